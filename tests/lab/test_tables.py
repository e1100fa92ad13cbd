"""Tables and recipes: what `report` makes of results, and the paper's own recipes."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from mpu_cli.errors import UsageError
from mpu_cli.files.manifest import RESULTS
from mpu_cli.lab.report import degradation, pivot, published_results, read_recipe, read_sweeps
from mpu_cli.options.unlearning import RecordFormat
from mpu_cli.records.read import read_records
from tests.helpers.models import needs_shared, random_model, save
from tests.helpers.paths import ROOT, SHARED


def test_pivot() -> None:
    lines = [
        {"name": "a", "algo": "npo", "mode": "clean", "metrics": {"x": 1.0}},
        {"name": "b", "algo": "npo", "mode": "mpu", "kappa": 0.1, "metrics": {"x": 2.0}},
        {"name": "c", "algo": "npo", "mode": "mpu", "kappa": 0.2, "metrics": {"x": 3.0}},
    ]
    assert pivot(lines, ["x"]) == {
        "x": [
            ["algo", "kappa", "clean", "mpu", "mpu: % from clean"],
            ["npo", "0.1", "1", "2", "100"],
            ["npo", "0.2", "1", "3", "200"],
        ]
    }
    assert pivot(lines[1:], ["x"], across="kappa")["x"] == [["algo", "mode", "0.1", "0.2"], ["npo", "mpu", "2", "3"]]


def test_a_mode_that_ignores_the_columns_has_its_result_in_each() -> None:
    lines = [
        {"name": "a", "mode": "clean", "metrics": {"x": 1.0}},
        {"name": "b", "mode": "mpu", "kappa": 0.1, "metrics": {"x": 2.0}},
        {"name": "c", "mode": "mpu", "kappa": 0.2, "metrics": {"x": 3.0}},
    ]
    rows = pivot(lines, ["x"], across="kappa")["x"]
    assert rows == [["mode", "0.1", "0.2"], ["clean", "1", "1"], ["mpu", "2", "3"]]


def test_sweeps_of_one_name_or_of_one_mode_stay_apart(tmp_path: Path) -> None:
    """Each by its path, where folders have the same name; one that varies no mode beside one that does."""
    modes = {"monday": ["clean", "mpu"], "friday": [None]}
    for day, of_sweep in modes.items():
        (tmp_path / day / "grid").mkdir(parents=True)
        lines = [{"name": str(mode), "metrics": {"x": 1.0}, **({"mode": mode} if mode else {})} for mode in of_sweep]
        (tmp_path / day / "grid" / RESULTS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    folders = [tmp_path / day / "grid" for day in modes]
    rows = pivot(read_sweeps(folders), ["x"])["x"]
    assert rows[0][:3] == ["sweep", "clean", "mpu"]
    assert [row[:3] for row in rows[1:]] == [[str(folders[0]), "1", "1"], [str(folders[1]), "–", "1"]]


def test_pivot_averages_repeats() -> None:
    """Means and 95 % intervals over draws and orders; each run is compared with the clean run of the same order."""
    values = {("mpu", 1, 0): 0.9, ("mpu", 2, 0): 1.2, ("mpu", 1, 1): 2.2, ("mpu", 2, 1): 2.4}
    lines = [{"name": f"c{seed}", "mode": "clean", "seed": seed, "metrics": {"x": 1.0 + seed}} for seed in (0, 1)]
    lines += [
        {"name": str(key), "mode": key[0], "secret_seed": key[1], "seed": key[2], "metrics": {"x": value}}
        for key, value in values.items()
    ]
    head, *rows = pivot(lines, ["x"])["x"]
    assert head == ["clean", "mpu", "mpu: % from clean"]
    [[clean, mpu_, off]] = rows
    half = stats.t.interval(0.95, 3, scale=stats.sem(list(values.values())))[1]
    assert mpu_ == f"{np.mean(list(values.values())):.4g} ± {half:.2g}"
    assert clean.startswith("1.5 ± ")
    distances = [10, 20, 10, 20]
    assert off == f"15 ± {stats.t.interval(0.95, 3, scale=stats.sem(distances))[1]:.2g}"
    by_order = pivot(lines, ["x"], over=["secret_seed"])["x"]
    assert by_order[0] == ["seed", "clean", "mpu", "mpu: % from clean"]
    assert [row[:2] for row in by_order[1:]] == [["0", "1"], ["1", "2"]]
    with pytest.raises(UsageError, match="--over nothing"):
        pivot(lines, ["x"], over=["nothing"])
    with pytest.raises(UsageError, match="is averaged over"):
        pivot(lines, ["x"], across="seed", over=["seed"])
    zero = [{**line, "metrics": {"x": 0.0 if line["mode"] == "clean" else 1.0}} for line in lines]
    assert pivot(zero, ["x"])["x"][1][-1] == "–"  # no percentage of 0


@pytest.mark.slow
def test_report(mpu: Callable, tmp_path: Path) -> None:
    """Best in bold where intervals allow it, by what each metric is good for; curves with intervals; nothing from
    elsewhere; experiments without a result are named; tables and figures alone."""
    values = {("clean", None): 0.5, ("mpu", 0.01): 0.6, ("mpu", 0.1): 0.3}
    lines = [
        {"name": f"{mode}-{kappa}-{seed}", "digest": "", "algo": "npo", "mode": mode, "secret_seed": seed,
         **({} if kappa is None else {"kappa": kappa}), "seconds": 60,
         "metrics": {"model_utility": value + seed / 1000, "forget_Q_A_Prob": value}}
        for (mode, kappa), value in values.items() for seed in (1, 2)
    ]  # fmt: skip
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep/results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert mpu("report", "sweep", cwd=tmp_path).out == "sweep/report.html\n"
    page = (tmp_path / "sweep/report.html").read_text()
    bold = set(re.findall(r"<b>([^<]*)</b>", page))
    assert {"0.6015 ± 0.0064", "0.5015 ± 0.0064"} <= bold  # utility: more is better
    assert {"0.5 ± 0", "0.3 ± 0"} <= bold  # what the model still says of the records: less is
    assert "mpu</b>: average degradation (distance from clean) over 1 algorithm" in page
    assert page.count("<svg") == 2
    (tmp_path / "sweep/sweep.json").write_text(json.dumps({"experiments": [*(line["name"] for line in lines), "lost"]}))
    partial = mpu("report", "sweep", "--force", "--json", cwd=tmp_path)
    assert partial.json["missing"] == ["lost"]
    assert "without a result: lost" in partial.err
    assert "Without a result: lost." in (tmp_path / "sweep/report.html").read_text()
    tables = pivot(lines, ["model_utility", "forget_Q_A_Prob"])
    for suffix in ("csv", "tex", "md", "pdf"):
        mpu("report", "sweep", "--out", f"report.{suffix}", cwd=tmp_path)
    with (tmp_path / "report.csv").open(newline="") as file:
        assert [*csv.reader(file)] == [
            ["table", *tables["model_utility"][0]],
            *(
                [metric, *("" if cell == "–" else cell for cell in row)]
                for metric, (_, *rows) in tables.items()
                for row in rows
            ),
        ]
    latex = (tmp_path / "report.tex").read_text()
    cells = [re.split(r"(?<!\\)&", line) for line in latex.splitlines() if line.endswith(r"\\")]
    assert [len(row) for row in cells] == [len(row) for table in tables.values() for row in table]
    assert r"$\pm$" in latex

    assert (tmp_path / "report.pdf").read_bytes().count(b"/Type /Page ") == 2
    assert "must end in" in mpu("report", "sweep", "--out", "report.docx", cwd=tmp_path, check=False).err
    assert not re.findall(r"""(?:src|href)=["'](?!#)""", page)
    assert "already exists" in mpu("report", "sweep", cwd=tmp_path, check=False).err
    assert mpu("report", "sweep", "--force", "--metrics", "model_utility", cwd=tmp_path).out
    shutil.copytree(tmp_path / "sweep", tmp_path / "other")
    document = mpu("report", "sweep", "other", "--out", "both.html", "--json", cwd=tmp_path).json
    assert document["experiments"] == 2 * len(lines)
    page = (tmp_path / "both.html").read_text()
    assert "<th>sweep</th>" in page
    assert "<td>other</td>" in page
    assert "has no results.jsonl" in mpu("report", ".", cwd=tmp_path, check=False).err


def test_a_cell_of_fewer_runs_is_bold_if_its_interval_stands_apart(mpu: Callable, tmp_path: Path) -> None:
    clean, apart, wide = (0.49, 0.5, 0.51), (0.9, 0.9001), (0.1, 0.99)
    for values, bold in ((apart, 1), (wide, 0)):
        cells = {("npo", "clean"): clean, ("npo", "mpu"): values, ("simnpo", "mpu"): clean}
        lines = [
            {"name": f"{algo}-{mode}-{seed}", "algo": algo, "mode": mode, "seed": seed,
             "metrics": {"model_utility": value}}
            for (algo, mode), runs in cells.items() for seed, value in enumerate(runs)
        ]  # fmt: skip
        (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        mpu("report", ".", "--force", cwd=tmp_path)
        page = (tmp_path / "report.html").read_text()
        assert len(re.findall(r"<b>[^<]*n = 2[^<]*</b>", page)) == bold


PAPER = ROOT / "examples/paper"
RECIPES = sorted(path.stem for path in PAPER.glob("*.toml") if path.stem not in ("common", "small", "real"))
TRIED = ("pum_main_comparison", "pum_kappa", "llama-3.1-8b_tofu_lora")  # the others differ from these in little


def test_every_value_of_the_paper_is_in_one_recipe() -> None:
    """Each number of the paper's tables stands in the recipe that is named after its table, and nowhere else."""
    with (PAPER / "tables.csv").open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    assert len(rows) == 1576
    assert {row["table"] for row in rows} == set(RECIPES)
    for recipe in RECIPES:
        lines = [line for line in published_results(PAPER / f"{recipe}.toml") if "paper" in line["mode"]]
        recipe_values = sorted((line["algo"], name, value) for line in lines for name, value in line["metrics"].items())
        table_rows = [row for row in rows if row["table"] == recipe]
        assert recipe_values == sorted((row["algo"], row["metric"], float(row["value"])) for row in table_rows), recipe
        for line in lines:  # and with the settings it was measured with
            mode = line["mode"].rpartition(" ")[2]
            [row] = [
                row for row in table_rows
                if (row["algo"], row["mode"]) == (line["algo"], mode)
                and row["model"] in line["mode"]
                and line.get("forget", row["forget"]) in (row["forget"], f"tofu:{row['forget']}")
                and (mode != "mpu" or (float(row["kappa"]), int(row["copies"])) == (line["kappa"], line["copies"]))
                and (mode != "noised" or float(row["kappa"]) == pytest.approx(1.5 * line["kappa"]))
                and (mode == "clean" or (int(row["rounds"]), int(row["epochs"])) == (line["rounds"], line["epochs"]))
                and row["metric"] == next(iter(line["metrics"]))
            ]  # fmt: skip
            assert float(row["value"]) == line["metrics"][row["metric"]]


def test_the_papers_own_average() -> None:
    """Without gradient ascent, on Llama 3.2 1B: 0.72 % (truth ratio) and 0.25 % (utility) for MPU, 1.30 and 0.42 %
    for noised, computed from the file by hand."""
    lines = [line for line in published_results(PAPER / "pum_main_comparison.toml") if "paper" in line["mode"]]
    degradations = {mode.rpartition(" ")[2]: each for mode, each in degradation(lines, [*lines[0]["metrics"]]).items()}
    expected = {"mpu": (0.72, 0.25), "noised": (1.30, 0.42)}
    for mode, (ratio, utility) in expected.items():
        assert degradations[mode]["forget_truth_ratio"].percent == pytest.approx(ratio, abs=0.005)
        assert degradations[mode]["model_utility"].percent == pytest.approx(utility, abs=0.005)
        assert degradations[mode]["model_utility"].count == 6


def test_a_recipe_extends_another(mpu: Callable, tmp_path: Path) -> None:
    (tmp_path / "below.toml").write_text(
        'base = "a"\nalgo = "npo"\nkappa = 0.1\n[eval]\nbenchmark = "qa"\nreference_model = "b"\n'
    )
    (tmp_path / "own.toml").write_text('extends = "below.toml"\nkappa = 0.2\n[eval]\nreference_model = "c"\n')
    read = read_recipe(tmp_path / "own.toml")
    assert read == {"base": "a", "algo": "npo", "kappa": 0.2, "eval": {"benchmark": "qa", "reference_model": "c"}}
    for text, complaint in (('"../below.toml"', "same folder"), ("3", "same folder"), ('"own.toml"', "extends")):
        (tmp_path / "own.toml").write_text(f"extends = {text}\n")
        assert complaint in mpu("sweep", "own.toml", "--dry-run", cwd=tmp_path, check=False).err
    (tmp_path / "own.toml").write_text(
        'extends = "below.toml"\n[[published]]\nsource = "x"\nfile = "t.csv"\ntable = "y"\n'
    )
    mpu("sweep", "own.toml", "--dry-run", cwd=tmp_path, refused="t.csv: cannot be read")


@needs_shared
@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [pytest.param(name, marks=pytest.mark.exhaustive) if name not in TRIED else name for name in RECIPES],
)
def test_recipes_of_the_paper(mpu: Callable, tmp_path: Path, recipe: str) -> None:
    """Each runs to its end on small models, on its smallest grid, and says how far MPU is from clean."""
    (tmp_path / "models").symlink_to(SHARED / "models")
    for name in ("forget01", "retain99"):
        records = read_records(f"tofu:{name}", RecordFormat(data_dir=SHARED / "data/tofu"))[:4]
        lines = [json.dumps({"question": r.question, "answer": r.answer}) + "\n" for r in records]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    grid = {"algo": "graddiff", "epochs": 1, "rounds": 1, "forget": "forget01.jsonl", "retain": "retain99.jsonl",
            "eval.benchmark": "qa", "eval.metrics": '["forget_Q_A_Prob"]'}  # fmt: skip
    grid |= {"kappa": 0.01, "copies": 2, "data_dir": SHARED / "data/tofu"}
    settings = [part for name, value in grid.items() for part in ("--set", f"{name}={value}")]
    small = ROOT / "examples/paper/small.toml"
    outcome = mpu(
        "sweep", ROOT / f"examples/paper/{recipe}.toml", "--with", small, *settings, "--out", "out", cwd=tmp_path
    )
    assert "**forget_Q_A_Prob**" in outcome.out
    modes = read_recipe(PAPER / f"{recipe}.toml")["mode"]
    if {"clean", "mpu"} <= {*modes}:
        assert "mpu: average degradation (distance from clean) over 1 algorithm" in outcome.out
    assert list((tmp_path / "out").glob("retain-*.json"))


@pytest.mark.slow
def test_the_dry_run_of_a_grid_warns_as_its_experiments_do(mpu: Callable, tmp_path: Path) -> None:
    save(random_model("llama"), tmp_path / "base")
    row = json.dumps({"question": "w1 w2", "answer": "w3 w4"})
    for name, rows in (("forget", [row]), ("retain", [row, row.replace("w3", "w5")])):
        (tmp_path / f"{name}.jsonl").write_text("".join(line + "\n" for line in rows))
    (tmp_path / "grid.toml").write_text(
        'base = "base"\nforget = "forget.jsonl"\nretain = "retain.jsonl"\nalgo = ["npo", "graddiff"]\nkappa = 0.01\n'
        'copies = 2\nepochs = 1\n[eval]\nbenchmark = "qa"\nforget = "forget.jsonl"\n'
    )
    warning = "also in the retain set, which works against forgetting"  # of trainings; evaluations have another
    assert mpu("sweep", "grid.toml", "--dry-run", cwd=tmp_path).err.count(warning) == 1
    assert mpu("sweep", "grid.toml", cwd=tmp_path).err.count(warning) == 2
