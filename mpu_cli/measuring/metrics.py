"""Turns a model's scores and answers on a benchmark into OpenUnlearning's metrics, in their format.

``Findings`` are the results of the passes over the model, by key: ``SPLIT.answer`` (an AnswerReading for each record),
``SPLIT.paraphrased`` and ``SPLIT.perturbed`` (mean losses), ``SPLIT.text`` (an Answer), ``gradnorm``, ``reference`` and
what each attack of ``relearning`` found. They are plain JSON, so that an interrupted run can resume from a file of
them. A metric names the keys it needs and the metrics it is computed from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial, wraps
from numbers import Real
from statistics import fmean
from typing import TYPE_CHECKING, Any, ParamSpec

import torch
from transformers import PreTrainedModel

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.files.reader import worker_pool
from mpu_cli.heap import suit_heap_to
from mpu_cli.measuring.encoding import Item
from mpu_cli.measuring.scoring import ADVICE, Advance, logits_of, passes_at_once, weights_of
from mpu_cli.measuring.words import AnyScript
from mpu_cli.model.device import memory_in_mind
from mpu_cli.observer import SILENT
from mpu_cli.plugins import load_plugin, reporting_errors

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer

# The direction of improvement; RETAIN is near the value of a model that never saw the forget set, for attacks.
UP, DOWN, ZERO, RETAIN = "up", "down", "zero", "retain"
EPSILON = 1e-10  # OpenUnlearning's guard against division by zero
CHANCE = 0.5  # AUC of random guessing
SIDES = ("forget", "holdout")  # the splits that membership inference compares: members and non-members
GRADIENTS, REFERENCE = "gradnorm", "reference"  # keys of findings that belong to both

Findings = Mapping[str, Any]
MetricResult = dict[str, Any]  # {"agg_value": …, "value_by_index": {"0": {…}}}, as OpenUnlearning writes a metric
Forms = Mapping[str, MetricResult]  # of the metrics that come before, by name


@dataclass(frozen=True)
class Metric:
    """A metric, computed from findings and from other metrics."""

    needs: tuple[str, ...]  # keys of Findings
    make: Callable[[Findings, Forms], MetricResult]  # from findings and the metrics before it
    goal: str = UP  # the direction in which its value should go: UP, DOWN, ZERO or RETAIN
    dependencies: tuple[str, ...] = ()  # metrics, which stand before it in its table
    # Raises MpuError, before any pass over the model, for a retain log that the metric cannot be made with.
    check: Callable[[], object] = lambda: None
    says: str = ""  # its definition, for the page of metrics


MetricTable = dict[str, Metric]  # by name
Arguments = ParamSpec("Arguments")


def with_definition(maker: Callable[Arguments, Metric]) -> Callable[Arguments, Metric]:
    """Makes the docstring of a function that returns a metric the metric's definition."""

    @wraps(maker)
    def metric_with_definition(*arguments: Arguments.args, **named: Arguments.kwargs) -> Metric:
        return replace(maker(*arguments, **named), says=" ".join((maker.__doc__ or "").split()))

    return metric_with_definition


def imported_metric(name: str, built_in: Collection[str], splits: Iterable[str]) -> Metric:
    """A metric of an installed package, by its entry point in ``mpu.metrics``, or of ``module:function``: a Metric, or
    a function that computes the value from the ``SPLIT.answer`` findings of all ``splits``; more should be better."""
    label = f"--metrics {name}"
    imported = load_plugin("metric", name, "--metrics", built_in)
    is_metric = isinstance(imported, Metric)
    if isinstance(imported, Metric):
        metric = imported
    elif callable(imported):
        metric = Metric(tuple(f"{split}.answer" for split in splits), imported)
    else:
        raise UsageError(f"{label}: neither a Metric nor a function that returns a number")
    compute: Callable[..., object] = reporting_errors(
        label, metric.make, "findings, metrics" if is_metric else "findings"
    )

    class NeededFindings(dict[str, Any]):
        def __missing__(self, key: str) -> object:
            raise MpuError(
                f"{label}: reads the findings {key!r}, but is given {', '.join(metric.needs) or 'none'}",
                "generated answers (forget.text) and others are measured for a Metric that has them in its needs",
            )

    def make(findings: Findings, forms: Forms) -> MetricResult:
        needed = NeededFindings({key: findings[key] for key in metric.needs})
        result = compute(needed, forms) if is_metric else compute(needed)
        form = dict(result) if isinstance(result, Mapping) else {"agg_value": result}
        value = form.get("agg_value")
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise MpuError(f"{label}: returned {result!r:.80}", "return a finite number, or a form with agg_value")
        return {**form, "agg_value": float(value), "goal": metric.goal}  # tables do not import it

    return replace(metric, make=make)


def by_index(rows: Sequence[Mapping[str, object]], agg_value: float) -> MetricResult:
    return {"agg_value": agg_value, "value_by_index": {str(i): dict(row) for i, row in enumerate(rows)}}


def _mean_form(rows: Sequence[Mapping[str, Any]], field: str) -> MetricResult:
    """The ``rows`` of all records, and the mean of ``field`` over them."""
    return by_index(rows, fmean([row[field] for row in rows]))


def _of_records(key: str, row_of: Callable[[Any], Mapping[str, Any]], field: str, goal: str) -> Metric:
    """The mean of ``field`` over the rows that ``row_of`` makes of the findings of each record."""
    return Metric((key,), lambda findings, _: _mean_form([row_of(finding) for finding in findings[key]], field), goal)


def _of_knowledge(split: str) -> str:
    """The goal of a model's knowledge of a split: down for the forget set, up for everything else."""
    return DOWN if split.startswith("forget") or split == "verbmem" else UP


def _probability(loss: float) -> dict[str, float]:
    return {"prob": math.exp(-loss), "avg_loss": loss}


@with_definition
def probability(split: str) -> Metric:
    """exp(−ℓ), ℓ the mean loss over the tokens of the true answer; the mean over records (Maini et al. 2024, arXiv
    2401.06121)."""
    return _of_records(
        f"{split}.answer", lambda answer: _probability(answer["loss"]), "prob", goal=_of_knowledge(split)
    )


@with_definition
def content_probability(split: str) -> Metric:
    """exp(−ℓ), ℓ the mean loss over the tokens of the true answer without its end, which a model that knows nothing
    of it may predict; the mean over records."""
    return _of_records(
        f"{split}.answer", lambda answer: _probability(answer["content_loss"]), "prob", goal=_of_knowledge(split)
    )


ASKS_NOTHING = "some of the records are texts, which ask nothing"


def unavailable(reason: str) -> Metric:
    """A metric that cannot be computed here, and why."""
    return Metric((), lambda _findings, _forms: no_value(reason))


def no_value(reason: str) -> MetricResult:
    """The form of a metric that has no value, and why."""
    return {"agg_value": None, "reason": reason}


@with_definition
def paraphrased_probability(split: str) -> Metric:
    """exp(−ℓ), ℓ the mean loss over the tokens of the paraphrased answer; the mean over records."""
    return _of_records(f"{split}.paraphrased", _probability, "prob", goal=_of_knowledge(split))


@with_definition
def perturbed_probability(split: str) -> Metric:
    """exp(−ℓ), ℓ the mean loss over the tokens of a wrong answer; the mean over those of a record, then over
    records."""
    key = f"{split}.perturbed"

    def make(findings: Findings, _: object) -> MetricResult:
        rows = [{"prob": [math.exp(-loss) for loss in losses], "avg_loss": list(losses)} for losses in findings[key]]
        return by_index(rows, fmean([fmean(row["prob"]) for row in rows]))

    return Metric((key,), make, DOWN)


@with_definition
def normalised_probability(right: str, wrong: str) -> Metric:
    """p(right)/(p(right) + Σ p(wrong)), p = exp(−ℓ) of the true and of each wrong answer; the mean over records."""

    def make(_: Findings, forms: Forms) -> MetricResult:
        wrongs = forms[wrong]["value_by_index"]
        rows = []
        for index, row in forms[right]["value_by_index"].items():
            p = row["prob"]
            rows.append({"prob": p / (p + math.fsum(wrongs[index]["prob"]) + EPSILON)})
        return _mean_form(rows, "prob")

    return Metric((), make, dependencies=(right, wrong))


@with_definition
def truth_ratio(right: str, wrong: str, *, forget: bool) -> Metric:
    """r = exp(−mean ℓ of the wrong answers)/exp(−ℓ of the right one) for each question; over the forget set the mean
    of min(r, 1/r), near 1 if the model distinguishes right from wrong no better than chance; elsewhere the mean of
    max(0, 1 − r)."""

    def make(_: Findings, forms: Forms) -> MetricResult:
        wrongs = forms[wrong]["value_by_index"]
        rows = []
        for index, row in forms[right]["value_by_index"].items():
            ratio = math.exp(-fmean(wrongs[index]["avg_loss"])) / (math.exp(-row["avg_loss"]) + EPSILON)
            rows.append({"score": ratio})
        ratios = [row["score"] for row in rows]
        terms = [min(r, 1 / (r + EPSILON)) for r in ratios] if forget else [max(0.0, 1 - r) for r in ratios]
        return by_index(rows, fmean(terms))

    return Metric((), make, dependencies=(right, wrong))


@cache
def _rouge_scorer(*, any_script: bool) -> RougeScorer:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rouge1", "rougeL"], use_stemmer=True, tokenizer=AnyScript() if any_script else None)


@with_definition
def rouge(split: str, score: str) -> Metric:
    """ROUGE-L of the model's own greedy answer against the true one, with stemming: recall for questions, F1 for MUSE;
    the mean over records."""

    def row(answer: Mapping[str, str]) -> dict[str, object]:
        scores = _rouge_scorer(any_script=False).score(answer["ground_truth"], answer["generation"])
        return {
            "rouge1_recall": scores["rouge1"].recall,
            "rougeL_f1": scores["rougeL"].fmeasure,
            "rougeL_recall": scores["rougeL"].recall,
            **answer,
        }

    return _of_records(f"{split}.text", row, score, goal=_of_knowledge(split))


@with_definition
def rouge_of_any_script(split: str) -> Metric:
    """ROUGE-L recall of the model's own greedy answer in answers of any script: words of letters, and single signs of
    scripts without spaces and of emoji, where OpenUnlearning's number knows letters of English and digits only. Without
    stemming; the mean over records."""

    def row(answer: Mapping[str, str]) -> dict[str, float]:
        score = _rouge_scorer(any_script=True).score(answer["ground_truth"], answer["generation"])["rougeL"]
        return {"rougeL_recall": score.recall, "rougeL_f1": score.fmeasure}

    return _of_records(f"{split}.text", row, "rougeL_recall", goal=_of_knowledge(split))


@with_definition
def extraction_strength(split: str) -> Metric:
    """1 − k/L of an answer of L tokens, k the shortest prefix after which the model's likeliest token is right at every
    place (Carlini et al. 2021), the end of its turn aside; on TOFU and MUSE k is L − 1 at most, as OpenUnlearning has
    it; the mean over records."""
    return _of_records(f"{split}.answer", lambda answer: {"score": answer["extraction_strength"]}, "score", goal=DOWN)


@with_definition
def exact_memorization(split: str) -> Metric:
    """the share of an answer's tokens, the end of its turn aside, that are the model's likeliest (Tirumala et al.
    2022); the mean over records."""
    return _of_records(f"{split}.answer", lambda answer: {"score": answer["exact_memorization"]}, "score", goal=DOWN)


def membership() -> MetricTable:
    """Membership inference: scores of the forget set and of unseen records (``SIDES``).

    The AUC is 1 if the forget record is the likelier one in every pair.
    """
    answers = tuple(f"{side}.answer" for side in SIDES)

    def auc(by: str, needs: tuple[str, ...], scores: Callable[[Findings, str], list[float]]) -> Metric:
        def make(findings: Findings, _: object) -> MetricResult:
            from sklearn.metrics import roc_auc_score

            forget, holdout = (scores(findings, side) for side in SIDES)
            # All scores are lower for members, such as losses, so that the unseen records are the positive class.
            labels = [0] * len(forget) + [1] * len(holdout)
            value = float(roc_auc_score(labels, [*forget, *holdout]))
            sides = {
                side: _mean_form([{"score": score} for score in scores_of_side], "score")
                for side, scores_of_side in zip(SIDES, (forget, holdout), strict=True)
            }
            return {**sides, "auc": value, "agg_value": value}

        return Metric(needs, make, RETAIN, says=f"AUC between forgotten and unseen records by {by}")

    def of_answers(by: str, score: Callable[[Mapping], float]) -> Metric:
        return auc(by, answers, lambda findings, side: [score(answer) for answer in findings[f"{side}.answer"]])

    def beyond_reference(findings: Findings, side: str) -> list[float]:
        pairs = zip(findings[f"{side}.answer"], findings[REFERENCE][side], strict=True)
        return [answer["loss"] - other for answer, other in pairs]

    return {
        "mia_loss": of_answers(
            "the mean loss of its tokens, the end of the answer's turn included", lambda answer: answer["loss"]
        ),
        "mia_zlib": of_answers(
            "the mean loss of its tokens, that end included, over the length of its text, compressed by zlib "
            "(Carlini et al. 2021)",
            lambda answer: answer["loss"] / answer["compressed"],
        ),
        "mia_min_k": of_answers(
            "minus the mean log-probability of its least likely 40 % of tokens, without that end (Shi et al. "
            "2024, arXiv 2310.16789)",
            lambda answer: answer["min_k"],
        ),
        "mia_min_k_plus_plus": of_answers(
            "mia_min_k's score of log-probabilities that are standardised over the vocabulary (Zhang et al. 2025, "
            "arXiv 2404.02936)",
            lambda answer: answer["min_k_plus_plus"],
        ),
        "mia_gradnorm": auc(
            "the norm of the loss's gradient, without that end",
            (GRADIENTS,),
            lambda findings, side: findings[GRADIENTS][side],
        ),
        "mia_reference": auc(
            "mia_loss's score minus that of a reference model, --reference-model",
            (*answers, REFERENCE),
            beyond_reference,
        ),
    }


@with_definition
def forget_quality(retain_ratios: Callable[[], Sequence[float]]) -> Metric:
    """p-value of the two-sample Kolmogorov–Smirnov test between this model's truth ratios on the forget set and those
    of the retain model in --retain-log (Maini et al. 2024)."""

    def make(_: Findings, forms: Forms) -> MetricResult:
        from scipy.stats import ks_2samp

        ratios = [row["score"] for row in forms["forget_truth_ratio"]["value_by_index"].values()]
        return {"agg_value": float(ks_2samp(ratios, retain_ratios()).pvalue)}

    return Metric((), make, dependencies=("forget_truth_ratio",), check=retain_ratios)


def privleak_form(auc: float, retain_auc: float) -> MetricResult:
    """100·((1 − AUC) − (1 − AUC_retain))/(1 − AUC_retain); no value if the retain model tells every pair apart."""
    retain = 1 - retain_auc
    if retain < EPSILON:
        return no_value("the retain model's AUC is 1, and privleak divides by 1 − AUC")
    return {"agg_value": 100 * ((1 - auc) - retain) / (retain + EPSILON)}


@with_definition
def privleak(retain_auc: Callable[[], float]) -> Metric:
    """100·((1 − AUC) − (1 − AUC_retain))/(1 − AUC_retain) of mia_min_k; AUC_retain from --retain-log, else 0.5 (Shi et
    al. 2024, arXiv 2407.06460)."""

    def make(_: Findings, forms: Forms) -> MetricResult:
        return privleak_form(forms["mia_min_k"]["agg_value"], retain_auc())

    return Metric((), make, ZERO, dependencies=("mia_min_k",), check=retain_auc)


@with_definition
def harmonic_mean(parts: tuple[str, ...]) -> Metric:
    """the harmonic mean of probability, ROUGE and truth ratio on the retain set, real authors and world facts (Maini et
    al. 2024)."""

    def make(_: Findings, forms: Forms) -> MetricResult:
        from scipy.stats import hmean

        if missing := [name for name in parts if forms[name]["agg_value"] is None]:
            return no_value(f"{missing[0]} has no value")

        return {"agg_value": float(hmean([forms[name]["agg_value"] for name in parts]))}

    return Metric((), make, dependencies=parts)


# The attack that needs gradients; those above only need scores.

GRADIENT_BYTES = 1 << 30  # bytes of gradients at once
NormsOf = Callable[[torch.Tensor, Sequence[torch.Tensor]], list[torch.Tensor]]


def gradient_norms(model: PreTrainedModel, items: Sequence[Item], advance: Advance = SILENT.advance) -> list[float]:
    """For each item, the mean over parameters of the 2-norm of the gradient of its mean token loss.

    The answer's end is excluded, as OpenUnlearning does; an item with nothing else gives 0.
    """
    model.eval()
    parameters = [p.requires_grad_(True) for p in model.parameters()]
    weights = weights_of(model)
    suit_heap_to(weights)
    gradients_in_memory = GRADIENT_BYTES // weights
    norms = []
    at_once = max(1, min(passes_at_once(model), gradients_in_memory))
    norms_of = _norms_together if at_once > 1 else _norms_in_turn
    with memory_in_mind(ADVICE), worker_pool(at_once) as pool:
        for item, norm in zip(
            items, pool.map(partial(_gradient_norm, model, parameters, norms_of), items), strict=True
        ):
            if math.isnan(norm):
                raise MpuError(f"{item.location}: the model's gradient is NaN")
            norms.append(norm)
            advance(1)
    return norms


@torch.enable_grad()
def _gradient_norm(model: PreTrainedModel, parameters: Sequence[torch.Tensor], norms_of: NormsOf, item: Item) -> float:
    count = item.content_tokens
    if not count:
        return 0.0
    log_p = logits_of(model, item)[:count].float().log_softmax(-1)
    targets = torch.tensor(item.labels[:count], device=log_p.device)
    loss = -log_p.gather(1, targets[:, None]).mean()
    return float(torch.stack(norms_of(loss, parameters)).mean())


def _norms_together(loss: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [gradient.float().norm(2) for gradient in gradients if gradient is not None]


def _norms_in_turn(loss: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same, with one parameter's gradient at a time; for one pass at once."""
    norms: list[torch.Tensor] = []

    def take(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        norms.append(parameter.grad.float().norm(2))
        parameter.grad = None

    hooks = [parameter.register_post_accumulate_grad_hook(take) for parameter in parameters]
    try:
        loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
    return norms


# Metrics of what attacks bring back, from what ``relearning`` found.

RELEARNED = "forget_Q_A_Prob_relearned"  # the metric whose form has a curve over steps
RESAMPLES = 2000  # of a bootstrap
RECOVERED = {
    "relearn": "the probability of the true answers of one half of the forget set, after fine-tuning on the other half",
    "quantise": "the probability of the true answers, once the weights are rounded to 8 or 4 bits",
    "paraphrase": "the largest probability of the true answer over rephrased questions",
    "sample": "the largest ROUGE-L recall over answers sampled at temperature 1",
    "context": "the probability of the true answers after other records in the prompt",
}


def attack_key(name: str) -> str:
    """Key of the findings of an attack of ``relearning``."""
    return f"attack:{name}"


def interval(values: Sequence[float]) -> list[float] | None:
    """The 95 % interval of the mean of ``values``, by a percentile bootstrap over them; None for fewer than two."""
    import numpy
    from scipy.stats import bootstrap

    if len(values) < 2:
        return None
    bootstrap_result = bootstrap(
        (numpy.asarray(values),), numpy.mean, n_resamples=RESAMPLES, method="percentile",
        random_state=numpy.random.default_rng(0),
    )  # fmt: skip
    return [float(bootstrap_result.confidence_interval.low), float(bootstrap_result.confidence_interval.high)]


def _form_with_interval(rows: Sequence[Mapping[str, Any]], field: str) -> MetricResult:
    return {**_mean_form(rows, field), "interval": interval([row[field] for row in rows])}


def _recovered_probabilities(losses: Sequence[float]) -> MetricResult:
    return _form_with_interval([_probability(loss) for loss in losses], "prob")


def recovery_metrics(attack: str, *, retain: bool, any_script: bool) -> MetricTable:
    """The metrics of the forget set after an attack on forgetting: probabilities of the true answers, or ROUGE of
    sampled ones, each with the 95 % interval of its mean. ``retain``: whether there are records to keep, which one
    attack uses; ``any_script``: whether ROUGE of answers in any script is measured, too."""
    key = attack_key(attack)

    def metric_of(make: Callable[[Any], MetricResult]) -> Metric:
        return Metric((key,), lambda findings, _: make(findings[key]), DOWN, says=RECOVERED[attack])

    def relearning_form(history: Mapping[str, Any]) -> MetricResult:
        forms = [_recovered_probabilities(losses) for losses in history["losses"]]
        curve = [
            {"steps": steps, "agg_value": form["agg_value"], "interval": form["interval"]}
            for steps, form in zip(history["steps"], forms, strict=True)
        ]
        return {**forms[-1], "curve": curve}

    def of_losses(name: str) -> Metric:
        return metric_of(lambda losses: _recovered_probabilities(losses[name]))

    def rephrasing_form(record_losses: Sequence[Sequence[float]]) -> MetricResult:
        probabilities = [[math.exp(-loss) for loss in losses] for losses in record_losses]
        return _form_with_interval([{"prob": max(probs), "probs": probs} for probs in probabilities], "prob")

    def sampling_form(sampled_answers: Sequence[Mapping[str, Any]], any_script: bool = False) -> MetricResult:
        scorer = _rouge_scorer(any_script=any_script)
        rows = []
        for answers in sampled_answers:
            truth = answers["ground_truth"]
            scores = [scorer.score(truth, answer)["rougeL"].recall for answer in answers["samples"]]
            best = scores.index(max(scores))
            rows.append({"rougeL_recall": scores[best], "ground_truth": truth, "generation": answers["samples"][best]})
        return _form_with_interval(rows, "rougeL_recall")

    if attack == "relearn":
        return {RELEARNED: metric_of(relearning_form)}
    if attack == "quantise":
        return {f"forget_Q_A_Prob_{kind}": of_losses(kind) for kind in ("int8", "int4")}
    if attack == "paraphrase":
        return {"forget_Q_A_Prob_rephrased": metric_of(rephrasing_form)}
    if attack == "sample":
        sampled = {"forget_Q_A_ROUGE_sampled": metric_of(sampling_form)}
        if any_script:
            sampled["forget_Q_A_ROUGE_sampled_any_script"] = metric_of(partial(sampling_form, any_script=True))
        return sampled
    in_context = {"forget_Q_A_Prob_in_context": of_losses("forget")}
    if retain:
        in_context["forget_Q_A_Prob_in_retain_context"] = of_losses("retain")
    return in_context
