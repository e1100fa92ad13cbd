"""``mpu unlearn``: the client's part."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mpu_cli.cli import options
from mpu_cli.cli.output import emit, note, progress, warn
from mpu_cli.errors import MpuError, UsageError

if TYPE_CHECKING:
    from mpu_cli.client.lora import Lora

CONSTANTS, DATA, TRAINING, LORA = "Constants of the algorithm", "Records", "Training", "LoRA"
PRIVACY = "Differential privacy of the records"


def unlearn(
    copy: Annotated[
        str,
        typer.Argument(
            help="A copy from `mpu publish` (sealed ones too), or any model directory or Hub id.", metavar="COPY"
        ),
    ],
    algo: Annotated[
        Literal["gradascent", "graddiff", "npo", "dpo", "simnpo", "undial", "satimp", "wga", "rmu"],
        typer.Option(help="Unlearning algorithm."),
    ] = "npo",
    out: Annotated[
        Path | None, typer.Option(help="The delta to write (default: deltas/COPY.safetensors).", metavar="FILE")
    ] = None,
    forget: Annotated[
        str,
        typer.Option(
            help="Records to forget: JSON lines, JSON, CSV, Parquet, tofu:SPLIT, muse-news:SPLIT, or a Hub dataset "
            "OWNER/NAME@CONFIG:SPLIT.",
            metavar="DATA",
            rich_help_panel=DATA,
        ),
    ] = "forget.jsonl",
    retain: Annotated[
        str,
        typer.Option(help="Records to keep, for algorithms that use some.", metavar="DATA", rich_help_panel=DATA),
    ] = "retain.jsonl",
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder with tofu's or muse's files, instead of the Hub.", metavar="DIR", rich_help_panel=DATA
        ),
    ] = None,
    alternates: Annotated[
        Path | None,
        typer.Option(
            help="Answers for dpo to prefer, a line each, where a record has no 'alternate' (default: refusals).",
            metavar="FILE",
            rich_help_panel=DATA,
        ),
    ] = None,
    few_shot: Annotated[
        str | None,
        typer.Option(help="Records that come before each as earlier turns.", metavar="DATA", rich_help_panel=DATA),
    ] = None,
    system_prompt: Annotated[
        str, typer.Option(help="System turn of the chat template; '' for none.", rich_help_panel=DATA)
    ] = "You are a helpful assistant.",
    template: Annotated[
        Literal["chat", "plain"],
        typer.Option(help="The tokenizer's chat template, or Question: … Answer: ….", rich_help_panel=DATA),
    ] = "chat",
    date: Annotated[
        str, typer.Option(help="The day that a chat template prints, if it prints one.", rich_help_panel=DATA)
    ] = "10 Apr 2025",
    reference_file: Annotated[
        Path | None,
        typer.Option(
            help="Keeps the reference model's probabilities: written in round 1, read in later rounds. For npo, dpo, "
            "undial and --retain-loss kl.",
            metavar="FILE",
            rich_help_panel=DATA,
        ),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the forget set (default: the paper's for a round of ALGO).")
    ] = None,
    lr: Annotated[float, typer.Option(help="Learning rate, constant after warm-up.")] = 1e-5,
    batch_size: Annotated[int, typer.Option(help="Forget records in a step, with as many retain records.")] = 32,
    optim: Annotated[
        options.Optimizer,
        typer.Option(
            help="Optimiser; adamw is the paper's, adamw-blockwise follows all coordinates and lets noise cancel best."
        ),
    ] = "adamw",
    precision: Annotated[
        Literal["float32", "bfloat16", "float64"], typer.Option(help="Dtype of weights and training.")
    ] = "float32",
    retain_loss: Annotated[
        Literal["nll", "kl", "hidden"] | None,
        typer.Option(help="Retain term (default: nll; hidden for rmu).", rich_help_panel=CONSTANTS),
    ] = None,
    gamma: Annotated[float | None, typer.Option(help="γ, weight of forgetting.", rich_help_panel=CONSTANTS)] = None,
    alpha: Annotated[float | None, typer.Option(help="α, weight of retaining.", rich_help_panel=CONSTANTS)] = None,
    beta: Annotated[
        float | None, typer.Option(help="β of npo, dpo, simnpo, undial, wga.", rich_help_panel=CONSTANTS)
    ] = None,
    beta1: Annotated[float | None, typer.Option(help="β₁ of satimp.", rich_help_panel=CONSTANTS)] = None,
    beta2: Annotated[float | None, typer.Option(help="β₂ of satimp.", rich_help_panel=CONSTANTS)] = None,
    delta: Annotated[float | None, typer.Option(help="δ of simnpo.", rich_help_panel=CONSTANTS)] = None,
    layer: Annotated[int | None, typer.Option(help="Layer of rmu, from 0.", rich_help_panel=CONSTANTS)] = None,
    coefficient: Annotated[float | None, typer.Option(help="c of rmu.", rich_help_panel=CONSTANTS)] = None,
    lora_rank: Annotated[
        int | None, typer.Option(help="Train factors of this rank instead of all weights.", rich_help_panel=LORA)
    ] = None,
    lora_alpha: Annotated[
        float | None, typer.Option(help="Scaling · rank (default: twice the rank).", rich_help_panel=LORA)
    ] = None,
    lora_targets: Annotated[
        str | None,
        typer.Option(
            help="Modules to adapt, such as q_proj,v_proj (default: all linear layers).", rich_help_panel=LORA
        ),
    ] = None,
    dp_epsilon: Annotated[
        float | None,
        typer.Option(help="ε of differential privacy for each record, for one delta.", rich_help_panel=PRIVACY),
    ] = None,
    dp_delta: Annotated[float, typer.Option(help="δ beside it.", rich_help_panel=PRIVACY)] = 1e-5,
    dp_max_grad_norm: Annotated[
        float, typer.Option(help="Clip the gradient of each record at this.", rich_help_panel=PRIVACY)
    ] = 1.0,
    micro_batch_size: Annotated[
        int | None,
        typer.Option(help="Records that go through the model at once (default: all).", rich_help_panel=TRAINING),
    ] = None,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Less memory, more time.", rich_help_panel=TRAINING)
    ] = False,
    deterministic: Annotated[
        bool,
        typer.Option(
            help="On a GPU: the same bits for the same seed, at some cost in speed.", rich_help_panel=TRAINING
        ),
    ] = True,
    attention: Annotated[
        Literal["sdpa", "flash_attention_2", "eager"],
        typer.Option(help="Implementation of attention.", rich_help_panel=TRAINING),
    ] = "sdpa",
    weight_decay: Annotated[float, typer.Option(help="Weight decay.", rich_help_panel=TRAINING)] = 0.01,
    max_grad_norm: Annotated[
        float, typer.Option(help="Clip the gradient's norm at this.", rich_help_panel=TRAINING)
    ] = 1.0,
    warmup_steps: Annotated[int, typer.Option(help="Steps of linear warm-up.", rich_help_panel=TRAINING)] = 0,
    seed: Annotated[
        int,
        typer.Option(help="Order of the records. Use the same for every copy of a round.", rich_help_panel=TRAINING),
    ] = 0,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Where to train.", rich_help_panel=TRAINING)
    ] = "auto",
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Keep checkpoints, and go on from the last if there is one.", rich_help_panel=TRAINING
        ),
    ] = False,
    checkpoint_steps: Annotated[
        int, typer.Option(help="Steps between the checkpoints of --resume.", rich_help_panel=TRAINING)
    ] = 50,
    log: Annotated[
        Path | None,
        typer.Option(help="Append the losses of each step, JSON lines.", metavar="FILE", rich_help_panel=TRAINING),
    ] = None,
    report_to: Annotated[
        Literal["tensorboard", "wandb"] | None,
        typer.Option(help="Report the losses there.", rich_help_panel=TRAINING),
    ] = None,
    identity: options.Identity = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Unlearn the records of --forget on COPY and write the change of its weights, which is all that goes back.

    Run it on every copy of the round with the same options: only then does the noise cancel. Prints the path of
    the delta.
    """
    given = {
        "gamma": gamma, "alpha": alpha, "beta": beta, "beta1": beta1, "beta2": beta2, "delta": delta, "layer": layer,
        "coefficient": coefficient,
    }  # fmt: skip
    constants = {name: value for name, value in given.items() if value is not None}
    if lora_rank is None and (lora_alpha is not None or lora_targets is not None):
        raise UsageError("--lora-alpha and --lora-targets need --lora-rank")

    from mpu_cli.client.losses import ALGORITHMS
    from mpu_cli.client.records import read_records

    # The records are read first: what is wrong with them is known before anything large is loaded.
    to_forget = read_records(forget, data_dir)
    to_retain = []
    if constants.get("alpha", ALGORITHMS[algo].settings.alpha):
        try:
            to_retain = read_records(retain, data_dir)
        except MpuError as error:
            if retain == "retain.jsonl" and not Path(retain).exists():
                raise MpuError(f"{error}; {algo} needs records to keep, name them with --retain") from error
            raise
    name = Path(copy).resolve().name if Path(copy).exists() else copy.rsplit("/", 1)[-1]
    target = out or Path("deltas") / f"{name.removesuffix('.safetensors').removesuffix('.age')}.safetensors"

    from mpu_cli.checkpoint.source import open_model
    from mpu_cli.cli.secrets import opened_copy
    from mpu_cli.client.private import Privacy
    from mpu_cli.client.tag import client_secret, default_secret_path
    from mpu_cli.client.training import Loop
    from mpu_cli.client.unlearn import Options
    from mpu_cli.client.unlearn import unlearn as run_unlearn

    epochs = ALGORITHMS[algo].epochs if epochs is None else epochs
    chosen = Options(
        algorithm=algo,
        epochs=epochs,
        constants=constants,
        retain_loss=retain_loss,
        precision=precision,
        attention=attention,
        template=template,
        system_prompt=system_prompt,
        date=date,
        reference_file=reference_file,
        few_shot=tuple(read_records(few_shot, data_dir)) if few_shot else (),
        device=device,
        privacy=None if dp_epsilon is None else Privacy(dp_epsilon, dp_delta, dp_max_grad_norm),
        loop=Loop(
            optimizer=optim,
            lr=lr,
            weight_decay=weight_decay,
            max_grad_norm=max_grad_norm,
            warmup_steps=warmup_steps,
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            gradient_checkpointing=gradient_checkpointing,
            deterministic=deterministic,
            seed=seed,
            log=log,
            report_to=report_to,
            resume=target.with_name(target.name + ".resume") if resume else None,
            checkpoint_steps=checkpoint_steps,
        ),
        **({"alternates": _lines(alternates)} if alternates else {}),
        lora=None if lora_rank is None else _lora(lora_rank, lora_alpha, lora_targets),
    )
    with opened_copy(copy, identity, target) as source, progress(f"unlearn {name}", epochs, "epochs") as advance:

        def show(losses: object, steps: int) -> None:
            kept = "" if losses.retain_term is None else f" retain {losses.retain_term:.3f}"
            advance(epochs / steps, f"loss {losses.loss:.3f} = forget {losses.forget_term:.3f}{kept}")

        result = run_unlearn(
            open_model(source), to_forget, to_retain, chosen, target=target, force=force, on_step=show, tell=note,
            warn=warn, secret=lambda: client_secret(default_secret_path()),
        )  # fmt: skip
    if not result.first:
        return
    text = f"{name}: {algo}"
    if result.steps:
        begin, end = result.steps[0], result.steps[-1]
        kept = "" if end.retain is None else f", on retain {begin.retain:.3f} → {end.retain:.3f}"
        text += (
            f", {len(result.steps)} steps; loss per answer token on forget {begin.forget:.3f} → {end.forget:.3f}{kept} "
            "(first and last batch)"
        )
    note(f"{text}; ‖Δ‖ {result.norm:.3g}")
    if result.spent:
        note(
            f"privacy: this delta protects each record with ε = {result.spent['epsilon']:.3g} at δ = {dp_delta:g}; "
            "the deltas of m copies together spend at most m times that"
        )
    emit(
        [result.path],
        {
            "delta": result.path,
            "algorithm": algo,
            "norm": result.norm,
            "privacy": result.spent,
            "steps": [asdict(s) for s in result.steps],
        },
        as_json,
    )


def _lora(rank: int, alpha: float | None, targets: str | None) -> Lora:
    from mpu_cli.client.lora import Lora

    names = filter(None, map(str.strip, (targets or "").split(",")))
    return Lora(rank, 2 * rank if alpha is None else alpha, tuple(names))


def _lines(path: Path) -> tuple[str, ...]:
    try:
        lines = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise MpuError(f"{path}: the alternates cannot be read from it") from error
    if not lines:
        raise MpuError(f"{path}: holds no alternates")
    return lines
