"""A model at work, for passes over records and attacks on forgetting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mpu_cli.files.reader import OPTION, TORCH
from mpu_cli.measuring.benchmarks.base import Split
from mpu_cli.measuring.encoding import Encoder, Item, TrainedEncoder
from mpu_cli.measuring.generation import Answer, Served, answer
from mpu_cli.measuring.results import Findings, Subject
from mpu_cli.measuring.scoring import Advance, Scorer
from mpu_cli.model.load import load, skeleton, tokenizer_of
from mpu_cli.model.source import Model
from mpu_cli.model.staging import add_delta, with_adapter
from mpu_cli.observer import SILENT
from mpu_cli.options.evaluation import Measuring


@dataclass
class Run:
    """A model at work, with what it reads already encoded. After ``release``, it is loaded again when it is needed."""

    subject: Subject
    options: Measuring
    tokenizer: PreTrainedTokenizerBase
    encoder: Encoder
    findings: Findings
    _model: PreTrainedModel | None
    _reader: Scorer | Served | None = None
    _has_delta: bool = False  # with its delta
    _items: dict[tuple[str, str], list] = field(default_factory=dict)

    @property
    def model(self) -> PreTrainedModel:
        if self._model is None:
            self._model, _ = load_subject(self.subject, self.findings.facts)
        return self._model

    @property
    def reader(self) -> Scorer | Served:
        """The scorer of items: a model in this process, or one that is served."""
        if self._reader is None:
            self._reader = self.subject.endpoint or Scorer(self.model, follows_suite=self.follows_suite)
        return self._reader

    @property
    def batch_size(self) -> int:
        return self.options.scoring.batch_size

    @property
    def follows_suite(self) -> bool:
        """Whether numbers are computed as OpenUnlearning computes them, its bias included."""
        return not isinstance(self.encoder, TrainedEncoder)

    def encoded_items(self, split: Split, part: str = "answer") -> list:
        """The items of ``part`` of every record: an Item each, or a list of them."""
        if (split.name, part) not in self._items:
            self._items[split.name, part] = list(split.encode(self.encoder, part, split))
        return self._items[split.name, part]

    def answer_limit(self, split: Split, items: Sequence[Item]) -> int:
        """The most tokens of a generated answer: --scoring max_new_tokens, or the split's limit."""
        longest = max((len(item.labels) for item in items), default=0) if split.limit_follows_answers else 0
        return self.options.scoring.max_new_tokens or max(split.limit, longest)

    def answers(
        self, split: Split, items: Sequence[Item], drafts: Sequence[list[int]], advance: Advance
    ) -> list[Answer]:
        """The greedy answer to each prompt; ``drafts``, its known first tokens, save work where weights are at hand."""
        limit, endpoint = self.answer_limit(split, items), self.subject.endpoint
        if endpoint:
            return endpoint.answer(
                self.tokenizer, items, limit=limit, stops=split.stops, batch_size=self.batch_size, advance=advance
            )
        return answer(
            self.model, self.tokenizer, items, drafts, limit=limit, stops=split.stops, batch_size=self.batch_size,
            longest=self.encoder.encoding.limits.longest, advance=advance,
        )  # fmt: skip

    def losses(self, items: Sequence[Item]) -> list[float]:
        """Mean loss per token of each item, in nats."""
        scores = self.reader.score([], loss_items=items, batch_size=self.batch_size, advance=SILENT.advance)
        return [score.loss for score in scores]

    def add_delta(self) -> None:
        """Add the delta to the weights, if there is one and they are without it."""
        if self.subject.delta and not self._has_delta:
            add_delta(self.model, self.subject.model, self.subject.delta)
            self._has_delta = True

    def release(self) -> None:
        """Let go of the model, whose weights were changed, or whose room is needed."""
        self._model, self._reader, self._has_delta = None, None, False


def load_subject(subject: Subject, facts: Mapping[str, Any]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model of a measurement with these ``facts``, and its tokenizer; without weights if it is served."""
    if subject.endpoint:
        return skeleton(subject.model), tokenizer_of(subject.model)
    loaded, tokenizer = loaded_for(subject.model, facts)
    return with_adapter(loaded, subject.adapter) if subject.adapter else loaded, tokenizer


def loaded_for(model: Model, facts: Mapping[str, Any]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """``model``, in the dtype, on the device and in as many bits as a measurement with these ``facts`` has it."""
    options = facts["options"]
    dtype, device = TORCH[OPTION[options["dtype"]]], str(facts["hardware"]["device"])
    return load(model, dtype, device, quantize=options.get("quantize"))
