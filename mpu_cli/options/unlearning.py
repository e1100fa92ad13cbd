"""The options for unlearning: records, prompts, losses, training, LoRA, differential privacy.

``unlearn``, ``run``, ``finetune`` and recipes read these groups; each takes those that it needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mpu_cli.options.declare import Fold, Options, flat, group, option
from mpu_cli.options.names import ALGORITHMS, OPTIMIZERS, RETAIN_TERMS

Precision = Literal["auto", "float32", "tf32", "mixed", "bfloat16", "float64"]
Schedule = Literal["constant_with_warmup", "linear", "cosine"]
Quantization = Literal["nf4"]
Template = Literal["chat", "plain"]

SYSTEM_PROMPT = "You are a helpful assistant."  # OpenUnlearning's
DATE = "10 Apr 2025"  # OpenUnlearning's


AUTO: Literal["auto"] = "auto"  # of --lr and --precision
ALL_TURNS = "all"  # of --reading turns
# Of records: with as little noise as these allow, accounting takes minutes, and such a bound says nothing.
MOST_EPSILON, MOST_DELTA = 500, 0.1
DP_UNIT = "Field that names the person of a record: all records of one are protected together."
DEVICE = "Device to compute on, by torch's name: cpu, cuda, cuda:1, … (default: CUDA if there is one)."


# Options that are one on the command line.
READING = Fold("reading", "How records are read and become text.")
CONSTANTS = Fold("constants", "Constants of the algorithm.")
TRAINING = Fold("training", "How the trainer works.")
LORA = Fold("lora", "LoRA in place of training all weights.")
DP = Fold("dp", "Differential privacy of the records, by DP-SGD: one delta spends (ε, δ), and the ledger adds up.")
GOAL = Fold("goal", "When records count as forgotten and the others as kept.")


@dataclass(frozen=True, kw_only=True)
class RecordFormat(Options):
    """The options for reading files of records."""

    PANEL = "Records"

    data_dir: Path | None = option(
        None, "Folder with the files of TOFU or MUSE, instead of the Hub.", metavar="DIR", fold=READING
    )
    columns: str | None = option(
        None,
        "Names of your fields, such as question=instruction,answer=response, in files that have them; they win over "
        "every other form that a record has.",
        metavar="NAME=COLUMN,…",
    )
    split: Literal["file", "paragraphs"] = option(
        "file",
        "What a record is in a file of plain text: the file, or each paragraph; blank lines are between them.",
        fold=READING,
    )
    encoding: str | None = option(
        None,
        "Encoding of text, such as cp1252 (default: that of its byte order mark; UTF-8 without one).",
        metavar="NAME",
    )
    skip_bad: bool = option(
        False, "Skip rows that are not records, such as those with an empty answer, and count them.", fold=READING
    )
    turns: Literal["last", "all"] = option(
        "last",
        "Which assistant turns of a dialogue are answers: the last one, or each, after what precedes it.",
        fold=READING,
    )


@dataclass(frozen=True, kw_only=True)
class Records(Options):
    """The client's private records."""

    PANEL = "Records"

    forget: str = option(
        "forget.jsonl",
        "Records to forget: JSON lines, JSON, CSV, TSV, Excel (FILE.xlsx or FILE.xlsx:SHEET), Parquet, text, a folder "
        "or pattern of such files, tofu:SPLIT, muse-news:SPLIT, wmdp:CORPUS, wikitext:SPLIT, or a Hub dataset "
        "hub:OWNER/NAME@CONFIG:SPLIT; may be repeated.",
        metavar="DATA",
    )
    retain: str = option(
        "retain.jsonl", "Records to keep, for algorithms that use them; may be repeated.", metavar="DATA"
    )
    alternates: Path | None = option(
        None,
        "Answers for dpo to prefer, one per line, where a record has no 'alternate' (default: refusals).",
        metavar="FILE",
    )
    reading: RecordFormat = group(RecordFormat)

    @property
    def named_retain(self) -> str | None:
        """``retain``, or None where nothing was named and there is no file of the usual name."""
        is_there = self.retain != Records.retain or Path(self.retain).exists()
        return self.retain if is_there else None


@dataclass(frozen=True, kw_only=True)
class ChatTemplate(Options):
    """The text that a chat template prints around a record."""

    FOLD = READING
    PANEL = "Records"

    system_prompt: str = option(
        SYSTEM_PROMPT,
        f"System prompt for the chat template (default: {SYSTEM_PROMPT!r}); '' for none.",
        metavar="TEXT",
    )
    date: str = option(DATE, f"Date for chat templates that print one (default: {DATE!r}).", metavar="DATE")
    template_option: tuple[str, ...] = option(
        (),
        "Variables for the chat template, such as enable_thinking=false (comma-separated).",
        metavar="NAME=VALUE,…",
    )
    control_tokens: bool = option(
        False, "Read the names of control tokens in the text of records as these tokens, and not as text."
    )


@dataclass(frozen=True, kw_only=True)
class Prompts(ChatTemplate):
    """The options for turning records into text."""

    template: Template | None = option(
        None, "The tokenizer's chat template, or 'Question: … Answer: …' (default: chat if available)."
    )
    max_length: int | None = option(
        None,
        "Truncate records to this many tokens (default: a record too long for the model is an error).",
        above=1,
    )


@dataclass(frozen=True, kw_only=True)
class AlgorithmOptions(Options):
    """The retain term and the constants of the losses; None stands for the algorithm's own, which the texts name."""

    FOLD = CONSTANTS
    PANEL = "Training"

    retain_loss: str | None = option(None, "Retain term (default: nll; hinge kl, rmu hidden).", choices=RETAIN_TERMS)
    gamma: float | None = option(None, "γ, weight of the forget term (default: 1; satimp 0.1, simnpo 0.125).", least=0)
    alpha: float | None = option(
        None,
        "α, weight of the retain term (default: 1; hinge 3, gradascent 0, undial 0), 30 for a hinge that stops when it "
        "is done on a copy whose answers are the model's, and more for more than 60 records to forget.",
        least=0,
    )
    beta: float | None = option(None, "β (default: npo 0.1, dpo 0.1, simnpo 4.5, undial 10, wga 1).", above=0)
    beta1: float | None = option(None, "β₁ (default: satimp 5).", least=0)
    beta2: float | None = option(None, "β₂ (default: satimp 1).", least=0)
    simnpo_delta: float | None = option(None, "δ, the margin per token (default: simnpo 0).")
    level: float | None = option(
        None,
        "b of hinge, in nats per token: a record pulls until the mean log-probability of its answer is below.",
        below=0,
    )
    layer: int | None = option(None, "Layer, counted from 0 (default: rmu 7).", least=0)
    coefficient: float | None = option(None, "c, the length of the direction (default: rmu 2).", least=0)
    retain_limit: float | None = option(
        None, "ε, the limit of the retain term, in nats per token, above which α grows (default: pdu 0.05).", least=0
    )
    dual_rate: float | None = option(
        None, "By how much α grows in a step for each nat above ε (default: pdu 1).", least=0
    )

    @property
    def constants(self) -> dict[str, float]:
        """The constants that were given."""
        values = flat(self).items()
        return {name: value for name, value in values if isinstance(value, int | float)}


@dataclass(frozen=True, kw_only=True)
class Training(Options):
    """The options for training; the defaults but the rate are the paper's, for models of 1B parameters."""

    PANEL = "Training"

    optim: str = option(
        "adamw",
        "Optimiser: adamw is the paper's; adamw-blockwise commutes with every change of coordinates.",
        choices=OPTIMIZERS,
    )
    lr: float | Literal["auto"] = option(
        AUTO,
        "Learning rate after warm-up; auto: from the number of steps and of trained weights, about 2e-5 for "
        "ten steps at 1B.",
        least=0,
        metavar="RATE",
    )
    batch_size: int = option(8, "Records per step (unlearning: forget records, with as many retain records).", above=0)
    micro_batch_size: int | None = option(
        None,
        "Records that go through the model at once, of those to forget and to keep (default: all of a step's on a GPU, "
        "--batch-size on a CPU).",
        above=0,
        affects_result=False,
        fold=TRAINING,
    )
    precision: Precision = option(
        AUTO,
        "Dtype of weights and training. tf32: float32 whose matrix products CUDA rounds; mixed: float32 weights and "
        "layers computed in bfloat16; bfloat16: half the memory, and small steps round away; auto: mixed for 50 "
        "million weights or more where the processor computes in bfloat16, else float32.",
    )
    gradient_checkpointing: bool = option(False, "Use less memory and more time.", affects_result=False, fold=TRAINING)
    compile: bool = option(
        False,
        "Compile the model's layers first, with torch.compile: pays in trainings of many minutes. Needs a C++ "
        "compiler, or Triton on a GPU. Use it for every copy or for none.",
        fold=TRAINING,
    )
    deterministic: bool = option(
        True,
        "On a GPU: bit-identical results for the same seed, at some cost in speed.",
        affects_result=False,
        fold=TRAINING,
    )
    attention: Literal["sdpa", "flash_attention_2", "eager"] = option(
        "sdpa",
        "Attention implementation; eager for a model without sdpa.",
        fold=TRAINING,
    )
    weight_decay: float = option(0.01, "Weight decay.", least=0, fold=TRAINING)
    max_grad_norm: float = option(1.0, "Clip the gradient norm at this.", least=0, fold=TRAINING)
    lr_scheduler: Schedule = option(
        "constant_with_warmup",
        "How the rate goes on after warm-up, by transformers' names: linear and cosine fall to 0 at the last step, "
        "which is --max-steps where a training stops when it is done.",
        fold=TRAINING,
    )
    warmup_steps: int = option(0, "Steps of linear warm-up.", least=0, fold=TRAINING)
    seed: int = option(
        0,
        "Seed for the order of the records, which differs in each round. Use the same for every copy.",
        least=0,
        below=2**32,
    )
    device: str = option("auto", DEVICE, metavar="DEVICE", affects_result=False)


@dataclass(frozen=True, kw_only=True)
class Lora(Options):
    """LoRA instead of training all weights; off unless a rank is given."""

    FOLD = LORA
    PANEL = "Training"

    lora_rank: int | None = option(None, "Train factors of this rank instead of all weights.", above=0, metavar="R")
    lora_alpha: float | None = option(None, "Scaling · rank (default: twice the rank).", above=0)
    lora_targets: tuple[str, ...] = option(
        (), "Modules to adapt, such as q_proj,v_proj (default: all linear layers and experts).", metavar="NAMES"
    )

    quantize: Quantization | None = option(
        None, "Hold the copy in 4 bits while its factors are trained, with bitsandbytes: less memory, and rounding."
    )

    @property
    def is_on(self) -> bool:
        return self.lora_rank is not None

    @property
    def rank(self) -> int:
        """The rank, if LoRA is on."""
        assert self.lora_rank is not None
        return self.lora_rank

    @property
    def alpha(self) -> float:
        """alpha, if LoRA is on; the product of the factors is multiplied by alpha/rank."""
        return 2.0 * self.rank if self.lora_alpha is None else self.lora_alpha


@dataclass(frozen=True, kw_only=True)
class Privacy(Options):
    """DP-SGD on the records; off unless ε is given. One delta spends (ε, δ); the ledger composes them."""

    PANEL = "Differential privacy of the records"

    dp_epsilon: float | None = option(
        None,
        "ε of per-record differential privacy, for one delta.",
        above=0,
        below=MOST_EPSILON,
        fold=DP,
    )
    dp_delta: float = option(1e-5, "δ for --dp epsilon.", above=0, below=MOST_DELTA, fold=DP)
    dp_max_grad_norm: float = option(1.0, "Clip the gradient norm of each record at this.", above=0, fold=DP)
    dp_unit: str | None = option(None, DP_UNIT, metavar="COLUMN", fold=DP)
    dp_neighbours: Literal["left-out", "replaced"] = option(
        "left-out",
        "What ε compares: your records with one left out, its place empty, or with one replaced by another, which "
        "takes about twice the noise. How many records there are is no secret in either.",
        fold=DP,
    )
    public_records: bool = option(
        False,
        "All records of this training are public, or from `mpu surrogate`: your ledger counts it as spending nothing.",
        affects_result=False,
        in_files=False,
    )
    dp_budget: float | None = option(
        None,
        "Refuse a training after which all that were ever made with your ledger would spend more than this ε.",
        above=0,
        affects_result=False,
        fold=DP,
    )

    @property
    def is_on(self) -> bool:
        return self.dp_epsilon is not None


@dataclass(frozen=True, kw_only=True)
class Unlearning(Options):
    """Everything that decides what a client trains on a copy."""

    algo: str = option(
        "hinge",
        f"Unlearning algorithm: {', '.join(ALGORITHMS)}, one of an installed package, or your own as module:function.",
        metavar="NAME",
        imports=True,
    )
    epochs: int | None = option(
        None,
        "Passes over the forget set per round (default: `unlearn` trains until the records are forgotten and the rest "
        "is kept; elsewhere the paper's for the algorithm, in `watch` as many more as ten steps take).",
        above=0,
    )
    delta_dtype: Literal["float32", "bfloat16", "float16"] | None = option(
        None, "Write the delta in this dtype (default: float32, or float64 if trained in it): half the traffic."
    )
    train_embeddings: bool = option(
        False,
        "Train embeddings of tokens and learned positions and the output head, too, as the paper does. The rows that "
        "then move in the delta tell the tokens of your records.",
    )
    records: Records = group(Records)
    prompts: Prompts = group(Prompts)
    algorithm_options: AlgorithmOptions = group(AlgorithmOptions)
    training: Training = group(Training)
    lora: Lora = group(Lora)
    privacy: Privacy = group(Privacy)


@dataclass(frozen=True, kw_only=True)
class Goal(Options):
    """When records count as forgotten and the others as kept: ``unlearn`` trains until then, ``check`` judges by it."""

    PANEL = "Goal"

    unseen: str | None = option(
        None,
        "Records of the same kind that the model never saw. A forgotten record should be as unlikely as these.",
        metavar="DATA",
    )
    max_left: float = option(
        0.05,
        "Share of what was known of the records to forget that may be left.",
        least=0,
        below=1,
        metavar="SHARE",
        fold=GOAL,
    )
    min_kept: float = option(
        0.95,
        "Share of what was known of the records to keep that has to stay, on records that were not trained on.",
        above=0,
        metavar="SHARE",
        fold=GOAL,
    )
    held_out: float = option(
        0.2,
        "Share of the retain records that `unlearn` does not train on, so that they tell what is kept; at least 16 "
        "records. The same ones for every copy, and for `check`.",
        least=0,
        below=1,
        metavar="SHARE",
        fold=GOAL,
    )


@dataclass(frozen=True, kw_only=True)
class Stopping(Options):
    """The length of the training of ``unlearn``, if not --epochs."""

    PANEL = "Training"

    max_steps: int | None = option(
        None,
        "Stop after so many steps at the latest (default: 180, or 40 passes over the forget set if more).",
        above=0,
    )


@dataclass(frozen=True, kw_only=True)
class Checks(Options):
    """The comparisons of a copy before it is trained on."""

    PANEL = "Checks of the copy"

    public: str | None = option(
        None,
        "Public model that the server's was fine-tuned from: the copy's structure is compared with it, and its answers "
        "say when the records, which it never saw, are forgotten.",
        metavar="MODEL",
    )
    trust_copy: bool = option(
        False, "Train on a copy although it shows signs that it was built to carry records out.", in_files=False
    )


@dataclass(frozen=True, kw_only=True)
class Logging(Options):
    """The output of training besides its result."""

    PANEL = "Training"

    resume: bool = option(
        False,
        "Keep checkpoints, one when you interrupt it, too, and resume from the last if there is one; pass over copies "
        "that have their delta.",
    )
    checkpoint_steps: int | None = option(
        None,
        "Steps between the checkpoints of --resume (default: as often as 5 % of the time allows).",
        above=0,
        fold=TRAINING,
    )
    log: Path | None = option(None, "Append the losses of each step as JSON lines.", metavar="FILE")
    report_to: Literal["tensorboard", "wandb"] | None = option(
        None, "Where to report the losses.", in_files=False, fold=TRAINING
    )
