"""A small llama, with records to forget and to retain beside it."""

from __future__ import annotations

import pytest

from tests.helpers.models import random_model, save, write_records


@pytest.fixture
def base(tmp_path):
    write_records(tmp_path / "forget.jsonl", 6, 1)
    write_records(tmp_path / "retain.jsonl", 9, 2)
    return save(random_model("llama"), tmp_path / "base")
