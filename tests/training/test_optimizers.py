"""Optimisers and their registry."""

from __future__ import annotations

import copy

import pytest
import torch

from mpu_cli.errors import UsageError
from mpu_cli.options.declare import from_flat
from mpu_cli.options.unlearning import Unlearning
from mpu_cli.training.optimizers import OPTIMIZERS, BlockwiseAdamW, make_optimizer
from mpu_cli.training.rates import with_epochs, with_rate


class TestBlockwiseAdamW:
    def test_is_adamw_where_all_gradients_have_one_size(self):
        """If all entries of a gradient have the same square, their mean equals each of them: the two must agree."""
        torch.manual_seed(0)
        start = torch.randn(5, 4, dtype=torch.float64)
        ours, theirs = (start.clone().requires_grad_() for _ in range(2))
        options = {"lr": 0.03, "betas": (0.8, 0.95), "weight_decay": 0.1}
        pairs = [(ours, BlockwiseAdamW([ours], **options)), (theirs, torch.optim.AdamW([theirs], **options))]
        for step in range(6):
            sign = torch.randn(5, 4, generator=torch.Generator().manual_seed(step)).sign().double()
            for parameter, optimizer in pairs:
                parameter.grad = sign * (step + 1)
                optimizer.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)

    def test_commutes_with_rotation(self):
        torch.manual_seed(0)
        rotation = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))[0]
        x = torch.randn(6, 3, dtype=torch.float64)
        plain, turned = x.clone().requires_grad_(), (rotation @ x).requires_grad_()
        optimizers = [BlockwiseAdamW([p], lr=0.1, weight_decay=0.2) for p in (plain, turned)]
        for _ in range(5):
            gradient = torch.randn(6, 3, dtype=torch.float64)
            plain.grad, turned.grad = gradient, rotation @ gradient
            for optimizer in optimizers:
                optimizer.step()
        torch.testing.assert_close(turned.detach(), rotation @ plain.detach(), rtol=1e-12, atol=1e-12)

    def test_state_is_half_of_adamws(self):
        parameter = torch.randn(100, 100, requires_grad=True)
        sizes = []
        for kind in (BlockwiseAdamW, torch.optim.AdamW):
            parameter.grad = torch.ones_like(parameter)
            optimizer = kind([parameter], lr=1e-3)
            optimizer.step()
            sizes.append(sum(v.numel() for v in optimizer.state[parameter].values() if torch.is_tensor(v)))
        assert sizes[0] <= sizes[1] / 2 + 2

    def test_moments_of_bfloat16_parameters_are_float32(self):
        parameter = torch.randn(8, 8).to(torch.bfloat16).requires_grad_()
        parameter.grad = torch.ones_like(parameter)
        optimizer = BlockwiseAdamW([parameter], lr=1e-3)
        optimizer.step()
        assert optimizer.state[parameter]["exp_avg"].dtype == torch.float32


class TestMuon:
    @staticmethod
    def make(seed: int = 0) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
        """An embedding, a matrix and a norm, and their optimiser with two parameter groups."""
        generator = torch.Generator().manual_seed(seed)
        parameters = [torch.nn.Parameter(torch.randn(*shape, generator=generator)) for shape in ((9, 4), (6, 4), (4,))]
        groups = [{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:], "weight_decay": 0.0}]
        return parameters, make_optimizer("muon", groups, 0.01, outside=parameters[:1])

    @staticmethod
    def step(parameters: list[torch.nn.Parameter], optimizers: list[torch.optim.Optimizer], number: int) -> None:
        generator = torch.Generator().manual_seed(100 + number)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()

    def test_is_torchs_for_matrices_and_blockwise_for_the_rest(self):
        parameters, optimizer = self.make()
        expected, _ = self.make()
        apart = [
            torch.optim.Muon([expected[1]], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            BlockwiseAdamW([{"params": expected[:1], "weight_decay": 0.1}, {"params": expected[2:]}], lr=0.01),
        ]
        for number in range(3):
            if number == 2:  # as a schedule does
                for group in [g for o in (optimizer, *apart) for g in o.param_groups]:
                    group["lr"] = 0.003
            self.step(parameters, [optimizer], number)
            self.step(expected, apart, number)
        for parameter, expected_parameter in zip(parameters, expected, strict=True):
            assert torch.equal(parameter, expected_parameter)

    def test_a_saved_state_goes_on(self):
        parameters, optimizer = self.make()
        restored_parameters, fresh = self.make()
        for number in range(2):
            self.step(parameters, [optimizer], number)
        with torch.no_grad():
            for parameter, restored_parameter in zip(parameters, restored_parameters, strict=True):
                restored_parameter.copy_(parameter)
        fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        self.step(parameters, [optimizer], 2)
        self.step(restored_parameters, [fresh], 2)
        for parameter, restored_parameter in zip(parameters, restored_parameters, strict=True):
            assert torch.equal(parameter, restored_parameter)


@pytest.mark.parametrize("name", OPTIMIZERS)
class TestRegistry:
    """What the registry says of each optimiser is so."""

    def make(self, name: str, start: torch.Tensor, **group: float) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
        parameter = torch.nn.Parameter(start.clone())
        return parameter, make_optimizer(name, [{"params": [parameter], **group}], 0.01)

    @pytest.mark.slow
    def test_bytes_of_state(self, name: str) -> None:
        parameter, optimizer = self.make(name, torch.randn(512, 512))
        parameter.grad = torch.randn(512, 512)
        optimizer.step()
        states = [value for value in optimizer.state[parameter].values() if torch.is_tensor(value) and value.ndim]
        per_weight = sum(value.nbytes for value in states) / parameter.numel()
        assert per_weight == pytest.approx(OPTIMIZERS[name].state_bytes, rel=0.05, abs=1e-9)

    def test_decay_is_decoupled(self, name: str) -> None:
        """Without a gradient, θ shrinks by the rate times the decay, as in AdamW (Loshchilov and Hutter, 2019)."""
        start = torch.randn(64, 64)
        parameter, optimizer = self.make(name, start, weight_decay=0.5)
        parameter.grad = torch.zeros_like(start)
        optimizer.step()
        torch.testing.assert_close(parameter.detach(), start * (1 - 0.01 * 0.5))

    @pytest.mark.parametrize("map_", ["signed permutation", "rotation"])
    def test_which_maps_it_commutes_with(self, name: str, map_: str) -> None:
        """Training in other coordinates is training, in other coordinates: for all with signed permutations, for those
        that are not elementwise with rotations."""
        torch.manual_seed(0)
        turn = torch.linalg.qr(torch.randn(128, 128, dtype=torch.float64))[0]
        if map_ == "signed permutation":
            turn = torch.eye(128, dtype=torch.float64)[torch.randperm(128)] * torch.randn(128).sign()
        start = torch.randn(128, 64, dtype=torch.float64)
        plain, optimizer = self.make(name, start.float())
        turned, other = self.make(name, (turn @ start).float())
        for _ in range(3):
            gradient = torch.randn(128, 64, dtype=torch.float64)
            plain.grad, turned.grad = gradient.float(), (turn @ gradient).float()
            optimizer.step()
            other.step()
        moved, expected = turned.double() - turn @ start, turn @ (plain.double() - start)
        error = float((moved - expected).norm() / expected.norm())
        follows = map_ == "signed permutation" or not OPTIMIZERS[name].elementwise
        rounding = 0.05 if name == "muon" else 1e-3  # it computes in bfloat16
        assert (error < rounding) == follows, error


class TestTheRate:
    """--lr auto: what the page of defaults says, and the same for every mode of a run."""

    def of(self, steps: int, weights: int = 10**6, **options: object) -> float | str:
        return with_rate(from_flat(Unlearning, {"algo": "npo", **options}), weights, steps).lr

    def test_follows_from_steps_and_weights(self) -> None:
        assert self.of(10) == pytest.approx(8 / 10 / 1000)
        assert self.of(10, 4 * 10**6) == pytest.approx(self.of(10) / 2)
        assert self.of(1000) == self.of(10_000) == pytest.approx(3.2e-4)  # as there is more to forget
        assert self.of(1000, 10**9) == pytest.approx(1e-5)  # the paper's, at 1B
        for options in ({"algo": "graddiff"}, {"lora_rank": 4}):
            assert self.of(10, **options) == pytest.approx(self.of(10) / 4)
        assert self.of(10, lr=3e-5) == 3e-5
        with pytest.raises(UsageError, match="--optim sgd: needs a rate"):
            self.of(10, optim="sgd")

    @pytest.mark.parametrize(("records", "epochs"), [(40, 5), (1, 10), (400, 5)])
    def test_at_least_ten_steps(self, records: int, epochs: int) -> None:
        options = from_flat(Unlearning, {"algo": "npo"})  # five epochs in the paper, 32 records a step
        assert with_epochs(options, records).epochs == epochs
        assert with_epochs(from_flat(Unlearning, {"algo": "npo", "lr": 1e-5}), records).epochs is None
