"""A transform changes the weights but not the function, and its inverse undoes it."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mpu_cli.files.sealing import default_identity_path, read_identities
from mpu_cli.model.layout import axis_length, layout_of
from mpu_cli.model.sampling import AxisMap
from mpu_cli.model.source import open_model
from mpu_cli.model.transform import TensorMap, as_matrix, row_slices, tensor_map
from mpu_cli.protocol.keys import unseal
from mpu_cli.protocol.publication import Publication
from tests.helpers.models import CONFIGS, VOCABULARY, random_model, save

SETS = ("paper", "signed", "all")
TOKENS = torch.randint(VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(1))


def logits(folder, tokens=TOKENS):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(tokens).logits


def relative(actual, expected):
    return float((actual - expected).abs().max() / expected.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("symmetries", SETS)
def test_copies_of_a_trained_model_compute_what_it_computes(mpu, tmp_path, demo, symmetries):
    full = demo.model
    mpu("publish", full, "--kappa", 0, "--dtype", "float32", "--symmetries", symmetries, "--out", tmp_path,
        "--keys", tmp_path / "k.bin")  # fmt: skip
    vocabulary = json.loads((full / "config.json").read_text())["vocab_size"]
    tokens = torch.randint(vocabulary, (2, 200), generator=torch.Generator().manual_seed(1))
    expected = logits(full, tokens)
    for k in (1, 2):
        assert relative(logits(tmp_path / f"copy_{k}", tokens), expected) < 1e-5


@pytest.mark.parametrize("family", CONFIGS)
def test_signed_copies_lose_nothing_in_bfloat16(mpu, tmp_path, family):
    """A copy without noise holds the base's weights bit for bit, with only their order and signs changed."""
    base = save(random_model(family, dtype=torch.bfloat16), tmp_path / "base")
    mpu("publish", base, "--kappa", 0, "--out", tmp_path, "--keys", tmp_path / "k.bin")
    model = open_model(str(base))
    copy = open_model(str(tmp_path / "copy_2")).checkpoint
    for name in model.checkpoint.tensors:
        original, published = (each.tensor(name).view(torch.int16) & 0x7FFF for each in (model.checkpoint, copy))
        assert torch.equal(original.flatten().sort().values, published.flatten().sort().values), name
    layout = layout_of(model.checkpoint.tensors, model.config, "")
    [identity] = read_identities(default_identity_path())
    keys = unseal(tmp_path / "k.bin", [identity])
    transform = keys.publication.transform(2, layout)
    back = apply_transform(transform, layout, {t.name: copy.tensor(t.name) for t in layout.parameters}, inverse=True)
    for name, tensor in back.items():
        assert torch.equal(tensor.view(torch.int16), model.checkpoint.tensor(name).view(torch.int16)), name


@pytest.mark.parametrize(
    ("family", "false"),
    [
        ("llama", {"up"}),  # signs of up rows without those of the down columns
        ("llama", {"gate", "ffn"}),  # a gate's sign is not a symmetry of its activation
        ("llama", {"|model|"}),  # the sign of a norm's weight
        ("gpt2", {"ffn"}),  # no gate
        ("gpt2", {"model"}),  # LayerNorm subtracts the mean
        ("llama", {"query"}),  # without the keys'
        ("llama", {"value"}),  # without the output projection's
    ],
)
def test_signs_that_are_no_symmetry_change_the_function(tmp_path, family, false):
    base = save(random_model(family), tmp_path / "base")
    model = open_model(str(base))
    layout = layout_of(model.checkpoint.tensors, model.config, "")
    generator = torch.Generator().manual_seed(0)
    maps = {}
    for axis in false:
        n = axis_length(layout.sizes, axis)
        signs = torch.where(torch.rand(n, generator=generator) < 0.5, -1.0, 1.0)
        maps[axis] = AxisMap(torch.arange(n), signs=signs)
    changed = load_file(base / "model.safetensors")
    for tensor in layout.parameters:
        mapping, matrix = tensor_map(layout, tensor, maps), as_matrix(changed[tensor.name])
        changed[tensor.name] = mapping.forward(matrix, 0).reshape(changed[tensor.name].shape).contiguous()
    expected = logits(base)
    save_file(changed, base / "model.safetensors", {"format": "pt"})
    assert relative(logits(base), expected) > 0.01


def apply_transform(transform, layout, weights, *, inverse=False):
    """T (or T⁻¹) of whole tensors, assembled from slices as the commands do."""
    result = {}
    for tensor in layout.parameters:
        mapping, x = transform.of(tensor), as_matrix(weights[tensor.name])
        y = torch.empty_like(x)
        for start, stop in row_slices([mapping], *x.shape):
            if inverse:
                y[start:stop] = mapping.backward(mapping.take(x, start, stop), start)
            else:
                mapping.put(y, mapping.forward(x[start:stop], start), start)
        result[tensor.name] = y.view(weights[tensor.name].shape)
    return result


@pytest.fixture(params=CONFIGS)
def layout_and_checkpoint(request, tmp_path):
    model = open_model(str(save(random_model(request.param), tmp_path / "base")))
    return layout_of(model.checkpoint.tensors, model.config, ""), model.checkpoint


@pytest.mark.parametrize("symmetries", SETS)
def test_inverse_undoes(layout_and_checkpoint, symmetries):
    layout, checkpoint = layout_and_checkpoint
    weights = {t.name: checkpoint.tensor(t.name) for t in layout.parameters}
    transform = Publication(seed=bytes(32), symmetries=symmetries).transform(1, layout)
    back = apply_transform(transform, layout, apply_transform(transform, layout, weights), inverse=True)
    for name, tensor in weights.items():
        torch.testing.assert_close(back[name], tensor, rtol=0, atol=1e-6 * float(tensor.abs().max()))


@pytest.mark.parametrize("symmetries", SETS)
def test_transform_is_orthogonal_and_linear(layout_and_checkpoint, symmetries):
    layout, checkpoint = layout_and_checkpoint
    generator = torch.Generator().manual_seed(0)

    def random_delta():
        shapes = {t.name: checkpoint.tensors[t.name].shape for t in layout.parameters}
        return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}

    a, b = random_delta(), random_delta()
    transform = Publication(seed=bytes(32), symmetries=symmetries).transform(2, layout)
    total = apply_transform(transform, layout, {name: a[name] + 3 * b[name] for name in a}, inverse=True)
    parts = apply_transform(transform, layout, a, inverse=True), apply_transform(transform, layout, b, inverse=True)
    for name in a:
        torch.testing.assert_close(total[name], parts[0][name] + 3 * parts[1][name])
        torch.testing.assert_close(parts[0][name].norm(), a[name].norm())


def test_slices_do_not_show(layout_and_checkpoint, monkeypatch):
    """The result does not depend on how tensors are sliced."""
    layout, checkpoint = layout_and_checkpoint
    weights = {t.name: checkpoint.tensor(t.name) for t in layout.parameters}
    transform = Publication(seed=bytes(32), symmetries="all").transform(1, layout)
    expected = apply_transform(transform, layout, weights)
    monkeypatch.setattr("mpu_cli.model.transform.CHUNK", 300)
    pieces = apply_transform(transform, layout, weights)
    for name, tensor in expected.items():
        torch.testing.assert_close(pieces[name], tensor, rtol=0, atol=1e-6)


def test_grouping_of_heads_is_kept(tmp_path):
    """Under head permutations a query head stays with the KV head that serves it."""
    model = open_model(str(save(random_model("llama"), tmp_path / "base")))
    layout = layout_of(model.checkpoint.tensors, model.config, "")
    transform = Publication(seed=bytes(32), symmetries="all").transform(1, layout)
    maps = transform._layer_maps(0)
    d, group = layout.sizes["head_dim"], layout.sizes["heads"] // layout.sizes["kv_heads"]
    query = maps["query"].order.view(-1, d)[:, 0] // d
    key = maps["key"].order.view(-1, d)[:, 0] // d
    for root, head in enumerate(query.tolist()):
        assert head // group == key[root // group]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.uint8], ids=str)
def test_rows_arrive_whatever_their_bytes(dtype: torch.dtype) -> None:
    """Rows of any width, in tensors that begin anywhere in a file, against indexing by torch; and back."""
    generator = torch.Generator().manual_seed(0)
    for columns, offset in itertools.product(range(1, 10), range(9)):
        order = torch.randperm(7, generator=generator)
        mapping = TensorMap(AxisMap(order), None)
        rows = torch.randint(0, 100, (7, columns), generator=generator).to(dtype)
        room = torch.zeros(7 * columns + offset, dtype=dtype)
        target = room[offset:].view(7, columns)
        for start, stop in ((0, 3), (3, 7)):
            mapping.put(target, rows[start:stop], start)
        assert torch.equal(target, rows[order])
        assert not room[:offset].any()
        assert torch.equal(mapping.take(target, 2, 6), rows[2:6])
