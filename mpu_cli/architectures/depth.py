"""A model without some of its layers: which tensors are left, and what they are called once the rest is renumbered."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mpu_cli.architectures.layout import Layout
from mpu_cli.errors import UsageError

_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


@dataclass(frozen=True)
class Shallow:
    """``layout``: of the model without the layers. ``names``: the whole model's names of its tensors → its own."""

    layout: Layout
    names: Mapping[str, str]


def parse_layers(text: str) -> tuple[int, ...]:
    """``13-16,20`` as the numbers of layers, counted from 0, ascending. Raises UsageError."""
    layers: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise UsageError(f"--omit-layers {text}: {part.strip()!r} names no layers", "write it as 13-16 or 3,7")
        layers.update(range(first, last + 1))
    return tuple(sorted(layers))


def without_layers(layout: Layout, omitted: Sequence[int]) -> Shallow:
    """``layout`` without the layers ``omitted``, counted from 0. Raises UsageError if it lacks one, or none is left."""
    count = len(layout.structures)
    if not omitted:
        return Shallow(layout, {name: name for name in layout.tensors})
    if max(omitted) >= count:
        raise UsageError(f"--omit-layers: there is no layer {max(omitted)}", f"layers are numbered 0 to {count - 1}")
    kept = [layer for layer in range(count) if layer not in omitted]
    if not kept:
        raise UsageError("--omit-layers: none of the model's layers is left", "leave out fewer")
    prefix = layout.family.layer.removeprefix(layout.family.prefix) if layout.bare else layout.family.layer
    new = {prefix.format(i=layer): prefix.format(i=i) for i, layer in enumerate(kept)}
    gone = tuple(prefix.format(i=layer) for layer in omitted)
    numbers = {layer: i for i, layer in enumerate(kept)}

    def renamed(name: str) -> str:
        own = next((old for old in new if name.startswith(old)), None)
        return name if own is None else new[own] + name.removeprefix(own)

    def block(name: str) -> str:
        return renamed(name + ".").removesuffix(".")  # a layer's block is its prefix without the dot

    names = {name: renamed(name) for name in layout.tensors if not name.startswith(gone)}
    tensors = {
        own: replace(
            layout.tensors[name], name=own, block=block(layout.tensors[name].block),
            layer=None if (layer := layout.tensors[name].layer) is None else numbers[layer],
        )
        for name, own in names.items()
    }  # fmt: skip
    shallow = replace(
        layout,
        sizes={**layout.sizes, "layers": len(kept)},
        tensors=tensors,
        structures=tuple(layout.structures[layer] for layer in kept),
    )
    return Shallow(shallow, names)
