"""What stays the same in every round and on every day: the losses' reference, the date in prompts, the training."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from mpu_cli.errors import UsageError
from mpu_cli.files.manifest import delta_manifest, facts_of
from mpu_cli.files.reader import open_checkpoint
from mpu_cli.measuring.encoding import OpenUnlearningEncoder
from mpu_cli.records.encode import Encoding, pad
from mpu_cli.records.forms import parse_date, question
from mpu_cli.records.read import read_records
from mpu_cli.training.delta import training_tag
from mpu_cli.training.ledger import default_secret_path
from mpu_cli.training.reference import forward
from tests.helpers.attacks import WORD, edit, publish_copies, treat_word_differently, unlearn_copy, write_records_with
from tests.helpers.models import load, random_model, save, write_records
from tests.helpers.protocol import tensors
from tests.helpers.trainings import for_run

TRAINING = (
    "--algo", "npo", "--reading", "template=plain", "--epochs", 2,
    "--lr", 1e-3, "--batch-size", 3, "--optim", "adamw-blockwise",
)  # fmt: skip


def publish(mpu: Callable, root: Path, base: str, number: int, *options: object, run: object = "") -> None:
    mpu("publish", base, "--copies", 2, "--kappa", 0.05, "--dtype", "float32", "--seed", 3, "--run", f"{run}:{number}",
        "--out", f"r{number}", "--keys", f"r{number}/keys.bin", *options, cwd=root)  # fmt: skip


ANYWAY = ("--trust-deltas", "--force")


class TestReferenceFile:
    @pytest.mark.slow
    def test_two_rounds_by_hand_are_those_of_run(self, mpu: Callable, root: Path) -> None:
        """`mpu run` keeps the first round's reference as --reference-file does; --loss-reference round does not."""
        base = "base"
        for number in (1, 2):
            publish(mpu, root, base, number)
            for k in (1, 2):
                reference_options = ("--reference-file", f"ref/{k}.safetensors")
                mpu("unlearn", f"r{number}/copy_{k}", *TRAINING, *reference_options,
                    "--out", f"r{number}/d/{k}.safetensors", cwd=root)  # fmt: skip
            mpu("aggregate", f"r{number}/d", "--keys", f"r{number}/keys.bin", "--out", f"r{number}/model", cwd=root)
            base = f"r{number}/model"
        options = ("--copies", 2, "--kappa", 0.05, "--publish", "dtype=float32", "--secret-seed", 3, "--rounds", 2)
        options += tuple(for_run(TRAINING))
        ends = {}
        for reference in ("original", "round"):
            mpu("run", "base", *options, "--loss-reference", reference, "--out", reference, cwd=root)
            ends[reference] = tensors(root / reference / "server/round_2/model")
            assert not (root / reference / "client/references").exists()
        by_hand = tensors(root / base)
        assert all(torch.equal(ends["original"][name], by_hand[name]) for name in by_hand)
        assert any(not torch.equal(ends["round"][name], by_hand[name]) for name in by_hand)

    @pytest.mark.slow
    def test_the_reference_is_the_first_rounds_copy(self, mpu: Callable, root: Path) -> None:
        """NPO's term at the first step of round 2, from two models' probabilities (Zhang et al., 2024)."""
        common = (*TRAINING, "--batch-size", 6, "--reference-file", "ref.safetensors", "--json")
        publish(mpu, root, "base", 1)
        mpu("unlearn", "r1/copy_1", *common, "--out", "d1.safetensors", cwd=root)
        save(random_model("llama", seed=5), root / "next")
        publish(mpu, root, "next", 2, run=facts(root / "r1/copy_1")["run"])
        document = mpu("unlearn", "r2/copy_1", *common, "--out", "d2.safetensors", cwd=root).json
        means = []
        for copy in ("r1/copy_1", "r2/copy_1"):
            model, tokenizer = load(root / copy, torch.float32, "cpu")
            examples = Encoding(tokenizer, "plain").encode(read_records(root / "forget.jsonl"))
            with torch.no_grad():
                means.append(forward(model, pad(examples)).sequence_log_probs.double())
        ratios = means[1] - means[0]
        term = -(2 / 0.1) * float(torch.nn.functional.logsigmoid(-0.1 * ratios).mean())
        assert document["steps"][0]["forget_term"] == pytest.approx(term, rel=1e-5)
        assert abs(term - 20 * math.log(2)) > 0.1  # its value relative to round 2's own copy

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "algorithm",
        [
            ["npo"],
            ["dpo"],
            ["undial"],
            ["npo", "--constants", "retain_loss=kl"],
            ["graddiff", "--constants", "retain_loss=kl"],
        ],
        ids=lambda words: "-".join(words),
    )
    def test_what_is_read_is_what_was_asked(self, mpu: Callable, root: Path, algorithm: list[str]) -> None:
        """Writing the file changes nothing, nor does reading it instead of running the model."""
        publish(mpu, root, "base", 1)
        options = (*TRAINING, "--algo", *algorithm)
        mpu("unlearn", "r1/copy_1", *options, "--out", "plain.safetensors", cwd=root)
        for out in ("written", "read"):
            mpu(
                "unlearn",
                "r1/copy_1",
                *options,
                "--reference-file",
                "ref.safetensors",
                "--out",
                f"{out}.safetensors",
                cwd=root,
            )
        expected = load_file(root / "plain.safetensors")
        for out in ("written", "read"):
            delta = load_file(root / f"{out}.safetensors")
            assert all(torch.equal(delta[name], tensor) for name, tensor in expected.items())

    @pytest.mark.slow
    def test_another_reference_is_refused(self, mpu: Callable, root: Path) -> None:
        publish(mpu, root, "base", 1)
        publish(mpu, root, "base", 2, run="other")
        common = (*TRAINING, "--reference-file", "ref.safetensors", "--out", "d", "--force")
        mpu("unlearn", "r2/copy_1", *common, cwd=root, fails="copy 1 of round 1", status=1)
        mpu("unlearn", "r1/copy_1", *common, cwd=root)
        before = (root / "ref.safetensors").read_bytes()
        write_records(root / "other.jsonl", 6, 8)
        for wrong, says in (
            (("r1/copy_2", *common), "copy 1 instead of 2"),
            (("r2/copy_1", *common), "run"),
            (("r1/copy_1", *common, "--forget", "other.jsonl"), "in records or the options that print them"),
            (("r1/copy_1", *common, "--reading", "template=chat"), "in records or the options that print them"),
            (("r1/copy_1", *common, "--algo", "undial"), "asks"),
            (("r1/copy_1", *common, "--reference-file", "r1/copy_1/model.safetensors"), "not a reference file"),
        ):
            mpu("unlearn", *wrong, cwd=root, refused=says, status=1)
        for algorithm in ("graddiff", "rmu"):
            mpu("unlearn", "r1/copy_1", *common, "--algo", algorithm, cwd=root, fails="--reference-file", status=2)
        mpu("unlearn", "r1/copy_1", *common, "--reference-file", "r.bin", cwd=root, refused="name it r.safetensors")
        assert (root / "ref.safetensors").read_bytes() == before

    @pytest.mark.parametrize("word", [WORD, "w7"])
    def test_a_reference_file_is_no_oracle_either(self, mpu: Callable, root: Path, word: str) -> None:
        """Probabilities of round 1 are refused for a copy of another template, whatever the records hold."""
        write_records_with(word, root)
        honest, _ = publish_copies(mpu, root)
        options = ("--algo", "npo", "--reference-file", "ref.safetensors", "--trust-copy", "--reading", "template=chat")
        unlearn_copy(mpu, root, honest, "1", *options)
        treat_word_differently(honest)
        facts = json.loads((honest / "mpu.json").read_text())
        assert facts["round"] == 1
        edit(honest / "mpu.json", round=2)
        weights = load_file(honest / "model.safetensors")
        metadata = {"mpu": json.dumps(json.loads((honest / "mpu.json").read_text()))}
        save_file(weights, honest / "model.safetensors", metadata)
        unlearn_copy(mpu, root, honest, "2", *options, fails="tokenizer, template or config", status=1)


def facts(copy: Path) -> dict:
    return json.loads((copy / "mpu.json").read_text())


class TestDate:
    @pytest.fixture
    def dated_root(self, root: Path) -> Path:
        """A base whose template prints the year, using both of the names that templates use for the date."""
        path = root / "base/chat_template.jinja"
        path.write_text("{{ 'w' + strftime_now('%y') + ' w' + date_string[-2:] + ' ' }}" + path.read_text())
        return root

    def test_it_is_the_same_day_in_training_and_evaluation(self, dated_root: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(dated_root / "base")
        record = question("w4 w5", "w6")
        for date, year in (("10 Apr 2025", "w25"), ("2031-12-01", "w31")):
            [trained] = Encoding(tokenizer, date=date).encode([record])
            [scored] = OpenUnlearningEncoder(Encoding(tokenizer, "chat", date=date)).questions([record])
            for ids in (trained.ids, scored.ids):
                assert tokenizer.convert_ids_to_tokens(list(ids[:2])) == [year, year]
        [default] = Encoding(tokenizer).encode([record])
        assert tokenizer.convert_ids_to_tokens(default.ids[:1]) == ["w25"]  # whatever the current day

    @pytest.mark.slow
    def test_the_command_line_has_it_everywhere(self, mpu: Callable, dated_root: Path) -> None:
        """A different day gives a different delta, model and scores."""
        training = (*TRAINING, "--reading", "template=chat,system_prompt=")
        records = ("--benchmark", "qa", "--forget", "forget.jsonl", "--metrics", "forget_Q_A_Prob")
        results = {}
        for name, more in (
            ("default", ()),
            ("same", ("--reading", "date=10 Apr 2025")),
            ("other", ("--reading", "date=2031-12-01")),
        ):
            mpu("unlearn", "base", *training, *more, "--out", f"{name}.safetensors", cwd=dated_root)
            mpu("run", "base", *for_run(training), *for_run(more), "--mode", "clean", "--rounds", 1,
                "--publish", "dtype=float32",
                "--out", name,
                cwd=dated_root)  # fmt: skip
            mpu("finetune", "base", "--data", "forget.jsonl", "--epochs", 1, "--reading", "system_prompt=", *more,
                "--out", f"{name}.f", cwd=dated_root)  # fmt: skip
            outcome = mpu(
                "eval",
                "base",
                *records,
                *more,
                "--reading",
                "system_prompt=",
                "--out",
                f"{name}.json",
                "--json",
                cwd=dated_root,
            )
            weights = (
                f"{name}.safetensors",
                f"{name}/server/round_1/model/model.safetensors",
                f"{name}.f/model.safetensors",
            )
            name_of = "model.layers.0.mlp.up_proj.weight"
            results[name] = [load_file(dated_root / path)[name_of] for path in weights] + [
                outcome.json["metrics"]["forget_Q_A_Prob"]
            ]
        for default, same, other in zip(results["default"], results["same"], results["other"], strict=True):
            assert torch.equal(torch.as_tensor(default), torch.as_tensor(same))
            assert not torch.equal(torch.as_tensor(default), torch.as_tensor(other))
        compared = mpu("compare", "default.json", "other.json", cwd=dated_root)
        assert "date" in compared.err

    def test_what_is_no_date(self, mpu: Callable, root: Path) -> None:
        with pytest.raises(UsageError, match="--reading date='tomorrow'"):
            parse_date("tomorrow")
        for *command, fold in (
            ("unlearn", "base", "--reading"), ("run", "base", "--unlearn"),
            ("finetune", "base", "--data", "forget.jsonl", "--reading"),
        ):  # fmt: skip
            mpu(*command, fold, "date=31 Feb 2026", cwd=root, fails="not a date", status=2)


class TestTags:
    @pytest.fixture
    def deltas(self, mpu: Callable, root: Path) -> Callable[..., str]:
        """Trains the second copy, with other options than the first, and returns aggregate's messages."""
        publish(mpu, root, "base", 1)
        mpu("unlearn", "r1/copy_1", *TRAINING, "--out", "d/1.safetensors", cwd=root)

        def train(*other: object) -> str:
            mpu("unlearn", "r1/copy_2", *TRAINING, *other, "--out", "d/2.safetensors", "--force", cwd=root)
            return mpu(
                "aggregate", "d", "--keys", "r1/keys.bin", "--out", "new", "--trust-deltas", "--force", cwd=root
            ).err

        return train

    @pytest.mark.slow
    def test_copies_trained_differently_are_told(self, deltas: Callable[..., str], root: Path) -> None:
        lines = (root / "forget.jsonl").read_text().splitlines(True)
        (root / "half.jsonl").write_text("".join(lines[:3]))
        assert "trained with different" not in deltas()
        assert "trained with different" not in deltas(
            "--training", "micro_batch_size=2"
        )  # the same except for the last bits
        assert "different records" in deltas("--forget", "half.jsonl")
        for other in (("--seed", 1), ("--lr", 2e-3), ("--algo", "simnpo"), ("--epochs", 1)):
            assert "different options or seed" in deltas(*other)

    @pytest.mark.slow
    def test_tags_of_two_keys_are_not_compared(self, mpu: Callable, deltas: Callable[..., str], root: Path) -> None:
        """As for copies that are trained on two machines."""
        assert "different options" in deltas("--seed", 1)
        default_secret_path().write_text("ab" * 32)
        mpu("unlearn", "r1/copy_2", *TRAINING, "--seed", 1, "--out", "d/2.safetensors", "--force", cwd=root)
        printed = mpu(
            "aggregate", "d", "--keys", "r1/keys.bin", "--out", "new", "--trust-deltas", "--force", cwd=root
        ).err
        assert "trained with different" not in printed

    @pytest.mark.slow
    def test_the_server_cannot_test_a_guess(self, deltas: Callable[..., str], root: Path) -> None:
        """A different key changes everything in the tag; every round and run has its own key."""
        deltas()
        tag = delta_manifest(open_checkpoint(root / "d/1.safetensors").metadata, root).trained
        assert sorted(tag) == ["key", "options", "records", "versions"]
        mine, other = bytes.fromhex(default_secret_path().read_text()), bytes(32)
        run_ = facts(root / "r1/copy_1")["run"]
        tag_values = [
            set(training_tag(secret, name, number, {"tokens": "x"}).values())
            for secret, name, number in ((mine, run_, 1), (mine, run_, 2), (mine, "other", 1), (other, run_, 1))
        ]
        assert not any(a & b for i, a in enumerate(tag_values) for b in tag_values[:i])
        assert training_tag(mine, run_, 1, {})["key"] == tag["key"]
        assert oct(default_secret_path().stat().st_mode & 0o777) == "0o600"

    def test_a_secret_that_cannot_be_made_costs_no_training(self, mpu: Callable, root: Path) -> None:
        """The delta is written without tags, and a message reports it."""
        publish(mpu, root, "base", 1)
        default_secret_path().mkdir(parents=True)
        mpu("unlearn", "r1/copy_1", *TRAINING, "--out", "d.safetensors", cwd=root, fails="client's secret", status=1)
        default_secret_path().rmdir()
        parent = default_secret_path().parent
        parent.rename(parent.with_name("away"))
        parent.write_text("in the way")
        outcome = mpu("unlearn", "r1/copy_1", *TRAINING, "--out", "d.safetensors", cwd=root)
        assert "cannot check that copies were trained identically" in outcome.err
        assert "trained" not in facts_of(open_checkpoint(root / "d.safetensors").metadata)

    def test_a_model_that_is_no_copy_has_none(self, mpu: Callable, root: Path) -> None:
        mpu("unlearn", "base", *TRAINING, "--out", "d.safetensors", cwd=root)
        assert "trained" not in facts_of(open_checkpoint(root / "d.safetensors").metadata)

    @pytest.mark.parametrize("word", [WORD, "w7"])
    def test_a_tag_says_nothing_of_a_copys_encoding(self, mpu: Callable, root: Path, word: str) -> None:
        """Trained all the same, both copies have one tag, with the word in the records and without."""
        write_records_with(word, root)
        honest, crafted = publish_copies(mpu, root)
        treat_word_differently(crafted)
        for number, copy in enumerate((honest, crafted), 1):
            unlearn_copy(mpu, root, copy, str(number), "--reading", "template=chat", "--trust-copy")
        honest_tags, crafted_tags = (tags_of(root / f"{number}.safetensors") for number in (1, 2))
        assert honest_tags == crafted_tags is not None

    @pytest.mark.slow
    def test_there_is_none_under_dp(self, mpu: Callable, root: Path) -> None:
        honest, _ = publish_copies(mpu, root)
        unlearn_copy(mpu, root, honest, "1", "--dp", "epsilon=8")
        assert not tags_of(root / "1.safetensors")


@pytest.mark.parametrize(
    ("symmetries", "optimizer", "warned"),
    [
        ("paper", "adamw", True), ("all", "adamw", True), ("signed", "adamw", False), ("none", "adamw", False),
        ("paper", "adamw-blockwise", False), ("all", "muon", False),
    ],
)  # fmt: skip
def test_an_optimizer_that_does_not_suit_the_copy(
    mpu: Callable, root: Path, symmetries: str, optimizer: str, warned: bool
) -> None:
    publish(mpu, root, "base", 1, "--symmetries", symmetries)
    assert f"symmetries    {symmetries}".split() == mpu("inspect", "r1/copy_1", cwd=root).out.splitlines()[4].split()
    outcome = mpu("unlearn", "r1/copy_1", *TRAINING, "--optim", optimizer, "--out", "d.safetensors", cwd=root)
    assert ("--symmetries signed" in outcome.err) is warned


def tags_of(delta: Path) -> dict[str, str] | None:
    return delta_manifest(open_checkpoint(delta).metadata, delta).trained
