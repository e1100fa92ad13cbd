"""What each attack of `mpu audit` recovers, by noise scale, number of copies, symmetries and dtype: a table and a plot.

python examples/audit.py BASE [--public MODEL] [--plot FILE]
python examples/audit.py --make qwen2 [--plot FILE]    # trains a small public model and a private one of that family
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mpu_cli.cli.main import main as mpu

ATTACKS = ("one copy", "one copy, reference", "all copies", "all copies, reference", "all copies, factors unknown")
KAPPAS = (0.01, 0.1, 1, 10)
NOISE = "zero-sum"  # takes all copies to remove; for extrapolating noise, two are enough
SIZES = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 256}
FAMILIES = {
    "llama": SIZES | {"intermediate_size": 352, "num_key_value_heads": 2},
    "qwen2": SIZES | {"intermediate_size": 352, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "gpt2": {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 256},
}


def run(*arguments: object) -> str:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            mpu([str(argument) for argument in arguments])
        except SystemExit as stop:
            if stop.code:
                raise SystemExit(err.getvalue()) from stop
    return out.getvalue()


def make_pair(family: str, folder: Path) -> tuple[Path, Path]:
    """A private model, fine-tuned on facts about some people, and the public model behind it, which knows others."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from mpu_cli.demo.model import make_people, make_tokenizer
    from mpu_cli.records.read import read_records

    people = make_people(40, seed=0)
    for name, known in (("public", people[:20]), ("private", people[20:])):
        rows = [row for person in known for row in person]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    records = [record for name in ("public", "private") for record in read_records(str(folder / f"{name}.jsonl"))]
    tokenizer = make_tokenizer(records)
    torch.manual_seed(0)
    ids = {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 3}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FAMILIES[family], **ids)).save_pretrained(
        folder / "random"
    )
    tokenizer.save_pretrained(folder / "random")
    common = ("--lr", 2e-3, "--batch-size", 25)
    run("finetune", folder / "random", "--data", folder / "public.jsonl", "--epochs", 20, "--out", folder / "public",
        *common)  # fmt: skip
    run("finetune", folder / "public", "--data", folder / "private.jsonl", "--epochs", 5, "--out", folder / "private",
        *common)  # fmt: skip
    return folder / "private", folder / "public"


def draw(found: dict[tuple[str, str, int, float], dict], path: Path) -> None:
    """Plot error over κ for m = 2 and float32, one colour per attack: the total and (thin) each block."""
    from mpu_cli.lab.plots import PALETTE, make_figure, write_figure

    there = [attack for attack in ATTACKS if attack in next(iter(found.values()))]

    def panel(symmetries: str) -> object:
        def lines(axes: object) -> None:
            for i, (attack, colour) in enumerate(zip(there, PALETTE, strict=False)):
                told = [found[symmetries, "float32", 2, kappa][attack] for kappa in KAPPAS]
                for block in told[0]["blocks"]:
                    errors = [t["blocks"][block]["weights"] for t in told]
                    axes.plot(KAPPAS, errors, color=colour, linewidth=0.5, alpha=0.4)
                axes.plot(KAPPAS, [t["weights"] for t in told], color=colour, linewidth=5 - 0.8 * i, label=attack)
            axes.axhline(1, color="#bbb", linestyle=":", linewidth=1)
            axes.set(xscale="log", yscale="log", ylim=(1e-7, 20), xlabel="κ", ylabel="relative error of the weights")
            axes.set_title(f"--symmetries {symmetries}", fontsize=10)
            axes.legend(fontsize=8)

        return lines

    rows = [
        [", ".join(map(str, key)), *(f"{told[attack]['weights']:.3g}" for attack in there)]
        for key, told in found.items()
    ]
    figure = make_figure([panel("paper"), panel("all")], "What the attacks recover (m = 2, float32; thin: blocks)")
    write_figure(figure, path, "Audit", header=["", *there], rows=rows, force=True)


def audit(base: Path, reference: Path | None, plot: Path | None) -> None:
    public: Sequence[object] = ["--public", reference] if reference else []
    print("| symmetries | dtype | m | κ | " + " | ".join(ATTACKS) + " | task vector: one copy | all copies |")
    print("|" + "---|" * (len(ATTACKS) + 6))
    found = {}
    for symmetries, dtype, m, kappa in itertools.product(("paper", "all"), ("float32", "bfloat16"), (2, 3), KAPPAS):
        with tempfile.TemporaryDirectory() as folder:
            chosen = ("--symmetries", symmetries)
            published = run(
                "publish", base, *public, *chosen, "--copies", m, "--noise", NOISE, "--kappa", kappa, "--dtype", dtype,
                "--out", folder, "--keys", Path(folder) / "keys.bin",
            )  # fmt: skip
            told = json.loads(
                run("audit", *published.split(), "--base", base, *public, *chosen, "--noise", NOISE, "--json")
            )["attacks"]
        found[symmetries, dtype, m, kappa] = told
        cells = [f"{told[name]['weights']:.2%}" if name in told else "–" for name in ATTACKS]
        for name in ("one copy, reference", "all copies, reference"):
            cells.append(f"{told[name]['task_vector']:.2%}" if name in told else "–")
        print(f"| {symmetries} | {dtype} | {m} | {kappa:g} | {' | '.join(cells)} |", flush=True)
    if plot:
        draw(found, plot)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("base", nargs="?", type=Path)
    parser.add_argument("--public", type=Path)
    parser.add_argument("--make", choices=FAMILIES)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    if (options.base is None) == (options.make is None):
        parser.error("give either BASE or --make")
    with tempfile.TemporaryDirectory() as folder:
        base, reference = options.base, options.public
        if options.make:
            base, reference = make_pair(options.make, Path(folder))
        audit(base, reference, options.plot)


if __name__ == "__main__":
    main()
