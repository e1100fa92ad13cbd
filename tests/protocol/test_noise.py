"""The noise: zero-sum, with the paper's covariance; and the underlying random stream."""

from __future__ import annotations

import math

import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from mpu_cli.errors import UsageError
from mpu_cli.files.randomness import Randomness, Stream, keystream, standard_normals
from mpu_cli.options.publishing import Copies
from mpu_cli.protocol.noise import Extrapolated, Noise, Scales, ZeroSum, mixing_matrix, scheme_of

KEY = bytes(range(32))
N = 400_000


def noise_of(factors, sigma=0.5, dtype=torch.float32, n=N, kind=ZeroSum):
    noise = Noise(Randomness(KEY), 1, kind(tuple(factors)).mixing)
    return torch.cat(
        noise.added_to(torch.zeros(1, n, dtype=dtype), noise.subkeys("t", Scales(sigma)), Scales(sigma), 0)
    )


@pytest.mark.parametrize("copies", [2, 3, 4, 5])
def test_noise_over_alpha_sums_to_zero(copies):
    alphas = torch.linspace(0.5, 3, copies).tolist()
    noise = noise_of(alphas, dtype=torch.float64)
    total = sum(part / alpha for part, alpha in zip(noise, alphas, strict=True))
    assert float(total.abs().max()) < 1e-14


@pytest.mark.parametrize("copies", [2, 3, 4, 5])
def test_covariance_is_the_papers(copies):
    """D B D·σ² with B = m/(m−1)·I − 1/(m−1)·11ᵀ (appendix A.1), within five standard errors."""
    alphas, sigma = ZeroSum.default(copies).factors, 0.5
    d = torch.diag(torch.tensor(alphas, dtype=torch.float64))
    m = copies
    expected = sigma**2 * d @ (m / (m - 1) * torch.eye(m, dtype=torch.float64) - torch.ones(m, m) / (m - 1)) @ d
    covariance = torch.cov(noise_of(alphas, sigma).double())
    error = math.sqrt(2 / N) * float(expected.diagonal().max())
    torch.testing.assert_close(covariance, expected, rtol=0, atol=5 * error)


def test_two_draws_are_mirror_images():
    copy_1_noise, copy_2_noise = noise_of((1.0, 2.0))
    assert torch.equal(copy_2_noise / 2, -copy_1_noise)


@pytest.mark.parametrize("copies", [2, 3, 7])
def test_mixing_matrix_is_the_helmert_form(copies):
    a = mixing_matrix(copies)
    torch.testing.assert_close(a.sum(0), torch.zeros(copies - 1, dtype=torch.float64), rtol=0, atol=1e-14)
    torch.testing.assert_close(a.square().sum(1), torch.ones(copies, dtype=torch.float64))
    expected = copies / (copies - 1) * torch.eye(copies - 1, dtype=torch.float64)
    torch.testing.assert_close(a.T @ a, expected)


@pytest.mark.parametrize("double", [False, True])
def test_draws_are_standard_normal_and_independent(double):
    x, y = (standard_normals(bytes([i] * 32), 0, N, double=double).double() for i in (1, 2))
    assert stats.kstest(x.numpy(), "norm").pvalue > 1e-3
    assert 6 > float(x.abs().max()) > 4  # the largest of 400,000 normals misses this range once in a thousand times
    for a, b in ((x, y), (x[:-1], x[1:]), (x[:-512], x[512:])):  # a radius and its angle are 512 apart
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 5 / math.sqrt(N)
        assert abs(float(torch.corrcoef(torch.stack([a.square(), b.square()]))[0, 1])) < 5 / math.sqrt(N)


@settings(deadline=None)
@given(st.integers(0, 5000), st.integers(1, 5000), st.booleans())
def test_any_slice_is_a_slice_of_the_whole(start, length, double):
    normals = standard_normals(KEY, 0, 10_000, double=double)
    normals_slice = standard_normals(KEY, start, start + length, double=double)
    assert torch.equal(normals_slice, normals[start : start + length])


@pytest.mark.parametrize("double", [False, True])
def test_normals_are_box_muller_of_the_keystream(double):
    width, bits = (8, 63) if double else (4, 31)
    cell = keystream(KEY, 3 * 1024 * width, 1024 * width)
    words = [int.from_bytes(cell[i : i + width], "little") for i in range(0, len(cell), width)]
    normals = standard_normals(KEY, 3 * 1024, 4 * 1024, double=double)
    for i in range(512):
        radius = math.sqrt(-2 * math.log((words[i] % 2**bits + 1) / 2**bits))
        angle = math.pi * (words[512 + i] - (words[512 + i] >> bits) * 2 ** (bits + 1)) / 2**bits
        expected = [radius * math.cos(angle), radius * math.sin(angle)]
        assert normals[[i, i + 512]].tolist() == pytest.approx(expected, rel=0, abs=1e-14 if double else 2e-6)


def test_keystream_is_aes_256_ctr():
    encryptor = Cipher(algorithms.AES(KEY), modes.CTR(bytes(16))).encryptor()
    expected = encryptor.update(bytes(3_000_000))
    assert bytes(keystream(KEY, 0, 3_000_000)) == expected
    assert bytes(keystream(KEY, 1024, 512)) == expected[1024:1536]


def test_purposes_have_keys_of_their_own():
    randomness, other = Randomness(KEY), Randomness(bytes(32))
    purposes = [
        ("noise", 1, "t", 0),
        ("noise", 1, "t", 1),
        ("noise", 2, "t", 0),
        ("noise", 1, "t0"),
        ("noise", "1", "t", 0),
    ]
    keys = {source.key(*purpose) for source in (randomness, other) for purpose in purposes}
    assert len(keys) == 2 * len(purposes)


def test_permutations_are_uniform():
    counts: dict[tuple, int] = {}
    stream = Stream(KEY)
    for _ in range(12_000):
        order = tuple(stream.permutation(4).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert stats.chisquare(list(counts.values())).pvalue > 1e-3


def test_uniforms_and_normals_of_a_stream():
    assert stats.kstest(Stream(KEY).uniform(N).numpy(), "uniform").pvalue > 1e-3
    assert stats.kstest(Stream(KEY).normal(N).numpy(), "norm").pvalue > 1e-3


NODES = [(1, -1), (1, -2), (1, -1, 1.5), (1, -1, 1.5, -1.5), (0.7, 3, -1.1, 2, -4)]


@pytest.mark.parametrize("nodes", NODES)
def test_weights_read_polynomials_at_zero(nodes):
    """For any polynomial of degree below m, the weights give its value at 0 from its values at the nodes."""
    m = len(nodes)
    c, weights = torch.tensor(nodes, dtype=torch.float64), Extrapolated(tuple(nodes)).weights
    for seed in range(5):
        coefficients = torch.randn(m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        values = sum(a * c**i for i, a in enumerate(coefficients))
        assert float(weights @ values) == pytest.approx(float(coefficients[0]), rel=0, abs=1e-12)
    assert abs(float(weights @ c**m)) == pytest.approx(Extrapolated(tuple(nodes)).remainder)


@pytest.mark.parametrize("nodes", NODES)
def test_copies_are_multiples_of_one_draw(nodes):
    noise = noise_of(nodes, kind=Extrapolated)
    assert stats.kstest((noise[0] / (0.5 * nodes[0])).numpy(), "norm").pvalue > 1e-3
    for c, copy in zip(nodes, noise, strict=True):
        torch.testing.assert_close(copy / c, noise[0] / nodes[0], rtol=1e-6, atol=0)


def test_two_nodes_are_the_papers_scheme():
    """At (α₁, −α₂): bit-for-bit the same noise, and the same weights."""
    assert torch.equal(noise_of((1.0, -2.0), kind=Extrapolated), noise_of((1.0, 2.0)))
    weights = Extrapolated((1.0, -2.0)).weights
    torch.testing.assert_close(weights, ZeroSum((1.0, 2.0)).weights)


@pytest.mark.parametrize("copies", range(2, 9))
def test_default_nodes(copies):
    """At least σ of noise in each copy, nodes on both sides of 0, and weights that stay small."""
    nodes = Extrapolated.default(copies).factors
    assert min(map(abs, nodes)) == 1
    assert min(nodes) < 0 < max(nodes)
    assert float(Extrapolated(tuple(nodes)).weights.abs().sum()) < 20


@pytest.mark.parametrize(
    "nodes", [(1.0,), (1.0, 1.0), (1.0, 0.0), (1.0, math.nan), (1.0, math.inf), (1.0, 1 + 1e-9), (1.0, -1.0, 2.0)]
)
def test_nodes_that_are_none(nodes):
    with pytest.raises(UsageError, match="--noise extrapolate"):
        scheme_of(Copies(copies=2, noise=f"extrapolate:{','.join(map(str, nodes))}"))


@pytest.mark.parametrize("alphas", [(1.0,), (1.0, 0.0), (1.0, -1.0), (1.0, math.nan), (1.0, math.inf), (1.0, 2.0, 3.0)])
def test_alphas_that_are_none(alphas):
    with pytest.raises(UsageError, match="--noise zero-sum"):
        scheme_of(Copies(copies=2, noise=f"zero-sum:{','.join(map(str, alphas))}"))
