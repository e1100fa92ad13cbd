r"""The vocabulary for describing a model family.

A tensor is a name plus what each of its axes counts; a fused axis (GPT-2's ``c_attn``) is a tuple of names. The axis
names alone determine what a symmetry does, so a new family is a new table, not new code.

| axis | counts |
|---|---|
| model | the residual stream |
| \|model\| | the residual stream where a norm's weight scales it: permuted with it, but without sign changes |
| ffn | neurons of the feed-forward layer |
| gate, up | the same neurons in a gated layer, before the product act(gate)·up |
| query | query heads × head size, the coordinates of the query–key dot product |
| key | KV heads × head size, the same coordinates |
| value | KV heads × head size, the coordinates of values |
| mixed | query heads × head size: values after attention, the input of the output projection |
| vocab, position | rows of the embeddings |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Axis = str | tuple[str, ...]

LAYER_AXES = ("ffn", "gate", "up", "query", "key", "value", "mixed")


@dataclass(frozen=True)
class Tensor:
    """One parameter. ``when`` is the config entry that says whether it exists (None: always)."""

    name: str
    axes: tuple[Axis, ...]
    when: str | None = None


@dataclass(frozen=True)
class Permutation:
    """One permutation of all ``axes``, which count the same things; those in ``signed`` also share sign changes."""

    name: str
    axes: tuple[str, ...]
    signed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rotation:
    """One orthogonal matrix per KV head, applied to every head of ``axes`` that belongs to it.

    ``planes`` restricts it to SO(2) in each two-coordinate plane that RoPE rotates: "halves" pairs i with i + d/2.
    With ``planes=None``, it is any matrix in O(d), where d is the head size.
    """

    name: str
    axes: tuple[str, ...]
    planes: str | None


@dataclass(frozen=True)
class Turns:
    """The rotations that are signed permutations: one per KV head, applied to every head of ``axes`` belonging to it.

    With ``planes``, a multiple of 90° in each plane; with ``planes=None``, any order and signs of the head's
    coordinates.
    """

    name: str
    axes: tuple[str, ...]
    planes: str | None


@dataclass(frozen=True)
class HeadPermutation:
    """Permutes whole KV heads together with their query heads, and the query heads within each group."""

    name: str


Symmetry = Permutation | Rotation | Turns | HeadPermutation

FFN_AXES, MODEL_AXES = ("ffn", "gate", "up"), ("model", "|model|")
FFN, RESIDUAL = Permutation("ffn", FFN_AXES), Permutation("residual", MODEL_AXES)
SIGNED_FFN = Permutation("ffn", FFN_AXES, signed=("up", "ffn"))
SIGNED_RESIDUAL = Permutation("residual", MODEL_AXES, signed=("model",))
HEADS = HeadPermutation("heads")
ATTENTION = ("query", "key", "value", "mixed")
QK, VO = ("query", "key"), ("value", "mixed")
SETS = ("signed", "paper", "all", "none")


def symmetry_sets(planes: str | None, *, gated: bool, rms_norm: bool) -> dict[str, tuple[Symmetry, ...]]:
    """The sets of SETS for a family whose queries and keys rotate in ``planes`` (None: no RoPE).

    ``gated``: the feed-forward layer is act(gate)·up, so that signs of up cancel against those of the next layer.
    ``rms_norm``: the norms preserve signs; a LayerNorm, which subtracts the mean, does not. The set "every" cannot be
    chosen for a publication: it is the union of all sets, up to which two copies of a model are compared.
    """
    ffn, residual = SIGNED_FFN if gated else FFN, SIGNED_RESIDUAL if rms_norm else RESIDUAL
    rotations = (Rotation("qk", QK, planes), Rotation("vo", VO, None))
    return {
        "none": (),
        "paper": (FFN, Rotation("attention", ATTENTION, planes)),
        "signed": (ffn, Turns("qk", QK, planes), Turns("vo", VO, None), HEADS, residual),
        "all": (FFN, *rotations, HEADS, RESIDUAL),
        "every": (ffn, *rotations, HEADS, residual),
    }


@dataclass(frozen=True)
class Family:
    """A model family as a table.

    ``sizes`` maps the names of sizes to config entries; ``defaults`` are the values that transformers assumes for
    missing entries. ``unless`` lists config entries that can invalidate the table, each with the value for which the
    table holds. ``layer`` is the prefix of a layer's tensors; ``prefix`` may be missing from all names (a checkpoint
    of the bare model). ``buffers`` are name suffixes of constants, which are not parameters. ``transposed``: whether
    linear layers store (inputs, outputs), as Conv1D does.
    """

    model_types: tuple[str, ...]
    sizes: Mapping[str, str]
    prefix: str
    layer: str
    tensors: tuple[Tensor, ...]
    layer_tensors: tuple[Tensor, ...]
    symmetries: Mapping[str, tuple[Symmetry, ...]]
    head: str = "lm_head.weight"
    defaults: Mapping[str, object] = field(default_factory=dict)
    unless: Mapping[str, object] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()
    transposed: bool = False
