"""A family applied to one config and one checkpoint's tensor names: the axes, sizes and block of every tensor."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mpu_cli.architectures.axes import CHANNELS, FFN_AXES, MODEL_AXES, Axis, Fused, Repeated, names_of
from mpu_cli.architectures.config_reading import (
    named_as,
    sizes_of_layer,
    sizes_of_model,
    structure_of,
    supported_family,
    tensor_exists,
    with_defaults,
)
from mpu_cli.architectures.family import Config, Family, Tensor
from mpu_cli.architectures.symmetries import (
    EVERY,
    LATENTS,
    SETS,
    Structure,
    Symmetry,
    symmetries_of_layer,
    symmetries_of_model,
)
from mpu_cli.checkpoint.header import FLOATS, TensorInfo
from mpu_cli.checkpoint.reader import quoted_list
from mpu_cli.errors import MpuError, UsageError

# axis → the size that it has (times the size of a head, for those of attention)
_LENGTHS = (
    dict.fromkeys(FFN_AXES, "ffn")
    | {f"s-{axis}": "shared_ffn" for axis in FFN_AXES}
    | {f"e-{axis}": "expert_ffn" for axis in FFN_AXES}
    | dict.fromkeys(MODEL_AXES, "model")
    | dict.fromkeys(CHANNELS, "channels")
    | {f"|{axis}|": axis for axis in LATENTS}
    | {"expert": "experts", "head": "heads", "|head|": "head_dim"}
)
_QUERY_HEADS, _KV_HEADS = ("query", "mixed", "|query|", "|mixed|"), ("key", "value", "|key|")


@dataclass(frozen=True)
class TensorLayout:
    """One tensor of a checkpoint. ``axes`` has one tuple per dimension, of one name or, if fused, several.

    ``chunks``: in how many chunks each dimension is fused, 1 if one name follows the other. ``layer`` is None outside
    the layers, ``expert`` unless the tensor belongs to one expert. A ``constant`` (such as a mask) is not a parameter:
    it gets no noise, and is reordered only if its axes say what it counts.
    """

    name: str
    axes: tuple[tuple[str, ...], ...]
    layer: int | None
    block: str
    constant: bool = False
    chunks: tuple[int, ...] = (1, 1, 1)
    expert: int | None = None


@dataclass(frozen=True)
class Layout:
    """A checkpoint's tensors in block order, and the sizes of its axes and heads.

    ``alias`` is the tensor of a tied head, which only repeats the embedding, if the files contain it. ``bare`` is
    whether the names lack the family's prefix. ``structures``: what decides the symmetries of each layer. ``config``:
    the model's, with defaults filled in. ``layer_sizes``: the sizes in each layer, if they differ.
    """

    family: Family
    sizes: Mapping[str, int]
    tensors: Mapping[str, TensorLayout]
    alias: str | None
    bare: bool
    structures: tuple[Structure, ...] = ()
    config: Config = field(default_factory=dict)
    layer_sizes: tuple[Mapping[str, int], ...] = ()

    def sizes_of(self, layer: int | None) -> Mapping[str, int]:
        """The sizes in a layer, or of the whole model (None)."""
        return self.sizes if layer is None or not self.layer_sizes else self.layer_sizes[layer]

    @property
    def blocks(self) -> dict[str, list[TensorLayout]]:
        blocks: dict[str, list[TensorLayout]] = {}
        for tensor in self.tensors.values():
            blocks.setdefault(tensor.block, []).append(tensor)
        return blocks

    @property
    def parameters(self) -> list[TensorLayout]:
        """The trained tensors, without constants."""
        return [tensor for tensor in self.tensors.values() if not tensor.constant]

    def full_name(self, name: str) -> str:
        """The name that the transformers model uses for tensor ``name`` of these files."""
        if name in self.family.heads and not self.family.text_config:
            return HEAD
        for in_file, in_memory in self.family.renamed:
            if name.startswith(in_file):
                return in_memory + name.removeprefix(in_file)
        return self.family.prefix + name if self.bare and not name.startswith("lm_head.") else name

    def symmetries(self, name: str, layer: int | None = None) -> tuple[Symmetry, ...]:
        """The symmetries in set ``name`` that a layer allows, or the whole model (None).

        Raises UsageError if there is no such set.
        """
        if name not in (*SETS, EVERY):
            raise UsageError(f"unknown symmetries {name!r}", f"choose from {', '.join(SETS)}")
        if layer is None:
            channels = any("channel" in group for tensor in self.tensors.values() for group in tensor.axes)
            return symmetries_of_model(name, self.family.rms_norm, channels)
        return symmetries_of_layer(name, self.structures[layer])


EMBEDDING = (("vocab",), ("channel-vocab",), ("position",))  # axes of the rows of embeddings, and of the output head
HEAD = "lm_head.weight"  # the output layer's name in memory


def layout_of(tensors: Mapping[str, TensorInfo], config: Mapping[str, object], where: str) -> Layout:
    """The layout of the checkpoint with these ``tensors``; every name and shape is checked.

    Raises MpuError if the architecture is not supported or the config does not describe these tensors. ``where``
    names the model in error messages.
    """
    family = named_as(supported_family(config, where), tensors)
    try:
        return _layout(family, tensors, config, where)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:  # a config may hold anything
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise MpuError(f"{where}: config.json does not describe a {config['model_type']} model ({reason})") from error


def expected_tensors(config: Mapping[str, object]) -> dict[str, TensorInfo]:
    """The tensors that files of a model with this config hold, in float32, as its family's table has them.

    For models of which there are no files; of what surrounds a language model, only what writes into it. Raises
    MpuError if the architecture is not supported.
    """
    where = "config"
    family = supported_family(config, where)
    filled = with_defaults(family, config)
    sizes = sizes_of_model(family, filled, where)
    of_layers = tuple(sizes_of_layer(family, filled, sizes, i, where) for i in range(sizes["layers"]))
    try:
        expected = _expected_layouts(family, filled, sizes, of_layers, _layout_there(family, len(of_layers), {}))
    except KeyError as error:
        raise MpuError(f"{where}: does not say how large {error} is") from error
    if _is_tied(family, config, filled, None):
        expected = {name: tensor for name, tensor in expected.items() if name not in family.heads}
    shapes = {name: _shape(tensor, sizes, of_layers) for name, tensor in expected.items()}
    return {name: TensorInfo(name, "F32", shape, Path(), 0) for name, shape in shapes.items()}


def _layout(family: Family, tensors: Mapping[str, TensorInfo], config: Mapping[str, object], where: str) -> Layout:
    filled = with_defaults(family, config)
    sizes = sizes_of_model(family, filled, where)
    bare = not any(name.startswith(family.prefix) for name in tensors)

    def here(name: str) -> str:
        return name.removeprefix(family.prefix) if bare else name

    layers = sizes["layers"]
    if layers > len(tensors):
        raise MpuError(
            f"{where}: config.json specifies {layers} layers, but the weights have only {len(tensors)} tensors"
        )
    of_layers = tuple(sizes_of_layer(family, filled, sizes, i, where) for i in range(layers))
    arrangement = _layout_there(family, layers, tensors)
    apart = any("{e}" in t.name and t.layout in (None, *arrangement) for t in family.layer_tensors)
    if apart and sizes["experts"] > len(tensors):
        raise MpuError(f"{where}: config.json specifies {sizes['experts']} experts, more than there are tensors")
    expected = _expected_layouts(family, filled, sizes, of_layers, arrangement, here)
    head = next((here(name) for name in family.heads if here(name) in tensors), None)
    untied = next((here(name) for name in family.heads if here(name) in expected), None)
    alias = None
    embedding = next(name for name, tensor in expected.items() if tensor.axes[0] == ("vocab",))
    if _is_tied(family, config, filled, head):
        expected.pop(untied or "", None)
        if head and embedding not in tensors:  # the same tensor by the head's name
            expected = _with_separate_block(expected, embedding, head)
        else:
            alias = head
    elif untied and head and head != untied:  # the same tensor by the other name, in its place
        expected = _with_separate_block(expected, untied, head)
    constants = _check_names(family, expected, tensors, alias, where)
    for name, layout in expected.items():
        shape = _shape(layout, sizes, of_layers)
        if tensors[name].shape != shape:
            swapped = sorted(tensors[name].shape) == sorted(shape)
            raise MpuError(
                f"{where}: {name!r} has shape {list(tensors[name].shape)}, but config.json requires {list(shape)}",
                "load the model with transformers and save it again, which arranges its tensors" if swapped else None,
            )
        if tensors[name].dtype not in FLOATS:
            raise MpuError(
                f"{where}: {name!r} is stored as {tensors[name].dtype}, but mpu needs weights that are not quantised "
                f"({', '.join(FLOATS)})"
            )
    for name in constants:
        expected[name] = TensorLayout(name, ((),) * len(tensors[name].shape), None, name, constant=True)
    structures = tuple(structure_of(family, filled, of_layers[i], i, where) for i in range(layers))
    return Layout(family, sizes, expected, alias, bare, structures, filled, of_layers if family.layer_sizes else ())


def _expected_layouts(
    family: Family,
    config: Config,
    sizes: Mapping[str, int],
    of_layers: Sequence[Mapping[str, int]],
    arrangement: Collection[str],
    here: Callable[[str], str] = lambda name: name,
) -> dict[str, TensorLayout]:
    """The tensors of the table by the names that they have ``here``, with alternatives arranged by ``arrangement``."""
    expected: dict[str, TensorLayout] = {}

    def expect(tensor: Tensor, prefix: str, layer: int | None, block: str | None) -> None:
        if (tensor.layout and tensor.layout not in arrangement) or not tensor_exists(tensor, config, layer or 0):
            return
        own_sizes = sizes if layer is None else of_layers[layer]
        axes, chunks = zip(*(_names_and_chunks(axis, own_sizes) for axis in tensor.axes), strict=True)
        for e in range(sizes["experts"]) if "{e}" in tensor.name else (None,):
            name = here(prefix + (tensor.name if e is None else tensor.name.replace("{e}", str(e))))
            block_name = name if block is None or not tensor.trained else here(block)
            expected[name] = TensorLayout(name, axes, layer, block_name, not tensor.trained, chunks, e)

    for tensor in family.tensors:
        expect(tensor, "", None, None)
    for i in range(len(of_layers)):
        prefix = family.layer.format(i=i)
        for tensor in family.layer_tensors:
            expect(tensor, prefix, i, prefix.rstrip("."))
    return expected


def _check_names(
    family: Family, expected: Collection[str], tensors: Collection[str], alias: str | None, where: str
) -> list[str]:
    """Which of ``tensors`` are constants. Raises MpuError if some are dead, missing or unknown."""
    unexpected = [name for name in tensors if name not in expected and not name.startswith(family.frozen_prefixes)]
    if dead := sorted(name for name in unexpected if any(fnmatch.fnmatch(name, pattern) for pattern in family.dead)):
        raise MpuError(
            f"{where}: the weights contain {quoted_list(dead)}, which the model does not use; a copy would give them "
            "away",
            "load the model with transformers and save it again, which leaves them out",
        )
    ends, begins = family.buffers, family.frozen_prefixes
    constants = [n for n in tensors if n not in expected and (n.endswith(ends) or n.startswith(begins))]
    if missing := set(expected) - set(tensors):
        raise MpuError(f"{where}: the weights lack {quoted_list(missing)}, which config.json requires")
    if unknown := set(tensors) - set(expected) - set(constants) - {alias}:
        raise MpuError(f"{where}: the weights contain {quoted_list(unknown)}, which config.json does not describe")
    return constants


def _shape(tensor: TensorLayout, sizes: Mapping[str, int], of_layers: Sequence[Mapping[str, int]]) -> tuple[int, ...]:
    axis_sizes = sizes if tensor.layer is None else of_layers[tensor.layer]
    return tuple(sum(axis_length(axis_sizes, axis) for axis in group) for group in tensor.axes)


def axis_length(sizes: Mapping[str, int], axis: str) -> int:
    """The number of coordinates of ``axis``."""
    if axis in _QUERY_HEADS:
        return sizes["heads"] * sizes["head_dim"]
    if axis in _KV_HEADS:
        return sizes["kv_heads"] * sizes["head_dim"]
    return sizes[_LENGTHS.get(axis, axis)]


def _with_separate_block(expected: Mapping[str, TensorLayout], before: str, name: str) -> dict[str, TensorLayout]:
    """``expected``, in which the tensor ``before`` is a block of its own, called ``name``."""
    tensor = expected[before]
    fresh = TensorLayout(name, tensor.axes, tensor.layer, name, tensor.constant, tensor.chunks)
    return {name if each == before else each: fresh if each == before else layout for each, layout in expected.items()}


def _is_tied(family: Family, config: Mapping[str, object], filled: Config, head: str | None) -> bool:
    """Whether transformers makes the head and the embedding one tensor; ``head``: the name of one that is stored."""
    text = config.get(family.text_config) if family.text_config else None
    if not isinstance(text, dict):
        return bool(filled["tie_word_embeddings"])
    of_text = text.get("tie_word_embeddings")
    if "text" in family.ties and (family.text_tied if of_text is None else of_text):
        return True
    if "outer" not in family.ties:
        return False
    # Where a wrapper's config says nothing, transformers goes by what the files have, too.
    return bool(filled["tie_word_embeddings"]) and not (config.get("tie_word_embeddings") is None and head)


def _names_and_chunks(axis: Axis, sizes: Mapping[str, int]) -> tuple[tuple[str, ...], int]:
    if isinstance(axis, Fused):
        return axis.names, axis.chunks if isinstance(axis.chunks, int) else sizes[axis.chunks]
    return names_of(axis) * (sizes[axis.times] if isinstance(axis, Repeated) else 1), 1


def _layout_there(family: Family, layers: int, tensors: Mapping[str, TensorInfo]) -> set[str]:
    """Of alternative arrangements of tensors the one that these files hold; the first if none is to be seen."""
    alternatives = list(dict.fromkeys(tensor.layout for tensor in family.layer_tensors if tensor.layout))
    for chosen in alternatives:
        markers = {t.name.replace("{e}", "0") for t in family.layer_tensors if t.layout == chosen}
        full = {family.layer.format(i=i) + marker for i in range(layers) for marker in markers}
        if full & set(tensors) or {name.removeprefix(family.prefix) for name in full} & set(tensors):
            return {chosen}
    return set(alternatives[:1])
