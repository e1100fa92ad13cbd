"""Optimisers by the names of the command line."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

import torch

from mpu_cli.errors import MpuError


class BlockwiseAdamW(torch.optim.Optimizer):
    """AdamW with one second moment a tensor: the mean of its squared gradient (Adam-mini's idea, Zhang et al. 2024).

    m ← β₁m + (1−β₁)g, v ← β₂v + (1−β₂)·mean(g²), θ ← θ − lr·(m̂/(√v̂ + ε) + λθ), with the usual bias corrections.
    v does not change under an orthogonal map of the tensor, so training on a transformed copy stays the transform of
    training on the base; it is smooth in θ, so zero-sum noise cancels to first order; and it keeps one number a weight,
    AdamW two. The first moment is in float32 (float64 for float64 parameters), also for bfloat16 weights, for which
    torch's AdamW has both moments in bfloat16.
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

    def load_state_dict(self, state_dict: dict) -> None:
        """Take over a saved state, with the moments as wide as they were: torch would round them to the parameters."""
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, saved in state_dict["state"].items():
            state = self.state[parameters[number]]
            state |= {name: saved[name].to(state[name].device) for name in ("exp_avg", "exp_avg_sq")}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
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
                # At most one temporary of the tensor's size at a time, in float32; nothing waits for the device.
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
        return loss


def _mean(x: torch.Tensor) -> torch.Tensor:
    """The mean of the whole tensor, also where this process holds only a shard of it."""
    from torch.distributed.tensor import DTensor  # a third of a second, which asking for names must not cost

    return x.sum().full_tensor() / x.numel() if isinstance(x, DTensor) else x.mean()


OPTIMIZERS = ("adamw", "adamw-blockwise", "sgd", "paged_adamw_32bit", "adamw_8bit")


def make_optimizer(name: str, groups: list[dict], lr: float) -> torch.optim.Optimizer:
    """The optimiser ``name`` over parameter groups. Raises MpuError if the package behind it is not installed."""
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, fused=True)
    if name == "adamw-blockwise":
        return BlockwiseAdamW(groups, lr=lr)
    if name == "sgd":
        return torch.optim.SGD(groups, lr=lr)
    try:
        import bitsandbytes
    except ImportError as error:
        raise MpuError(f"--optim {name} needs bitsandbytes; install it with pip install bitsandbytes") from error
    warnings.filterwarnings("ignore", message="Paged optimizers are not supported on CPU")  # nothing to page there
    if name == "paged_adamw_32bit":
        return bitsandbytes.optim.PagedAdamW32bit(groups, lr=lr)
    return bitsandbytes.optim.AdamW8bit(groups, lr=lr)
