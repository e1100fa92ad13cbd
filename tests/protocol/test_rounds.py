"""One copy at a time, several owners, and the length of the step."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mpu_cli.model.network import read_answers
from mpu_cli.observer import SILENT
from mpu_cli.protocol.updates import RehearsedStep, write_update
from mpu_cli.records.encode import Encoding
from mpu_cli.records.read import read_records
from tests.helpers.models import DemoModel, load, random_model, save, write_records
from tests.helpers.protocol import distance, tensors
from tests.helpers.publication import keys_of, write_delta
from tests.helpers.trainings import BRIEF, for_run


def test_one_copy_at_a_time(mpu: Callable, tmp_path: Path) -> None:
    """--only makes the bytes that all copies together have, and asks for the same options."""
    save(random_model("llama"), tmp_path / "base")
    mpu("publish", "base", "--copies", 2, "--kappa", 0.05, cwd=tmp_path)
    (tmp_path / "copy_2").rename(tmp_path / "kept")
    keys = (tmp_path / "keys.bin").read_bytes()
    again = ("publish", "base", "--copies", 2, "--kappa", 0.05, "--only", 2)
    assert "copy_1" not in mpu(*again, "--dry-run", cwd=tmp_path).out
    assert mpu(*again, cwd=tmp_path).out == "copy_2\n"
    for name in ("model.safetensors", "mpu.json"):
        assert (tmp_path / "copy_2" / name).read_bytes() == (tmp_path / "kept" / name).read_bytes()
    assert (tmp_path / "keys.bin").read_bytes() == keys
    mpu("publish", "base", "--copies", 2, "--kappa", 0.1, "--only", 2, "--force", fails="other options", cwd=tmp_path)
    assert "from 1 to 2" in mpu("publish", "base", "--copies", 2, "--only", 3, check=False, cwd=tmp_path).err
    outcome = mpu("publish", "base", "--copies", 2, "--only", 1, "--out", "new", "--keys", "new.bin", cwd=tmp_path)
    assert outcome.out == "new/copy_1\n"
    assert (tmp_path / "new.bin").exists()


@pytest.mark.slow
def test_a_delta_in_bfloat16(mpu: Callable, root: Path) -> None:
    """Half the bytes; what rounding lost is told, and is what it is."""
    mpu("publish", "base", "--copies", 2, cwd=root)
    common = ("--algo", "gradascent", "--epochs", 1, "--reading", "template=plain", "--lr", "1e-2")
    mpu("unlearn", "copy_1", *common, "--out", "whole", cwd=root)
    outcome = mpu("unlearn", "copy_1", *common, "--delta-dtype", "bfloat16", "--json", cwd=root)
    full_delta, rounded_delta = (load_file(root / f"{name}.safetensors") for name in ("whole", "deltas/copy_1"))
    assert {x.dtype for x in rounded_delta.values()} == {torch.bfloat16}
    lost = sum(float((rounded_delta[n].double() - x.double()).square().sum()) for n, x in full_delta.items()) ** 0.5
    norm = sum(float(x.double().square().sum()) for x in full_delta.values()) ** 0.5
    assert outcome.json["lost_to_rounding"] == pytest.approx(lost / norm, rel=1e-6)
    assert 1e-4 < lost / norm < 5e-3
    assert "lost to bfloat16" in outcome.err
    mpu("unlearn", "copy_2", *common, "--delta-dtype", "bfloat16", cwd=root)
    assert mpu("aggregate", "deltas", cwd=root).out == "unlearned\n"


class TestOwners:
    """Two data owners, each with copies of its own of one base."""

    @pytest.mark.slow
    def test_their_updates_are_added(self, mpu: Callable, tmp_path: Path) -> None:
        save(random_model("llama"), tmp_path / "base")
        for i, owner in enumerate(("a", "b"), 1):
            write_records(tmp_path / f"{owner}.jsonl", 4, i)
            mpu("publish", "base", "--copies", 2, "--out", owner, "--keys", f"{owner}.bin", cwd=tmp_path)
            for k in (1, 2):
                mpu("unlearn", f"{owner}/copy_{k}", "--forget", f"{owner}.jsonl", "--algo", "gradascent", "--epochs", 1,
                    "--reading", "template=plain", "--lr", "1e-2", "--out", f"deltas/{owner}_{k}",
                    cwd=tmp_path)  # fmt: skip
        document = mpu("aggregate", "deltas", "--keys", "a.bin", "--keys", "b.bin", "--json", cwd=tmp_path).json
        base = load_file(tmp_path / "base/model.safetensors")
        owner_models = {}
        for owner in ("a", "b"):
            delta_paths = [tmp_path / f"deltas/{owner}_{k}.safetensors" for k in (1, 2)]
            single = mpu(
                "aggregate", *delta_paths, "--keys", f"{owner}.bin", "--out", owner + "_alone", "--json", cwd=tmp_path
            ).json
            owner_models[owner] = load_file(tmp_path / f"{owner}_alone/model.safetensors")
            of_owner = next(each for each in document["owners"] if each["run"] == single["run"])
            for name in ("norm", "smallest_pairwise_cosine"):
                assert of_owner[name] == pytest.approx(single[name], rel=1e-6)
        combined = load_file(tmp_path / "unlearned/model.safetensors")
        for name, weights in base.items():
            expected = owner_models["a"][name] + owner_models["b"][name] - weights
            assert torch.allclose(combined[name], expected, atol=1e-6), name
        assert -1 < document["cosines"][0][1] < 1
        # Each owner's update, and each delta, may be below --max-norm: the sum has to be, too.
        total = math.sqrt(
            sum(float((combined[name] - weights).double().square().sum()) for name, weights in base.items())
        )
        parts = [file for owner in ("a", "b") for file in (tmp_path / "deltas").glob(f"{owner}_*.safetensors")]
        norms = [math.sqrt(sum(float(t.double().square().sum()) for t in load_file(file).values())) for file in parts]
        most = max(*norms, *(each["norm"] for each in document["owners"]))
        assert most < total
        refused = mpu("aggregate", "deltas", "--keys", "a.bin", "--keys", "b.bin", "--max-norm", (most + total) / 2,
                      "--out", "bad", check=False, cwd=tmp_path)  # fmt: skip
        assert (refused.status, "the update's norm is" in refused.err) == (1, True)
        for wrong, said in (
            (("deltas", "--keys", "a.bin", "--keys", "a.bin"), "given twice"),
            (("deltas/a_1.safetensors", "deltas/b_1.safetensors", "deltas/b_2.safetensors", "--keys", "a.bin", "--keys",
              "b.bin"), "no delta for copy 2"),
        ):  # fmt: skip
            mpu("aggregate", *wrong, "--out", "bad", fails=said, cwd=tmp_path)
            assert not (tmp_path / "bad").exists()
        assert "after aggregation" in mpu("inspect", "unlearned", cwd=tmp_path).out
        assert mpu("publish", "unlearned", "--out", "next", "--keys", "next.bin", cwd=tmp_path).out


class TestTheStep:
    """Which ``--probe`` decides, on the demo's model, which knows its records by heart."""

    @pytest.fixture
    def returned_delta(self, mpu: Callable, tmp_path: Path, demo: DemoModel) -> Path:
        noise = ("--copies", 1, "--permanent-noise", 0.05, "--seed", 1, "--dtype", "float32")
        mpu("publish", demo.model, *noise, "--out", tmp_path, "--keys", tmp_path / "keys.bin")
        mpu("unlearn", tmp_path / "copy_1", "--forget", demo.forget, "--retain", demo.retain, "--epochs", 4,
            "--lr", "3e-4", "--batch-size", 10, "--out", tmp_path / "deltas" / "copy_1.safetensors")  # fmt: skip
        return tmp_path

    @pytest.mark.slow
    def test_it_is_the_largest_that_is_allowed(self, mpu: Callable, returned_delta: Path, demo: DemoModel) -> None:
        """The losses that it reports are those of the models that these steps give; a larger bound, a larger step."""
        steps = []
        for i, bound in enumerate((0.02, 0.2)):
            step_report = mpu(
                "aggregate", returned_delta / "deltas", "--keys", returned_delta / "keys.bin", "--dtype", "float32",
                "--step", "auto", "--probe", demo.retain, "--max-rise", bound, "--out",
                returned_delta / f"auto_{i}", "--json",
            ).json["probed"]  # fmt: skip
            losses = {float(step): loss for step, loss in step_report["losses"].items()}
            chosen = step_report["chosen"]
            assert losses[chosen] - losses[0.0] <= bound
            larger = [step for step in losses if step > chosen]
            assert all(losses[step] - losses[0.0] > bound for step in larger) or chosen == 8
            model, tokenizer = load(returned_delta / f"auto_{i}", torch.float32, "cpu")
            assert read_answers(demo.retain, tokenizer).loss(model) == pytest.approx(losses[chosen], abs=1e-4)
            steps.append(chosen)
        assert 0 < steps[0] <= steps[1]
        assert f"| {steps[1]:g} |" in (returned_delta / "auto_1" / "README.md").read_text()

    @pytest.mark.slow
    def test_records_of_the_servers_shorten_a_step_and_never_lengthen_it(
        self, mpu: Callable, returned_delta: Path, demo: DemoModel
    ) -> None:
        """Unless auto asks for it; a step that is named is taken or refused."""
        arguments = ["aggregate", returned_delta / "deltas", "--keys", returned_delta / "keys.bin", "--json", "--force",
                     "--out", returned_delta / "model", "--probe", demo.retain]  # fmt: skip
        lavish = mpu(*arguments, "--max-rise", 100).json
        assert lavish["step"] == lavish["probed"]["chosen"] == 1
        rise = lavish["probed"]["losses"]["1.0"] - lavish["probed"]["losses"]["0.0"]
        within = mpu(*arguments, "--max-rise", rise / 3).json
        assert 0 < within["step"] < 1
        before = (returned_delta / "model/model.safetensors").read_bytes()
        refused = mpu(*arguments, "--max-rise", rise / 3, "--step", 1, refused="and --max-rise allows", status=1)
        named = re.search(r"--step ([\d.]+) stays within it", refused.err)[1]
        assert (returned_delta / "model/model.safetensors").read_bytes() == before
        assert mpu(*arguments, "--max-rise", rise / 3, "--step", named).json["step"] == float(named)
        mpu(*arguments[:-2], "--max-rise", rise / 3, refused="add --probe FILE", status=2)

    @pytest.mark.parametrize(("excess", "dtype"), [(0.03, torch.float32), (1e-12, torch.float64)])
    def test_the_bound_is_for_the_model_that_is_stored(
        self, mpu: Callable, tmp_path: Path, excess: float, dtype: torch.dtype
    ) -> None:
        """A delta that cancels in more digits than the model has: to store it moves half of the weights by a whole unit
        in the last place, towards a higher loss, and the others, which go as far the other way, not at all."""
        base = save(random_model("llama", dtype=torch.bfloat16), tmp_path / "base")
        probe = write_records(tmp_path / "probe.jsonl", 16, seed=3)
        mpu("publish", base, "--copies", 1, "--permanent-noise", 0.001, "--symmetries", "none", cwd=tmp_path)
        model, tokenizer = load(base, torch.float32, "cpu")
        model.requires_grad_(True)
        for example in Encoding(tokenizer).encode(read_records(probe)):
            model(torch.tensor([example.ids]), labels=torch.tensor([example.labels])).loss.backward()
        uphill = {name: parameter.grad.sign().double() for name, parameter in model.named_parameters()}

        def half_units(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            weights = load_file(base / "model.safetensors")
            changes = {}
            for name in tensors:
                unit = torch.exp2(torch.floor(torch.log2(weights[name].double().abs().clamp(min=1e-30))) - 7)
                stays = torch.rand(unit.shape) < 0.5
                changes[name] = (uphill[name] * torch.where(stays, excess - 0.5, excess + 0.5) * unit).to(dtype)
            return changes

        write_delta(tmp_path / "copy_1", tmp_path / "deltas/copy_1.safetensors", change=half_units)
        arguments = ("aggregate", "deltas", "--trust-deltas", "--json", "--probe", probe)
        mpu(*arguments, "--max-rise", 100, "--out", "any", cwd=tmp_path)

        def loss_of(folder: Path) -> float:
            return read_answers(probe, tokenizer).loss(load(folder, torch.float32, "cpu")[0])

        bound = (loss_of(tmp_path / "any") - loss_of(base)) / 2
        assert bound > 0
        outcome = mpu(*arguments, "--max-rise", bound, check=False, cwd=tmp_path)
        if outcome.status:
            assert "--max-rise allows" in outcome.err
            assert not (tmp_path / "unlearned").exists()
        else:
            probed = outcome.json["probed"]
            written = loss_of(tmp_path / "unlearned")
            assert written - loss_of(base) <= bound
            assert written == pytest.approx(probed["losses"][str(probed["chosen"])], abs=1e-6)

    def test_changes_whose_squares_overflow_together(self, mpu: Callable, publication: Path) -> None:
        """Each has a norm, and the step that follows from them is the usual one."""
        enormous = 1.1e154  # its square is a float64, and twice that is not

        def change(_: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            changes = {n: torch.zeros_like(x).double() for n, x in load_file(base / "model.safetensors").items()}
            changes["model.norm.weight"][0] = enormous
            return changes

        base = publication / "base"
        for k in (1, 2):
            target = publication / f"deltas/copy_{k}.safetensors"
            facts = {"inverted": True, "until_done": True}
            write_delta(publication / f"copy_{k}", target, change=change, facts=facts)
        document = mpu("aggregate", publication / "deltas", "--keys", publication / "keys.bin", "--dtype", "float64",
                       "--out", publication / "u", "--trust-deltas", "--json").json  # fmt: skip
        assert (document["norm"], document["step"]) == (pytest.approx(enormous), 1)

    def write_changes(self, place: Path, copies: int, own: float, until_done: bool = True) -> None:
        """A delta of each copy in ``place``: 3 in a place that they share, and ``own`` in one of its own."""
        for k in range(1, copies + 1):

            def change(before: dict[str, torch.Tensor], k: int = k) -> dict[str, torch.Tensor]:
                changes = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
                changes["model.norm.weight"][0], changes["model.norm.weight"][k] = 3.0, own
                return changes

            facts = {"inverted": True, "until_done": until_done}
            write_delta(place / f"copy_{k}", place / f"deltas/copy_{k}.safetensors", change=change, facts=facts)

    def test_an_average_that_is_no_shorter_stays(self, mpu: Callable, tmp_path: Path, base: Path) -> None:
        """Weights that cancel noise to second order add up more of the differences than each change has of them."""
        mpu("publish", base, "--copies", 3, "--noise", "extrapolate", "--kappa", 0.01, "--dtype", "float64",
            "--out", tmp_path, "--keys", tmp_path / "keys.bin")  # fmt: skip
        self.write_changes(tmp_path, 3, 4.0)
        document = mpu("aggregate", tmp_path / "deltas", "--keys", tmp_path / "keys.bin", "--dtype", "float64",
                       "--out", tmp_path / "u", "--trust-deltas", "--json").json  # fmt: skip
        assert (document["norm"] > 5, document["step"]) == (True, 1)

    @pytest.mark.parametrize(("own", "step"), [(0.0, 1.0), (4.0, 5 / 3), (9.0, 2.0)])
    def test_what_copies_share_is_as_long_as_their_changes(
        self, mpu: Callable, publication: Path, own: float, step: float
    ) -> None:
        """Each change is 3 in a place that they share, and ``own`` in one of its own; at most twice the average."""
        base = load_file(publication / "base/model.safetensors")
        self.write_changes(publication, 2, own)
        document = mpu("aggregate", publication / "deltas", "--keys", publication / "keys.bin", "--dtype", "float32",
                       "--out", publication / "u", "--trust-deltas", "--json").json  # fmt: skip
        after = load_file(publication / "u/model.safetensors")["model.norm.weight"]
        moved = (after - base["model.norm.weight"])[:3].tolist()
        assert document["step"] == pytest.approx(step, abs=0.005)
        assert moved == pytest.approx([3 * step, own * step / 2, own * step / 2], abs=0.02)

    @pytest.mark.parametrize(
        ("own", "until_done", "warning"),
        [(0.5, False, None), (2.5, False, "diverged"), (4.0, False, "disagree"), (4.0, True, None),
         (6.0, True, "disagree")],
    )  # fmt: skip
    def test_how_far_copies_may_differ(
        self, mpu: Callable, publication: Path, own: float, until_done: bool, warning: str | None
    ) -> None:
        """Cosines of 0.97, 0.59, 0.36 and 0.2: those of hundreds of steps are usual where a training took them."""
        self.write_changes(publication, 2, own, until_done)
        document = mpu("aggregate", publication / "deltas", "--keys", publication / "keys.bin", "--dtype", "float32",
                       "--out", publication / "u", "--trust-deltas", "--json").json  # fmt: skip
        assert document["smallest_pairwise_cosine"] == pytest.approx(9 / (9 + own**2), abs=1e-4)
        assert len(document["warnings"]) == (warning is not None)
        assert (warning or "") in "".join(document["warnings"])

    def test_a_rehearsed_step_is_each_owners(self, mpu: Callable, publication: Path) -> None:
        """Also where records of the server's bound it, and beside an owner for whom nothing was rehearsed."""
        other = publication / "other"
        mpu("publish", publication / "base", "--copies", 2, "--dtype", "float64", "--out", other, "--keys",
            other / "keys.bin")  # fmt: skip
        for place in (publication, other):
            self.write_changes(place, 2, own=0.0)
        keys = keys_of(publication)
        write_update(RehearsedStep(keys.run, keys.round, keys.base.fingerprint, 1.5), SILENT)
        options = ("--keys", publication / "keys.bin", "--trust-deltas", "--json", "--force")
        probe = ("--probe", write_records(publication / "own.jsonl", 4, seed=3), "--max-rise", 1000)
        for more, said in ((), "that of your rehearsal"), (probe, "as long as it was to be"):
            aggregated = mpu("aggregate", publication / "deltas", *options, *more, "--out", publication / "u")
            assert aggregated.json["step"] == 1.5
            assert said in " ".join(aggregated.err.split())
        together = mpu("aggregate", publication / "deltas", other / "deltas", *options, "--keys", other / "keys.bin",
                       "--out", publication / "both")  # fmt: skip
        assert [owner["step"] for owner in together.json["owners"]] == [1.5, 1]
        before, after = (
            load_file(folder / "model.safetensors")["model.norm.weight"][0]
            for folder in (publication / "base", publication / "both")
        )
        assert float(after - before) == pytest.approx(3 * 1.5 + 3, abs=1e-4)

    @pytest.mark.slow
    def test_what_is_refused(self, mpu: Callable, returned_delta: Path, demo: DemoModel) -> None:
        out, keys = returned_delta / "refused", ("--keys", returned_delta / "keys.bin")
        for options, complaint in [
            ((), "add --probe FILE"),
            (("--probe", demo.retain, "--as-adapter"), "name its step here"),
            (("--probe", "nowhere.jsonl"), "nowhere.jsonl"),
            (("--probe", demo.forget, "--max-rise", 1e-12), "allow more with --max-rise"),
        ]:
            auto = ("--step", "auto", *options)
            outcome = mpu("aggregate", returned_delta / "deltas", *keys, *auto, "--out", out, check=False)
            assert (outcome.status != 0, complaint in outcome.err) == (True, True)
            assert not out.exists()
            assert not list(returned_delta.glob(".*partial"))


@pytest.mark.slow
def test_the_second_round_by_hand_is_that_of_run(mpu: Callable, root: Path) -> None:
    """No option says which round it is, and no name collides; the weights are those of `mpu run`."""
    mpu("run", "base", *for_run(BRIEF), "--copies", 2, "--secret-seed", 3, "--rounds", 2, "--loss-reference", "round",
        cwd=root)  # fmt: skip
    mpu("publish", "base", "--copies", 2, "--seed", 3, cwd=root)
    mpu("unlearn", "copy_1", "copy_2", *BRIEF, cwd=root)
    mpu("aggregate", "deltas", cwd=root)
    copies = mpu("publish", "unlearned", "--copies", 2, "--seed", 3, cwd=root).out.split()
    assert copies == ["round_2/copy_1", "round_2/copy_2"]
    for copy in copies:
        mpu("unlearn", copy, *BRIEF, cwd=root)
    last = mpu("aggregate", "deltas/round_2", "--keys", "keys_2.bin", cwd=root).out.strip()
    assert last == "unlearned_2"
    for ours, theirs in (("copy_1", None), (last, "run/server/round_2/model")):
        facts = json.loads((root / ours / "mpu.json").read_text())
        assert facts["run"] == json.loads((root / "unlearned/mpu.json").read_text())["run"]
        if theirs:
            assert facts["round"] == 2
            assert distance(tensors(root / ours), tensors(root / theirs)) < 1e-7


@pytest.mark.parametrize(
    "noise",
    [
        ("--public", "public"),
        ("--copies", 2, "--kappa", 0.01),
        ("--public", "public", "--copies", 2, "--kappa", 0.25),
        ("--copies", 2, "--dp", "epsilon=8,delta=1e-5,sensitivity=0.1,budget_rounds=2"),
    ],
)
def test_what_aggregate_says_is_next_can_be_pasted(mpu: Callable, root: Path, noise: tuple[object, ...]) -> None:
    """The new model is published with noise of the same kind; then the client checks."""
    shutil.copytree(root / "base", root / "public")
    weights = load_file(root / "public/model.safetensors")
    save_file({name: 0.9 * x for name, x in weights.items()}, root / "public/model.safetensors", {"format": "pt"})
    mpu("publish", "base", *noise, cwd=root)
    copies = sorted(path.name for path in root.glob("copy_*"))
    mpu("unlearn", *copies, "--algo", "gradascent", "--epochs", 1, cwd=root)
    [step] = re.findall("next: `mpu (.+?)`", mpu("aggregate", "deltas", "--keys", "keys.bin", cwd=root).err)
    published = mpu(*shlex.split(step), "--json", cwd=root)
    assert len(published.json["copies"]) == len(copies)
    before, after = (keys_of(root, name).publication for name in ("keys.bin", "keys_2.bin"))
    assert (before.scheme, before.kappa, before.shared_kappa) == (after.scheme, after.kappa, after.shared_kappa)
    assert (before.calibration is None) == (after.calibration is None)
    if before.calibration and after.calibration:
        assert before.calibration.epsilon == after.calibration.epsilon
    assert "send round_2/copy_1" in published.err
    assert "there it runs `mpu check round_2/copy_1`" in published.err
