"""Words of texts in any script, for ROUGE.

OpenUnlearning's ROUGE, of rouge-score, knows the letters of English and digits only: it drops all others, and
compares what remains, be it a year or nothing.
"""

from __future__ import annotations

import re
import unicodedata

import regex

_ENGLISH = re.compile(r"[a-z0-9]")
_DROPPED = regex.compile(r"[\p{L}\p{N}\p{M}\p{Extended_Pictographic}--[a-z0-9]]", regex.VERSION1)
# Letters of scripts that put no spaces between words: Unicode's line breaking (UAX 14) has classes for them.
_UNSPACED = r"[[\p{LB=SA}\p{LB=ID}\p{LB=CJ}\p{Han}\p{Hiragana}\p{Katakana}]&&[\p{L}\p{Nl}]]"
# One of those letters; a word of any other letters and digits; or any other visible sign that is not punctuation.
_WORDS = regex.compile(
    rf"{_UNSPACED}\p{{M}}*|[[\p{{L}}\p{{N}}]--{_UNSPACED}][[\p{{L}}\p{{N}}\p{{M}}]--{_UNSPACED}]*|(?=[\p{{S}}])\X",
    regex.VERSION1,
)


def is_cut_by_rouge(text: str) -> bool:
    """Whether rouge-score's own tokenizer drops letters of ``text``, or finds no word in it."""
    lowered = text.lower()
    return bool(_DROPPED.search(lowered)) or not _ENGLISH.search(lowered)


class AnyScript:
    """A tokenizer for ``rouge_score``: words in lower case, of any script.

    >>> AnyScript().tokenize("Она родилась в 北京 2008年.")
    ['она', 'родилась', 'в', '北', '京', '2008', '年']
    """

    def tokenize(self, text: str) -> list[str]:
        return _WORDS.findall(unicodedata.normalize("NFKC", text).lower())
