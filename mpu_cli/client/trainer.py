"""The step of a training: transformers' Trainer over micro-batches that are one term of the loss each."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from torch.utils.data import SequentialSampler
from transformers import PreTrainedModel, Trainer

from mpu_cli.client.losses import Objective, TermInputs
from mpu_cli.client.optimizers import make_optimizer
from mpu_cli.client.reference_model import Reference, forward
from mpu_cli.heap import suit_heap_to
from mpu_cli.models.library_errors import out_of_memory
from mpu_cli.models.logits import Head
from mpu_cli.options.unlearning import Training


@dataclass(frozen=True)
class Losses:
    """The losses of one step.

    ``loss`` = γ·``forget_term`` + α·``retain_term`` is minimised; ``forget`` and ``retain`` are cross-entropies per
    answer token. None where no retain set is read.
    """

    loss: float
    forget_term: float
    retain_term: float | None
    forget: float
    retain: float | None


def only(batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    [batch] = batches  # with more than one, part of the schedule would be lost
    return batch


class UnlearningTrainer(Trainer):
    """Trains through ``MicroBatches``, and reports each step. In one process, a micro-batch that memory does not
    suffice for is split, and its step begun again."""

    loss_is_scaled_for_ga = True  # every part is normalised by its whole step

    def __init__(
        self, *, objective: Objective, references: Mapping[str, Reference], training: Training,
        head: Head | None, own_head: Head | None, on_step: Callable[[Losses], None],
        on_memory: Callable[[int], None], **kwargs: object,
    ):  # fmt: skip
        super().__init__(**kwargs)
        self._head, self._own_head = head, own_head
        self._objective, self._references, self._training = objective, references, training
        self._on_step, self._on_memory = on_step, on_memory
        self._sums: dict[str, torch.Tensor] = {}
        self._last: dict[str, float] = {}  # terms of the last step
        self._step: list[int] = []  # the micro-batches of the step that are done
        self._most: int | None = None  # records that memory suffices for; None: any so far
        self._trained = sum(p.nbytes for p in self.model.parameters() if p.requires_grad)

    def _get_train_sampler(self, *_: object) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)  # the schedule sets the order

    def create_optimizer(self, *_: object) -> torch.optim.Optimizer:
        decayed = set(self.get_decay_parameter_names(self.model))
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for name, p in named if name in decayed], "weight_decay": self._training.weight_decay},
            {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
        ]
        self.optimizer = make_optimizer(
            self._training.optim, groups, float(self._training.lr), outside_layers(self.model)
        )
        return self.optimizer

    def _inputs(self, model: torch.nn.Module, name: str, batch: dict[str, Any], layer: int | None) -> TermInputs:
        counts = {key: batch[key] for key in ("step_tokens", "step_examples")}
        scores = forward(model, batch, layer=layer, head=self._head, own_head=self._own_head, **counts)
        return TermInputs(scores, self._references[name].frozen(batch))

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        number = inputs.pop("number")
        loss = None
        try:
            loss = self._pass(model, number, inputs, num_items_in_batch)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error) or self.accelerator.num_processes > 1:
                raise
        while loss is None:  # outside of the handler, which would hold what the pass had computed
            loss = self._with_fewer(model, number, num_items_in_batch)
        self._step.append(number)
        if len(self._step) == self.args.gradient_accumulation_steps:
            self._report()
        return loss

    def _pass(
        self, model: torch.nn.Module, number: int, inputs: dict[str, Any] | None, items: torch.Tensor | int | None
    ) -> torch.Tensor:
        """The gradient of a micro-batch, whole or in pieces that memory suffices for, added to what is there."""
        full_batch = inputs is not None and self._most is None
        pieces = [inputs] if full_batch else self.train_dataset.pieces(number, self._most)
        losses = [super(UnlearningTrainer, self).training_step(model, piece, items) for piece in pieces]
        return torch.stack(losses).sum()

    def _with_fewer(self, model: torch.nn.Module, number: int, items: torch.Tensor | int | None) -> torch.Tensor | None:
        """The step so far, again, with half as many records at once; None if memory does not suffice for those.

        A gradient may have been added in part when memory ran out, so the step begins anew. Raises OutOfMemoryError if
        there was one record.
        """
        largest = max(self.train_dataset.records_of(each) for each in (*self._step, number))
        most = min(self._most or largest, largest) // 2
        if most < 1:
            raise torch.OutOfMemoryError("out of memory with one record")
        self._most, self._sums = most, {}
        model.zero_grad(set_to_none=True)
        gc.collect()
        clear_device_cache()
        self._on_memory(most)
        try:
            return [self._pass(model, each, None, items) for each in (*self._step, number)][-1]
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
        return None

    def compute_loss(self, model: torch.nn.Module, inputs: dict, return_outputs: bool = False, **_: object) -> object:
        if self.args.device.type == "cpu":
            suit_heap_to(self._trained)
        objective, constants = self._objective, self._objective.constants
        if "retain" in inputs:
            name, rate = "retain", constants.alpha
            layer = constants.layer if objective.retain_outputs == "hidden" else None
            part = self._inputs(model, "retain", inputs["retain"], layer)
            term = objective.retain(part)
        else:
            name, rate = "forget", constants.gamma
            layer = constants.layer if objective.algorithm.hidden else None
            part = self._inputs(model, "forget", inputs["forget"], layer)
            other = self._inputs(model, "alternate", inputs["alternate"], None) if "alternate" in inputs else None
            term = objective.algorithm.forget(part, other, constants)
        loss = rate * term
        self._count({"loss": loss, f"{name}_term": term, name: part.scores.cross_entropy})
        # Processes average their gradients, but the parts of a step must add up.
        loss = loss * self.accelerator.num_processes
        return (loss, None) if return_outputs else loss

    def _count(self, losses: dict[str, torch.Tensor]) -> None:
        """Add up the parts of a step over its micro-batches."""
        for name, value in losses.items():
            self._sums[name] = self._sums[name] + value.detach() if name in self._sums else value.detach()

    def _report(self) -> None:
        of_all = self.accelerator.reduce(torch.stack([*self._sums.values()]), "sum")
        sums = dict(zip(self._sums, of_all.tolist(), strict=True))  # at once: a GPU is waited for each time
        self._sums, self._step, self._last = {}, [], sums
        retain_term, retain = sums.get("retain_term"), sums.get("retain")
        self._on_step(Losses(sums["loss"], sums["forget_term"], retain_term, sums["forget"], retain))

    def log(self, logs: dict[str, float], *arguments: object) -> None:
        super().log(logs | self._last, *arguments)


def outside_layers(model: PreTrainedModel) -> list[torch.Tensor]:
    """The weights of all embeddings and of the output head."""
    head = model.get_output_embeddings()
    return [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding) or m is head]
