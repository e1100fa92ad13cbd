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
DARK = ("--force-dark-mode", "--blink-settings=preferredColorScheme=0")
# In a frame, because a window cannot be as narrow. The title becomes the page's width, whether it is shown dark, and
# the colours of its text and background.
FRAME = """<!doctype html><title>not loaded</title><iframe src="{page}" width="{width}" height="900" style="border:0"
onload="const page = this.contentDocument, style = this.contentWindow.getComputedStyle(page.body);
document.title = [page.documentElement.scrollWidth, matchMedia('(prefers-color-scheme: dark)').matches, style.color,
style.backgroundColor].join('; ')"></iframe>"""
READABLE = 4.5  # contrast of text, of Web Content Accessibility Guidelines 2.2

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]


def luminance(colour: str) -> float:
    """Relative luminance of a CSS colour rgb(…), from 0 to 1."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def open_narrow(page: Path, profile: Path, *, dark: bool = False) -> int:
    """The width that ``page`` takes where it is given ``NARROW`` pixels; fails if the console has an error or if text
    can hardly be told from what is behind it."""
    frame = page.with_name(f"frame_of_{page.name}")
    frame.write_text(FRAME.format(page=page.name, width=NARROW), encoding="utf-8")
    done = subprocess.run(
        [str(CHROMIUM), *QUIETLY, *(DARK if dark else ()), f"--user-data-dir={profile}", "--dump-dom", frame.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line or "ERR_" in line]
    title = re.search(r"<title>(\d+); (\w+); (rgb[^;]*); (rgb[^;]*)</title>", done.stdout)
    assert title, done.stdout[:500]
    assert title[2] == str(dark).lower()
    text, behind = sorted(luminance(colour) for colour in (title[3], title[4]))
    assert (behind + 0.05) / (text + 0.05) >= READABLE
    assert (luminance(title[4]) < 0.2) == dark
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
    for dark in (False, True):
        assert open_narrow(tmp_path / "sweep/report.html", tmp_path / f"profile_{dark}", dark=dark) <= NARROW


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="needs the extra docs")
def test_the_site_fits_a_narrow_window(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "--no-directory-urls"]
    subprocess.run([*command, "-d", str(tmp_path / "s")], cwd=ROOT, check=True, capture_output=True)
    for page in ("index.html", "protection.html", "commands/publish.html", "reference/errors.html", "measured.html"):
        for dark in (False, True):
            assert open_narrow(tmp_path / "s" / page, tmp_path / f"profile_{dark}", dark=dark) <= NARROW, page
