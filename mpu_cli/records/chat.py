"""Chat templates: programs from another party, rendered in a process with limits.

transformers' sandbox keeps a template from files and attributes, but not from loops that never end or numbers that fill
the memory. Rendering itself is transformers' own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mpu_cli.boundary.sandbox import PROCESS, LimitError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONGEST = 1 << 16  # characters that a template may add to a dialogue

# Arguments of the function that renders, which nothing else may be called like.
RESERVED = {
    "messages", "conversation", "conversations", "chat_template", "add_generation_prompt", "continue_final_message",
    "tools", "documents", "return_assistant_tokens_mask",
}  # fmt: skip

Dialogue = Sequence[Mapping[str, object]]


class TemplateError(ValueError):
    """A chat template that rejected a dialogue."""


def template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokenizer's chat template. Raises TemplateError if it has several and none of them is the default."""
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        raise TemplateError("it has several templates, and none is named default") from error


def render(
    tokenizer: PreTrainedTokenizerBase, dialogues: Sequence[Dialogue], *, generation_prompt: bool, **variables: object
) -> list[str | TemplateError]:
    """Each dialogue as the tokenizer's chat template prints it, as ``apply_chat_template`` does, or why it rejects it.

    ``variables`` are what the template sees besides; ``chat_template`` replaces the template. Raises LimitError if it
    takes too long, needs too much memory or prints too much.
    """
    template = variables.pop("chat_template", None) or template_of(tokenizer)
    # Special tokens may be called anything: also like an argument of the template's, which they would replace.
    special = {name: text for name, text in tokenizer.special_tokens_map.items() if name not in RESERVED}
    request = {**special, **variables, "chat_template": template, "add_generation_prompt": generation_prompt}
    turns = [[dict(turn) for turn in dialogue] for dialogue in dialogues]
    room = sum(len(json.dumps(dialogue)) + LONGEST for dialogue in turns)
    outcomes = PROCESS.render(request, turns, 6 * room + 100)
    if len(outcomes) != len(dialogues):
        raise LimitError("it returned another number of dialogues")
    return [text if worked else TemplateError(text) for worked, text in outcomes]
