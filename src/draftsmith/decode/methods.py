"""Ways to draft: a block as a chain, a tree from the same block, or what followed the same words before."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draftsmith.decode.sampling import Dice
from draftsmith.decode.states import DraftState
from draftsmith.decode.tree import best_tree
from draftsmith.decode.verify import Proposal
from draftsmith.drafter.model import Drafter
from draftsmith.errors import ConfigError
from draftsmith.target.load import Target


class Proposer(Protocol):
    """A method at work on one sequence."""

    def propose(self, tokens: Sequence[int], features_TF: Tensor | None, size: int) -> Proposal:
        """Drafts at most `size - 1` tokens in a row after the last of `tokens` (prompt and answer so far).

        `features_TF` are those of the tokens accepted since the last call, if the method `needs_features`.
        """


class Method(Protocol):
    """A way to draft, for any number of sequences."""

    @property
    def block_size(self) -> int:
        """Most tokens that a round can produce."""

    @property
    def rows(self) -> int:
        """Most rows that a round has verified."""

    @property
    def needs_features(self) -> bool:
        """Whether the target's hidden states are wanted."""

    @property
    def branches(self) -> bool:
        """Whether drafts are trees."""

    def start(self, target: Target, length: int, dice: Dice) -> Proposer:
        """Buffers for one sequence of at most `length` tokens."""


@dataclass(frozen=True, eq=False, slots=True)
class Chain:
    """A DFlash drafter's block as it is: each slot's most likely token, or, when sampling, one drawn from its filtered
    distribution unless `greedy`."""

    drafter: Drafter
    greedy: bool = False
    needs_features: bool = True
    branches: bool = False

    @property
    def block_size(self) -> int:
        return self.drafter.config.block_size

    @property
    def rows(self) -> int:
        return self.block_size

    def start(self, target: Target, length: int, dice: Dice) -> "_ChainProposer":
        return _ChainProposer(self, target, length, dice)


class _ChainProposer:
    def __init__(self, method: Chain, target: Target, length: int, dice: Dice) -> None:
        self.state = DraftState(method.drafter, target.embedding_VH, target.head_VH, length)
        self.dice, self.draws = dice, not (method.greedy or dice.sampling.greedy)
        self.ids_B = torch.empty(method.block_size, dtype=torch.long, device=target.device)

    def propose(self, tokens: Sequence[int], features_TF: Tensor | None, size: int) -> Proposal:
        assert features_TF is not None
        ids_R, q_NV = self.ids_B[:size], None
        ids_R[0] = tokens[-1]
        if size == 1:
            return Proposal(ids_R)
        logits_NV = self.state.forward(features_TF, tokens[-1], size)
        if self.draws:
            q_NV = self.dice.sampling.probabilities(logits_NV)
            ids_R[1:] = self.dice.draw(q_NV)
        else:
            torch.argmax(logits_NV, -1, out=ids_R[1:])
        return Proposal(ids_R, drawn_from_NV=q_NV)


@dataclass(frozen=True, eq=False, slots=True)
class Tree:
    """The `budget` most likely prefixes of a DFlash drafter's block, verified in one forward."""

    drafter: Drafter
    budget: int
    needs_features: bool = True
    branches: bool = True

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise ConfigError(f"--tree is {self.budget}: give the number of drafted tokens to verify, at least 1")

    @property
    def block_size(self) -> int:
        return self.drafter.config.block_size

    @property
    def rows(self) -> int:
        return self.budget + 1

    def start(self, target: Target, length: int, dice: Dice) -> "_TreeProposer":
        return _TreeProposer(self, target, length, dice)


class _TreeProposer:
    def __init__(self, method: Tree, target: Target, length: int, dice: Dice) -> None:
        self.state = DraftState(method.drafter, target.embedding_VH, target.head_VH, length)
        self.budget, self.temperature = method.budget, dice.sampling.temperature or 1.0

    def propose(self, tokens: Sequence[int], features_TF: Tensor | None, size: int) -> Proposal:
        assert features_TF is not None
        anchor_1 = self.state.block_B.new_tensor(tokens[-1:])
        if size == 1:
            return Proposal(anchor_1)
        logits_NV = self.state.forward(features_TF, tokens[-1], size).float()
        tree = best_tree((logits_NV / self.temperature).log_softmax(-1), self.budget)
        return Proposal(torch.cat((anchor_1, tree.tokens_N)), tree=tree)


@dataclass(frozen=True, slots=True)
class LookUp:
    """No model: what followed the longest earlier occurrence of the last `longest` .. 1 tokens (prompt look-up)."""

    block_size: int
    longest: int = 3
    needs_features: bool = False
    branches: bool = False

    @property
    def rows(self) -> int:
        return self.block_size

    def start(self, target: Target, length: int, dice: Dice) -> "_LookUpProposer":
        return _LookUpProposer(self.longest, target.device)


class _LookUpProposer:
    """Remembers where each n-gram was last seen, so that a round costs what it has added."""

    def __init__(self, longest: int, device: torch.device) -> None:
        self.longest, self.device, self.seen = longest, device, 0
        self.follows: dict[tuple[int, ...], int] = {}  # n-gram -> position behind its last occurrence before the end

    def propose(self, tokens: Sequence[int], features_TF: Tensor | None, size: int) -> Proposal:
        for end in range(max(1, self.seen), len(tokens)):
            for width in range(1, min(self.longest, end) + 1):
                self.follows[tuple(tokens[end - width : end])] = end
        self.seen = len(tokens)
        return Proposal(torch.tensor([tokens[-1], *self._continuation(tokens, size - 1)], device=self.device))

    def _continuation(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        for width in range(min(self.longest, len(tokens)), 0, -1):
            place = self.follows.get(tuple(tokens[len(tokens) - width :]))
            if place is not None:
                return tokens[place : place + count]
        return []
