"""The command line as users see it: the README's workflow, pipes, errors, interrupts."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mpu_cli.cli import output
from mpu_cli.files.transaction import Transaction
from mpu_cli.measuring.encoding import TrainedEncoder
from mpu_cli.measuring.scoring import Scorer
from mpu_cli.options.unlearning import RecordFormat
from mpu_cli.records.encode import Encoding
from mpu_cli.records.read import read_records
from mpu_cli.training.ledger import LedgerEntry
from tests.helpers.attacks import edit
from tests.helpers.models import load, random_model, save, write_records
from tests.helpers.shapes import make
from tests.helpers.stopping import stop_when
from tests.helpers.trainings import BRIEF


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


def loading_of(modules, arguments, cwd=None, status=0):
    """What a command writes to standard error in a process of its own, and last which of ``modules`` it loaded."""
    program = (
        "import sys\nfrom mpu_cli.cli.main import main\ntry: main()\n"
        f"finally: print(sys.modules.keys() & {modules}, file=sys.stderr)"
    )
    command = [sys.executable, "-c", program, *arguments.split()]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    return done.stderr.splitlines()


def test_help_loads_neither_torch_nor_transformers():
    for arguments in ("--help", "publish --help", "unlearn --help", "--version"):
        assert loading_of({"torch", "transformers", "numpy", "pyrage"}, arguments) == ["set()"]


def test_what_reads_no_model_loads_no_transformers(tmp_path: Path) -> None:
    """Importing it takes three seconds."""
    assert loading_of({"torch"}, f"keygen --out {tmp_path}/identity.txt")[-1] == "set()"
    entry = LedgerEntry("identity", "run", round=1, copy=1, weights="", algorithm="hinge", records=1)
    (tmp_path / "ledger.jsonl").write_text(json.dumps(asdict(entry)) + "\n")
    assert loading_of({"transformers", "accelerate"}, "inspect ledger.jsonl", cwd=tmp_path)[-1] == "set()"
    imports = "import sys, mpu_cli.measuring.receipt, mpu_cli.training.ledger\nassert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", imports], check=True)


@pytest.mark.parametrize("command", ["unlearn copy_1", "check copy_1"])
def test_a_mistake_in_records_is_reported_before_torch_is_loaded(tmp_path: Path, command: str) -> None:
    (tmp_path / "forget.jsonl").write_text("{")
    line = f"{command} --forget forget.jsonl"
    error, *_, loaded = loading_of({"torch", "transformers"}, line, cwd=tmp_path, status=1)
    assert "forget.jsonl, line 1: not JSON" in error
    assert loaded == "set()"


@pytest.mark.slow
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
    assert loading_of({"transformers", "accelerate", "scipy"}, line, cwd=root)[-1] == "set()"


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
    assert {path.name for path in tmp_path.iterdir()} == {"base", "config"}  # where the register is


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
    assert outputs in (set(), {"copy_1", "copy_2", "copy_3", "keys.bin"})  # all or nothing
    if process.returncode == 143:
        assert err.endswith("mpu: error: stopped\n") or "nothing was left half-written" in err
        assert outputs or len(err.splitlines()) == 1


@pytest.mark.slow
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
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: no such file"),
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
def test_a_base_that_is_none(mpu, tmp_path, base, what):
    spoil, complaint = BAD_MODELS[what]
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
        (["--noise", "zero-sum:1,0"], "--noise", 2),
        (["--noise", "zero-sum:1,-2"], "--noise", 2),
        (["--noise", "zero-sum:1,nan"], "--noise", 2),
        (["--copies", "2", "--noise", "zero-sum:1,2,3"], "--noise", 2),
        (["--noise", "extrapolate:1,1"], "--noise", 2),
        (["--noise", "extrapolate:1,0"], "--noise", 2),
        (["--noise", "extrapolate:1,inf"], "--noise", 2),
        (["--noise", "gaussian"], "--noise gaussian: must be one of", 2),
        (["--noise", "zero-sum:"], "--noise zero-sum:", 2),
        (["--noise", "zero-sum:one,two"], "--noise", 2),
        (["--run", ":0"], "--run: must be at least 1", 2),
        (["--run", "clinic:two"], "--run clinic:two", 2),
        (["--copies", "1000"], "at most", 2),
        (["--noise", "zero-sum:1e-320,1"], "--noise", 2),
        (["--seed", str(2**300)], "--seed", 2),
        (["--keys", "copy_1/keys.bin"], "choose other names", 1),
        (["--seed", "-1"], "--seed", 2),
        (["--symmetries", "some"], "--symmetries", 2),
        (["--dtype", "int8"], "--dtype", 2),
        (["--nonsense"], "--nonsense", 2),
        (["--recipient", "age1nonsense"], "age1nonsense", 1),
        (["--recipient", "age1x", "--passphrase"], "mutually exclusive", 2),
        (["--identity", "gone.txt"], "gone.txt", 1),
        (["--public", "gone"], "gone: no such file", 1),
        (["--public", "other"], "shape", 1),
        (["--public", "gpt2"], "different architecture", 1),
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


def test_an_output_that_exists_stays(mpu, tmp_path, base):
    mpu("publish", base, cwd=tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert_refused(mpu("publish", base, check=False, cwd=tmp_path), "--force")
    (tmp_path / "keys.bin").rename(tmp_path / "kept.bin")
    assert_refused(mpu("publish", base, check=False, cwd=tmp_path), "--force")
    (tmp_path / "kept.bin").rename(tmp_path / "keys.bin")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    mpu("publish", base, "--force", cwd=tmp_path)
    assert (tmp_path / "keys.bin").read_bytes() != before[tmp_path / "keys.bin"]


def test_an_output_is_taken_before_the_training(mpu, root):
    """Of two commands with one output, the second does not train; nor does one whose last output exists."""
    arguments = ["--algo", "gradascent", "--epochs", 1, "--out", "d.safetensors"]
    with Transaction() as transaction:
        transaction.add(root / "d.safetensors").write_text("first")
        for further in ([], ["--force"], ["--dry-run"]):
            assert_refused(mpu("unlearn", "base", *arguments, *further, check=False, cwd=root), "is writing it")
    assert_refused(mpu("unlearn", "base", *arguments, check=False, cwd=root), "already exists")
    mpu("unlearn", "base", *arguments, "--force", cwd=root)
    shutil.copytree(root / "base", root / "other")
    (root / "deltas").mkdir()
    (root / "deltas/other.safetensors").touch()
    arguments[-1] = "deltas"
    assert_refused(
        mpu("unlearn", "base", "other", *arguments, check=False, cwd=root), "other.safetensors: already exists"
    )
    assert not (root / "deltas/base.safetensors").exists()


def test_a_text_has_no_other_answer(mpu, tmp_path):
    """Split into pieces, it would be paired with the alternates of other records."""
    save(random_model("llama"), tmp_path / "base")
    (tmp_path / "forget.jsonl").write_text(json.dumps({"text": " ".join(["w4"] * 200)}) + "\n")
    write_records(tmp_path / "retain.jsonl", 2, 2)
    mpu("unlearn", "base", "--algo", "dpo", fails="forget.jsonl, line 1 is a text", status=2, cwd=tmp_path)


def test_a_record_longer_than_the_model_reads(mpu, tmp_path):
    """Learned positions end; rotary ones do not, and such a record is trained on as it is evaluated."""
    (tmp_path / "forget.jsonl").write_text(json.dumps({"question": "w4 " * 300, "answer": "w5"}))
    for family, fits in (("gpt2", False), ("llama", True)):
        save(random_model(family), tmp_path / family)
        training = ("--algo", "gradascent", "--epochs", 1, "--trust-copy")
        done = mpu("unlearn", family, *training, check=False, cwd=tmp_path)
        assert (done.status == 0) is fits
        if fits:
            assert "1 of 1 records are longer than the 256 tokens" in done.err
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
        (b"\xff\x00\xfe", "UTF-8"),
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
        (["--constants", "gamma=nan"], "--constants gamma", 2),
        (["--training", "micro_batch_size=0"], "--training micro_batch_size", 2),
        (["--algo", "rmu", "--constants", "layer=2"], "--constants layer", 2),
        (["--algo", "rmu", "--constants", "layer=1"], "final norm", 2),  # the last of two layers
        (["--algo", "npo", "--constants", "coefficient=5"], "--constants coefficient: npo has no such constant", 2),
        (["--lora", "rank=2,alpha=0"], "--lora alpha", 2),
        (["--dp", "epsilon=1e-9,delta=1e-30"], "--dp epsilon", 2),
        (["--dp", "epsilon=4", "--constants", "retain_loss=hidden,layer=0"], "--constants retain_loss=hidden", 2),
        (["--algo", "npo", "--constants", "retain_loss=hidden"], "--constants layer", 2),
        (["--lora", "rank=0"], "--lora rank", 2),
        (["--dp", "epsilon=4", "--training", "compile"], "--dp does not work with --training", 2),
        (["--dp", "epsilon=4", "--training", "lr_scheduler=linear"], "--training lr_scheduler", 2),
        (["--training", "compile,gradient_checkpointing"], "--training compile", 2),
        (["--lora", "rank=2,quantize=nf4", "--training", "compile"], "--training compile", 2),
        (["--training", "attention=flash_attention_2"], "--precision bfloat16", 2),
        (["--constants", "beta=0"], "--constants beta", 2),
        (["--epochs", "0"], "--epochs", 2),
        (["--epochs", "1", "--unseen", "u"], "error: --unseen: only for a training that stops when it is done", 2),
        (
            ["--dp", "epsilon=4", "--goal", "max_left=0.1", "--max-steps", "3"],
            "error: --goal max_left, --max-steps:",
            2,
        ),
        (["--batch-size", "0"], "--batch-size", 2),
        (["--training", "weight_decay=inf"], "--training weight_decay", 2),
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


@pytest.mark.parametrize(("place", "reason"), [("-", "--json"), ("file/x", "Not a directory"), ("x" * 300, "too long")])
@pytest.mark.parametrize(
    "arguments",
    [
        ("eval", "base", "--forget", "forget.jsonl", "--out"),
        ("finetune", "base", "--data", "forget.jsonl", "--out"),
        ("keygen", "--out"),
        ("publish", "base", "--keys"),
        ("publish", "base", "--dry-run", "--out"),
        ("run", "base", "--out"),
        ("run", "base", "--dry-run", "--out"),
        ("sweep", "sweep.toml", "--out"),
        ("unlearn", "base", "--trust-copy", "--out"),
        ("watch", "spool", "--once", "--work"),
        ("watch", "--once", "--work", "work"),
    ],
    ids=" ".join,
)
def test_where_nothing_can_be_written(
    mpu: Callable, root: Path, arguments: tuple[str, ...], place: str, reason: str
) -> None:
    """One error before the work, which leaves nothing."""
    (root / "file").touch()
    (root / "sweep.toml").write_text('base = "base"\n')
    before = set(root.rglob("*"))
    mpu(*arguments, place, cwd=root, refused=reason)
    assert set(root.rglob("*")) == before


def test_a_tokenizer_without_template_or_none(mpu, tmp_path, base):
    write_records(tmp_path / "forget.jsonl", 4, 1)
    (base / "chat_template.jinja").unlink()
    arguments = ["unlearn", "base", "--algo", "gradascent", "--epochs", 1]
    assert_refused(mpu(*arguments, "--reading", "template=chat", check=False, cwd=tmp_path), "--reading template=plain")
    mpu(*arguments, cwd=tmp_path)  # plain prompts, as mpu eval does
    mpu(*arguments, "--reading", "template=plain", "--out", "plain.safetensors", cwd=tmp_path)
    default_delta, plain_delta = (
        load_file(tmp_path / path) for path in ("deltas/base.safetensors", "plain.safetensors")
    )
    assert all(torch.equal(default_delta[name], plain_delta[name]) for name in default_delta)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (base / name).unlink()
    assert_refused(mpu(*arguments, "--force", check=False, cwd=tmp_path), "base")


def test_a_template_without_system_turn(mpu, tmp_path, base):
    write_records(tmp_path / "forget.jsonl", 4, 1)
    template = (base / "chat_template.jinja").read_text()
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    (base / "chat_template.jinja").write_text(refusal + template)
    arguments = ["unlearn", "base", "--algo", "gradascent", "--epochs", 1]
    assert_refused(mpu(*arguments, check=False, cwd=tmp_path), "--reading system_prompt=")
    assert not (tmp_path / "deltas").exists()
    mpu(*arguments, "--reading", "system_prompt=", cwd=tmp_path)
    assert (tmp_path / "deltas/base.safetensors").is_file()


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
        edit(base / name, **change)
        shell(f"yes | mpu unlearn {base.name} --algo gradascent --epochs 1")
        assert not (tmp_path / "owned").exists()


@pytest.mark.exhaustive
def test_out_of_memory_takes_fewer_records_at_once_or_says_what_to_lower(tmp_path, shell):
    """An address space limit stands in for a machine with little memory: one that holds some records, and one that does
    not hold the model."""
    base = save(random_model("llama", vocab_size=2_000_000), tmp_path / "base")
    write_records(tmp_path / "forget.jsonl", 400, 1)
    line = (
        f"OMP_NUM_THREADS=1 mpu unlearn {base.name} --algo gradascent --batch-size 400 --epochs 1 --precision float32"
    )
    done = shell(f"ulimit -v 5000000; {line}")
    assert done.returncode == 0, done.stderr
    assert "out of memory: from here on, 200 records at once" in done.stderr
    assert (tmp_path / "deltas/base.safetensors").exists()
    refused = shell(f"ulimit -v 3600000; {line} --force")
    assert refused.returncode == 1
    assert "--training micro_batch_size" in refused.stderr.splitlines()[-1]


@pytest.mark.slow
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
        options = ("--algo", "npo", "--epochs", 1, "--reading", "template=plain", "--out", f"{i}.safetensors")
        mpu("unlearn", "base", *named, *options, cwd=tmp_path)
        deltas.append((tmp_path / f"{i}.safetensors").read_bytes())
    assert len(set(deltas)) == 1
    missing = mpu("unlearn", "base", "--forget", "all.jsonl", "--forget=gone.jsonl", check=False, cwd=tmp_path)
    assert (missing.is_one_error, "gone.jsonl: no such file" in missing.err) == (True, True)


@pytest.mark.slow
def test_a_text_of_paragraphs(mpu, tmp_path):
    """One record, which is said; or one for each paragraph, if that is meant."""
    save(random_model("llama"), tmp_path / "base")
    (tmp_path / "forget.txt").write_text("First one.\n\nThe second\nparagraph.\n \n\nA third.\n")
    command = (
        "unlearn",
        "base",
        "--forget",
        "forget.txt",
        "--algo",
        "gradascent",
        "--reading",
        "template=plain",
        "--dry-run",
    )
    outcome = mpu(*command, cwd=tmp_path)
    assert "forget.txt: one record, of 3 paragraphs; --reading split=paragraphs makes one of each" in outcome.err
    assert [record.answer for record in read_records(tmp_path / "forget.txt", RecordFormat(split="paragraphs"))] == [
        "First one.", "The second\nparagraph.", "A third."
    ]  # fmt: skip
    assert "warning" not in mpu(*command, "--reading", "split=paragraphs", cwd=tmp_path).err
    (tmp_path / "forget.csv").write_text("Ask,Reply\nWho?,Me.\n")
    table = ("--forget", "forget.csv", "--columns", "question=Ask,answer=Reply")
    outcome = mpu("unlearn", "base", *table, "--algo", "gradascent", "--device", "cpu", "--dry-run", cwd=tmp_path)
    assert "until it is done, " in outcome.out


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
    mpu("unlearn", "base", "--forget", "t.csv", fails=hint, status=1, cwd=tmp_path)
    columns = hint.removeprefix("--columns ").strip("'")
    [record] = read_records(tmp_path / "t.csv", RecordFormat(columns=columns))
    assert len(record.turns) == 1
    nearly = mpu("unlearn", "base", "--forget", "t.csv", "--columns", columns[:-1], check=False, cwd=tmp_path)
    assert f"did you mean {header.split(',')[-1]!r}?" in nearly.err


def test_lines_of_progress_say_how_long_it_will_take(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Of steps that take a second each: as many seconds as there are steps left, a line in ten seconds."""
    monkeypatch.setattr(output.time, "monotonic", lambda: 0.0)
    terminal = output.Terminal()
    terminal.stage("train", 60, "steps")
    now = 0.0
    monkeypatch.setattr(output.time, "monotonic", lambda: now)
    for _ in range(60):
        now += 1.0
        terminal.advance(1)
    lines = capsys.readouterr().err.splitlines()
    done_and_left = [re.fullmatch(r"train: (\d+)%, up to (\d+) s left", line).groups() for line in lines]
    assert [int(left) for _, left in done_and_left] == [49, 38, 27, 16, 5]
    for done, left in done_and_left:
        assert abs(60 * (1 - int(done) / 100) - int(left)) < 1


@pytest.mark.slow
def test_a_module_in_the_current_folder_is_not_imported(tmp_path: Path) -> None:
    from mpu_cli.subprocesses import python_command, safe_environment

    for module in ("multiprocessing", "torch", "json", "mpu_cli", "tokenizers"):
        (tmp_path / module).mkdir()
        (tmp_path / module / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    for entry in (("mpu_cli.entry", "main", "--version"), ("mpu_cli.flower.watch", "serve", "0")):
        subprocess.run(
            python_command(*entry), cwd=tmp_path, env=safe_environment(), input=b"", capture_output=True,
            check=False, timeout=120,
        )  # fmt: skip
    assert not (tmp_path / "ran").exists()


def test_out_may_be_a_directory(mpu: Callable, root: Path) -> None:
    assert mpu("unlearn", "base", *BRIEF, "--out", "new/", cwd=root).out == "new/base.safetensors\n"
    (root / "there").mkdir()
    assert mpu("unlearn", "base", *BRIEF, "--out", "there", cwd=root).out == "there/base.safetensors\n"


def test_a_delta_gets_its_suffix(mpu: Callable, root: Path) -> None:
    assert mpu("unlearn", "base", *BRIEF, "--out", "mine", cwd=root).out == "mine.safetensors\n"
    mpu("unlearn", "base", *BRIEF, "--out", "mine.bin", refused="use mine.safetensors", cwd=root)
    assert not (root / "mine.bin").exists()
