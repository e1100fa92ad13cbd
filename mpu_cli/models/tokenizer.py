"""Loading a tokenizer without code from its folder, tried in a process with limits first."""

from __future__ import annotations

from pathlib import Path

from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

from mpu_cli.boundary.cleaning import check_tokens
from mpu_cli.boundary.sandbox import PROCESS, LimitError
from mpu_cli.models.library_errors import blaming
from mpu_cli.models.source import VOCABULARY_FILES, Model
from mpu_cli.models.staging import staged_model


def tokenizer_of(model: Model) -> PreTrainedTokenizerBase:
    """The tokenizer of ``model``, without code from its folder. Raises MpuError if transformers cannot load it."""
    with staged_model(model) as folder, blaming(f"{model.source}: transformers cannot load its tokenizer"):
        return load_staged_tokenizer(folder)


def load_staged_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a staged folder, which is first read in a process with limits. Raises LimitError there.

    Vocabularies in older forms are converted there, and only what came of that is read here.
    """
    file = folder / "tokenizer.json"
    vocabularies = [folder / name for name in VOCABULARY_FILES if (folder / name).exists()]
    if vocabularies and not file.exists():
        worked, outcome = PROCESS.convert(folder)
        if not worked:
            raise LimitError(f"{vocabularies[0].name}: {outcome}")
        if outcome:
            file.write_text(outcome, encoding="utf-8")
    if file.exists():
        worked, outcome = PROCESS.load(file.read_text(encoding="utf-8"))
        if not worked:
            raise LimitError(f"{file.name}: {outcome}")
        check_tokens(*outcome)
        for path in vocabularies:
            path.unlink()
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
