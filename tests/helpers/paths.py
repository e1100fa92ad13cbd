"""Where things lie: the clone with its examples, and the models and data that CI has beside it."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("MPU_TEST_SHARED") or ROOT.parent / "shared")


def example(name: str) -> ModuleType:
    """examples/NAME.py, which lies in no package."""
    path = ROOT / f"examples/{name}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
