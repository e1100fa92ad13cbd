"""What DP-SGD really leaks, measured in one training (Steinke, Nasr and Jagielski, 2023, arXiv 2305.08846).

Canaries are put into the forget set or left out, by one fair coin each. Whoever knows all of them guesses the coins
from the change of the weights. Under (ε, δ) no guess is right more often than e^ε/(1 + e^ε), so that the number of
right guesses gives a lower bound of ε, which must lie below the ε that was claimed.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from scipy import optimize, stats

from mpu_cli.lab import private
from mpu_cli.lab.private import plan, train_privately
from mpu_cli.options.unlearning import Privacy, Training
from mpu_cli.records.encode import Encoding, pad
from mpu_cli.records.forms import question
from mpu_cli.training.losses import ALGORITHMS, Objective
from mpu_cli.training.reference import ExampleSet
from tests.helpers.models import load
from tests.helpers.paths import SHARED

CANARIES, GUESSES = 1000, 200
EPSILON, DELTA = 4.0, 1e-7
CONFIDENCE = 0.95
SEED = bytes(32)  # of the noise: a bound that holds with CONFIDENCE fails in some draws

pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="needs the small models")


def lower_bound(right: int, guesses: int, canaries: int, delta: float) -> float:
    """The largest ε that ``right`` of ``guesses`` refute with CONFIDENCE (theorem 5.2, with 2·m·δ for its term)."""

    def excess(epsilon: float) -> float:
        tail = stats.binom.sf(right - 1, guesses, 1 / (1 + math.exp(-epsilon)))
        return float(tail) + 2 * canaries * delta - (1 - CONFIDENCE)

    return optimize.brentq(excess, 0.0, 50.0) if excess(0.0) < 0 < excess(50.0) else 0.0


def audited_epsilon() -> float:
    """The lower bound from one step of DP-SGD on one matrix of the 5 M model."""
    model, tokenizer = load(SHARED / "models/full", torch.float32, "cpu")
    weight = model.get_parameter("model.layers.3.mlp.down_proj.weight")
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is weight)
    coins = random.Random(0)
    words = [f"{coins.randrange(10**6):06d}" for _ in range(4 * CANARIES)]
    records = [question(" ".join(words[i : i + 2]), " ".join(words[i + 2 : i + 4])) for i in range(0, len(words), 4)]
    examples = Encoding(tokenizer).encode(records)
    gradients = torch.empty(CANARIES, weight.numel())
    for i, example in enumerate(examples):
        batch = pad([example])
        labels = batch.pop("labels")
        logits = model(**batch, use_cache=False).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, labels[0, 1:], ignore_index=-100)
        gradients[i] = torch.autograd.grad(loss, weight)[0].flatten()
    gradients /= gradients.norm(dim=1, keepdim=True).clamp(min=1.0)  # as they are clipped
    included = torch.tensor([coins.random() < 0.5 for _ in examples])
    sets = {"forget": ExampleSet([e for e, is_in in zip(examples, included, strict=True) if is_in])}
    count = len(sets["forget"].examples)
    training = Training(optim="sgd", lr=1.0, weight_decay=0, batch_size=count, micro_batch_size=64)
    privacy = Privacy(dp_epsilon=EPSILON, dp_delta=DELTA)
    planned = plan({"forget": [None] * count}, training, privacy, epochs=1)
    assert (planned.mechanism.sample_rate, planned.mechanism.steps) == (1, 1)
    before = weight.detach().clone()
    algorithm = ALGORITHMS["gradascent"]
    objective = Objective(algorithm, algorithm.constants, "nll")
    train_privately(
        model, sets, objective, training, privacy=privacy, planned=planned, on_step=lambda *_: None, seed=SEED
    )
    released = count * (weight.detach() - before).flatten()  # the sum of the clipped gradients, and noise
    # Coins are independent of each other: their least-squares estimate, with what the noise is known to be.
    kernel = gradients @ gradients.T
    residual = gradients @ (released - gradients.sum(0) / 2)
    noise = 4 * planned.mechanism.noise_multiplier**2 * torch.eye(CANARIES)
    scores = torch.linalg.solve(kernel.double() + noise.double(), residual.double())
    ranked = scores.argsort()
    right = int((~included[ranked[: GUESSES // 2]]).sum() + included[ranked[-GUESSES // 2 :]].sum())
    return lower_bound(right, GUESSES, CANARIES, DELTA)


def test_the_lower_bound_is_that_of_randomized_response() -> None:
    """Guesses that are right as often as ε allows refute almost ε, and no more."""
    rate = 1 / (1 + math.exp(-2.0))
    assert 1.9 < lower_bound(round(10_000 * rate), 10_000, 10_000, 0.0) < 2.0
    assert lower_bound(5_000, 10_000, 10_000, 0.0) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "least"),
    [
        ("half the noise", 0.3 * EPSILON),
        pytest.param("noise before clipping", EPSILON / 2, marks=pytest.mark.exhaustive),
    ],
)
def test_a_training_leaks_less_than_it_claims_and_a_fault_is_seen(
    monkeypatch: pytest.MonkeyPatch, fault: str, least: float
) -> None:
    """The same measurement where the noise is half as large, and where clipping takes it away with the gradient: it
    shows more than an honest training does, and at least this."""
    honest_epsilon = audited_epsilon()
    assert 0 < honest_epsilon < EPSILON
    with_noise = private.with_noise
    faults = {
        "half the noise": lambda x, std, key: with_noise(x, std / 2, key),
        "noise before clipping": lambda x, std, key: with_noise(x, std / float(x.norm()), key),
    }
    monkeypatch.setattr(private, "with_noise", faults[fault])
    assert audited_epsilon() > max(least, honest_epsilon)
