"""Sealed copies that write elsewhere than they should."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyrage
import pytest

from mpu_cli.errors import MpuError
from mpu_cli.files.boundary import unpack_folder
from mpu_cli.files.sealing import make_identity
from mpu_cli.files.transaction import remove_abandoned


def archive(*members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.USTAR_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as out:
        for member, content in members:
            member.size = len(content)
            out.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


FOLDER = (member("copy_1", tarfile.DIRTYPE), b"")


ARCHIVES = {
    "link and file through it": [FOLDER, (member("copy_1/x", tarfile.SYMTYPE, "../.."), b""),
                                 (member("copy_1/x/escaped"), b"!")],
    "link of the name of a file": [FOLDER, (member("copy_1/model", tarfile.SYMTYPE, "/tmp/escaped"), b""),
                                   (member("copy_1/model"), b"!")],
    "hard link": [FOLDER, (member("copy_1/x", tarfile.LNKTYPE, "/etc/passwd"), b"")],
    "parent": [(member("../escaped"), b"!")],
    "parent inside": [FOLDER, (member("copy_1/../escaped"), b"!")],
    "absolute": [(member("/tmp/escaped"), b"!")],
    "device": [FOLDER, (member("copy_1/x", tarfile.CHRTYPE), b"")],
    "FIFO": [FOLDER, (member("copy_1/x", tarfile.FIFOTYPE), b"")],
    "two folders": [FOLDER, (member("other", tarfile.DIRTYPE), b"")],
    "a file only": [(member("copy_1"), b"!")],
    "nested": [FOLDER, (member("copy_1/a", tarfile.DIRTYPE), b""), (member("copy_1/a/b"), b"!")],
    "twice": [FOLDER, (member("copy_1/x"), b"1"), (member("copy_1/x"), b"2")],
    "hidden": [FOLDER, (member("copy_1/.bashrc"), b"!")],
}  # fmt: skip


class TestASealedCopyThatWritesElsewhere:
    @pytest.mark.parametrize("attack", ARCHIVES)
    def test_members(self, mpu: Callable, root: Path, attack: str) -> None:
        make_identity(root / "id.txt")
        identity = pyrage.x25519.Identity.from_str((root / "id.txt").read_text().split()[-1])
        (root / "x.age").write_bytes(pyrage.encrypt(archive(*ARCHIVES[attack]), [identity.to_public()]))
        before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
        refused = mpu("unlearn", "x.age", "--identity", "id.txt", "--out", "d.safetensors", check=False, cwd=root)
        assert refused.status == 1
        assert "contains no copy of a model" in refused.err
        assert refused.is_one_error
        assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
        assert not Path("/tmp/escaped").exists()

    @pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
    def test_names_that_need_extended_headers(self, tmp_path: Path, form: int) -> None:
        """Whose size tarfile would read into memory."""
        tar_bytes = archive(FOLDER, (member("copy_1/" + "a" * 300), b"!"), form=form)
        with pytest.raises(MpuError, match=r"refused|is not a file"):
            unpack_folder(io.BytesIO(tar_bytes), tmp_path)

    def test_sparse_and_truncated(self, tmp_path: Path) -> None:
        tar_bytes = bytearray(archive(FOLDER, (member("copy_1/x"), b"12345")))
        with pytest.raises(MpuError, match="truncated"):
            unpack_folder(io.BytesIO(bytes(tar_bytes[: 2 * 512 + 3])), tmp_path)
        sparse = member("copy_1/y", tarfile.GNUTYPE_SPARSE)
        (tmp_path / "sparse").mkdir()
        with pytest.raises(MpuError, match="is not a file"):
            unpack_folder(io.BytesIO(archive(FOLDER)[:512] + sparse.tobuf()), tmp_path / "sparse")

    def test_what_a_killed_command_left_is_removed(self, tmp_path: Path) -> None:
        """Plaintext of a sealed copy: a process that is killed cannot remove it, the next one does."""
        program = (
            "import sys, time\nfrom pathlib import Path\nfrom mpu_cli.files.transaction import Transaction\n"
            f"with Transaction() as t:\n    f = t.scratch(Path({str(tmp_path)!r}))\n    (f / 'plain').write_text('x')\n"
            "    print('ready', flush=True)\n    time.sleep(60)\n"
        )
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        [scratch_folder] = tmp_path.iterdir()
        assert remove_abandoned(tmp_path) == []  # it is at work
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert remove_abandoned(tmp_path) == [scratch_folder]
        assert list(tmp_path.iterdir()) == []
