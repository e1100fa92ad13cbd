"""What reads records for the passes: a model in this process, or one that is served."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from mpu_cli.evaluation.encoding import Item
from mpu_cli.evaluation.generation import Answer, answer
from mpu_cli.evaluation.scoring import Scorer, TokenScores


class Reader(Protocol):
    """A model that scores items and answers prompts; ``Scorer`` and ``generation.answer`` say how."""

    def prepare(self, items: Sequence[Item]) -> None:
        """Find out how ``items`` are best read, before the first is."""

    def score(
        self,
        items: Sequence[Item],
        *,
        batch_size: int,
        loss_items: Sequence[Item] = (),
        moments: bool = False,
        advance: Callable[[int], None] = ...,
    ) -> list[TokenScores]:
        """Scores of the tokens of ``items`` and then of ``loss_items``; with ``moments`` where whole distributions are
        known."""

    def answer(
        self,
        tokenizer: PreTrainedTokenizerBase,
        items: Sequence[Item],
        drafts: Sequence[list[int]],
        *,
        limit: int,
        stops: Sequence[str] = (),
        batch_size: int,
        longest: int | None = None,
        advance: Callable[[int], None] = ...,
    ) -> list[Answer]:
        """The greedy answer to each prompt; ``drafts``, its known first tokens, save work where weights are at hand."""


class Local(Scorer):
    """A model in this process."""

    def answer(
        self,
        tokenizer: PreTrainedTokenizerBase,
        items: Sequence[Item],
        drafts: Sequence[list[int]],
        *,
        limit: int,
        stops: Sequence[str] = (),
        batch_size: int,
        longest: int | None = None,
        advance: Callable[[int], None] = lambda _: None,
    ) -> list[Answer]:
        """See ``Reader``."""
        return answer(
            self._model, tokenizer, items, drafts, limit=limit, stops=stops, batch_size=batch_size, longest=longest,
            advance=advance,
        )  # fmt: skip
