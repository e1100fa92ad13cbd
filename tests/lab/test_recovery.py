"""``mpu eval --attacks``: what brings back what was forgotten, each against an independent computation."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rouge_score.rouge_scorer import RougeScorer
from transformers import AutoModelForCausalLM, AutoTokenizer

from mpu_cli.lab.relearning import CONTEXT, REPHRASINGS, round_weights
from mpu_cli.options.unlearning import SYSTEM_PROMPT
from tests.helpers.evaluation import words
from tests.helpers.models import random_model, save


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A model, and records that it never saw: seven to forget and five to keep."""
    save(random_model("llama"), tmp_path / "model")
    rng = random.Random(0)
    for name, count in (("forget", 7), ("retain", 5)):
        rows = [{"question": words(rng, 6), "answer": words(rng, rng.randrange(3, 9))} for _ in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def rows_of(root: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (root / f"{name}.jsonl").read_text().splitlines()]


def measure(mpu: Callable, root: Path, attacks: str, *more: object) -> dict:
    out = root / "eval.json"
    common = ("--benchmark", "qa", "--forget", root / "forget.jsonl", "--retain", root / "retain.jsonl")
    mpu("eval", root / "model", *common, "--attacks", attacks, "--metrics", "forget_Q_A_Prob", "--out", out, *more)
    return json.loads(out.read_text())["metrics"]


class Alone:
    """A model by itself, asked without mpu."""

    def __init__(self, folder: Path):
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def loss(self, turns: list[tuple[str, str]], answer: str) -> torch.Tensor:
        """Mean loss per token of the answer to the last of ``turns``, whose own answer is not read."""
        *earlier, (question, _) = turns
        messages = [{"role": "system", "content": SYSTEM_PROMPT}]
        for prior_question, prior_answer in earlier:
            messages += [{"role": "user", "content": prior_question}, {"role": "assistant", "content": prior_answer}]
        messages.append({"role": "user", "content": question})
        template_options = {"tokenize": True, "return_dict": False}
        prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, **template_options)
        token_ids = self.tokenizer.apply_chat_template(
            [*messages, {"role": "assistant", "content": answer}], **template_options
        )
        if token_ids[-1] != self.tokenizer.eos_token_id:
            token_ids = [*token_ids, self.tokenizer.eos_token_id]
        log_p = self.model(torch.tensor([token_ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        return -log_p.gather(1, torch.tensor(token_ids[len(prompt) :])[:, None]).mean()

    @torch.no_grad()
    def probability(self, question: str, answer: str, earlier: list[dict] = ()) -> float:
        turns = [(row["question"], row["answer"]) for row in earlier]
        return math.exp(-float(self.loss([*turns, (question, "")], answer)))


def probabilities(form: dict) -> list[float]:
    return [row["prob"] for row in form["value_by_index"].values()]


def test_questions_in_other_words(mpu: Callable, root: Path) -> None:
    """The likeliest of all rephrasings counts, a record's own ones too."""
    rows = rows_of(root, "forget")
    paraphrased_rows = [{**row, "paraphrased_question": [row["question"], f"w5 {row['question']}"]} for row in rows]
    (root / "forget.jsonl").write_text("".join(json.dumps(row) + "\n" for row in paraphrased_rows))
    form = measure(mpu, root, "paraphrase")["forget_Q_A_Prob_rephrased"]
    reference = Alone(root / "model")
    expected = []
    for row in paraphrased_rows:
        questions = [*(phrase.format(row["question"]) for phrase in REPHRASINGS), *row["paraphrased_question"]]
        expected.append([reference.probability(question, row["answer"]) for question in questions])
    actual_probs = [row["probs"] for row in form["value_by_index"].values()]
    assert [pytest.approx(row, rel=1e-4) for row in expected] == actual_probs
    assert form["agg_value"] == pytest.approx(sum(map(max, expected)) / len(expected), rel=1e-4)
    assert form["interval"][0] < form["agg_value"] < form["interval"][1]


def test_other_records_in_context(mpu: Callable, root: Path) -> None:
    forms = measure(mpu, root, "context")
    reference = Alone(root / "model")
    forget, retain = rows_of(root, "forget"), rows_of(root, "retain")
    for name, sets in (("in_context", forget), ("in_retain_context", retain)):
        expected = []
        for i, row in enumerate(forget):
            start = i + (sets is forget)  # never the record itself
            earlier = [sets[(start + step) % len(sets)] for step in range(CONTEXT)]
            assert row not in earlier
            expected.append(reference.probability(row["question"], row["answer"], earlier))
        assert probabilities(forms[f"forget_Q_A_Prob_{name}"]) == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_the_best_of_several_answers(mpu: Callable, root: Path) -> None:
    """The stored answer has the stored score, and a model that knows the records says them in every sample."""
    forms = [measure(mpu, root, "sample:3", "--force") for _ in range(2)]
    assert forms[0] == forms[1]  # drawn from a fixed seed
    form = forms[0]["forget_Q_A_ROUGE_sampled"]
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    for row in form["value_by_index"].values():
        assert row["rougeL_recall"] == scorer.score(row["ground_truth"], row["generation"])["rougeL"].recall
    single_sample = measure(mpu, root, "sample:1", "--force")["forget_Q_A_ROUGE_sampled"]["agg_value"]
    many_samples = measure(mpu, root, "sample:40", "--force")["forget_Q_A_ROUGE_sampled"]["agg_value"]
    assert single_sample < many_samples
    rows = root / "forget.jsonl", root / "retain.jsonl"
    learning = ("--epochs", 60, "--lr", 1e-2, "--batch-size", 12, "--out", root / "taught")
    mpu("finetune", root / "model", "--data", rows[0], "--data", rows[1], *learning)
    (root / "model").rename(root / "untaught")
    (root / "taught").rename(root / "model")
    taught = measure(mpu, root, "sample:2", "--force")
    assert taught["forget_Q_A_ROUGE_sampled"]["agg_value"] > 0.95


class TestRounding:
    @pytest.mark.slow
    def test_levels(self) -> None:
        """Each group of a row lies on 2^bits − 1 levels, at most half a step from where it was; rounding again changes
        nothing; embeddings, head and vectors stay."""
        for bits, group, size in ((8, None, 48), (4, 16, 16)):
            before, model = random_model("llama"), random_model("llama")
            round_weights(model, bits, group)
            again = random_model("llama")
            again.load_state_dict(model.state_dict())
            round_weights(again, bits, group)
            named = dict(model.named_parameters())
            for name, weight in before.named_parameters():
                torch.testing.assert_close(dict(again.named_parameters())[name], named[name])
                if "embed" in name or "lm_head" in name or weight.ndim < 2:
                    assert torch.equal(named[name], weight)
                    continue
                for row, rounded_row in zip(weight.detach(), named[name].detach(), strict=True):
                    width = size if len(row) % size == 0 else len(row)
                    for part, rounded in zip(row.split(width), rounded_row.split(width), strict=True):
                        step = part.abs().max() / (2 ** (bits - 1) - 1)
                        assert (part - rounded).abs().max() <= step / 2 * (1 + 1e-5)
                        assert len(rounded.unique()) <= 2**bits - 1

    def test_a_model_of_such_weights_keeps_its_answers(self, mpu: Callable, root: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(root / "model")
        round_weights(model, 8, None)
        model.save_pretrained(root / "model")
        forms = measure(mpu, root, "quantise")
        exact, int8 = (probabilities(forms[f"forget_Q_A_Prob{kind}"]) for kind in ("", "_int8"))
        assert int8 == pytest.approx(exact, rel=1e-4)
        assert probabilities(forms["forget_Q_A_Prob_int4"]) != pytest.approx(exact, rel=1e-3)


@pytest.mark.slow
def test_relearning(mpu: Callable, root: Path) -> None:
    """The curve is that of plain AdamW on the first half, measured on the second; the model on disk stays."""
    weights = (root / "model" / "model.safetensors").read_bytes()
    forms = measure(mpu, root, "relearn:3:1e-2,quantise,context")
    form = forms["forget_Q_A_Prob_relearned"]
    reference, rows = Alone(root / "model"), rows_of(root, "forget")
    relearned_rows, held_out_rows = rows[:3], rows[3:]

    def mean_probability() -> float:
        return sum(reference.probability(row["question"], row["answer"]) for row in held_out_rows) / len(held_out_rows)

    expected = [mean_probability()]
    optimizer = torch.optim.AdamW(reference.model.parameters(), lr=1e-2)
    for _step in range(3):
        optimizer.zero_grad()
        losses = [reference.loss([(row["question"], "")], row["answer"]) for row in relearned_rows]
        sizes = [len(row["answer"].split()) + 1 for row in relearned_rows]
        (sum(a * n for a, n in zip(losses, sizes, strict=True)) / sum(sizes)).backward()
        optimizer.step()
        expected.append(mean_probability())
    assert [point["steps"] for point in form["curve"]] == [0, 1, 2, 3]
    assert [point["agg_value"] for point in form["curve"]] == pytest.approx(expected, rel=2e-3)
    assert form["curve"][0]["agg_value"] == pytest.approx(
        sum(probabilities(forms["forget_Q_A_Prob"])[3:]) / 4, rel=1e-5
    )
    assert form["agg_value"] == form["curve"][-1]["agg_value"]
    assert weights == (root / "model" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_after_an_attack_the_reference_and_the_delta_are_right(mpu: Callable, root: Path) -> None:
    """Attacks that change weights leave other metrics as they are without them."""
    common = ("--benchmark", "qa", "--forget", root / "forget.jsonl", "--unseen", root / "retain.jsonl")
    more = ("--metrics", "mia_reference,mia_gradnorm,forget_Q_A_ROUGE", "--reference-model", root / "model")
    run_metrics = []
    for attacks in ((), ("--attacks", "relearn:20:1e-2,quantise,sample")):
        out = root / f"{len(attacks)}.json"
        mpu("eval", root / "model", *common, *more, *attacks, "--out", out)
        run_metrics.append(json.loads(out.read_text())["metrics"])
    assert run_metrics[0].items() <= run_metrics[1].items()
    assert run_metrics[1]["mia_reference"]["agg_value"] == 0.5  # the model is its own reference


@pytest.mark.slow
def test_a_retain_log_of_other_attacks_is_told(mpu: Callable, root: Path) -> None:
    """What a stronger attack brings back is no measure for a weaker one."""
    common = ("--benchmark", "qa", "--forget", root / "forget.jsonl", "--metrics", "forget_Q_A_Prob")
    log = root / "log.json"
    mpu("eval", root / "model", *common, "--attacks", "relearn:2:1e-3", "--out", log)
    for lr, is_told in ((1e-3, False), (1e-4, True)):
        out = root / f"{lr}.json"
        said = mpu(
            "eval", root / "model", *common, "--attacks", f"relearn:2:{lr}", "--retain-log", log, "--out", out
        ).err
        assert ("its attacks were others (relearn_lr 0.001 → 0.0001)" in said) == is_told


@pytest.mark.slow
def test_a_delta_is_attacked_with_the_copy(mpu: Callable, root: Path) -> None:
    """A copy with its delta gives what the sum of both gives."""
    mpu("publish", "model", "--kappa", 0, "--copies", 1, "--symmetries", "none", cwd=root)
    training = (
        "--algo",
        "graddiff",
        "--lr",
        1e-2,
        "--epochs",
        2,
        "--forget",
        "forget.jsonl",
        "--retain",
        "retain.jsonl",
    )
    mpu("unlearn", "copy_1", *training, cwd=root)
    mpu("aggregate", "deltas", "--keys", "keys.bin", cwd=root)
    eval_options = (
        "--benchmark",
        "qa",
        "--forget",
        "forget.jsonl",
        "--attacks",
        "quantise,relearn:2",
    )
    for name, model_arguments in (
        ("both", ("copy_1", "--delta", "deltas/copy_1.safetensors")),
        ("sum", ("unlearned",)),
    ):
        mpu("eval", *model_arguments, *eval_options, "--metrics", "forget_Q_A_Prob", "--out", f"{name}.json", cwd=root)
    with_delta, summed = (json.loads((root / f"{name}.json").read_text())["metrics"] for name in ("both", "sum"))
    for name, form in with_delta.items():
        assert probabilities(form) == pytest.approx(probabilities(summed[name]), rel=1e-3), name


@pytest.mark.slow
def test_a_picture_of_relearning(mpu: Callable, root: Path) -> None:
    measure(mpu, root, "relearn", "--plot", root / "curve.html")
    assert "Relearning" in (root / "curve.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--attacks", "guess"), "--attacks guess: must be one of"),
        (("--attacks", "relearn", "--scoring", "dtype=bfloat16"), "use --scoring dtype=float32"),
        (("--attacks", "relearn:20:0"), "0: must be a number above 0"),
        (("--attacks", "relearn:0"), "0: must be a whole number of at least 1"),
        (("--attacks", "relearn:2.5"), "2.5: must be a whole number of at least 1"),
        (("--attacks", "sample:8:9"), "too many numbers"),
        (("--attacks", "relearn", "--endpoint", "http://127.0.0.1:9/v1", "--endpoint-model", "x"), "needs the model's"),
    ],
)
def test_refusals(mpu: Callable, root: Path, arguments: tuple, complaint: str) -> None:
    common = ("--benchmark", "qa", "--forget", root / "forget.jsonl", "--out", root / "eval.json")
    refused = mpu("eval", root / "model", *common, *arguments, check=False)
    assert refused.status in (1, 2)
    assert complaint in refused.err
    assert not (root / "eval.json").exists()


def test_not_for_texts(mpu: Callable, root: Path) -> None:
    mpu("eval", root / "model", "--benchmark", "muse", "--attacks", "relearn", fails="not for --benchmark muse")
