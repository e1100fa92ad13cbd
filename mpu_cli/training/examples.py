"""The records of a training as tokens."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mpu_cli.errors import MpuError
from mpu_cli.model.load import limits_of
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.unlearning import Unlearning
from mpu_cli.records.encode import Example, encoding_of
from mpu_cli.records.forms import Record
from mpu_cli.training.data import Dataset, alternates
from mpu_cli.training.losses import Objective, objective_of


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
    *,
    observer: Observer = SILENT,
) -> tuple[dict[str, list[Example]], dict[str, list[int]]]:
    """The examples of the sets that the algorithm reads, and the numbers of the records that have some.

    Those are all of them, except under DP-SGD: there, a record that the tokenizer or its template rejects is left out,
    because a failure would tell the model's owner that it is there.
    """
    private = options.privacy.is_on
    # A longer record would change what the model computes of the others in its batch.
    limits, prompts = limits_of(model, independent=private), options.prompts
    encoding = encoding_of(tokenizer, prompts, prompts.template, limits)
    encoded: dict[str, list[Example]] = {}
    record_numbers: dict[str, list[int]] = {}
    records = sets_of(data, objective_of(options.algo, options.algorithm_options))
    for name, set_records in data.sets.items():
        if name not in (*records, "retain") and set_records:  # scored on the way, and not trained on
            records[name] = set_records
    for name, set_records in records.items():
        encoded[name] = []
        record_numbers[name] = []
        problems = []
        for number, examples in enumerate(encoding.encode_each(set_records)):
            if private and not isinstance(examples, MpuError) and len(examples) != 1:
                examples = MpuError(
                    f"{set_records[number].location}: {len(examples)} examples, where --dp epsilon takes one a record"
                )
            if not isinstance(examples, MpuError):
                encoded[name] += examples
                record_numbers[name].append(number)
            elif private:
                problems.append(examples.problem)
            else:
                raise examples
        if problems:
            observer.warn(
                f"{len(problems)} of {len(set_records)} records of the {name} set are left out: {problems[0]}"
            )
        if not encoded[name] and not private:
            raise MpuError(f"the {name} set has no record of two tokens or more, so there is nothing to learn from")
        if not encoded[name]:  # to stop here would tell that each record was rejected: noise alone is trained on
            encoded[name] = [Example([0, 0], [0, 0], 2)]
    for remark in encoding.remarks(sum(map(len, records.values()))):
        observer.warn(remark)
    return encoded, record_numbers
