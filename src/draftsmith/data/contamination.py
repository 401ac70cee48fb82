"""Evaluation prompts that occur in training data, found by the words they share.

A prompt is known by its n-grams of words (case and punctuation do not count). A conversation contains it when it holds
at least half of them, or when one of its turns is the prompt. Prompts of fewer than n words are one n-gram of their own
length; those of fewer than `MIN_WORDS` count only as a whole turn, because such few words are everywhere.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

from draftsmith.data.conversations import Conversation, Prompt

MIN_WORDS = 5
OVERLAP = 0.5  # share of a prompt's n-grams that makes a conversation contain it
_WORDS = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Found:
    """A prompt (`file:line`) that a conversation contains, and the share of its n-grams that stand there."""

    prompt: str
    overlap: float


class PromptIndex:
    """Evaluation prompts to look for. Immutable, the same in every process."""

    def __init__(self, prompts: Sequence[Prompt], words: int = 13) -> None:
        self._sources = [prompt.source for prompt in prompts]
        texts = [_asked(prompt) for prompt in prompts]
        self.key = sha256(json.dumps([texts, self._sources, words, MIN_WORDS, OVERLAP]).encode()).hexdigest()
        self._sizes: list[int] = []  # n-grams of each prompt
        self._grams: dict[int, dict[tuple[str, ...], list[int]]] = {}  # n -> n-gram -> prompts
        self._turns: dict[tuple[str, ...], list[int]] = {}  # whole prompts
        for number, text in enumerate(texts):
            asked = _words(text)
            self._turns.setdefault(tuple(asked), []).append(number)
            length = min(words, len(asked))
            grams = set(_grams(asked, length)) if length >= MIN_WORDS else set()
            self._sizes.append(len(grams))
            for gram in grams:
                self._grams.setdefault(length, {}).setdefault(gram, []).append(number)

    def find(self, conversation: Conversation) -> list[Found]:
        """Prompts that a conversation contains, in their order."""
        shares: dict[int, set[tuple[str, ...]]] = {}
        whole: set[int] = set()
        for text in _texts(conversation):
            said = _words(text)
            whole.update(self._turns.get(tuple(said), ()) if said else ())
            for length, known in self._grams.items():
                for gram in _grams(said, length):
                    for number in known.get(gram, ()):
                        shares.setdefault(number, set()).add(gram)
        overlaps = {number: len(grams) / self._sizes[number] for number, grams in shares.items()}
        overlaps |= dict.fromkeys(whole, 1.0)
        return [Found(self._sources[n], share) for n, share in sorted(overlaps.items()) if share >= OVERLAP]


def _asked(prompt: Prompt) -> str:
    """What a person asked last: the turn that the answer answers."""
    if prompt.text is not None:
        return prompt.text
    return str(next((m["content"] for m in reversed(prompt.messages) if m["role"] == "user"), ""))


def _texts(conversation: Conversation) -> Iterator[str]:
    """All that is said in a conversation; token ids are not looked into."""
    yield from (str(message["content"]) for message in conversation.messages)
    if conversation.text is not None:
        yield conversation.text
    if conversation.completion is not None:
        yield conversation.completion


def _words(text: str) -> list[str]:
    return _WORDS.findall(text.casefold())


def _grams(words: Sequence[str], length: int) -> Iterator[tuple[str, ...]]:
    return zip(*(words[start:] for start in range(length)), strict=False)
