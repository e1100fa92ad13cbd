"""A real Flower network on the loopback, over TLS, set up as docs/two_organisations.md says."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.helpers.paths import ROOT

BUNDLE = ROOT / "examples/flower"
PROGRAMS = Path(sys.executable).parent
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "1000000",
    "MALLOC_TRIM_THRESHOLD_": "1000000", "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "PYTHONUNBUFFERED": "1",
}  # fmt: skip
PATIENCE = 240  # seconds that anything may take here


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_for(what: Callable[[], object], seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, f"waited {seconds} s in vain"
        time.sleep(0.3)


@dataclass
class Network:
    """Processes of both organisations in ``folder``, with a log each."""

    folder: Path
    extra_path: Path | None = None  # modules that a test's own bundle names
    processes: dict[str, subprocess.Popen] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)

    @property
    def tls(self) -> Path:
        return self.folder / "tls"

    def environment(self, home: str) -> dict[str, str]:
        path = f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}"
        modules = os.pathsep.join(filter(None, [str(self.extra_path or ""), os.environ.get("PYTHONPATH", "")]))
        return {
            **os.environ,
            **QUIET,
            "PATH": path,
            "PYTHONPATH": modules,
            "FLWR_HOME": str(self.folder / "homes" / home),
        }

    def start(self, name: str, *command: object, home: str | None = None) -> subprocess.Popen:
        with (self.folder / f"{name}.log").open("a") as log:
            self.processes[name] = subprocess.Popen(
                [str(part) for part in command], stdout=log, stderr=log, cwd=self.folder,
                env=self.environment(home or name), start_new_session=True,
            )  # fmt: skip
        return self.processes[name]

    def stop(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """Signal a process and all that it started."""
        process = self.processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        process.wait(PATIENCE)

    def flwr(self, *arguments: object, check: bool = True) -> str:
        done = subprocess.run(
            [str(PROGRAMS / "flwr"), *map(str, arguments)], env=self.environment("cli"), capture_output=True, text=True,
            check=False, cwd=self.folder,
        )  # fmt: skip
        assert done.returncode == 0 or not check, done.stdout + done.stderr
        return done.stdout

    def begin(self, *owners: str) -> None:
        """Everything up to online nodes."""
        subprocess.run(["bash", BUNDLE / "certificates.sh", self.tls, "localhost", *owners, "stranger"], check=True)
        names = ["link", *owners, "stranger"]
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))
        home = self.folder / "homes/cli"
        home.mkdir(parents=True)
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{self.ports["link"]}"\n'
            f'root-certificates = "{self.tls / "ca.pem"}"\n'
        )
        self.start_link()
        for owner in owners:
            self.flwr("supernode", "register", self.tls / f"{owner}.pub", "here", "--name", owner)
            self.start_node(owner)
        wait_for(lambda: self.flwr("supernode", "ls", "here", "--format", "json").count('"online"') == len(owners))

    def start_link(self) -> None:
        address = f"127.0.0.1:{self.ports['link']}"
        secret = ("--superexec-auth-secret-file", self.tls / "superexec.secret")
        self.start(
            "link", "flower-superlink", "--host", "127.0.0.1", "--port", self.ports["link"], "--database", "state.db",
            "--ssl-certfile", self.tls / "server.pem", "--ssl-keyfile", self.tls / "server.key",
            "--ssl-ca-certfile", self.tls / "ca.pem", "--enable-supernode-auth", "--isolation", "process", *secret,
            "--disable-runtime-dependency-installation",
        )  # fmt: skip

        wait_for(lambda: is_listening(self.ports["link"]))
        if "superexec" not in self.processes:
            self.start(
                "superexec", "flower-superexec", "--runtime-api-address", address,
                "--root-certificates", self.tls / "ca.pem", *secret, home="link",
            )  # fmt: skip

    def start_node(self, owner: str, ca: Path | None = None, key: Path | None = None) -> subprocess.Popen:
        spool = self.folder / f"spool-{owner}"
        spool.mkdir(exist_ok=True)
        return self.start(
            owner, "flower-supernode", "--superlink", f"127.0.0.1:{self.ports['link']}",
            "--root-certificates", ca or self.tls / "ca.pem", "--auth-supernode-private-key", key or self.tls / owner,
            "--node-config", f'spool="{spool}"', "--host", "127.0.0.1", "--port", self.ports[owner],
        )  # fmt: skip

    def submit(self, bundle: Path, **config: str | int | float) -> str:
        """Start a run; its id."""
        pairs = " ".join(f"{name}={json.dumps(value)}" for name, value in config.items())
        report = json.loads(self.flwr("run", bundle, "here", "--format", "json", "--run-config", pairs))
        assert report.get("success", True), report
        return str(report["run-id"])

    def status(self, run: str) -> str:
        return json.loads(self.flwr("ls", "here", "--run-id", run, "--format", "json"))["runs"][0]["status"]

    def finish(self, run: str) -> tuple[str, str]:
        """Wait for a run; its status and log."""
        wait_for(lambda: self.status(run).startswith("finished"), 2 * PATIENCE)
        return self.status(run), self.flwr("log", run, "here", check=False)

    def peaks(self) -> dict[str, float]:
        """Peak resident memory of each process that runs, in MB."""
        peak_memory = {}
        for name, process in self.processes.items():
            if process.poll() is not None:
                continue
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            peak_memory[name] = next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))
        return peak_memory

    def end(self) -> None:
        for name in list(self.processes):
            self.stop(name, signal.SIGTERM if name == "link" else signal.SIGKILL)


@contextlib.contextmanager
def network(folder: Path, *owners: str, extra_path: Path | None = None) -> Iterator[Network]:
    folder.mkdir(parents=True, exist_ok=True)
    net = Network(folder, extra_path)
    try:
        net.begin(*owners)
        yield net
    finally:
        net.end()
        shutil.rmtree(folder / "homes", ignore_errors=True)
