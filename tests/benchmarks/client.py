"""NPO as ``mpu unlearn`` trains it, against a loop that keeps a second model and runs it at every step.

    python -m tests.benchmarks.client 0.1b DIR           # or a model folder in place of the shape
    python -m tests.benchmarks.client 1b DIR --device cuda --dtype bfloat16 --batches 20 --batch-size 32

Both train with AdamW on the same random tokens, through the epochs of one round of NPO; asking the frozen copy is paid
for. The loop is the usual one: logits of every position, of both
models. Prints tokens a second and peak memory: of the device on a GPU, anonymous resident memory on a CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from mpu_cli.options.unlearning import Training
from mpu_cli.records.encode import IGNORED, Example, pad
from mpu_cli.training.loop import train
from mpu_cli.training.losses import ALGORITHMS, Objective, Outputs, score
from mpu_cli.training.reference import ExampleSet, freeze
from tests.helpers.measuring import run_measured
from tests.helpers.shapes import make

LENGTH, PROMPT = 128, 64
EPOCHS = ALGORITHMS["npo"].epochs
BETA = 0.1


def examples(vocabulary: int, count: int, seed: int) -> list[Example]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(3, vocabulary, (count, LENGTH), generator=generator).tolist()
    return [Example(row, [IGNORED] * PROMPT + row[PROMPT:]) for row in rows]


def load(options: argparse.Namespace) -> torch.nn.Module:
    dtype = getattr(torch, options.dtype)
    return AutoModelForCausalLM.from_pretrained(options.folder / "base", dtype=dtype).to(options.device)


def clock(model: torch.nn.Module) -> float:
    """Seconds; on a GPU once it is awake and all that was asked of it is done."""
    if model.device.type == "cuda":
        with torch.no_grad():
            model(input_ids=torch.ones(1, LENGTH, dtype=torch.long, device=model.device))
        torch.cuda.synchronize()
    return time.perf_counter()


def ours(options: argparse.Namespace) -> float:
    """Seconds for all the steps, those of asking the frozen copy included."""
    model = load(options)
    size, count = options.batch_size, options.batch_size * options.batches
    forget, retain = (examples(model.config.vocab_size, count, seed) for seed in (1, 2))
    batches = [list(range(i, i + size)) for i in range(0, count, size)] * EPOCHS
    steps = [{"forget": batch, "retain": batch} for batch in batches]
    started = clock(model)
    frozen = freeze(model, forget, "log_probs", layer=-1, batch_size=size)
    sets = {"forget": frozen, "retain": ExampleSet(retain)}
    npo = ALGORITHMS["npo"]
    train(model, steps, sets, Objective(npo, npo.constants, "nll"), Training(lr=1e-5), on_step=lambda *_: None)
    return clock(model) - started


def scores(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Outputs:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
    return score(logits, batch["labels"])


def two_models(options: argparse.Namespace) -> float:
    """The same with a frozen second model that is run at every step."""
    model, frozen = load(options), load(options)
    size, count = options.batch_size, options.batch_size * options.batches
    forget, retain = (examples(model.config.vocab_size, count, seed) for seed in (1, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    started = clock(model)
    for i in [*range(0, count, size)] * EPOCHS:
        batches = [{k: v.to(options.device) for k, v in pad(rows[i : i + size]).items()} for rows in (forget, retain)]
        with torch.no_grad():
            reference = scores(frozen, batches[0]).sequence_log_probs
        ratio = scores(model, batches[0]).sequence_log_probs - reference
        loss = -2 / BETA * logsigmoid(-BETA * ratio).mean() + scores(model, batches[1]).cross_entropy
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return clock(model) - started


def main(options: argparse.Namespace) -> None:
    if options.kind:
        seconds = {"ours": ours, "two_models": two_models}[options.kind](options)
        peak = torch.cuda.max_memory_allocated() / 2**20 if options.device == "cuda" else None
        tokens = 2 * options.batch_size * options.batches * EPOCHS * LENGTH
        print(json.dumps({"tokens": tokens / seconds, "peak": peak}))
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    if (options.folder / "base").is_symlink():
        pass  # of an earlier run
    elif Path(options.shape).is_dir():
        (options.folder / "base").symlink_to(Path(options.shape).resolve())
    else:
        make(options.shape, options.folder / "base", dtype="BF16")
    for kind in ("two_models", "ours"):
        command = [sys.executable, "-m", "tests.benchmarks.client", *sys.argv[1:], "--kind", kind]
        with tempfile.TemporaryFile("w+") as output:
            _, anonymous = run_measured(*command, stdout=output)
            output.seek(0)
            report = json.loads(output.read().splitlines()[-1])
        print(f"{kind:<12} {report['tokens']:9.0f} tokens/s {report['peak'] or anonymous:8.0f} MB", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("shape")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batches", type=int, default=2, help="in an epoch, of forget and as many retain records")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    main(parser.parse_args())
