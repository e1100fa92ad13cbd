"""``mpu ask``: what models answer to a question, side by side."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from mpu_cli.errors import UsageError
from mpu_cli.files.manifest import read_copy_manifest
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.command import IDENTITY, Command, Report
from mpu_cli.options.declare import as_arguments, flat, from_flat, group, option
from mpu_cli.options.unlearning import DEVICE, Prompts
from mpu_cli.wording import command_line


@dataclass(frozen=True)
class Reply:
    """The answer of ``model``, ``with_delta`` or as it is."""

    model: str
    with_delta: bool
    answer: str


@dataclass(frozen=True, kw_only=True)
class Ask(Command):
    """Ask each MODEL the same QUESTION, and print its answer: before and after unlearning, or a copy with its delta.

    Answers are the likeliest ones, token by token, and asked for as records are in training: in that of your last
    request on copies of the first model's run, unless options say otherwise. Prints a line for each.
    """

    NAME = "ask"
    EXAMPLE = "mpu ask copy_1 'Who is Ada?' --delta deltas/copy_1.safetensors"

    models: list[str] = option(
        ..., "Model directories, copies (sealed or not) or Hub ids.", metavar="MODEL…", argument=True
    )
    question: str = option(..., "What to ask.", metavar="QUESTION", argument=True)
    delta: Path | None = option(None, "Ask MODEL, a copy, with this delta of it, too.", metavar="FILE")
    max_new_tokens: int = option(128, "Tokens of an answer, at most.", above=0)
    prompts: Prompts = group(Prompts)
    device: str = option("auto", DEVICE, metavar="DEVICE")
    identity: Path | None = option(None, IDENTITY, metavar="FILE")

    def run(self, observer: Observer = SILENT) -> list[Reply]:
        """The answers, in the order of the models."""
        from mpu_cli.files.sealing import opened_copy
        from mpu_cli.measuring.generation import Respondent
        from mpu_cli.model.source import open_model
        from mpu_cli.records.forms import question

        if not self.question.strip():
            raise UsageError("QUESTION: is empty", "put it in quotes, after the models")
        if self.delta and len(self.models) > 1:
            raise UsageError(f"--delta: is of one copy, and {len(self.models)} models are named", "name its copy alone")
        record = question(self.question, "–", "the question")
        replies: list[Reply] = []
        prompts = self.prompts
        for model in self.models:
            with opened_copy(model, self.identity, observer) as source:
                if not replies and prompts == Prompts():
                    prompts = _noted_prompts(source, observer)
                copy = open_model(source, links=False)
                respondent = Respondent(copy, prompts, self.device)
                [answer] = respondent.answers([record], self.max_new_tokens, observer)
                replies.append(Reply(model, False, answer))
                if self.delta:
                    respondent.add(copy, self.delta)
                    [answer] = respondent.answers([record], self.max_new_tokens, observer)
                    replies.append(Reply(model, True, answer))
        return replies

    def report(self, replies: list[Reply], observer: Observer) -> Report:  # noqa: ARG002 (as all commands have it)
        lines = []
        for reply in replies:
            name = f"{reply.model} with {self.delta}" if reply.with_delta else reply.model
            lines.append(f"{name}\t{' '.join(reply.answer.split())}")
        return Report(lines, [asdict(reply) for reply in replies])


def _noted_prompts(source: str, observer: Observer) -> Prompts:
    """The options for turning a question into text of the last request on copies of the run of the one in ``source``;
    the defaults if there is none."""
    from mpu_cli.training.requests import default_requests_path, read_requests, request_on

    manifest = read_copy_manifest(Path(source))
    request = request_on(manifest, read_requests(default_requests_path()))
    names = flat(Prompts())
    values = {name: value for name, value in request.options.items() if name in names} if request else {}
    prompts = from_flat(Prompts, values)
    if request and values:
        shown = command_line(*as_arguments(prompts))
        observer.note(f"from your request on copy {request.copy} of run {request.run}: {shown}")
    return prompts
