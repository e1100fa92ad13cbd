"""What copies have of the files beside the base's weights: the same tokens, and no entry is lost without a word."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from tests.helpers.attacks import edit
from tests.helpers.models import random_model

TEXT = "Where was Ines born? It's 12345 a  b\n\nDon't, x_y"


def save_pieces(folder: Path) -> None:
    """A tokenizer whose words begin with ▁, as in sentencepiece models that were converted."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=96, special_tokens=["<s>", "</s>", "<unk>"], show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def base_with_pieces(folder: Path, family: str) -> Path:
    random_model(family).save_pretrained(folder)
    save_pieces(folder)
    return folder


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "gpt_neox", "gemma3_text", "opt"])
def test_a_tokenizers_class_named_in_the_models_config(mpu: Callable, root: Path, family: str) -> None:
    """And nowhere else: transformers takes another class, which splits words otherwise, if copies lack it."""
    base = base_with_pieces(root / "own", family)
    edit(base / "tokenizer_config.json", "tokenizer_class")
    edit(base / "config.json", tokenizer_class="PreTrainedTokenizerFast")
    mpu("publish", base, "--copies", 2, "--kappa", 0, "--out", root, "--keys", root / "keys.bin")
    expected, ours = (AutoTokenizer.from_pretrained(folder) for folder in (base, root / "copy_1"))
    assert ours(TEXT).input_ids == expected(TEXT).input_ids
    assert type(ours) is type(expected)


def test_copies_that_would_have_other_tokens_are_refused(mpu: Callable, root: Path) -> None:
    """Copies do not get what looks like a path, and transformers then takes another class."""
    base = base_with_pieces(root / "own", "qwen3")
    edit(base / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast/", sp_model_kwargs={"a": 1})
    mpu("publish", base, "--out", root / "x", "--keys", root / "x/keys.bin", fails="tokenizer_class", status=1)
    assert not (root / "x").exists()


def test_what_copies_do_not_get_is_named(mpu: Callable, root: Path) -> None:
    base = root / "base"
    edit(base / "generation_config.json", stop_strings=["<|end|>"], bad_words_ids=[[5]], cache_implementation="hybrid")
    edit(base / "tokenizer_config.json", response_schema={"type": "object"})
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates/rag.jinja").write_text("{{ 1 }}")
    printed = mpu("publish", "base", "--kappa", 0, "--copies", 2, cwd=root).err
    for lost in (
        "additional_chat_templates/rag.jinja",
        "cache_implementation",
        "tokenizer_config.json: response_schema",
    ):
        assert lost in printed
    generation_config = GenerationConfig.from_pretrained(root / "copy_1")
    assert (generation_config.stop_strings, generation_config.bad_words_ids) == (["<|end|>"], [[5]])
