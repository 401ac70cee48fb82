"""What a tokenizer says about itself: its chat template, its special tokens, and one to mask with."""

from typing import Any

from draftsmith.decisions import Decision
from draftsmith.errors import ConfigError


def template_of(tokenizer: Any) -> str:
    """The chat template, the default one of several; "" if there is none."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default", "")
    return template or ""


def end_of_turn_ids(tokenizer: Any) -> list[int]:
    """Special tokens that end a turn where the eos token does not."""
    names = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|eot|>", "<|call|>")
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[name] for name in names if name in vocabulary]


def choose_mask_token(tokenizer: Any, embedding_rows: int, wanted: int | None) -> Decision:
    """The id that fills the slots to be drafted: the tokenizer's own mask token, else an unused reserved one, else an
    id past the tokenizer but inside the embedding.

    Raises:
        ConfigError: `wanted` is out of range, or there is no such id.
    """
    if wanted is not None:
        if not 0 <= wanted < embedding_rows:
            raise ConfigError(f"drafter.mask_token is {wanted}: the embedding has ids 0..{embedding_rows - 1}")
        return Decision("mask token", wanted, "set in the config")
    if tokenizer.mask_token_id is not None and tokenizer.mask_token_id < embedding_rows:
        return Decision("mask token", tokenizer.mask_token_id, f"{tokenizer.mask_token}, the tokenizer's own")
    template = template_of(tokenizer)
    for index, token in sorted(tokenizer.added_tokens_decoder.items()):
        name = str(token.content)
        if index < embedding_rows and name not in template and ("reserved" in name or "unused" in name):
            return Decision("mask token", index, f"{name}, a reserved token that the template never uses")
    past = max(tokenizer.get_vocab().values()) + 1  # not the number of tokens: ids may have gaps
    if past < embedding_rows:
        return Decision("mask token", past, f"first id past the tokenizer, inside the embedding of {embedding_rows}")
    raise ConfigError(
        "drafter.mask_token: the tokenizer has no mask token, no reserved token and the embedding no spare row; "
        "set drafter.mask_token to an id that never occurs in your data"
    )
