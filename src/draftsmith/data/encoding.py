"""From rendered text to token ids, with the tokens of the answers told exactly."""

import re
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

HEADER_CHARACTERS, MAX_HEADERS = 64, 4096


class Unusable(Exception):
    """This conversation cannot be turned into documents; the message is the reason."""


class Encoder:
    """A fast tokenizer without its Python shell, which costs more than the work. Keeps headers it has tokenised."""

    def __init__(self, tokenizer: Any, hint: str) -> None:
        tokenizer("", add_special_tokens=False)  # takes back truncation and padding that its file may ask for
        self.backend = tokenizer.backend_tokenizer
        self._hint = hint
        self._headers: dict[str, list[int]] = {}
        added = tokenizer.added_tokens_decoder.values()
        # Found in the raw text, whatever stands around them.
        plain = [t.content for t in added if not (t.normalized or t.lstrip or t.rstrip or t.single_word)]
        self._cuts = re.compile("|".join(map(re.escape, sorted(plain, key=len, reverse=True))) or "(?!)")

    def encode(self, text: str, answers: Sequence[tuple[int, int]]) -> tuple[list[int], NDArray[np.bool_], int]:
        """Token ids of a text, the mask of its answers (places in characters), and where the last answer begins.

        Raises:
            Unusable: the border of an answer lies inside a token, or the tokenizer does not give the answer back.
        """
        encoded = self.backend.encode(text, add_special_tokens=False)
        tokens, offsets = encoded.ids, encoded.offsets
        mask, first = np.zeros(len(tokens), np.bool_), 0
        for start, stop in answers:
            first, last = self._prompt_length(text[:start], tokens, offsets), bisect_left(offsets, (stop, -1))
            if first < 0 or (last > first and offsets[last - 1][1] > stop):
                raise Unusable(
                    "a token crosses the border of an answer, so serving would see other tokens" + self._hint
                )
            self._check_decoded(tokens, first, last, text[start : offsets[last - 1][1] if last > first else start])
            mask[first:last] = True
        return tokens, mask, first

    def _prompt_length(self, before: str, tokens: list[int], offsets: list[tuple[int, int]]) -> int:
        """How many tokens serving sees for `before`, if the document begins with them; else -1.

        Text is cut at special tokens before anything else happens to it, so only what follows the last one of them
        (the header of an answer, mostly) has to be tokenised again.
        """
        marks = list(self._cuts.finditer(before, max(0, len(before) - HEADER_CHARACTERS)))
        if marks:
            mark = marks[-1]
            place = bisect_left(offsets, (mark.start(), -1))
            header = self._header(mark[0] + before[mark.end() :])
            cut = place < len(tokens) and offsets[place] == mark.span() and tokens[place] == header[0]
            if cut and tokens[place : place + len(header)] == header:
                return place + len(header)
        whole = self.backend.encode(before, add_special_tokens=False).ids
        return len(whole) if tokens[: len(whole)] == whole else -1

    def _header(self, text: str) -> list[int]:
        if text not in self._headers:
            if len(self._headers) == MAX_HEADERS:
                self._headers.clear()
            self._headers[text] = self.backend.encode(text, add_special_tokens=False).ids
        return self._headers[text]

    def _check_decoded(self, tokens: list[int], first: int, last: int, text: str) -> None:
        """Decoding the tokens of an answer gives the answer, as far as the tokenizer keeps text at all."""
        decode = self.backend.decode
        decoded = decode(tokens[first:last], skip_special_tokens=False)
        if decoded == text:
            return
        normalizer = self.backend.normalizer
        if normalizer is not None and decoded == normalizer.normalize_str(text):
            return
        before = decode(tokens[:first], skip_special_tokens=False)  # a space may belong to what stands before
        if decode(tokens[:last], skip_special_tokens=False) != before + text:
            raise Unusable(f"the tokenizer loses text: {decoded[:60]!r} comes back for the answer {text[:60]!r}")
