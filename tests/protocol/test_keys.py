"""Keys and identities: who opens them, what the sealed document holds, and keys of somebody else."""

from __future__ import annotations

import io
import json
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyrage
import pytest

from mpu_cli.errors import MpuError
from mpu_cli.files.sealing import default_identity_path, make_identity, parse_recipients, read_identities
from mpu_cli.protocol.keys import VERSION, seal, unseal
from mpu_cli.protocol.publication import default_secret_path, server_secret
from tests.helpers.attacks import publish_copies, unlearn_copy
from tests.helpers.publication import aggregate, keys_of, write_delta


class TestKeys:
    def test_the_identity_is_made_once_and_private(self, mpu, tmp_path, base, monkeypatch):
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
        for name in "ab":
            mpu("publish", base, "--out", tmp_path / name, "--keys", tmp_path / name / "keys.bin")
            assert stat.S_IMODE((tmp_path / name / "keys.bin").stat().st_mode) == 0o600
        identity = tmp_path / "config/mpu/identity.txt"
        assert stat.S_IMODE(identity.stat().st_mode) == 0o600
        for name in "ab":
            assert unseal(tmp_path / name / "keys.bin", read_identities(identity)).copies == 3

    def test_a_file_in_the_place_of_the_configuration_is_named(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        (tmp_path / "mpu").write_text("")
        with pytest.raises(MpuError, match=r"server\.key: cannot be written: File exists; set XDG_CONFIG_HOME"):
            server_secret()

    def test_the_document_is_plain_age(self, publication):
        """age decrypts to the JSON that docs/formats.md describes."""
        [identity] = read_identities(default_identity_path())
        document = json.loads(pyrage.decrypt((publication / "keys.bin").read_bytes(), [identity]))
        assert (document["format"], document["version"]) == ("mpu-keys", VERSION)
        assert len(bytes.fromhex(document["seed"])) == 32
        assert document["noise"] == {"kind": "extrapolate", "factors": [1, -1]}
        assert document["base"]["path"] == str(publication / "base")

    def test_recipient_and_identity(self, mpu, tmp_path, base):
        recipient = mpu("keygen", "--out", tmp_path / "id", "--json").json["recipient"]
        arguments = ["--out", tmp_path, "--keys", tmp_path / "keys.bin"]
        mpu("publish", base, *arguments, "--recipient", recipient)
        assert "no: sealed" in mpu("inspect", tmp_path / "keys.bin").out
        assert recipient in mpu("inspect", tmp_path / "id").out
        assert mpu("inspect", tmp_path / "keys.bin", "--identity", tmp_path / "id", "--json").json["copies"] == 3
        make_identity(tmp_path / "other")
        wrong = mpu("verify", tmp_path / "copy_1", "--keys", tmp_path / "keys.bin", "--identity", tmp_path / "other",
                    check=False)  # fmt: skip
        assert wrong.status == 1
        assert "another identity" in wrong.err

    @pytest.mark.slow
    def test_passphrase(self, mpu, tmp_path, base):
        (tmp_path / "pw").write_text("correct horse\n")
        (tmp_path / "wrong").write_text("battery staple\n")
        keys = tmp_path / "keys.bin"
        mpu("publish", base, "--out", tmp_path, "--keys", keys, "--passphrase-file", tmp_path / "pw")
        verify = ["verify", tmp_path / "copy_1", "--keys", keys, "--no-logits", "--passphrase-file"]
        assert "right" in mpu(*verify, tmp_path / "pw").out
        assert "wrong passphrase" in mpu(*verify, tmp_path / "wrong", check=False).err
        assert "--passphrase-file" in mpu("inspect", keys).out

    def test_an_identity_is_never_replaced(self, mpu, tmp_path):
        mpu("keygen", "--out", tmp_path / "id")
        before = (tmp_path / "id").read_bytes()
        assert mpu("keygen", "--out", tmp_path / "id", check=False).status == 1
        assert (tmp_path / "id").read_bytes() == before

    @pytest.mark.parametrize("where", [0, 30, 100, -1])
    def test_damage(self, mpu, publication, where):
        raw = bytearray((publication / "keys.bin").read_bytes())
        raw[where] ^= 0x41
        (publication / "keys.bin").write_bytes(raw)
        outcome = aggregate(mpu, publication, check=False)
        assert outcome.status == 1
        assert outcome.is_one_error
        assert "keys.bin" in outcome.err

    @pytest.mark.parametrize(
        "noise",
        [
            {"kind": "other", "factors": [1, -1]}, {"kind": "extrapolate", "factors": [1, 1]}, {"kind": "extrapolate"},
            {"kind": "extrapolate", "factors": [1, 0]}, {"kind": "zero-sum", "factors": [1, -1]}, [1, 2], None,
            {"kind": "extrapolate", "factors": [1, "x"]}, {"kind": "extrapolate", "factors": [1, -1, 2]},
            {"kind": "extrapolate", "factors": [1, 10**400]}, {"kind": "zero-sum", "factors": [1, 5e-324]},
        ],
    )  # fmt: skip
    def test_noise_that_is_none(self, mpu, publication, noise):
        [identity] = read_identities(default_identity_path())
        document = json.loads(pyrage.decrypt((publication / "keys.bin").read_bytes(), [identity])) | {"noise": noise}
        (publication / "keys.bin").write_bytes(pyrage.encrypt(json.dumps(document).encode(), [identity.to_public()]))
        outcome = aggregate(mpu, publication, check=False)
        assert (outcome.status, "key data is incomplete or invalid" in outcome.err) == (1, True)

    @pytest.mark.parametrize("version", [VERSION + 1, VERSION - 1, None, "8"])
    def test_another_version(self, mpu, publication, version):
        [identity] = read_identities(default_identity_path())
        document = json.loads(pyrage.decrypt((publication / "keys.bin").read_bytes(), [identity]))
        newer = json.dumps(document | {"version": version}).encode()
        (publication / "keys.bin").write_bytes(pyrage.encrypt(newer, [identity.to_public()]))
        assert "update mpu" in aggregate(mpu, publication, check=False).err

    def test_keys_are_never_replaced(self, mpu: Callable, tmp_path: Path, base: Path) -> None:
        outputs = ("--kappa", 0.1, "--out", tmp_path, "--keys", tmp_path / "keys.bin")
        mpu("publish", base, *outputs)
        before = (tmp_path / "keys.bin").read_bytes()
        for number in (1, 2):
            printed = mpu("publish", base, *outputs, "--force").err
            earlier = tmp_path / f"keys.earlier-{number}.bin"
            assert str(earlier) in printed
            assert stat.S_IMODE(earlier.stat().st_mode) == 0o600
        assert (tmp_path / "keys.earlier-1.bin").read_bytes() == before
        assert (tmp_path / "keys.bin").read_bytes() not in (before, earlier.read_bytes())

    def test_a_secret_key_is_told_from_a_public_one(self, mpu, tmp_path, base):
        """A client that sent its whole identity file is to be told so."""
        public = make_identity(tmp_path / "identity.txt")
        for recipient, is_told in ((public, False), (tmp_path / "identity.txt", True)):
            out = tmp_path / str(is_told)
            told = mpu("publish", base, "--kappa", 0.1, "--copy-recipients", recipient, "--out", out, "--keys",
                       out / "keys.bin")  # fmt: skip
            assert ("holds a secret key" in told.err) == is_told
            assert (out / "copy_1.age").exists()

    def test_the_folder_that_is_sent_holds_no_keys(self, mpu, tmp_path, base):
        """By default, not in the folder of a round; where they do, because --keys says so, there is a warning."""
        first = mpu("publish", base, "--copies", 2, cwd=tmp_path)
        assert "also holds the keys, keys.bin" in first.err
        for copy in (1, 2):
            write_delta(tmp_path / f"copy_{copy}", tmp_path / f"deltas/copy_{copy}.safetensors", copy)
        aggregate(mpu, tmp_path)
        unlearned = tmp_path / "unlearned"
        second = mpu("publish", unlearned, "--copies", 2, "--json", cwd=tmp_path)
        assert second.json["keys"] == "keys_2.bin"
        assert sorted(path.name for path in (tmp_path / "round_2").iterdir()) == ["copy_1", "copy_2"]
        assert "round_2 holds the copies and nothing else" in second.err
        (tmp_path / "deltas/round_2").mkdir()
        for copy in (1, 2):
            write_delta(tmp_path / f"round_2/copy_{copy}", tmp_path / f"deltas/round_2/copy_{copy}.safetensors", copy)
        assert "mpu aggregate deltas/round_2 --keys keys_2.bin" in mpu("status", cwd=tmp_path).out
        shared = mpu(
            "publish", unlearned, "--allow", "publish-again", "--out", "x", "--keys", "x/k.bin", "--quiet", cwd=tmp_path
        )
        assert "warning: x also holds the keys, k.bin: send the copies alone" in shared.err

    def test_the_secret_is_private_and_no_repr_tells_it(self, mpu: Callable, tmp_path: Path, base: Path) -> None:
        mpu("publish", base, "--copies", 1, "--permanent-noise", 1, "--out", tmp_path, "--keys", tmp_path / "keys.bin")
        assert stat.S_IMODE(default_secret_path().stat().st_mode) == 0o600
        keys = keys_of(tmp_path)
        publication = keys.publication
        assert publication.permanent_seed
        for secret in (publication.seed, publication.permanent_seed):
            assert str(secret) not in repr(keys)
            assert secret.hex() not in repr(keys)
        default_secret_path().write_text("short")
        outcome = mpu("publish", base, "--copies", 1, "--permanent-noise", 1, "--out", tmp_path / "x", check=False)
        assert (outcome.status, "cannot be read as the server's secret" in outcome.err) == (1, True)

    @pytest.mark.slow
    def test_two_first_publications_at_once(self, mpu: Callable, root: Path, shell: Callable) -> None:
        """Both keys open with the one identity that was made."""
        done = shell("for i in 1 2 3; do (mpu publish base --copies 2 --out p$i --keys p$i.bin) & done; wait")
        assert done.returncode == 0, done.stderr
        for i in (1, 2, 3):
            assert "symmetries" in mpu("inspect", f"p{i}.bin", cwd=root).out


class TestKeysOfSomebodyElse:
    def test_they_are_refused_and_what_they_name_is_not_fetched(
        self, mpu: Callable, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whoever knows the public key can seal keys; their base may be any path or name."""
        import huggingface_hub

        publish_copies(mpu, root)
        [identity] = read_identities(default_identity_path())
        genuine = unseal(root / "keys.bin", [identity])
        forged = replace(genuine, base=replace(genuine.base, path="owner/name"))
        (root / "forged.bin").write_bytes(seal(forged, [identity.to_public()]))
        unlearn_copy(mpu, root, root / "copy_1", "1")
        requested_names: list[object] = []

        def download(name: str, local_files_only: bool = False, **_: object) -> str:
            if not local_files_only:
                requested_names.append(name)
            raise huggingface_hub.errors.LocalEntryNotFoundError(name)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        refused = mpu("invert", "1.safetensors", "--keys", "forged.bin", check=False, cwd=root)
        assert "was not sealed with this server's secret" in refused.err
        refused = mpu("invert", "1.safetensors", "--keys", "forged.bin", "--trust-keys", check=False, cwd=root)
        assert "owner/name: not on this machine" in refused.err
        assert requested_names == []
        assert "unknown" in mpu("inspect", "forged.bin", cwd=root).out
        assert "this server" in mpu("inspect", "keys.bin", cwd=root).out


class TestHeaders:
    def test_a_header_that_repeats_its_recipient(self, mpu: Callable, root: Path) -> None:
        """rage needs time that grows with the square of a header's length: longer ones are refused unread."""
        publish_copies(mpu, root)
        [identity] = read_identities(default_identity_path())
        sealed = pyrage.encrypt(b"nothing", [identity.to_public()])
        version_line, rest = sealed.split(b"\n-> ", 1)
        stanza = rest.split(b"\n--- ", 1)[0]
        evil = version_line + (b"\n-> " + stanza) * 20_000 + b"\n--- " + rest.split(b"\n--- ", 1)[1]
        (root / "evil.age").write_bytes(evil)
        (root / "evil.bin").write_bytes(evil)
        for command in (("unlearn", "evil.age"), ("aggregate", "d", "--keys", "evil.bin")):
            mpu(*command, fails="header is longer", status=1, cwd=root)

    def test_as_many_recipients_as_fit(self, tmp_path: Path) -> None:
        from mpu_cli.files.sealing import MAX_RECIPIENTS, check_header

        recipient = make_identity(tmp_path / "id.txt")
        sealed = pyrage.encrypt(b"x", parse_recipients([recipient] * MAX_RECIPIENTS))
        check_header(io.BytesIO(sealed).read(), tmp_path / "k")
        with pytest.raises(MpuError, match="recipients"):
            parse_recipients([recipient] * (MAX_RECIPIENTS + 1))
