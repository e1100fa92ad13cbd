"""Tags that show the server whether the copies of a round were trained identically, and nothing else.

A delta carries HMAC-SHA256 values of what it was trained on and how. Their key never leaves the client, so the server
may guess records but cannot test a guess. Each round has its own key, so tags cannot be compared between rounds. Tags
that differ under the same key belong to copies that were trained differently.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from pathlib import Path

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from mpu_cli.sealing import default_identity_path, own_secret

KEY_BYTES, TAG_BYTES = 32, 16


def default_secret_path() -> Path:
    """``mpu/client.key`` in the user's configuration directory."""
    return default_identity_path().with_name("client.key")


def client_secret(path: Path) -> bytes:
    """The client's secret in ``path``, created on first use with mode 0600. Raises MpuError if the file is invalid."""
    return own_secret(path, "the client's secret", "remove it to create a new one")


def own_client_secret() -> bytes:
    """The secret in the client's configuration directory."""
    return client_secret(default_secret_path())


def training_tag(secret: bytes, run: str, round_: int, facts: Mapping[str, object]) -> dict[str, str]:
    """A tag for each of ``facts``, and under "key" one of the key itself: only tags of the same key can be compared."""
    key = HKDF(SHA256(), KEY_BYTES, salt=None, info=f"mpu training tag {json.dumps([run, round_])}".encode()).derive(
        secret
    )
    return {
        name: hmac.new(key, json.dumps([name, value], sort_keys=True, default=str).encode(), "sha256")
        .digest()[:TAG_BYTES]
        .hex()
        for name, value in {"key": None, **facts}.items()
    }
