"""Declaring options: a group is a frozen dataclass, a kind of ``Options``, whose fields carry their help and range.

A group may hold other groups; seen from outside, its options are flat and each name occurs once. The command line
(``mpu_cli.cli.driver``), recipes (``from_flat``), environment variables and the Python functions all read these
declarations, so a new option is one line in a group and its use. A command is such a group, too (``Command``).

>>> @dataclass(frozen=True, kw_only=True)
... class Stirring(Options):
...     speed: float = option(1.0, "Turns per second.", above=0)
>>> from_flat(Stirring, {"speed": 2})
Stirring(speed=2.0)
"""

from __future__ import annotations

import json
import math
import re
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec

from mpu_cli.errors import UsageError
from mpu_cli.toml import read_toml

SMALLEST, LARGEST = 1e-30, 1e30  # sizes of a number but 0: its square and its inverse are finite in float64
AGAIN = "\x1e"  # between the values of an option of several parts that is given several times
RECORDS = "DATA"  # the metavar of options that name records, of one source or of several
# Options as transformers, TRL and peft call them.
OTHER_NAMES = {
    "learning_rate": "lr", "num_train_epochs": "epochs", "num_epochs": "epochs", "optimizer": "optim",
    "per_device_train_batch_size": "batch_size", "lr_scheduler_type": "lr_scheduler", "rank": "lora_rank",
    "r": "lora_rank", "target_modules": "lora_targets", "max_seq_length": "max_length", "output_dir": "out",
    "output": "out", "attn_implementation": "attention", "torch_dtype": "dtype", "loss_type": "algo",
}  # fmt: skip
Group = TypeVar("Group")
Function = TypeVar("Function", bound=Callable[..., Any])


def cached(function: Function) -> Function:
    """``functools.cache`` with the function's own type: by typeshed's, classes are not hashable."""
    return cast(Function, cache(function))


class Options:
    """A group of options. Raises UsageError for a number that is out of its range."""

    def __post_init__(self) -> None:
        declarations = declared_options(type(self))
        for group_field in fields(cast(Any, self)):
            if group_field.name in declarations:  # and not a group, which checked itself
                declarations[group_field.name].check(getattr(self, group_field.name))


@dataclass(frozen=True)
class Range:
    """The numbers that an option accepts: at least ``least``, more than ``above``, less than ``below``, and of a size
    that can be computed with."""

    least: float | None = None
    above: float | None = None
    below: float | None = None

    def __contains__(self, value: float) -> bool:
        return (
            is_computable(value)
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        if self.above is not None and self.below is not None:
            return f"between {self.above:g} and {self.below:g}"
        bounds = []
        if self.least is not None:
            bounds.append(f"at least {self.least:g}")
        if self.above is not None:
            bounds.append(f"above {self.above:g}")
        if self.below is not None:
            bounds.append(f"below {self.below:g}" if self.below < 1e6 else f"below 2^{math.log2(self.below):g}")
        return " and ".join(bounds) or "a finite number"


def is_computable(value: float) -> bool:
    """Whether a number is finite, and neither so large nor so small that computing with it ends in infinity."""
    return value == 0 or SMALLEST <= abs(value) <= LARGEST


@dataclass(frozen=True)
class Fold:
    """Options that are one on the command line, ``--constants beta=0.1,gamma=2``: its name and its help."""

    name: str
    help: str
    explained_by: str = ""  # the command whose help has what its parts do, if it is another's

    @property
    def flag(self) -> str:
        return f"--{self.name}"


@dataclass(frozen=True)
class Declaration:
    """One option, as its group declares it."""

    name: str  # in Python and in recipes
    annotation: Any  # such as float | Literal["auto"] | None
    # str, int, float, bool, Path, tuple for names (comma-separated on the command line, a list in a recipe), or list
    # for what is repeated there, each of the type ``item``
    kind: type
    optional: bool  # whether None, for "not set", is a value
    choices: tuple[str, ...]  # empty if any value of the kind will do
    default: object
    help: str
    flag: str  # on the command line
    metavar: str | None
    panel: str | None
    range: Range | None
    argument: bool
    affects_result: bool  # by more than its last bits
    words: tuple[str, ...] = ()  # that may stand in place of a number
    item: type = str
    hidden: bool = False  # from help
    in_files: bool = True  # whether a file of options may set it
    imports: bool = False  # a module, if the value has a colon: module:function
    fold: Fold | None = None  # the option of the command line that this one is a part of
    other_flags: tuple[str, ...] = ()  # in commands where it stands apart, or is a part of another option

    def part_of(self, fold: Fold) -> Declaration:
        """This option as a part of ``fold``."""
        flag = f"{fold.flag} {self.name.removeprefix(f'{fold.name}_')}"
        return replace(self, fold=fold, flag=flag, other_flags=(*self.other_flags, self.flag))

    @property
    def key(self) -> str:
        """The name in its fold: ``rank`` for ``lora_rank`` in ``--lora``."""
        return self.name.removeprefix(f"{self.fold.name}_") if self.fold else self.name

    @property
    def is_required(self) -> bool:
        return self.default is MISSING

    @property
    def separator(self) -> str:
        """The separator of several values that are one text: names of files of records may have commas."""
        return "\n" if self.metavar == RECORDS else ","

    def convert(self, value: object, where: str = "") -> object:
        """``value`` as this option's type."""
        raw, expected = value, f"of type {self.kind.__name__}"
        if self.choices:
            expected = f"one of {', '.join(self.choices)}"
        try:
            if self.words and isinstance(value, str) and value not in self.words:
                expected = f"a number or {' or '.join(self.words)}"
                value = float(value)
            if self.kind is tuple and isinstance(value, str):
                value = [name.strip() for name in value.split(",") if name.strip()]
            if self.kind is list and isinstance(value, str | Path):
                value = [value]
            value = msgspec.convert(value, self.annotation, dec_hook=lambda kind, text: kind(text))
            if self.choices and value is not None and value not in self.choices:
                raise ValueError(value)
        except (ValueError, TypeError) as error:  # ValueError: also msgspec's
            raise UsageError(f"{where}{self.name} = {raw!r}: must be {expected}") from error
        self.check(value, where)
        return value

    def check(self, value: object, where: str = "") -> None:
        """Raise UsageError for a number that is not finite or out of range."""
        allowed = self.range or Range()
        if not isinstance(value, int | float) or isinstance(value, bool) or value in allowed:
            return
        label = f"{where}{self.name} = " if where else f"{self.flag}{'=' if self.fold else ' '}"
        is_finite = abs(value) < math.inf
        if is_finite and not is_computable(value):
            raise UsageError(f"{label}{value}: must be 0 or between {SMALLEST:g} and {LARGEST:g} in size")
        finite = "" if is_finite or allowed == Range() else "finite and "
        raise UsageError(f"{label}{value}: must be {finite}{allowed}")


Declarations = dict[str, Declaration]  # by name


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    metavar: str | None = None,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    flag: str | None = None,
    panel: str | None = None,
    argument: bool = False,
    affects_result: bool = True,
    hidden: bool = False,
    in_files: bool = True,
    imports: bool = False,
    fold: Fold | None = None,
) -> Any:
    """A field of a group. ``default`` ``...`` makes it required; ``choices``: in place of a Literal's; ``flag``: on the
    command line, if it is not the name with hyphens; ``argument``: positional there and in Python; ``panel``: in help,
    if it is not the group's; ``fold``: the option that it is a part of there, if not the group's ``FOLD``.
    ``in_files`` is False for what a file of options, which may be another party's, must not do unnoticed: run a
    program, send something, choose secrets, replace files, leave out a check; ``imports``: it may not name a module."""
    bounded = (least, above, below) != (None, None, None)
    metadata = {  # its names are those of fields of ``Declaration``
        "help": help,
        "choices": choices,
        "metavar": metavar,
        "range": Range(least, above, below) if bounded else None,
        "flag": flag,
        "panel": panel,
        "argument": argument,
        "affects_result": affects_result,
        "hidden": hidden,
        "in_files": in_files,
        "imports": imports,
        "fold": fold,
    }
    return field(default=MISSING if default is ... else default, metadata=metadata, kw_only=not argument)


def group(group_class: type[Group], *, fold: Fold | None = None, apart: Collection[str] = ()) -> Group:
    """A field of a group that holds the options of another group; on the command line they are one option, ``fold``, if
    it is given, except those ``apart``."""
    return field(default_factory=group_class, metadata={"fold": fold, "apart": apart})  # type: ignore[return-value]


@cached
def declared_options(group_class: type) -> Declarations:
    """All options of a group, those of the groups inside it included, in the order of their declaration."""
    options: Declarations = {}
    for group_field, kind in _own_fields(group_class):
        if is_dataclass(kind):
            inner = dict(declared_options(kind))
            if fold := group_field.metadata.get("fold"):
                folded = inner.keys() - group_field.metadata["apart"]
                inner |= {name: inner[name].part_of(fold) for name in folded}
        else:
            inner = {group_field.name: _declaration(group_class, group_field, kind)}
        if twice := options.keys() & inner.keys():
            raise TypeError(f"{group_class.__name__} declares {min(twice)!r} twice")
        options |= inner
    return options


def from_flat(group_class: type[Group], values: Mapping[str, object], where: str = "") -> Group:
    """The group with the options in ``values``, by name; defaults for those that are missing.

    Raises UsageError, its text beginning with ``where``, for an unknown name, a wrong type, a value that is not
    a choice or out of range, and for a required option that is missing.
    """
    declarations = declared_options(group_class)
    for name in values:
        if name not in declarations:
            near = nearest(name, declarations)
            raise UsageError(
                f"{where}{name}: unknown option",
                f"did you mean {near}?" if near else f"choose from {', '.join(declarations)}",
            )
    return _build(group_class, values, where)


def nearest(name: str, names: Collection[str]) -> str | None:
    """The one of ``names``, in Python, that an unknown ``name`` probably means: another tool's name for it, or nearly
    the same name."""
    if OTHER_NAMES.get(name) in names:
        return OTHER_NAMES[name]
    return next(iter(get_close_matches(name, names, 1)), None)


def check_in_files(declarations: Declarations, values: Mapping[str, object], where: str, hint: str) -> None:
    """Raise UsageError, its text beginning with ``where``, if a file sets an option that no file may set, or names a
    module to be imported."""
    for name, value in values.items():
        if (declared := declarations.get(name)) is None:
            continue
        if declared.imports and ":" in str(value):
            raise UsageError(f"{where}{name}: {value}: a file, which may be somebody else's, names no module", hint)
        if not declared.in_files:
            raise UsageError(f"{where}{name}: cannot be set in a file, which may be somebody else's", hint)


def _build(group_class: type[Group], values: Mapping[str, object], where: str) -> Group:
    arguments: dict[str, object] = {}
    declarations = declared_options(group_class)
    for group_field, kind in _own_fields(group_class):
        name = group_field.name
        if is_dataclass(kind):
            arguments[name] = _build(kind, values, where)
        elif name in values:
            arguments[name] = declarations[name].convert(values[name], where)
        elif declarations[name].is_required:
            raise UsageError(f"{where}{name}: missing ({declarations[name].help})")
    return group_class(**arguments)


def flat(group: object) -> dict[str, object]:
    """The inverse of ``from_flat``: every option by its name."""
    values: dict[str, object] = {}
    for group_field, kind in _own_fields(type(group)):
        value = getattr(group, group_field.name)
        values |= flat(value) if is_dataclass(kind) else {group_field.name: value}
    return values


@cached
def _own_fields(group_class: type) -> list[tuple[Field, type]]:
    """The fields of a group, each with its type."""
    hints = get_type_hints(group_class)
    return [(group_field, hints[group_field.name]) for group_field in fields(group_class)]


def _declaration(group_class: type, group_field: Field, hint: Any) -> Declaration:
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    optional = type(None) in parts
    kinds = [part for part in parts if part is not type(None)]
    words = ()
    # Such as float | Literal["auto"].
    if len(kinds) > 1 and get_origin(kinds[-1]) is Literal:
        words = get_args(kinds.pop())
    [kind] = kinds
    is_literal = get_origin(kind) is Literal
    item = get_args(kind)[0] if get_origin(kind) is list else str
    described = {
        **group_field.metadata,
        "flag": group_field.metadata["flag"] or "--" + group_field.name.replace("_", "-"),
        "panel": group_field.metadata["panel"] or getattr(group_class, "PANEL", None),
        "choices": get_args(kind) if is_literal else group_field.metadata["choices"],
    }
    fold = described.pop("fold") or getattr(group_class, "FOLD", None)
    declaration = Declaration(
        name=group_field.name,
        annotation=hint,
        kind=str if is_literal else get_origin(kind) or kind,
        optional=optional,
        default=group_field.default,
        words=words,
        item=item,
        **described,
    )
    return declaration.part_of(fold) if fold else declaration


def folds_of(declarations: Declarations) -> dict[Fold, list[Declaration]]:
    """The folds of these options, each with its members, in the order of their first."""
    folds: dict[Fold, list[Declaration]] = {}
    for declaration in declarations.values():
        if declaration.fold:
            folds.setdefault(declaration.fold, []).append(declaration)
    return folds


def spelled_for(group_class: type, text: str) -> str:
    """``text``, such as an error's, with each option as ``group_class`` has it: --unlearn precision=float64 in a
    command that has the options of `unlearn` as parts of one."""
    declarations = declared_options(group_class).values()
    present = {declared.flag.split()[0] for declared in declarations}
    for declared in declarations:
        value = "|".join([r"-?[\d.]", r"\S+=", *map(re.escape, declared.choices)])  # and not the sentence's next word
        for flag in declared.other_flags:
            if flag not in present and flag != declared.flag:
                text = re.sub(rf"{flag} (?={value})", f"{declared.flag}=", text)
                text = re.sub(rf"{flag}(?![a-z0-9_-])", declared.flag, text)
    return text


def unfold(fold: Fold, texts: Iterable[str], declarations: Declarations) -> dict[str, object]:
    """The values that ``texts`` set, each NAME=VALUE,…, a TOML file of such values or a JSON object, by the names in
    Python.

    A switch needs no value, what has no name goes on with the text before it (``rank=8,targets=q_proj,v_proj``), and of
    a name that is given twice the last value counts.
    """
    members = {declared.key: declared for declared in folds_of(declarations)[fold]}

    def member(key: str, where: str) -> Declaration:
        if (declared := members.get(key.replace("-", "_"))) is None:
            near = nearest(key.replace("-", "_"), members)
            hint = f"did you mean {near}?" if near else f"write NAME=VALUE, with a name of {', '.join(members)}"
            raise UsageError(f"{where}: no such name", hint)
        return declared

    values: dict[str, object] = {}
    for text in texts:
        is_file = text.endswith(".toml") and "=" not in text
        if is_file or text.startswith("{"):
            try:
                table = read_toml(Path(text)) if is_file else json.loads(text)
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{fold.flag} {text}: not a JSON object ({error})") from error
            of_table = {member(key, f"{fold.flag} {text}: {key}").name: value for key, value in table.items()}
            if is_file:
                check_in_files(declarations, of_table, f"{text}: ", "give it on the command line")
            values |= of_table
            continue
        last: Declaration | None = None
        for part in text.split(","):
            key, equals, value = part.partition("=")
            key = key.strip()
            is_member = key.replace("-", "_") in members
            goes_on = last is not None and last.kind in (tuple, str) and not last.choices
            if not is_member and last and goes_on and (not equals or "=" in (last.metavar or "")):
                values[last.name] = f"{values[last.name]},{part}"
                continue
            last = member(key, f"{fold.flag} {part.strip()}")
            if not equals and last.kind is not bool:
                raise UsageError(f"{fold.flag} {part.strip()}: needs a value", f"write {key}=VALUE")
            values[last.name] = _parsed(last, value if equals else "true")
    return values


def _parsed(declaration: Declaration, text: str) -> object:
    """``text`` as a value of the option's kind."""
    if text in declaration.words:
        return text
    if declaration.kind is bool:
        if text.lower() not in ("true", "false"):
            raise UsageError(f"{declaration.flag}={text}: must be true or false")
        return text.lower() == "true"
    if declaration.kind in (int, float):
        try:
            return declaration.kind(text)
        except ValueError as error:
            kind = "a whole number" if declaration.kind is int else "a number"
            raise UsageError(f"{declaration.flag}={text}: must be {kind}") from error
    return text


def differing(options: Options) -> dict[str, object]:
    """The options that differ from their defaults, by name."""
    declarations = declared_options(type(options))
    return {name: value for name, value in flat(options).items() if value != declarations[name].default}


def flags_set(command: Options, *groups: Options) -> list[str]:
    """The flags in ``command`` of the options of these ``groups`` that differ from the defaults."""
    declarations = declared_options(type(command))
    return [declarations[name].flag for group in groups for name in differing(group)]


def as_arguments(options: Options, without: Collection[str] = (), *, of: type | None = None) -> list[str]:
    """The ``options`` that differ from the defaults, as on the command line, except those ``without``; ``of``: those
    that this other group has, as on its command line."""
    words: list[str] = []
    folded: dict[Fold, dict[str, Any]] = {}
    values = flat(options)
    for name, declaration in declared_options(of or type(options)).items():
        value = values.get(name)
        if name in without or value in (declaration.default, None, ()):
            continue
        if declaration.fold:
            folded.setdefault(declaration.fold, {})[declaration.key] = value
        elif declaration.kind is bool:
            words.append(declaration.flag if value else declaration.flag.replace("--", "--no-", 1))
        else:
            for text in _texts(value).splitlines() or [""]:  # records: several sources are an option each
                words += [declaration.flag, text]
    for fold, parts in folded.items():
        pairs = ",".join(f"{key}={_texts(value)}" for key, value in parts.items())
        # Text may look like further parts.
        is_plain = not any(isinstance(value, str | Path) and {",", "\n"} & set(str(value)) for value in parts.values())
        words += [fold.flag, pairs if is_plain else json.dumps(parts, default=str)]
    return words


def _texts(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)
