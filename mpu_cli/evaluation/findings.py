"""What the passes over a model found, kept in a file after each pass, so that an interrupted run can resume."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpu_cli.evaluation.readings import AnswerReading
from mpu_cli.resumption import write_atomically

FIELDS = sorted(AnswerReading.__annotations__)  # of a reading: findings with other fields are of another version


@dataclass
class Findings:
    """What was found under ``facts``, by key; written to ``path`` after each pass."""

    facts: dict[str, Any]
    entries: dict[str, Any]
    path: Path

    def keep(self, entries: Mapping[str, object]) -> None:
        self.entries.update(entries)
        write_atomically(self.path, json.dumps({"facts": self.facts, "fields": FIELDS, "findings": self.entries}))


def read_findings(path: Path, facts: dict[str, Any], splits: Mapping[str, Collection[str]]) -> Findings:
    """Findings of an interrupted run with the same facts, as far as the records behind them have not changed; empty if
    there are none or the file is damaged. ``splits`` names the splits that each key was found on."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        document = json.loads(path.read_text(encoding="utf-8"))
        before, now = document["facts"], json.loads(json.dumps(facts))
        then, data = before.pop("data"), now.pop("data")
        same = {name for name in data if then.get(name) == data[name]}
        if before == now and document["fields"] == FIELDS:
            entries = document["findings"]
            return Findings(
                facts, {key: entries[key] for key in splits if key in entries and same >= {*splits[key]}}, path
            )
    return Findings(facts, {}, path)
