"""Which copy a model came from that is only served: the noise of a copy changes what it computes.

Let s be the log-probabilities that the served model gives to the tokens of some texts, and c those of the base with the
publication's permanent noise. If the model came from a copy, s − c is about J·n, with n the copy's own noise (what
cancels, and the mark) and J the derivative of c by the weights. So the gradient g of Σ (s − c)·c, with s − c fixed, is
correlated with n. Given g, which does not depend on a secret that the model was made without, Σ⟨f(g), n⟩ is normal with
variance Σ‖f(g)‖²‖t‖², whatever the model, the texts and f are: the same exact statistic as for weights (``trace``). It
takes one pass forward and backward over the texts for each publication, and no copy is made again. f, the square root
with its sign, element by element, gives a few weights with large gradients less say; s − c is divided by −c, because
tokens that the model is sure of vary less from copy to copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedModel

from mpu_cli.architectures.layout import Layout, layout_of
from mpu_cli.checkpoint.pool import worker_pool
from mpu_cli.errors import MpuError
from mpu_cli.evaluation.encoding import Item, TrainedEncoder
from mpu_cli.evaluation.endpoint import Endpoint
from mpu_cli.models.network import build
from mpu_cli.models.shallow import shallow
from mpu_cli.models.source import Model
from mpu_cli.models.tensor_names import in_memory, pieces_in_files
from mpu_cli.models.tokenizer import tokenizer_of
from mpu_cli.observer import SILENT, Observer
from mpu_cli.records.encoding import Encoding
from mpu_cli.records.forms import parse_columns
from mpu_cli.records.reading import read_records
from mpu_cli.server.deltas import check_base
from mpu_cli.server.noise import Scales
from mpu_cli.symmetry.transform import TensorMap, as_matrix, row_slices
from mpu_cli.tracing.evidence import CopyEvidence, NoiseEvidence, PublicationEvidence, Trace
from mpu_cli.tracing.noise import PublicationKeys, PublishedNoise, Sums, clip, sums_of

AT_ONCE = 4  # texts in a request
SURE = 1e-3  # nats of a token below which all count as equally sure
UNMOVED = TensorMap(None, None)


def trace_endpoint(
    endpoint: Endpoint,
    publications: Sequence[PublicationKeys],
    texts: Path,
    columns: str | None = None,
    *,
    observer: Observer = SILENT,
) -> Trace:
    """Look for the noise of every copy of ``publications`` in what the model at ``endpoint`` gives to ``texts``.

    ``texts``: a file of records; every token after the first is scored. Raises MpuError for an endpoint that returns no
    log-probabilities of prompts, and for texts that cannot be read.
    """
    records = read_records(texts, columns=parse_columns(columns))
    results = []
    served: dict[str, list[torch.Tensor]] = {}
    observer.stage("trace", len(publications) * len(records), "texts")
    with worker_pool() as pool:
        for each in publications:
            check_base(each.base, each.keys, pool)
            base = shallow(each.base, each.keys.publication.omitted)
            items = [
                replace(item, start=1) for item in TrainedEncoder(Encoding(tokenizer_of(each.base))).questions(records)
            ]
            vocabulary = repr(items)
            if vocabulary not in served:
                scores = endpoint.score(items, batch_size=AT_ONCE)
                served[vocabulary] = [_log_probs(score.log_probs, endpoint) for score in scores]
            layout = layout_of(base.checkpoint.tensors, base.config, base.source)
            network = _noisy_network(each, base, layout, pool)
            gradients = _gradients(network, items, served[vocabulary], layout, observer)
            results.append(_evidence(each, layout, gradients, pool))
    return Trace(endpoint.url, tuple(results))


def _log_probs(log_probs: torch.Tensor | None, endpoint: Endpoint) -> torch.Tensor:
    if log_probs is None:
        raise MpuError(f"{endpoint.url}: returns no log-probabilities of prompts")
    return log_probs


def _noisy_network(publication: PublicationKeys, base: Model, layout: Layout, pool: Executor) -> PreTrainedModel:
    """The base with the publication's permanent noise, which every copy has, in float32."""
    config = AutoConfig.for_model(**{k: v for k, v in base.config.items() if k not in ("dtype", "torch_dtype")})
    network = build(config, dtype=torch.float32).eval()
    places = in_memory(network, layout.tensors)
    noise = PublishedNoise(publication)

    def add_noise(target: torch.Tensor, keys: Sequence[bytes], scale: float) -> None:
        def add(bounds: tuple[int, int]) -> None:
            start, stop = bounds
            [draw] = noise.draws(keys, start * target.shape[1], stop * target.shape[1])
            target[start:stop].add_(draw.view(stop - start, -1), alpha=scale)

        list(pool.map(add, row_slices([UNMOVED], *target.shape)))

    with torch.no_grad():
        for tensor in layout.tensors.values():
            if tensor.constant and not any(tensor.axes):
                continue
            stored = base.checkpoint.tensor(tensor.name)
            weights, target = as_matrix(stored.float().clone()), places[tensor.name]
            permanent = publication.keys.scales(tensor.block).permanent
            if permanent and not tensor.constant:
                add_noise(weights, noise.keys(tensor.name, Scales(permanent=permanent)), permanent)
            target.copy_(weights.view(target.shape))
    return network


def _gradients(
    network: PreTrainedModel, items: Sequence[Item], served: Sequence[torch.Tensor], layout: Layout, observer: Observer
) -> dict[str, torch.Tensor]:
    """The gradient of Σ (s − c)/(−c)·c by each tensor of the files, with the quotient fixed and clipped."""
    for parameter in network.parameters():
        parameter.requires_grad_(True)
    for item, log_probs in zip(items, served, strict=True):
        ids = torch.tensor([item.ids])
        logits = network(input_ids=ids, use_cache=False).logits[0, :-1].float()
        ours = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        fixed = ours.detach()
        difference = clip(((log_probs.float() - fixed) / (-fixed).clamp(min=SURE)).nan_to_num())
        (difference * ours).sum().backward()
        observer.advance(1)
    gradients = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        if parameter.grad is not None:
            for piece in pieces_in_files(name, parameter.shape, layout.tensors, network):
                gradients[piece.file_name] = piece.of(parameter.grad)
    return gradients


def _evidence(
    publication: PublicationKeys, layout: Layout, gradients: Mapping[str, torch.Tensor], pool: Executor
) -> PublicationEvidence:
    keys, noise = publication.keys, PublishedNoise(publication)
    sums = Sums(torch.zeros(keys.copies + 1, 3, dtype=torch.float64))
    for tensor in layout.parameters:
        scales = keys.scales(tensor.block)
        copy_scales = Scales(scales.cancelling, mark=scales.mark)
        if tensor.name not in gradients or not (copy_scales.cancelling or copy_scales.mark):
            continue
        gradient = as_matrix(gradients[tensor.name].contiguous())
        subkeys, templates = noise.keys(tensor.name, copy_scales), noise.templates(copy_scales)

        def work(bounds: tuple[int, int], gradient=gradient, subkeys=subkeys, templates=templates):  # type: ignore[no-untyped-def]
            start, stop = bounds
            draws = noise.draws(subkeys, start * gradient.shape[1], stop * gradient.shape[1])
            signal = gradient[start:stop].flatten()
            signal = signal.sign() * signal.abs().sqrt()
            without_mark = [torch.zeros_like(signal)] * (templates.shape[1] - len(draws))
            return sums_of(signal, [*draws, *without_mark], templates, 1.0)

        for part in pool.map(work, row_slices([UNMOVED], *gradient.shape)):
            sums.add(tensor.block, part)

    def of(row: int) -> NoiseEvidence:
        return replace(sums.evidence(row), share=math.nan)  # a gradient says nothing of how much of the noise there is

    copies = tuple(
        CopyEvidence(k, keys.recipients.get(str(k)), None, 0, False, of(k) if any(keys.sigma.values()) else None)
        for k in range(1, keys.copies + 1)
    )
    parameters = layout.parameters
    mark = of(0) if keys.publication.mark else None
    return PublicationEvidence(publication.label, keys, mark, copies, len(gradients), len(parameters), 0)
