"""A model family as a table: tensors, sizes, and what may invalidate the table.

The names of axes alone determine what a symmetry does, so a new family is a new table, not new code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

# The names of axes: what each of a tensor's axes counts.
#
# | axis | counts |
# |---|---|
# | model | the residual stream |
# | \|model\| | the residual stream where a norm's weight scales it: permuted with it, but without sign changes |
# | ffn | neurons of the feed-forward layer |
# | gate, up | the same neurons in a gated layer, before the product act(gate)·up |
# | s-ffn, s-gate, s-up | the same of a shared expert, or of a second feed-forward layer |
# | e-ffn, e-gate, e-up | the same inside each expert of a mixture |
# | expert | the experts of a mixture, in the router and in stacked tensors |
# | query | query heads × head size, the coordinates of the query–key dot product |
# | key | KV heads × head size, the same coordinates |
# | value | KV heads × head size, the coordinates of values |
# | mixed | query heads × head size: values after attention, the input of the output projection |
# | \|query\|, \|key\| | query and key where the weight of a norm over all heads scales them |
# | \|head\| | the coordinates of one head where the weight of a norm, the same for all heads, scales them |
# | \|mixed\| | mixed where a gate multiplies it, coordinate by coordinate: reordered along, without sign changes |
# | head | query heads, one number each |
# | q-latent, kv-latent | the latents of latent attention (MLA); \|q-latent\|, \|kv-latent\| where norms scale them |
# | mla-query, mla-key-value | query heads × (coordinates without and with RoPE), × (keys without RoPE, values) |
# | mla-key, mla-mixed | the coordinates of keys with RoPE, which all heads share; query heads × values |
# | ssm-head, ssm, ssm-state | heads of Mamba2, heads × head size, and groups × states (of B and of C) |
# | delta-head, delta-value, delta-key | value heads of a delta net, × head size, and key heads × head size |
# | \|delta\| | the coordinates of one value head, the same for all |
# | m-inner, m-state, m-rank | channels and states of Mamba, and what its time steps are computed from |
# | vocab, position | rows of the embeddings |
# | channel | the channels of embeddings of its own that a layer reads, which all layers order alike |
# | \|channel\| | the same where they are gated, or a norm's weight scales them |
#
# An axis of a tensor may hold several of these, fused: a tuple of names one after the other (GPT-2's ``c_attn``), or
# ``Fused`` in chunks, each with its share of each name (GPT-NeoX: for each head its query, key and value), or one
# name again and again, ``Repeated`` (Gemma 4's embeddings, with the channels of every layer).


@dataclass(frozen=True)
class Fused:
    """Axes fused in ``chunks`` chunks, the name of a size or a number: of each chunk its share of each of ``names``."""

    names: tuple[str, ...]
    chunks: str | int


@dataclass(frozen=True)
class Repeated:
    """An axis that holds ``name`` once for each of ``times``, the name of a size."""

    name: str
    times: str


Axis = str | tuple[str, ...] | Fused | Repeated


def names_of(axis: Axis) -> tuple[str, ...]:
    """The names that an axis is made of."""
    if isinstance(axis, tuple):
        return axis
    if isinstance(axis, str):
        return (axis,)
    return (axis.name,) if isinstance(axis, Repeated) else axis.names


FFN_AXES = ("ffn", "gate", "up")
ATTENTION = ("query", "key", "value", "mixed")
OF_QUERIES, OF_KEYS, OF_HEAD, OF_MIXED = "|query|", "|key|", "|head|", "|mixed|"
MODEL_AXES, CHANNELS = ("model", "|model|"), ("channel", "|channel|")
LAYER_AXES = (
    *FFN_AXES, *(f"s-{axis}" for axis in FFN_AXES), *(f"e-{axis}" for axis in FFN_AXES), "expert",
    *ATTENTION, OF_QUERIES, OF_KEYS, OF_HEAD, OF_MIXED, "head",
    "q-latent", "|q-latent|", "kv-latent", "|kv-latent|", "mla-query", "mla-key-value", "mla-key", "mla-mixed",
    "ssm-head", "ssm", "ssm-state", "delta-head", "delta-value", "delta-key", "|delta|", "m-inner", "m-state", "m-rank",
)  # fmt: skip


# The symmetries that models can have, and those of a layer and of the residual stream.


@dataclass(frozen=True)
class Permutation:
    """One permutation of all ``axes``, which count the same things; those in ``signed`` also share sign changes.

    ``per_expert``: each expert has its own.
    """

    name: str
    axes: tuple[str, ...]
    signed: tuple[str, ...] = ()
    per_expert: bool = False


@dataclass(frozen=True)
class Rotation:
    """One orthogonal matrix per KV head, applied to every head of ``axes`` that belongs to it.

    It turns each plane of two of the first ``rotary`` coordinates, those that RoPE rotates, and is any matrix in O() on
    the rest; with ``planes=None``, on all of them. "halves" pairs i with i + rotary/2, "neighbours" 2i with 2i + 1.
    """

    name: str
    axes: tuple[str, ...]
    planes: str | None
    rotary: int | None = None  # None: all coordinates of a head


@dataclass(frozen=True)
class QuarterTurns:
    """The rotations that are signed permutations: one per KV head, applied to every head of ``axes`` belonging to it.

    In each plane a multiple of 90°; of the coordinates that RoPE leaves alone any order and signs. ``norm`` says how a
    norm scales queries and keys before RoPE: "shared", with one weight for all heads, or "whole", with one for each
    coordinate of every head. Then its weights are reordered along; what "shared" weights have in common, all heads do.
    """

    name: str
    axes: tuple[str, ...]
    planes: str | None
    rotary: int | None = None
    norm: str | None = None


@dataclass(frozen=True)
class HeadPermutation:
    """Permutes whole KV heads together with their query heads, and the query heads within each group."""

    name: str


@dataclass(frozen=True)
class ExpertPermutation:
    """Permutes the experts of a mixture with the rows of its router, within and between ``groups`` of equal size."""

    name: str
    groups: int = 1


@dataclass(frozen=True)
class LatentHeads:
    """The symmetries of the heads of latent attention (DeepSeek-V2, arXiv 2405.04434).

    Each head has a map of the coordinates that RoPE leaves alone, for its queries and keys, and one of its values; all
    heads share one turn of the planes that RoPE turns. Any rotations or, with ``turns``, signed permutations. With
    ``order``, heads change places.
    """

    name: str
    planes: str
    turns: bool
    order: bool


@dataclass(frozen=True)
class GroupedHeads:
    """Orders, without signs, of the heads of a state-space layer, which come in groups.

    Groups change places, heads do within their group, and so do the coordinates of each head (``inner``) and what a
    group has besides heads (``of_group``).
    """

    name: str
    groups: str  # the name of a size
    per_head: str  # an axis with one number per head
    inner: str
    of_group: str
    common: str | None = None  # coordinates of one head, of which all heads have the same order


Symmetry = Permutation | Rotation | QuarterTurns | HeadPermutation | ExpertPermutation | LatentHeads | GroupedHeads

HEADS, EXPERTS = HeadPermutation("heads"), "experts"
GROUPED = (
    GroupedHeads("mamba", groups="ssm-groups", per_head="ssm-head", inner="ssm", of_group="ssm-state"),
    GroupedHeads(
        "delta-net", groups="delta-groups", per_head="delta-head", inner="delta-value", of_group="delta-key",
        common="|delta|",
    ),
)  # fmt: skip
ORDERED = ("m-inner", "m-state", "m-rank")  # axes with an order of their own, and nothing more
LATENTS = ("q-latent", "kv-latent")
QK, VO = ("query", "key"), ("value", "mixed")
UNION = "union"  # the union of all sets, up to which two copies are compared; no publication can choose it


@dataclass(frozen=True)
class Ffn:
    """A feed-forward layer: the prefix of its axes, and whether signs of up cancel against those of the next layer.

    They do if the layer is act(gate)·up, and nothing is added to up.
    """

    prefix: str
    gated: bool

    def permutation(self, signed: bool) -> Permutation:
        axes = tuple(self.prefix + axis for axis in FFN_AXES)
        signs = (self.prefix + "up", self.prefix + "ffn") if signed and self.gated else ()
        name = {"": "ffn", "s-": "shared-ffn", "e-": "expert-ffn"}[self.prefix]
        return Permutation(name, axes, signs, per_expert=self.prefix == "e-")


@dataclass(frozen=True)
class Structure:
    """The features of one layer that decide its symmetries."""

    planes: str | None  # of a head: how RoPE pairs the coordinates that it turns
    rotary: int  # how many coordinates of a head RoPE turns; 0: none
    norm: str | None  # of queries and keys, as in ``QuarterTurns``
    movable: bool  # whether heads can change places (not under ALiBi)
    ffns: tuple[Ffn, ...]  # its feed-forward layers
    groups: int  # of experts; 0 without experts
    attention: bool  # whether it has any
    # whether something works on values coordinate by coordinate, so that they cannot be rotated
    elementwise: bool
    keys_are_values: bool  # whether its keys are its values, too, so that one turn is for both
    # the layer whose keys and values it reads, and whose turns and order of heads it shares; None: its own
    reads: int | None
    latent: str | None  # the planes of RoPE in latent attention; None: it has none
    latents: tuple[str, ...]  # of LATENTS
    grouped: tuple[GroupedHeads, ...]  # of GROUPED
    ordered: tuple[str, ...]  # of ORDERED

    @property
    def shared_symmetries(self) -> tuple[str, ...]:
        """The symmetries that this layer has in common with the one whose keys and values it reads."""
        return () if self.reads is None else ("attention", "qk", "vo", HEADS.name)


@dataclass(frozen=True)
class SymmetrySet:
    """The symmetries that a publication may use.

    ``signs``: permutations change signs, too, where the function allows it; ``beyond_paper``: heads, experts, latents
    and state spaces, which the paper leaves in place; ``quarter_turns``: rotations are signed permutations, which
    elementwise optimisers follow and which round nothing.
    """

    signs: bool
    beyond_paper: bool
    quarter_turns: bool


SYMMETRY_SETS = {
    "signed": SymmetrySet(signs=True, beyond_paper=True, quarter_turns=True),
    "paper": SymmetrySet(signs=False, beyond_paper=False, quarter_turns=False),
    "all": SymmetrySet(signs=False, beyond_paper=True, quarter_turns=False),
    UNION: SymmetrySet(signs=True, beyond_paper=True, quarter_turns=False),
}
SETS = (*(name for name in SYMMETRY_SETS if name != UNION), "none")


def symmetries_of_layer(name: str, layer: Structure) -> tuple[Symmetry, ...]:
    """The symmetries of set ``name`` (one of SETS, or UNION) that a layer allows, in the order of their keys."""
    if name == "none":
        return ()
    chosen = SYMMETRY_SETS[name]
    symmetries: list[Symmetry] = [ffn.permutation(chosen.signs) for ffn in layer.ffns]
    if layer.latent:  # queries, keys and values are computed from latents
        if chosen.beyond_paper:
            for axis in layer.latents:
                symmetries.append(Permutation(axis, (axis, f"|{axis}|"), (axis,) if chosen.signs else ()))
        symmetries.append(LatentHeads("attention", layer.latent, turns=chosen.quarter_turns, order=chosen.beyond_paper))
    elif layer.attention:
        symmetries += _attention(chosen, layer)
    if chosen.beyond_paper:  # of the experts of a mixture, and of state spaces: orders only
        if layer.groups:
            symmetries.append(ExpertPermutation(EXPERTS, layer.groups))
        symmetries += layer.grouped
        symmetries += [Permutation(axis, (axis,)) for axis in layer.ordered]
    return tuple(symmetries)


def _attention(chosen: SymmetrySet, layer: Structure) -> tuple[Symmetry, ...]:
    """The symmetries of ordinary attention.

    A norm of queries and keys leaves only turns by multiples of 90° between them, so that one rotation for queries,
    keys and values becomes two.
    """
    planes, rotary, norm = (layer.planes if layer.rotary else None), layer.rotary, layer.norm
    heads = (HEADS,) if chosen.beyond_paper and layer.movable else ()
    if layer.keys_are_values:
        return (QuarterTurns("qk", (*QK, "mixed"), planes, rotary, norm), *heads)
    if not chosen.beyond_paper and not norm and not layer.elementwise:
        return (Rotation("attention", ATTENTION, planes, rotary),)
    only_turns = bool(norm) or chosen.quarter_turns or not chosen.beyond_paper
    qk: Symmetry = QuarterTurns("qk", QK, planes, rotary, norm) if only_turns else Rotation("qk", QK, planes, rotary)
    values: Symmetry = Rotation("vo", VO, None)
    if chosen.quarter_turns or layer.elementwise:
        values = QuarterTurns("vo", VO, None)
    return (qk, values, *heads)


def symmetries_of_model(name: str, rms_norm: bool, channels: bool) -> tuple[Symmetry, ...]:
    """The symmetries of set ``name`` of the residual stream: RMS norms preserve signs, a LayerNorm, which subtracts the
    mean, does not. ``channels``: whether layers read embeddings of their own."""
    if name in ("none", "paper"):
        return ()
    signs = name in ("signed", UNION)
    residual = Permutation("residual", MODEL_AXES, ("model",) if rms_norm and signs else ())
    if not channels:
        return (residual,)
    return residual, Permutation("channels", CHANNELS, ("channel",) if signs else ())


Config = Mapping[str, Any]
Rule = Callable[[Config, int], Any]  # of a config, whose defaults are filled in, and the number of a layer


SizeSource = str | int | Sequence[str] | Rule  # a config entry, a number, the first entry there, or a rule
Sizes = Mapping[str, SizeSource]


@dataclass(frozen=True)
class Tensor:
    """One parameter. ``when``: the config entry, or the rule, that says whether it exists (None: always).

    ``parts``: its names in the Hub's files, where those differ from memory's; of a stack of experts, whose first axis
    counts them, the matrices of each expert ``{e}`` that lie one below the other. Files hold all parts, or none. What
    is not ``trained`` gets no noise and is in no delta, but changes places with what it counts.
    """

    name: str
    axes: tuple[Axis, ...]
    when: str | Rule | None = None
    parts: tuple[str, ...] = ()
    trained: bool = True

    def in_files(self) -> tuple[Tensor, ...]:
        """Its parts in the Hub's files."""
        if not self.parts:
            return (self,)
        if "{e}" not in self.parts[0]:
            return (replace(self, name=self.parts[0], parts=()),)
        _, rows, columns = self.axes
        return tuple(
            Tensor(part, (axis, columns), self.when) for part, axis in zip(self.parts, names_of(rows), strict=True)
        )


@dataclass(frozen=True)
class Family:
    """A model family as a table.

    The axes of a layer's tensors and the fields from ``planes`` to ``rms_norm``, ``reads`` and ``latent`` decide the
    symmetries. ``text_config`` to ``renamed`` are for a wrapper around a language model.
    """

    model_types: tuple[str, ...]
    sizes: Sizes
    prefix: str  # of all names; files of the bare model lack it
    layer: str  # the prefix of a layer's tensors
    tensors: tuple[Tensor, ...]
    layer_tensors: tuple[Tensor, ...]
    planes: str | None = "halves"
    rotary: Rule | None = None  # how many coordinates of a head RoPE turns in a layer; None: all
    movable_heads: bool | Rule = True
    gated: bool = True  # whether nothing is added to up
    rms_norm: bool = True
    layer_sizes: Sizes = field(default_factory=dict)  # sizes that differ between layers
    reads: Rule | None = None  # for ``Structure.reads``
    latent: str | Rule | None = None  # for ``Structure.latent``
    heads: tuple[str, ...] = ("lm_head.weight",)  # names of the output layer, of which files hold one
    defaults: Mapping[str, object] = field(default_factory=dict)  # values that transformers assumes for missing entries
    # config entries that can invalidate the table, each with the value for which the table holds
    unless: Mapping[str, object] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()  # name suffixes of constants, which are not parameters
    # patterns of tensors that the model does not use and that must not be copied as they are
    dead: tuple[str, ...] = ()
    transposed: bool = False  # whether linear layers store (inputs, outputs), as Conv1D does
    text_config: str | None = None  # the config entry that describes the language model
    # the configs that may tie the head to the embedding: "outer", "text" or either; () where transformers never does
    ties: tuple[str, ...] = ("outer",)
    text_tied: bool = False  # whether the text's config ties them if it does not say
    # of what is not part of the language model and is neither changed nor trained
    frozen_prefixes: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()  # prefixes that files may have, with those in memory
    note: str = ""  # for the list of families


def as_in_memory(family: Family) -> Family:
    """The table for files with the names that the model has in memory, as FSDP and DeepSpeed save them."""
    return replace(_with_renamed_prefixes(family, family.renamed), renamed=())


def variants_of(family: Family) -> tuple[Family, ...]:
    """``family``, and its table by each of the other names that files may have."""
    if not family.renamed:
        return (family,)
    in_files = _with_renamed_prefixes(family, tuple((in_memory, in_file) for in_file, in_memory in family.renamed))
    with_bare_head = replace(
        in_files,
        heads=family.heads,
        tensors=tuple(
            before if before.name.endswith("lm_head.weight") else after
            for before, after in zip(family.tensors, in_files.tensors, strict=True)
        ),
    )
    return family, as_in_memory(family), in_files, with_bare_head


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
