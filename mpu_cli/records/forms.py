"""The forms that rows of files may have, and the record in each."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import date, datetime
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.files.sandbox import PROCESS, LimitError
from mpu_cli.options.unlearning import ALL_TURNS, DATE, RecordFormat
from mpu_cli.records.excel import CellError
from mpu_cli.wording import names_in

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# One record: a dialogue that leads to an answer, or a text.

Fields = tuple[tuple[str, Any], ...]  # a message's fields besides role and content, such as tool_calls


class Turn(NamedTuple):
    """A message of a dialogue. ``fields`` are passed to the chat template as they are."""

    role: str
    content: str
    fields: Fields = ()

    @property
    def message(self) -> dict[str, Any]:
        """The message as chat templates read it."""
        return {**dict(self.fields), "role": self.role, "content": self.content}


class ContextTurn(Turn):
    """A turn of the assistant that its message marks as not to be trained on: it is context, and never an answer."""


@dataclass(frozen=True)
class Record:
    """Turns that lead to an answer or, without any turns, a text."""

    turns: tuple[Turn, ...]
    answer: str
    location: str  # that the record was read from, for messages
    alternate: str | None = None  # an alternative answer (for DPO)
    unit: str | None = None  # the person whose record it is, if a field says so
    answer_fields: Fields = ()  # of the answer's message besides its content, such as reasoning_content

    @property
    def question(self) -> str:
        """The user's last turn, or the last turn of any role if there is none of the user's."""
        users = [turn.content for turn in self.turns if turn.role == "user"]
        return users[-1] if users else self.turns[-1].content

    @property
    def identity(self) -> str:
        """The dialogue and its answer as text, the same for records equal to the letter, wherever they were read."""
        return json.dumps([self.turns, self.answer, self.answer_fields], sort_keys=True)

    @property
    def key(self) -> str:
        """The text that is the same for records that count as one: they read alike but for case, white space and the
        form of characters, which templates and tokenizers may take away."""
        return _folded([self.turns, self.answer, self.answer_fields])

    @property
    def protected_as(self) -> str:
        """The unit that a privacy bound protects: a person, if a field says whose record it is, else the record."""
        return f"record {self.key}" if self.unit is None else f"unit {self.unit}"

    @property
    def content(self) -> dict[str, object]:
        """The record wherever it was read from, for digests: ``location`` is empty, and has the name that it had when
        the first digests were made."""
        entries = asdict(replace(self, location=""))
        return {"place" if name == "location" else name: value for name, value in entries.items()}

    @property
    def answer_turn(self) -> Turn:
        return Turn("assistant", self.answer, self.answer_fields)

    @property
    def dialogue(self) -> tuple[Turn, ...]:
        """The turns and the answer's."""
        return (*self.turns, self.answer_turn)


RecordSets = Mapping[str, Sequence[Record]]  # by name: forget, retain, …


def question(text: str, answer: str, location: str = "", alternate: str | None = None) -> Record:
    """A record of one question and its answer."""
    return Record((Turn("user", text),), answer, location, alternate)


def digest_of_record(record: Record) -> str:
    """SHA-256 of the record's key, in hexadecimal."""
    return hashlib.sha256(record.key.encode()).hexdigest()


def distinct(records: Sequence[Record]) -> list[Record]:
    """Each record once, where it stands first."""
    by_key: dict[str, Record] = {}
    for record in records:
        by_key.setdefault(record.key, record)
    return list(by_key.values())


def remarks_on_overlap(forget: Sequence[Record], retain: Sequence[Record], consequence: str) -> list[str]:
    """A sentence if some of the records to ``forget`` are to be kept, too, with its ``consequence``."""
    overlap = {record.key for record in forget} & {record.key for record in retain}
    return [f"{len(overlap)} of the records to forget are also in the retain set, {consequence}"] if overlap else []


def dialogues_of(records: Sequence[Record]) -> list[int]:
    """A number for each record, the same for those of one dialogue: of two, one leads to the answer of the other.

    In an interval over records they say hardly more than one, and are drawn together.
    """
    numbers: dict[str, int] = {}  # by what was said up to an answer
    dialogues = {}
    for number, record in sorted(enumerate(records), key=lambda entry: -len(entry[1].turns)):
        digest = ""
        beginnings = []
        for turn in record.dialogue:
            digest = hashlib.sha256(f"{digest} {_folded(turn)}".encode()).hexdigest()
            beginnings.append(digest)
        dialogues[number] = numbers.setdefault(digest, len(numbers))
        for beginning in beginnings:
            numbers.setdefault(beginning, dialogues[number])
    return [dialogues[number] for number in range(len(records))]


def _folded(value: object) -> str:
    """``value`` as JSON, without case, white space and the variants that Unicode has of a character."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    # JSON writes this white space as escapes, which split() below would not take out.
    for escaped in ("\\n", "\\r", "\\t", "\\f"):
        text = text.replace(escaped, " ")
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def remarks_on_units(records: Sequence[Record], unit: str | None) -> list[str]:
    """Remarks on persons whom a privacy bound does not protect as one, a sentence each; ``unit``: the field that names
    whose records they are, if there is one."""
    if unit is not None:
        return []
    units = {record.protected_as for record in records}
    units_by_question: dict[str, set[str]] = {}
    for record in records:
        if record.turns:
            units_by_question.setdefault(_folded(record.turns), set()).add(record.protected_as)
    remarks = []
    if repeated := len(records) - len(units):
        remarks.append(f"{repeated} of {len(records)} records repeat others: equal records are protected as one")
    if sharing := sum(len(sharers) for sharers in units_by_question.values() if len(sharers) > 1):
        remarks.append(
            f"{sharing} records share their question with another, and each is protected alone: if they are of one "
            "person, name the field that says whose they are with --dp unit"
        )
    return remarks


def check_units(reading: RecordFormat, unit: str | None) -> None:
    """Raise UsageError if each turn of a dialogue would be protected alone: all have what precedes them."""
    if reading.turns == ALL_TURNS and unit is None:
        raise UsageError(
            "--reading turns=all makes several records of a dialogue, and a bound would protect each of them alone",
            "name the field that all records of a dialogue share with --dp unit, or leave out --reading turns",
        )


def records_of_turns(record: Record, turns: str) -> Iterator[Record]:
    """``record`` itself or, if ``turns`` is "all", one for each of its assistant turns, each after what precedes it."""
    if turns == ALL_TURNS:
        for number, turn in enumerate(record.turns):
            if turn.role == "assistant" and number and not isinstance(turn, ContextTurn):
                yield Record(
                    record.turns[:number], turn.content, f"{record.location}, turn {number + 1}", unit=record.unit,
                    answer_fields=turn.fields,
                )  # fmt: skip
    yield record


# Chat templates: programs from another party, rendered in a process with limits.
#
# transformers' sandbox keeps a template from files and attributes, but not from loops that never end or numbers that
# fill the memory. Rendering itself is transformers' own.

MAX_TEMPLATE_CHARACTERS = 1 << 16  # characters that a template may add to a dialogue

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
    # The reply is JSON, in which a character may take six bytes.
    characters = sum(len(json.dumps(dialogue)) + MAX_TEMPLATE_CHARACTERS for dialogue in turns)
    outcomes = PROCESS.render(request, turns, 6 * characters + 100)
    if len(outcomes) != len(dialogues):
        raise LimitError("it returned another number of dialogues")
    return [text if worked else TemplateError(text) for worked, text in outcomes]


# The date that chat templates print: the same in training and evaluation, whatever day they run.
#
# Llama 3's templates print today's date, so copies of one round trained on different days would see different tokens.

_FORMATS = ("%d %b %Y", "%Y-%m-%d")
_CALL = re.compile(r"strftime_now\(\s{0,9}(?:format\s{0,9}=\s{0,9})?([\"'])([^\"']{0,100})\1\s{0,9}\)")
COMPUTED_DATE = "computed date format"
# Replaces transformers' function, which reads the clock and cannot be overridden.
_MACRO = (
    "{%- macro strftime_now(format) -%}{%- if format not in mpu_date -%}{{ raise_exception('" + COMPUTED_DATE + ": ' "
    "+ format) }}{%- endif -%}{{ mpu_date[format] }}{%- endmacro %}"
)


@cache
def parse_date(text: str) -> date:
    """Parse a day such as 10 Apr 2025 or 2025-04-10."""
    for form in _FORMATS:
        with suppress(ValueError):
            return datetime.strptime(text, form).date()
    raise UsageError(f"--reading date={text!r}: not a date such as {DATE!r} or 2025-04-10")


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


# Hints for a row whose fields no form has.

QUESTIONS = ("question", "prompt", "instruction", "input", "query", "message", "customer", "user", "request", "ticket")
ANSWERS = ("answer", "response", "reply", "output", "completion", "agent", "resolution", "assistant", "solution")
IDENTIFIERS = ("id", "idx", "index", "uuid", "url", "title", "source", "category", "split", "date")
YOUR_COLUMN = "YOUR_COLUMN"  # in a hint, where no column stands out
LONGEST_NAME = 40  # characters of a column's name; longer ones are records of a table without header


def columns_hint(
    row: Mapping[str, object], missing: str | None = None, columns: Mapping[str, str] | None = None
) -> str | None:
    """A hint that names a question and its answer in a row of other fields, as far as their names or the lengths of
    their texts tell, else None.

    ``missing`` is a field that has no text: nothing is suggested if the row has it, in another type. What ``columns``
    has of the two is kept.
    """
    if {"chosen", "rejected"} <= row.keys():
        return (
            "a pair of preferences: say which answer is meant, such as --columns "
            "question=prompt,answer=rejected,alternate=chosen"
        )
    if missing is not None and missing in row:
        several = isinstance(row[missing], list)
        return f"{missing!r} is a list: choose one of its texts, or write a record for each" if several else None
    for name, value in row.items():
        if isinstance(value, list | dict) and _is_one_of(ANSWERS, name):
            return f"{name!r} is a list or an object: write the answer as a text in a field of its own"
    names = [str(name) for name, value in row.items() if isinstance(value, str)]
    if any(len(name) > LONGEST_NAME or name.rstrip().endswith(("?", ".", "!")) for name in map(str, row)):
        return "the first line seems to be a record: put a line with the names of the columns above it"
    columns = columns or {}
    names = [name for name in names if name.lower() not in IDENTIFIERS and name not in columns.values()]
    question = columns.get("question") or _first_match(QUESTIONS, names)
    answer = columns.get("answer") or _first_match(ANSWERS, names)
    if len(names) == 2 and question is answer is None:
        question, answer = names
    if question == answer:
        answer = None
    remaining = [name for name in names if name not in (question, answer)]
    if len(remaining) < (question, answer).count(None):
        return None
    certain = None not in (question, answer) or ((question or answer) and len(remaining) == 1)
    likely = iter(_of_longest_texts(row, remaining, (question, answer).count(None)))
    question, answer = question or next(likely), answer or next(likely)
    named = f"--columns {shlex.quote(f'question={question},answer={answer}')}"
    # Which of several is the other half would be a guess.
    return f"name them: {named}" if certain else f"name those of the question and of the answer, such as {named}"


def _of_longest_texts(row: Mapping[str, object], names: list[str], count: int) -> list[str]:
    """The ``count`` fields among ``names`` whose texts are much longer than the others', which numbers and dates are
    not, in their order; a placeholder for each if none are."""
    texts = {name: str(row[name]) for name in names if any(map(str.isalpha, str(row[name])))}
    by_length = sorted(texts, key=lambda name: -len(texts[name]))
    lengths = [len(texts[name]) for name in by_length]
    if len(texts) < count or (len(texts) > count and lengths[count - 1] < 2 * lengths[count]):
        return [YOUR_COLUMN] * count
    return [name for name in names if name in by_length[:count]]


def _is_one_of(words: tuple[str, ...], name: object) -> bool:
    return any(word in str(name).lower() for word in words)


def _first_match(words: tuple[str, ...], names: list[str]) -> str | None:
    return next((name for word in words for name in names if _is_one_of((word,), name)), None)


FORMS = "question/answer, prompt/completion, instruction/output (with input), messages, conversations, or text"
# The first of these that a row has is its form; --columns chooses another.
MAIN_FIELDS = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "question": ("question", "answer"),
    "prompt": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "text": ("text",),
}
# Read beside the fields of a form, or by the evaluation.
OTHER_FIELDS = {"alternate", "system", "set", "paraphrased_answer", "perturbed_answer", "paraphrased_question"}
# A message's marks for training: OpenAI, Mistral, Together; axolotl; ms-swift; and, the other way, torchtune.
TRAINING_MARKS = ("weight", "train", "training", "loss", "masked")
MARKED_PARTS = ("train_detail", "training_detail")  # axolotl's, of parts of a message
CALLS = ("function_call", "tool_call")  # roles of assistants' messages whose text is a call as JSON
# The roles that a message may have, by what OpenAI, LangChain, ShareGPT, LLaMA-Factory and chat templates call them.
ROLES = {
    "system": "system", "developer": "developer",
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "ai", "model", "bot", "chatbot"), "assistant"),
    **dict.fromkeys(CALLS, "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython", "tool_response", "function_response"), "tool"),
}  # fmt: skip
SHAREGPT_ROLES = ("human", "gpt")  # under "from", the names that the form itself has
MISTYPED = 0.75  # similarity from which a field is taken for the one that --columns meant


def parse_columns(text: str | None) -> dict[str, str]:
    """``question=instruction,answer=response`` as our name → the column's name."""
    columns = {}
    for part in names_in(text):
        field_name, equals, column = (word.strip() for word in part.partition("="))
        if not (field_name and equals and column):
            raise UsageError(f"--columns {part}: expected NAME=COLUMN, such as question=instruction,answer=response")
        columns[field_name] = column
    return columns


def rename_columns(row: object, columns: Mapping[str, str], location: str) -> object:
    """``row`` with the fields that ``columns`` names under our names, and without those of any other form.

    A row that has none of these fields, nor one of nearly that name, is of another file's form and stays as it is.
    Raises MpuError if it has some of them only, or if it has no form either.
    """
    if not columns or not isinstance(row, dict):
        return row
    if missing := [column for column in columns.values() if column not in row]:
        lowered = {name.lower(): name for name in map(str, row)}
        mistyped = any(get_close_matches(column.lower(), lowered, 1, MISTYPED) for column in missing)
        if len(missing) == len(columns) and not mistyped:
            with suppress(MpuError):
                parse_record(row, location)
                return row
        close = get_close_matches(missing[0].lower(), lowered, 1, 0.5)
        raise MpuError(
            f"{location}: no field {missing[0]!r} (its fields: {_names(row)})",
            f"did you mean {lowered[close[0]]!r}?" if close else None,
        )
    renamed = {field_name: row[column] for field_name, column in columns.items()}
    if len(halves := {"question", "answer"} - {*renamed, *row}) == 1 and {"question", "answer"} & renamed.keys():
        raise MpuError(
            f"{location}: --columns does not say which field is the {halves.pop()} (the fields: {_names(row)})",
            columns_hint(row, columns=columns),
        )
    main = {field for fields in MAIN_FIELDS.values() for field in fields}
    dropped = set(columns.values())
    if main & renamed.keys():  # the form is that of --columns, whatever others the row has
        dropped |= main
    return {name: value for name, value in row.items() if name not in dropped} | renamed


def form_of(row: Mapping[str, object]) -> str | None:
    """The first field of the form that ``row`` has, None if it has none. A field that is null or empty is absent if
    another form is there."""
    named = [name for name in MAIN_FIELDS if row.get(name) is not None]
    filled = [name for name in named if not _is_blank(row[name])]
    return next(iter(filled or named), None)


def _is_blank(value: object) -> bool:
    return value in (None, "", [], {}) or (isinstance(value, str) and not value.strip())


def other_forms(row: Mapping[str, object]) -> list[str]:
    """The complete forms that a row has besides the one that is read."""
    complete = [name for name, fields in MAIN_FIELDS.items() if all(not _is_blank(row.get(field)) for field in fields)]
    return [name for name in complete if name != form_of(row)]


def unread_fields(row: object) -> set[str]:
    """The fields of a row that no command reads."""
    if not isinstance(row, dict):
        return set()
    form = form_of(row)
    read = set(OTHER_FIELDS)
    if form == "instruction":
        read.add("input")
    for name in (form, *other_forms(row)):  # another note says which of the complete forms is read
        read.update(MAIN_FIELDS.get(name or "", ()))
    if (messages := _messages(row)) and role_of(messages[0]) == "system":
        read.discard("system")  # the dialogue's own is used
    return {str(name) for name, value in row.items() if name and name not in read and not _is_blank(value)}


def renamed_roles(row: object) -> dict[str, str]:
    """The roles of a row's messages that are read under another name, and that name."""
    renamed = {}
    for message in _messages(row):
        name, role = _role_name(message), role_of(message)
        if (
            name is not None
            and role not in (None, name)
            and not (message.get("role") is None and name in SHAREGPT_ROLES)
        ):
            renamed[name] = str(role)
    return renamed


def is_context_only(message: Mapping[str, Any], location: str) -> bool:
    """Whether a message of the assistant is marked as not to be trained on."""
    if role_of(message) != "assistant":
        return False
    marks = {name: message[name] for name in TRAINING_MARKS if message.get(name) is not None}
    weight = marks.get("weight")
    if isinstance(weight, int | float) and weight not in (0, 1):
        raise MpuError(f"{location}: a message has the weight {weight:g}", "a weight is 0 or 1")
    off = {name: value == 0 or str(value).strip().lower() in ("0", "false") for name, value in marks.items()}
    return any(off[name] != (name == "masked") for name in off)


def unread_marks(row: object) -> set[str]:
    """The marks of a row's messages about training that no command reads: on others' messages, and on parts of one."""
    unread = set()
    for message in _messages(row):
        role = role_of(message)
        for name in ("train", "training", "loss"):
            if role not in (None, "assistant") and message.get(name) in (True, 1):
                unread.add(f"{name!r} of {role} messages")
        if role is not None:
            unread |= {repr(name) for name in MARKED_PARTS if message.get(name)}
    return unread


def context_only_answers(row: object) -> int:
    """The number of a row's answers that are marked as not to be trained on."""
    return sum(is_context_only(message, "") for message in _messages(row) if role_of(message))


def _messages(row: object) -> list[Any]:
    """The messages of a row whose form has some, as they are written."""
    if not isinstance(row, dict) or (form := form_of(row)) not in ("messages", "conversations", "prompt"):
        return []
    messages: list[Any] = []
    for name in MAIN_FIELDS[form]:
        if isinstance(row.get(name), list):
            messages += row[name]
        elif form == "prompt" and not _is_blank(row.get(name)):  # text beside the other one's messages
            messages.append({"role": "user" if name == "prompt" else "assistant", "content": row[name]})
    return messages


def parse_record(row: object, location: str) -> Record:
    """The record in a row. Raises MpuError, naming the location, if there is none."""
    if not isinstance(row, dict):
        raise MpuError(f"{location}: not a JSON object with {FORMS}")
    # An empty cell of a table is no answer.
    alternate = _text(row, "alternate", location) if row.get("alternate") else None
    form = form_of(row)
    if form == "text":
        return Record((), _text(row, "text", location), location, alternate)
    if form in ("messages", "conversations"):
        turns = _turns(_messages(row), location)
    elif form == "instruction":
        # Alpaca's: the instruction says what to do with the input, and one of them may be empty.
        names = [name for name in ("instruction", "input") if not _is_blank(row.get(name))]
        prompt = "\n\n".join(_text(row, name, location) for name in names or ["instruction"])
        turns = [Turn("user", prompt), Turn("assistant", _text(row, "output", location))]
    elif form == "prompt" and list in (type(row["prompt"]), type(row.get("completion"))):  # TRL's conversational form
        turns = _turns(_messages(row), location)
    elif form is not None:
        prompt, answer = MAIN_FIELDS[form]
        turns = [Turn("user", _text(row, prompt, location)), Turn("assistant", _text(row, answer, location))]
    else:
        raise MpuError(f"{location}: none of {FORMS} found (its fields: {_names(row)})", columns_hint(row))
    if not _is_blank(row.get("system")) and turns[0].role != "system":
        turns.insert(0, Turn("system", _text(row, "system", location)))
    if turns[-1].role != "assistant":
        raise MpuError(f"{location}: the last message is not the assistant's, so there is no answer")
    while isinstance(turns[-1], ContextTurn) or turns[-1].role != "assistant":
        del turns[-1]  # what follows the last answer that is trained on changes nothing of it
        if len(turns) < 2:
            raise MpuError(
                f"{location}: every answer is marked as not to be trained on, such as by 'weight': 0",
                "take the record out, or leave such records out with --reading skip_bad",
            )
    *earlier, last = turns
    return Record(tuple(earlier), last.content, location, alternate=alternate, answer_fields=last.fields)


def _role_name(message: object) -> str | None:
    """The role of a message in its own words, under "role" or, in ShareGPT's form, "from"; None if it names none."""
    if not isinstance(message, dict):
        return None
    name = message.get("role") if message.get("role") is not None else message.get("from")
    return name if isinstance(name, str) and name.strip() else None


def role_of(message: object) -> str | None:
    """The role of a message, None if it has none that is known."""
    name = _role_name(message)
    return None if name is None else ROLES.get(name.strip().lower())


def unit_of(row: object, field: str, location: str) -> str:
    """The person whose row it is, by ``field``, that of --dp unit."""
    value = row.get(field) if isinstance(row, dict) else None
    if not isinstance(value, str | int) or value == "":
        raise MpuError(f"{location}: no {field!r}, which --dp unit names")
    return str(value)


def _text(row: Mapping[str, object], name: str, location: str) -> str:
    value = row.get(name)
    if isinstance(value, CellError):
        raise MpuError(
            f"{location}: {name!r} is {value}, an error of the spreadsheet",
            "mend its formula, or leave such records out with --reading skip_bad",
        )
    if isinstance(value, float) and math.isfinite(value):
        value = repr(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        raise MpuError(
            f"{location}: {name!r} is missing, empty or not a text (its fields: {_names(row)})", columns_hint(row, name)
        )
    return sound_text(value, f"{location}: {name!r}")


def sound_text(text: str, what: str) -> str:
    """``text``. Raises MpuError, naming ``what``, if it is not valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MpuError(f"{what} contains an unpaired surrogate, which is not valid text") from error
    return text


def _turns(messages: Sequence[Any], location: str) -> list[Turn]:
    """The turns of a dialogue. Content may be a text or parts of text; a message with tool calls needs none."""
    turns = []
    for message in messages:
        name, role = _role_name(message), role_of(message)
        if name is None:
            raise MpuError(f"{location}: every message needs a role and content")
        if role is None:
            raise MpuError(
                f"{location}: unknown role {name[:LONGEST_NAME]!r}",
                "name it system, user, assistant or tool; common other names, such as human and gpt, are read, too",
            )
        text_field = "content" if message.get("content") is not None else "value"
        content = _content(message.get(text_field), location)
        main = ("role", "from", "content", text_field)
        extra = {str(key): value for key, value in message.items() if key not in main}
        try:
            text = json.dumps(_without_nulls(extra), ensure_ascii=False, default=str)
        except RecursionError as error:
            raise MpuError(f"{location}: a message has a field that is nested too deeply") from error
        extra = json.loads(sound_text(text, f"{location}: a message"))
        if name.strip().lower() in CALLS and (calls := _calls_in(content)):
            content, extra["tool_calls"] = "", calls
        extra = {key: value for key, value in extra.items() if value not in ("", [], {}) and key not in TRAINING_MARKS}
        if "tool_calls" in extra:
            extra["tool_calls"] = _tool_calls(extra["tool_calls"], location)
        if not content.strip() and not extra.keys() & {"tool_calls", "function_call"}:
            raise MpuError(f"{location}: every message needs a role and content")
        turns.append((ContextTurn if is_context_only(message, location) else Turn)(role, content, tuple(extra.items())))
    if len(turns) < 2:
        raise MpuError(f"{location}: messages need a question and an answer")
    return turns


def _without_nulls(value: Any) -> Any:
    """``value`` without the entries of objects that are null: a table gives each of them the names of all rows, and so
    does JSON that was written from one. TRL drops them, too."""
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value


def _calls_in(text: str) -> list[Any]:
    """The tool calls in the text of LLaMA-Factory's role function_call, which is JSON; none if it is other text."""
    with suppress(ValueError, RecursionError):
        calls = json.loads(text)
        calls = calls if isinstance(calls, list) else [calls]
        if all(isinstance(call, dict) and {"name", "arguments"} <= call.keys() for call in calls):
            return [{"type": "function", "function": call} for call in calls]
    return []


def _tool_calls(calls: Any, location: str) -> Any:
    """``calls`` with their arguments as objects, as vLLM gives them to the template: OpenAI's logs hold them as JSON
    text, which a template would encode a second time."""
    try:
        calls = json.loads(calls) if isinstance(calls, str) else calls
        for call in calls if isinstance(calls, list) else []:
            function = call.get("function", call) if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(arguments := function.get("arguments", ""), str):
                function["arguments"] = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError) as error:
        raise MpuError(f"{location}: a tool call has arguments that are not JSON ({error})") from error
    return calls


def _content(content: object, location: str) -> str:
    if isinstance(content, list):
        texts = []
        for part in content:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise MpuError(f"{location}: a message has content of type {kind!r}; only text can be read")
            texts.append(sound_text(part["text"], f"{location}: a message"))
        return "".join(texts)
    if content is None:
        return ""
    if not isinstance(content, str):
        raise MpuError(f"{location}: a message's content is not a text")
    return sound_text(content, f"{location}: a message")


def _names(row: Mapping[str, object]) -> str:
    return ", ".join(map(str, row)) or "none"
