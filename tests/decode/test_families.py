"""Targets of many kinds: decoded losslessly, by chains and by trees, or refused with the reason. Never a wrong answer.

The same file is run with the oldest supported transformers by `test_oldest_transformers.py`.
"""

from dataclasses import replace
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from conftest import tiny_drafter, tiny_target
from draftsmith import embedded
from draftsmith.decode import speculate
from draftsmith.decode.evaluate import evaluate
from draftsmith.decode.methods import Chain, LookUp, Method, Tree
from draftsmith.decode.probe import probe_target
from draftsmith.decode.sampling import Dice
from draftsmith.decode.speculate import decode, plain_generate
from draftsmith.decode.verify import Proposal, Verdict
from draftsmith.drafter.model import Drafter
from draftsmith.errors import InputError
from draftsmith.target.capture import TapCapture, decoder_layers
from draftsmith.target.load import Target, TargetSpec

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ATTENTION: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 6},
    "gemma2": {"sliding_window": 6},
    "gemma3_text": {"sliding_window": 6},
    "olmo3": {"sliding_window": 6},
    "gpt_oss": {"sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 1},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt2": {"n_embd": 32, "n_layer": 5, "n_head": 4, "n_positions": 256},
    "gpt_neox": {},
}
CHUNKED = {
    "llama4_text": {"attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 48,
                    "no_rope_layers": [1, 1, 1, 0, 1]},
}  # fmt: skip
CONVOLUTION = {"lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention", "conv"]}}
RECURRENT = {
    "qwen3_5_text": {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
                     "linear_value_head_dim": 8},
    "mamba": {"state_size": 4},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4},
}  # fmt: skip
PROMPTS, COUNT = [[1, 2, 3], list(range(3, 23))], 12


def family(kind: str, settings: dict[str, Any]) -> Target:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SIZES | settings))).eval()
    config = model.config.get_text_config()
    return Target(
        spec=TargetSpec(kind), model=model, config=config,
        tokenizer=AutoTokenizer.from_pretrained(embedded.TARGET),
        capture=TapCapture(decoder_layers(model, 5), (0, 1, 2)),
        embedding_VH=model.get_input_embeddings().weight.detach(),
        head_VH=model.get_output_embeddings().weight.detach(), stop_ids=(), fingerprint="",
    )  # fmt: skip


@torch.no_grad()
def without_cache(target: Target, prompt: list[int], count: int) -> tuple[int, ...]:
    """Greedy decoding that reads everything again for each token: nothing can be rolled back wrongly here."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(target.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


@pytest.mark.parametrize("kind", [*ATTENTION, *CHUNKED, *CONVOLUTION])
def test_chains_decode_what_the_target_writes(kind: str) -> None:
    target = family(kind, (ATTENTION | CHUNKED | CONVOLUTION)[kind])
    probe_target(target)
    for prompt in PROMPTS:
        expected = without_cache(target, prompt, COUNT)
        assert plain_generate(target, prompt, COUNT).tokens == expected
        assert decode(target, Chain(tiny_drafter()), prompt, COUNT).tokens == expected
        assert decode(target, LookUp(5), prompt, COUNT).tokens == expected


@pytest.mark.parametrize("kind", ATTENTION)
def test_trees_decode_what_the_target_writes(kind: str) -> None:
    target = family(kind, ATTENTION[kind])
    probe_target(target, trees=True)
    for prompt in PROMPTS:
        assert decode(target, Tree(tiny_drafter(), 8), prompt, COUNT).tokens == without_cache(target, prompt, COUNT)


@pytest.mark.parametrize("kind", [*CHUNKED, *CONVOLUTION])
def test_trees_are_refused_where_no_mask_can_make_one(kind: str) -> None:
    target = family(kind, (CHUNKED | CONVOLUTION)[kind])
    with pytest.raises(InputError, match="only full and sliding attention can read a tree"):
        probe_target(target, trees=True)


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_states_are_refused(kind: str) -> None:
    target = family(kind, RECURRENT[kind])
    with pytest.raises(InputError, match=f"target.model {kind}.*(recurrent state|takes no key/value cache|its cache)"):
        probe_target(target)
    with pytest.raises(InputError, match="cannot be used"):
        decode(target, Chain(tiny_drafter()), [1, 2, 3], 4)


def test_a_target_that_ignores_a_trees_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    forward = type(target.model).forward

    @wraps(forward)
    def deaf(self: Any, *, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        return forward(self, **kwargs)

    probe_target(target, trees=True)
    monkeypatch.setattr(type(target.model), "forward", deaf)
    with pytest.raises(InputError, match="does not heed the mask of a draft tree"):
        probe_target(target, trees=True)


def lower_precision() -> tuple[Target, Drafter]:
    """The tiny target and drafter in bf16 all through."""
    target, drafter = tiny_target(), tiny_drafter()
    model = target.model.bfloat16()
    return replace(target, embedding_VH=model.get_input_embeddings().weight, head_VH=model.lm_head.weight), (
        drafter.bfloat16()
    )


@pytest.mark.parametrize("trees", [False, True], ids=["chain", "tree"])
def test_a_lower_precision_target_decodes_what_it_writes_but_for_ties(trees: bool) -> None:
    """Every first difference must be one that the target's own rounding explains."""
    target, drafter = lower_precision()
    report = evaluate(target, Tree(drafter, 8) if trees else Chain(drafter), PROMPTS, 40)
    assert report.main.lossless
    assert all(tie.gap <= tie.noise for tie in report.main.ties)


def test_an_error_in_lower_precision_is_no_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verifier that keeps one wrong draft now and then is far beyond what rounding explains."""
    target, drafter = lower_precision()
    honest = speculate.verify

    def generous(proposal: Proposal, logits_RV: Tensor, dice: Dice) -> Verdict:
        verdict = honest(proposal, logits_RV, dice)
        if len(verdict.rows) == 1 and len(proposal.ids_R) > 1:
            return Verdict([0, 1], [int(proposal.ids_R[1]), int(logits_RV[1].argmax())])
        return verdict

    monkeypatch.setattr(speculate, "verify", generous)
    assert not evaluate(target, Chain(drafter), PROMPTS, 40).main.lossless


class EightBit(nn.Module):
    """A linear layer as weight-only quantisation leaves it: no floating-point weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.scale = nn.Parameter(linear.weight.abs().amax(1, keepdim=True) / 127, requires_grad=False)
        self.register_buffer("weight", (linear.weight / self.scale).round().to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.float() * self.scale).T


@pytest.mark.parametrize("method", [Chain(tiny_drafter()), Tree(tiny_drafter(), 8)], ids=["chain", "tree"])
def test_a_quantised_target_is_decoded_like_any_other(method: Method) -> None:
    target = tiny_target()
    for layer in target.model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, EightBit(getattr(layer.self_attn, name)))
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(layer.mlp, name, EightBit(getattr(layer.mlp, name)))
    probe_target(target, trees=True)
    for prompt in PROMPTS:
        assert decode(target, method, prompt, COUNT).tokens == without_cache(target, prompt, COUNT)
