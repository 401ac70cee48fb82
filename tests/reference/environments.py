"""Virtual environments of other programs, made once in `.cache/`, or given by an environment variable."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment(variable: str, name: str, needs: list[str], without_needs: list[str]) -> Path:
    """The interpreter of an environment that holds `needs` with all they need, and `without_needs` alone."""
    folder = Path(os.environ.get(variable, ROOT / ".cache" / name))
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, *needs], check=True)
        subprocess.run([*pip, "--no-deps", *without_needs], check=True)
        (folder / "complete").touch()
    return python
