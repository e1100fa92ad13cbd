"""The small models that the tables are about: a Llama of 5 M parameters, trained on a fifth of TOFU.

python examples/small/make.py models

writes models/pretrained (public text, and general questions), models/full (from it, 800 records of TOFU: those that
retain_perturbed asks about, and forget10), and models/retain99 and models/retain90, which never saw forget01 or
forget10. Their records lie in models/records. TOFU and the text come from the Hub, or from --data-dir and --text.
Training is the program's own, so the numbers of another machine differ in the last digits.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import mpu_cli
from mpu_cli.options.unlearning import RecordFormat
from mpu_cli.records.read import read_records

TEXTS = 4000  # of the public text
GENERAL = ("real_authors_perturbed", "world_facts_perturbed")
AUTHORS, FORGET10 = slice(0, 400), slice(3600, 4000)  # of TOFU's 4,000 records
LEFT_OUT = {"full": 0, "retain99": 40, "retain90": 400}  # records at the end that a model does not see
SPECIAL = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>", "<|eot_id|>", "<|pad|>"]
CHAT_TEMPLATE = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


def make_untrained(folder: Path, texts: Sequence[str]) -> None:
    """A tokenizer for ``texts``, 4,096 tokens of bytes and what they merge to, and a model with random weights."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    begin, _, _, _, end, pad = SPECIAL
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=begin, eos_token=end, pad_token=pad)
    fast.chat_template = CHAT_TEMPLATE
    config = AutoConfig.for_model(
        "llama", vocab_size=len(fast), hidden_size=256, intermediate_size=704, num_hidden_layers=6,
        num_attention_heads=8, num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, rms_norm_eps=1e-6,
        rope_theta=500000.0, tie_word_embeddings=True, bos_token_id=0, eos_token_id=4, pad_token_id=5,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    fast.save_pretrained(folder)


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
    make_untrained(folder / "untrained", [value for row in (*texts, *general, *records) for value in row.values()])

    def finetune(start: str, name: str, data: Sequence[Path], epochs: int, rate: float) -> None:
        mpu_cli.finetune(
            folder / start, data=[str(path) for path in data], epochs=epochs, batch_size=16, lr=rate,
            lr_scheduler="cosine", out=folder / name,
        )  # fmt: skip
        print(folder / name)

    finetune("untrained", "pretrained", public, epochs_of_text, 1e-3)
    for name, path in files.items():
        finetune("pretrained", name, [path, public[1]], epochs_of_records, 1e-3)


if __name__ == "__main__":
    main()
