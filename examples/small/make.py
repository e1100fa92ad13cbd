"""Small models like those of the tables: a Llama of 5 M parameters, trained on a fifth of TOFU.

python examples/small/make.py models

writes models/pretrained (public text, and general questions), models/full (from it, 800 records of TOFU: those that
retain_perturbed asks about, and forget10), and models/retain99 and models/retain90, which never saw forget01 or
forget10. Their records lie in models/records. TOFU and the text come from the Hub, or from --data-dir and --text.
Models that are there are kept, so that the command resumes where it was interrupted. --epochs 1 5 is quick, to see
whether everything runs; such models know little.
mpu sweep examples/paper/pum_main_comparison.toml --with examples/paper/small.toml makes one of the paper's tables of
them. The models that were measured were trained on other text and not by this script, so their numbers differ. Ask
what a model knows before you use it (mpu eval models/full --forget models/records/full.jsonl): if not all, raise
--epochs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import mpu_cli
from mpu_cli.demo.model import train_tokenizer
from mpu_cli.errors import MpuError
from mpu_cli.options.unlearning import RecordFormat
from mpu_cli.records.read import read_records

TEXTS, TOKENS = 4000, 256  # of the public text, and of each of them at most
GENERAL = ("real_authors_perturbed", "world_facts_perturbed")
AUTHORS, FORGET10 = slice(0, 400), slice(3600, 4000)  # of TOFU's 4,000 records
LEFT_OUT = {"full": 0, "retain99": 40, "retain90": 400}  # records at the end that a model does not see


def make_untrained(folder: Path, texts: Sequence[str]) -> None:
    """A tokenizer of 4,096 tokens, trained on ``texts``, and a model with random weights."""
    tokenizer = train_tokenizer(texts, vocabulary=4096)
    config = AutoConfig.for_model(
        "llama", vocab_size=len(tokenizer), hidden_size=256, intermediate_size=704, num_hidden_layers=6,
        num_attention_heads=8, num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, rms_norm_eps=1e-6,
        rope_theta=500000.0, tie_word_embeddings=True, bos_token_id=0, eos_token_id=2, pad_token_id=3,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write(path: Path, rows: Sequence[dict[str, str]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data-dir", type=Path, help="a folder with TOFU's files, in place of the Hub")
    parser.add_argument("--text", default="wikitext:train", help="public text, a file or a name as of --forget")
    parser.add_argument("--epochs", type=int, nargs=2, default=(3, 40), metavar="N", help="of the text, of the records")
    given = parser.parse_args()
    folder, (epochs_of_text, epochs_of_records) = given.folder, given.epochs

    def tofu(name: str) -> list[dict[str, str]]:
        read = read_records(f"tofu:{name}", RecordFormat(data_dir=given.data_dir))
        return [{"question": record.question, "answer": record.answer} for record in read]

    records = tofu("full")
    if len(records) == 4000:
        records = [*records[AUTHORS], *records[FORGET10]]
    files = {name: write(folder / f"records/{name}.jsonl", records[: len(records) - n]) for name, n in LEFT_OUT.items()}
    texts = [{"text": record.answer} for record in islice(read_records(given.text), TEXTS)]
    general = [row for name in GENERAL for row in tofu(name)]
    public = [write(folder / "records/text.jsonl", texts), write(folder / "records/general.jsonl", general)]
    if not (folder / "pretrained").exists():
        make_untrained(folder / "untrained", [value for row in (*texts, *general, *records) for value in row.values()])

    def finetune(start: str, name: str, data: Sequence[Path], epochs: int, rate: float) -> None:
        if not (folder / name).exists():
            mpu_cli.finetune(
                folder / start, data=[str(path) for path in data], epochs=epochs, batch_size=16, lr=rate,
                lr_scheduler="cosine", max_length=TOKENS, out=folder / name,
            )  # fmt: skip
        print(folder / name)

    finetune("untrained", "pretrained", public, epochs_of_text, 1e-3)
    for name, path in files.items():
        finetune("pretrained", name, [path, public[1]], epochs_of_records, 1e-3)


if __name__ == "__main__":
    try:
        main()
    except MpuError as error:
        sys.exit(f"{error.problem}\nwithout the Hub: --data-dir FOLDER, with TOFU's files, and --text FILE")
