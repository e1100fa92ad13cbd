"""The date that chat templates print: one and the same in training and in evaluation, on whatever day they run.

Llama 3's templates print today's date. Copies of one round that are trained on two days would see other tokens.
"""

from __future__ import annotations

import re
from datetime import date, datetime
from typing import TYPE_CHECKING

from mpu_cli.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_DATE = "10 Apr 2025"  # OpenUnlearning's
_FORMATS = ("%d %b %Y", "%Y-%m-%d")
_CALL = re.compile(r"strftime_now\(\s*(?:format\s*=\s*)?([\"'])(.*?)\1\s*\)")
# Takes the place of transformers' function, which asks the clock and cannot be passed over.
_MACRO = (
    "{%- macro strftime_now(format) -%}{%- if format not in mpu_date -%}"
    "{{ raise_exception('it makes up a date format: ' + format) }}{%- endif -%}{{ mpu_date[format] }}{%- endmacro %}"
)


def parse_date(text: str) -> date:
    """The day that ``text``, such as 10 Apr 2025 or 2025-04-10, names. Raises UsageError if it is not a date."""
    for form in _FORMATS:
        try:
            return datetime.strptime(text, form).date()
        except ValueError:
            continue
    raise UsageError(f"--date {text!r}: not a date such as {DEFAULT_DATE!r} or 2025-04-10")


def template_date(tokenizer: PreTrainedTokenizerBase, text: str) -> dict[str, object]:
    """Arguments for ``apply_chat_template`` under which the tokenizer's chat template sees the day ``text``."""
    day = parse_date(text)
    arguments: dict[str, object] = {"date_string": day.strftime(_FORMATS[0])}
    template = tokenizer.get_chat_template()
    if formats := {form for _, form in _CALL.findall(template)}:
        arguments["mpu_date"] = {form: day.strftime(form) for form in formats}
    if "strftime_now" in template:
        arguments["chat_template"] = _MACRO + template
    return arguments
