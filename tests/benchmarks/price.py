"""What a request costs both parties, computed: docs/data/price.csv.

python -m tests.benchmarks.price [SHAPE …] > docs/data/price.csv

Bytes and memory are those that the product computes for a checkpoint of the shape, of which only the header exists.
Times are operations, 6 for each weight and token of a step (LoRA has no gradients of the weights: 4; gradient
checkpointing computes the forward pass once more: 2) and 2 where records are only scored, at SHARE of the products that
the card's data sheet promises. Steps: as many passes over the records to forget as 60 steps are with 40 records.
"""

from __future__ import annotations

import csv
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from mpu_cli.files.writer import nbytes_of
from mpu_cli.measuring.cost import Work, peak_memory, rows_at_once
from mpu_cli.model.source import Model, open_model
from mpu_cli.options.declare import flat, from_flat
from mpu_cli.options.unlearning import Goal, Lora, Training, Unlearning
from mpu_cli.training.delta import delta_specs
from mpu_cli.training.losses import objective_of
from mpu_cli.training.stopping import EVAL_STEPS, LEAST_HELD_OUT, SCORED_RECORDS
from mpu_cli.wording import in_bytes, in_time
from tests.helpers.shapes import tensors_of, whole_config

SHAPES = ("1b", "8b", "70b")
CARDS = {  # RTX 4090, H100, H200: bytes, and products in bfloat16 per second, by their data sheets
    "24 GB": (24e9, 165e12),
    "80 GB": (80e9, 989e12),
    "141 GB": (141e9, 989e12),
}
SHARE = 0.2
TOKENS = 128  # of a record, half of them its answer
PASSES = 60 * 8 / 40  # over the records to forget: docs/data/steps.csv
REQUESTS = (40, 400)  # records to forget, with twice as many to keep, and as many unseen ones
HEADER = ["model", "sent", "sent back", "memory", "card", "fits", *(f"{n} records" for n in REQUESTS)]
TRAININGS = {"all weights": Lora(), "LoRA": Lora(lora_rank=16)}
SMALLEST = {"gradient_checkpointing": True, "precision": "bfloat16", "micro_batch_size": 1}
SMALLEST_WORDS = "--precision bfloat16 --training gradient_checkpointing,micro_batch_size=1"
WAYS: dict[str, dict[str, object]] = {  # to take less memory, the one that costs least first
    "": {},
    "--training micro_batch_size=8": {"micro_batch_size": 8},
    "--training micro_batch_size=4": {"micro_batch_size": 4},
    "--training micro_batch_size=1": {"micro_batch_size": 1},
    SMALLEST_WORDS: SMALLEST,
    f"--lora quantize=nf4 {SMALLEST_WORDS}": {**SMALLEST, "quantize": "nf4"},  # LoRA alone
}


def header_of(shape: str, folder: Path) -> Model:
    """A model of ``shape`` whose weights are a hole in a file."""
    config = whole_config(shape)
    entries, end = {}, 0
    for name, size in tensors_of(config).items():
        start, end = end, end + 2 * math.prod(size)
        entries[name] = {"dtype": "BF16", "shape": size, "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
    return open_model(str(folder))


def seconds(weights: int, options: Unlearning, records: int, words: str, products: float) -> float:
    """Of a training on ``records`` and of the evaluations on the way, with the options in ``words``."""
    batch = options.training.batch_size
    steps = PASSES * records / batch
    step = batch * (1 + objective_of(options.algo, options.algorithm_options).algorithm.retain_per_forget)
    per_token = (4 if options.lora.lora_rank else 6) + 2 * ("gradient_checkpointing" in words)
    held_out = max(LEAST_HELD_OUT, round(Goal.held_out * 2 * records))
    scores = sum(min(count, SCORED_RECORDS) for count in (records, records, held_out))
    operations = weights * TOKENS * steps * (per_token * step + 2 * scores / EVAL_STEPS)
    return operations / (SHARE * products)


def rows_of(shape: str) -> Iterator[list[str]]:
    """The table's rows for one shape."""
    with tempfile.TemporaryDirectory() as folder:
        model = header_of(shape, Path(folder) / shape)
        weights = sum(info.elements for info in model.checkpoint.tensors.values())
        for name, lora in TRAININGS.items():
            # As --precision auto and a card have it: mixed, a step's records at once.
            options = Unlearning(lora=lora, training=Training(precision="mixed", micro_batch_size=sys.maxsize))
            objective = objective_of(options.algo, options.algorithm_options)
            peaks = {}
            for words, changes in WAYS.items():
                if "quantize" not in changes or lora.lora_rank:
                    changed = from_flat(Unlearning, flat(options) | changes)
                    rows = rows_at_once(changed, objective)
                    work = Work(rows, TOKENS, rows * TOKENS // 2)
                    peaks[words] = peak_memory(model, changed, objective, work).total
            returned = nbytes_of(delta_specs(model, options))
            for card, (room, products) in CARDS.items():
                way = next((words for words, peak in peaks.items() if peak <= room), None)
                fits = "no" if way is None else f"with `{way}`" if way else "yes"
                times = ["–"] * len(REQUESTS)
                if way is not None:
                    times = [in_time(seconds(weights, options, records, way, products)) for records in REQUESTS]
                sizes = map(in_bytes, (2 * weights, returned, peaks[""]))
                yield [f"{shape.upper()}, {name}", *sizes, card, fits, *times]


def main(shapes: Sequence[str]) -> None:
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(HEADER)
    for shape in shapes or SHAPES:
        table.writerows(rows_of(shape))


if __name__ == "__main__":
    main(sys.argv[1:])
