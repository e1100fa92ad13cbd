"""Models of transformers at work: their classes and layers, attention, logits in chunks, and how likely answers are."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations import sdpa_attention

from mpu_cli.errors import MpuError
from mpu_cli.files.sandbox import load_tokenizer
from mpu_cli.model.products import faster_product
from mpu_cli.model.source import DTYPE_ENTRIES, Model
from mpu_cli.records.encode import Encoding, Example, pad
from mpu_cli.records.read import read_records


def network_of(config: PretrainedConfig) -> Any:
    """The class with all of the model's tensors. Of a wrapper around a language model, the causal one may have the
    language model's only, or not exist."""
    reads_images = type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return transformers.AutoModelForImageTextToText if reads_images else transformers.AutoModelForCausalLM


def concrete(config: PretrainedConfig) -> Any:
    """The model's own class; None if transformers has none."""
    images = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    return images or transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)


def build(config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    """A model as ``config`` describes it, with weights that transformers makes up; ``options`` are those of
    ``from_config``."""
    return network_of(config).from_config(config, trust_remote_code=False, **options)


def config_of(entries: Mapping[str, Any]) -> PretrainedConfig:
    """transformers' config of these entries of a config.json, without the dtype."""
    without_dtype = {name: value for name, value in entries.items() if name not in DTYPE_ENTRIES}
    return transformers.AutoConfig.for_model(**without_dtype)


def parts_of(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """``config``, and the configs of its parts: text, images, and what those consist of."""
    yield config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PretrainedConfig):
            yield from parts_of(part)


# The decoder layers of a model, and what one of them reads.


def decoder_layers(model: torch.nn.Module) -> torch.nn.ModuleList:
    """The layers of ``model``, which may be wrapped; of one that reads images, those of its language model."""
    unwrapped_model: Any = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    depth = unwrapped_model.config.get_text_config().num_hidden_layers
    lists = (module for module in unwrapped_model.get_decoder().modules() if isinstance(module, torch.nn.ModuleList))
    return next(layers for layers in lists if len(layers) == depth and any(layers[0].children()))


@contextmanager
def output_of_layer(model: torch.nn.Module, layer: int | None) -> Iterator[list[torch.Tensor]]:
    """Yield a list in which passes of ``model`` inside the block leave the output of ``layer``, counted from 0 and not
    the last, (batch, length, width). The layers above read it detached: nothing of theirs is kept for a backward pass.
    Without a layer, passes are as usual."""
    layer_outputs: list[torch.Tensor] = []
    if layer is None:
        yield layer_outputs
        return

    def keep(_: torch.nn.Module, inputs: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        states = inputs[0] if inputs else named["hidden_states"]
        layer_outputs[:] = [states]
        if inputs:
            return (states.detach(), *inputs[1:]), named
        return inputs, named | {"hidden_states": states.detach()}

    with decoder_layers(model)[layer + 1].register_forward_pre_hook(keep, with_kwargs=True):
        yield layer_outputs


# Attention on accelerators: which of torch's kernels transformers' call leads to.

HALVES = (torch.float16, torch.bfloat16)


def repeat_keys_where_faster() -> None:
    """Replace, once, transformers' decision whether keys and values may stay one for several query heads: only where
    fast kernels take them so.

    Outside of half precision, the only CUDA kernel that does keeps all attention scores, which takes 15.6 instead of
    7.0 GB for a record of 2,048 tokens at 1B. So they are repeated there.
    """
    original = sdpa_attention.use_gqa_in_sdpa
    if hasattr(original, "__wrapped__"):  # replaced before
        return

    @wraps(original)
    def use_gqa(attention_mask: torch.Tensor | None, key: torch.Tensor, *args: torch.Tensor) -> bool:
        return original(attention_mask, key, *args) and (key.device.type == "cpu" or key.dtype in HALVES)

    sdpa_attention.use_gqa_in_sdpa = use_gqa


# Whether the small files that copies get tokenise as all of the model's own do.

WORDS_AT_ONCE = 500  # words of a text


def check_same_tokens(model: Model, copy: Path, lost: str) -> None:
    """Raises MpuError unless the tokenizer that transformers reads in ``copy``, which lacks ``lost``, agrees with the
    one in the folder of ``model`` on a text of all words in the vocabulary. If there is none, nothing is compared.
    """
    transformers.logging.set_verbosity_error()
    tokenizer, copy_tokenizer = _tokenizer(model.folder), _tokenizer(copy)
    if tokenizer is None:
        return
    texts = words_of(tokenizer)
    if copy_tokenizer is None or copy_tokenizer(texts).input_ids != tokenizer(texts).input_ids:
        raise MpuError(
            f"{model.folder}: its copies would have other tokens, because they do not get {lost}",
            "load the tokenizer with transformers and save it again, as a tokenizer.json that says everything",
        )


def words_of(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Texts that together have every word of the vocabulary, and what tokenizers disagree about."""
    words = [tokenizer.convert_tokens_to_string([token]) for token in sorted(tokenizer.get_vocab())]
    texts = [" ".join(words[i : i + WORDS_AT_ONCE]) for i in range(0, len(words), WORDS_AT_ONCE)]
    return ["It's 12345 a  b\n\nDon't, x_y", *texts]


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    try:
        return load_tokenizer(folder)
    except Exception:  # a tokenizer of another program's, or one that needs code
        return None


# Logits of tokens, computed a chunk of tokens at a time from the states that the output head reads.
#
# With a vocabulary of 128,000, the logits of a batch and what its backward pass needs are larger than a small model.
# Here they never exist together: each chunk's are computed, used and dropped, and computed again in the backward
# pass. If they are one chunk, they are kept.

CHUNK = 1 << 26  # logits that exist at once: 256 MiB in float32
SOFTMAX_ROWS = 64  # tokens whose softmax is summed at once, on a CPU: what that allocates is then small, and reused
CAPPED_FACTOR = 1024.0  # logits times this are capped by any cap

Head = torch.nn.Module  # from states (…, width) to logits (…, vocabulary); has a weight (vocabulary, width)


@dataclass(frozen=True)
class Logits:
    """The logits of some tokens, (tokens, vocabulary), in float32 or wider.

    ``head`` computes them from ``states``, (tokens, width), of any number of tokens; None: ``states`` are the logits.
    """

    states: torch.Tensor
    head: Head | None = None

    def __len__(self) -> int:
        return len(self.states)

    def whole(self) -> torch.Tensor:
        """All of them at once."""
        return at_least_float32(self.states if self.head is None else self.head(self.states))

    def log_probs(self, targets: torch.Tensor) -> torch.Tensor:
        """log p of each token's target: (tokens,)."""
        # Not a subclass of Linear, which may compute anything else with its weight.
        if type(self.head) is torch.nn.Linear:
            return _LogProbs.apply(self.states, self.head.weight, self.head.bias, targets)
        return self.per_token(
            lambda logits, chunk_targets: -cross_entropy(logits, chunk_targets, reduction="none"), targets
        )

    def per_token(
        self, compute: Callable[..., torch.Tensor], *columns: torch.Tensor, frozen: Logits | None = None
    ) -> torch.Tensor:
        """``compute(logits, *columns, frozen_logits)`` for chunks of tokens, one row for each token.

        ``columns`` have a row for each token. No gradient goes through the logits of ``frozen``.
        """
        frozen_states = () if frozen is None else (frozen.states,)

        def compute_chunk(states: torch.Tensor, *chunk_columns: torch.Tensor) -> torch.Tensor:
            if frozen is not None:
                with torch.no_grad():
                    chunk_columns = (*chunk_columns[:-1], Logits(chunk_columns[-1], frozen.head).whole())
            return compute(Logits(states, self.head).whole(), *chunk_columns)

        step = len(self) if self.head is None else chunk_of(vocabulary_of(self.head))
        if len(self) <= step:
            return compute_chunk(self.states, *columns, *frozen_states)
        chunks = zip(*(column.split(step) for column in (self.states, *columns, *frozen_states)), strict=True)
        if not torch.is_grad_enabled():
            return torch.cat([compute_chunk(*chunk) for chunk in chunks])
        outputs = []
        for chunk in chunks:
            # Nothing in a chunk is random, so the backward pass needs no state of generators to compute it again.
            output = checkpoint(
                compute_chunk, *chunk, use_reentrant=False, preserve_rng_state=False, determinism_check="none"
            )
            outputs.append(output)
        return torch.cat(outputs)


def vocabulary_of(head: Head) -> int:
    return cast(torch.Tensor, head.weight).shape[0]


def chunk_of(vocabulary: int) -> int:
    """The number of tokens whose logits are one chunk."""
    return max(1, CHUNK // vocabulary)


class _LogProbs(torch.autograd.Function):
    """log softmax(W·states + b) at the targets. Its backward pass turns the logits into their gradient in place.

    torch's own cross-entropy keeps log-probabilities and gradients of all logits beside them. Logits are kept for the
    backward pass if they are one chunk, and computed again if they are more.
    """

    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
    ) -> torch.Tensor:
        ctx.step = chunk_of(weight.shape[0])
        target_logits, sums, logits = [], [], None
        for part, chunk_targets in zip(states.split(ctx.step), targets.split(ctx.step), strict=True):
            logits = None  # or two chunks exist while the next is computed
            with faster_product(part, weight.T):
                logits = at_least_float32(linear(part, weight, bias))
            rows_at_once = SOFTMAX_ROWS if logits.device.type == "cpu" else len(logits)
            sums += [rows.logsumexp(1) for rows in logits.split(rows_at_once)]
            target_logits.append(logits.gather(1, chunk_targets[:, None])[:, 0])
        normalisers = torch.cat(sums) if sums else states.new_zeros(0)
        ctx.chunk_logits = logits if len(target_logits) == 1 and any(ctx.needs_input_grad) else None
        ctx.save_for_backward(states, weight, bias, targets, normalisers)
        return torch.cat(target_logits) - normalisers if target_logits else normalisers

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, weight, bias, targets, normalisers = ctx.saved_tensors
        of_states = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        of_weight = of_bias = None
        for start in range(0, len(states), ctx.step):
            part = slice(start, start + ctx.step)
            logits = None
            with faster_product(states[part], weight.T):
                logits = (
                    at_least_float32(linear(states[part], weight, bias))
                    if ctx.chunk_logits is None
                    else ctx.chunk_logits
                )
            ctx.chunk_logits = None
            chunk_gradient, chunk_targets = gradient[part, None], targets[part, None]
            # ∂ log p(target) / ∂ logits = onehot(target) − softmax(logits)
            logits.sub_(normalisers[part, None]).exp_().mul_(-chunk_gradient)
            # On a GPU, adding in place has no deterministic form; writing has.
            logits.scatter_(1, chunk_targets, logits.gather(1, chunk_targets) + chunk_gradient)
            logits = logits.to(weight.dtype)
            if of_states is not None:
                with faster_product(logits, weight):
                    of_states[part] = logits @ weight
            if ctx.needs_input_grad[1]:
                with faster_product(logits.T, states[part]):
                    if of_weight is None:
                        of_weight = logits.T @ states[part]
                    else:
                        of_weight.addmm_(logits.T, states[part])
            if ctx.needs_input_grad[2]:
                of_bias = logits.sum(0) + (0 if of_bias is None else of_bias)
        if of_weight is None and ctx.needs_input_grad[1]:
            of_weight = torch.zeros_like(weight)
        return of_states, of_weight, of_bias, None


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """``x`` in float32 or, if it is wider, as it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@torch.no_grad()
def separate_head(model: PreTrainedModel) -> Head | None:
    """The output head of ``model``, if it alone turns what it reads into logits; else None.

    Some models cap or scale their logits after the head, which shows if the head's output is made large. Weights that
    are split over processes are not tried: they are whole only within a pass of the model.
    """
    from torch.distributed.tensor import DTensor

    head = model.get_output_embeddings()
    if head is None or any(isinstance(parameter, DTensor) for parameter in head.parameters()):
        return None
    large: list[torch.Tensor] = []

    def inflate(_: torch.nn.Module, __: object, output: torch.Tensor) -> torch.Tensor:
        large[:] = [output * CAPPED_FACTOR]
        return large[0]

    with head.register_forward_hook(inflate):
        logits = model(input_ids=torch.arange(4, device=model.device)[None], use_cache=False).logits
    head_is_last = large and large[0].shape == logits.shape and torch.equal(large[0].to(logits.dtype), logits)
    return head if head_is_last else None


@contextmanager
def input_of(head: Head | None) -> Iterator[list[torch.Tensor]]:
    """Yield a list in which this thread's passes of the model inside the block leave what ``head`` reads, (batch,
    length, width); they compute the logits of the first position only. Without a head, passes are as usual."""
    head_inputs: list[torch.Tensor] = []
    if head is None:
        yield head_inputs
        return
    thread = threading.get_ident()

    def keep(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor] | None:
        if threading.get_ident() != thread:
            return None
        head_inputs[:] = inputs
        return (inputs[0][:, :1].contiguous(),)  # or torch would expand the weights

    with head.register_forward_pre_hook(keep):
        yield head_inputs


# The likelihood of records' answers under a model: the measure that commands report before and after their work.

EXAMPLES_AT_ONCE = 8  # examples
MAX_RECORDS = 128  # records of a file: enough to tell a difference


@dataclass(frozen=True)
class AnswerScore:
    """−log p of an answer, in nats, its number of tokens, and whether each of them is the likeliest (False if nobody
    looked)."""

    loss: float
    tokens: int
    is_likeliest: bool

    @classmethod
    def of_all(cls, scores: Sequence[AnswerScore]) -> AnswerScore:
        """Several answers as one: their tokens count together."""
        loss, tokens = sum(score.loss for score in scores), sum(score.tokens for score in scores)
        return cls(loss, tokens, all(score.is_likeliest for score in scores))

    @property
    def per_token(self) -> float:
        """−log p of a token, on average; 0 without tokens."""
        return self.loss / max(1, self.tokens)

    @property
    def probability(self) -> float:
        """Of a token: their geometric mean."""
        return math.exp(-self.per_token)


class Answers:
    """Records as tokens, padded in batches of similar length."""

    def __init__(self, examples: Sequence[Example], at_once: int = EXAMPLES_AT_ONCE):
        by_length = sorted(range(len(examples)), key=lambda i: len(examples[i].ids))
        self._numbers = [by_length[i : i + at_once] for i in range(0, len(examples), at_once)]
        self._batches = [pad([examples[i] for i in numbers]) for numbers in self._numbers]

    def loss(self, model: PreTrainedModel) -> float:
        """Mean −log p per token of the answers, in nats."""
        return AnswerScore.of_all(self.scores(model)).per_token

    def losses(self, model: PreTrainedModel) -> list[float]:
        """The same of each record alone, in their order; 0 for one without an answer."""
        return [score.per_token for score in self.scores(model)]

    @torch.no_grad()
    def scores(self, model: PreTrainedModel, likeliest: bool = False) -> list[AnswerScore]:
        """Each record's score; ``likeliest``: whether to look which tokens are, which takes all logits."""
        device, head = next(model.parameters()).device, separate_head(model)
        scores = [AnswerScore(0.0, 0, False)] * sum(map(len, self._numbers))
        for numbers, batch in zip(self._numbers, self._batches, strict=True):
            labels = batch["labels"][:, 1:].to(device)
            inputs = {name: batch[name].to(device) for name in ("input_ids", "attention_mask")}
            with input_of(head) as states:
                logits = model(**inputs, use_cache=False).logits
            answer_mask = labels >= 0
            answer_logits = Logits((logits if head is None else states[0])[:, :-1][answer_mask], head)
            log_probs = torch.zeros(labels.shape, dtype=torch.float64)
            wrong = torch.zeros(labels.shape, dtype=torch.bool)
            log_probs[answer_mask.cpu()] = answer_logits.log_probs(labels[answer_mask]).double().cpu()
            if likeliest:
                right = answer_logits.per_token(lambda rows, targets: rows.argmax(-1) == targets, labels[answer_mask])
                wrong[answer_mask.cpu()] = ~right.cpu()
            totals, counts = (-log_probs.sum(1)).tolist(), answer_mask.sum(1).tolist()
            for number, total, count, one_is_wrong in zip(numbers, totals, counts, wrong.any(1).tolist(), strict=True):
                scores[number] = AnswerScore(total, count, likeliest and not one_is_wrong)
        return scores


def read_answers(path: Path, tokenizer: PreTrainedTokenizerBase) -> Answers:
    """The first records of ``path``."""
    examples = Encoding(tokenizer).encode(read_records(path)[:MAX_RECORDS])
    if not any(label >= 0 for example in examples for label in example.labels):
        raise MpuError(f"{path}: no record has an answer")
    return Answers(examples)
