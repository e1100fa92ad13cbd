"""Memory of the two processes of a sharded training when the first step begins: what loading costs the host.

    python -m tests.benchmarks.sharded 0.5b DIR

gloo on a CPU, which accelerate is made to treat as NCCL on GPUs (tests/training/test_training.py). Prints each
process's anonymous resident memory before its weights are distributed, and ends there: on a CPU, what training then
takes on the device is in the same memory.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from tests.helpers.models import save_tokenizer, write_records
from tests.helpers.shapes import make
from tests.training.test_training import FSDP, SHARDED

STOP = """
def stop(*arguments, **options):
    [memory] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("RssAnon")]
    print(f"process {PartialState().process_index}: {int(memory) / 1024:,.0f} MB", flush=True)
    PartialState().wait_for_everyone()
    os._exit(0)

unlearn.train = stop
"""


def main(shape: str, folder: Path) -> None:
    base = save_tokenizer(make(shape, folder / "base"))
    for name, count, seed in (("forget", 4, 1), ("retain", 4, 2)):
        write_records(folder / f"{name}.jsonl", count, seed)
    begin, patches, end = SHARDED.partition("sys.argv[1:]")
    (folder / "sharded.py").write_text(begin + STOP + patches + end)
    arguments = [
        "unlearn", base, "--forget", folder / "forget.jsonl", "--retain", folder / "retain.jsonl",
        "--reading", "template=plain", "--batch-size", 2, "--device", "cpu", "--out", folder / "delta.safetensors",
    ]  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "sharded.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **FSDP, "FSDP_VERSION": "2"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    environment["ARGUMENTS"] = shlex.join(map(str, arguments))
    subprocess.run(command, cwd=folder, env=environment, check=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).resolve())
