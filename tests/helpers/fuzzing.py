"""What each party parses of the other's, on mutations of real files: an MpuError or a result, nothing else.

``TARGETS`` maps a name to a function that reads one mutated file in a folder of its own. tests/files/test_fuzz.py
plays a few hundred inputs, ``python -m tests.benchmarks.fuzz`` as many as one likes.
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
from contextlib import redirect_stdout
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyrage
import torch
from safetensors.torch import save_file

from mpu_cli.cli.driver import carry_out
from mpu_cli.commands.inspect import Inspect
from mpu_cli.errors import MpuError
from mpu_cli.files.boundary import unpack_folder
from mpu_cli.files.manifest import CopyManifest, delta_manifest, read_copy_manifest
from mpu_cli.files.reader import open_checkpoint
from mpu_cli.files.sealing import open_folder, seal_folder
from mpu_cli.flower.spool import COPY, FILE, validate_name
from mpu_cli.flower.watch import hand_on, read_answers, read_message
from mpu_cli.lab import endpoint
from mpu_cli.measuring.encoding import Item
from mpu_cli.measuring.receipt import (
    CopyFacts,
    as_text,
    check_signatures,
    new_receipt,
    read_receipt,
    with_signature,
)
from mpu_cli.measuring.retain import read_retain_log
from mpu_cli.measuring.verdict import SetScore, Share, Verdict
from mpu_cli.model.layout import layout_of
from mpu_cli.model.load import skeleton, tokenizer_of
from mpu_cli.model.source import open_model
from mpu_cli.model.staging import staged_adapter, staged_model
from mpu_cli.observer import Observer
from mpu_cli.protocol.keys import BaseIdentity, Keys, seal, unseal
from mpu_cli.protocol.publication import Publication
from mpu_cli.protocol.register import read_register
from mpu_cli.protocol.updates import read_updates
from mpu_cli.records.encode import Encoding
from mpu_cli.records.forms import question
from mpu_cli.records.knowledge import Tail
from mpu_cli.records.read import read_records
from mpu_cli.toml import read_toml
from mpu_cli.training.ledger import read_ledger
from mpu_cli.training.requests import read_requests
from tests.helpers.models import write_records

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
    mutated = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(mutated) + 1) if draw.random() < 0.5 else draw.randrange(min(len(mutated), 600) + 1)
        kind = draw.randrange(6)
        if kind == 0 and at < len(mutated):
            mutated[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            mutated[at : at + draw.randint(0, 40)] = draw.randbytes(draw.randint(0, 40))
        elif kind == 2:
            del mutated[at:]
        elif kind == 3:
            mutated[at:at] = mutated[at : at + draw.randint(1, 2000)]
        elif kind == 4:
            mutated[:8] = draw.choice((0, 1, 2**24, 2**24 + 1, 2**63, len(mutated), max(0, len(mutated) - 8))).to_bytes(
                8, "little"
            )
        else:
            text = draw.choice((b"{", b"[", b"9" * 400, b'"', b"null", b"-", b"1e999", b"\\u0000", b"]" * 50))
            mutated[at : at + draw.randint(0, 3)] = text * draw.choice((1, 1, 1, 3000))
    return bytes(mutated)


def mutated_json(document: Any, draw: random.Random) -> Any:
    """The document with one to three of its values or names replaced by junk, doubled or removed."""
    mutated = json.loads(json.dumps(document))
    for _ in range(draw.randint(1, 3)):
        places: list[tuple[Any, Any]] = []
        waiting = [mutated]
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
    return mutated


def _json_file(name: str) -> Callable[[Path, random.Random], None]:
    """Mutates one JSON file of a folder: as a document, or its bytes."""

    def mutate(folder: Path, draw: random.Random) -> None:
        path = folder / name
        if draw.random() < 0.7:
            mutated = mutated_json(json.loads(path.read_text()), draw)
            path.write_bytes(json.dumps(mutated).encode("utf-8", "surrogatepass"))
        else:
            path.write_bytes(mutated_bytes(path.read_bytes(), draw))

    mutate.document = name  # type: ignore[attr-defined]
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
    with staged_model(model):
        pass


def _config(folder: Path) -> None:
    skeleton(open_model(str(folder), links=False))


def _tokenizer(folder: Path) -> None:
    encoding = Encoding(tokenizer_of(open_model(str(folder), links=False)), "plain")
    encoding.encode([question("w4 w5", "w6", "record 1")])


def _delta(folder: Path) -> None:
    checkpoint = open_checkpoint(folder / "delta.safetensors", links=False)
    delta_manifest(checkpoint.metadata, checkpoint.path)
    for name in checkpoint.tensors:
        checkpoint.tensor(name)


def _read_receipt(path: Path) -> None:
    check_signatures(read_receipt(path), path)


def _archive(folder: Path) -> None:
    into = folder / "into"
    into.mkdir()
    unpack_folder(io.BytesIO((folder / "copy.tar").read_bytes()), into)


def _inspect(path: Path) -> None:
    """`mpu inspect`, which changes nothing and prints nothing that moves a terminal."""
    before = {each: each.stat().st_mtime_ns for each in path.parent.rglob("*")}
    printed = io.StringIO()
    with redirect_stdout(printed):
        for as_json in (False, True):
            carry_out(Inspect(path=path), dry_run=False, as_json=as_json)
    assert all(c.isprintable() or c == "\n" for c in printed.getvalue())
    assert before == {each: each.stat().st_mtime_ns for each in path.parent.rglob("*")}, "inspect changed something"


def _describe_and_read(name: str, *readers: Callable[[Path], object]) -> Callable[[Path], None]:
    """Describes the file ``name`` of a folder ("" for the folder), and then reads it with ``readers``."""

    def read(folder: Path) -> None:
        try:
            _inspect(folder / name)
        finally:
            for reader in readers:
                reader(folder / name)

    return read


def _keys(folder: Path) -> None:
    """What is sealed for the server may be anybody's: every secret is derived from it and used."""
    identity = pyrage.x25519.Identity.from_str((folder / "identity.txt").read_text().strip())
    keys = unseal(folder / "keys.bin", [identity], secret=bytes(32))
    publication = keys.publication
    publication.scheme.weights.sum()
    noise = publication.noise([1], str)
    scales = publication.scales(publication.kappa, publication.shared_kappa)
    noise.added_to(torch.zeros(1, 8), noise.subkeys("x", scales), scales, 0)


def _reseal(folder: Path, draw: random.Random) -> None:
    """Mutates what is inside the keys, and seals it again."""
    identity = pyrage.x25519.Identity.from_str((folder / "identity.txt").read_text().strip())
    document = pyrage.decrypt((folder / "keys.bin").read_bytes(), [identity])
    mutated = mutated_json(json.loads(document), draw)
    if draw.random() < 0.2:
        content = mutated_bytes(document, draw)
    else:
        content = json.dumps(mutated).encode("utf-8", "surrogatepass")
    (folder / "keys.bin").write_bytes(pyrage.encrypt(content, [identity.to_public()]))


def _line_of(name: str) -> Callable[[Path, random.Random], None]:
    """Mutates a line of a file of JSON lines, or its bytes."""

    def mutate(folder: Path, draw: random.Random) -> None:
        path = folder / name
        lines = path.read_bytes().split(b"\n")
        if draw.random() < 0.7:
            number = draw.randrange(len(lines) - 1)
            lines[number] = json.dumps(mutated_json(json.loads(lines[number]), draw)).encode("utf-8", "surrogatepass")
            path.write_bytes(b"\n".join(lines))
        else:
            path.write_bytes(mutated_bytes(path.read_bytes(), draw))

    return mutate


def _read_answers(folder: Path) -> None:
    read_answers(folder / "answered.jsonl")


def _adapter(folder: Path) -> None:
    with staged_adapter(folder):
        pass


def _open_sealed_copy(folder: Path) -> None:
    identity = pyrage.x25519.Identity.from_str((folder / "identity.txt").read_text().strip())
    (folder / "into").mkdir()
    open_folder(folder / "copy_1.age", [identity], folder / "into")


def _names(folder: Path) -> None:
    for line in (folder / "names").read_text(errors="replace").split("\n"):
        for pattern in (COPY, FILE):
            try:
                name = validate_name(line, pattern)
            except ValueError:
                continue
            assert (folder / name).resolve().is_relative_to(folder.resolve()), name


def _reply(folder: Path) -> None:
    """A completion as a server of the other party could send it."""
    reply = endpoint.document_of((folder / "reply.json").read_bytes(), "endpoint")
    item = Item((1, 2, 3, 4), 2, (1, 2), "place")
    remote = endpoint.Endpoint("http://localhost/v1", "m")
    for choice in endpoint.choices_of(reply, 1, remote.url):
        remote.scores_of(item, choice)


def _read_message(folder: Path) -> None:
    hand_on(read_message((folder / "message.json").read_bytes()), Observer())


def make_seeds(folder: Path) -> Path:
    """Real files to mutate, in ``folder``: a copy, a sharded copy, a delta, an archive, a reply."""
    from safetensors.torch import load_file

    from mpu_cli.files.manifest import DeltaManifest, as_metadata, copy_facts, delta_facts
    from mpu_cli.files.writer import CheckpointWriter
    from tests.helpers.models import random_model, save

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
    _make_documents(folder, copy)
    probs = {"token_logprobs": [None, -0.5, -0.25, -1.0], "top_logprobs": [None, {"a": -0.5}, {"b": -0.1}, {"c": -1.0}]}
    (folder / "reply/reply.json").write_text(json.dumps({"choices": [{"index": 0, "text": "a", "logprobs": probs}]}))
    return folder


def _make_documents(folder: Path, copy: Path) -> None:
    """What mpu writes besides checkpoints: results, ledgers, keys, an adapter, a run."""
    identity = pyrage.x25519.Identity.generate()
    publication = Publication(seed=bytes(32), run="run", shared_kappa=0.1, permanent_seed=bytes(32))
    base = BaseIdentity("/models/base", "/models/base/config.json", "blake3:" + "0" * 64)
    keys = Keys(publication, {"x": 0.1}, ("a", "b", "c"), base, "/models/public", {"x": 0.2})
    mechanism = {"noise_multiplier": 1.5, "sample_rate": 0.5, "steps": 3}
    ledger = [
        {"time": "2026-01-01T00:00:00+00:00", "identity": "i", "run": "run", "round": 1, "copy": 1, "weights": "w",
         "algorithm": "npo", "records": 6, "forget": None, "retain": None, "mechanism": mechanism, "data": "d",
         "reading_context": "s"},
        {"losses_of": "i", "forget": 1.5, "retain": 0.5},
    ]  # fmt: skip
    register = {"time": "2026-01-01T00:00:00+00:00", "run": "run", "round": 1, "content": "c", "noise_content": "c",
                "sample": {"dtypes": ["F32"], "values": [0.5]}, "permanent_sigma": {"x": 0.1},
                "calibrated_sigma": None}  # fmt: skip
    answered = [{"copy": "run/round_1/copy_1", "state": "begun", "digest": "d"},
                {"copy": "run/round_1/copy_1", "state": "answered"}]  # fmt: skip
    rows = {"0": {"input": "q", "prob": 0.5, "avg_loss": 1.5}}
    result = {"format": "mpu-eval", "benchmark": "qa", "model": {"source": "copy_1"},
              "metrics": {"forget_Q_A_Prob": {"agg_value": 0.5, "value_by_index": rows}}}  # fmt: skip
    run = {"mpu": "0.2", "base": "base", "experiment": {"algo": "npo"}, "published": {}}
    for name in ("keys", "documents", "adapter", "sealed", "run"):
        (folder / name).mkdir()
    (folder / "keys/identity.txt").write_text(str(identity))
    (folder / "keys/keys.bin").write_bytes(seal(keys, [identity.to_public()], secret=bytes(32)))
    source = {"forget": "forget.jsonl", "reading": {"turns": "all"}, "records": ["d"]}
    request = {"time": "2026-01-01T00:00:00+00:00", "run": "run", "round": 1, "copy": 1, "copy_id": "c",
               "copy_path": "copy_1", "weights": "w", "change": "blake3:0",
               "sources": [source], "options": {"retain": "retain.jsonl", "max_left": 0.1}}  # fmt: skip
    updates = [
        {"time": "t", "run": "run", "round": 1, "deltas": ["d.safetensors"], "fingerprints": ["blake3:0"],
         "keys": "keys.bin", "base": "blake3:1", "model": "unlearned", "rate": 1.0},
        {"time": "t", "checked_run": "run", "round": 2, "verdict": "pass", "receipt": "receipt.json"},
        {"time": "t", "rehearsed_run": "run", "round": 1, "base": "blake3:1", "step": 1.25},
    ]  # fmt: skip
    documents = {"ledger": ledger, "published": [register], "answered": answered, "requests": [request],
                 "updates": updates}  # fmt: skip
    for name, lines in documents.items():
        (folder / f"documents/{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "documents/recipe.toml").write_text("[unlearn]\nalgo = ['npo', 'graddiff']\nlr = 1e-5\n")
    write_records(folder / "documents/records.jsonl", 3, 1)
    (folder / "documents/eval.json").write_text(json.dumps(result))
    report = {"summary": "copy_1: hinge, 1 step", "warnings": ["w"], "facts": {"norm": 1.5, "steps": [{"forget": 1.5}]}}
    message = {"kind": "stage", "values": ["label", 1.5, "bytes"], "report": report}
    (folder / "documents/message.json").write_text(json.dumps(message))
    scores = dict.fromkeys(("forget", "forget before", "unseen"), SetScore(2, 0.5, 0.5))
    verdict = Verdict(Share(0.5, 0.4, 0.6), None, None, 0.05, 0.95, scores, tail=Tail(6, 3, 1, 0, 0))
    trained, measured = (
        CopyFacts(run="run", round=1, copy=1, copy_id="a", weights="blake3:" + digit * 64, reading_context="0" * 64)
        for digit in "12"
    )
    receipt = new_receipt(
        verdict, copy=measured, before=trained, public=None,
        records="0" * 64, nonce="0" * 64, version="1",
    )  # fmt: skip
    (folder / "documents/receipt.json").write_text(as_text(with_signature(receipt, "client", bytes(32))))
    (folder / "run/run.json").write_text(json.dumps(run))
    (folder / "run/log.jsonl").write_text(json.dumps({"step": "publish", "round": 1}) + "\n")
    factors = {
        f"base_model.model.model.layers.0.self_attn.q_proj.lora_{factor}.weight": torch.ones(2, 8) for factor in "AB"
    }
    save_file(factors, folder / "adapter/adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "alpha_pattern": {"q_.*": 2},
              "base_model_name_or_path": "base", "init_lora_weights": True, "task_type": "CAUSAL_LM"}  # fmt: skip
    (folder / "adapter/adapter_config.json").write_text(json.dumps(config))
    (folder / "sealed/identity.txt").write_text(str(identity))
    seal_folder(copy, "copy_1", folder / "sealed/copy_1.age", identity.to_public())
    (copy / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>", "additional_special_tokens": ["a"]}))
    (copy / "added_tokens.json").write_text(json.dumps({"<extra>": 95}))
    (copy / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    (copy / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [1], "temperature": 0.5, "stop_strings": ["x"]})
    )
    (copy / "README.md").write_text("| algorithm | npo |\n\n- a warning\n")


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
    "keys": ("keys", _reseal, _keys),
    "keys, sealed": ("keys", _bytes_of("keys.bin"), _describe_and_read("keys.bin")),
    "ledger": ("documents", _line_of("ledger.jsonl"), _describe_and_read("ledger.jsonl", read_ledger)),
    "register": ("documents", _line_of("published.jsonl"), _describe_and_read("published.jsonl", read_register)),
    "requests": ("documents", _line_of("requests.jsonl"), _describe_and_read("requests.jsonl", read_requests)),
    "updates": ("documents", _line_of("updates.jsonl"), _describe_and_read("updates.jsonl", read_updates)),
    "answered": ("documents", _line_of("answered.jsonl"), _read_answers),
    "result": ("documents", _json_file("eval.json"), _describe_and_read("eval.json", read_retain_log)),
    "receipt": ("documents", _json_file("receipt.json"), lambda folder: _read_receipt(folder / "receipt.json")),
    "training's message": ("documents", _json_file("message.json"), _read_message),
    "run": ("run", _json_file("run.json"), _describe_and_read("run.json")),
    "log": ("run", _line_of("log.jsonl"), _describe_and_read("")),
    "adapter config": ("adapter", _json_file("adapter_config.json"), _describe_and_read("", _adapter)),
    "adapter weights": ("adapter", _bytes_of("adapter_model.safetensors"), _describe_and_read("", _adapter)),
    "sealed copy": ("sealed", _bytes_of("copy_1.age"), _open_sealed_copy),
    "special tokens": ("copy", _json_file("special_tokens_map.json"), _tokenizer),
    "added tokens": ("copy", _json_file("added_tokens.json"), _tokenizer),
    "chat template": ("copy", _json_file("chat_template.json"), _tokenizer),
    "generation config": ("copy", _json_file("generation_config.json"), _copy),
    "records": ("documents", _line_of("records.jsonl"), lambda folder: read_records(folder / "records.jsonl")),
    "recipe": ("documents", _bytes_of("recipe.toml"), lambda folder: read_toml(folder / "recipe.toml")),
    "inspected copy": ("copy", _json_file("mpu.json"), _describe_and_read("")),
    "inspected delta": ("delta", _bytes_of("delta.safetensors"), _describe_and_read("delta.safetensors")),
}


# Every module that parses JSON, TOML or age: the targets that play it, or why nobody else writes what it reads.
READERS: dict[str, tuple[str, ...] | str] = {
    "commands/inspect.py": ("inspected copy", "inspected delta", "result", "run", "log", "keys, sealed"),
    "files/boundary.py": ("manifest", "keys"),
    "files/manifest.py": ("manifest", "delta", "inspected copy"),
    "files/reader.py": ("header", "delta", "index"),
    "files/resumption.py": ("ledger", "register", "answered", "log"),
    "files/sandbox.py": "a pipe to a process of its own",
    "files/sealing.py": ("sealed copy",),
    "flower/server_app.py": "the server's own state",
    "flower/watch.py": ("training's message", "answered"),
    "lab/report.py": ("log",),
    "lab/rounds.py": ("log",),
    "lab/sweep.py": "what mpu itself printed",
    "measuring/benchmarks/base.py": ("records",),
    "lab/endpoint.py": ("reply",),
    "lab/frame.py": ("result",),
    "measuring/receipt.py": ("receipt",),
    "measuring/results.py": ("tokenizer config",),
    "measuring/retain.py": ("result",),
    "model/source.py": ("config", "generation config", "config, built"),
    "model/staging.py": ("adapter config", "adapter weights", "special tokens", "added tokens", "chat template"),
    "options/declare.py": "the user's own command line",
    "protocol/keys.py": ("keys", "keys, sealed"),
    "protocol/register.py": ("register",),
    "protocol/updates.py": ("updates",),
    "records/encode.py": "--reading template_option",
    "records/forms.py": ("records",),
    "records/read.py": ("records",),
    "toml.py": ("recipe",),
    "training/copycheck.py": ("tokenizer",),
    "training/execution.py": "a seal that is checked with the client's secret",
    "training/ledger.py": ("ledger",),
    "training/loop.py": "the training's own log",
    "training/requests.py": ("requests",),
    "training/stopping.py": "a seal that is checked with the client's secret",
    "training/unlearn.py": "a digest that is compared",
}


def play(target: str, seeds: Path, scratch: Path, seed: int, report: Report) -> None:
    """One input: mutate, read, and judge."""
    source, mutate, read = TARGETS[target]
    room = scratch / "room"
    shutil.copytree(seeds / source, room / "input")
    mutate(room / "input", random.Random(f"{target} {seed}"))
    judge(f"{target} {seed}", lambda: read(room / "input"), report)
    if outside := [path.name for path in room.iterdir() if path.name != "input"]:
        report.problems.append(f"{target} {seed}: wrote {outside}")
    shutil.rmtree(room)


def judge(name: str, read: Callable[[], object], report: Report) -> None:
    """Note whether reading ends in a result or in an error of ours, and what it takes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.monotonic()
    try:
        read()
    except MpuError as error:
        report.refused += 1
        if "\n" in error.problem or len(error.problem) > 5000:
            report.problems.append(f"{name}: message of several lines or {len(error.problem)} characters")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        report.problems.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
    seconds = time.monotonic() - started
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    if seconds > SECONDS or grown > BYTES:
        report.problems.append(f"{name}: {seconds:.1f} s, {grown:,} bytes")
    report.ran += 1
    report.slowest = max(report.slowest, seconds)
