"""What people open in a browser, opened in one: a report, and the site."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
QUIETLY = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--enable-logging=stderr",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--allow-file-access-from-files",
)  # fmt: skip
NARROW = 400  # pixels
# In a frame, because a window cannot be as narrow.
FRAME = """<!doctype html><title>not loaded</title><iframe src="{page}" width="{width}" height="900" style="border:0"
onload="document.title = this.contentDocument.documentElement.scrollWidth"></iframe>"""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]


def open_narrow(page: Path, profile: Path) -> int:
    """The width that ``page`` takes where it is given ``NARROW`` pixels; fails if the console has an error."""
    frame = page.with_name(f"frame_of_{page.name}")
    frame.write_text(FRAME.format(page=page.name, width=NARROW), encoding="utf-8")
    done = subprocess.run(
        [str(CHROMIUM), *QUIETLY, f"--user-data-dir={profile}", "--dump-dom", frame.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line or "ERR_" in line]
    title = re.search(r"<title>(\d+)</title>", done.stdout)
    assert title, done.stdout[:500]
    return int(title[1])


def test_a_report_fits_a_narrow_window(mpu: Callable, tmp_path: Path) -> None:
    lines = [
        {"name": f"{mode}-{kappa}-{seed}", "digest": "", "algo": "npo", "mode": mode, "kappa": kappa,
         "secret_seed": seed, "seconds": 60,
         "metrics": {"model_utility": 0.5 + kappa + seed / 100, "forget_Q_A_Prob": 0.3 - kappa},
         "before": {"model_utility": 0.6, "forget_Q_A_Prob": 0.9}}
        for mode in ("clean", "mpu", "noised") for kappa in (0.01, 0.1) for seed in (1, 2)
    ]  # fmt: skip
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep/results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    mpu("report", "sweep", cwd=tmp_path)
    assert open_narrow(tmp_path / "sweep/report.html", tmp_path / "profile") <= NARROW


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="needs the extra docs")
def test_the_site_fits_a_narrow_window(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "--no-directory-urls"]
    subprocess.run([*command, "-d", str(tmp_path / "s")], cwd=ROOT, check=True, capture_output=True)
    for page in ("index.html", "threat_model.html", "commands.html", "reference/errors.html"):
        assert open_narrow(tmp_path / "s" / page, tmp_path / "profile") <= NARROW, page
