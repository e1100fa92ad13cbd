"""Makes the golden numbers in this folder: what OpenUnlearning's own evaluator says of tiny models.

    python -m tests.measuring.golden.make CLONE

CLONE is a clone of github.com/locuslab/open-unlearning at the commit that README.md here names; its evaluator needs
``pip install hydra-core hydra_colorlog`` beside what mpu installs. For each of two architectures, a model learned some
made-up records (``full``), and another one all but those to be forgotten (``retain``), by heart in parts, so that no
metric is trivial. ``tests/measuring/test_golden.py`` compares ``mpu eval`` with what stands here.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

from tests.benchmarks.suite import MORE, evaluated_by_suite
from tests.helpers.models import VOCABULARY, random_model, save

HERE = Path(__file__).parent
ARCHITECTURES = ("llama", "gpt2")
RECORDS = 12
TOFU = {"forget01_perturbed": 1, "retain_perturbed": 2, "real_authors_perturbed": 3, "world_facts_perturbed": 4,
        "holdout01": 5}  # fmt: skip


def words(rng: random.Random, least: int, most: int) -> str:
    return " ".join(f"w{rng.randrange(3, VOCABULARY)}" for _ in range(rng.randrange(least, most)))


def write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_records() -> None:
    """TOFU's and MUSE's files, as on the Hub, of made-up words."""
    for name, seed in TOFU.items():
        rng = random.Random(seed)
        write(HERE / "tofu" / f"{name}.json", [
            {"question": words(rng, 4, 9), "answer": words(rng, 5, 12), "paraphrased_answer": words(rng, 5, 12),
             "perturbed_answer": [words(rng, 5, 12) for _ in range(3)]} for _ in range(RECORDS)
        ])  # fmt: skip
    rng = random.Random(6)
    for name in ("forget_qa", "forget_qa_icl", "retain_qa", "retain_qa_icl"):
        rows = [
            {"question": words(rng, 4, 6), "answer": words(rng, 2, 4)} for _ in range(3 if "icl" in name else RECORDS)
        ]
        write(HERE / "muse/knowmem" / f"{name}.json", rows)
    write(HERE / "muse/verbmem/forget.json",
          [{"prompt": words(rng, 6, 9), "gt": words(rng, 9, 20)} for _ in range(RECORDS)])  # fmt: skip
    for name in ("forget", "holdout"):
        write(HERE / "muse/privleak" / f"{name}.json", [{"text": words(rng, 12, 30)} for _ in range(RECORDS)])


def make_models(architecture: str) -> None:
    scratch = HERE / architecture / "random"
    save(random_model(architecture), scratch)
    learned = {"full": ("forget01_perturbed", "retain_perturbed"), "retain": ("retain_perturbed",)}
    training = ["--epochs", "7", "--lr", "3e-3", "--batch-size", "4", "--force"]
    for name, files in learned.items():
        data = [argument for file in files for argument in ("--data", HERE / "tofu" / f"{file}.json")]
        command = [sys.executable, "-m", "mpu_cli", "finetune", scratch, *data, *training]
        subprocess.run([*map(str, command), "--out", str(HERE / architecture / name)], check=True)
    shutil.rmtree(scratch)


def measure(clone: Path, architecture: str, name: str) -> None:
    """What OpenUnlearning says of a model, in processes of their own."""
    model, log = HERE / architecture / name, HERE / architecture / "retain"
    for benchmark in ("TOFU", "MUSE"):
        out = HERE / architecture / f"{name}.{benchmark}"
        logged = f"{log}.{benchmark}.json" if name == "full" else "null"
        arguments = [clone, benchmark, model, HERE / architecture / "retain", logged, out]
        subprocess.run(
            [sys.executable, "-m", "tests.measuring.golden.make", "--suite", *map(str, arguments)], check=True
        )
        results = json.loads((out / f"{benchmark}_EVAL.json").read_text())
        (HERE / architecture / f"{name}.{benchmark}.json").write_text(json.dumps(results, indent=1) + "\n")
        shutil.rmtree(out)


def suite(clone: str, benchmark: str, model: str, reference: str, log: str, out: str) -> None:
    overrides = [
        f"experiment=eval/{benchmark.lower()}/default.yaml", "task_name=golden", f"retain_logs_path={log}",
        f"paths.output_dir={out}", f"model.model_args.pretrained_model_name_or_path={model}",
        "model.model_args.torch_dtype=float32", "model.model_args.attn_implementation=sdpa",
        f"model.tokenizer_args.pretrained_model_name_or_path={model}", "~model.model_args.device_map",
    ]  # fmt: skip
    if benchmark == "TOFU":
        overrides += [
            "model=Llama-3.2-1B-Instruct", "forget_split=forget01", "holdout_split=holdout01",
            f"+eval/tofu_metrics=[{','.join(MORE)}]",
            f"eval.tofu.metrics.mia_reference.reference_model_path={reference}",
        ]  # fmt: skip
    else:
        more = [name for name in MORE if name not in ("mia_gradnorm", "mia_reference")]
        overrides.append(f"+eval/muse_metrics=[{','.join(more)}]")
    files = HERE / benchmark.lower()

    def source(path: str, name: str, split: str) -> Path:
        return files / f"{name}.json" if "TOFU" in path else files / name / f"{split}.json"

    evaluated_by_suite(Path(clone), overrides, source)


def main(clone: Path) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    make_records()
    for architecture in ARCHITECTURES:
        make_models(architecture)
        for name in ("retain", "full"):
            measure(clone, architecture, name)


if __name__ == "__main__":
    if sys.argv[1] == "--suite":
        suite(*sys.argv[2:])
    else:
        main(Path(sys.argv[1]).resolve())
