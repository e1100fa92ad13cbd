"""Metrics of what attacks bring back, from what ``recovery`` found."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mpu_cli.evaluation.metrics import DOWN, Metric, MetricResult, by_index, mean

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
    """Key of what an attack of ``recovery`` found."""
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
    values = [row[field] for row in rows]
    return {**by_index(rows, mean(values)), "interval": interval(values)}


def _recovered_probabilities(losses: Sequence[float]) -> MetricResult:
    return _form_with_interval([{"prob": math.exp(-loss), "avg_loss": loss} for loss in losses], "prob")


def recovery_metrics(attack: str, retain: bool) -> dict[str, Metric]:
    """What an attack brings back of the forget set: probabilities of the true answers, or ROUGE of sampled ones, each
    with the 95 % interval of its mean. ``retain``: whether there are records to keep, which one attack uses."""
    key = attack_key(attack)

    def of(make: Callable[[Any], MetricResult]) -> Metric:
        return Metric((key,), lambda findings, _: make(findings[key]), DOWN, says=RECOVERED[attack])

    def relearning_form(history: Mapping[str, Any]) -> MetricResult:
        forms = [_recovered_probabilities(losses) for losses in history["losses"]]
        curve = [
            {"steps": steps, "agg_value": form["agg_value"], "interval": form["interval"]}
            for steps, form in zip(history["steps"], forms, strict=True)
        ]
        return {**forms[-1], "curve": curve}

    def quantisation_form(kind: str, losses_by_kind: Mapping[str, Any]) -> MetricResult:
        return _recovered_probabilities(losses_by_kind[kind])

    def rephrasing_form(record_losses: Sequence[Sequence[float]]) -> MetricResult:
        probabilities = [[math.exp(-loss) for loss in losses] for losses in record_losses]
        return _form_with_interval([{"prob": max(probs), "probs": probs} for probs in probabilities], "prob")

    def sampling_form(sampled_answers: Sequence[Mapping[str, Any]]) -> MetricResult:
        from rouge_score.rouge_scorer import RougeScorer

        scorer = RougeScorer(["rougeL"], use_stemmer=True)
        rows = []
        for answers in sampled_answers:
            truth = answers["ground_truth"]
            scores = [scorer.score(truth, answer)["rougeL"].recall for answer in answers["samples"]]
            best = scores.index(max(scores))
            rows.append({"rougeL_recall": scores[best], "ground_truth": truth, "generation": answers["samples"][best]})
        return _form_with_interval(rows, "rougeL_recall")

    if attack == "relearn":
        return {RELEARNED: of(relearning_form)}
    if attack == "quantise":
        return {f"forget_Q_A_Prob_{kind}": of(partial(quantisation_form, kind)) for kind in ("int8", "int4")}
    if attack == "paraphrase":
        return {"forget_Q_A_Prob_rephrased": of(rephrasing_form)}
    if attack == "sample":
        return {"forget_Q_A_ROUGE_sampled": of(sampling_form)}
    table = {
        "forget_Q_A_Prob_in_context": of(lambda losses_by_split: _recovered_probabilities(losses_by_split["forget"]))
    }
    if retain:
        table["forget_Q_A_Prob_in_retain_context"] = of(
            lambda losses_by_split: _recovered_probabilities(losses_by_split["retain"])
        )
    return table
