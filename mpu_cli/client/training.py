"""The training loop: transformers' Trainer over a schedule that is fixed before it begins."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.utils.data import Dataset, SequentialSampler
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from mpu_cli.client.data import Example, pad
from mpu_cli.client.losses import Algorithm, Answers, Settings, score
from mpu_cli.client.optimizers import OPTIMIZERS


@dataclass(frozen=True)
class Step:
    """One optimiser step: the forget examples in it, by number, and the retain examples beside them."""

    forget: list[int]
    retain: list[int]


@dataclass(frozen=True)
class Losses:
    """What one step saw: the loss that was lowered, and cross-entropy per answer token on both sets."""

    total: float
    forget: float
    retain: float | None


def schedule(forget: int, retain: int, *, epochs: int, batch_size: int, seed: int) -> list[Step]:
    """All steps of a training, fixed by ``seed``: every copy of a round must see the same ones for noise to cancel.

    Each epoch goes once through the ``forget`` examples in a new order. Retain examples come from one endless
    sequence of orders of all ``retain`` (none if 0), as many in a step as forget examples.
    """
    order = random.Random(seed)
    waiting: list[int] = []
    steps = []
    for _ in range(epochs):
        numbers = order.sample(range(forget), forget)
        for start in range(0, forget, batch_size):
            batch = numbers[start : start + batch_size]
            while retain and len(waiting) < len(batch):
                waiting += order.sample(range(retain), retain)
            steps.append(Step(batch, waiting[: len(batch)] if retain else []))
            waiting = waiting[len(batch) :]
    return steps


class _Batches(Dataset):
    """The schedule's steps as padded batches."""

    def __init__(
        self, steps: Sequence[Step], forget: Sequence[Example], retain: Sequence[Example],
        reference: torch.Tensor | None, pad_id: int,
    ):  # fmt: skip
        self._steps, self._forget, self._retain = steps, forget, retain
        self._reference, self._pad_id = reference, pad_id

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, index: int) -> dict[str, object]:
        step = self._steps[index]
        batch: dict[str, object] = {"forget": pad([self._forget[i] for i in step.forget], self._pad_id)}
        if step.retain:
            batch["retain"] = pad([self._retain[i] for i in step.retain], self._pad_id)
        if self._reference is not None:
            batch["reference"] = self._reference[step.forget]
        return batch


class _UnlearningTrainer(Trainer):
    def __init__(
        self, *, algorithm: Algorithm, settings: Settings, optimizer_name: str, on_step: Callable[[Losses], None],
        **kwargs: object,
    ):  # fmt: skip
        super().__init__(**kwargs)
        self._algorithm, self._settings = algorithm, settings
        self._optimizer_name, self._on_step = optimizer_name, on_step

    def _get_train_sampler(self, *_: object) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)  # the order is the schedule's

    def create_optimizer(self, *_: object) -> torch.optim.Optimizer:
        decayed = set(self.get_decay_parameter_names(self.model))
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for name, p in named if name in decayed], "weight_decay": self.args.weight_decay},
            {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
        ]
        self.optimizer = OPTIMIZERS[self._optimizer_name](groups, lr=self.args.learning_rate)
        return self.optimizer

    def compute_loss(self, model: PreTrainedModel, inputs: dict, return_outputs: bool = False, **_: object):
        forget = answers_of(model, inputs["forget"])
        loss = self._algorithm.gamma * self._algorithm.forget(forget, inputs.get("reference"), self._settings)
        retain = answers_of(model, inputs["retain"]).token_mean_loss if "retain" in inputs else None
        if retain is not None:
            loss = loss + self._algorithm.alpha * retain
        self._on_step(Losses(loss.item(), forget.token_mean_loss.item(), retain.item() if retain is not None else None))
        return (loss, None) if return_outputs else loss


def answers_of(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> Answers:
    """Run the model on a padded batch and score its labels."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
    return score(logits, batch["labels"])


@torch.no_grad()
def sequence_log_probs(
    model: PreTrainedModel, examples: Sequence[Example], batch_size: int, pad_id: int
) -> torch.Tensor:
    """log p of every example's answer under ``model`` as it is, (examples,), on the CPU."""
    model.eval()
    parts = []
    for start in range(0, len(examples), batch_size):
        batch = {k: v.to(model.device) for k, v in pad(examples[start : start + batch_size], pad_id).items()}
        parts.append(answers_of(model, batch).sequence_log_probs.cpu())
    return torch.cat(parts)


def train(
    model: PreTrainedModel,
    steps: Sequence[Step],
    forget: Sequence[Example],
    retain: Sequence[Example],
    *,
    algorithm: Algorithm,
    settings: Settings,
    reference: torch.Tensor | None,
    pad_id: int,
    optimizer: str,
    lr: float,
    weight_decay: float,
    max_grad_norm: float,
    seed: int,
    on_step: Callable[[Losses, int], None],
) -> None:
    """Train ``model`` in place, on the device it is on, through ``steps``, at a constant rate.

    ``on_step`` is told the losses of each step and how many steps there are.
    """
    with tempfile.TemporaryDirectory(prefix="mpu-") as scratch:
        arguments = TrainingArguments(
            output_dir=scratch,
            num_train_epochs=1,
            per_device_train_batch_size=1,  # a schedule step is a batch already
            learning_rate=lr,
            lr_scheduler_type="constant",
            weight_decay=weight_decay,
            max_grad_norm=max_grad_norm,
            seed=seed,
            use_cpu=model.device.type == "cpu",
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
        )
        trainer = _UnlearningTrainer(
            model=model,
            args=arguments,
            train_dataset=_Batches(steps, forget, retain, reference, pad_id),
            data_collator=lambda batches: batches[0],
            algorithm=algorithm,
            settings=settings,
            optimizer_name=optimizer,
            on_step=lambda losses: on_step(losses, len(steps)),
        )
        for callback in (PrinterCallback, ProgressCallback):  # both print to standard output
            trainer.remove_callback(callback)
        trainer.train()
