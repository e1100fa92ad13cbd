"""Options from files and variables, help, and what is printed where."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import shlex
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import save_file

from mpu_cli.cli.main import COMMANDS, application, main
from mpu_cli.cli.output import progress_columns
from mpu_cli.commands.check import Check
from mpu_cli.commands.unlearn import Unlearn
from mpu_cli.files.manifest import DeltaManifest, as_metadata, delta_facts
from mpu_cli.files.reader import OPTION
from mpu_cli.lab.relearning import ATTACKS
from mpu_cli.model.family import SETS
from mpu_cli.options import names
from mpu_cli.options.declare import (
    OTHER_NAMES,
    as_arguments,
    declared_options,
    folds_of,
    from_flat,
    spelled_for,
    unfold,
)
from mpu_cli.options.evaluation import Scoring
from mpu_cli.options.publishing import Publishing
from mpu_cli.options.unlearning import AUTO, AlgorithmOptions, Unlearning
from mpu_cli.protocol.keys import open_keys
from mpu_cli.protocol.noise import SCHEMES
from mpu_cli.records.read import read_records
from mpu_cli.training.checks import PRECISIONS
from mpu_cli.training.losses import ALGORITHMS, RETAIN, Constants
from mpu_cli.training.optimizers import OPTIMIZERS
from tests.helpers.models import random_model, save, write_records


def test_choices_are_those_of_the_tables():
    """Options list their choices without importing their implementations, from the source or again."""

    def choices(group, name):
        return set(declared_options(group)[name].choices)

    assert (tuple(ALGORITHMS), tuple(ATTACKS)) == (names.ALGORITHMS, names.ATTACKS)
    assert all(name in declared_options(Unlearning)["algo"].help for name in ALGORITHMS)
    assert choices(Unlearning, "optim") == set(OPTIMIZERS)
    assert choices(Unlearning, "precision") == {AUTO, *PRECISIONS}
    assert choices(Unlearning, "retain_loss") == set(RETAIN)
    assert choices(Publishing, "dtype") == set(OPTION)
    assert choices(Publishing, "symmetries") == set(SETS)
    assert all(f"{kind}:" in declared_options(Publishing)["noise"].help for kind in SCHEMES)
    assert set(declared_options(AlgorithmOptions)) == {"retain_loss", *(field.name for field in fields(Constants))}


def test_each_example_is_a_command_line_of_its_command() -> None:
    """As click reads it: options that exist, with values of their kinds, and all that is required."""
    group = application()
    for name, command in COMMANDS.items():
        program, called, *arguments = shlex.split(command.EXAMPLE)
        assert (program, called) == ("mpu", name)
        group.commands[name].make_context(name, arguments)


def test_help_says_each_algorithms_constants() -> None:
    """(default: FOR ALL; ALGORITHM VALUE, …), without the first for constants that not all have. Level has none."""
    for name, option in declared_options(AlgorithmOptions).items():
        if name == "level":
            continue
        [said] = re.findall(r"\(default: ([^)]*)\)", option.help)
        general, _, named = said.rpartition("; ")
        own = dict(each.split() for each in named.split(", "))
        for algo, algorithm in ALGORITHMS.items():
            used = {"retain_loss", "gamma", "alpha", *algorithm.constant_names}
            actual = algorithm.retain if name == "retain_loss" else getattr(algorithm.constants, name)
            text = own.get(algo, general) if name in used else None
            if text is not None:
                assert text == (actual if isinstance(actual, str) else f"{actual:g}"), (name, algo)
            else:
                assert algo not in own, (name, algo)
    assert f"{ALGORITHMS['hinge'].faithful_alpha:g} for a hinge" in declared_options(AlgorithmOptions)["alpha"].help


def test_standard_output_carries_paths_only(mpu, root):
    assert mpu("publish", "base", "--copies", 2, cwd=root).out == "copy_1\ncopy_2\n"
    for k in (1, 2):
        outcome = mpu("unlearn", f"copy_{k}", "--algo", "npo", "--epochs", 1, cwd=root)
        assert outcome.out == f"deltas/copy_{k}.safetensors\n"
    assert mpu("invert", "deltas", cwd=root).out == "inverted/copy_1.safetensors\ninverted/copy_2.safetensors\n"
    assert mpu("aggregate", "deltas", cwd=root).out == "unlearned\n"


@pytest.mark.slow
def test_json_is_one_document(mpu, root):
    assert mpu("publish", "base", "--copies", 2, "--json", cwd=root).json["copies"] == ["copy_1", "copy_2"]
    for k in (1, 2):
        assert mpu("unlearn", f"copy_{k}", "--algo", "npo", "--epochs", 1, "--json", cwd=root).json
    document = mpu("aggregate", "deltas", "--json", cwd=root).json
    assert [c["copy"] for c in document["copies"]] == [1, 2]
    assert mpu("verify", "copy_1", "--json", cwd=root).json["ok"]
    kinds = {path: mpu("inspect", path, "--json", cwd=root).json["kind"] for path in
             ("copy_1", "deltas/copy_1.safetensors", "keys.bin", "unlearned", "base")}  # fmt: skip
    assert len(set(kinds.values())) == 5
    assert len(mpu("inspect", "base", "--tensors", "--json", cwd=root).json["list"]) == 20


def test_debug_shows_the_traceback(mpu, tmp_path):
    for arguments in (["--debug", "publish", "gone.safetensors"], ["publish", "gone.safetensors", "--debug"]):
        assert "Traceback" in mpu(*arguments, check=False, cwd=tmp_path).err


@pytest.mark.slow
def test_a_closed_pipe_is_no_error(shell, tmp_path):
    save(random_model("llama"), tmp_path / "base")
    assert (
        "Traceback"
        not in shell("mpu inspect base --tensors | head -n1; mpu inspect base --tensors --json | true").stderr
    )


def test_help_of_another_commands_options_refers_to_it() -> None:
    for name in ("run", "rehearse"):
        parameters = {each.name: each for each in application([name]).commands[name].params}
        assert "mpu unlearn --help-all" in parameters["unlearn"].help
        assert "beta" not in parameters["unlearn"].help


def test_help_tells_defaults():
    done = subprocess.run(
        [sys.executable, "-m", "mpu_cli", "publish", "--help-all"], capture_output=True, text=True, check=True
    )
    text = " ".join(done.stdout.replace("│", " ").split())
    assert "(default: each tensor's own)" in text
    assert "(default: none, noise is scaled to BASE)" in text


def test_options_by_variables(mpu, tmp_path, base, monkeypatch):
    for name, value in (("COPIES", "3"), ("RUN", "one:5"), ("JSON", "1"), ("KEYS", str(tmp_path / "k"))):
        monkeypatch.setenv(f"MPU_PUBLISH_{name}", value)
    monkeypatch.setenv("MPU_VERSION", "1.0")  # somebody else's
    document = mpu("publish", base, "--out", tmp_path).json
    assert (len(document["copies"]), document["round"], document["keys"]) == (3, 5, str(tmp_path / "k"))


def test_control_characters_do_not_reach_the_terminal(mpu, tmp_path):
    for algorithm in ("npo", "npo\nrun  FORGED\x1b[2J"):
        facts = delta_facts(DeltaManifest(None, algorithm))
        save_file({"a\x1b[31m": torch.zeros(1)}, tmp_path / "d.safetensors", as_metadata(facts))
        shown = mpu("inspect", tmp_path / "d.safetensors", "--tensors", check=False)
        assert ("algorithm: not of the form" in shown.err) == (algorithm != "npo")
        assert "\x1b" not in shown.out + shown.err
        assert not any(line.startswith("run") for line in shown.out.splitlines())


def test_a_text_with_odd_line_separators_is_a_line(mpu, tmp_path):
    save(random_model("llama"), tmp_path / "base")
    (tmp_path / "forget.jsonl").write_text('{"question": "w4\u2028w5", "answer": "w6\u0085"}\n', encoding="utf-8")
    arguments = ["--algo", "gradascent", "--epochs", 1, "--batch-size", 1, "--trust-copy"]
    assert len(mpu("unlearn", "base", *arguments, "--json", cwd=tmp_path).json["steps"]) == 1


class TestOptionsFromAFile:
    def test_the_command_line_comes_first_then_a_variable_then_the_file(
        self, mpu: Callable, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In any position; names with hyphens or underscores; lists as on the command line with commas."""
        (root / "mpu.toml").write_text(
            '[publish]\nkappa = 0.5\npermanent-noise = 0.25\nbase = "base"\nonly = [1, 3]\n'
            '[aggregate]\nkeys = "other.bin"\n'
        )
        monkeypatch.setenv("MPU_PUBLISH_PERMANENT_NOISE", "0.125")
        outcome = mpu("publish", "--kappa", 0.75, "--config", "mpu.toml", "--seed", 3, "--json", cwd=root)
        assert "κ = 0.75 and permanent noise of 0.125" in outcome.err
        assert outcome.json["copies"] == ["copy_1", "copy_3"]
        monkeypatch.delenv("MPU_PUBLISH_PERMANENT_NOISE")
        again = mpu("publish", "--config", "mpu.toml", "--seed", 3, "--force", "--keys", "again.bin", cwd=root)
        assert "permanent noise of 0.25" in again.err
        assert "other.bin: cannot read" in mpu("--config=mpu.toml", "aggregate", "x", check=False, cwd=root).err

    def test_parts_of_an_option_come_from_all_three(
        self, mpu: Callable, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of each part the last value counts: one on the command line leaves the privacy that the file asks for."""
        (root / "mpu.toml").write_text("[publish]\ndp = {epsilon = 5, delta = 1e-5, sensitivity = 9}\n")
        monkeypatch.setenv("MPU_PUBLISH_DP", "sensitivity=0.1,budget_rounds=2")
        mpu("publish", "base", "--config", "mpu.toml", "--dp", "budget_rounds=3", cwd=root)
        calibration = open_keys(root / "keys.bin").publication.calibration
        assert calibration is not None
        assert (calibration.epsilon, calibration.sensitivity, calibration.rounds) == (5, 0.1, 3)
        monkeypatch.delenv("MPU_PUBLISH_DP")
        mpu("publish", "base", "--dp", "budget_rounds=3", "--out", "x", refused="--dp epsilon", cwd=root)
        for part in ("max_grad_norm=0.5", "neighbours=replaced", "delta=1e-6"):
            mpu("unlearn", "copy_1", "--dp", part, refused="needs --dp epsilon", cwd=root)

    def test_several_files_of_records(self, mpu: Callable, root: Path) -> None:
        """In a list, as with the option given twice; and as Python gives them: names may have commas, or begin with a
        hyphen."""
        for name in ("more, of them.jsonl", "-more.jsonl"):
            write_records(root / name, 3, 7)
        (root / "mpu.toml").write_text('[unlearn]\nforget = ["forget.jsonl", "more, of them.jsonl"]\n')
        twice = ("--forget", "forget.jsonl", "--forget", "more, of them.jsonl")
        hyphen = ("--forget", "forget.jsonl", "--forget", "-more.jsonl")
        for given in (("--config", "mpu.toml"), twice, hyphen):
            assert "9 records to forget" in mpu("unlearn", "base", "--dry-run", *given, cwd=root).out
        command = Unlearn.of("base", forget=[root / "forget.jsonl", root / "more, of them.jsonl"])
        assert len(read_records(command.unlearning.records.forget)) == 9

    @pytest.mark.parametrize(
        ("text", "named"),
        [
            ("[publish]\nkapa = 1", "did you mean kappa?"),
            ("kappa = 1", "put options into a table"),
            ("[publisch]\nkappa = 1", "publisch: not a command"),
            ("[publish", "not TOML"),
            ("[publish]\nkappa = 'much'", "--kappa"),
            (f"[publish]\nkappa = {'9' * 5000}", "not TOML"),
            (f"[publish]\nkappa = {'[' * 5000}{']' * 5000}", "not TOML"),
            (f"[publish]\ncopies = {'9' * 400}", "--copies"),
        ],
    )
    def test_mistakes(self, mpu: Callable, root: Path, text: str, named: str) -> None:
        (root / "mpu.toml").write_text(text)
        mpu("publish", "base", "--config", "mpu.toml", refused=named, cwd=root)
        assert not list(root.glob("copy_*"))

    def test_what_a_file_may_not_set(self, mpu: Callable, root: Path) -> None:
        """It may be the other party's: nothing that runs, sends, replaces, chooses secrets or leaves out a check."""
        refused = {
            "aggregate": {"trust_deltas", "trust_keys", "force"},
            "check": {"outside_dp", "changed_reading", "force"},
            "evaluate": {"endpoint", "force"},
            "publish": {"copy_recipients", "recipient", "seed", "publish_again", "trust_keys", "force"},
            "run": {"launch", "public_records"},
            "sweep": {"launcher_options"},
            "trace": {"endpoint", "trust_keys"},
            "unlearn": {"public_records", "trust_copy", "report_to", "force"},
        }
        for name, command in COMMANDS.items():
            closed = {option.name for option in declared_options(command).values() if not option.in_files}
            assert refused.get(command.__name__.lower(), closed) == closed
            for option in declared_options(command).values():  # of the commands of the future, too
                if option.name == "force" or option.name.startswith("trust_"):
                    assert option.name in closed, (name, option.name)
        (root / "mpu.toml").write_text("[run]\nlaunch = \"sh -c 'touch ran' --\"\n")
        mpu("run", "base", "--config", "mpu.toml", refused="[run] launch: cannot be set in a file", status=2, cwd=root)
        (root / "grid.toml").write_text("base = 'base'\nlaunch = \"sh -c 'touch ran' --\"\n")
        (root / "with.toml").write_text("launch = 'sh'\n")
        mpu("sweep", "grid.toml", refused="grid.toml: launch: cannot be set in a file", status=2, cwd=root)
        (root / "grid.toml").write_text("base = 'base'\n")
        mpu("sweep", "grid.toml", "--with", "with.toml", refused="with.toml: launch", status=2, cwd=root)
        assert not (root / "ran").exists()

    @pytest.mark.parametrize("option", ["kappa", "rounds"])
    def test_a_number_that_no_float_holds(self, mpu: Callable, root: Path, option: str) -> None:
        (root / "grid.toml").write_text(f"base = 'base'\n{option} = {'9' * 400}\n")
        mpu("sweep", "grid.toml", refused=f"grid.toml: {option} = ", status=2, cwd=root)

    def test_unknown_variables_are_named(self, mpu: Callable, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MPU_PUBLISH_KAPA", "0.5")
        outcome = mpu("inspect", root / "base")
        assert "warning: MPU_PUBLISH_KAPA: no option has this variable; did you mean MPU_PUBLISH_KAPPA?" in outcome.err


@pytest.mark.slow
def test_nothing_is_drawn_over_the_question_for_a_passphrase(root: Path) -> None:
    """Once it stands on the terminal, nothing follows until it is answered; then the copies are made."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "mpu_cli", "publish", "base", "--copies", "2", "--passphrase"]
    asked = subprocess.Popen(
        command, cwd=root, stdin=slave, stderr=slave, stdout=slave, env=os.environ | {"TERM": "xterm"},
        start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(slave)
    shown = b""
    for answer in (b"open sesame\n", b"open sesame\n"):
        while not shown.rstrip().endswith(b":"):
            shown += os.read(master, 4096)
        assert select.select([master], [], [], 0.5)[0] == []
        os.write(master, answer)
        shown = b""
    with suppress(OSError):  # the terminal is gone once the command has ended
        while piece := os.read(master, 4096):
            shown += piece
    assert asked.wait() == 0, shown
    assert (root / "copy_2").is_dir()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_help_at_any_width(mpu, monkeypatch, width):
    """Sentences are whole at any width, and markup eats no word."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERMINAL_WIDTH", str(width))
    lines = [line.strip("│ ").rstrip() for line in mpu("--help").out.splitlines() if line.startswith("│")]
    assert any(line.startswith("demo") for line in lines)
    assert "such as ." not in " ".join(lines)
    words = " ".join(" ".join(lines).split())
    assert "forgetting against utility, and each numeric axis of the grid" in words


@pytest.mark.parametrize("command", [name for name, each in COMMANDS.items() if each.ESSENTIAL])
def test_help_in_two_levels(mpu, command):
    """The options that matter, each of which exists, and how to see the rest."""
    short_help, full_help = mpu(command, "--help").out, mpu(command, "--help-all").out
    assert len(short_help.splitlines()) < len(full_help.splitlines())
    assert f"more options: mpu {command} --help-all" in " ".join(short_help.split())
    flags = {flag for each in application().commands[command].params for flag in each.opts}
    assert set(COMMANDS[command].ESSENTIAL.split()) <= flags


def test_an_option_that_is_nearly_right(mpu, tmp_path):
    (tmp_path / "sweep.toml").write_text('base = "base"\nbatchsize = 8\n')
    mpu("sweep", "sweep.toml", fails="did you mean batch_size?", status=2, cwd=tmp_path)


def test_an_option_by_the_name_that_other_tools_have(mpu, root):
    """On the command line, in a file of options and in a recipe."""
    (root / "mpu.toml").write_text("[unlearn]\nlearning_rate = 1e-4\n")
    (root / "sweep.toml").write_text('base = "base"\nlearning_rate = 1e-4\n')
    mpu("unlearn", "base", "--learning-rate", "1e-4", refused="--lr", status=2, cwd=root)
    refused = mpu("unlearn", "base", "--copies", 2, refused="No such option", status=2, cwd=root)  # an argument's name
    assert not re.search(r"--copies\)|mean '--copies'", refused.err)
    mpu("--config", "mpu.toml", "unlearn", "base", refused="did you mean lr?", status=2, cwd=root)
    mpu("sweep", "sweep.toml", refused="did you mean lr?", status=2, cwd=root)
    for name, ours in OTHER_NAMES.items():
        assert any(ours in declared_options(command) for command in COMMANDS.values()), name


@pytest.mark.parametrize("value", ["many", "0"])
def test_a_bad_value_is_said_to_be_the_variables(mpu, monkeypatch, tmp_path, value):
    """Unless the command line gives the option, which then comes first."""
    monkeypatch.setenv("MPU_UNLEARN_EPOCHS", value)
    refused = mpu("unlearn", "copy_1", check=False, cwd=tmp_path)
    assert "MPU_UNLEARN_EPOCHS" in refused.err
    assert "--epochs" not in refused.err
    refused = mpu("unlearn", "copy_1", "--epochs=-1", check=False, cwd=tmp_path)
    assert "--epochs" in refused.err
    assert "MPU_UNLEARN_EPOCHS" not in refused.err


def test_quiet_leaves_results_and_warnings(mpu: Callable, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("publish", "base", "--copies", 2, "--kappa", 0.3, "--force")
    loud = mpu(*command, cwd=root)
    warnings = [line for line in loud.err.splitlines() if line.startswith("warning: ")]
    assert warnings
    assert len(warnings) < len(loud.err.splitlines())
    for quiet in (("--quiet", *command), (*command, "--quiet")):
        outcome = mpu(*quiet, cwd=root)
        assert (outcome.out, outcome.err.splitlines()) == (loud.out, warnings)
        monkeypatch.delenv("MPU_QUIET")  # which --quiet sets, for the processes that a command starts
    monkeypatch.setenv("MPU_QUIET", "1")
    assert mpu(*command, cwd=root).err.splitlines() == warnings


def test_stages_add_up_to_the_command(mpu: Callable, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--profile, anywhere on the line: each stage once, in no more time than the command took."""
    started = time.monotonic()
    outcome = mpu("publish", "base", "--copies", 2, "--kappa", 0.3, "--force", "--profile", cwd=root)
    elapsed = time.monotonic() - started
    monkeypatch.delenv("MPU_PROFILE")  # which it sets, for the processes that a command starts
    stages = dict(re.findall(r"^profile: (.+): ([\d.]+) s$", outcome.err, re.M))
    assert {"loading", "publish"} <= stages.keys()
    assert 0 < sum(map(float, stages.values())) <= elapsed + 0.01 * len(stages)
    assert "profile:" not in mpu("publish", "base", "--copies", 2, "--kappa", 0.3, "--force", cwd=root).err


@pytest.mark.parametrize("width", [60, 80])
def test_times_stay_on_narrow_terminals(width: int) -> None:
    text = io.StringIO()
    console = Console(width=width, file=text, force_terminal=True, color_system=None)
    bar = Progress(*progress_columns("unlearn copy_1", "steps"), console=console, auto_refresh=False, expand=True)
    bar.add_task("", total=300, completed=123.0, text="loss 1.234 = forget 0.234 retain 1.000")
    console.print(bar.get_renderable())
    assert re.search(r"unlearn copy_1 .*123.0/300 steps 0:00:00 left -:--:-- loss", text.getvalue())


def test_a_shell_completes_options(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Which are declared only for the command that is called."""
    for name, value in (("_MPU_COMPLETE", "complete_bash"), ("COMP_WORDS", "mpu publish --kap"), ("COMP_CWORD", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main([])
    assert capfd.readouterr().out.split() == ["--kappa"]


class TestFolds:
    """Options that are one on the command line, such as ``--lora rank=8,alpha=4``."""

    @pytest.mark.parametrize(
        ("name", "texts", "file", "options"),
        [
            ("lora", ["rank=8,targets=q_proj,v_proj", "alpha=4"], 'rank = 8\nalpha = 4\ntargets = ["q_proj", "v_proj"]',
             {"lora_rank": 8, "lora_alpha": 4.0, "lora_targets": ("q_proj", "v_proj")}),
            ("training", ["compile,deterministic=false"], "compile = true\ndeterministic = false",
             {"compile": True, "deterministic": False}),
            ("reading", ["system_prompt=Be brief, please,turns=all"],
             'system_prompt = "Be brief, please"\nturns = "all"',
             {"system_prompt": "Be brief, please", "turns": "all"}),
            ("constants", ["beta=1", "beta=2"], "beta = 2", {"beta": 2.0}),
        ],
    )  # fmt: skip
    def test_text_file_and_python_say_the_same(
        self, tmp_path: Path, name: str, texts: list[str], file: str, options: dict[str, object]
    ) -> None:
        declared = declared_options(Unlearn)
        [fold] = [each for each in folds_of(declared) if each.name == name]
        path = tmp_path / "options.toml"
        path.write_text(file)
        expected = Unlearn.of(["copy"], **options)
        for given in (texts, [str(path)]):
            assert from_flat(Unlearn, {"copies": ["copy"], **unfold(fold, given, declared)}) == expected
        # As a command that mpu prints or runs says it.
        [flag, text] = as_arguments(expected, without=("copies",))
        assert flag == fold.flag
        assert from_flat(Unlearn, {"copies": ["copy"], **unfold(fold, [text], declared)}) == expected

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("--lora-rank", 4), "--lora rank"),
            (("--beta", 2), "--constants beta"),
            (("--lora", "rnk=4"), "did you mean rank?"),
            (("--lora", "rank"), "write rank=VALUE"),
            (("--lora", "rank=four"), "must be a whole number"),
            (("--constants", "beta=-1"), "--constants beta=-1.0: must be above 0"),
            (("--training", "compile=perhaps"), "must be true or false"),
        ],
    )
    def test_a_mistake_is_named(self, mpu: Callable, tmp_path: Path, words: tuple, said: str) -> None:
        refused = mpu("unlearn", "copy", *words, cwd=tmp_path, check=False)
        assert refused.status == 2
        assert said in refused.err

    def test_a_file_cannot_set_what_no_file_may(self, mpu: Callable, tmp_path: Path) -> None:
        (tmp_path / "training.toml").write_text('report_to = "wandb"\n')
        said = "report_to: cannot be set in a file"
        mpu("unlearn", "copy", "--training", "training.toml", cwd=tmp_path, refused=said, status=2)
        (tmp_path / "unlearn.toml").write_text("public_records = true\n")
        said = "public_records: cannot be set in a file"
        mpu("run", "base", "--unlearn", "unlearn.toml", cwd=tmp_path, refused=said, status=2)
        for training in ('{ report_to = "wandb" }', '"report_to=wandb"'):
            (tmp_path / "mpu.toml").write_text(f"[unlearn]\ntraining = {training}\n")
            said = "report_to: cannot be set in a file"
            mpu("unlearn", "copy", "--config", "mpu.toml", cwd=tmp_path, refused=said, status=2)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("system_prompt=Hi,max-lenght=512", "did you mean max_length?"),
            ("system_prompt=Hi,max_len=512", "did you mean max_length?"),
            ("turns=all,skip-bad=perhaps", "must be true or false"),
        ],
    )
    def test_a_name_is_no_part_of_the_text_before(self, mpu: Callable, tmp_path: Path, text: str, said: str) -> None:
        refused = mpu("unlearn", "copy", "--reading", text, cwd=tmp_path, check=False)
        assert refused.status == 2
        assert said in refused.err

    @pytest.mark.parametrize("prompt", ["Be kind, date=x, and brief", "two\nlines, skip_bad", '{"a": 1}, b', ""])
    def test_any_text_survives_as_a_command_that_is_printed(self, prompt: str) -> None:
        """Also text that looks like further parts of the option."""
        declared = declared_options(Unlearn)
        [reading] = [each for each in folds_of(declared) if each.name == "reading"]
        expected = Unlearn.of(["copy"], system_prompt=prompt, turns="all")
        [_, text] = as_arguments(expected, without=("copies",))
        assert from_flat(Unlearn, {"copies": ["copy"], **unfold(reading, text.split("\n"), declared)}) == expected

    @pytest.mark.parametrize(
        ("command", "text", "spelled"),
        [
            ("run", "--precision mixed does not work with --training compile",
             "--unlearn precision=mixed does not work with --unlearn compile"),
            ("run", "--lora alpha needs --lora rank", "--unlearn lora_alpha needs --unlearn lora_rank"),
            ("run", "use --optim adamw-blockwise or --kappa 0", "use --unlearn optim=adamw-blockwise or --kappa 0"),
            ("rehearse", "--batch-size 0: too few, --weight-decay -1: too little",
             "--batch-size 0: too few, --unlearn weight_decay=-1: too little"),
            ("check", "name them: --columns question=Ask", "name them: --reading columns=question=Ask"),
            ("unlearn", "--precision mixed, --lora rank, --columns question=Ask",
             "--precision mixed, --lora rank, --columns question=Ask"),
        ],
    )  # fmt: skip
    def test_errors_name_options_as_the_command_has_them(self, command: str, text: str, spelled: str) -> None:
        assert spelled_for(COMMANDS[command], text) == spelled

    def test_an_error_of_unlearn_in_another_command(self, mpu: Callable, root: Path) -> None:
        for option in ("lora_alpha", "dp_budget"):
            run = ("run", "base", "--unlearn", f"{option}=2", "--dry-run")
            mpu(*run, cwd=root, refused=f"--unlearn {option}", status=2)

    def test_what_one_command_reads_is_said_as_another_reads_it(self) -> None:
        """`check` prints the command of `unlearn` that follows: --columns stands alone there, and how `check` computes
        is left out."""
        declared = declared_options(Check)
        columns = "question=Ask,answer=Reply"
        texts = {
            "reading": [f"columns={columns},encoding=cp1252,turns=all"],
            "scoring": ["device=cpu,batch_size=4"],
            "goal": ["max_left=0.1"],
        }
        folds = {fold.name: fold for fold in folds_of(declared)}
        values = {name: value for fold in texts for name, value in unfold(folds[fold], texts[fold], declared).items()}
        checking = from_flat(Check, {"copy": "copy_1", **values}).checking
        assert (checking.reading.columns, checking.scoring.device) == (columns, "cpu")
        words = as_arguments(checking, declared_options(Scoring), of=Unlearn)
        assert words == [
            "--columns", columns, "--encoding", "cp1252", "--reading", "turns=all", "--goal", "max_left=0.1"
        ]  # fmt: skip

    def test_a_variable_and_a_repeated_option(
        self, mpu: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A variable is not cut at its spaces, and of an option that is given twice both count."""
        mpu("unlearn", "copy", "--lora", "rank=2", "--lora", "alpha=-1", cwd=tmp_path, refused="--lora alpha", status=2)
        mpu("unlearn", "copy", "--lora", "rank=-2", "--lora", "alpha=1", cwd=tmp_path, refused="--lora rank", status=2)
        monkeypatch.setenv("MPU_UNLEARN_READING", "system_prompt=You are brief,max_length=-1")
        mpu("unlearn", "copy", cwd=tmp_path, refused="MPU_UNLEARN_READING max_length=-1", status=2)

    @pytest.mark.parametrize("value", ["8", "[{rank = 8}]", "[1]"])
    def test_a_table_of_another_kind(self, mpu: Callable, tmp_path: Path, value: str) -> None:
        (tmp_path / "mpu.toml").write_text(f"[unlearn]\nlora = {value}\n")
        mpu("unlearn", "copy", "--config", "mpu.toml", cwd=tmp_path, refused="lora: must be text", status=2)

    @pytest.mark.parametrize(
        ("command", "file"),
        [
            (("eval", "x", "--config", "options.toml"), '[eval]\nmetrics = "evil:f"\n'),
            (("unlearn", "x", "--config", "options.toml"), '[unlearn]\nalgo = "evil:f"\n'),
            (("sweep", "options.toml"), 'base = "x"\nalgo = ["npo", "evil:f"]\n'),
            (("sweep", "options.toml"), 'base = "x"\n[eval]\nmetrics = ["evil:f"]\n'),
        ],
    )
    def test_a_file_names_no_module(self, mpu: Callable, tmp_path: Path, command: tuple, file: str) -> None:
        (tmp_path / "evil.py").write_text("open('ran', 'w').close()\n")
        (tmp_path / "options.toml").write_text(file)
        mpu(*command, cwd=tmp_path, refused="names no module", status=2)
        assert not (tmp_path / "ran").exists()


def test_global_options_without_their_value_or_with_one(mpu: Callable) -> None:
    mpu("status", "--quiet=1", refused="--quiet: takes no value", status=2)
    mpu("status", "--config", refused="--config: needs a file", status=2)
