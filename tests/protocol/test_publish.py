"""What `mpu publish` writes, and what it says of it."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import mpu_cli
from mpu_cli.commands.publish import command_to_publish
from mpu_cli.files.manifest import read_copy_manifest
from mpu_cli.files.reader import open_checkpoint
from mpu_cli.files.sealing import default_identity_path, make_identity, read_identities
from mpu_cli.model.layout import layout_of
from mpu_cli.model.network import read_answers
from mpu_cli.model.source import open_model
from mpu_cli.options.publishing import HIDING_KAPPA, HIDING_PERMANENT
from mpu_cli.protocol.keys import unseal
from mpu_cli.protocol.publication import Publication, default_secret_path
from mpu_cli.protocol.register import default_register_path
from tests.helpers.attacks import TRAINING, edit, publish_copy
from tests.helpers.measuring import run_measured
from tests.helpers.models import DemoModel, load, random_model, save
from tests.helpers.protocol import tensors
from tests.helpers.publication import aggregate, keys_of, write_delta
from tests.helpers.shapes import make


class TestPublish:
    def test_noise_has_the_scale_asked_for(self, mpu, tmp_path, base):
        """σ of a block, measured in the files, is α_k·κ·RMS(base − reference)."""
        reference = save(random_model("llama", seed=5), tmp_path / "reference")
        mpu("publish", base, "--public", reference, "--kappa", 0.3, "--noise", "zero-sum:1,3", "--symmetries", "none",
            "--out", tmp_path, "--keys", tmp_path / "keys.bin", "--dtype", "float64")  # fmt: skip
        before, other = tensors(base), tensors(reference)
        blocks = layout_of(open_checkpoint(base).tensors, open_model(str(base)).config, "").blocks
        for k, alpha in ((1, 1), (2, 3)):
            copy = tensors(tmp_path / f"copy_{k}")
            for block, members in blocks.items():
                v, noise = (
                    torch.cat([(a[t.name] - b[t.name]).flatten() for t in members])
                    for a, b in ((before, other), (copy, before))
                )
                expected = alpha * 0.3 * float(v.square().mean().sqrt())
                assert keys_of(tmp_path).sigma[block] * alpha == pytest.approx(expected, rel=1e-6)
                actual = float(noise.square().mean().sqrt())
                assert actual == pytest.approx(expected, rel=5 / math.sqrt(2 * len(noise)))

    @pytest.mark.parametrize(
        "options",
        [
            "--public PUBLIC",
            "--public PUBLIC --watermark 0.05 --max-noise 0.05 --dtype float32",
            "--public PUBLIC --copies 2 --watermark 0",
            "--public PUBLIC --kappa 0.0123456789 --noise extrapolate:1,-1,0.3 --symmetries all --max-noise 0.5",
            "--public PUBLIC --permanent-noise 3.3333333 --copies 1",
            "--public PUBLIC --permanent-noise 10 --copies 1",
            "--public PUBLIC --noise zero-sum --copies 1",
            "--kappa 0.5 --permanent-noise 0.2 --watermark 0.2 --noise zero-sum:1,1.7",
            "--dp epsilon=2,delta=1e-5,sensitivity=0.12345678,adversary=one-copy,budget_rounds=4",
            "--kappa 0.1 --copies 3 --copy-recipients CLIENT",
            "--kappa 0.1 --copies 2 --copy-recipients CLIENT,OTHER",
        ],
    )
    def test_the_command_for_the_next_round_publishes_in_the_same_way(self, mpu, tmp_path, base, options):
        """What `aggregate` prints as the next step gives noise of the same kind and scale; only secrets are new."""
        public = save(random_model("llama", seed=5), tmp_path / "public")
        options = options.replace("PUBLIC", str(public))
        for name in ("CLIENT", "OTHER"):
            options = options.replace(name, make_identity(tmp_path / name))
        words = options.split()
        mpu("publish", base, *words, "--out", tmp_path / "1", "--keys", tmp_path / "1" / "keys.bin")
        first = keys_of(tmp_path / "1")
        _, *printed = shlex.split(command_to_publish(base, first))
        mpu(*printed, "--allow", "publish-again", "--out", tmp_path / "2", "--keys", tmp_path / "2" / "keys.bin")
        second = keys_of(tmp_path / "2")
        assert second.publication.seed != first.publication.seed
        secrets = {"seed": b"", "run": "1"}
        assert replace(second.publication, **secrets) == replace(first.publication, **secrets)
        assert second.sigma == first.sigma
        assert second.shared_sigma == first.shared_sigma
        assert second.recipients == first.recipients

    def test_another_secret_is_another_draw(self, mpu, tmp_path, base):
        """Two draws of permanent noise on one base average, so a server that lost its secret is stopped."""
        noise = ("--copies", 1, "--kappa", 0, "--permanent-noise", 1)

        def publish(out, *options, **expected):
            mpu(
                "publish",
                base,
                *noise,
                *options,
                "--out",
                tmp_path / out,
                "--keys",
                tmp_path / f"{out}.bin",
                **expected,
            )

        publish("1")
        secret = default_secret_path().read_bytes()
        default_secret_path().unlink()
        publish("2", fails="server.key back from your backup", status=1)
        assert not (tmp_path / "2").exists()
        new_secret = default_secret_path().read_bytes()
        default_secret_path().write_bytes(secret)
        publish("3")
        default_secret_path().write_bytes(new_secret)
        publish("4", "--allow", "publish-again")
        publish("5")
        for first, again in (("1", "3"), ("4", "5")):  # one draw under each secret, whatever the coordinates
            seeds = []
            for name in (first, again):
                keys = unseal(tmp_path / f"{name}.bin", read_identities(default_identity_path()))
                seeds.append(keys.publication.permanent_seed)
            assert seeds[0] == seeds[1]

    def test_copies_for_sites_of_their_own_are_judged_one_by_one(self, mpu, tmp_path, base):
        """Noise that cancels hides from each of several recipients, and nothing from one who gets all copies."""
        public = save(random_model("llama", seed=5), tmp_path / "public")
        keys = [make_identity(tmp_path / name) for name in "abc"]
        for recipients, gives_away in ((keys, False), ([keys[0]] * 3, True)):
            out = tmp_path / str(gives_away)
            told = mpu("publish", base, "--public", public, "--copies", 3, "--kappa", 1, "--copy-recipients",
                       ",".join(recipients), "--out", out, "--keys", out / "keys.bin", "--json")  # fmt: skip
            assert told.json["gives_weights_away"] == gives_away
            assert ("do not send these copies" in told.err) == gives_away

    @pytest.mark.parametrize(
        "noise", ["--copies 1 --permanent-noise 0.05", "--copies 2 --kappa 0.05 --permanent-noise 0.01"]
    )
    def test_small_permanent_noise_is_warned_of(self, mpu, tmp_path, base, noise):
        public = save(random_model("llama", seed=5), tmp_path / "public")
        told = mpu("publish", base, "--public", public, *noise.split(), "--json", cwd=tmp_path)
        assert told.json["gives_weights_away"] is True
        assert "do not send" in told.err

    def test_copies_that_were_made_one_by_one_are_for_their_own_recipients(self, mpu, tmp_path, base):
        """In the order that --only names them; the next command does not seal all of them for the first."""
        keys = [make_identity(tmp_path / name) for name in "ab"]
        options = ("publish", base, "--copies", 2, "--kappa", 1, "--seed", 3)
        mpu(*options, "--only", "2,1", "--copy-recipients", f"{keys[1]},{keys[0]}", "--out", "both", "--keys", "2.bin",
            cwd=tmp_path)  # fmt: skip
        for copy, name in (("copy_1", "a"), ("copy_2", "b")):
            mpu("inspect", f"both/{copy}.age", "--identity", tmp_path / name, cwd=tmp_path)
        mpu(*options, "--only", 1, "--copy-recipients", keys[0], cwd=tmp_path)
        mpu(*options, "--only", 2, "--copy-recipients", keys[1], cwd=tmp_path)
        command = shlex.split(command_to_publish(base, keys_of(tmp_path)))
        assert command[command.index("--copy-recipients") + 1] == f"{keys[0]},RECIPIENT_2"

    def test_another_dtype_is_read_alike(self, mpu, tmp_path, base):
        """A check accepts the copy of a model that the round stored in another dtype."""
        for dtype in ("float32", "bfloat16"):
            mpu("publish", base, "--copies", 2, "--kappa", 0.1, "--dtype", dtype, "--out", dtype, "--keys",
                f"{dtype}.bin", cwd=tmp_path)  # fmt: skip
        contexts = {open_model(str(tmp_path / dtype / "copy_1")).reading_context for dtype in ("float32", "bfloat16")}
        assert len(contexts) == 1

    @pytest.mark.parametrize("run", ["x" * 201, "Klinik\u00a0S", "two\nlines"])
    def test_a_name_that_no_reader_takes_is_refused(self, mpu, tmp_path, base, run):
        mpu("publish", base, "--copies", 2, "--kappa", 0.1, "--run", run, refused="not", cwd=tmp_path)
        assert not (tmp_path / "keys.bin").exists()

    def test_permanent_noise_of_several_owners_is_remembered(self, mpu, tmp_path, base):
        owners = [{"run": name, "round": 1} for name in "ab"]
        manifest = {"format": "mpu-model", "version": 1, "owners": owners, "permanent": True}
        (base / "mpu.json").write_text(json.dumps(manifest))
        mpu("publish", base, "--copies", 2, refused="had permanent noise", cwd=tmp_path)

    def test_another_request_begins_at_round_1(self, mpu, tmp_path, base):
        mpu("publish", base, "--copies", 2, cwd=tmp_path)
        for copy in (1, 2):
            write_delta(tmp_path / f"copy_{copy}", tmp_path / f"deltas/copy_{copy}.safetensors", copy)
        aggregate(mpu, tmp_path)
        for options, expected in (
            ((), (keys_of(tmp_path).run, 2)),
            (("--run", "clinic"), ("clinic", 1)),
            (("--run", "clinic:3"), ("clinic", 3)),
        ):
            out = tmp_path / (options[-1] if options else "same")
            mpu("publish", tmp_path / "unlearned", "--copies", 2, *options, "--out", out, "--keys", out / "keys.bin")
            assert (keys_of(out).run, keys_of(out).round) == expected

    def test_the_seed_fixes_every_byte(self, mpu, tmp_path, base, monkeypatch):
        """A seed gives the same files, however the work is split and however many threads there are."""
        arguments = ["publish", base, "--seed", 7, "--symmetries", "all"]
        mpu(*arguments, "--out", tmp_path / "a", "--keys", tmp_path / "a/keys.bin")
        monkeypatch.setattr("mpu_cli.files.reader.os.sched_getaffinity", lambda _: {0})
        mpu(*arguments, "--out", tmp_path / "b", "--keys", tmp_path / "b/keys.bin")
        monkeypatch.setattr("mpu_cli.model.transform.CHUNK", 1000)
        mpu(*arguments, "--out", tmp_path / "c", "--keys", tmp_path / "c/keys.bin")
        for other in "bc":
            for k in (1, 2):
                for name in ("model.safetensors", "mpu.json", "config.json"):
                    files = [tmp_path / f"{run}/copy_{k}/{name}" for run in ("a", other)]
                    assert files[0].read_bytes() == files[1].read_bytes()

    def test_permanent_noise_is_in_every_copy(self, mpu, tmp_path, base):
        """The weighted sum of the copies is the base plus the shared noise, at its scale; verify accounts for it."""
        options = ("--kappa", 0.1, "--permanent-noise", 0.2, "--symmetries", "none", "--dtype", "float64")
        stderr = mpu("publish", base, *options, "--copies", 3, "--out", tmp_path, "--keys", tmp_path / "keys.bin").err
        assert "permanent noise of 0.2" in stderr
        keys, before = keys_of(tmp_path), tensors(base)
        copies = [tensors(tmp_path / f"copy_{k}") for k in (1, 2, 3)]
        weights = keys.publication.scheme.weights.tolist()
        name = "model.embed_tokens.weight"
        residual = sum(w * copy[name] for copy, w in zip(copies, weights, strict=True)) - before[name]
        assert float(residual.square().mean().sqrt()) == pytest.approx(keys.shared_sigma[name], rel=0.05)
        assert keys.shared_sigma[name] == pytest.approx(2 * keys.sigma[name], rel=5e-3)  # it is rounded
        for copy, scale in zip(copies, keys.publication.scheme.scales, strict=True):
            noise_rms = float((copy[name] - before[name]).square().mean().sqrt())
            assert noise_rms == pytest.approx(math.hypot(scale * keys.sigma[name], keys.shared_sigma[name]), rel=0.05)
        mpu("verify", tmp_path / "copy_2", "--keys", tmp_path / "keys.bin")
        attacks = mpu("audit", *(tmp_path / f"copy_{k}" for k in (1, 2, 3)), "--base", base, "--json").json["attacks"]
        assert attacks["all copies"]["weights"] > 0.15

    def test_two_publications_share_no_noise(self, mpu, tmp_path, base):
        noises = []
        for name in "ab":
            mpu("publish", base, "--symmetries", "none", "--kappa", 1, "--out", tmp_path / name,
                "--keys", tmp_path / name / "keys.bin")  # fmt: skip
            copy, before = tensors(tmp_path / name / "copy_1"), tensors(base)
            noises.append(torch.cat([(copy[t] - before[t]).flatten() for t in before]))
        correlation = float(torch.corrcoef(torch.stack(noises))[0, 1])
        assert abs(correlation) < 5 / math.sqrt(len(noises[0]))

    def test_copies_tell_no_secret(self, mpu, tmp_path, base):
        """Only the weights differ between the copies of two seeds, and the copies contain no secret."""
        edit(base / "config.json", _name_or_path="/srv/secret-model")
        (base / "training_args.bin").write_text("private")
        out = mpu("publish", base, "--noise", "zero-sum:1.25,1.75", "--out", tmp_path, "--keys", tmp_path / "keys.bin")
        keys = keys_of(tmp_path)
        secrets = [keys.publication.seed.hex(), "1.25", "1.75", "secret-model", str(base)]
        secrets += [repr(sigma) for sigma in keys.sigma.values()]
        for path in [p for k in (1, 2) for p in (tmp_path / f"copy_{k}").iterdir()]:
            raw = path.read_bytes()
            if path.suffix == ".safetensors":
                raw = raw[: 8 + int.from_bytes(raw[:8], "little")]
            assert not [s for s in secrets if s.encode() in raw], path
            assert path.name != "training_args.bin"
        assert keys.publication.seed.hex() not in out.out + out.err
        assert keys.publication.seed.hex() not in mpu("inspect", tmp_path / "keys.bin", "--json").out

    def test_shards_publish_as_one_file_does(self, mpu, tmp_path, base):
        AutoModelForCausalLM.from_pretrained(base).save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
        assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
        mpu("publish", base, "--seed", 1, "--out", tmp_path / "a", "--keys", tmp_path / "a.bin")
        for source, name in ((tmp_path / "sharded", "b"), (tmp_path / "sharded/model.safetensors.index.json", "c")):
            mpu("publish", source, "--seed", 1, "--out", tmp_path / name, "--keys", tmp_path / f"{name}.bin")
            expected = load_file(tmp_path / "a/copy_2/model.safetensors")
            copy = open_checkpoint(tmp_path / name / "copy_2")
            assert copy.shards == open_checkpoint(tmp_path / "sharded").shards
            assert all(torch.equal(copy.tensor(t), expected[t]) for t in expected)

    def test_the_size_of_the_noise_is_that_of_the_difference(self, mpu: Callable, tmp_path: Path, base: Path) -> None:
        """Of the first copy from the base, over all weights: a copy in the base's own coordinates shows it."""
        options = ("--symmetries", "none", "--copies", 2, "--kappa", 0.02, "--out", tmp_path)
        told = mpu("publish", base, *options, "--keys", tmp_path / "keys.bin").err
        known, copy = tensors(base), tensors(tmp_path / "copy_1")
        noise = math.sqrt(sum(float((copy[name].double() - known[name].double()).square().sum()) for name in copy))
        size = math.sqrt(sum(float(known[name].double().square().sum()) for name in copy))
        assert float(re.search(r"size of the noise: (\S+) %", told)[1]) == pytest.approx(100 * noise / size, rel=0.06)

    def test_noise_larger_than_the_weights_is_warned_of(self, mpu: Callable, tmp_path: Path, base: Path) -> None:
        """And noise that a limit kept smaller is not said to be what was asked for."""
        public = save(random_model("llama", seed=5), tmp_path / "public")
        printed = []
        for name, options in (("a", ()), ("b", ("--copies", 1, "--permanent-noise", 10))):
            out = tmp_path / name
            targets = ("--allow", "publish-again", "--out", out, "--keys", out / "keys.bin")
            printed.append(mpu("publish", base, "--public", public, *options, *targets).err)
        assert ["limited to" in text for text in printed] == [True, False]
        assert ["probably ruins the copies" in text for text in printed] == [False, True]

    def test_reports_what_rounding_leaves(self, mpu, tmp_path):
        base = save(random_model("llama", dtype=torch.bfloat16), tmp_path / "base")
        arguments = ["publish", base, "--kappa", 1e-4, "--json", "--force", "--out", tmp_path, "--keys", tmp_path / "k"]
        outcome = mpu(*arguments)
        assert all(c["unchanged"] > 0.5 for b in outcome.json["blocks"] for c in b["copies"])
        assert "rounding on storage" in outcome.err
        outcome = mpu(*arguments, "--dtype", "float32")
        for block in outcome.json["blocks"]:
            for copy in block["copies"]:
                assert copy["unchanged"] < 0.05
                assert copy["survived"] == pytest.approx(
                    copy["requested"], rel=5 / math.sqrt(2 * block["weights"]) + 0.01
                )
        assert "rounding on storage" not in outcome.err

    def test_a_tied_head_that_is_stored_too_is_left_out(self, mpu, tmp_path, base):
        weights = load_file(base / "model.safetensors")
        save_file(
            {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, base / "model.safetensors"
        )
        mpu("publish", base, "--out", tmp_path, "--keys", tmp_path / "keys.bin")
        assert "lm_head.weight" not in load_file(tmp_path / "copy_1/model.safetensors")
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
        save_file(weights, base / "model.safetensors")
        outcome = mpu("publish", base, "--out", tmp_path / "x", "--keys", tmp_path / "x.bin", check=False)
        assert outcome.status == 1
        assert "tie_word_embeddings" in outcome.err

    def test_names_without_prefix_and_masks(self, mpu, tmp_path):
        """GPT-2 as stored on the Hub: names of the bare model, and the causal masks among the weights."""
        base = save(random_model("gpt2"), tmp_path / "base")
        weights = {n.removeprefix("transformer."): t for n, t in load_file(base / "model.safetensors").items()}
        mask = torch.tril(torch.ones(1, 1, 128, 128, dtype=torch.uint8))
        save_file(weights | {"h.0.attn.bias": mask, "h.1.attn.bias": mask.clone()}, base / "model.safetensors")
        mpu("publish", base, "--out", tmp_path, "--keys", tmp_path / "keys.bin", "--kappa", 0, "--symmetries", "all")
        copy = load_file(tmp_path / "copy_1/model.safetensors")
        assert copy.keys() == load_file(base / "model.safetensors").keys()
        assert torch.equal(copy["h.1.attn.bias"], mask)
        assert "right" in mpu("verify", tmp_path / "copy_1", "--keys", tmp_path / "keys.bin").out

    @pytest.mark.parametrize(
        ("arguments", "weight", "complaint"),
        [(["--kappa", "1e30"], 1e10, "--kappa"), (["--dtype", "float16"], 1e6, "--dtype")],
    )
    def test_what_overflows_is_not_published(self, mpu, tmp_path, base, arguments, weight, complaint):
        weights = load_file(base / "model.safetensors")
        weights["model.norm.weight"][0] = weight
        save_file(weights, base / "model.safetensors", {"format": "pt"})
        mpu("publish", base, *arguments, fails=complaint, status=1, cwd=tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {"base"}

    def test_one_seed_and_other_options_are_another_publication(self, mpu, tmp_path, base):
        ids = []
        for i, more in enumerate(
            ([], ["--kappa", 0.1], ["--noise", "zero-sum:1,3"], ["--noise", "extrapolate:1,3"], ["--symmetries", "all"])
        ):
            mpu(
                "publish",
                base,
                "--copies",
                2,
                "--seed",
                1,
                *more,
                "--out",
                tmp_path / str(i),
                "--keys",
                tmp_path / f"{i}.bin",
            )
            ids.append(read_copy_manifest(tmp_path / f"{i}/copy_1").copy_id)
        assert len(set(ids)) == 5

    def test_a_tokenizer_config_tells_no_path(self, mpu, tmp_path, base):
        edit(base / "tokenizer_config.json", name_or_path="/srv/secret", auto_map={"a": "b"})
        mpu("publish", base, "--out", tmp_path, "--keys", tmp_path / "keys.bin")
        config = json.loads((tmp_path / "copy_1/tokenizer_config.json").read_text())
        assert not {"name_or_path", "auto_map"} & set(config)

    @pytest.mark.slow
    def test_memory_does_not_grow_with_the_model(self, tmp_path):
        """200 MB more layers need only a few slices more anonymous memory."""
        peaks = []
        for layers in (4, 36):
            base = make("0.1b", tmp_path / str(layers), num_hidden_layers=layers)
            _, peak = run_measured(
                sys.executable,
                "-m",
                "mpu_cli",
                "publish",
                str(base),
                "--out",
                str(base),
                "--keys",
                str(base / "keys.bin"),
            )
            peaks.append(peak)
        assert peaks[1] - peaks[0] < 40  # MB

    @pytest.mark.slow
    def test_four_copies_need_no_more_memory_than_two(self, tmp_path):
        base = make("0.1b", tmp_path / "base", num_hidden_layers=4)
        peaks = [
            run_measured(sys.executable, "-m", "mpu_cli", "publish", str(base), "--copies", str(copies), "--out",
                         str(tmp_path / str(copies)), "--keys", str(tmp_path / f"{copies}.bin"))[1]
            for copies in (2, 4)
        ]  # fmt: skip
        assert peaks[1] - peaks[0] < 40  # MB


@pytest.mark.slow
def test_publish_says_what_a_copy_knows(mpu: Callable, tmp_path: Path, demo: DemoModel) -> None:
    """The losses on the server's records are those that an evaluation of the same models gives."""
    outcome = mpu("publish", demo.model, "--copies", 1, "--permanent-noise", 1, "--probe", demo.forget, "--out",
               tmp_path, "--keys", tmp_path / "keys.bin", "--json")  # fmt: skip
    losses = outcome.json["probe"]
    assert losses["copy_1"] > losses["the base"]
    assert "probability of an answer's tokens" in outcome.err
    assert "too little to unlearn on" in outcome.err
    mild = ("--copies", 1, "--permanent-noise", 0.2, "--allow", "publish-again", "--copy-recipients",
            make_identity(tmp_path / "id"))  # fmt: skip
    sealed = mpu("publish", demo.model, "--probe", demo.forget, *mild, "--out", tmp_path / "mild", "--keys",
                 tmp_path / "mild.bin", "--json")  # fmt: skip
    assert losses["the base"] < sealed.json["probe"]["copy_1"] < losses["copy_1"]
    assert "too little to unlearn on" not in sealed.err
    mpu("publish", demo.model, "--probe", "nowhere.jsonl", "--out", tmp_path / "x", refused="nowhere.jsonl")
    assert not (tmp_path / "x").exists()
    model, tokenizer = load(tmp_path / "copy_1", torch.float32, "cpu")
    assert read_answers(demo.forget, tokenizer).loss(model) == pytest.approx(losses["copy_1"], abs=1e-4)


@pytest.mark.parametrize(
    ("options", "copies", "kappa", "permanent"),
    [
        ((), 1, 0, HIDING_PERMANENT),
        (("--copies", 2), 2, HIDING_KAPPA, HIDING_PERMANENT),
        (("--noise", "zero-sum"), 3, HIDING_KAPPA, HIDING_PERMANENT),
        (("--noise", "extrapolate:1"), 1, 0, HIDING_PERMANENT),
        (("--copy-recipients", "PUBLIC,PUBLIC"), 2, HIDING_KAPPA, HIDING_PERMANENT),
        (("--kappa", 0.01), 3, 0.01, 0),
        (("--permanent-noise", 2, "--copies", 1), 1, 0, 2),
    ],
)
def test_what_naming_the_public_model_chooses(
    mpu: Callable, tmp_path: Path, base: Path, options: tuple, copies: int, kappa: float, permanent: float
) -> None:
    """One copy with noise that stays, unless several are asked for or a scale is."""
    public = save(random_model("llama", seed=1), tmp_path / "public")
    recipient = make_identity(tmp_path / "client.txt")
    arguments = [str(option).replace("PUBLIC", recipient) for option in options]
    mpu("publish", base, "--public", public, *arguments, "--out", tmp_path, "--keys", tmp_path / "keys.bin")
    keys = keys_of(tmp_path)
    assert (keys.copies, keys.publication.kappa, keys.publication.shared_kappa) == (copies, kappa, permanent)
    assert len(list(tmp_path.glob("copy_*"))) == copies


class TestWhatThePublisherIsTold:
    def test_the_base_as_its_own_public_model(self, mpu: Callable, tmp_path: Path, base: Path) -> None:
        """Noise of the scale of what fine-tuning changed would be none: refused, and nothing is left."""
        same = shutil.copytree(base, tmp_path / "same")
        outputs = ("--out", tmp_path / "out", "--keys", tmp_path / "k.bin")
        mpu("publish", base, "--public", same, *outputs, fails="there is nothing to scale noise to", status=1)
        assert not (tmp_path / "out").exists()
        assert not (tmp_path / "k.bin").exists()

    def test_the_function_says_what_the_command_says(self, mpu: Callable, tmp_path: Path, base: Path) -> None:
        """That copies without a public model give the weights away, and that there is no tokenizer."""
        for path in (*base.glob("tokenizer*"), *base.glob("*.jinja")):
            path.unlink()
        outcome = mpu("publish", base, "--out", tmp_path / "a", "--keys", tmp_path / "a.bin", "--json")
        published = mpu_cli.publish(base, out=tmp_path / "b", keys=tmp_path / "b.bin")
        assert sum("give the weights away" in warning for warning in published.warnings) == 1
        assert any("no tokenizer files" in warning for warning in published.warnings)
        assert outcome.json["warnings"] == published.warnings
        for warning in published.warnings:
            assert " ".join(warning.split()) in " ".join(outcome.err.split())
        bounded = mpu_cli.publish(base, out=tmp_path / "d", keys=tmp_path / "d.bin", kappa=1.0, max_noise=0.1)
        [warning] = [each for each in bounded.warnings if "give the weights away" in each]
        assert float(re.search(r"to within ([\d.]+) of their size", warning)[1]) < 0.101
        public = save(random_model("llama", seed=1), tmp_path / "public")
        published = mpu_cli.publish(base, public=public, out=tmp_path / "c", keys=tmp_path / "c.bin")
        assert published.leakage is not None
        assert 0 < published.leakage.one_copy < 1

    def test_another_reference_for_the_second_copy(self, mpu: Callable, root: Path) -> None:
        """Its noise would have another scale than its keys say."""
        save(random_model("llama", seed=5), root / "reference")
        options = ["--public", "reference", "--copies", 2, "--seed", 1, "--kappa", 0.1]
        mpu("publish", "base", *options, "--only", 1, cwd=root)
        save(random_model("llama", seed=6), root / "reference")
        mpu("publish", "base", *options, "--only", 2, fails="another pretrained model", status=1, cwd=root)
        assert not (root / "copy_2").exists()

    @pytest.mark.slow
    def test_a_copy_is_not_published(self, mpu: Callable, root: Path) -> None:
        mpu("publish", "base", "--copies", 2, cwd=root)
        mpu("publish", "copy_1", refused="a copy, not a model", cwd=root)

    def test_one_shard(self, mpu: Callable, root: Path) -> None:
        (root / "base/model.safetensors").rename(root / "base/model-00001-of-00002.safetensors")
        refused = mpu("publish", "base/model-00001-of-00002.safetensors", check=False, cwd=root)
        assert refused.is_one_error
        assert "one of 2 shards" in refused.err
        assert "pass the folder base" in refused.err

    def test_a_base_without_a_tokenizer(self, mpu: Callable, root: Path) -> None:
        for path in (root / "base").glob("*token*"):
            path.unlink()
        for path in (root / "base").glob("chat_template*"):
            path.unlink()
        assert "no tokenizer files" in mpu("publish", "base", "--copies", 2, cwd=root).err


class TestPermanentNoise:
    """Without a seed it is the same in every publication of a base, so that they cannot be averaged."""

    def test_nobody_is_advised_to_do_without_noise(self, mpu: Callable, tmp_path: Path, base: Path) -> None:
        """--max-noise limits noise that cancels, too, which is not what a single copy would have."""
        public = save(random_model("llama", seed=1), tmp_path / "public")
        warnings = mpu("publish", base, "--public", public, "--kappa", 1, "--max-noise", 0.02, cwd=tmp_path).err
        assert "a client that gets all copies takes the noise off; if one does, use --permanent-noise" in warnings
        assert "--permanent-noise 0" not in warnings

    def test_draws_for_models_that_an_update_tells_apart_are_counted(
        self, mpu: Callable, tmp_path: Path, base: Path
    ) -> None:
        """Two of one scale hide what one of that over √2 does; the same base again is no other draw, and a model of
        other weights none that averages."""
        public = ("--public", save(random_model("llama", seed=1), tmp_path / "public"), "--copies", 1)
        updated = shutil.copytree(base, tmp_path / "updated")
        weights = tensors(base)
        torch.manual_seed(0)
        save_file({name: x + 1e-3 * torch.randn_like(x) for name, x in weights.items()},
                  updated / "model.safetensors", {"format": "pt"})  # fmt: skip

        def published(model: Path, *options: object) -> dict:
            outcome = mpu("publish", model, *public, *options, "--force", "--json", cwd=tmp_path)
            assert ("of nearly this model" in outcome.err) == (outcome.json["hidden"]["draws"] > 1)
            return outcome.json["hidden"]

        for _ in range(2):
            assert published(base, "--permanent-noise", 1)["draws"] == 1
        both = published(updated, "--permanent-noise", 1)
        assert both["draws"] == 2
        assert both["with_earlier"] < both["one_copy"]
        alone = published(updated, "--permanent-noise", 0.5**0.5, "--seed", 1)
        assert alone["draws"] == 1
        assert both["with_earlier"] == pytest.approx(alone["one_copy"], abs=0.02)
        other = save(random_model("llama", seed=2), tmp_path / "other")
        assert published(other, "--permanent-noise", 1)["draws"] == 1

    def noise(self, mpu: Callable, base: Path, out: Path, *options: object) -> torch.Tensor:
        plain = ("--copies", 1, "--symmetries", "none", "--dtype", "float64")
        mpu("publish", base, *plain, *options, "--out", out, "--keys", out / "keys.bin")
        mpu("verify", out / "copy_1", "--keys", out / "keys.bin")
        name = "model.embed_tokens.weight"
        return (tensors(out / "copy_1")[name] - tensors(base)[name]).flatten()

    @pytest.mark.slow
    def test_it_is_one_draw(self, mpu: Callable, tmp_path: Path, base: Path) -> None:
        draw = self.noise(mpu, base, tmp_path / "a", "--permanent-noise", 1)
        assert torch.equal(self.noise(mpu, base, tmp_path / "b", "--permanent-noise", 1), draw)
        # of two multiples of one draw, anyone could compute it
        other_draws = [self.noise(mpu, base, tmp_path / "c", "--permanent-noise", 2, "--allow", "publish-again")]
        other = save(random_model("llama", seed=1), tmp_path / "other")
        other_draws.append(self.noise(mpu, other, tmp_path / "d", "--permanent-noise", 1))
        default_secret_path().unlink()
        other_draws.append(self.noise(mpu, base, tmp_path / "e", "--permanent-noise", 1, "--allow", "publish-again"))
        for noise in other_draws:
            assert abs(float(torch.corrcoef(torch.stack([draw, noise]))[0, 1])) < 5 / math.sqrt(len(draw))

    @pytest.mark.parametrize("stored", ["float32", "float16", "a tensor more", "without a prefix"])
    def test_it_is_one_draw_for_the_same_weights_in_another_file(
        self, mpu: Callable, tmp_path: Path, base: Path, stored: str
    ) -> None:
        public = save(random_model("llama", seed=1), tmp_path / "public")
        tensors_of_base = load_file(base / "model.safetensors")
        if stored in ("float32", "float16"):
            tensors_of_base = {name: x.to(getattr(torch, stored)) for name, x in tensors_of_base.items()}
        elif stored == "a tensor more":
            tensors_of_base["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        else:
            tensors_of_base = {name.removeprefix("model."): x for name, x in tensors_of_base.items()}
        other = shutil.copytree(base, tmp_path / "other")
        save_file(tensors_of_base, other / "model.safetensors", {"format": "pt"})
        all_keys, noise = [], []
        for name, model, copies in (("a", base, 1), ("b", other, 1), ("c", other, 2)):
            # Without a watermark, which is another draw in every publication.
            options = ("--public", public, "--watermark", 0, "--copies", copies, "--keys", tmp_path / name / "keys.bin")
            mpu("publish", model, *options, "--out", tmp_path / name, "--symmetries", "none", "--dtype", "float64")
            all_keys.append(keys_of(tmp_path / name))
            mpu("verify", tmp_path / name / "copy_1", *options[-2:], "--no-logits")
            copy, clean = tensors(tmp_path / name / "copy_1"), tensors(model)
            noise.append(sorted(float((copy[n] - clean[n]).sum()) for n in copy if "inv_freq" not in n))
        assert len({keys.publication.permanent_seed for keys in all_keys}) == 1
        assert len({tuple(keys.shared_sigma.values()) for keys in all_keys}) == 1
        assert noise[0] == pytest.approx(noise[1], abs=1e-6)

    def test_another_scale_is_refused(self, mpu: Callable, tmp_path: Path, base: Path) -> None:
        """Also of the base in another precision, and nothing is left behind."""
        options = ("--copies", 1, "--keys", tmp_path / "b.bin", "--out", tmp_path / "b")
        self.noise(mpu, base, tmp_path / "a", "--permanent-noise", 1)
        rounded = {name: x.to(torch.float16) for name, x in load_file(base / "model.safetensors").items()}
        other = shutil.copytree(base, tmp_path / "other")
        save_file(rounded, other / "model.safetensors", {"format": "pt"})
        for model in (base, other):
            refused = mpu("publish", model, "--permanent-noise", 2, *options, check=False)
            assert (refused.status, "another scale" in refused.err) == (1, True)
            assert "--allow publish-again" in refused.err
            assert not (tmp_path / "b").exists()
        assert stat.S_IMODE(default_register_path().stat().st_mode) == 0o600
        mpu("publish", base, "--permanent-noise", 2, *options, "--allow", "publish-again")
        back = ("--permanent-noise", 1, "--copies", 1, "--keys", tmp_path / "c.bin", "--out", tmp_path / "c")
        assert "another scale" in mpu("publish", base, *back, check=False).err  # those of scale 2 may be out
        mpu("publish", base, "--permanent-noise", 2.01, *options, "--force")
        shared = [unseal(tmp_path / f"b{end}.bin", read_identities(default_identity_path())).shared_sigma
                  for end in ("", ".earlier-1")]  # fmt: skip
        assert shared[0] == shared[1]

    def test_a_publication_that_failed_is_not_counted(self, mpu: Callable, tmp_path: Path, base: Path) -> None:
        calibrated = ("--copies", 2, "--dp", "epsilon=1,delta=1e-6", "--out", tmp_path / "e", "--keys")
        outputs = (*calibrated, tmp_path / "e.bin", "--dp")
        assert "overflows" in mpu("publish", base, *outputs, "sensitivity=1e5", "--dtype", "float16", check=False).err
        mpu("publish", base, *outputs, "sensitivity=0.01")
        assert "would not hold" in mpu("publish", base, *outputs, "sensitivity=0.01", "--force", check=False).err

    def test_epsilon_counts_publications(self, mpu: Callable, tmp_path: Path, base: Path) -> None:
        """Two publications of a base, to two owners who may pool their copies, are two mechanisms."""
        calibrated = ("--copies", 2, "--dp", "epsilon=1,delta=1e-6,sensitivity=0.01")

        def publish(name: str, *options: object) -> str:
            to = ("--out", tmp_path / name, "--keys", tmp_path / name / "keys.bin")
            outcome = mpu("publish", base, *calibrated, *options, *to, check=False)
            assert outcome.status == 0 or not (tmp_path / name).exists()
            return outcome.err if outcome.status else ""

        assert not publish("a", "--dp", "budget_rounds=2")
        assert not publish("b", "--dp", "budget_rounds=2")
        assert "with 2 earlier publications of this base or run" in publish("c", "--dp", "budget_rounds=2")
        assert "would not hold" in publish("c", "--dp", "epsilon=8,budget_rounds=9")  # nor that of the others
        assert "would not hold" in publish("d")
        assert not publish("e", "--allow", "publish-again")

    def test_it_is_the_same_on_another_processor(self) -> None:
        """Whose sums differ in their last bits: the scale, which is part of what it is drawn from, is rounded."""
        publication = Publication(seed=bytes(32), kappa=0.0, shared_kappa=1.0, permanent_seed=bytes(32))
        assert publication.sigmas(0.012345678, 1.0) == publication.sigmas(0.012345679, 1.0) == (0.0, 0.0123)

    def test_a_further_copy_later(self, mpu: Callable, tmp_path: Path, base: Path) -> None:
        """--only: the keys say what it is drawn from, also after the server's own secret is gone."""
        several = ("--copies", 2, "--kappa", 0.1, "--permanent-noise", 1, "--symmetries", "none", "--dtype", "float64")
        for number in (1, 2):
            keys = ("--keys", tmp_path / "keys.bin")
            mpu("publish", base, *several, "--only", number, "--out", tmp_path, *keys, "--allow", "trust-keys")
            default_secret_path().unlink(missing_ok=True)
            mpu("verify", tmp_path / f"copy_{number}", *keys, "--trust-keys")
        name = "model.embed_tokens.weight"
        copies = [tensors(tmp_path / f"copy_{number}")[name] for number in (1, 2)]
        residual = sum(copies) / 2 - tensors(base)[name]  # what cancels is gone, what stays is one draw at its scale
        assert float(residual.square().mean().sqrt()) == pytest.approx(keys_of(tmp_path).shared_sigma[name], rel=0.05)


class TestWhatLeavesTheServer:
    def test_no_path_and_no_code(self, mpu: Callable, root: Path) -> None:
        """Whatever JSON beside the weights says: paths, nested or not, repositories and code stay at home."""
        secret = str(root)
        base = root / "base"
        edit(base / "config.json", _name_or_path=secret, auto_map={"AutoModel": f"{secret}/x.py--X"},
             rope_parameters={"rope_type": "default", "rope_theta": 1e4, "_name_or_path": secret},
             internal_notes=f"trained in {secret}")  # fmt: skip
        edit(base / "tokenizer_config.json", tokenizer_file=f"{secret}/t.json", special_tokens_map_file=f"{secret}/s",
             name_or_path=secret, auto_map={"AutoTokenizer": [secret, None]})  # fmt: skip
        (base / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "_from": secret, "prompt": "hi"}))
        (base / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 2}, "cache_dir": secret}))
        publish_copy(mpu, root)
        mpu("unlearn", "copy_1", "copy_2", *TRAINING, "--lora", "rank=2", cwd=root)
        mpu("aggregate", "deltas", "--keys", "keys.bin", "--out", "model", cwd=root)
        mpu("aggregate", "deltas", "--keys", "keys.bin", "--as-adapter", "--out", "adapter", cwd=root)
        for name in ("config.json", "tokenizer_config.json"):  # the result is the server's own
            assert (root / "model" / name).read_bytes() == (base / name).read_bytes()
        for folder in ("copy_1", "adapter"):
            for path in (root / folder).iterdir():
                content = path.read_bytes()
                assert secret.encode() not in content, path
                assert b"auto_map" not in content
                assert b"internal_notes" not in content
        assert json.loads((root / "copy_1/generation_config.json").read_text()) == {"eos_token_id": 1}
        assert json.loads((root / "copy_1/preprocessor_config.json").read_text()) == {"size": {"height": 2}}
        load(root / "copy_1", torch.float32, "cpu")

    @pytest.mark.slow
    def test_what_is_published_as_it_is_is_said(self, mpu: Callable, tmp_path: Path) -> None:
        """A vision tower has neither noise nor coordinates: its share stands in what publish and plan print."""
        save(random_model("gemma3"), tmp_path / "base")
        outcome = mpu("publish", "base", "--copies", 2, cwd=tmp_path)
        bare = [n for n in load_file(tmp_path / "base/model.safetensors") if n.startswith(("vision", "model.vision"))]
        base, copy = (load_file(tmp_path / n / "model.safetensors") for n in ("base", "copy_1"))
        same = sum(base[n].numel() for n in base if n in copy and torch.equal(base[n], copy[n]))
        assert bare
        assert f"{same:,} of" in outcome.err
        assert "without noise or secret coordinates" in outcome.err
        planned = mpu("publish", "base", "--dry-run", "--out", "x", "--keys", "y", cwd=tmp_path)
        assert f"{same:,} of" in planned.err
