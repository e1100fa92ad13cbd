"""Optimisers, and the registry from which options, costs, checks and `mpu doctor` take them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from mpu_cli.errors import MpuError


class _WideMoments(torch.optim.Optimizer):
    """Loads a saved state with the moments in the dtype they had: torch would cast them to the parameters' dtype."""

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, moments in state_dict["state"].items():
            state = self.state[parameters[number]]
            for name in ("exp_avg", "exp_avg_sq"):
                if name in moments:
                    state[name] = moments[name].to(state[name].device)


class BlockwiseAdamW(_WideMoments):
    """AdamW with one second moment per tensor: the mean squared gradient (the idea of Adam-mini, Zhang et al. 2024).

    m ← β₁m + (1−β₁)g, v ← β₂v + (1−β₂)·mean(g²), θ ← θ − lr·(m̂/(√v̂ + ε) + λθ), with the usual bias corrections.
    v is invariant under orthogonal maps of the tensor, so training a transformed copy gives the transform of training
    the base; it is smooth in θ, so zero-sum noise cancels to first order; and the state is one number per weight, where
    AdamW keeps two. The first moment is in float32 (float64 for float64 parameters) even for bfloat16 weights, for
    which torch's AdamW keeps both moments in bfloat16.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override] # noqa: ARG002 (as torch has it)
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                wide = torch.promote_types(parameter.dtype, torch.float32)
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(parameter, dtype=wide)
                    state["exp_avg_sq"] = torch.zeros((), dtype=wide, device=parameter.device)
                state["step"] += 1
                # At most one temporary of the tensor's size at a time, in float32; no synchronisation with the device.
                state["exp_avg"].mul_(beta1).add_(parameter.grad, alpha=1 - beta1)
                square = parameter.grad.to(wide, copy=True).square_()
                state["exp_avg_sq"].lerp_(_mean(square), 1 - beta2)
                del square
                scale = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt().add_(group["eps"])
                rate = group["lr"] / (1 - beta1 ** state["step"]) / scale
                moved = parameter.to(wide)
                moved.mul_(1 - group["lr"] * group["weight_decay"]).addcmul_(state["exp_avg"], rate, value=-1)
                if moved is not parameter:
                    parameter.copy_(moved)


def _mean(x: torch.Tensor) -> torch.Tensor:
    """The mean of the whole tensor, even if this process holds only a shard of it."""
    from torch.distributed.tensor import DTensor  # takes a third of a second; listing the names must not

    return x.sum().full_tensor() / x.numel() if isinstance(x, DTensor) else x.mean()  # type: ignore[attr-defined]


class Muon(_WideMoments):
    """torch's Muon (Jordan et al., 2024) for weight matrices, BlockwiseAdamW for embeddings, head and 1-D tensors.

    ``muon`` in each group selects one of the two. A step of Muon is the orthogonal factor of its momentum matrix, which
    rotates with the coordinates on either side, up to rounding: torch computes it in bfloat16. Steps are scaled to the
    size of AdamW's, so that ``lr`` means the same (Liu et al., 2025).
    """

    def __init__(self, groups: list[dict], lr: float):
        if not hasattr(torch.optim, "Muon"):
            raise MpuError(f"--optim muon needs torch 2.9 or newer, but this is {torch.__version__}")
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        matrices = [group for group in self.param_groups if group["muon"]]
        adamw_groups = [group for group in self.param_groups if not group["muon"]]
        self._parts: dict[bool, torch.optim.Optimizer] = {}
        if matrices:
            self._parts[True] = torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw")
        if adamw_groups:
            self._parts[False] = BlockwiseAdamW(adamw_groups, lr=lr)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override] # noqa: ARG002 (as torch has it)
        for use_muon, part in self._parts.items():
            # Schedulers and load_state_dict replace this optimiser's state and groups, so pass them to the parts.
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if group["muon"] is use_muon]
            part.step()


def _matrices_apart(groups: Iterable[dict], outside: Collection[torch.Tensor]) -> list[dict]:
    """``groups``, each split into its matrices, except those ``outside`` the layers, and the rest."""
    apart = []
    for group in groups:
        parts: dict[bool, list[torch.Tensor]] = {True: [], False: []}
        for parameter in group["params"]:
            is_outside = any(parameter is other for other in outside)  # "in" would compare the elements
            parts[parameter.ndim == 2 and not is_outside].append(parameter)
        apart += [{**group, "params": params, "muon": use_muon} for use_muon, params in parts.items() if params]
    return apart


Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class Optimizer:
    """An optimiser of ``--optim``, as options, costs and checks see it."""

    # From parameter groups, the rate, and those of the parameters that are outside the layers: embeddings and head.
    make: Callable[[Groups, float, Collection[torch.Tensor]], torch.optim.Optimizer]
    state_bytes: int  # per weight, beside weight and gradient
    # Each element's step depends on that element's gradients only, squared or by sign, so it commutes with permutations
    # and sign changes of coordinates but not with rotations.
    elementwise: bool = False
    normalised: bool = True  # steps are as large as the rate, whatever the size of gradients
    whole_matrices: bool = False  # it must see each matrix in one piece, where weights are sharded


OPTIMIZERS = {
    "adamw": Optimizer(
        lambda groups, lr, _: torch.optim.AdamW(groups, lr=lr, fused=True), state_bytes=8, elementwise=True
    ),
    "adamw-blockwise": Optimizer(lambda groups, lr, _: BlockwiseAdamW(groups, lr=lr), state_bytes=4),
    "sgd": Optimizer(lambda groups, lr, _: torch.optim.SGD(groups, lr=lr), state_bytes=0, normalised=False),
    "muon": Optimizer(
        lambda groups, lr, outside: Muon(_matrices_apart(groups, outside), lr), state_bytes=4, whole_matrices=True
    ),
}


def make_optimizer(
    name: str, groups: Groups, lr: float, outside: Collection[torch.Tensor] = ()
) -> torch.optim.Optimizer:
    """The optimiser ``name`` over parameter groups; ``outside`` are embedding and head, which Muon is not meant for."""
    return OPTIMIZERS[name].make(groups, lr, outside)
