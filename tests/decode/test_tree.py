"""Draft trees: the best one for a budget, read in one forward as if each branch stood alone, and lossless."""

import heapq
import math

import pytest
import torch
from torch import Tensor

from conftest import tiny_drafter, tiny_target
from draftsmith.decode.methods import Chain, Tree
from draftsmith.decode.speculate import decode, plain_generate
from draftsmith.decode.states import TargetState
from draftsmith.decode.tree import DraftTree, ancestors, best_tree
from draftsmith.decode.verify import followed
from draftsmith.errors import ConfigError

PROMPTS = [[1, 2, 3], [7], list(range(20)), [9, 30, 12, 44, 2]]


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """The tokens on the way to each node, in the tree's order."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens_N.tolist(), tree.parents_N.tolist(), strict=True):
        found.append((*found[parent], token))
    return found[1:]


def best_first(log_probabilities_SV: Tensor, budget: int) -> list[tuple[int, ...]]:
    """The same by a heap, one node at a time: the slow twin."""
    table = log_probabilities_SV.tolist()
    heap = [(-value, (token,)) for token, value in enumerate(table[0])]
    heapq.heapify(heap)
    out = []
    while heap and len(out) < budget:
        cost, path = heapq.heappop(heap)
        out.append(path)
        if len(path) < len(table):
            for token, value in enumerate(table[len(path)]):
                heapq.heappush(heap, (cost - value, (*path, token)))
    return out


@pytest.mark.parametrize(("slots", "vocabulary", "budget"), [(1, 9, 4), (3, 5, 1), (3, 5, 16), (5, 7, 40), (2, 2, 99)])
def test_the_tree_holds_the_most_likely_prefixes(slots: int, vocabulary: int, budget: int) -> None:
    for seed in range(5):
        table_SV = torch.randn(slots, vocabulary, generator=torch.Generator().manual_seed(seed)).mul(2).log_softmax(-1)
        assert paths(best_tree(table_SV, budget)) == best_first(table_SV, budget)


def test_a_certain_drafter_gives_its_chain() -> None:
    """All scores are equal then: parents must still come before, and with, their children."""
    table_SV = torch.full((4, 6), -math.inf).index_fill(1, torch.tensor([2]), 0.0)
    assert paths(best_tree(table_SV, 4)) == [(2,), (2, 2), (2, 2, 2), (2, 2, 2, 2)]


def test_ancestors_are_the_way_to_the_root() -> None:
    visible = ancestors(torch.tensor([0, 0, 1, 3]), 3)
    assert visible.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]


def test_following_takes_the_wanted_branch() -> None:
    ids, parents = [9, 1, 2, 3, 3, 4], [0, 0, 1, 2, 4]
    assert followed(ids, [2, 7, 3, 7, 4, 8], parents).rows == [0, 2, 4, 5]
    assert followed(ids, [2, 7, 3, 7, 4, 8], parents).tokens == [2, 3, 4, 8]
    assert followed(ids, [5, 7, 3, 7, 4, 8], parents).rows == [0]
    assert followed(ids, [1, 3, 3, 4, 4, 8], parents).rows == [0, 1, 3]


WINDOWS = [
    {},
    {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
    {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 3},
]


@pytest.mark.parametrize("changes", WINDOWS, ids=["full", "sliding", "both"])
@torch.inference_mode()
def test_each_branch_is_read_as_if_it_stood_alone(changes: dict[str, int]) -> None:
    """Logits and features of every row equal those of its tokens in a row, before and after a rollback."""
    target = tiny_target(**changes)
    table_SV = torch.randn(3, 64, generator=torch.Generator().manual_seed(3)).mul(3).log_softmax(-1)
    tree = best_tree(table_SV, 12)
    reader = TargetState(target, 64)
    reader.forward(torch.arange(9), features=False)
    ids_R = torch.cat((torch.tensor([9]), tree.tokens_N))
    logits_RV, features_RF = reader.forward(ids_R, features=True, tree=tree.shape)
    assert features_RF is not None
    for row, path in enumerate([(), *paths(tree)]):
        alone, features = TargetState(target, 64).forward(torch.tensor([*range(10), *path]), features=True)
        assert features is not None
        assert (logits_RV[row] - alone[-1]).abs().max() <= 1e-4 * alone.abs().max()
        assert (features_RF[row] - features[-1]).abs().max() <= 1e-4 * features.abs().max()
    row = next(r for r in range(12, 0, -1) if len(paths(tree)[r - 1]) > 1)
    way = [0, *tree.shape.visible_RR[row].nonzero()[1:, 0].tolist()]
    reader.cache.keep(way, len(ids_R))
    read_on, _ = reader.forward(torch.tensor([5, 6]), features=False)
    alone, _ = TargetState(target, 64).forward(torch.tensor([*range(10), *paths(tree)[row - 1], 5, 6]), features=False)
    assert (read_on - alone[-2:]).abs().max() <= 1e-4 * alone.abs().max()


@pytest.mark.parametrize("changes", WINDOWS, ids=["full", "sliding", "both"])
@pytest.mark.parametrize("budget", [1, 30])
def test_trees_leave_the_output_alone(changes: dict[str, int], budget: int) -> None:
    target = tiny_target(**changes)
    for prompt in PROMPTS:
        got = decode(target, Tree(tiny_drafter(), budget), prompt, 16)
        assert got.tokens == plain_generate(target, prompt, 16).tokens
        assert 1 + sum(got.rounds) == len(got.tokens)


def test_a_tree_accepts_at_least_what_its_chain_would() -> None:
    """A budget that holds the whole chain and more, with a drafter that is right now and then."""
    target = tiny_target()
    rounds = {}
    for method in (Chain(tiny_drafter(1)), Tree(tiny_drafter(1), 64 * 3)):
        rounds[type(method)] = sum(len(decode(target, method, prompt, 40).rounds) for prompt in PROMPTS)
    assert rounds[Tree] < rounds[Chain]


def test_a_tree_needs_a_node() -> None:
    with pytest.raises(ConfigError, match="--tree is 0"):
        Tree(tiny_drafter(), 0)
