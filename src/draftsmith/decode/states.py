"""The two models at work on one sequence: every forward of decoding happens in `TargetState` or `DraftState`."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.compile import guard
from draftsmith.decode.cache import DraftCache, TargetCache
from draftsmith.drafter.attention.layout import behind_context
from draftsmith.drafter.config import FULL, SLIDING
from draftsmith.drafter.model import Drafter, RotaryTable
from draftsmith.errors import InputError
from draftsmith.target.capture import concatenated
from draftsmith.target.load import Target


@dataclass(frozen=True, eq=False, slots=True)
class TreeShape:
    """How R tokens read at once hang together; row 0 is the root and a parent stands before its children."""

    depths_R: Tensor  # distance to the root
    visible_RR: Tensor  # bool: the row itself and its ancestors


class TargetState:
    """The target with a cache of its own.

    Args:
        capacity: the most tokens that are ever in the cache, those to be verified included.
    """

    def __init__(self, target: Target, capacity: int) -> None:
        self.target = target
        self.cache = TargetCache(target.model, target.config, capacity)

    def forward(
        self, ids_T: Tensor, *, features: bool, last_only: bool = False, tree: TreeShape | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Reads tokens behind the cache, one after the other or as a tree. The only forward of the target in decoding.

        Returns:
            Logits [T, V], or [1, V] with `last_only`; features [T, F] on request.
        """
        arguments = {"input_ids": ids_T[None], "logits_to_keep": 1 if last_only else 0, **self.cache.arguments}
        if tree is not None:
            arguments |= self._tree_arguments(tree)
        if features:
            with guard.shared(), self.target.capture.collect(stop_after_last=False) as states:
                logits_TV = self.target.model(**arguments).logits[0]
        else:
            with guard.shared():
                logits_TV = self.target.model(**arguments).logits[0]
        self.cache.extended(len(ids_T))
        return logits_TV, concatenated(states)[0] if features else None

    def _tree_arguments(self, tree: TreeShape) -> dict[str, Any]:
        """Positions and additive masks [1, 1, R, context + R]: a row sees the context, itself and its ancestors.

        A model whose layers differ takes one mask per kind, in a dictionary.

        Raises:
            InputError: the model has layers that no mask can make read a tree.
        """
        config, context = self.target.config, self.cache.length
        kinds = sorted(set(_layer_kinds(config)))
        if not self.cache.is_plain or not {*kinds} <= {FULL, SLIDING}:
            raise InputError(
                f"--tree: target.model {config.model_type} has layers of kind {', '.join(kinds)}; only full and "
                "sliding attention can read a tree"
            )
        positions_R = context + tree.depths_R
        keys_K = torch.cat((torch.arange(context, device=positions_R.device), positions_R))
        whole_RK = torch.cat((tree.visible_RR.new_ones(len(positions_R), context), tree.visible_RR), 1)
        masks = {}
        for kind in kinds:
            near = True if kind == FULL else keys_K > positions_R[:, None] - config.sliding_window
            masks[kind] = _additive(whole_RK & near, self.target.embedding_VH.dtype)[None, None]
        return {"position_ids": positions_R[None], "attention_mask": masks if len(kinds) > 1 else masks[kinds[0]]}


def _layer_kinds(config: Any) -> list[str]:
    """Kinds of attention of the layers; a config without a list has one kind."""
    kinds = getattr(config, "layer_types", None)
    return list(kinds) if kinds else [SLIDING if getattr(config, "sliding_window", None) else FULL]


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where visible, the dtype's lowest value elsewhere: what every attention implementation adds to its scores."""
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)


class DraftState:
    """A drafter with a context cache and buffers of its own.

    Args:
        length: the most tokens the context ever has.
    """

    def __init__(self, drafter: Drafter, embedding_VH: Tensor, head_VH: Tensor, length: int) -> None:
        config = drafter.config
        self.drafter, self.embedding_VH, self.head_VH = drafter, embedding_VH, head_VH
        dtype = drafter.fc.weight.dtype
        self.rotary = RotaryTable(config, length + config.block_size, embedding_VH.device, dtype)
        self.cache = DraftCache(config, length, drafter.fc.weight)
        self.block_B = torch.full((config.block_size,), config.mask_token_id, device=embedding_VH.device)
        self._masks: dict[tuple[int, int, bool], Tensor] = {}

    def forward(self, features_TF: Tensor, anchor_token: int, size: int) -> Tensor:
        """Takes the new context in and drafts a block behind it. The only forward of the drafter in decoding.

        Args:
            features_TF: of the tokens accepted since the last call; the anchor stands right behind them.
            anchor_token: the last decided token.
            size: slots of the block, the anchor's included.

        Returns:
            Logits [size - 1, V] of the slots after the anchor.
        """
        with guard.shared():
            self.extend(features_TF)
            return self.logits(anchor_token, size)

    def extend(self, features_TF: Tensor) -> None:
        """Takes the features of the next accepted tokens into the context."""
        count = features_TF.shape[0]
        context_TH = self.drafter.context(features_TF.to(self.drafter.fc.weight.dtype))
        rotation = self.rotary.at(slice(self.cache.length, self.cache.length + count))
        for layer in self.drafter.stack:
            self.cache.write(layer.index, *layer.context(context_TH, rotation))
        self.cache.length += count

    def logits(self, anchor_token: int, size: int) -> Tensor:
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
        end = self.cache.write(layer, keys_GBD, values_GBD)
        first = 0 if window is None else max(0, self.cache.length - window + 1)
        keys_GTD, values_GTD = self.cache.read(layer, first, end)
        mask = None
        if window is not None or causal:
            mask = self._mask(size, self.cache.length - first, window, causal)
        return F.scaled_dot_product_attention(
            q_ABD[None], keys_GTD[None], values_GTD[None], attn_mask=mask, enable_gqa=True
        )[0]

    def _mask(self, size: int, context: int, window: int | None, causal: bool) -> Tensor:
        """With a window made once per shape: only the first rounds differ from each other."""
        key, device = (size, context, causal), self.block_B.device
        if window is None:
            return behind_context(size, context, window, causal, device)
        if key not in self._masks:
            self._masks[key] = behind_context(size, context, window, causal, device)
        return self._masks[key]
