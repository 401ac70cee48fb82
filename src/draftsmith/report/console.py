"""Where lines for a person go. Light, so that commands that need no model start at once."""

from rich.console import Console

console = Console()


def say(line: str) -> None:
    """One plain line."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)
