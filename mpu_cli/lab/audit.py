"""The attacks by name, and what they recovered."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

# How an attacker estimates a change hidden in noise, better than by taking it as it is.
#
# d = v + n is what a recovered model has on top of what is public, n white noise. Multiplied by ‖v‖²/(‖v‖² + ‖n‖²),
# the best factor for a v that nothing is known of, its error is η/√(1 + η²) of v at noise of scale η, where d itself
# is off by η. If v has low rank, as a change trained with LoRA has, singular values tell it from noise: those within
# the noise's bulk are dropped, and the others lowered to what v contributes on average (Gavish and Donoho 2017, arXiv
# 1405.7511).

AS_IT_IS, SCALED, SPECTRAL = "as it is", "scaled down", "singular values"

Tensors = Mapping[str, torch.Tensor]


def estimates(recovered: Tensors, public: Tensors, truth: Tensors) -> dict[str, dict[str, torch.Tensor]]:
    """``recovered`` itself, and what shrinking its difference from ``public`` makes of it, by the name of the method.

    ``truth`` only gives the scale of the noise in each tensor, which an attacker who knows κ computes.
    """
    by_method: dict[str, dict[str, torch.Tensor]] = {AS_IT_IS: dict(recovered), SCALED: {}, SPECTRAL: {}}
    for name, tensor in recovered.items():
        change = tensor - public[name]
        noise = float((tensor - truth[name]).double().square().mean().sqrt())
        size = float(change.double().square().mean())
        factor = max(0.0, 1 - noise**2 / size) if size else 0.0
        by_method[SCALED][name] = public[name] + factor * change
        by_method[SPECTRAL][name] = public[name] + (spectral(change, noise) if change.ndim == 2 else factor * change)
    return by_method


def spectral(x: torch.Tensor, noise: float) -> torch.Tensor:
    """The matrix behind ``x``, float32 (rows, columns), which has white noise of this scale: singular values shrunk so
    that the squared error is least."""
    if not noise:
        return x
    wide = x if x.shape[0] <= x.shape[1] else x.T
    values, vectors = torch.linalg.eigh((wide @ wide.T).double())
    rows, columns = wide.shape
    unit = noise * math.sqrt(columns)
    ratio = rows / columns
    squares = (values.clamp(min=0) / unit**2).clamp(min=1e-30)  # of singular values, in units of the noise's
    inside = (squares - ratio - 1) ** 2 - 4 * ratio
    factors = torch.where(squares > (1 + math.sqrt(ratio)) ** 2, inside.clamp(min=0).sqrt() / squares, 0.0)
    vectors = vectors.to(x.dtype)
    shrunk = vectors @ (factors.to(x.dtype)[:, None] * (vectors.T @ wide))
    return shrunk if wide is x else shrunk.T


RECOVERY_ERROR = (
    0.1  # relative error of the task vector, or without a pretrained model of the weights, that is a recovery
)


@dataclass(frozen=True)
class AttackError:
    """One way to recover the weights.

    ``several``: needs more than one copy; ``reference``: uses the public reference; ``one_draw``: works only on copies
    at multiples of one draw of the noise, of which there are more than two; ``believes``: removes the noise as the
    attacker believes it to be.
    """

    name: str
    description: str
    several: bool = False
    reference: bool = False
    one_draw: bool = False
    believes: bool = False


ONE_COPY = AttackError("one copy", "one copy, no reference: only the noise hides the weights")
ONE_COPY_REFERENCE = AttackError("one copy, reference", "one copy, aligned to the public reference", reference=True)
TWO_COPIES = AttackError(
    "two copies",
    "two of the copies, aligned and extrapolated to zero noise: they hold multiples of one draw",
    several=True, one_draw=True, believes=True,
)  # fmt: skip
ALL_COPIES = AttackError(
    "all copies", "all copies aligned to the first, averaged so that the noise cancels", several=True, believes=True
)
ALL_SMALLEST = AttackError(
    "all copies, smallest",
    "the same, with the weights that make the average smallest (factors unknown, no reference)",
    several=True,
)
ALL_REFERENCE = AttackError(
    "all copies, reference",
    "all copies aligned to the reference, averaged so that the noise cancels",
    several=True, reference=True, believes=True,
)  # fmt: skip
ALL_UNKNOWN = AttackError(
    "all copies, factors unknown",
    "all copies aligned to the reference, weighted to bring the average nearest to it",
    several=True, reference=True,
)  # fmt: skip
ATTACKS = {
    attack.name: attack
    for attack in (
        ONE_COPY, ONE_COPY_REFERENCE, TWO_COPIES, ALL_COPIES, ALL_SMALLEST, ALL_REFERENCE, ALL_UNKNOWN,
    )
}  # fmt: skip


@dataclass
class Recovered:
    """What one attack recovered: squared errors by method of estimating the change (``lab.audit``) and block.

    ``function``: up to the symmetries, under which the model computes the same function; ``task``: as recovered, in
    the reference's coordinates, if the attack ends up in them.
    """

    function: dict[str, dict[str, float]] = field(default_factory=dict)
    task: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Audit:
    """Errors by attack and block; ``task`` and ``weights`` are the squared norms that they are relative to, by block;
    ``unmoved`` is the share of weights that are unchanged in a copy, by block."""

    attacks: dict[str, Recovered]
    task: dict[str, float]
    weights: dict[str, float]
    unmoved: dict[str, float]
    with_reference: bool

    def method(self, attack: str) -> str:
        """The method of estimating the change with which the attack's error is smallest in total."""
        errors = self.attacks[attack].function
        return min(errors, key=lambda method: math.fsum(errors[method].values()))

    def function_error(self, attack: str, block: str | None = None) -> float:
        """Error relative to the weights, up to symmetries, in total or for one block, with the best method."""
        return self._ratio(self.attacks[attack].function[self.method(attack)], self.weights, block)

    def plain_error(self, attack: str) -> float:
        """``function_error`` in total of what was recovered, as it is."""
        return self._ratio(self.attacks[attack].function[AS_IT_IS], self.weights, None)

    def change_error(self, attack: str) -> float:
        """``function_error`` in total, relative to the task vector (to the weights if there is no reference)."""
        return self._ratio(self.attacks[attack].function[self.method(attack)], self.task, None)

    def task_error(self, attack: str, block: str | None = None) -> float | None:
        """Error relative to the task vector, in the reference's coordinates, with the method that makes it smallest;
        None if the attack ends up in others."""
        errors = self.attacks[attack].task
        if not errors:
            return None
        return self._ratio(
            min(errors.values(), key=lambda block_errors: math.fsum(block_errors.values())), self.task, block
        )

    @property
    def best(self) -> str:
        """The attack that comes nearest to the weights."""
        return min(self.attacks, key=self.function_error)

    @property
    def verdict(self) -> str:
        """One sentence: whether the best attack recovered what fine-tuning changed; or, without a reference, all."""
        off, share = self.function_error(self.best), self.change_error(self.best)
        attack = f"the best of these attacks, {ATTACKS[self.best].description},"
        if not self.with_reference:
            outcome = "recovered" if share < RECOVERY_ERROR else "not recovered"
            return f"{outcome}: {attack} is off by {off:.2%} of the weights"
        # Relative errors of 1 and more are those of the public model itself, which knows nothing of the change.
        how_much = "recovered" if share < RECOVERY_ERROR else "in part recovered" if share < 1 else "not recovered"
        return (
            f"{how_much}: {attack} gives {max(0.0, 1 - share):.0%} of what fine-tuning changed (it is off by "
            f"{share:.2%} of that, and by {off:.2%} of the weights)"
        )

    def document(self) -> dict[str, object]:
        """Everything that was measured, for JSON."""
        return {
            name: {
                "weights": self.function_error(name),
                "task_vector": self.task_error(name),
                "of_change": self.change_error(name),
                "method": self.method(name),
                "blocks": {
                    block: {"weights": self.function_error(name, block), "task_vector": self.task_error(name, block)}
                    for block in self.weights
                },
            }
            for name, recovered in self.attacks.items()
        }

    def _ratio(self, errors: Mapping[str, float], norms: Mapping[str, float], block: str | None) -> float:
        blocks = [block] if block else list(norms)
        total = math.fsum(norms[b] for b in blocks)
        return math.sqrt(math.fsum(errors[b] for b in blocks) / total) if total else math.nan
