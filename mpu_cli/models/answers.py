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
        examples = sorted(examples, key=lambda example: len(example.ids))
        self._batches = [pad(examples[i : i + at_once]) for i in range(0, len(examples), at_once)]

    @torch.no_grad()
    def loss(self, model: PreTrainedModel) -> float:
        """Mean −log p per token of the answers, in nats."""
        device, head = next(model.parameters()).device, separate_head(model)
        total, count = 0.0, 0
        for batch in self._batches:
            labels = batch["labels"][:, 1:].to(device)
            inputs = {name: batch[name].to(device) for name in ("input_ids", "attention_mask")}
            with input_of(head) as states:
                logits = model(**inputs, use_cache=False).logits
            answer_mask = labels >= 0
            answer_logits = Logits((logits if head is None else states[0])[:, :-1][answer_mask], head)
            total -= float(answer_logits.log_probs(labels[answer_mask]).double().sum())
            count += len(answer_logits)
        return total / max(1, count)


def read_answers(path: Path, tokenizer: PreTrainedTokenizerBase, columns: str | None = None) -> Answers:
    """The first records of ``path``. Raises MpuError as ``read_records`` does, and if none of them has an answer."""
    examples = Encoding(tokenizer).encode(read_records(path, columns=parse_columns(columns))[:MAX_RECORDS])
    if not any(label >= 0 for example in examples for label in example.labels):
        raise MpuError(f"{path}: no record has an answer")
    return Answers(examples)
