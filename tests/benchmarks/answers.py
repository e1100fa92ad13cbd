"""Greedy answers to the questions of records: as `mpu eval` generates them, and with all rows until the last has ended.

    python -m tests.benchmarks.answers MODEL RECORDS [RECORDS …]

Prints the seconds of both, the tokens of the answers, and how many texts are the same.
"""

from __future__ import annotations

import sys
import time

import torch

from mpu_cli.measuring import generation
from mpu_cli.measuring.encoding import encoder_of
from mpu_cli.measuring.generation import answer
from mpu_cli.model.load import limits_of, load
from mpu_cli.model.source import open_model
from mpu_cli.options.unlearning import Prompts
from mpu_cli.records.read import read_records

LIMIT, BATCH = 200, 32  # tokens of an answer, as in OpenUnlearning; records at once


def main(source: str, files: list[str]) -> None:
    model, tokenizer = load(open_model(source), torch.float32, "cpu")
    encoder = encoder_of(tokenizer, Prompts(), None, limits_of(model), "as trained")
    items = encoder.questions([record for file in files for record in read_records(file)])
    texts = []
    for name, part in (("rows that have ended leave", generation.PART), ("all rows stay", LIMIT)):
        generation.PART = part
        started = time.monotonic()
        answers = answer(model, tokenizer, items, [[]] * len(items), limit=LIMIT, batch_size=BATCH)
        texts.append([each.generation for each in answers])
        tokens = sum(len(tokenizer(text).input_ids) for text in texts[-1])
        print(f"{name:<28} {time.monotonic() - started:6.1f} s, {tokens} tokens", flush=True)
    same = sum(one == other for one, other in zip(*texts, strict=True))
    print(f"{same} of {len(items)} answers are the same")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
