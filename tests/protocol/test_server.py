"""Keys, publish, invert, aggregate and verify, through the command line on small models."""

from __future__ import annotations

import json
import math
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mpu_cli.errors import MpuError
from mpu_cli.files.manifest import CopyManifest, DeltaManifest, as_metadata, delta_facts, delta_manifest
from mpu_cli.files.reader import open_checkpoint
from mpu_cli.protocol.noise import SAFETY
from tests.helpers.attacks import TRAINING, publish_copy
from tests.helpers.models import CONFIGS, random_model, save, write_records
from tests.helpers.protocol import tensors
from tests.helpers.publication import aggregate, write_delta
from tests.helpers.trainings import BRIEF


class TestAggregate:
    def test_is_the_weighted_sum_of_the_inverted(self, mpu, publication):
        aggregate(mpu, publication)
        paths = mpu(
            "invert", publication / "deltas", "--keys", publication / "keys.bin", "--out", publication / "inv"
        ).out
        first_delta, second_delta = (tensors(Path(path)) for path in paths.split())
        before, after = tensors(publication / "base"), tensors(publication / "unlearned")
        for name in before:  # nodes 1 and −1
            torch.testing.assert_close(after[name] - before[name], (first_delta[name] + second_delta[name]) / 2)

    def test_raw_inverted_and_mixed_give_the_same(self, mpu, publication):
        aggregate(mpu, publication)
        raw = tensors(publication / "unlearned")
        mpu("invert", publication / "deltas", "--keys", publication / "keys.bin", "--out", publication / "inv")
        for folder in ("inv", "deltas"):
            shutil.rmtree(publication / "unlearned")
            aggregate(
                mpu, publication, publication / folder / "copy_1.safetensors", publication / "inv/copy_2.safetensors"
            )
            actual = tensors(publication / "unlearned")
            for name in raw:
                torch.testing.assert_close(actual[name], raw[name])

    def test_inverted_factors_of_stacked_experts_give_the_same(self, mpu, tmp_path):
        """Each expert's left factor meets its own right one, in the base's order of experts, too."""

        def as_factors(change: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            stacks = {name: x for name, x in change.items() if x.ndim == 3}
            left_factors = {f"{name}.lora_B": x[..., :2].contiguous() for name, x in stacks.items()}
            return left_factors | {f"{name}.lora_A": x[:, :2].contiguous() for name, x in stacks.items()}

        save(random_model("gpt_oss"), tmp_path / "base")
        mpu("publish", tmp_path / "base", "--copies", 2, "--out", tmp_path, "--keys", tmp_path / "keys.bin")
        for k in (1, 2):
            path = tmp_path / f"deltas/copy_{k}.safetensors"
            write_delta(tmp_path / f"copy_{k}", path, seed=k, change=as_factors, facts={"kind": "lora"})
        mpu("invert", tmp_path / "deltas", "--keys", tmp_path / "keys.bin", "--out", tmp_path / "inv")
        results = []
        for folder in ("deltas", "inv"):
            aggregate(mpu, tmp_path, tmp_path / folder)
            results.append(tensors(tmp_path / "unlearned"))
        before = tensors(tmp_path / "base")
        assert any(not torch.equal(results[0][name], before[name]) for name in before)
        for name in before:
            torch.testing.assert_close(results[1][name], results[0][name])

    def test_what_macos_puts_beside_files_is_passed(self, mpu, publication):
        """AppleDouble files and __MACOSX, among deltas and beside weights under a name of their own."""
        (publication / "base/model.safetensors").rename(publication / "base/weights.safetensors")
        (publication / "deltas/__MACOSX").mkdir()
        for name in ("deltas/._copy_1.safetensors", "deltas/__MACOSX/._copy_2.safetensors",
                     "base/._weights.safetensors"):  # fmt: skip
            (publication / name).write_bytes(bytes.fromhex("0005160700020000") + b"Mac OS X        " + bytes(4072))
        arguments = ("--base", publication / "base")
        aggregate(mpu, publication, publication / "deltas", *arguments)
        assert (publication / "unlearned/model.safetensors").is_file()
        assert "._" not in mpu("status", cwd=publication).out

    def test_the_step_scales_the_update(self, mpu, publication):
        before = tensors(publication / "base")
        updates = []
        for rate in (1.0, -0.25):
            mpu("aggregate", publication / "deltas", "--keys", publication / "keys.bin", "--dtype", "float64",
                "--step", rate, "--out", publication / "u", "--trust-deltas", "--force")  # fmt: skip
            updates.append({n: t - before[n] for n, t in tensors(publication / "u").items()})
        for name in before:
            torch.testing.assert_close(updates[1][name], -0.25 * updates[0][name])

    def test_a_hostile_delta(self, mpu, publication):
        """A huge norm is refused if there is a bound, and a poisoned tensor is named."""
        arguments = (
            "aggregate",
            publication / "deltas",
            "--keys",
            publication / "keys.bin",
            "--out",
            publication / "u",
        )
        honest = mpu(*arguments, "--trust-deltas", "--json").json
        assert honest["outliers"] == []
        path = publication / "deltas/copy_2.safetensors"
        delta, metadata = tensors(path), open_checkpoint(path).metadata
        name = sorted(delta)[3]
        delta[name] = delta[name] * 1000
        save_file({n: t.float() for n, t in delta.items()}, path, metadata)
        outcome = mpu(*arguments, "--trust-deltas", "--force")
        assert f"copy 2 changes {name} " in outcome.err
        [outlier] = mpu(*arguments, "--trust-deltas", "--force", "--json").json["outliers"]
        assert (outlier["tensor"], outlier["copy"]) == (name, 2)
        assert 300 < outlier["factor"] < 3000
        shutil.rmtree(publication / "u")
        bound = 2 * max(copy["norm"] for copy in honest["copies"])
        mpu(*arguments, "--max-norm", bound, fails="copy_2.safetensors: norm is", status=1)
        assert not (publication / "u").exists()
        assert mpu(*arguments, "--max-norm", 0, check=False).status == 2

    @pytest.mark.slow
    def test_copies_trained_otherwise_are_told(self, mpu, tmp_path, base):
        """Each one is a valid delta by itself: only a comparison shows that they do not belong together."""
        for seed, name in enumerate(("forget", "retain")):
            write_records(tmp_path / f"{name}.jsonl", 4, seed)
        mpu("publish", base, "--copies", 2, cwd=tmp_path)
        common = ("--epochs", 1, "--reading", "template=plain", "--force")
        mpu("unlearn", "copy_1", "--algo", "npo", *common, cwd=tmp_path)
        for options, complaint in (
            (("--algo", "npo"), None),
            (("--algo", "graddiff"), "copies 1 and 2 were trained with different options or seed"),
        ):
            mpu("unlearn", "copy_2", *options, *common, cwd=tmp_path)
            for dry in ((), ("--dry-run",)) if complaint else ():
                refused = mpu("aggregate", "deltas", "--out", "never", *dry, check=False, cwd=tmp_path)
                assert (refused.status, refused.is_one_error) == (1, True)
                assert (
                    "copy_2.safetensors: was trained with different options or seed than deltas/copy_1" in refused.err
                )
                assert not (tmp_path / "never").exists()
            printed = mpu("aggregate", "deltas", "--trust-deltas", "--force", cwd=tmp_path).err
            assert complaint in printed if complaint else "warning" not in printed

    def test_norms_and_cosines_are_what_they_say(self, mpu, publication):
        outcome = mpu("aggregate", publication / "deltas", "--keys", publication / "keys.bin", "--dtype", "float64",
                   "--out", publication / "unlearned", "--trust-deltas", "--json")  # fmt: skip
        assert "disagree" in outcome.err  # random deltas have nothing in common
        paths = mpu(
            "invert", publication / "deltas", "--keys", publication / "keys.bin", "--out", publication / "inv"
        ).out
        flat = [torch.cat([t.flatten() for t in tensors(Path(path)).values()]) for path in paths.split()]
        mean = (flat[0] + flat[1]) / 2
        for delta, x in zip(outcome.json["copies"], flat, strict=True):
            assert delta["norm"] == pytest.approx(float(x.norm()))
            assert delta["cosine"] == pytest.approx(float(x @ mean / x.norm() / mean.norm()))
        assert outcome.json["norm"] == pytest.approx(float(mean.norm()))
        # Two copies: half of their difference, and the next term of a series that continues like this.
        apart = [float((x - mean).norm() / mean.norm()) for x in flat]
        error = outcome.json["error_estimate"]
        assert error["one_order_lower"] == pytest.approx(float((flat[0] - flat[1]).norm() / 2 / mean.norm()))
        assert error["relative"] == pytest.approx(min(SAFETY * error["one_order_lower"] ** 2, error["one_order_lower"]))
        assert error["variance_factor"] == pytest.approx(0.5)
        assert error["signal_to_noise"] == pytest.approx(1 / sum(0.25 * d * d for d in apart))
        assert "error of the update: about" in outcome.err
        assert outcome.err.count("warning") == 1  # the cause, and not what follows from it

    def test_the_result_is_a_model(self, mpu, publication):
        aggregate(mpu, publication)
        model = AutoModelForCausalLM.from_pretrained(publication / "unlearned")
        assert model.dtype == torch.float64
        assert (publication / "unlearned/tokenizer.json").exists()

    @pytest.mark.parametrize(
        ("spoil", "complaint"),
        [
            (lambda t: {n: x for n, x in t.items() if "norm" not in n}, "lacks"),
            (lambda t: t | {"extra": torch.zeros(1)}, "contains 'extra'"),
            (lambda t: {n.replace("model.norm", "norm"): x for n, x in t.items()}, "lacks 'model.norm.weight'"),
            (lambda t: t | {"model.norm.weight": torch.zeros(3)}, "shape"),
            (lambda t: t | {"model.norm.weight": t["model.norm.weight"].to(torch.int32)}, "stored as I32"),
            (lambda t: t | {"model.norm.weight": t["model.norm.weight"] * math.nan}, "NaN or Inf"),
            (lambda t: t | {"model.embed_tokens.weight": t["model.embed_tokens.weight"] * math.inf}, "NaN or Inf"),
        ],
        ids=["missing", "extra", "renamed", "shape", "dtype", "nan", "inf"],
    )  # fmt: skip
    def test_a_delta_that_does_not_fit_is_refused(self, mpu, publication, spoil, complaint):
        write_delta(publication / "copy_2", publication / "deltas/copy_2.safetensors", change=spoil)
        outcome = aggregate(mpu, publication, check=False)
        assert outcome.status == 1
        assert complaint in outcome.err
        assert "copy_2.safetensors" in outcome.err
        assert outcome.is_one_error
        assert not (publication / "unlearned").exists()

    @pytest.mark.parametrize(
        ("facts", "complaint"),
        [
            ({"run": "another"}, "run another"),
            ({"round": 2}, "round 2"),
            ({"copy_id": "00"}, "another publication"),
            ({"copy": 3}, "copy 3 of 2"),
            ({"copy_id": None}, "copy_id: expected str, got null"),
            ({"copy": "1"}, "copy: expected int, got str"),
            ({"round": True}, "round: expected int, got bool"),
            ({"kind": "mystery"}, "kind"),
            ({"version": 99}, "update mpu"),
            ({"format": "other"}, "not a delta"),
        ],
    )
    def test_a_foreign_delta_is_refused(self, mpu, publication, facts, complaint):
        write_delta(publication / "copy_2", publication / "deltas/copy_2.safetensors", facts=facts)
        outcome = aggregate(mpu, publication, check=False)
        assert outcome.status == 1
        assert complaint in outcome.err

    def test_all_copies_once(self, mpu, publication):
        first_path, second_path = (publication / f"deltas/copy_{k}.safetensors" for k in (1, 2))
        assert "no delta for copy 2" in aggregate(mpu, publication, first_path, check=False).err
        assert "give the one" in aggregate(mpu, publication, first_path, second_path, first_path, check=False).err
        assert (
            "no such file" in aggregate(mpu, publication, first_path, publication / "gone.safetensors", check=False).err
        )

    def test_a_delta_of_the_base_itself_belongs_to_no_run(self, mpu, publication):
        (publication / "base/mpu.json").unlink(missing_ok=True)
        manifest = delta_facts(DeltaManifest(None, "npo"))
        save_file(tensors(publication / "base"), publication / "deltas/clean.safetensors", as_metadata(manifest))
        assert "no run" in aggregate(mpu, publication, check=False).err

    def test_another_base_is_refused(self, mpu, publication):
        other = save(random_model("llama", seed=9), publication / "other")
        outcome = mpu("aggregate", publication / "deltas", "--keys", publication / "keys.bin", "--base", other,
                      "--out", publication / "unlearned", check=False)  # fmt: skip
        assert "fingerprint" in outcome.err
        assert not (publication / "unlearned").exists()
        shutil.rmtree(publication / "base")
        assert "--base" in aggregate(mpu, publication, check=False).err

    def test_inverting_twice_is_refused(self, mpu, publication):
        arguments = ["--keys", publication / "keys.bin", "--out"]
        mpu("invert", publication / "deltas", *arguments, publication / "inv")
        assert "already inverted" in mpu("invert", publication / "inv", *arguments, publication / "x", check=False).err

    @pytest.mark.slow
    def test_paths_from_a_pipe(self, publication):
        paths = "".join(f"{publication}/deltas/copy_{k}.safetensors\n" for k in (2, 1))
        done = subprocess.run(
            [sys.executable, "-m", "mpu_cli", "aggregate", "-", "--keys", publication / "keys.bin", "--trust-deltas",
             "--out", publication / "unlearned"], input=paths, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout == f"{publication}/unlearned\n"

    def test_an_algorithm_that_is_markup(self, mpu: Callable, root: Path) -> None:
        """The delta's word for it stands in the model card."""
        publish_copy(mpu, root)
        mpu("unlearn", "copy_1", "copy_2", *TRAINING, cwd=root)
        path = root / "deltas/copy_1.safetensors"
        facts = json.loads(open_checkpoint(path).metadata["mpu"]) | {"algorithm": "npo |\n# Owned\n![](http://x)"}
        save_file(load_file(path), path, as_metadata(facts))
        mpu("aggregate", "deltas", "--keys", "keys.bin", fails="algorithm: not of the form", cwd=root)

    @pytest.mark.slow
    def test_max_norm_bounds_the_update(self, mpu: Callable, root: Path) -> None:
        """Weights of three copies have opposite signs: deltas below the bound can add up to an update above it."""
        mpu("publish", "base", "--copies", 3, "--seed", 1, "--kappa", 0.2, cwd=root)
        for k in (1, 2, 3):
            mpu("unlearn", f"copy_{k}", *TRAINING, "--trust-copy", cwd=root)
        outcome = mpu("aggregate", "deltas", "--keys", "keys.bin", "--json", "--dry-run", check=False, cwd=root)
        assert outcome.status == 0
        norms = [load_file(root / f"deltas/copy_{k}.safetensors") for k in (1, 2, 3)]
        largest = max(float(sum(t.double().square().sum() for t in delta.values()) ** 0.5) for delta in norms)
        refused = mpu("aggregate", "deltas", "--keys", "keys.bin", "--step", 3, "--max-norm", 1.5 * largest,
                      check=False, cwd=root)  # fmt: skip
        assert "the update's norm is" in refused.err

    @pytest.mark.slow
    def test_what_no_noise_covers_is_for_its_owner_only(self, mpu: Callable, root: Path) -> None:
        """The server's new model, under an open umask."""
        training = [*TRAINING, "--algo", "gradascent", "--epochs", 1]
        mpu("publish", "base", "--copies", 2, "--kappa", 0.01, cwd=root)
        mpu("unlearn", "copy_1", "copy_2", *training, cwd=root)
        subprocess.run(
            [sys.executable, "-m", "mpu_cli", "aggregate", "deltas", "--out", "model"], cwd=root, check=True,
            capture_output=True, preexec_fn=lambda: os.umask(0),
        )  # fmt: skip
        files = list((root / "model").rglob("*.safetensors"))
        assert files
        for path in files:
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path

    def test_another_base_is_not_blamed_on_the_client(self, mpu: Callable, root: Path) -> None:
        save(random_model("qwen2"), root / "other")
        mpu("publish", "base", "--copies", 2, cwd=root)
        mpu("unlearn", "copy_1", "copy_2", *BRIEF, cwd=root)
        mpu("aggregate", "deltas", "--base", "other", refused="other: is not the model that was published", cwd=root)


class TestVerify:
    @pytest.mark.parametrize("family", CONFIGS)
    def test_a_publication_is_right(self, mpu, tmp_path, family):
        base = save(random_model(family), tmp_path / "base")
        mpu("publish", base, "--symmetries", "all", "--kappa", 0.1, "--copies", 3, "--out", tmp_path,
            "--keys", tmp_path / "keys.bin")  # fmt: skip
        for k in (1, 2, 3):
            document = mpu("verify", tmp_path / f"copy_{k}", "--keys", tmp_path / "keys.bin", "--json").json
            assert document["ok"]
            assert document["function"] < 1e-5
            assert document["logits"] < 1e-5
            for block in document["blocks"]:
                assert block["survived"] == pytest.approx(block["requested"], rel=0.6)

    def test_a_changed_copy_is_wrong(self, mpu, publication):
        weights = load_file(publication / "copy_1/model.safetensors")
        weights["model.layers.0.self_attn.q_proj.weight"][0, 0] += 1e-3
        metadata = open_checkpoint(publication / "copy_1").metadata
        save_file(weights, publication / "copy_1/model.safetensors", metadata)
        outcome = mpu("verify", publication / "copy_1", "--keys", publication / "keys.bin", check=False)
        assert outcome.status == 1
        assert "WRONG" in outcome.out

    def test_noise_that_is_not_there_is_missed(self, mpu, tmp_path):
        """In bfloat16, noise is little more than rounding: a copy without noise must not pass as one with noise."""
        base = save(random_model("llama", dtype=torch.bfloat16), tmp_path / "base")
        for kappa in (0, 0.01):
            mpu(
                "publish",
                base,
                "--seed",
                5,
                "--kappa",
                kappa,
                "--out",
                tmp_path / f"{kappa}",
                "--keys",
                tmp_path / f"{kappa}.k",
            )
        for name in ("mpu.json",):
            shutil.copy(tmp_path / "0.01/copy_1" / name, tmp_path / "0/copy_1" / name)
        metadata = open_checkpoint(tmp_path / "0.01/copy_1").metadata
        save_file(load_file(tmp_path / "0/copy_1/model.safetensors"), tmp_path / "0/copy_1/model.safetensors", metadata)
        assert mpu("verify", tmp_path / "0.01/copy_1", "--keys", tmp_path / "0.01.k").status == 0
        assert mpu("verify", tmp_path / "0/copy_1", "--keys", tmp_path / "0.01.k", check=False).status == 1

    def test_nan_is_wrong(self, mpu, publication):
        path = publication / "copy_1/model.safetensors"
        weights = load_file(path)
        weights["model.layers.0.self_attn.q_proj.weight"] *= math.nan
        save_file(weights, path, open_checkpoint(publication / "copy_1").metadata)
        outcome = mpu("verify", publication / "copy_1", "--keys", publication / "keys.bin", "--no-logits", check=False)
        assert outcome.status == 1

    def test_weights_of_another_copy_are_missed_nowhere(self, mpu, publication):
        shutil.copy(publication / "copy_2/model.safetensors", publication / "copy_1/model.safetensors")
        forget = write_records(publication / "f", 2, 1)
        verify = ["verify", "--keys", publication / "keys.bin"]
        for command, *more in (verify, ["unlearn", "--algo", "gradascent", "--forget", forget]):
            mpu(command, publication / "copy_1", *more, fails="weights next to it", status=1)

    def test_another_publication(self, mpu, publication):
        mpu("publish", publication / "base", "--out", publication / "b", "--keys", publication / "b.bin")
        mpu("verify", publication / "b/copy_1", "--keys", publication / "keys.bin", fails="another publication")


def test_manifests_survive_metadata():
    origin = CopyManifest("123456", 2, 1, 3, "0042")  # strings that look like numbers stay strings
    manifest = DeltaManifest(origin, "npo", inverted=True)
    assert delta_manifest(as_metadata(delta_facts(manifest)), Path("x")) == manifest


def test_facts_of_a_delta_are_plain(tmp_path: Path) -> None:
    good = delta_facts(DeltaManifest(None, "npo"))
    for bad in (
        {"privacy": {"epsilon": "<script>"}}, {"privacy": {"a b": 1}}, {"trained": {"key": "x" * 999}},
        {"trained": {"key": 1}}, {"run": "r", "round": 1, "copy": 1, "copies": 2, "copy_id": "| x |"},
        {"run": "r\n", "round": 1, "copy": 1, "copies": 2, "copy_id": "x"}, {"round": True, "run": "r"},
    ):  # fmt: skip
        with pytest.raises(MpuError):
            delta_manifest(as_metadata(good | bad), tmp_path)


class TestTheModelCard:
    @pytest.mark.slow
    def test_provenance_without_secrets(self, mpu: Callable, root: Path) -> None:
        mpu("publish", "base", "--copies", 2, "--seed", 7, cwd=root)
        mpu("unlearn", "copy_1", "copy_2", *BRIEF, cwd=root)
        document = mpu("aggregate", "deltas", "--json", cwd=root).json
        card = (root / "unlearned" / "README.md").read_text()
        head = yaml.safe_load(card.split("---")[1])
        assert head["library_name"] == "transformers"
        assert "unlearning" in head["tags"]
        assert f"| run, round | {document['run']}, 1 |" in card
        assert str(root) not in card
