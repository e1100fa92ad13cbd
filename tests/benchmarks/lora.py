"""Peak memory of LoRA training, NPO, in bfloat16 with gradient checkpointing, and a bound for 8B from it.

    python -m tests.benchmarks.lora DIR 0.1b,0.5b,1b [cpu|cuda]

Rank 16 on all linear layers, batches of 4 forget and 4 retain records of 256 tokens, 64 of them answers. What a peak
has beside the weights are adapters with their gradients and moments (parameters of the adapters), the states that
checkpointing keeps (layers × width), the layer that is recomputed (width of its feed-forward part) and logits
(vocabulary). From 1B to 8B none of these grows by more than a factor g (4 from 1B), so that the weights of 8B and g
times the rest bound its peak.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from math import prod
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from mpu_cli.options.unlearning import Lora, Training
from mpu_cli.records.encode import IGNORED, Example
from mpu_cli.training.loop import train
from mpu_cli.training.lora import LoraChange
from mpu_cli.training.losses import ALGORITHMS, Objective
from mpu_cli.training.reference import ExampleSet, freeze
from tests.helpers.measuring import run_measured
from tests.helpers.shapes import SHAPES, make, tensors_of, whole_config

RANK, BATCH, LENGTH, ANSWER = 16, 4, 256, 64


def work(folder: Path, device: str) -> None:
    """Two steps; prints the peak on a GPU."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(3, model.config.vocab_size, (2 * BATCH, LENGTH), generator=generator).tolist()
    examples = [Example(row, [IGNORED] * (LENGTH - ANSWER) + row[-ANSWER:]) for row in rows]
    forget, retain = examples[:BATCH], examples[BATCH:]
    frozen = freeze(model, forget, "log_probs", layer=-1, batch_size=BATCH)
    npo, indices = ALGORITHMS["npo"], list(range(BATCH))
    names: dict = {name: () for name, _ in model.named_parameters()}
    train(
        LoraChange(names, Lora(lora_rank=RANK), wide_inputs=False).wrap(model),
        [{"forget": indices, "retain": indices}] * 2, {"forget": frozen, "retain": ExampleSet(retain)},
        Objective(npo, npo.constants, "nll"), Training(lr=1e-5, gradient_checkpointing=True), on_step=lambda *_: None,
    )  # fmt: skip
    if device == "cuda":
        print(torch.cuda.max_memory_allocated())


def weights(shape: str) -> float:
    """MB of the weights in bfloat16."""
    return 2 * sum(map(prod, tensors_of(whole_config(shape)).values())) / 1e6


def growth(small: str, large: str) -> float:
    """The largest of the ratios of what memory beside the weights is proportional to."""
    sizes = [whole_config(shape) for shape in (small, large)]
    adapters = [
        sum(RANK * sum(size) for name, size in tensors_of(c).items() if len(size) == 2 and "layers" in name)
        for c in sizes
    ]
    checkpointed_states = [c["num_hidden_layers"] * c["hidden_size"] for c in sizes]
    layer = [c["intermediate_size"] for c in sizes]
    return max(b / a for a, b in (adapters, checkpointed_states, layer))


def main() -> None:
    folder, shapes, device = Path(sys.argv[1]), sys.argv[2].split(","), (sys.argv[3:] or ["cpu"])[0]
    if shapes == ["work"]:
        work(folder, device)
        return
    print("| shape | weights | peak | the rest | bound for 8B |")
    print("|---|---|---|---|---|")
    for shape in shapes:
        assert shape in SHAPES
        base = make(shape, folder / shape)
        command = (sys.executable, "-m", "tests.benchmarks.lora", base, "work", device)
        if device == "cuda":
            peak = float(subprocess.run(command, check=True, capture_output=True).stdout.split()[-1]) / 1e6
        else:
            peak = run_measured(*command)[1] * 2**20 / 1e6
        rest = peak - weights(shape)
        bound = weights("8b") + growth(shape, "8b") * rest
        print(f"| {shape} | {weights(shape):,.0f} MB | {peak:,.0f} MB | {rest:,.0f} MB | {bound:,.0f} MB |", flush=True)
        shutil.rmtree(base)


if __name__ == "__main__":
    main()
