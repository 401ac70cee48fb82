"""Whatever a user gives, the answer is a result or an `InputError`: no other exception, no hang, nothing lost.

Each of the four inputs is fuzzed twice: a few fixed examples in `make test`, thousands of new ones in `make test-all`.
"""

from pathlib import Path

import pytest

from fuzz import checkpoints, configs, conversations, drafts
from fuzz.fuzzing import MANY, fuzz

INPUTS = {"configs": configs, "conversations": conversations, "checkpoints": checkpoints, "drafts": drafts}


@pytest.mark.parametrize("what", INPUTS)
def test_a_few_examples(what: str, tmp_path: Path) -> None:
    fuzz(what, INPUTS[what].examples(), INPUTS[what].checker(tmp_path), many=False)


@pytest.mark.slow
@pytest.mark.parametrize("what", INPUTS)
def test_many_examples(what: str, tmp_path: Path) -> None:
    fuzz(what, INPUTS[what].examples(), INPUTS[what].checker(tmp_path), many=True)


def test_many_are_twenty_thousand() -> None:
    assert sum(MANY.values()) >= 20_000
    assert set(MANY) == set(INPUTS)
