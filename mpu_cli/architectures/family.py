"""The words in which a model family is described.

A tensor is a name and what each of its axes counts; a fused axis (GPT-2's ``c_attn``) is a tuple of names. What a
symmetry does follows from the names of the axes alone, so a new family is a new table and no new code.

| axis | counts |
|---|---|
| model | the residual stream |
| ffn | neurons of the feed-forward layer |
| query | query heads × head size, the coordinates in which queries meet keys |
| key | KV heads × head size, the same coordinates |
| value | KV heads × head size, the coordinates of values |
| mixed | query heads × head size: values after attention, what the output projection reads |
| vocab, position | rows of the embeddings |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Axis = str | tuple[str, ...]

LAYER_AXES = ("ffn", "query", "key", "value", "mixed")


@dataclass(frozen=True)
class Tensor:
    """One parameter. ``when`` names the config entry that says whether it is there (None: always)."""

    name: str
    axes: tuple[Axis, ...]
    when: str | None = None


@dataclass(frozen=True)
class Permutation:
    """Any permutation of one axis, wherever it occurs."""

    name: str
    axis: str


@dataclass(frozen=True)
class Rotation:
    """One orthogonal matrix for each KV head, on every head of ``axes`` that belongs to it.

    ``planes`` restricts it to SO(2) in each plane of two coordinates that RoPE turns: "halves" pairs i with
    i + d/2. With ``planes=None`` it is any matrix of O(d), d the head size.
    """

    name: str
    axes: tuple[str, ...]
    planes: str | None


@dataclass(frozen=True)
class HeadPermutation:
    """Whole KV heads change places, each with its query heads, and these change places among themselves."""

    name: str


Symmetry = Permutation | Rotation | HeadPermutation

FFN = Permutation("ffn", "ffn")
RESIDUAL = Permutation("residual", "model")
HEADS = HeadPermutation("heads")
ATTENTION = ("query", "key", "value", "mixed")
QK, VO = ("query", "key"), ("value", "mixed")


def symmetry_sets(planes: str | None) -> dict[str, tuple[Symmetry, ...]]:
    """The sets of DESIGN §3 for a family whose queries and keys turn in ``planes`` (None: no RoPE)."""
    return {
        "none": (),
        "paper": (FFN, Rotation("attention", ATTENTION, planes)),
        "all": (FFN, Rotation("qk", QK, planes), Rotation("vo", VO, None), HEADS, RESIDUAL),
    }


@dataclass(frozen=True)
class Family:
    """A model family as a table.

    ``sizes`` maps the names below to the config's entries; ``defaults`` are the values that transformers assumes
    where the config has none. ``unless`` names config entries under which the table would be wrong, with the value
    under which it holds. ``layer`` is the prefix of a layer's tensors; ``prefix`` may be absent from all the names
    (a checkpoint of the bare model). ``buffers`` are endings of names of constants that are no parameters.
    ``transposed``: whether linear layers store (inputs, outputs), as Conv1D does.
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
