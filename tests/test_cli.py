"""The command line as users see it: the README's workflow, pipes, errors, interrupts."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
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
import typer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mpu_cli.architectures.symmetries import SETS
from mpu_cli.checkpoint.dtypes import OPTION
from mpu_cli.cli.levels import ESSENTIAL
from mpu_cli.cli.main import app
from mpu_cli.client.checks import PRECISIONS
from mpu_cli.client.losses import ALGORITHMS, RETAIN, Constants
from mpu_cli.client.optimizers import OPTIMIZERS
from mpu_cli.evaluation.encoding import TrainedEncoder
from mpu_cli.evaluation.scoring import Scorer
from mpu_cli.options.declare import declared_options
from mpu_cli.options.publishing import Publishing
from mpu_cli.options.unlearning import Loss, Unlearning
from mpu_cli.records.encoding import Encoding
from mpu_cli.records.reading import read_records
from mpu_cli.server.scheme import SCHEMES
from tests.benchmarks.shapes import make
from tests.models import load, random_model, save, write_records
from tests.stopping import stop_when


@pytest.fixture
def workplace(tmp_path, demo):
    """The files that README's first example needs."""
    for path in (*demo.model.iterdir(), demo.forget, demo.retain):
        shutil.copy(path, tmp_path / path.name.replace("model.safetensors", "base.safetensors"))
    return tmp_path


def forget_loss(model, folder):
    network, tokenizer = load(model, torch.float32, "cpu")
    items = TrainedEncoder(Encoding(tokenizer)).questions(read_records(folder / "forget.jsonl"))
    losses = torch.cat([scores.losses for scores in Scorer(network).score(items, batch_size=32)])
    return float(losses.mean())


@pytest.mark.slow
def test_the_commands_of_readme(workplace, demo, shell):
    """The blocks of README from the three steps on, as they stand there, with a trained model in the place of the
    demo's."""
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```sh\n(.*?)```", readme[readme.index("## The three steps") :], re.S)
    assert len(blocks) == 2
    model, records = workplace / "mpu-demo/models/target", workplace / "mpu-demo/records"
    shutil.copytree(demo.model, model)
    records.mkdir()
    for name in ("forget", "retain"):
        shutil.copy(workplace / f"{name}.jsonl", records)
    done = shell("set -e\n" + "\n".join(blocks))
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if not line.startswith("deltas")] == [
        "copy_1", "copy_2", "unlearned", "eval.json", "again",
    ]  # fmt: skip
    for out in ("unlearned", "again"):
        assert forget_loss(workplace / out, workplace) > forget_loss(model, workplace)


@pytest.mark.slow
def test_a_checkpoint_file_and_npo(workplace, demo, shell):
    """A file with its config beside it, and the first commands that anyone types."""
    for line in (
        "mpu publish base.safetensors --copies 2 --kappa 0.01",
        "mpu unlearn copy_1 --algo npo",
        "mpu unlearn copy_2 --algo npo",
        "mpu aggregate deltas/ --keys keys.bin",
    ):
        done = shell(line)
        assert done.returncode == 0, done.stderr
    assert done.stdout == "unlearned\n"
    before, after = (forget_loss(folder, workplace) for folder in (demo.model, workplace / "unlearned"))
    assert after > before
    assert AutoModelForCausalLM.from_pretrained(workplace / "unlearned").dtype == torch.float32


def test_help_loads_neither_torch_nor_transformers():
    program = (
        "import sys\nfrom mpu_cli.cli.main import main\ntry: main()\n"
        "finally: print(sys.modules.keys() & {'torch', 'transformers', 'numpy', 'pyrage'}, file=sys.stderr)"
    )
    for arguments in ("--help", "publish --help", "unlearn --help", "--version"):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments.split()], capture_output=True, text=True, check=True
        )
        assert done.stderr.strip() == "set()"


@pytest.mark.parametrize("command", ["publish", "invert", "aggregate"])
def test_servers_commands_load_no_transformers(root: Path, mpu: Callable, command: str) -> None:
    """Importing it takes longer than publishing a small model."""
    if command in ("invert", "aggregate"):
        mpu("publish", "base", "--copies", 2, cwd=root)
        for k in (1, 2):
            out = f"deltas/{k}.safetensors"
            mpu("unlearn", f"copy_{k}", "--algo", "gradascent", "--epochs", 1, "--out", out, cwd=root)
    line = {
        "publish": "publish base --copies 2",
        "invert": "invert deltas/1.safetensors --keys keys.bin",
        "aggregate": "aggregate deltas --keys keys.bin --out model",
    }[command]
    program = (
        "import sys\nfrom mpu_cli.cli.main import main\ntry: main()\n"
        "finally: print(sys.modules.keys() & {'transformers', 'accelerate', 'scipy'}, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *line.split()], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines()[-1] == "set()"


def test_choices_are_those_of_the_tables():
    """Options list their choices without importing their implementations; the two must stay in sync."""

    def choices(group, name):
        return set(declared_options(group)[name].choices)

    assert choices(Unlearning, "algo") == set(ALGORITHMS)
    assert choices(Unlearning, "optim") == set(OPTIMIZERS)
    assert choices(Unlearning, "precision") == set(PRECISIONS)
    assert choices(Unlearning, "retain_loss") == set(RETAIN)
    assert choices(Publishing, "dtype") == set(OPTION)
    assert choices(Publishing, "symmetries") == set(SETS)
    assert choices(Publishing, "noise") == set(SCHEMES)
    assert set(declared_options(Loss)) == {"retain_loss", *(field.name for field in fields(Constants))}


def test_standard_output_carries_paths_only(mpu, tmp_path):
    base = save(random_model("llama"), tmp_path / "base")
    write_records(tmp_path / "forget.jsonl", 4, 1)
    write_records(tmp_path / "retain.jsonl", 4, 2)
    assert mpu("publish", base, "--copies", 2, cwd=tmp_path).out == "copy_1\ncopy_2\n"
    for k in (1, 2):
        outcome = mpu("unlearn", f"copy_{k}", "--epochs", 1, cwd=tmp_path)
        assert outcome.out == f"deltas/copy_{k}.safetensors\n"
    assert mpu("invert", "deltas", cwd=tmp_path).out == "inverted/copy_1.safetensors\ninverted/copy_2.safetensors\n"
    assert mpu("aggregate", "deltas", cwd=tmp_path).out == "unlearned\n"


def test_json_is_one_document(mpu, tmp_path):
    base = save(random_model("llama"), tmp_path / "base")
    write_records(tmp_path / "forget.jsonl", 4, 1)
    write_records(tmp_path / "retain.jsonl", 4, 2)
    assert mpu("publish", base, "--copies", 2, "--json", cwd=tmp_path).json["copies"] == ["copy_1", "copy_2"]
    for k in (1, 2):
        mpu("unlearn", f"copy_{k}", "--epochs", 1, "--json", cwd=tmp_path)
    document = mpu("aggregate", "deltas", "--json", cwd=tmp_path).json
    assert [c["copy"] for c in document["copies"]] == [1, 2]
    assert mpu("verify", "copy_1", "--json", cwd=tmp_path).json["ok"]
    kinds = {path: mpu("inspect", path, "--json", cwd=tmp_path).json["kind"] for path in
             ("copy_1", "deltas/copy_1.safetensors", "keys.bin", "unlearned", "base")}  # fmt: skip
    assert len(set(kinds.values())) == 5
    assert len(mpu("inspect", "base", "--tensors", "--json", cwd=tmp_path).json["list"]) == 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interrupt_leaves_nothing(tmp_path, name):
    """Interrupted in the middle of writing 200 MB: only what existed before exists afterwards."""
    base = make("0.1b", tmp_path / "base")
    done = stop_when(
        ["publish", base, "--out", tmp_path / "out", "--keys", tmp_path / "keys.bin"],
        lambda: list(tmp_path.glob("out/.copy_2.*/model.safetensors")),
        env={"XDG_CONFIG_HOME": str(tmp_path / "config")},
        by=getattr(signal, name),
    )
    assert done.returncode == 128 + getattr(signal, name)
    assert done.stdout == ""
    assert "nothing was left half-written" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"base"}


@pytest.mark.parametrize("delay", [0.02, 0.1, 0.3, 0.6, 1.0])
def test_an_interrupt_while_loading_is_one_line(tmp_path, delay):
    save(random_model("llama"), tmp_path / "base")
    process = subprocess.Popen(
        [sys.executable, "-m", "mpu_cli", "publish", "base"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    time.sleep(delay)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (143, -signal.SIGTERM, 0)  # before Python runs, and after it is done, too
    outputs = {path.name for path in tmp_path.iterdir()} - {"base"}
    assert outputs in (set(), {"copy_1", "copy_2", "keys.bin"})  # all or nothing
    if process.returncode == 143:
        assert err.endswith("mpu: error: stopped\n") or "nothing was left half-written" in err
        assert outputs or len(err.splitlines()) == 1


def test_a_disk_that_is_too_small(shell, tmp_path):
    """A file size limit stands in for a full disk: the command fails before anything is written."""
    save(random_model("llama"), tmp_path / "base")
    done = shell("ulimit -f 60; mpu publish base")
    assert done.returncode == 1
    assert "cannot reserve" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"base"}


def spoiler(change):
    """A function that changes the config.json of a model directory."""

    def spoil(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(change(json.loads(path.read_text()))))

    return spoil


def respoil(folder, change):
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")


BAD_MODELS = {
    "no config": (lambda f: (f / "config.json").unlink(), "--model-config"),
    "config no JSON": (lambda f: (f / "config.json").write_text("{"), "not JSON"),
    "config an array": (lambda f: (f / "config.json").write_text("[]"), "not a JSON object"),
    "unknown architecture": (spoiler(lambda c: c | {"model_type": "mamba"}), "supported: llama, mistral, "),
    "no architecture": (spoiler(lambda c: {"was": c["model_type"]}), "not supported"),
    "architecture a list": (spoiler(lambda c: c | {"model_type": []}), "not supported"),
    "another width": (spoiler(lambda c: c | {"hidden_size": 96, "head_dim": 8}), "has shape"),
    "more layers": (spoiler(lambda c: c | {"num_hidden_layers": 3}), "lack"),
    "a billion layers": (spoiler(lambda c: c | {"num_hidden_layers": 10**9}), "layers"),
    "fewer layers": (spoiler(lambda c: c | {"num_hidden_layers": 1}), "does not describe"),
    "heads a text": (spoiler(lambda c: c | {"num_attention_heads": "six"}), "num_attention_heads"),
    "heads that do not divide": (spoiler(lambda c: c | {"num_key_value_heads": 4}), "do not divide"),
    "no heads": (spoiler(lambda c: c | {"num_key_value_heads": 0}), "positive"),
    "untied": (spoiler(lambda c: c | {"tie_word_embeddings": False}), "lm_head.weight"),
    "quantised": (spoiler(lambda c: c | {"quantization_config": {}}), "quantised"),
    "partial rotary": (spoiler(lambda c: c | {"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no weights"),
    "truncated": (lambda f: os.truncate(f / "model.safetensors", 9999), "truncated"),
    "whole numbers": (lambda f: respoil(f, lambda t: {n: x.to(torch.int8) for n, x in t.items()}), "quantised"),
    "NaN": (lambda f: respoil(f, lambda t: {n: x * float("nan") for n, x in t.items()}), "NaN"),
    "a tensor more": (lambda f: respoil(f, lambda t: t | {"lora_A": torch.zeros(1)}), "'lora_A'"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_MODELS)
def test_a_base_that_is_none(mpu, tmp_path, what):
    spoil, complaint = BAD_MODELS[what]
    base = save(random_model("llama"), tmp_path / "base")
    spoil(base)
    outcome = mpu("publish", base, "--out", tmp_path / "out", "--keys", tmp_path / "keys.bin", check=False)
    assert_refused(outcome, complaint)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "keys.bin").exists()


def assert_refused(outcome, complaint, status=1):
    assert outcome.status == status, outcome.err
    assert outcome.out == ""
    assert outcome.is_one_error, outcome.err
    assert complaint in outcome.err


@pytest.mark.parametrize(
    ("arguments", "complaint", "status"),
    [
        (["--kappa", "-1"], "--kappa", 2),
        (["--kappa", "nan"], "--kappa", 2),
        (["--kappa", "inf"], "--kappa", 2),
        (["--kappa", "much"], "--kappa", 2),
        (["--copies", "1"], "has to be permanent", 2),
        (["--alphas", "1,0"], "--alphas", 2),
        (["--alphas", "1,-2"], "--alphas", 2),
        (["--alphas", "1,nan"], "--alphas", 2),
        (["--copies", "2", "--alphas", "1,2,3"], "--alphas", 2),
        (["--nodes", "1,1"], "--nodes", 2),
        (["--nodes", "1,0"], "--nodes", 2),
        (["--nodes", "1,inf"], "--nodes", 2),
        (["--nodes", "1,-1", "--noise", "zero-sum"], "--nodes", 2),
        (["--alphas", "1,2", "--noise", "extrapolate"], "--alphas", 2),
        (["--alphas", "one,two"], "--alphas", 2),
        (["--round", "0"], "--round", 2),
        (["--copies", "1000"], "at most", 2),
        (["--alphas", "1e-320,1"], "--alphas", 2),
        (["--seed", str(2**300)], "--seed", 2),
        (["--keys", "copy_1/keys.bin"], "choose other names", 1),
        (["--seed", "-1"], "--seed", 2),
        (["--symmetries", "some"], "--symmetries", 2),
        (["--dtype", "int8"], "--dtype", 2),
        (["--nonsense"], "--nonsense", 2),
        (["--recipient", "age1nonsense"], "age1nonsense", 1),
        (["--recipient", "age1x", "--passphrase"], "mutually exclusive", 2),
        (["--identity", "gone.txt"], "gone.txt", 1),
        (["--reference", "gone"], "gone: no such file", 1),
        (["--reference", "other"], "shape", 1),
        (["--reference", "gpt2"], "different architecture", 1),
        (["--model-config", "gone.json"], "gone.json", 1),
        (["--keys", "base"], "directory", 1),
        (["--passphrase-file", "empty"], "empty passphrase", 1),
    ],
)
def test_publish_arguments(mpu, tmp_path, arguments, complaint, status):
    save(random_model("llama"), tmp_path / "base")
    save(random_model("gpt2"), tmp_path / "gpt2")
    save(random_model("llama", intermediate_size=96), tmp_path / "other")
    (tmp_path / "empty").touch()
    assert_refused(mpu("publish", "base", *arguments, "--force", check=False, cwd=tmp_path), complaint, status)
    assert {path.name for path in tmp_path.iterdir()} == {"base", "gpt2", "other", "empty"}


def test_a_missing_base(mpu, tmp_path):
    assert_refused(mpu("publish", "gone.safetensors", check=False, cwd=tmp_path), "gone.safetensors: no such file")
    assert_refused(mpu("publish", "org/name", check=False, cwd=tmp_path), "org/name")
    assert_refused(mpu("publish", check=False, cwd=tmp_path), "BASE", 2)
    assert not any(tmp_path.iterdir())


def test_an_output_that_exists_stays(mpu, tmp_path):
    base = save(random_model("llama"), tmp_path / "base")
    mpu("publish", base, cwd=tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert_refused(mpu("publish", base, check=False, cwd=tmp_path), "--force")
    (tmp_path / "keys.bin").rename(tmp_path / "kept.bin")
    assert_refused(mpu("publish", base, check=False, cwd=tmp_path), "--force")
    (tmp_path / "kept.bin").rename(tmp_path / "keys.bin")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    mpu("publish", base, "--force", cwd=tmp_path)
    assert (tmp_path / "keys.bin").read_bytes() != before[tmp_path / "keys.bin"]


def test_a_text_has_no_other_answer(mpu, tmp_path):
    """Split into pieces, it would be paired with the alternates of other records."""
    save(random_model("llama"), tmp_path / "base")
    (tmp_path / "forget.jsonl").write_text(json.dumps({"text": " ".join(["w4"] * 200)}) + "\n")
    write_records(tmp_path / "retain.jsonl", 2, 2)
    outcome = mpu("unlearn", "base", "--algo", "dpo", check=False, cwd=tmp_path)
    assert outcome.status == 2
    assert "forget.jsonl, line 1 is a text" in outcome.err


def test_a_record_longer_than_the_model_reads(mpu, tmp_path):
    """Learned positions end; rotary ones do not, and such a record is trained on as it is evaluated."""
    (tmp_path / "forget.jsonl").write_text(json.dumps({"question": "w4 " * 300, "answer": "w5"}))
    for family, fits in (("gpt2", False), ("llama", True)):
        save(random_model(family), tmp_path / family)
        training = ("--algo", "gradascent", "--epochs", 1, "--trust-copy")
        done = mpu("unlearn", family, *training, check=False, cwd=tmp_path)
        assert (done.status == 0) is fits
        if fits:
            assert "1 of 1 records of the forget set are longer than the 256 tokens" in done.err
        else:
            assert_refused(done, "tokens")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "no records"),
        ("\n\n", "no records"),
        ("[]", "no records"),
        ("{", "line 1: not JSON"),
        ('{"question": "w4", "answer": "w5"}\nnonsense\n', "line 2: not JSON"),
        ('{"question": "w4"}', "'answer'"),
        ('{"question": "w4", "answer": ""}', "'answer'"),
        ('{"question": [3], "answer": "w5"}', "'question'"),
        ("3", "not a JSON object"),
        ('[{"question": "w4", "answer": "w5"}, 7]', "record 2"),
        ("[" * 100_000, "not JSON"),
        ('{"text": "w4"}', "two tokens"),
        ('{"question": "w4", "answer": "\\ud800"}', "surrogate"),
        (b"\xff\xfe\x00", "UTF-8"),
        (None, "no such file"),
    ],
)
def test_records_that_are_none(mpu, tmp_path, content, complaint):
    save(random_model("llama"), tmp_path / "base")
    if content is not None:
        (tmp_path / "forget.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    write_records(tmp_path / "retain.jsonl", 2, 2)
    assert_refused(mpu("unlearn", "base", check=False, cwd=tmp_path), complaint)
    assert not (tmp_path / "deltas").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint", "status"),
    [
        (["--lr", "nan"], "--lr", 2),
        (["--lr", "-1"], "--lr", 2),
        (["--seed", "-1"], "--seed", 2),
        (["--seed", str(2**32)], "--seed", 2),
        (["--gamma", "nan"], "--gamma", 2),
        (["--micro-batch-size", "0"], "--micro-batch-size", 2),
        (["--algo", "rmu", "--layer", "2"], "--layer", 2),
        (["--algo", "rmu", "--layer", "1"], "final norm", 2),  # the last of two layers
        (["--algo", "npo", "--coefficient", "5"], "--coefficient: npo has no such constant", 2),
        (["--lora-rank", "2", "--lora-alpha", "0"], "--lora-alpha", 2),
        (["--dp-epsilon", "1e-6"], "--dp-epsilon", 2),
        (["--dp-epsilon", "4", "--retain-loss", "hidden", "--layer", "0"], "--retain-loss hidden", 2),
        (["--algo", "npo", "--retain-loss", "hidden"], "--layer", 2),
        (["--lora-rank", "0"], "--lora-rank", 2),
        (["--few-shot", "gone.jsonl"], "gone.jsonl", 1),
        (["--attention", "flash_attention_2"], "--precision bfloat16", 2),
        (["--beta", "0"], "--beta", 2),
        (["--epochs", "0"], "--epochs", 2),
        (["--batch-size", "0"], "--batch-size", 2),
        (["--weight-decay", "inf"], "--weight-decay", 2),
        (["--algo", "wish"], "--algo", 2),
        (["--retain", "gone.jsonl"], "gone.jsonl: no such file", 1),
        (["--out", "base/model.safetensors"], "already exists", 1),
        (["--out", "base/config.json"], "a delta is a .safetensors file", 2),
    ]
    + ([] if torch.cuda.is_available() else [(["--device", "cuda"], "--device", 2)]),
)
def test_unlearn_arguments(mpu, tmp_path, arguments, complaint, status):
    save(random_model("llama"), tmp_path / "base")
    write_records(tmp_path / "forget.jsonl", 2, 1)
    write_records(tmp_path / "retain.jsonl", 2, 2)
    assert_refused(mpu("unlearn", "base", *arguments, check=False, cwd=tmp_path), complaint, status)
    assert not (tmp_path / "deltas").exists()


def test_a_tokenizer_without_template_or_none(mpu, tmp_path):
    base = save(random_model("llama"), tmp_path / "base")
    write_records(tmp_path / "forget.jsonl", 4, 1)
    (base / "chat_template.jinja").unlink()
    arguments = ["unlearn", "base", "--algo", "gradascent", "--epochs", 1]
    assert_refused(mpu(*arguments, "--template", "chat", check=False, cwd=tmp_path), "--template plain")
    mpu(*arguments, cwd=tmp_path)  # plain prompts, as mpu eval does
    mpu(*arguments, "--template", "plain", "--out", "plain.safetensors", cwd=tmp_path)
    default_delta, plain_delta = (
        load_file(tmp_path / path) for path in ("deltas/base.safetensors", "plain.safetensors")
    )
    assert all(torch.equal(default_delta[name], plain_delta[name]) for name in default_delta)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (base / name).unlink()
    assert_refused(mpu(*arguments, "--force", check=False, cwd=tmp_path), "base")


def test_a_template_without_system_turn(mpu, tmp_path):
    base = save(random_model("llama"), tmp_path / "base")
    write_records(tmp_path / "forget.jsonl", 4, 1)
    template = (base / "chat_template.jinja").read_text()
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    (base / "chat_template.jinja").write_text(refusal + template)
    arguments = ["unlearn", "base", "--algo", "gradascent", "--epochs", 1]
    assert_refused(mpu(*arguments, check=False, cwd=tmp_path), "--system-prompt ''")
    assert not (tmp_path / "deltas").exists()
    mpu(*arguments, "--system-prompt", "", cwd=tmp_path)
    assert (tmp_path / "deltas/base.safetensors").is_file()


def test_debug_shows_the_traceback(mpu, tmp_path):
    for arguments in (["--debug", "publish", "gone.safetensors"], ["publish", "gone.safetensors", "--debug"]):
        assert "Traceback" in mpu(*arguments, check=False, cwd=tmp_path).err


def test_a_closed_pipe_is_no_error(shell, tmp_path):
    save(random_model("llama"), tmp_path / "base")
    assert (
        "Traceback"
        not in shell("mpu inspect base --tensors | head -n1; mpu inspect base --tensors --json | true").stderr
    )


@pytest.mark.slow
def test_code_in_a_folder_is_not_run(tmp_path, shell):
    """Whatever the folder contains or the user types, a model or tokenizer that needs custom code is refused."""
    write_records(tmp_path / "forget.jsonl", 2, 1)
    hack = "import pathlib\npathlib.Path('owned').touch()\nclass A: pass\n"
    changes = {
        "config.json": {"model_type": "evil", "auto_map": {"AutoConfig": "hack.A", "AutoModelForCausalLM": "hack.A"}},
        "tokenizer_config.json": {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["hack.A", "hack.A"]}},
    }
    for name, change in changes.items():
        base = save(random_model("llama"), tmp_path / name.removesuffix(".json"))
        (base / "hack.py").write_text(hack)
        path = base / name
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        shell(f"yes | mpu unlearn {base.name} --algo gradascent --epochs 1")
        assert not (tmp_path / "owned").exists()


def test_help_tells_defaults():
    done = subprocess.run(
        [sys.executable, "-m", "mpu_cli", "publish", "--help-all"], capture_output=True, text=True, check=True
    )
    text = " ".join(done.stdout.replace("│", " ").split())
    assert "(default: each tensor's own)" in text
    assert "(default: none, noise is scaled to BASE)" in text


def test_options_by_variables(mpu, tmp_path, monkeypatch):
    base = save(random_model("llama"), tmp_path / "base")
    for name, value in (("COPIES", "3"), ("ROUND", "5"), ("JSON", "1"), ("KEYS", str(tmp_path / "k"))):
        monkeypatch.setenv(f"MPU_PUBLISH_{name}", value)
    monkeypatch.setenv("MPU_VERSION", "1.0")  # somebody else's
    document = mpu("publish", base, "--out", tmp_path).json
    assert (len(document["copies"]), document["round"], document["keys"]) == (3, 5, str(tmp_path / "k"))


def test_control_characters_do_not_reach_the_terminal(mpu, tmp_path):
    from mpu_cli.manifest import DeltaManifest, as_metadata, delta_facts

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


@pytest.mark.slow
def test_out_of_memory_takes_fewer_records_at_once_or_says_what_to_lower(tmp_path, shell):
    """An address space limit stands in for a machine with little memory: one that holds some records, and one that does
    not hold the model."""
    base = save(random_model("llama", vocab_size=2_000_000), tmp_path / "base")
    write_records(tmp_path / "forget.jsonl", 400, 1)
    line = f"OMP_NUM_THREADS=1 mpu unlearn {base.name} --algo gradascent --batch-size 400 --epochs 1"
    done = shell(f"ulimit -v 5000000; {line}")
    assert done.returncode == 0, done.stderr
    assert "out of memory: from here on, 200 records at once" in done.stderr
    assert (tmp_path / "deltas/base.safetensors").exists()
    refused = shell(f"ulimit -v 3600000; {line} --force")
    assert refused.returncode == 1
    assert "--micro-batch-size" in refused.stderr.splitlines()[-1]


class TestOptionsFromAFile:
    def test_the_command_line_comes_first_then_a_variable_then_the_file(
        self, mpu: Callable, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In any position; names with hyphens or underscores; lists as on the command line with commas."""
        (root / "mpu.toml").write_text(
            '[publish]\nkappa = 0.5\nseed = 3\nshared-noise = 0.25\nbase = "base"\nnodes = [1, -1, 2]\n'
            '[aggregate]\nkeys = "other.bin"\n'
        )
        monkeypatch.setenv("MPU_PUBLISH_PERMANENT_NOISE", "0.125")
        outcome = mpu("publish", "--kappa", 0.75, "--config", "mpu.toml", "--json", cwd=root)
        assert "κ = 0.75 and permanent noise of 0.125" in outcome.err
        assert outcome.json["noise"]["factors"] == [1, -1, 2]
        monkeypatch.delenv("MPU_PUBLISH_PERMANENT_NOISE")
        monkeypatch.setenv("MPU_PUBLISH_SHARED_NOISE", "0.5")
        assert "permanent noise of 0.5" in mpu("publish", "--config", "mpu.toml", "--force", cwd=root).err
        monkeypatch.delenv("MPU_PUBLISH_SHARED_NOISE")
        former = mpu("publish", "--config", "mpu.toml", "--force", cwd=root).err  # the name that it had before
        assert "permanent noise of 0.25" in former
        assert "other.bin: cannot read" in mpu("--config=mpu.toml", "aggregate", "x", check=False, cwd=root).err

    @pytest.mark.parametrize(
        ("text", "named"),
        [
            ("[publish]\nkapa = 1", "did you mean kappa?"),
            ("kappa = 1", "put options into a table"),
            ("[publisch]\nkappa = 1", "publisch: not a command"),
            ("[publish", "not TOML"),
            ("[publish]\nkappa = 'much'", "--kappa"),
        ],
    )
    def test_mistakes(self, mpu: Callable, root: Path, text: str, named: str) -> None:
        (root / "mpu.toml").write_text(text)
        refused = mpu("publish", "base", "--config", "mpu.toml", check=False, cwd=root)
        assert refused.is_one_error
        assert named in refused.err
        assert not list(root.glob("copy_*"))

    def test_a_models_config_is_another_option(self, mpu: Callable, root: Path) -> None:
        refused = mpu("publish", "base", "--config", "base/config.json", check=False, cwd=root)
        assert refused.is_one_error
        assert "--model-config" in refused.err

    def test_unknown_variables_are_named(self, mpu: Callable, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MPU_PUBLISH_KAPA", "0.5")
        outcome = mpu("inspect", root / "base")
        assert "warning: MPU_PUBLISH_KAPA: no option has this variable; did you mean MPU_PUBLISH_KAPPA?" in outcome.err


def test_tables_fit_a_narrow_terminal(root: Path) -> None:
    """60 columns: publish has a line for each copy, and no number is cut."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 60, 0, 0))
    command = [sys.executable, "-m", "mpu_cli", "publish", "base", "--copies", "3", "--dtype", "float64"]
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    done = subprocess.Popen(
        command, cwd=root, stderr=slave, stdout=subprocess.DEVNULL, env=environment | {"TERM": "xterm"}
    )
    os.close(slave)
    shown = b""
    with suppress(OSError):  # the terminal is gone once the command has ended
        while piece := os.read(master, 4096):
            shown += piece
    assert done.wait() == 0
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode()).splitlines()]
    rows = [line for line in lines if line.startswith("model.")]
    assert len(rows) == 3 * 4  # embedding, norm and two layers, in three copies
    assert max(map(len, rows)) <= 60
    assert all(re.search(r"[123]  \d\.\d\de-\d\d  \d\.\d\de-\d\d +\d+\.\d%$", row) for row in rows)


def test_records_in_several_places(mpu, tmp_path):
    """--forget twice, a folder, a pattern and one file with all of them are the same records in the same order."""
    save(random_model("llama"), tmp_path / "base")
    write_records(tmp_path / "retain.jsonl", 4, 2)
    write_records(tmp_path / "all.jsonl", 4, 1)
    lines = (tmp_path / "all.jsonl").read_text().splitlines()
    (tmp_path / "notes").mkdir()
    for name, part in (("a", lines[:1]), ("b", lines[1:])):
        (tmp_path / f"notes/{name}.jsonl").write_text("\n".join(part) + "\n")
    deltas = []
    ways = (["all.jsonl"], ["notes/a.jsonl", "notes/b.jsonl"], ["notes"], ["notes/*.jsonl"])
    for i, sources in enumerate(ways):
        named = [text for source in sources for text in ("--forget", source)]
        options = ("--algo", "npo", "--epochs", 1, "--template", "plain", "--out", f"{i}.safetensors")
        mpu("unlearn", "base", *named, *options, cwd=tmp_path)
        deltas.append((tmp_path / f"{i}.safetensors").read_bytes())
    assert len(set(deltas)) == 1
    missing = mpu("unlearn", "base", "--forget", "all.jsonl", "--forget=gone.jsonl", check=False, cwd=tmp_path)
    assert (missing.is_one_error, "gone.jsonl: no such file" in missing.err) == (True, True)


def test_a_text_of_paragraphs(mpu, tmp_path):
    """One record, which is said; or one for each paragraph, if that is meant."""
    save(random_model("llama"), tmp_path / "base")
    (tmp_path / "forget.txt").write_text("First one.\n\nThe second\nparagraph.\n \n\nA third.\n")
    command = ("unlearn", "base", "--forget", "forget.txt", "--algo", "gradascent", "--template", "plain", "--dry-run")
    outcome = mpu(*command, cwd=tmp_path)
    assert "forget.txt: one record, of 3 paragraphs; --split paragraphs makes a record of each" in outcome.err
    assert [record.answer for record in read_records(tmp_path / "forget.txt", split="paragraphs")] == [
        "First one.", "The second\nparagraph.", "A third."
    ]  # fmt: skip
    assert "warning" not in mpu(*command, "--split", "paragraphs", cwd=tmp_path).err
    (tmp_path / "forget.csv").write_text("Ask,Reply\nWho?,Me.\n")
    table = ("--forget", "forget.csv", "--columns", "question=Ask,answer=Reply")
    outcome = mpu("unlearn", "base", *table, "--algo", "gradascent", "--device", "cpu", "--dry-run", cwd=tmp_path)
    assert "training takes about" in outcome.out


@pytest.mark.parametrize(
    ("header", "hint"),
    [
        ("Ticket,Customer message,Agent reply", "--columns 'question=Customer message,answer=Agent reply'"),
        ("instruction,response", "--columns question=instruction,answer=response"),
    ],
)
def test_a_table_with_other_columns(mpu, tmp_path, header, hint):
    """The hint can be pasted, and a name that is nearly right is put right."""
    (tmp_path / "t.csv").write_text(f"{header}\n" + ",".join("xyz"[: header.count(",") + 1]) + "\n")
    refused = mpu("unlearn", "base", "--forget", "t.csv", check=False, cwd=tmp_path)
    assert (refused.status, hint in refused.err) == (1, True)
    columns = hint.removeprefix("--columns ").strip("'")
    [record] = read_records(tmp_path / "t.csv", columns=dict(pair.split("=") for pair in columns.split(",")))
    assert len(record.turns) == 1
    nearly = mpu("unlearn", "base", "--forget", "t.csv", "--columns", columns[:-1], check=False, cwd=tmp_path)
    assert f"did you mean {header.split(',')[-1]!r}?" in nearly.err


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


@pytest.mark.parametrize("command", ESSENTIAL)
def test_help_in_two_levels(mpu, command):
    """The options that matter, each of which exists, and how to see the rest."""
    short_help, full_help = mpu(command, "--help").out, mpu(command, "--help-all").out
    assert len(short_help.splitlines()) < len(full_help.splitlines())
    assert f"more options: mpu {command} --help-all" in " ".join(short_help.split())
    flags = {flag for each in typer.main.get_command(app).commands[command].params for flag in each.opts}
    assert set(ESSENTIAL[command].split()) <= flags


def test_an_option_that_is_nearly_right(mpu, tmp_path):
    (tmp_path / "sweep.toml").write_text('base = "base"\nbatchsize = 8\n')
    outcome = mpu("sweep", "sweep.toml", check=False, cwd=tmp_path)
    assert (outcome.status, "did you mean batch_size?" in outcome.err) == (2, True)
