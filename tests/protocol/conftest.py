"""A publication that tests of the server's commands begin with."""

from __future__ import annotations

import pytest

from tests.helpers.publication import write_delta


@pytest.fixture
def publication(mpu, tmp_path, base):
    """Two copies, float64 so that nothing is rounded, and a random delta of each."""
    mpu("publish", base, "--copies", 2, "--dtype", "float64", "--out", tmp_path, "--keys", tmp_path / "keys.bin")
    for k in (1, 2):
        write_delta(tmp_path / f"copy_{k}", tmp_path / f"deltas/copy_{k}.safetensors", seed=k)
    return tmp_path
