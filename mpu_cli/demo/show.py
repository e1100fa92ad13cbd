"""The demonstration: both parties on one machine, each in its own folder, and what came of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from mpu_cli.checkpoint.source import open_model
from mpu_cli.checkpoint.transaction import Transaction
from mpu_cli.client.data import Encoding
from mpu_cli.client.loading import load
from mpu_cli.client.records import Record, read_records
from mpu_cli.client.training import Loop
from mpu_cli.client.unlearn import Options, unlearn
from mpu_cli.demo.model import make_model
from mpu_cli.demo.people import make_people
from mpu_cli.errors import MpuError
from mpu_cli.evaluation.answers import greedy_answer, loss_per_token
from mpu_cli.server.aggregate import Aggregation, aggregate, open_deltas
from mpu_cli.server.keys import make_identity, read_identities, seal, unseal
from mpu_cli.server.noise import default_alphas
from mpu_cli.server.publish import publish
from mpu_cli.server.randomness import new_seed

PEOPLE, FORGOTTEN = 40, 4
EPOCHS = 60  # of training; the model then knows its records by heart
COPIES, KAPPA = 2, 0.01
OPTIONS = Options(
    "npo", epochs=20, constants={"beta": 0.5}, loop=Loop(optimizer="adamw-blockwise", lr=3e-4, batch_size=10)
)

# (label, total) → what advances a bar of that length; the command line draws it
Bar = Callable[[str, int], AbstractContextManager[Callable[..., None]]]


@dataclass(frozen=True)
class Knowledge:
    """What a model knows: loss per answer token on both sets, and its answers to one question of each."""

    forget: float
    retain: float
    forget_answer: str
    retain_answer: str


@dataclass(frozen=True)
class Demonstration:
    """What was made, and what the models know before and after."""

    unlearned: Path
    questions: tuple[Record, Record]
    before: Knowledge
    after: Knowledge
    aggregation: Aggregation


def run_demo(folder: Path, *, seed: int, bar: Bar, tell: Callable[[str], None]) -> Demonstration:
    """Play server and client in ``folder``, which is made, and removed again if something fails.

    ``tell`` gets a line for each step. Raises MpuError if ``folder`` exists.
    """
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        folder.mkdir()
    except FileExistsError as error:
        raise MpuError(f"{folder}: exists already; name another directory for the demonstration") from error
    try:
        with Transaction():  # so that an interrupt comes as an exception
            return _play(folder / "server", folder / "client", seed=seed, bar=bar, tell=tell)
    except BaseException:
        shutil.rmtree(folder)
        raise


def _play(server: Path, client: Path, *, seed: int, bar: Bar, tell: Callable[[str], None]) -> Demonstration:
    server.mkdir()
    client.mkdir()
    people = make_people(PEOPLE, seed)
    parts = people[:FORGOTTEN], people[FORGOTTEN:]
    forget, retain = ([record for person in part for record in person] for part in parts)
    for name, records in (("forget", forget), ("retain", retain)):
        _write_records(client / f"{name}.jsonl", records)

    with bar("train a model", EPOCHS) as advance:
        make_model(
            forget + retain, server / "base", epochs=EPOCHS, seed=seed,
            on_step=lambda losses, steps: advance(EPOCHS / steps, f"loss {losses.loss:.2f}"),
        )  # fmt: skip
    before = _knowledge(server / "base", forget, retain)
    tell(f"The server trained a model on {len(forget + retain)} facts about {PEOPLE} people.")

    make_identity(server / "identity.txt")
    identities = read_identities(server / "identity.txt")
    base = open_model(str(server / "base"))
    publication = publish(
        base, None, alphas=default_alphas(COPIES), kappa=KAPPA, symmetries="paper", dtype=None, seed=new_seed(),
        seed_is_secret=True, run=None, round_=1, out=server, keys_path=server / "keys.bin",
        seal=lambda keys: seal(keys, [known.to_public() for known in identities]), force=False,
        progress=lambda _: None,
    )  # fmt: skip
    for path in publication.copies:
        shutil.move(path, client / path.name)  # all that goes from the server to the client
    tell(f"The server published {COPIES} noisy copies in secret coordinates and kept the keys.")

    deltas = []
    for path in publication.copies:
        with bar(f"unlearn {path.name}", OPTIONS.epochs) as advance:
            unlearn(
                open_model(str(client / path.name)), read_records(client / "forget.jsonl"),
                read_records(client / "retain.jsonl"), OPTIONS,
                target=client / "deltas" / f"{path.name}.safetensors", force=False,
                on_step=lambda losses, steps: advance(OPTIONS.epochs / steps, f"forget {losses.forget:.2f}"),
            )  # fmt: skip
        deltas.append(client / "deltas" / f"{path.name}.safetensors")
    tell(f"The client unlearned {len(forget)} facts about {FORGOTTEN} people on each copy and returned the changes.")

    keys = unseal(server / "keys.bin", identities)
    aggregation = aggregate(
        base, open_deltas(deltas, keys), keys, server_lr=1.0, dtype=None, out=server / "unlearned", force=False,
        progress=lambda _: None,
    )  # fmt: skip
    tell("The server undid the coordinates, averaged the changes so that the noise cancels, and applied them.")
    after = _knowledge(server / "unlearned", forget, retain)
    return Demonstration(aggregation.path, (forget[0], retain[0]), before, after, aggregation)


def _write_records(path: Path, records: Sequence[Record]) -> None:
    lines = [json.dumps({"question": record.question, "answer": record.answer}) for record in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _knowledge(folder: Path, forget: Sequence[Record], retain: Sequence[Record]) -> Knowledge:
    model, tokenizer = load(folder, torch.float32, "cpu")
    encoding = Encoding(tokenizer)
    sets = [encoding.encode(records) for records in (forget, retain)]
    losses = [loss_per_token(model, examples) for examples in sets]
    return Knowledge(*losses, *(greedy_answer(model, tokenizer, examples[0]) for examples in sets))
