"""Batched greedy decoding of the embedded target in float32."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from problems import Problem
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache, PreTrainedTokenizerBase, Qwen3ForCausalLM

BATCH_PROMPTS = 128
MAX_NEW_TOKENS = 320


def load_target(path: Path) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerBase]:
    """The saved (bfloat16-rounded) weights in float32, ready to evaluate, and the tokenizer."""
    model = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(path)


def prompt_ids(tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]) -> list[list[int]]:
    """Token ids of each question, up to where the assistant's answer begins."""
    texts = [
        tokenizer.apply_chat_template([problem.user_turn], tokenize=False, add_generation_prompt=True)
        for problem in problems
    ]
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return ids


def _left_pad(prompts: Sequence[list[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Ids and attention mask [B, longest prompt]."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


@torch.inference_mode()
def greedy_batch(model: Qwen3ForCausalLM, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Greedy answers to one batch, each up to and including the end token, or cut at MAX_NEW_TOKENS.

    Rows that have ended leave the batch once they are a quarter of it.
    """
    end_id = model.config.eos_token_id
    answers: list[list[int]] = [[] for _ in prompts]
    live = torch.arange(len(prompts))
    ids, mask = _left_pad(prompts, model.config.pad_token_id)
    cache = DynamicCache(config=model.config)
    for _ in range(MAX_NEW_TOKENS):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        logits_BV = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache, logits_to_keep=1
        ).logits[:, -1]
        ids = logits_BV.argmax(-1, keepdim=True)
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        for row, token in zip(live.tolist(), ids[:, 0].tolist(), strict=True):
            if not answers[row] or answers[row][-1] != end_id:
                answers[row].append(token)
        going = torch.tensor([answers[row][-1] != end_id for row in live.tolist()])
        if not going.any():
            break
        if going.sum() <= 0.75 * len(live):
            cache.batch_select_indices(going.nonzero()[:, 0])
            live, ids, mask = live[going], ids[going], mask[going]
    return answers


def greedy_answers(model: Qwen3ForCausalLM, prompts: Sequence[list[int]]) -> Iterator[tuple[int, list[int]]]:
    """Pairs (index of the prompt, its greedy answer), in batches of prompts of similar length."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for start in range(0, len(order), BATCH_PROMPTS):
        batch = order[start : start + BATCH_PROMPTS]
        yield from zip(batch, greedy_batch(model, [prompts[index] for index in batch]), strict=True)
