"""What the frozen copy says of the examples, computed once before training, so that no second model is kept.

Log-probabilities are a number an example. Logits (undial, KL) would be a vocabulary's width a token: instead the final
hidden state of each answer token is kept, and a copy of the output head that makes logits of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from mpu_cli.checkpoint.dtypes import NAME
from mpu_cli.checkpoint.reader import open_checkpoint
from mpu_cli.checkpoint.transaction import Transaction
from mpu_cli.checkpoint.writer import CheckpointWriter, Plan
from mpu_cli.client.data import IGNORED, Example, pad
from mpu_cli.client.losses import Frozen, Scores, score
from mpu_cli.errors import MpuError
from mpu_cli.manifest import as_metadata, facts_of

ROWS = 1 << 14  # of the embedding that are made float64 at once
FORMAT, VERSION = "mpu-reference", 1


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


def save_references(path: Path, references: Mapping[str, Reference], facts: Mapping[str, object]) -> None:
    """Write what the frozen copy said of each set to ``path``, with ``facts`` that say of what copy and records."""
    tensors: dict[str, torch.Tensor] = {}
    for name, reference in references.items():
        if reference.log_probs is not None:
            tensors[f"{name}.log_probs"] = reference.log_probs
        if reference.states:
            tensors[f"{name}.states"] = torch.cat(list(reference.states))
            tensors[f"{name}.lengths"] = torch.tensor([float(len(state)) for state in reference.states])
        if isinstance(reference.head, torch.nn.Linear):
            tensors |= {f"{name}.head.{key}": value for key, value in reference.head.state_dict().items()}
    plan: Plan = {name: (NAME[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    metadata = as_metadata({"format": FORMAT, "version": VERSION, **facts})
    with Transaction() as transaction, CheckpointWriter(transaction.add(path), plan, metadata) as writer:
        for name, tensor in tensors.items():
            writer.tensor(name).copy_(tensor)


def load_references(
    path: Path, asks: Mapping[str, str | None], facts: Mapping[str, object], device: torch.device
) -> dict[str, Reference]:
    """What ``save_references`` wrote, for sets that ask for ``asks``.

    Raises MpuError for a file that is none, or whose facts are others: it would steer towards another model or records.
    """
    held = open_checkpoint(path)
    found = facts_of(held.metadata)
    if found.get("format") != FORMAT or found.get("version") != VERSION:
        raise MpuError(f"{path}: not a reference file of this mpu")
    if other := [name for name, value in facts.items() if found.get(name) != value]:
        told = ", ".join(f"{name} {found.get(name)!r} instead of {facts[name]!r}" for name in other if name != "tokens")
        raise MpuError(
            f"{path}: belongs to other {' and '.join(other).replace('tokens', 'records, template or date')}"
            f"{f' ({told})' if told else ''}; name the file that round 1 wrote for this copy"
        )
    references = {}
    for name, wanted in asks.items():
        here = {
            key.removeprefix(f"{name}."): held.tensor(key).clone() for key in held.tensors if key.startswith(f"{name}.")
        }
        states, head = (), None
        if "states" in here:
            states = here["states"].split([int(n) for n in here["lengths"].tolist()])
            head = torch.nn.Identity()
        if "head.weight" in here:
            weight = here["head.weight"]
            head = torch.nn.Linear(*weight.T.shape, bias="head.bias" in here, device=device, dtype=weight.dtype)
            head.load_state_dict({key.removeprefix("head."): here[key] for key in here if key.startswith("head.")})
            head.requires_grad_(False)
        references[name] = Reference(wanted, here.get("log_probs"), states, head)
    return references


@torch.no_grad()
def steering_direction(model: PreTrainedModel, seed: int) -> torch.Tensor:
    """RMU's random vector (Li et al., 2024), float64 (width,): entries uniform in (−1, 1), then made of length 1.

    Entry j is 2Φ(⟨s, e_j⟩/‖e_j‖) − 1, with e_j column j of the embedding and s a normal number for each token. So
    drawn, it is permuted and changes sign with the model dimension of a copy, and all copies are steered the same way.
    Li et al. draw from [0, 1), which has no sign to change.
    """
    embedding = model.get_input_embeddings().weight
    draws = torch.randn(len(embedding), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    products = squares = torch.zeros(embedding.shape[1], dtype=torch.float64, device=embedding.device)
    for rows, normals in zip(embedding.split(ROWS), draws.to(embedding.device).split(ROWS), strict=True):
        products = products + normals @ rows.double()
        squares = squares + rows.double().square().sum(0)
    uniform = 2 * torch.special.ndtr(products / squares.sqrt().clamp(min=torch.finfo(torch.float64).tiny)) - 1
    return uniform / uniform.norm()


def _head(model: PreTrainedModel, scores: Scores) -> torch.nn.Module:
    """A frozen copy of the output head if logits are what it makes of the final state, else the identity.

    Some models cap or scale their logits after the head; theirs are kept whole.
    """
    head = copy.deepcopy(model.get_output_embeddings()).requires_grad_(False)
    apart = torch.linalg.vector_norm(head(scores.hidden).to(scores.logits.dtype) - scores.logits)
    # Capping or scaling is far more than that; half precision, rounded in another order, is less.
    return head if apart <= 2e-2 * torch.linalg.vector_norm(scores.logits) else torch.nn.Identity()
