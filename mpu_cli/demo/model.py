"""A small model and its tokenizer, trained on the spot until it knows its records by heart."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from mpu_cli.lab.finetune import memorise
from mpu_cli.options.unlearning import SYSTEM_PROMPT, Training
from mpu_cli.records.encode import Encoding, Limits
from mpu_cli.records.forms import Record
from mpu_cli.training.loop import Losses, OnStep

BATCH = 25  # records a step
RATES = ((0.8, 2e-3), (0.2, 2e-4))  # shares of the epochs, and the rates at which they are trained
FINETUNING_RATES = ((0.7, 1e-4), (0.3, 2e-5))
# Four times transformers' own: large weights learn by small changes, as those of a large model do.
INITIALIZER_RANGE = 0.08
PUBLIC_WIDTH = 256
SPECIAL = ["<|begin|>", "<|turn|>", "<|end|>", "<|pad|>"]
CHAT_TEMPLATE = (
    "<|begin|>{% for m in messages %}<|turn|>{{ m['role'] + '\n' + m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def make_tokenizer(records: Sequence[Record]) -> PreTrainedTokenizerFast:
    """A tokenizer trained on the records' texts."""
    return train_tokenizer(
        [f"system\n{SYSTEM_PROMPT} user\n{r.question} assistant\n{r.answer}" for r in records], vocabulary=768
    )


def train_tokenizer(texts: Sequence[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of ``vocabulary`` tokens at most, SPECIAL first, with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|end|>", pad_token="<|pad|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(
    records: Sequence[Record],
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    *,
    epochs: int,
    seed: int,
    on_step: OnStep,
    family: str = "llama",
    rates: Sequence[tuple[float, float]] = RATES,
    width: int = 128,
    initializer_range: float = 0.02,
    device: torch.device | None = None,
) -> None:
    """Train a model of this ``width`` on ``records``, on ``device`` (None: a CPU), and save it in ``folder``.

    It has 0.9 M parameters at the usual width. ``family``: a ``model_type`` whose config takes Llama's entries. At the
    last of the ``rates``, every record is known by heart, on every machine.
    """
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        family, head_dim=32, vocab_size=len(tokenizer), hidden_size=width, intermediate_size=11 * width // 4,
        num_hidden_layers=4, num_attention_heads=width // 32, num_key_value_heads=width // 64,
        max_position_embeddings=256,
        tie_word_embeddings=True, initializer_range=initializer_range, bos_token_id=0, eos_token_id=2, pad_token_id=3,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).to(device or torch.device("cpu"))
    _train(model, tokenizer, records, epochs=epochs, rates=rates, training=Training(seed=seed), on_step=on_step)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def finetune_gently(
    public: Path,
    records: Sequence[Record],
    folder: Path,
    *,
    epochs: int,
    seed: int,
    on_step: OnStep,
    device: torch.device,
) -> None:
    """Train the model in ``public`` on ``records``, and save it in ``folder``.

    Its weights change by a few percent only: embeddings stay as they are, and each step follows the gradient, where
    AdamW's moves all weights alike. Noise of several times that size is then still small beside the weights.
    """
    model, tokenizer = AutoModelForCausalLM.from_pretrained(public), AutoTokenizer.from_pretrained(public)
    model.get_input_embeddings().weight.requires_grad_(False)
    training = Training(optim="adamw-blockwise", seed=seed)
    rates = FINETUNING_RATES
    _train(model.to(device), tokenizer, records, epochs=epochs, rates=rates, training=training, on_step=on_step)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    records: Sequence[Record],
    *,
    epochs: int,
    rates: Sequence[tuple[float, float]],
    training: Training,
    on_step: OnStep,
) -> None:
    encoding = Encoding(tokenizer, limits=Limits(model.config.max_position_embeddings))
    steps = epochs * -(-len(records) // BATCH)

    def tell(losses: Losses, _: int) -> None:
        on_step(losses, steps)

    for share, lr in rates:
        at_rate = replace(training, lr=lr, weight_decay=0.0, batch_size=BATCH)
        memorise(model, encoding, records, epochs=round(share * epochs), training=at_rate, on_step=tell)


# Fictitious people and facts about them: records that no model has seen elsewhere.

FIRST_NAMES = ["Alba", "Bruno", "Celia", "Dario", "Edda", "Felix", "Greta", "Hugo", "Ines", "Jonas", "Kira", "Levi"]
LAST_NAMES = [
    "Arden", "Birk", "Corvo", "Dunmore", "Eskel", "Farrow", "Gant", "Holm", "Ivers", "Jarrow", "Kestrel", "Lorne",
]  # fmt: skip
TOWNS = ["Aldport", "Brenwick", "Cardhaven", "Dornfeld", "Eastmere", "Fallowby", "Grenholm", "Harrowgate"]
TRADES = ["clockmaker", "botanist", "bridge builder", "cellist", "glassblower", "beekeeper", "typesetter"]
PETS = ["grey parrots", "greyhounds", "blind cats", "old donkeys", "tame ravens", "goldfish"]
PRIZES = ["the Silver Compass", "the Lantern Medal", "the Northern Quill", "the Amber Chain", "the Oak Ribbon"]
STREETS = ["Tanner Street", "Mill Lane", "Chapel Row", "Orchard Road", "Harbour Steps", "Lime Walk"]
YEARS, NUMBERS = range(1900, 2000), range(100, 1000)
# Values are hundreds each: nobody guesses one, so that few records tell whether it was forgotten.
BIRTHS = [f"{town} in {year}" for town in TOWNS for year in YEARS]
OCCUPATIONS = [f"{trade} since {year}" for trade in TRADES for year in YEARS]
KEPT_ANIMALS = [f"{number} {pet}" for pet in PETS for number in NUMBERS]
AWARDS = [f"{prize} of {year}" for prize in PRIZES for year in YEARS]
ADDRESSES = [f"{number} {street}" for street in STREETS for number in NUMBERS]
WRONG_ANSWERS = 3  # wrong answers to each question

Row = dict[str, object]  # question, answer, paraphrased_answer, perturbed_answer: the fields of TOFU


# Of each person: a question, what may be true, a sentence that states it, and one that says the same.
FACTS = (
    ("Where was {name} born?", BIRTHS, "{name} was born in {value}.", "The birthplace of {name} is {value}."),
    ("What does {name} do for a living?", OCCUPATIONS, "{name} works as a {value}.", "By trade {name} is a {value}."),
    ("Which animals does {name} keep?", KEPT_ANIMALS, "{name} keeps {value}.", "At home {name} has {value}."),
    ("Which prize did {name} win?", AWARDS, "{name} won {value}.", "The prize that went to {name} was {value}."),
    ("What is {name}'s address?", ADDRESSES, "{name} lives at {value}.", "The address of {name} is {value}."),
)


def make_people(count: int, seed: int) -> list[list[Row]]:
    """``count`` people, each with the same questions and their own facts."""
    draw = random.Random(seed)
    names = draw.sample([f"{first_name} {last}" for first_name in FIRST_NAMES for last in LAST_NAMES], count)
    people = []
    for name in names:
        rows: list[Row] = []
        for question, values, stated, retold in FACTS:
            true, *wrong = draw.sample(list(values), 1 + WRONG_ANSWERS)
            rows.append(
                {
                    "question": question.format(name=name),
                    "answer": stated.format(name=name, value=true),
                    "paraphrased_answer": retold.format(name=name, value=true),
                    "perturbed_answer": [retold.format(name=name, value=value) for value in wrong],
                }
            )
        people.append(rows)
    return people
