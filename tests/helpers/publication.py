"""A publication of two copies with random deltas, for tests of the server's commands."""

from __future__ import annotations

import torch
from safetensors.torch import save_file

from mpu_cli.files.manifest import DeltaManifest, as_metadata, delta_facts, read_copy_manifest
from mpu_cli.files.reader import open_checkpoint
from mpu_cli.files.sealing import default_identity_path, read_identities
from mpu_cli.protocol.keys import unseal


def keys_of(folder, name="keys.bin"):
    return unseal(folder / name, read_identities(default_identity_path()))


def write_delta(copy, target, seed=0, change=lambda tensors: tensors, facts=None):
    """A delta of random numbers for ``copy``; ``change`` and ``facts`` can make it invalid."""
    torch.manual_seed(seed)
    checkpoint = open_checkpoint(copy)
    delta_tensors = {name: torch.randn(info.shape, dtype=torch.float64) for name, info in checkpoint.tensors.items()}
    manifest = delta_facts(DeltaManifest(read_copy_manifest(copy), "npo")) | (facts or {})
    target.parent.mkdir(exist_ok=True)
    save_file(change(delta_tensors), target, as_metadata(manifest))
    return target


def aggregate(mpu, folder, *arguments, check=True):
    # Random deltas have nothing in common, which only --trust-deltas aggregates.
    return mpu("aggregate", *(arguments or [folder / "deltas"]), "--keys", folder / "keys.bin", "--dtype", "float64",
               "--trust-deltas", "--force", "--out", folder / "unlearned", check=check)  # fmt: skip
