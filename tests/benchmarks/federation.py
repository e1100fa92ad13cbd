"""Two rounds of NPO over Flower on the loopback: the model, memory of each process, bytes on the wire.

    python -m tests.benchmarks.federation DIR MODEL FORGET RETAIN      with flwr installed: pip install '.[flower]'
    python -m tests.benchmarks.federation DIR 0.5b                     only sends two copies of a model of that shape

Compares the model with that of ``mpu run`` with the same seeds. Bytes are what the loopback interface counted, where
each piece passes three times (ServerApp, SuperLink, SuperNode, ClientApp), questions and TLS included.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from pathlib import Path

from safetensors.torch import load_file

from tests.helpers.federation import BUNDLE, network, wait_for
from tests.helpers.shapes import make
from tests.helpers.trainings import for_run

TRAINING = [
    "--algo",
    "npo",
    "--lr",
    "1e-4",
    "--epochs",
    "1",
    "--batch-size",
    "8",
    "--optim",
    "adamw-blockwise",
    "--device",
    "cpu",
]


def mpu(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "mpu_cli", *map(str, arguments)]


def on_the_wire() -> int:
    """Bytes that the loopback interface has received."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


class Peaks(threading.Thread):
    """Peak resident memory, in MB, of each of Flower's programs, the short-lived ones too."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.by_program: dict[str, float] = {}

    def run(self) -> None:
        while True:
            for folder in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError, IndexError):
                    command = (folder / "cmdline").read_bytes().split(b"\0")
                    program = Path(command[1].decode()).name
                    if program.startswith(("flower-", "flwr-")):
                        lines = (folder / "status").read_text().splitlines()
                        peak = next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))
                        self.by_program[program] = max(peak, self.by_program.get(program, 0))
            time.sleep(0.2)


def sizes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def tell(peaks: Peaks) -> None:
    for name, peak in sorted(peaks.by_program.items()):
        print(f"{name:<18} {peak:6.0f} MB")


def send(folder: Path, shape: str) -> None:
    """Two copies of a model of ``shape`` to a node."""
    base = make(shape, folder / "base")
    peaks = Peaks()
    peaks.start()
    with network(folder / "net", "a") as net:
        config = {"base": str(base), "state": str(folder / "state"), "owners": "a", "publish": "--copies 2"}
        net.submit(BUNDLE, **config)
        wait_for((folder / "state/round_1/a/keys.bin").exists)
        began, before = time.monotonic(), on_the_wire()
        wait_for(lambda: len(list((net.folder / "spool-a/in").glob("*/round_1/copy_*"))) == 2, 1200)
        seconds, sent = time.monotonic() - began, sizes(net.folder / "spool-a/in")
        print(f"{sent:,} bytes in {seconds:.0f} s, {sent / seconds / 1e6:.1f} MB/s; {on_the_wire() - before:,} counted")
        tell(peaks)


def main(folder: Path, model: Path, forget: Path, retain: Path) -> None:
    records = ["--forget", forget, "--retain", retain]
    noise = ["--copies", "2", "--kappa", "0.01"]
    began = time.monotonic()
    run = mpu(
        "run",
        model,
        *records,
        *for_run(TRAINING),
        *noise,
        "--rounds",
        2,
        "--secret-seed",
        3,
        "--out",
        folder / "run",
        "--keep",
    )
    subprocess.run(run, check=True)
    print(f"mpu run: {time.monotonic() - began:.0f} s")
    files = sum(sizes(folder / f"run/client/round_{r}/copy_{k}") for r in (1, 2) for k in (1, 2))
    files += sum(sizes(folder / f"run/server/round_{r}/deltas") for r in (1, 2))
    peaks = Peaks()
    peaks.start()
    with network(folder / "net", "a") as net:
        watch = mpu("watch", net.folder / "spool-a", *records, *TRAINING, "--work", net.folder / "work", "--poll", 0.5)
        net.start("watch", *watch)
        began, before = time.monotonic(), on_the_wire()
        number = net.submit(
            BUNDLE, base=str(model), state=str(folder / "state"), owners="a", rounds=2, poll=2.0,
            publish=" ".join([*noise, "--seed 3"]),
        )  # fmt: skip
        status, log = net.finish(number)
        print(f"{status}, {time.monotonic() - began:.0f} s")
        print(f"{on_the_wire() - before:,} bytes on the loopback; copies and deltas together {files:,}")
        tell(peaks)
        print(log if status != "finished:completed" else "")
    ours, theirs = (load_file(f / "round_2/model/model.safetensors") for f in (folder / "state", folder / "run/server"))
    print("bit for bit the model of mpu run:", all(bool((ours[n] == theirs[n]).all()) for n in theirs))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        send(Path(sys.argv[1]).resolve(), sys.argv[2])
    else:
        main(*(Path(argument).resolve() for argument in sys.argv[1:5]))
