"""Rounds between organisations: the spool, ``mpu watch``, and the app on a real Flower network."""

from __future__ import annotations

import grp
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from mpu_cli.errors import MpuError
from mpu_cli.files.reader import open_checkpoint
from mpu_cli.files.resumption import alone_in
from mpu_cli.flower.spool import Spool, digest_of
from tests.helpers.federation import BUNDLE, Network, network, wait_for
from tests.helpers.models import random_model, save, write_records
from tests.helpers.protocol import tensors
from tests.helpers.trainings import for_run
from tests.protocol.test_server import write_delta

TRAINING = ["--algo", "npo", "--reading", "template=plain", "--lr", "1e-3", "--batch-size", "3", "--epochs", "2"]
COPY = "run/round_1/copy_1"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A model and two owners' records."""
    save(random_model("llama"), tmp_path / "base")
    for number, owner in enumerate("ab"):
        (tmp_path / owner).mkdir()
        write_records(tmp_path / owner / "forget.jsonl", 6, 10 * number + 1)
        write_records(tmp_path / owner / "retain.jsonl", 9, 10 * number + 2)
    return tmp_path


def records(root: Path, owner: str) -> list[object]:
    return ["--forget", root / owner / "forget.jsonl", "--retain", root / owner / "retain.jsonl"]


class TestSpool:
    @pytest.mark.parametrize(
        "name", ["../x/round_1/copy_1", "/etc/round_1/copy_1", "a/round_1", "a/../round_1/copy_1", ""]
    )
    def test_names_that_lead_elsewhere_are_refused(self, tmp_path, name):
        spool = Spool(tmp_path / "spool")
        for use in (spool.state, spool.forget, spool.again, lambda n: spool.put(n, "x", 0, b"x")):
            with pytest.raises(ValueError, match="not a name"):
                use(name)
        with pytest.raises(ValueError, match="not a name"):
            spool.put(COPY, f"../{name}", 0, b"x")
        assert not (tmp_path / "spool").exists()

    def test_only_files_of_a_delta_are_read(self, tmp_path):
        spool = Spool(tmp_path)
        (spool.root / "out" / f"{COPY}.safetensors").parent.mkdir(parents=True)
        (spool.root / "out" / f"{COPY}.safetensors").write_bytes(b"0123456789")
        ((spool.root / "out" / f"{COPY}.safetensors").parent / "secret").write_text("x")
        assert spool.read(COPY, "copy_1.safetensors", 3, 4) == b"3456"
        with pytest.raises(ValueError, match="not a file of the delta"):
            spool.read(COPY, "secret", 0, 1)

    def test_pieces_may_repeat_and_damage_is_sent_again(self, tmp_path):
        spool, data = Spool(tmp_path), bytes(range(200))
        source = tmp_path / "source"
        source.write_bytes(data)
        digests = {"w": digest_of(source), "c": digest_of(source)}
        for offset, end in ((0, 80), (80, 200), (0, 80), (40, 90)):  # again, after a reply that was lost
            spool.put(COPY, "w", offset, data[offset:end])
        spool.put(COPY, "c", 100, data[100:])  # one before it is missing
        assert spool.received_sizes(COPY) == {"w": 200}
        spool.put(COPY, "c", 0, b"\1" + data[1:])
        assert spool.complete(COPY, digests) == ["c"]
        assert spool.state(COPY) == "arriving"
        assert spool.received_sizes(COPY) == {"w": 200}
        spool.put(COPY, "c", 0, data)
        assert spool.complete(COPY, digests) == spool.complete(COPY, digests) == []
        assert spool.state(COPY) == "waiting"
        assert (spool.root / "in" / COPY / "w").read_bytes() == data
        assert list(spool.copies()) == [COPY]


@pytest.mark.slow
class TestWatch:
    def test_two_rounds_are_those_of_run(self, mpu: Callable, root: Path) -> None:
        """Bit for bit; and nothing of the records, logs or references is in the spool."""
        base, work = root / "base", ["--work", root / "work"]
        spool = Spool(root / "spool")
        for number in (1, 2):
            mpu("publish", base, "--seed", 3, "--copies", 2, "--kappa", 0.05, "--out", root / f"r{number}",
                "--keys", root / f"r{number}/keys.bin")  # fmt: skip
            for k in (1, 2):
                copy = root / f"r{number}/copy_{k}"
                run = json.loads((copy / "mpu.json").read_text())["run"]
                target = spool.root / "in" / f"{run}/round_{number}/copy_{k}"
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(copy, target)
            outcome = mpu("watch", spool.root, *records(root, "a"), *TRAINING, *work, "--once", "--json")
            deltas = spool.root / f"out/{run}/round_{number}"
            reports = [json.loads(line) for line in outcome.out.splitlines()]
            assert all(each["after"]["forget"] > each["before"]["forget"] for each in reports)
            assert [each["delta"] for each in reports] == [str(deltas / f"copy_{k}.safetensors") for k in (1, 2)]
            assert mpu("watch", spool.root, *records(root, "a"), *TRAINING, *work, "--once").out == ""
            mpu("aggregate", deltas, "--keys", root / f"r{number}/keys.bin", "--out", root / f"r{number}/model")
            base = root / f"r{number}/model"
        mpu("run", root / "base", *records(root, "a"), *for_run(TRAINING), "--copies", 2, "--kappa", 0.05,
            "--secret-seed", 3,
            "--rounds", 2, "--out", root / "run")  # fmt: skip
        expected = tensors(root / "run/server/round_2/model")
        assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors(base).items())
        spool_folders = {path.relative_to(spool.root).parts[0] for path in spool.root.rglob("*") if path.is_file()}
        assert spool_folders == {"in", "out"}
        assert {path.name for path in (spool.root / "out").rglob("*") if path.is_file()} == {
            "copy_1.safetensors", "copy_2.safetensors",
        }  # fmt: skip

    def test_a_copy_is_trained_on_once(self, mpu: Callable, root: Path) -> None:
        """Asked again, the same bytes; nothing for another copy of the name, after the round, or beyond the limit."""
        spool, watch = Spool(root / "spool"), ["watch", root / "spool", *records(root, "a"), *TRAINING]
        watch += ["--work", root / "work", "--once", "--max-deltas", 1]

        def arrive(seed: int) -> str:
            mpu("publish", root / "base", "--seed", seed, "--copies", 2, "--run", "r", "--out", root / f"p{seed}",
                "--keys", root / f"p{seed}/keys.bin", "--force")  # fmt: skip
            target = spool.root / "in" / "r/round_1/copy_1"
            shutil.rmtree(target, ignore_errors=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(root / f"p{seed}/copy_1", target)
            return "r/round_1/copy_1"

        copy = arrive(1)
        mpu(*watch, "--dp", "epsilon=8")
        delta_bytes = (spool.root / "out" / f"{copy}.safetensors").read_bytes()
        spool.again(copy)
        assert "asked for again" in mpu(*watch, "--dp", "epsilon=8").err
        assert (spool.root / "out" / f"{copy}.safetensors").read_bytes() == delta_bytes  # DP-SGD would draw other noise
        spool.again(copy)
        arrive(2)
        assert "another copy of this name" in mpu(*watch, check=False).err
        assert spool.state(copy) == "failed"
        spool.again(copy)
        spool.forget(copy)
        mpu(*watch)
        arrive(1)
        assert "its round is over" in mpu(*watch, check=False).err
        spool.forget(copy)
        shutil.move(root / "p1/copy_2", spool.root / "in" / "r/round_1/copy_2")
        assert "--max-deltas allows no more" in mpu(*watch, check=False).err
        assert not list((spool.root / "out").rglob("*.safetensors"))

    def test_a_failure_is_told_here_and_only_marked_there(self, mpu: Callable, root: Path) -> None:
        spool = Spool(root / "spool")
        mpu("publish", root / "base", "--out", root, "--keys", root / "keys.bin")
        (spool.root / "in" / COPY).parent.mkdir(parents=True)
        shutil.move(root / "copy_1", spool.root / "in" / COPY)  # not the run that its name says
        mpu(
            "watch", spool.root, *records(root, "a"), *TRAINING, "--work", root / "work", "--once",
            fails="does not hold the copy that its name says", status=1,
        )  # fmt: skip
        assert (spool.root / "out" / f"{COPY}.failed").read_bytes() == b""
        assert spool.state(COPY) == "failed"
        mpu("watch", spool.root, *records(root, "a"), "--work", spool.root / "work", refused="is in the spool")


def watcher(net: Network, root: Path, owner: str, *training: object) -> subprocess.Popen:
    """``mpu watch`` of an owner, as a process of its own."""
    return net.start(
        f"watch-{owner}", sys.executable, "-m", "mpu_cli", "watch", net.folder / f"spool-{owner}",
        *records(root, owner), *training, "--work", net.folder / f"work-{owner}", "--poll", 0.5, "--device", "cpu",
    )  # fmt: skip


CONFIG = {"poll": 2.0, "patience": 60.0, "limit": 240.0}


@pytest.mark.slow
@pytest.mark.flower
class TestFlower:
    @pytest.fixture(autouse=True)
    def _flwr(self):
        pytest.importorskip("flwr")

    @pytest.mark.exhaustive
    def test_two_rounds_are_those_of_run_whatever_is_killed(self, mpu: Callable, root: Path) -> None:
        """The node, the data owner's training and the SuperLink are killed; the model is that of ``mpu run``."""
        options = ["--copies", "2", "--kappa", "0.05"]
        training = [*TRAINING, "--epochs", "30"]
        mpu("run", root / "base", *records(root, "a"), *for_run(training), *options, "--secret-seed", 3, "--rounds", 2,
            "--out", root / "run")  # fmt: skip
        expected = tensors(root / "run/server/round_2/model")
        with network(root / "net", "a") as net:
            watcher(net, root, "a", *training)
            run = net.submit(
                BUNDLE, base=str(root / "base"), state=str(root / "state"), owners="a", rounds=2,
                publish=" ".join([*options, "--seed 3"]), **CONFIG,
            )  # fmt: skip
            # Killed while training: the node at once refuses to start again, so a supervisor would try in a loop.
            wait_for(lambda: list(net.folder.glob("work-a/deltas/*/round_1/*.resume/checkpoint-*")))
            net.stop("a")
            net.stop("watch-a")
            watcher(net, root, "a", *training)
            wait_for(lambda: net.start_node("a").poll() is None and not dies(net, "a"))
            wait_for(lambda: (root / "state/round_2/a/keys.bin").exists())
            net.stop("link")
            net.start_link()
            status, log = net.finish(run)
            assert status == "finished:completed", log + (net.folder / "superexec.log").read_text()[-3000:]
            assert "resuming after step" in (net.folder / "watch-a.log").read_text()
        actual = tensors(root / "state/round_2/model")
        assert all(torch.equal(tensor, expected[name]) for name, tensor in actual.items())
        assert not list((net.folder / "spool-a").rglob("*.safetensors"))  # what is over is removed

    def test_several_owners_a_bad_delta_and_strangers(self, mpu: Callable, root: Path) -> None:
        """Two owners' updates are added; a damaged delta is asked for again; what crossed the wire is read."""
        (root / "recorder").mkdir()
        (root / "recorder/recorded.py").write_text(RECORDER)
        bundle = root / "bundle"
        shutil.copytree(BUNDLE, bundle)
        project = (bundle / "pyproject.toml").read_text()
        (bundle / "pyproject.toml").write_text(project.replace("mpu_cli.flower.server_app:app", "recorded:app"))
        with network(root / "net", "a", "b", extra_path=root / "recorder") as net:
            for owner in "ab":
                watcher(net, root, owner, *TRAINING)
            assert dies(net, "stranger", net.start_node("stranger"))  # its key is not registered
            subprocess.run(["bash", BUNDLE / "certificates.sh", root / "other", "localhost"], check=True)
            assert dies(net, "stranger", net.start_node("stranger", ca=root / "other/ca.pem", key=net.tls / "stranger"))
            assert "CERTIFICATE_VERIFY_FAILED" in (net.folder / "stranger.log").read_text()
            run = net.submit(
                bundle, base=str(root / "base"), state=str(root / "state"), owners="a,b", rounds=1,
                publish="--copies 2 --kappa 0.05", **CONFIG,
            )  # fmt: skip
            status, log = net.finish(run)
            assert status == "finished:completed", log
            assert "it is asked for again" in log
            peaks = net.peaks()
        assert max(peaks[name] for name in ("link", "a", "b")) < 512
        opened = ("--identity", root / "state/identity.txt")
        for owner in "ab":
            folder, keys = root / "hand" / owner, root / f"state/round_1/{owner}/keys.bin"
            mpu("publish", root / "base", "--copies", 2, "--kappa", 0.05, "--only", "1,2", "--keys", keys, *opened,
                "--out", folder)  # fmt: skip
            for k in (1, 2):
                mpu("unlearn", folder / f"copy_{k}", *records(root, owner), *TRAINING, "--out",
                    folder / f"deltas/copy_{k}.safetensors")  # fmt: skip
        keys = [part for owner in "ab" for part in ("--keys", root / f"state/round_1/{owner}/keys.bin")]
        mpu("aggregate", *(root / f"hand/{owner}/deltas" for owner in "ab"), *keys, *opened, "--out",
            root / "hand/model")  # fmt: skip
        expected = tensors(root / "hand/model")
        actual = tensors(root / "state/round_1/model")
        assert all(torch.equal(tensor, expected[name]) for name, tensor in actual.items())

        wire = {path.name: path.read_bytes() for path in (root / "state/wire").iterdir()}
        everything = b"".join(wire.values())
        for owner in "ab":
            for name in ("forget", "retain"):
                for line in (root / owner / f"{name}.jsonl").read_text().splitlines():
                    for text in json.loads(line).values():
                        assert text.encode() not in everything
            for k in (1, 2):
                copy = open_checkpoint(root / f"hand/{owner}/copy_{k}")
                assert all(bytes(copy.raw(name)) in everything for name in copy.tensors)
        base = open_checkpoint(root / "base")
        assert not any(bytes(base.raw(name)) in everything for name in base.tensors)
        for path in ("identity.txt", "round_1/a/keys.bin", "round_1/b/keys.bin"):
            assert (root / "state" / path).read_bytes() not in everything

    @pytest.mark.exhaustive
    def test_a_second_failure_is_reported_and_nothing_is_aggregated(self, root: Path) -> None:
        """An owner whose records cannot be used: its copies are tried twice, and no model is made."""
        with network(root / "net", "a") as net:
            watcher(net, root, "a", "--algo", "npo", "--reading", "template=chat,max_length=2")
            run = net.submit(
                BUNDLE, base=str(root / "base"), state=str(root / "state"), owners="a", rounds=1,
                publish="--copies 2", **CONFIG,
            )  # fmt: skip
            status, log = net.finish(run)
            assert status == "finished:failed"
            assert log.count("it is asked for again") >= 1
            assert "could not unlearn on it" in log
        assert not (root / "state/round_1/model").exists()


def dies(net: Network, name: str, process: subprocess.Popen | None = None) -> bool:
    """Whether a node gives up: one that was started now within a minute, another within some seconds."""
    try:
        (process or net.processes[name]).wait(60 if process else 12)
    except subprocess.TimeoutExpired:
        return False
    return True


RECORDER = '''
"""The server's Flower app, with everything that it sends and receives written to STATE/wire, and one delta damaged."""

import itertools
from pathlib import Path

from flwr.serverapp import ServerApp

from mpu_cli.flower.server_app import play, settings_of

app = ServerApp()


class Recorded:
    def __init__(self, grid, folder):
        self.grid, self.folder, self.numbers, self.damaged = grid, folder, itertools.count(), False
        folder.mkdir(parents=True)

    def __getattr__(self, name):
        return getattr(self.grid, name)

    def keep(self, content):
        for record in content.array_records.values():
            for array in record.values():
                (self.folder / f"{next(self.numbers)}.bytes").write_bytes(array.data)
        for record in content.config_records.values():
            (self.folder / f"{next(self.numbers)}.values").write_text(repr(dict(record)))

    def push_messages(self, messages):
        messages = list(messages)
        for message in messages:
            self.keep(message.content)
        return self.grid.push_messages(messages)

    def pull_messages(self, ids):
        for message in self.grid.pull_messages(ids):
            if not message.has_error():
                self.keep(message.content)
                for record in message.content.array_records.values():
                    if not self.damaged and "0" in record:  # the first piece of the first delta
                        self.damaged = True
                        array = record["0"]
                        array.data = b"\\0" * len(array.data)
            yield message


@app.main()
def main(grid, context):
    settings = settings_of(dict(context.run_config))
    play(Recorded(grid, settings.state / "wire"), settings)
'''


def settings(root: Path, owners: str, **more: object) -> dict:
    """The configuration of a run."""
    return {
        "base": str(root / "base"), "state": str(root / "state"), "owners": owners, "rounds": 1, "publish": "",
        "aggregate": "", "poll": 0.01, "patience": 9, "limit": 99, "on_missing": "end", "quorum": 1, **more,
    }  # fmt: skip


class TestAnswersOfACourier:
    """Whatever a Flower app answers: its owner is given up, nothing is written elsewhere, other owners go on."""

    DELTA: ClassVar[dict] = {"state": "done", "names": ["copy_1.safetensors"], "sizes": [1], "digests": ["x"]}
    HOSTILE: ClassVar[dict[str, dict[str, dict]]] = {
        "a state that is none": {"state": {"state": "x" * 999}},
        "a state that is a number": {"state": {"state": 7}},
        "no state": {"state": {}},
        "names without digests": {"state": DELTA | {"digests": []}},
        "digests that are numbers": {"state": DELTA | {"digests": [1]}},
        "names that are numbers": {"state": DELTA | {"names": [1]}},
        "no names": {"state": {"state": "done"}},
        "sizes that are words": {"state": DELTA | {"sizes": ["1"]}},
        "a size below zero": {"state": DELTA | {"sizes": [-5]}},
        "an empty file": {"state": DELTA | {"sizes": [0]}},
        "more than any delta has": {"state": DELTA | {"sizes": [1 << 50]}},
        "more than it declared": {"state": DELTA, "get": {"pieces": [b"12"]}},
        "another number of pieces": {"state": DELTA, "get": {"pieces": [b"1", b"1"]}},
        "no piece": {"state": DELTA, "get": {"pieces": []}},
        "a name that leads elsewhere": {"state": DELTA | {"names": ["../x"]}},
        "a name inside one that leads elsewhere": {"state": DELTA | {"names": ["copy_1.safetensors/../../x"]}},
        "another file beside": {
            "state": DELTA | {"names": ["copy_1.safetensors/x"]},
        },
        "a file and a folder of one name": {
            "state": DELTA | {
                "names": ["copy_1.safetensors", "copy_1.safetensors/mpu.json"], "sizes": [1, 1], "digests": ["x", "x"],
            }
        },
        "too many files": {
            "state": DELTA | {
                "names": [f"copy_1.safetensors/model-{i:05}-of-02000.safetensors" for i in range(2000)],
                "sizes": [1] * 2000, "digests": ["x"] * 2000,
            }
        },
        "held sizes that are words": {
            "state": {"state": "arriving", "names": ["config.json"], "sizes": ["1"]},
        },
        "keeps nothing": {
            "state": {"state": "arriving", "names": [], "sizes": []},
            "put": {"state": "arriving", "names": [], "sizes": []},
        },
        "always damaged": {"state": {"state": "arriving", "names": [], "sizes": []}, "put": {"keeps": "all"}},
    }  # fmt: skip

    @pytest.mark.parametrize("attack", HOSTILE)
    def test_are_one_owners_failure(self, mpu: Callable, root: Path, attack: str) -> None:
        pytest.importorskip("flwr")
        from mpu_cli.flower.exchange import Exchange, Reply, Request
        from mpu_cli.flower.server_app import Round, settings_of

        state = root / "state"
        (state / "round_1/a").mkdir(parents=True)
        mpu("keygen", "--out", state / "identity.txt")
        mpu("publish", root / "base", "--copies", 2, "--run", "r", "--identity", state / "identity.txt", "--out",
            state / "round_1/a/copies", "--keys", state / "round_1/a/keys.bin")  # fmt: skip
        (state / "round_1/a/run").write_text("r\n")
        said: list[str] = []
        exchange = Exchange(None, 9, 99, said.append)  # nothing is sent: answers are given here
        game = Round(settings_of(settings(root, "a")), exchange, 1, root / "base")
        copy = game.copies("a")[0]
        file_sizes = {path.name: path.stat().st_size for path in copy.iterdir()}
        keeps_all = {"state": "arriving", "names": list(file_sizes), "sizes": list(file_sizes.values())}
        answers = {"state": self.DELTA, "put": {}, "get": {"pieces": [b"1"]}, "again": {}} | self.HOSTILE[attack]
        before = {path for path in root.rglob("*") if "arriving" not in path.parts and "rejected" not in path.parts}
        job = game._deliver("a", copy)
        exchange._advance(0, job, "a", None)
        for _ in range(40):
            if 0 not in exchange._running:
                break
            request: Request = exchange._running[0].request
            values = {**answers[request.kind]}
            data = values.pop("pieces", [])
            values = keeps_all if values == {"keeps": "all"} else values
            exchange._advance(0, job, "a", Reply(values, data))
        [(owner, failure)] = exchange._failures
        assert owner == "a"
        assert not game.delta("a", copy).exists()
        assert "\n" not in failure.problem
        assert str(root) not in failure.problem or "rejected" in failure.problem
        after = {path for path in root.rglob("*") if "arriving" not in path.parts and "rejected" not in path.parts}
        assert {path for path in after - before if path.name not in ("arriving", "rejected")} == set()

    @pytest.mark.parametrize("what", ["sending", "fetching"])
    def test_an_owner_that_answers_slowly_is_given_up(
        self, mpu: Callable, root: Path, monkeypatch: pytest.MonkeyPatch, what: str
    ) -> None:
        """An owner that keeps a byte of what it is sent, or sends a piece, just within each request's limit ends its
        part of the round after a few limits, and not after as many as its copy has bytes."""
        pytest.importorskip("flwr")
        from mpu_cli.flower import server_app
        from mpu_cli.flower.exchange import Reply
        from mpu_cli.flower.server_app import settings_of

        state, limit = root / "state", 100.0
        (state / "round_1/a").mkdir(parents=True)
        mpu("keygen", "--out", state / "identity.txt")
        mpu("publish", root / "base", "--copies", 2, "--run", "r", "--identity", state / "identity.txt", "--out",
            state / "round_1/a/copies", "--keys", state / "round_1/a/keys.bin")  # fmt: skip
        (state / "round_1/a/run").write_text("r\n")
        monkeypatch.setattr(server_app, "PIECE", 1000)
        clock = [0.0]
        monkeypatch.setattr(server_app.time, "monotonic", lambda: clock[0])
        game = server_app.Round(settings_of(settings(root, "a", limit=limit)), None, 1, root / "base")
        job = game._deliver("a", game.copies("a")[0])

        def play() -> None:
            request, answers = next(job), 0
            while clock[0] < 10 * limit:
                clock[0] += 0.9 * limit
                answers += 1
                if what == "sending":
                    reply = Reply({"state": "arriving", "names": ["model.safetensors"], "sizes": [answers]}, [])
                elif request.kind == "get":
                    reply = Reply({}, [bytes(count) for count in request.values["counts"]])
                else:
                    declared = {"names": ["copy_1.safetensors"], "sizes": [50_000], "digests": ["0"]}
                    reply = Reply({"state": "done", **declared}, [])
                request = job.send(reply)

        with pytest.raises(MpuError, match="not sent, unlearned and returned"):
            play()
        assert clock[0] <= (server_app.PARTS + 1) * limit


class InProcess:
    """Flower apps without a network between them: what the server pushes is handled at once, by the client's own code.

    ``lost``: how many of the first replies come only after the request was sent again. ``broken``: owners whose
    Flower app cannot reach its spool.
    """

    def __init__(self, spools: dict[str, Path], lost: int = 0):
        from flwr.app import Context, RecordDict
        from flwr.supercore.task_identity import TaskIdentity

        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as a ServerApp's process has
        self.owners, self.lost, self.broken = list(spools), lost, set()
        self.contexts = [
            Context(0, i, {"spool": str(path)}, RecordDict(), {}) for i, path in enumerate(spools.values())
        ]
        self.replies: dict[str, object] = {}
        self.request_kinds: list[str] = []

    def get_node_ids(self) -> list[int]:
        return list(range(len(self.owners)))

    def get_nodes(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(node_id=i, name=owner) for i, owner in enumerate(self.owners)]

    def push_messages(self, messages: list) -> list[str]:
        from flwr.app import Error, Message

        from mpu_cli.flower.client_app import _handle

        sent = []
        for message in messages:
            number = f"{len(self.request_kinds)}"
            message.metadata.__dict__["_message_id"] = number  # as the SuperLink sets it
            node = message.metadata.dst_node_id
            self.request_kinds.append(message.content.config_records["about"]["kind"])
            try:
                if self.owners[node] in self.broken:
                    raise RuntimeError("broken")
                reply = _handle(message, self.contexts[node])
            except RuntimeError as error:
                reply = Message(Error(2, str(error)), reply_to=message)
            self.replies[number] = reply
            sent.append(number)
        return sent

    def pull_messages(self, ids: list[str]) -> list:
        ready = [number for number in ids if number in self.replies and not self._late(number)]
        return [self.replies.pop(number) for number in ready]

    def _late(self, number: str) -> bool:
        return int(number) < self.lost and len(self.request_kinds) <= int(number) + self.lost


@pytest.fixture
def play(root: Path, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Plays a run with owners whose watch is ``mpu watch``, in this process; returns what was said."""
    pytest.importorskip("flwr")
    from mpu_cli.flower import exchange, server_app

    monkeypatch.setattr(exchange, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(exchange, "POLL_SECONDS", 0.01)

    def play(grid: InProcess, working: str, **config: object) -> list[str]:
        said: list[str] = []
        monkeypatch.setattr(server_app, "say", said.append)
        watches = [
            subprocess.Popen(
                [sys.executable, "-m", "mpu_cli", "watch", root / f"spool-{owner}", *map(str, records(root, owner)),
                 *TRAINING, "--work", root / f"work-{owner}", "--poll", "0.2", "--device", "cpu"],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
            for owner in working
        ]  # fmt: skip
        mask = os.umask(0o022)
        try:
            server_app.play(grid, server_app.settings_of(settings(root, ",".join(grid.owners), **config)))
        finally:
            os.umask(mask)
            for watch in watches:
                watch.terminate()
                watch.wait()
        return said

    return play


def spools(root: Path, owners: str) -> dict[str, Path]:
    return {owner: root / f"spool-{owner}" for owner in owners}


@pytest.mark.slow
@pytest.mark.flower
def test_an_owner_that_is_left_out_can_come_later(mpu: Callable, root: Path, play: Callable) -> None:
    """The round goes on with the others, says so, and is made anew with all; files are nobody else's."""
    publish = "--copies 2 --kappa 0.05"
    grid = InProcess(spools(root, "ab"))
    grid.broken = {"b"}
    with pytest.raises(MpuError, match="b: its Flower app cannot answer"):
        play(grid, "a", publish=publish)
    assert not (root / "state/round_1/model").exists()
    with pytest.raises(MpuError, match="b: its Flower app cannot answer"):
        play(grid, "a", publish=publish, on_missing="leave-out", quorum=2)
    said = play(grid, "a", publish=publish, on_missing="leave-out")
    assert "b was left out" in said[-1]
    model = root / "state/round_1/model"
    assert "Left out of round 1: b." in (model / "README.md").read_text()
    without = tensors(model)
    grid.broken = set()
    said = play(grid, "b", publish=publish, on_missing="leave-out")
    assert "deltas of b came after all" in " ".join(said)
    assert "left out" not in said[-1]
    assert not any("Left out" in card.read_text() for card in model.glob("README.md"))
    keys = [part for owner in "ab" for part in ("--keys", root / f"state/round_1/{owner}/keys.bin")]
    mpu("aggregate", *(root / f"state/round_1/{owner}/deltas" for owner in "ab"), *keys, "--identity",
        root / "state/identity.txt", "--base", root / "base", "--out", root / "by-hand")  # fmt: skip
    expected, actual = tensors(root / "by-hand"), tensors(model)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in actual.items())
    assert any(not torch.equal(tensor, without[name]) for name, tensor in actual.items())
    for path in (root / "state").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
    assert not list(root.glob("spool-*/in/*/*/copy_*"))


@pytest.mark.parametrize("on_missing", ["leave-out", "end"])
def test_an_owner_whose_deltas_are_refused_alone(root: Path, on_missing: str) -> None:
    """Such as by ``--max-norm``, which is checked when all deltas are there: the round goes on without that owner."""
    pytest.importorskip("flwr")
    from mpu_cli.flower.server_app import Round, mpu, settings_of

    config = {
        "publish": "--copies 2 --kappa 0.01",
        "aggregate": "--max-norm 100 --trust-deltas",
        "on_missing": on_missing,
    }
    current = Round(settings_of(settings(root, "a,b,c", **config)), None, 1, root / "base")
    (root / "state").mkdir()
    mpu("keygen", "--out", current.identity)
    for owner, scale in (("a", 1e-3), ("b", 10.0), ("c", 1e-3)):
        current._publish(owner)
        for copy in current.copies(owner):
            change = dict.fromkeys(tensors(copy), scale)
            write_delta(copy, current.delta(owner, copy), seed=1,
                        change=lambda delta, change=change: {n: change[n] * x for n, x in delta.items()})  # fmt: skip
    if on_missing == "end":
        with pytest.raises(MpuError, match="max-norm"):
            current._aggregate(["a", "b", "c"], {})
        assert not current.model.exists()
        return
    current._aggregate(["a", "b", "c"], {})
    assert list(current.left_out) == ["b"]
    assert "max-norm" in current.left_out["b"]
    warnings = (current.folder / "warnings.txt").read_text()
    assert "b was left out" in warnings
    current._combine(["a", "c"], root / "without")
    expected, actual = tensors(root / "without"), tensors(current.model)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in actual)
    assert not list(current.folder.glob("*.partial"))


@pytest.mark.slow
@pytest.mark.flower
def test_what_aggregation_warns_of_is_told(root: Path, play: Callable) -> None:
    """In the log, in the state, and in the run's last line; and replies that come late are used or taken away."""
    grid = InProcess(spools(root, "a"), lost=3)
    said = play(grid, "a", publish="--copies 2 --kappa 0.05", aggregate="--step 1e-9", patience=0.2)
    assert (root / "state/round_1/warnings.txt").read_text().strip()
    warning = (root / "state/round_1/warnings.txt").read_text().splitlines()[0]
    assert f"warning: {warning}" in said
    assert warning in said[-1]
    assert any("is sent again" in line for line in said)
    assert not grid.replies


@pytest.mark.flower
def test_a_copy_that_nobody_works_on_is_given_up(root: Path, play: Callable) -> None:
    """``limit`` seconds after it arrived, however often its Flower app answers meanwhile."""
    (root / "spool-a").mkdir(exist_ok=True)
    Spool(root / "spool-a").prepare()
    with pytest.raises(MpuError, match="not unlearned within 2 s"):
        play(InProcess(spools(root, "a")), "", publish="--copies 2 --kappa 0.05", limit=2, poll=0.1)


def test_a_state_has_one_run(root: Path, play: Callable) -> None:
    (root / "state").mkdir()
    with alone_in(root / "state", "flower", "state"), pytest.raises(MpuError, match="in use by another"):
        play(InProcess(spools(root, "a")), "")


@pytest.mark.parametrize("other", ["copy_2", "round_2/copy_1"])
def test_a_delta_of_another_copy_is_not_taken(mpu: Callable, root: Path, other: str) -> None:
    pytest.importorskip("flwr")
    from mpu_cli.flower.exchange import Exchange
    from mpu_cli.flower.server_app import Round, settings_of

    owner = root / "state/round_1/a"
    owner.mkdir(parents=True)
    identity = root / "state/identity.txt"
    mpu("keygen", "--out", identity)
    for number, out in ((1, owner), (2, root / "second")):
        mpu("publish", root / "base", "--copies", 2, "--run", f"r:{number}", "--identity", identity, "--out",
            out / "copies", "--keys", out / "keys.bin")  # fmt: skip
    (owner / "run").write_text("r\n")
    source = owner / "copies/copy_2" if other == "copy_2" else root / "second/copies/copy_1"
    delta = owner / "arriving/copy_1/copy_1.safetensors"
    mpu("unlearn", source, *records(root, "a"), *TRAINING, "--out", delta)
    game = Round(settings_of(settings(root, "a")), Exchange(None, 9, 99, print), 1, root / "base")
    assert game._complaint("a", "r/round_1/copy_1", delta) == "is the delta of another copy"
    mpu("unlearn", owner / "copies/copy_1", *records(root, "a"), *TRAINING, "--out", delta, "--force")
    assert game._complaint("a", "r/round_1/copy_1", delta) == ""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another group")
def test_a_spool_is_for_a_group_at_any_umask(mpu: Callable, root: Path) -> None:
    """What watch makes, and what either side makes inside; a spool that others cannot write to is refused."""
    group = next(each for each in grp.getgrall() if each.gr_gid != os.getgid())
    watch = ["watch", root / "spool", *records(root, "a"), "--work", root / "work", "--once", "--spool-group"]
    for mask in (0o022, 0o077):
        before = os.umask(mask)
        try:
            mpu(*watch, group.gr_name)
            Spool(root / "spool").put(COPY, "config.json", 0, b"{}")
            for path in (root / "spool", *(root / "spool").rglob("*")):
                assert path.stat().st_gid == group.gr_gid, path
                assert path.stat().st_mode & 0o070 == (0o070 if path.is_dir() else 0o060), path
                assert path.stat().st_mode & 0o007 == 0, path
        finally:
            os.umask(before)
            shutil.rmtree(root / "spool", ignore_errors=True)
    (root / "spool").mkdir(mode=0o755)
    outcome = mpu(*watch, group.gr_name, check=False)
    assert outcome.is_one_error
    assert "cannot write everything that is made there" in outcome.err
    assert f"chgrp {group.gr_name}" in outcome.err
    assert "no such group here" in mpu(*watch, "nobody-has-this-group", check=False).err


@pytest.mark.slow
@pytest.mark.flower
def test_the_page_as_it_stands(root: Path) -> None:
    """docs/two_organisations.md on one machine, by its script: the model is that of aggregate by hand."""
    pytest.importorskip("flwr")
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # of the environment that runs the tests
    result = subprocess.run(
        ["bash", BUNDLE / "rehearse.sh", root / "base", root / "a/forget.jsonl", root / "a/retain.jsonl", "played"],
        cwd=root, capture_output=True, text=True, check=False,
        env={**os.environ, "PATH": programs, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert "byte for byte" in result.stdout
    assert (root / "played/server/state.db").stat().st_mode & 0o077 == 0
