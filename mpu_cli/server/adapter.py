"""Aggregating LoRA deltas into one peft adapter for the base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from mpu_cli.checkpoint.dtypes import NAME, all_finite
from mpu_cli.checkpoint.pool import worker_pool
from mpu_cli.checkpoint.transaction import Transaction
from mpu_cli.checkpoint.writer import CheckpointWriter, TensorSpecs
from mpu_cli.errors import MpuError
from mpu_cli.models.files import write_json
from mpu_cli.models.source import Model
from mpu_cli.server.agreement import Aggregation, agreement
from mpu_cli.server.card import CARD, card
from mpu_cli.server.deltas import check_base, check_norms, outliers_of
from mpu_cli.server.inverse import LowRank, Undoing
from mpu_cli.server.round import AggregatePlan


def aggregate_adapter(plan: AggregatePlan) -> Aggregation:
    """Write η·Δ̄ of one owner's LoRA deltas as one peft adapter for the base, whose rank is the sum of theirs.

    Its factors are the inverted factors side by side: B = [η·w₁B₁ … η·w_mB_m], A = [A₁ … A_m], so nothing is lost.
    Raises MpuError as ``aggregate`` does.
    """
    base, layout, options, [owner], [weights] = plan.base, plan.layout, plan.options, plan.owners, plan.weights
    deltas, keys = owner.deltas, owner.keys
    rate = float(options.server_lr)
    with worker_pool() as pool:
        check_base(base, keys, pool)
    undoing = Undoing(deltas, keys, layout)
    gram = torch.zeros(len(deltas), len(deltas), dtype=torch.float64)
    tensors: dict[str, torch.Tensor] = {}
    outliers: list[tuple[str, int, float]] = []
    for tensor in layout.parameters:
        changes = undoing.changes(tensor)
        if all(change is None for change in changes):
            continue
        rows = base.checkpoint.tensors[tensor.name].shape[0]
        factors = [c.factors(rows) if isinstance(c, LowRank) else None for c in changes]
        for delta, pair in zip(deltas, factors, strict=True):
            if pair and not all(all_finite(factor) for factor in pair):
                raise MpuError(
                    f"{delta.path}: {tensor.name!r} contains NaN or Inf, so nothing from this round was applied"
                )
        products = _inner_products(factors)
        gram += products
        outliers += outliers_of(tensor.name, products, deltas)
        left_factor = torch.cat([rate * float(w) * f[0] for w, f in zip(weights, factors, strict=True) if f], 1)
        right = torch.cat([f[1] for f in factors if f], 0)
        a, b = (left_factor.T, right.T) if layout.family.transposed else (right, left_factor)
        module = "base_model.model." + layout.full_name(tensor.name).removesuffix(".weight")
        tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    check_norms(gram, deltas, options.max_norm, weights * rate)
    config = _peft_config(tensors, base, transposed=layout.family.transposed)
    specs: TensorSpecs = {name: (NAME[t.dtype], tuple(t.shape)) for name, t in tensors.items()}
    with Transaction(force=plan.force) as transaction:
        folder = transaction.add(plan.out, directory=True)
        with CheckpointWriter(folder / "adapter_model.safetensors", specs, {}) as writer:
            for name, factor in tensors.items():
                writer.tensor(name).copy_(factor)
        write_json(folder / "adapter_config.json", config)
        manifests = {delta.copy: delta.manifest for delta in deltas}
        result = replace(agreement(plan.out, gram, keys, manifests), outliers=tuple(outliers))
        result.check(plan.force)
        (folder / CARD).write_text(card(base, keys, result, "adapter"), encoding="utf-8")
    return result


def _inner_products(factors: Sequence[tuple[torch.Tensor, torch.Tensor] | None]) -> torch.Tensor:
    """⟨B_j A_j, B_k A_k⟩ = tr(B_jᵀB_k·A_kA_jᵀ) of every two deltas, float64 (deltas, deltas); 0 where one has none."""
    products = torch.zeros(len(factors), len(factors), dtype=torch.float64)
    for j, factors_j in enumerate(factors):
        for k, factors_k in enumerate(factors):
            if factors_j and factors_k:
                b_product = factors_j[0].double().T @ factors_k[0].double()
                a_product = factors_j[1].double() @ factors_k[1].double().T
                products[j, k] = (b_product * a_product).sum()
    return products


def _peft_config(tensors: Mapping[str, torch.Tensor], base: Model, *, transposed: bool) -> dict[str, object]:
    """adapter_config.json for these factors."""
    ranks = {tensor.shape[0] for name, tensor in tensors.items() if ".lora_A." in name}
    modules = sorted({name.removeprefix("base_model.model.").split(".lora_")[0] for name in tensors})
    config: dict[str, object] = {
        # Of a base on this machine, its folder's name only: where it lies is nobody's business.
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base.public_name, "bias": "none",
        "r": max(ranks), "lora_alpha": max(ranks), "lora_dropout": 0.0, "target_modules": modules,
        "rank_pattern": {}, "alpha_pattern": {}, "fan_in_fan_out": transposed, "inference_mode": True,
    }  # fmt: skip
    if len(ranks) > 1:
        module_ranks = {module: tensors[f"base_model.model.{module}.lora_A.weight"].shape[0] for module in modules}
        config |= {"rank_pattern": module_ranks, "alpha_pattern": module_ranks}
    return config
