"""With a drafter that has learned something: a hundred prompts greedily, and trees against chains."""

from collections.abc import Callable

import pytest
import torch

from conftest import run_training
from draftsmith.config import Config
from draftsmith.data.conversations import Conversation, as_prompt, read_conversations, read_prompts
from draftsmith.data.template import Renderer
from draftsmith.decode.figures import tau
from draftsmith.decode.methods import Chain, Tree
from draftsmith.decode.speculate import decode, plain_generate
from draftsmith.report.session import load_pair
from draftsmith.target.load import TargetSpec

PROMPTS, TOKENS = 100, 48


@pytest.mark.slow
def test_a_hundred_prompts_are_decoded_as_the_target_writes_them(demo_config: Callable[..., Config]) -> None:
    """Chains, and trees of 16 and 32; the larger tree accepts more than the smaller, that more than the chain."""
    result, _, _ = run_training(demo_config(train__steps=60))
    target, drafter = load_pair(TargetSpec("demo"), result.folder / "draft", torch.device("cpu"))
    asked = [as_prompt(c) for c in read_conversations(["demo"]) if isinstance(c, Conversation)]
    prompts = [*read_prompts(["demo"]), *(prompt for prompt in asked if prompt is not None)][:PROMPTS]
    ids = [Renderer(target.tokenizer).prompt_ids(prompt) for prompt in prompts]
    expected = [plain_generate(target, prompt, TOKENS).tokens for prompt in ids]
    taus = []
    for method in (Chain(drafter), Tree(drafter, 16), Tree(drafter, 32)):
        got = [decode(target, method, prompt, TOKENS) for prompt in ids]
        assert [g.tokens for g in got] == expected
        taus.append(tau(got))
    assert 1.1 < taus[0] <= taus[1] <= taus[2]
