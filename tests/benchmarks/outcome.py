"""Whether the default commands end in a pass on the server's model, judged by plain transformers.

python -m tests.benchmarks.outcome MODEL FORGET RETAIN HELD UNSEEN [PUBLISH OPTION …]

Plays publish, unlearn and aggregate word for word, no option but paths and those of publish, and goes along the update
that they find. At each of some multiples of the step that was taken, prints what is left of FORGET and kept of HELD,
records that the model knows and no command sees, as shares of what it knew beyond what it guesses of UNSEEN, records
that it never saw; and the tail: how many of FORGET are known better than 95 in 100 of UNSEEN and by more than 5 %. A
step passes with at most 5 % left, 95 % kept, and no more records in the tail than of as many unseen ones by chance.
Last, the row of docs/data/outcome.csv: left, kept, tail, training steps, the client's seconds, whether it passes, and
the multiples that do. With MPU_UNLEARN_UNSEEN=FILE in the environment, the client has unseen records, too. Nothing of
mpu computes the numbers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, quantiles

import torch
from scipy.stats import binom
from transformers import AutoModelForCausalLM, AutoTokenizer

SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
DATE = "10 Apr 2025"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = (0.8, 0.9, 1.0, 1.1, 1.25)  # times the step that was taken
MAX_LEFT, MIN_KEPT = 0.05, 0.95
TAIL = 0.95  # quantile of UNSEEN, and the share of draws that have no more records above it than pass


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
    """What is left of the records to forget and kept of those held out, of what was known before and is not guessed."""
    left, kept = ((after[name] - after["unseen"]) / (before[name] - before["unseen"]) for name in ("forget", "held"))
    return left, kept


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
    request = Path(files["forget"]).read_text(encoding="utf-8").splitlines()
    base = load(model)
    before = scores_of(base, model, judged)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CONFIG_HOME"] = f"{folder}/config"  # the notes of the requests
        run("publish", str(Path(model).resolve()), *options, folder=folder)
        copies = sorted(path.name for path in Path(folder).glob("copy_*"))
        seconds = run("unlearn", *copies, "--forget", files["forget"], "--retain", files["retain"], folder=folder)
        run("aggregate", "deltas", "--keys", "keys.bin", folder=folder)
        ledger = Path(folder, "config/mpu/ledger.jsonl").read_text(encoding="utf-8").splitlines()
        schedule = next(filter(None, (json.loads(line).get("schedule") for line in reversed(ledger))))
        unlearned = load(f"{folder}/unlearned")
    starts = {name: parameter.detach().clone() for name, parameter in base.named_parameters()}
    ends = {name: parameter.detach() for name, parameter in unlearned.named_parameters()}

    def judge(step: float) -> tuple[float, float, int]:
        """What is left and kept that far along the update, and the number of records in the tail."""
        with torch.no_grad():
            for name, parameter in base.named_parameters():
                parameter.copy_(torch.lerp(starts[name], ends[name], step))
        values = {name: probabilities(base, model, file) for name, file in judged.items()}
        after = {name: fmean(each) for name, each in values.items()}
        at_max_left = after["unseen"] + MAX_LEFT * (before["forget"] - before["unseen"])
        limit = max(at_max_left, quantiles(values["unseen"], n=20, method="inclusive")[-1])
        left, kept = shares(before, after)
        return left, kept, sum(value > limit for value in values["forget"])

    passing = []
    for step in STEPS:
        left, kept, tail = judge(step)
        if left <= MAX_LEFT and kept >= MIN_KEPT and tail <= binom.ppf(TAIL, len(request), 1 - TAIL):
            passing.append(step)
        print(f"{step:g} times the step: {left:.1%} left, {kept:.1%} kept, {tail} records in the tail", flush=True)
        if step == 1:
            at_one = f"{100 * left:.1f} %,{100 * kept:.1f} %,{tail} of {len(request)}"
    span = f"{min(passing):g} to {max(passing):g}" if passing else "none"
    print(f"{at_one},{schedule['steps']},{seconds:.0f},{'yes' if 1 in passing else 'no'},{span}")


if __name__ == "__main__":
    main(sys.argv[1:])
