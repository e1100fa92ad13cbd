"""Tokens of texts and dialogues. The rules of a tokenizer.json are another party's: each text goes through them in a
process with limits before this one tokenizes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from mpu_cli.errors import MpuError
from mpu_cli.files.folder import LONGEST_TOKEN
from mpu_cli.files.sandbox import PROCESS, LimitError
from mpu_cli.records import forms

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENS_PER_CHARACTER, MORE = 8, 1_000  # tokens for each character (its bytes are four), and besides
LONGEST_TEXT = 1_000  # characters for each token

Tokens = list[int]
Spans = list[tuple[int, int]]  # of characters: where each begins and ends
Value = TypeVar("Value")


@dataclass(frozen=True)
class TokenizedText:
    """The tokens of a text: ``ids`` (n,), and for each the characters of the text that it stands for, (begin, end).

    ``added`` is how many of the last tokens are not in the text, but what the tokenizer ends every text with.
    """

    ids: Tokens
    offsets: Spans
    added: int = 0

    def first_after(self, character: int) -> int:
        """The first token that has a part of the text from ``character`` on, n if none has."""
        return next((i for i, (_, end) in enumerate(self.offsets) if end > character), len(self.ids))

    def first_from(self, character: int) -> int:
        """The first token that has nothing of the text before ``character``, n - ``added`` if there is none."""
        count = len(self.ids) - self.added
        for i, (begin, end) in enumerate(self.offsets[:count]):
            if begin >= character and end > begin:
                return i
        return count


def common_prefix_length(one: Sequence[object], other: Sequence[object]) -> int:
    """The number of characters or tokens that two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def rejection(error: ValueError, location: str = "", hint: str | None = None) -> MpuError:
    """The error for a template or tokenizer that rejected the record at ``location`` or, without one, is unusable."""
    where = f"{location}: " if location else ""
    if isinstance(error, LimitError):
        return MpuError(f"{where}the model's chat template or tokenizer cannot be used: {error}")
    if not isinstance(error, forms.TemplateError):
        return MpuError(f"{where}the model's tokenizer cannot encode it ({error})")
    return MpuError(
        f"{where}the tokenizer's chat template rejected {'it' if location else 'the records'} ({error})",
        hint or "if it has no system role, use --reading system_prompt=, or use --reading template=plain",
    )


def of_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, special: bool = True
) -> list[Tokens | ValueError]:
    """The tokens of each text, or why it has none. ``special``: with those that the tokenizer adds to a text.

    Raises LimitError if that takes too much.
    """
    return _within_limits(
        tokenizer, texts, special, lambda possible: tokenizer(possible, add_special_tokens=special).input_ids
    )


def decode(
    tokenizer: PreTrainedTokenizerBase, sequences: Sequence[Tokens], *, skip_special: bool = True, **options: Any
) -> list[str]:
    """The text of each sequence, by default without special tokens; ``options`` are those of the tokenizer's
    ``decode``."""
    if sequences and (json := _backend_json(tokenizer)):
        problem = "the model's tokenizer cannot turn tokens into text"
        try:
            outcomes = PROCESS.decode(json, sequences, skip_special)
        except LimitError as error:
            raise MpuError(f"{problem}: {error}") from error
        for (worked, length), ids in zip(outcomes, sequences, strict=True):
            if not worked:
                raise MpuError(f"{problem}: {length}")
            if length > LONGEST_TEXT * len(ids) + MORE:
                raise MpuError(f"{problem}: {len(ids)} tokens become {length:,} characters")
    return [tokenizer.decode(ids, skip_special_tokens=skip_special, **options) for ids in sequences]


def with_offsets(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, special: bool = True, controls: bool = True
) -> list[TokenizedText | ValueError]:
    """The tokens of each text as in ``of_texts``, with the characters that each token stands for; without ``controls``,
    the names of control tokens are text like any other."""

    def tokenize(possible: list[str]) -> list[TokenizedText]:
        if tokenizer.is_fast:
            return _offsets_of_backend(tokenizer, possible, special, controls)
        return [_offsets_by_decoding(tokenizer, text, special, controls) for text in possible]

    return _within_limits(tokenizer, texts, special, tokenize, controls)


def _within_limits(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], special: bool,
    tokenize: Callable[[list[str]], Iterable[Value]], controls: bool = True,
) -> list[Value | ValueError]:  # fmt: skip
    """Each text by ``tokenize``, or the error if it cannot be tokenized, found out in the process with limits."""
    failed: dict[int, ValueError] = {}
    if texts and (json := _backend_json(tokenizer)):
        for i, (worked, outcome) in enumerate(PROCESS.tokenize(json, texts, special, controls)):
            if not worked:
                failed[i] = ValueError(outcome)
            elif outcome > TOKENS_PER_CHARACTER * len(texts[i]) + MORE:
                failed[i] = ValueError(f"{len(texts[i])} characters become {outcome:,} tokens")
    possible = [text for i, text in enumerate(texts) if i not in failed]
    tokenized = iter(tokenize(possible) if possible else ())
    return [failed[i] if i in failed else next(tokenized) for i in range(len(texts))]


_JSON: WeakKeyDictionary[PreTrainedTokenizerBase, str] = WeakKeyDictionary()


def _backend_json(tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokenizer.json of ``tokenizer``, "" if it is not of the tokenizers library. Writing it takes a tenth of a
    second, and generating asks at every step."""
    if tokenizer not in _JSON:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        _JSON[tokenizer] = backend.to_str() if backend is not None else ""
    return _JSON[tokenizer]


def _offsets_of_backend(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], special: bool, controls: bool
) -> list[TokenizedText]:
    encoded = tokenizer(
        list(texts), add_special_tokens=special, return_offsets_mapping=True, return_special_tokens_mask=True,
        split_special_tokens=not controls,
    )  # fmt: skip
    columns = (encoded["input_ids"], encoded["offset_mapping"], encoded["special_tokens_mask"])
    tokenized = []
    for ids, offsets, is_added in zip(*columns, strict=True):
        added = 0
        if special and not all(is_added):  # count those that end the text
            while is_added[-1 - added]:
                added += 1
        tokenized.append(TokenizedText(ids, [tuple(pair) for pair in offsets], added))
    return tokenized


def _offsets_by_decoding(tokenizer: PreTrainedTokenizerBase, text: str, special: bool, controls: bool) -> TokenizedText:
    """Offsets of a tokenizer that does not give them: where the text of the first tokens ends, for each number."""
    ids = tokenizer(text, add_special_tokens=special, split_special_tokens=not controls).input_ids
    beginnings = [tokenizer.decode(ids[: i + 1], skip_special_tokens=special) for i in range(len(ids))]
    ends = [common_prefix_length(text, beginning) for beginning in beginnings]
    for i in range(len(ends) - 2, -1, -1):  # a token that is a part of a character stands for all of it
        if ends[i] == (ends[i - 1] if i else 0):
            ends[i] = ends[i + 1]
    last = tokenizer(text, add_special_tokens=False).input_ids[-1:]
    added = 1 if special and ids[-1:] == [tokenizer.eos_token_id] and last != ids[-1:] else 0
    return TokenizedText(ids, list(zip([0, *ends[:-1]], ends, strict=True)), added)


def of_dialogues(
    tokenizer: PreTrainedTokenizerBase, dialogues: Sequence[forms.Dialogue], *, generation_prompt: bool,
    **variables: object,
) -> list[Tokens | ValueError]:  # fmt: skip
    """The tokens of each dialogue, without special tokens beyond the template's, or why it has none.

    Raises LimitError if that takes too much, TemplateError if there is no template to use.
    """
    texts = forms.render(tokenizer, dialogues, generation_prompt=generation_prompt, **variables)
    ids = iter(of_texts(tokenizer, [text for text in texts if isinstance(text, str)], special=False))
    return [next(ids) if isinstance(text, str) else text for text in texts]


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The tokens that a template structures dialogues with, by number, each with its name, which is not blank."""
    named = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    named |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    if any(len(name) > LONGEST_TOKEN for name in named.values()):  # they are looked for in every text
        raise MpuError(
            f"the copy's tokenizer has a control token of more than {LONGEST_TOKEN:,} characters", "ask its owner"
        )
    return {number: name for number, name in named.items() if name.strip()}


def with_controls_as_text(
    tokenizer: PreTrainedTokenizerBase, text: str, tokenized: TokenizedText, spans: Spans
) -> TokenizedText:
    """``tokenized``, of ``text``, with the control tokens in these ``spans`` of characters as tokens of their names."""
    controls = control_tokens(tokenizer)
    ids: Tokens = []
    offsets: Spans = []
    for token, (begin, end) in zip(tokenized.ids, tokenized.offsets, strict=True):
        if token in controls and any(begin < last and first < end for first, last in spans):
            name = _as_text(tokenizer, text[begin:end])
            ids += name.ids
            offsets += [(begin + first, begin + last) for first, last in name.offsets]
        else:
            ids.append(token)
            offsets.append((begin, end))
    return TokenizedText(ids, offsets, tokenized.added)


def _as_text(tokenizer: PreTrainedTokenizerBase, name: str) -> TokenizedText:
    """The tokens of ``name`` within a text: after a line's end, since some tokenizers put a mark before the first."""
    [outcome] = with_offsets(tokenizer, [f"\n{name}"], special=False, controls=False)
    if isinstance(outcome, ValueError):
        raise outcome
    ids: Tokens = []
    offsets: Spans = []
    # Leaves out the tokens of the line's end, the first character, and counts places from the name on.
    for token, (begin, end) in zip(outcome.ids, outcome.offsets, strict=True):
        if end > 1:
            ids.append(token)
            offsets.append((max(0, begin - 1), end - 1))
    return TokenizedText(ids, offsets)


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The tokens that a tokenizer calls special, or that were added to it."""
    return set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
