"""How far each command is from what this machine allows: seconds, the limit, and the share.

python -m tests.benchmarks.limits DIR MODEL FORGET RETAIN UNSEEN [--steps N] [--csv docs/data/limits.csv]

Measures the machine first: products of matrices in float32 and bfloat16, copies in memory, and a copy to the disk
with its flush. Then it runs the main commands on MODEL, a chat model, in DIR, with the first records of three files of
JSON lines, 8 to forget and 16 to keep in a step. The limit of what streams is a copy to the disk of as many bytes as it
reads or writes, whichever are more. That of what computes is the sum over the model's passes, as they were counted
while the command ran: the products of their tokens, padding apart, at the measured rate, or one reading of the weights,
whichever takes longer; three times that where a backward pass follows. Imports, checks and everything else are what a
share below 1 consists of. What computes runs twice, first with all float32 products by MKL, torch's usual library.
One process at a time; take a quiet machine.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.flop_counter import FlopCounterMode

from mpu_cli.cli import output
from mpu_cli.cli.main import main as mpu
from mpu_cli.model import products
from mpu_cli.model.load import limits_of, load
from mpu_cli.model.products import faster_product
from mpu_cli.model.source import open_model
from mpu_cli.options.unlearning import Prompts
from mpu_cli.records.encode import Example, answer_tokens, encoding_of, pad
from mpu_cli.records.read import read_records
from tests.benchmarks.gpu import products_per_second
from tests.helpers.measuring import MPU, run_measured

SIZE = 2048  # of the matrices
COPIED = 1 << 28  # bytes of the tensor that is copied in memory
PER_STEP = 8, 16  # records to forget and to keep
LINES = {"forget": 8, "retain": 32, "unseen": 8}  # of the records to keep, half is held out
PARTS = {"_score": "scores", "_say": "answers", "_gradients": "attacks", "_run_attack": "attacks"}  # of eval's passes
MKL, ONEDNN = LIBRARIES = "mkl", "onednn"
COLUMNS = ("command", "part", "by MKL", "seconds", "limit", "share")


@dataclass(frozen=True)
class Limits:
    """What the machine does in a second, measured, and what a pass of the model takes of it.

    ``float32`` and ``bfloat16``: operations in products; ``memory`` and ``disk``: bytes; ``operations``: of one token
    of the records, with as much of the output head as answers take; ``vocabulary`` and ``nbytes``: of the model.
    """

    float32: float
    bfloat16: float
    memory: float
    disk: float
    operations: float
    vocabulary: int
    nbytes: int

    def of_pass(self, tokens: int, *, in_bfloat16: bool, has_backward: bool) -> float:
        """Seconds that a pass over so many ``tokens`` takes at least."""
        products = tokens * self.operations / (self.bfloat16 if in_bfloat16 else self.float32)
        return (3 if has_backward else 1) * max(products, self.nbytes / self.memory)


def measure_limits(folder: Path, model: str, files: dict[str, Path]) -> Limits:
    source = open_model(model)
    loaded, tokenizer = load(source, torch.float32, "cpu")
    encoded = encoding_of(tokenizer, Prompts(), None, limits_of(loaded)).encode(
        [record for file in files.values() for record in read_records(str(file))]
    )
    examples = [example for example in encoded if isinstance(example, Example)]
    batch = pad(examples[:8])
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        loaded(input_ids=batch["input_ids"])
    vocabulary, width = loaded.get_output_embeddings().weight.shape
    head = 2 * vocabulary * width
    share = sum(map(answer_tokens, examples)) / sum(len(example.ids) for example in examples)
    blocks = torch.empty(2, COPIED // 8)
    blocks.fill_(1.0)
    with faster_product(blocks, blocks.T):
        float32 = products_per_second("cpu", torch.float32, SIZE)
    return Limits(
        float32=float32,
        bfloat16=products_per_second("cpu", torch.bfloat16, SIZE),
        memory=2 * blocks[0].nbytes / fastest(lambda: blocks[0].copy_(blocks[1])),  # read and written
        disk=source.checkpoint.path.stat().st_size / fastest(lambda: copy_to_disk(source.checkpoint.path, folder)),
        operations=counter.get_total_flops() / batch["input_ids"].numel() - head + share * head,
        vocabulary=vocabulary,
        nbytes=sum(parameter.nbytes for parameter in loaded.parameters()),
    )


def fastest(run: Callable[[], object]) -> float:
    """Seconds of the fastest of three runs."""
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def copy_to_disk(file: Path, folder: Path) -> None:
    with file.open("rb") as source, (folder / "copied").open("wb") as target:
        os.sendfile(target.fileno(), source.fileno(), 0, file.stat().st_size)
        os.fsync(target.fileno())


class Meter:
    """Seconds and limits of a command's parts, while it runs in this process."""

    def __init__(self, limits: Limits):
        self._limits, self._part, self._began = limits, "start", time.perf_counter()
        self.seconds: dict[str, float] = defaultdict(float)
        self.limits: dict[str, float] = defaultdict(float)

    def enter(self, part: str) -> None:
        """What happens from now on is of this ``part``."""
        now = time.perf_counter()
        self.seconds[self._part] += now - self._began
        self._part, self._began = part, now

    def count(self, module: torch.nn.Module, inputs: tuple) -> None:
        """Called before each module's pass: the token embedding's stands for the model's."""
        if not isinstance(module, torch.nn.Embedding) or module.num_embeddings != self._limits.vocabulary:
            return
        if module.weight.is_meta:
            return
        self.limits[self._part] += self._limits.of_pass(
            int((inputs[0] != 0).sum()),  # pad() fills with 0
            in_bfloat16=torch.is_autocast_enabled("cpu") or module.weight.dtype == torch.bfloat16,
            has_backward=torch.is_grad_enabled(),
        )


def metered(limits: Limits, target: Path, library: str, arguments: list[str]) -> None:
    """Run a command in this process, and write the seconds and the limits of its parts to ``target``."""
    from mpu_cli.measuring import evaluate

    if library == MKL:
        products.onednn_is_exact = lambda: False  # type: ignore[assignment]

    meter = Meter(limits)
    register_module_forward_pre_hook(meter.count)
    stage, passes_for = output.Terminal.stage, evaluate.passes_for

    def enter_stage(self: output.Terminal, label: str, *rest: Any) -> None:
        meter.enter(label)
        stage(self, label, *rest)

    def metered_passes(*inputs: Any) -> Iterator[evaluate.Pass]:
        for each in passes_for(*inputs):
            function = getattr(each.find, "func", each.find).__name__

            def find(*values: Any, name: str = PARTS.get(function, function), wrapped: Callable = each.find) -> Any:
                meter.enter(name)
                return wrapped(*values)

            yield replace(each, find=find)

    output.Terminal.stage, evaluate.passes_for = enter_stage, metered_passes  # type: ignore[method-assign]
    try:
        mpu(arguments)
    finally:
        meter.enter("end")
        parts = {name: [meter.seconds[name], meter.limits[name]] for name in meter.seconds}
        target.write_text(json.dumps(parts), encoding="utf-8")


def main() -> None:
    if sys.argv[1:2] == ["--metered"]:
        of_machine, target, library, *arguments = sys.argv[2:]
        metered(Limits(**json.loads(of_machine)), Path(target), library, arguments)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for name in ("model", *LINES):
        parser.add_argument(name)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    options.folder.mkdir()
    os.environ["XDG_CONFIG_HOME"] = str(options.folder / "config")
    files = {}
    for name, count in LINES.items():
        lines = Path(getattr(options, name)).read_text(encoding="utf-8").splitlines()
        files[name] = options.folder / f"{name}.jsonl"
        files[name].write_text("\n".join(lines[:count]) + "\n", encoding="utf-8")
    limits = measure_limits(options.folder, options.model, files)
    rates = f"{limits.float32 / 1e9:.0f} and {limits.bfloat16 / 1e9:.0f} GFLOP/s in float32 and bfloat16"
    print(f"{rates}, {limits.memory / 1e9:.1f} GB/s in memory, {limits.disk / 1e9:.2f} GB/s to the disk")
    print("\t".join(COLUMNS))
    table = [COLUMNS]

    def measure(library: str, *command: object) -> dict[str, tuple[float, float]]:
        """Seconds and limit of each part of a command, in a process of its own; "whole": of all of them."""
        target, started = options.folder / "parts.json", time.perf_counter()
        program = [sys.executable, "-m", "tests.benchmarks.limits", "--metered"]
        metering = [json.dumps(asdict(limits)), str(target), library]
        status = os.spawnv(os.P_WAIT, sys.executable, [*program, *metering, *map(str, command), "--quiet"])
        seconds = time.perf_counter() - started
        if status not in (0, 1):  # 1: a verdict that is not a pass
            raise SystemExit(f"{command[0]}: exit status {status}")
        parts = {name: (spent, limit) for name, (spent, limit) in json.loads(target.read_text()).items()}
        return parts | {"whole": (seconds, sum(limit for _, limit in parts.values()))}

    def row(command: str, part: str, by_mkl: str, seconds: float, limit: float) -> None:
        cells = command, part, by_mkl, f"{seconds:.1f} s", f"{limit:.1f} s", f"{limit / seconds:.0%}"
        table.append(cells)
        print("\t".join(cells), flush=True)

    def streamed(nbytes: int, name: str, *command: object) -> None:
        row(name, "whole", "", run_measured(*MPU, name, *command, "--quiet")[0], nbytes / limits.disk)

    def computed(label: str, chosen: tuple[str, ...], *command: object) -> None:
        """Rows of a command; "{}" in it stands for the library by which it runs."""
        parts = {library: measure(library, *(str(word).format(library) for word in command)) for library in LIBRARIES}
        for part in ("whole", *chosen):
            totals = {}
            for library, values in parts.items():
                of_part = [value for name, value in values.items() if name.split()[0] == part]
                totals[library] = [sum(column) for column in zip(*of_part, strict=True)]
            if totals[ONEDNN]:
                row(label, part, f"{totals[MKL][0]:.1f} s", *totals[ONEDNN])

    records = [argument for name in LINES for argument in (f"--{name}", files[name])]
    copies, keys, deltas = options.folder / "copies", options.folder / "keys.bin", f"{options.folder}/deltas_{{}}"
    size = limits.nbytes
    streamed(2 * size, "publish", options.model, "--kappa", 0.01, "--copies", 2, "--out", copies, "--keys", keys)
    streamed(size, "verify", copies / "copy_1", "--keys", keys, "--no-logits")
    training = (*records, "--max-steps", options.steps, "--batch-size", PER_STEP[0], "--trust-copy", "--alone")
    whole = f"unlearn, {options.steps} steps of {PER_STEP[0]} + {PER_STEP[1]} records"
    steps = ("check", "measure", "unlearn")
    computed(f"{whole}, float32", steps, "unlearn", copies / "copy_1", *training, "--precision", "float32", "--out",
             f"{deltas}/")  # fmt: skip
    computed(f"{whole}, --precision auto", steps, "unlearn", copies / "copy_2", *training, "--out", f"{deltas}/")
    unlearned, copy = options.folder / "unlearned", options.folder / "round_2/copy_1"
    # Two deltas and the base are read; trained in two precisions, which `aggregate` would refuse.
    streamed(3 * size, "aggregate", deltas.format(ONEDNN), "--keys", keys, "--out", unlearned, "--trust-deltas")
    run_measured(*MPU, "publish", unlearned, "--kappa", 0, "--permanent-noise", 0.01, "--copies", 1, "--out",
                 copy.parent, "--keys", options.folder / "keys_2.bin", "--quiet")  # fmt: skip
    computed("check", (), "check", copy, *records, "--before", copies / "copy_1", "--scoring", "dtype=float32",
             "--allow", "changed-reading")  # fmt: skip
    attacks = ("--attacks", f"quantise,relearn:{options.steps}")
    computed("eval", tuple(dict.fromkeys(PARTS.values())), "eval", unlearned, *records, *attacks, "--scoring",
             "dtype=float32", "--out", options.folder / "eval_{}.json")  # fmt: skip
    computed("rehearse", (), "rehearse", copy, *records, "--unlearn", f"max_steps={options.steps}", "--keys",
             options.folder / "keys_2.bin")  # fmt: skip
    if options.csv:
        with options.csv.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows(table)


if __name__ == "__main__":
    main()
