"""What one party sends, made to hurt the other: each attack on real files, through the command line."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mpu_cli.errors import MpuError
from mpu_cli.files.folder import clean_config
from mpu_cli.files.manifest import DeltaManifest, as_metadata, delta_facts, delta_manifest
from mpu_cli.files.randomness import Randomness
from mpu_cli.files.reader import MAX_HEADER, open_checkpoint
from mpu_cli.model import load as loading
from mpu_cli.model.source import Model, open_model
from mpu_cli.training.private import with_noise
from tests.helpers.attacks import TRAINING, edit, publish_copy, unlearn_copy
from tests.helpers.models import DemoModel, load, random_model, save


class TestACopyThatReadsTheClientsDisk:
    @pytest.fixture
    def private(self, root: Path) -> Path:
        """Another model that the client can read, of the same shapes."""
        return save(random_model("llama", seed=9), root / "private")

    @pytest.mark.parametrize("absolute", [True, False])
    def test_a_config_that_names_other_weights(self, mpu: Callable, root: Path, private: Path, absolute: bool) -> None:
        copy = publish_copy(mpu, root)
        unlearn_copy(mpu, root, copy, "honest")
        measured = ["--benchmark", "qa", "--forget", "forget.jsonl", "--metrics", "forget_Q_A_Prob", "--json"]
        expected = mpu("eval", copy, *measured, "--out", "a.json", cwd=root).json["metrics"]
        file = str(private / "model.safetensors") if absolute else "../private/model.safetensors"
        index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(private / "model.safetensors"), file)}
        (copy / "other.safetensors.index.json").write_text(json.dumps(index))
        edit(copy / "config.json", transformers_weights="other.safetensors.index.json")
        unlearn_copy(mpu, root, copy, "attacked", "--trust-copy")  # it is not the copy of before
        assert (root / "attacked.safetensors").read_bytes() == (root / "honest.safetensors").read_bytes()
        assert mpu("eval", copy, *measured, "--out", "b.json", cwd=root).json["metrics"] == expected

    @pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "mpu.json"])
    def test_a_link_in_place_of_a_file(self, mpu: Callable, root: Path, private: Path, name: str) -> None:
        copy = publish_copy(mpu, root)
        target = private / name
        if name == "mpu.json":
            target.write_text((copy / name).read_text())
        (copy / name).unlink()
        (copy / name).symlink_to(target)
        unlearn_copy(mpu, root, copy, "d", refused="is a link", status=1)
        assert not (root / "d.safetensors").exists()

    def test_links_of_the_hubs_cache_are_files(self, mpu: Callable, root: Path) -> None:
        copy = publish_copy(mpu, root)
        cache = root / "models--owner--name"
        (cache / "blobs").mkdir(parents=True)
        (cache / "snapshots").mkdir()
        snapshot = cache / "snapshots/0123abc"
        snapshot.mkdir()
        for number, path in enumerate(sorted(copy.iterdir())):
            path.rename(cache / f"blobs/{number}")
            (snapshot / path.name).symlink_to(f"../../blobs/{number}")
        unlearn_copy(mpu, root, snapshot, "d")
        (cache / "blobs/0").rename(root / "elsewhere")
        (cache / "blobs/0").symlink_to(root / "elsewhere")
        assert "is a link" in unlearn_copy(mpu, root, snapshot, "d", check=False).err
        (cache / "blobs/0").unlink()
        (root / "elsewhere").rename(cache / "blobs/0")
        (cache / "blobs").rename(root / "private_folder")
        (cache / "blobs").symlink_to(root / "private_folder")
        assert "is a link" in unlearn_copy(mpu, root, snapshot, "d", check=False).err

    def test_a_template_of_any_length(self, mpu: Callable, root: Path) -> None:
        """It would be sent to the process that renders with each record."""
        copy = publish_copy(mpu, root)
        (copy / "chat_template.jinja").write_text("x" * 300_000)
        assert "larger than" in unlearn_copy(mpu, root, copy, "d", check=False).err

    def test_a_tokenizer_that_names_files(self, mpu: Callable, root: Path) -> None:
        """Paths in tokenizer_config.json are not followed, code and unknown names are left out."""
        copy = publish_copy(mpu, root)
        unlearn_copy(mpu, root, copy, "honest")
        shutil.copy(copy / "tokenizer.json", root / "secret.json")
        edit(copy / "tokenizer_config.json", tokenizer_file=str(root / "secret.json"),
             vocab_file="/etc/passwd", auto_map={"AutoTokenizer": ["evil.py--Evil", None]})  # fmt: skip
        (copy / "evil.py").write_text(f"open({str(root / 'ran')!r}, 'w')")
        unlearn_copy(mpu, root, copy, "attacked", "--trust-copy")  # it is not the copy of before
        assert (root / "attacked.safetensors").read_bytes() == (root / "honest.safetensors").read_bytes()
        assert not (root / "ran").exists()

    @pytest.mark.parametrize(
        "value",
        [
            {"transformers_weights": "x"}, {"auto_map": {"AutoModel": "x.y"}}, {"_name_or_path": "/home/a"},
            {"attn_implementation": "owner/kernel"}, {"_attn_implementation": "x"}, {"experts_implementation": "x"},
            {"quantization_config": {"quant_method": "bitsandbytes"}}, {"name_or_path": "../x"},
            {"text_config": {"_name_or_path": "/x", "transformers_weights": "y"}}, {"hidden_act": "/etc/passwd"},
            {"architectures": ["../../x"]}, {"hidden_act": "owner/repo"}, {"unheard_of": 1},
        ],
        ids=str,
    )  # fmt: skip
    def test_nothing_of_a_config_that_libraries_would_obey(self, value: dict) -> None:
        cleaned = clean_config({"model_type": "llama", **value})
        assert json.dumps(cleaned) in (
            '{"model_type": "llama"}', '{"model_type": "llama", "text_config": {}}',
        )  # fmt: skip

    def test_a_quantised_copy(self, mpu: Callable, root: Path) -> None:
        copy = publish_copy(mpu, root)
        edit(copy / "config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
        assert "quantis" in unlearn_copy(mpu, root, copy, "d", check=False).err

    @pytest.mark.slow
    def test_an_adapter_that_imports_a_module(self, mpu: Callable, root: Path, demo: DemoModel) -> None:
        """peft would import what ``megatron_core`` names, and read other kinds of adapters."""
        records = ["--forget", demo.forget, "--retain", demo.retain]
        mpu("publish", demo.model, "--copies", 2, cwd=root)
        training = ("--algo", "npo", "--epochs", 1, "--lora-rank", 2)
        mpu("unlearn", "copy_1", "copy_2", *records, *training, cwd=root)
        mpu("aggregate", "deltas", "--keys", "keys.bin", "--as-adapter", "--out", "adapter", cwd=root)
        (root / "evil_module.py").write_text(f"open({str(root / 'ran')!r}, 'w')")
        edit(root / "adapter/adapter_config.json", megatron_config={"a": 1}, megatron_core="evil_module")
        options = [
            "--base",
            demo.model,
            "--benchmark",
            "qa",
            "--forget",
            demo.forget,
            "--metrics",
            "forget_Q_A_Prob",
        ]
        sys.path.insert(0, str(root))
        try:
            mpu("eval", "adapter", *options, cwd=root)
        finally:
            sys.path.remove(str(root))
        assert not (root / "ran").exists()
        hints = {"PREFIX_TUNING": "no model of its own", "VERA": "merge_and_unload"}
        for kind, hint in hints.items():
            edit(root / "adapter/adapter_config.json", peft_type=kind)
            refused = mpu("eval", "adapter", *options, "--out", "b.json", fails="not a LoRA adapter", cwd=root)
            assert hint in refused.err

    def test_weights_that_change_between_check_and_use(
        self, mpu: Callable, root: Path, private: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another file under the name once its header was read: what was loaded is compared with what was opened."""
        copy, read = publish_copy(mpu, root), loading.AutoConfig.from_pretrained

        def swap(*arguments: object, **options: object) -> object:
            os.replace(private / "model.safetensors", copy / "model.safetensors")
            monkeypatch.setattr(loading.AutoConfig, "from_pretrained", read)
            return read(*arguments, **options)

        opened = open_checkpoint(copy / "model.safetensors")
        opened.tensor("model.norm.weight")  # mapped, as it is once its fingerprint was taken
        monkeypatch.setattr(loading.AutoConfig, "from_pretrained", swap)
        copy_model = open_model(str(copy))
        model = Model(copy_model.source, opened, copy_model.config, copy_model.config_path, copy_model.folder)
        with pytest.raises(MpuError, match="differs from this file"):
            loading.load(model, torch.float32, "cpu")


def test_noise_of_dp_sgd_does_not_hang_on_32_bits() -> None:
    """Seeds that agree in all but one of 256 bits give unrelated noise; torch's generator keeps 32 of them."""
    seed = bytes(range(32))
    x = torch.zeros(20_000)
    noise = with_noise(x, 1.0, Randomness(seed).key("dp noise", 0, 0))
    for bit in (0, 31, 32, 64, 200, 255):
        other = bytearray(seed)
        other[bit // 8] ^= 1 << bit % 8
        other_noise = with_noise(x, 1.0, Randomness(bytes(other)).key("dp noise", 0, 0))
        assert abs(float(noise @ other_noise)) / len(x) < 5 / len(x) ** 0.5
    old = [torch.randn(8, generator=torch.Generator().manual_seed(s)) for s in (7, 7 + 2**32)]
    assert torch.equal(*old)  # what was wrong with torch's


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
        mpu("unlearn", "copy_1", "copy_2", *TRAINING, "--lora-rank", 2, cwd=root)
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


class TestSmallThings:
    def test_a_config_larger_than_the_weights(self, mpu: Callable, root: Path) -> None:
        copy = publish_copy(mpu, root)
        edit(copy / "config.json", vocab_size=30_000_000)
        started = time.monotonic()
        unlearn_copy(mpu, root, copy, "d", refused="describes a model of")
        assert time.monotonic() - started < 20

    def test_a_header_that_fills_the_memory(self, mpu: Callable, root: Path) -> None:
        copy = publish_copy(mpu, root)
        path = copy / "model.safetensors"
        path.write_bytes((MAX_HEADER + 1).to_bytes(8, "little") + b"[" * (MAX_HEADER + 1))
        unlearn_copy(mpu, root, copy, "d", fails="header is longer")

    def test_an_algorithm_that_is_markup(self, mpu: Callable, root: Path) -> None:
        """The delta's word for it stands in the model card."""
        publish_copy(mpu, root)
        mpu("unlearn", "copy_1", "copy_2", *TRAINING, cwd=root)
        path = root / "deltas/copy_1.safetensors"
        facts = json.loads(open_checkpoint(path).metadata["mpu"]) | {"algorithm": "npo |\n# Owned\n![](http://x)"}
        save_file(load_file(path), path, as_metadata(facts))
        mpu("aggregate", "deltas", "--keys", "keys.bin", fails="algorithm: not of the form", cwd=root)

    def test_facts_of_a_delta_are_plain(self, tmp_path: Path) -> None:
        good = delta_facts(DeltaManifest(None, "npo"))
        for bad in (
            {"privacy": {"epsilon": "<script>"}}, {"privacy": {"a b": 1}}, {"trained": {"key": "x" * 999}},
            {"trained": {"key": 1}}, {"run": "r", "round": 1, "copy": 1, "copies": 2, "copy_id": "| x |"},
            {"run": "r\n", "round": 1, "copy": 1, "copies": 2, "copy_id": "x"}, {"round": True, "run": "r"},
        ):  # fmt: skip
            with pytest.raises(MpuError):
                delta_manifest(as_metadata(good | bad), tmp_path)

    @pytest.mark.slow
    def test_two_first_publications_at_once(self, mpu: Callable, root: Path, shell: Callable) -> None:
        """Both keys open with the one identity that was made."""
        done = shell("for i in 1 2 3; do (mpu publish base --copies 2 --out p$i --keys p$i.bin) & done; wait")
        assert done.returncode == 0, done.stderr
        for i in (1, 2, 3):
            assert "symmetries" in mpu("inspect", f"p{i}.bin", cwd=root).out

    def test_another_reference_for_the_second_copy(self, mpu: Callable, root: Path) -> None:
        """Its noise would have another scale than its keys say."""
        save(random_model("llama", seed=5), root / "reference")
        options = ["--pretrained", "reference", "--copies", 2, "--seed", 1, "--kappa", 0.1]
        mpu("publish", "base", *options, "--only", 1, cwd=root)
        save(random_model("llama", seed=6), root / "reference")
        mpu("publish", "base", *options, "--only", 2, fails="another pretrained model", status=1, cwd=root)
        assert not (root / "copy_2").exists()

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
        refused = mpu("aggregate", "deltas", "--keys", "keys.bin", "--server-lr", 3, "--max-norm", 1.5 * largest,
                      check=False, cwd=root)  # fmt: skip
        assert "the update's norm is" in refused.err

    def test_a_config_with_more_layers_than_weights(self, mpu: Callable, root: Path) -> None:
        """Libraries build them before they look."""
        copy = publish_copy(mpu, root)
        for name, value in (("num_hidden_layers", 10**9), ("max_position_embeddings", 10**12)):
            edit(copy / "config.json", **{name: value})
            (copy / "mpu.json").unlink(missing_ok=True)  # as a model of the client's own would be
            refused = mpu("eval", copy, "--benchmark", "qa", "--forget", "forget.jsonl", check=False, cwd=root)
            assert refused.status == 1
            assert refused.is_one_error
            edit(copy / "config.json", **{name: 2 if name == "num_hidden_layers" else 256})
