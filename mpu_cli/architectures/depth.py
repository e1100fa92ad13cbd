"""A model without some of its layers: which tensors are left, and what they are called once the rest is renumbered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mpu_cli.architectures.layout import Layout
from mpu_cli.errors import UsageError


@dataclass(frozen=True)
class Shallow:
    """``layout``: of the model without the layers. ``names``: the whole model's names of its tensors → its own."""

    layout: Layout
    names: Mapping[str, str]


def without_layers(layout: Layout, omitted: Sequence[int]) -> Shallow:
    """``layout`` without the layers ``omitted``, counted from 0. Raises UsageError if it lacks one, or none is left."""
    count = len(layout.structures)
    if not omitted:
        return Shallow(layout, {name: name for name in layout.tensors})
    if max(omitted) >= count:
        raise UsageError(f"--omit-layers: there is no layer {max(omitted)}", f"layers are numbered 0 to {count - 1}")
    remaining_layers = [layer for layer in range(count) if layer not in omitted]
    if not remaining_layers:
        raise UsageError("--omit-layers: none of the model's layers is left", "leave out fewer")
    prefix = layout.family.layer.removeprefix(layout.family.prefix) if layout.bare else layout.family.layer
    new = {prefix.format(i=layer): prefix.format(i=i) for i, layer in enumerate(remaining_layers)}
    gone = tuple(prefix.format(i=layer) for layer in omitted)
    numbers = {layer: i for i, layer in enumerate(remaining_layers)}

    def renumbered_name(name: str) -> str:
        old_prefix = next((old for old in new if name.startswith(old)), None)
        return name if old_prefix is None else new[old_prefix] + name.removeprefix(old_prefix)

    def block(name: str) -> str:
        return renumbered_name(name + ".").removesuffix(".")  # a layer's block is its prefix without the dot

    names = {name: renumbered_name(name) for name in layout.tensors if not name.startswith(gone)}
    tensors = {
        new_name: replace(
            layout.tensors[name], name=new_name, block=block(layout.tensors[name].block),
            layer=None if (layer := layout.tensors[name].layer) is None else numbers[layer],
        )
        for name, new_name in names.items()
    }  # fmt: skip
    shallow = replace(
        layout,
        sizes={**layout.sizes, "layers": len(remaining_layers)},
        tensors=tensors,
        structures=tuple(layout.structures[layer] for layer in remaining_layers),
        layer_sizes=tuple(layout.layer_sizes[layer] for layer in remaining_layers) if layout.layer_sizes else (),
    )
    return Shallow(shallow, names)
