"""Options of trainings that tests of several commands run."""

from __future__ import annotations

BRIEF = (
    "--algo", "npo", "--epochs", 2, "--lr", 0.001, "--batch-size", 3,
    "--optim", "adamw-blockwise", "--reading", "template=plain",
)  # fmt: skip

FORGETTING = (
    "--algo", "npo", "--constants", "beta=2.0", "--lr", 0.0003, "--epochs", 10,
    "--batch-size", 5, "--optim", "adamw-blockwise",
)  # fmt: skip
