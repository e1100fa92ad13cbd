"""How likely a model makes the answers of records: the measure that commands report before and after what they do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mpu_cli.errors import MpuError
from mpu_cli.models.logits import Logits, input_of, separate_head
from mpu_cli.records.batches import pad
from mpu_cli.records.encoding import Encoding, Example
from mpu_cli.records.forms import parse_columns
from mpu_cli.records.reading import read_records

AT_ONCE = 8  # examples
MAX_RECORDS = 128  # records of a file: enough to tell a difference


class Answers:
    """Records as tokens, padded in batches of similar length."""

    def __init__(self, examples: Sequence[Example], at_once: int = AT_ONCE):
        by_length = sorted(range(len(examples)), key=lambda i: len(examples[i].ids))
        self._numbers = [by_length[i : i + at_once] for i in range(0, len(examples), at_once)]
        self._batches = [pad([examples[i] for i in numbers]) for numbers in self._numbers]

    def loss(self, model: PreTrainedModel) -> float:
        """Mean −log p per token of the answers, in nats."""
        sums = self._sums(model)
        return sum(total for total, _ in sums) / max(1, sum(count for _, count in sums))

    def losses(self, model: PreTrainedModel) -> list[float]:
        """The same of each record alone, in their order; 0 for one without an answer."""
        return [total / max(1, count) for total, count in self._sums(model)]

    @torch.no_grad()
    def _sums(self, model: PreTrainedModel) -> list[tuple[float, int]]:
        """−log p of each record's answer, and its number of tokens."""
        device, head = next(model.parameters()).device, separate_head(model)
        sums = [(0.0, 0)] * sum(map(len, self._numbers))
        for numbers, batch in zip(self._numbers, self._batches, strict=True):
            labels = batch["labels"][:, 1:].to(device)
            inputs = {name: batch[name].to(device) for name in ("input_ids", "attention_mask")}
            with input_of(head) as states:
                logits = model(**inputs, use_cache=False).logits
            answer_mask = labels >= 0
            answer_logits = Logits((logits if head is None else states[0])[:, :-1][answer_mask], head)
            log_probs = torch.zeros(labels.shape, dtype=torch.float64)
            log_probs[answer_mask.cpu()] = answer_logits.log_probs(labels[answer_mask]).double().cpu()
            totals, counts = (-log_probs.sum(1)).tolist(), answer_mask.sum(1).tolist()
            for number, total, count in zip(numbers, totals, counts, strict=True):
                sums[number] = (total, count)
        return sums


def read_answers(path: Path, tokenizer: PreTrainedTokenizerBase, columns: str | None = None) -> Answers:
    """The first records of ``path``. Raises MpuError as ``read_records`` does, and if none of them has an answer."""
    examples = Encoding(tokenizer).encode(read_records(path, columns=parse_columns(columns))[:MAX_RECORDS])
    if not any(label >= 0 for example in examples for label in example.labels):
        raise MpuError(f"{path}: no record has an answer")
    return Answers(examples)
