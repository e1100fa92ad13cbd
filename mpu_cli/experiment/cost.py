"""What a round will cost, before anyone starts it: bytes, memory, operations, the server's time.

The paper (appendix) counts 9·m·N·b bytes moved and m·(6N + 4·d_h·N_attn) operations for publishing and aggregating
m copies of N weights of b bytes, N_attn of them in attention. The time is the larger of what these take at this
machine's measured bandwidth and speed: a roofline, which is ours, not the paper's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mpu_cli.architectures.layout import layout_of
from mpu_cli.checkpoint.header import ITEM_SIZE
from mpu_cli.client.optimizers import OPTIMIZERS
from mpu_cli.errors import MpuError
from mpu_cli.models.shallow import shallow
from mpu_cli.models.source import Model, open_model
from mpu_cli.observer import SILENT
from mpu_cli.server.copying import BUFFERS

if TYPE_CHECKING:
    from mpu_cli.client.dataset import Dataset
    from mpu_cli.experiment.memory import Memory, Work
    from mpu_cli.options.experiment import Experiment
    from mpu_cli.options.unlearning import RecordFormat, Unlearning
    from mpu_cli.records.encoding import Example

ATTENTION = {"query", "key", "value", "mixed"}
TRIES = 5
SLOWER = 2.0  # a training than its matrix products would be alone, at batches of a few records (docs/performance.md)


@dataclass(frozen=True)
class Machine:
    """Measured here: bytes copied in memory per second (counting read and write), and float32 operations per second."""

    bandwidth: float
    operations: float


@dataclass(frozen=True)
class Cost:
    """One round, as the paper counts it; bytes and seconds.

    ``weights``: of the model, ``attention_weights`` of them in attention, whose heads have ``head_size`` coordinates;
    ``published``: bytes of all ``copies``; ``returned``: of their deltas; ``moved``: bytes that the server
    reads and writes, ``operations`` what it computes, ``intensity`` their ratio; ``server_seconds`` the larger of what
    both take here; ``training_…``: of all copies, None if the records are not known.
    """

    weights: int
    attention_weights: int
    head_size: int
    copies: int
    published: int
    returned: int
    server_memory: float
    moved: float
    operations: float
    intensity: float
    server_seconds: float
    training_operations: float | None
    training_seconds: float | None


def training_memory(weights: int, optimizer: str) -> int:
    """Bytes for the weights, their gradient and the optimiser's state, in float32, without activations."""
    return weights * (4 + 4 + OPTIMIZERS[optimizer].state_bytes)


def measure_machine() -> Machine:
    """Best of a few tries at copying 256 MB and at multiplying two 1,024 × 1,024 matrices."""
    source = torch.ones(64 << 20, dtype=torch.float32)
    target = torch.empty_like(source)
    matrix = torch.ones(1024, 1024)
    copying = _best(lambda: target.copy_(source))
    multiplying = _best(lambda: matrix @ matrix)
    return Machine(2 * source.nbytes / copying, 2 * 1024**3 / multiplying)


def _best(work: Callable[[], object]) -> float:
    work()
    seconds = []
    for _ in range(TRIES):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def cost(
    model: Model,
    machine: Machine,
    *,
    copies: int,
    options: Unlearning,
    tokens: int | None = None,
) -> Cost:
    """The cost of one round with ``copies`` copies of ``model``; ``tokens`` is how many training reads per copy.

    Training takes 6 operations per token and weight, 2 forward and 4 backward; with LoRA, which has no gradients of the
    weights, 4. What comes back is what ``options`` train.
    """
    from mpu_cli.checkpoint.writer import nbytes_of
    from mpu_cli.client.delta import delta_specs

    layout = layout_of(model.checkpoint.tensors, model.config, model.source)
    parameters = {tensor.name: model.checkpoint.tensors[tensor.name] for tensor in layout.parameters}
    weights = sum(info.elements for info in parameters.values())
    attention = sum(
        parameters[tensor.name].elements
        for tensor in layout.parameters
        if any(ATTENTION & set(axis) for axis in tensor.axes)
    )
    stored = sum(info.nbytes for info in parameters.values())
    width = max(ITEM_SIZE[info.dtype] for info in parameters.values())
    moved = 9 * copies * weights * width
    operations = copies * (6 * weights + 4 * layout.sizes["head_dim"] * attention)
    per_token = 6.0 if options.lora.lora_rank is None else 4.0
    training = None if tokens is None else per_token * weights * tokens * copies
    return Cost(
        weights=weights,
        attention_weights=attention,
        head_size=layout.sizes["head_dim"],
        copies=copies,
        published=copies * stored,
        returned=copies * nbytes_of(delta_specs(model, options)),
        server_memory=BUFFERS,
        moved=moved,
        operations=operations,
        intensity=operations / moved,
        server_seconds=max(moved / machine.bandwidth, operations / machine.operations),
        training_operations=training,
        training_seconds=None if training is None else SLOWER * training / machine.operations,
    )


@dataclass(frozen=True)
class ExperimentCost:
    """An experiment with all its rounds: bytes to and from the client, hours of training here, roughly."""

    sent: int
    returned: int
    hours: float


def costs_of(experiments: Sequence[Experiment]) -> list[ExperimentCost | None]:
    """What each experiment costs; None if its model or records are not on this machine."""
    from mpu_cli.client.checks import epochs_of
    from mpu_cli.experiment.modes import publication_in, rounds_of, with_merged_rounds

    machine = measure_machine()
    costs: list[ExperimentCost | None] = []
    read: dict[tuple[str, str, RecordFormat], int] = {}
    for experiment in experiments:
        played = with_merged_rounds(experiment)
        published = publication_in(played, seed=bytes(32))
        options = played.unlearning
        where = (played.base, options.records.forget, options.records.reading)
        if not Path(played.base).exists():
            costs.append(None)
            continue
        try:
            model = shallow(open_model(played.base), published.omitted)
            if where not in read:
                read[where] = training_tokens(model, options.records.forget, options.records.reading)
        except MpuError:
            costs.append(None)
            continue
        round_cost = cost(
            model, machine, copies=published.copies, options=options,
            tokens=int(sets_of(options) * epochs_of(options) * read[where]),
        )  # fmt: skip
        rounds = rounds_of(played)
        assert round_cost.training_seconds is not None
        costs.append(
            ExperimentCost(
                rounds * round_cost.published,
                rounds * round_cost.returned,
                rounds * round_cost.training_seconds / 3600,
            )
        )
    return costs


def sets_of(options: Unlearning) -> int:
    """How many sets of records are trained on, each with as many records a step: those to forget, and those to keep."""
    from mpu_cli.client.losses import objective_of

    return 2 if objective_of(options.algo, options.loss).constants.alpha else 1


@dataclass(frozen=True)
class TrainingCost:
    """Training on one copy: its peak ``memory``, with the largest micro-batch, ``work``; ``usual_rate``: what --lr auto
    would be, None for optimisers that have none; ``seconds``: on processors, else None."""

    epochs: int
    steps: int
    rate: float
    usual_rate: float | None
    memory: Memory
    work: Work
    seconds: float | None


def training_cost(copy: Model, data: Dataset, options: Unlearning) -> TrainingCost:
    """What ``unlearn`` takes. In each step, as many records are read to keep as to forget.

    Raises MpuError if the model has no tokenizer or a record cannot be read, UsageError for options that do not go
    together.
    """
    from mpu_cli.client.checks import check_options, epochs_of
    from mpu_cli.client.datasets import encoded_sets
    from mpu_cli.client.delta import change_of, stored_specs
    from mpu_cli.client.rate import usual_rate, with_epochs, with_rate
    from mpu_cli.client.schedule import schedule
    from mpu_cli.experiment.memory import largest_work, peak_memory
    from mpu_cli.models.device import device_of
    from mpu_cli.models.loading import skeleton
    from mpu_cli.models.tokenizer import tokenizer_of

    objective = check_options(options)
    options = with_epochs(options, len(data.forget))
    bare, epochs = skeleton(copy), epochs_of(options)
    specs = stored_specs(change_of(options, bare, copy.checkpoint, torch.float32), bare, options)
    encoded, _ = encoded_sets(bare, tokenizer_of(copy), data, options, objective, SILENT)
    sets = {name: examples for name, (examples, _) in encoded.items()}
    training = options.training
    steps = schedule(
        len(sets["forget"]), len(sets.get("retain", ())), epochs=epochs, batch_size=training.batch_size,
        seed=training.seed,
    )  # fmt: skip
    trained = sum(math.prod(shape) for _, shape in specs.values())
    seconds = None
    if device_of(training.device).type == "cpu":
        weights = sum(info.elements for info in copy.checkpoint.tensors.values())
        of_forget = sum(len(example.ids) for example in sets["forget"])
        passes = 3 * epochs * len(encoded) * SLOWER + 1 + 2 * len(encoded)  # and the reference's, and before and after
        seconds = 2.0 * weights * passes * of_forget / measure_machine().operations
    work = largest_work(list(sets.values()), options)
    return TrainingCost(
        epochs,
        len(steps),
        float(with_rate(options, trained, len(steps)).lr),
        usual_rate(options, trained, len(steps)),
        peak_memory(copy, options, objective, work, bare),
        work,
        seconds,
    )


def training_tokens(model: Model, forget: str, reading: RecordFormat) -> int:
    """Number of tokens in all records, encoded as for training."""
    return sum(len(example.ids) for example in examples_of(model, forget, reading))


def examples_of(model: Model, forget: str, reading: RecordFormat) -> list[Example]:
    """Records, encoded as for training: with the chat template if the tokenizer has one.

    Raises MpuError if the model has no tokenizer or the records cannot be read.
    """
    from mpu_cli.models.tokenizer import tokenizer_of
    from mpu_cli.records.encoding import Encoding
    from mpu_cli.records.reading import read_named

    records = read_named(forget, reading)
    try:
        tokenizer = tokenizer_of(model)
    except MpuError as error:
        raise MpuError(f"{model.source}: has no tokenizer, which is needed to count the tokens of --forget") from error
    return Encoding(tokenizer).encode(records)
