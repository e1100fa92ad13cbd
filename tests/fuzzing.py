"""What each party parses of the other's, on mutations of real files: an MpuError or a result, nothing else.

``TARGETS`` maps a name to a function that reads one mutated file in a folder of its own. tests/test_fuzz.py plays a few
hundred inputs, ``python -m tests.benchmarks.fuzz`` as many as one likes.
"""

from __future__ import annotations

import io
import json
import random
import resource
import shutil
import tarfile
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpu_cli.architectures.layout import layout_of
from mpu_cli.boundary.archives import unpack_folder
from mpu_cli.checkpoint.reader import open_checkpoint
from mpu_cli.errors import MpuError
from mpu_cli.evaluation import endpoint
from mpu_cli.evaluation.encoding import Item
from mpu_cli.federation.spool import COPY, FILE, checked
from mpu_cli.manifest import delta_manifest, read_copy_manifest
from mpu_cli.models.loading import skeleton, tokenizer_of
from mpu_cli.models.source import open_model
from mpu_cli.models.staging import staged
from mpu_cli.records.encoding import Encoding
from mpu_cli.records.record import question

SECONDS, BYTES = 10.0, 1 << 30  # that an input may take
JUNK: tuple[object, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 10**400, -(10**30), 0.5, 1e308, float("inf"), "", "x", "../x", "/etc/passwd",
    "a/b", "\x00", "\x1b[2J", "\ud800", "ü" * 300, "x" * 70_000, [], {}, [[]], [None], {"": {}}, ["x"] * 2000,
    {"model_type": "llama"}, "owner/repo", "https://h/x", "float16", "auto",
)  # fmt: skip


@dataclass
class Report:
    """How many inputs ran, how many were refused, and what went wrong, by kind and input."""

    ran: int = 0
    refused: int = 0
    slowest: float = 0.0
    problems: list[str] = field(default_factory=list)


def mutated_bytes(content: bytes, draw: random.Random) -> bytes:
    """A few changes: bits, bytes, truncation, repeats, numbers of a header."""
    made = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(made) + 1) if draw.random() < 0.5 else draw.randrange(min(len(made), 600) + 1)
        kind = draw.randrange(6)
        if kind == 0 and at < len(made):
            made[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            made[at : at + draw.randint(0, 40)] = draw.randbytes(draw.randint(0, 40))
        elif kind == 2:
            del made[at:]
        elif kind == 3:
            made[at:at] = made[at : at + draw.randint(1, 2000)]
        elif kind == 4:
            made[:8] = draw.choice((0, 1, 2**24, 2**24 + 1, 2**63, len(made), max(0, len(made) - 8))).to_bytes(
                8, "little"
            )
        else:
            text = draw.choice((b"{", b"[", b"9" * 400, b'"', b"null", b"-", b"1e999", b"\\u0000", b"]" * 50))
            made[at : at + draw.randint(0, 3)] = text * draw.choice((1, 1, 1, 3000))
    return bytes(made)


def mutated_json(document: Any, draw: random.Random) -> Any:
    """The document with one to three of its values or names replaced by junk, doubled or removed."""
    made = json.loads(json.dumps(document))
    for _ in range(draw.randint(1, 3)):
        places: list[tuple[Any, Any]] = []
        waiting = [made]
        while waiting and len(places) < 5000:
            each = waiting.pop()
            keys = list(each) if isinstance(each, dict) else range(len(each))
            places += [(each, key) for key in keys]
            waiting += [each[key] for key in keys if isinstance(each[key], dict | list) and each[key]]
        if not places:
            return deepcopy(draw.choice(JUNK))
        holder, key = draw.choice(places)
        kind = draw.random()
        if kind < 0.6:
            holder[key] = deepcopy(draw.choice(JUNK))
        elif kind < 0.75 and isinstance(holder, dict):
            holder[str(draw.choice(JUNK))[:80]] = holder.pop(key)
        elif kind < 0.9:
            del holder[key]
        elif isinstance(holder, dict):
            names = ("transformers_weights", "auto_map", "_name_or_path", "tokenizer_file", "chat_template")
            holder[draw.choice(names)] = deepcopy(draw.choice(JUNK))
    return made


def _json_file(name: str) -> Callable[[Path, random.Random], None]:
    """Mutates one JSON file of a folder: as a document, or its bytes."""

    def mutate(folder: Path, draw: random.Random) -> None:
        path = folder / name
        if draw.random() < 0.7:
            made = mutated_json(json.loads(path.read_text()), draw)
            path.write_bytes(json.dumps(made).encode("utf-8", "surrogatepass"))
        else:
            path.write_bytes(mutated_bytes(path.read_bytes(), draw))

    return mutate


def _bytes_of(name: str) -> Callable[[Path, random.Random], None]:
    def mutate(folder: Path, draw: random.Random) -> None:
        (folder / name).write_bytes(mutated_bytes((folder / name).read_bytes(), draw))

    return mutate


def _copy(folder: Path) -> None:
    """What the client does with a copy before it loads weights."""
    model = open_model(str(folder), links=False)
    read_copy_manifest(folder, model.checkpoint.metadata)
    layout_of(model.checkpoint.tensors, model.config, model.source)
    with staged(model):
        pass


def _config(folder: Path) -> None:
    skeleton(open_model(str(folder), links=False))


def _tokenizer(folder: Path) -> None:
    encoding = Encoding(tokenizer_of(open_model(str(folder), links=False)), "plain")
    encoding.encode([question("w4 w5", "w6", "record 1")])


def _delta(folder: Path) -> None:
    held = open_checkpoint(folder / "delta.safetensors", links=False)
    delta_manifest(held.metadata, held.path)
    for name in held.tensors:
        held.tensor(name)


def _archive(folder: Path) -> None:
    into = folder / "into"
    into.mkdir()
    unpack_folder(io.BytesIO((folder / "copy.tar").read_bytes()), into)


def _names(folder: Path) -> None:
    for line in (folder / "names").read_text(errors="replace").split("\n"):
        for pattern in (COPY, FILE):
            try:
                name = checked(line, pattern)
            except ValueError:
                continue
            assert (folder / name).resolve().is_relative_to(folder.resolve()), name


def _reply(folder: Path) -> None:
    """A completion as a server of the other party could send it."""
    reply = endpoint.document_of((folder / "reply.json").read_bytes(), "endpoint")
    item = Item((1, 2, 3, 4), 2, (1, 2), "place")
    asked = endpoint.Endpoint("http://localhost/v1", "m")
    for choice in endpoint.choices_of(reply, 1, asked.url):
        asked.scores_of(item, choice)


def make_seeds(folder: Path) -> Path:
    """Real files to mutate, in ``folder``: a copy, a sharded copy, a delta, an archive, a reply."""
    from safetensors.torch import load_file

    from mpu_cli.checkpoint.writer import CheckpointWriter
    from mpu_cli.manifest import CopyManifest, DeltaManifest, as_metadata, copy_facts, delta_facts
    from tests.models import random_model, save

    copy = save(random_model("llama"), folder / "copy")
    origin = CopyManifest("run", 1, 1, 2, "0123abcd", "signed")
    delta = DeltaManifest(origin, "npo", trained={"key": "ab"})
    (copy / "mpu.json").write_text(json.dumps(copy_facts(origin)))
    weights = load_file(copy / "model.safetensors")
    specs = {name: ("F32", tuple(tensor.shape)) for name, tensor in weights.items()}
    for target, limit, facts in (
        (copy / "model.safetensors", 10**9, copy_facts(origin)), (folder / "shards", 100_000, copy_facts(origin)),
        (folder / "delta" / "delta.safetensors", 10**9, delta_facts(delta)),
    ):  # fmt: skip
        target.unlink(missing_ok=True)
        (target if target.suffix == "" else target.parent).mkdir(exist_ok=True)
        with CheckpointWriter(target, specs, as_metadata(facts), max_shard=limit) as writer:
            for name, tensor in weights.items():
                writer.tensor(name).copy_(tensor)
    for name in ("config.json", "mpu.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(copy / name, folder / "shards" / name)
    (folder / "archive").mkdir()
    with tarfile.open(folder / "archive/copy.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
        archive.add(copy, "copy_1")
    (folder / "names").mkdir()
    (folder / "names/names").write_text("run/round_1/copy_2\nmodel.safetensors\nmodel.safetensors/x\n")
    (folder / "reply").mkdir()
    probs = {"token_logprobs": [None, -0.5, -0.25, -1.0], "top_logprobs": [None, {"a": -0.5}, {"b": -0.1}, {"c": -1.0}]}
    (folder / "reply/reply.json").write_text(json.dumps({"choices": [{"index": 0, "text": "a", "logprobs": probs}]}))
    return folder


# Name → folder of make_seeds, what is mutated in it, what reads it.
TARGETS: dict[str, tuple[str, Callable[[Path, random.Random], None], Callable[[Path], None]]] = {
    "header": ("copy", _bytes_of("model.safetensors"), _copy),
    "index": ("shards", _json_file("model.safetensors.index.json"), _copy),
    "manifest": ("copy", _json_file("mpu.json"), _copy),
    "config": ("copy", _json_file("config.json"), _copy),
    "config, built": ("copy", _json_file("config.json"), _config),
    "tokenizer": ("copy", _json_file("tokenizer.json"), _tokenizer),
    "tokenizer config": ("copy", _json_file("tokenizer_config.json"), _tokenizer),
    "delta": ("delta", _bytes_of("delta.safetensors"), _delta),
    "archive": ("archive", _bytes_of("copy.tar"), _archive),
    "names": ("names", _bytes_of("names"), _names),
    "reply": ("reply", _json_file("reply.json"), _reply),
}


def play(target: str, seeds: Path, scratch: Path, seed: int, report: Report) -> None:
    """One input: mutate, read, and judge."""
    source, mutate, read = TARGETS[target]
    room = scratch / "room"
    shutil.copytree(seeds / source, room / "input")
    mutate(room / "input", random.Random(f"{target} {seed}"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.monotonic()
    try:
        read(room / "input")
    except MpuError as error:
        report.refused += 1
        if "\n" in error.problem or len(error.problem) > 5000:
            report.problems.append(f"{target} {seed}: message of several lines or {len(error.problem)} characters")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        report.problems.append(f"{target} {seed}: {type(error).__name__}: {str(error)[:200]}")
    seconds = time.monotonic() - started
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    if seconds > SECONDS or grown > BYTES:
        report.problems.append(f"{target} {seed}: {seconds:.1f} s, {grown:,} bytes")
    if outside := [path.name for path in room.iterdir() if path.name != "input"]:
        report.problems.append(f"{target} {seed}: wrote {outside}")
    report.ran += 1
    report.slowest = max(report.slowest, seconds)
    shutil.rmtree(room)
