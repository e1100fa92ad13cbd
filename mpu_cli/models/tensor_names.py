"""Where the tensors of files are in the model that transformers makes of them: names and arrangements can differ."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from mpu_cli.architectures.family import Family, Stack, as_in_memory
from mpu_cli.architectures.layout import HEAD
from mpu_cli.architectures.wrappers import family_of
from mpu_cli.checkpoint.reader import Checkpoint
from mpu_cli.errors import MpuError
from mpu_cli.models.quantized import shape_of


@dataclass(frozen=True)
class Piece:
    """A tensor of the files, as part of a parameter: all of it or, of a stack, ``rows`` of matrix ``expert``."""

    file_name: str
    shape: tuple[int, ...]
    expert: int | None = None
    rows: tuple[int, int] = (0, 0)

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """This part of ``parameter``, as a view."""
        return parameter if self.expert is None else parameter[self.expert, slice(*self.rows)]

    def with_new_prefix(self, prefix: str, other: str) -> Piece:
        """This piece with ``other`` in place of ``prefix``, if its name begins with that."""
        has_prefix = self.file_name.startswith(prefix)
        return replace(self, file_name=other + self.file_name.removeprefix(prefix)) if has_prefix else self


def family_of_model(model: PreTrainedModel) -> Family | None:
    """The table of ``model``'s family; None if there is none."""
    return family_of(model.config.model_type, model.config.get_text_config().model_type)


Names = dict[str, list[Piece]]  # a model's parameters by name → their pieces in files


def pieces_in_files(name: str, shape: Sequence[int], files: Collection[str], model: PreTrainedModel) -> list[Piece]:
    """The tensors of ``files``, by name, that parameter ``name`` of ``model`` is read from; none if there are none.

    Files of a bare model lack a prefix, some call the output layer by another name, some hold an embedding under the
    name of the head that is tied to it, and those of a mixture may hold a matrix for each expert.
    """
    prefix = f"{model.base_model_prefix}."
    family = family_of_model(model)
    names = [name, *(target for target, source in model.all_tied_weights_keys.items() if source == name)]
    candidates = [[Piece(each, tuple(shape))] for each in names]
    if family:
        if HEAD in names:
            candidates += [[Piece(head, tuple(shape))] for head in family.heads]
        for stack in family.stacks:
            if name.endswith(f".{stack.name}"):
                candidates.append(_of_stack(stack, name.removesuffix(stack.name), shape))
        for in_file, in_memory in family.renamed:
            if any(each.startswith(in_memory) for each in names):
                candidates += [[piece.with_new_prefix(in_memory, in_file) for piece in pieces] for pieces in candidates]
    candidates += [[piece.with_new_prefix(prefix, "") for piece in pieces] for pieces in candidates]
    return next((pieces for pieces in candidates if all(piece.file_name in files for piece in pieces)), [])


def _of_stack(stack: Stack, prefix: str, shape: Sequence[int]) -> list[Piece]:
    if not any("{e}" in part for part in stack.parts):
        return [Piece(prefix + stack.parts[0], tuple(shape))]
    rows = shape[1] // len(stack.parts)
    return [
        Piece(prefix + part.replace("{e}", str(e)), (rows, *shape[2:]), e, (i * rows, (i + 1) * rows))
        for e in range(shape[0])
        for i, part in enumerate(stack.parts)
    ]


def is_trained(piece: Piece, model: PreTrainedModel) -> bool:
    """Whether ``piece`` is part of what is published, trained and returned."""
    family = family_of_model(model)
    if family is None:
        return True
    constant = (tensor.name for tensor in (*family.tensors, *family.layer_tensors) if not tensor.trained)
    frozen_prefixes = (*family.frozen_prefixes, *as_in_memory(family).frozen_prefixes)
    return not piece.file_name.startswith(frozen_prefixes) and not piece.file_name.endswith(tuple(constant))


def check_stored(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Raises MpuError unless each parameter of ``model`` is in the files, in this shape."""
    for name, parameter in model.named_parameters():
        pieces = pieces_in_files(name, shape_of(parameter), checkpoint.tensors, model)
        if not pieces or any(checkpoint.tensors[piece.file_name].shape != piece.shape for piece in pieces):
            raise MpuError(
                f"{checkpoint.path}: transformers trains {name!r}, but these files have no such tensor of that shape"
            )


def in_memory(model: PreTrainedModel, files: Collection[str]) -> dict[str, torch.Tensor]:
    """Each of the tensors that ``files`` name, as a view of a parameter or buffer of ``model``; of what is tied, each
    of its names."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    return {
        piece.file_name: piece.of(tensor)
        for name, tensor in tensors.items()
        for piece in pieces_in_files(name, shape_of(tensor), files, model)
    }


def has_separate_heads(model: PreTrainedModel, checkpoint: Checkpoint) -> bool:
    """Whether the config of ``model`` ties tensors that the files hold with different values: transformers then leaves
    them apart."""
    files = checkpoint.tensors
    shapes = {name: shape_of(tensor) for name, tensor in model.named_parameters(remove_duplicate=False)}
    for pair in model.all_tied_weights_keys.items():
        stored = [_stored_under(name, shapes[name], files, model) for name in pair if name in shapes]
        if len(set(stored)) == 2 and all(stored):
            head, embedding = (checkpoint.tensor(name) for name in stored if name)
            if not torch.equal(head, embedding):
                return True
    return False


def _stored_under(name: str, shape: Sequence[int], files: Collection[str], model: PreTrainedModel) -> str | None:
    pieces = pieces_in_files(name, shape, files, model)
    return pieces[0].file_name if pieces else None
