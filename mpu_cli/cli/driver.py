"""A command on the command line: typer's options from its dataclass; parsed, carried out, printed."""

from __future__ import annotations

import inspect
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING
from typing import Annotated, Any, List, Literal, Optional  # noqa: UP035 (typer takes a list's type from List)

import typer

from mpu_cli.cli.config import Commands
from mpu_cli.cli.output import emit, emit_table, terminal, warn
from mpu_cli.files.transaction import Transaction
from mpu_cli.options.command import Command, Preview
from mpu_cli.options.declare import AGAIN, Declaration, Fold, declared_options, folds_of, from_flat, unfold
from mpu_cli.wording import in_bytes

ALWAYS = ("--dry-run", "--force", "--json", "--help")  # options that help shows for every command
HELP_ALL = "--help-all"


def typer_command(command: type[Command], *, with_options: bool) -> Callable[..., None]:
    """The function for a typer command: its parameters are the options of ``command``, its docstring is its help."""
    declarations = declared_options(command) if with_options else {}
    folds = folds_of(declarations)
    parameters = [_parameter(option) for option in declarations.values() if not option.fold]
    parameters += [_folded_parameter(fold, members) for fold, members in folds.items()]
    if with_options and hasattr(command, "preview"):
        parameters.append(_switch("dry_run", "--dry-run", command.DRY_RUN))
    if with_options and "as_json" not in declarations:
        parameters.append(_switch("as_json", "--json", "Print one JSON document instead of paths."))

    parameters.append(inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))

    def call(*, context: typer.Context, dry_run: bool = False, **values: Any) -> None:
        as_json = bool(values.get("as_json"))
        if "as_json" not in declarations:
            del values["as_json"]
        for fold in folds:
            for text in _texts_of(fold, values.pop(fold.name), context):
                values |= unfold(fold, filter(None, text.split(AGAIN)), declarations)
        specified = {name: value for name, value in values.items() if value is not None}
        carry_out(from_flat(command, specified), dry_run=dry_run, as_json=as_json)

    # Help breaks lines where the terminal does, not where the docstring does.
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    call.__doc__ = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _texts_of(fold: Fold, counted: str | None, context: typer.Context) -> list[str]:
    """What the file of --config, the variable and the command line say of a fold, in this order: of each name the last
    value counts, and not the whole of what was said last. ``counted``: what counts for click."""
    [parameter] = [parameter for parameter in context.command.params if parameter.name == fold.name]
    in_file = context.lookup_default(fold.name)
    if isinstance(in_file, dict):
        in_file = json.dumps(in_file, default=str)
    return [text for text in (in_file, os.environ.get(str(parameter.envvar)), counted) if text]


def _switch(name: str, flag: str, text: str) -> inspect.Parameter:
    return _keyword(name, bool, typer.Option(flag, help=text), default=False)


def _keyword(name: str, kind: Any, info: Any, *, default: Any) -> inspect.Parameter:
    """A parameter of this ``kind``, as typer reads it."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])


def _parameter(declaration: Declaration) -> inspect.Parameter:
    """An option as typer reads it."""
    kind: Any = declaration.kind
    if declaration.choices:
        kind = Literal[declaration.choices]
    elif declaration.kind is tuple or declaration.words:
        kind = str
    elif declaration.kind is list:
        kind = List[declaration.item]  # type: ignore[name-defined] # noqa: UP006
    if declaration.optional or declaration.kind is tuple:
        kind = Optional[kind]  # noqa: UP045 (the kind is a value here)
    default: Any = inspect.Parameter.empty if declaration.default is MISSING else declaration.default
    if declaration.words and default is not None:
        default = str(default)
    elif declaration.kind is tuple:
        default = None
    if declaration.argument:
        info: Any = typer.Argument(help=declaration.help, metavar=declaration.metavar)
    else:
        by_name = "--" + declaration.name.replace("_", "-")
        # Naming the flag keeps typer from adding --no-… to what is off anyway.
        is_off = declaration.kind is bool and not declaration.default
        names = [declaration.flag] if is_off or declaration.flag != by_name else []
        info = typer.Option(
            *names, help=declaration.help, metavar=declaration.metavar, rich_help_panel=declaration.panel,
            hidden=declaration.hidden,
        )  # fmt: skip
    return _keyword(declaration.name, kind, info, default=default)


def _folded_parameter(fold: Fold, members: Sequence[Declaration]) -> inspect.Parameter:
    """Several options as the one of their fold, with AGAIN between its values if it is given several times."""
    names = [f"{member.key}: {member.help}" for member in members]
    if fold.explained_by:
        names = [f"See `mpu {fold.explained_by} {HELP_ALL}`."]
    from_file = ["Also from FILE.toml."] if any(member.in_files for member in members) else []
    text = " ".join([fold.help, *from_file, *names])
    info = typer.Option(fold.flag, help=text, metavar="NAME=VALUE,…", rich_help_panel=members[0].panel)
    return _keyword(fold.name, Optional[str], info, default=None)  # noqa: UP045 (the kind is a value here)


def carry_out(command: Command, *, dry_run: bool, as_json: bool) -> None:
    """Run ``command`` and print its result or, with ``dry_run``, the files that it would read and write."""
    with terminal() as observer:
        result = command.preview(observer) if dry_run else command.run(observer)  # type: ignore[attr-defined]
    if dry_run and isinstance(result, Preview):
        print_preview(result, force=getattr(command, "force", False), as_json=as_json)
        return
    if dry_run:
        report = result
    else:
        show_table = observer.table if as_json else emit_table  # standard output is for the document alone
        for table in command.tables(result):
            show_table(table.title, table.columns, table.rows)
        report = command.report(result, observer)
    emit(report.lines, report.document, as_json and report.document is not None)
    if report.failure:
        raise report.failure
    if report.status:
        raise typer.Exit(report.status)


def print_preview(preview: Preview, *, force: bool, as_json: bool) -> None:
    """Print ``preview``."""
    for path, _ in preview.writes:
        Transaction(force=force).check(path, path in preview.folders)
    first = preview.writes[0][0]
    needed = sum(size or 0 for _, size in preview.writes) + preview.scratch
    free = shutil.disk_usage(next(parent for parent in first.absolute().parents if parent.exists())).free
    lines = [f"reads\t{path}{_size_column(size)}" for path, size in preview.reads]
    lines += [f"writes\t{path}{_size_column(size)}" for path, size in preview.writes]
    lines += [f"memory\tabout {in_bytes(preview.memory)}", f"disk\t{in_bytes(needed)} of {in_bytes(free)} free"]
    if needed > free:
        warn(f"{first.parent}: {in_bytes(needed)} are needed, {in_bytes(free)} are free")
    lines += [f"note\t{text}" for text in preview.notes]
    document = {
        "reads": [{"path": path, "bytes": size} for path, size in preview.reads],
        "writes": [{"path": path, "bytes": size} for path, size in preview.writes],
        "memory": preview.memory,
        "disk": {"needed": needed, "free": free},
        "notes": list(preview.notes),
    }
    emit(lines, document, as_json)


def _size_column(size: int | None) -> str:
    return "" if size is None else f"\t{in_bytes(size)}"


def in_two_levels(commands: Commands, classes: Mapping[str, type[Command]], arguments: list[str]) -> list[str]:
    """Hide the options that are not ``ESSENTIAL``, unless --help-all is among ``arguments``; returns these, with --help
    in its place."""
    if HELP_ALL in arguments:
        return ["--help" if argument == HELP_ALL else argument for argument in arguments]
    for name, command in classes.items():
        if not command.ESSENTIAL:
            continue
        options = [option for option in commands[name].params if option.param_type_name == "option"]
        hidden = [option for option in options if not {*command.ESSENTIAL.split(), *ALWAYS} & set(option.opts)]
        for option in hidden:
            option.hidden = True
        more = f"And {len(hidden)} more options: mpu {name} {HELP_ALL}"
        commands[name].epilog = "\n\n".join(filter(None, (commands[name].epilog, more)))
    return arguments
