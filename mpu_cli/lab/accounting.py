"""The privacy of records that trainings and releases spend, by dp-accounting.

Privacy loss distributions (Koskela et al., 2020) compose what mechanisms really leak; Rényi bounds, which DP-SGD is
often accounted by, overstate ε (docs/bounds_and_tracing.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpu_cli.errors import UsageError
from mpu_cli.plugins import require
from mpu_cli.training.ledger import Mechanism, Release, Spending

if TYPE_CHECKING:
    from dp_accounting import DpEvent
    from dp_accounting.pld import PLDAccountant

DISCRETIZATION = 1e-3  # of the privacy loss, in nats; rounded up, so that ε remains a bound
TOLERANCE = 1e-3  # of the noise that is sought
ACCOUNTED = "differential privacy of the records"


def composed_epsilon(spendings: Sequence[Spending], delta: float, neighbours: str = "left-out") -> float:
    """ε at ``delta`` of all ``spendings`` one after the other; infinite if one has no bound.

    Releases add their (ε, δ): what they leave of ``delta`` is left for the trainings.
    """
    releases = [spending.between(neighbours) for spending in spendings if isinstance(spending, Release)]
    mechanisms = [spending for spending in spendings if isinstance(spending, Mechanism)]
    if None in spendings or not all(mechanism.noise_multiplier for mechanism in mechanisms):
        return math.inf
    remaining_delta = delta - math.fsum(release.delta for release in releases)
    if remaining_delta < 0 or (mechanisms and remaining_delta == 0):
        return math.inf
    epsilon = math.fsum(release.epsilon for release in releases)
    if mechanisms:
        accountant = _accountant(neighbours)
        for mechanism in mechanisms:
            accountant.compose(_event(mechanism))
        epsilon += float(accountant.get_epsilon(remaining_delta))
    return epsilon


def noise_multiplier_for(
    epsilon: float, delta: float, *, sample_rate: float, steps: int, neighbours: str = "left-out"
) -> float:
    """The least noise under which ``steps`` of DP-SGD spend (``epsilon``, ``delta``).

    Raises UsageError if none is enough.
    """
    from dp_accounting import calibrate_dp_mechanism, mechanism_calibration

    try:
        multiplier = calibrate_dp_mechanism(
            lambda: _accountant(neighbours),
            lambda sigma: _event(Mechanism(sigma, sample_rate, steps)),
            epsilon,
            delta,
            tol=TOLERANCE,
        )
    except (ValueError, mechanism_calibration.NoBracketIntervalFoundError) as error:
        raise UsageError(
            f"--dp epsilon={epsilon:g},delta={delta:g}: no usable noise level achieves this in {steps} steps",
            "raise them, or use fewer --epochs",
        ) from error
    return float(multiplier)


def _accountant(neighbours: str) -> PLDAccountant:
    require("dp-accounting", ACCOUNTED)
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import PLDAccountant

    relations = {"left-out": NeighboringRelation.ADD_OR_REMOVE_ONE, "replaced": NeighboringRelation.REPLACE_ONE}
    return PLDAccountant(relations[neighbours], value_discretization_interval=DISCRETIZATION)


def _event(mechanism: Mechanism) -> DpEvent:
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent

    step: DpEvent = GaussianDpEvent(mechanism.noise_multiplier)
    if mechanism.sample_rate < 1:
        step = PoissonSampledDpEvent(mechanism.sample_rate, step)
    return SelfComposedDpEvent(step, mechanism.steps)
