"""Results of ``mpu eval`` and ``mpu sweep`` as a pandas data frame."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mpu_cli.errors import MpuError
from mpu_cli.files.boundary import read_json_object
from mpu_cli.files.manifest import RESULTS
from mpu_cli.files.resumption import read_lines
from mpu_cli.files.visible import visible
from mpu_cli.measuring.retain import FORMAT, LARGEST_RESULT, read_retain_log, sources_in

if TYPE_CHECKING:
    from pandas import DataFrame


def results(folder: str | Path) -> DataFrame:
    """A row for each experiment of a sweep's folder or, in any other folder, for each result of ``mpu eval``.

    The index, ``name``, is the experiment's or the file's. Columns of both: ``metrics.NAME``, the metrics. Of a sweep:
    each option that it varies; ``before.NAME`` and ``retain model.NAME``, the metrics of the model before unlearning
    and of the one that never saw the forget set; ``smallest_pairwise_cosine``, ``error_estimate``, ``noise_asked``,
    ``noise_survived`` and ``lost_to_rounding``, of the rounds; ``seconds`` and ``evaluation_seconds``. Of an
    evaluation: ``model``, its ``adapter`` and ``delta`` if it had them, ``benchmark`` and ``seconds``.
    """
    import pandas

    folder = Path(folder)
    if (folder / RESULTS).exists():
        rows = read_lines(folder / RESULTS, "run the sweep again")
    else:
        rows = []
        for path in visible(folder.glob("*.json")):
            document = read_json_object(path, LARGEST_RESULT)
            if document.get("format") != FORMAT["format"]:
                continue
            log = read_retain_log(path)
            facts = {name: document.get(name) for name in ("benchmark", "seconds")}
            metrics = {name: log.value(name) for name in log.metrics}
            rows.append({"name": path.stem, **sources_in(document), **facts, "metrics": metrics})
    if not rows:
        raise MpuError(f"{folder}: holds no results", "name a folder of `mpu sweep`, or one with results of `mpu eval`")
    return pandas.json_normalize(rows).set_index("name").drop(columns="digest", errors="ignore")
