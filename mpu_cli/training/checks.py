"""Checks of options, records and a copy before anything is trained, and the options that identify a training."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mpu_cli.errors import MpuError, UsageError
from mpu_cli.files.manifest import CopyManifest
from mpu_cli.model.device import device_of, tell_accelerate
from mpu_cli.model.load import is_sharded
from mpu_cli.model.source import Model
from mpu_cli.model.tensors import check_bitsandbytes, scales
from mpu_cli.observer import Observer
from mpu_cli.options.declare import declared_options, differing, flat
from mpu_cli.options.unlearning import AUTO, Goal, Logging, Lora, Privacy, Records, Training, Unlearning
from mpu_cli.plugins import extension
from mpu_cli.records.encode import no_template
from mpu_cli.records.forms import check_units, parse_date
from mpu_cli.training.data import SETS_OF_OPTION, Dataset
from mpu_cli.training.examples import sets_of
from mpu_cli.training.execution import check_compiler
from mpu_cli.training.losses import Objective, algorithm_named, objective_of
from mpu_cli.training.optimizers import OPTIMIZERS

ROTATED = ("paper", "all")  # sets of symmetries that do more than permute coordinates and change their signs
PRECISIONS = {  # dtype of the weights
    "float32": torch.float32, "tf32": torch.float32, "mixed": torch.float32, "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}  # fmt: skip


def epochs_of(options: Unlearning) -> int:
    """The epochs that were asked for, or the paper's for a round of the algorithm."""
    return algorithm_named(options.algo).epochs if options.epochs is None else options.epochs


def check_options(options: Unlearning, goal: Goal | None = None) -> Objective:
    """The objective that ``options`` describe; ``goal``: of a training that stops when it is done, or None."""
    objective = objective_of(options.algo, options.algorithm_options)
    training, lora, privacy = options.training, options.lora, options.privacy
    is_private = privacy.is_on
    check_training(training, options.prompts.date)
    if not lora.is_on and lora != Lora():
        raise UsageError("--lora alpha, targets and quantize need --lora rank")
    if lora.quantize is not None:
        if training.precision == "float64" or is_sharded():
            raise UsageError("--lora quantize does not work with --precision float64, or weights split over processes")
        if training.compile:
            raise UsageError("--lora quantize does not work with --training compile")
        check_bitsandbytes()
    if not is_private and (given := sorted(differing(privacy).keys() - {"public_records"})):
        names = ", ".join(name.removeprefix("dp_") for name in given)
        raise UsageError(f"--dp {names}: needs --dp epsilon, without which records are not protected")
    if is_private and privacy.public_records:
        raise UsageError("--public-records does not work with --dp epsilon", "public records need no noise")
    if privacy.public_records:
        _check_public_files(options, goal, objective)
    if is_private:
        check_units(options.records.reading, privacy.dp_unit)
        extension("private").check_objective(options.algo, objective)
        mixed = training.precision == "mixed"
        scheduled = training.warmup_steps or training.lr_scheduler != Training().lr_scheduler
        if scheduled or training.gradient_checkpointing or training.compile or mixed:
            raise UsageError(
                "--dp does not work with --training lr_scheduler, warmup_steps, gradient_checkpointing or compile "
                "or --precision mixed"
            )
    return objective


def in_float32_if_private(options: Unlearning, observer: Observer) -> Unlearning:
    """``options`` as they are or, for DP-SGD in bfloat16, in float32: in 8 bits, one record changes how the gradients
    of all are rounded, and their sum by more than the clip that ε is computed from."""
    if not options.privacy.is_on or options.training.precision not in (AUTO, "bfloat16"):
        return options
    if options.training.precision == "bfloat16":
        observer.warn(
            "--dp epsilon computes in float32: in bfloat16, one record would move the sum of gradients too far"
        )
    return replace(options, training=replace(options.training, precision="float32"))


def _check_public_files(options: Unlearning, goal: Goal | None, objective: Objective) -> None:
    """Raise UsageError for --public-records on files that private records have unless named otherwise: forget.jsonl and
    the like, and those that a variable of any command names, however they are written."""
    usual = [f"{option}.jsonl" for option in SETS_OF_OPTION]
    of_variables = []
    for variable, value in os.environ.items():
        if re.fullmatch(rf"MPU_[A-Z_]+_({'|'.join(SETS_OF_OPTION)})", variable, re.IGNORECASE):
            of_variables += value.splitlines()
    private = {_resolved(name) for name in usual + of_variables}
    named = flat(options) | (flat(goal) if goal else {})
    if not objective.constants.alpha:  # no retain records are read
        del named["retain"]
    for option in SETS_OF_OPTION:
        for name in str(named.get(option) or "").splitlines():
            if _resolved(name) in private:
                raise UsageError(
                    f"--public-records: {name} is where private records are expected: "
                    f"{', '.join(usual)}, and what variables such as "
                    f"MPU_UNLEARN_{option.upper()} name",
                    f"name public ones with --{option}",
                )


def _resolved(name: str) -> str:
    """``name`` as the path that it leads to, if there is one."""
    path = Path(name)
    return str(path.resolve()) if path.exists() else os.path.normpath(name)


def refers_back(objective: Objective) -> bool:
    """Whether a loss compares with probabilities of the model before unlearning.

    Hidden states (rmu) are in the coordinates of their own copy, which change from round to round.
    """
    required_outputs = {objective.algorithm.reference_outputs}
    if objective.constants.alpha:
        required_outputs.add(objective.retain_outputs)
    return bool(required_outputs & {"log_probs", "logits"}) and not required_outputs & {"hidden", "direction"}


def check_training(training: Training, date: str) -> None:
    """Raise UsageError or MpuError for what the device or the libraries cannot do here, before anything is loaded."""
    parse_date(date)
    device = device_of(training.device)
    tell_accelerate(device)
    if parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        raise UsageError("accelerate is set to DeepSpeed, which mpu does not train with", "use FSDP 2")
    if training.compile:
        if training.gradient_checkpointing:
            raise UsageError("--training compile does not work with --training gradient_checkpointing")
        check_compiler(device)
    if training.attention == "flash_attention_2":
        if training.precision not in ("bfloat16", "mixed") or device.type != "cuda":
            raise UsageError(
                "--training attention=flash_attention_2 requires --precision bfloat16 or mixed and a CUDA device"
            )
        # Looked for here: transformers would fetch a kernel, which is code, from the Hub in its place.
        if find_spec("flash_attn") is None:
            raise MpuError(
                "--training attention=flash_attention_2 needs flash-attn", "install it with pip install flash-attn"
            )


def check_logging(logging: Logging, privacy: Privacy) -> None:
    """Raise UsageError for logs that would leak private records, MpuError for a library that is not installed."""
    if privacy.is_on and (logging.resume or logging.log or logging.report_to):
        raise UsageError("--dp epsilon does not work with --resume, --log or --training report_to")
    if (name := logging.report_to) and find_spec(name) is None:
        raise MpuError(f"--training report_to={name} needs {name}", f"install it with pip install {name}")


def check_reference_file(path: Path, manifest: CopyManifest | None, options: Unlearning, objective: Objective) -> bool:
    """Whether the reference in ``path`` exists and is to be read."""
    if not refers_back(objective):
        raise UsageError(
            f"--reference-file: {options.algo} with --constants retain_loss={objective.retain_loss} compares with no "
            "probabilities, or with hidden states, which are in a copy's own coordinates",
            "leave it out",
        )
    if path.suffix != ".safetensors":
        raise UsageError(
            f"--reference-file {path}: is a .safetensors file", f"name it {path.with_suffix('.safetensors')}"
        )
    if not path.exists() and manifest and manifest.round > 1:
        raise MpuError(
            f"{path}: no such file, and this copy is of round {manifest.round}",
            f"give the file that copy {manifest.copy} of round 1 wrote, or leave out "
            "--reference-file to use this round's copy",
        )
    return path.exists()


def check_suits(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: Dataset, options: Unlearning, objective: Objective
) -> None:
    """Raises UsageError or MpuError for options that do not suit the model, whatever the records say."""
    depth, layer = model.config.get_text_config().num_hidden_layers, objective.constants.layer
    if (objective.algorithm.hidden or objective.retain_outputs == "hidden") and layer >= depth - 1:
        raise UsageError(
            f"--constants layer={layer}: the model has {depth} layers, counted from 0, and the last one's output is "
            "only available after the final norm",
            "choose a lower one",
        )
    texts = [record.location for record in data.forget if not record.turns]
    if objective.algorithm.alternate and texts:
        raise UsageError(f"--algo {options.algo}: needs answers to compare, but {texts[0]} is a text")
    if options.prompts.template == "chat" and not tokenizer.chat_template:
        raise no_template()


def check_finite(model: PreTrainedModel, copy: Model) -> None:
    """Raises MpuError for weights that are NaN or infinite: in the row of one token, they would tell whether a record
    has it."""
    for name, parameter in model.named_parameters():
        if parameter.numel() and not torch.stack(torch.aminmax(scales(parameter))).isfinite().all():
            raise MpuError(f"{copy.source}: {name!r} holds NaN or Inf", "ask its owner for a whole copy")


def without_numbers(copy: Model) -> MpuError:
    """The error for a copy whose losses on the client's records are not finite."""
    problem = f"{copy.source}: gives no probabilities on your records, only NaN or Inf"
    return MpuError(problem, "ask its owner for a copy that computes")


def decisive_options(options: Unlearning) -> dict[str, object]:
    """The options that identify a training to the ledger, the server's tags and the checkpoints of --resume, however
    they were spelled: defaults resolved, groups that are off left out, and without records, which count by their
    contents."""
    values = flat(replace(options, epochs=epochs_of(options)))
    left_out = set(declared_options(Records))
    if not options.lora.is_on:
        left_out |= declared_options(Lora).keys()
    else:
        values["lora_alpha"] = options.lora.alpha
    if not options.privacy.is_on:
        left_out |= declared_options(Privacy).keys()
    declarations = declared_options(Unlearning)
    return {name: value for name, value in values.items() if declarations[name].affects_result and name not in left_out}


def plan_privately(data: Dataset, options: Unlearning, objective: Objective) -> Any:
    """The rates at which DP-SGD reads records or persons, and its noise."""
    units = {name: [record.protected_as for record in records] for name, records in sets_of(data, objective).items()}
    return extension("private").plan(units, options.training, options.privacy, epochs=epochs_of(options))


def misfits(manifest: CopyManifest | None, options: Unlearning) -> list[str]:
    """The ``options`` that do not suit the copy, a sentence each."""
    if not (manifest and manifest.symmetries in ROTATED and OPTIMIZERS[options.training.optim].elementwise):
        return []
    return [
        f"{options.training.optim} scales each coordinate separately, but this copy's coordinates are rotated "
        f"(symmetries {manifest.symmetries}): the aggregate will be off even without noise. Use --optim "
        "adamw-blockwise, or ask the server for copies with --symmetries signed"
    ]
