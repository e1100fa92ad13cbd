"""The frozen copy's outputs on the examples, computed once before training so that no second model is kept.

Log-probabilities are one number per example. Logits (undial, KL) would be one number per token and vocabulary entry, so
the final hidden state of each answer token is kept instead, with a copy of the output head to compute logits from it.
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
from mpu_cli.checkpoint.writer import CheckpointWriter, TensorSpecs
from mpu_cli.client.losses import Frozen, Scores, score
from mpu_cli.errors import MpuError
from mpu_cli.manifest import as_metadata, facts_of
from mpu_cli.records.encoding import IGNORED, Example, pad

ROWS = 1 << 14  # of the embedding that are converted to float64 at a time
FORMAT, VERSION = "mpu-reference", 1


@dataclass(frozen=True)
class Reference:
    """The frozen copy's outputs on one set of examples; ``asks`` is the field of Frozen that it provides."""

    asks: str | None = None
    log_probs: torch.Tensor | None = None  # (examples,)
    states: Sequence[torch.Tensor] = ()  # for each example (tokens, width)
    head: Callable[[torch.Tensor], torch.Tensor] | None = None
    direction: torch.Tensor | None = None  # (width,)

    @property
    def nbytes(self) -> int:
        """Size of what is kept, including the head."""
        kept = sum(state.nbytes for state in self.states)
        if isinstance(self.head, torch.nn.Module):
            kept += sum(parameter.nbytes for parameter in self.head.parameters())
        return kept + (0 if self.log_probs is None else self.log_probs.nbytes)

    def collect(self, numbers: Sequence[int], like: Sequence[int]) -> dict[str, torch.Tensor]:
        """The outputs for a batch of the examples ``numbers``, as tensors that the trainer moves to the device.

        If ``numbers`` is empty, the batch holds one example of ``like``, without labels.
        """
        if self.log_probs is not None:
            return {"reference": self.log_probs[list(numbers or like)]}
        if self.states:
            return {"reference": torch.cat([self.states[i] for i in numbers] or [self.states[like[0]][:0]])}
        return {}

    def frozen(self, batch: dict[str, torch.Tensor]) -> Frozen:
        """The frozen copy's outputs for a batch made by ``collect``."""
        if self.direction is not None:
            return Frozen(direction=self.direction)
        value = batch.get("reference")
        if value is None:
            return Frozen()
        if self.asks == "logits":
            with torch.no_grad():
                assert self.head is not None
                value = self.head(value)
        return Frozen(**{str(self.asks): value})


def run(model: torch.nn.Module, batch: dict[str, torch.Tensor], *, layer: int | None = None, **counts: int) -> Scores:
    """Run ``model`` on a padded batch and score its labels; with ``layer``, also return that layer's output.

    Layers are counted from 0; −1 is the state that the head reads.
    """
    labels = batch["labels"]
    labelled = (labels[:, 1:] != IGNORED).any(0).nonzero()
    kept = labels.shape[1] - int(labelled[0]) if len(labelled) else 1  # logits of prompts are never computed
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
    """Compute ``asks`` from ``model`` as it is now: "log_probs", "logits", "hidden" of ``layer``, a "direction" drawn
    with ``seed``, or nothing (None)."""
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
        assert kept is not None  # asked for above
        states += [state.cpu() for state in kept.split(torch.bincount(scores.rows, minlength=len(part)).tolist())]
    return Reference(asks, torch.cat(sums) if sums else None, states, head)


def save_references(path: Path, references: Mapping[str, Reference], facts: Mapping[str, object]) -> None:
    """Write the frozen copy's outputs on each set to ``path``, with ``facts`` that identify the copy and records."""
    tensors: dict[str, torch.Tensor] = {}
    for name, reference in references.items():
        if reference.log_probs is not None:
            tensors[f"{name}.log_probs"] = reference.log_probs
        if reference.states:
            tensors[f"{name}.states"] = torch.cat(list(reference.states))
            tensors[f"{name}.lengths"] = torch.tensor([float(len(state)) for state in reference.states])
        if isinstance(reference.head, torch.nn.Linear):
            tensors |= {f"{name}.head.{key}": value for key, value in reference.head.state_dict().items()}
    specs: TensorSpecs = {name: (NAME[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    metadata = as_metadata({"format": FORMAT, "version": VERSION, **facts})
    with Transaction() as transaction, CheckpointWriter(transaction.add(path), specs, metadata) as writer:
        for name, tensor in tensors.items():
            writer.tensor(name).copy_(tensor)


def load_references(
    path: Path, asks: Mapping[str, str | None], facts: Mapping[str, object], device: torch.device
) -> dict[str, Reference]:
    """Read what ``save_references`` wrote, for sets that need ``asks``.

    Raises MpuError if the file is invalid or its facts differ: it would steer towards a different model or records.
    """
    held = open_checkpoint(path)
    metadata = facts_of(held.metadata)
    if metadata.get("format") != FORMAT or metadata.get("version") != VERSION:
        raise MpuError(f"{path}: not a reference file for this version of mpu")
    if other := [name for name, value in facts.items() if metadata.get(name) != value]:
        details = ", ".join(
            f"{name} {metadata.get(name)!r} instead of {facts[name]!r}" for name in other if name != "tokens"
        )
        raise MpuError(
            f"{path}: does not match this training in "
            f"{' and '.join(other).replace('tokens', 'records, template or date')}"
            f"{f' ({details})' if details else ''}",
            "use the file that round 1 wrote for this copy",
        )
    references = {}
    for name, wanted in asks.items():
        here = {
            key.removeprefix(f"{name}."): held.tensor(key).clone() for key in held.tensors if key.startswith(f"{name}.")
        }
        states: Sequence[torch.Tensor] = ()
        head: torch.nn.Module | None = None
        if "states" in here:
            states = here["states"].split([int(n) for n in here["lengths"].tolist()])
            head = torch.nn.Identity()
        if "head.weight" in here:
            weight = here["head.weight"]
            width, vocabulary = weight.T.shape
            head = torch.nn.Linear(width, vocabulary, bias="head.bias" in here, device=device, dtype=weight.dtype)
            head.load_state_dict({key.removeprefix("head."): here[key] for key in here if key.startswith("head.")})
            head.requires_grad_(False)
        references[name] = Reference(wanted, here.get("log_probs"), states, head)
    return references


@torch.no_grad()
def steering_direction(model: PreTrainedModel, seed: int) -> torch.Tensor:
    """RMU's random vector (Li et al., 2024), float64 (width,): entries uniform in (−1, 1), then scaled to length 1.

    Entry j is 2Φ(⟨s, e_j⟩/‖e_j‖) − 1, where e_j is column j of the embedding and s has one normal draw per token. Drawn
    this way, it follows the permutation and sign changes of a copy's model dimension, so all copies are steered the
    same way. Li et al. draw from [0, 1), which has no sign to change.
    """
    embedding = model.get_input_embeddings().weight
    draws = torch.randn(len(embedding), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    products = squares = torch.zeros(embedding.shape[1], dtype=torch.float64, device=embedding.device)
    for rows, normals in zip(embedding.split(ROWS), draws.to(embedding.device).split(ROWS), strict=True):
        products = products + rows.double().T.mv(normals)
        squares = squares + rows.double().square().sum(0)
    uniform = 2 * torch.special.ndtr(products / squares.sqrt().clamp(min=torch.finfo(torch.float64).tiny)) - 1
    return uniform / uniform.norm()


def _head(model: PreTrainedModel, scores: Scores) -> torch.nn.Module:
    """A frozen copy of the output head if it alone turns the final state into logits, else the identity.

    Some models cap or scale their logits after the head; for those, the logits themselves are kept.
    """
    head = copy.deepcopy(model.get_output_embeddings()).requires_grad_(False)
    apart = torch.linalg.vector_norm(head(scores.hidden).to(scores.logits.dtype) - scores.logits)
    # Capping or scaling changes them by far more than that; half precision rounded in a different order, by less.
    return head if apart <= 2e-2 * torch.linalg.vector_norm(scores.logits) else torch.nn.Identity()
