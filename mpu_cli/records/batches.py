"""Batches of examples."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpu_cli.records.encoding import IGNORED, Example


def answer_tokens(example: Example) -> int:
    """The number of tokens of ``example`` that are predicted: its labels, except one on the very first token."""
    return sum(label != IGNORED for label in example.labels[1:])


def pad(examples: Sequence[Example]) -> dict[str, torch.Tensor]:
    """A batch padded on the right: input_ids, attention_mask and labels, int64 (batch, longest).

    Pads with id 0: padding is neither attended to nor learned, and a tokenizer's own id may be outside the vocabulary.
    """
    longest = max(len(example.ids) for example in examples)

    def rows(values: Sequence[list[int]], filler: int) -> torch.Tensor:
        return torch.tensor([row + [filler] * (longest - len(row)) for row in values])

    return {
        "input_ids": rows([e.ids for e in examples], 0),
        "attention_mask": rows([[1] * len(e.ids) for e in examples], 0),
        "labels": rows([e.labels for e in examples], IGNORED),
    }
