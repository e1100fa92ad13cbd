"""What a TOML file is: a recipe of ``mpu sweep``, or options for ``--config``."""

from __future__ import annotations

from pathlib import Path

MAX_RECIPE = 1_000_000  # bytes


def describe_toml(path: Path) -> dict[str, object]:
    """What a file of options is: a recipe of ``mpu sweep`` with its axes, or options for ``--config``."""
    from mpu_cli.boundary.files import read_bounded
    from mpu_cli.toml import parse_toml

    document = parse_toml(read_bounded(path, MAX_RECIPE, links=False), path)
    if "base" not in document and "extends" not in document:
        return {
            "kind": "TOML; for --config, if its tables are named after commands",
            "tables": sorted(document),
        }
    cases = document.get("cases")
    tables = [document, *(case for case in cases if isinstance(case, dict))] if isinstance(cases, list) else [document]
    axes = [(name, len(value)) for table in tables for name, value in table.items() if isinstance(value, list)]
    return {
        "kind": "recipe of mpu sweep", "base": document.get("base", f"that of {document.get('extends')}"),
        "axes": {name: f"{count} values" for name, count in axes if name != "cases"},
        "cases": len(tables) - 1,
    }  # fmt: skip
