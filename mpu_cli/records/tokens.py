"""Tokens of texts and dialogues. The rules of a tokenizer.json are another party's: each text goes through them in a
process with limits before this one tokenizes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpu_cli.boundary.limited import PROCESS, LimitError
from mpu_cli.errors import MpuError
from mpu_cli.records import chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST, MORE = 8, 1_000  # tokens for each character (its bytes are four), and besides

Tokens = list[int]


def rejection(error: ValueError, place: str = "") -> MpuError:
    """What to tell of a template or tokenizer that rejected what is at ``place``, or (without one) cannot be used."""
    where = f"{place}: " if place else ""
    if isinstance(error, LimitError):
        return MpuError(f"{where}the model's chat template or tokenizer cannot be used: {error}")
    if not isinstance(error, chat.TemplateError):
        return MpuError(f"{where}the model's tokenizer cannot encode it ({error})")
    return MpuError(
        f"{where}the tokenizer's chat template rejected {'it' if place else 'the records'} ({error})",
        "if it has no system role, use --system-prompt '', or use --template plain",
    )


def of_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, special: bool = True
) -> list[Tokens | ValueError]:
    """The tokens of each text, or why it has none. ``special``: with those that the tokenizer adds to a text.

    Raises LimitError if that takes too much.
    """
    failed: dict[int, ValueError] = {}
    if texts and (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        outcomes = PROCESS.tokenize(backend.to_str(), texts, special)
        for i, (worked, told) in enumerate(outcomes):
            if not worked:
                failed[i] = ValueError(told)
            elif told > MOST * len(texts[i]) + MORE:
                failed[i] = ValueError(f"{len(texts[i])} characters become {told:,} tokens")
    possible = [text for i, text in enumerate(texts) if i not in failed]
    ids = iter(tokenizer(possible, add_special_tokens=special).input_ids if possible else ())
    return [failed[i] if i in failed else next(ids) for i in range(len(texts))]


def of_dialogues(
    tokenizer: PreTrainedTokenizerBase, dialogues: Sequence[chat.Dialogue], *, generation_prompt: bool,
    **variables: object,
) -> list[Tokens | ValueError]:  # fmt: skip
    """The tokens of each dialogue, without special tokens beyond the template's, or why it has none.

    Raises LimitError if that takes too much, TemplateError if there is no template to use.
    """
    texts = chat.render(tokenizer, dialogues, generation_prompt=generation_prompt, **variables)
    ids = iter(of_texts(tokenizer, [text for text in texts if isinstance(text, str)], special=False))
    return [next(ids) if isinstance(text, str) else text for text in texts]
