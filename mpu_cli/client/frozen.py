"""What the frozen copy says of the examples, computed once before training, so that no second model is kept.

Log-probabilities are a number an example. Logits (undial, KL) would be a vocabulary's width a token: instead the final
hidden state of each answer token is kept, and a copy of the output head that makes logits of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from mpu_cli.client.data import IGNORED, Example, pad
from mpu_cli.client.losses import Frozen, Scores, score

ROWS = 1 << 14  # of the embedding that are made float64 at once


@dataclass(frozen=True)
class Reference:
    """The frozen copy's word on one set of examples; ``asks`` is the field of Frozen that it can give."""

    asks: str | None = None
    log_probs: torch.Tensor | None = None  # (examples,)
    states: Sequence[torch.Tensor] = ()  # for each example (tokens, width)
    head: Callable[[torch.Tensor], torch.Tensor] | None = None
    direction: torch.Tensor | None = None  # (width,)

    @property
    def nbytes(self) -> int:
        """What is kept for it, the head included."""
        kept = sum(state.nbytes for state in self.states)
        if isinstance(self.head, torch.nn.Module):
            kept += sum(parameter.nbytes for parameter in self.head.parameters())
        return kept + (0 if self.log_probs is None else self.log_probs.nbytes)

    def collect(self, numbers: Sequence[int], like: Sequence[int]) -> dict[str, torch.Tensor]:
        """What belongs to a batch of the examples ``numbers``, as tensors that the trainer moves to the device.

        A batch of none holds an example without labels, one of ``like``.
        """
        if self.log_probs is not None:
            return {"reference": self.log_probs[list(numbers or like)]}
        if self.states:
            return {"reference": torch.cat([self.states[i] for i in numbers] or [self.states[like[0]][:0]])}
        return {}

    def frozen(self, batch: dict[str, torch.Tensor]) -> Frozen:
        """The frozen copy's word on a batch made by ``collect``."""
        if self.direction is not None:
            return Frozen(direction=self.direction)
        value = batch.get("reference")
        if value is None:
            return Frozen()
        if self.asks == "logits":
            with torch.no_grad():
                value = self.head(value)
        return Frozen(**{self.asks: value})


def run(
    model: torch.nn.Module, batch: dict[str, torch.Tensor], *, layer: int | None = None, **counts: object
) -> Scores:
    """Run ``model`` on a padded batch and score its labels; with ``layer``, take that layer's output along.

    Layers count from 0; −1 is the state that the head reads.
    """
    labels = batch["labels"]
    labelled = (labels[:, 1:] != IGNORED).any(0).nonzero()
    kept = labels.shape[1] - int(labelled[0]) if len(labelled) else 1  # the logits of prompts are never made
    output = model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        use_cache=False,
        output_hidden_states=layer is not None,
        logits_to_keep=kept,
    )
    hidden = None if layer is None else output.hidden_states[layer if layer < 0 else layer + 1][:, -kept:]
    return score(output.logits, labels[:, -kept:], hidden=hidden, weights=batch.get("weights"), **counts)


@torch.no_grad()
def freeze(
    model: PreTrainedModel,
    examples: Sequence[Example],
    asks: str | None,
    *,
    layer: int,
    batch_size: int,
    seed: int = 0,
) -> Reference:
    """Ask ``model``, as it is now, for ``asks``: "log_probs", "logits", "hidden" of ``layer``, a "direction" drawn with
    ``seed``, or nothing (None)."""
    if asks is None:
        return Reference()
    if asks == "direction":
        return Reference(asks, direction=steering_direction(model, seed))
    model.eval()
    sums: list[torch.Tensor] = []
    states: list[torch.Tensor] = []
    head = None
    for start in range(0, len(examples), batch_size):
        part = examples[start : start + batch_size]
        batch = {name: value.to(model.device) for name, value in pad(part).items()}
        scores = run(model, batch, layer={"log_probs": None, "logits": -1, "hidden": layer}[asks])
        if asks == "log_probs":
            sums.append(scores.sequence_log_probs.cpu())
            continue
        if asks == "logits" and head is None:
            head = _head(model, scores)
        kept = scores.logits.to(model.dtype) if isinstance(head, torch.nn.Identity) else scores.hidden
        states += [state.cpu() for state in kept.split(torch.bincount(scores.rows, minlength=len(part)).tolist())]
    return Reference(asks, torch.cat(sums) if sums else None, states, head)


@torch.no_grad()
def steering_direction(model: PreTrainedModel, seed: int) -> torch.Tensor:
    """RMU's random vector (Li et al., 2024), float64 (width,): entries uniform in [0, 1), then made of length 1.

    Entry j is Φ(⟨s, e_j⟩/‖e_j‖), with e_j column j of the embedding and s a normal number for each token. So drawn, it
    is permuted with the model dimension of a copy, and all copies are steered the same way.
    """
    embedding = model.get_input_embeddings().weight
    draws = torch.randn(len(embedding), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    products = squares = torch.zeros(embedding.shape[1], dtype=torch.float64, device=embedding.device)
    for rows, normals in zip(embedding.split(ROWS), draws.to(embedding.device).split(ROWS), strict=True):
        products = products + normals @ rows.double()
        squares = squares + rows.double().square().sum(0)
    uniform = torch.special.ndtr(products / squares.sqrt().clamp(min=torch.finfo(torch.float64).tiny))
    return uniform / uniform.norm()


def _head(model: PreTrainedModel, scores: Scores) -> torch.nn.Module:
    """A frozen copy of the output head if logits are what it makes of the final state, else the identity.

    Some models cap or scale their logits after the head; theirs are kept whole.
    """
    head = copy.deepcopy(model.get_output_embeddings()).requires_grad_(False)
    apart = torch.linalg.vector_norm(head(scores.hidden).to(scores.logits.dtype) - scores.logits)
    # Capping or scaling is far more than that; half precision, rounded in another order, is less.
    return head if apart <= 2e-2 * torch.linalg.vector_norm(scores.logits) else torch.nn.Identity()
