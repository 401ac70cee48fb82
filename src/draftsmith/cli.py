"""Entry point: parses, calls a command (`commands/`), turns errors into one line and an exit code."""

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

# Read by libraries when they are imported, so set before any of them is.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")  # nobody asks the hub to convert a model in our name

from draftsmith import __version__
from draftsmith.commands import checkpoints, compiler, data, decode, train
from draftsmith.commands.signals import INTERRUPTED
from draftsmith.errors import InputError, explained
from draftsmith.redaction import without_secrets


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `draftsmith`. Returns the exit code."""
    if sys.platform == "win32":
        print("draftsmith: Windows is not supported (no fcntl locks, no fork-safe signals); use WSL", file=sys.stderr)
        return 2
    _open_streams()
    options = _parser().parse_args(arguments)
    if (cache := _compiler_cache()) is not None:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))  # read by the compiler when it is first needed
    try:
        code: int = options.command(options)
    except InputError as error:
        _complain(" ".join(str(error).splitlines()))
        return error.exit_code
    except KeyboardInterrupt:  # before or outside training, where there is nothing to save
        print("draftsmith: interrupted", file=sys.stderr)
        return INTERRUPTED[signal.SIGINT]
    except Exception as error:  # noqa: BLE001 - the last place: one line for a person, the rest for a log
        _report(error)
        os._exit(1)  # a worker stuck in native code must not keep the process
    return code


def _report(error: Exception) -> None:
    """The cause first; where it does not lie in the machine, all that helps to find it."""
    cause = explained(error)
    _complain(cause or f"{type(error).__name__}: {error}")
    for note in getattr(error, "__notes__", []):
        _complain(note)
    with suppress(OSError):  # nobody may be left to read it
        if cause is None:
            print(without_secrets(traceback.format_exc()), file=sys.stderr, end="")
        sys.stderr.flush()
    with suppress(OSError):
        sys.stdout.flush()


def _complain(message: str) -> None:
    with suppress(OSError):
        print(f"draftsmith: {without_secrets(message)}", file=sys.stderr, flush=True)


def _open_streams() -> None:
    """A daemon's may be closed; what would be printed goes nowhere then."""
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for the whole process
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Arguments are repeated in what is wrong with them, and one may be a key that has no business there."""
        super().error(without_secrets(message))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="draftsmith", description="Train and measure DFlash drafters.")
    parser.add_argument("--version", action="version", version=f"draftsmith {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    for group in (train, decode, data, checkpoints, compiler):
        group.add(commands)
    return parser


def _compiler_cache() -> Path | None:
    """The user's own place, which a restart does not empty. None if it cannot be written: PyTorch's default stands."""
    caches = Path("~/Library/Caches" if sys.platform == "darwin" else "~/.cache")
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or caches.expanduser())
    except RuntimeError:  # no home
        return None
    nearest = next(folder for folder in (caches, *caches.parents) if folder.exists())
    if not caches.is_absolute() or not os.access(nearest, os.W_OK | os.X_OK):
        return None
    return caches / "draftsmith" / "compiler"


if __name__ == "__main__":
    sys.exit(main())
