"""Where lines for a person go. Light, so that commands that need no model start at once."""

import errno
import os

from rich.console import Console

from draftsmith.errors import written_below
from draftsmith.redaction import without_secrets


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """The library's own ends the program, from whichever thread happens to print."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


console = _Console()


def say(line: str) -> None:
    """One plain line, without secrets."""
    with written_below("standard output"):
        console.print(without_secrets(line), markup=False, highlight=False, soft_wrap=True)
