"""General ability, measured by EleutherAI's evaluation harness on the model that is already loaded."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mpu_cli.errors import MpuError


def run_tasks(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: Sequence[str], batch_size: int
) -> dict[str, dict[str, object]]:
    """``lm_eval/TASK/METRIC`` → its form, for each of ``tasks``: harness task names or .yaml task files.

    A form is {"agg_value": …, "higher_is_better": …}; a task that filters answers in several ways has
    ``lm_eval/TASK/METRIC,FILTER``.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    # Tokenizers that have used all cores warn if the process is forked, and a task's code may do that.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in ("lm_eval", "lm-eval"):
        logging.getLogger(name).setLevel(logging.ERROR)
    quiet = not sys.stderr.isatty()  # the harness draws progress bars even without a terminal
    named = [str(Path(task).resolve()) if task.endswith((".yaml", ".yml")) else task for task in tasks]
    try:
        with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stderr(nowhere if quiet else sys.stderr):
            wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
            measured = simple_evaluate(wrapped, tasks=named, bootstrap_iters=0, log_samples=False, verbosity="ERROR")
    except Exception as error:  # tasks and their data can raise anything
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise MpuError(f"--lm-eval {','.join(tasks)}: {reason[0]}") from error
    values = {}
    for task, results in measured["results"].items():
        higher = measured.get("higher_is_better", {}).get(task, {})
        for metric, value in results.items():
            name, _, part = metric.partition(",")
            if isinstance(value, int | float) and not name.endswith("_stderr") and part:
                key = f"lm_eval/{task}/{name if part == 'none' else metric}"
                values[key] = {"agg_value": float(value), "higher_is_better": higher.get(name)}
    return values
