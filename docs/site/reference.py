"""Pages from the program itself, which the site has and the repository has not: ``python docs/site/reference.py``
prints the commands, ``… families`` and ``… metrics`` these."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import mpu_cli
from mpu_cli.cli.main import PANELS, application
from mpu_cli.errors import MpuError
from mpu_cli.model.family import CHANNELS, LAYER_AXES, MODEL_AXES, UNION, Family, names_of

WIDTH = 118  # of lines of text
CODE_WIDTH = 80  # of lines of code that a page shows without scrolling
NO_BREAK = "\N{NO-BREAK SPACE}"
INTRODUCTION = """# Which command?

By who runs it. Every option can also be set with an environment variable: `MPU_` + command + option, such as
`MPU_PUBLISH_KAPPA=0.01`. For every command there are `--help`, `--config FILE` (options from a TOML file, a table for
each command; none that run a program, send, replace files or trust somebody), `--quiet` (warnings and errors only),
`--profile` (how long each stage took) and `--debug` (a traceback when something fails).
"""


def index() -> str:
    """The page that leads to those of ``command_pages``, Markdown."""
    lines = [INTRODUCTION]
    for panel, commands in PANELS.items():
        lines += [f"## {panel}", "", "| command | |", "|---|---|"]
        for command in commands:
            first = (command.__doc__ or "").split("\n\n")[0].split()
            lines.append(f"| [mpu {command.NAME}](commands/{command.NAME}.md) | {' '.join(first)} |")
        lines.append("")
    return "\n".join(lines)


def command_pages() -> dict[str, str]:
    """A page for each command, by its name, Markdown."""
    group = application()
    return {name: "\n".join(_section(name, command)) for name, command in group.commands.items()}


def reference() -> str:
    """All of them in one."""
    return "\n".join([index(), *command_pages().values()])


FUNCTIONS_INTRODUCTION = """# Python functions

Each function has the arguments and options of its command, whose page explains them; `observer` gets progress, notes
and warnings. [Python](../python.md) shows how the functions fit together.
"""


def functions() -> str:
    """The commands as Python functions, each with its signature, Markdown."""
    sections = [FUNCTIONS_INTRODUCTION]
    for name in sorted(set(mpu_cli.__all__) - {"__version__", "results"}):
        function = getattr(mpu_cli, name)
        command, signature = function.__wrapped__.__self__, inspect.signature(function)
        parameters = list(signature.parameters.values())
        whole = [str(parameter).replace(" ", NO_BREAK) for parameter in parameters]
        whole.insert(sum(parameter.kind == parameter.POSITIONAL_OR_KEYWORD for parameter in parameters), "*")
        lines = textwrap.wrap(
            ", ".join(whole), CODE_WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
        )
        code = "\n".join([f"{name}(", *lines, f") -> {signature.return_annotation}"]).replace(NO_BREAK, " ")
        text = inspect.cleandoc(function.__doc__).split("\n\n")[0]
        page = f"[mpu {command.NAME}](../commands/{command.NAME}.md)"
        sections.append(f"## {name}\n\n{text} Options: {page}.\n\n```python\n{code}\n```\n")
    return "\n".join(sections)


FAMILIES_INTRODUCTION = """# Families

{count} model types, and what each family's architecture allows in the set `all`. `signed` takes the permutations, signs
and turns by 90° among it, and `paper` turns queries, keys and values of a head together, where nothing keeps them
apart. Each line holds on small random models to 1e-5 in float32, over the whole path (`tests/model/test_family.py`);
Llama, Qwen3 and OLMo 2 were tested on trained models, too.

`mpu check-family MODEL` applies each symmetry to a checkpoint, alone and with the others, and compares logits.
An architecture that is not listed is refused: a transform that does
not fit would change what the model computes. How to add one: [contributing](../CONTRIBUTING.md#add-a-family).

- **RoPE** allows one angle in each plane of two coordinates, for a key head and all its query heads, and any
  rotation of the coordinates that it leaves alone. Which two coordinates share a plane differs: i and i + r/2
  (halves), or 2i and 2i + 1 (neighbours).
- **Norms of queries and keys** lie between their rows and RoPE. Turns by 90° pass through if the norm's weights
  change places with the coordinates; other angles do not.
- **Experts** change places with the rows of their router, and each has its own order of neurons. Files with a
  matrix for each expert and files with stacks are both read, and results are laid out like the base. Which expert a
  token goes to is a decision that noise can flip; an error from that does not cancel, so keep κ small and look at
  the estimate of `aggregate`. LoRA adapts experts too, unless `--lora targets` leaves them out; `aggregate
  --as-adapter` cannot write those.
- **Latent attention** (MLA): all heads share the part of their keys that RoPE turns, so they share its angles. **State
  spaces** (Mamba, Mamba2, delta nets): heads, their coordinates and states change places, without signs.
- **Models that read images or sounds** are published whole. What their towers write into the language model moves
  along; the towers stay as they are, without noise (`publish` says how much that is), and nothing of them is trained.
- **What no symmetry moves** `publish` names: with `paper`, embeddings and norms, for instance. Noise hides those. The
  column *in place* has what no set moves; it is at most 0.01 % of the weights (`python docs/site/reference.py
  shares` computes it for the sizes that transformers assumes).
- Tensors that a model does not use (prediction heads of some releases) and quantised weights are refused by name.

| family | `model_type` | queries and keys | values | heads | neurons | residual stream | in place | |
|---|---|---|---|---|---|---|---|---|
"""


def families_page() -> str:
    """The page on families, Markdown."""
    from mpu_cli.model.wrappers import supported_families

    families = supported_families()
    unique = list({id(family): family for family in families.values()}.values())
    return FAMILIES_INTRODUCTION.replace("{count}", str(len(families)), 1) + "".join(map(_family_row, unique))


def _family_row(family: Family) -> str:
    axes = {name for tensor in family.layer_tensors for axis in tensor.axes for name in names_of(axis)}
    angles = f"any angle, {family.planes}" if family.planes else "any rotation"
    if family.planes and family.rotary:
        angles += "; elsewhere any rotation"
    turns = f"turns by 90°, {family.planes}"
    normed = [t for t in family.layer_tensors if {"|head|", "|query|"} & {n for axis in t.axes for n in names_of(axis)}]
    optional = any(isinstance(tensor.when, str) for tensor in normed)  # an entry of the config says whether it is there
    queries = f"{angles}; with a norm {turns}" if optional else turns if normed else angles
    values = "order and signs" if "|mixed|" in axes else "any rotation"
    if "mla-query" in axes:
        queries, values = "one angle for all heads; elsewhere any rotation; latents: order and signs", "any rotation"
    heads = "move" if family.movable_heads is True else "stay under ALiBi"
    cells = [
        NAMES.get(family.model_types[0], family.model_types[0].replace("_", " ").title()),
        ", ".join(f"`{model_type}`" for model_type in family.model_types),
        queries,
        values,
        heads + (", experts move" if "e-ffn" in axes else ""),
        "order and signs" if family.gated and axes & {"up", "e-up"} else "order",
        "order and signs" if family.rms_norm else "order",
        ", ".join(f"`{name}`" for name in _in_place(family)),
        family.note,
    ]
    return "| " + " | ".join(cells) + " |\n"


def _in_place(family: Family) -> list[str]:
    """The trained tensors of which no symmetry moves an axis."""
    moved = {*LAYER_AXES, *MODEL_AXES, *CHANNELS}
    tensors = [tensor for tensor in (*family.tensors, *family.layer_tensors) if tensor.trained]
    return sorted(t.name for t in tensors if not any(name in moved for axis in t.axes for name in names_of(axis)))


def shares() -> Iterator[str]:
    """Lines of a table: for each ``model_type``, with the sizes that transformers assumes, how many weights there are,
    which share of them no symmetry moves, and which is around the language model and stays as it is."""
    import torch
    from transformers import CONFIG_MAPPING

    from mpu_cli.model.layout import expected_tensors, layout_of
    from mpu_cli.model.network import build
    from mpu_cli.model.wrappers import WRAPPERS, supported_families
    from mpu_cli.protocol.verify import unmoved_tensor_names

    yield "| `model_type` | billions of weights | nothing moves | around the language model |"
    yield "|---|---|---|---|"
    for model_type in supported_families():
        config = CONFIG_MAPPING[model_type]()
        try:
            tensors = expected_tensors(config.to_dict())
            names = unmoved_tensor_names(layout_of(tensors, config.to_dict(), model_type), UNION)
        except MpuError:
            yield f"| `{model_type}` | | | transformers' own sizes do not make a model |"
            continue
        inside = sum(info.elements for info in tensors.values())
        total_weights = inside
        if model_type in WRAPPERS:
            with torch.device("meta"):
                total_weights = sum(parameter.numel() for parameter in build(config).parameters())
        still = sum(tensors[name].elements for name in names)
        around = f"{1 - inside / total_weights:.1%}" if total_weights > inside else ""
        yield f"| `{model_type}` | {total_weights / 1e9:.2f} | {still / total_weights:.3%} | {around} |"


NAMES = {  # where it is not the model type in title case
    "gemma4_text": "Gemma 4", "gemma4": "Gemma 4, images, sounds", "gemma4_unified_text": "Gemma 4, unified",
    "gemma4_unified": "Gemma 4, unified, images, sounds", "mistral3": "Mistral Small 3, Ministral 3, images",
    "qwen2_vl": "Qwen 2 VL", "qwen2_5_vl": "Qwen 2.5 VL", "qwen3_vl": "Qwen 3 VL", "qwen3_vl_moe": "Qwen 3 VL, mixture",
    "llama4": "Llama 4, images", "muse_glimmer": "Muse Glimmer", "llava": "LLaVA",
    "llama": "Llama 2, 3, …", "llama4_text": "Llama 4", "mistral": "Mistral, Ministral", "qwen2": "Qwen 2, 2.5",
    "qwen3": "Qwen 3", "qwen3_5_text": "Qwen 3.5", "qwen3_5_moe_text": "Qwen 3.5, mixture",
    "qwen3_5": "Qwen 3.5, images", "qwen3_5_moe": "Qwen 3.5, mixture, images",
    "qwen2_moe": "Qwen 1.5, 2, mixture", "qwen3_moe": "Qwen 3, mixture", "smollm3": "SmolLM 3", "gemma": "Gemma",
    "gemma2": "Gemma 2", "gemma3_text": "Gemma 3", "gemma3": "Gemma 3, images", "phi": "Phi 1, 1.5, 2",
    "phi3": "Phi 3, 3.5, 4", "olmo": "OLMo", "olmo2": "OLMo 2, 3", "olmoe": "OLMoE", "gpt_neox": "Pythia, GPT-NeoX",
    "granite": "Granite 3", "granitemoe": "Granite 3, mixture", "gpt_oss": "gpt-oss", "glm": "GLM 4 (2024)",
    "glm4": "GLM 4 (2025)", "glm4_moe": "GLM 4.5, 4.6", "glm4_moe_lite": "GLM 4.7 Flash", "glm_moe_dsa": "GLM 5",
    "deepseek_v2": "DeepSeek V2", "deepseek_v3": "DeepSeek V3, R1", "deepseek_v32": "DeepSeek V3.2",
    "youtu": "Youtu-LLM", "minicpm3": "MiniCPM 3", "stablelm": "StableLM", "starcoder2": "StarCoder 2",
    "cohere": "Command R", "cohere2": "Command R7B, A", "exaone4": "EXAONE 4", "opt": "OPT", "gpt2": "GPT-2",
    "gpt_neo": "GPT-Neo", "gptj": "GPT-J", "gpt_bigcode": "StarCoder, SantaCoder", "codegen": "CodeGen",
    "seed_oss": "Seed-OSS", "iquestcoder": "IQuest-Coder", "ernie4_5": "ERNIE 4.5",
    "ernie4_5_moe": "ERNIE 4.5, mixture", "hunyuan_v1_dense": "Hunyuan", "hunyuan_v1_moe": "Hunyuan, mixture",
    "apertus": "Apertus", "minimax_m2": "MiniMax M2", "phimoe": "Phi 3.5, mixture", "dots1": "dots.llm1",
    "afmoe": "Trinity (AFMoE)", "granite_swa": "Granite, windows", "granitemoe_swa": "Granite, windows, mixture",
    "jais2": "Jais 2", "smolvlm": "SmolVLM",
    "lfm2": "LFM2", "lfm2_moe": "LFM2, mixture", "lfm3": "LFM3", "granitemoehybrid": "Granite 4",
    "qwen3_next": "Qwen 3 Next", "nemotron_h": "Nemotron-H, Nemotron 3", "falcon_h1": "Falcon H1",
    "gemma3n_text": "Gemma 3n", "bamba": "Bamba", "jamba": "Jamba",
    "arcee": "AFM", "cwm": "CWM", "helium": "Helium", "nemotron": "Nemotron 4, Minitron", "nanochat": "nanochat",
    "vaultgemma": "VaultGemma", "exaone_moe": "K-EXAONE", "solar_open": "Solar Open", "flex_olmo": "FlexOlmo",
    "internlm3": "InternLM 3", "bitnet": "BitNet", "biogpt": "BioGPT", "mpt": "MPT", "mellum": "Mellum",
    "hy_v3": "Hunyuan 3", "cohere2_moe": "Command A, mixture",
}  # fmt: skip


def _section(name: str, command: Any) -> Iterator[str]:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    usage = " ".join(["mpu", name, *(str(a.metavar or a.name.upper()) for a in arguments), "[OPTIONS]"])
    description = textwrap.wrap(" ".join((command.help or "").split()), WIDTH, break_on_hyphens=False)
    yield from (f"# mpu {name}", "", "```text", usage, "```", "", *description, "")
    if command.epilog:
        example = command.epilog.removeprefix("Example: ").replace(" --", " \\\n  --")
        yield from ("```sh", example, "```", "")
    panels: dict[str | None, list[Any]] = {}
    for parameter in [*arguments, *options]:
        panels.setdefault(parameter.rich_help_panel, []).append(parameter)
    for panel, parameters in panels.items():
        if panel:
            yield from (f"## {panel}", "")
        yield from ("| | default | |", "|---|---|---|", *map(_option_row, parameters), "")


def _option_row(parameter: Any) -> str:
    flags = [f"`{parameter.metavar or parameter.name.upper()}`"]
    if parameter.param_type_name == "option":
        flags = [f"`{flag}`" for flag in (*parameter.opts, *parameter.secondary_opts)]
    choices = _choices(parameter.type_descriptor.annotation)
    text = " ".join((parameter.help or "").split())
    if choices:
        text = f"{text} One of {', '.join(f'`{choice}`' for choice in choices)}."
    cells = [", ".join(flags), _default(parameter), text]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _choices(annotation: object) -> tuple[str, ...]:
    """The values of a Literal, also of an optional one."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return next(filter(None, map(_choices, get_args(annotation))), ())


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    value = parameter.default
    if value is None or value is False or callable(value):
        return ""
    return "`''`" if value == "" else f"`{value}`"


METRICS_INTRODUCTION = """# Metrics

What `mpu eval`
measures, by the names in its files, which are OpenUnlearning's where it has the metric too (a test compares them,
[measuring](measuring.md)). ℓ is a loss per token, in nats.

The arrow says where a value should go: up, down, to zero, or to that of a model that never saw the forget set.

| metric | | what it is | benchmarks |
|---|---|---|---|
"""
ARROWS = {"up": "↑", "down": "↓", "zero": "→ 0", "retain": "→ retain"}


def metrics_page() -> str:
    """The page, Markdown."""
    from mpu_cli.measuring.benchmarks import examples, known_metrics

    lines = []
    for name, metric in known_metrics().items():
        where = [at for at, benchmark in examples().items() if name in benchmark.metrics]
        if not where:  # forget_quality, which needs a retain log, and what --attacks measure
            where = [at for at, benchmark in examples().items() if benchmark.has_questions_to_forget]
        lines.append(f"| `{name}` | {ARROWS[metric.goal]} | {metric.says.removesuffix('.')} | {', '.join(where)} |")
    return METRICS_INTRODUCTION + "\n".join(lines) + "\n"


PAGES = {"commands": reference, "families": families_page, "metrics": metrics_page}

if __name__ == "__main__":
    import sys

    if sys.argv[1:2] == ["shares"]:
        for line in shares():
            print(line, flush=True)
    else:
        print(PAGES[sys.argv[1] if len(sys.argv) > 1 else "commands"](), end="")
