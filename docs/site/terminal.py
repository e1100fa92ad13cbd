"""Draw docs/terminal.svg, README's four steps as they look in a terminal, from a real run:

    python docs/site/terminal.py DIR            # DIR holds the mpu-demo/ that `mpu demo` left
    python docs/site/terminal.py DIR --check    # compares with the picture instead, up to numbers and keys

The picture's description is its text, so that programs that read pages aloud can read it, too.
"""

from __future__ import annotations

import html
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "docs/terminal.svg"
COLUMNS = 112
FIRST_USE = "mpu publish mpu-demo/models/target --out first --keys first.bin --quiet"  # makes identity and secret
SEPARATOR = "\x1e"
COLOURS = {"server": "bold bright_yellow", "client": "bold bright_green"}
_FONT_FROM_ELSEWHERE = re.compile(r"@font-face \{\{.*?\}\}", re.DOTALL)
_PROGRESS = re.compile(r"(\w+ copy_\d+|score [a-z ]+|loading|measure [a-z ]+): \d+%.*")  # bars on a terminal
_VARIES = re.compile(r"[0-9a-z]{30,}|-?\d[\d.,]*(e-?\d+)?")
_OF_SOME_RUNS = re.compile(
    r"warning: the copies (?:disagree|diverged) .*?(?=Deltas of this round)"
    r"|,? which restores what the average lost of each copy's change"
)
_DESCRIPTION = re.compile(r"<desc>(.*?)</desc>", re.DOTALL)


def read_steps(readme: str) -> Iterator[tuple[str, str]]:
    """Each command of README's section "The four steps", after the party that runs it."""
    [block] = re.findall(r"^## The four steps\n.*?```sh\n(.*?)```", readme, re.DOTALL | re.MULTILINE)
    party = "server"
    for line in block.replace("\\\n", " ").splitlines():
        if comment := re.match(r"# \d\. (\w+):", line):
            party = comment[1].lower()
        elif command := " ".join(line.partition("  #")[0].split()):
            yield party, command


def run_steps(demo: Path) -> list[tuple[str, str, list[str]]]:
    """Party, command and the lines that the command prints, in one shell, in a folder with the demo's files alone."""
    steps = list(read_steps((ROOT / "README.md").read_text(encoding="utf-8")))
    script = "\n".join([FIRST_USE, *(f"echo '{SEPARATOR}'\n{command}" for _, command in steps)])
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(demo, Path(folder) / "mpu-demo")
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "COLUMNS": str(COLUMNS),
            "XDG_CONFIG_HOME": f"{folder}/config",
        }
        run = subprocess.run(
            ["bash", "-e", "-c", script],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    if run.returncode:
        sys.exit(f"README's steps failed:\n{run.stdout}")
    outputs = run.stdout.split(SEPARATOR)[1:]
    return [
        (party, command, [line.rstrip() for line in output.splitlines()[1:] if not _PROGRESS.fullmatch(line)])
        for (party, command), output in zip(steps, outputs, strict=True)
        if command.startswith("mpu ")
    ]


def draw(runs: list[tuple[str, str, list[str]]]) -> str:
    """The SVG, without fonts from other servers."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    for party, command, lines in runs:
        console.print(Text(f"{party}$ {command}", style=COLOURS[party]))
        console.print(Text("\n".join([*lines, ""])))
    picture = console.export_svg(
        title="mpu",
        theme=MONOKAI,
        code_format=_FONT_FROM_ELSEWHERE.sub("", CONSOLE_SVG_FORMAT).replace("Fira Code, ", ""),
        unique_id="mpu",
    )
    text = "\n".join(line for party, command, lines in runs for line in (f"{party}$ {command}", *lines))
    heading = f"<title>README's four steps in a terminal</title><desc>{html.escape(text)}</desc>"
    return picture.replace("<style>", f"{heading}\n    <style>", 1)


def comparable(picture: str) -> str:
    """The text of a picture without what varies: losses differ between machines, noise and keys between runs."""
    [text] = _DESCRIPTION.findall(picture)
    return _OF_SOME_RUNS.sub("", " ".join(_VARIES.sub("#", html.unescape(text)).split()))


def main(demo: Path, check: bool) -> None:
    picture = draw(run_steps(demo))
    if not check:
        TARGET.write_text(picture, encoding="utf-8")
    elif comparable(picture) != comparable(TARGET.read_text(encoding="utf-8")):
        sys.exit(f"{TARGET.name} is not what README's steps print:\n{comparable(picture)}")


if __name__ == "__main__":
    if sys.argv[2:] not in ([], ["--check"]):
        sys.exit(__doc__)
    main(Path(sys.argv[1]) / "mpu-demo", check=bool(sys.argv[2:]))
