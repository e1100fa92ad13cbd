"""`mpu check` and its receipts: what passes, what is signed, and what a change to a receipt does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import mpu_cli
from mpu_cli.demo.people import make_people
from mpu_cli.errors import UsageError
from mpu_cli.evaluation.receipt import as_text, read_receipt, with_signature
from mpu_cli.evaluation.verdict import MARGIN, SetScore, Verdict
from mpu_cli.sealing import default_identity_path
from tests.helpers.models import DemoModel


@pytest.fixture
def folder(mpu: Callable, tmp_path: Path, demo: DemoModel) -> Path:
    """Copies of the demo's model, and of one that forgot everything: its weights in the last layer are shuffled."""
    people = make_people(12, 0)[10:]
    (tmp_path / "unseen.jsonl").write_text("".join(json.dumps(row) + "\n" for person in people for row in person))
    forgetful = shutil.copytree(demo.model, tmp_path / "forgetful")
    weights = load_file(forgetful / "model.safetensors")
    torch.manual_seed(0)
    weights |= {name: x + 0.1 * torch.randn_like(x) for name, x in weights.items() if "mlp" in name}
    save_file(weights, forgetful / "model.safetensors", {"format": "pt"})
    for name, model in (("same", demo.model), ("other", forgetful)):
        mpu("publish", model, "--copies", 2, "--kappa", 0.001, "--out", tmp_path / name,
            "--keys", tmp_path / f"{name}.bin")  # fmt: skip
    return tmp_path


def check(mpu: Callable, copy: Path, folder: Path, demo: DemoModel, *options: object, status: int = 1) -> dict:
    records = ("--forget", demo.forget, "--retain", demo.retain, "--unseen", folder / "unseen.jsonl")
    outcome = mpu("check", copy, *records, "--before", folder / "same/copy_2", *options, "--json", check=False)
    assert outcome.status == status, outcome.err
    return json.loads(outcome.out)


@pytest.mark.slow
def test_numbers_are_those_of_eval(mpu: Callable, folder: Path, demo: DemoModel) -> None:
    """On a copy that forgot nothing, and on one that forgot everything; of both it says what to ask for."""
    for name, verdict in (("same", (False, True)), ("other", (True, False))):
        copy = folder / name / "copy_1"
        document = check(mpu, copy, folder, demo)
        assert (document["forgotten"], document["kept"]) == verdict
        out = folder / f"{name}.json"
        mpu("eval", copy, "--benchmark", "qa", "--forget", demo.forget, "--retain", demo.retain, "--out", out)
        metrics = json.loads(out.read_text())["metrics"]
        for part in ("forget", "retain"):
            assert document[part]["probability"] == pytest.approx(metrics[f"{part}_Q_A_Prob"]["agg_value"])
    records = ("--forget", demo.forget, "--retain", demo.retain)
    verdict_in_python = mpu_cli.check(
        folder / "other/copy_1", forget=str(demo.forget), retain=str(demo.retain), unseen=folder / "unseen.jsonl",
        before=folder / "same/copy_1",
    ).verdict  # fmt: skip
    assert verdict_in_python.forget.probability == document["forget"]["probability"]
    for name, value in (("holdout", "unseen.jsonl"), ("benchmark", "tofu"), ("metrics", "forget_Q_A_Prob")):
        with pytest.raises(UsageError, match=f"{name}: a check does not use it"):
            mpu_cli.check(folder / "other/copy_1", forget=str(demo.forget), **{name: value})
    undecided = mpu("check", folder / "same/copy_1", *records, check=False)
    assert "undecided" in undecided.out
    assert undecided.status == 1


def test_the_verdict_follows_from_the_numbers() -> None:
    """Within the margin on both sides, and not beyond it."""

    def verdict(forget: float, retain: float, before: float = 0.9) -> Verdict:
        scores = [SetScore(1, probability) for probability in (forget, retain, 0.4, before, 0.9)]
        return Verdict(*scores)

    assert verdict(0.4 + 0.99 * MARGIN, 0.9 - 0.99 * MARGIN).passes
    assert not verdict(0.4 + 1.01 * MARGIN, 0.9).passes
    assert not verdict(0.4, 0.9 - 1.01 * MARGIN).passes
    assert [verdict(p, 0.9).is_conspicuous for p in (0.4 - 1.9 * MARGIN, 0.4 - 2.1 * MARGIN)] == [False, True]
    assert verdict(0.4, 0.9, before=0.41).is_forgotten is None  # there was nothing to forget
    noise = SetScore(1, 1e-5)  # a copy that knows nothing
    assert Verdict(noise, noise, noise, noise, noise).sentence.startswith("undecided")


def test_a_receipt_is_signed_by_both_and_by_nobody_else(mpu: Callable, folder: Path, demo: DemoModel) -> None:
    """Without records; a number that was changed, another publication's keys and a wrong verdict are refused."""
    path = folder / "receipt.json"
    check(mpu, folder / "same/copy_1", folder, demo, "--receipt", path)
    text = path.read_text()
    rows = [json.loads(line) for file in (demo.forget, demo.retain) for line in file.read_text().splitlines()]
    assert not any(row["answer"] in text or row["question"] in text for row in rows)
    assert "not signed by the server" in mpu("receipt", path).err
    refused = mpu("receipt", path, "--keys", folder / "other.bin", check=False)
    assert refused.is_one_error
    assert "another publication" in refused.err
    assert path.read_text() == text
    sign = ("receipt", path, "--keys", folder / "same.bin", "--copy")
    unsigned = path.read_text()
    wrong = mpu(*sign, folder / "same/copy_1", "--client-key", "0" * 64, check=False)
    assert "not signed by the client" in wrong.err
    assert path.read_text() == unsigned
    assert "other weights" in mpu(*sign, folder / "same/copy_2", check=False).err
    mpu(*sign, folder / "same/copy_1")
    outcome = mpu("receipt", path, "--json")
    assert "signed as the server" in outcome.err
    public = {party: outcome.json[party]["public_key"] for party in ("client", "server")}
    mpu("receipt", path, "--client-key", public["client"], "--server-key", public["server"])
    assert "not signed by the server" in mpu("receipt", path, "--server-key", public["client"], check=False).err
    forged = with_signature(with_signature(read_receipt(path), "client", bytes(32)), "server", bytes(32))
    (folder / "forged.json").write_text(as_text(forged))
    assert "somebody else" in mpu("receipt", folder / "forged.json", *sign[2:4], check=False).err
    signed_receipt = json.loads(path.read_text())
    for change in (
        lambda entries: entries["forget"].update(probability=0.1),
        lambda entries: entries["copy"].update(round=7),
        lambda entries: entries["copy"].update(run="half a character \ud800"),
        lambda entries: entries.update(client=None),
        lambda entries: entries["client"].update(signature=entries["server"]["signature"]),
        lambda entries: entries.update(verdict="pass: forgotten, the rest is kept"),
        lambda entries: entries.update(more=1),
    ):
        entries = json.loads(json.dumps(signed_receipt))
        change(entries)
        (folder / "changed.json").write_text(json.dumps(entries))
        assert mpu("receipt", folder / "changed.json", check=False).is_one_error


def test_a_sealed_copy_is_opened_and_removed(mpu: Callable, folder: Path, demo: DemoModel) -> None:
    """check, `eval --delta` and audit-delta read a sealed copy as they read a plain one; nothing of it stays."""
    mpu("publish", demo.model, "--copies", 1, "--kappa", 0, "--permanent-noise", 0.01, "--copy-recipients",
        default_identity_path(), "--out", folder / "sealed", "--keys", folder / "sealed.bin")  # fmt: skip
    before = sorted(folder.rglob("*"))
    document = check(mpu, folder / "sealed/copy_1.age", folder, demo)
    assert document["forgotten"] is False
    assert sorted(folder.rglob("*")) == before
    records = ("--forget", demo.forget, "--retain", demo.retain)
    delta, out = folder / "d.safetensors", folder / "sealed.json"
    mpu("unlearn", folder / "sealed/copy_1.age", *records, "--epochs", 1, "--out", delta, "--trust-copy")
    measured = ("--benchmark", "qa", *records, "--delta", delta, "--metrics", "forget_Q_A_ROUGE", "--out", out)
    mpu("eval", folder / "sealed/copy_1.age", *measured, "--no-texts")
    assert "subspace of the inputs" in mpu("audit-delta", folder / "sealed/copy_1.age", delta, *records).out
    assert sorted({*folder.rglob("*")} - {*before}) == [delta, out]
    rows = [json.loads(line) for line in demo.forget.read_text().splitlines()]
    text = out.read_text()
    assert not any(row["answer"] in text or row["question"] in text for row in rows)
    assert json.loads(text)["metrics"]["forget_Q_A_ROUGE"]["value_by_index"]["0"]["rougeL_recall"] is not None
