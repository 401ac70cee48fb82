"""Which drafts are kept, so that the output has exactly the target's own distribution.

Where a draft was *chosen* (the most likely token, a tree, a look-up), the target draws its own token at every row, and
drafts are followed as long as they are what it drew. Where a draft was *drawn* from a distribution q, it is kept with
probability min(1, p / q) and otherwise replaced by a draw from max(0, p - q) (Leviathan et al., arXiv 2211.17192,
theorem 1; the first rule is this one for a q that is certain). p is the target's filtered distribution in both cases.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.decode.sampling import Dice
from draftsmith.decode.states import TreeShape
from draftsmith.decode.tree import DraftTree


@dataclass(frozen=True, eq=False, slots=True)
class Proposal:
    """What a round asks the target about: the anchor and N drafts, as R = N + 1 rows.

    Chosen drafts are a chain or a tree (`parents_N`, rows of the parents); drawn ones are a chain with their
    distributions.
    """

    ids_R: Tensor
    drawn_from_NV: Tensor | None = None
    tree: DraftTree | None = None

    @property
    def shape(self) -> TreeShape | None:
        return self.tree.shape if self.tree is not None else None


@dataclass(frozen=True, slots=True)
class Verdict:
    """`rows` are the verified rows that stay: the anchor's, then those of the accepted drafts. `tokens` are the
    accepted drafts and the target's next token: as many."""

    rows: list[int]
    tokens: list[int]


def verify(proposal: Proposal, logits_RV: Tensor, dice: Dice) -> Verdict:
    """Decides about a proposal from the target's logits of its rows; waits for the device once."""
    if proposal.drawn_from_NV is not None and not dice.sampling.greedy:
        return _verify_drawn(proposal.ids_R, proposal.drawn_from_NV, logits_RV, dice)
    wanted_R = dice.choose(logits_RV)
    if proposal.tree is None:
        ids, wanted = torch.stack((proposal.ids_R, wanted_R)).tolist()
        return followed(ids, wanted, range(len(ids) - 1))
    ids, wanted, parents = torch.stack((proposal.ids_R, wanted_R, _padded(proposal.tree.parents_N))).tolist()
    return followed(ids, wanted, parents[1:])


def _padded(parents_N: Tensor) -> Tensor:
    return torch.cat((parents_N.new_zeros(1), parents_N))


def followed(ids: Sequence[int], wanted: Sequence[int], parents: Sequence[int]) -> Verdict:
    """The way down from row 0, as long as a child is what its parent's row wants next.

    Args:
        ids: token of each row.
        wanted: the target's next token after each row.
        parents: the row above each row but the first.
    """
    rows = [0]
    for row, parent in enumerate(parents, 1):  # parents stand before their children, so one pass finds the way
        if parent == rows[-1] and ids[row] == wanted[parent]:
            rows.append(row)
    return Verdict(rows, [wanted[row] for row in rows])


def _verify_drawn(ids_R: Tensor, q_NV: Tensor, logits_RV: Tensor, dice: Dice) -> Verdict:
    """Rejection sampling, on the device to the end."""
    p_RV = dice.sampling.probabilities(logits_RV)
    drafts_N1 = ids_R[1:, None]
    p_N, q_N = p_RV[:-1].gather(-1, drafts_N1)[:, 0], q_NV.gather(-1, drafts_N1)[:, 0]
    accepted = (dice.uniform(p_N) * q_N < p_N).cumprod(0).sum()[None]
    next_p_1V = p_RV.index_select(0, accepted)
    q_RV = torch.cat((q_NV, q_NV.new_zeros(1, q_NV.shape[1])))  # after the last draft nothing was proposed
    rest_1V = (next_p_1V - q_RV.index_select(0, accepted)).clamp_min_(0)
    rest_1V = torch.where(rest_1V.sum() > 0, rest_1V, next_p_1V)  # p = q up to rounding: any draw is one from p
    count, token, *ids = torch.cat((accepted, dice.draw(rest_1V), ids_R)).tolist()
    return Verdict(list(range(count + 1)), [*ids[1 : count + 1], token])
