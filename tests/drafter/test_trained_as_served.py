"""Invariant 1: what training computes for a block is what decoding computes at the same place. And nothing leaks."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import random_documents, row_source, tiny_drafter
from draftsmith.decode.states import DraftState
from draftsmith.drafter.anchors import make_blocks
from draftsmith.drafter.attention import blockwise, kernels, layout
from draftsmith.drafter.config import FULL, SLIDING
from draftsmith.drafter.loss import HeadScaling, block_loss
from draftsmith.drafter.model import Drafter, RotaryTable
from draftsmith.nouns import Row

KINDS = [
    {"layer_types": (FULL, FULL)},
    {"layer_types": (FULL, SLIDING), "sliding_window": 6},
    {"layer_types": (SLIDING, FULL), "sliding_window": 2},  # smaller than the block
    {"layer_types": (SLIDING, SLIDING), "sliding_window": 40},
    {"layer_types": (FULL, FULL), "input_embedding_scale": 2.5, "output_multiplier": 0.5},
    {"layer_types": (FULL, FULL), "final_logit_softcapping": 4.0},
]


def embedding() -> Tensor:
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(5))


def packed_row(packing: bool = True) -> Row:
    return row_source(random_documents(1, [23, 17, 20]), packing=packing).row(0)


def features_of(row: Row) -> Tensor:
    return torch.randn(len(row.tokens_T), 96, generator=torch.Generator().manual_seed(row.spans[0].document))


def training_logits(drafter: Drafter, row: Row, features_TF: Tensor) -> Tensor:
    """[N, B, V]"""
    blocks = make_blocks(row, block_size=4, mask_token=63, gamma=4.0)
    rotary = RotaryTable(drafter.config, 128, torch.device("cpu"))
    hidden_QH = drafter(features_TF, row.positions_T, blocks, embedding(), rotary).detach()
    return drafter.config.head_scaling.logits(hidden_QH @ embedding().T).unflatten(0, (-1, 4))


def decoding_logits(drafter: Drafter, row: Row, features_TF: Tensor, pieces: int) -> Tensor:
    """[N, B - 1, V], each block drafted as a server would: context of its document only, taken in `pieces` parts."""
    out = []
    for anchor, start in zip(row.anchors_N.tolist(), row.starts_N.tolist(), strict=True):
        state = DraftState(drafter, embedding(), embedding(), 128)
        with torch.inference_mode():
            for part in features_TF[start:anchor].tensor_split(min(pieces, anchor - start)):
                state.extend(part)
            out.append(state.logits(int(row.tokens_T[anchor]), 4))
    return torch.stack(out)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "alone"])
@pytest.mark.parametrize("pieces", [1, 5])
def test_training_logits_equal_decoding_logits(kind: dict[str, Any], packing: bool, pieces: int) -> None:
    drafter, row = tiny_drafter(**kind), packed_row(packing)
    features_TF = features_of(row)
    served = decoding_logits(drafter, row, features_TF, pieces)
    trained = training_logits(drafter, row, features_TF)[:, 1:]
    assert len(row.anchors_N) > 3
    assert (trained - served).abs().max() <= 1e-5 * served.abs().max()


def moved(drafter: Drafter, row: Row, change: Any) -> Tensor:
    """Bool [N]: which blocks' logits move when `change` is applied to (row, features)."""
    features_TF = features_of(row)
    before = training_logits(drafter, row, features_TF)
    after = training_logits(drafter, *change(row, features_TF.clone()))
    return ((after - before).abs().amax((1, 2)) > 0).cpu()


def with_feature(position: int) -> Any:
    def change(row: Row, features_TF: Tensor) -> tuple[Row, Tensor]:
        features_TF[position] += 3.0
        return row, features_TF

    return change


def with_token(position: int) -> Any:
    def change(row: Row, features_TF: Tensor) -> tuple[Row, Tensor]:
        tokens_T = row.tokens_T.clone()
        tokens_T[position] = (tokens_T[position] + 1) % 60
        return Row(row.index, row.spans, tokens_T, row.positions_T, row.supervised_T, row.anchors_N, row.starts_N), (
            features_TF
        )

    return change


def leaks(drafter: Drafter, row: Row) -> int:
    """How many (block, position) pairs show a block something it may not see, or hide its own anchor's token."""
    wrong = 0
    anchors, starts = row.anchors_N, row.starts_N
    for position in range(len(row.tokens_T)):
        seen = moved(drafter, row, with_feature(position))
        wrong += int((seen & ((anchors <= position) | (starts > position))).sum())
        by_token = moved(drafter, row, with_token(position))
        wrong += int((by_token != (anchors == position)).sum())
    return wrong


@pytest.mark.parametrize("kind", KINDS[:3], ids=str)
def test_no_block_sees_what_it_may_not(kind: dict[str, Any]) -> None:
    assert leaks(tiny_drafter(**kind), packed_row()) == 0


def test_the_probe_notices_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    def leaky(where: Any, blocks: slice, keys: slice, device: torch.device) -> Tensor:
        return torch.ones_like(layout.context_mask(where, blocks, keys, device))

    monkeypatch.setattr(blockwise, "context_mask", leaky)
    assert leaks(tiny_drafter(), packed_row()) > 0


def test_full_layers_see_all_the_context_they_may() -> None:
    """The other half of a mask: what is visible really has an effect."""
    drafter, row = tiny_drafter(), packed_row()
    for position, (anchor, start) in itertools.product(
        range(len(row.tokens_T)), [(int(row.anchors_N[-1]), int(row.starts_N[-1]))]
    ):
        seen = bool(moved(drafter, row, with_feature(position))[-1])
        assert seen == (start <= position < anchor)


@pytest.mark.parametrize("fused", [True, False], ids=["fused kernel", "public SDPA"])
def test_lower_precision_computes_the_same_roughly(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 autocast over fp32 masters, as on CUDA: every dtype meets its like, forward and backward."""
    monkeypatch.setattr(kernels, "_FUSED_CPU", fused)
    row = packed_row()
    blocks = make_blocks(row, block_size=4, mask_token=63, gamma=4.0)
    outcomes = []
    for lower in (False, True):
        drafter = tiny_drafter(layer_types=(FULL, SLIDING), sliding_window=6)
        rotary = RotaryTable(drafter.config, 128, torch.device("cpu"))
        table = embedding().bfloat16() if lower else embedding()
        with torch.autocast("cpu", torch.bfloat16, enabled=lower):
            hidden_QH = drafter(features_of(row), row.positions_T, blocks, table, rotary)
        block_loss(hidden_QH, blocks, table, HeadScaling()).loss.backward()  # type: ignore[no-untyped-call]
        gradient = torch.cat([p.grad.flatten() for p in drafter.parameters() if p.grad is not None])
        assert gradient.dtype == torch.float32
        outcomes.append(gradient)
    exact, rough = outcomes
    assert torch.nn.functional.cosine_similarity(exact, rough, dim=0) > 0.98
