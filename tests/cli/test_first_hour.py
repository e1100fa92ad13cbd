"""What a new user meets: training that does not forget, checking a delta, the next round by hand, records as people
have them."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mpu_cli.cli.output import progress_columns
from mpu_cli.files.reader import open_checkpoint
from mpu_cli.files.sealing import default_identity_path
from mpu_cli.records.encode import Encoding
from mpu_cli.records.read import read_records
from tests.helpers.models import DemoModel, random_model, save
from tests.helpers.protocol import distance, tensors
from tests.helpers.publication import keys_of

TRAINING = (
    "--algo",
    "npo",
    "--epochs",
    2,
    "--lr",
    1e-3,
    "--batch-size",
    3,
    "--optim",
    "adamw-blockwise",
    "--template",
    "plain",
)
FORGETS = (
    "--algo",
    "npo",
    "--beta",
    2.0,
    "--lr",
    3e-4,
    "--epochs",
    10,
    "--batch-size",
    5,
    "--optim",
    "adamw-blockwise",
)


class TestForgetting:
    @pytest.mark.slow
    def test_too_little_training_is_told(self, mpu: Callable, demo: DemoModel, tmp_path: Path) -> None:
        """The losses are of all records, before and after, and the warning names what to raise."""
        records = ("--forget", demo.forget, "--retain", demo.retain)
        little = mpu(
            "unlearn",
            demo.model,
            *records,
            "--lr",
            1e-5,
            "--epochs",
            1,
            "--json",
            "--out",
            "a.safetensors",
            cwd=tmp_path,
        )
        assert "hardly forgotten" in little.err
        assert "--lr" in little.err
        enough = mpu("unlearn", demo.model, *records, *FORGETS, "--json", "--out", "b.safetensors", cwd=tmp_path)
        assert "hardly forgotten" not in enough.err
        before, after = enough.json["before"], enough.json["after"]
        assert before == pytest.approx(little.json["before"], rel=1e-5)  # in batches of another size
        assert after["forget"] > before["forget"] + 0.5
        assert after["retain"] < before["retain"] + 0.5
        ruined = mpu("unlearn", demo.model, *records, "--algo", "gradascent", "--lr", 1e-2, "--epochs", 5, "--json",
                     "--alpha", 1, "--out", "c.safetensors", cwd=tmp_path)  # fmt: skip
        assert "lost much of what it should keep" in ruined.err

    def test_losses_before_are_those_of_the_first_step(self, mpu: Callable, root: Path) -> None:
        """With one batch that holds all records; after, those that a second training begins with."""
        options = ("--epochs", 1, "--batch-size", 9, "--lr", 0, "--template", "plain", "--precision", "float64")
        document = mpu("unlearn", "base", *options, "--json", "--out", "d.safetensors", cwd=root).json
        assert document["before"]["forget"] == pytest.approx(document["steps"][0]["forget"], rel=1e-9)
        assert document["after"] == document["before"]


class TestEvaluatingADelta:
    @pytest.mark.slow
    @pytest.mark.parametrize("lora", [(), ("--lora-rank", 4)], ids=["full", "lora"])
    def test_numbers_are_those_of_the_copy_with_its_delta(
        self, mpu: Callable, demo: DemoModel, tmp_path: Path, lora: tuple
    ) -> None:
        """Against the model that clean unlearning gives: one copy without noise or symmetries, aggregated."""
        records = ("--forget", demo.forget, "--retain", demo.retain)
        publish = ("--kappa", 0, "--symmetries", "none", "--copies", 2)
        mpu("publish", demo.model, *publish, cwd=tmp_path)
        shown = mpu("unlearn", "copy_1", *records, *FORGETS, *lora, "--show", 2, "--json", cwd=tmp_path)
        mpu("unlearn", "copy_2", *records, *FORGETS, *lora, cwd=tmp_path)
        mpu("aggregate", "deltas", cwd=tmp_path)
        common = ("--benchmark", "qa", *records, "--json")
        checked = mpu("eval", "copy_1", "--delta", "deltas/copy_1.safetensors", "--show", 2, *common, cwd=tmp_path)
        direct = mpu("eval", "unlearned", *common, "--out", "direct.json", cwd=tmp_path)
        for name, value in direct.json["metrics"].items():
            assert checked.json["metrics"][name] == pytest.approx(value, rel=1e-3, abs=1e-3), name
        questions = [json.loads(line) for line in demo.forget.read_text().splitlines()][:2]
        for question in questions:
            truth = question["answer"]
            assert f"{question['question']}\n  truth:   {truth}\n" in checked.err
            assert f"before:  {truth}\n" in checked.err  # the copy knows it by heart
        assert checked.err.count("after:") == 2
        answers = [line for line in checked.err.splitlines() if line.startswith("  after:")]
        assert [f"  after:   {each['answer']}" for each in shown.json["answers"]] == answers
        assert all(line in shown.err.splitlines() for line in answers)

    def test_another_copys_delta_is_refused(self, mpu: Callable, root: Path) -> None:
        mpu("publish", "base", "--copies", 2, cwd=root)
        mpu("unlearn", "copy_1", *TRAINING, cwd=root)
        mpu(
            "eval", "copy_2", "--benchmark", "qa", "--delta", "deltas/copy_1.safetensors",
            refused="not a delta of copy_2", cwd=root,
        )  # fmt: skip


@pytest.mark.slow
def test_the_second_round_by_hand_is_that_of_run(mpu: Callable, root: Path) -> None:
    """No option says which round it is, and no name collides; the weights are those of `mpu run`."""
    mpu("run", "base", *TRAINING, "--copies", 2, "--secret-seed", 3, "--rounds", 2, "--loss-reference", "round",
        cwd=root)  # fmt: skip
    mpu("publish", "base", "--copies", 2, "--seed", 3, cwd=root)
    mpu("unlearn", "copy_1", "copy_2", *TRAINING, cwd=root)
    mpu("aggregate", "deltas", cwd=root)
    copies = mpu("publish", "unlearned", "--copies", 2, "--seed", 3, cwd=root).out.split()
    assert copies == ["round_2/copy_1", "round_2/copy_2"]
    for copy in copies:
        mpu("unlearn", copy, *TRAINING, cwd=root)
    last = mpu("aggregate", "deltas/round_2", "--keys", "keys_2.bin", cwd=root).out.strip()
    assert last == "unlearned_2"
    for ours, theirs in (("copy_1", None), (last, "run/server/round_2/model")):
        facts = json.loads((root / ours / "mpu.json").read_text())
        assert facts["run"] == json.loads((root / "unlearned/mpu.json").read_text())["run"]
        if theirs:
            assert facts["round"] == 2
            assert distance(tensors(root / ours), tensors(root / theirs)) < 1e-7


class TestRecords:
    PAIRS = (("What; is, it?", 'A "thing".'), ("Who?", "Nobody\nat all."))

    def read_text_as_records(self, folder: Path, name: str, text: str) -> list[tuple[str, str]]:
        (folder / name).write_text(text, encoding="utf-8")
        return [(record.question, record.answer) for record in read_records(folder / name)]

    def test_files_as_people_have_them(self, tmp_path: Path) -> None:
        rows = [{"question": q, "answer": a} for q, a in self.PAIRS]
        sharegpt = [
            {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]} for q, a in self.PAIRS
        ]
        quoted = [[f'"{part.replace(chr(34), chr(34) * 2)}"' for part in pair] for pair in self.PAIRS]
        for name, text in {
            "a.json": json.dumps({"version": 1, "data": rows}, indent=2),
            "b.json": json.dumps(rows),
            "c.jsonl": "".join(json.dumps(row) + "\n" for row in sharegpt),
            "d.csv": "question;answer\n" + "\n".join(map(";".join, quoted)) + "\n",
            "e.csv": "question,answer\r\n" + "\r\n".join(map(",".join, quoted)) + "\r\n",
            "f.tsv": "question\tanswer\n" + "\n".join(map("\t".join, quoted)) + "\n",
        }.items():
            assert self.read_text_as_records(tmp_path, name, text) == list(self.PAIRS), name
        (tmp_path / "g.txt").write_text("One text.\n\nOf two paragraphs.\n")
        [record] = read_records(tmp_path / "g.txt")
        assert (record.turns, record.answer) == ((), "One text.\n\nOf two paragraphs.\n")

    def test_columns_by_other_names(self, mpu: Callable, root: Path) -> None:
        """The same delta as with our names; a column that is not there is named."""
        for name in ("forget", "retain"):
            rows = [json.loads(line) for line in (root / f"{name}.jsonl").read_text().splitlines()]
            mine = "".join(json.dumps({"instruction": r["question"], "response": r["answer"]}) + "\n" for r in rows)
            (root / f"{name}_mine.jsonl").write_text(mine)
        mpu("unlearn", "base", *TRAINING, "--out", "ours.safetensors", cwd=root)
        mine = ("--forget", "forget_mine.jsonl", "--retain", "retain_mine.jsonl", "--out", "mine.safetensors")
        mpu("unlearn", "base", *TRAINING, *mine, "--columns", "question=instruction,answer=response", cwd=root)
        expected, actual = (load_file(root / f"{name}.safetensors") for name in ("ours", "mine"))
        assert all(torch.equal(expected[name], actual[name]) for name in expected)
        for columns, says in (("question=prompt", "no field 'prompt'"), ("question", "expected NAME=COLUMN")):
            mpu("unlearn", "base", *TRAINING, *mine, "--columns", columns, refused=says, cwd=root)

    def test_a_table_with_a_cell_too_many(self, mpu: Callable, root: Path) -> None:
        (root / "bad.csv").write_text("question,answer\nWho?,Me,you\n")
        mpu("unlearn", "base", "--forget", "bad.csv", refused="bad.csv, record 1", cwd=root)

    def test_truncation_is_counted(self, mpu: Callable, root: Path) -> None:
        (root / "long.jsonl").write_text(
            (root / "forget.jsonl").read_text()
            + json.dumps({"question": "w5", "answer": " ".join(["w6"] * 200)}) + "\n"
        )  # fmt: skip
        outcome = mpu("unlearn", "base", *TRAINING, "--forget", "long.jsonl", "--max-length", 100, cwd=root)
        assert "1 of 16 records were truncated to 100 tokens" in outcome.err
        refused = mpu("unlearn", "base", *TRAINING, "--max-length", 2, "--out", "x.safetensors", check=False, cwd=root)
        assert refused.is_one_error
        assert "--max-length 2" in refused.err

    def test_what_was_cut_is_scored_as_cut(self, mpu: Callable, root: Path) -> None:
        """Beside the same records, cut by hand to the same tokens."""
        base, text = root / "base", " ".join(["w6", "w7"] * 100)
        (root / "long.jsonl").write_text(json.dumps({"question": "w5", "answer": text}) + "\n")
        [example] = Encoding(AutoTokenizer.from_pretrained(base), "plain").encode(read_records(root / "long.jsonl"))
        begin = next(i for i, label in enumerate(example.labels) if label >= 0)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        with torch.no_grad():
            logits = model(torch.tensor([example.ids[:50]])).logits[0, begin - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(example.ids[begin:50]))
        options = ("--forget", "long.jsonl", "--template", "plain", "--max-length", 50, "--json")
        checked = mpu("check", "base", *options, check=False, cwd=root)
        qa = ("--benchmark", "qa", "--metrics", "forget_Q_A_Prob")
        measured = mpu("eval", "base", *qa, *options, cwd=root).json["metrics"]["forget_Q_A_Prob"]
        assert measured == pytest.approx(float((-loss).exp()), rel=1e-4)
        for outcome in (checked, mpu("eval", "base", *qa, *options, "--force", cwd=root)):
            assert "1 of 1 records were truncated to 50 tokens" in outcome.err

    @pytest.mark.slow
    def test_records_in_both_sets_are_told(self, mpu: Callable, root: Path) -> None:
        """By every command that reads both, also where case and spaces differ."""
        first, second, *_ = (root / "forget.jsonl").read_text().splitlines()
        lines = [first.replace('"question": "w', '"question": "W'), second.replace(" w", "  w")]
        (root / "both.jsonl").write_text("\n".join(lines) + "\n" + (root / "retain.jsonl").read_text())
        both = ("--forget", "forget.jsonl", "--retain", "both.jsonl")
        commands = (
            ("unlearn", "base", *TRAINING, *both, "--dry-run"),
            ("unlearn", "base", *TRAINING, *both),
            ("check", "base", *both),
            ("eval", "base", *both, "--metrics", "forget_Q_A_Prob"),
        )
        for command in commands:
            outcome = mpu(*command, check=False, cwd=root)
            assert outcome.err.count("2 of the records to forget are also in the retain set") == 1

    @pytest.mark.slow
    def test_eval_reads_what_unlearn_reads(self, mpu: Callable, root: Path) -> None:
        rows = [json.loads(line) for line in (root / "forget.jsonl").read_text().splitlines()]
        chats = [
            [{"role": "user", "content": r["question"]}, {"role": "assistant", "content": r["answer"]}] for r in rows
        ]
        (root / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
        values = [
            mpu("eval", "base", "--benchmark", "qa", "--forget", name, "--out", f"{name}.json", "--json", cwd=root).json
            for name in ("forget.jsonl", "chats.jsonl")
        ]
        assert values[0]["metrics"] == values[1]["metrics"]


def test_out_may_be_a_directory(mpu: Callable, root: Path) -> None:
    assert mpu("unlearn", "base", *TRAINING, "--out", "new/", cwd=root).out == "new/base.safetensors\n"
    (root / "there").mkdir()
    assert mpu("unlearn", "base", *TRAINING, "--out", "there", cwd=root).out == "there/base.safetensors\n"


def test_a_delta_gets_its_suffix(mpu: Callable, root: Path) -> None:
    assert mpu("unlearn", "base", *TRAINING, "--out", "mine", cwd=root).out == "mine.safetensors\n"
    mpu("unlearn", "base", *TRAINING, "--out", "mine.bin", refused="use mine.safetensors", cwd=root)
    assert not (root / "mine.bin").exists()


@pytest.mark.slow
class TestMistakes:
    """What somebody gets wrong who sees the program for the first time."""

    def test_a_copy_is_not_published(self, mpu: Callable, root: Path) -> None:
        mpu("publish", "base", "--copies", 2, cwd=root)
        mpu("publish", "copy_1", refused="a copy, not a model", cwd=root)

    def test_a_check_against_the_copy_itself_or_a_later_one(self, mpu: Callable, root: Path) -> None:
        for number in (1, 2):
            options = ("--copies", 2, "--run", "one", "--round", number)
            mpu("publish", "base", *options, "--out", f"round_{number}", "--keys", f"{number}.bin", cwd=root)
        for before, complaint in (("round_1/copy_1", "the copy itself"), ("round_2/copy_1", "swapped")):
            mpu("check", "round_1/copy_1", "--forget", "forget.jsonl", "--before", before, refused=complaint, cwd=root)

    def test_an_evaluation_of_nothing(self, mpu: Callable, root: Path) -> None:
        mpu("eval", "base", refused="--forget", status=2, cwd=root)

    def test_an_audit_with_another_base_is_warned_of(self, mpu: Callable, root: Path) -> None:
        save(random_model("llama", seed=3), root / "other")
        mpu("publish", "base", "--copies", 2, "--kappa", 0.01, cwd=root)
        assert "--keys checks it" in mpu("audit", "copy_1", "copy_2", "--base", "other", cwd=root).err
        assert "--keys checks it" not in mpu("audit", "copy_1", "copy_2", "--base", "base", cwd=root).err


class TestCheckedBeforeTheWork:
    def test_a_metric_that_the_sweep_will_not_have(self, mpu: Callable, root: Path) -> None:
        (root / "grid.toml").write_text('base = "base"\nalgo = "graddiff"\n[eval]\nbenchmark = "qa"\n')
        mpu("sweep", "grid.toml", "--metrics", "model_utility", refused="model_utility", cwd=root)
        assert not (root / "grid").exists()

    @pytest.mark.parametrize("command", [("eval", "base"), ("unlearn", "base", "--forget", "tofu:forget01")])
    def test_a_data_dir_that_is_not_there(self, mpu: Callable, root: Path, command: tuple) -> None:
        mpu(*command, "--data-dir", "nowhere", refused="nowhere: no such directory", cwd=root)

    def test_another_base_is_not_blamed_on_the_client(self, mpu: Callable, root: Path) -> None:
        save(random_model("qwen2"), root / "other")
        mpu("publish", "base", "--copies", 2, cwd=root)
        mpu("unlearn", "copy_1", "copy_2", *TRAINING, cwd=root)
        mpu("aggregate", "deltas", "--base", "other", refused="other: is not the model that was published", cwd=root)

    def test_one_shard(self, mpu: Callable, root: Path) -> None:
        (root / "base/model.safetensors").rename(root / "base/model-00001-of-00002.safetensors")
        refused = mpu("publish", "base/model-00001-of-00002.safetensors", check=False, cwd=root)
        assert refused.is_one_error
        assert "one of 2 shards" in refused.err
        assert "pass the folder base" in refused.err

    def test_a_base_without_a_tokenizer(self, mpu: Callable, root: Path) -> None:
        for path in (root / "base").glob("*token*"):
            path.unlink()
        for path in (root / "base").glob("chat_template*"):
            path.unlink()
        assert "no tokenizer files" in mpu("publish", "base", "--copies", 2, cwd=root).err

    def test_secrets_and_the_register_are_described(self, mpu: Callable, tmp_path: Path) -> None:
        base = save(random_model("llama"), tmp_path / "base")
        mpu("publish", base, "--copies", 1, "--permanent-noise", 1, "--out", tmp_path, "--keys", tmp_path / "k.bin")
        configuration = default_identity_path().parent
        assert "server's secret" in mpu("inspect", configuration / "server.key").out
        assert "register of your publications" in mpu("inspect", configuration / "published.jsonl").out

    @pytest.mark.slow
    def test_everything_that_mpu_makes_can_be_inspected(self, mpu: Callable, root: Path) -> None:
        """Every file and folder that a run and an evaluation leave says what it is, and no two kinds look alike."""
        run = ("run", "base", *TRAINING, "--copies", 2, "--rounds", 1, "--keep")
        planned = mpu(*run, "--dry-run", "--json", cwd=root).json
        assert not (root / "run").exists()
        mpu(*run, cwd=root)
        log = [json.loads(line) for line in (root / "run/log.jsonl").read_text().splitlines()]
        assert planned["sent"] == sum(line["bytes"] for line in log if line["step"] == "publish")
        mpu("eval", "base", "--benchmark", "qa", "--metrics", "forget_Q_A_Prob", cwd=root)
        mpu("unlearn", "base", *TRAINING, cwd=root)
        (root / "grid").mkdir()
        (root / "grid/results.jsonl").write_text('{"name": "1"}\n')
        (root / "grid/sweep.json").write_text('{"experiments": ["1", "2"]}')
        assert mpu("inspect", ".", "--json", cwd=root).json["kind"] == "folder"  # with a run in it, and no sweep itself
        kinds = {
            path: mpu("inspect", path, "--json", cwd=root).json["kind"]
            for path in (
                "run", "run/run.json", "run/log.jsonl", "run/server/identity.txt", "run/server/round_1/deltas",
                "run/server/round_1/model", "run/client/round_1/copy_1", "eval.json", "deltas/base.safetensors", "base",
                "grid",
            )
        }  # fmt: skip
        assert len(set(kinds.values())) == len(kinds)


class TestDryRun:
    """All checks are made and nothing is written; the bytes are those of the files that a real run writes."""

    @pytest.mark.slow
    def test_the_whole_path(self, mpu: Callable, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(root)
        for lora in ((), ("--lora-rank", 2)):
            steps = [
                ("publish", "base", "--copies", 2, "--dtype", "bfloat16", "--force"),
                ("unlearn", "copy_1", *TRAINING, *lora, "--force"),
                ("unlearn", "copy_2", *TRAINING, *lora, "--force"),
                ("aggregate", "deltas", "--dtype", "float32", "--force"),
                *([] if lora else [("invert", "deltas", "--force")]),
            ]
            for step in steps:
                before = sorted(root.rglob("*"))
                planned = mpu(*step, "--dry-run", "--json").json
                assert sorted(root.rglob("*")) == before
                mpu(*step)
                for written in planned["writes"]:
                    assert Path(written["path"]).exists()
                    if written["bytes"] is not None:
                        assert written["bytes"] == open_checkpoint(Path(written["path"])).nbytes

    def test_its_checks(self, mpu: Callable, root: Path) -> None:
        mpu("publish", "base", "--copies", 2, cwd=root)
        for arguments, named in (
            (("publish", "base"), "copy_1: already exists"),
            (("unlearn", "copy_1", "--beta1", 2), "beta1"),
            (("aggregate", "deltas"), "deltas"),
        ):
            mpu(*arguments, "--dry-run", refused=named, cwd=root)

    @pytest.mark.slow
    def test_a_file_of_records_is_no_copy_and_an_index_of_shards_is(self, mpu: Callable, root: Path) -> None:
        mpu("unlearn", "base", "retain.jsonl", *TRAINING, refused="repeat --forget or --retain", cwd=root)
        model = AutoModelForCausalLM.from_pretrained(root / "base")
        model.save_pretrained(root / "base", max_shard_size="20KB")
        (root / "base/model.safetensors").unlink(missing_ok=True)
        index = "base/model.safetensors.index.json"
        assert mpu("unlearn", index, *TRAINING, "--dry-run", cwd=root).out.startswith("reads")

    def test_lines_for_people(self, mpu: Callable, root: Path) -> None:
        planned = mpu("publish", "base", "--copies", 2, "--dry-run", cwd=root)
        labels = [line.split("\t")[0] for line in planned.out.splitlines()]
        assert labels == ["reads", *["writes"] * 3, "memory", "disk", "note"]
        assert "no --pretrained: the noise is scaled to the weights themselves" in planned.err
        assert "this noise cancels for whoever has all copies" in planned.err
        bare = mpu("publish", "base", "--copies", 2, "--kappa", 0, "--dry-run", cwd=root).err
        assert "no noise: whoever aligns a copy with the public model has the weights" in bare


class TestTheModelCard:
    @pytest.mark.slow
    def test_provenance_without_secrets(self, mpu: Callable, root: Path) -> None:
        mpu("publish", "base", "--copies", 2, "--seed", 7, cwd=root)
        mpu("unlearn", "copy_1", "copy_2", *TRAINING, cwd=root)
        document = mpu("aggregate", "deltas", "--json", cwd=root).json
        card = (root / "unlearned" / "README.md").read_text()
        head = yaml.safe_load(card.split("---")[1])
        assert head["library_name"] == "transformers"
        assert "unlearning" in head["tags"]
        assert f"| run, round | {document['run']}, 1 |" in card
        assert str(root) not in card

    @pytest.mark.slow
    def test_a_push_that_cannot_work_is_refused_before_the_work(self, mpu: Callable, root: Path) -> None:
        mpu("publish", "base", "--copies", 2, cwd=root)
        mpu("unlearn", "copy_1", "copy_2", *TRAINING, cwd=root)
        for name, named in (("noowner", "expected OWNER/NAME"), ("some/model", "--push some/model")):
            mpu("aggregate", "deltas", "--push", name, refused=named, cwd=root)
            assert not (root / "unlearned").exists()


class TestTune:
    @pytest.mark.slow
    def test_finds_what_forgets_in_bounds(self, mpu: Callable, demo: DemoModel, tmp_path: Path) -> None:
        """Its options, passed to unlearn as printed, give the losses that it promised; nothing is left behind."""
        common = ("--forget", demo.forget, "--retain", demo.retain, "--algo", "npo", "--beta", 2.0,
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
        assert document["options"].startswith("--algo npo --beta 2 --optim adamw-blockwise --batch-size 5 --lr ")
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
            mpu("tune", "base", *TRAINING[6:], *arguments, refused=named, cwd=root)

    def test_nothing_found_is_said(self, mpu: Callable, root: Path) -> None:
        outcome = mpu("tune", "base", "--algo", "npo", "--template", "plain", "--trials", 1, "--least-lr", 1e-9,
                   "--most-lr", 1e-9, "--max-rise", 10, check=False, cwd=root)  # fmt: skip
        assert "nothing found that forgets: the loss rose by at most" in outcome.err
        assert (outcome.status, outcome.out) == (1, "")

    def test_no_trial_in_bounds(self, mpu: Callable, root: Path) -> None:
        mpu(
            "tune", "base", "--algo", "npo", "--template", "plain", "--trials", 1, "--least-lr", 0.5, "--most-lr",
            0.5, "--most-epochs", 2, "--max-rise", 1e-6, fails="no trial stayed in bounds", status=1, cwd=root,
        )  # fmt: skip


def test_a_folder_says_what_is_next(mpu: Callable, root: Path) -> None:
    """`mpu status` names copies, deltas and keys of each round, whose turn it is, and the command that comes next;
    `mpu inspect .` says the same."""
    mpu("publish", "base", "--copies", 2, "--kappa", 0.01, cwd=root)
    training = ("--algo", "gradascent", "--epochs", 1, "--forget", "forget.jsonl")
    steps = {
        "mpu unlearn copy_1 copy_2 --out deltas/": ("copy_1",),
        "mpu unlearn copy_2 --out deltas/": ("copy_2",),
    }
    for expected, copies in steps.items():
        said = mpu("status", cwd=root).out
        assert said.splitlines()[-1] == f"next\tclient: {expected}"
        assert "keys.bin" in said
        mpu("unlearn", *copies, *training, cwd=root)
    assert mpu("status", cwd=root).out.endswith("next\tserver: mpu aggregate deltas --keys keys.bin\n")
    assert [each["turn"] for each in mpu("status", "--json", cwd=root).json["next"]] == ["server"]
    assert "server: mpu aggregate deltas --keys keys.bin" in mpu("inspect", ".", cwd=root).out
    (root / "keys.bin").rename(root.parent / "elsewhere.bin")
    assert mpu("status", cwd=root).out.endswith("next\tclient: return the deltas to the model's owner\n")
    (root / "copy_9").mkdir()
    (root / "copy_9/config.json").write_text("{")
    assert "copy_9 (" in mpu("inspect", ".", "--json", cwd=root).json["not readable"][0]


def test_a_folder_for_each_client_is_looked_into(mpu: Callable, root: Path) -> None:
    """`publish --out hospital --keys hospital.bin` leaves copies where `status` finds them; models that lie deeper, as
    the demo's do, are not the request's."""
    mpu("publish", "base", "--copies", 2, "--out", "hospital", "--keys", "hospital.bin", cwd=root)
    save(random_model("llama"), root / "demo/models/target")
    account = mpu("status", "--json", cwd=root).json
    assert (account["other"], account["keys"]) == ({"models": ["base"]}, ["hospital.bin"])
    assert account["rounds"][0]["made"] == {"1": "hospital/copy_1", "2": "hospital/copy_2"}
    assert account["next"][0]["step"] == "mpu unlearn hospital/copy_1 hospital/copy_2 --out deltas/"


def test_what_is_next_can_be_pasted(mpu: Callable, root: Path) -> None:
    """From another folder, with spaces in the path: the commands that `status` prints lead to the new model."""
    folder = root / "my round"
    mpu("publish", "base", "--copies", 2, "--kappa", 0.01, "--out", folder, "--keys", folder / "keys.bin", cwd=root)
    missing = {"unlearn": ("--algo", "gradascent", "--epochs", 1), "aggregate": ()}
    for command, options in missing.items():
        [step] = re.findall(r"next\t\w+: (mpu .+)", mpu("status", "my round", cwd=root).out)
        assert shlex.split(step)[1] == command
        mpu(*shlex.split(step)[1:], *options, cwd=root)
    assert (root / "unlearned/model.safetensors").exists()


@pytest.mark.parametrize("options", [(), ("--kappa", 0), ("--kappa", 0.1, "--seed", 7, "--copies", 3)])
def test_what_publish_remarks_before_the_work_its_dry_run_remarks(
    mpu: Callable, root: Path, options: tuple[object, ...]
) -> None:
    """The remarks that need no weights are the same lines."""
    (root / "base/README.md").write_text("ours")
    dry, real = (mpu("publish", "base", *options, *more, cwd=root).err.splitlines() for more in (("--dry-run",), ()))
    assert dry
    assert not set(dry) - set(real)
    assert any("--seed is for repeatable" in line for line in dry) == ("--seed" in options)


@pytest.mark.parametrize(
    "noise",
    [
        ("--pretrained", "public"),
        ("--copies", 2, "--kappa", 0.01),
        ("--pretrained", "public", "--copies", 2, "--kappa", 0.25),
        ("--copies", 2, "--epsilon", 8, "--dp-delta", 1e-5, "--sensitivity", 0.1, "--budget-rounds", 2),
    ],
)
def test_what_aggregate_says_is_next_can_be_pasted(mpu: Callable, root: Path, noise: tuple[object, ...]) -> None:
    """The new model is published with noise of the same kind; then the client checks."""
    shutil.copytree(root / "base", root / "public")
    weights = load_file(root / "public/model.safetensors")
    save_file({name: 0.9 * x for name, x in weights.items()}, root / "public/model.safetensors", {"format": "pt"})
    mpu("publish", "base", *noise, cwd=root)
    copies = sorted(path.name for path in root.glob("copy_*"))
    mpu("unlearn", *copies, "--algo", "gradascent", "--epochs", 1, cwd=root)
    [step] = re.findall("next: `mpu (.+?)`", mpu("aggregate", "deltas", "--keys", "keys.bin", cwd=root).err)
    published = mpu(*shlex.split(step), "--json", cwd=root)
    assert len(published.json["copies"]) == len(copies)
    before, after = (keys_of(root, name).publication for name in ("keys.bin", "keys_2.bin"))
    assert (before.scheme, before.kappa, before.shared_kappa) == (after.scheme, after.kappa, after.shared_kappa)
    assert (before.calibration is None) == (after.calibration is None)
    if before.calibration and after.calibration:
        assert before.calibration.epsilon == after.calibration.epsilon
    assert "send round_2/copy_1" in published.err
    assert "who runs `mpu check copy_1 …`" in published.err


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


def test_a_copy_in_the_wrong_place_is_named(mpu: Callable, root: Path) -> None:
    """`mpu watch` says where a copy belongs, and what it waits for where it waits."""
    mpu("publish", "base", "--copies", 2, "--run", "r", "--out", "spool/in", "--keys", "keys.bin", cwd=root)
    printed = mpu("watch", "spool", *TRAINING, "--once", check=False, cwd=root).err
    assert "spool/in/copy_1: a copy is expected at spool/in/r/round_1/copy_1" in printed
