"""Signs that a copy is not what it should be, looked for before anything is trained on it.

Secret coordinates keep the client from comparing a copy with anything weight by weight, and a copy can be built to
carry records out in its delta: with an untied output layer, whose rows list tokens, or with trap units, each of which
responds to one record and hands its hidden states over (imprint layers: Fowl et al. 2021, arXiv 2110.13057). What the
coordinates leave in place can be compared: the configuration, the tokenizer, norms of rows and columns up to their
order, what each unit responds to, and what copies of one round answer.

These are signs, not a proof: who knows them can stay below them. A bound comes from --dp epsilon alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import normalize, silu
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mpu_cli.errors import MpuError
from mpu_cli.files.folder import clean_config
from mpu_cli.files.reader import FLOATS, Checkpoint, quoted_list, short
from mpu_cli.files.sandbox import LimitError
from mpu_cli.model.family import FFN_AXES
from mpu_cli.model.layout import Layout
from mpu_cli.model.load import tokenizer_of
from mpu_cli.model.source import Model
from mpu_cli.model.tensors import dequantized_weight
from mpu_cli.observer import Observer
from mpu_cli.records import tokens
from mpu_cli.records.encode import Example
from mpu_cli.training.ledger import LedgerEntry

LOOKED_AT, FEWEST = 32, 4  # records on which units are judged, and how many it takes
# Limits that separated planted from honest layers of a 5 M and a 135 M Llama (examples/imprint.py); honest ones had at
# most 0.2 % of units that are rare, and none that are off or twins.
RARE_PARTICIPATION = 0.05  # participation below which a unit is active almost nowhere
OFF_INPUT = -20.0  # input below which a unit is off to the last bit of float32
TWIN_COSINE = 0.98  # cosine of two rows; the most in an honest layer was 0.885
MANY_RARE, MANY = 0.05, 0.01  # shares of a layer's units above which it is odd
COSINE_ROWS = 2_048  # compared with all others at once
FFN_INPUTS = ("gate_proj", "up_proj", "gate_up_proj", "fc1", "fc_in", "c_fc", "dense_h_to_4h", "w1",
              "input_linear")  # fmt: skip
MAX_RELATIVE_LOSS_DIFFERENCE = 0.25  # relative difference of losses between copies of a round that noise explains, and
MAX_LOSS_DIFFERENCE = 0.1  # their absolute difference, per answer token
# How many times larger than in the public model a matrix's norm, or the spread of its rows' norms, may be.
MAX_NORM_RATIO = 4.0
# Facts of a config that differ between fine-tunes of one model.
_FREE = {"dtype", "torch_dtype", "transformers_version", "architectures", "use_cache", "bos_token_id", "eos_token_id",
         "pad_token_id", "return_dict", "output_hidden_states", "attention_dropout", "initializer_range"}  # fmt: skip


def refuse(signs: Sequence[str], source: str, trusted: bool, observer: Observer) -> None:
    """Report ``signs`` that an honest copy does not show, and refuse the copy unless it is ``trusted``."""
    for sign in signs if trusted else signs[1:]:
        observer.warn(f"{source}: {sign}")
    if signs and not trusted:
        raise MpuError(
            f"{source}: {signs[0]}",
            "ask its owner; --trust-copy trains on it all the same, and what it takes with it is then your risk",
        )


def against_public(copy: Model, tokenizer: PreTrainedTokenizerBase, public: Model, texts: Sequence[str]) -> list[str]:
    """The differences of ``copy`` from a public model of which it is said to be a fine-tune: configuration, ties,
    tensors, tokenizer, also on ``texts`` as they are, and the norms that no symmetry changes."""
    signs = []
    config, public_config = clean_config(copy.config), clean_config(public.config)
    odd = []
    for name in sorted((config.keys() & public_config.keys()) - _FREE):
        if None not in (config[name], public_config[name]) and config[name] != public_config[name]:
            odd.append(name)
    if odd:
        signs.append(f"config.json differs from {public.source} in {quoted_list(odd)}")
    shapes, public_shapes = (
        {name: info.shape for name, info in model.checkpoint.tensors.items() if info.dtype in FLOATS}
        for model in (copy, public)
    )
    if odd := sorted(name for name in shapes.keys() ^ public_shapes.keys() if not name.endswith("inv_freq")):
        tied = " (an output layer of its own lists the tokens of your answers)" if "lm_head.weight" in odd else ""
        signs.append(f"its tensors are not {public.source}'s: {quoted_list(odd)}{tied}")
    if odd := sorted(name for name in shapes.keys() & public_shapes.keys() if shapes[name] != public_shapes[name]):
        signs.append(f"shapes differ from {public.source}'s: {quoted_list(odd)}")
    other = tokenizer_of(public)
    if other.get_vocab() != tokenizer.get_vocab():
        signs.append(f"its vocabulary is not {public.source}'s")
    elif other.chat_template != tokenizer.chat_template:
        signs.append(f"its chat template is not {public.source}'s")
    elif parts := _unlike_parts(tokenizer, other):
        signs.append(f"its tokenizer is not {public.source}'s: {quoted_list(parts)}")
    else:
        try:
            outcomes = []
            for reader in (tokenizer, other):
                # No two errors are equal, so None stands for a text that has no tokens.
                outcomes.append(
                    [None if isinstance(ids, ValueError) else ids for ids in tokens.of_texts(reader, texts)]
                )
        except LimitError as error:
            raise tokens.rejection(error, copy.source) from error
        if outcomes[0] != outcomes[1]:
            signs.append(f"it tokenizes your records in another way than {public.source}")
    odd = []
    for name, shape in shapes.items():
        if public_shapes.get(name) == shape and _norms_apart(copy.checkpoint, public.checkpoint, name):
            odd.append(name)
    if odd:
        signs.append(f"rows of another size than in {public.source}: {quoted_list(odd)}")
    return signs


def _unlike_parts(tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> list[str]:
    """The parts of two tokenizers that differ, such as the normalizer, which the texts at hand need not show."""
    contents = []
    for reader in (tokenizer, other):
        backend = getattr(reader, "backend_tokenizer", None)
        parts = json.loads(backend.to_str()) if backend is not None else {"class": type(reader).__name__}
        contents.append({**parts, "special tokens": reader.special_tokens_map, "truncation": None, "padding": None})
    parts, other_parts = contents
    return sorted(name for name in parts.keys() | other_parts.keys() if parts.get(name) != other_parts.get(name))


def _norms_apart(copy: Checkpoint, public: Checkpoint, name: str) -> bool:
    """Whether a matrix's norm, or the range of its rows' norms, differs in size from the public model's.

    Permutations and changes of sign keep the norms of rows up to their order, rotations of heads that of the matrix.
    """
    weight, public_weight = copy.tensor(name), public.tensor(name)
    if weight.ndim < 2 or not weight.numel():
        return False
    row_norms = weight.float().flatten(1).norm(dim=1)
    public_row_norms = public_weight.float().flatten(1).norm(dim=1)
    for checkpoint in (copy, public):
        checkpoint.forget_pages(name)
    for pick in (lambda n: n.norm(), lambda n: n.max(), lambda n: n.median()):
        size, public_size = max(float(pick(row_norms)), 1e-12), max(float(pick(public_row_norms)), 1e-12)
        if max(size, public_size) > MAX_NORM_RATIO * min(size, public_size):
            return True
    return False


@dataclass(frozen=True)
class Units:
    """Shares of a layer's FFN units that behave like traps.

    ``rare``: active at few positions of the records; ``off``: off at more than half of them; ``twins``: parallel to
    another unit, as in traps that are read from differences.
    """

    layer: str
    rare: float
    off: float
    twins: float


@torch.no_grad()
def ffn_units(model: PreTrainedModel, examples: Sequence[Example]) -> list[Units]:
    """The responses of the units of each FFN to the client's own records, from one forward pass of LOOKED_AT of them.

    Of experts, which see few positions each, only the weights are judged: ``twin_units``.
    """
    modules = {n: m for n, m in model.named_modules() if n.rsplit(".", 1)[-1] in FFN_INPUTS and hasattr(m, "weight")}
    activity = {name: _Activity() for name in modules}

    def count(name: str) -> Callable[..., None]:
        return lambda _module, _inputs, output: activity[name].add(output.flatten(0, -2))

    hooks = [module.register_forward_hook(count(name)) for name, module in modules.items()]
    training = model.training
    model.eval()
    try:
        for example in examples[:LOOKED_AT]:
            model(input_ids=torch.tensor([example.ids], device=model.device), use_cache=False, logits_to_keep=1)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return [
        _units(name, sums, dequantized_weight(modules[name].weight))
        for name, sums in activity.items()
        if sums.positions
    ]


class _Activity:
    """The activity of each unit of a layer over all positions, in sums: the activations of all layers would take
    gigabytes."""

    def __init__(self) -> None:
        self.positions = 0
        # Of each unit: Σ|a| and Σa² of its activation a, float64, so that no square leaves its range; and how often it
        # is off.
        self.sums, self.squares, self.off = torch.zeros(()), torch.zeros(()), torch.zeros(())

    def add(self, inputs: torch.Tensor) -> None:
        """Count the inputs of the units at further positions: (positions, units)."""
        active = silu(inputs.float()).abs().double()
        self.positions += len(inputs)
        self.sums = self.sums + active.sum(0).cpu()
        self.squares = self.squares + active.square().sum(0).cpu()
        self.off = self.off + (inputs < OFF_INPUT).sum(0).cpu()


def _units(name: str, activity: _Activity, weight: torch.Tensor) -> Units:
    # Participation, (Σa)²/(n·Σa²), is 1 if a unit is equally active at all n positions, 1/n if at one alone.
    squares = activity.squares.clamp(min=torch.finfo(torch.float64).tiny)
    participation = activity.sums.square() / squares / activity.positions
    rows = weight.detach().float().cpu()
    rare = participation < RARE_PARTICIPATION
    off = activity.off / activity.positions > 0.5  # at more than half of the positions
    twins = _twins(rows if rows.shape[0] == len(activity.sums) else rows.T)
    return Units(name, float(rare.float().mean()), float(off.float().mean()), twins)


def twin_units(model: PreTrainedModel, *, of_experts: bool) -> list[Units]:
    """The units of each FFN, or ``of_experts`` alone, that are parallel to each other, from their weights: of stacks
    (experts, rows, columns), too. The rarity of experts' units follows from routing, and has no limits yet."""
    units = []
    for name, weight in model.named_parameters():
        module_name = name.removesuffix(".weight")
        stem, _, kind = module_name.rpartition(".")
        if kind not in FFN_INPUTS or (of_experts and ".experts" not in f".{stem}."):
            continue
        rows = dequantized_weight(weight).detach().float().cpu()
        if name != module_name and type(model.get_submodule(module_name)).__name__ == "Conv1D":
            rows = rows.T
        matrices = rows if rows.ndim > 2 else rows[None]
        twins = max((_twins(matrix) for matrix in matrices), default=0.0)
        units.append(Units(module_name, rare=0.0, off=0.0, twins=twins))
    return units


def _twins(rows: torch.Tensor) -> float:
    """The share of ``rows`` that are parallel to another one."""
    rows = normalize(rows, dim=1)
    nearest = []  # for each row, its largest cosine with another one
    for start in range(0, len(rows), COSINE_ROWS):
        cosines = rows[start : start + COSINE_ROWS] @ rows.T
        cosines.diagonal(start).zero_()  # of each with itself
        nearest.append(cosines.amax(1))
    return float((torch.cat(nearest) > TWIN_COSINE).float().mean())


def traps(copy: Model, model: PreTrainedModel, examples: Sequence[Example] | None, records: int) -> list[str]:
    """Layers with more units than honest ones have that look like traps, and layers that cannot be judged.

    ``examples``: what the client will train on; None to judge by the weights alone. ``records`` is how many there are,
    also those that the copy's tokenizer rejects: their number is no secret, which of them it rejects is.
    """
    if records < FEWEST:
        return [f"its units cannot be looked at for traps: that takes {FEWEST} records"]
    try:
        layout = copy.layout
    except MpuError:
        kind = copy.config.get("model_type")
        return [f"its units cannot be looked at for traps: {short(str(kind))} is not an architecture of mpu's"]
    judged = twin_units(model, of_experts=examples is not None)
    if examples is not None:  # spread over all of them: the first ones are only those to forget
        judged += ffn_units(model, examples[:: max(1, len(examples) // LOOKED_AT)])
    missing = _layers_with_units(layout)
    for units in judged:
        numbers = [int(part) for part in units.layer.split(".") if part.isdecimal()]
        missing.difference_update(numbers[:1])  # the first number in a module's name is its layer's
    signs = []
    if missing:
        signs.append(f"units of layers {quoted_list(map(str, sorted(missing)))} cannot be looked at for traps")
    odd = [units for units in judged if units.rare > MANY_RARE or max(units.off, units.twins) > MANY]
    if not odd:
        return signs
    worst = max(odd, key=lambda units: max(units.rare, units.off, units.twins))
    more = f", and in {len(odd) - 1} more layers" if len(odd) > 1 else ""
    traps_found = (
        f"units built to record single tokens of your records: {worst.layer} has {worst.rare:.0%} that are almost "
        f"never active, {worst.off:.0%} that are mostly off, {worst.twins:.0%} that are parallel{more}"
    )
    return [traps_found, *signs]


def _layers_with_units(layout: Layout) -> set[int]:
    """The layers that have an FFN or experts, by what their tensors' axes count."""
    # "s-" begins the axes of shared experts, "e-" those of routed ones.
    units = {f"{kind}{axis}" for kind in ("", "s-", "e-") for axis in FFN_AXES}
    layers = set()
    for tensor in layout.parameters:
        if tensor.layer is not None and any(units & {*group} for group in tensor.axes):
            layers.add(tensor.layer)
    return layers


def against_others(this: LedgerEntry, before: Mapping[str, float | None], ledger: Sequence[LedgerEntry]) -> list[str]:
    """Copies of one round whose losses on the same records, before training, are further apart than noise explains."""
    signs: list[str] = []
    if not this.run:
        return signs
    together: dict[int, LedgerEntry] = {}
    for entry in (*ledger, this):
        if (entry.run, entry.round, entry.data) == (this.run, this.round, this.data):
            if entry.copy in together and together[entry.copy].weights != entry.weights:
                together = {}  # published once more under the same name, as --seed does
            together[entry.copy] = entry
    for entry in together.values():
        if entry.copy == this.copy:
            continue
        for name, earlier in (("forget", entry.forget), ("retain", entry.retain)):
            now = before.get(name)
            if now is None or earlier is None:
                continue
            if abs(now - earlier) > max(MAX_LOSS_DIFFERENCE, MAX_RELATIVE_LOSS_DIFFERENCE * max(now, earlier)):
                signs.append(
                    f"its loss on the {name} set is {now:.3f} per answer token, that of copy {entry.copy} {earlier:.3f}"
                )
    return signs
