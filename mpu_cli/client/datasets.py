"""The records of a training as tokens, and what its losses need of the frozen copy."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mpu_cli.client.dataset import Dataset
from mpu_cli.client.losses import Objective
from mpu_cli.client.processes import from_first
from mpu_cli.client.reference_model import Reference, freeze, load_references, save_references
from mpu_cli.client.schedule import ExampleSet
from mpu_cli.errors import MpuError
from mpu_cli.manifest import CopyManifest
from mpu_cli.models.limits import longest_independent_input, longest_input, trained_length, vocabulary_size
from mpu_cli.observer import Observer
from mpu_cli.options.unlearning import Unlearning
from mpu_cli.records.encoding import Example, encoding_of
from mpu_cli.records.record import Record

# For each set, its examples and what its loss needs from the frozen copy.
Encoded = dict[str, tuple[list[Example], str | None]]


def sets_of(data: Dataset, objective: Objective) -> dict[str, Sequence[Record]]:
    """The sets that the algorithm reads."""
    sets: dict[str, Sequence[Record]] = {"forget": data.forget}
    if objective.constants.alpha:
        sets["retain"] = data.retain
    if objective.algorithm.alternate:
        sets["alternate"] = alternates(data.forget, data.alternates)
    return sets


def encoded_sets(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: Dataset,
    options: Unlearning,
    objective: Objective,
    observer: Observer,
) -> tuple[Encoded, dict[str, list[int]]]:
    """The sets that the algorithm reads, as tokens, and the numbers of the records that have some.

    Those are all of them, except under DP-SGD: there, a record that the tokenizer or its template rejects is left out,
    because a failure would tell the model's owner that it is there.
    """
    algorithm = objective.algorithm
    private = options.privacy.dp_epsilon is not None
    # A longer record would change what the model computes of the others in its batch.
    limits = [longest_input(model), longest_independent_input(model) if private else None]
    limit = min((each for each in limits if each is not None), default=None)
    prompts = options.prompts
    encoding = encoding_of(tokenizer, prompts, prompts.template, limit, data.few_shot, vocabulary_size(model))
    encoded: Encoded = {}
    record_numbers: dict[str, list[int]] = {}
    records = sets_of(data, objective)
    for name, set_records in records.items():
        of_each: list[list[Example]] = []
        record_numbers[name] = []
        problems = []
        for number, examples in enumerate(encoding.encode_each(set_records)):
            if private and not isinstance(examples, MpuError) and len(examples) != 1:
                examples = MpuError(
                    f"{set_records[number].location}: {len(examples)} examples, where --dp-epsilon takes one a record"
                )
            if not isinstance(examples, MpuError):
                of_each.append(examples)
                record_numbers[name].append(number)
            elif private:
                problems.append(examples.problem)
            else:
                raise examples
        if problems:
            observer.warn(
                f"{len(problems)} of {len(set_records)} records of the {name} set are left out: {problems[0]}"
            )
        together = [example for record_examples in of_each for example in record_examples]
        if not together and not private:
            raise MpuError(f"the {name} set has no record of two tokens or more, so there is nothing to learn from")
        if not together:  # to stop here would tell that each record was rejected: noise alone is trained on
            together = [Example([0, 0], [0, 0], 2)]
        usual = trained_length(model)
        if usual and (long := sum(len(example.ids) > usual for example in together)):
            observer.warn(
                f"{long} of {len(set_records)} records of the {name} set are longer than the {usual:,} tokens that the "
                "model was made for; --max-length cuts them"
            )
        reference_outputs = objective.retain_outputs if name == "retain" else algorithm.reference_outputs
        encoded[name] = together, reference_outputs
    for remark in encoding.remarks(sum(map(len, records.values()))):
        observer.note(remark)
    return encoded, record_numbers


def alternates(records: Sequence[Record], answers: Sequence[str]) -> list[Record]:
    """Each record with an alternative answer: its own ``alternate``, or one drawn from ``answers``.

    The draw is the same in every round, so that the outputs of the first round's copy can be the reference.
    """
    draw = random.Random(0)
    drawn = [draw.choice(answers) for _ in records]  # one per record, so that none depends on the others
    return [replace(r, answer=r.alternate or other, answer_fields=()) for r, other in zip(records, drawn, strict=True)]


def contents(data: Dataset) -> list[dict[str, object]]:
    """The records, wherever they were read from."""
    return [record.content for record in (*data.forget, *data.retain, *data.few_shot)]


def records_digest(data: Dataset) -> str:
    """SHA-256 of the records as the client has them, in hexadecimal.

    Not of their tokens: those are what the copy's tokenizer and template make of them, so two copies that treat a word
    differently would tell its owner, by equal digests, that no record has that word.
    """
    return hashlib.sha256(json.dumps([contents(data), list(data.alternates)], default=str).encode()).hexdigest()


@dataclass(frozen=True)
class KeptReferences:
    """Where the reference model's answers are kept (None: nowhere), whether they are read from there, and whose they
    are. ``records`` is a digest of the records and of the options that print them, ``surroundings`` of the copy's
    tokenizer, template and config: together they decide the tokens, and no single record decides whether they match."""

    path: Path | None
    read: bool
    manifest: CopyManifest | None
    records: str
    surroundings: str

    def facts(self, reference_outputs: Mapping[str, str | None]) -> dict[str, object]:
        """What has to be the same when the file is read again; the copy itself only in round 1."""
        manifest = self.manifest
        facts: dict[str, object] = {
            "run": manifest.run if manifest else None,
            "copy": manifest.copy if manifest else None,
        }
        facts |= {"records": self.records, "surroundings": self.surroundings, "asks": dict(reference_outputs)}
        if not self.read or (manifest and manifest.round == 1):
            facts["copy_id"] = manifest.copy_id if manifest else None
        return facts


def example_sets(
    model: PreTrainedModel,
    encoded: Encoded,
    reference_cache: KeptReferences,
    options: Unlearning,
    objective: Objective,
    observer: Observer,
) -> dict[str, ExampleSet]:
    """Each set with what the frozen copy says of it: ``model``, or round 1's if that was ``reference_cache``."""
    reference_outputs = {name: output_kind for name, (_, output_kind) in encoded.items()}

    def ask() -> dict[str, Reference]:
        if reference_cache.path and reference_cache.read:
            facts = reference_cache.facts(reference_outputs)
            loaded_references = load_references(reference_cache.path, reference_outputs, facts)
            observer.note(f"the reference model's probabilities are read from {reference_cache.path}")
            return loaded_references
        batch_size = options.training.micro_batch_size or options.training.batch_size
        layer, seed = objective.constants.layer, options.training.seed
        references = {
            name: freeze(model, examples, output_kind, layer=layer, batch_size=batch_size, seed=seed)
            for name, (examples, output_kind) in encoded.items()
        }
        if reference_cache.path:
            save_references(reference_cache.path, references, reference_cache.facts(reference_outputs))
        return references

    references = from_first(ask)
    device = PartialState().device if PartialState().num_processes > 1 else model.device
    references = {name: reference.on(device) for name, reference in references.items()}
    for name, reference in references.items():
        if reference.states:
            kind = reference_outputs[name]
            observer.note(f"the frozen copy's {kind} on the {name} set take {reference.nbytes:,} bytes")
    return {name: ExampleSet(examples, references[name]) for name, (examples, _) in encoded.items()}
