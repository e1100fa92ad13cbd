"""The attack of a server that reads the tokens of records off a delta, played by the client before it sends it.

The reader knows the model before, its tokenizer, and the delta in the model's own coordinates, which are as good as the
copy's for this: every rule looks at rows and directions together with the weights that they belong to. Which rule is
best depends on the optimiser and on what is tied; a server can find that out with a delta of its own. The rules were
chosen among many on deltas of the TOFU models (examples/what_a_delta_lists.py repeats the numbers of the threat model).

``change`` is the delta of a tensor and ``weight`` the same tensor before; (rows, width) for embeddings and heads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.files.manifest import LEFT_FACTOR, RIGHT_FACTOR
from mpu_cli.files.reader import Checkpoint
from mpu_cli.lab.options.surrogates import TermRelease
from mpu_cli.model.load import limits_of, load
from mpu_cli.model.network import Answers
from mpu_cli.model.source import open_model
from mpu_cli.model.staging import add_delta, open_delta
from mpu_cli.model.tensors import in_memory
from mpu_cli.options.unlearning import Prompts
from mpu_cli.plugins import require
from mpu_cli.records.encode import IGNORED, Example, encoding_of
from mpu_cli.records.forms import Record
from mpu_cli.records.terms import join_overlapping, terms_of, texts_of
from mpu_cli.training.ledger import Release

if TYPE_CHECKING:
    from opendp.mod import Measurement


# Share of the rows, those with the smallest residual, that show how much rounding moves a row.
SMALLEST_RESIDUALS = 0.01
ROUNDING = 5e-8  # residual per step that rounding leaves in float32, twice over
ASSUMED_STEPS = 40  # assumed, as a reader does not know their number
GRADIENT_FACTOR = 3.0  # rows whose residual is this many times that of the calm ones had a gradient
LEAST_NORM = 1e-12
RIDGE = 1e-4  # of ``span_gain``
MIN_AUC = 0.8  # AUC of forgotten against kept tokens from which a reading is called one
SEVERAL = 5  # tokens that a side needs to be ranked


def decay_residual(change: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The part of d across w, relative to ‖w‖, by row: ‖d − (⟨d, w⟩/‖w‖²)·w‖/‖w‖, (rows,).

    A row without a gradient moves by weight decay alone, d = −c·w, so only rounding is left. Best under SGD.
    """
    size = weight.norm(dim=1, keepdim=True).clamp(min=LEAST_NORM)
    along = (change * weight).sum(1, keepdim=True) / size.square()
    return ((change - along * weight) / size).norm(dim=1)


def norm(change: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """‖d‖ by row: (rows,). Best where steps are proportional to gradients (adamw-blockwise), and for simnpo."""
    return change.norm(dim=1)


def distance_to_mean(change: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """1 − mean cosine of a row with all rows: (rows,). Rows of absent tokens move along with each other."""
    unit = _unit(change)
    return 1 - unit @ unit.mean(0)


def against_weight(change: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """−cos(d, w) by row: (rows,). A head's rows of forgotten answers move against themselves."""
    return -(_unit(change) * _unit(weight)).sum(1)


def fit_residual(change: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """‖d/‖d‖ − (A·w/‖w‖ + b)‖ by row, with A and b from one ridge regression over all rows: (rows,).

    A head's gradient moves the row of an absent token by Σ_t p_t(v)·h_t, and p_t(v) is a function of w_v: that change
    can be predicted from the weight. The change of a token in an answer cannot. Best under AdamW.
    """
    unit = _unit(change)
    inputs = torch.cat([_unit(weight), weight.new_ones(len(weight), 1)], 1)
    gram = inputs.T @ inputs
    gram += 1e-3 * gram.diagonal().mean() * torch.eye(len(gram))
    return (unit - inputs @ torch.linalg.solve(gram, inputs.T @ unit)).norm(dim=1)


RULES = (decay_residual, norm, distance_to_mean, against_weight, fit_residual)  # a reading has the name of the function


def moved_rows(change: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """The rows that had a gradient, (rows,) bool; None if all had one, as in a head.

    The calmest rows show how much rounding there is. Exact for an untied input embedding, for learned positions and,
    flattened to a row each, for a mixture's experts.
    """
    residual = decay_residual(change, weight)
    floor = float(residual.sort().values[: max(1, int(len(residual) * SMALLEST_RESIDUALS))].median())
    return None if floor > ROUNDING * ASSUMED_STEPS else residual > max(GRADIENT_FACTOR * floor, LEAST_NORM)


def span_gain(changes: Sequence[torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    """log xᵀ(C + λI)⁻¹x − log xᵀ(M + λI)⁻¹x for the first layer's input x of each token: (vocabulary,).

    ``changes`` are those of queries, keys and values, (outputs, width); M is the mean of their ΔWᵀΔW and C that of xxᵀ
    over the vocabulary, both of trace 1, and λ = RIDGE/width. Rows of ΔW are sums of the inputs that were read
    (DAGER, Petrov et al. 2024, arXiv 2405.15586), so these lie where M is large; C discounts what all tokens share.
    """
    x = inputs.double()
    moment = torch.zeros(x.shape[1], x.shape[1], dtype=torch.float64)
    for change in changes:
        wide = change.double()
        moment += wide.T @ wide / wide.square().sum().clamp(min=1e-60) / len(changes)
    shared = x.T @ x / x.square().sum()

    def leverage(matrix: torch.Tensor) -> torch.Tensor:
        inverse = torch.linalg.inv(matrix + RIDGE / len(matrix) * torch.eye(len(matrix), dtype=torch.float64))
        return ((x @ inverse) * x).sum(1).clamp(min=1e-30).log()

    return (leverage(shared) - leverage(moment)).float()


def _unit(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(rows, dim=-1, eps=1e-30)


@dataclass(frozen=True)
class LeakageReading:
    """The claims of one rule about one tensor, None where it makes no such claim."""

    tensor: str
    rule: str
    # Of the tokens of records to forget only, or of the records, against those of records to keep; 0.5 is chance.
    auc: float | None = None
    precision: float | None = None  # of the tokens that the rule lists as read; so is ``recall``
    recall: float | None = None
    fact: str | None = None

    @property
    def tells(self) -> bool:
        """Whether a server learns something from it of which the client should be warned."""
        listed = self.precision is not None and self.recall is not None and min(self.precision, self.recall) > 0.5
        return listed or self.fact is not None or (self.auc or 0.0) > MIN_AUC


def _auc(positives: Sequence[float], negatives: Sequence[float]) -> float:
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score([1] * len(positives) + [0] * len(negatives), [*positives, *negatives]))


def readings(
    model: PreTrainedModel, before: Checkpoint, delta: Checkpoint, forget: Sequence[Example], retain: Sequence[Example]
) -> list[LeakageReading]:
    """The rules' readings of ``delta``, a full one or LoRA's, of the model in ``before``, loaded as ``model``.

    Of each embedding: the rows that moved if some did not, and the best of RULES, chosen with the truth as a server can
    with a delta of its own.
    """
    places = in_memory(model, before.tensors)
    by_pointer = {view.data_ptr(): name for name, view in places.items()}
    tokens = _Tokens.of(forget, retain)
    changes = {name: change for name in places if (change := _change(delta, name)) is not None}
    inputs, head = model.get_input_embeddings(), model.get_output_embeddings()
    embeddings = [inputs]
    if head is not None and head.weight.data_ptr() != inputs.weight.data_ptr():
        embeddings.append(head)
    delta_readings = []
    for module in embeddings:
        name = by_pointer.get(module.weight.data_ptr(), "")
        if name in changes:
            change, weight = changes[name], before.tensor(name).float()
            rows = moved_rows(change, weight)
            if module is inputs and rows is not None:
                delta_readings.append(LeakageReading(name, "rows that moved", None, *tokens.precision_and_recall(rows)))
            rated = {rule.__name__: tokens.auc(rule(change, weight)) for rule in RULES}
            best = max(rated, key=lambda rule: rated[rule] or 0.0)
            delta_readings.append(LeakageReading(name, best, rated[best]))
    delta_readings += _first_layer(model, places, changes, tokens)
    for name, change in changes.items():
        delta_readings += _positions_and_experts(name, change, before, model)
    return delta_readings


def _first_layer(
    model: PreTrainedModel,
    places: Mapping[str, torch.Tensor],
    changes: Mapping[str, torch.Tensor],
    tokens: _Tokens,
) -> list[LeakageReading]:
    """The subspace of what the first layer's matrices over the embedding's width learned."""
    weight = model.get_input_embeddings().weight.detach().float().cpu()
    width = weight.shape[1]
    matrix_names = []
    for name, change in changes.items():
        reads_embedding = change.ndim == 2 and change.shape[1] == width
        if reads_embedding and ".0." in name and "attn" in name and "o_proj" not in name:
            matrix_names.append(name)
    if not matrix_names:
        return []
    scales = [places[n] for n in places if ".0.input_layernorm." in n and places[n].shape == (width,)]
    x = _unit(weight)
    if scales:
        x = _unit(x * scales[0].detach().float().cpu())
    gains = span_gain([changes[name] for name in matrix_names], x)
    return [LeakageReading(", ".join(matrix_names), "subspace of the inputs", tokens.auc(gains))]


def _positions_and_experts(
    name: str, change: torch.Tensor, before: Checkpoint, model: PreTrainedModel
) -> Iterator[LeakageReading]:
    """The longest record, from learned positions; the experts that records reached, from a stack."""
    if change.ndim == 3:
        reached = moved_rows(change.flatten(1), before.tensor(name).float().flatten(1))
        if reached is not None and not bool(reached.all()):
            fact = f"reached {int(reached.sum())} of {len(reached)} experts"
            yield LeakageReading(name, "rows that moved", fact=fact)
    of_tokens = model.get_input_embeddings(), model.get_output_embeddings()
    other_embeddings = [m for m in model.modules() if isinstance(m, torch.nn.Embedding) and m not in of_tokens]
    if change.ndim == 2 and any(tuple(m.weight.shape) == tuple(change.shape) for m in other_embeddings):
        moved = moved_rows(change, before.tensor(name).float())
        if moved is not None and bool(moved.any()):
            # The last token of a record predicts nothing, so its position gets no gradient.
            longest = int(moved.nonzero().max()) + 2
            yield LeakageReading(name, "rows that moved", fact=f"the longest record has {longest} tokens")


def _change(delta: Checkpoint, name: str) -> torch.Tensor | None:
    """The change of tensor ``name``, float32; the product of LoRA's factors. None if it was not trained."""
    if name in delta.tensors:
        return delta.tensor(name).float()
    if name + LEFT_FACTOR in delta.tensors:
        return delta.tensor(name + LEFT_FACTOR).float() @ delta.tensor(name + RIGHT_FACTOR).float()
    return None


@dataclass(frozen=True)
class _Tokens:
    """The tokens of the vocabulary that occur in records to forget and to keep, without those that all records have."""

    forget: frozenset[int]
    retain: frozenset[int]
    template: frozenset[int]

    @classmethod
    def of(cls, forget: Sequence[Example], retain: Sequence[Example]) -> _Tokens:
        prompt_tokens: set[int] = set()
        for example in forget:
            pairs = zip(example.ids, example.labels, strict=True)
            prompt_tokens |= {token for token, label in pairs if label == IGNORED}
        forget_sets, retain_sets = ([frozenset(example.ids) for example in examples] for examples in (forget, retain))
        # Tokens that all records have, and not in answers alone. A single record has nothing to be compared with.
        record_sets, template = [*forget_sets, *retain_sets], frozenset[int]()
        if len(record_sets) > 1:
            template = frozenset.intersection(*record_sets) & prompt_tokens
        return cls(frozenset().union(*forget_sets) - template, frozenset().union(*retain_sets) - template, template)

    def auc(self, scores: torch.Tensor) -> float | None:
        """AUC of tokens of records to forget only against tokens of records to keep only, or all others if there are
        none of these; None if a side has fewer than SEVERAL."""
        positives, negatives = self.forget - self.retain, self.retain - self.forget
        if len(negatives) < SEVERAL:
            negatives = frozenset(range(len(scores))) - self.forget - self.template
        positive_rows = sorted(token for token in positives if token < len(scores))
        negative_rows = sorted(token for token in negatives if token < len(scores))
        if min(len(positive_rows), len(negative_rows)) < SEVERAL:
            return None
        values = scores.nan_to_num()
        return _auc(values[positive_rows].tolist(), values[negative_rows].tolist())

    def precision_and_recall(self, rows: torch.Tensor) -> tuple[float, float]:
        """Precision and recall of a list of tokens that were read."""
        listed = {int(i) for i in rows.nonzero()[:, 0]} - self.template
        true = self.forget | self.retain
        hits = len(listed & true)
        return hits / max(1, len(listed)), hits / max(1, len(true))


# Reading a delta of one's own as its receiver would (``mpu audit-delta``).


def audit(
    copy: str, delta: Path, forget: Sequence[Record], retain: Sequence[Record], prompts: Prompts
) -> list[LeakageReading]:
    """The rules' readings of ``delta``, made from ``copy`` with these records."""
    model = open_model(copy, links=False)
    delta_checkpoint = open_delta(model, delta)
    loaded, tokenizer = load(model, torch.float32, "cpu")
    encoding = encoding_of(tokenizer, prompts, prompts.template, limits_of(loaded))
    forget_examples, retain_examples = encoding.encode(forget), encoding.encode(retain)
    delta_readings = readings(loaded, model.checkpoint, delta_checkpoint, forget_examples, retain_examples)
    if not delta_readings:
        raise MpuError(f"{delta}: changes nothing that these readings look at")
    if retain_examples:
        of_sets = [Answers(forget_examples), Answers(retain_examples)]
        losses_before = [answers.losses(loaded) for answers in of_sets]
        add_delta(loaded, model, delta_checkpoint)
        changes = []
        for answers, losses in zip(of_sets, losses_before, strict=True):
            changes.append([after - before for before, after in zip(losses, answers.losses(loaded), strict=True)])
        # Who guesses the records sees by how much the delta changes the loss on each: that tells what was forgotten.
        delta_readings.append(LeakageReading("all", "loss of candidate records", _auc(*changes)))
    return delta_readings


# Terms that many private records share, released with differential privacy by OpenDP.
#
# Each unit, a record or a person, counts for a few terms chosen from it alone. A term is released if its count plus
# discrete Laplace noise reaches a threshold (Korolova et al., 2009): the noise hides how many units have it, the
# threshold that one unit has what no other does. What is made of the terms afterwards spends nothing more.

MAX_THRESHOLD = 1 << 30  # also the most that is counted: OpenDP counts in 32 bits here


@dataclass(frozen=True)
class TermMechanism:
    """The mechanism before it reads records. ``threshold``: units that a term needs, give or take the noise of scale
    ``noise_scale``; ``bound``: what one release spends."""

    measurement: Measurement
    threshold: int
    noise_scale: float
    bound: Release


def term_mechanism(options: TermRelease) -> TermMechanism:
    """The mechanism with the lowest threshold that meets ``options``."""
    require("opendp", "mpu surrogate")
    opendp: Any = import_module("opendp.prelude")
    opendp.enable_features("contrib")
    domain = opendp.map_domain(opendp.atom_domain(T=str), opendp.atom_domain(T="i32"))
    metric = opendp.l01inf_distance(opendp.absolute_distance(T="i32"))
    # One unit changes the counts of its terms by one each; a replaced one, also those of its replacement.
    changes = options.terms * (2 if options.dp_neighbours == "replaced" else 1)
    distance = (changes, changes, 1)
    scale = changes / options.dp_epsilon * (1 + 1e-9)  # rounding must not exceed ε

    def make(threshold: int) -> Any:
        return opendp.m.make_laplace_threshold(domain, metric, scale=scale, threshold=threshold)

    def meets(threshold: int) -> bool:
        return bool(make(threshold).map(distance)[1] <= options.dp_delta)

    try:
        threshold = 1 if meets(1) else opendp.binary_search(meets, bounds=(1, MAX_THRESHOLD))
    except (ValueError, opendp.OpenDPException) as error:
        raise UsageError(
            f"--dp epsilon={options.dp_epsilon:g},delta={options.dp_delta:g}: no threshold achieves this",
            "raise them, or use fewer --terms",
        ) from error
    epsilon, delta = make(threshold).map(distance)
    bound = Release(float(epsilon), float(delta), options.dp_neighbours)
    # OpenDP releases a count that reaches the threshold, and its bound is of counts that exceed it.
    return TermMechanism(make(threshold + 1), threshold + 1, scale, bound)


def release_terms(records: Sequence[Record], names: Sequence[str | None], options: TermRelease,
                  mechanism: TermMechanism) -> tuple[list[str], int]:  # fmt: skip
    """The terms of ``records`` that enough units share, joined where they overlap: all that the bound covers. And how
    many of the records mention one of them, which stays with the client.

    ``names``: of each record, what --term-column says it is about. Each call draws fresh noise of the operating system
    and spends the bound of ``mechanism`` once more.
    """
    candidates: dict[object, Counter[str]] = {}  # of each unit, a record or a person, from its own records
    for record, name in zip(records, names, strict=True):
        terms = [name] if name else []
        if options.term_column is None:
            terms = terms_of(record, options.terms)
        candidates.setdefault(record.protected_as, Counter()).update(terms)
    counts: Counter[str] = Counter()
    for of_unit in candidates.values():
        counts.update(term for term, _ in of_unit.most_common(options.terms))
    released = mechanism.measurement({term: min(count, MAX_THRESHOLD) for term, count in counts.items()})
    mentioning = 0
    for record, name in zip(records, names, strict=True):
        text = name or "\n".join(texts_of(record))
        mentioning += any(term in text for term in released)
    ordered = sorted(released, key=lambda term: (-released[term], term))
    # A single term stands for all of a record; of several, neighbouring pairs of words are parts of one name.
    joins = options.terms > 1 and options.term_column is None
    return join_overlapping(ordered) if joins else ordered, mentioning
