"""``mpu eval`` against OpenUnlearning's evaluator: the same TOFU metrics of one model, each in a process of its own.

    python -m tests.benchmarks.suite CLONE MODEL DATA_DIR REFERENCE RETAIN_LOG [RUNS]

CLONE is a clone of github.com/locuslab/open-unlearning. Its evaluator needs ``pip install hydra-core hydra_colorlog``
beside what mpu installs; lm_eval, which it imports and does not use here, is replaced by an empty module, and its calls
are adapted to transformers 5 and datasets 4. DATA_DIR holds TOFU's files as on the Hub, REFERENCE is the model of
``mia_reference``, RETAIN_LOG a result with the retain model's values. The two take turns; the table has each one's
fastest run.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path

from tests.helpers.measuring import MPU, run_measured

# What OpenUnlearning computes beside its own choice.
MORE = (
    "exact_memorization", "mia_loss", "mia_zlib", "mia_min_k", "mia_min_k_plus_plus", "mia_gradnorm", "mia_reference",
)  # fmt: skip
FORGET, HOLDOUT = "forget01", "holdout01"
BATCH = 32


def evaluated_by_suite(clone: Path, overrides: list[str], source: Callable[[str, str, str], Path]) -> None:
    """Run OpenUnlearning's evaluator in this process, with its own configuration and ``overrides``.

    ``source(path, name, split)`` is the file to read in place of a dataset of the Hub.
    """
    sys.path.insert(0, str(clone / "src"))
    for name in ("lm_eval", "lm_eval.tasks", "lm_eval.models", "lm_eval.models.hf_vlms"):
        sys.modules[name] = types.ModuleType(name)
        for unused in ("simple_evaluate", "TaskManager", "HFLM"):
            setattr(sys.modules[name], unused, None)

    import datasets
    from hydra import compose, initialize_config_dir
    from transformers import PreTrainedTokenizerBase

    templated, read = PreTrainedTokenizerBase.apply_chat_template, datasets.load_dataset
    PreTrainedTokenizerBase.apply_chat_template = lambda *args, **options: templated(
        *args, **{"return_dict": False, **options}
    )
    datasets.arrow_dataset.Column.__add__ = lambda column, more: [*column, *more]
    # of a local file, every row is in "train"
    datasets.load_dataset = lambda path, name, split: read(
        "json", data_files=str(source(path, name, split)), split="train"
    )
    with initialize_config_dir(str(clone.resolve() / "configs"), version_base=None):
        config = compose("eval.yaml", overrides)

    from evals import get_evaluators
    from model import get_model

    loaded, tokenizer = get_model(config.model)
    [evaluator] = get_evaluators(config.eval).values()
    evaluator.evaluate(model=loaded, tokenizer=tokenizer, template_args=config.model.template_args)


def suite(clone: Path, model: Path, data: Path, reference: Path, log: Path, out: Path) -> None:
    """OpenUnlearning's evaluator on TOFU, in this process; TOFU_EVAL.json in ``out``."""
    overrides = [
        "experiment=eval/tofu/default.yaml", "task_name=benchmark", "model=Llama-3.2-1B-Instruct",
        f"forget_split={FORGET}", f"holdout_split={HOLDOUT}", f"retain_logs_path={log}",
        f"paths.output_dir={out}", f"eval.tofu.batch_size={BATCH}", "~model.model_args.device_map",
        f"model.model_args.pretrained_model_name_or_path={model}", "model.model_args.torch_dtype=float32",
        "model.model_args.attn_implementation=sdpa",
        f"model.tokenizer_args.pretrained_model_name_or_path={model}", f"+eval/tofu_metrics=[{','.join(MORE)}]",
        f"eval.tofu.metrics.mia_reference.reference_model_path={reference}",
    ]  # fmt: skip
    evaluated_by_suite(clone, overrides, lambda _, name, __: data / f"{name}.json")


def main(paths: list[Path], runs: int) -> None:
    _, model, data, reference, log = paths
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        mpu_command = [
            *MPU, "eval", model, "--benchmark", f"tofu:{FORGET}", "--reading", f"data_dir={data}",
            "--scoring", f"batch_size={BATCH}",
            "--reference-model", reference, "--retain-log", log, "--device", "cpu", "--force",
            "--out", out / "mpu.json",
        ]  # fmt: skip
        theirs = (sys.executable, "-m", "tests.benchmarks.suite", "--suite")
        timings: dict[str, list[float]] = {"mpu eval": [], "OpenUnlearning": []}
        for number in range(runs):
            timings["mpu eval"].append(run_measured(*mpu_command)[0])
            timings["OpenUnlearning"].append(run_measured(*theirs, *paths, out / str(number))[0])
        suite_results = json.loads((out / "0/TOFU_EVAL.json").read_text())
        ours = json.loads((out / "mpu.json").read_text())["metrics"]
        common_metrics = [name for name in ours if suite_results.get(name, {}).get("agg_value") is not None]
        apart = max(abs(ours[name]["agg_value"] - suite_results[name]["agg_value"]) for name in common_metrics)
    print(f"threads: {os.cpu_count()}; {len(common_metrics)} metrics, apart by at most {apart:.1e}")
    for name, each in timings.items():
        print(f"{name:16} {min(each):6.1f} s   {', '.join(f'{seconds:.1f}' for seconds in each)}")
    print(f"{min(timings['OpenUnlearning']) / min(timings['mpu eval']):.2f} times")


if __name__ == "__main__":
    if sys.argv[1] == "--suite":
        suite(*map(Path, sys.argv[2:]))
    else:
        main([Path(part).resolve() for part in sys.argv[1:6]], int((sys.argv[6:] or ["2"])[0]))
