"""Pages whose lines can be read in a diff, and modules that can be imported in any order."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter

import pytest

from tests.helpers.paths import ROOT

PACKAGE = ROOT / "mpu_cli"
MAX_MARKDOWN = 140
SOURCES = sorted(PACKAGE.rglob("*.py"))


def test_lines_of_pages_can_be_read_in_a_diff() -> None:
    """Tables, links and code aside."""
    pages = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    long_lines = []
    for page in pages.split():
        in_code = False
        for number, line in enumerate((ROOT / page).read_text(encoding="utf-8").split("\n"), 1):
            in_code ^= line.lstrip().startswith("```")
            if len(line) > MAX_MARKDOWN and not in_code and not line.lstrip().startswith(("|", "[", "<", "![")):
                long_lines.append(f"{page}:{number}")
    assert long_lines == []


def test_no_modules_import_each_other() -> None:
    """At their top level, types included; what a function imports may come back."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in SOURCES}
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        imported = set()
        statements: list[ast.stmt] = list(ast.parse(path.read_text(encoding="utf-8")).body)
        for statement in statements:
            if isinstance(statement, ast.If):  # TYPE_CHECKING
                statements += statement.body
            elif isinstance(statement, ast.ImportFrom) and statement.module:
                for alias in statement.names:
                    module = f"{statement.module}.{alias.name}"
                    imported.add(module if module in names else statement.module)
        graph[name] = imported & names.keys()
    TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.slow
def test_every_module_can_be_imported_first() -> None:
    """Modules of one package that import each other in a circle fail for whoever begins with the wrong one."""
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in SOURCES]
    program = (
        "import importlib, sys\n"
        "for module in sys.argv[1:]:\n"
        "    for name in [name for name in sys.modules if name.startswith('mpu_cli')]:\n"
        "        del sys.modules[name]\n"
        "    try:\n"
        "        importlib.import_module(module)\n"
        "    except ModuleNotFoundError as error:\n"
        "        assert error.name == 'flwr', error\n"
    )
    names = [module for module in modules if not module.endswith("__main__")]
    done = subprocess.run(
        [sys.executable, "-c", program, *names], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-1000:]
