"""The cost of a round, before anyone starts it: bytes, memory and steps."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.functional import linear
from transformers import PretrainedConfig, PreTrainedModel

from mpu_cli.errors import MpuError
from mpu_cli.files.boundary import private_scratch
from mpu_cli.files.writer import nbytes_of
from mpu_cli.heap import RETURNED
from mpu_cli.model.device import device_of
from mpu_cli.model.load import skeleton, tokenizer_of
from mpu_cli.model.network import CHUNK, build, input_of
from mpu_cli.model.source import Model
from mpu_cli.model.tensors import BYTES, linear_layers
from mpu_cli.observer import Observer
from mpu_cli.options.unlearning import Unlearning
from mpu_cli.protocol.copies import BUFFERS
from mpu_cli.records.encode import EncodedSets, Encoding, Example, answer_tokens
from mpu_cli.records.forms import Record
from mpu_cli.training import lora
from mpu_cli.training.checks import PRECISIONS, check_options, epochs_of
from mpu_cli.training.data import Dataset
from mpu_cli.training.delta import change_of, delta_specs, stored_specs
from mpu_cli.training.examples import encoded_sets
from mpu_cli.training.execution import in_precision
from mpu_cli.training.loop import schedule
from mpu_cli.training.losses import Objective
from mpu_cli.training.optimizers import OPTIMIZERS
from mpu_cli.training.rates import records_at_once, usual_rate, with_epochs, with_precision, with_rate
from mpu_cli.training.stopping import StoppingRule
from mpu_cli.training.unlearn import UnlearningTask


@dataclass(frozen=True)
class Cost:
    """The traffic between the parties in one round, in bytes: ``published``, of all copies of a model with so many
    ``weights``, and ``returned``, of their deltas; ``server_memory``, whatever the model's size."""

    weights: int
    copies: int
    published: int
    returned: int
    server_memory: float


def cost(model: Model, *, copies: int, options: Unlearning) -> Cost:
    """The cost of one round with ``copies`` copies of ``model``, on which the client trains with ``options``."""
    parameters = [model.checkpoint.tensors[tensor.name] for tensor in model.layout.parameters]
    return Cost(
        weights=sum(info.elements for info in parameters),
        copies=copies,
        published=copies * sum(info.nbytes for info in parameters),
        returned=copies * nbytes_of(delta_specs(model, options)),
        server_memory=BUFFERS,
    )


def steps_of(options: Unlearning, records: int, stopping_rule: StoppingRule | None) -> int:
    """The steps of a training on so many ``records`` to forget: at most, with a ``stopping_rule``."""
    size = options.training.batch_size
    if stopping_rule:
        return stopping_rule.limit(records, size)
    return epochs_of(options) * -(-records // size)


class _Clock(Observer):
    """Notes when each training step ends."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._trains = False

    def stage(self, label: str, total: float, unit: str = "bytes") -> None:  # noqa: ARG002 (as all observers have it)
        self._trains = unit == "steps"

    def advance(self, amount: float, detail: str = "") -> None:  # noqa: ARG002
        if self._trains:
            self.times.append(time.perf_counter())


def seconds_of_step(copy: Model, data: Dataset, options: Unlearning) -> float:
    """The duration of a training step here, the second, as the first makes the optimiser's state. Nothing is kept."""
    size, clock = options.training.batch_size, _Clock()
    data = replace(data, forget=data.forget[:size])
    with private_scratch() as folder:
        options = replace(options, epochs=2)
        UnlearningTask(copy, data, options, target=folder / "delta.safetensors", observer=clock).run()
    return clock.times[-1] - clock.times[-2]


def training_memory(weights: int, optimizer: str) -> int:
    """Bytes for the weights, their gradient and the optimiser's state, in float32, without activations."""
    return weights * (4 + 4 + OPTIMIZERS[optimizer].state_bytes)


@dataclass(frozen=True, kw_only=True)
class TrainingCost:
    """The cost of training on one copy."""

    epochs: int
    steps: int
    kept: int  # records to keep in a step
    rate: float
    usual_rate: float | None  # of --lr auto, None for optimisers that have none
    memory: Memory  # at the peak
    work: Work


def training_cost(copy: Model, data: Dataset, options: Unlearning, stopping_rule: StoppingRule | None) -> TrainingCost:
    """The cost of an ``UnlearningTask``; with a ``stopping_rule``, of the most steps that it allows.

    Raises MpuError if the model has no tokenizer or a record cannot be read, UsageError for options that do not go
    together.
    """
    objective = check_options(options)
    limit = stopping_rule.limit(len(data.forget), options.training.batch_size) if stopping_rule else None
    if limit:
        options = replace(options, epochs=-(-limit * options.training.batch_size // max(1, len(data.forget))))
    options = with_epochs(options, len(data.forget))
    empty_model, epochs = skeleton(copy), epochs_of(options)
    specs = stored_specs(change_of(options, empty_model, copy.checkpoint, torch.float32), empty_model, options)
    sets, _ = encoded_sets(empty_model, tokenizer_of(copy), data, options)
    training = options.training
    steps = schedule(
        len(sets["forget"]), len(sets.get("retain", ())), epochs=epochs, batch_size=training.batch_size,
        seed=training.seed, retain_per_forget=objective.algorithm.retain_per_forget,
    )[:limit]  # fmt: skip
    trained = sum(math.prod(shape) for _, shape in specs.values())
    work = largest_work(sets, options, objective)
    return TrainingCost(
        epochs=epochs,
        steps=len(steps),
        kept=training.batch_size * objective.algorithm.retain_per_forget if "retain" in sets else 0,
        rate=float(with_rate(options, trained, len(steps)).lr),
        usual_rate=usual_rate(options, trained, len(steps)),
        memory=peak_memory(copy, options, objective, work, empty_model),
        work=work,
    )


def examples_of(model: Model, records: Sequence[Record]) -> list[Example]:
    """``records``, encoded as for training: with the chat template if the tokenizer has one.

    Raises MpuError if the model has no tokenizer.
    """
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
    """The memory at the peak of a training step, in bytes."""

    weights: float
    gradients: float
    state: float
    activations: float  # all that is kept for the backward pass of the largest micro-batch
    logits: float  # as many as are computed at once, or the frozen model's output head
    fragments: float = 0.0  # blocks that the allocator holds and cannot use
    process: float = PROCESS  # without data; on a CUDA device, its context

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
    """The number of records that go through the model together, of so many ``records`` to forget (None: a step's)."""
    training = options.training
    terms = ["forget", "retain"] if objective.constants.alpha else ["forget"]
    of_forget = training.batch_size if records is None else min(training.batch_size, records)
    of_step = of_forget * max(map(objective.records, objective.passes(terms)))
    return min(of_step, records_at_once(training, device_of(training.device), of_step))


def largest_work(sets: EncodedSets, options: Unlearning, objective: Objective) -> Work:
    """The largest micro-batch of a training on ``sets``: as many records as go at once, all as long as the longest."""
    examples = [example for of_set in sets.values() for example in of_set]
    rows = rows_at_once(options, objective, len(sets["forget"]))
    return Work(rows, max(len(example.ids) for example in examples), rows * max(map(answer_tokens, examples)))


def peak_memory(
    copy: Model, options: Unlearning, objective: Objective, work: Work, empty_model: PreTrainedModel | None = None
) -> Memory:
    """The peak of unlearning on ``copy``; ``empty_model`` is its skeleton, where there is one already.

    Raises MpuError if transformers does not know the model.
    """
    options = replace(options, training=with_precision(options.training, copy))
    dtype = PRECISIONS[options.training.precision]
    empty_model = empty_model or skeleton(copy)
    trained_names = set(change_of(options, empty_model, copy.checkpoint, dtype).trainable_names(empty_model))
    weights = float(sum(p.numel() for p in empty_model.parameters()) * dtype.itemsize)
    if options.lora.quantize and (matrices := [layer.weight.numel() for layer in linear_layers(empty_model).values()]):
        weights -= sum(matrices) * (dtype.itemsize - BYTES)
        weights += max(matrices) * dtype.itemsize  # one at a time, as what it stands for
    width, device = dtype.itemsize, device_of(options.training.device)
    sizes = [p.numel() for name, p in empty_model.named_parameters() if name in trained_names]
    trained = sum(sizes)
    scattered = sum(size for size in sizes if size * width < RETURNED)
    if options.lora.is_on:
        shapes = [weight.shape for weight in lora.adapted_parameters(empty_model, options.lora, trained_names).values()]
        trained = scattered = sum(math.prod(shape[:-2]) * options.lora.rank * sum(shape[-2:]) for shape in shapes)
        width = FACTORS
        weights += trained * width
    activation_bytes = held_for_backward(empty_model, dtype, options, work, trained_names)
    vocabulary = empty_model.get_output_embeddings().weight
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
    empty_model: PreTrainedModel, dtype: torch.dtype, options: Unlearning, work: Work, trained: set[str]
) -> int:
    """Bytes that the backward pass keeps of one pass, beside the model's own tensors."""
    config, checkpointing = empty_model.config.get_text_config(), options.training.gradient_checkpointing
    layers = max(1, config.num_hidden_layers)
    try:
        model = _without_data(empty_model, dtype, options, trained)
        saved_bytes = _saved_tensor_bytes(model, work)
        if not checkpointing:
            return saved_bytes
        model.enable_input_require_grads()  # as peft does: checkpoints of frozen inputs would have no gradient
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return _saved_tensor_bytes(model, work) + saved_bytes // layers  # one layer at a time is computed again
    except (RuntimeError, ValueError):  # what this model computes depends on its data, such as a router's choices
        saved_bytes = by_formula(config, work, dtype)
        return saved_bytes // layers + saved_bytes // KEPT_BY_LAYER if checkpointing else saved_bytes


def _without_data(
    empty_model: PreTrainedModel, dtype: torch.dtype, options: Unlearning, trained: set[str]
) -> PreTrainedModel:
    """A model as it is trained, on fake tensors."""
    with FakeTensorMode():
        model = build(empty_model.config, dtype=dtype)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained)
        if options.lora.quantize and options.training.precision == "mixed":  # products of what 4 bits stand for
            for layer in linear_layers(model).values():
                layer.to(torch.bfloat16)
        if options.lora.is_on:
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
    del output  # which keeps the graph alive until here
    return sum(tensor.untyped_storage().nbytes() for tensor in saved_tensors.values())


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
