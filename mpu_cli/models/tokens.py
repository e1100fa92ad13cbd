"""Whether the small files that copies get tokenise as all of the model's own do."""

from __future__ import annotations

from pathlib import Path

import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mpu_cli.errors import MpuError
from mpu_cli.models.source import Model

AT_ONCE = 500  # words of a text


def check_same_tokens(model: Model, copy: Path, lost: str) -> None:
    """Raises MpuError unless the tokenizer that transformers reads in ``copy``, which lacks ``lost``, agrees with the
    one in the folder of ``model`` on a text of all words in the vocabulary. If there is none, nothing is compared.
    """
    transformers.logging.set_verbosity_error()
    tokenizer, other = _tokenizer(model.folder), _tokenizer(copy)
    if tokenizer is None:
        return
    texts = words_of(tokenizer)
    if other is None or other(texts).input_ids != tokenizer(texts).input_ids:
        raise MpuError(
            f"{model.folder}: its copies would have other tokens, because they do not get {lost}",
            "load the tokenizer with transformers and save it again, as a tokenizer.json that says everything",
        )


def words_of(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Texts that together have every word of the vocabulary, and what tokenizers disagree about."""
    words = [tokenizer.convert_tokens_to_string([token]) for token in sorted(tokenizer.get_vocab())]
    texts = [" ".join(words[i : i + AT_ONCE]) for i in range(0, len(words), AT_ONCE)]
    return ["It's 12345 a  b\n\nDon't, x_y", *texts]


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception:  # a tokenizer of another program's, or one that needs code
        return None
