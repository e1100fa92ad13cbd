r"""The names of axes: what each of a tensor's axes counts.

A tensor is a name plus what each of its axes counts. The axis names alone determine what a symmetry does, so a new
family is a new table, not new code.

| axis | counts |
|---|---|
| model | the residual stream |
| \|model\| | the residual stream where a norm's weight scales it: permuted with it, but without sign changes |
| ffn | neurons of the feed-forward layer |
| gate, up | the same neurons in a gated layer, before the product act(gate)·up |
| s-ffn, s-gate, s-up | the same of a shared expert, or of a second feed-forward layer |
| e-ffn, e-gate, e-up | the same inside each expert of a mixture |
| expert | the experts of a mixture, in the router and in stacked tensors |
| query | query heads × head size, the coordinates of the query–key dot product |
| key | KV heads × head size, the same coordinates |
| value | KV heads × head size, the coordinates of values |
| mixed | query heads × head size: values after attention, the input of the output projection |
| \|query\|, \|key\| | query and key where the weight of a norm over all heads scales them |
| \|head\| | the coordinates of one head where the weight of a norm, the same for all heads, scales them |
| \|mixed\| | mixed where a gate multiplies it, coordinate by coordinate: reordered along, without sign changes |
| head | query heads, one number each |
| q-latent, kv-latent | the latents of latent attention (MLA); \|q-latent\|, \|kv-latent\| where norms scale them |
| mla-query, mla-key-value | query heads × (coordinates without and with RoPE), × (keys without RoPE, values) |
| mla-key, mla-mixed | the coordinates of keys with RoPE, which all heads share; query heads × values |
| ssm-head, ssm, ssm-state | heads of Mamba2, heads × head size, and groups × states (of B and of C) |
| delta-head, delta-value, delta-key | value heads of a delta net, × head size, and key heads × head size |
| \|delta\| | the coordinates of one value head, the same for all |
| m-inner, m-state, m-rank | channels and states of Mamba, and what its time steps are computed from |
| vocab, position | rows of the embeddings |
| channel | the channels of embeddings of its own that a layer reads, which all layers order alike |
| \|channel\| | the same where they are gated, or a norm's weight scales them |

An axis of a tensor may hold several of these, fused: a tuple of names one after the other (GPT-2's ``c_attn``), or
``Fused`` in chunks, each with its share of each name (GPT-NeoX: for each head its query, key and value), or one name
again and again, ``Repeated`` (Gemma 4's embeddings, with the channels of every layer).
"""

from __future__ import annotations

from dataclasses import dataclass


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
    return (axis,) if isinstance(axis, str) else (axis.name,) if isinstance(axis, Repeated) else axis.names


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
