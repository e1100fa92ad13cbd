"""Where things lie: the clone, and the models and data that CI has beside it."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("MPU_TEST_SHARED") or ROOT.parent / "shared")
