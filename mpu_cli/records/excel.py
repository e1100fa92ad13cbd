"""Cells of Excel files as the sheet shows them: numbers, dates and durations in their simple formats."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

from mpu_cli.errors import MpuError, first_line
from mpu_cli.files.boundary import repeated


class CellError(str):
    """An error value of a spreadsheet, such as #N/A, in place of a text."""

    __slots__ = ()


class UnformattedCell(str):
    """A value whose ``number_format`` is not applied, so that the sheet shows it differently."""

    number_format: str


ERROR_VALUE = re.compile(r"#(?:N/?[ADV]|[A-ZÄÖÜÉ0/]{3,9}[!?])")  # as text, in English and other languages: #NV, #WERT!
# What Excel shows as each reader's system does: formats 14 and 22, by openpyxl's names, and long dates.
_BY_LOCALE = re.compile(r"mm-dd-yy|m/d/yy h:mm|\[\$-F[48]00\].*", re.IGNORECASE | re.DOTALL)
_COLOUR = r"\[(?:black|blue|cyan|green|magenta|red|white|yellow|color ?\d+)\]"
_TOKENS = re.compile(
    rf"""(?P<colour>{_COLOUR})|"(?P<quoted>[^"]*)"|\\(?P<escaped>.)|(?P<space>_.)|(?P<fill>\*.)
    |\[\$(?P<currency>[^\]-]*)(?:-(?P<language>[^\]]*))?\]|\[(?P<elapsed>h+|m+|s+)\]|(?P<half>AM/PM)
    |(?P<part>y+|m+|d+|h+|s+(?:\.0+)?)|(?P<digits>[#0.,])|(?P<percent>%)|(?P<sign>.)""",
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)
_LITERAL_SIGNS = set("-+():/ $€£¥.,'~{}<>=!^&")  # shown as they are, without quotes
_ENGLISH = ("", "409", "809", "1009", "C09", "x-none")  # languages whose names of days and months are known here
_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

Token = tuple[str, str]  # its kind and its text


def excel_rows(path: Path, sheet: str | None = None) -> Iterator[tuple[str, dict[str, str]]]:
    """The rows of ``sheet``, or of the one sheet that has any, below the first filled row, which has their names; each
    with its place."""
    try:
        import openpyxl
    except ImportError as error:
        raise MpuError(
            f"{path}: an Excel file, which openpyxl reads", "pip install openpyxl, or save it as CSV"
        ) from error
    try:
        book = openpyxl.load_workbook(path, read_only=True, data_only=True, keep_links=False)
        tables = {page.title: _filled_rows(page) for page in book.worksheets if sheet in (None, page.title)}
        names = book.sheetnames
        book.close()
    except Exception as error:  # openpyxl lets through what zip files, XML and its own parser raise
        raise MpuError(f"{path}: not an Excel file ({first_line(error)})") from error
    if sheet is not None and sheet not in tables:
        raise MpuError(f"{path}: no sheet {sheet!r} (available: {', '.join(names)})")
    filled = {name: rows for name, rows in tables.items() if len(rows) > 1}
    if len(filled) > 1:
        choice = next(iter(filled))
        raise MpuError(
            f"{path}: has records in several sheets: {', '.join(filled)}", f"name one of them, such as {path}:{choice}"
        )
    for (_, header), *rows in filled.values():
        columns = [text.strip() for text in header]
        twice = repeated(name for name in columns if name)
        if twice is not None:
            raise MpuError(f"{path}: two columns are called {twice[:80]!r}", "rename one of them")
        for number, cells in rows:
            named = dict(zip(columns, cells, strict=False))
            if any(text for name, text in named.items() if name):
                yield f"{path}, line {number}", {name: text for name, text in named.items() if name}


def _filled_rows(page: Any) -> list[tuple[int, list[str]]]:
    """The texts of each row that has any, and its number."""
    page.reset_dimensions()  # what a file says of its size may be wrong
    rows = []
    for number, cells in enumerate(page.iter_rows(), 1):
        texts = [_text_of(cell) for cell in cells]
        if any(texts):
            rows.append((number, texts))
    return rows


def _text_of(cell: Any) -> str:
    value = cell.value
    if value is None:
        return ""
    if cell.data_type == "e":
        return CellError(value)
    if isinstance(value, str):  # Excel writes a carriage return as _x000D_
        return value.replace("_x000D_", "\r").replace("\r\n", "\n").replace("\r", "\n")
    if isinstance(value, bool):
        return str(value).upper()
    number_format = cell.number_format or "General"
    shown = shown_text(value, number_format)
    if shown is None:
        shown = UnformattedCell(_plain(value))
        shown.number_format = number_format
    return shown


def _plain(value: float | date | time | timedelta) -> str:
    """A value without any format of the sheet's."""
    if isinstance(value, datetime) and value.time() == time():
        value = value.date()
    if isinstance(value, timedelta):
        return _elapsed(value, "h") + f":{value.seconds // 60 % 60:02}:{value.seconds % 60:02}"
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def shown_text(value: float | date | time | timedelta, number_format: str) -> str | None:
    """The text that Excel shows for ``value`` in ``number_format``; None where that is not a simple format, or differs
    from reader to reader.

    >>> shown_text(0.125, "0.0%"), shown_text(1234, "00000"), shown_text(date(1987, 3, 5), "DD.MM.YYYY")
    ('12.5%', '01234', '05.03.1987')
    """
    if number_format in ("General", "@") and isinstance(value, int | float):
        return _plain(value)
    if _BY_LOCALE.fullmatch(number_format):
        return None
    sections: list[list[Token]] = [[]]
    for match in _TOKENS.finditer(number_format):
        kind = match.lastgroup or ""
        if match["language"] is not None:
            sections[-1].append(("language", match["language"]))
            kind = "currency"
        text = match[kind]
        if kind == "sign" and text == ";":
            sections.append([])
        else:
            sections[-1].append((kind, text))
    if isinstance(value, int | float):
        return _number(Decimal(repr(value)), sections)
    return _moment(value, sections[0])


def _number(value: Decimal, sections: list[list[Token]]) -> str | None:
    """A number by a format of up to three sections: of positive numbers, negative ones and zero."""
    section, sign = sections[0], "-" if value < 0 else ""
    if value < 0 and len(sections) > 1:
        section, sign = sections[1], ""
    if value == 0 and len(sections) > 2:
        section = sections[2]
    value, digits = abs(value), ""
    pieces: list[str | None] = []  # None is the place of the digits
    for kind, text in section:
        if kind in ("colour", "fill", "language"):
            continue
        if kind in ("part", "half", "elapsed") or (kind == "sign" and text not in _LITERAL_SIGNS):
            return None  # a fraction, an exponent, a condition
        if kind == "digits":
            digits += text
            if not pieces or pieces[-1] is not None:
                pieces.append(None)
            continue
        if kind == "percent":
            value *= 100
        pieces.append(" " if kind == "space" else text)
    if "/" in "".join(piece or "" for piece in pieces):
        return None
    scaled = digits.rstrip(",")
    value /= 1000 ** (len(digits) - len(scaled))
    whole, _, decimals = scaled.partition(".")
    groups = pieces.count(None)
    if not digits:
        return "".join(piece or "" for piece in pieces).strip()
    if "," in decimals or "." in decimals or (groups > 1 and (decimals or "," in whole)):
        return None
    rounded = value.quantize(Decimal(1).scaleb(-len(decimals)), ROUND_HALF_UP)
    text = f"{rounded:f}"
    integer, _, fraction = text.partition(".")
    integer = integer.lstrip("0").rjust(whole.count("0"), "0")
    while fraction and len(fraction) > decimals.rfind("0") + 1 and fraction.endswith("0"):
        fraction = fraction[:-1]
    if "," in whole and integer:
        integer = re.sub(r"(?<=\d)(?=(?:\d{3})+$)", ",", integer)
    if not rounded:
        sign = ""
    if groups > 1:  # digits between other signs, such as 000-00-0000
        return _between_signs(integer, section, sign)
    number = integer + ("." + fraction if decimals and (fraction or "." in scaled) else "")
    return sign + "".join(number if piece is None else piece for piece in pieces).strip()


def _between_signs(integer: str, section: list[Token], sign: str) -> str:
    shown: list[str] = []
    places = sum(kind == "digits" for kind, _ in section)
    for kind, text in reversed(section):
        if kind == "digits":
            places -= 1
            integer, digit = (integer[:-1], integer[-1:]) if places else ("", integer)
            shown.append(digit)
        elif kind in ("quoted", "escaped", "sign", "currency", "percent"):
            shown.append(text)
    return sign + "".join(reversed(shown)).strip()


def _elapsed(value: timedelta, unit: str) -> str:
    seconds = {"h": 3600, "m": 60, "s": 1}[unit[0].lower()]
    return str(value // timedelta(seconds=seconds)).rjust(len(unit), "0")


def _moment(value: date | time | timedelta, section: list[Token]) -> str | None:
    """A date, a time of day or a duration by the parts of its format."""
    if isinstance(value, timedelta):
        clock: Any = (datetime.min + value % timedelta(days=1)).time()
    else:
        clock = value if isinstance(value, datetime | time) else time()
    parts = [(i, text.lower()) for i, (kind, text) in enumerate(section) if kind in ("part", "elapsed")]
    minutes = set()  # m is minutes after hours and before seconds, else months
    for (_, before), (i, text), (_, after) in zip([(0, ""), *parts], parts, [*parts[1:], (0, "")], strict=False):
        if text[0] == "m" and (before[:1] == "h" or after[:1] == "s"):
            minutes.add(i)
    half = any(kind == "half" for kind, _ in section)
    shown = []
    for i, (kind, text) in enumerate(section):
        form = text.lower()
        if kind == "language":
            named = any(part[:3] in ("mmm", "ddd") for _, part in parts)
            if named and text.lstrip("0").upper() not in _ENGLISH:
                return None
        elif kind in ("colour", "fill"):
            continue
        elif kind == "elapsed":
            if not isinstance(value, timedelta):
                return None
            shown.append(_elapsed(value, form))
        elif kind == "half":
            shown.append("AM" if clock.hour < 12 else "PM")
        elif (kind == "part" and form[0] in "hs") or i in minutes:
            if form.startswith("h"):
                number = (clock.hour % 12 or 12) if half else clock.hour
            else:
                number = clock.minute if i in minutes else clock.second
            whole, dot, fraction = form.partition(".")
            text = str(number).rjust(min(len(whole), 2), "0")
            shown.append(text + (dot + f"{clock.microsecond:06}"[: len(fraction)] if fraction else ""))
        elif kind == "part":
            if not isinstance(value, date):
                return None
            shown.append(_date_part(value, form))
        elif (kind in ("digits", "percent") and text not in ".,") or (kind == "sign" and text not in _LITERAL_SIGNS):
            return None
        else:
            shown.append(" " if kind == "space" else text)
    return "".join(shown).strip()


def _date_part(day: date, form: str) -> str:
    if form[0] == "y":
        return f"{day.year:04}" if len(form) > 2 else f"{day.year % 100:02}"
    number, names = (day.month, _MONTHS[day.month - 1]) if form[0] == "m" else (day.day, _DAYS[day.weekday()])
    if len(form) < 3:
        return str(number).rjust(len(form), "0")
    if len(form) == 5 and form[0] == "m":
        return names[0]
    return names[:3] if len(form) == 3 else names
