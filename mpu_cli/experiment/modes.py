"""The modes of an experiment: what the server publishes, how many rounds there are, and at which rate is trained."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from mpu_cli.checkpoint.dtypes import OPTION
from mpu_cli.client.checks import epochs_of
from mpu_cli.client.dataset import Dataset
from mpu_cli.client.delta import delta_specs
from mpu_cli.client.losses import ALGORITHMS
from mpu_cli.client.rate import with_rate
from mpu_cli.models.source import open_model
from mpu_cli.options.experiment import Experiment
from mpu_cli.options.unlearning import AUTO
from mpu_cli.server.publication import Publication, settings_of
from mpu_cli.server.scheme import ZeroSum, scheme_of


def publication_in(experiment: Experiment, *, seed: bytes, run: str = "", number: int = 1) -> Publication:
    """What the server publishes in round ``number``, with the secrets of ``seed``, in the experiment's mode.

    Raises UsageError for options that do not go together.
    """
    disguise = experiment.disguise.with_scale(with_pretrained=experiment.pretrained is not None)
    stored = experiment.stored.dtype
    published = Publication(
        seed=seed,
        seed_is_secret=experiment.secret_seed is None,
        dtype=OPTION[stored] if stored else None,
        run=run,
        round=number,
        scheme=scheme_of(disguise),
        **settings_of(disguise),
    )
    return MODES[experiment.mode](published)


def _model_itself(published: Publication) -> Publication:
    return replace(
        published, scheme=ZeroSum((1.0,)), kappa=0.0, shared_kappa=0.0, mark=0.0, symmetries="none", omitted=()
    )


def _one_noised_copy(published: Publication) -> Publication:
    mean = math.fsum(published.scheme.scales) / published.copies
    return replace(published, scheme=ZeroSum((mean,)), mark=0.0, symmetries="none", omitted=())


# What the server publishes in a mode, in place of what the options say.
MODES: dict[str, Callable[[Publication], Publication]] = {
    "clean": _model_itself,
    "clean-rounds": _model_itself,
    "noised": _one_noised_copy,
    "mpu": lambda published: published,
}


def rounds_of(experiment: Experiment) -> int:
    """The rounds that were asked for, or the paper's for the algorithm."""
    return ALGORITHMS[experiment.unlearning.algo].rounds if experiment.rounds is None else experiment.rounds


def with_merged_rounds(experiment: Experiment) -> Experiment:
    """``experiment`` as it is played: what is clean has one round with all epochs."""
    if experiment.mode != "clean":
        return experiment
    epochs = rounds_of(experiment) * epochs_of(experiment.unlearning)
    return replace(experiment, rounds=1, unlearning=replace(experiment.unlearning, epochs=epochs))


def with_one_rate(experiment: Experiment, data: Dataset) -> Experiment:
    """``experiment`` with a number for the learning rate, the same in every mode: from the steps of all rounds."""
    unlearning = experiment.unlearning
    if unlearning.training.lr != AUTO:
        return experiment
    epochs, size = rounds_of(experiment) * epochs_of(unlearning), unlearning.training.batch_size
    specs = delta_specs(open_model(experiment.base), unlearning)
    trained = sum(math.prod(shape) for _, shape in specs.values())
    training = with_rate(unlearning, trained, epochs * -(-len(data.forget) // size))
    return replace(experiment, unlearning=replace(unlearning, training=training))
