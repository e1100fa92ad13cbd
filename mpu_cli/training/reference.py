"""The frozen copy's outputs on the examples, computed once before training so that no second model is kept.

Log-probabilities are one number per example. Logits (undial, KL) would be one number per token and vocabulary entry, so
the final hidden state of each answer token is kept instead, with a copy of the output head to compute logits from it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from mpu_cli.errors import MpuError
from mpu_cli.files.manifest import as_metadata, facts_of
from mpu_cli.files.reader import open_checkpoint
from mpu_cli.files.transaction import Transaction
from mpu_cli.model.network import Head, Logits, input_of, output_of_layer, separate_head
from mpu_cli.records.encode import EncodedSets, Example, answer_tokens, pad
from mpu_cli.training.losses import Outputs, locate_answers, score

EMBEDDING_ROWS = 1 << 14  # of the embedding that are converted to float64 at a time
FORMAT, VERSION = "mpu-reference", 1
# Facts of a reference file that are digests, in words.
DIGESTS = {
    "records": "records or the options that print them",
    "reading_context": "the copy's tokenizer, template or config",
}


@dataclass(frozen=True)
class ExampleSet:
    """The examples of one set, and the outputs of the frozen copy on them that its term asks for.

    Outputs stay on the CPU; ``on`` puts the head and the direction, which every batch uses, on a device.
    """

    examples: Sequence[Example]
    reference_outputs: str | None = None
    outputs: Sequence[torch.Tensor] = ()  # of each example: its log-probability, (1,), or states, (tokens, width)
    head: torch.nn.Module | None = None  # makes logits of the states
    direction: torch.Tensor | None = None  # (width,)

    def on(self, device: torch.device) -> ExampleSet:
        """This set, with its head and direction on ``device``."""
        head = None if self.head is None else self.head.to(device)
        direction = None if self.direction is None else self.direction.to(device)
        return replace(self, head=head, direction=direction)

    def reference_loss(self, count: int) -> float | None:
        """The frozen copy's mean −log p per token of the first ``count`` answers, in nats; None if its outputs do not
        say."""
        examples, outputs = self.examples[:count], self.outputs[:count]
        if self.reference_outputs == "logits" and self.head is not None:
            targets = locate_answers(pad(examples)["labels"])["targets"]
            weight = next(self.head.parameters())
            logits = Logits(torch.cat(list(outputs)).to(weight), self.head)
            log_probs = logits.log_probs(targets.to(weight.device))
        elif self.reference_outputs == "log_probs":
            log_probs = torch.cat(list(outputs))
        else:
            return None
        return -float(log_probs.double().sum()) / max(1, sum(map(answer_tokens, examples)))

    def collect(self, numbers: Sequence[int], like: Sequence[int]) -> dict[str, torch.Tensor]:
        """The outputs for a batch of the examples ``numbers``, as tensors that the trainer moves to the device.

        If ``numbers`` is empty, the batch holds one example of ``like``, without labels.
        """
        if not self.outputs:
            return {}
        outputs = [self.outputs[i] for i in numbers]
        if not outputs:
            filler = self.outputs[like[0]]
            outputs = [filler if self.reference_outputs == "log_probs" else filler[:0]]  # no rows, of the same width
        return {"reference": torch.cat(outputs)}

    def reference(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor | Logits | None:
        """The frozen copy's outputs for a batch made by ``collect``, as ``Outputs`` has them."""
        if self.direction is not None:
            return self.direction
        value = batch.get("reference")
        if value is not None and self.reference_outputs == "logits":
            return Logits(value, self.head)
        return value


ExampleSets = Mapping[str, ExampleSet]  # by name


def forward(
    model: torch.nn.Module,
    batch: Mapping[str, Any],
    *,
    layer: int | None = None,
    head: Head | None = None,
    own_head: Head | None = None,
) -> Outputs:
    """Run ``model`` on a batch padded on the right, and score its labels; with ``layer``, also return that layer's
    output.

    Layers are counted from 0. With the model's ``head`` apart, logits are of answer tokens only, and in chunks;
    ``own_head``: the model's, if ``head`` is a copy of it. ``batch`` may say where its ``answers`` are, and how many
    positions at its end they take, ``length_of_answers``. No mask is passed: what is before padding does not see it,
    and without one attention has faster kernels.
    """
    labels = batch["labels"]
    answers = batch.get("answers") or locate_answers(labels)
    kept = batch.get("length_of_answers") or length_of_answers(labels, answers)  # logits of prompts are never computed
    with input_of(head and (own_head or head)) as states, output_of_layer(model, layer) as below:
        output = model(input_ids=batch["input_ids"], use_cache=False, logits_to_keep=kept)
    if head is not None:  # layers may compute in another precision than their weights have
        states[0] = states[0].to(next(head.parameters()).dtype)
    before = labels.shape[1] - kept
    return score(
        output.logits if head is None else states[0],
        labels[:, before:],
        head=head,
        hidden=None if layer is None else below[0][:, before:],
        answers=answers | {"columns": answers["columns"] - before},
    )


def length_of_answers(labels: torch.Tensor, answers: Mapping[str, torch.Tensor]) -> int:
    """The number of positions from the first that predicts an answer's token, at least 1."""
    return labels.shape[1] - int(answers["columns"].min()) if len(answers["columns"]) else 1


@torch.no_grad()
def freeze(
    model: PreTrainedModel,
    examples: Sequence[Example],
    reference_outputs: str | None,
    *,
    layer: int,
    batch_size: int,
    seed: int = 0,
) -> ExampleSet:
    """``examples`` with ``reference_outputs`` of ``model`` as it is now: "log_probs", "logits", "hidden" of ``layer``,
    a "direction" drawn with ``seed``, or nothing (None)."""
    if reference_outputs is None:
        return ExampleSet(examples)
    if reference_outputs == "direction":
        return ExampleSet(examples, reference_outputs, direction=steering_direction(model, seed).cpu())
    model.eval()
    by_length = sorted(range(len(examples)), key=lambda number: len(examples[number].ids))
    outputs: list[torch.Tensor] = [torch.empty(0)] * len(examples)
    head = separate_head(model)
    frozen_head = None
    if head and reference_outputs == "logits":
        frozen_head = copy.deepcopy(head).requires_grad_(False).cpu()
    for start in range(0, len(examples), batch_size):
        numbers = by_length[start : start + batch_size]
        batch = {name: value.to(model.device) for name, value in pad([examples[i] for i in numbers]).items()}
        scores = forward(model, batch, layer=layer if reference_outputs == "hidden" else None, head=head)
        if reference_outputs == "log_probs":
            of_batch = scores.sequence_log_probs.split(1)
        else:
            states = scores.logits.states.to(model.dtype) if reference_outputs == "logits" else scores.hidden
            assert states is not None  # asked for above
            of_batch = states.split(torch.bincount(scores.rows, minlength=len(numbers)).tolist())
        for number, output in zip(numbers, of_batch, strict=True):
            outputs[number] = output.cpu()
    return ExampleSet(examples, reference_outputs, outputs, frozen_head)


def save_references(path: Path, sets: ExampleSets, facts: Mapping[str, object]) -> None:
    """Write the frozen copy's outputs on each set to ``path``, with ``facts`` that identify the copy and records."""
    tensors: dict[str, torch.Tensor] = {}
    for name, example_set in sets.items():
        if example_set.outputs:
            tensors[f"{name}.outputs"] = torch.cat(list(example_set.outputs))
            tensors[f"{name}.lengths"] = torch.tensor([float(len(output)) for output in example_set.outputs])
        if isinstance(example_set.head, torch.nn.Linear):
            tensors |= {f"{name}.head.{key}": value for key, value in example_set.head.state_dict().items()}
    with Transaction() as transaction:
        save_file(tensors, transaction.add(path), as_metadata({"format": FORMAT, "version": VERSION, **facts}))


def load_references(
    path: Path,
    examples: EncodedSets,
    reference_outputs: Mapping[str, str | None],
    facts: Mapping[str, object],
) -> dict[str, ExampleSet]:
    """The ``examples`` of each set with ``reference_outputs`` that ``save_references`` wrote.

    Raises MpuError if the file is invalid or its facts differ: it would steer towards a different model or records.
    """
    checkpoint = open_checkpoint(path)
    metadata = facts_of(checkpoint.metadata)
    if metadata.get("format") != FORMAT or metadata.get("version") != VERSION:
        raise MpuError(f"{path}: not a reference file for this version of mpu")
    if differing := [name for name, value in facts.items() if metadata.get(name) != value]:
        reasons = " and ".join(DIGESTS.get(name, name) for name in differing)
        shown = [name for name in differing if name not in DIGESTS]
        if shown:
            details = ", ".join(f"{name} {metadata.get(name)!r} instead of {facts[name]!r}" for name in shown)
            reasons += f" ({details})"
        raise MpuError(
            f"{path}: does not match this training in {reasons}",
            "use the file that round 1 wrote for this copy",
        )
    sets = {}
    for name, set_examples in examples.items():
        prefix = f"{name}."
        of_set = [key for key in checkpoint.tensors if key.startswith(prefix)]
        tensors = {key.removeprefix(prefix): checkpoint.tensor(key).clone() for key in of_set}
        outputs: Sequence[torch.Tensor] = ()
        head: torch.nn.Module | None = None
        if "outputs" in tensors:
            outputs = tensors["outputs"].split([int(n) for n in tensors["lengths"].tolist()])
        if "head.weight" in tensors:
            weight = tensors["head.weight"]
            width, vocabulary = weight.T.shape
            head = torch.nn.Linear(width, vocabulary, bias="head.bias" in tensors, dtype=weight.dtype)
            of_head = {key.removeprefix("head."): value for key, value in tensors.items() if key.startswith("head.")}
            head.load_state_dict(of_head)
            head.requires_grad_(False)
        sets[name] = ExampleSet(set_examples, reference_outputs[name], outputs, head)
    return sets


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
    for rows, normals in zip(
        embedding.split(EMBEDDING_ROWS), draws.to(embedding.device).split(EMBEDDING_ROWS), strict=True
    ):
        products = products + rows.double().T.mv(normals)
        squares = squares + rows.double().square().sum(0)
    uniform = 2 * torch.special.ndtr(products / squares.sqrt().clamp(min=torch.finfo(torch.float64).tiny)) - 1
    return uniform / uniform.norm()
