"""`mpu tune`: its options give the losses that it promises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.models import DemoModel
from tests.helpers.trainings import BRIEF


class TestTune:
    @pytest.mark.slow
    def test_finds_what_forgets_in_bounds(self, mpu: Callable, demo: DemoModel, tmp_path: Path) -> None:
        """Its options, passed to unlearn as printed, give the losses that it promised; nothing is left behind."""
        common = ("--forget", demo.forget, "--retain", demo.retain, "--algo", "npo", "--constants", "beta=2.0",
                  "--batch-size", 5, "--optim", "adamw-blockwise")  # fmt: skip
        search = ("--trials", 5, "--most-epochs", 8, "--least-lr", 1e-4, "--max-rise", 0.2)
        document = mpu("tune", demo.model, *common, *search, "--json", cwd=tmp_path).json
        assert not list(tmp_path.iterdir())
        assert len(document["trials"]) == 5
        within = [trial for trial in document["trials"] if trial["retain_rise"] <= 0.2]
        assert document["best"] == max(within, key=lambda trial: trial["forget_rise"])
        assert document["best"]["forget_rise"] > 0.1
        again = mpu("tune", demo.model, *common, *search, cwd=tmp_path).out
        assert again == document["options"] + "\n"  # the same seed, the same search
        assert document["options"].startswith(
            "--algo npo --optim adamw-blockwise --batch-size 5 --constants beta=2 --lr "
        )
        exact = ("--lr", document["best"]["lr"], "--epochs", document["best"]["epochs"])
        direct = mpu("unlearn", demo.model, *common, *exact, "--json", cwd=tmp_path).json
        rise = direct["after"]["forget"] - direct["before"]["forget"]
        assert rise == pytest.approx(document["best"]["forget_rise"], rel=1e-6)

    def test_bad_input(self, mpu: Callable, root: Path) -> None:
        for arguments, named in (
            (("--algo", "gradascent"), "records to keep"),
            (("--least-lr", 1, "--most-lr", 0.1), "--least-lr"),
            (("--trials", 0), "--trials"),
            (("--forget", "none.jsonl"), "none.jsonl"),
        ):
            mpu("tune", "base", *BRIEF[6:], *arguments, refused=named, cwd=root)

    def test_nothing_found_is_said(self, mpu: Callable, root: Path) -> None:
        outcome = mpu("tune", "base", "--algo", "npo", "--reading", "template=plain", "--trials", 1, "--least-lr", 1e-9,
                   "--most-lr", 1e-9, "--max-rise", 10, check=False, cwd=root)  # fmt: skip
        assert "nothing found that forgets: the loss rose by at most" in outcome.err
        assert (outcome.status, outcome.out) == (1, "")

    def test_no_trial_in_bounds(self, mpu: Callable, root: Path) -> None:
        mpu(
            "tune", "base", "--algo", "npo", "--reading", "template=plain", "--trials", 1, "--least-lr", 0.5,
            "--most-lr",
            0.5, "--most-epochs", 2, "--max-rise", 1e-6, fails="no trial stayed in bounds", status=1, cwd=root,
        )  # fmt: skip
