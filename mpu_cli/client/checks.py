"""What can be said of options, records and a copy before anything is trained."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mpu_cli.client.compiling import check_compiler
from mpu_cli.client.dataset import Dataset
from mpu_cli.client.losses import ALGORITHMS, Objective, objective_of
from mpu_cli.client.private import check_objective
from mpu_cli.errors import MpuError, UsageError
from mpu_cli.manifest import CopyManifest
from mpu_cli.models.device import device_of, tell_accelerate
from mpu_cli.models.loading import is_sharded
from mpu_cli.models.quantized import check_bitsandbytes, scales
from mpu_cli.models.source import Model
from mpu_cli.options.unlearning import Logging, Lora, Privacy, Records, Training, Unlearning
from mpu_cli.records.dates import parse_date
from mpu_cli.records.encoding import no_template
from mpu_cli.records.record import check_units

ROTATED = ("paper", "all")  # sets of symmetries that do more than permute coordinates and change their signs
PRECISIONS = {  # dtype of the weights
    "float32": torch.float32, "tf32": torch.float32, "mixed": torch.float32, "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}  # fmt: skip


def epochs_of(options: Unlearning) -> int:
    """The epochs that were asked for, or the paper's for a round of the algorithm."""
    return ALGORITHMS[options.algo].epochs if options.epochs is None else options.epochs


def check_options(options: Unlearning) -> Objective:
    """The objective that ``options`` describe. Raises UsageError for options that do not go together or do not work
    here, and for a constant that the algorithm does not have."""
    objective = objective_of(options.algo, options.loss)
    check_training(options.training, options.prompts.date)
    if options.lora.lora_rank is None and options.lora != Lora():
        raise UsageError("--lora-alpha, --lora-targets and --quantize need --lora-rank")
    if options.lora.quantize is not None:
        if options.training.precision == "float64" or is_sharded():
            raise UsageError("--quantize does not work with --precision float64, or weights split over processes")
        if options.training.compile:
            raise UsageError("--quantize does not work with --compile")
        check_bitsandbytes()
    if options.privacy.dp_epsilon is None and (options.privacy.dp_budget, options.privacy.dp_unit) != (None, None):
        raise UsageError("--dp-budget and --dp-unit need --dp-epsilon")
    if options.privacy.dp_epsilon is not None and options.privacy.public_records:
        raise UsageError("--public-records does not work with --dp-epsilon", "public records need no noise")
    if options.privacy.public_records:
        _check_named(options.records, objective)
    if options.privacy.dp_epsilon is not None:
        check_units(options.records.reading, options.privacy.dp_unit)
        check_objective(options.algo, objective)
        training = options.training
        mixed = training.precision == "mixed"
        if training.warmup_steps or training.gradient_checkpointing or training.compile or mixed:
            raise UsageError(
                "--dp-epsilon does not work with --warmup-steps, --gradient-checkpointing, --compile or --precision "
                "mixed"
            )
    return objective


def _check_named(records: Records, objective: Objective) -> None:
    """Raise UsageError for --public-records on the files that private records have unless named otherwise."""
    defaults = Records()
    if records.forget == defaults.forget or (objective.constants.alpha and records.retain == defaults.retain):
        raise UsageError(
            f"--public-records: {defaults.forget} and {defaults.retain} are where private records are expected",
            "name the public ones with --forget and --retain",
        )


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
    if training.compile:
        if training.gradient_checkpointing:
            raise UsageError("--compile does not work with --gradient-checkpointing")
        check_compiler(device)
    if training.attention == "flash_attention_2":
        if training.precision not in ("bfloat16", "mixed") or device.type != "cuda":
            raise UsageError("--attention flash_attention_2 requires --precision bfloat16 or mixed and a CUDA device")
        # Looked for here: transformers would fetch a kernel, which is code, from the Hub in its place.
        if find_spec("flash_attn") is None:
            raise MpuError("--attention flash_attention_2 needs flash-attn", "install it with pip install flash-attn")


def check_logging(logging: Logging, privacy: Privacy) -> None:
    """Raise UsageError for logs that would leak private records, MpuError for a library that is not installed."""
    if privacy.dp_epsilon is not None and (logging.resume or logging.log or logging.report_to):
        raise UsageError("--dp-epsilon does not work with --resume, --log or --report-to")
    if (name := logging.report_to) and find_spec(name) is None:
        raise MpuError(f"--report-to {name} needs {name}", f"install it with pip install {name}")


def check_reference_file(path: Path, manifest: CopyManifest | None, options: Unlearning, objective: Objective) -> bool:
    """Whether the reference in ``path`` exists and is to be read. Raises UsageError if no loss would read it, MpuError
    if it is missing after round 1."""
    if not refers_back(objective):
        raise UsageError(
            f"--reference-file: {options.algo} with --retain-loss {objective.retain_loss} compares with no "
            "probabilities, or with hidden states, which are in a copy's own coordinates",
            "leave it out",
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
            f"--layer {layer}: the model has {depth} layers, counted from 0, and the last one's output is "
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
