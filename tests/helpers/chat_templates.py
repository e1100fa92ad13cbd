"""Chat templates of real families as data, and tokenizers that have them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mpu_cli.toml import read_toml

FOLDER = Path(__file__).parent / "templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.toml"))


@dataclass(frozen=True)
class TemplateCase:
    """A template, and what it prints around the last answer: ``before`` and ``after``; of that, ``labelled_after`` is
    to be learned. ``system``: whether it takes a system prompt."""

    bos: str
    eos: str
    tokens: list[str]
    system: bool
    before: str
    after: str
    labelled_after: str
    generation: str
    template: str


def template_case(name: str) -> TemplateCase:
    return TemplateCase(**read_toml(FOLDER / f"{name}.toml"))


@cache
def pieces() -> str:
    """A byte-level BPE with merges of English words, as JSON."""
    words = "The answer to a question of Ines Corvo, who was born in Eastmere in the north and works as a botanist.\n"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([words] * 4, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    return tokenizer.to_str()


def tokenizer_with(case: TemplateCase) -> PreTrainedTokenizerFast:
    """A tokenizer that has the case's template and special tokens."""
    special = {name: text for name, text in (("bos_token", case.bos), ("eos_token", case.eos)) if text}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(pieces()), **special)
    tokenizer.add_tokens(case.tokens, special_tokens=True)
    tokenizer.chat_template = case.template
    return tokenizer
