"""``mpu eval`` and ``mpu compare``: the field's standard metrics, from one pass per item."""

from __future__ import annotations

import json
import math
import random
import shutil
import stat
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import mannwhitneyu
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from mpu_cli.measuring.encoding import Item
from mpu_cli.measuring.generation import reading
from mpu_cli.measuring.scoring import TokenScores
from mpu_cli.options.unlearning import DATE, SYSTEM_PROMPT
from tests.helpers.attacks import edit
from tests.helpers.models import DemoModel, needs_shared, random_model, save
from tests.helpers.paths import SHARED
from tests.helpers.stopping import stop_when
from tests.helpers.trainings import BRIEF, FORGETTING


@pytest.mark.slow
@needs_shared
@pytest.mark.parametrize("name", ["full_forget01"])  # retain99_forget01 holds too, and takes as long
def test_numbers_are_the_suites(mpu: Callable, tmp_path: Path, name: str) -> None:
    golden = json.loads((SHARED / "golden" / f"{name}.json").read_text())
    rows = json.loads((SHARED / "golden" / f"{name}_EVAL.json").read_text())
    # As the file's command, whose options have other names by now.
    mpu("eval", SHARED / "models" / name.partition("_")[0], "--benchmark", f"tofu:{name.partition('_')[2]}",
        "--reading", f"data_dir={SHARED / 'data/tofu'}", "--reference-model", SHARED / "models/pretrained",
        "--retain-log", SHARED / "golden/retain99_forget01_EVAL.json", "--out", tmp_path / "eval.json")  # fmt: skip
    results = json.loads((tmp_path / "eval.json").read_text())["metrics"]
    for metric, value in golden["metrics"].items():
        actual = results[metric]["agg_value"]
        if metric == "forget_quality":
            assert math.log(actual) == pytest.approx(math.log(value), rel=1e-4)
        else:
            assert actual == pytest.approx(value, abs=2e-6), metric
    for metric in golden["metrics"]:
        form = rows[metric]
        assert set(form) == set(results[metric])
        for index, row in form.get("value_by_index", {}).items():
            actual_row = results[metric]["value_by_index"][index]
            assert set(actual_row) == set(row)
            if "prob" in row:
                assert actual_row["prob"] == pytest.approx(row["prob"], abs=2e-6)
            if "generation" in row:
                assert actual_row == row


def test_memorisation_is_what_its_words_say() -> None:
    rng = random.Random(4)
    for _ in range(200):
        labels = [rng.randrange(3) for _ in range(rng.randrange(2, 9))]
        said = [rng.randrange(3) if rng.random() < 0.5 else label for label in labels]
        log_probs = -torch.rand(len(labels))
        item = Item((0, *labels), 1, (0,), "")
        readings = reading(item, TokenScores(-log_probs, log_probs, torch.tensor(said)), "text")
        right = [a == b for a, b in zip(said, labels, strict=True)][:-1]
        shortest = next((k for k in range(len(right)) if all(right[k:])), len(right) - 1)
        assert readings["extraction_strength"] == pytest.approx(1 - shortest / len(right))
        assert readings["exact_memorization"] == pytest.approx(sum(right) / len(right))
        lowest = np.sort(log_probs[:-1].numpy())[: max(1, int(0.4 * len(right)))]
        assert readings["min_k"] == pytest.approx(-lowest.mean())
        agreed = next((i for i, ok in enumerate([*right, said[-1] == labels[-1]]) if not ok), len(labels))
        assert readings["says"] == said[: agreed + 1]


class TestCommand:
    @pytest.mark.slow
    def test_by_hand(self, mpu: Callable, model: Path, tofu: Path, tmp_path: Path) -> None:
        """TOFU's metrics on a random model, computed here from their definitions, one record at a time."""
        reference = save(random_model("llama", seed=9), tmp_path / "reference")
        out = mpu(
            "eval", model, "--reading", f"data_dir={tofu}", "--benchmark", "tofu:forget01", "--reference-model",
            reference,
            "--out", tmp_path / "eval.json", "--scoring", "batch_size=4", "--json",
        ).json["metrics"]  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(model)
        models = [AutoModelForCausalLM.from_pretrained(path) for path in (model, reference)]

        def chat(*turns: tuple[str, str], prompt: bool) -> list[int]:
            messages = [{"role": role, "content": text} for role, text in turns]
            return tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=True).input_ids

        def logits(question: str, reply: str, which: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
            turns = [("system", "You are a helpful assistant."), ("user", question)]
            prompt = chat(*turns, prompt=True)
            ids = chat(*turns, ("assistant", reply), prompt=False)
            ids += [tokenizer.eos_token_id] * (ids[-1] != tokenizer.eos_token_id)
            answer_logits = models[which](input_ids=torch.tensor([ids])).logits[0, len(prompt) - 1 : -1]
            return answer_logits.log_softmax(-1), torch.tensor(ids[len(prompt) :])

        def loss(question: str, reply: str, which: int = 0) -> float:
            log_p, labels = logits(question, reply, which)
            return float(-log_p.gather(1, labels[:, None]).mean())

        def rows(split: str) -> list[dict]:
            return [json.loads(line) for line in (tofu / f"{split}.json").read_text().splitlines()]

        forget, holdout = rows("forget01_perturbed"), rows("holdout01")
        with torch.no_grad():
            probabilities = [math.exp(-loss(r["question"], r["answer"])) for r in forget]
            assert out["forget_Q_A_Prob"] == pytest.approx(np.mean(probabilities), rel=1e-4)

            def ratio(row: dict, right: str) -> float:
                wrong = np.mean([loss(row["question"], w) for w in row["perturbed_answer"]])
                return math.exp(-wrong) / math.exp(-loss(row["question"], row[right]))

            ratios = [ratio(r, "paraphrased_answer") for r in forget]
            assert out["forget_truth_ratio"] == pytest.approx(np.mean([min(r, 1 / r) for r in ratios]), rel=1e-4)
            facts = rows("world_facts_perturbed")
            ratios = [max(0, 1 - ratio(r, "answer")) for r in facts]
            assert out["wf_Truth_Ratio"] == pytest.approx(np.mean(ratios), rel=1e-4)
            shares = []
            for r in facts:
                p, *wrong = [math.exp(-loss(r["question"], a)) for a in (r["answer"], *r["perturbed_answer"])]
                shares.append(p / (p + sum(wrong)))
            assert out["wf_Q_A_Prob_normalised"] == pytest.approx(np.mean(shares), rel=1e-4)

            def auc(value: Callable[[dict], float]) -> float:
                sides = [[value(r) for r in side] for side in (forget, holdout)]
                return mannwhitneyu(sides[1], sides[0]).statistic / (len(forget) * len(holdout))

            attacks = {
                "mia_loss": lambda r: loss(r["question"], r["answer"]),
                "mia_reference": lambda r: loss(r["question"], r["answer"]) - loss(r["question"], r["answer"], 1),
                "mia_zlib": lambda r: loss(r["question"], r["answer"]) / len(zlib.compress(r["answer"].encode())),
            }
            for name, value in attacks.items():
                assert out[name] == pytest.approx(auc(value)), name

        def gradient_norm(row: dict) -> float:
            log_p, labels = logits(row["question"], row["answer"])
            models[0].zero_grad()
            (-log_p[:-1].gather(1, labels[:-1, None]).mean()).backward()
            return np.mean([float(p.grad.norm()) for p in models[0].parameters()])

        assert out["mia_gradnorm"] == pytest.approx(auc(gradient_norm))
        parts = [out[f"{s}_{m}"] for s in ("ra", "wf") for m in ("Q_A_Prob_normalised", "Q_A_ROUGE", "Truth_Ratio")]
        parts += [out[f"retain_{m}"] for m in ("Q_A_Prob", "Q_A_ROUGE", "Truth_Ratio")]
        harmonic = 0 if 0 in parts else 9 / sum(1 / part for part in parts)
        assert out["model_utility"] == pytest.approx(harmonic)

    @pytest.mark.slow
    def test_batch_size_changes_no_number(self, mpu: Callable, model: Path, tofu: Path, tmp_path: Path) -> None:
        results = []
        for size in (1, 5, 64):
            path = tmp_path / f"{size}.json"
            mpu(
                "eval",
                model,
                "--reading",
                f"data_dir={tofu}",
                "--benchmark",
                "tofu:forget01",
                "--scoring",
                f"batch_size={size}",
                "--out",
                path,
            )
            results.append({n: f["agg_value"] for n, f in json.loads(path.read_text())["metrics"].items()})
        assert results[1] == pytest.approx(results[0], abs=1e-5)
        assert results[2] == pytest.approx(results[0], abs=1e-5)

    @pytest.mark.slow
    def test_the_padding_token_changes_no_number(self, mpu: Callable, model: Path, tofu: Path, tmp_path: Path) -> None:
        """OpenUnlearning masks it in prompts, too, which is said where they have it."""
        results, notes = [], []
        for pad in ("<pad>", "<s>", None):  # without one, it pads with the end, which this template's prompts lack
            folder = shutil.copytree(model, tmp_path / f"model_{len(notes)}")
            for name in ("tokenizer_config.json", "special_tokens_map.json"):
                if (folder / name).exists():
                    edit(folder / name, pad_token=pad)
            out = folder / "eval.json"
            command = ("eval", folder, "--reading", f"data_dir={tofu}", "--benchmark", "tofu:forget01", "--out", out)
            notes.append(mpu(*command, "--metrics", "forget_Q_A_Prob").err)
            results.append(json.loads(out.read_text())["metrics"]["forget_Q_A_Prob"])
        assert results[0] == results[1] == results[2]
        assert ["OpenUnlearning's own numbers" in note for note in notes] == [False, True, False]
        edit(folder / "tokenizer_config.json", eos_token="<s>")
        assert "it hides '<s>' from the model" in mpu(*command, "--metrics", "forget_Q_A_Prob", "--force").err

    def test_only_what_is_asked_for(self, mpu: Callable, model: Path, tofu: Path, tmp_path: Path) -> None:
        for split in ("retain_perturbed", "holdout01", "real_authors_perturbed"):
            (tofu / f"{split}.json").unlink()
        out = tmp_path / "eval.json"
        mpu(
            "eval",
            model,
            "--reading",
            f"data_dir={tofu}",
            "--benchmark",
            "tofu:forget01",
            "--metrics",
            "forget_truth_ratio",
            "--out",
            out,
        )
        document = json.loads(out.read_text())
        assert list(document["data"]) == ["forget"]
        assert set(document["metrics"]) == {"forget_truth_ratio", "forget_Q_A_PARA_Prob", "forget_Q_A_PERT_Prob"}

    @pytest.mark.slow
    def test_its_result_is_a_retain_log(self, mpu: Callable, model: Path, tofu: Path, tmp_path: Path) -> None:
        log, out = tmp_path / "retain.json", tmp_path / "eval.json"
        common = ("--reading", f"data_dir={tofu}", "--benchmark", "tofu:forget01")
        mpu("eval", model, *common, "--out", log)
        results = mpu("eval", model, *common, "--retain-log", log, "--out", out, "--json").json["metrics"]
        assert results["forget_quality"] == pytest.approx(1)  # the same model
        assert results["privleak"] == pytest.approx(0)
        lines = (tofu / "forget01_perturbed.json").read_text().splitlines()
        (tofu / "forget01_perturbed.json").write_text("\n".join(lines[::-1]))
        refused = mpu("eval", model, *common, "--retain-log", log, "--out", out, "--force", check=False)
        assert refused.status == 1
        assert "different forget records" in refused.err
        suites = tmp_path / "suite.json"  # from OpenUnlearning, which stores no digests of the records
        suites.write_text(json.dumps(json.loads(log.read_text())["metrics"]))
        options = ("--metrics", "forget_quality", "--out", out, "--force")
        mpu("eval", model, *common, "--retain-log", suites, *options, fails="different questions")
        (tofu / "forget01_perturbed.json").write_text("\n".join(lines[:3]))
        refused = mpu("eval", model, *common, "--retain-log", suites, *options, check=False)
        assert "different forget split (7 questions, expected 3)" in refused.err
        (tofu / "forget01_perturbed.json").write_text("\n".join(lines))
        assert not list(tmp_path.glob(".*.partial"))  # before any pass over the model
        bare = json.loads(log.read_text())
        del bare["metrics"]["mia_min_k"]
        log.write_text(json.dumps(bare))
        options = ("--metrics", "privleak", "--out", out, "--force")
        mpu("eval", model, *common, "--retain-log", log, *options, fails="has no mia_min_k")
        bare["benchmark"] = "qa"
        log.write_text(json.dumps(bare))
        mpu("eval", model, *common, "--retain-log", log, *options, fails="on qa, not on tofu")
        (tmp_path / "p.png").write_text("mine")
        refused = mpu("eval", model, *common, "--plot", tmp_path / "p.png", "--out", tmp_path / "new", check=False)
        assert "p.png: already exists" in refused.err

    @pytest.mark.slow
    def test_goes_on_after_a_kill(self, mpu: Callable, model: Path, tofu: Path, tmp_path: Path) -> None:
        arguments = ["eval", str(model), "--reading", f"data_dir={tofu!s}", "--benchmark", "tofu:forget01"]
        mpu(*arguments, "--out", tmp_path / "whole.json")
        out = tmp_path / "eval.json"
        partial = tmp_path / ".eval.json.partial"
        stop_when([*arguments, "--out", out], partial.exists, env={"OMP_NUM_THREADS": "1"})
        assert not out.exists()
        state = json.loads(partial.read_text())
        state["findings"].pop("wf.text", None)
        state["facts"]["hardware"]["threads"] = torch.get_num_threads()
        partial.write_text(json.dumps(state))
        said = mpu(*arguments, "--out", out)
        assert "resuming from" in said.err
        assert not partial.exists()
        metrics = [json.loads(p.read_text())["metrics"] for p in (out, tmp_path / "whole.json")]
        values = [{name: form["agg_value"] for name, form in result.items()} for result in metrics]
        assert values[0] == pytest.approx(values[1], abs=1e-6)

    def test_a_partial_of_other_options_is_not_used(
        self, mpu: Callable, model: Path, tofu: Path, tmp_path: Path
    ) -> None:
        (tmp_path / ".eval.json.partial").write_text(json.dumps({"facts": {}, "findings": {"forget.answer": []}}))
        out = tmp_path / "eval.json"
        said = mpu(
            "eval",
            model,
            "--reading",
            f"data_dir={tofu}",
            "--benchmark",
            "tofu:forget01",
            "--metrics",
            "mia_loss",
            "--out",
            out,
        )
        assert "resuming" not in said.err
        assert len(json.loads(out.read_text())["metrics"]["mia_loss"]["forget"]["value_by_index"]) == 7

    def test_not_numbers(self, mpu: Callable, tofu: Path, tmp_path: Path) -> None:
        broken = random_model("llama")
        broken.model.norm.weight.data[0] = float("nan")
        path = save(broken, tmp_path / "broken")
        said = mpu(
            "eval",
            path,
            "--reading",
            f"data_dir={tofu}",
            "--benchmark",
            "tofu:forget01",
            "--out",
            tmp_path / "e",
            check=False,
        )
        assert said.status == 1
        assert "forget01_perturbed.json, line " in said.err
        assert "NaN" in said.err
        assert not (tmp_path / "e").exists()

    def test_not_numbers_in_answers(self, mpu: Callable, tofu: Path, tmp_path: Path) -> None:
        broken = random_model("llama")
        with torch.no_grad():
            broken.model.norm.weight.fill_(math.nan)
        save(broken, tmp_path / "nan")
        options = ("--reading", f"data_dir={tofu}", "--benchmark", "tofu:forget01", "--metrics", "forget_Q_A_ROUGE")
        refused = mpu("eval", tmp_path / "nan", *options, "--out", tmp_path / "n.json", check=False)
        assert refused.status == 1
        assert "forget01_perturbed.json" in refused.err
        assert "logits are NaN" in refused.err

    @pytest.mark.slow
    def test_findings_of_a_stopped_run_are_used_where_nothing_changed(
        self, mpu: Callable, model: Path, tofu: Path, tmp_path: Path
    ) -> None:
        """A number in the partial file is used in the result, but not after something it depends on has changed."""
        options = (
            "--reading",
            f"data_dir={tofu}",
            "--benchmark",
            "tofu:forget01",
            "--metrics",
            "forget_Q_A_Prob,retain_Q_A_Prob",
        )
        out, partial = tmp_path / "eval.json", tmp_path / ".eval.json.partial"
        more = ("--metrics", "forget_Q_A_Prob,retain_Q_A_Prob,retain_Q_A_ROUGE")
        threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        stop_when(["eval", model, *options, *more, "--out", out], partial.exists, env=threads)
        state = json.loads(partial.read_text())
        assert "forget.answer" in state["findings"]
        for row in state["findings"]["forget.answer"]:
            row["loss"] = 3.0
        planted = json.dumps(state)
        lines = (tofu / "retain_perturbed.json").read_text()
        (tofu / "retain_perturbed.json").write_text("\n".join(lines.splitlines()[::-1]) + "\n")
        for change, expected in ((None, True), ("generation_config.json", False)):
            partial.write_text(planted)
            if change:
                edit(model / change, eos_token_id=7)
            probability = mpu("eval", model, *options, "--out", out, "--force", "--json").json["metrics"][
                "forget_Q_A_Prob"
            ]
            assert (probability == pytest.approx(math.exp(-3.0))) is expected

    @pytest.mark.slow
    def test_pictures(self, mpu: Callable, model: Path, tofu: Path, tmp_path: Path) -> None:
        common = (
            "eval",
            model,
            "--reading",
            f"data_dir={tofu}",
            "--benchmark",
            "tofu:forget01",
            "--force",
            "--out",
            tmp_path / "e.json",
        )
        for suffix, begin in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".html", b"<!doctype html>")):
            picture = tmp_path / f"picture{suffix}"
            said = mpu(*common, "--plot", picture)
            assert said.out.splitlines()[-2:] == [str(tmp_path / "e.json"), str(picture)]  # after the table
            assert picture.read_bytes().startswith(begin)
        page = (tmp_path / "picture.html").read_text()
        assert "forget_truth_ratio" in page
        assert "http://" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
            "http://creativecommons.org", ""
        )

    @pytest.mark.parametrize("existing", [False, True])
    def test_what_holds_records_is_for_its_owner(self, mpu: Callable, root: Path, existing: bool) -> None:
        if existing:
            (root / "eval.json").write_text("{}")
            (root / "eval.json").chmod(0o644)
        mpu("eval", "base", "--benchmark", "qa", "--forget", "forget.jsonl", "--force", cwd=root)
        assert stat.S_IMODE((root / "eval.json").stat().st_mode) == 0o600

    @pytest.mark.slow
    def test_an_evaluation_of_nothing(self, mpu: Callable, root: Path) -> None:
        mpu("eval", "base", refused="--forget", status=2, cwd=root)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--benchmark", "tofu:forget02"], 1, "no split 'forget02_perturbed'"),
        (["--benchmark", "tofu:retain90"], 2, "forget01"),
        (["--benchmark", "tofu:forget01", "--metrics", "accuracy"], 2, "no such metric"),
        (["--benchmark", "tofu:forget01", "--metrics", "forget_quality"], 2, "needs --retain-log"),
        (["--benchmark", "tofu:forget01", "--metrics", "mia_reference"], 2, "--reference-model"),
        (["--benchmark", "tofu:forget01", "--retain-log", "{tofu}/holdout01.json"], 1, "holdout01.json: not JSON"),
        (["--benchmark", "tofu:forget01", "--scoring", "batch_size=0"], 2, "at least 1"),
        (["--benchmark", "tofu:forget01", "--plot", "picture.jpg"], 2, ".png, .svg, .pdf, .html"),
        (["--benchmark", "muse"], 1, "no split"),
        (["--benchmark", "qa", "--forget", "{tofu}/missing.json"], 1, "missing.json"),
        (["--benchmark", "tofu", "--forget", "{tofu}/holdout01.json"], 2, "--benchmark qa"),
    ],
)  # fmt: skip
def test_bad_input(
    mpu: Callable, model: Path, tofu: Path, tmp_path: Path, arguments: list[str], status: int, said: str
) -> None:
    options = [argument.format(tofu=tofu) for argument in arguments]
    mpu("eval", model, "--reading", f"data_dir={tofu}", *options, refused=said, status=status, cwd=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "tofu"}


def test_a_record_without_its_fields(mpu: Callable, model: Path, tofu: Path, tmp_path: Path) -> None:
    path = tofu / "retain_perturbed.json"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    del rows[4]["perturbed_answer"]
    path.write_text("\n".join(map(json.dumps, rows)))
    arguments = ("eval", model, "--reading", f"data_dir={tofu}", "--benchmark", "tofu:forget01")
    mpu(*arguments, fails="retain_perturbed.json, line 5: no list of texts in 'perturbed_answer'", cwd=tmp_path)


def test_a_model_without_a_tokenizer(mpu: Callable, model: Path, tofu: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(model / name, bare)
    outcome = mpu(
        "eval", bare, "--reading", f"data_dir={tofu}", "--benchmark", "tofu:forget01", check=False, cwd=tmp_path
    )
    assert outcome.status == 1
    assert str(bare) in outcome.err
    assert "tokenizer" in outcome.err


def short_of_greedy(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, question: str, text: str) -> float:
    """By how much a token of ``text`` is less probable than the most probable one, in nats, at most."""
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, date_string=DATE)
    answer = tokenizer(text, add_special_tokens=False).input_ids
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return float((logits.max(-1).values - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]).max())


class TestEvaluatingADelta:
    @pytest.mark.slow
    @pytest.mark.parametrize("lora", [(), ("--lora", "rank=4", "--lr", "3e-3")], ids=["full", "lora"])
    def test_numbers_are_those_of_the_copy_with_its_delta(
        self, mpu: Callable, demo: DemoModel, tmp_path: Path, lora: tuple
    ) -> None:
        """Against the model that clean unlearning gives: one copy without noise or symmetries, aggregated."""
        records = ("--forget", demo.forget, "--retain", demo.retain)
        publish = ("--kappa", 0, "--symmetries", "none", "--copies", 2)
        mpu("publish", demo.model, *publish, cwd=tmp_path)
        shown = mpu("unlearn", "copy_1", *records, *FORGETTING, *lora, "--show", 2, "--json", cwd=tmp_path)
        mpu("unlearn", "copy_2", *records, *FORGETTING, *lora, cwd=tmp_path)
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
        answers = [line for line in checked.err.splitlines() if line.startswith("  after:")]
        assert len(answers) == 2
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "unlearned")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "unlearned").eval()
        for answer, after, question in zip(answers, shown.json["answers"], questions, strict=True):
            assert f"  after:   {after['answer']}" in shown.err.splitlines()
            for text in (answer.removeprefix("  after:   "), after["answer"]):
                # The model babbles, so that some words are near ties, which rounding decides differently in each.
                assert short_of_greedy(model, tokenizer, question["question"], text) < 1e-2
        assert any(short_of_greedy(model, tokenizer, each["question"], each["answer"]) > 1 for each in questions)

    def test_another_copys_delta_is_refused(self, mpu: Callable, root: Path) -> None:
        mpu("publish", "base", "--copies", 2, cwd=root)
        mpu("unlearn", "copy_1", *BRIEF, cwd=root)
        mpu(
            "eval", "copy_2", "--benchmark", "qa", "--delta", "deltas/copy_1.safetensors",
            refused="not a delta of copy_2", cwd=root,
        )  # fmt: skip
