"""Names and sizes that keep the code readable: counted over the sources, so that a review does not have to."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.helpers.paths import ROOT

PACKAGE = ROOT / "mpu_cli"
# Ordinary words that fit everything, and so say nothing of what they name.
WORDS = {
    "held", "found", "own", "kept", "asked", "known", "told", "whole", "of", "given", "place", "first", "one", "others",
    "both", "left", "seen", "stays", "made", "wanted", "there", "alone", "taken",
}  # fmt: skip
PARTICIPLES = re.compile(
    r"[a-z]+ed|held|made|told|found|known|said|shown|given|drawn|written|sent|built|kept|left|seen|taken|done|lost|"
    r"begun|hidden|bound|grown|chosen"
)
NO_PARTICIPLES = {"need", "seed", "embed", "feed", "speed", "shed"}
MAX_LINES, MAX_FUNCTION, MAX_MARKDOWN = 350, 60, 140
TABLES = {"mixtures.py", "hybrids.py", "layernorm.py"}  # of families
SOURCES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def bound_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Variables, arguments, fields and attributes that are assigned, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name, node.lineno


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def lines_of_body(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How long a function is without its signature: a command's options stand there."""
    last = function.end_lineno or function.lineno
    return last - function.body[0].lineno + 1


def test_no_variable_is_named_by_an_ordinary_word() -> None:
    places = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in [*SOURCES, *TESTS]
        for name, line in bound_names(ast.parse(path.read_text(encoding="utf-8")))
        if name.strip("_").lower() in WORDS or name in ("MOST", "LARGEST")
    ]
    assert places == []


def test_functions_are_verbs_or_nouns() -> None:
    """No function is named by a lone participle, which says neither what it does nor what it returns."""
    participles = [
        f"{path.relative_to(ROOT)}:{function.lineno} {function.name}"
        for path in [*SOURCES, *TESTS]
        for function in functions(ast.parse(path.read_text(encoding="utf-8")))
        if PARTICIPLES.fullmatch(name := function.name.strip("_")) and name not in NO_PARTICIPLES
    ]
    assert participles == []


@pytest.mark.parametrize("kind", ["files", "functions"])
def test_nothing_is_too_long(kind: str) -> None:
    too_long = []
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        if kind == "files" and path.name not in TABLES and text.count("\n") > MAX_LINES:
            too_long.append(f"{path.relative_to(ROOT)}: {text.count(chr(10))} lines")
        if kind == "functions":
            sizes = [(lines_of_body(function), function) for function in functions(ast.parse(text))]
            too_long += [
                f"{path.relative_to(ROOT)}:{function.lineno} {function.name}: {size} lines"
                for size, function in sizes
                if size > MAX_FUNCTION
            ]
    assert too_long == []


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
