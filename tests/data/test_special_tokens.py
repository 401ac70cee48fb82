"""The mask token is the tokenizer's own, else one that nothing uses, and never made up."""

from typing import Any

import pytest
from transformers import AutoTokenizer

from chats import CHATML, tokenizer
from draftsmith import embedded
from draftsmith.data.special_tokens import choose_mask_token
from draftsmith.errors import ConfigError


@pytest.fixture(scope="module")
def demo_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(embedded.TARGET)


def test_mask_token_own_then_reserved_then_past_the_tokenizer(demo_tokenizer: Any) -> None:
    assert choose_mask_token(demo_tokenizer, 2048, None).value == demo_tokenizer.convert_tokens_to_ids("<|mask|>")
    plain = tokenizer(CHATML)
    reserved = plain.convert_tokens_to_ids("<|reserved_special_token_0|>")
    assert choose_mask_token(plain, 300, None).value == reserved
    used = tokenizer(CHATML + "{{ '<|reserved_special_token_0|>' }}")
    past = max(used.get_vocab().values()) + 1
    assert choose_mask_token(used, past + 1, None).value == past
    with pytest.raises(ConfigError, match=r"drafter\.mask_token: .* no spare row"):
        choose_mask_token(used, past, None)
    own = tokenizer(CHATML, mask_token="<|mask|>")
    assert choose_mask_token(own, 300, None).value == own.mask_token_id
    with pytest.raises(ConfigError, match="no mask token"):  # its own lies outside the embedding
        choose_mask_token(own, own.mask_token_id, None)


def test_a_wanted_mask_token_must_be_inside_the_embedding(demo_tokenizer: Any) -> None:
    assert choose_mask_token(demo_tokenizer, 2048, 2047).value == 2047
    for wanted in (-1, 2048):
        with pytest.raises(ConfigError, match=rf"drafter\.mask_token is {wanted}: the embedding has ids 0\.\.2047"):
            choose_mask_token(demo_tokenizer, 2048, wanted)


def test_gaps_between_ids_are_not_taken_for_spare_rows() -> None:
    class Gaps:
        chat_template, mask_token_id = None, None
        added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012

        def __len__(self) -> int:
            return 2

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0, "b": 2}

    assert choose_mask_token(Gaps(), 9, None).value == 3
