"""The command lines in pages and scripts, as words, with ANY in place of a value that the text does not have."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mpu_cli.cli.main import COMMANDS

ANY = "1"


def in_page(text: str) -> Iterator[list[str]]:
    """In blocks of a shell, and in code within a line, of which many are not whole."""
    for block in re.findall(r"^ *```sh\n(.*?)^ *```", text, re.M | re.S):
        yield from in_shell(block)
    for code in re.findall(r"`((?:mpu|python) [^`]+)`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)):
        yield from in_shell(" ".join(code.split()))


def in_shell(text: str) -> Iterator[list[str]]:
    """In lines of a shell. "…" after an option is its value; alone it stands for further words."""
    lexer = shlex.shlex(re.sub(r"(?m)(^| )#.*|\\\n", " ", text), posix=True, punctuation_chars="|&;()\n")
    lexer.whitespace_split, lexer.whitespace, lexer.commenters = True, " ", ""
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set("|&;()\n"):
            if words:
                yield words
            words = []
        elif word != "…" or words[-1].startswith("--"):
            words.append(word.replace("…", ANY))


def in_script(source: str) -> Iterator[list[str]]:
    """In lists, tuples and calls, from the name of a command on; options alone, as constants, are those of unlearn."""
    tree = ast.parse(source)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    constants = _assigned(tree.body)
    for part in (part for outer in (tree, *classes) for part in outer.body if part not in classes):
        values = constants | _assigned(ast.walk(part))
        for node in ast.walk(part):
            parts = node.args if isinstance(node, ast.Call) else getattr(node, "elts", [])
            starts = [i for i, each in enumerate(parts) if isinstance(each, ast.Constant) and each.value in COMMANDS]
            words = [*_words(parts[starts[-1] :] if starts else parts, values)]
            if starts and any(word.startswith("--") for word in words):
                yield words
            elif isinstance(part, ast.Assign) and words and words[0].startswith("--"):
                yield ["unlearn", ANY, *words]


def _assigned(nodes: Iterable[ast.AST]) -> dict[str, ast.expr]:
    assignments = [node for node in nodes if isinstance(node, ast.Assign)]
    return {name.id: node.value for node in assignments for name in node.targets if isinstance(name, ast.Name)}


def _words(parts: Sequence[ast.expr], values: Mapping[str, ast.expr]) -> Iterator[str]:
    for part in parts:
        if isinstance(part, ast.Starred):
            value = part.value.body if isinstance(part.value, ast.IfExp) else part.value
            value = values.get(value.id, value) if isinstance(value, ast.Name) else value
            yield from _words(getattr(value, "elts", []), values)
        else:
            yield _text(part)


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    return str(node.value) if isinstance(node, ast.Constant) else ANY
