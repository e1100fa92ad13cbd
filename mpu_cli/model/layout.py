"""A family applied to one config and one checkpoint's tensor names: the axes, sizes and block of every tensor."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.files.reader import FLOATS, TensorInfo, quoted_list
from mpu_cli.model.family import (
    CHANNELS,
    FFN_AXES,
    GROUPED,
    LATENTS,
    MODEL_AXES,
    ORDERED,
    SETS,
    UNION,
    Axis,
    Config,
    Family,
    Ffn,
    Fused,
    Repeated,
    SizeSource,
    Structure,
    Symmetry,
    Tensor,
    names_of,
    symmetries_of_layer,
    symmetries_of_model,
    variants_of,
)
from mpu_cli.model.wrappers import HEAD, REFUSED, family_of, supported_families

# The facts in a model's config: its family, its sizes, and what decides the symmetries of each layer.

OPTIONAL = ("head_dim", "experts", "expert_ffn", "shared_ffn", "channels")  # sizes that a config may lack


def supported_family(config: Mapping[str, object], where: str) -> Family:
    model_type, text = config.get("model_type"), config.get("text_config")
    text_type = text.get("model_type") if isinstance(text, dict) else None
    family = family_of(model_type, text_type)
    if family is None and (reason := REFUSED.get(str(model_type))):
        raise MpuError(f"{where}: architecture {model_type!r} is not supported: {reason}")
    if family is None:
        inside = f" around {text_type!r}" if str(model_type) in supported_families() else ""
        raise MpuError(
            f"{where}: architecture {model_type!r}{inside} is not supported "
            f"(supported: {', '.join(supported_families())}), and mpu does not guess: a transform "
            "that does not fit would change what the model computes"
        )
    if config.get("quantization_config") is not None:
        raise MpuError(
            f"{where}: is quantised (quantization_config in config.json)",
            "use the weights as trained, or dequantise them: from_pretrained(…, dtype=torch.bfloat16) and "
            "save_pretrained",
        )
    entries = {**config, **text} if isinstance(text, dict) else config
    rope = entries.get("rope_parameters") or entries.get("rope_scaling") or {}
    for key, value in family.unless.items():
        actual = entries.get(key, rope.get(key, value) if isinstance(rope, dict) else value)
        if actual != value:
            raise MpuError(f"{where}: {model_type} with {key} = {actual!r} is not supported (only {value!r})")
    return family


class Architecture:
    """A family applied to one config: the sizes of its axes, which tensors it has, and what decides its symmetries."""

    def __init__(self, family: Family, config: Mapping[str, object], where: str):
        self.family, self._where, self._config_file = family, where, config
        self._config = self._with_defaults(config)
        self.sizes: dict[str, int] = {}
        for size, source in self.family.sizes.items():
            if (value := self._size(size, source, 0)) is not None:
                self.sizes[size] = value
        if "head_dim" not in self.sizes:
            heads, width = self.sizes["heads"], self.sizes["model"]
            if width % heads:
                raise MpuError(f"{where}: {heads} heads do not divide a width of {width} (config.json)")
            self.sizes["head_dim"] = width // heads
        self._check_heads(self.sizes)

    def _with_defaults(self, config: Mapping[str, object]) -> Config:
        """``config`` with the family's defaults, and with what newer configs keep under rope_parameters."""
        family = self.family
        entries = {name: value for name, value in config.items() if value is not None}
        if family.text_config and isinstance(text := config.get(family.text_config), dict):
            # Not tie_word_embeddings: that of the whole stays, and is_tied reads the text's itself.
            text_entries = {
                name: value for name, value in text.items() if value is not None and name != "tie_word_embeddings"
            }
            entries |= {**text_entries, "model_type": config["model_type"]}
        defaults = dict(family.defaults)
        rope = entries.get("rope_parameters")
        if isinstance(rope, dict):  # tables in it are for layers of one type
            defaults |= {name: value for name, value in rope.items() if not isinstance(value, dict)}
        return {**defaults, **entries}

    def _size(self, size: str, source: SizeSource, layer: int) -> int | None:
        """A size, from its source; None if the model has no such thing."""
        key = size
        value: Any = source
        if callable(source):
            value = source(self._config, layer)
        elif not isinstance(source, int):
            keys = (source,) if isinstance(source, str) else tuple(source)
            key = next((name for name in keys if self._config.get(name) is not None), keys[0])
            value = self._config.get(key)
        if value is None and size == "kv_heads":
            value = self.sizes["heads"]
        if value is None and key == "n_inner":  # GPT-2's, for which transformers assumes this
            value = 4 * self.sizes["model"]
        if value is None and (size in OPTIONAL or callable(source)):
            return None
        if type(value) is not int or value < 1:
            raise MpuError(f"{self._where}: {key} in config.json is {value!r}, not a positive integer")
        return value

    def _check_heads(self, sizes: Mapping[str, int]) -> None:
        heads, kv_heads, d = sizes["heads"], sizes["kv_heads"], sizes["head_dim"]
        if heads % kv_heads:
            raise MpuError(f"{self._where}: {kv_heads} KV heads do not divide {heads} heads (config.json)")
        if self.family.planes and self.family.rotary is None and d % 2:
            raise MpuError(f"{self._where}: head size {d} does not divide into RoPE planes (config.json)")

    @cached_property
    def layer_sizes(self) -> tuple[Mapping[str, int], ...]:
        """The sizes in each layer, if they differ; else empty."""
        layers: list[Mapping[str, int]] = []
        for i in range(self.sizes["layers"] if self.family.layer_sizes else 0):
            sizes = dict(self.sizes)
            for size, source in self.family.layer_sizes.items():
                if (value := self._size(size, source, i)) is not None:
                    sizes[size] = value
            self._check_heads(sizes)
            layers.append(sizes)
        return tuple(layers)

    def sizes_of(self, layer: int | None) -> Mapping[str, int]:
        """The sizes in a layer, or of the whole model (None)."""
        return self.sizes if layer is None or not self.layer_sizes else self.layer_sizes[layer]

    def _value(self, rule: Any, layer: int) -> Any:
        return rule(self._config, layer) if callable(rule) else rule

    def has(self, tensor: Tensor, layer: int) -> bool:
        """Whether a layer, or the model, has this tensor of the table."""
        if isinstance(tensor.when, str):
            return bool(self._config.get(tensor.when))
        return tensor.when is None or bool(tensor.when(self._config, layer))

    def structure(self, layer: int) -> Structure:
        family, d = self.family, self.sizes_of(layer)["head_dim"]
        rotary = 0
        if family.planes is not None:
            # Rules read the size of a head from the config, which need not have it.
            rotary = d if family.rotary is None else int(family.rotary({**self._config, "head_dim": d}, layer))
        if not 0 <= rotary <= d or rotary % 2:
            raise MpuError(
                f"{self._where}: RoPE over {rotary} of a head's {d} coordinates does not divide into planes "
                "(config.json)"
            )
        tensors = [tensor for tensor in family.layer_tensors if self.has(tensor, layer)]
        axes = {name for tensor in tensors for axis in tensor.axes for name in names_of(axis)}
        reads = self._value(family.reads, layer)
        # A layer that reads another's keys and values has none itself.
        keys_are_values = "key" in axes and "value" not in axes
        if reads is not None:
            keys_are_values = self.structure(reads).keys_are_values
        norms = {"|head|": "shared", "|query|": "whole"}
        return Structure(
            family.planes,
            rotary,
            next((norm for axis, norm in norms.items() if axis in axes), None),
            movable=bool(self._value(family.movable_heads, layer)),
            ffns=tuple(Ffn(of, family.gated and f"{of}up" in axes) for of in ("", "s-", "e-") if f"{of}ffn" in axes),
            groups=int(self._config.get("n_group") or 1) if "e-ffn" in axes else 0,
            attention="query" in axes,
            elementwise="|mixed|" in axes,
            keys_are_values=keys_are_values,
            reads=reads,
            latent=self._value(family.latent, layer) if "mla-query" in axes else None,
            latents=tuple(axis for axis in LATENTS if axis in axes),
            grouped=tuple(heads for heads in GROUPED if heads.inner in axes),
            ordered=tuple(axis for axis in ORDERED if axis in axes),
        )

    def is_tied(self, head: str | None) -> bool:
        """Whether transformers makes the head and the embedding one tensor; ``head``: the name of one that is
        stored."""
        family, is_tied = self.family, bool(self._config.get("tie_word_embeddings"))
        if not family.ties:
            return False
        text = self._config_file.get(family.text_config) if family.text_config else None
        if not isinstance(text, dict):
            return is_tied
        text_tied = text.get("tie_word_embeddings")
        if "text" in family.ties and (family.text_tied if text_tied is None else text_tied):
            return True
        # Where a wrapper's config says nothing, transformers goes by what the files have, too.
        is_silent = self._config_file.get("tie_word_embeddings") is None
        return "outer" in family.ties and is_tied and not (is_silent and head)

    def arranged_as(self, stored: Collection[str]) -> list[Tensor]:
        """The tensors of a layer as these files hold them: as the Hub's do, unless only memory's names are there."""
        family = self.family

        def are_stored(arranged: Iterable[Tensor]) -> bool:
            suffixes = [tensor.name.replace("{e}", "0") for tensor in arranged]
            names = {family.layer.format(i=i) + suffix for i in range(self.sizes["layers"]) for suffix in suffixes}
            return any(name in stored or name.removeprefix(family.prefix) in stored for name in names)

        in_memory = [tensor for tensor in family.layer_tensors if tensor.parts]
        in_files = [part for tensor in in_memory for part in tensor.in_files()]
        if are_stored(in_memory) and not are_stored(in_files):
            return list(family.layer_tensors)
        return [part for tensor in family.layer_tensors for part in tensor.in_files()]

    def tensors(self, layer_tensors: Iterable[Tensor], here: Callable[[str], str]) -> dict[str, TensorLayout]:
        """The tensors of the table, with these ``layer_tensors``, by the names that they have ``here``."""
        layouts: dict[str, TensorLayout] = {}

        def add(tensor: Tensor, prefix: str, layer: int | None) -> None:
            if not self.has(tensor, layer or 0):
                return
            sizes = self.sizes_of(layer)
            axes, chunks = zip(*(_names_and_chunks(axis, sizes) for axis in tensor.axes), strict=True)
            experts: Iterable[int | None] = range(self.sizes["experts"]) if "{e}" in tensor.name else (None,)
            for e in experts:
                name = here(prefix + tensor.name.replace("{e}", str(e)))
                block = here(prefix.rstrip(".")) if prefix and tensor.trained else name
                layouts[name] = TensorLayout(
                    name, axes, layer, block=block, constant=not tensor.trained, chunks=chunks, expert=e
                )

        for tensor in self.family.tensors:
            add(tensor, "", None)
        for i in range(self.sizes["layers"]):
            for tensor in layer_tensors:
                add(tensor, self.family.layer.format(i=i), i)
        return layouts

    def shape(self, tensor: TensorLayout) -> tuple[int, ...]:
        sizes = self.sizes_of(tensor.layer)
        return tuple(sum(axis_length(sizes, axis) for axis in group) for group in tensor.axes)


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
QUERY_HEADS, KV_HEADS = ("query", "mixed", "|query|", "|mixed|"), ("key", "value", "|key|")


@dataclass(frozen=True)
class TensorLayout:
    """One tensor of a checkpoint."""

    name: str
    axes: tuple[tuple[str, ...], ...]  # a tuple per dimension, of one name or, if fused, several
    layer: int | None  # None outside the layers
    block: str
    # not a parameter (such as a mask): gets no noise, and is reordered only if its axes say what it counts
    constant: bool = False
    chunks: tuple[int, ...] = (1, 1, 1)  # in how many chunks each dimension is fused; 1 if one name follows the other
    expert: int | None = None  # None unless the tensor belongs to one expert


@dataclass(frozen=True)
class Layout:
    """A checkpoint's tensors in block order, and the sizes of its axes and heads."""

    family: Family
    sizes: Mapping[str, int]
    tensors: Mapping[str, TensorLayout]
    alias: str | None  # the tensor of a tied head, which only repeats the embedding, if the files contain it
    unprefixed: bool  # whether the names lack the family's prefix
    structures: tuple[Structure, ...]  # of each layer: what decides its symmetries
    sizes_of: Callable[[int | None], Mapping[str, int]]  # in a layer, or of the whole model (None)

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
        return self.family.prefix + name if self.unprefixed and not name.startswith("lm_head.") else name

    def symmetries(self, name: str, layer: int | None = None) -> tuple[Symmetry, ...]:
        """The symmetries in set ``name`` that a layer allows, or the whole model (None)."""
        if name not in (*SETS, UNION):
            raise UsageError(f"unknown symmetries {name!r}", f"choose from {', '.join(SETS)}")
        if layer is None:
            channels = any("channel" in group for tensor in self.tensors.values() for group in tensor.axes)
            return symmetries_of_model(name, self.family.rms_norm, channels)
        return symmetries_of_layer(name, self.structures[layer])


@dataclass(frozen=True)
class Piece:
    """A tensor of the files, as part of a parameter: all of it or, of a stack, ``rows`` of matrix ``expert``."""

    file_name: str
    shape: tuple[int, ...]
    expert: int | None = None
    rows: tuple[int, int] = (0, 0)

    def of(self, parameter: Any) -> Any:
        """This part of ``parameter``, as a view."""
        return parameter if self.expert is None else parameter[self.expert, slice(*self.rows)]

    def with_new_prefix(self, prefix: str, other: str) -> Piece:
        """This piece with ``other`` in place of ``prefix``, if its name begins with that."""
        has_prefix = self.file_name.startswith(prefix)
        return replace(self, file_name=other + self.file_name.removeprefix(prefix)) if has_prefix else self


def pieces_of(family: Family, name: str, shape: Sequence[int]) -> list[Piece]:
    """The tensors that the Hub's files hold in place of parameter ``name``; none if they hold it under its own name."""
    tensor = next((t for t in family.layer_tensors if t.parts and name.endswith(f".{t.name}")), None)
    if tensor is None:
        return []
    prefix = name.removesuffix(tensor.name)
    if "{e}" not in tensor.parts[0]:
        return [Piece(prefix + tensor.parts[0], tuple(shape))]
    rows = shape[1] // len(tensor.parts)
    return [
        Piece(prefix + part.replace("{e}", str(e)), (rows, *shape[2:]), e, (i * rows, (i + 1) * rows))
        for e in range(shape[0])
        for i, part in enumerate(tensor.parts)
    ]


EMBEDDING = (("vocab",), ("channel-vocab",), ("position",))  # axes of the rows of embeddings, and of the output head


def layout_of(tensors: Mapping[str, TensorInfo], config: Mapping[str, object], where: str) -> Layout:
    """The layout of the checkpoint with these ``tensors``; every name and shape is checked.

    Raises MpuError if the architecture is not supported or the config does not describe these tensors. ``where``
    names the model in error messages.
    """
    # By the names in these files: those that files usually have, or those of the model in memory.
    variants = variants_of(supported_family(config, where))
    family = max(variants, key=lambda variant: sum(tensor.name in tensors for tensor in variant.tensors))
    try:
        return _layout(Architecture(family, config, where), tensors, where)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:  # a config may hold anything
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise MpuError(f"{where}: config.json does not describe a {config['model_type']} model ({reason})") from error


def _layout(architecture: Architecture, tensors: Mapping[str, TensorInfo], where: str) -> Layout:
    family, sizes = architecture.family, architecture.sizes
    unprefixed = not any(name.startswith(family.prefix) for name in tensors)

    def here(name: str) -> str:
        return name.removeprefix(family.prefix) if unprefixed else name

    layers = sizes["layers"]
    if layers > len(tensors):
        raise MpuError(
            f"{where}: config.json specifies {layers} layers, but the weights have only {len(tensors)} tensors"
        )
    layer_tensors = architecture.arranged_as(tensors)
    if any("{e}" in t.name for t in layer_tensors) and sizes["experts"] > len(tensors):
        raise MpuError(f"{where}: config.json specifies {sizes['experts']} experts, more than there are tensors")
    expected = architecture.tensors(layer_tensors, here)
    stored_head = next((here(name) for name in family.heads if here(name) in tensors), None)
    expected_head = next((here(name) for name in family.heads if here(name) in expected), None)
    alias = None
    embedding = next(name for name, tensor in expected.items() if tensor.axes[0] == ("vocab",))
    if architecture.is_tied(stored_head):
        expected.pop(expected_head or "", None)
        if stored_head and embedding not in tensors:  # the embedding is stored under the head's name
            expected = _with_new_name(expected, embedding, stored_head)
        else:
            alias = stored_head
    elif expected_head and stored_head and stored_head != expected_head:  # the head is stored under its other name
        expected = _with_new_name(expected, expected_head, stored_head)
    constants = _check_names(family, expected, tensors, alias, where)
    for name, tensor in expected.items():
        shape, info = architecture.shape(tensor), tensors[name]
        if info.shape != shape:
            swapped = sorted(info.shape) == sorted(shape)
            raise MpuError(
                f"{where}: {name!r} has shape {list(info.shape)}, but config.json requires {list(shape)}",
                "load the model with transformers and save it again, which arranges its tensors" if swapped else None,
            )
        if info.dtype not in FLOATS:
            raise MpuError(
                f"{where}: {name!r} is stored as {info.dtype}, but mpu needs weights that are not quantised "
                f"({', '.join(FLOATS)})"
            )
    for name in constants:
        expected[name] = TensorLayout(name, ((),) * len(tensors[name].shape), None, name, constant=True)
    structures = tuple(architecture.structure(i) for i in range(layers))
    return Layout(family, sizes, expected, alias, unprefixed, structures, architecture.sizes_of)


def _check_names(
    family: Family, expected: Collection[str], tensors: Collection[str], alias: str | None, where: str
) -> list[str]:
    """The constants among ``tensors``."""
    others = [name for name in tensors if name not in expected]
    constants = [n for n in others if n.endswith(family.buffers) or n.startswith(family.frozen_prefixes)]
    outside = [name for name in others if not name.startswith(family.frozen_prefixes)]
    if dead := [name for name in outside if any(fnmatch.fnmatch(name, pattern) for pattern in family.dead)]:
        raise MpuError(
            f"{where}: the weights contain {quoted_list(dead)}, which the model does not use; a copy would give them "
            "away",
            "load the model with transformers and save it again, which leaves them out",
        )
    unknown = set(others) - {*constants, alias}
    if missing := set(expected) - set(tensors):
        hint = None
        if unknown:
            names = quoted_list(unknown)
            hint = f"they have {names}: if transformers loads them, its save_pretrained gives the usual names"
        raise MpuError(f"{where}: the weights lack {quoted_list(missing)}, which config.json requires", hint)
    if unknown:
        raise MpuError(f"{where}: the weights contain {quoted_list(unknown)}, which config.json does not describe")
    return constants


def axis_length(sizes: Mapping[str, int], axis: str) -> int:
    """The number of coordinates of ``axis``."""
    if axis in QUERY_HEADS:
        return sizes["heads"] * sizes["head_dim"]
    if axis in KV_HEADS:
        return sizes["kv_heads"] * sizes["head_dim"]
    return sizes[_LENGTHS.get(axis, axis)]


def _with_new_name(expected: Mapping[str, TensorLayout], old: str, new: str) -> dict[str, TensorLayout]:
    """``expected``, with the tensor ``old`` called ``new``, in its place; it is a block of its own."""
    renamed: dict[str, TensorLayout] = {}
    for name, tensor in expected.items():
        if name == old:
            renamed[new] = replace(tensor, name=new, block=new)
        else:
            renamed[name] = tensor
    return renamed


def _names_and_chunks(axis: Axis, sizes: Mapping[str, int]) -> tuple[tuple[str, ...], int]:
    if isinstance(axis, Fused):
        return axis.names, axis.chunks if isinstance(axis.chunks, int) else sizes[axis.chunks]
    if isinstance(axis, Repeated):
        return (axis.name,) * sizes[axis.times], 1
    return names_of(axis), 1
