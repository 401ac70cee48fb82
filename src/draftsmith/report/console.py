"""Where lines for a person go. Light, so that commands that need no model start at once."""

from rich.console import Console

from draftsmith.errors import written_below
from draftsmith.redaction import without_secrets

console = Console()


def say(line: str) -> None:
    """One plain line, without secrets."""
    with written_below("standard output"):
        console.print(without_secrets(line), markup=False, highlight=False, soft_wrap=True)
