"""``mpu publish``: disguised copies of a model, and the keys that undo them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mpu_cli.cli import options
from mpu_cli.cli.output import emit, note, progress, table, warn
from mpu_cli.errors import UsageError

if TYPE_CHECKING:
    from mpu_cli.server.publish import Publication

KAPPA = 0.01  # the paper's
CALIBRATION, SEALING = "Noise for differential privacy", "Sealing"
ROUNDED_AWAY = 0.1  # share of weights left as they were, above which storage is said to eat the noise


def publish(
    base: Annotated[str, typer.Argument(help="The model: file, directory, sharded index or Hub id.", metavar="BASE")],
    reference: Annotated[
        str | None,
        typer.Option(
            help="Public model that BASE was fine-tuned from; noise is scaled to BASE − REFERENCE (default: none, "
            "noise is scaled to BASE).",
            metavar="MODEL",
        ),
    ] = None,
    copies: Annotated[
        int | None,
        typer.Option(
            help="How many copies, m ≥ 2 (default: 3, or as many as --nodes, --alphas or --copy-recipients).",
            metavar="M",
        ),
    ] = None,
    kappa: Annotated[
        float | None, typer.Option(help="Noise scale: σ of a block = κ · RMS of its task vector (default: 0.01).")
    ] = None,
    shared_noise: Annotated[
        float | None,
        typer.Option(
            help="κ_s, scale of noise that is the same in every copy: no combination of copies removes it, and the "
            "update suffers from it to first order (default: none).",
            metavar="KAPPA",
        ),
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(help="ε: noise calibrated to it, in place of --kappa.", rich_help_panel=CALIBRATION),
    ] = None,
    delta: Annotated[float | None, typer.Option(help="δ beside it.", rich_help_panel=CALIBRATION)] = None,
    sensitivity: Annotated[
        float | None,
        typer.Option(
            help="S: models whose weights are at most this far apart (L2 norm) shall not be told from each other.",
            rich_help_panel=CALIBRATION,
        ),
    ] = None,
    adversary: Annotated[
        Literal["one-copy", "all-copies"],
        typer.Option(help="Whom it shall hold against: what a client sees.", rich_help_panel=CALIBRATION),
    ] = "all-copies",
    bound: Annotated[
        Literal["analytic", "classical"],
        typer.Option(help="Exact, or the textbook's for ε ≤ 1.", rich_help_panel=CALIBRATION),
    ] = "analytic",
    budget_rounds: Annotated[
        int, typer.Option(help="How many rounds of the run ε and δ are for.", metavar="R", rich_help_panel=CALIBRATION)
    ] = 1,
    noise: Annotated[
        options.Noise | None,
        typer.Option(
            help="extrapolate: multiples of one draw, of which all orders below M cancel (default). zero-sum: the "
            "paper's, of which the first order cancels."
        ),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            help="extrapolate: the multiple of each copy, such as 1,-1,1.5 (default: 1, -1, 1.5, -1.5, …).",
            metavar="C1,C2,…",
        ),
    ] = None,
    alphas: Annotated[
        str | None,
        typer.Option(
            help="zero-sum: the factor of each copy, such as 1,2, or random: drawn secretly between 1 and 2 (default: "
            "evenly from 1 to 2).",
            metavar="A,B,…",
        ),
    ] = None,
    symmetries: Annotated[
        options.Symmetries,
        typer.Option(
            help="Which function-preserving changes of coordinates to hide the weights in. signed: permutations and "
            "signs, which plain AdamW follows and which round nothing; paper: the paper's; all: rotations wherever the "
            "model allows them."
        ),
    ] = "signed",
    dtype: options.Dtype = None,
    config: options.Config = None,
    out: Annotated[Path, typer.Option(help="Directory for copy_1 … copy_m.", metavar="DIR")] = Path("."),
    keys: Annotated[Path, typer.Option(help="Where to put the sealed keys.", metavar="FILE")] = Path("keys.bin"),
    copy_recipients: Annotated[
        str | None,
        typer.Option(
            help="Seal each copy as copy_k.age for its own client: m age public keys, or files that hold one.",
            metavar="A.pub,B.pub,…",
        ),
    ] = None,
    recipient: Annotated[
        list[str] | None, typer.Option(help="Seal the keys for this age public key (repeatable).", metavar="age1…")
    ] = None,
    passphrase: Annotated[bool, typer.Option("--passphrase", help="Seal the keys with a passphrase.")] = False,
    passphrase_file: options.PassphraseFile = None,
    identity: options.Identity = None,
    run: Annotated[str | None, typer.Option(help="Name of the run (default: a random one).", metavar="ID")] = None,
    round_: Annotated[int, typer.Option("--round", help="Which round of the run this is.", metavar="R")] = 1,
    seed: Annotated[
        int | None,
        typer.Option(help="For repeatable experiments only: who knows the seed can undo the copies.", metavar="N"),
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Say where the time went.")] = False,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Make M noisy copies of BASE, each in secret coordinates of its own, and the sealed keys that undo them.

    Give each copy to the client and keep the keys: `mpu aggregate` needs them. Prints the path of each copy.
    """
    if round_ < 1:
        raise UsageError(f"--round {round_}: counts from 1")
    if seed is not None and not 0 <= seed < 2**64:
        raise UsageError(f"--seed {seed}: must be 0 or more, and below 2⁶⁴")
    if epsilon is None and (delta is not None or sensitivity is not None):
        raise UsageError("--delta and --sensitivity calibrate noise for --epsilon, which is missing")
    if epsilon is not None:
        if delta is None or sensitivity is None:
            raise UsageError("--epsilon needs --delta and --sensitivity")
        if kappa is not None or shared_noise is not None:
            raise UsageError(
                "--epsilon sets the noise, the same in every block; --kappa and --shared-noise scale it to the weights "
                "and would tell of them"
            )
        if seed is not None:
            raise UsageError("--epsilon with --seed: noise that can be guessed protects nothing; leave --seed out")
        if round_ > budget_rounds:
            raise UsageError(f"--round {round_}: ε and δ are for {budget_rounds} (--budget-rounds)")

    from mpu_cli.checkpoint.dtypes import OPTION
    from mpu_cli.checkpoint.source import open_model
    from mpu_cli.cli.secrets import recipients_of_copies, sealer
    from mpu_cli.server import randomness
    from mpu_cli.server.noise import RANDOM, choose_scheme
    from mpu_cli.server.profile import Profile
    from mpu_cli.server.publish import publish as run_publish

    master = randomness.new_seed() if seed is None else randomness.seed_from_number(seed)
    if copies is None and nodes is None and alphas in (None, RANDOM) and copy_recipients and "," in copy_recipients:
        copies = copy_recipients.count(",") + 1
    scheme = choose_scheme(noise, alphas, nodes, copies, (randomness.Randomness(master), round_))
    calibration = None
    if epsilon is not None:
        from mpu_cli.privacy.calibration import calibrate, statement

        calibration = calibrate(
            epsilon, delta, sensitivity, adversary=adversary, bound=bound, rounds=budget_rounds,
            smallest_alpha=min(scheme.scales),
        )  # fmt: skip
        kappa = shared_noise = 0.0
    kappa, shared_noise = KAPPA if kappa is None else kappa, shared_noise or 0.0
    clients = recipients_of_copies(copy_recipients, scheme.copies) if copy_recipients else []
    model = open_model(base, config)
    public = open_model(reference) if reference else None
    laps = Profile() if profile else None
    seal = sealer(recipient or [], passphrase, passphrase_file, identity)
    with progress("publish", model.checkpoint.nbytes) as advance:
        publication = run_publish(
            model,
            public,
            noise=scheme,
            kappa=kappa,
            symmetries=symmetries,
            dtype=OPTION[dtype] if dtype else None,
            seed=master,
            seed_is_secret=seed is None,
            run=run,
            round_=round_,
            out=out,
            keys_path=keys,
            seal=seal,
            force=force,
            progress=advance,
            shared_kappa=shared_noise,
            calibration=calibration,
            recipients=clients,
            profile=laps,
        )
    if public is None and (kappa > 0 or shared_noise > 0):
        note("no --reference: the noise is scaled to the weights themselves, not to what fine-tuning changed")
    if seed is not None:
        warn("--seed is for repeatable experiments: whoever knows or guesses it can undo these copies")
    report(publication)
    secret = "" if alphas == RANDOM else f" ({', '.join(f'{factor:g}' for factor in scheme.factors)})"
    note(f"noise: {scheme.kind}{secret}, cancels up to order {scheme.order - 1}; symmetries: {symmetries}")
    if calibration:
        note(statement(calibration))
    if laps:
        total = sum(laps.seconds.values())
        rows = [[name, f"{seconds:.2f}", f"{seconds / total:.0%}"] for name, seconds in laps.seconds.items()]
        table("Seconds of work, over all threads", ["", "seconds", "share"], rows)
    emit(
        publication.copies,
        {
            "copies": publication.copies,
            "keys": publication.keys_path,
            "run": publication.keys.run,
            "round": publication.keys.round,
            "symmetries": symmetries,
            "noise": {"kind": scheme.kind, "factors": None if alphas == RANDOM else scheme.factors},
            "calibration": asdict(calibration) if calibration else None,
            "blocks": [asdict(block) for block in publication.blocks],
            "profile": laps.seconds if laps else None,
        },
        as_json,
    )


def report(publication: Publication) -> None:
    """What became of the noise, on standard error."""
    blocks = [block for block in publication.blocks if block.copies]
    kappa, shared, told = publication.keys.kappa, publication.keys.shared_kappa, publication.keys.calibration
    if kappa or shared or told:
        rows = []
        for block in blocks:
            row = [block.block, f"{block.weights:,}", f"{block.rms:.3g}"]
            for copy in block.copies:
                row += [f"{copy.asked:.2e}", f"{copy.survived:.2e}", f"{copy.unchanged:.1%}"]
            rows.append(row)
        columns = ["block", "weights", "RMS(v)"]
        for k in range(1, len(publication.copies) + 1):
            columns += [f"σ of {k}", "survived", "unchanged"]
        scale = f"κ = {kappa:g}" + (f" and κ_s = {shared:g}, shared" if shared else "")
        if told:
            scale = f"ε = {told.epsilon:g}, δ = {told.delta:g}"
        table(f"Noise at {scale}, as asked for and as stored", columns, rows)
        if not told and (silent := [block.block for block in blocks if block.rms == 0]):
            warn(
                f"no noise in {len(silent)} of {len(blocks)} blocks, where base and reference are equal: "
                f"{', '.join(silent[:3])}{' …' if len(silent) > 3 else ''}"
            )
        noisy = [(c.unchanged, b.weights) for b in blocks for c in b.copies if c.asked]
        lost = sum(unchanged * weights for unchanged, weights in noisy) / max(1, sum(weights for _, weights in noisy))
        if lost > ROUNDED_AWAY:
            warn(
                f"rounding on storage leaves {lost:.0%} of the weights as they were without noise; "
                "--dtype float32 keeps the noise, a larger --kappa outgrows the rounding"
            )
    note(
        f"keys: {publication.keys_path} (run {publication.keys.run}, round {publication.keys.round}); "
        "keep it, and keep it to yourself"
    )
