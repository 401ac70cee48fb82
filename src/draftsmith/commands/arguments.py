"""Types of command-line arguments: what is out of range is refused while parsing."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from draftsmith.errors import ConfigError


def count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)


def whole(text: str) -> int:
    if not text.isdecimal() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 0, of at most 18 digits")
    return int(text)


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def share_of(most: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to {most:g}")
        return value

    return parse


def check_json(path: Path | None) -> None:
    """Before anything is measured: can the figures be written?

    Raises:
        ConfigError: they cannot.
    """
    if path is None:
        return
    if not path.parent.is_dir():
        raise ConfigError(f"--json {path}: {path.parent} is not a folder; create it first")
    if path.is_dir():
        raise ConfigError(f"--json {path} is a folder; name a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"--json {path} cannot be written; choose another place or change its permissions")
