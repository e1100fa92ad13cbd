"""The execution of a training: its precision, compiled layers, several processes, and checkpoints.

Precisions are float64 throughout, float32 with rounded matrix products, and bfloat16 layers.
"""

from __future__ import annotations

import copy
import hmac
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast, broadcast_object_list
from blake3 import blake3
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.files.boundary import read_json_object
from mpu_cli.files.resumption import write_atomically
from mpu_cli.model.network import Head, decoder_layers, separate_head
from mpu_cli.training.optimizers import OPTIMIZERS

_CASTS = (torch.Tensor.to, torch.Tensor.type)
_SOFTMAXES = (
    torch.softmax, torch.Tensor.softmax, torch.nn.functional.softmax,
    torch.log_softmax, torch.Tensor.log_softmax, torch.nn.functional.log_softmax,
)  # fmt: skip


class _KeepFloat64(TorchFunctionMode):
    """Models compute norms and softmaxes in float32, whatever their own dtype. This ignores casts of float64 tensors to
    float32, and keeps their softmaxes in float64."""

    def __torch_function__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            if func in _CASTS or func in _SOFTMAXES:
                args = tuple(torch.float64 if value is torch.float32 else value for value in args)
                kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()}
        return func(*args, **kwargs)


def as_wide_as(dtype: torch.dtype) -> AbstractContextManager[object]:
    """Inside it, norms and softmaxes of a float64 model are in float64 too; any other ``dtype`` changes nothing."""
    return _KeepFloat64() if dtype == torch.float64 else nullcontext()


@contextmanager
def computing_in(precision: str, dtype: torch.dtype) -> Iterator[None]:
    """Inside it, CUDA computes products of float32 matrices as ``precision``, of ``--precision``, says, and float64
    models as ``as_wide_as`` does."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        with as_wide_as(dtype):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def in_precision(model: PreTrainedModel, precision: str) -> PreTrainedModel:
    """``model``, whose layers compute in bfloat16 if ``precision`` is "mixed"; its weights stay as they are."""
    if precision == "mixed":
        for module in model.modules():
            if hasattr(module, "compute_dtype"):  # a layer in 4 bits, which autocast does not know
                module.compute_dtype = torch.bfloat16
        model.forward = torch.autocast(model.device.type, torch.bfloat16)(model.forward)
    return model


# torch.compile for the layers of a model.

# What torch uses.
COMPILER = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")


def check_compiler(device: torch.device) -> None:
    """Raise MpuError if layers cannot be compiled for ``device`` here."""
    if device.type == "cpu" and shutil.which(COMPILER) is None:
        raise MpuError(
            f"--training compile needs a C++ compiler, and there is no {COMPILER}",
            "install one, name another by CXX, or leave it out",
        )


@contextmanager
def compiled_layers(model: torch.nn.Module) -> Iterator[None]:
    """Compile each layer of ``model`` at its first pass inside; the names of its parameters stay."""
    from torch._dynamo.exc import TorchDynamoException

    layers = list(decoder_layers(model))
    for layer in layers:
        layer.compile(dynamic=True)  # batches differ in length
    try:
        yield
    except TorchDynamoException as error:
        # The first line of torch's message names the backend alone; what went wrong follows.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = next((line for line in lines if not line.startswith("backend=")), type(error).__name__)
        raise MpuError(f"--training compile: {reason}", "leave it out") from error
    finally:
        for layer in layers:
            layer._compiled_call_impl = None  # what Module.compile sets; measuring compiles nothing


# Training in several processes: what only the first computes, because the weights may be whole only there.

Value = TypeVar("Value")


def from_first(make: Callable[[], Value]) -> Value:
    """The result of ``make`` in the first process, given to all. Tensors in it have to be on the CPU."""
    state = PartialState()
    if state.num_processes == 1:
        return make()
    object_list = [make() if state.is_main_process else None]
    broadcast_object_list(object_list)
    return object_list[0]  # type: ignore[return-value] # of the first process


# Weights in parts on several processes: which optimisers can train them so, and gathering them again.


def whole_head(model: PreTrainedModel) -> Head | None:
    """A copy of the output head, whole in every process, before the weights are split; None if it is trained, or does
    not alone turn what it reads into logits.

    With it, logits of a batch need not exist together. It is as large as the embeddings: 1 GB at 8B in bfloat16.
    """
    head = model.get_output_embeddings()
    if head is None or any(parameter.requires_grad for parameter in head.parameters()):
        return None
    if not from_first(lambda: separate_head(model) is not None):
        return None
    head_copy = copy.deepcopy(head)
    for tensor in (*head_copy.parameters(), *head_copy.buffers()):
        tensor.data = broadcast(tensor.data.to(PartialState().device), from_process=0)
    return head_copy


def check_sharding(accelerator: Accelerator, optimizer: str) -> None:
    """Raises UsageError if ``whole_parameters`` or the optimiser does not support how the weights are sharded."""
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    if fsdp is not None and fsdp.fsdp_version == 1:
        raise UsageError("FSDP 1 hides which shard belongs to which weight", "set accelerate's fsdp_version to 2")
    if fsdp is not None and OPTIMIZERS[optimizer].whole_matrices:
        raise UsageError(f"{optimizer} needs each matrix whole, but FSDP shards them", "use --optim adamw-blockwise")


def whole_parameters(
    trained: torch.nn.Module, chosen: Callable[[str], bool] = lambda _: True
) -> Iterator[tuple[str, torch.Tensor]]:
    """The ``chosen`` parameters by their own names, each gathered by all processes when its turn comes."""
    from accelerate.utils import extract_model_from_parallel
    from torch.distributed.tensor import DTensor

    for name, parameter in extract_model_from_parallel(trained).named_parameters():
        if not chosen(name):
            continue
        yield name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


# Checkpoints of a training: when they are written, and which one it resumes from.

KEPT_CHECKPOINTS = 2  # the previous one stays until the next is complete
CHECKPOINT_SHARE = 0.05  # of the time at most that goes into writing checkpoints, unless steps are given
SEAL = "mpu-seal.json"  # in a checkpoint: the MAC of its other files


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one training in ``folder``, under the client's ``secret``; ``training`` is its digest.

    Each is sealed with a MAC of its files. One that lies there without was written by somebody else, or not finished:
    its weights would be trained on unseen, and three of its files are pickles.
    """

    folder: Path
    secret: bytes = field(repr=False)
    training: str

    @property
    def name(self) -> str:
        """The name of the training in a log: that of its delta."""
        return self.folder.name.removesuffix(".resume")

    def of_step(self, step: int) -> Path:
        """The path of the checkpoint of ``step``."""
        return self.folder / f"{PREFIX_CHECKPOINT_DIR}-{step}"

    def seal(self, step: int) -> None:
        """Seal the checkpoint of ``step``, which is complete, or is not there because there was no room for it."""
        checkpoint = self.of_step(step)
        if not checkpoint.is_dir():
            return
        write_atomically(checkpoint / SEAL, json.dumps({"hmac-sha256": self._mac(checkpoint)}) + "\n")

    def last(self) -> Path | None:
        """The newest sealed checkpoint."""
        checkpoint = last_checkpoint(self.folder)
        if checkpoint is None:
            return None
        written = read_json_object(checkpoint / SEAL, links=False).get("hmac-sha256")
        if not isinstance(written, str) or not hmac.compare_digest(written.encode(), self._mac(checkpoint).encode()):
            raise MpuError(
                f"{checkpoint}: not a checkpoint that this mpu wrote for this training",
                f"remove {self.folder} to start over",
            )
        return checkpoint

    def _mac(self, checkpoint: Path) -> str:
        digests = []
        for path in sorted(checkpoint.rglob("*")):
            if path.is_symlink():
                raise MpuError(f"{path}: a link in a checkpoint", f"remove {self.folder} to start over")
            if path.is_file() and path.name != SEAL:
                hasher = blake3(max_threads=blake3.AUTO).update_mmap(path)
                digests.append([str(path.relative_to(checkpoint)), hasher.hexdigest()])
        message = json.dumps(["mpu checkpoint", self.training, digests]).encode()
        return hmac.new(self.secret, message, "sha256").hexdigest()


def give_up(checkpoint: Path, nbytes: int, warn: Callable[[str], None]) -> None:
    """Remove a ``checkpoint``, of ``nbytes`` or more, that there was no room for, and say so."""
    shutil.rmtree(checkpoint, ignore_errors=True)
    free = shutil.disk_usage(checkpoint.parent).free
    warn(
        f"{checkpoint}: no room for a checkpoint ({nbytes:,} bytes or more, {free:,} are free); the training goes on "
        "without"
    )


class CheckpointCallback(TrainerCallback):
    """Has the Trainer write a checkpoint after the first step and then as often as CHECKPOINT_SHARE allows, or every
    ``steps`` steps; none after the last, however it is the last, which the result follows. Each is sealed once it is
    complete. If there are ``signals`` to stop, it writes one and ends the training."""

    def __init__(self, steps: int | None, checkpoints: Checkpoints, signals: list[int]):
        self._steps, self._checkpoints, self._signals = steps, checkpoints, signals
        self._last = time.monotonic()  # when the last one was complete
        self._took = 0.0  # seconds that it took

    def on_step_end(self, _: TrainingArguments, state: TrainerState, control: TrainerControl, **__: Any) -> None:
        if state.global_step >= state.max_steps or control.should_training_stop:
            return
        # Processes write together, and stop together.
        is_due, self._signals[:] = from_first(lambda: (self._is_due(state.global_step), self._signals))
        control.should_training_stop = bool(self._signals)
        control.should_save = is_due or control.should_training_stop
        self._began = time.monotonic()

    def on_save(self, _: TrainingArguments, state: TrainerState, __: TrainerControl, **___: Any) -> None:
        from_first(lambda: self._checkpoints.seal(state.global_step))
        self._last = time.monotonic()
        has_room = self._checkpoints.of_step(state.global_step).is_dir()
        self._took = self._last - self._began if has_room else math.inf  # none by time any more

    def _is_due(self, step: int) -> bool:
        if self._steps is not None:
            return step % self._steps == 0
        return time.monotonic() - self._last >= self._took / CHECKPOINT_SHARE


def last_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint of the Trainer in ``folder``: its seal is written last."""
    sealed = [path for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if (path / SEAL).is_file()]
    return max((path for path in sealed if path.name.rpartition("-")[2].isdecimal()), key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    """The number of steps that were done when ``checkpoint`` was written."""
    return int(checkpoint.name.rsplit("-", 1)[1])
