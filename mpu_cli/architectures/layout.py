"""A family applied to one config and one checkpoint's tensor names: the axes, sizes and block of every tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mpu_cli.architectures.families import FAMILIES
from mpu_cli.architectures.family import FFN_AXES, MODEL_AXES, SETS, Family, Symmetry
from mpu_cli.checkpoint.header import FLOATS, TensorInfo
from mpu_cli.checkpoint.reader import listed
from mpu_cli.errors import MpuError, UsageError


@dataclass(frozen=True)
class TensorLayout:
    """One tensor of a checkpoint. ``axes`` has one tuple per dimension, of one name or, if fused, several.

    ``layer`` is None outside the layers. A ``constant`` (such as a mask) is not a parameter and is left untouched.
    """

    name: str
    axes: tuple[tuple[str, ...], ...]
    layer: int | None
    block: str
    constant: bool = False


@dataclass(frozen=True)
class Layout:
    """A checkpoint's tensors in block order, and the sizes of its axes and heads.

    ``alias`` is the tensor of a tied head, which only repeats the embedding, if the files contain it. ``bare`` is
    whether the names lack the family's prefix.
    """

    family: Family
    sizes: Mapping[str, int]
    tensors: Mapping[str, TensorLayout]
    alias: str | None
    bare: bool

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
        return self.family.prefix + name if self.bare and name != self.family.head else name

    def symmetries(self, name: str) -> tuple[Symmetry, ...]:
        """The symmetries in set ``name`` that this family allows. Raises UsageError if there is no such set."""
        if name not in self.family.symmetries:
            raise UsageError(f"unknown symmetries {name!r}", f"choose from {', '.join(SETS)}")
        return self.family.symmetries[name]


def layout_of(tensors: Mapping[str, TensorInfo], config: Mapping[str, object], where: str) -> Layout:
    """The layout of the checkpoint with these ``tensors``; every name and shape is checked.

    Raises MpuError if the architecture is not supported or the config does not describe these tensors. ``where``
    names the model in error messages.
    """
    family = _family(config, where)
    sizes = _sizes(family, config, where)
    flags = {**family.defaults, **config}
    bare = not any(name.startswith(family.prefix) for name in tensors)

    def here(name: str) -> str:
        return name.removeprefix(family.prefix) if bare else name

    expected: dict[str, TensorLayout] = {}

    def expect(name: str, axes: tuple, layer: int | None, block: str) -> None:
        groups = tuple((axis,) if isinstance(axis, str) else axis for axis in axes)
        expected[here(name)] = TensorLayout(here(name), groups, layer, here(block))

    for tensor in family.tensors:
        expect(tensor.name, tensor.axes, None, tensor.name)
    if sizes["layers"] > len(tensors):
        raise MpuError(
            f"{where}: config.json specifies {sizes['layers']} layers, but the weights have only {len(tensors)} tensors"
        )
    for i in range(sizes["layers"]):
        prefix = family.layer.format(i=i)
        for tensor in family.layer_tensors:
            if tensor.when is None or flags.get(tensor.when):
                expect(prefix + tensor.name, tensor.axes, i, prefix.rstrip("."))
    alias = None
    if flags["tie_word_embeddings"]:
        alias = here(family.head) if here(family.head) in tensors else None
        del expected[here(family.head)]

    constants = {name for name in tensors if name not in expected and name.endswith(family.buffers)}
    if missing := set(expected) - set(tensors):
        raise MpuError(f"{where}: the weights lack {listed(missing)}, which config.json requires")
    if unknown := set(tensors) - set(expected) - constants - {alias}:
        raise MpuError(f"{where}: the weights contain {listed(unknown)}, which config.json does not describe")
    for name, layout in expected.items():
        shape = tuple(sum(axis_length(sizes, axis) for axis in group) for group in layout.axes)
        if tensors[name].shape != shape:
            raise MpuError(
                f"{where}: {name!r} has shape {list(tensors[name].shape)}, but config.json requires {list(shape)}"
            )
        if tensors[name].dtype not in FLOATS:
            raise MpuError(
                f"{where}: {name!r} is stored as {tensors[name].dtype}, but mpu needs weights that are not quantised "
                f"({', '.join(FLOATS)})"
            )
    for name in constants:
        expected[name] = TensorLayout(name, ((),) * len(tensors[name].shape), None, name, constant=True)
    return Layout(family, sizes, expected, alias, bare)


def axis_length(sizes: Mapping[str, int], axis: str) -> int:
    """The number of coordinates of ``axis``."""
    if axis in ("query", "mixed"):
        return sizes["heads"] * sizes["head_dim"]
    if axis in ("key", "value"):
        return sizes["kv_heads"] * sizes["head_dim"]
    if axis in FFN_AXES:
        return sizes["ffn"]
    return sizes["model"] if axis in MODEL_AXES else sizes[axis]


def _family(config: Mapping[str, object], where: str) -> Family:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise MpuError(
            f"{where}: architecture {model_type!r} is not supported (supported: {', '.join(FAMILIES)}), and mpu does "
            "not guess: a transform that does not fit would change what the model computes"
        )
    if "quantization_config" in config:
        raise MpuError(f"{where}: is quantised (quantization_config in config.json)", "use the weights as trained")
    family = FAMILIES[model_type]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for key, value in family.unless.items():
        given = config.get(key, rope.get(key, value) if isinstance(rope, dict) else value)
        if given != value:
            raise MpuError(f"{where}: {model_type} with {key} = {given!r} is not supported (only {value!r})")
    return family


def _sizes(family: Family, config: Mapping[str, object], where: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for size, key in family.sizes.items():
        value = config[key] if config.get(key) is not None else family.defaults.get(key)
        if value is None and size == "kv_heads":
            value = sizes["heads"]
        if value is None and key == "n_inner":
            value = 4 * sizes["model"]
        if value is None and size == "head_dim":
            continue
        if type(value) is not int or value < 1:
            raise MpuError(f"{where}: {key} in config.json is {value!r}, not a positive integer")
        sizes[size] = value
    if "head_dim" not in sizes:
        if sizes["model"] % sizes["heads"]:
            raise MpuError(f"{where}: {sizes['heads']} heads do not divide a width of {sizes['model']} (config.json)")
        sizes["head_dim"] = sizes["model"] // sizes["heads"]
    if sizes["heads"] % sizes["kv_heads"]:
        raise MpuError(f"{where}: {sizes['kv_heads']} KV heads do not divide {sizes['heads']} heads (config.json)")
    if any(getattr(s, "planes", None) for s in family.symmetries["all"]) and sizes["head_dim"] % 2:
        raise MpuError(f"{where}: head size {sizes['head_dim']} does not divide into RoPE planes (config.json)")
    return sizes
