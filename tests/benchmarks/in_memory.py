"""Publishing the plain way, to compare with: whole state dicts in memory, one draw of torch.randn for each copy.

python -m tests.benchmarks.in_memory BASE OUT COPIES
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from mpu_cli.files.randomness import new_seed
from mpu_cli.model.layout import layout_of
from mpu_cli.model.source import open_model
from mpu_cli.protocol.noise import ZeroSum
from mpu_cli.protocol.publication import Publication

KAPPA = 0.01


def main(base: str, out: Path, copies: int) -> None:
    model = open_model(base)
    layout = layout_of(model.checkpoint.tensors, model.config, base)
    weights = load_file(model.checkpoint.path)
    sigma = {}
    for block, tensors in layout.blocks.items():
        squares = sum(float(weights[t.name].float().square().sum()) for t in tensors)
        sigma[block] = KAPPA * math.sqrt(squares / sum(weights[t.name].numel() for t in tensors))
    noise = [{name: torch.randn(w.shape) for name, w in weights.items()} for _ in range(copies)]
    scale = math.sqrt(copies / (copies - 1))
    for name in weights:
        mean = sum(each[name] for each in noise) / copies
        for alpha, each in zip(ZeroSum.default(copies).factors, noise, strict=True):
            each[name] = (each[name] - mean) * (scale * alpha * sigma[layout.tensors[name].block])
    publication = Publication(seed=new_seed(), symmetries="paper", scheme=ZeroSum.default(copies))
    for k, each in enumerate(noise, 1):
        transform = publication.transform(k, layout)
        copy = {}
        for name, w in weights.items():
            noisy = w.float() + each[name]
            mapping = transform.of(layout.tensors[name])
            moved = torch.empty_like(noisy)
            matrix = noisy.view(len(noisy), -1)
            mapping.put(moved.view(len(moved), -1), mapping.forward(matrix, 0), 0)
            copy[name] = moved.to(w.dtype)
        out.mkdir(parents=True, exist_ok=True)
        save_file(copy, out / f"copy_{k}.safetensors")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
