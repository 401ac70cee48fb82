"""The draft tree with the highest expected acceptance (DDTree, arXiv 2604.12989), from one block's marginals.

A node is a choice of tokens for the first slots of the block; its score is the log-probability that the drafter gives
to that choice, slot by slot. No node is more likely than its parent, so the `budget` best nodes are a tree, and the one
in which the most tokens are expected to be accepted if the drafter were right about the target.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.decode.states import TreeShape


@dataclass(frozen=True, eq=False, slots=True)
class DraftTree:
    """N drafted tokens, best first, below a root that is row 0 of the R = N + 1 rows to be verified.

    `parents_N` are rows; a parent stands before its children. `shape` is what the target needs to read the rows.
    """

    tokens_N: Tensor
    parents_N: Tensor
    shape: TreeShape


def best_tree(log_probabilities_SV: Tensor, budget: int) -> DraftTree:
    """The `budget` most likely prefixes of a block of S slots, without waiting for the device.

    Slot by slot it keeps the `budget` best prefixes of that length: no longer one can be among the best overall whose
    own prefix is not. Ties go to the shorter prefix, so a parent is never left out.

    Args:
        log_probabilities_SV: of each slot, at most 0.
        budget: nodes below the root; fewer come back only if there are no more prefixes.
    """
    slots, vocabulary = log_probabilities_SV.shape
    width = min(budget, vocabulary)
    values_SW, ids_SW = log_probabilities_SV.topk(width)
    scores_C, first = values_SW.new_zeros(1), -1  # candidates of a slot and the row of the first among all; the root
    scores, tokens, parents, depths = [], [], [], []
    for slot in range(slots):
        scores_C, picked_C = (scores_C[:, None] + values_SW[slot]).flatten().topk(min(budget, len(scores_C) * width))
        scores.append(scores_C)
        tokens.append(ids_SW[slot][picked_C % width])
        parents.append(first + picked_C // width)
        depths.append(torch.full_like(picked_C, slot + 1))
        first = sum(map(len, scores[:-1]))
    order_N = torch.cat(scores).sort(stable=True, descending=True).indices[:budget]
    row_of_A = torch.zeros(sum(map(len, scores)) + 1, dtype=torch.long, device=order_N.device)  # the last: the root
    row_of_A[order_N] = torch.arange(1, len(order_N) + 1, device=order_N.device)
    parents_N = row_of_A[torch.cat(parents)[order_N]]
    depths_R = torch.cat((parents_N.new_zeros(1), torch.cat(depths)[order_N]))
    return DraftTree(torch.cat(tokens)[order_N], parents_N, TreeShape(depths_R, ancestors(parents_N, slots)))


def ancestors(parents_N: Tensor, depth: int) -> Tensor:
    """Bool [R, R]: whether a row's way up to the root, itself included, passes a row."""
    parents_R = torch.cat((parents_N.new_zeros(1), parents_N))
    rows_R = at_R = torch.arange(len(parents_R), device=parents_R.device)
    visible_RR = torch.zeros(len(rows_R), len(rows_R), dtype=torch.bool, device=rows_R.device)
    for _ in range(depth + 1):
        visible_RR[rows_R, at_R] = True
        at_R = parents_R[at_R]
    return visible_RR
