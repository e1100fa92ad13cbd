"""The pages: what they link to and quote exists, and the worked examples work."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import pickle
import pydoc
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
import yaml
from nbclient import NotebookClient

import mpu_cli
from mpu_cli.cli.main import COMMANDS
from mpu_cli.demo.model import make_people
from mpu_cli.errors import MpuError, MpuWarning, UsageError
from mpu_cli.measuring.benchmarks import known_metrics
from mpu_cli.model.wrappers import supported_families
from mpu_cli.observer import SILENT
from mpu_cli.options.declare import declared_options
from mpu_cli.toml import read_toml
from tests.helpers import command_lines
from tests.helpers.command_lines import ANY
from tests.helpers.models import DemoModel, random_model, save
from tests.helpers.paths import ROOT

REFERENCE = SimpleNamespace(**runpy.run_path(str(ROOT / "docs/site/reference.py")))
HAVE_DOCSTRINGS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
PAGES = [path for path in sorted(ROOT.rglob("*.md")) if not re.search(r"/\.", path.relative_to(ROOT.parent).as_posix())]
SCRIPTS = [*sorted((ROOT / "examples").rglob("*.py")), *sorted((ROOT / "tests/benchmarks").glob("*.py"))]
LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)#\s]+)(#[^)]*)?\)")


def test_the_site_says_what_readme_does_of_the_families() -> None:
    [number] = re.findall(r"\[over (\d+) model types\]", (ROOT / "README.md").read_text(encoding="utf-8"))
    page = REFERENCE.families_page()
    assert all(f"`{name}`" in page for name in supported_families())
    assert int(number) < len(supported_families())
    assert f"{len(supported_families())} model types" in page


def test_the_picture_of_the_packages_is_current(tmp_path: Path) -> None:
    """Made again from the import contract, and every package of the source is in it."""
    command = [sys.executable, "-c", f"import runpy; m = runpy.run_path({str(ROOT / 'docs/site/packages.py')!r}); "
               "print(m['picture'](m['layers_of'](m['ROOT'] / 'pyproject.toml')), end='')"]  # fmt: skip
    drawn = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert drawn == (ROOT / "docs/packages.svg").read_text(encoding="utf-8"), "run: python docs/site/packages.py"
    names = {path.stem for path in (ROOT / "mpu_cli").iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    assert all(f">{name}</text>" in drawn for name in names)


def test_every_metric_is_defined() -> None:
    page = REFERENCE.metrics_page()
    assert all(f"`{name}`" in page for name in known_metrics())
    assert all(len(metric.says) > 20 for metric in known_metrics().values())


@pytest.mark.parametrize("page", [path.relative_to(ROOT).as_posix() for path in PAGES])
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target, anchor in LINK.findall(path.read_text(encoding="utf-8")):
        target_path = path.parent / target
        assert target_path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target_path.read_text(encoding="utf-8"), re.M)
            slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor[1:] in slugs, f"{target}{anchor}"


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.stem)
def test_code_fits_the_column_of_the_site(path: Path) -> None:
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```", path.read_text(encoding="utf-8"), re.M | re.S)
    assert not [line for block in blocks for line in block.splitlines() if len(line) > REFERENCE.CODE_WIDTH]


def test_commands_have_pages_with_each_option_once() -> None:
    """Under its group, as help has it."""
    for name, page in REFERENCE.command_pages().items():
        rows = re.findall(r"^\| `(--[\w-]+)`", page, re.M)
        assert len(rows) == len(set(rows)), name
        assert not re.search(r"^## (.*)\n(?:.*\n)*## \1$", page, re.M), name
    assert "## Goal" in REFERENCE.command_pages()["unlearn"]


def test_functions_have_their_signatures() -> None:
    """As Python reads them; every keyword is one that the function takes."""
    page = REFERENCE.functions()
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(blocks) == len(set(mpu_cli.__all__) - {"__version__", "results"})
    for block in blocks:
        [function] = ast.parse(f"def {block.strip()}: ...").body
        assert isinstance(function, ast.FunctionDef)
        command = getattr(mpu_cli, function.name).__wrapped__.__self__
        names = [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]
        assert len(names) == 1 + len(declared_options(command))
        for name in set(names) - {"observer"}:
            with pytest.raises(UsageError) as caught:
                command.of(**{name: object()})
            assert "unknown option" not in str(caught.value)
    assert set(dir(mpu_cli)) == set(mpu_cli.__all__)
    assert pickle.loads(pickle.dumps(mpu_cli.publish)) is mpu_cli.publish
    help_text = pydoc.plain(pydoc.render_doc(mpu_cli.publish))
    assert "publish(base, *, " in help_text
    assert mpu_cli.publish.__doc__.splitlines()[0] in help_text


@pytest.mark.slow
def test_troubleshooting_quotes_real_messages() -> None:
    """Every message in the page's tables is a text of the program, up to what differs from case to case."""
    texts = []
    for path in (ROOT / "mpu_cli").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        nodes = [*ast.walk(tree)]
        docstrings = {ast.get_docstring(node, clean=False) for node in nodes if isinstance(node, HAVE_DOCSTRINGS)}
        for node in nodes:
            pieces = node.values if isinstance(node, ast.JoinedStr) else [node]
            parts = [str(piece.value) if isinstance(piece, ast.Constant) else "…" for piece in pieces]
            if isinstance(node, ast.JoinedStr | ast.Constant) and "".join(parts) not in docstrings:
                texts.append(" ".join("".join(parts).split()))
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    messages = [line.split("|")[1] for line in page.splitlines() if re.match(r"\| (?!message)", line)]
    assert len(messages) > 25
    for message in messages:
        quoted = re.sub(r" \(a (warning|note)\)", "", message).split("…")
        fixed_parts = [part.strip() for part in quoted if part.strip()]
        is_quoted = any(all(part in text for part in fixed_parts) for text in texts)
        assert is_quoted or fixed_parts == ["something else"], message


def test_what_claims_are_shown_by_exists() -> None:
    """Every test and example that docs/claims.md names, and every command."""
    page = (ROOT / "docs/claims.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:tests|examples)/[^`\s]+)`", page)
    assert len(named) > 25
    for path, _, name in (each.partition("::") for each in named):
        assert (ROOT / path).exists(), path
        text = (ROOT / path).read_text(encoding="utf-8") if name else ""
        assert not name or re.search(rf"^(?:def|class) {name}\b", text, re.M), f"{path}::{name}"
    commands = set(re.findall(r"`mpu ([a-z-]+)", page))
    assert commands <= set(re.findall(r"^# mpu ([a-z-]+)", REFERENCE.reference(), re.M))


@pytest.mark.slow
def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == mpu_cli.__version__
    assert "2602.23798" in citation["references"][0]["url"]


def name_as_the_demo_does(demo: DemoModel, folder: Path) -> None:
    """Its model and records, and unseen ones, below ``folder`` under the names of `mpu demo`'s."""
    (folder / "mpu-demo/models").mkdir(parents=True)
    (folder / "mpu-demo/models/target").symlink_to(demo.model)
    records = folder / "mpu-demo/records"
    records.mkdir()
    for path in (demo.forget, demo.retain):
        shutil.copy(path, records)
    unseen = [row for person in make_people(2, seed=1) for row in person]
    (records / "unseen.jsonl").write_text("".join(json.dumps(row) + "\n" for row in unseen))


@pytest.mark.slow
def test_the_worked_example(demo: DemoModel, tmp_path: Path) -> None:
    """docs/python.md as it stands, in an empty folder, with the demo's names for a model that is there already."""
    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    program = re.findall(r"```python\n(.*?)```", page, re.S)[0]
    name_as_the_demo_does(demo, tmp_path)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    forget, retain = (float(value) for value in done.stdout.splitlines()[-1].split())
    assert forget < 0.7 < 0.75 < retain
    assert re.search(r"^forgotten: (True|False) kept: (True|False)$", done.stdout, re.M)
    assert "MpuWarning: these copies give the weights away" in done.stderr


@pytest.mark.slow
def test_the_notebook_runs(demo: DemoModel, tmp_path: Path) -> None:
    """Every cell, in a kernel of its own, on a smaller model that is there already; it forgets, keeps the rest, and
    ends with a verdict."""
    name_as_the_demo_does(demo, tmp_path)
    notebook = nbformat.read(ROOT / "examples/notebook.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "strip the outputs before committing"
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    shown = "".join(out.text for out in outputs if out.get("name") == "stdout")  # without bars
    after = {line.split()[0]: float(line.split()[-1]) for line in shown.splitlines() if "_Q_A_Prob" in line}
    assert after["forget_Q_A_Prob"] < 0.6 < 0.9 < after["retain_Q_A_Prob"]
    assert re.search(r"^verdict: \w", shown, re.M)


@pytest.mark.parametrize("path", SCRIPTS)
def test_scripts_that_no_test_runs_import_what_there_is(path: Path) -> None:
    """Examples and benchmarks take minutes to hours, so that a name which moved would go unnoticed."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("mpu_cli", "tests"):
            module = importlib.import_module(node.module)
            for each in node.names:
                is_module = (
                    importlib.util.find_spec(f"{node.module}.{each.name}") if hasattr(module, "__path__") else None
                )
                assert is_module or hasattr(module, each.name), f"{node.module}.{each.name}"


def lines_of_pages() -> list[list[str]]:
    """The command lines in all pages, in scripts' docstrings and beside the tables."""
    texts = [path.read_text(encoding="utf-8") for path in PAGES]
    lines = [line for text in texts for line in command_lines.in_page(text)]
    for command in read_toml(ROOT / "docs/data/commands.toml").values():
        lines += command_lines.in_shell(command.partition(", or ")[0])
    for path in SCRIPTS:
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        for line in re.findall(r"^ *(python (?:.*\\\n)*.*)", docstring, re.M):
            lines += command_lines.in_shell(re.sub(r"[][]|\bN\b", lambda part: ANY if part[0] == "N" else " ", line))
    return [list(line) for line in dict.fromkeys(map(tuple, lines))]


@pytest.mark.parametrize("where", ["pages", "scripts"])
def test_commands_are_called_as_they_are(where: str, mpu: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is read up to the checks of its options and not carried out; what the text leaves out may be missing."""
    monkeypatch.setattr("mpu_cli.cli.driver.carry_out", lambda *_, **__: None)
    if where == "pages":
        lines = [words for program, *words in lines_of_pages() if program == "mpu" and words[0][0].islower()]
    else:
        lines = [words for path in SCRIPTS for words in command_lines.in_script(path.read_text(encoding="utf-8"))]
    assert len(lines) > 50
    for name, *words in dict.fromkeys(map(tuple, lines)):
        declared = declared_options(COMMANDS[name]).values()
        choices = {each.flag: each.choices[0] for each in declared if each.choices}
        pairs = zip(["", *words], words, strict=False)
        words = [choices[flag] if word == ANY and flag in choices else word for flag, word in pairs]
        outcome = mpu(name, *words, check=False)
        unknown = re.search("Missing|requires an argument" + ("|must be between" if ANY in words else ""), outcome.err)
        assert not outcome.status or unknown, (name, words, outcome.err)


def test_scripts_read_the_arguments_that_pages_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with a parser run until it has parsed them. What they read of the result is there."""
    parse = argparse.ArgumentParser.parse_args

    class Parsed(Exception):
        pass

    def parse_and_stop(parser: argparse.ArgumentParser) -> None:
        raise Parsed(parse(parser))

    def fail(_: argparse.ArgumentParser, message: str) -> None:
        raise Parsed if "are required" in message else AssertionError(message)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.setattr(argparse.ArgumentParser, "error", fail)
    parsed = set()
    for program, *words in lines_of_pages():
        if program != "python":
            continue
        file, *words = [words[1].replace(".", "/") + ".py", *words[2:]] if words[0] == "-m" else words
        path = ROOT / file
        if path not in SCRIPTS or "ArgumentParser(" not in (source := path.read_text(encoding="utf-8")):
            continue
        monkeypatch.setattr(sys, "argv", [file, *words])
        monkeypatch.syspath_prepend(path.parent)
        with pytest.raises(Parsed) as stopped:
            runpy.run_path(str(path), run_name="__main__")
        [name] = re.findall(r"(\w+)(?: = |\()parser.parse_args\(\)", source)
        nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
        nodes = [node for node in nodes if isinstance(node.value, ast.Name) and node.value.id == name]
        stored = {node.attr for node in nodes if isinstance(node.ctx, ast.Store)}
        for arguments in stopped.value.args:
            assert {node.attr for node in nodes} <= vars(arguments).keys() | stored, file
        parsed.add(path)
    assert len(parsed) > 15


def test_functions_take_the_options_of_their_commands(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """They warn through ``warnings`` at the line that called them, and show bars on standard error."""
    base = save(random_model("llama"), tmp_path / "base")
    with pytest.warns(MpuWarning, match="give the weights away") as warned:
        published = mpu_cli.publish(base, out=tmp_path, keys=tmp_path / "k.bin", copies=2, symmetries="none", kappa=0.5)
    assert {warning.filename for warning in warned} == {__file__}
    shown = capfd.readouterr()
    assert "publish" in shown.err
    assert not shown.out
    assert [path.name for path in published.copies] == ["copy_1", "copy_2"]
    assert (published.keys.publication.kappa, published.keys.publication.symmetries) == (0.5, "none")
    audit = mpu_cli.audit(published.copies, base=base)[0]
    assert audit.function_error("all copies") < 1e-3 < audit.function_error("one copy")
    with pytest.raises(UsageError, match="colour: unknown option"):
        mpu_cli.publish(base, out=tmp_path / "other", colour="red")
    with pytest.raises(UsageError, match="kappa -1"):
        mpu_cli.publish(base, out=tmp_path / "other", kappa=-1)


@pytest.mark.slow
def test_small_models_without_the_hub(tmp_path: Path) -> None:
    """The error names options that the script has."""
    command = [sys.executable, ROOT / "examples/small/make.py", "models"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "--data-dir FOLDER" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_results_are_a_data_frame(tmp_path: Path, demo: DemoModel) -> None:
    """A row for each result in a folder, with the values of its metrics, as ``compare`` has them."""
    records = {"forget": demo.forget, "retain": demo.retain, "metrics": "forget_Q_A_Prob,retain_Q_A_Prob"}
    for name in ("before", "after"):
        mpu_cli.evaluate(demo.model, out=tmp_path / f"{name}.json", observer=SILENT, **records)
    (tmp_path / "config.json").write_text("{}")
    frame = mpu_cli.results(tmp_path)
    assert list(frame.index) == ["after", "before"]
    assert set(frame["model"]) == {str(demo.model)}
    compared = mpu_cli.compare([tmp_path / "after.json", tmp_path / "before.json"], metrics="all").values
    for name, values in compared.items():
        assert frame[f"metrics.{name}"].to_list() == values
    [trained] = mpu_cli.unlearn([demo.model], forget=demo.forget, retain=demo.retain, epochs=1, out=tmp_path / "deltas")
    delta = trained.result.path
    mpu_cli.evaluate(demo.model, delta=delta, out=tmp_path / "delta.json", observer=SILENT, **records)
    frame = mpu_cli.results(tmp_path)
    assert frame["delta"].fillna("").to_dict() == {"after": "", "before": "", "delta": str(delta)}
    assert set(frame["model"]) == {str(demo.model)}
    [reply] = mpu_cli.ask([demo.model], json.loads(demo.forget.read_text().splitlines()[0])["question"])
    assert reply.answer
    with pytest.raises(MpuError, match="holds no results"):
        mpu_cli.results(demo.model)
