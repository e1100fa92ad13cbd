"""Which tokens of the records a server reads off a delta, for trainings that differ in one option each.

    python examples/what_a_delta_lists.py MODEL --forget FORGET --retain RETAIN [--count 40] [--epochs 5] [--lr 1e-4]

Trains with `mpu unlearn` and reads with `mpu audit-delta`: for each training the best reading of each tensor, its AUC
of tokens of forgotten against kept records (0.5 is chance) and, where it lists tokens, its precision and recall.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

TRAININGS = {
    "default": [],
    "default, adamw-blockwise": ["--optim", "adamw-blockwise"],
    "default, bfloat16 delta": ["--delta-dtype", "bfloat16"],
    "LoRA of rank 8": ["--lora", "rank=8"],
    "embeddings, too": ["--train-embeddings"],
    "embeddings, too; adamw-blockwise": ["--train-embeddings", "--optim", "adamw-blockwise"],
    "embeddings, too; bfloat16 delta": ["--train-embeddings", "--delta-dtype", "bfloat16"],
    "embeddings, too; rmu": ["--train-embeddings", "--algo", "rmu", "--constants", "layer=2"],
}


def mpu(*arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "mpu_cli", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def untied(model: Path, target: Path) -> Path:
    """The same function with an output head of its own."""
    from safetensors.torch import load_file, save_file

    target.mkdir()
    for path in model.iterdir():
        if path.suffix in (".json", ".jinja"):
            (target / path.name).write_bytes(path.read_bytes())
    weights = load_file(model / "model.safetensors")
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, target / "model.safetensors",
              {"format": "pt"})  # fmt: skip
    config = json.loads((model / "config.json").read_text()) | {"tie_word_embeddings": False}
    (target / "config.json").write_text(json.dumps(config))
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--forget", type=Path, required=True)
    parser.add_argument("--retain", type=Path, required=True)
    parser.add_argument("--count", type=int, default=40, help="records of each set")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", default="1e-4")
    parser.add_argument("--only", nargs="*", default=None, help="names of trainings")
    parser.add_argument("--untied", action="store_true", help="give the model an output head of its own first")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model = untied(options.model, work / "untied") if options.untied else options.model
        records = []
        for name in ("forget", "retain"):
            lines = getattr(options, name).read_text(encoding="utf-8").splitlines()[: options.count]
            (work / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
            records += [f"--{name}", work / f"{name}.jsonl"]
        for title, training in TRAININGS.items():
            if options.only is not None and title not in options.only:
                continue
            delta = work / "delta.safetensors"
            told = json.loads(mpu("unlearn", model, *records, "--epochs", options.epochs, "--batch-size", 8, "--lr",
                                  options.lr, *training, "--out", delta, "--force", "--json"))  # fmt: skip
            print(f"{title}: forget loss {told['before']['forget']:.3f} → {told['after']['forget']:.3f}, retain loss "
                  f"{told['before']['retain']:.3f} → {told['after']['retain']:.3f}")  # fmt: skip
            for each in json.loads(mpu("audit-delta", model, delta, *records, "--json")):
                numbers = [f"{name} {each[key]:.3f}" for name, key in
                           (("AUC", "told_apart"), ("precision", "precision"), ("recall", "recall"))
                           if each[key] is not None]  # fmt: skip
                found = ", ".join(numbers) + (each["fact"] or "")
                print(f"    {each['tensor'][:50]:<52}{each['rule']:<24}{found}", flush=True)


if __name__ == "__main__":
    main()
