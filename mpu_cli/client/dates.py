"""The date that chat templates print: one and the same in training and in evaluation, on whatever day they run.

Llama 3's templates print today's date. Copies of one round that are trained on two days would see other tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime

from mpu_cli.errors import UsageError

DEFAULT_DATE = "10 Apr 2025"  # OpenUnlearning's
_FORMATS = ("%d %b %Y", "%Y-%m-%d")


def template_date(text: str) -> dict[str, str | Callable[[str], str]]:
    """Arguments for ``apply_chat_template`` under which it is the day ``text``, such as 10 Apr 2025 or 2025-04-10.

    Raises UsageError if it is not a date.
    """
    day = _parse(text)
    return {"date_string": day.strftime(_FORMATS[0]), "strftime_now": day.strftime}


def _parse(text: str) -> date:
    for form in _FORMATS:
        try:
            return datetime.strptime(text, form).date()
        except ValueError:
            continue
    raise UsageError(f"--date {text!r}: not a date such as {DEFAULT_DATE!r} or 2025-04-10")
