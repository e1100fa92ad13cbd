"""How ``mpu tune`` searches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mpu_cli.options.declare import Options, option


@dataclass(frozen=True, kw_only=True)
class Search(Options):
    """Where to look for a learning rate and a number of epochs, and what the model may lose on the way."""

    PANEL: ClassVar[str] = "Search"

    trials: int = option(15, "Number of trainings.", metavar="N", least=1)
    least_lr: float = option(1e-6, "Lowest learning rate to try.", above=0)
    most_lr: float = option(1e-3, "Highest learning rate to try.", above=0)
    most_epochs: int = option(20, "Most epochs to try.", least=1)
    max_rise: float = option(0.1, "How much the loss on records to keep may rise, in nats per answer token.", above=0)
    enough: float | None = option(
        None, "Stop once the loss on the records to forget has risen by this much, in nats per answer token.", above=0
    )
