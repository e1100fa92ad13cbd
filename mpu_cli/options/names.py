"""The names in tables of other packages, read from their source, so that options list them without importing torch."""

from __future__ import annotations

import ast
from pathlib import Path

from mpu_cli import EXTENSIONS

PACKAGE = Path(__file__).parents[1]


def keys_of(table: str, module: str) -> tuple[str, ...]:
    """The keys of the dict ``table`` at the top level of ``module``, those that are written there as text."""
    source = (PACKAGE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    start = source.index(f"\n{table} = {{")
    literal = ast.parse(source[start : source.index("\n}", start) + 2]).body[0]
    assert isinstance(literal, ast.Assign)
    assert isinstance(literal.value, ast.Dict)
    return tuple(str(key.value) for key in literal.value.keys if isinstance(key, ast.Constant))


ALGORITHMS = keys_of("ALGORITHMS", "training.losses")
RETAIN_TERMS = keys_of("RETAIN", "training.losses")
OPTIMIZERS = keys_of("OPTIMIZERS", "training.optimizers")
BENCHMARKS = tuple(
    sorted(path.stem for path in (PACKAGE / "measuring/benchmarks").glob("[a-z]*.py") if path.stem != "base")
)
ATTACKS = keys_of("ATTACKS", EXTENSIONS["attacks"])  # those that keep the weights first
SYMMETRIES = (*keys_of("SYMMETRY_SETS", "model.family"), "none")
