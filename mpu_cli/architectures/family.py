"""A model family as a table: tensors, sizes, and what may invalidate the table.

The names of axes (``axes``) alone determine what a symmetry does, so a new family is a new table, not new code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mpu_cli.architectures.axes import Axis
from mpu_cli.architectures.symmetries import Structure

Config = Mapping[str, Any]
Rule = Callable[[Config, int], Any]  # of a config, whose defaults are filled in, and the number of a layer


SizeSource = str | int | Sequence[str] | Rule  # a config entry, a number, the first entry there, or a rule
Sizes = Mapping[str, SizeSource]


@dataclass(frozen=True)
class Tensor:
    """One parameter. ``when``: the config entry, or the rule, that says whether it exists (None: always).

    A name with ``{e}`` stands for one tensor for each expert. ``layout`` is for tensors that some files hold in
    another arrangement: those of one layout are there, or those of the other. What is not ``trained`` gets no noise
    and is in no delta, but changes places with what it counts.
    """

    name: str
    axes: tuple[Axis, ...]
    when: str | Rule | None = None
    layout: str | None = None
    trained: bool = True


@dataclass(frozen=True)
class Stack:
    """A parameter in memory, of shape (experts, rows, columns), that files hold as a matrix for each expert.

    ``parts``: the names in files of the matrices that lie one below the other in one of the stack. Without ``{e}``,
    the name in files of the whole parameter.
    """

    name: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Family:
    """A model family as a table.

    ``sizes`` maps the names of sizes to their ``Sizes``, ``layer_sizes`` those that differ between layers;
    ``defaults`` are the values that transformers assumes for
    missing entries. ``unless`` lists config entries that can invalidate the table, each with the value for which the
    table holds. ``layer`` is the prefix of a layer's tensors; ``prefix`` may be missing from all names (a checkpoint of
    the bare model). ``heads`` are names of the output layer, of which files hold one. ``buffers`` are name suffixes of
    constants, which are not parameters; ``dead`` are patterns of tensors that the model does not use and that must not
    be copied as they are. ``transposed``: whether linear layers store (inputs, outputs), as Conv1D does.

    Of a wrapper around a language model, ``text_config`` is the config entry that describes that model,
    ``frozen_prefixes`` are prefixes of what is not part of it and is neither changed nor trained. ``renamed`` are
    prefixes that files may have with those in memory; ``ties`` says which configs may tie the head to the embedding,
    "outer", "text" or either, and ``text_tied`` whether that of a text which does not say does.

    Symmetries follow from the rest: ``planes``, ``rotary`` (a rule for how many coordinates of a head RoPE turns in a
    layer; None: all), ``qk_norm`` (as in ``QuarterTurns``, or a rule), ``movable_heads``, ``gated``, ``rms_norm``,
    ``experts`` (a rule: whether a layer has experts), ``groups`` (of experts), ``keys_are_values``, ``reads``
    and ``latent`` (rules for those of ``Structure``). ``note`` is for the list of families.
    """

    model_types: tuple[str, ...]
    sizes: Sizes
    prefix: str
    layer: str
    tensors: tuple[Tensor, ...]
    layer_tensors: tuple[Tensor, ...]
    planes: str | None = "halves"
    rotary: Rule | None = None
    qk_norm: str | Rule | None = None
    movable_heads: bool | Rule = True
    gated: bool = True
    rms_norm: bool = True
    experts: Rule | None = None
    groups: int | str = 1
    layer_sizes: Sizes = field(default_factory=dict)
    keys_are_values: Rule | None = None
    reads: Rule | None = None
    latent: str | Rule | None = None
    heads: tuple[str, ...] = ("lm_head.weight",)
    defaults: Mapping[str, object] = field(default_factory=dict)
    unless: Mapping[str, object] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()
    dead: tuple[str, ...] = ()
    transposed: bool = False
    stacks: tuple[Stack, ...] = ()
    text_config: str | None = None
    ties: tuple[str, ...] = ("outer",)
    text_tied: bool = False
    frozen_prefixes: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    note: str = ""


def as_in_memory(family: Family) -> Family:
    """The table for files with the names that the model has in memory, as FSDP and DeepSpeed save them."""
    return replace(_with_renamed_prefixes(family, family.renamed), renamed=())


def variants_of(family: Family) -> tuple[Family, ...]:
    """``family``, and its table by each of the other names that files may have."""
    in_files = tuple((in_memory, in_file) for in_file, in_memory in family.renamed)
    return (family, as_in_memory(family), _with_renamed_prefixes(family, in_files)) if family.renamed else (family,)


def _with_renamed_prefixes(family: Family, prefixes: tuple[tuple[str, str], ...]) -> Family:
    def replace_prefix(name: str) -> str:
        before, after = next((pair for pair in prefixes if name.startswith(pair[0])), ("", ""))
        return after + name.removeprefix(before)

    return replace(
        family,
        prefix=replace_prefix(family.prefix),
        layer=replace_prefix(family.layer),
        tensors=tuple(replace(tensor, name=replace_prefix(tensor.name)) for tensor in family.tensors),
        heads=tuple(map(replace_prefix, family.heads)),
        frozen_prefixes=tuple(map(replace_prefix, family.frozen_prefixes)),
    )


def describe(layer: Structure) -> str:
    """What a layer allows in the set "all", in words."""
    words = []
    if layer.attention:
        free = "any rotation" if not layer.rotary else f"any angle in {layer.planes}"
        rotated = f"turns by 90° in {layer.planes}, norms moved along" if layer.norm else free
        words.append(f"queries and keys: {rotated}")
        words.append("values: " + ("order and signs" if layer.elementwise else "any rotation"))
        words.append("heads change places" if layer.movable else "heads stay (ALiBi)")
    words.append("neurons: order" + (" and signs" if any(ffn.gated for ffn in layer.ffns) else ""))
    if layer.latent:
        words.append(f"heads: any rotation without RoPE, one angle for all in {layer.latent}; latents: order and signs")
    if layer.grouped or layer.ordered:
        words.append("state-space coordinates: order")
    if layer.groups:
        words.append("experts change places")
    return "; ".join(words)
