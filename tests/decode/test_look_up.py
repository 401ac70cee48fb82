"""Look-up drafts what followed the same words before."""

import torch

from conftest import tiny_target
from draftsmith.decode.evaluate import Contender, evaluate
from draftsmith.decode.methods import LookUp, _LookUpProposer
from draftsmith.decode.speculate import decode, plain_generate


def drafts(text: list[int], size: int, proposer: _LookUpProposer | None = None) -> list[int]:
    proposer = proposer or _LookUpProposer(3, torch.device("cpu"))
    anchor, *rest = proposer.propose(text, None, size).ids_R.tolist()
    assert anchor == text[-1]
    return rest


def test_the_longest_match_wins_and_then_the_latest() -> None:
    assert drafts([1, 2, 3, 9, 7, 3, 8, 1, 2, 3], 3) == [9, 7]  # three tokens match, although 3 alone came later
    assert drafts([3, 5, 3, 6, 3], 3) == [6, 3]
    assert drafts([1, 2, 3], 4) == []
    assert drafts([4, 4], 4) == [4]  # what follows is not longer than the text


def test_it_learns_from_what_it_is_shown_later() -> None:
    proposer = _LookUpProposer(3, torch.device("cpu"))
    assert drafts([1, 2], 4, proposer) == []
    assert drafts([1, 2, 5, 6, 1, 2], 3, proposer) == [5, 6]
    assert drafts([1, 2, 5, 6, 1, 2, 5], 3, proposer) == [6, 1]


def test_it_drafts_the_same_from_pieces_as_from_the_whole() -> None:
    text = torch.randint(0, 4, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    proposer = _LookUpProposer(3, torch.device("cpu"))
    for end in range(1, 61):
        assert drafts(text[:end], 5, proposer) == drafts(text[:end], 5)


def test_a_looping_target_is_drafted_well() -> None:
    """Random targets fall into loops, which look-up finds; the output stays the target's."""
    target = tiny_target()
    prompt = plain_generate(target, [1, 2, 3], 60).tokens
    got = decode(target, LookUp(8), prompt, 40)
    assert got.tokens == plain_generate(target, prompt, 40).tokens
    report = evaluate(target, LookUp(8), [prompt], 40, others={"same": Contender(target, LookUp(8))})
    assert report.others["same"].tau == report.main.tau == sum(got.rounds) / len(got.rounds)
    assert report.main.lossless
