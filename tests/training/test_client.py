"""Data, schedule, unlearning, and several copies in one command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from mpu_cli.files.manifest import delta_manifest
from mpu_cli.files.reader import open_checkpoint
from mpu_cli.records.encode import IGNORED, Encoding, Limits, pad
from mpu_cli.records.forms import question
from mpu_cli.records.read import read_records
from mpu_cli.training.execution import as_wide_as
from mpu_cli.training.loop import schedule
from mpu_cli.training.losses import ALGORITHMS
from mpu_cli.training.reference import forward
from tests.helpers.models import DemoModel, load, needs_shared, random_model, save, write_records
from tests.helpers.paths import SHARED
from tests.helpers.trainings import FORGETTING


def unlearn(mpu, folder, model, *arguments, out="d.safetensors", **expected):
    return mpu("unlearn", model, "--forget", folder / "forget.jsonl", "--retain", folder / "retain.jsonl",
               "--reading", "template=plain", "--out", folder / out, *arguments, **expected)  # fmt: skip


class TestData:
    @needs_shared
    def test_labels_are_the_answer_and_its_end_of_turn(self):
        tokenizer = AutoTokenizer.from_pretrained(SHARED / "models/full")
        records = read_records(SHARED / "data/tofu/forget01.json")
        examples = Encoding(tokenizer, limits=Limits(2048)).encode(records)
        assert len(examples) == 40
        for record, example in zip(records, examples, strict=True):
            learned = [i for i in example.labels if i != IGNORED]
            assert tokenizer.decode(learned) == record.answer + "<|eot_id|>"
            prompt = tokenizer.decode(example.ids[: -len(learned)])
            assert prompt.endswith("<|start_header_id|>assistant<|end_header_id|>\n\n")
            assert "You are a helpful assistant." in prompt
            assert record.question in prompt

    @needs_shared
    def test_what_follows_the_end_of_turn_is_not_learned(self):
        """Templates such as Qwen's add a line break after it."""
        tokenizer = AutoTokenizer.from_pretrained(SHARED / "models/full")
        tokenizer.chat_template = tokenizer.chat_template.replace("'<|eot_id|>'", "'<|eot_id|>\n'")
        [example] = Encoding(tokenizer).encode([question("Why?", "Because.")])
        assert example.labels[-1] == IGNORED
        assert tokenizer.decode([i for i in example.labels if i != IGNORED]) == "Because.<|eot_id|>"

    def test_array_and_lines_and_blank_lines(self, tmp_path):
        rows = [{"question": f"q{i}", "answer": "ä", "extra": 1} for i in range(3)]
        (tmp_path / "a.json").write_text(json.dumps(rows))
        (tmp_path / "b.jsonl").write_text("\ufeff" + "\n\n".join(json.dumps(r) for r in rows) + "\n", encoding="utf-8")
        assert [r.question for r in read_records(tmp_path / "a.json")] == ["q0", "q1", "q2"]
        assert [r.answer for r in read_records(tmp_path / "b.jsonl")] == ["ä"] * 3

    def test_padding_changes_no_score(self, base):
        model, tokenizer = load(base, torch.float64, "cpu")
        records = read_records(base.parent / "forget.jsonl")
        records += [question("w4", "w5"), question("w4 w5 w6 " * 5, "w7")]
        examples = Encoding(tokenizer, system_prompt="").encode(records)
        with torch.no_grad():
            batch_scores = forward(model, pad(examples)).sequence_log_probs
            separate_scores = torch.cat([forward(model, pad([example])).sequence_log_probs for example in examples])
        torch.testing.assert_close(batch_scores, separate_scores, rtol=1e-6, atol=1e-6)  # norms and RoPE are in float32


class TestSchedule:
    def test_every_epoch_sees_every_record_once(self):
        steps = schedule(10, 7, epochs=4, batch_size=3, seed=0)
        assert [len(step["forget"]) for step in steps] == [3, 3, 3, 1] * 4
        for epoch in range(4):
            forget_indices = [i for step in steps[4 * epoch : 4 * epoch + 4] for i in step["forget"]]
            assert sorted(forget_indices) == list(range(10))
        retain_indices = [i for step in steps for i in step["retain"]]
        assert len(retain_indices) == 40
        for start in range(0, 35, 7):
            assert sorted(retain_indices[start : start + 7]) == list(range(7))

    def test_the_seed_fixes_it(self):
        steps, same_seed_steps, other_seed_steps = (schedule(10, 7, epochs=2, batch_size=3, seed=s) for s in (1, 1, 2))
        assert steps == same_seed_steps != other_seed_steps


def at_layer(algorithm: str, layer: int) -> list[object]:
    """The layer option, for algorithms that have one; its default is too high for small models."""
    return ["--constants", f"layer={layer}"] if "layer" in ALGORITHMS[algorithm].constant_names else []


def one_now(names: Iterable[str], *chosen: str) -> list:
    """``names`` as parameters, those that are not ``chosen`` in the exhaustive tier."""
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.exhaustive) for name in names]


class TestUnlearn:
    @pytest.mark.slow
    @pytest.mark.parametrize("algorithm", one_now(ALGORITHMS, "npo", "rmu"))
    def test_lowers_its_term_and_forgets(self, mpu, tmp_path, demo, algorithm):
        """On a trained model and records that it has memorised."""
        for path in (demo.forget, demo.retain):
            shutil.copy(path, tmp_path / path.name)
        # satimp's weights vanish where a record is known by heart: as it is, the retain term outweighs them.
        gamma = {"satimp": 10.0}.get(algorithm, ALGORITHMS[algorithm].constants.gamma)
        # With simnpo's rate of an eighth, the retain term is lowered first, and with it the loss on all records.
        epochs = 16 if algorithm == "simnpo" else 6
        outcome = unlearn(mpu, tmp_path, demo.model, "--algo", algorithm, "--lr", "3e-4", "--optim",
                       "adamw-blockwise", "--json", "--epochs", epochs, "--batch-size", 32,
                       "--reading", "template=chat", "--constants", f"gamma={gamma}",
                       *at_layer(algorithm, 1))  # fmt: skip
        steps = outcome.json["steps"]
        assert len(steps) == epochs
        assert steps[-1]["forget_term"] < steps[0]["forget_term"]
        assert steps[-1]["forget"] > steps[0]["forget"]
        assert (steps[0]["retain"] is None) == (algorithm in ("gradascent", "undial"))
        settings = ALGORITHMS[algorithm].constants
        alpha = settings.alpha
        for step in steps:
            retain_term = step["retain_term"] or 0
            assert step["loss"] == pytest.approx(gamma * step["forget_term"] + alpha * retain_term, rel=1e-5)
            alpha = max(0, alpha + settings.dual_rate * (retain_term - settings.retain_limit))

    @pytest.mark.slow
    @pytest.mark.parametrize("algorithm", one_now(ALGORITHMS, "hinge", "rmu"))
    def test_parts_of_a_step_add_up(self, mpu, tmp_path, base, algorithm):
        """Micro-batches, even if uneven or empty, give the same delta as the whole batch."""
        options = ["--algo", algorithm, "--precision", "float64", *at_layer(algorithm, 0), "--epochs", 2, "--optim",
                   "sgd", "--lr", "1e-2", "--batch-size", 4, "--training", "max_grad_norm=1e9"]  # fmt: skip
        unlearn(
            mpu, tmp_path, base, *options, "--training", "micro_batch_size=99", out="whole.safetensors"
        )  # both sets in one
        for size in (1, 3):  # 6 records in steps of 4 and 2: with parts of 1, the second step has two empty ones
            unlearn(
                mpu, tmp_path, base, *options, "--training", f"micro_batch_size={size}", out=f"parts{size}.safetensors"
            )
            full_batch, micro_batches = (
                load_file(tmp_path / f"{name}.safetensors") for name in ("whole", f"parts{size}")
            )
            for name, tensor in full_batch.items():
                torch.testing.assert_close(
                    micro_batches[name], tensor, rtol=1e-5, atol=1e-9 + 1e-6 * float(tensor.abs().max())
                )

    def test_delta_is_after_minus_before(self, mpu, tmp_path, base):
        """One SGD step of gradient ascent, compared with manual autograd."""
        unlearn(mpu, tmp_path, base, "--algo", "gradascent", "--optim", "sgd", "--lr", "0.1", "--epochs", 1,
                "--training", "weight_decay=0,max_grad_norm=1e9", "--precision", "float64",
                "--train-embeddings")  # fmt: skip
        model, tokenizer = load(base, torch.float64, "cpu")
        examples = Encoding(tokenizer, template="plain").encode(read_records(tmp_path / "forget.jsonl"))
        with as_wide_as(torch.float64):
            forward(model, pad(examples)).cross_entropy.backward()
        delta = load_file(tmp_path / "d.safetensors")
        parameters = dict(model.named_parameters())
        assert delta.keys() == parameters.keys()
        for name, change in delta.items():
            torch.testing.assert_close(change, 0.1 * parameters[name].grad, rtol=1e-6, atol=1e-9)

    def test_gradient_is_clipped(self, mpu, tmp_path, base):
        outcome = unlearn(mpu, tmp_path, base, "--algo", "gradascent", "--optim", "sgd", "--lr", "0.1", "--epochs", 1,
                       "--training", "weight_decay=0,max_grad_norm=0.01", "--precision", "float64",
                       "--json")  # fmt: skip
        assert outcome.json["norm"] == pytest.approx(0.1 * 0.01, rel=1e-4)

    @pytest.mark.slow
    @pytest.mark.parametrize("optimizer", one_now(["adamw", "adamw-blockwise", "sgd"], "adamw-blockwise"))
    def test_same_seed_same_delta(self, mpu, tmp_path, base, optimizer):
        for out, seed in (("a", 3), ("b", 3), ("c", 4)):
            unlearn(mpu, tmp_path, base, "--optim", optimizer, "--lr", "1e-3", "--batch-size", 2, "--epochs", 2,
                    "--seed", seed, out=f"{out}.safetensors")  # fmt: skip
        a, b, c = ((tmp_path / f"{out}.safetensors").read_bytes() for out in "abc")
        assert a == b != c

    @pytest.mark.parametrize(
        ("precision", "stored"), [("float32", torch.float32), ("bfloat16", torch.float32), ("float64", torch.float64)]
    )
    def test_precision(self, mpu, tmp_path, base, precision, stored):
        unlearn(mpu, tmp_path, base, "--precision", precision, "--lr", "1e-2", "--epochs", 2)
        delta = load_file(tmp_path / "d.safetensors")
        assert {t.dtype for t in delta.values()} == {stored}
        before = load_file(base / "model.safetensors")
        for name, change in delta.items():  # the sum is exactly the trained model's weight
            start = before[name].to(getattr(torch, precision)).to(stored)
            assert torch.equal((start + change).to(getattr(torch, precision)).to(stored), start + change)

    def test_a_small_model_is_trained_in_float32_by_default(self, mpu, tmp_path, base):
        deltas = []
        for name, precision in (("auto", ()), ("float32", ("--precision", "float32"))):
            unlearn(mpu, tmp_path, base, *precision, "--epochs", 1)
            deltas.append((tmp_path / "d.safetensors").rename(tmp_path / f"{name}.safetensors").read_bytes())
        assert deltas[0] == deltas[1]

    def test_dropout_is_off(self, tmp_path):
        """Random dropout masks would differ between the copies."""
        base = save(random_model("gpt2"), tmp_path / "base")
        assert json.loads((base / "config.json").read_text())["resid_pdrop"] > 0
        model, _ = load(base, torch.float32, "cpu")
        tokens = torch.arange(3, 30)[None]
        model.train()
        assert torch.equal(model(tokens).logits, model(tokens).logits)

    def test_names_are_those_of_the_files(self, mpu, tmp_path):
        base = save(random_model("gpt2"), tmp_path / "base")
        write_records(tmp_path / "forget.jsonl", 4, 1)
        tensors = {n.removeprefix("transformer."): t for n, t in load_file(base / "model.safetensors").items()}
        save_file(tensors, base / "model.safetensors", {"format": "pt"})
        unlearn(mpu, tmp_path, base, "--algo", "gradascent", "--epochs", 1, "--train-embeddings")
        assert load_file(tmp_path / "d.safetensors").keys() == tensors.keys()
        unlearn(mpu, tmp_path, base, "--algo", "gradascent", "--epochs", 1, out="e.safetensors")
        assert load_file(tmp_path / "e.safetensors").keys() == tensors.keys() - {"wte.weight", "wpe.weight"}

    @pytest.mark.slow
    def test_any_model_may_be_the_clean_baseline(self, mpu, tmp_path, base):
        unlearn(mpu, tmp_path, base, "--epochs", 1)
        checkpoint = open_checkpoint(tmp_path / "d.safetensors")
        assert delta_manifest(checkpoint.metadata, tmp_path).origin is None
        (base / "model.safetensors").rename(base / "weights.safetensors")
        for name, source in (("file", base / "weights.safetensors"), ("folder", base)):
            unlearn(mpu, tmp_path, source, "--epochs", 1, out=f"{name}.safetensors")
            assert (tmp_path / f"{name}.safetensors").read_bytes() == (tmp_path / "d.safetensors").read_bytes()

    def test_the_delta_tells_nothing_of_the_records(self, mpu, tmp_path, base):
        """The metadata contains neither their text nor their number nor the training time."""
        unlearn(mpu, tmp_path, base, "--algo", "npo", "--epochs", 1)
        assert json.loads(open_checkpoint(tmp_path / "d.safetensors").metadata["mpu"]) == {
            "format": "mpu-delta", "version": 2, "algorithm": "npo", "kind": "full", "inverted": False,
        }  # fmt: skip

    @pytest.mark.slow
    def test_divergence_is_told_and_leaves_nothing(self, mpu, tmp_path, base):
        outcome = unlearn(
            mpu, tmp_path, base, "--optim", "sgd", "--lr", "1e30", "--training", "max_grad_norm=1e30", check=False
        )
        assert outcome.status == 1
        assert "--lr" in outcome.err
        assert not (tmp_path / "d.safetensors").exists()
        assert not list(tmp_path.glob(".*"))

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
        enough = mpu("unlearn", demo.model, *records, *FORGETTING, "--json", "--out", "b.safetensors", cwd=tmp_path)
        assert "hardly forgotten" not in enough.err
        before, after = enough.json["before"], enough.json["after"]
        assert before == pytest.approx(little.json["before"], rel=1e-5)  # in batches of another size
        assert after["forget"] > before["forget"] + 0.5
        assert after["retain"] < before["retain"] + 0.5
        ruined = mpu("unlearn", demo.model, *records, "--algo", "gradascent", "--lr", 1e-2, "--epochs", 5, "--json",
                     "--constants", "alpha=1", "--out", "c.safetensors", cwd=tmp_path)  # fmt: skip
        assert "lost much of what it should keep" in ruined.err

    def test_losses_before_are_those_of_the_first_step(self, mpu: Callable, root: Path) -> None:
        """With one batch that holds all records; after, those that a second training begins with."""
        options = ("--epochs", 1, "--batch-size", 9, "--lr", 0, "--reading", "template=plain", "--precision", "float64")
        document = mpu("unlearn", "base", *options, "--json", "--out", "d.safetensors", cwd=root).json
        assert document["before"]["forget"] == pytest.approx(document["steps"][0]["forget"], rel=1e-9)
        assert document["after"] == pytest.approx(document["before"], rel=1e-12)


class TestSeveralCopies:
    TRAINING = ("--algo", "npo", "--epochs", 2, "--batch-size", 3, "--lr", "1e-3")

    @pytest.fixture
    def copies(self, mpu, root):
        return mpu("publish", "base", "--copies", 3, "--seed", 1, cwd=root).out.split()

    @pytest.mark.parametrize(
        "more",
        [
            (),
            *(
                pytest.param(more, marks=pytest.mark.exhaustive)
                for more in (("--lora", "rank=2"), ("--algo", "dpo"), ("--optim", "muon"))
            ),
        ],
    )
    @pytest.mark.slow
    def test_each_delta_is_what_it_is_alone(self, mpu, root, copies, more):
        for name in copies:
            mpu("unlearn", name, *self.TRAINING, *more, "--out", "alone/", cwd=root)
        outcome = mpu("unlearn", *copies, *self.TRAINING, *more, "--out", "together", "--json", cwd=root)
        assert [Path(each["delta"]).name for each in outcome.json["deltas"]] == [
            f"{name}.safetensors" for name in copies
        ]
        for name in copies:
            separate_path, joint_path = (root / folder / f"{name}.safetensors" for folder in ("alone", "together"))
            assert separate_path.read_bytes() == joint_path.read_bytes()

    @pytest.mark.slow
    def test_resume_passes_over_what_is_done(self, mpu, root, copies):
        mpu("unlearn", copies[1], *self.TRAINING, cwd=root)
        before = (root / "deltas/copy_2.safetensors").stat().st_mtime_ns
        mpu("unlearn", *copies, *self.TRAINING, fails="already exists", cwd=root)
        assert not (root / "deltas/copy_1.safetensors").exists()  # nothing was trained in vain
        outcome = mpu("unlearn", *copies, *self.TRAINING, "--resume", cwd=root)
        assert "copy_2: deltas/copy_2.safetensors is there already" in outcome.err
        assert outcome.out.split() == [f"deltas/{name}.safetensors" for name in copies]
        assert (root / "deltas/copy_2.safetensors").stat().st_mtime_ns == before
        mpu("publish", "base", "--copies", 3, "--seed", 2, "--force", cwd=root)
        mpu("unlearn", *copies, *self.TRAINING, "--resume", fails="is not the delta of copy_1", cwd=root)

    def test_resume_passes_over_sealed_copies(self, mpu, root):
        mpu("keygen", "--out", "client.txt", cwd=root)
        key = root / "client.txt"
        mpu("publish", "base", "--copies", 2, "--copy-recipients", key, cwd=root)
        sealed = ["copy_1.age", "copy_2.age", "--identity", key]
        mpu("unlearn", *sealed, *self.TRAINING, cwd=root)
        assert mpu("unlearn", *sealed, *self.TRAINING, "--resume", cwd=root).err.count("is there already") == 2

    @pytest.mark.slow
    def test_reference_files_of_a_round(self, mpu, root, copies):
        mpu("unlearn", *copies, *self.TRAINING, "--reference-file", "references", cwd=root)
        assert {path.name for path in (root / "references").iterdir()} == {f"{name}.safetensors" for name in copies}

    @pytest.mark.parametrize(
        ("options", "complaint"),
        [
            (["--out", "d.safetensors"], "one file for 2 deltas"),
            (["--reference-file", "r.safetensors"], "one file for 2 copies"),
        ],
    )
    def test_one_file_for_two(self, mpu, root, copies, options, complaint):
        mpu("unlearn", *copies[:2], *options, fails=complaint, status=2, cwd=root)
        mpu("unlearn", copies[0], f"./{copies[0]}", fails="would be the delta of two copies", cwd=root)
