"""General ability by EleutherAI's evaluation harness, on the model that is loaded already."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mpu_cli.errors import MpuError, UsageError


def check() -> None:
    """UsageError if the harness is not installed."""
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise UsageError("--lm-eval needs EleutherAI's harness; install it with pip install lm-eval") from error


def run_tasks(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: Sequence[str], batch_size: int
) -> dict[str, dict[str, object]]:
    """``lm_eval/TASK/METRIC`` → its form for each of ``tasks``: names that the harness knows, or its .yaml files.

    A form is {"agg_value": …, "higher_is_better": …}; a task that filters answers in several ways has
    ``lm_eval/TASK/METRIC,FILTER``.

    Raises MpuError if a task is not known or its data cannot be had.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    for name in ("lm_eval", "lm-eval"):
        logging.getLogger(name).setLevel(logging.ERROR)
    named = [str(Path(task).resolve()) if task.endswith((".yaml", ".yml")) else task for task in tasks]
    try:
        with ExitStack() as quiet:
            if not sys.stderr.isatty():  # it draws bars wherever it writes
                quiet.enter_context(redirect_stderr(quiet.enter_context(open(os.devnull, "w", encoding="utf-8"))))
            wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
            told = simple_evaluate(wrapped, tasks=named, bootstrap_iters=0, log_samples=False, verbosity="ERROR")
    except Exception as error:  # whatever tasks and their data may bring about
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise MpuError(f"--lm-eval {','.join(tasks)}: {reason[0]}") from error
    values = {}
    for task, results in told["results"].items():
        higher = told.get("higher_is_better", {}).get(task, {})
        for metric, value in results.items():
            name, _, part = metric.partition(",")
            if isinstance(value, int | float) and not name.endswith("_stderr") and part:
                key = f"lm_eval/{task}/{name if part == 'none' else metric}"
                values[key] = {"agg_value": float(value), "higher_is_better": higher.get(name)}
    return values
