"""Pages that the site has besides docs/: those at the repository's root, the examples', and what the program itself
says: commands, families, metrics, Python functions, error messages."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import mkdocs_gen_files

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))
import reference  # noqa: E402
from links import AT_ROOT  # noqa: E402

RESULTS = (
    "mpu_cli.protocol.review.Reviewed",
    "mpu_cli.commands.unlearn.Unlearned",
    "mpu_cli.protocol.combine.Aggregation",
    "mpu_cli.commands.check.Checked",
    "mpu_cli.measuring.evaluate.Evaluation",
    "mpu_cli.lab.frame.results",
    "mpu_cli.lab.commands.compare.Comparison",
    "mpu_cli.commands.ask.Reply",
    "mpu_cli.lab.commands.rehearse.Rehearsal",
    "mpu_cli.lab.commands.sweep.Swept",
    "mpu_cli.errors.MpuError",
    "mpu_cli.errors.UsageError",
    "mpu_cli.errors.MpuWarning",
    "mpu_cli.observer.Observer",
    "mpu_cli.observer.PythonObserver",
)
FIXED = 20  # letters that an error has at least, beside what differs from case to case
PARTS = {  # packages of the program, by what they are for
    "cli": "The command line", "options": "The command line", "commands": "Commands", "demo": "The demonstration",
    "lab": "The laboratory", "flower": "Rounds over Flower",
    "measuring": "Measuring and checks", "protocol": "Publishing and aggregating", "training": "Training",
    "model": "Models", "records": "Records", "files": "Files and secrets",
}  # fmt: skip


def template(node: ast.expr) -> str | None:
    """The text of a message, with … for what differs from case to case; None if it is put together elsewhere."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = (template(node.left) or "…", template(node.right) or "…")
        return "".join(parts)
    return None


def errors() -> Iterator[tuple[str, str, str]]:
    """Every error whose text stands where it is raised: the part of the program, the error, its hint."""
    for path in sorted((ROOT / "mpu_cli").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("MpuError", "UsageError") and node.args:
                problem = template(node.args[0])
                hint = template(node.args[1]) if len(node.args) > 1 else ""
                if problem and len(re.sub(r"\W", "", problem)) >= FIXED:
                    part = path.relative_to(ROOT / "mpu_cli").parts[0]
                    yield PARTS.get(part, "Anywhere"), problem, hint or ""


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[").replace("*", "\\*")


for name, page in AT_ROOT.items():
    with mkdocs_gen_files.open(page, "w") as file:
        file.write((ROOT / name).read_text(encoding="utf-8"))
for path in sorted((ROOT / "examples").rglob("*")):
    if path.suffix in (".md", ".png", ".svg"):
        with mkdocs_gen_files.open(path.relative_to(ROOT).as_posix(), "wb") as binary:
            binary.write(path.read_bytes())
generated = {f"commands/{name}.md": text for name, text in reference.command_pages().items()} | {
    "commands.md": reference.index(), "families.md": reference.families_page(), "metrics.md": reference.metrics_page(),
}  # fmt: skip
for page, text in generated.items():
    with mkdocs_gen_files.open(page, "w") as file:
        file.write(text)
with mkdocs_gen_files.open("reference/api.md", "w") as file:
    file.write(f"{reference.functions()}\n## Results, errors and progress\n")
    for name in RESULTS:
        file.write(f"\n::: {name}\n    options: {{ heading_level: 3 }}\n")
by_part: dict[str, set[tuple[str, str]]] = {}
for part, problem, hint in errors():
    by_part.setdefault(part, set()).add((problem, hint))
with mkdocs_gen_files.open("reference/errors.md", "w") as file:
    file.write(
        "# Error messages\n\nNearly every error that a command can end with, by the part of the program, without what "
        "differs from case to case (…); the search finds them, too. For the common ones, see "
        "[troubleshooting](../troubleshooting.md).\n"
    )
    for part, pairs in sorted(by_part.items()):
        file.write(f'\n??? note "{part}"\n\n    | error | what to do |\n    |---|---|\n')
        for problem, hint in sorted(pairs, key=lambda pair: pair[0].lstrip("… :")):
            file.write(f"    | {cell(problem)} | {cell(hint)} |\n")
