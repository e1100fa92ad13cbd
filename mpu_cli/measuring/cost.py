"""What a round will cost, before anyone starts it: bytes, memory, operations, the server's time.

The paper (appendix) counts 9·m·N·b bytes moved and m·(6N + 4·d_h·N_attn) operations for publishing and aggregating
m copies of N weights of b bytes, N_attn of them in attention. The time is the larger of what these take at this
machine's measured bandwidth and speed: a roofline, which is ours, not the paper's.
"""

from __future__ import annotations

import math
import os
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.functional import linear
from transformers import PretrainedConfig, PreTrainedModel

from mpu_cli.errors import MpuError
from mpu_cli.files.reader import ITEM_SIZE
from mpu_cli.files.writer import nbytes_of
from mpu_cli.heap import RETURNED
from mpu_cli.model.device import device_of
from mpu_cli.model.load import skeleton, tokenizer_of
from mpu_cli.model.network import CHUNK, build, input_of
from mpu_cli.model.source import Model
from mpu_cli.model.tensors import BYTES, linear_layers
from mpu_cli.options.declare import declared_options, flat, from_flat
from mpu_cli.options.unlearning import RecordFormat, Unlearning
from mpu_cli.protocol.stream import BUFFERS
from mpu_cli.records.encode import Encoding, Example, answer_tokens
from mpu_cli.records.read import read_records
from mpu_cli.training import lora
from mpu_cli.training.data import Dataset, encoded_sets
from mpu_cli.training.delta import change_of, delta_specs, stored_specs
from mpu_cli.training.execution import in_precision
from mpu_cli.training.job import PRECISIONS, check_options, epochs_of
from mpu_cli.training.loop import schedule
from mpu_cli.training.losses import Objective, objective_of
from mpu_cli.training.optimizers import OPTIMIZERS
from mpu_cli.training.rates import records_at_once, usual_rate, with_epochs, with_precision, with_rate
from mpu_cli.training.stopping import Until

ATTENTION = {"query", "key", "value", "mixed"}
TRIES = 9
SLOWER = 2.0  # a training than its matrix products would be alone, at batches of a few records (docs/measured.md)


@dataclass(frozen=True)
class Machine:
    """Measured here: bytes copied in memory per second (counting read and write), and operations per second of matrix
    products, in float32 and (``training_operations``) in the precision of a training.

    ``spread``: how many times as long the slowest of these products took as the fastest; ``busy``: for how many other
    programs each core had work in the last minute.
    """

    bandwidth: float
    operations: float
    training_operations: float
    spread: float
    busy: float


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


@cache
def measure_machine(precision: str = "float32") -> Machine:
    """Best of a few tries at copying 256 MB and at multiplying two 1,024 × 1,024 matrices, also in ``precision``."""
    busy = max(0.0, os.getloadavg()[0] - 1) / (os.cpu_count() or 1)  # one of them is this program
    source = torch.ones(64 << 20, dtype=torch.float32)
    target = torch.empty_like(source)
    matrix = torch.ones(1024, 1024)
    in_training = matrix.to(torch.bfloat16 if precision == "mixed" else PRECISIONS[precision])
    copying = _seconds(lambda: target.copy_(source))
    multiplying = _seconds(lambda: matrix @ matrix)
    training = _seconds(lambda: in_training @ in_training)
    operations = 2 * 1024**3
    return Machine(
        bandwidth=2 * source.nbytes / min(copying),
        operations=operations / min(multiplying),
        training_operations=operations / min(training),
        spread=max(training) / min(training),
        busy=busy,
    )


def _seconds(work: Callable[[], object]) -> list[float]:
    """The seconds that each of a few tries takes, after one that is not counted."""
    # timeit turns garbage collection off; a training runs with it.
    return timeit.repeat(work, "import gc; gc.enable()", repeat=1 + TRIES, number=1)[1:]


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
    layout = model.layout
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
        training_seconds=None if training is None else SLOWER * training / machine.training_operations,
    )


def set_count(options: Unlearning) -> int:
    """How many sets of records are trained on, each with as many records a step: those to forget, and those to keep."""
    return 2 if objective_of(options.algo, options.loss).constants.alpha else 1


@dataclass(frozen=True, kw_only=True)
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


def training_cost(copy: Model, data: Dataset, options: Unlearning, until: Until | None = None) -> TrainingCost:
    """What ``unlearn`` takes; ``until``: when it stops, which is counted as late as it may.

    Raises MpuError if the model has no tokenizer or a record cannot be read, UsageError for options that do not go
    together.
    """
    objective = check_options(options)
    limit = until.limit(len(data.forget), options.training.batch_size) if until else None
    if limit:
        options = replace(options, epochs=-(-limit * options.training.batch_size // max(1, len(data.forget))))
    options = with_epochs(options, len(data.forget))
    bare, epochs = skeleton(copy), epochs_of(options)
    specs = stored_specs(change_of(options, bare, copy.checkpoint, torch.float32), bare, options)
    encoded, _ = encoded_sets(bare, tokenizer_of(copy), data, options)
    sets = {name: examples for name, (examples, _) in encoded.items()}
    training = options.training
    steps = schedule(
        len(sets["forget"]), len(sets.get("retain", ())), epochs=epochs, batch_size=training.batch_size,
        seed=training.seed, retain_per_forget=objective.algorithm.retain_per_forget,
    )[:limit]  # fmt: skip
    trained = sum(math.prod(shape) for _, shape in specs.values())
    seconds = None
    if device_of(training.device).type == "cpu":
        weights = sum(info.elements for info in copy.checkpoint.tensors.values())
        of_forget = sum(len(example.ids) for example in sets["forget"])
        # In units of the records to forget, with as many of each other set.
        reads = 1 + ("alternate" in sets) + objective.algorithm.retain_per_forget * ("retain" in sets)
        # A backward pass counts as two. Then one pass for the reference, and all sets scored before and after.
        passes = 3 * epochs * reads * SLOWER + 1 + 2 * reads
        seconds = 2.0 * weights * passes * of_forget / measure_machine().operations  # a multiplication and an addition
    work = largest_work(sets, options, objective)
    return TrainingCost(
        epochs=epochs,
        steps=len(steps),
        rate=float(with_rate(options, trained, len(steps)).lr),
        usual_rate=usual_rate(options, trained, len(steps)),
        memory=peak_memory(copy, options, objective, work, bare),
        work=work,
        seconds=seconds,
    )


def examples_of(model: Model, forget: str, reading: RecordFormat) -> list[Example]:
    """Records, encoded as for training: with the chat template if the tokenizer has one.

    Raises MpuError if the model has no tokenizer or the records cannot be read.
    """
    records = read_records(forget, reading)
    try:
        tokenizer = tokenizer_of(model)
    except MpuError as error:
        raise MpuError(f"{model.source}: has no tokenizer, which is needed to count the tokens of --forget") from error
    return Encoding(tokenizer).encode(records)


# Peak memory of a training, before it: weights and optimiser from their sizes, activations from a pass without data.
#
# The pass is of the model's own code, with torch's fake tensors: what the backward pass would keep is counted,
# storage by storage, with LoRA, checkpointing and mixed precision as they are. Nothing of that size exists. Where
# what a model computes depends on its data (mixtures), a formula takes its place.

PROCESS = 400e6  # bytes: Python with torch, transformers and what they load
CONTEXT = 0.5 * 2**30  # bytes on a CUDA device before anything of a model is there
# Of gradients and the optimiser's state in blocks smaller than glibc returns: what lies between them and is of no use.
# Measured on 135 M parameters (tests/benchmarks/memory.py), whose matrices are all that small.
FRAGMENTS = 0.3
KEPT_BY_LAYER = 12  # a layer keeps about so many times its input, which checkpointing alone keeps
FACTORS = 4  # bytes of a number in LoRA's factors


@dataclass(frozen=True)
class Memory:
    """What is held at the peak of a training step, in bytes. ``activations``: all that the backward pass of the largest
    micro-batch keeps; ``logits``: those computed at once, or the frozen model's output head; ``fragments``: what the
    allocator holds and cannot use; ``process``: without data, on a CUDA device its context.
    """

    weights: float
    gradients: float
    state: float
    activations: float
    logits: float
    fragments: float = 0.0
    process: float = PROCESS

    @property
    def total(self) -> float:
        return sum(asdict(self).values())


@dataclass(frozen=True)
class Work:
    """The largest micro-batch: ``rows`` of ``length`` tokens, of which ``answers`` in all are predicted."""

    rows: int
    length: int
    answers: int


def rows_at_once(options: Unlearning, objective: Objective, records: int | None = None) -> int:
    """How many records go through the model together, of so many ``records`` to forget (None: enough for a step)."""
    training = options.training
    terms = ["forget", "retain"] if objective.constants.alpha else ["forget"]
    of_forget = training.batch_size if records is None else min(training.batch_size, records)
    of_step = of_forget * max(map(objective.records, objective.passes(terms)))
    return min(of_step, records_at_once(training, device_of(training.device), of_step))


def largest_work(sets: Mapping[str, Sequence[Example]], options: Unlearning, objective: Objective) -> Work:
    """The largest micro-batch of a training on ``sets``: as many records as go at once, all as long as the longest."""
    examples = [example for of_set in sets.values() for example in of_set]
    rows = rows_at_once(options, objective, len(sets["forget"]))
    return Work(rows, max(len(example.ids) for example in examples), rows * max(map(answer_tokens, examples)))


def peak_memory(
    copy: Model, options: Unlearning, objective: Objective, work: Work, bare: PreTrainedModel | None = None
) -> Memory:
    """The peak of ``unlearn`` on ``copy``; ``bare`` is its skeleton, where there is one already.

    Raises MpuError if transformers does not know the model.
    """
    options = replace(options, training=with_precision(options.training, copy))
    dtype = PRECISIONS[options.training.precision]
    bare = bare or skeleton(copy)
    trained_names = set(change_of(options, bare, copy.checkpoint, dtype).trainable_names(bare))
    weights = float(sum(p.numel() for p in bare.parameters()) * dtype.itemsize)
    if options.lora.quantize and (matrices := [layer.weight.numel() for layer in linear_layers(bare).values()]):
        weights -= sum(matrices) * (dtype.itemsize - BYTES)
        weights += max(matrices) * dtype.itemsize  # one at a time, as what it stands for
    width, device = dtype.itemsize, device_of(options.training.device)
    sizes = [p.numel() for name, p in bare.named_parameters() if name in trained_names]
    trained = sum(sizes)
    scattered = sum(size for size in sizes if size * width < RETURNED)
    if options.lora.lora_rank is not None:
        shapes = [weight.shape for weight in lora.adapted_parameters(bare, options.lora, trained_names).values()]
        trained = scattered = sum(math.prod(shape[:-2]) * options.lora.rank * sum(shape[-2:]) for shape in shapes)
        width = FACTORS
        weights += trained * width
    activation_bytes = held_for_backward(bare, dtype, options, work, trained_names)
    vocabulary = bare.get_output_embeddings().weight
    at_once = min(work.answers * vocabulary.shape[0], CHUNK)
    logits = at_once * (4 if dtype == torch.float32 else 4 + dtype.itemsize)
    if "logits" in (objective.algorithm.reference_outputs, objective.retain_outputs):  # a frozen head, and its logits
        logits += vocabulary.numel() * dtype.itemsize + 4 * at_once
    terms = 2 if objective.algorithm.alternate else 1  # a record and its alternative go through together
    state_bytes = OPTIMIZERS[options.training.optim].state_bytes
    return Memory(
        weights=weights,
        gradients=trained * width,
        state=trained * state_bytes,
        activations=terms * activation_bytes,
        logits=logits,
        fragments=FRAGMENTS * scattered * (width + state_bytes) if device.type == "cpu" else 0.0,
        process=CONTEXT if device.type == "cuda" else PROCESS,
    )


def held_for_backward(
    bare: PreTrainedModel, dtype: torch.dtype, options: Unlearning, work: Work, trained: set[str]
) -> int:
    """Bytes that the backward pass keeps of one pass, beside the model's own tensors."""
    config, checkpointing = bare.config.get_text_config(), options.training.gradient_checkpointing
    layers = max(1, config.num_hidden_layers)
    try:
        model = _without_data(bare, dtype, options, trained)
        saved_bytes = _saved_tensor_bytes(model, work)
        if not checkpointing:
            return saved_bytes
        model.enable_input_require_grads()  # as peft does: checkpoints of frozen inputs would have no gradient
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return _saved_tensor_bytes(model, work) + saved_bytes // layers  # one layer at a time is computed again
    except (RuntimeError, ValueError):  # what this model computes depends on its data, such as a router's choices
        saved_bytes = by_formula(config, work, dtype)
        return saved_bytes // layers + saved_bytes // KEPT_BY_LAYER if checkpointing else saved_bytes


def _without_data(bare: PreTrainedModel, dtype: torch.dtype, options: Unlearning, trained: set[str]) -> PreTrainedModel:
    """A model as it is trained, on fake tensors."""
    with FakeTensorMode():
        model = build(bare.config, dtype=dtype)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained)
        if options.lora.quantize and options.training.precision == "mixed":  # products of what 4 bits stand for
            for layer in linear_layers(model).values():
                layer.to(torch.bfloat16)
        if options.lora.lora_rank is not None:
            targets = lora.adapted_parameters(model, options.lora, trained)
            model.requires_grad_(False)
            for name, weight in targets.items():
                if weight.ndim == 2:  # stacks of experts' matrices are left out: they add little to what is kept
                    module = name.removesuffix(".weight")
                    model.set_submodule(module, _LowRank(model.get_submodule(module), weight, options.lora.rank))
    return in_precision(model, options.training.precision).train()


class _LowRank(torch.nn.Module):
    """A frozen linear layer and factors beside it, which keep for the backward pass what peft's do."""

    def __init__(self, base: torch.nn.Module, weight: torch.Tensor, rank: int):
        super().__init__()
        self.base = base
        rows, columns = weight.shape if isinstance(base, torch.nn.Linear) else weight.shape[::-1]
        self.lora_A = torch.nn.Parameter(torch.empty(rank, columns))
        self.lora_B = torch.nn.Parameter(torch.empty(rows, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frozen = self.base(x)
        return frozen + linear(linear(x, self.lora_A.to(x.dtype)), self.lora_B.to(x.dtype)).to(frozen.dtype)


def by_formula(config: PretrainedConfig, work: Work, dtype: torch.dtype) -> int:
    """Bytes that the backward pass keeps, from a config: of each token and layer, two norms' input, normalised and
    scaled states (6 · width), queries and the attention's output, keys and values, and gate, its activation, up and
    their product (4 · feed-forward, for each expert that a token goes to)."""
    width, heads = config.hidden_size, config.num_attention_heads
    of_head = getattr(config, "head_dim", None) or width // heads
    shared = getattr(config, "num_key_value_heads", None) or heads
    experts = getattr(config, "num_experts_per_tok", None) or 1
    inner = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None) or 4 * width
    elements_per_token = 6 * width + 2 * (heads + shared) * of_head + 4 * experts * inner
    return work.rows * work.length * config.num_hidden_layers * elements_per_token * dtype.itemsize


def _saved_tensor_bytes(model: PreTrainedModel, work: Work) -> int:
    model_storages = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
    saved_tensors: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if _storage(tensor) not in model_storages:
            saved_tensors.setdefault(_storage(tensor), tensor)
        return tensor

    fakes = next(tensor.fake_mode for tensor in model.parameters() if isinstance(tensor, FakeTensor))
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with fakes, hooks, input_of(model.get_output_embeddings()):
        ids = torch.zeros(work.rows, work.length, dtype=torch.long)
        output = model(input_ids=ids, use_cache=False, logits_to_keep=1)
    del output  # until here, what it keeps is kept
    return sum(tensor.untyped_storage().nbytes() for tensor in saved_tensors.values())


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def way_to_fit(
    copy: Model, options: Unlearning, objective: Objective, work: Work, memory: float
) -> tuple[str, Memory] | None:
    """The cheapest change with which ``options`` fit into ``memory`` bytes: what to add to the command, and the peak
    with it. None if none of those that are known does."""
    private, training, rank = options.privacy.dp_epsilon is not None, options.training, options.lora.lora_rank
    checkpointing, half = {"gradient_checkpointing": True}, {"precision": "bfloat16"}

    def with_rows(changes: dict[str, Any], counts: Sequence[int]) -> list[dict[str, Any]]:
        """``changes`` with micro-batches of each of ``counts``, where that is fewer than now."""
        return [changes | ({"micro_batch_size": rows} if rows < work.rows else {}) for rows in counts]

    smaller = [rows for rows in (16, 8, 4, 2, 1) if rows < work.rows]
    tries = with_rows({}, smaller)
    if not training.gradient_checkpointing and not private:
        tries += with_rows(checkpointing, (work.rows, *smaller))
    if rank is None:
        for changes in with_rows({"lora_rank": 16, **checkpointing}, (work.rows, 1)):
            tries += [changes, changes | half]
    elif training.precision != "bfloat16":
        tries += with_rows(checkpointing | half, (1,))
    if not options.lora.quantize and training.precision != "float64" and not private:
        low_rank = {} if rank else {"lora_rank": 16}
        tries += with_rows({**low_rank, "quantize": "nf4", **checkpointing, **half}, (1,))
    bare, flags = skeleton(copy), declared_options(Unlearning)
    for changes in tries:
        rows = changes.get("micro_batch_size", work.rows)
        fewer = replace(work, rows=rows, answers=-(-work.answers * rows // work.rows))
        needed = peak_memory(copy, from_flat(Unlearning, flat(options) | changes), objective, fewer, bare)
        if needed.total <= memory:
            words = []
            for name, value in changes.items():
                words += [flags[name].flag] if value is True else [flags[name].flag, str(value)]
            return " ".join(words), needed
    return None
