"""The short way to the border of an answer agrees with tokenising everything again."""

import random
from typing import Any

import pytest

from chats import CHATML, sentencepiece, tokenizer
from draftsmith.data.encoding import HEADER_CHARACTERS, Encoder

PIECES = ["<|im_start|>", "<|im_end|>", "assistant\n", "\n", "\n\n", " ", "  ", "the", " the", "é", "e\u0301", "👩‍👩‍👧",
          "<|im_", "start|>", "x" * (HEADER_CHARACTERS + 1), "▁", "[INST]"]  # fmt: skip


def stripping() -> Any:
    """Special tokens that take white space with them, as Phi-3's do, are no place to cut at."""
    from tokenizers import AddedToken

    made = tokenizer(CHATML)
    made.add_special_tokens(
        {"additional_special_tokens": [AddedToken("[INST]", lstrip=True, rstrip=True, special=True)]}
    )
    return made


@pytest.mark.parametrize("make", [lambda: tokenizer(CHATML), lambda: sentencepiece(None, ["<|im_start|>"]), stripping])
def test_the_prompt_is_as_long_as_its_own_tokens(make: Any) -> None:
    made, draw = make(), random.Random(0)
    encoder = Encoder(made, "")
    lengths = set()
    for _ in range(3000):
        before, after = ("".join(draw.choices(PIECES, k=draw.randrange(6))) for _ in range(2))
        encoded = encoder.backend.encode(before + after, add_special_tokens=False)
        own = made(before, add_special_tokens=False)["input_ids"]
        expected = len(own) if encoded.ids[: len(own)] == own else -1
        assert encoder._prompt_length(before, encoded.ids, encoded.offsets) == expected, (before, after)
        lengths.add(expected)
    assert -1 in lengths, "some borders lie inside a token"
    assert len(lengths) > 10
