"""The symmetries that models can have, and those of a layer and of the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

from mpu_cli.architectures.axes import ATTENTION, CHANNELS, FFN_AXES, MODEL_AXES


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
    """What latent attention allows in its heads (DeepSeek-V2, arXiv 2405.04434).

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
    """Orders, without signs, of the heads of a state-space layer, which come in ``groups``, the name of a size.

    Groups change places, heads do within their group, and so do the coordinates of each head (``inner``) and what a
    group has besides heads (``of_group``). ``per_head`` has one number a head. Of ``common``, the coordinates of one
    head, all heads have the same order.
    """

    name: str
    groups: str
    per_head: str
    inner: str
    of_group: str
    common: str | None = None


Symmetry = Permutation | Rotation | QuarterTurns | HeadPermutation | ExpertPermutation | LatentHeads | GroupedHeads

HEADS, EXPERTS = HeadPermutation("heads"), "experts"
GROUPED = (
    GroupedHeads("mamba", "ssm-groups", "ssm-head", "ssm", "ssm-state"),
    GroupedHeads("delta-net", "delta-groups", "delta-head", "delta-value", "delta-key", "|delta|"),
)
ORDERED = ("m-inner", "m-state", "m-rank")  # axes with an order of their own, and nothing more
LATENTS = ("q-latent", "kv-latent")
QK, VO = ("query", "key"), ("value", "mixed")
SETS = ("signed", "paper", "all", "none")
EVERY = "every"  # the union of all sets, up to which two copies are compared; no publication can choose it


@dataclass(frozen=True)
class Ffn:
    """A feed-forward layer: the prefix of its axes, and whether signs of up cancel against those of the next layer.

    They do if the layer is act(gate)·up, and nothing is added to up.
    """

    prefix: str = ""
    gated: bool = True

    def permutation(self, signed: bool) -> Permutation:
        axes = tuple(self.prefix + axis for axis in FFN_AXES)
        signs = (self.prefix + "up", self.prefix + "ffn") if signed and self.gated else ()
        name = {"": "ffn", "s-": "shared-ffn", "e-": "expert-ffn"}[self.prefix]
        return Permutation(name, axes, signs, per_expert=self.prefix == "e-")


@dataclass(frozen=True)
class Structure:
    """What decides the symmetries of one layer.

    ``planes`` and ``rotary``: which coordinates of a head RoPE turns (rotary 0: none); ``norm``: of queries and keys,
    as in ``QuarterTurns``; ``movable``: whether heads can change places (not under ALiBi); ``ffns``: its feed-forward
    layers; ``groups``: of experts, 0 without experts; ``attention``: whether it has any; ``elementwise``: whether
    something works on values coordinate by coordinate, so that they cannot be rotated; ``keys_are_values``: whether its
    keys are its values, too, so that one turn is for both; ``reads``: the layer whose keys and values it reads (None:
    its own), whose turns and order of heads it then shares; ``latent``: the planes of RoPE in latent attention (None:
    it has none), and ``latents``: those of LATENTS that it has; ``grouped``: those of GROUPED that it has, and
    ``ordered``: those of ORDERED.
    """

    planes: str | None
    rotary: int
    norm: str | None
    movable: bool
    ffns: tuple[Ffn, ...]
    groups: int = 0
    attention: bool = True
    elementwise: bool = False
    keys_are_values: bool = False
    reads: int | None = None
    latent: str | None = None
    latents: tuple[str, ...] = ()
    grouped: tuple[GroupedHeads, ...] = ()
    ordered: tuple[str, ...] = ()

    @property
    def shared_symmetries(self) -> tuple[str, ...]:
        """The symmetries that this layer has in common with the one whose keys and values it reads."""
        return () if self.reads is None else ("attention", "qk", "vo", HEADS.name)


@dataclass(frozen=True)
class SymmetrySet:
    """Which symmetries a publication may use.

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
    EVERY: SymmetrySet(signs=True, beyond_paper=True, quarter_turns=False),
}


def symmetries_of_layer(name: str, layer: Structure) -> tuple[Symmetry, ...]:
    """The symmetries of set ``name`` (one of SETS, or EVERY) that a layer allows, in the order of their keys."""
    if name == "none":
        return ()
    chosen = SYMMETRY_SETS[name]
    if layer.latent:
        attention = _latent_attention(chosen, layer, layer.latent)
    elif not layer.attention:
        attention = ()
    else:
        attention = _attention(chosen, layer)
    ffns = tuple(ffn.permutation(chosen.signs) for ffn in layer.ffns)
    return (*ffns, *attention, *_experts_and_states(chosen, layer))


def _attention(chosen: SymmetrySet, layer: Structure) -> tuple[Symmetry, ...]:
    """Of ordinary attention.

    A norm of queries and keys leaves only turns by multiples of 90° between them, so that what is one rotation for
    queries, keys and values without it is two.
    """
    planes, rotary, norm = (layer.planes if layer.rotary else None), layer.rotary, layer.norm
    heads = (HEADS,) if chosen.beyond_paper and layer.movable else ()
    if layer.keys_are_values:
        turns_of_all = QuarterTurns("qk", (*QK, "mixed"), planes, rotary, norm)
        return (turns_of_all, *((HEADS,) if chosen.beyond_paper else ()))
    if not chosen.beyond_paper and not norm and not layer.elementwise:
        return (Rotation("attention", ATTENTION, planes, rotary),)
    only_turns = bool(norm) or chosen.quarter_turns or not chosen.beyond_paper
    qk: Symmetry = QuarterTurns("qk", QK, planes, rotary, norm) if only_turns else Rotation("qk", QK, planes, rotary)
    values: Symmetry = Rotation("vo", VO, None)
    if chosen.quarter_turns or layer.elementwise:
        values = QuarterTurns("vo", VO, None)
    return (qk, values, *heads)


def _latent_attention(chosen: SymmetrySet, layer: Structure, planes: str) -> tuple[Symmetry, ...]:
    """Of attention whose queries, keys and values are computed from latents."""
    heads = LatentHeads("attention", planes, turns=chosen.quarter_turns, order=chosen.beyond_paper)
    if not chosen.beyond_paper:
        return (heads,)
    latents = (Permutation(axis, (axis, f"|{axis}|"), (axis,) if chosen.signs else ()) for axis in layer.latents)
    return (*latents, heads)


def _experts_and_states(chosen: SymmetrySet, layer: Structure) -> tuple[Symmetry, ...]:
    """Of the experts of a mixture, and of state spaces: orders only."""
    if not chosen.beyond_paper:
        return ()
    experts = (ExpertPermutation(EXPERTS, layer.groups),) if layer.groups else ()
    return (*experts, *layer.grouped, *(Permutation(axis, (axis,)) for axis in layer.ordered))


def symmetries_of_model(name: str, rms_norm: bool, channels: bool = False) -> tuple[Symmetry, ...]:
    """The symmetries of set ``name`` of the residual stream: RMS norms preserve signs, a LayerNorm, which subtracts the
    mean, does not. ``channels``: whether layers read embeddings of their own."""
    if name in ("none", "paper"):
        return ()
    signs = name in ("signed", EVERY)
    residual = Permutation("residual", MODEL_AXES, ("model",) if rms_norm and signs else ())
    return (residual, Permutation("channels", CHANNELS, ("channel",) if signs else ())) if channels else (residual,)
