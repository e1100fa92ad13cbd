"""A small model and its tokenizer, trained on the spot until it knows its records by heart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from mpu_cli.client.finetune import memorise
from mpu_cli.client.trainer import Losses
from mpu_cli.options.unlearning import SYSTEM_PROMPT, Training
from mpu_cli.records.encoding import Encoding
from mpu_cli.records.record import Record

SPECIAL = ["<|begin|>", "<|turn|>", "<|end|>", "<|pad|>"]
CHAT_TEMPLATE = (
    "<|begin|>{% for m in messages %}<|turn|>{{ m['role'] + '\n' + m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def make_tokenizer(records: Sequence[Record]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on the records' texts, with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [f"system\n{SYSTEM_PROMPT} user\n{r.question} assistant\n{r.answer}" for r in records]
    trainer = trainers.BpeTrainer(
        vocab_size=768,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|end|>", pad_token="<|pad|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(
    records: Sequence[Record],
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    *,
    epochs: int,
    seed: int,
    on_step: Callable[[Losses, int], None],
    family: str = "llama",
) -> None:
    """Train a model with 0.9 M parameters on ``records`` and save it in ``folder`` (float32).

    ``family`` is a ``model_type`` whose config takes Llama's entries.
    """
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        family, head_dim=32, vocab_size=len(tokenizer), hidden_size=128, intermediate_size=352, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=2, pad_token_id=3,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    encoding = Encoding(tokenizer, max_length=config.max_position_embeddings)
    training = Training(lr=2e-3, weight_decay=0.0, batch_size=25, seed=seed)
    memorise(model, encoding, records, epochs=epochs, training=training, on_step=on_step)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
