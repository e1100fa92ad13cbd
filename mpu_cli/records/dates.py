"""The date that chat templates print: the same in training and evaluation, whatever day they run.

Llama 3's templates print today's date, so copies of one round trained on different days would see different tokens.
"""

from __future__ import annotations

import re
from datetime import date, datetime
from functools import cache
from typing import TYPE_CHECKING

from mpu_cli.errors import UsageError
from mpu_cli.options.unlearning import DATE
from mpu_cli.records.chat import template_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FORMATS = ("%d %b %Y", "%Y-%m-%d")
_CALL = re.compile(r"strftime_now\(\s{0,9}(?:format\s{0,9}=\s{0,9})?([\"'])([^\"']{0,100})\1\s{0,9}\)")
# Replaces transformers' function, which reads the clock and cannot be overridden.
_MACRO = (
    "{%- macro strftime_now(format) -%}{%- if format not in mpu_date -%}"
    "{{ raise_exception('computed date format: ' + format) }}{%- endif -%}{{ mpu_date[format] }}{%- endmacro %}"
)


@cache
def parse_date(text: str) -> date:
    """Parse a day such as 10 Apr 2025 or 2025-04-10. Raises UsageError if ``text`` is not a date."""
    for form in _FORMATS:
        try:
            return datetime.strptime(text, form).date()
        except ValueError:
            continue
    raise UsageError(f"--date {text!r}: not a date such as {DATE!r} or 2025-04-10")


def template_date(tokenizer: PreTrainedTokenizerBase, text: str) -> dict[str, object]:
    """Arguments for ``apply_chat_template`` that make the tokenizer's chat template see the day ``text``.

    Raises TemplateError if it has no template to use.
    """
    day = parse_date(text)
    arguments: dict[str, object] = {"date_string": day.strftime(_FORMATS[0])}
    template = template_of(tokenizer)
    if formats := {form for _, form in _CALL.findall(template)}:
        arguments["mpu_date"] = {form: day.strftime(form) for form in formats}
    if "strftime_now" in template:
        arguments["chat_template"] = _MACRO + template
    return arguments
