"""docs/formats.md, implemented again from its text alone: seeds, streams, noise, fingerprints, tags of files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyrage
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from safetensors import safe_open
from safetensors.torch import load_file

from tests.helpers.models import random_model, save
from tests.helpers.paths import ROOT

PAGE = (ROOT / "docs/formats.md").read_text(encoding="utf-8")
SEED = bytes.fromhex("9367af1f19240f0479cccae331aa0f0da0809963a420aeb61163ad718f18043a")


def hkdf(secret: bytes, info: str) -> bytes:
    return HKDF(SHA256(), 32, None, info.encode()).derive(secret)


def subkey(*purpose: object) -> bytes:
    return hkdf(SEED, "mpu v1 " + json.dumps(purpose))


def stream(key: bytes, nbytes: int) -> bytes:
    return Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(nbytes))


def normals(key: bytes, n: int) -> np.ndarray:
    """The first ``n`` float32 normals, in float64."""
    cells = -(-n // 1024)
    words = np.frombuffer(stream(key, 4096 * cells), "<i4").reshape(cells, 2, 512).astype(np.int64)
    rho = np.sqrt(-2 * np.log(((words[:, 0] & 0x7FFFFFFF) + 1) / 2**31))
    phi = np.pi * words[:, 1] / 2**31
    return np.stack([rho * np.cos(phi), rho * np.sin(phi)], 1).reshape(-1)[:n]


def numbers_in_row(row: str) -> list[float]:
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| {row}"))
    return [float(number.replace("−", "-")) for number in re.findall(r"[−-]?[\d.]+", line.split("|")[2])]


def test_the_vector() -> None:
    assert hkdf(bytes(32), "mpu seed from number") == SEED
    key = subkey("noise", 1, "lm_head.weight", 0)
    for value in (SEED, subkey("run"), key, stream(key, 16)):
        assert f"`{value.hex()}`" in PAGE
    np.testing.assert_allclose(normals(key, 1024)[[0, 1, 512, 513]], numbers_in_row("its normals"), rtol=1e-6)
    words = np.frombuffer(stream(key, 8192), "<i8").reshape(2, 512)
    rho = np.sqrt(-2 * np.log(((words[0, 0] & (2**63 - 1)) + 1) / 2**63))
    phi = np.pi * words[1, 0] / 2**63
    np.testing.assert_allclose([rho * np.cos(phi), rho * np.sin(phi)], numbers_in_row("as float64"), rtol=1e-12)
    order = np.argsort(np.frombuffer(stream(subkey("symmetry", 1, 1, "ffn", 0), 64), "<u8"), kind="stable")
    assert order.tolist() == numbers_in_row("permutation of 8")


def test_a_publication_is_what_the_page_says(mpu: Callable, tmp_path: Path) -> None:
    """Keys opened with age, the base's fingerprint, a copy's noise and its facts, each from the page alone."""
    base = save(random_model("llama"), tmp_path / "base")
    mpu("keygen", "--out", tmp_path / "id.txt")
    mpu("publish", base, "--seed", 0, "--kappa", 0.1, "--symmetries", "none", "--out", tmp_path,
        "--keys", tmp_path / "keys.bin", "--identity", tmp_path / "id.txt")  # fmt: skip
    secret = next(line for line in (tmp_path / "id.txt").read_text().splitlines() if line.startswith("AGE-SECRET"))
    identity = pyrage.x25519.Identity.from_str(secret)
    keys = json.loads(pyrage.decrypt((tmp_path / "keys.bin").read_bytes(), [identity]))
    assert keys["seed"] == SEED.hex()
    assert keys["run"] == subkey("run").hex()[:32]
    for name in keys:
        assert f"`{name}`" in PAGE

    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("base", "copy_2"))
    pieces = {n: [t.numpy().tobytes()[i : i + 2**22] for i in range(0, t.nbytes, 2**22)] for n, t in before.items()}
    digests = {n: blake3(b"".join(blake3(p).digest() for p in ps)) for n, ps in pieces.items()}
    table = [[n, "F32", list(before[n].shape), digests[n].hexdigest()] for n in sorted(before)]
    digest = blake3(json.dumps(table, separators=(",", ":")).encode()).hexdigest()
    assert keys["base"]["fingerprint"] == f"blake3:{digest}"

    name, block = "model.norm.weight", "model.norm.weight"
    expected = keys["noise"]["factors"][1] * keys["sigma"][block] * normals(subkey("noise", 1, name, 0), 48)
    np.testing.assert_allclose((after[name] - before[name]).numpy(), expected, atol=1e-6)

    facts = json.loads((tmp_path / "copy_2/mpu.json").read_text())
    with safe_open(tmp_path / "copy_2/model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["mpu"]) == facts
    assert facts["copy_id"] == keys["copy_ids"][1]
    for field in facts:
        assert f"`{field}`" in PAGE
