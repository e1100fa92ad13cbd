"""Linear layers whose products are computed by whichever library is faster give what the layer says, in float32."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mpu_cli.model.products import LEAST_MULTIPLICATIONS, multiply_where_faster

TOLERANCE = 2e-6  # relative; a product that is rounded to bfloat16 is off by 3e-3


@pytest.fixture(autouse=True)
def faster_products() -> None:
    multiply_where_faster()


def distance(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    assert a is not None
    assert b is not None
    return float((a.double() - b).norm().detach() / b.norm().detach())


@pytest.mark.parametrize("shape", ["matrix", "strided batch", "transposed batch"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_outputs_and_gradients_are_those_of_float64(shape: str, has_bias: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(320, 400, bias=has_bias)
    inputs = {
        "matrix": torch.randn(50, 320),
        "strided batch": torch.randn(3, 60, 320)[:, ::2],
        "transposed batch": torch.randn(320, 5, 12).permute(1, 2, 0),
    }[shape].requires_grad_()  # fmt: skip
    assert inputs.numel() * 400 >= LEAST_MULTIPLICATIONS
    wide = torch.nn.Linear(320, 400, bias=has_bias).double()
    wide.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    wide_inputs = inputs.detach().double().requires_grad_()
    outputs, exact = layer(inputs), wide(wide_inputs)
    towards = torch.randn(outputs.shape)
    (outputs * towards).sum().backward()
    (exact * towards.double()).sum().backward()
    assert outputs.shape == exact.shape
    assert distance(outputs, exact) < TOLERANCE
    assert distance(inputs.grad, wide_inputs.grad) < TOLERANCE
    for ours, theirs in zip(layer.parameters(), wide.parameters(), strict=True):
        assert distance(ours.grad, theirs.grad) < TOLERANCE


def test_frozen_weights_get_no_gradient() -> None:
    layer = torch.nn.Linear(320, 400).requires_grad_(False)
    inputs = torch.randn(50, 320, requires_grad=True)
    layer(inputs).sum().backward()
    assert layer.weight.grad is None
    assert distance(inputs.grad, layer.weight.double().sum(0).expand(50, -1)) < 1e-5  # a sum of 400 in float32


def test_products_of_others_stay_as_they_were() -> None:
    before = torch.get_float32_matmul_precision()
    layer, inputs = torch.nn.Linear(320, 400), torch.randn(50, 320)
    layer(inputs)
    assert torch.get_float32_matmul_precision() == before  # attention's, among others
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(inputs), torch.ops.aten.linear(inputs, layer.weight, layer.bias))
    half = torch.nn.Linear(320, 400).bfloat16()
    assert torch.equal(half(inputs.bfloat16()), torch.ops.aten.linear(inputs.bfloat16(), half.weight, half.bias))


def test_threads_leave_the_setting_as_it_was() -> None:
    before = torch.get_float32_matmul_precision()
    layer, inputs = torch.nn.Linear(320, 400), torch.randn(50, 320)
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda _: layer(inputs), range(200)))
    assert all(distance(output, outputs[0].double()) < TOLERANCE for output in outputs)
    assert torch.get_float32_matmul_precision() == before
