"""Pages that the site has besides docs/: those at the repository's root, the examples', and what the program itself
says: commands, families, metrics, Python functions, error messages."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import mkdocs_gen_files

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))
import reference  # noqa: E402
from links import AT_ROOT  # noqa: E402

API = {
    "mpu_cli.commands.publish": ("Publish",),
    "mpu_cli.commands.unlearn": ("Unlearn", "Unlearned"),
    "mpu_cli.commands.invert": ("Invert",),
    "mpu_cli.commands.aggregate": ("Aggregate",),
    "mpu_cli.commands.check": ("Check", "Checked"),
    "mpu_cli.commands.evaluate": ("Evaluate",),
    "mpu_cli.measuring.evaluate": ("Evaluation",),
    "mpu_cli.measuring.frame": ("results",),
    "mpu_cli.commands.compare": ("Compare", "Comparison"),
    "mpu_cli.commands.ask": ("Ask", "Reply"),
    "mpu_cli.commands.rehearse": ("Rehearse", "Rehearsal"),
    "mpu_cli.lab.commands.sweep": ("Sweep", "Swept"),
    "mpu_cli.lab.commands.audit": ("Audit",),
    "mpu_cli.lab.commands.surrogate": ("Surrogate",),
    "mpu_cli.errors": ("MpuError", "UsageError", "MpuWarning"),
    "mpu_cli.observer": ("Observer", "PythonObserver"),
}


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


def errors() -> Iterator[tuple[str, str]]:
    """Every error whose text stands where it is raised, with its hint; others are put together elsewhere."""
    for path in sorted((ROOT / "mpu_cli").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("MpuError", "UsageError") and node.args:
                problem = template(node.args[0])
                hint = template(node.args[1]) if len(node.args) > 1 else ""
                if problem and problem.strip("… :"):
                    yield problem, hint or ""


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
    file.write("# Python functions\n\nSee [Python](../python.md) for how they fit together.\n")
    for module, names in API.items():
        for name in names:
            file.write(f"\n::: {module}.{name}\n")
with mkdocs_gen_files.open("reference/errors.md", "w") as file:
    file.write(
        "# Error messages\n\nNearly every error that a command can end with, without what differs from case to case "
        "(…). For the common ones, see [troubleshooting](../troubleshooting.md).\n\n| error | what to do |\n|---|---|\n"
    )
    for problem, hint in sorted(set(errors()), key=lambda pair: pair[0].lstrip("… :")):
        file.write(f"| {cell(problem)} | {cell(hint)} |\n")
