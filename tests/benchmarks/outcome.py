"""Whether the default commands end in a pass on the server's model, judged by plain transformers.

python -m tests.benchmarks.outcome MODEL FORGET RETAIN HELD UNSEEN [PUBLISH OPTION …]

Plays publish, unlearn and aggregate word for word, no option but paths and those of publish, and prints what is left of
FORGET and what is kept of HELD, records that the model knows and no command sees, as shares of what it knew; then both
for other steps along the same update, times the one that was taken, and what is left then on the copy with as much
noise again, if there is one copy with permanent noise. UNSEEN are records that it never saw; with
MPU_UNLEARN_UNSEEN=FILE in the environment, the client has them, too. Nothing of mpu computes the numbers.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
DATE = "10 Apr 2025"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = (0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.6)  # times the step that was taken


def probabilities(model: torch.nn.Module, folder: str, file: str) -> list[float]:
    """exp(mean log-probability of the answer's tokens) of each record of ``file``, with the tokenizer in ``folder``."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    values = []
    for line in Path(file).read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        messages = [SYSTEM, {"role": "user", "content": record["question"]}]
        answer = {"role": "assistant", "content": record["answer"]}
        apply = tokenizer.apply_chat_template  # type: ignore[attr-defined]
        prompt = apply(messages, add_generation_prompt=True, return_dict=False, date_string=DATE)
        full = apply([*messages, answer], return_dict=False, date_string=DATE)
        while not tokenizer.decode(full[-1:]).strip():  # type: ignore[attr-defined] # a line's end after the turn
            full = full[:-1]
        ids = torch.tensor([full], device=DEVICE)
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        losses = torch.nn.functional.cross_entropy(logits, ids[0, len(prompt) :], reduction="none")
        values.append(float((-losses.mean()).exp()))
    return values


def scores(folder: str, files: dict[str, str]) -> dict[str, float]:
    """The mean probability of each set under the model in ``folder``."""
    return scores_of(load(folder), folder, files)


def load(folder: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE).eval()


def scores_of(model: torch.nn.Module, folder: str, files: dict[str, str]) -> dict[str, float]:
    """The same of ``model``, with the tokenizer in ``folder``."""
    return {name: fmean(probabilities(model, folder, file)) for name, file in files.items()}


def shares(before: dict[str, float], after: dict[str, float]) -> tuple[float, float]:
    """What is left of the records to forget, and what is kept of those held out, of what was known before."""
    left = (after["forget"] - after["unseen"]) / (before["forget"] - before["unseen"])
    return left, after["held"] / before["held"]


def run(*arguments: str, folder: str) -> float:
    """Run mpu in ``folder``; the seconds that it took."""
    started = time.monotonic()
    subprocess.run([sys.executable, "-m", "mpu_cli", *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - started


def main(arguments: Sequence[str]) -> None:
    model, *named = arguments[:5]
    files = dict(
        zip(("forget", "retain", "held", "unseen"), (str(Path(name).resolve()) for name in named), strict=True)
    )
    options = [str(Path(each).resolve()) if Path(each).exists() else each for each in arguments[5:]]
    judged = {name: files[name] for name in ("forget", "held", "unseen")}
    before = scores(model, judged)
    with tempfile.TemporaryDirectory() as folder:
        run("publish", str(Path(model).resolve()), *options, folder=folder)
        copies = sorted(path.name for path in Path(folder).glob("copy_*"))
        seconds = run("unlearn", *copies, "--forget", files["forget"], "--retain", files["retain"], folder=folder)
        run("aggregate", "deltas", "--keys", "keys.bin", folder=folder)
        base, unlearned = load(model), load(f"{folder}/unlearned")
        noisy, delta = None, {}
        if len(copies) == 1 and (share := json.loads(Path(folder, copies[0], "mpu.json").read_text())["noise"]):
            noisy, delta = (
                with_noise(load(f"{folder}/{copies[0]}"), share),
                load_file(f"{folder}/deltas/copy_1.safetensors"),
            )
    after = scores_of(unlearned, model, judged)
    left, kept = shares(before, after)
    verdict = "pass" if left <= 0.05 and kept >= 0.95 else "fail"
    print(f"{verdict}: {left:.1%} left, {kept:.1%} kept; unlearn took {seconds:.0f} s; before {before}, after {after}")
    starts = {name: parameter.detach().clone() for name, parameter in base.named_parameters()}
    ends = dict(unlearned.named_parameters())
    for step in STEPS:
        with torch.no_grad():
            for name, parameter in base.named_parameters():
                parameter.copy_(torch.lerp(starts[name], ends[name], step))
        left, kept = shares(before, scores_of(base, model, judged))
        on_copy = ""
        if noisy:
            on_copy = f"; {left_with(noisy, delta, step, model, judged):.1%} left on the copy with as much noise again"
        print(f"{step:g} times the step: {left:.1%} left, {kept:.1%} kept{on_copy}")


def with_noise(model: torch.nn.Module, share: float) -> torch.nn.Module:
    """``model`` with normal noise of ``share`` of each matrix's root mean square."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(share * parameter.square().mean().sqrt() * torch.randn_like(parameter))
    return model


def left_with(
    model: torch.nn.Module, delta: dict[str, torch.Tensor], step: float, folder: str, files: dict[str, str]
) -> float:
    """What is left of what ``model`` knows if it is given ``step`` times ``delta``, which is taken back again."""
    before, parameters = scores_of(model, folder, files), dict(model.named_parameters())
    starts = {name: parameters[name].detach().clone() for name in delta}
    with torch.no_grad():
        for name, change in delta.items():
            parameters[name].add_(step * change.to(DEVICE))
    left, _ = shares(before, scores_of(model, folder, files))
    with torch.no_grad():
        for name, start in starts.items():
            parameters[name].copy_(start)
    return left


if __name__ == "__main__":
    main(sys.argv[1:])
