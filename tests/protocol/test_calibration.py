"""Noise calibrated to (ε, δ): the numbers match the theorems, and the files contain the requested noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import mpmath
import pytest
import torch
from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from safetensors.torch import load_file

from mpu_cli.options.publishing import CalibrationOptions
from mpu_cli.protocol.noise import calibrate
from tests.helpers.models import random_model, save

GRID = [(epsilon, delta) for epsilon in (0.01, 0.1, 1.0, 3.0, 8.0) for delta in (1e-10, 1e-5, 0.01)]


def noise(epsilon: float, delta: float, sensitivity: float = 1.0, **options: object) -> float:
    """σ of the noise that all copies share."""
    return calibrate(
        CalibrationOptions(epsilon=epsilon, dp_delta=delta, sensitivity=sensitivity, **options), 1.0
    ).shared_sigma


class TestCalibrate:
    @pytest.mark.parametrize(("epsilon", "delta"), GRID)
    def test_meets_the_analytic_bound(self, epsilon: float, delta: float) -> None:
        """Balle and Wang (2018), Theorem 8: δ = Φ(S/2σ − εσ/S) − e^ε Φ(−S/2σ − εσ/S), in 50 digits."""
        s = 2.5
        sigma = mpmath.mpf(noise(epsilon, delta, s))
        with mpmath.workdps(50):
            a, b = s / (2 * sigma), epsilon * sigma / s
            spent = mpmath.ncdf(a - b) - mpmath.exp(epsilon) * mpmath.ncdf(-a - b)
        assert float(spent) == pytest.approx(delta, rel=1e-6)

    @pytest.mark.parametrize(("epsilon", "delta"), [(e, d) for e, d in GRID if e <= 1])
    def test_the_classical_bound_is_its_formula_and_larger(self, epsilon: float, delta: float) -> None:
        classical = noise(epsilon, delta, 3.0, bound="classical")
        assert classical == pytest.approx(3.0 * math.sqrt(2 * math.log(1.25 / delta)) / epsilon)
        assert classical > noise(epsilon, delta, 3.0)

    @pytest.mark.parametrize("rounds", [1, 5, 20])
    def test_rounds_compose_to_what_was_asked(self, rounds: int) -> None:
        """Against the accountant of privacy loss distributions, which knows nothing of √R."""
        sigma = noise(2.0, 1e-5, budget_rounds=rounds)
        accountant = PLDAccountant().compose(SelfComposedDpEvent(GaussianDpEvent(sigma), rounds))
        assert accountant.get_epsilon(1e-5) == pytest.approx(2.0, rel=1e-3)

    def test_one_copy_has_what_it_needs_from_its_own_noise(self) -> None:
        calibration = calibrate(
            CalibrationOptions(epsilon=1.0, dp_delta=1e-5, sensitivity=1.0, adversary="one-copy"), 0.5
        )
        assert 0.5 * calibration.sigma == pytest.approx(noise(1.0, 1e-5))
        assert calibration.shared_sigma == 0


class TestPublished:
    @pytest.mark.parametrize("adversary", ["one-copy", "all-copies"])
    @pytest.mark.parametrize("symmetries", ["none", "all"])
    def test_what_was_asked_for_is_in_the_files(
        self, mpu: Callable, tmp_path: Path, base: Path, adversary: str, symmetries: str
    ) -> None:
        """σ in every block of every copy; all copies together leave only the shared noise, or none."""
        outcome = mpu(
            "publish", base, "--dp", f"epsilon=4,delta=1e-6,sensitivity=0.05,adversary={adversary}",
            "--symmetries", symmetries, "--dp", "budget_rounds=3", "--noise", "zero-sum:1,2", "--out", tmp_path,
            "--keys", tmp_path / "k.bin", "--json",
        )  # fmt: skip
        needed = noise(4, 1e-6, 0.05, budget_rounds=3)
        clean = load_file(base / "model.safetensors")
        requested_sigmas = (needed, 2 * needed) if adversary == "one-copy" else (needed, needed)
        for block in outcome.json["blocks"]:
            for copy, sigma in zip(block["copies"], requested_sigmas, strict=True):
                assert copy["requested"] == pytest.approx(sigma)
                assert copy["survived"] == pytest.approx(sigma, rel=6 / math.sqrt(2 * block["weights"]))
        if symmetries == "none":
            copies = [load_file(tmp_path / f"copy_{k}" / "model.safetensors") for k in (1, 2)]
            mean = torch.cat([((2 * copies[0][n] + copies[1][n]) / 3 - w).flatten() for n, w in clean.items()])
            expected = 0 if adversary == "one-copy" else needed
            assert float(mean.square().mean().sqrt()) == pytest.approx(expected, rel=0.03, abs=1e-6)
        for k in (1, 2):
            mpu("verify", tmp_path / f"copy_{k}", "--keys", tmp_path / "k.bin")
        facts = mpu("inspect", tmp_path / "k.bin").out
        assert f"against {adversary}" in facts

    def test_says_what_it_holds_against(self, mpu: Callable, tmp_path: Path) -> None:
        base = save(random_model("gpt2"), tmp_path / "base")
        common = (
            "publish",
            base,
            "--dp",
            "epsilon=1,delta=1e-5,sensitivity=0.01",
            "--out",
            tmp_path,
            "--keys",
        )
        printed = mpu(*common, tmp_path / "k.bin").err
        assert "every copy" in printed
        assert "Computational" in printed
        printed = mpu(
            *common, tmp_path / "k.bin", "--force", "--allow", "publish-again", "--dp", "adversary=one-copy"
        ).err
        assert "one copy of a round" in printed

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ("--dp epsilon=1", "--dp delta and sensitivity"),
            ("--dp delta=1e-5", "for --dp epsilon"),
            ("--dp epsilon=0,delta=1e-5,sensitivity=1", "above 0"),
            ("--dp epsilon=1,delta=1,sensitivity=1", "between 0 and 1"),
            ("--dp epsilon=1,delta=1e-5,sensitivity=inf", "finite"),
            ("--dp epsilon=2,delta=1e-5,sensitivity=1,bound=classical", "ε ≤ 1"),
            ("--dp epsilon=100,delta=1e-10,sensitivity=1", "smaller ε"),
            ("--dp epsilon=1,delta=1e-5,sensitivity=1 --kappa 0.01", "leak them"),
            ("--dp epsilon=1,delta=1e-5,sensitivity=1 --seed 1", "guessed"),
            ("--dp epsilon=1,delta=1e-5,sensitivity=1 --run :2", "--dp budget_rounds"),
        ],
    )
    def test_refuses(self, mpu: Callable, tmp_path: Path, base: Path, arguments: str, says: str) -> None:
        out = tmp_path / "out"
        refused = mpu("publish", base, *arguments.split(), "--out", out, "--keys", out / "k.bin", check=False)
        assert refused.status != 0
        assert says in refused.err
        assert refused.is_one_error
        assert not out.exists()
