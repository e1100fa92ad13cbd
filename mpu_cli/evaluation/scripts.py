"""Words of texts in any script, for ROUGE.

OpenUnlearning's ROUGE, of rouge-score, knows the letters of English and digits only: an answer without any has 0.
"""

from __future__ import annotations

import re
import unicodedata

import regex

ENGLISH = re.compile(r"[a-z0-9]", re.IGNORECASE)
# A sign of its own in scripts that put no spaces between words, and any other visible sign that is no punctuation.
_WORDS = regex.compile(
    r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]\p{M}*"
    r"|[\p{L}\p{N}][\p{L}\p{N}\p{M}]*"
    r"|(?=[\p{S}])\X"
)


class AnyScript:
    """A tokenizer for ``rouge_score``: words in lower case, of any script.

    >>> AnyScript().tokenize("Она родилась в 北京.")
    ['она', 'родилась', 'в', '北', '京']
    """

    def tokenize(self, text: str) -> list[str]:
        return _WORDS.findall(unicodedata.normalize("NFKC", text).lower())


def has_english_words(text: str) -> bool:
    """Whether rouge-score's own tokenizer finds a word in ``text``."""
    return ENGLISH.search(text) is not None
