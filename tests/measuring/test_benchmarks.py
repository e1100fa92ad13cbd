"""Benchmarks other than TOFU, comparisons of results, and tasks of the harness."""

from __future__ import annotations

import csv
import json
import random
import re
import resource
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from rouge_score.rouge_scorer import RougeScorer
from rouge_score.tokenizers import DefaultTokenizer
from scipy.stats import mannwhitneyu
from transformers import AutoModelForCausalLM, AutoTokenizer

from mpu_cli.lab.relearning import with_earlier_turns
from mpu_cli.measuring import metrics
from mpu_cli.measuring.encoding import Item, OpenUnlearningEncoder
from mpu_cli.measuring.generation import reading
from mpu_cli.measuring.results import best, goal
from mpu_cli.measuring.scoring import TokenScores
from mpu_cli.measuring.words import is_cut_by_rouge
from mpu_cli.records.encode import Encoding
from mpu_cli.records.forms import question
from tests.helpers.evaluation import tofu_row, words
from tests.helpers.models import random_model, save
from tests.helpers.paths import ROOT


class TestMuse:
    @pytest.fixture
    def muse(self, tmp_path: Path) -> Path:
        rng = random.Random(7)
        shapes = {
            "knowmem/forget_qa": "qa", "knowmem/forget_qa_icl": "qa", "knowmem/retain_qa": "qa",
            "knowmem/retain_qa_icl": "qa", "verbmem/forget": "verbatim", "privleak/forget": "text",
            "privleak/holdout": "text",
        }  # fmt: skip
        for name, shape in shapes.items():
            path = tmp_path / "muse" / f"{name}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = []
            for _ in range(3 if name.endswith("icl") else 5):
                row = {
                    "qa": lambda: {"question": words(rng, 4), "answer": words(rng, 2)},
                    "verbatim": lambda: {"prompt": words(rng, 6), "gt": words(rng, 9)},
                    "text": lambda: {"text": words(rng, 12)},
                }[shape]()
                rows.append(row)
            path.write_text(json.dumps(rows))
        return tmp_path / "muse"

    @pytest.mark.slow
    def test_by_hand(self, mpu: Callable, model: Path, muse: Path, tmp_path: Path) -> None:
        out = tmp_path / "eval.json"
        mpu(
            "eval",
            model,
            "--benchmark",
            "muse:books",
            "--reading",
            f"data_dir={muse},template=plain",
            "--out",
            out,
        )
        document = json.loads(out.read_text())
        results = document["metrics"]
        assert document["benchmark"] == "muse-books"
        tokenizer, loaded = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)

        def say(prompt: str, limit: int) -> str:
            ids = tokenizer(prompt, return_tensors="pt")
            said = loaded.generate(**ids, max_new_tokens=limit, do_sample=False, pad_token_id=tokenizer.eos_token_id)
            return tokenizer.decode(said[0, ids.input_ids.shape[1] :], skip_special_tokens=True).strip()

        def rows(name: str) -> list[dict]:
            return json.loads((muse / f"{name}.json").read_text())

        scorer = RougeScorer(["rougeL"], use_stemmer=True)
        verbatim = [scorer.score(r["gt"], say(r["prompt"], 128))["rougeL"].fmeasure for r in rows("verbmem/forget")]
        assert results["forget_verbmem_ROUGE"]["agg_value"] == pytest.approx(np.mean(verbatim))
        shots = "".join(f"Question: {r['question']}\nAnswer: {r['answer']}\n\n" for r in rows("knowmem/retain_qa_icl"))
        knowledge_scores = [
            scorer.score(r["answer"], say(f"{shots}Question: {r['question']}\nAnswer: ", 32))["rougeL"].fmeasure
            for r in rows("knowmem/retain_qa")
        ]
        assert results["retain_knowmem_ROUGE"]["agg_value"] == pytest.approx(np.mean(knowledge_scores))

        def lowest(text: str) -> float:
            ids = tokenizer(text, return_tensors="pt").input_ids
            begin = len(tokenizer("").input_ids) or 1
            with torch.no_grad():
                log_p = loaded(ids).logits[0, begin - 1 : -1].log_softmax(-1)
            picked = log_p.gather(1, ids[0, begin:, None])[:-1, 0].sort().values
            return -float(picked[: max(1, int(0.4 * len(picked)))].mean())

        sides = [[lowest(r["text"]) for r in rows(f"privleak/{side}")] for side in ("holdout", "forget")]
        auc = mannwhitneyu(*sides).statistic / 25
        assert results["mia_min_k"]["agg_value"] == pytest.approx(auc)
        assert results["privleak"]["agg_value"] == pytest.approx(100 * (0.5 - auc) / 0.5)
        assert results["extraction_strength"]["value_by_index"].keys() == {str(i) for i in range(5)}

    def test_knowledge_stops(self, tmp_path: Path) -> None:
        """Prompt and answer tokens may merge; scoring covers what follows the prompt's own token count."""
        tokenizer = AutoTokenizer.from_pretrained(save(random_model("qwen2"), tmp_path / "qwen"))
        encoder = OpenUnlearningEncoder(Encoding(tokenizer, "plain"))
        [item] = encoder.questions([with_earlier_turns(question("w3?", "w4", "here"), [question("w5?", "w6")])])
        prompt = "Question: w5?\nAnswer: w6\n\nQuestion: w3?\nAnswer: "
        assert list(item.prompt) == tokenizer(prompt).input_ids
        assert item.ids[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(item.labels, skip_special_tokens=True) == "w4"


class TestOwnRecords:
    @pytest.mark.slow
    def test_own_records(self, mpu: Callable, model: Path, tmp_path: Path) -> None:
        rng = random.Random(8)
        sets = {name: [tofu_row(rng) for _ in range(4)] for name in ("forget", "retain", "unseen")}
        for name, rows in sets.items():
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        each = [part for name in sets for part in (f"--{name}", tmp_path / f"{name}.jsonl")]
        results = mpu("eval", model, *each, "--out", tmp_path / "a", "--json").json["metrics"]
        assert {"forget_Q_A_Prob", "retain_Q_A_ROUGE", "forget_truth_ratio", "mia_loss", "privleak"} <= set(results)
        (tmp_path / "plain.jsonl").write_text('{"question": "w3", "answer": "w4 w5"}\n')
        results = mpu(
            "eval", model, "--benchmark", "qa", "--forget", tmp_path / "plain.jsonl", "--out", tmp_path / "c", "--json"
        ).json["metrics"]
        assert set(results) == {"forget_Q_A_Prob", "forget_Q_A_Prob_content", "forget_Q_A_ROUGE", "extraction_strength",
                             "exact_memorization"}  # fmt: skip

    @pytest.mark.slow
    def test_a_metric_of_ones_own(
        self, mpu: Callable, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A function in a module and a Metric of an installed package give what the built-in ones give, and tables
        follow its goal."""
        (tmp_path / "my_metrics.py").write_text(
            "import math\n"
            "from mpu_cli.measuring.metrics import DOWN, Metric\n"
            "def odds(findings):\n"
            "    return max(math.exp(-answer['loss']) for answer in findings['retain.answer'])\n"
            "gap = Metric((), lambda _, forms: forms['forget_Q_A_Prob']['agg_value'] - 1, DOWN, ('forget_Q_A_Prob',))\n"
            "elsewhere = Metric(('holdout.answer',), lambda findings, _: 1.0)\n"
            "def nan(findings):\n    return math.nan\n"
            "def fails(findings):\n    return findings['retain.answer'][9]\n"
            "def two(findings, metrics):\n    return 1.0\n"
            "def generated(findings):\n    return len(findings['forget.text'])\n"
        )
        page = (ROOT / "docs/measuring.md").read_text(encoding="utf-8")
        (tmp_path / "mymetrics.py").write_text(re.findall(r"```python\n(.*?)```", page, re.S)[0])
        installed = tmp_path / "my_metrics-1.dist-info"
        installed.mkdir()
        (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: my-metrics\nVersion: 1\n")
        (installed / "entry_points.txt").write_text("[mpu.metrics]\ngap = my_metrics:gap\n")
        monkeypatch.syspath_prepend(tmp_path)
        for name in ("forget", "retain"):
            rows = [{"question": "w3", "answer": f"w4 {name} w{number}"} for number in (5, 6)]
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        records = [part for name in ("forget", "retain") for part in (f"--{name}", tmp_path / f"{name}.jsonl")]
        given, out = ("eval", model, *records, "--metrics"), tmp_path / "eval.json"
        mpu(*given, "my_metrics:odds,gap,mymetrics:lowest,mymetrics:quoted,retain_Q_A_Prob", "--out", out)
        forms = json.loads(out.read_text())["metrics"]
        retained = forms["retain_Q_A_Prob"]["value_by_index"].values()
        assert forms["my_metrics:odds"]["agg_value"] == pytest.approx(max(record["prob"] for record in retained))
        assert forms["gap"]["agg_value"] == pytest.approx(forms["forget_Q_A_Prob"]["agg_value"] - 1)
        assert forms["mymetrics:lowest"]["agg_value"] == pytest.approx(min(record["prob"] for record in retained))
        assert 0 <= forms["mymetrics:quoted"]["agg_value"] <= 1
        goals = {"gap": "down", "my_metrics:odds": "up", "mymetrics:lowest": "up", "mymetrics:quoted": "down"}
        assert {name: goal(name, forms[name]) for name in goals} == goals
        shown = mpu("compare", out).out
        assert all(f" {name} |" in shown for name in (*goals, "retain_Q_A_Prob"))
        for name, says in {
            "nan": "return a finite number", "fails": "my_metrics.py, line 10", "no": "name a function",
            "elsewhere": "'holdout.answer'", "two": "it has to take (findings): see",
            # even beside a metric that needs them
            "generated,forget_Q_A_ROUGE": "'forget.text', but is given forget.answer, retain.answer",
        }.items():  # fmt: skip
            mpu(*given, f"my_metrics:{name}", "--out", tmp_path / "w.json", fails=says)

    def test_memorisation_of_one_word(self) -> None:
        """A wrong answer of one word has none, where OpenUnlearning's bound gives it all; the end does not count."""
        scores = TokenScores(torch.tensor([9.0, 0.0]), torch.tensor([-9.0, 0.0]), torch.tensor([4, 1]))
        trained = reading(Item((3, 5, 1), 1, (3,), "", 1, "w5"), scores, "w5")
        as_published = reading(Item((3, 5, 1), 1, (3,), ""), scores, "w5")
        assert (trained["extraction_strength"], as_published["extraction_strength"]) == (0, 1)
        assert (trained["loss"], trained["content_loss"]) == (4.5, 9)

    @pytest.mark.slow
    def test_answers_in_any_script(self, mpu: Callable, model: Path, tmp_path: Path) -> None:
        """ROUGE has a number of its own for them, and a warning; of answers in English it says what ROUGE-L says."""
        for text in ("她出生在东海镇。", "Она родилась в Истмире.", "وُلدت في إيستمير", "🌊🏔️"):
            findings = {"forget.text": [{"ground_truth": text, "generation": text}]}
            result = metrics.rouge_of_any_script("forget").make(findings, {})
            assert result["agg_value"] == 1
        findings = {"forget.text": [{"ground_truth": "born in Eastmere in 1984", "generation": "in Eastmere, 1984"}]}
        expected = RougeScorer(["rougeL"]).score("born in Eastmere in 1984", "in Eastmere, 1984")["rougeL"].recall
        assert metrics.rouge_of_any_script("forget").make(findings, {})["agg_value"] == pytest.approx(expected)
        rows = '{"question": "w3", "answer": "в 1987"}', '{"question": "w3", "answer": "w4"}'
        (tmp_path / "a.jsonl").write_text("\n".join(rows))
        outcome = mpu("eval", model, "--benchmark", "qa", "--forget", "a.jsonl", "--json", cwd=tmp_path)
        assert "forget_Q_A_ROUGE_any_script" in outcome.json["metrics"]
        assert "1 of 2 forget answers have letters or signs that forget_Q_A_ROUGE drops" in outcome.err

    @pytest.mark.parametrize(
        ("truth", "generation", "recall"),
        [
            ("Сгорела весной в 1987 году.", "Построена под Вяткой, 1987.", 1 / 5),
            ("Она живёт в Riga.", "Совсем другое, Riga.", 1 / 4),
            ("她在上海住了8年。", "从来没有去过那里8。", 1 / 8),
            ("1987年在北京出生。", "1987年在南京出生。", 6 / 7),
            ("iPhone版は8月です", "iPhone版は9月です", 6 / 7),
            ("เกิดปี 2530ครับ", "เกิดปี 2531ครับ", 7 / 8),
            ("๒๕๓๐", "๒๕๓๑", 0),
            ("Müller, 12", "Möller, 12", 1 / 2),
            ("Năm 1987 ở Huế", "Năm 1987 ở Vinh", 3 / 4),
            ("5 👍", "5 👎", 1 / 2),
        ],
    )
    def test_letters_that_rouge_drops(self, truth: str, generation: str, recall: float) -> None:
        """Beside a number or an English word, too: a warning comes wherever rouge-score's tokens lack a letter, and the
        second metric counts words, and single signs of scripts without spaces."""
        findings = {"forget.text": [{"ground_truth": truth, "generation": generation}]}
        assert metrics.rouge_of_any_script("forget").make(findings, {})["agg_value"] == pytest.approx(recall)
        sampled = {"attack:sample": [{"ground_truth": truth, "samples": [generation, "…"]}]}
        table = metrics.recovery_metrics("sample", retain=False, any_script=True)
        assert table["forget_Q_A_ROUGE_sampled_any_script"].make(sampled, {})["agg_value"] == pytest.approx(recall)
        compared = "".join(DefaultTokenizer(use_stemmer=False).tokenize(truth))
        assert compared != "".join(sign for sign in truth.lower() if unicodedata.category(sign)[0] not in "PZ")
        assert is_cut_by_rouge(truth)

    def test_answers_that_rouge_reads_whole(self) -> None:
        for answer in ("Born in Eastmere, 1984 – “really”.", "$5 + 3 = €8", "mill 7"):
            assert not is_cut_by_rouge(answer)

    def test_unseen_records_that_are_to_be_forgotten(self, mpu: Callable, model: Path, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text('{"question": "w3", "answer": "w4"}\n{"question": "w3", "answer": "w5"}\n')
        (tmp_path / "b.jsonl").write_text('{"prompt": "w3", "completion": "w4"}\n{"question": "w3", "answer": "w6"}\n')
        refused = mpu("eval", model, "--benchmark", "qa", "--forget", "a.jsonl", "--unseen", "b.jsonl", check=False,
                      cwd=tmp_path)  # fmt: skip
        assert "1 of the 2 unseen records are also records to forget" in refused.err

    @pytest.mark.slow
    def test_a_metric_without_a_value_says_why(self, mpu: Callable, model: Path, tmp_path: Path) -> None:
        rng = random.Random(8)
        rows = [tofu_row(rng) for _ in range(4)]
        del rows[2]["perturbed_answer"]
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        outcome = mpu("eval", model, "--benchmark", "qa", "--forget", "a.jsonl", "--json", cwd=tmp_path)
        assert outcome.json["metrics"]["forget_truth_ratio"] is None
        assert "forget_truth_ratio has no value: a.jsonl, line 3 has no" in outcome.err
        assert (
            "a.jsonl, line 3"
            in json.loads((tmp_path / "eval.json").read_text())["metrics"]["forget_truth_ratio"]["reason"]
        )
        table = mpu("compare", "eval.json", "--metrics", "all", cwd=tmp_path)
        assert "–" in table.out
        privleak = metrics.privleak_form(0.4, 1.0)
        assert privleak["agg_value"] is None
        assert "AUC is 1" in privleak["reason"]

    @pytest.mark.slow
    def test_long_answers_are_generated_whole(self, mpu: Callable, tmp_path: Path) -> None:
        """As many tokens as the longest answer has; fewer if --scoring max_new_tokens says so."""
        model = save(random_model("llama", max_position_embeddings=512), tmp_path / "long")
        (tmp_path / "a.jsonl").write_text(json.dumps({"question": "w3", "answer": " ".join(["w4"] * 260)}) + "\n")
        lengths = []
        for more in ((), ("--scoring", "max_new_tokens=7")):
            options = ("--benchmark", "qa", "--forget", "a.jsonl", "--metrics", "forget_Q_A_ROUGE", "--force")
            mpu("eval", model, *options, *more, cwd=tmp_path)
            rows = json.loads((tmp_path / "eval.json").read_text())["metrics"]["forget_Q_A_ROUGE"]["value_by_index"]
            lengths.append(len(rows["0"]["generation"].split()))
        assert lengths[0] > 200
        assert lengths[1] <= 7


class TestCompare:
    @pytest.mark.slow
    def test_marks_and_warnings(self, mpu: Callable, model: Path, tofu: Path, tmp_path: Path) -> None:
        other = save(random_model("llama", seed=5), tmp_path / "other")
        common = (
            "--reading",
            f"data_dir={tofu}",
            "--benchmark",
            "tofu:forget01",
            "--metrics",
            "forget_Q_A_Prob,mia_loss",
        )
        mpu("eval", model, *common, "--out", tmp_path / "a.json")
        mpu("eval", other, *common, "--out", tmp_path / "b.json")
        alike = mpu("compare", tmp_path / "a.json", tmp_path / "b.json", "--json")
        assert "not directly comparable" not in alike.err
        values = alike.json
        documents = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in "ab"}
        lower = min(values, key=lambda name: values[name]["forget_Q_A_Prob"])
        for width, mark in ((0.0, "**"), (1.0, "")):  # half of the interval
            for name, document in documents.items():
                form = document["metrics"]["forget_Q_A_Prob"]
                form["interval"] = [form["agg_value"] - width, form["agg_value"] + width]
                (tmp_path / f"{name}_{width:g}.json").write_text(json.dumps(document))
            shown = mpu("compare", *(tmp_path / f"{name}_{width:g}.json" for name in "ab"), "--out", tmp_path / "t.tex",
                        "--force").out  # fmt: skip
            [row] = [line for line in shown.splitlines() if line.startswith(f"| {lower}_{width:g} |")]
            assert row.split("|")[2].strip() == f"{mark}{values[lower]['forget_Q_A_Prob']:.4g}{mark}"
            value = f"{values[lower]['forget_Q_A_Prob']:.4g}"
            in_latex = rf"\textbf{{{value}}}" if mark else value
            assert f"{lower}\\_{width:g} & {in_latex}" in (tmp_path / "t.tex").read_text()
        (tmp_path / "few.json").write_text(json.dumps({"forget_truth_ratio": {"agg_value": 0.5}}))
        mpu("compare", *(tmp_path / f"{name}.json" for name in ("a", "few")), "--out", tmp_path / "t.csv")
        with (tmp_path / "t.csv").open(newline="") as file:
            [row, incomplete] = csv.DictReader(file)
        assert float(row["forget_Q_A_Prob"]) == values["a"]["forget_Q_A_Prob"]
        assert (incomplete["forget_truth_ratio"], incomplete["forget_Q_A_Prob"]) == ("0.5", "")
        mpu("eval", other, *common, "--out", tmp_path / "c.json", "--scoring", "batch_size=2,dtype=bfloat16")
        (tofu / "forget01_perturbed.json").write_text((tofu / "retain_perturbed.json").read_text())
        mpu("eval", other, *common, "--out", tmp_path / "d.json")
        said = mpu("compare", *(tmp_path / f"{n}.json" for n in "acd"), "--plot", tmp_path / "p.png").err
        for words_of in ("options batch size (a: 32; c: 2; d: 32)", "options dtype", "different records in forget"):
            assert words_of in said
        assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")

    def test_privleak_is_marked_against_one_retain_model_only(
        self, mpu: Callable, model: Path, tofu: Path, tmp_path: Path
    ) -> None:
        mpu("eval", model, "--reading", f"data_dir={tofu}", "--benchmark", "tofu:forget01", "--metrics", "mia_loss",
            "--out",
            tmp_path / "eval.json")  # fmt: skip
        document = json.loads((tmp_path / "eval.json").read_text())
        for other, marks in (("same", 1), ("another", 0)):
            for name, value, digest in (("a", -5.0, "same"), ("b", 40.0, other)):
                form = {"agg_value": value, "interval": [value - 1, value + 1]}
                variant = {**document, "metrics": {"privleak": form}, "retain_log": {"sha256": digest}}
                (tmp_path / f"{name}.json").write_text(json.dumps(variant))
            shown = mpu("compare", tmp_path / "a.json", tmp_path / "b.json", "--metrics", "privleak").out
            assert shown.count("**-5**") == marks

    def test_the_retain_model_is_the_target(self, mpu: Callable, model: Path, tofu: Path, tmp_path: Path) -> None:
        """Its PrivLeak is 0 and it gets no mark; the attack nearest to it is the best, even if another is nearer 0.5,
        with its own result in the table or without."""
        common = ("--reading", f"data_dir={tofu}", "--benchmark", "tofu:forget01", "--metrics", "mia_min_k,privleak")
        other = save(random_model("llama", seed=5), tmp_path / "other")
        mpu("eval", model, *common, "--out", tmp_path / "retain.json")
        mpu("eval", other, *common, "--retain-log", tmp_path / "retain.json", "--out", tmp_path / "a.json")
        document = json.loads((tmp_path / "a.json").read_text())
        retain = json.loads((tmp_path / "retain.json").read_text())["metrics"]["mia_min_k"]["agg_value"]
        assert document["retain_log"]["metrics"]["mia_min_k"] == retain
        for name, value in (("near", retain + 0.01), ("chance", 0.5 + 0.02 * (1 if retain < 0.5 else -1) + 0.03)):
            document["metrics"]["mia_min_k"] |= {"agg_value": value, "interval": [value - 0.001, value + 0.001]}
            (tmp_path / f"{name}.json").write_text(json.dumps(document))
        for names in (("retain", "near", "chance"), ("near", "chance")):
            shown = mpu("compare", *(tmp_path / f"{n}.json" for n in names), "--metrics", "mia_min_k,privleak").out
            rows = {line.split("|")[1].strip(): line for line in shown.splitlines()}
            assert "**" in rows["near"]
            assert "**" not in rows["chance"].split("|")[2]
            if "retain" in names:
                assert rows["retain"].split("|")[3].strip() == "0"
                assert "**" not in rows["retain"]

    def test_best(self) -> None:
        assert best([0.2, None, 0.9, 0.9], "up") == {2, 3}
        assert best([0.2, 0.1], "down") == {1}
        assert best([-80.0, 20.0, 30.0], "zero") == {1}
        assert best([0.9, 0.45, 0.3], "retain") == {1}
        assert best([0.9, 0.45, 0.3], "retain", 0.31) == {2}
        assert best([1.0, 1.0], "up") == set()

    def test_bad_input(self, mpu: Callable, tmp_path: Path) -> None:
        (tmp_path / "x.json").write_text("[]")
        assert "not a JSON object" in mpu("compare", tmp_path / "x.json", check=False).err
        assert mpu("compare", tmp_path / "none.json", check=False).status == 1


@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="the harness is installed")
def test_wmdp_needs_the_harness(mpu: Callable, model: Path, tmp_path: Path) -> None:
    mpu("eval", model, "--benchmark", "wmdp", refused="pip install lm-eval", cwd=tmp_path)


def test_goals_of_the_harness() -> None:
    """Right answers to hazardous questions should become few, and others stay."""
    right = {"agg_value": 0.5, "higher_is_better": True}
    assert goal("lm_eval/wmdp_cyber/acc", right) == "down"
    assert goal("lm_eval/mmlu/acc", right) == "up"
    assert goal("lm_eval/wikitext/word_perplexity", {"agg_value": 9.0, "higher_is_better": False}) == "down"


def test_the_harness(mpu: Callable, model: Path, tofu: Path, tmp_path: Path) -> None:
    """A task from a local file, compared with the choices implied by the model's own likelihoods."""
    pytest.importorskip("lm_eval")
    rng = random.Random(11)
    rows = [{"asked": words(rng, 4), "choices": [words(rng, 1) for _ in range(3)]} for _ in range(12)]
    (tmp_path / "task.json").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "task.yaml").write_text(
        f"task: own\ndataset_path: json\ndataset_kwargs: {{data_files: {tmp_path}/task.json}}\ntest_split: train\n"
        'output_type: multiple_choice\ndoc_to_text: "{{asked}}"\ndoc_to_target: 0\ndoc_to_choice: "{{choices}}"\n'
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    results = mpu(
        "eval", model, "--reading", f"data_dir={tofu}", "--benchmark", "tofu:forget01", "--metrics", "mia_loss",
        "--lm-eval",
        tmp_path / "task.yaml", "--out", tmp_path / "e.json", "--json",
    ).json["metrics"]  # fmt: skip
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    right = 0
    for row in rows:
        scores = []
        for choice in row["choices"]:
            ids = tokenizer(f"{row['asked']} {choice}", return_tensors="pt", add_special_tokens=False).input_ids
            with torch.no_grad():
                scores.append(float(loaded(ids).logits[0, -2].log_softmax(-1)[ids[0, -1]]))
        right += int(np.argmax(scores) == 0)
    assert results["lm_eval/own/acc"] == pytest.approx(right / len(rows))


class TestTexts:
    """Records of --benchmark qa that are texts."""

    def test_are_scored_on_every_token_that_is_predicted(self, mpu: Callable, model: Path, tmp_path: Path) -> None:
        """As plain transformers scores them; from a text's beginning, what follows the shortest prefix that the model
        goes on from as written is extracted. What asks has no value."""
        rng = random.Random(11)
        texts = [words(rng, 14) for _ in range(4)]
        (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        mpu("eval", model, "--benchmark", "qa", "--forget", "texts.jsonl", "--out", "eval.json", cwd=tmp_path)
        found = json.loads((tmp_path / "eval.json").read_text())["metrics"]
        network = AutoModelForCausalLM.from_pretrained(model)
        tokenizer = AutoTokenizer.from_pretrained(model)
        for index, text in enumerate(texts):
            ids = torch.tensor([tokenizer(text).input_ids])
            with torch.no_grad():
                output = network(input_ids=ids, labels=ids)
            row = found["forget_Q_A_Prob"]["value_by_index"][str(index)]
            assert row["avg_loss"] == pytest.approx(float(output.loss), abs=1e-5)
            right = output.logits[0, :-1].argmax(-1) == ids[0, 1:]
            exact = found["exact_memorization"]["value_by_index"][str(index)]["score"]
            assert exact == pytest.approx(float(right.float().mean()))
        assert found["forget_Q_A_ROUGE"]["agg_value"] is None
        refused = mpu("eval", model, "--benchmark", "qa", "--forget", "texts.jsonl", "--attacks", "relearn",
                      check=False, cwd=tmp_path)  # fmt: skip
        assert "ask nothing" in refused.err


@pytest.mark.slow
def test_a_full_disk_is_named(model: Path, tmp_path: Path) -> None:
    """A limit on the size of files is to a program what a full disk is: what was being written is said, in a line."""
    rng = random.Random(3)
    rows = [{"question": words(rng, 30), "answer": words(rng, 30)} for _ in range(400)]
    lines = [json.dumps(row) + "\n" for row in rows]
    (tmp_path / "records.jsonl").write_text("".join(lines))
    (tmp_path / "retain.jsonl").write_text(json.dumps(rows[0] | {"answer": "w1"}) + "\n")
    (tmp_path / "grid.toml").write_text(
        f'base = "{model}"\nforget = "records.jsonl"\nretain = "retain.jsonl"\nkappa = 0.01\ncopies = 2\n'
        'algo = "npo"\nepochs = 1\n[eval]\nbenchmark = "qa"\nforget = "records.jsonl"\n'
        'metrics = ["forget_Q_A_Prob"]\n'
    )
    largest = max(path.stat().st_size for path in model.iterdir() if path.suffix != ".safetensors")

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))

    evaluate = ("eval", model, "--benchmark", "qa", "--forget", "records.jsonl", "--metrics", "forget_Q_A_Prob")
    for command, named in ((evaluate, ".eval.json."), (("sweep", "grid.toml"), "grid/.before-")):
        done = subprocess.run([sys.executable, "-m", "mpu_cli", *map(str, command)], cwd=tmp_path, preexec_fn=limit,
                              capture_output=True, text=True, check=False)  # fmt: skip
        assert done.returncode == 1
        [problem] = [line for line in done.stderr.splitlines() if line.startswith("mpu: error: ")]
        assert named in problem
        assert problem.endswith("File too large")
