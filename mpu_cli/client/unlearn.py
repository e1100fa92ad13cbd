"""Unlearning on one copy: load it, train it on the private records, give back the change of its weights."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from mpu_cli.checkpoint.dtypes import NAME
from mpu_cli.checkpoint.reader import WEIGHTS_NAME, Checkpoint, listed
from mpu_cli.checkpoint.source import Model
from mpu_cli.checkpoint.transaction import Transaction
from mpu_cli.checkpoint.writer import MAX_SHARD, CheckpointWriter, Plan, plan_bytes
from mpu_cli.client.data import Record, encode
from mpu_cli.client.losses import ALGORITHMS, Settings
from mpu_cli.client.training import Losses, schedule, sequence_log_probs, train
from mpu_cli.errors import MpuError, UsageError
from mpu_cli.manifest import DeltaManifest, as_metadata, delta_facts, read_copy_manifest

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class Options:
    """How to unlearn; the names and defaults are those of the command line."""

    algorithm: str
    epochs: int | None = None
    lr: float = 1e-5
    batch_size: int = 32
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    optimizer: str = "adamw"
    precision: str = "float32"
    settings: Settings = field(default_factory=Settings)
    template: str = "chat"
    system_prompt: str = "You are a helpful assistant."
    seed: int = 0
    device: str = "auto"


@dataclass(frozen=True)
class Result:
    """What ``unlearn`` made: the delta, the losses of each step, and the norm of the change."""

    path: Path
    steps: list[Losses]
    norm: float


def check_options(options: Options) -> None:
    """Raise UsageError for a number that is none or out of range."""
    for name in ("lr", "weight_decay", "max_grad_norm"):
        value = getattr(options, name)
        if not (math.isfinite(value) and value >= 0):
            raise UsageError(f"--{name.replace('_', '-')} {value}: must be a finite number, 0 or more")
    if not (math.isfinite(options.settings.beta) and options.settings.beta > 0):
        raise UsageError(f"--beta {options.settings.beta}: must be a finite number above 0")
    for name in ("epochs", "batch_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA device here; use --device cpu")


def unlearn(
    copy: Model,
    forget: Sequence[Record],
    retain: Sequence[Record],
    options: Options,
    *,
    target: Path,
    force: bool,
    on_step: Callable[[Losses, int], None],
) -> Result:
    """Unlearn ``forget`` on ``copy`` and write the change of every trained tensor to ``target``.

    ``copy`` may be any causal model; the delta of one that is no copy belongs to no run. ``retain`` may be empty
    if the algorithm reads none. ``on_step`` is told the losses of each step and how many steps there are.
    Raises MpuError if the model or its tokenizer cannot be used, or training diverged.
    """
    check_options(options)
    algorithm = ALGORITHMS[options.algorithm]
    dtype = PRECISIONS[options.precision]
    manifest = read_copy_manifest(copy.folder)
    transformers.set_seed(options.seed)
    with Transaction(force=force) as transaction, _as_directory(copy) as folder:
        model, tokenizer = load(folder, dtype, options.device)
        names = _names_in_files(model, copy.checkpoint)
        delta_dtype = NAME[torch.promote_types(dtype, torch.float32)]
        plan: Plan = {name: (delta_dtype, tuple(p.shape)) for name, p in names.items()}
        output = transaction.add(target, directory=plan_bytes(plan) > MAX_SHARD)

        limit = getattr(model.config, "max_position_embeddings", None)
        sets = [
            encode(records, tokenizer, template=options.template, system_prompt=options.system_prompt, max_length=limit)
            for records in (forget, retain if algorithm.alpha else [])
        ]
        pad_id = next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None)
        reference = None
        if algorithm.reference:
            reference = sequence_log_probs(model, sets[0], options.batch_size, pad_id)
        steps = schedule(
            len(sets[0]),
            len(sets[1]),
            epochs=options.epochs or algorithm.epochs,
            batch_size=options.batch_size,
            seed=options.seed,
        )
        losses: list[Losses] = []

        def record(step: Losses, total: int) -> None:
            losses.append(step)
            on_step(step, total)

        train(
            model,
            steps,
            *sets,
            algorithm=algorithm,
            settings=options.settings,
            reference=reference,
            pad_id=pad_id,
            optimizer=options.optimizer,
            lr=options.lr,
            weight_decay=options.weight_decay,
            max_grad_norm=options.max_grad_norm,
            seed=options.seed,
            on_step=record,
        )
        facts = delta_facts(DeltaManifest(manifest, options.algorithm))
        with CheckpointWriter(output, plan, as_metadata(facts)) as writer:
            norm = _write_delta(names, copy.checkpoint, dtype, writer)
    return Result(target, losses, norm)


@contextmanager
def _as_directory(copy: Model) -> Iterator[Path]:
    """``copy`` as a directory that transformers loads; a lone file under another name gets one of links."""
    if (
        copy.checkpoint.path.name in (WEIGHTS_NAME, f"{WEIGHTS_NAME}.index.json")
        and copy.config_path.parent == copy.folder
    ):
        yield copy.folder
        return
    if copy.checkpoint.path.name.endswith(".index.json"):
        raise MpuError(
            f"{copy.source}: rename the index to {WEIGHTS_NAME}.index.json, the name that transformers reads"
        )
    with tempfile.TemporaryDirectory(prefix="mpu-") as scratch:
        folder = Path(scratch)
        (folder / WEIGHTS_NAME).symlink_to(copy.checkpoint.path.resolve())
        shutil.copyfile(copy.config_path, folder / "config.json")
        for path in copy.side_files:
            shutil.copyfile(path, folder / path.name)
        yield folder


def load(folder: Path, dtype: torch.dtype, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and tokenizer in ``folder``: safetensors only, no code from the folder, no dropout.

    With dropout, every copy would train under other random masks and the noise would not cancel.
    Raises MpuError if transformers cannot load them or had to make up weights.
    """
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(folder)
        for name in vars(config):
            if name.endswith(("dropout", "pdrop")):
                setattr(config, name, 0.0)
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, ImportError) as error:
        reason = str(error).strip().splitlines()
        raise MpuError(
            f"{folder}: transformers cannot load it ({reason[0] if reason else type(error).__name__})"
        ) from error
    if made_up := {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}:
        raise MpuError(f"{folder}: the weights do not fit config.json ({listed(made_up)})")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device), tokenizer


def _names_in_files(model: PreTrainedModel, checkpoint: Checkpoint) -> dict[str, torch.nn.Parameter]:
    """The trained parameters by the names that the copy's files use for them."""
    prefix = model.base_model_prefix + "."
    names = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        match = name if name in checkpoint.tensors else name.removeprefix(prefix)
        if match not in checkpoint.tensors or checkpoint.tensors[match].shape != tuple(parameter.shape):
            raise MpuError(f"{checkpoint.path}: transformers trains {name!r}, which these files do not hold as it is")
        names[match] = parameter
    return names


def _write_delta(
    parameters: dict[str, torch.nn.Parameter], before: Checkpoint, dtype: torch.dtype, writer: CheckpointWriter
) -> float:
    """Write after − before, tensor by tensor; returns its norm. ``before`` is read from the copy's files again."""
    square = 0.0
    for name, parameter in parameters.items():
        target = writer.tensor(name)
        torch.sub(parameter.detach().cpu().to(target.dtype), before.tensor(name).to(dtype).to(target.dtype), out=target)
        part = math.fsum(float(piece.double().square().sum()) for piece in target.view(-1).split(1 << 20))
        if not math.isfinite(part):
            raise MpuError(f"training diverged: {name!r} is no longer finite; lower --lr, or use fewer --epochs")
        square += part
        writer.forget_pages(name)
        before.forget_pages(name)
    return math.sqrt(square)
