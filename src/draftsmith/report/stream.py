"""An answer as it comes, token by token, with the drafts in colour."""

from typing import Any

from rich.console import Console
from rich.text import Text
from tokenizers.decoders import DecodeStream

COLOURS = ("green", "cyan")  # of the drafts of one round and of the next


class TextStream:
    """Writes rounds as text. Drafted tokens take the colour of their round, the target's own stay plain.

    A character that spans tokens is written with its last one. Without a terminal there are no colours.
    """

    def __init__(self, tokenizer: Any, console: Console) -> None:
        self._tokenizer, self._console = tokenizer.backend_tokenizer, console
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._rounds = 0

    def round(self, tokens: list[int], drafted: int) -> None:
        """Writes a round's tokens, the first `drafted` of which were drafts."""
        colour = COLOURS[self._rounds % len(COLOURS)]
        line = Text()
        for place, token in enumerate(tokens):
            line.append(self._decoder.step(self._tokenizer, token) or "", colour if place < drafted else "")
        self._rounds += 1
        self._console.print(line, end="", soft_wrap=True)

    def close(self) -> None:
        """Ends the line."""
        self._console.print()
