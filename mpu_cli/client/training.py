"""The training loop: transformers' Trainer over a schedule that is fixed in advance.

Losses are normalised by the whole step, so their sum over its micro-batches, on one process or several, is the loss of
the step.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from mpu_cli.client.checkpoints import KEPT_CHECKPOINTS, Checkpoints, Saving, step_of
from mpu_cli.client.compiling import compiled_layers
from mpu_cli.client.losses import Objective
from mpu_cli.client.precision import as_wide_as
from mpu_cli.client.processes import from_first
from mpu_cli.client.reference_model import forward
from mpu_cli.client.schedule import READ, ExampleSet, MicroBatches, TrainingStep
from mpu_cli.client.sharding import check_sharding, split_weights, whole_head
from mpu_cli.client.trainer import Losses, UnlearningTrainer, only
from mpu_cli.errors import MpuError
from mpu_cli.models.loading import shards_with_zero_3
from mpu_cli.models.logits import separate_head
from mpu_cli.options.unlearning import Logging, Training
from mpu_cli.records.batches import pad
from mpu_cli.records.encoding import Example
from mpu_cli.resumption import write_atomically

NO_LOGGING = Logging()


def drop_repeated_steps(log: Path, done: int, total: int) -> None:
    """Take from the end of ``log`` the steps that an interrupted training wrote after its last checkpoint, of step
    ``done``: they will be written again. A training that reached its last step, ``total``, is complete."""
    try:
        lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
        numbers = [int(json.loads(line)["step"]) for line in lines]
    except (OSError, ValueError, KeyError, TypeError):
        return  # not there yet, or not a log of ours
    if not numbers or numbers[-1] == total:
        return
    begin = len(numbers) - 1 - numbers[::-1].index(1) if 1 in numbers else 0
    repeated = sum(number > done for number in numbers[begin:])
    if repeated:
        write_atomically(log, "".join(lines[: len(lines) - repeated]))


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
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise MpuError(f"{str(error).splitlines()[0]}", "use --no-deterministic") from error
    finally:
        torch.use_deterministic_algorithms(False)


@dataclass
class _StepLog:
    """Writes the losses of each step to ``log``, if there is one, and hands them on."""

    log: TextIO | None
    steps_done: int
    total_steps: int
    on_step: Callable[[Losses, int], None]
    started: float = field(default_factory=time.monotonic)

    def __call__(self, losses: Losses) -> None:
        self.steps_done += 1
        if self.log:
            numbers = {k: None if v is None or not math.isfinite(v) else v for k, v in asdict(losses).items()}
            seconds = round(time.monotonic() - self.started, 3)
            self.log.write(json.dumps({"step": self.steps_done, **numbers, "seconds": seconds}) + "\n")
            self.log.flush()
        self.on_step(losses, self.total_steps)


def train(
    model: PreTrainedModel,
    steps: Sequence[TrainingStep],
    sets: Mapping[str, ExampleSet],
    objective: Objective,
    training: Training,
    *,
    logging: Logging = NO_LOGGING,
    checkpoints: Checkpoints | None = None,
    on_step: Callable[[Losses, int], None],
    on_memory: Callable[[int], None] = lambda _: None,
) -> torch.nn.Module:
    """Train ``model`` in place, on the device it is on, through ``steps``; returns it as it was wrapped for that.

    The rate is constant after warm-up. ``on_step`` is called with the losses of each step and the number of steps;
    ``on_memory``, when memory does not suffice, with how many records go through the model at once from then on. With a
    place for ``checkpoints``, keeps some there and resumes from the latest.
    """
    if logging.report_to == "tensorboard":  # otherwise it is deleted with the scratch folder
        os.environ.setdefault("TENSORBOARD_LOGGING_DIR", "runs")
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"  # --precision decides, not the environment
    with ExitStack() as stack:
        folder = (
            checkpoints.folder if checkpoints else Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mpu-")))
        )
        main_process = PartialState().is_main_process
        shallow = {"forget": objective.algorithm.hidden, "retain": objective.retain_outputs == "hidden"}
        # A term that uses all weights comes last: processes exchange gradients then, and wait for those of all weights.
        terms = sorted((name for name in READ if name in sets), key=lambda name: not shallow[name])
        if all(shallow[name] for name in terms):
            _fix_unused(model, sets["forget"].examples[0], objective.constants.layer)
        deepspeed = parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
        sharded = parse_flag_from_env("ACCELERATE_USE_FSDP")  # else every GPU holds whole gradients until the last
        arguments = _arguments(folder, training, logging, model.device, sharded)
        if training.gradient_checkpointing:
            # Recomputation in the backward pass runs outside the modes of the forward pass.
            contexts = lambda: (nullcontext(), as_wide_as(model.dtype))  # noqa: E731 (torch requires a function)
            model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
        stack.enter_context(compiled_layers(model) if training.compile else nullcontext())
        per_process = -(-training.batch_size // arguments.world_size)
        accumulation = -(-per_process // (training.micro_batch_size or per_process))
        arguments.gradient_accumulation_steps = accumulation * len(terms)
        begin = from_first(checkpoints.last) if checkpoints else None
        done = step_of(begin) if begin else 0
        if logging.log and main_process and checkpoints:
            drop_repeated_steps(logging.log, done, len(steps))
        log = stack.enter_context(logging.log.open("a", encoding="utf-8")) if logging.log and main_process else None
        record = _StepLog(log, done, len(steps), on_step)
        own_head = model.get_output_embeddings()
        head = whole_head(model) if sharded or deepspeed else separate_head(model)
        if shards_with_zero_3():
            split_weights(model)
        trainer = UnlearningTrainer(
            model=model,
            args=arguments,
            train_dataset=MicroBatches(steps, sets, terms, accumulation * arguments.world_size),
            data_collator=only,
            objective=objective,
            references={name: data.reference for name, data in sets.items()},
            training=training,
            head=head,
            own_head=own_head,
            on_step=record,
            on_memory=on_memory,
        )
        check_sharding(trainer.accelerator, training.optim)
        for callback in (PrinterCallback, ProgressCallback):  # both print to standard output
            trainer.remove_callback(callback)
        if checkpoints:
            trainer.add_callback(Saving(logging.checkpoint_steps, checkpoints))
        trainer.train(resume_from_checkpoint=str(begin) if begin else None)
        return trainer.model


def _arguments(
    folder: Path, training: Training, logging: Logging, device: torch.device, sharded: bool
) -> TrainingArguments:
    """The Trainer's arguments, for a model on ``device``."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=1,
        per_device_train_batch_size=1,  # an item of the dataset is already a micro-batch
        learning_rate=float(training.lr),
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=training.warmup_steps,
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        seed=training.seed,
        use_cpu=device.type == "cpu",
        report_to=[logging.report_to] if logging.report_to else [],
        save_strategy="no",  # ``Saving`` decides
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
        arguments.__dict__["_setup_devices"] = device  # where the model is; transformers would take the first GPU
    return arguments


def _fix_unused(model: PreTrainedModel, example: Example, layer: int) -> None:
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
