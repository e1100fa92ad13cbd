"""``mpu inspect``: what a file is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mpu_cli.commands.secrets import opened_keys
from mpu_cli.commands.status import facts_of_folder
from mpu_cli.errors import MpuError
from mpu_cli.files.boundary import AGE_HEADER, open_regular, read_json_object
from mpu_cli.files.manifest import PLANNED, RESULTS, CopyManifest, DeltaManifest, ModelManifest, facts_of, manifest_of
from mpu_cli.files.resumption import read_lines
from mpu_cli.measuring.retain import LARGEST_RESULT, sources_in
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.command import IDENTITY, PASSPHRASE_FILE, Command, Opening, Report
from mpu_cli.options.declare import option
from mpu_cli.wording import command_line, one_line

LONGEST_TEXT = 2000  # characters of a value
# Weights that have no manifest of their own, by the format in their metadata: in words, and the facts that are shown.
STATED = {
    "mpu-copy": ("weights of a copy", [field.name for field in fields(CopyManifest)]),
    "mpu-reference": (
        "a reference model's probabilities for a client's records: keep it with the client", ["run", "copy", "asks"]
    ),
    "mpu-model": ("model, after aggregation", ["run", "round"]),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Inspect(Command):
    """Describe PATH: its kind, what it belongs to, its tensors. Never shows secrets, even from key files.

    Changes nothing. PATH may be a link; links inside a folder are not followed.
    """

    NAME = "inspect"
    EXAMPLE = "mpu inspect copy_1"

    path: Path = option(
        ...,
        "Anything that mpu made: a copy, delta, model, key file, identity, result, log or folder.",
        metavar="PATH",
        argument=True,
    )
    tensors: bool = option(False, "List every tensor.")
    identity: Path | None = option(None, IDENTITY, metavar="FILE")
    passphrase_file: Path | None = option(None, PASSPHRASE_FILE, metavar="FILE")

    def run(self, observer: Observer = SILENT) -> dict[str, Any]:  # noqa: ARG002 (as all commands have it)
        """The facts, by their names."""
        from mpu_cli.files.sealing import read_identities

        path = self.path
        if path.name == "mpu.json" and path.is_file():
            path = path.parent
        if not path.exists():
            raise MpuError(f"{path}: no such file or directory")
        if path.is_symlink():
            path = path.resolve()
        head = b""
        if not path.is_dir():
            with open_regular(path) as file:
                head = file.read(64)
        if head.startswith(AGE_HEADER):
            return _sealed_facts(path, self.identity, self.passphrase_file)
        if head.startswith((b"AGE-SECRET-KEY-", b"# ")):
            public_keys = [str(identity.to_public()) for identity in read_identities(path)]
            return {"kind": "age identity (secret: opens key files)", "public keys": public_keys, "mode": _mode(path)}
        return _document(path, head) or _folder(path) or _checkpoint(path, self.tensors)

    def report(self, facts: dict[str, Any], observer: Observer) -> Report:  # noqa: ARG002 (as all commands have it)
        shown = {name: _bounded(value) for name, value in facts.items()}
        return Report(_lines(shown), shown)


def _sealed_facts(path: Path, identity: Path | None, passphrase_file: Path | None) -> dict[str, object]:
    from mpu_cli.files.sealing import default_identity_path
    from mpu_cli.protocol.keys import MAX_KEYS_FILE, needs_passphrase

    by_age = command_line("age", "-d", "-i", "IDENTITY", path)
    copy = {
        "kind": "copy, sealed for its client (age v1)",
        "bytes": path.stat().st_size,
        "to open": f"{command_line('mpu', 'unlearn', path)}, or {by_age} | tar x",
    }
    facts: dict[str, object] = {"kind": "keys of a publication, sealed (age v1)"}
    if path.stat().st_size > MAX_KEYS_FILE:
        return copy
    if needs_passphrase(path):
        if passphrase_file is None:
            return {**facts, "opened": "no: sealed with a passphrase (--passphrase-file)"}
    elif identity is None and not default_identity_path().exists():
        # Copies and keys look alike until opened, but copies are written with this suffix.
        return copy if path.suffix == ".age" else {**facts, "opened": "no: sealed for an identity (--identity)"}
    try:
        keys = opened_keys(path, Opening(identity=identity, passphrase_file=passphrase_file, trust_keys=True), SILENT)
    except MpuError as error:
        if path.suffix == ".age":
            return copy
        if identity or passphrase_file:
            raise
        return {**facts, "opened": f"no: {str(error).removeprefix(f'{path}: ')}"}
    publication, calibration = keys.publication, {}
    if bound := publication.calibration:
        calibration["calibrated"] = (
            f"ε = {bound.epsilon:g}, δ = {bound.delta:g}, S = {bound.sensitivity:g}, against {bound.adversary}, "
            f"{bound.rounds} rounds, {bound.bound}"
        )
    noise = publication.scheme.name
    if publication.copies > 1:
        noise += f", cancels up to order {publication.scheme.order - 1}"
    # The seed, α_k or c_k, and σ undo the noise and the coordinates: they are never shown.
    return {
        **facts,
        "run": keys.run,
        "sealed by": "this server" if keys.authentic else "unknown: not with this server's secret",
        "round": keys.round,
        "copies": keys.copies,
        "kappa": publication.kappa,
        "permanent noise": publication.shared_kappa,
        **calibration,
        "symmetries": publication.symmetries,
        "noise": noise,
        "seed": "secret" if publication.seed_is_secret else "from --seed: not secret",
        "base": keys.base.path,
        "base fingerprint": keys.base.fingerprint,
        "pretrained": keys.reference or "none",
    }


def _mode(path: Path) -> str:
    return f"{path.stat().st_mode & 0o777:04o}"


def _checkpoint(path: Path, tensors: bool) -> dict[str, object]:
    from mpu_cli.files.reader import ADAPTER_CONFIG, open_checkpoint

    checkpoint = open_checkpoint(path, links=False)
    stated = facts_of(checkpoint.metadata)
    facts: dict[str, object] = {"kind": "model"}
    manifest = manifest_of(path, checkpoint.metadata)
    format_ = "mpu-model" if isinstance(manifest, ModelManifest) else str(stated.get("format"))
    if isinstance(manifest, DeltaManifest):
        facts = {"kind": "delta, " + ("inverted" if manifest.inverted else "in its copy's coordinates")}
        facts |= {"algorithm": manifest.algorithm, "contents": manifest.kind}
        if manifest.privacy:
            facts["privacy, as the client says"] = manifest.privacy
        if manifest.trained:
            facts["training tags"] = manifest.trained
        origin = manifest.origin
        facts |= _belonging(origin) if origin else {"belongs to": "no run (made from a model that is not an mpu copy)"}
    elif isinstance(manifest, CopyManifest):
        facts = {"kind": "copy, as published", **_belonging(manifest)}
    elif format_ in STATED:
        kind, names = STATED[format_]
        facts = {"kind": kind} | {name: value for name, value in stated.items() if name in names}
    elif path.is_dir() and (path / ADAPTER_CONFIG).is_file() and not (path / "config.json").exists():
        config = read_json_object(path / ADAPTER_CONFIG, links=False)
        facts = {"kind": "LoRA adapter (peft)", "rank": config.get("r"), "for": config.get("base_model_name_or_path")}
    infos = checkpoint.tensors.values()
    facts |= {
        "tensors": len(checkpoint.tensors),
        "weights": sum(info.elements for info in infos),
        "bytes": checkpoint.nbytes,
        "dtypes": dict(Counter(info.dtype for info in infos)),
        "files": len({info.file for info in infos}),
    }
    if tensors:
        facts["list"] = {name: f"{i.dtype} {list(i.shape)}" for name, i in checkpoint.tensors.items()}
    return facts


def _document(path: Path, head: bytes) -> dict[str, Any] | None:
    """The facts about a JSON file of mpu's; None for anything else."""
    secrets = {
        "client.key": "client's secret, which training tags are keyed with",
        "server.key": "server's secret, with which keys are authenticated and from which permanent noise is drawn",
    }
    if path.name in secrets and path.is_file():
        return {"kind": secrets[path.name], "mode": _mode(path)}
    if not head.lstrip().startswith(b"{"):
        return None
    if path.suffix == ".jsonl":
        from mpu_cli.protocol.register import read_register
        from mpu_cli.training.ledger import LOSSES_OF, read_ledger, summary

        lines = read_lines(path, "remove it", links=False)
        if lines and all("content" in line and "sample" in line for line in lines):
            kind = "register of your publications, with which later ones are compared: keep it"
            return {"kind": kind, "publications": len(read_register(path))}
        if lines and all("identity" in line or LOSSES_OF in line for line in lines):
            return {"kind": "ledger of your trainings on copies: keep it", **summary(read_ledger(path))}
        steps = Counter(str(line["step"]) for line in lines if "step" in line)
        if all("digest" in line and "metrics" in line for line in lines):
            return {"kind": "results of mpu sweep", "experiments": [str(line.get("name")) for line in lines]}
        kind = "log of mpu run" if "publish" in steps else "JSON lines"
        return {"kind": kind, "lines": len(lines), **({"steps": dict(steps)} if steps else {})}
    document: dict[str, Any] = read_json_object(path, LARGEST_RESULT, links=False)
    if document.get("format") == "mpu-eval":
        metrics = _table(document, "metrics")
        return {
            "kind": "result of mpu eval",
            "benchmark": document.get("benchmark"),
            **sources_in(document),
            "metrics": {name: _table(metrics, name).get("agg_value") for name in metrics},
        }
    if document.get("format") == "mpu-receipt":
        from mpu_cli.measuring.receipt import check_signatures, read_receipt

        receipt = read_receipt(path)
        try:
            signers = {f"signed as the {party}": key for party, key in check_signatures(receipt, path).items()}
        except MpuError as error:
            signers = {"signed by": f"nobody: {str(error).removeprefix(f'{path}: ')}"}
        return {
            "kind": "receipt of mpu check (`mpu receipt` says what its signatures prove)",
            "of": f"run {receipt.copy.run}, round {receipt.copy.round}, copy {receipt.copy.copy}",
            "date": receipt.date,
            "left, in percent": receipt.left,
            "kept, in percent": receipt.kept,
            "verdict": receipt.verdict,
            **signers,
        }
    if {"experiment", "published"} <= document.keys():
        return {"kind": "facts of mpu run", **{name: document.get(name) for name in ("mpu", "base", "experiment")}}
    return None


def _table(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The table under ``name``; an empty one for anything else that a file may have there."""
    value = document.get(name)
    return value if isinstance(value, dict) else {}


def _folder(path: Path) -> dict[str, object] | None:
    """The facts about a directory that holds a run or a sweep, not a checkpoint; None for any other."""
    if not path.is_dir() or list(path.glob("*.index.json")):
        return None
    if (path / "run.json").is_file():
        log = read_lines(path / "log.jsonl", "choose another folder", links=False)
        numbers = (folder.parent.name.removeprefix("round_") for folder in path.glob("server/round_*/model"))
        rounds = sorted(int(number) for number in numbers if number.isdecimal())
        return {"kind": "mpu run", "steps done": len(log), "rounds with a model": rounds}
    if (path / PLANNED).is_file():
        lines = read_lines(path / RESULTS, "choose another folder", links=False)
        return {"kind": "mpu sweep", "experiments done": [str(line.get("name")) for line in lines]}
    if (path / "config.json").exists() or (path / "adapter_config.json").exists():
        return None
    return None if (path / "model.safetensors").exists() else facts_of_folder(path)


def _belonging(origin: CopyManifest) -> dict[str, object]:
    return {
        "run": origin.run,
        "round": origin.round,
        "copy": f"{origin.copy} of {origin.copies}",
        "symmetries": origin.symmetries or "not stated",
    }


def _bounded(value: object, depth: int = 4) -> object:
    """``value``, which a hostile file may hold, cut to a size that can be shown."""
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        return value[:LONGEST_TEXT] + "…"
    if isinstance(value, dict | list) and not depth:
        return "…"
    if isinstance(value, dict):
        return {str(_bounded(name)): _bounded(entry, depth - 1) for name, entry in value.items()}
    if isinstance(value, list):
        return [_bounded(entry, depth - 1) for entry in value]
    return value


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    width = max(map(len, facts))
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k}: {v}" for k, v in value.items()) if name != "list" else ""
        elif isinstance(value, list):
            value = ", ".join(map(str, value))
        elif isinstance(value, int):
            value = f"{value:,}"
        yield one_line(f"{name:<{width}}  {value}")
    for name, value in facts.get("list", {}).items():
        yield one_line(f"  {name}  {value}")
