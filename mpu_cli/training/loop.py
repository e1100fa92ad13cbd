"""A training: its steps, fixed in advance; their micro-batches; transformers' Trainer over them."""

from __future__ import annotations

import errno
import gc
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from accelerate.utils.memory import clear_device_cache
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from mpu_cli.errors import MpuError, no_space
from mpu_cli.files.resumption import write_atomically
from mpu_cli.files.transaction import defer_signals
from mpu_cli.heap import suit_heap_to
from mpu_cli.model.device import out_of_memory
from mpu_cli.model.load import is_sharded
from mpu_cli.model.network import Head, Logits, separate_head
from mpu_cli.options.unlearning import Logging, Training
from mpu_cli.records.encode import IGNORED, Example, answer_tokens, pad
from mpu_cli.training.execution import (
    KEPT_CHECKPOINTS,
    CheckpointCallback,
    Checkpoints,
    as_wide_as,
    check_sharding,
    compiled_layers,
    from_first,
    give_up,
    step_of,
    whole_head,
)
from mpu_cli.training.losses import Objective, Outputs, locate_answers
from mpu_cli.training.optimizers import make_optimizer
from mpu_cli.training.rates import records_at_once, remarks_on_warmup
from mpu_cli.training.reference import ExampleSets, forward, length_of_answers
from mpu_cli.wording import counted


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


Step = Mapping[str, list[int]]  # the numbers of its examples, by term
OnStep = Callable[[Losses, int], None]  # with the number of steps in all


def schedule(
    forget: int, retain: int, *, epochs: int, batch_size: int, seed: int, retain_per_forget: int = 1
) -> list[Step]:
    """The numbers of the examples of each step, by term: "forget" and, to go with them, "retain". ``seed`` fixes all
    steps of a training: noise cancels only if every copy of a round sees the same ones.

    Each epoch goes through the ``forget`` examples once, in a new order. Retain examples come from an endless sequence
    of shuffles of all ``retain`` (none if 0), ``retain_per_forget`` for each forget example of a step.
    """
    order = random.Random(seed)
    waiting: list[int] = []
    steps: list[Step] = []
    for _ in range(epochs):
        numbers = order.sample(range(forget), forget)
        for start in range(0, forget, batch_size):
            batch = numbers[start : start + batch_size]
            count = len(batch) * retain_per_forget
            while retain and len(waiting) < count:
                waiting += order.sample(range(retain), retain)
            steps.append({"forget": batch, "retain": waiting[:count] if retain else []})
            waiting = waiting[count:]
    return steps


SETS_OF_TERM = {"forget": ("forget", "alternate"), "retain": ("retain",)}  # the sets that each term reads together


class MicroBatches(Dataset):
    """The data that the loader reads: the steps of a ``schedule``, each split into ``parts`` micro-batches for each of
    the ``passes``, which are the terms that are computed from one pass of the model.

    Examples of one length go together, whatever set they are of, so that little is padded.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        sets: ExampleSets,
        passes: Sequence[Sequence[str]],
        parts: int,
    ):
        self._steps, self._sets, self._passes, self._parts = steps, sets, passes, parts

    def __len__(self) -> int:
        return len(self._steps) * len(self._passes) * self._parts

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The ``number`` of the micro-batch, its rows and, by their names, its ``sets``: how many rows and answer
        tokens are theirs, one set after the other, their frozen outputs and the counts of their step."""
        return {**self._batch(*self._at(index)), "number": index}

    def records_of(self, index: int) -> int:
        """The number of records of a micro-batch."""
        return len(self._at(index)[1])

    def pieces(self, index: int, most: int) -> Iterator[dict[str, Any]]:
        """A micro-batch in batches of at most ``most`` records, whose losses and gradients add up to its own."""
        step, chosen = self._at(index)
        for start in range(0, max(1, len(chosen)), most):  # a filler is one
            yield self._batch(step, chosen[start : start + most])

    def _at(self, index: int) -> tuple[Step, list[tuple[str, int]]]:
        """The numbers of the examples of a micro-batch's whole step, by term, and its own examples: term and number."""
        step_and_pass, part = divmod(index, self._parts)
        step, pass_index = divmod(step_and_pass, len(self._passes))
        of_step = {term: self._steps[step][term] for term in self._passes[pass_index]}
        chosen = [(term, number) for term, numbers in of_step.items() for number in numbers]
        if self._parts > 1:
            chosen.sort(key=self._length)
        start, stop = len(chosen) * part // self._parts, len(chosen) * (part + 1) // self._parts
        return of_step, chosen[start:stop]

    def _names(self, term: str) -> list[str]:
        return [name for name in SETS_OF_TERM[term] if name in self._sets]

    def _length(self, chosen: tuple[str, int]) -> int:
        term, number = chosen
        return max(len(self._sets[name].examples[number].ids) for name in self._names(term))

    def _batch(self, of_step: Step, chosen: Sequence[tuple[str, int]]) -> dict[str, Any]:
        rows: list[Example] = []
        sets: dict[str, dict[str, Any]] = {}
        for term, numbers in of_step.items():
            chosen_numbers = [number for of_term, number in chosen if of_term == term]
            is_filler = not chosen and not rows  # fewer examples than parts: one that adds nothing
            if not chosen_numbers and not is_filler:
                continue
            for name in self._names(term):
                data = self._sets[name]
                examples = [data.examples[i] for i in chosen_numbers or numbers[:1]]
                rows += examples
                sets[name] = {
                    "rows": len(examples),
                    "tokens": 0 if is_filler else sum(map(answer_tokens, examples)),
                    "weights": torch.full((len(examples),), 0.0 if is_filler else 1.0),
                    "step_tokens": sum(answer_tokens(data.examples[i]) for i in numbers),
                    "step_examples": len(numbers),
                    **data.collect(chosen_numbers, like=numbers[:1]),
                }
        padded = pad(rows)
        if not chosen:
            padded["labels"].fill_(IGNORED)
        answers = locate_answers(padded["labels"])  # here, where nothing waits for an accelerator
        return {
            "batch": {
                "input_ids": padded["input_ids"],
                "labels": padded["labels"],
                "answers": answers,
                "length_of_answers": length_of_answers(padded["labels"], answers),
            },
            "sets": sets,
        }


def the_one_item(batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    [batch] = batches  # with more than one, part of the schedule would be lost
    return batch


class UnlearningTrainer(Trainer):
    """Trains through ``MicroBatches``, and reports each step. In one process, a micro-batch that memory does not
    suffice for is split, and its step begun again. ``head``: as ``forward`` takes it; ``planned_steps``: over which the
    rate takes its course."""

    loss_is_scaled_for_ga = True  # every part is normalised by its whole step

    def __init__(
        self, *, objective: Objective, sets: ExampleSets, training: Training,
        head: Head | None, planned_steps: int, on_step: Callable[[Losses], None], warn: Callable[[str], None],
        **kwargs: object,
    ):  # fmt: skip
        super().__init__(**kwargs)
        self._head, self._own_head = head, self.model.get_output_embeddings()
        self._objective, self._sets, self._training = objective, sets, training
        self._on_step, self._warn = on_step, warn
        self._planned_steps = planned_steps
        self._sums: dict[str, torch.Tensor] = {}
        self._last_sums: dict[str, float] = {}  # terms of the last step
        self._done_in_step: list[int] = []  # the micro-batches of the step that are done
        self._record_limit: int | None = None  # records that memory suffices for; None: any so far
        self._trained_bytes = sum(p.nbytes for p in self.model.parameters() if p.requires_grad)

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

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        return super().create_scheduler(max(num_training_steps, self._planned_steps), optimizer)

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
            loss = self._redo_step_with_fewer(model, number, num_items_in_batch)
        self._done_in_step.append(number)
        if len(self._done_in_step) == self.args.gradient_accumulation_steps:
            self._report()
        return loss

    def _pass(
        self, model: torch.nn.Module, number: int, inputs: dict[str, Any] | None, items: torch.Tensor | int | None
    ) -> torch.Tensor:
        """The gradient of a micro-batch, whole or in pieces that memory suffices for, added to what is there."""
        pieces = [inputs] if self._record_limit is None else self.train_dataset.pieces(number, self._record_limit)
        losses = []
        for piece in pieces:
            losses.append(super().training_step(model, piece, items))
        return torch.stack(losses).sum()

    def _redo_step_with_fewer(
        self, model: torch.nn.Module, number: int, items: torch.Tensor | int | None
    ) -> torch.Tensor | None:
        """The step so far, again, with half as many records at once; None if memory does not suffice for those.

        A gradient may have been added in part when memory ran out, so the step begins anew. Raises OutOfMemoryError if
        there was one record.
        """
        largest = max(self.train_dataset.records_of(micro_batch) for micro_batch in (*self._done_in_step, number))
        most = min(self._record_limit or largest, largest) // 2
        if most < 1:
            raise torch.OutOfMemoryError("out of memory with one record")
        self._record_limit, self._sums = most, {}
        model.zero_grad(set_to_none=True)
        gc.collect()
        clear_device_cache()
        self._warn(
            f"out of memory: from here on, {counted(most, 'record')} at once; --training micro_batch_size={most} "
            "begins so"
        )
        try:
            for micro_batch in (*self._done_in_step, number):
                loss = self._pass(model, micro_batch, None, items)
            return loss
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
        return None

    def compute_loss(self, model: torch.nn.Module, inputs: dict, return_outputs: bool = False, **_: object) -> object:
        if self.args.device.type == "cpu":  # again each time: small blocks return to the system only at the call
            suit_heap_to(self._trained_bytes)
        objective, constants = self._objective, self._objective.constants
        scores_of = self._scores(model, inputs)
        losses = []
        if forget := scores_of.get("forget"):
            term = objective.algorithm.forget(forget, scores_of.get("alternate"), constants)
            losses.append(constants.gamma * term)
            self._count({"forget_term": term, "forget": forget.cross_entropy})
        if retain := scores_of.get("retain"):
            term = objective.retain(retain)
            losses.append(self._alpha * term)
            self._count({"retain_term": term, "retain": retain.cross_entropy})
        # Each part is normalised by its whole step, so that the parts add up to the loss of the step.
        loss = torch.stack(losses).sum()
        self._count({"loss": loss})
        # Processes average their gradients, but the parts of a step must add up.
        loss = loss * self.accelerator.num_processes
        return (loss, None) if return_outputs else loss

    def _scores(self, model: torch.nn.Module, inputs: Mapping[str, Any]) -> dict[str, Outputs]:
        """One pass of the model over all rows, divided among the sets."""
        objective = self._objective
        layer = objective.constants.layer if any(map(objective.reads_layer, inputs["sets"])) else None
        together = forward(model, inputs["batch"], layer=layer, head=self._head, own_head=self._own_head)
        scores_of: dict[str, Outputs] = {}
        row = token = 0
        for name, part in inputs["sets"].items():
            tokens = slice(token, token + part["tokens"])
            scores_of[name] = Outputs(
                targets=together.targets[tokens],
                logits=Logits(together.logits.states[tokens], together.logits.head),
                hidden=None if together.hidden is None else together.hidden[tokens],
                rows=together.rows[tokens] - row,
                weights=part["weights"],
                step_tokens=part["step_tokens"],
                step_examples=part["step_examples"],
                reference=self._sets[name].reference(part),
            )
            row, token = row + part["rows"], tokens.stop
        return scores_of

    @property
    def _alpha(self) -> float:
        """The weight of the retain term. Where each step changes it, checkpoints keep it, in the Trainer's state."""
        return self.state.stateful_callbacks.get(DUAL, {}).get("alpha", self._objective.constants.alpha)

    def _count(self, losses: dict[str, torch.Tensor]) -> None:
        """Add up the parts of a step over its micro-batches."""
        for name, value in losses.items():
            self._sums[name] = self._sums.get(name, 0) + value.detach()

    def _report(self) -> None:
        names = ["loss"]
        for term in SETS_OF_TERM:
            if term in self._sets:
                names += [f"{term}_term", term]
        zero = torch.zeros_like(self._sums["loss"])  # of a set that this process had no records of
        of_all = self.accelerator.reduce(torch.stack([self._sums.get(name, zero) for name in names]), "sum")
        sums = dict(zip(names, of_all.tolist(), strict=True))  # at once: a GPU is waited for each time
        self._sums, self._done_in_step, self._last_sums = {}, [], sums
        retain_term, retain = sums.get("retain_term"), sums.get("retain")
        constants = self._objective.constants
        if retain_term is not None and constants.dual_rate:
            # Dual ascent: α is the multiplier of the constraint that the retain term is at most its limit.
            alpha = max(0.0, self._alpha + constants.dual_rate * (retain_term - constants.retain_limit))
            self.state.stateful_callbacks[DUAL] = {"alpha": alpha}
        self._on_step(Losses(sums["loss"], sums["forget_term"], retain_term, sums["forget"], retain))

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Write a checkpoint or, if there is no room for it, warn and train on without one."""
        try:
            super()._save_checkpoint(model, trial)
        except Exception as error:
            if not no_space(error) or self.accelerator.num_processes > 1:
                raise
            folder = Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            give_up(folder, 3 * self._trained_bytes, self._warn)  # it has the weights and AdamW's two moments

    def log(self, logs: dict[str, float], *arguments: object) -> None:
        super().log(logs | self._last_sums, *arguments)


def outside_layers(model: PreTrainedModel) -> list[torch.Tensor]:
    """The weights of all embeddings and of the output head."""
    head = model.get_output_embeddings()
    return [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding) or m is head]


DUAL = "mpu_dual"  # the entry for α in the Trainer's state
NO_LOGGING = Logging()


def drop_repeated_steps(log: Path, name: str, done: int) -> None:
    """Take from the end of ``log`` the steps that the training called ``name`` wrote after its checkpoint of step
    ``done``, from which it resumes: they will be written again."""
    try:
        lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
        end = len(lines)
        if lines and not lines[-1].endswith("\n"):  # cut off when the training was killed
            end -= 1
        entries = [json.loads(line) for line in lines[:end]]
        while end and entries[end - 1].get("training") == name and int(entries[end - 1]["step"]) > done:
            end -= 1
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return  # not there yet, or not a log of ours
    if end < len(lines):
        write_atomically(log, "".join(lines[:end]))


@contextmanager
def seed_training(training: Training) -> Iterator[None]:
    """Seed all generators and, unless ``training`` says otherwise, let CUDA compute the same bits each time.

    Enter it before anything is on the device; MpuError from within for what has no deterministic form there.
    transformers' own full determinism makes every kernel wait as well.
    """
    transformers.set_seed(training.seed)
    if not (training.deterministic and torch.cuda.is_available()):
        yield
        return
    os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")
    before = torch.are_deterministic_algorithms_enabled()
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise MpuError(str(error).splitlines()[0], "use --training deterministic=false") from error
    finally:
        torch.use_deterministic_algorithms(before)


@dataclass
class _StepLog:
    """Writes the losses of each step to ``log``, if there is one, and hands them on."""

    log: FileIO | None  # without a buffer, so that nothing fails later
    name: str | None  # of the training, where it can be resumed
    steps_done: int
    total_steps: int
    on_step: OnStep
    warn: Callable[[str], None]
    started: float = field(default_factory=time.monotonic)

    def __call__(self, losses: Losses) -> None:
        self.steps_done += 1
        if self.log:
            # JSON has neither NaN nor infinity.
            numbers = {k: None if v is None or not math.isfinite(v) else v for k, v in asdict(losses).items()}
            seconds = round(time.monotonic() - self.started, 3)
            entry = {"step": self.steps_done, **numbers, "seconds": seconds}
            if self.name:
                entry["training"] = self.name
            line = json.dumps(entry).encode() + b"\n"
            try:
                # Without a buffer, a disk that fills up takes a part of the line and raises nothing.
                if self.log.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                self.warn(f"{self.log.name}: {error.strerror}; the training goes on without its log")
                self.log = None
        self.on_step(losses, self.total_steps)


def train(
    model: PreTrainedModel,
    steps: Sequence[Step],
    sets: ExampleSets,
    objective: Objective,
    training: Training,
    *,
    logging: Logging = NO_LOGGING,
    checkpoints: Checkpoints | None = None,
    on_step: OnStep,
    warn: Callable[[str], None] = lambda _: None,
    early_stopping: TrainerCallback | None = None,
    planned_steps: int = 0,
) -> torch.nn.Module:
    """Train ``model`` in place, on the device it is on, through ``steps``; returns it as it was wrapped for that.

    ``on_step`` is called with the losses of each step and the number of steps; ``warn``, with a sentence, when memory
    or the disk does not suffice and the training adapts. With ``checkpoints``, keeps some and resumes from the latest.
    ``early_stopping`` may end the training early; ``planned_steps``: where these are the first ones of more. Raises
    OutOfMemoryError if memory does not suffice for one record.
    """
    for remark in remarks_on_warmup(training, len(steps)):
        warn(remark)
    if logging.report_to == "tensorboard":  # otherwise it is deleted with the scratch folder
        os.environ.setdefault("TENSORBOARD_LOGGING_DIR", "runs")
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"  # --precision decides, not the environment
    with ExitStack() as stack:
        if checkpoints:
            folder = checkpoints.folder
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mpu-")))
        main_process = PartialState().is_main_process
        terms = [name for name in SETS_OF_TERM if name in sets]
        passes = objective.passes(terms)
        if all(map(objective.reads_layer, terms)):
            _freeze_unused(model, sets["forget"].examples[0], objective.constants.layer)
        sharded = is_sharded()
        arguments = _arguments(folder, training, logging, model.device, sharded)
        if training.gradient_checkpointing:
            # Recomputation in the backward pass runs outside the modes of the forward pass.
            def contexts() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
                return nullcontext(), as_wide_as(model.dtype)

            model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
        if training.compile:
            stack.enter_context(compiled_layers(model))
        per_process = -(-training.batch_size // arguments.world_size)
        records = max(map(objective.records, passes)) * per_process  # of a step's largest pass, in one process
        accumulation = -(-records // records_at_once(training, model.device, records))
        arguments.gradient_accumulation_steps = accumulation * len(passes)
        resume_from = from_first(checkpoints.last) if checkpoints else None
        done = step_of(resume_from) if resume_from else 0
        # Without a checkpoint, lines of this name may be those of a training that ended.
        if logging.log and main_process and checkpoints and done:
            drop_repeated_steps(logging.log, checkpoints.name, done)
        log = stack.enter_context(logging.log.open("ab", buffering=0)) if logging.log and main_process else None
        record = _StepLog(
            log, checkpoints.name if checkpoints else None, steps_done=done, total_steps=len(steps), on_step=on_step,
            warn=warn,
        )  # fmt: skip
        trainer = UnlearningTrainer(
            model=model,
            args=arguments,
            train_dataset=MicroBatches(steps, sets, passes, accumulation * arguments.world_size),
            data_collator=the_one_item,
            objective=objective,
            sets=sets,
            training=training,
            head=whole_head(model) if sharded else separate_head(model),  # a whole copy if the weights are split
            planned_steps=planned_steps,
            on_step=record,
            warn=warn,
        )
        check_sharding(trainer.accelerator, training.optim)
        for callback in (PrinterCallback, ProgressCallback):  # both print to standard output
            trainer.remove_callback(callback)
        if early_stopping:
            trainer.add_callback(early_stopping)
        if checkpoints:
            signals = stack.enter_context(defer_signals(second_ends=True))
            trainer.add_callback(CheckpointCallback(logging.checkpoint_steps, checkpoints, signals))
        trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
        return trainer.model


def _arguments(
    folder: Path, training: Training, logging: Logging, device: torch.device, sharded: bool
) -> TrainingArguments:
    """The Trainer's arguments, for a model on ``device``."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=1,
        per_device_train_batch_size=1,  # an item of the dataset is already a micro-batch
        train_sampling_strategy="sequential",  # the schedule sets the order
        learning_rate=float(training.lr),
        lr_scheduler_type=training.lr_scheduler,
        warmup_steps=training.warmup_steps,
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        seed=training.seed,
        use_cpu=device.type == "cpu",
        report_to=[logging.report_to] if logging.report_to else [],
        save_strategy="no",  # ``CheckpointCallback`` decides
        save_total_limit=KEPT_CHECKPOINTS,
        logging_strategy="steps" if logging.report_to else "no",
        logging_steps=1,
        logging_nan_inf_filter=False,  # reads each loss, for which a GPU would be waited for
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
        accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": sharded}},
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # the Trainer would split a batch over all visible GPUs
    if arguments.world_size == 1:
        arguments.__dict__["_setup_devices"] = device  # the model's; transformers would take the first GPU
    return arguments


def _freeze_unused(model: PreTrainedModel, example: Example, layer: int) -> None:
    """Exclude from training the parameters after ``layer``, whose output is all that the loss reads.

    They would get no gradient, and with several processes each waits for the gradients of all trained parameters.
    """
    trained = [p for p in model.parameters() if p.requires_grad]

    def gradient_mask() -> list[bool]:
        batch = {name: value.to(model.device) for name, value in pad([example]).items()}
        hidden = forward(model, batch, layer=layer).hidden
        assert hidden is not None
        return [gradient is not None for gradient in torch.autograd.grad(hidden.sum(), trained, allow_unused=True)]

    for parameter, is_used in zip(trained, from_first(gradient_mask), strict=True):
        parameter.requires_grad_(is_used)
