"""Lists in sentences."""

from __future__ import annotations

from collections.abc import Sequence


def few(names: Sequence[str], limit: int = 4) -> str:
    """The first ``names``, and how many more there are."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
