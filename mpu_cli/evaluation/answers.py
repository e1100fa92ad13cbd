"""How well a model knows the answers to records: cross-entropy, and what it says."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mpu_cli.client.data import IGNORED, Example, answer_tokens
from mpu_cli.client.frozen import freeze


def loss_per_token(model: PreTrainedModel, examples: Sequence[Example], batch_size: int = 32) -> float:
    """Cross-entropy per labelled token over all ``examples``, in nats."""
    said = freeze(model, examples, "log_probs", layer=-1, batch_size=batch_size)
    return -float(said.log_probs.sum()) / sum(map(answer_tokens, examples))


@torch.no_grad()
def greedy_answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, example: Example, limit: int = 40) -> str:
    """What ``model`` says, greedily, after the part of ``example`` that is not labelled."""
    prompt = [i for i, label in zip(example.ids, example.labels, strict=True) if label == IGNORED]
    ids = torch.tensor([prompt], device=model.device)
    said = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return tokenizer.decode(said[0, len(prompt) :], skip_special_tokens=True).strip()
