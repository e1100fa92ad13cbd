"""Every test runs the command line with its own configuration directory, so that no real identity is touched."""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before importing anything that reads it at import time

if "PYTEST_XDIST_WORKER" in os.environ:  # processes share the cores; two threads in each would wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
import typer.main

import mpu_cli.cli.main
from tests.helpers.models import DemoModel, make_demo_model, random_model, save, write_records
from tests.helpers.paths import ROOT


@dataclass(frozen=True)
class Outcome:
    """The result of a command: exit status, standard output and standard error."""

    status: int
    out: str
    err: str

    @property
    def is_one_error(self) -> bool:
        """Whether standard error holds one error, with one hint at most, and nothing else."""
        error, *hints = self.err.splitlines() or [""]
        return error.startswith("mpu: error: ") and len(hints) < 2 and all(h.startswith("mpu: hint: ") for h in hints)

    @property
    def json(self) -> dict:
        return json.loads(self.out)


LATER = ("slow", "exhaustive")  # tiers that run only if -m asks for them, or if a file or a test is named


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`pytest` alone runs the fast tier; further variants of what other tests show are run only if -m asks."""
    full_suite = [Path(path).name for path in config.args] in (["tests"], [ROOT.name])
    markexpr = config.option.markexpr
    later = LATER if full_suite and not markexpr else () if "exhaustive" in markexpr else ("exhaustive",)
    left_out = [item for item in items if any(item.get_closest_marker(tier) for tier in later)]
    items[:] = [item for item in items if item not in set(left_out)]
    config.hook.pytest_deselected(items=left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not config.option.markexpr:
        terminalreporter.write_line("the fast tier; the others: pytest -m slow, pytest -m exhaustive")


@pytest.fixture(autouse=True)
def _private_configuration(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("config", "cache"):
        monkeypatch.setenv(f"XDG_{place.upper()}_HOME", str(tmp_path_factory.mktemp(place)))
    monkeypatch.setenv("PYTHONSAFEPATH", "")  # which a command sets for what it starts; so it is restored
    for name in [name for name in os.environ if name.startswith("MPU_") and name != "MPU_TEST_SHARED"]:
        monkeypatch.delenv(name)


@pytest.fixture
def mpu(capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Run ``mpu ARGUMENTS`` in this process (torch is loaded once), which has to work unless ``check`` is off.

    With ``fails``, it has to fail, to say this and, if it is given, to end with ``status``; with ``refused``, in one
    error and nothing else.
    """

    def run(
        *arguments: object, check: bool = True, refused: str | None = None, fails: str | None = None,
        status: int | None = None, cwd: Path | None = None,
    ) -> Outcome:  # fmt: skip
        capfd.readouterr()
        with monkeypatch.context() as patch:
            if cwd is not None:
                patch.chdir(cwd)
            with pytest.raises(SystemExit) as stop:
                mpu_cli.cli.main.main([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        outcome = Outcome(int(stop.value.code or 0), captured.out, captured.err)
        says = refused if fails is None else fails
        if says is not None:
            assert says in outcome.err
            assert outcome.status == status if status is not None else outcome.status != 0, outcome.err
            assert refused is None or outcome.is_one_error, outcome.err
        elif check:
            assert outcome.status == 0, outcome.err
        return outcome

    return run


@pytest.fixture
def shell(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Run a bash command line in ``tmp_path`` with this interpreter's ``mpu`` first on the path."""

    def run(line: str, **kwargs: object) -> subprocess.CompletedProcess:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            ["bash", "-o", "pipefail", "-c", line], cwd=tmp_path, env={**os.environ, "PATH": path},
            capture_output=True, text=True, check=False, **kwargs,
        )  # fmt: skip

    return run


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DemoModel:
    """The demo's model, made once for all processes of pytest."""
    basetemp = tmp_path_factory.getbasetemp()
    return make_demo_model((basetemp.parent if "PYTEST_XDIST_WORKER" in os.environ else basetemp) / "trained")


@pytest.fixture(scope="session", autouse=True)
def _deterministic() -> None:
    torch.use_deterministic_algorithms(True)


@pytest.fixture(scope="session", autouse=True)
def _quick_commands() -> None:
    """Thousands of commands run in one process: their options are declared, and their signatures read, once."""
    mpu_cli.cli.main.typer_command = functools.cache(mpu_cli.cli.main.typer_command)
    typer.main.get_params_from_function = functools.cache(typer.main.get_params_from_function)
    # submitit sets up logging when it is imported, which closes the streams of absl's handlers: pytest's, in a test.
    for module in ("mpu_cli.training.unlearn", "mpu_cli.measuring.evaluate", "peft", "datasets", "submitit"):
        importlib.import_module(module)


@pytest.fixture(scope="module", autouse=True)
def _little_to_search_for_garbage(_quick_commands: None) -> None:
    """Accelerate collects garbage after each training. What the tests before have left, millions of objects of modules,
    is none; to look through them took five times as long as a test."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save(random_model("llama"), tmp_path / "base")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a base, forget and retain records."""
    save(random_model("llama"), tmp_path / "base")
    write_records(tmp_path / "forget.jsonl", 6, 1)
    write_records(tmp_path / "retain.jsonl", 9, 2)
    return tmp_path
