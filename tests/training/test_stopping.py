"""Training until it is done: what is held out, what all copies share, and what the server's model then knows."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mpu_cli.demo.model import make_people
from mpu_cli.measuring.verdict import RecordScores, judge
from mpu_cli.options.unlearning import Goal
from mpu_cli.records.encode import Encoding, Limits, pad
from mpu_cli.records.forms import Record, question
from mpu_cli.records.knowledge import Probabilities, error_of_share_left, share_left
from mpu_cli.records.read import read_records
from mpu_cli.training import stopping
from mpu_cli.training.data import Dataset
from mpu_cli.training.ledger import LedgerEntry, RoundSchedule, read_ledger, write_down, write_round_schedule
from mpu_cli.training.stopping import (
    LEAST_HELD_OUT,
    SHARE_MARGIN,
    EarlyStopping,
    ProbeNoise,
    Scorer,
    StepScores,
    hold_out,
)
from tests.helpers.models import DemoModel, random_model, save, write_records


@pytest.mark.parametrize("count", [3, 20, 50, 400, 2000])
def test_what_is_held_out_does_not_depend_on_the_order(count: int) -> None:
    """A fifth, within bounds; the same records whatever their order; nothing is both trained on and held out."""
    records = [question(f"q{number}", f"a{number}") for number in range(count)]
    data = hold_out(Dataset(records[:1], records), 0.2)
    again = hold_out(Dataset(records[:1], random.Random(1).sample(records, count)), 0.2)

    def identities(part: Sequence[Record]) -> set[str]:
        return {record.identity for record in part}

    assert identities(data.held_out) == identities(again.held_out)
    assert not identities(data.held_out) & identities(data.retain)
    assert len(data.held_out) + len(data.retain) == count
    assert len(data.held_out) >= min(LEAST_HELD_OUT, count // 2)
    assert hold_out(Dataset(records[:1], records), 0).held_out == ()


def test_the_ledger_reads_every_schedule_that_options_allow(tmp_path: Path) -> None:
    """--constants takes any level below 0 and any α from 0 on: a ledger with one it does not read would be damaged."""
    entry = LedgerEntry(identity="a", run="b", round=1, copy=1, weights="c", algorithm="hinge", records=1)
    write_down(tmp_path / "ledger.jsonl", entry, delta=1e-5, budget=None)
    for schedule in (RoundSchedule(10, 180, -150.0, 1.0, 2e6), RoundSchedule(10, 180, -1e-9, 12.0, 0.0)):
        write_round_schedule(tmp_path / "ledger.jsonl", "a", schedule)
        assert [entry.schedule for entry in read_ledger(tmp_path / "ledger.jsonl")] == [schedule]


def test_what_is_left_does_not_change_with_what_a_stranger_knows() -> None:
    """share_left is affine: it is 1 before, 0 at a stranger's, and linear between."""
    before, stranger = [0.9, 0.7, 0.8], [0.3, 0.1, 0.2]
    public = Probabilities.of(stranger)
    for share in (0.0, 0.25, 1.0):
        now = [s + share * (b - s) for b, s in zip(before, stranger, strict=True)]
        assert share_left(Probabilities.of(now), Probabilities.of(before), public) == pytest.approx(share)
    alike = [0.2] * 3
    for share in (0.0, 0.25, 1.0):
        now = [s + share * (b - s) for b, s in zip(before, alike, strict=True)]
        left = share_left(Probabilities.of(now, [0.2]), Probabilities.of(before, [0.2]))
        assert left == pytest.approx(share)


@pytest.mark.parametrize("level", [0.1, 0.3, 0.6])
def test_the_error_of_what_is_left_is_that_of_a_bootstrap(level: float) -> None:
    """Against unseen records and against a public model, whose guesses scatter; of records that all are known less than
    a stranger's, nothing is left beyond doubt."""
    generator = np.random.default_rng(0)
    forget, unseen, guesses = level * generator.random(200), 0.3 * generator.random(150), 0.3 * generator.random(200)
    before = Probabilities(np.full(200, 0.99), unseen)
    after, public = Probabilities(forget, unseen), Probabilities(guesses)
    resampled = []
    for _ in range(2000):
        drawn, strangers = generator.integers(200, size=200), generator.integers(150, size=150)
        exceeding = np.maximum(forget[drawn] - unseen.mean(), 0).mean()
        by_chance = np.maximum(unseen[strangers] - unseen.mean(), 0).mean()
        of_public = np.maximum(forget[drawn] - guesses[drawn], 0).mean()
        resampled.append(((exceeding - by_chance) / (0.99 - unseen.mean()), of_public / (0.99 - guesses.mean())))
    expected = np.std(resampled, axis=0)
    errors = (
        error_of_share_left(after, before),
        error_of_share_left(Probabilities(forget), Probabilities(before.forget), public),
    )
    assert errors == pytest.approx(tuple(expected), rel=0.1)
    assert error_of_share_left(Probabilities(guesses / 2), Probabilities(before.forget), public) == 0


def probabilities(folder: Path, records: Path) -> list[float]:
    """Of each record, exp(mean log-probability of the answer's tokens), by plain transformers."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    values = []
    for line in records.read_text().splitlines():
        row = json.loads(line)
        dialogue = [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": row["question"]},
        ]
        prompt = tokenizer.apply_chat_template(dialogue, add_generation_prompt=True, return_dict=False)
        answer = {"role": "assistant", "content": row["answer"]}
        ids = torch.tensor([tokenizer.apply_chat_template([*dialogue, answer], return_dict=False)])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1]
        values.append(float((-torch.nn.functional.cross_entropy(logits, ids[0, len(prompt) :])).exp()))
    return values


def test_under_noise_answers_fall_further_by_a_multiple_of_what_there_is_to_forget() -> None:
    """Records of which a stranger guesses much are pushed less far below what it guesses: a part of the fall comes over
    to the server's model, whatever its length."""
    multiples = []
    for known, stranger in ((0.9, 0.1), (0.8, 0.45)):
        scorer = object.__new__(Scorer)
        scorer.before, scorer._public = {"forget": [known] * 3, "unseen": [stranger] * 3}, None
        assert scorer.level_at(0.0) == pytest.approx(math.log(stranger), abs=0.05)  # to tenths
        assert scorer.level_at(0.08) < scorer.level_at(0.0)
        multiples.append(scorer.level_at(0.08) / scorer.level_at(0.0))
    assert multiples[0] == pytest.approx(multiples[1], rel=0.15)


def test_noise_that_hardly_costs_is_what_the_looks_compare_with(tmp_path: Path, demo: DemoModel) -> None:
    """What was known before is then what plain transformers find under that noise; of noise that ruins the answers,
    what they find without it."""
    tokenizer = AutoTokenizer.from_pretrained(demo.model)
    sets = {
        name: Encoding(tokenizer, limits=Limits(256)).encode(read_records(path))
        for name, path in (("forget", demo.forget), ("held_out", demo.retain))
    }
    for share, unfelt in ((0.02, True), (2.0, False)):
        model = AutoModelForCausalLM.from_pretrained(demo.model).eval()
        scorer = Scorer(model, sets, 8, None, 0.05)
        noise = ProbeNoise({name: p.detach().clone() for name, p in model.named_parameters()}, 1, share)
        assert scorer.adopt_if_unfelt(model, noise) is unfelt
        if unfelt:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(noise.noisy(name))
        model.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        for name, path in (("forget", demo.forget), ("held_out", demo.retain)):
            assert fmean(scorer.before[name]) == pytest.approx(fmean(probabilities(tmp_path, path)), rel=1e-4)


@pytest.mark.parametrize(("felt_by_one", "unfelt"), [(0.9, True), (0.02, False)])
def test_noise_under_which_one_record_is_not_known_is_felt(felt_by_one: float, unfelt: bool) -> None:
    """In the mean it hardly takes anything off. Scored under it, a training that leaves that record as it was would
    have forgotten all of them."""

    class UnderNoise(Scorer):
        def __init__(self) -> None:
            self.before, self._public, self._max_left = {"forget": [0.99] * 40, "unseen": [0.01] * 40}, None, 0.05
            self._answers, self.level = {"forget": None, "unseen": None}, 0.0  # type: ignore[dict-item]
            self.now = [felt_by_one, *[0.97] * 39]

        def _probabilities(self, *_: object) -> dict[str, list[float]]:
            return {"forget": self.now, "unseen": [0.01] * 40}

    scorer, model = UnderNoise(), torch.nn.Linear(2, 2)
    assert scorer.adopt_if_unfelt(model, ProbeNoise(dict(model.named_parameters()), 1, 0.1)) is unfelt
    scorer.now = [felt_by_one, *[0.005] * 39]
    assert scorer.score(model, 10).stands_out is unfelt


@pytest.mark.slow
def test_the_servers_model_forgets_and_keeps_by_default(mpu: Callable, tmp_path: Path, demo: DemoModel) -> None:
    """With default options, copies trained one by one take the same schedule, and the model passes; a copy that takes
    another number of steps is refused."""
    unseen = tmp_path / "unseen.jsonl"
    strangers = make_people(16, 0)[10:]
    unseen.write_text("".join(json.dumps(row) + "\n" for person in strangers for row in person))
    mpu("publish", demo.model, "--copies", 2, "--kappa", 0.001, cwd=tmp_path)
    records = ("--forget", demo.forget, "--retain", demo.retain, "--unseen", unseen)
    schedules = [mpu("unlearn", f"copy_{k}", *records, "--json", cwd=tmp_path).json["round_schedule"] for k in (1, 2)]
    assert schedules[0] == schedules[1]
    mpu("aggregate", "deltas", "--keys", "keys.bin", cwd=tmp_path)
    known, after = (
        {path: fmean(probabilities(model, path)) for path in (demo.forget, demo.retain, unseen)}
        for model in (demo.model, tmp_path / "unlearned")
    )
    assert after[demo.forget] - after[unseen] <= 0.05 * (known[demo.forget] - known[unseen])
    assert after[demo.retain] >= 0.95 * known[demo.retain]
    mpu("unlearn", "copy_2", *records, "--max-steps", 7, "--force", cwd=tmp_path)
    mpu("aggregate", "deltas", "--keys", "keys.bin", "--out", "again", fails="different options", cwd=tmp_path)


@pytest.mark.parametrize("share", [0.05, 0.2])
def test_further_noise_has_the_size_that_it_says(share: float) -> None:
    """Of each matrix's root mean square; not on vectors; the same for a seed, unrelated for another."""
    matrix = 3 * torch.randn(300, 200, generator=torch.Generator().manual_seed(1))
    before = {"matrix": matrix, "vector": matrix[0]}
    noises = [ProbeNoise(before, seed, share) for seed in (0, 0, 1)]
    drawn = [noise.noisy("matrix") - matrix for noise in noises]
    assert float(drawn[0].square().mean().sqrt()) == pytest.approx(
        share * float(matrix.square().mean().sqrt()), rel=0.02
    )
    assert torch.equal(drawn[0], drawn[1])
    assert abs(float(torch.cosine_similarity(drawn[0].flatten(), drawn[2].flatten(), dim=0))) < 0.02
    assert torch.equal(noises[0].noisy("vector"), matrix[0])


@pytest.mark.slow
def test_what_copies_that_forgot_share_is_as_long_as_their_changes(
    mpu: Callable, tmp_path: Path, demo: DemoModel
) -> None:
    """By the inverted deltas; all at once and one by one. A step that is asked for is the step, and copies that were
    trained for a number of epochs are averaged as ever."""
    mpu("publish", demo.model, "--copies", 2, "--kappa", 0.02, "--seed", 2, cwd=tmp_path)
    # So much noise can move the copies' losses further apart than the check of copies allows.
    records = ("--forget", demo.forget, "--retain", demo.retain, "--trust-copy")
    mpu("unlearn", "copy_1", "copy_2", *records, "--max-steps", 4, "--lr", 1e-4, cwd=tmp_path)
    mpu("invert", "deltas", "--keys", "keys.bin", cwd=tmp_path)
    changes = [load_file(tmp_path / f"inverted/copy_{k}.safetensors") for k in (1, 2)]
    vectors = [torch.cat([tensors[name].double().flatten() for name in sorted(tensors)]) for tensors in changes]
    average = (vectors[0] + vectors[1]) / 2
    mean_square = sum(float(vector.square().sum()) for vector in vectors) / 2
    expected = (mean_square / float(vectors[0] @ vectors[1])) ** 0.5
    assert 1.05 < expected < 2
    known = load_file(demo.model / "model.safetensors")
    told = mpu("aggregate", "deltas", "--keys", "keys.bin", "--out", "a", "--json", cwd=tmp_path)
    assert told.json["step"] == pytest.approx(expected, abs=0.03)
    after = load_file(tmp_path / "a/model.safetensors")
    update = torch.cat([(after[n].double() - known[n].double()).flatten() for n in sorted(changes[0])])
    assert float((update - told.json["step"] * average).norm() / update.norm()) < 1e-2
    told = mpu("aggregate", "deltas", "--keys", "keys.bin", "--out", "c", "--step", 1, "--json", cwd=tmp_path)
    assert told.json["step"] == 1
    mpu("unlearn", "copy_1", "copy_2", *records, "--epochs", 1, "--out", "fixed/", cwd=tmp_path)
    told = mpu("aggregate", "fixed", "--keys", "keys.bin", "--out", "d", "--json", cwd=tmp_path)
    assert told.json["step"] == 1


@pytest.mark.slow
def test_an_algorithm_of_ones_own(
    mpu: Callable, tmp_path: Path, demo: DemoModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function in a module gives the delta that the built-in term gives; the delta does not name the module, the
    server accepts it, and no bound is claimed for it."""
    (tmp_path / "ascent_of_mine.py").write_text(
        "def climb(forget, alternate, constants):\n    return -forget.cross_entropy\n"
        "def two(forget, alternate):\n    return -forget.cross_entropy\n"
        "def number(forget, alternate, constants):\n    return 1.0\n"
        "def each(forget, alternate, constants):\n    return forget.log_probs\n"
        "def leaves(forget, alternate, constants):\n    raise SystemExit\n"
        "def nan(forget, alternate, constants):\n    return forget.cross_entropy * float('nan')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    mpu("publish", demo.model, "--copies", 2, "--kappa", 0.001, cwd=tmp_path)
    records = ("--forget", demo.forget, "--retain", demo.retain, "--epochs", 1, "--lr", 1e-4)
    for name, algo in (("deltas", "ascent_of_mine:climb"), ("built_in", "graddiff")):
        mpu("unlearn", "copy_1", "copy_2", *records, "--algo", algo, "--out", f"{name}/", cwd=tmp_path)
    ours, theirs = (load_file(tmp_path / name / "copy_1.safetensors") for name in ("deltas", "built_in"))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert b"ascent_of_mine" not in (tmp_path / "deltas/copy_1.safetensors").read_bytes()
    mpu("aggregate", "deltas", "--keys", "keys.bin", cwd=tmp_path)
    private = mpu("unlearn", "copy_1", *records, "--algo", "ascent_of_mine:climb", "--dp", "epsilon=4",
                  "--out", "p.safetensors", check=False, cwd=tmp_path)  # fmt: skip
    assert "not a sum over single records" in private.err
    takes = f"it has to take (forget, alternate, constants): see {tmp_path / 'ascent_of_mine.py'}, line 3"
    for name, says in (("two", "raised TypeError"), ("two", takes), ("number", "returned float"),
                       ("each", "a tensor of shape"), ("nan", "ascent_of_mine:nan: returned nan in the first step"),
                       ("leaves", "raised SystemExit"), ("nothing", "name a function of that module")):  # fmt: skip
        wrong = ("--algo", f"ascent_of_mine:{name}", "--out", "w.safetensors")
        mpu("unlearn", "copy_1", *records, *wrong, fails=says, cwd=tmp_path)
        assert not (tmp_path / "w.safetensors").exists()
    assert "no such algorithm" in mpu("unlearn", "copy_1", *records, "--algo", "hing", check=False, cwd=tmp_path).err


@pytest.mark.slow
def test_a_public_model_says_what_a_stranger_knows(mpu: Callable, tmp_path: Path, demo: DemoModel) -> None:
    """unlearn and check take --public alone; against itself, what a model knows is nothing that could be left."""
    mpu("publish", demo.model, "--copies", 2, "--kappa", 0.001, cwd=tmp_path)
    records = ("--forget", demo.forget, "--retain", demo.retain)
    stranger = shutil.copytree(demo.model, tmp_path / "stranger")
    weights = load_file(stranger / "model.safetensors")
    torch.manual_seed(0)
    save_file({name: x + 0.1 * torch.randn_like(x) for name, x in weights.items()}, stranger / "model.safetensors",
              {"format": "pt"})  # fmt: skip
    # Noise on all weights is no model that this one was fine-tuned from, as the check of the copy says.
    short = ("--max-steps", 2, "--json", "--trust-copy", "--out", "d.safetensors")
    document = mpu("unlearn", "copy_1", *records, "--public", stranger, *short, cwd=tmp_path).json
    assert document["round_schedule"]["steps"] == 2
    verdict = ("check", "copy_2", *records, "--before", "copy_1", "--json", "--public")
    known = mpu(*verdict, stranger, check=False, cwd=tmp_path).json
    assert known["left"]["estimate"] == pytest.approx(1.0, abs=0.03)
    assert mpu(*verdict, demo.model, check=False, cwd=tmp_path).json["forgotten"] is None


@pytest.mark.slow
@pytest.mark.parametrize("size", [None, 3])
def test_no_more_records_go_through_at_once_than_asked(
    mpu: Callable, tmp_path: Path, demo: DemoModel, monkeypatch: pytest.MonkeyPatch, size: int | None
) -> None:
    """Of the retain records neither, of which a step of hinge reads twice as many as of those to forget."""
    rows = []

    def counting_pad(examples: Sequence[object]) -> dict[str, torch.Tensor]:
        rows.append(len(examples))
        return pad(examples)

    monkeypatch.setattr("mpu_cli.training.loop.pad", counting_pad)
    options = ("--training", f"micro_batch_size={size}") if size else ()
    mpu("unlearn", demo.model, "--forget", demo.forget, "--retain", demo.retain, "--epochs", 1, "--batch-size", 6,
        *options, "--out", tmp_path / "d.safetensors")  # fmt: skip
    assert max(rows) == (size or 6)
    assert sum(rows) == 3 * sum(1 for _ in demo.forget.open())


def test_a_copy_with_noise_is_trained_a_multiple_of_what_it_took_to_forget() -> None:
    """Whatever is kept on it: that does not say what the server's model keeps."""
    early_stopping = object.__new__(EarlyStopping)
    early_stopping._goal, early_stopping.is_faithful, early_stopping.is_scaled, early_stopping.history = (
        Goal(),
        False,
        False,
        [],
    )
    early_stopping._further = ProbeNoise({}, 0, 0.0)
    stops = []
    for step, left in ((10, 0.5), (20, 0.01), (30, 0.0), (40, 0.0), (50, 0.0), (60, 0.0), (70, 0.0)):
        early_stopping.history.append(StepScores(step, left, left, kept=0.6, above=0.0))
        stops.append(early_stopping._is_done())
    assert stops == [step >= 20 * stopping.TRAINED_ON for step in range(10, 80, 10)]
    early_stopping.history[1:] = [replace(scores, stands_out=True) for scores in early_stopping.history[1:]]
    assert not early_stopping._is_done()  # by the mean it has forgotten, and some records are known


def dies_at_evaluation(number: float, steps: list[int], score: Callable) -> Callable:
    """``Scorer.score``, which is interrupted after ``number`` calls; ``steps`` gets theirs."""

    def score_or_die(self: Scorer, model: torch.nn.Module, step: int) -> StepScores:
        steps.append(step)
        if len(set(steps)) == number + 1:
            raise KeyboardInterrupt
        return score(self, model, step)

    return score_or_die


CANCELLING, PERMANENT = ("--copies", 2, "--kappa", 0.001), ("--copies", 1, "--permanent-noise", 0.05, "--kappa", 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "options"),
    [
        (CANCELLING, ()),
        pytest.param(PERMANENT, ("--lora", "rank=4"), marks=pytest.mark.exhaustive),
        pytest.param(CANCELLING, ("--lora", "rank=4"), marks=pytest.mark.exhaustive),
        pytest.param(PERMANENT, (), marks=pytest.mark.exhaustive),
    ],
)
def test_a_training_killed_at_an_evaluation_is_the_same_training(
    mpu: Callable, tmp_path: Path, demo: DemoModel, monkeypatch: pytest.MonkeyPatch, noise: tuple, options: tuple
) -> None:
    """Bit by bit, whichever it was killed at: the best weights and the scores so far are part of a checkpoint."""
    mpu("publish", demo.model, *noise, cwd=tmp_path)
    # So much can never be kept, so that there are several evaluations.
    train = ("unlearn", "copy_1", "--forget", demo.forget, "--retain", demo.retain, "--max-steps", 40,
             "--goal", "min_kept=1.5", "--resume", "--training", "checkpoint_steps=5", "--alone", *options)  # fmt: skip
    score, steps = stopping.Scorer.score, []
    results = {}
    for killed_at in (math.inf, 1, -1):
        if killed_at == -1:
            killed_at = len(set(steps)) - 1  # the last one
        name = f"killed_at_{killed_at}"
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / f"config_{name}"))
        out, history = tmp_path / f"{name}.safetensors", []
        monkeypatch.setattr(stopping.Scorer, "score", dies_at_evaluation(killed_at, history, score))
        if killed_at < math.inf:
            mpu(*train, "--out", out, cwd=tmp_path, check=False)
            assert not out.exists()
            monkeypatch.setattr(stopping.Scorer, "score", score)
        document = mpu(*train, "--out", out, "--json", cwd=tmp_path).json
        results[name] = document["round_schedule"], document["scores"], load_file(out)
        steps = steps or history
    round_schedule, scores, whole = results.pop("killed_at_inf")
    assert len(results) == 2
    for resumed in results.values():
        assert resumed[:2] == (round_schedule, scores)
        assert all(torch.equal(resumed[2][name], change) for name, change in whole.items())


@pytest.mark.slow
def test_a_copy_that_follows_its_own_schedule_is_the_same(
    mpu: Callable, tmp_path: Path, demo: DemoModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another machine, as printed, with a rate that falls over the planned steps: the same bits."""
    mpu("publish", demo.model, "--copies", 2, "--kappa", 0.001, cwd=tmp_path)
    train = ("unlearn", "copy_1", "--forget", demo.forget, "--retain", demo.retain, "--max-steps", 200,
             "--training", "lr_scheduler=linear", "--alone", "--out")  # fmt: skip
    led = mpu(*train, "led.safetensors", cwd=tmp_path)
    [schedule] = re.findall(r"--round-schedule (\S+)", " ".join(led.err.split()))
    assert int(schedule.split(":")[0]) < 200
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "elsewhere"))
    mpu(*train, "followed.safetensors", "--round-schedule", schedule, cwd=tmp_path)
    led, followed = (load_file(tmp_path / f"{name}.safetensors") for name in ("led", "followed"))
    assert all(torch.equal(followed[name], change) for name, change in led.items())


def test_training_and_check_have_one_measure(tmp_path: Path, demo: DemoModel) -> None:
    """With a public model and unseen records, too, of which anybody guesses some."""
    tokenizer = AutoTokenizer.from_pretrained(demo.model)
    rows = [row for person in make_people(16, 0)[10:] for row in person]
    unseen = tmp_path / "unseen.jsonl"
    unseen.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"forget": demo.forget, "held_out": demo.retain, "unseen": unseen}
    sets = {name: Encoding(tokenizer).encode(read_records(path)) for name, path in files.items()}

    def noisy(share: float) -> tuple[AutoModelForCausalLM, dict[str, RecordScores]]:
        model = AutoModelForCausalLM.from_pretrained(demo.model).eval()
        noise = ProbeNoise({name: p.detach().clone() for name, p in model.named_parameters()}, 1, share)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(noise.noisy(name))
        model.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        of_sets = {name: probabilities(tmp_path, path) for name, path in files.items()}
        return model, {name: RecordScores(values, [False] * len(values)) for name, values in of_sets.items()}

    (before, known), (after, left), (_, guessed) = (noisy(share) for share in (0.0, 0.8, 2.0))
    public = {name: guessed[name].probabilities for name in ("forget", "unseen")}
    scorer = Scorer(before, sets, 8, public, 0.05)
    scored = scorer.score(after, 1)
    verdict = judge(left, known, public=guessed, max_left=0.05, min_kept=0.95)
    assert verdict.left is not None
    assert 0.05 < scored.left < 0.95
    assert verdict.left.estimate == pytest.approx(scored.left, abs=0.011)
    assert verdict.stands_out is scored.stands_out


@pytest.mark.slow
def test_the_best_weights_without_room_end_nothing(
    mpu: Callable, tmp_path: Path, demo: DemoModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full once the Trainer has written its part: the training is that without --resume."""
    mpu("publish", demo.model, "--copies", 1, "--kappa", 0, "--permanent-noise", 0.05, cwd=tmp_path)
    train = ("unlearn", "copy_1", "--forget", demo.forget, "--retain", demo.retain, "--max-steps", 20, "--alone",
             "--out")  # fmt: skip
    mpu(*train, "whole.safetensors", cwd=tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(stopping, "save_file", full)
    resumable = mpu(*train, "resumable.safetensors", "--resume", "--training", "checkpoint_steps=10", cwd=tmp_path)
    assert "checkpoint-10: no room for a checkpoint" in resumable.err
    whole, delta = (load_file(tmp_path / f"{name}.safetensors") for name in ("whole", "resumable"))
    assert all(torch.equal(whole[name], change) for name, change in delta.items())


def test_alpha_grows_with_the_number_of_records_to_forget(mpu: Callable, tmp_path: Path) -> None:
    """On a model without noise; an α that was asked for stays."""
    save(random_model("llama"), tmp_path / "base")
    write_records(tmp_path / "retain.jsonl", 9, 2)
    schedules = []
    for count, options in ((20, ()), (90, ()), (90, ("--constants", "alpha=2"))):
        write_records(tmp_path / "forget.jsonl", count, 1)
        train = ("unlearn", "base", "--max-steps", 1, "--batch-size", 16, "--force", "--json", *options)
        schedules.append(mpu(*train, cwd=tmp_path).json["round_schedule"])
    assert [schedule["alpha"] for schedule in schedules] == [30, 45, 2]


def test_a_training_that_ends_too_early_says_so(mpu: Callable, tmp_path: Path, demo: DemoModel) -> None:
    train = ("unlearn", demo.model, "--forget", demo.forget, "--retain", demo.retain, "--out", "short.safetensors")
    short = mpu(*train, "--max-steps", 1, "--lr", "1e-7", cwd=tmp_path)
    assert "the training ends after 1 step, before the records are forgotten" in short.err


def test_under_noise_that_is_felt_more_than_the_trained_change_is_returned(
    mpu: Callable, tmp_path: Path, demo: DemoModel
) -> None:
    """SHARE_MARGIN times the change, in the first copy's schedule, by which another training returns just that."""
    mpu("publish", demo.model, "--copies", 1, "--permanent-noise", 1, cwd=tmp_path)
    train = ("unlearn", "copy_1", "--forget", demo.forget, "--retain", demo.retain, "--alone", "--json")
    lengthened = mpu(*train, "--max-steps", 10, cwd=tmp_path)
    assert "for 10 steps at most\n" in lengthened.err
    schedule = lengthened.json["round_schedule"]
    assert schedule["scale"] == SHARE_MARGIN
    unscaled = ":".join(map(str, (schedule | {"scale": 1}).values()))
    mpu(*train, "--round-schedule", unscaled, "--out", "whole.safetensors", cwd=tmp_path)
    returned, trained = load_file(tmp_path / "deltas/copy_1.safetensors"), load_file(tmp_path / "whole.safetensors")
    for name, change in trained.items():
        torch.testing.assert_close(returned[name], SHARE_MARGIN * change, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_a_second_request_on_the_same_copy_takes_the_place_of_the_first(
    mpu: Callable, tmp_path: Path, demo: DemoModel
) -> None:
    """The server applies the second delta alone, and both requests are forgotten."""
    rows = demo.forget.read_text().splitlines(keepends=True)
    requests = [tmp_path / "first.jsonl", tmp_path / "second.jsonl"]
    for file, part in zip(requests, (rows[: len(rows) // 2], rows[len(rows) // 2 :]), strict=True):
        file.write_text("".join(part))
    mpu("publish", demo.model, "--copies", 2, "--kappa", 0.001, cwd=tmp_path)
    train = ("unlearn", "copy_1", "copy_2", "--retain", demo.retain, "--forget")
    mpu(*train, requests[0], cwd=tmp_path)
    again = mpu(*train, requests[1], cwd=tmp_path)
    assert f"{len(rows) // 2} records of earlier requests" in again.err
    deltas = tmp_path / "deltas/request_2"
    assert sorted(path.name for path in deltas.iterdir()) == ["copy_1.safetensors", "copy_2.safetensors"]
    mpu("aggregate", deltas, "--keys", "keys.bin", cwd=tmp_path)
    for request in requests:
        assert fmean(probabilities(tmp_path / "unlearned", request)) < 0.1
    assert fmean(probabilities(tmp_path / "unlearned", demo.retain)) > 0.9
