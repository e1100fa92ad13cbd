"""What a new user meets: training that does not forget, checking a delta, the next round by hand, records as people
have them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mpu_cli.checkpoint.reader import open_checkpoint
from mpu_cli.records.reading import read_records
from mpu_cli.sealing import default_identity_path
from tests.models import Trained, random_model, save
from tests.protocol import distance, tensors

TRAINING = ("--epochs", 2, "--lr", 1e-3, "--batch-size", 3, "--optim", "adamw-blockwise", "--template", "plain")
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
    def test_too_little_training_is_told(self, mpu: Callable, trained: Trained, tmp_path: Path) -> None:
        """The losses are of all records, before and after, and the warning names what to raise."""
        records = ("--forget", trained.forget, "--retain", trained.retain)
        little = mpu(
            "unlearn",
            trained.model,
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
        enough = mpu("unlearn", trained.model, *records, *FORGETS, "--json", "--out", "b.safetensors", cwd=tmp_path)
        assert "hardly forgotten" not in enough.err
        before, after = enough.json["before"], enough.json["after"]
        assert before == little.json["before"]
        assert after["forget"] > before["forget"] + 0.5
        assert after["retain"] < before["retain"] + 0.5
        ruined = mpu("unlearn", trained.model, *records, "--algo", "gradascent", "--lr", 1e-2, "--epochs", 5, "--json",
                     "--alpha", 1, "--out", "c.safetensors", cwd=tmp_path)  # fmt: skip
        assert "lost much of what it should keep" in ruined.err

    def test_losses_before_are_those_of_the_first_step(self, mpu: Callable, place: Path) -> None:
        """With one batch that holds all records; after, those that a second training begins with."""
        whole = ("--epochs", 1, "--batch-size", 9, "--lr", 0, "--template", "plain", "--precision", "float64")
        told = mpu("unlearn", "base", *whole, "--json", "--out", "d.safetensors", cwd=place).json
        assert told["before"]["forget"] == pytest.approx(told["steps"][0]["forget"], rel=1e-9)
        assert told["after"] == told["before"]


class TestEvaluatingADelta:
    @pytest.mark.slow
    @pytest.mark.parametrize("lora", [(), ("--lora-rank", 4)], ids=["full", "lora"])
    def test_numbers_are_those_of_the_copy_with_its_delta(
        self, mpu: Callable, trained: Trained, tmp_path: Path, lora: tuple
    ) -> None:
        """Against the model that clean unlearning gives: one copy without noise or symmetries, aggregated."""
        records = ("--forget", trained.forget, "--retain", trained.retain)
        publish = ("--kappa", 0, "--symmetries", "none", "--copies", 2)
        mpu("publish", trained.model, *publish, cwd=tmp_path)
        shown = mpu("unlearn", "copy_1", *records, *FORGETS, *lora, "--show", 2, "--json", cwd=tmp_path)
        mpu("unlearn", "copy_2", *records, *FORGETS, *lora, cwd=tmp_path)
        mpu("aggregate", "deltas", cwd=tmp_path)
        common = ("--benchmark", "qa", *records, "--json")
        checked = mpu("eval", "copy_1", "--delta", "deltas/copy_1.safetensors", "--show", 2, *common, cwd=tmp_path)
        direct = mpu("eval", "unlearned", *common, "--out", "direct.json", cwd=tmp_path)
        for name, value in direct.json["metrics"].items():
            assert checked.json["metrics"][name] == pytest.approx(value, rel=1e-3, abs=1e-3), name
        questions = [json.loads(line) for line in trained.forget.read_text().splitlines()][:2]
        for question in questions:
            truth = question["answer"]
            assert f"{question['question']}\n  truth:   {truth}\n" in checked.err
            assert f"before:  {truth}\n" in checked.err  # the copy knows it by heart
        assert checked.err.count("after:") == 2
        answers = [line for line in checked.err.splitlines() if line.startswith("  after:")]
        assert [f"  after:   {each['answer']}" for each in shown.json["answers"]] == answers
        assert all(line in shown.err.splitlines() for line in answers)

    def test_another_copys_delta_is_refused(self, mpu: Callable, place: Path) -> None:
        mpu("publish", "base", "--copies", 2, cwd=place)
        mpu("unlearn", "copy_1", *TRAINING, cwd=place)
        refused = mpu(
            "eval", "copy_2", "--benchmark", "qa", "--delta", "deltas/copy_1.safetensors", check=False, cwd=place
        )
        assert refused.is_one_error
        assert "not a delta of copy_2" in refused.err


@pytest.mark.slow
def test_the_second_round_by_hand_is_that_of_run(mpu: Callable, place: Path) -> None:
    """No option says which round it is, and no name collides; the weights are those of `mpu run`."""
    mpu("run", "base", *TRAINING, "--copies", 2, "--secret-seed", 3, "--rounds", 2, "--loss-reference", "round",
        cwd=place)  # fmt: skip
    mpu("publish", "base", "--copies", 2, "--seed", 3, cwd=place)
    for k in (1, 2):
        mpu("unlearn", f"copy_{k}", *TRAINING, cwd=place)
    mpu("aggregate", "deltas", cwd=place)
    copies = mpu("publish", "unlearned", "--copies", 2, "--seed", 3, cwd=place).out.split()
    assert copies == ["round_2/copy_1", "round_2/copy_2"]
    for copy in copies:
        mpu("unlearn", copy, *TRAINING, cwd=place)
    last = mpu("aggregate", "deltas/round_2", "--keys", "round_2/keys.bin", cwd=place).out.strip()
    assert last == "unlearned_2"
    for ours, theirs in (("copy_1", None), (last, "run/server/round_2/model")):
        facts = json.loads((place / ours / "mpu.json").read_text())
        assert facts["run"] == json.loads((place / "unlearned/mpu.json").read_text())["run"]
        if theirs:
            assert facts["round"] == 2
            assert distance(tensors(place / ours), tensors(place / theirs)) < 1e-7


class TestRecords:
    PAIRS = (("What; is, it?", 'A "thing".'), ("Who?", "Nobody\nat all."))

    def written(self, folder: Path, name: str, text: str) -> list[tuple[str, str]]:
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
            assert self.written(tmp_path, name, text) == list(self.PAIRS), name
        (tmp_path / "g.txt").write_text("One text.\n\nOf two paragraphs.\n")
        [record] = read_records(tmp_path / "g.txt")
        assert (record.turns, record.answer) == ((), "One text.\n\nOf two paragraphs.\n")

    def test_columns_by_other_names(self, mpu: Callable, place: Path) -> None:
        """The same delta as with our names; a column that is not there is named."""
        for name in ("forget", "retain"):
            rows = [json.loads(line) for line in (place / f"{name}.jsonl").read_text().splitlines()]
            mine = "".join(json.dumps({"instruction": r["question"], "response": r["answer"]}) + "\n" for r in rows)
            (place / f"{name}_mine.jsonl").write_text(mine)
        mpu("unlearn", "base", *TRAINING, "--out", "ours.safetensors", cwd=place)
        mine = ("--forget", "forget_mine.jsonl", "--retain", "retain_mine.jsonl", "--out", "mine.safetensors")
        mpu("unlearn", "base", *TRAINING, *mine, "--columns", "question=instruction,answer=response", cwd=place)
        one, other = (load_file(place / f"{name}.safetensors") for name in ("ours", "mine"))
        assert all(torch.equal(one[name], other[name]) for name in one)
        for columns, says in (("question=prompt", "no field 'prompt'"), ("question", "expected NAME=COLUMN")):
            refused = mpu("unlearn", "base", *TRAINING, *mine, "--columns", columns, check=False, cwd=place)
            assert refused.is_one_error
            assert says in refused.err

    def test_a_table_with_a_cell_too_many(self, mpu: Callable, place: Path) -> None:
        (place / "bad.csv").write_text("question,answer\nWho?,Me,you\n")
        refused = mpu("unlearn", "base", "--forget", "bad.csv", check=False, cwd=place)
        assert refused.is_one_error
        assert "bad.csv, record 1" in refused.err

    def test_truncation_is_counted(self, mpu: Callable, place: Path) -> None:
        (place / "long.jsonl").write_text(
            (place / "forget.jsonl").read_text()
            + json.dumps({"question": "w5", "answer": " ".join(["w6"] * 200)}) + "\n"
        )  # fmt: skip
        told = mpu("unlearn", "base", *TRAINING, "--forget", "long.jsonl", "--max-length", 100, cwd=place)
        assert "1 of 16 records were truncated to 100 tokens" in told.err
        refused = mpu("unlearn", "base", *TRAINING, "--max-length", 2, "--out", "x.safetensors", check=False, cwd=place)
        assert refused.is_one_error
        assert "--max-length 2" in refused.err

    def test_records_in_both_sets_are_told(self, mpu: Callable, place: Path) -> None:
        both = (place / "forget.jsonl").read_text().splitlines()[:2] + (place / "retain.jsonl").read_text().splitlines()
        (place / "both.jsonl").write_text("\n".join(both) + "\n")
        told = mpu("unlearn", "base", *TRAINING, "--retain", "both.jsonl", cwd=place)
        assert "2 of the records to forget are also in the retain set" in told.err

    def test_eval_reads_what_unlearn_reads(self, mpu: Callable, place: Path) -> None:
        rows = [json.loads(line) for line in (place / "forget.jsonl").read_text().splitlines()]
        chats = [
            [{"role": "user", "content": r["question"]}, {"role": "assistant", "content": r["answer"]}] for r in rows
        ]
        (place / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
        values = [
            mpu(
                "eval", "base", "--benchmark", "qa", "--forget", name, "--out", f"{name}.json", "--json", cwd=place
            ).json
            for name in ("forget.jsonl", "chats.jsonl")
        ]
        assert values[0]["metrics"] == values[1]["metrics"]


def test_out_may_be_a_directory(mpu: Callable, place: Path) -> None:
    assert mpu("unlearn", "base", *TRAINING, "--out", "new/", cwd=place).out == "new/base.safetensors\n"
    (place / "there").mkdir()
    assert mpu("unlearn", "base", *TRAINING, "--out", "there", cwd=place).out == "there/base.safetensors\n"


def test_a_delta_gets_its_suffix(mpu: Callable, place: Path) -> None:
    assert mpu("unlearn", "base", *TRAINING, "--out", "mine", cwd=place).out == "mine.safetensors\n"
    refused = mpu("unlearn", "base", *TRAINING, "--out", "mine.bin", check=False, cwd=place)
    assert refused.is_one_error
    assert "use mine.safetensors" in refused.err
    assert not (place / "mine.bin").exists()


def test_a_finished_run_answers_without_loading_anything(
    mpu: Callable, place: Path, shell: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, in which torch cannot be imported; not once a record has changed."""
    run = ["run", "base", "--rounds", "1", "--copies", "2", *map(str, TRAINING)]
    first = mpu(*run, cwd=place).out
    (place / "no").mkdir()
    (place / "no" / "torch.py").write_text("raise ImportError('no torch here')\n")
    monkeypatch.setenv("PYTHONPATH", str(place / "no"))
    again = shell(f"mpu {' '.join(run)}")
    assert again.stdout == first, again.stderr
    assert "already finished" in again.stderr
    with (place / "forget.jsonl").open("a") as records:
        records.write(json.dumps({"question": "w5 w6", "answer": "w7"}) + "\n")
    assert shell(f"mpu {' '.join(run)}").returncode == 1  # it has to look, and cannot
    monkeypatch.undo()
    assert "different experiment" in mpu(*run, check=False, cwd=place).err


class TestCheckedBeforeTheWork:
    def test_a_metric_that_the_sweep_will_not_have(self, mpu: Callable, place: Path) -> None:
        (place / "grid.toml").write_text('base = "base"\nalgo = "graddiff"\n[eval]\nbenchmark = "qa"\n')
        refused = mpu("sweep", "grid.toml", "--metrics", "model_utility", check=False, cwd=place)
        assert refused.is_one_error
        assert "model_utility" in refused.err
        assert not (place / "grid").exists()

    @pytest.mark.parametrize("command", [("eval", "base"), ("unlearn", "base", "--forget", "tofu:forget01")])
    def test_a_data_dir_that_is_not_there(self, mpu: Callable, place: Path, command: tuple) -> None:
        refused = mpu(*command, "--data-dir", "nowhere", check=False, cwd=place)
        assert refused.is_one_error
        assert "nowhere: no such directory" in refused.err

    def test_another_base_is_not_blamed_on_the_client(self, mpu: Callable, place: Path) -> None:
        save(random_model("qwen2"), place / "other")
        mpu("publish", "base", "--copies", 2, cwd=place)
        for k in (1, 2):
            mpu("unlearn", f"copy_{k}", *TRAINING, cwd=place)
        refused = mpu("aggregate", "deltas", "--base", "other", check=False, cwd=place)
        assert refused.is_one_error
        assert "other: is not the model that was published" in refused.err

    def test_one_shard(self, mpu: Callable, place: Path) -> None:
        (place / "base/model.safetensors").rename(place / "base/model-00001-of-00002.safetensors")
        refused = mpu("publish", "base/model-00001-of-00002.safetensors", check=False, cwd=place)
        assert refused.is_one_error
        assert "one of 2 shards" in refused.err
        assert "pass the folder base" in refused.err

    def test_a_base_without_a_tokenizer(self, mpu: Callable, place: Path) -> None:
        for path in (place / "base").glob("*token*"):
            path.unlink()
        for path in (place / "base").glob("chat_template*"):
            path.unlink()
        assert "no tokenizer files" in mpu("publish", "base", "--copies", 2, cwd=place).err

    def test_secrets_and_the_register_are_described(self, mpu: Callable, tmp_path: Path) -> None:
        base = save(random_model("llama"), tmp_path / "base")
        mpu("publish", base, "--copies", 1, "--permanent-noise", 1, "--out", tmp_path, "--keys", tmp_path / "k.bin")
        configuration = default_identity_path().parent
        assert "server's secret" in mpu("inspect", configuration / "server.key").out
        assert "register of your publications" in mpu("inspect", configuration / "published.jsonl").out

    def test_everything_that_mpu_makes_can_be_inspected(self, mpu: Callable, place: Path) -> None:
        """Every file and folder that a run and an evaluation leave says what it is, and no two kinds look alike."""
        run = ("run", "base", *TRAINING, "--copies", 2, "--rounds", 1, "--keep")
        planned = mpu(*run, "--dry-run", "--json", cwd=place).json
        assert not (place / "run").exists()
        mpu(*run, cwd=place)
        log = [json.loads(line) for line in (place / "run/log.jsonl").read_text().splitlines()]
        assert planned["sent"] == sum(line["bytes"] for line in log if line["step"] == "publish")
        mpu("eval", "base", "--benchmark", "qa", "--metrics", "forget_Q_A_Prob", cwd=place)
        mpu("unlearn", "base", *TRAINING, cwd=place)
        kinds = {
            path: mpu("inspect", path, "--json", cwd=place).json["kind"]
            for path in (
                "run", "run/run.json", "run/log.jsonl", "run/server/identity.txt", "run/server/round_1/deltas",
                "run/server/round_1/model", "run/client/round_1/copy_1", "eval.json", "deltas/base.safetensors", "base",
            )
        }  # fmt: skip
        assert len(set(kinds.values())) == len(kinds)


class TestDryRun:
    """All checks are made and nothing is written; the bytes are those of the files that a real run writes."""

    def test_the_whole_path(self, mpu: Callable, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(place)
        for lora in ((), ("--lora-rank", 2)):
            steps = [
                ("publish", "base", "--copies", 2, "--dtype", "bfloat16", "--force"),
                ("unlearn", "copy_1", *TRAINING, *lora, "--force"),
                ("unlearn", "copy_2", *TRAINING, *lora, "--force"),
                ("aggregate", "deltas", "--dtype", "float32", "--force"),
                *([] if lora else [("invert", "deltas", "--force")]),
            ]
            for step in steps:
                before = sorted(place.rglob("*"))
                planned = mpu(*step, "--dry-run", "--json").json
                assert sorted(place.rglob("*")) == before
                mpu(*step)
                for written in planned["writes"]:
                    assert Path(written["path"]).exists()
                    if written["bytes"] is not None:
                        assert written["bytes"] == open_checkpoint(Path(written["path"])).nbytes

    def test_its_checks(self, mpu: Callable, place: Path) -> None:
        mpu("publish", "base", "--copies", 2, cwd=place)
        for arguments, named in (
            (("publish", "base"), "copy_1: already exists"),
            (("unlearn", "copy_1", "--beta1", 2), "beta1"),
            (("aggregate", "deltas"), "deltas"),
        ):
            refused = mpu(*arguments, "--dry-run", check=False, cwd=place)
            assert refused.is_one_error
            assert named in refused.err

    def test_a_file_of_records_is_no_copy_and_an_index_of_shards_is(self, mpu: Callable, place: Path) -> None:
        refused = mpu("unlearn", "base", "retain.jsonl", *TRAINING, check=False, cwd=place)
        assert refused.is_one_error
        assert "repeat --forget or --retain" in refused.err
        model = AutoModelForCausalLM.from_pretrained(place / "base")
        model.save_pretrained(place / "base", max_shard_size="20KB")
        (place / "base/model.safetensors").unlink(missing_ok=True)
        index = "base/model.safetensors.index.json"
        assert mpu("unlearn", index, *TRAINING, "--dry-run", cwd=place).out.startswith("reads")

    def test_lines_for_people(self, mpu: Callable, place: Path) -> None:
        lines = mpu("publish", "base", "--copies", 2, "--dry-run", cwd=place).out.splitlines()
        told = [line.split("\t")[0] for line in lines]
        assert told == ["reads", *["writes"] * 3, "memory", "disk", *["note"] * 3]
        notes = "\n".join(lines[-3:])
        assert "no --pretrained: the noise is scaled to the weights themselves" in notes
        assert "this noise cancels for whoever has all copies" in notes
        bare = mpu("publish", "base", "--copies", 2, "--kappa", 0, "--dry-run", cwd=place).out
        assert "no noise: whoever aligns a copy with the public model has the weights" in bare


class TestTheModelCard:
    def test_provenance_without_secrets(self, mpu: Callable, place: Path) -> None:
        mpu("publish", "base", "--copies", 2, "--seed", 7, cwd=place)
        for k in (1, 2):
            mpu("unlearn", f"copy_{k}", *TRAINING, cwd=place)
        told = mpu("aggregate", "deltas", "--json", cwd=place).json
        card = (place / "unlearned" / "README.md").read_text()
        head = yaml.safe_load(card.split("---")[1])
        assert head["library_name"] == "transformers"
        assert "unlearning" in head["tags"]
        assert f"| run, round | {told['run']}, 1 |" in card
        assert str(place) not in card

    def test_a_push_that_cannot_work_is_refused_before_the_work(self, mpu: Callable, place: Path) -> None:
        mpu("publish", "base", "--copies", 2, cwd=place)
        for k in (1, 2):
            mpu("unlearn", f"copy_{k}", *TRAINING, cwd=place)
        for name, named in (("noowner", "expected OWNER/NAME"), ("some/model", "--push some/model")):
            refused = mpu("aggregate", "deltas", "--push", name, check=False, cwd=place)
            assert refused.is_one_error
            assert named in refused.err
            assert not (place / "unlearned").exists()


class TestTune:
    @pytest.mark.slow
    def test_finds_what_forgets_in_bounds(self, mpu: Callable, trained: Trained, tmp_path: Path) -> None:
        """Its options, passed to unlearn as printed, give the losses that it promised; nothing is left behind."""
        common = ("--forget", trained.forget, "--retain", trained.retain, "--algo", "npo", "--beta", 2.0,
                  "--batch-size", 5, "--optim", "adamw-blockwise")  # fmt: skip
        search = ("--trials", 5, "--most-epochs", 8, "--least-lr", 1e-4, "--max-retain-rise", 0.2)
        told = mpu("tune", trained.model, *common, *search, "--json", cwd=tmp_path).json
        assert not list(tmp_path.iterdir())
        assert len(told["trials"]) == 5
        within = [trial for trial in told["trials"] if trial["retain_rise"] <= 0.2]
        assert told["best"] == max(within, key=lambda trial: trial["forget_rise"])
        assert told["best"]["forget_rise"] > 0.1
        again = mpu("tune", trained.model, *common, *search, cwd=tmp_path).out
        assert again == told["options"] + "\n"  # the same seed, the same search
        assert told["options"].startswith("--algo npo --beta 2 --optim adamw-blockwise --batch-size 5 --lr ")
        exact = ("--lr", told["best"]["lr"], "--epochs", told["best"]["epochs"])
        direct = mpu("unlearn", trained.model, *common, *exact, "--json", cwd=tmp_path).json
        rise = direct["after"]["forget"] - direct["before"]["forget"]
        assert rise == pytest.approx(told["best"]["forget_rise"], rel=1e-6)

    def test_bad_input(self, mpu: Callable, place: Path) -> None:
        for arguments, named in (
            (("--algo", "gradascent"), "records to keep"),
            (("--least-lr", 1, "--most-lr", 0.1), "--least-lr"),
            (("--trials", 0), "--trials"),
            (("--forget", "none.jsonl"), "none.jsonl"),
        ):
            refused = mpu("tune", "base", *TRAINING[6:], *arguments, check=False, cwd=place)
            assert refused.is_one_error
            assert named in refused.err

    def test_nothing_found_is_said(self, mpu: Callable, place: Path) -> None:
        told = mpu("tune", "base", "--template", "plain", "--trials", 1, "--least-lr", 1e-9, "--most-lr", 1e-9,
                   "--max-retain-rise", 10, cwd=place)  # fmt: skip
        assert "nothing found that forgets: the loss rose by at most" in told.err
        assert told.out.startswith("--algo npo --template plain --lr 1e-09 --epochs ")

    def test_no_trial_in_bounds(self, mpu: Callable, place: Path) -> None:
        refused = mpu("tune", "base", "--template", "plain", "--trials", 1, "--least-lr", 0.5, "--most-lr", 0.5,
                      "--most-epochs", 2, "--max-retain-rise", 1e-6, check=False, cwd=place)  # fmt: skip
        assert refused.status == 1
        assert "no trial stayed in bounds" in refused.err


def test_a_folder_says_what_is_next(mpu: Callable, place: Path) -> None:
    """`mpu inspect .` names copies, deltas and keys of each round, and the command that comes next."""
    mpu("publish", "base", "--copies", 2, "--kappa", 0.01, cwd=place)
    training = ("--algo", "gradascent", "--epochs", 1, "--forget", "forget.jsonl")
    steps = {
        "mpu unlearn copy_1 copy_2": ("copy_1",),
        "mpu unlearn copy_2": ("copy_2",),
    }
    for expected, copies in steps.items():
        said = mpu("inspect", ".", cwd=place).out
        assert f"next: {expected}\n" in said
        assert "keys.bin" in said
        mpu("unlearn", *copies, *training, cwd=place)
    assert "next: mpu aggregate deltas --keys keys.bin" in mpu("inspect", ".", cwd=place).out
    (place / "keys.bin").rename(place.parent / "elsewhere.bin")
    assert "next: return the deltas to the model's owner" in mpu("inspect", ".", cwd=place).out
    (place / "copy_9").mkdir()
    (place / "copy_9/config.json").write_text("{")
    assert "copy_9 (" in mpu("inspect", ".", "--json", cwd=place).json["not readable"][0]


def test_a_copy_in_the_wrong_place_is_named(mpu: Callable, place: Path) -> None:
    """`mpu watch` says where a copy belongs, and what it waits for where it waits."""
    mpu("publish", "base", "--copies", 2, "--run", "r", "--out", "spool/in", "--keys", "keys.bin", cwd=place)
    told = mpu("watch", "spool", *TRAINING, "--once", check=False, cwd=place).err
    assert "spool/in/copy_1: a copy is expected at spool/in/r/round_1/copy_1" in told
