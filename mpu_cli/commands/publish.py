"""``mpu publish``: disguised copies of a model, and the keys that undo them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mpu_cli.commands.secrets import opened_keys, read_passphrase
from mpu_cli.errors import MpuError, UsageError
from mpu_cli.files.manifest import (
    had_permanent_noise,
    keys_path,
    next_round,
    read_copy_manifest,
    round_folder,
)
from mpu_cli.files.transaction import Transaction
from mpu_cli.observer import SILENT, Observer
from mpu_cli.options.command import ALLOW, FORCE, Command, Opening, Preview, Report
from mpu_cli.options.declare import as_arguments, from_flat, group, option
from mpu_cli.options.publishing import Disguise, Publishing
from mpu_cli.text import read_text
from mpu_cli.wording import command_line, few

if TYPE_CHECKING:
    from mpu_cli.protocol.keys import Keys
    from mpu_cli.protocol.publish import Published, PublishPlan
    from mpu_cli.protocol.review import Remark, Reviewed


@dataclass(frozen=True, kw_only=True)
class Publish(Command):
    """Make M noisy copies of BASE, each in its own secret coordinates, and the sealed keys that undo them.

    Give the copies to the client and keep the keys: `mpu aggregate` needs them. Prints the path of each copy.
    """

    NAME = "publish"
    EXAMPLE = "mpu publish my-model --public meta-llama/Llama-3.2-1B-Instruct"
    ESSENTIAL = "--kappa --public --copies --permanent-noise --noise --symmetries --out --keys --recipient --probe"

    base: str = option(..., "The model: file, directory, sharded index or Hub id.", metavar="BASE", argument=True)
    publishing: Publishing = group(Publishing)
    public: str | None = option(
        None,
        "Public model that BASE was fine-tuned from: noise is scaled to what that changed and, unless a scale is "
        "given, chosen to hide it (default: none, noise is scaled to BASE).",
        metavar="MODEL",
    )
    out: Path | None = option(
        None, "Directory for copy_1 … copy_m (default: this one; after round 1, round_R).", metavar="DIR"
    )
    keys: Path | None = option(
        None, "Where to write the sealed keys (default: keys.bin; after round 1, keys_R.bin).", metavar="FILE"
    )
    only: str | None = option(
        None,
        "Make only these of the copies, such as 1 or 2,3; the others later, with the same options and --keys.",
        metavar="K,…",
    )
    copy_recipients: str | None = option(
        None,
        "Seal each copy as copy_k.age for its own client: m age public keys, or files that contain one.",
        metavar="A.pub,B.pub,…",
        in_files=False,
    )
    recipient: list[str] | None = option(
        None, "Seal the keys for this age public key (repeatable).", metavar="age1…", in_files=False
    )
    passphrase: bool = option(False, "Seal the keys with a passphrase.")
    opening: Opening = group(Opening, fold=ALLOW, apart=("identity", "passphrase_file"))
    run_name: str | None = option(
        None,
        "Name of the run, one for each request (default: the one that made BASE, or random); its round after a colon, "
        "such as clinic:2 or :2 (default: the one after BASE's, or 1 in another run).",
        metavar="ID",
        flag="--run",
    )
    seed: int | None = option(
        None, "For repeatable experiments only: whoever knows the seed can undo the copies.", metavar="N",
        in_files=False,
    )  # fmt: skip
    probe: Path | None = option(
        None, "Say how well a copy knows the answers of these records, beside BASE.", metavar="FILE"
    )
    force: bool = option(False, FORCE, in_files=False)

    def plan(self, observer: Observer = SILENT) -> PublishPlan:
        """The files to read and write, after every check that needs no weights."""
        from mpu_cli.files.sealing import parse_recipients
        from mpu_cli.model.source import open_model
        from mpu_cli.protocol.keys import check_one_way, sealer
        from mpu_cli.protocol.publication import publication_of
        from mpu_cli.protocol.publish import Target, plan_publish
        from mpu_cli.records.read import read_records

        recipients = [] if self.copy_recipients is None else [part.strip() for part in self.copy_recipients.split(",")]
        if not all(recipients):
            raise UsageError(
                f"--copy-recipients {self.copy_recipients!r}: a recipient is empty", "give one for each copy"
            )
        only = None
        if self.only is not None:
            numbers = [part.strip() for part in self.only.split(",")]
            if not all(part.isdigit() for part in numbers):
                raise UsageError(f"--only {self.only}: copies are numbered", "name them as 1 or 2,3")
            only = [int(part) for part in numbers]
        if self.probe:
            read_records(self.probe)  # before the work
        model = open_model(self.base)
        if read_copy_manifest(model.folder):
            raise MpuError(f"{self.base}: a copy, not a model", "publish the model that it was made from")
        run, round_ = self._run_and_round(model.folder)
        has_scale = self.publishing.disguise.sets_scale or self.publishing.calibration.epsilon is not None
        if had_permanent_noise(model.folder) and self.public is None and not has_scale:
            raise UsageError(
                f"{self.base}: the copies that it was made with had permanent noise, and those of it would not",
                "name the public model with --public again, or choose --kappa or --permanent-noise",
            )
        path = self.keys or keys_path(round_)
        existing_keys = opened_keys(path, self.opening, observer) if only is not None and path.exists() else None
        publishing, disguise = self.publishing, self.publishing.disguise
        if len(recipients) > 1 and only is None and disguise.count is None:  # a copy for each recipient
            publishing = replace(publishing, disguise=replace(disguise, copies=len(recipients)))
        publication = publication_of(
            publishing,
            with_pretrained=self.public is not None,
            seed=self.seed,
            run=run,
            round_=round_,
        )
        if existing_keys:  # further copies of that publication have its secrets
            publication = publication.with_secrets_of(existing_keys.publication)
        for copy in only or ():
            if not 1 <= copy <= publication.copies:
                raise UsageError(f"--only {copy}: copies are numbered from 1 to {publication.copies}")
        count = publication.copies if only is None else len(set(only))
        if len(recipients) == 1:
            recipients *= count
        if recipients and len(recipients) != count:
            raise UsageError(
                f"--copy-recipients: {len(recipients)} for {count} copies", "give one for each copy, or one for all"
            )
        passphrase, identity = None, self.opening.identity
        if existing_keys is None:  # keys that exist stay as they are
            by_passphrase = self.passphrase or self.opening.passphrase_file
            check_one_way(self.recipient, by_passphrase, identity)
            passphrase = read_passphrase(self.opening.passphrase_file, observer, new=True) if by_passphrase else None
        parsed = parse_recipients(recipients, "--copy-recipients")
        for part in dict.fromkeys(recipients):
            if not part.startswith("age1") and "AGE-SECRET-KEY-" in read_text(Path(part)):
                observer.warn(f"{part}: holds a secret key; a client sends its public key alone, age1…")
        target = Target(
            out=self.out or round_folder(Path("."), round_),
            keys=path,
            seal=sealer(recipients=self.recipient or [], passphrase=passphrase, identity=identity, note=observer.note),
            recipients=parsed,
            force=self.force,
        )
        public = open_model(self.public) if self.public else None
        return plan_publish(model, public, publication, target, only=only, existing_keys=existing_keys)

    def _run_and_round(self, base: Path) -> tuple[str, int]:
        """The run and the number of the round: those in --run, else those that follow the model in ``base``."""
        run_of_base, following_round = next_round(base)
        run, colon, number = (self.run_name or "").partition(":")
        if colon and not number.isdecimal():
            raise UsageError(f"--run {self.run_name}: the round after the colon is not a number", "such as clinic:2")
        if colon:
            following_round = int(number)
        elif run and run != run_of_base:  # another request
            following_round = 1
        return run or run_of_base or "", following_round

    def preview(self, observer: Observer) -> Preview:
        from mpu_cli.protocol.copies import BUFFERS
        from mpu_cli.protocol.review import remarks_on_plan

        plan = self.plan(observer)
        folders = (
            [] if plan.target.recipients else [plan.target.copy_path(manifest) for manifest in plan.manifests_to_write]
        )
        for path, _ in plan.outputs:  # an output that exists is an error, and no remark matters then
            Transaction(force=self.force).check(path, path in folders)
        _say(remarks_on_plan(plan), observer)
        return Preview(
            reads=[(model.source, model.checkpoint.nbytes) for model in (plan.base, plan.pretrained) if model],
            writes=plan.outputs,
            memory=BUFFERS,
            notes=[f"run {plan.publication.run}, round {plan.publication.round}"],
            folders=folders,
        )

    def run(self, observer: Observer = SILENT) -> Reviewed:
        """The copies and the keys, with an estimate of how well the copies hide; remarks go to ``observer``, too."""
        return self.carry_out(self.plan(observer), observer)

    def carry_out(self, plan: PublishPlan, observer: Observer) -> Reviewed:
        """What ``run`` does with its ``plan``."""
        from mpu_cli.protocol.publish import publish
        from mpu_cli.protocol.review import Reviewed, leakage_of, losses_of_copy, remarks_on_plan, remarks_on_result

        on_plan = list(remarks_on_plan(plan))
        # Warnings first: they may be a reason to stop the work.
        _say([remark for remark in on_plan if remark.is_warning], observer)
        published = publish(plan, observer=observer)
        leakage = leakage_of(plan, published)
        on_result = list(remarks_on_result(plan, published, leakage))
        probed = losses_of_copy(self.probe, plan, published) if self.probe else None
        _say([remark for remark in on_result if remark.is_warning], observer)
        return Reviewed(**vars(published), leakage=leakage, remarks=[*on_plan, *on_result], probed=probed)

    def report(self, published: Reviewed, observer: Observer) -> Report:
        if published.probed:
            known = ", ".join(f"{name} {math.exp(-loss):.0%}" for name, loss in published.probed.items())
            observer.note(f"probability of an answer's tokens on {self.probe} (geometric mean): {known}")
        if size := _size_of_noise(published):
            observer.note(size)
        observer.note(
            f"keys: {published.keys_path} (run {published.keys.run}, round {published.keys.round}); "
            "keep it, and keep it secret: without it deltas cannot be mapped back"
        )
        self._tell_what_to_send(published, observer)
        _say([remark for remark in published.remarks if not remark.is_warning], observer)
        observer.note(_next_step(published))
        publication = published.keys.publication
        scheme, calibration = publication.scheme, publication.calibration
        document = {
            "copies": published.copies,
            "keys": published.keys_path,
            "run": published.keys.run,
            "round": published.keys.round,
            "symmetries": publication.symmetries,
            "noise": {"kind": scheme.kind, "factors": scheme.factors},
            "calibration": asdict(calibration) if calibration else None,
            "hidden": asdict(published.leakage) if published.leakage else None,
            "gives_weights_away": published.gives_weights_away,
            "probe": published.probed,
            "warnings": published.warnings,
            "blocks": [asdict(block) for block in published.blocks],
        }
        return Report(published.copies, document)

    def _tell_what_to_send(self, published: Reviewed, observer: Observer) -> None:
        """The other contents of the folder that `publish` wrote, because somebody will send it as it is."""
        folder, keys = published.copies[0].parent, published.keys_path.resolve()
        others = sorted({path.name for path in folder.iterdir()} - {path.name for path in published.copies})
        name = "this folder" if folder == Path(".") else str(folder)
        if not others:
            observer.note(f"{name} holds the copies and nothing else")
        elif folder.resolve() != keys.parent:
            observer.note(f"{name} also holds {few(others)}: send the copies alone")
        else:
            tell = observer.warn if self.out else observer.note
            tell(f"{name} also holds the keys, {keys.name}: send the copies alone")


def command_to_publish(model: Path, keys: Keys) -> str:
    """The command that publishes ``model`` as the last publication was: with noise of its kind and scale, its
    symmetries, watermark, layers and dtype, sealed for the same clients. Under names of its own, if an earlier model
    of the same round was published beside it."""
    from mpu_cli.files.reader import WORD
    from mpu_cli.protocol.noise import SCHEMES

    publication = keys.publication
    scheme, calibration = publication.scheme, publication.calibration
    usual = Disguise(watermark=0.0)  # the values where none are given
    if keys.reference is not None:
        chosen = Disguise(copies=keys.copies).with_scale(with_pretrained=True)
        scales = publication.kappa, publication.shared_kappa
        if scales == (chosen.kappa, chosen.permanent_noise) and publication.max_noise is not None:
            usual = chosen
    has_scale = calibration is None and not usual.sets_scale
    noise = None if scheme.kind == "extrapolate" else scheme.kind
    if scheme != SCHEMES[scheme.kind].default(keys.copies):
        noise = f"{scheme.kind}:{','.join(map(repr, scheme.factors))}"
    options: dict[str, object] = {
        "copies": None if usual.sets_scale and keys.copies == 1 and noise is None else keys.copies,
        "noise": noise,
        "kappa": publication.kappa if has_scale else None,
        "permanent_noise": publication.shared_kappa or None if has_scale else None,
        "watermark": None if publication.watermark == usual.watermark else publication.watermark,
        "max_noise": None if publication.max_noise == usual.max_noise else publication.max_noise,
        "symmetries": publication.symmetries,
        "dtype": WORD[publication.dtype] if publication.dtype else None,
    }
    if calibration:
        options |= {
            "epsilon": calibration.epsilon, "dp_delta": calibration.delta, "sensitivity": calibration.sensitivity,
            "budget_rounds": calibration.rounds, "adversary": calibration.adversary, "bound": calibration.bound,
        }  # fmt: skip
    command: list[str | Path] = ["mpu", "publish", model]
    if keys.reference is not None:
        command += ["--public", keys.reference]
    command += as_arguments(from_flat(Publishing, options))
    if keys.recipients:
        # The keys of copies that were made one by one say it of the first ones.
        in_order = [keys.recipients.get(str(copy), f"RECIPIENT_{copy}") for copy in range(1, keys.copies + 1)]
        # One recipient, once, is that of all copies (see ``plan``).
        command += ["--copy-recipients", ",".join(in_order if len(set(in_order)) > 1 else in_order[:1])]
    if model.with_name(str(keys_path(keys.round + 1))).exists():
        names = (model.with_name(f"check_{number}") for number in itertools.count(2))
        out = next(name for name in names if not name.exists() and not name.with_suffix(".bin").exists())
        command += ["--out", out, "--keys", out.with_suffix(".bin")]
    return command_line(*command)


def _size_of_noise(published: Published) -> str | None:
    """The size of the first copy's noise beside the weights, and its loss in storage; None without noise."""
    blocks = [block for block in published.blocks if block.copies]
    weights = math.fsum(block.weights for block in blocks)
    size = math.sqrt(math.fsum(block.weights * block.weights_rms**2 for block in blocks))
    noise = math.sqrt(math.fsum(block.weights * block.copies[0].requested ** 2 for block in blocks))
    if not (noise and size):
        return None
    lost = math.fsum(block.weights * block.copies[0].unchanged for block in blocks) / weights
    publication = published.keys.publication
    calibration, permanent = publication.calibration, publication.shared_kappa
    scale = f"ε = {calibration.epsilon:g}" if calibration else f"κ = {publication.kappa:g}"
    if permanent:
        task = math.sqrt(math.fsum(block.weights * block.rms**2 for block in blocks))
        sigmas = published.keys.shared_sigma
        shared = math.sqrt(math.fsum(block.weights * sigmas.get(block.block, 0.0) ** 2 for block in blocks))
        scale += f" and permanent noise of {permanent:g}"
        if publication.max_noise is not None and shared < 0.99 * permanent * task:
            scale += f", limited to {shared / task:.2g} so that the copies are not ruined"
    return (
        f"size of the noise: {100 * noise / size:.2g} % of that of the weights, at {scale}; storage rounds it away in "
        f"{lost:.1%} of these (--json has each block)"
    )


def _next_step(published: Reviewed) -> str:
    """The next step with the copies."""
    names = [Path(path.name) for path in published.copies]
    keys, deltas = published.keys_path, round_folder(Path("deltas"), published.keys.round)
    send = f"send {few([command_line(path) for path in published.copies])} to the client"
    if published.copy_is_ruined:
        return "next: do not send these copies: what the noise left of the model knows too little to unlearn on"
    if published.gives_weights_away:
        send = f"do not send these copies: they give the weights away. In a trial, {send}"
    if published.keys.round > 1:
        # The client's copies of round 1 have the same names, and the check compares with them: they have to stay.
        folder = round_folder(Path("."), published.keys.round)
        check = command_line("mpu", "check", folder / names[0])
        return (
            f"next: {send}, in a folder {folder} that it puts beside its {names[0].stem}; there it runs `{check}`, "
            "which prints what is next"
        )
    unlearn = command_line("mpu", "unlearn", *names, "--forget", "forget.jsonl", "--retain", "retain.jsonl")
    aggregate = command_line("mpu", "aggregate", deltas, "--keys", keys)
    step = f"next: {send}, who runs `{unlearn}` and returns the deltas; then `{aggregate}`"
    are_all = len(published.copies) == published.keys.copies
    if not (published.keys.publication.permanent and are_all and all(path.is_dir() for path in published.copies)):
        return step  # a rehearsal needs all copies, and does not open sealed ones
    known = ("--forget", "known.jsonl", "--retain", "others.jsonl")
    rehearse = command_line("mpu", "rehearse", *published.copies, "--keys", keys, *known)
    return f"{step}. Meanwhile `{rehearse}`, on records of yours that the model knows, finds the step that suits it"


def _say(remarks: Iterable[Remark], observer: Observer) -> None:
    for remark in remarks:
        say = observer.warn if remark.is_warning else observer.note
        say(remark.text)
