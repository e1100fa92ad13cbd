"""The contract of every family: what holds for each, on one small random model with biases and norms away from 0 and 1,
and windows shorter than the text. ``pytest -m "exhaustive or not exhaustive" -k NAME`` on this file checks one."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, CLIPImageProcessorPil, GenerationConfig
from transformers import PreTrainedModel as Network

from mpu_cli.files.boundary import NAMES
from mpu_cli.files.folder import left_out
from mpu_cli.files.randomness import Randomness
from mpu_cli.measuring import generation
from mpu_cli.measuring.encoding import Item
from mpu_cli.measuring.generation import answer
from mpu_cli.measuring.scoring import Scorer
from mpu_cli.model.family import LAYER_AXES, Permutation, QuarterTurns, Rotation
from mpu_cli.model.layout import Layout
from mpu_cli.model.load import limits_of
from mpu_cli.model.network import output_of_layer, parts_of
from mpu_cli.model.sampling import AxisMap, sample
from mpu_cli.model.source import Model, open_model
from mpu_cli.model.staging import fields_of
from mpu_cli.model.transform import as_matrix, name_in_copy, row_slices, tensor_map
from mpu_cli.model.wrappers import supported_families
from mpu_cli.records.encode import Example
from mpu_cli.training.copycheck import traps
from tests.helpers.evaluation import items_of
from tests.helpers.models import (
    CONFIGS,
    FAMILY_CONFIGS,
    FUSED,
    REPRESENTATIVES,
    VOCABULARY,
    by_tier,
    load,
    read,
    save_random,
    write_records,
)
from tests.helpers.protocol import clean_update, distance, updates

SETS = ("signed", "paper", "all")
WEIGHTS = "model.safetensors"
TOKENS = torch.randint(VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(1))
TEXT = " ".join(f"w{i}" for i in range(3, 96)) + "  w4\n<s>w5?"
AT_ONCE = {
    "llama", "gpt2", "qwen3", "phi3-partial", "gpt_neox", "cohere2", "gemma2", "olmo2", "mixtral", "gpt_oss",
    "deepseek_v3", "mamba2", "nemotron_h", "falcon_h1", "llava", "bloom",
}  # fmt: skip
ONE_OF_EACH_TYPE = set({config["model_type"]: name for name, config in {**FAMILY_CONFIGS, **CONFIGS}.items()}.values())
EVERY = [*CONFIGS, *FAMILY_CONFIGS, *(f"{name}-fused" for name in FUSED)]
# Entries of configs that say where a model came from and which program wrote it.
OF_FILES = {"_name_or_path", "transformers_version", "dtype", "torch_dtype"}
OF_CLASSIFIERS = {"id2label", "label2id", "problem_type"}


@dataclass(frozen=True)
class Subject:
    """A random model of a family, saved in ``folder / "base"``."""

    name: str
    folder: Path
    mpu: Callable
    dtype: torch.dtype = torch.float32

    @classmethod
    def make(cls, name: str, folder: Path, mpu: Callable, dtype: torch.dtype = torch.float32) -> Subject:
        base = save_random(name, folder / "base", dtype)
        if name == "llava":
            CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}).save_pretrained(base)
        return cls(name, folder, mpu, dtype)

    @property
    def base(self) -> Path:
        return self.folder / "base"

    @property
    def network(self) -> Network:
        return read(self.base, self.dtype)

    @cached_property
    def model(self) -> Model:
        return open_model(str(self.base))

    @property
    def layout(self) -> Layout:
        return self.model.layout

    @cached_property
    def expected(self) -> torch.Tensor:
        """The base's logits."""
        return logits(self.network)

    @property
    def tolerance(self) -> float:
        return 1e-4 if self.name.startswith(("qwen3_5", "qwen3_next")) else 1e-5  # a delta net amplifies rounding


def logits(network: Network) -> torch.Tensor:
    with torch.no_grad():
        return network(TOKENS).logits


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


def check_family_says_so(subject: Subject) -> None:
    model_type = subject.model.config["model_type"]
    assert subject.mpu("check-family", subject.base).out == f"{model_type}: every symmetry holds\n"


def copies_compute_what_the_base_computes(subject: Subject) -> None:
    """Without noise, in each set; every tensor that a symmetry can move is moved, otherwise in each copy; and
    transformers makes the same of everything else."""
    weights = subject.model.checkpoint
    for symmetries in SETS:
        folder = subject.folder / symmetries
        subject.mpu("publish", subject.base, "--kappa", 0, "--copies", 2, "--symmetries", symmetries, "--out", folder,
                    "--keys", folder / "keys.bin")  # fmt: skip
        copies = [open_model(str(folder / f"copy_{k}")).checkpoint for k in (1, 2)]
        for k in (1, 2):
            assert relative(logits(read(folder / f"copy_{k}")), subject.expected) < subject.tolerance, symmetries
        for name, tensor in subject.layout.tensors.items():
            axes = {axis for group in tensor.axes for axis in group}
            movable = axes & {"model", "|model|"} and symmetries != "paper" and weights.tensors[name].elements > 8
            if movable or (subject.name in CONFIGS and axes & set(LAYER_AXES)):
                tensors = [checkpoint.tensor(name) for checkpoint in (weights, *copies)]
                for first, second in ((0, 1), (0, 2), (1, 2)):
                    assert not torch.equal(tensors[first], tensors[second]), (symmetries, name)
    check_files_beside(subject.folder / "signed/copy_1", subject.base)


def check_files_beside(folder: Path, base: Path) -> None:
    """``folder`` holds tensors of the same names, dtypes and shapes, and what transformers makes of its other files is
    the same."""
    shapes = [
        {name: (tensor.dtype, tensor.shape) for name, tensor in load_file(each / WEIGHTS).items()}
        for each in (folder, base)
    ]
    assert shapes[0] == shapes[1]
    ours, theirs = (AutoConfig.from_pretrained(each).to_dict() for each in (folder, base))
    assert without_provenance(ours) == without_provenance(theirs)
    assert GenerationConfig.from_pretrained(folder).to_dict() == GenerationConfig.from_pretrained(base).to_dict()
    ours, theirs = (AutoTokenizer.from_pretrained(each) for each in (folder, base))
    assert type(ours) is type(theirs)
    assert ours(TEXT).input_ids == theirs(TEXT).input_ids
    assert ours.chat_template == theirs.chat_template
    assert ours.special_tokens_map == theirs.special_tokens_map
    if (base / "preprocessor_config.json").exists():
        ours, theirs = (AutoProcessor.from_pretrained(each) for each in (folder, base))
        assert ours.to_dict() == theirs.to_dict()


def without_provenance(config: dict) -> dict:
    """``config`` and the configs in it without what is of files only; a dtype is that of the tensors."""
    return {
        name: without_provenance(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in OF_FILES
    }


def what_is_no_symmetry_changes_the_function(subject: Subject) -> None:
    tried = 0
    for name, layer, maps in false_maps(subject.layout):
        tensors = {n: t for n, t in subject.layout.tensors.items() if layer < 0 or t.layer == layer}
        actual = logits_through(subject.base, replace(subject.layout, tensors=tensors), maps)
        assert relative(actual, subject.expected) > 1e-3, name
        tried += 1
    assert tried or not any(s.rotary or s.norm for s in subject.layout.structures)


def false_maps(layout: Layout) -> Iterator[tuple[str, int, dict]]:
    """What looks like a symmetry and is none: a name, a layer (−1: all), and its maps."""
    last = max(
        range(len(layout.structures)), key=lambda i: (layout.structures[i].attention, layout.structures[i].rotary)
    )
    structure, sizes = layout.structures[last], layout.sizes_of(last)
    d = sizes["head_dim"]
    source = Randomness(bytes(32)).stream("symmetry", 1, 1, "false", 1)

    def draw(symmetry: object) -> dict:
        return dict(sample([symmetry], sizes, lambda _: source))  # type: ignore[list-item]

    if structure.rotary:
        yield "any rotation of queries and keys", last, draw(Rotation("qk", ("query", "key"), None))
        other = "neighbours" if structure.planes == "halves" else "halves"
        yield "the other planes", last, draw(Rotation("qk", ("query", "key"), other, structure.rotary))
    if structure.norm:
        yield "angles under a norm", last, draw(Rotation("qk", ("query", "key"), structure.planes, structure.rotary))
        moved = draw(QuarterTurns("qk", ("query", "key"), structure.planes, structure.rotary, structure.norm))
        yield "turns without the norm's weights", last, {axis: moved[axis] for axis in ("query", "key")}
    if not structure.movable:
        order = torch.arange(sizes["heads"]).roll(1)
        rolled_heads = AxisMap((order[:, None] * d + torch.arange(d)).flatten())
        yield "heads under ALiBi", last, dict.fromkeys(("query", "key", "value", "mixed"), rolled_heads)
    plain = [i for i, block in enumerate(layout.structures) if any(ffn.prefix == "" for ffn in block.ffns)]
    if plain and not layout.structures[plain[-1]].ffns[0].gated:
        signed = Permutation("ffn", ("ffn", "gate", "up"), signed=("ffn", "gate", "up"))
        yield "signs of neurons", plain[-1], draw(signed)
    if not layout.family.rms_norm:
        yield "signs of the residual stream", -1, draw(Permutation("r", ("model", "|model|"), signed=("model",)))


def logits_through(base: Path, layout: Layout, maps: dict) -> torch.Tensor:
    """Logits after the tensors in ``base``'s files went through ``maps``; the files are left as they were."""
    path = base / WEIGHTS
    before, after = load_file(path), {}
    for tensor in layout.tensors.values():
        mapping, matrix = tensor_map(layout, tensor, maps), as_matrix(before[tensor.name])
        target = torch.empty_like(matrix)
        for start, stop in row_slices([mapping], *matrix.shape):
            mapping.put(target, mapping.forward(matrix[start:stop], start), start)
        after[name_in_copy(tensor, maps)] = target.view(before[tensor.name].shape)
    save_file({**before, **after}, path, {"format": "pt"})
    try:
        return logits(read(base))
    finally:
        save_file(before, path, {"format": "pt"})


def items_that_begin_alike_are_scored_as_alone(subject: Subject) -> None:
    """Whatever attends along paths, convolves or keeps a state. Compared with log-probabilities of each item by itself;
    Mistral's prompts are longer than its window."""
    network, rng = subject.network, random.Random(1)
    items = items_of(rng, 5, 4) + items_of(rng, 4, 1)
    items += [replace(item, ids=(*item.ids, *item.ids[3:6])) for item in items[::3]]  # begin with all of another
    expected_logits = []
    for item in items:
        with torch.no_grad():
            expected_logits.append(network(input_ids=torch.tensor([item.ids])).logits[0, item.start - 1 : -1].double())
    for batch_size in (3, 64):
        scored = Scorer(network).score(items, batch_size=batch_size, moments=True)
        for item, scores, item_logits in zip(items, scored, expected_logits, strict=True):
            log_p = item_logits.log_softmax(-1)
            expected = log_p.gather(1, torch.tensor(item.labels)[:, None])[:, 0]
            torch.testing.assert_close(scores.log_probs.double(), expected, rtol=0, atol=1e-4)
            torch.testing.assert_close(scores.losses.double(), -expected, rtol=0, atol=1e-4)
            assert scores.likeliest.equal(item_logits.argmax(-1))
            mean = (log_p.exp() * log_p).sum(-1)
            variance = (log_p.exp() * (log_p - mean[:, None]) ** 2).sum(-1)
            torch.testing.assert_close(scores.mean.double(), mean, rtol=0, atol=1e-4)
            torch.testing.assert_close(scores.variance.double(), variance, rtol=0, atol=1e-3)


def answers_are_those_to_each_prompt_alone(subject: Subject) -> None:
    """By transformers' generation. Here they are a batch that rows leave one after the other."""
    network, tokenizer = load(subject.base, torch.float32, "cpu")
    longest = limits_of(network, independent=True).longest  # up to which no row's positions depend on the others
    items = items_of(random.Random(2), 6, 1)

    def generate(item: Item, **more: object) -> torch.Tensor:
        ids = torch.tensor([item.prompt])
        most = 40 if longest is None else min(40, longest - ids.shape[1])
        row = network.generate(ids, max_new_tokens=most, do_sample=False, pad_token_id=tokenizer.eos_token_id, **more)[
            0
        ]
        return row[ids.shape[1] :]

    end = int(generate(items[0])[:4][-1])  # a random model says it early, and again in other answers
    items = [replace(item, end_token=end) for item in items]
    alone = [generate(item, eos_token_id=[end, tokenizer.eos_token_id]) for item in items]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "PART", 3)
        answers = answer(network, tokenizer, items, [[]] * len(items), limit=40, batch_size=8, longest=longest)
    expected = [tokenizer.decode(row, skip_special_tokens=True).strip() for row in alone]
    assert [each.generation for each in answers] == expected


def the_output_of_a_layer_is_the_hidden_state(subject: Subject) -> None:
    """That transformers returns."""
    network = subject.network
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        expected = network(ids, output_hidden_states=True, use_cache=False).hidden_states[1]
        with output_of_layer(network, 0) as layer_outputs:
            network(ids, use_cache=False)
    assert torch.equal(layer_outputs[0], expected)


def every_setting_is_listed(subject: Subject) -> None:
    """As transformers' classes have them, also of their parts; a new release may add one."""
    for part in parts_of(subject.network.config):
        kind = type(part)
        names = {field.name for field in dataclasses.fields(kind)}
        names |= {*kind.attribute_map, *kind.attribute_map.values()}
        assert names - OF_CLASSIFIERS <= NAMES["config"], kind
    config = subject.model.config
    assert not left_out(config, fields_of(config))


def traps_can_be_looked_for(subject: Subject) -> None:
    network, _ = load(subject.base, torch.float32, "cpu")
    examples = [Example([*range(3 + i, 20 + i)], [*range(3 + i, 20 + i)], 17) for i in range(8)]
    assert traps(subject.model, network, examples, 8) == []


PROPERTIES = (
    check_family_says_so,
    copies_compute_what_the_base_computes,
    what_is_no_symmetry_changes_the_function,
    items_that_begin_alike_are_scored_as_alone,
    answers_are_those_to_each_prompt_alone,
    the_output_of_a_layer_is_the_hidden_state,
    every_setting_is_listed,
    traps_can_be_looked_for,
)


@pytest.mark.parametrize("family", by_tier(EVERY, AT_ONCE, REPRESENTATIVES | ONE_OF_EACH_TYPE))
def test_family(mpu: Callable, tmp_path: Path, subtests: pytest.Subtests, family: str) -> None:
    subject = Subject.make(family, tmp_path, mpu)
    for check in PROPERTIES:
        with subtests.test(check.__name__):
            check(subject)


def the_whole_path_gives_the_clean_update(subject: Subject) -> None:
    """Blockwise AdamW and SGD under rotations, plain AdamW under signed permutations, without noise; the result lies as
    the base does."""
    cases = [("all", "adamw-blockwise")]
    if subject.name in SEVERAL_OPTIMIZERS:
        cases += [("signed", "adamw"), ("paper", "sgd")]
    for symmetries, optimizer in cases:
        folder, options = subject.folder / symmetries, training_options(subject, "--optim", optimizer)
        clean = clean_update(subject.mpu, subject.base, folder, options)
        publishing: list[object] = ["--copies", 2, "--kappa", 0, "--symmetries", symmetries]
        update, _ = updates(subject.mpu, subject.base, folder, publishing, options)
        trained = [name for name in clean if float(clean[name].abs().max()) > 0]
        assert len(trained) > len(clean) / 2
        assert distance(update, clean) < 1e-5, symmetries
        result = folder / "unlearned"
        assert all(torch.isfinite(parameter).all() for parameter in read(result, torch.float64).parameters())
        check_files_beside(result, subject.base)
        for path in subject.base.iterdir():
            if path.suffix != ".safetensors":
                assert (result / path.name).read_bytes() == path.read_bytes(), path.name


def adapters_give_the_clean_update(subject: Subject) -> None:
    folder, options = subject.folder / "lora", training_options(subject, "--optim", "sgd", "--lora", "rank=3")
    clean = clean_update(subject.mpu, subject.base, folder, options)
    publishing: list[object] = ["--copies", 2, "--kappa", 0, "--symmetries", "all"]
    update, _ = updates(subject.mpu, subject.base, folder, publishing, options)
    assert distance({name: update[name] for name in clean}, clean) < 1e-4
    if subject.name in ("mixtral", "gpt_oss", "llama4_text"):
        assert any(".experts." in name and clean[name].any() for name in clean)


def training_options(subject: Subject, *more: object) -> list[object]:
    forget = write_records(subject.folder / "forget.jsonl", 4, 1)
    return ["--forget", forget, "--algo", "gradascent", "--precision", "float64", "--epochs", 2, "--batch-size", 2,
            "--reading", "template=plain", "--lr", "1e-3", *more]  # fmt: skip


# One of each kind of wiring; the others, whose copies compute what the base computes, in the exhaustive tier.
SEVERAL_OPTIMIZERS = (
    "mixtral", "qwen3", "olmo2", "phi3-partial", "gpt_neox", "cohere2", "mixtral-fused", "gpt_oss",
)  # fmt: skip
TRAINED = {"mixtral", "gpt_neox", "deepseek_v3", "nemotron_h"}


@pytest.mark.parametrize("family", by_tier(EVERY, fast=(), slow=TRAINED))
def test_family_is_trained(mpu: Callable, tmp_path: Path, subtests: pytest.Subtests, family: str) -> None:
    """In float64."""
    subject = Subject.make(family, tmp_path, mpu, torch.float64)
    for check in (the_whole_path_gives_the_clean_update, adapters_give_the_clean_update):
        with subtests.test(check.__name__):
            check(subject)


def test_every_family_is_tested() -> None:
    tested = {config["model_type"] for config in {**CONFIGS, **FAMILY_CONFIGS}.values()}
    assert tested == set(supported_families())
