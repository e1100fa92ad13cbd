"""NPO as ``mpu unlearn`` trains it, against a loop that keeps a second model and runs it at every step.

    python -m tests.benchmarks.client 0.1b DIR [cpu|cuda]

Both train in float32 on a CPU and in bfloat16 on a GPU, with AdamW, on the same random tokens, through the epochs of
one round of NPO; asking the frozen copy is paid for. The loop is the usual one: logits of every position, of both
models. Prints tokens a second and peak memory: of the device on a GPU, anonymous resident memory on a CPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from mpu_cli.client.data import IGNORED, Example, pad
from mpu_cli.client.frozen import Reference, freeze
from mpu_cli.client.losses import ALGORITHMS, Scores, score
from mpu_cli.client.training import ExampleSet, Loop, Step, train
from tests.benchmarks.server import run as run_measured
from tests.benchmarks.shapes import make

BATCH, LENGTH, PROMPT, BATCHES = 8, 128, 64, 2
EPOCHS = ALGORITHMS["npo"].epochs
STEPS = EPOCHS * BATCHES
BETA = 0.1


def examples(vocabulary: int, seed: int) -> list[Example]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(3, vocabulary, (BATCH * BATCHES, LENGTH), generator=generator).tolist()
    return [Example(row, [IGNORED] * PROMPT + row[PROMPT:]) for row in rows]


def load(folder: Path, device: str) -> torch.nn.Module:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)


def ours(folder: Path, device: str) -> float:
    """Seconds for all the steps, those of asking the frozen copy included."""
    model = load(folder, device)
    forget, retain = (examples(model.config.vocab_size, seed) for seed in (1, 2))
    steps = [Step(list(range(i, i + BATCH)), list(range(i, i + BATCH))) for i in range(0, BATCH * BATCHES, BATCH)]
    steps *= EPOCHS
    started = time.perf_counter()
    said = freeze(model, forget, "log_probs", layer=-1, batch_size=BATCH)
    sets = {"forget": ExampleSet(forget, said), "retain": ExampleSet(retain, Reference())}
    npo = ALGORITHMS["npo"]
    train(
        model,
        steps,
        sets,
        algorithm=npo,
        settings=npo.settings,
        retain_loss="nll",
        loop=Loop(),
        on_step=lambda *_: None,
    )
    return time.perf_counter() - started


def scores(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Scores:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
    return score(logits, batch["labels"])


def two_models(folder: Path, device: str) -> float:
    """The same with a frozen second model that is run at every step."""
    model, frozen = load(folder, device), load(folder, device)
    forget, retain = (examples(model.config.vocab_size, seed) for seed in (1, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    started = time.perf_counter()
    for i in [*range(0, BATCH * BATCHES, BATCH)] * EPOCHS:
        batches = [{k: v.to(device) for k, v in pad(rows[i : i + BATCH]).items()} for rows in (forget, retain)]
        with torch.no_grad():
            reference = scores(frozen, batches[0]).sequence_log_probs
        ratio = scores(model, batches[0]).sequence_log_probs - reference
        loss = -2 / BETA * logsigmoid(-BETA * ratio).mean() + scores(model, batches[1]).cross_entropy
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - started


def main() -> None:
    name, folder, device = sys.argv[1], Path(sys.argv[2]), (sys.argv[3:] or ["cpu"])[0]
    if name in ("ours", "two_models"):
        seconds = globals()[name](folder, device)
        peak = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else None
        print(json.dumps({"tokens": 2 * BATCH * LENGTH * STEPS / seconds, "peak": peak}))
        return
    base = make(name, folder / "base", dtype="BF16")
    for kind in ("two_models", "ours"):
        command = [sys.executable, "-m", "tests.benchmarks.client", kind, str(base), device]
        told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        peak = told["peak"] or run_measured(*command)[1]
        print(f"{kind:<12} {told['tokens']:9.0f} tokens/s {peak:8.0f} MB")


if __name__ == "__main__":
    main()
