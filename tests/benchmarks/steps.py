"""How long to train on a copy with noise: what the copy shows, and what the server's model has, every ten steps.

python -m tests.benchmarks.steps MODEL PUBLIC FORGET RETAIN HELD UNSEEN [STEPS [SEED]]

Publishes MODEL with the default noise, in its own coordinates so that the change can be applied on the way, and trains
on the copy without a stop (120 steps by default). A row: the step; what is left of FORGET and kept of held-out records
on the copy; what is left of FORGET and kept of HELD, records that no command sees, on MODEL with once and with 1.25
times the change. The last line names the step after which the copy had forgotten, and thrice that.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mpu_cli.cli.main import main as mpu
from mpu_cli.records.knowledge import Probabilities, share_kept, share_left
from mpu_cli.training import unlearn
from mpu_cli.training.stopping import EVAL_STEPS, TRAINED_ON, EarlyStopping
from tests.benchmarks.outcome import load, probabilities

SCALES = (1.0, 1.25)  # times the change


class Recording(EarlyStopping):
    """Scores as ``EarlyStopping`` does, and never stops; ``rows`` gets what the server's model has then."""

    base: Mapping[str, torch.Tensor]
    folder: str
    files: Mapping[str, str]
    before: Mapping[str, list[float]]
    rows: list[list[object]]

    def on_step_end(self, _: Any, state: Any, __: Any, **values: Any) -> None:
        if state.global_step % EVAL_STEPS:
            return
        model = values["model"]
        scores = self._scorer.score(model, state.global_step)
        self.history.append(scores)
        row: list[object] = [scores.step, f"{scores.left:.1%}", f"{scores.kept:.1%}"]
        copy = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        for scale in SCALES:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    before = self.base[name].to(parameter.device, torch.float32)
                    change = copy[name] - self._initial[name] if name in self._initial else 0.0
                    parameter.copy_(before + scale * change)
            after = {name: probabilities(model.eval(), self.folder, file) for name, file in self.files.items()}
            left = share_left(_of(after), _of(self.before))
            row += [f"{left:.1%}", f"{share_kept(after['held'], self.before['held']):.1%}"]
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(copy[name])
        model.train()
        self.rows.append(row)
        print("\t".join(map(str, row)), flush=True)


def _of(scores: Mapping[str, list[float]]) -> Probabilities:
    return Probabilities.of(scores["forget"], scores["unseen"])


def main(arguments: Sequence[str]) -> None:
    model, public, *named = arguments[:6]
    forget, retain, held, unseen = (str(Path(name).resolve()) for name in named)
    steps, seed = (arguments[6:7] or ["120"])[0], (arguments[7:8] or ["0"])[0]
    Recording.files = {"forget": forget, "held": held, "unseen": unseen}
    Recording.folder, Recording.rows = model, []
    Recording.base = load_file(Path(model) / "model.safetensors")
    whole = load(model)
    Recording.before = {name: probabilities(whole, model, file) for name, file in Recording.files.items()}
    del whole
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", folder)
        patch.setattr(unlearn, "EarlyStopping", Recording)
        patch.setattr(sys, "exit", lambda _: None)
        for command in (
            ["publish", model, "--public", public, "--symmetries", "none", "--seed", seed, "--out", folder,
             "--keys", f"{folder}/keys.bin"],
            ["unlearn", f"{folder}/copy_1", "--forget", forget, "--retain", retain, "--unseen", unseen, "--max-steps",
             steps, "--seed", seed, "--out", f"{folder}/d.safetensors"],
        ):  # fmt: skip
            try:
                mpu([*command, "--quiet"])
            except SystemExit as ended:
                if ended.code:
                    raise
    history = [int(str(row[0])) for row in Recording.rows if float(str(row[1]).rstrip("%")) <= 2.5]
    if history:
        print(f"forgotten on the copy after {history[0]} steps; {TRAINED_ON} times that: {TRAINED_ON * history[0]}")


if __name__ == "__main__":
    main(sys.argv[1:])
