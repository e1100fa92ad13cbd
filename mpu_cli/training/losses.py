"""The algorithms: one function per forget term, and a table of what each needs.

Notation: y_i is the answer of example i and |y_i| its length in tokens; p_i is its probability under the model being
trained, p the probability of a single answer token; p_ref and z_ref are the probability and logits under the frozen
copy that training started from. Sums and means are over the whole optimiser step, not over a micro-batch, so that the
losses of the parts of a step add up to the loss of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy, kl_div, logsigmoid, mse_loss

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.model.network import Head, Logits, at_least_float32
from mpu_cli.options.declare import declared_options
from mpu_cli.options.unlearning import AlgorithmOptions
from mpu_cli.plugins import load_plugin, reporting_errors
from mpu_cli.records.encode import IGNORED

# ruff: noqa: ARG001 (all forget terms have the same signature)


@dataclass(frozen=True)
class Outputs:
    """A model's outputs on the labelled tokens of one set, in (a part of) a step; beside them the frozen copy's."""

    targets: torch.Tensor  # the labelled tokens, (tokens,)
    logits: Logits  # of each token
    hidden: torch.Tensor | None  # (tokens, width), of the requested layer
    rows: torch.Tensor  # (tokens,), the example of each token
    weights: torch.Tensor  # (examples,), 0 for one that only fills up a part
    step_tokens: int  # in the whole step; so is ``step_examples``
    step_examples: int
    # The frozen copy's outputs that the term asks for, by ``reference_outputs``: "log_probs", log p_ref,i, (examples,);
    # "logits", z_ref of each token; "hidden", (tokens, width); "direction", RMU's, of length 1, (width,).
    reference: Any = None

    @cached_property
    def log_probs(self) -> torch.Tensor:
        """log p of each token: (tokens,)."""
        return self.logits.log_probs(self.targets)

    @property
    def lengths(self) -> torch.Tensor:
        """|y_i|, at least 1: (examples,)."""
        counts = torch.zeros(len(self.weights), dtype=torch.long, device=self.rows.device)
        return counts.index_add(0, self.rows, torch.ones_like(self.rows)).clamp(min=1)

    @property
    def sequence_log_probs(self) -> torch.Tensor:
        """log p_i: (examples,)."""
        zeros = torch.zeros(len(self.weights), dtype=self.log_probs.dtype, device=self.log_probs.device)
        return zeros.index_add(0, self.rows, self.log_probs)

    def token_mean(self, values: torch.Tensor) -> torch.Tensor:
        """This part's share of the mean of ``values``, (tokens,), over the step's answer tokens."""
        return values.sum() / self.step_tokens

    def example_mean(self, values: torch.Tensor) -> torch.Tensor:
        """This part's share of the mean of ``values``, (examples,), over the step's examples."""
        return (values * self.weights).sum() / self.step_examples

    @property
    def cross_entropy(self) -> torch.Tensor:
        """This part's share of the step's token mean cross-entropy."""
        return -self.token_mean(self.log_probs)


@dataclass(frozen=True)
class Constants:
    """Constants of the losses, named like their options; the docstring of each loss shows those that it reads.

    With a ``dual_rate``, ``alpha`` is only the value at the start: it grows by this rate for each nat that a step's
    retain term is above ``retain_limit``, and falls below it.
    """

    gamma: float = 1.0  # the weight of the forget term
    alpha: float = 1.0  # the weight of the retain term
    beta: float = 0.1
    beta1: float = 5.0
    beta2: float = 1.0
    simnpo_delta: float = 0.0
    level: float = -3.0  # in nats per token
    layer: int = 7  # counted from 0
    coefficient: float = 2.0
    retain_limit: float = 0.05
    dual_rate: float = 0.0


def locate_answers(labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """The places that tokens are predicted from, by labels (examples, length): ``rows`` and ``columns`` of the
    positions before them, and the tokens, ``targets``, all (tokens,), example by example."""
    labelled = labels[:, 1:] != IGNORED
    rows, columns = labelled.nonzero(as_tuple=True)
    return {"rows": rows, "columns": columns, "targets": labels[:, 1:][labelled]}


def score(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    head: Head | None = None,
    hidden: torch.Tensor | None = None,
    answers: Mapping[str, torch.Tensor] | None = None,
    reference: Any = None,
) -> Outputs:
    """Outputs from logits (examples, length, vocabulary) and labels (examples, length), in float32 or wider.

    With a ``head``, ``logits`` are the states (examples, length, width) that it computes them from. ``hidden``:
    (examples, length, width). ``answers`` are those of ``locate_answers``, where they are known: to find them on a GPU
    takes waiting for it. The counts are those of this batch alone.
    """
    rows, columns, targets = (answers or locate_answers(labels)).values()
    return Outputs(
        targets=targets,
        logits=Logits(logits[rows, columns], head),
        hidden=None if hidden is None else hidden[rows, columns],
        rows=rows,
        weights=torch.ones(len(labels), device=labels.device),
        step_tokens=len(rows),
        step_examples=len(labels),
        reference=reference,
    )


def gradient_ascent(forget: Outputs, alternate: Outputs | None, constants: Constants) -> torch.Tensor:
    """−(token mean cross-entropy): climb the loss (Jang et al., 2023)."""
    return -forget.cross_entropy


def hinge(forget: Outputs, alternate: Outputs | None, constants: Constants) -> torch.Tensor:
    """mean_i max(0, (1/|y_i|)·log p_i − b): climbs the loss of each record until its answer is as improbable as b.

    Gradient ascent has no end; here a record stops pulling once its answer is improbable enough. It is flooding (Ishida
    et al., 2020) turned around: a ceiling for each record's log-probability in place of a floor for the loss.
    """
    mean_log_probs = forget.sequence_log_probs / forget.lengths
    return forget.example_mean((mean_log_probs - constants.level).clamp(min=0))


def npo(forget: Outputs, alternate: Outputs | None, constants: Constants) -> torch.Tensor:
    """−(2/β)·mean_i log σ(−β·(log p_i − log p_ref,i)) (Zhang et al., 2024)."""
    ratio = forget.sequence_log_probs - forget.reference
    return -(2 / constants.beta) * forget.example_mean(logsigmoid(-constants.beta * ratio))


def dpo(forget: Outputs, alternate: Outputs | None, constants: Constants) -> torch.Tensor:
    """−(2/β)·mean_i log σ(β·((log p_w − log p_ref,w) − (log p_l − log p_ref,l))) (Rafailov et al., 2023).

    w is the alternative answer, l the one to forget. With alternatives that the model itself gives, it is AltPO (Mekala
    et al., 2024); with refusals, IdkDPO.
    """
    assert alternate is not None  # as ``Algorithm.alternate`` asks for them
    won = alternate.sequence_log_probs - alternate.reference
    lost = forget.sequence_log_probs - forget.reference
    return -(2 / constants.beta) * forget.example_mean(logsigmoid(constants.beta * (won - lost)))


def simnpo(forget: Outputs, alternate: Outputs | None, constants: Constants) -> torch.Tensor:
    """−(2/β)·mean_i log σ(−(β/|y_i|)·log p_i − β·δ) (Fan et al., 2024)."""
    mean_log_probs = forget.sequence_log_probs / forget.lengths
    margin = -constants.beta * mean_log_probs - constants.beta * constants.simnpo_delta
    return -(2 / constants.beta) * forget.example_mean(logsigmoid(margin))


def undial(forget: Outputs, alternate: Outputs | None, constants: Constants) -> torch.Tensor:
    """Token mean cross-entropy between softmax(z_ref − β·onehot(y)) and the model (Dong et al., 2024)."""

    def losses(logits: torch.Tensor, targets: torch.Tensor, frozen: torch.Tensor) -> torch.Tensor:
        reference, rows = frozen.to(logits.dtype), targets[:, None]
        lowered = reference.scatter(1, rows, reference.gather(1, rows) - constants.beta)
        return cross_entropy(logits, lowered.softmax(-1), reduction="none")

    return forget.token_mean(forget.logits.per_token(losses, forget.targets, frozen=forget.reference))


def ceu(forget: Outputs, alternate: Outputs | None, constants: Constants) -> torch.Tensor:
    """Token mean cross-entropy between the model's own prediction without the answer's token, softmax(z with z_y = −∞),
    detached, and the model (CE-U; Yang, 2025)."""

    def losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        without = logits.detach().scatter(1, targets[:, None], float("-inf")).softmax(-1)
        return cross_entropy(logits, without, reduction="none")

    return forget.token_mean(forget.logits.per_token(losses, forget.targets))


def pdu(forget: Outputs, alternate: Outputs | None, constants: Constants) -> torch.Tensor:
    """Token mean of (max z − mean z)², which is 0 where all tokens are as probable (PDU; Entesari et al., 2025).

    The retain term is a constraint there: α is its multiplier, which each step changes.
    """

    def margins(logits: torch.Tensor) -> torch.Tensor:
        return (logits.amax(-1) - logits.mean(-1)).square()

    return forget.token_mean(forget.logits.per_token(margins))


def satimp(forget: Outputs, alternate: Outputs | None, constants: Constants) -> torch.Tensor:
    """−(token mean of p^β₁·(1−p)^β₂·cross-entropy), the weights detached (Yang et al., 2025)."""
    p = forget.log_probs.detach().exp()
    return forget.token_mean(p**constants.beta1 * (1 - p) ** constants.beta2 * forget.log_probs)


def wga(forget: Outputs, alternate: Outputs | None, constants: Constants) -> torch.Tensor:
    """−(token mean of p^β·cross-entropy), the weights detached (Wang et al., 2025)."""
    p = forget.log_probs.detach().exp()
    return forget.token_mean(p**constants.beta * forget.log_probs)


def rmu(forget: Outputs, alternate: Outputs | None, constants: Constants) -> torch.Tensor:
    """Token mean of ‖h − c·u‖²/width: steers a layer's hidden states to a random unit vector u (Li et al., 2024)."""
    assert forget.hidden is not None  # as ``Algorithm.hidden`` asks for them
    hidden = at_least_float32(forget.hidden)
    target = (constants.coefficient * forget.reference).to(hidden)
    return forget.token_mean(mse_loss(hidden, target.expand_as(hidden), reduction="none").mean(-1))


def retain_nll(retain: Outputs) -> torch.Tensor:
    """Token mean cross-entropy."""
    return retain.cross_entropy


def retain_kl(retain: Outputs) -> torch.Tensor:
    """Token mean of KL(p_ref ‖ p) over the vocabulary."""

    def divergence(logits: torch.Tensor, frozen: torch.Tensor) -> torch.Tensor:
        reference = frozen.to(logits.dtype).log_softmax(-1)
        return kl_div(logits.log_softmax(-1), reference, reduction="none", log_target=True).sum(-1)

    return retain.token_mean(retain.logits.per_token(divergence, frozen=retain.reference))


def retain_hidden(retain: Outputs) -> torch.Tensor:
    """Token mean of ‖h − h_ref‖²/width (RMU's own retain term)."""
    assert retain.hidden is not None  # as ``Objective.reads_layer`` asks for them
    hidden = at_least_float32(retain.hidden)
    return retain.token_mean((hidden - retain.reference.to(hidden)).square().mean(-1))


FAITHFUL_RECORDS = 60  # to forget: for more, the α of a training whose scores are the server's model's grows with them


@dataclass(frozen=True)
class Algorithm:
    """An unlearning algorithm: loss = γ·forget + α·retain. With α = 0, no retain set is read."""

    forget: Callable[[Outputs, Outputs | None, Constants], torch.Tensor]
    constants: Constants
    constant_names: tuple[str, ...] = ()  # the constants that the forget term reads besides γ and α
    reference_outputs: str | None = None  # the frozen copy's outputs that the forget term needs, ``Outputs.reference``
    alternate: bool = False
    retain: str = "nll"
    hidden: bool = False
    epochs: int = 10  # in each round, in the paper's schedule
    rounds: int = 1  # in the paper's schedule
    retain_per_forget: int = 1  # retain records read in a step for each forget record
    bounded: bool = True  # the forget term stops pulling once a record is forgotten; else a smaller rate is usual
    # α in place of the constants' in a training until it is done whose scores are those of the server's model: slower,
    # and keeps more once scaled back.
    faithful_alpha: float | None = None

    def alpha_if_faithful(self, records: int) -> float | None:
        """``faithful_alpha`` for so many ``records`` to forget."""
        return self.faithful_alpha and self.faithful_alpha * max(1.0, records / FAITHFUL_RECORDS)


class RetainTerm(NamedTuple):
    """The function of a retain term, and the frozen copy's outputs that it needs."""

    term: Callable[[Outputs], torch.Tensor]
    reference_outputs: str | None


RETAIN = {
    "nll": RetainTerm(retain_nll, None),
    "kl": RetainTerm(retain_kl, "logits"),
    "hidden": RetainTerm(retain_hidden, "hidden"),
}

ALGORITHMS = {
    "hinge": Algorithm(hinge, Constants(alpha=3), ("level",), retain="kl", retain_per_forget=2, faithful_alpha=30),
    "gradascent": Algorithm(gradient_ascent, Constants(alpha=0), bounded=False),
    "graddiff": Algorithm(gradient_ascent, Constants(), bounded=False),
    "npo": Algorithm(npo, Constants(beta=0.1), ("beta",), reference_outputs="log_probs", epochs=5, rounds=2),
    "dpo": Algorithm(
        dpo, Constants(beta=0.1), ("beta",), reference_outputs="log_probs", alternate=True, epochs=1, rounds=10
    ),
    "simnpo": Algorithm(
        simnpo, Constants(beta=4.5, simnpo_delta=0, gamma=0.125), ("beta", "simnpo_delta"), epochs=1, rounds=10
    ),
    "undial": Algorithm(undial, Constants(beta=10, alpha=0), ("beta",), reference_outputs="logits"),
    "ceu": Algorithm(ceu, Constants()),
    "pdu": Algorithm(pdu, Constants(dual_rate=1), ("retain_limit", "dual_rate")),
    "satimp": Algorithm(satimp, Constants(beta1=5, beta2=1, gamma=0.1), ("beta1", "beta2"), epochs=1, rounds=10),
    "wga": Algorithm(wga, Constants(beta=1), ("beta",), epochs=5, rounds=2),
    "rmu": Algorithm(
        rmu,
        Constants(layer=7, coefficient=2),
        ("layer", "coefficient"),
        reference_outputs="direction",
        retain="hidden",
        hidden=True,
    ),
}


def algorithm_named(name: str) -> Algorithm:
    """The algorithm of ``--algo``: one of ALGORITHMS, of an installed package's entry point in ``mpu.algorithms``, or
    ``module:function``. What is imported is an Algorithm, or a forget term with the signature of those above."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    imported = load_plugin("algorithm", name, "--algo", ALGORITHMS)
    if isinstance(imported, Algorithm):
        return imported
    if not callable(imported):
        raise UsageError(f"--algo {name}: neither an Algorithm nor a function that returns a loss")
    return Algorithm(_checked(f"--algo {name}", imported), Constants(), CUSTOM_CONSTANTS)


def _checked(label: str, term: Callable[..., object]) -> Callable[..., torch.Tensor]:
    """``term``, of somebody else's module: raises MpuError for whatever it raises, if it does not return a scalar, and
    if the first one is not finite; later ones are not where the training diverges."""
    reported = reporting_errors(label, term, "forget, alternate, constants")
    is_first = True

    @wraps(term)
    def checked(*inputs: object) -> torch.Tensor:
        nonlocal is_first
        value = reported(*inputs)
        if not isinstance(value, torch.Tensor) or value.ndim:
            returned = type(value).__name__
            if isinstance(value, torch.Tensor):
                returned = f"a tensor of shape {list(value.shape)}"
            raise MpuError(f"{label}: returned {returned}", "return a tensor without dimensions, as token_mean does")
        if is_first and not value.isfinite():
            raise MpuError(f"{label}: returned {value.item()} in the first step", "return a finite loss")
        is_first = False
        return value

    return checked


CUSTOM_CONSTANTS = ("beta", "beta1", "beta2", "simnpo_delta", "level", "coefficient")  # a function may read any of them


@dataclass(frozen=True)
class Objective:
    """The objective that training lowers: γ·forget + α·retain, with the terms and the constants of one algorithm."""

    algorithm: Algorithm
    constants: Constants
    retain_loss: str

    @property
    def retain(self) -> Callable[[Outputs], torch.Tensor]:
        """The retain term."""
        return RETAIN[self.retain_loss].term

    @property
    def retain_outputs(self) -> str | None:
        """The outputs of the frozen copy that the retain term needs."""
        return RETAIN[self.retain_loss].reference_outputs

    def reference_outputs(self, name: str) -> str | None:
        """The outputs of the frozen copy that the loss needs on the set ``name``."""
        if name in ("forget", "alternate"):
            return self.algorithm.reference_outputs
        return self.retain_outputs if name == "retain" else None

    def reads_layer(self, term: str) -> bool:
        """Whether a term reads the output of a layer only, and nothing above it."""
        return self.retain_outputs == "hidden" if term == "retain" else self.algorithm.hidden

    def passes(self, terms: Collection[str]) -> list[tuple[str, ...]]:
        """``terms`` in groups, each computed from one pass of the model.

        Those that read all of it come last: processes exchange gradients then, and wait for those of all weights.
        """
        up_to_layer = tuple(term for term in terms if self.reads_layer(term))
        whole_model = tuple(term for term in terms if not self.reads_layer(term))
        return [group for group in (up_to_layer, whole_model) if group]

    def records(self, terms: Collection[str]) -> int:
        """The number of records that ``terms`` read for each record to forget."""
        return sum(self.algorithm.retain_per_forget if term == "retain" else 1 for term in terms)


def objective_of(algo: str, options: AlgorithmOptions) -> Objective:
    """The objective of ``--algo``, with the retain term and the constants that were given in place of its own."""
    algorithm = algorithm_named(algo)
    retain_loss = options.retain_loss or algorithm.retain
    valid_names = {"gamma", "alpha", *algorithm.constant_names}
    if RETAIN[retain_loss].reference_outputs == "hidden":
        valid_names.add("layer")
    if unknown := [name for name in options.constants if name not in valid_names]:
        flags = {name: option.flag for name, option in declared_options(AlgorithmOptions).items()}
        listed = ", ".join(flags[name] for name in sorted(valid_names))
        raise UsageError(f"{flags[unknown[0]]}: {algo} has no such constant (it has {listed})")
    constants = replace(algorithm.constants, **options.constants)  # type: ignore[arg-type] # layer is an int
    return Objective(algorithm, constants, retain_loss)
