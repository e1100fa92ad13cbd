"""Text in files that people write: UTF-8, or what its byte order mark names, as editors on Windows save it."""

from __future__ import annotations

import codecs
from pathlib import Path

BYTE_ORDER_MARK = "\ufeff"  # a byte order mark, decoded
BYTE_ORDER_MARKS = {  # that of UTF-32 begins with that of UTF-16
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip


def encoding_of(content: bytes) -> str:
    """The encoding that a byte order mark names; UTF-8 without one."""
    return next((name for mark, name in BYTE_ORDER_MARKS.items() if content.startswith(mark)), "utf-8")


def read_text(path: Path) -> str:
    """The text of a file, without its byte order mark. Raises OSError or UnicodeDecodeError."""
    content = path.read_bytes()
    return content.decode(encoding_of(content)).removeprefix(BYTE_ORDER_MARK)
