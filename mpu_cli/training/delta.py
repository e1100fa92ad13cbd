"""The change that a training made, written as a delta."""

from __future__ import annotations

import hmac
import json
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from transformers import PreTrainedModel

from mpu_cli.errors import Diverged, MpuError
from mpu_cli.files.reader import NAME, OPTION, Checkpoint
from mpu_cli.files.writer import CheckpointWriter, TensorSpecs
from mpu_cli.model.load import skeleton
from mpu_cli.model.source import Model
from mpu_cli.model.tensors import Names, check_stored, is_trained, pieces_in_files, shape_of
from mpu_cli.options.unlearning import Unlearning
from mpu_cli.training.execution import whole_parameters
from mpu_cli.training.lora import LoraChange


def names_in_files(model: PreTrainedModel, checkpoint: Checkpoint, embeddings: bool) -> Names:
    """The trained parameters: the model's name for each → its pieces in the copy's files. Others are frozen; without
    ``embeddings``, those of tokens and positions and the output head are, too."""
    check_stored(model, checkpoint)
    names = {}
    head = model.get_output_embeddings()
    frozen: set[int] = set()  # ids of parameters
    if not embeddings:
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding) or module is head:
                frozen.update(id(parameter) for parameter in module.parameters())
    for name, parameter in model.named_parameters():
        pieces = pieces_in_files(name, shape_of(parameter), set(checkpoint.tensors), model)
        if is_trained(pieces[0], model) and id(parameter) not in frozen:
            names[name] = pieces
        else:
            parameter.requires_grad_(False)
    return names


class FullChange:
    """The change of every trained weight."""

    kind = "full"

    def __init__(self, names: Names, before: Checkpoint, dtype: torch.dtype):
        self._names, self._before, self._dtype = names, before, dtype

    def trainable_names(self, _: PreTrainedModel) -> Collection[str]:
        """Names of the model's parameters that are trained."""
        return self._names

    def shapes(self, _: PreTrainedModel) -> dict[str, tuple[int, ...]]:
        """The tensors of the delta, by their names."""
        return {piece.file_name: piece.shape for pieces in self._names.values() for piece in pieces}

    def wrap(self, model: PreTrainedModel) -> PreTrainedModel:
        """The model that is trained in place of ``model``."""
        return model

    def tensors(self, trained: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """after − before of every parameter, one at a time; "before" is read again from the copy's files."""
        wide = torch.promote_types(self._dtype, torch.float32)
        for name, parameter in whole_parameters(trained):
            for piece in self._names.get(name, ()):
                after = piece.of(parameter.detach()).cpu().to(wide)
                yield piece.file_name, after - self._before.tensor(piece.file_name).to(self._dtype).to(wide)
                self._before.forget_pages(piece.file_name)

    def norm(self, written: float, _: Path) -> float:
        """The norm of the change, whose tensors have the norm ``written`` in the file."""
        return written


Change = FullChange | LoraChange


def change_of(options: Unlearning, model: PreTrainedModel, checkpoint: Checkpoint, dtype: torch.dtype) -> Change:
    """The change that training ``model``, loaded from ``checkpoint``, will return."""
    names = names_in_files(model, checkpoint, options.train_embeddings)
    if options.lora.is_on:
        per_record = options.privacy.is_on  # Opacus forms gradients in the dtype of inputs
        return LoraChange(names, options.lora, wide_inputs=per_record)
    return FullChange(names, checkpoint, dtype)


def delta_specs(copy: Model, options: Unlearning) -> TensorSpecs:
    """The tensors that a delta of ``copy``, trained in float32, will hold; no weight is read."""
    model = skeleton(copy)
    return stored_specs(change_of(options, model, copy.checkpoint, torch.float32), model, options)


def stored_specs(change: Change, model: PreTrainedModel, options: Unlearning) -> TensorSpecs:
    """The tensors of the delta in the dtype that it is stored in: --delta-dtype, or float32 or wider."""
    wide = NAME[torch.promote_types(model.dtype, torch.float32)]
    dtype = wide if options.delta_dtype is None else OPTION[options.delta_dtype]
    return {name: (dtype, shape) for name, shape in change.shapes(model).items()}


SUMMED_TOGETHER = 1 << 20  # elements that are converted to float64 at a time


def write_changes(changes: Iterator[tuple[str, torch.Tensor]], writer: CheckpointWriter) -> tuple[float, float]:
    """Write the tensors as they arrive; returns the norm over all of them, and how much of it rounding lost."""
    square = lost = 0.0
    for name, change in changes:
        pieces = change.reshape(-1).split(SUMMED_TOGETHER)
        part = math.fsum(float(piece.double().square().sum()) for piece in pieces)
        if not math.isfinite(part):
            raise Diverged(f"{name!r} is")
        square += part
        target = writer.tensor(name)
        target.copy_(change)
        if target.dtype != change.dtype:
            pairs = zip(target.reshape(-1).split(SUMMED_TOGETHER), pieces, strict=True)
            error = math.fsum(float((after.double() - before.double()).square().sum()) for after, before in pairs)
            if not math.isfinite(error):
                raise MpuError(f"{name!r}: the change overflows --delta-dtype", "use bfloat16 or float32")
            lost += error
        writer.forget_pages(name)
    return math.sqrt(square), math.sqrt(lost / square) if square else 0.0


# Tags that show the server whether the copies of a round were trained identically, and nothing else.
#
# A delta carries HMAC-SHA256 values of what it was trained on and how. Their key never leaves the client, so the
# server may guess records but cannot test a guess. Each round has its own key, so tags cannot be compared between
# rounds. Tags that differ under the same key belong to copies that were trained differently.

KEY_BYTES, TAG_BYTES = 32, 16


def training_tag(secret: bytes, run: str, round_: int, facts: Mapping[str, object]) -> dict[str, str]:
    """A tag for each of ``facts``, and under "key" one of the key itself: only tags of the same key can be compared."""
    info = f"mpu training tag {json.dumps([run, round_])}".encode()
    key = HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(secret)
    tags = {}
    for name, value in {"key": None, **facts}.items():
        message = json.dumps([name, value], sort_keys=True, default=str).encode()
        tags[name] = hmac.new(key, message, "sha256").digest()[:TAG_BYTES].hex()
    return tags
