"""Draft a block, verify it in one target forward, keep what the target would have written itself (greedy).

Round: the anchor is the last token whose feature is not known yet; the drafter fills the block after it; the target
reads the block once; the longest matching prefix is kept, plus the target's own next token, which is the next anchor.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.decode.cache import DraftCache, TargetCache
from draftsmith.drafter.attention.layout import behind_context
from draftsmith.drafter.model import Drafter, RotaryTable
from draftsmith.target.capture import concatenated
from draftsmith.target.load import Target


@dataclass(frozen=True, slots=True)
class Generation:
    """What one prompt gave. `rounds` holds the tokens each round produced; the first token belongs to the prefill.

    `decode_s` is the time after the first token was known.
    """

    tokens: tuple[int, ...]
    rounds: tuple[int, ...]
    accepted: tuple[int, ...]  # drafted tokens kept in each round
    decode_s: float


class DraftState:
    """A drafter at work on one sequence: its context cache and buffers."""

    def __init__(self, drafter: Drafter, embedding_VH: Tensor, head_VH: Tensor, length: int) -> None:
        config = drafter.config
        self.drafter, self.embedding_VH, self.head_VH = drafter, embedding_VH, head_VH
        self.rotary = RotaryTable(config, length + config.block_size, embedding_VH.device)
        self.cache = DraftCache(config, length, drafter.fc.weight)
        self.block_B = torch.full((config.block_size,), config.mask_token_id, device=embedding_VH.device)
        self._masks: dict[tuple[int, int, bool], Tensor] = {}

    def extend(self, features_TF: Tensor) -> None:
        """Takes the features of the next accepted tokens into the context."""
        count = features_TF.shape[0]
        context_TH = self.drafter.context(features_TF.to(self.drafter.fc.weight.dtype))
        rotation = self.rotary.at(slice(self.cache.length, self.cache.length + count))
        for layer in self.drafter.stack:
            self.cache.append(layer.index, *layer.context(context_TH, rotation))
        self.cache.length += count

    def logits(self, anchor_token: int | Tensor, size: int) -> Tensor:
        """Logits [size - 1, V] of the slots after the anchor, which stands right behind the context."""
        self.block_B[0] = anchor_token
        hidden_BH = self.drafter.embed(self.block_B[:size], self.embedding_VH)
        rotation = self.rotary.at(slice(self.cache.length, self.cache.length + size))
        hidden_BH = self.drafter.run_layers(hidden_BH.to(self.drafter.fc.weight.dtype), rotation, self._attend)
        return self.drafter.config.head_scaling.logits(hidden_BH[1:].to(self.head_VH.dtype) @ self.head_VH.T)

    def _attend(self, layer: int, q_ABD: Tensor, keys_GBD: Tensor, values_GBD: Tensor) -> Tensor:
        """The interval of `attention.layout`, for the one block behind the cached context."""
        config, size = self.drafter.config, q_ABD.shape[1]
        window, causal = config.window(layer), config.causal(layer)
        first = 0 if window is None else max(0, self.cache.length - window + 1)
        keys, values = self.cache.read(layer, first)
        keys = torch.cat((keys, keys_GBD), 1)[None]
        values = torch.cat((values, values_GBD), 1)[None]
        mask = None
        if window is not None or causal:
            mask = self._mask(size, self.cache.length - first, window, causal)
        return F.scaled_dot_product_attention(q_ABD[None], keys, values, attn_mask=mask, enable_gqa=True)[0]

    def _mask(self, size: int, context: int, window: int | None, causal: bool) -> Tensor:
        """With a window made once per shape: only the first rounds differ from each other."""
        key, device = (size, context, causal), self.block_B.device
        if window is None:
            return behind_context(size, context, window, causal, device)
        if key not in self._masks:
            self._masks[key] = behind_context(size, context, window, causal, device)
        return self._masks[key]


class TargetState:
    """The target at work on one sequence."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.cache = TargetCache(target.model, target.config)

    def forward(self, ids_T: Tensor, *, features: bool, last_only: bool = False) -> tuple[Tensor, Tensor | None]:
        """Reads tokens behind the cache. Logits [T or 1, V]; features [T, F] on request."""
        arguments = {"input_ids": ids_T[None], "logits_to_keep": 1 if last_only else 0, **self.cache.arguments}
        if not features:
            return self.target.model(**arguments).logits[0], None
        with self.target.capture.collect(stop_after_last=False) as states:
            logits_TV = self.target.model(**arguments).logits[0]
        return logits_TV, concatenated(states)[0]


@torch.inference_mode()
def speculative_generate(
    target: Target,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    on_tokens: Callable[[list[int]], None] | None = None,
) -> Generation:
    """Greedy decoding with a drafter; the tokens are those of `plain_generate`.

    Args:
        target: the model that decides.
        drafter: the model that guesses, on the same device.
        prompt_ids: at least one token.
        max_new_tokens: counts the first token; at least 1.
        on_tokens: called with every round's tokens as they are accepted.
    """
    length = len(prompt_ids) + max_new_tokens
    reader = TargetState(target)
    writer = DraftState(drafter, target.embedding_VH, target.head_VH, length)
    logits_1V, features_TF = reader.forward(
        torch.tensor(prompt_ids, device=target.device), features=True, last_only=True
    )
    tokens = [int(logits_1V[-1].argmax())]
    began = time.perf_counter()
    rounds: list[int] = []
    accepted_counts: list[int] = []
    while len(tokens) < max_new_tokens and tokens[-1] not in target.stop_ids:
        size = min(drafter.config.block_size, max_new_tokens - len(tokens) + 1)
        assert features_TF is not None
        writer.extend(features_TF)
        ids_B = torch.empty(size, dtype=torch.long, device=target.device)
        ids_B[0] = tokens[-1]
        if size > 1:
            torch.argmax(writer.logits(tokens[-1], size), -1, out=ids_B[1:])
        logits_BV, features_TF = reader.forward(ids_B, features=True)
        drafts, answers = torch.stack((ids_B, logits_BV.argmax(-1))).tolist()  # the round's one wait for the device
        accepted = _agreement(drafts[1:], answers)
        produced = answers[: accepted + 1][: max_new_tokens - len(tokens)]
        stop = next((i for i, token in enumerate(produced) if token in target.stop_ids), None)
        produced = produced if stop is None else produced[: stop + 1]
        reader.cache.forget(size - len(produced))
        features_TF = features_TF[: len(produced)] if features_TF is not None else None
        tokens += produced
        rounds.append(len(produced))
        accepted_counts.append(min(accepted, len(produced)))
        if on_tokens is not None:
            on_tokens(produced)
    return Generation(tuple(tokens), tuple(rounds), tuple(accepted_counts), time.perf_counter() - began)


def _agreement(drafts: Sequence[int], answers: Sequence[int]) -> int:
    """Length of the longest prefix on which the drafts are what the target answers."""
    for count, (draft, answer) in enumerate(zip(drafts, answers, strict=False)):
        if draft != answer:
            return count
    return len(drafts)


@torch.inference_mode()
def plain_generate(target: Target, prompt_ids: Sequence[int], max_new_tokens: int) -> Generation:
    """Greedy decoding one token per forward: what speculative decoding is compared with."""
    reader = TargetState(target)
    logits_1V, _ = reader.forward(torch.tensor(prompt_ids, device=target.device), features=False, last_only=True)
    tokens = [int(logits_1V[-1].argmax())]
    began = time.perf_counter()
    while len(tokens) < max_new_tokens and tokens[-1] not in target.stop_ids:
        logits_1V, _ = reader.forward(torch.tensor(tokens[-1:], device=target.device), features=False)
        tokens.append(int(logits_1V[-1].argmax()))
    return Generation(tuple(tokens), (), (), time.perf_counter() - began)
