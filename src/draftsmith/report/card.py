"""The README of a drafter folder, and the commands that serve it."""

import json

from draftsmith.drafter.config import DrafterConfig


def launch_lines(target: str, draft: str, block_size: int) -> dict[str, str]:
    """Exact commands for the servers that read this checkpoint. vLLM counts the drafted tokens, SGLang the block."""
    speculative = {"method": "dflash", "model": draft, "num_speculative_tokens": block_size - 1}
    return {
        "vLLM": f"vllm serve {target} --speculative-config '{json.dumps(speculative)}'",
        "SGLang": (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH "
            f"--speculative-draft-model-path {draft} --speculative-num-draft-tokens {block_size}"
        ),
    }


def model_card(target: str, config: DrafterConfig, step: int, tau: float | None) -> str:
    """Markdown; figures only if they were measured."""
    measured = f"τ {tau:.3f} on held-out prompts at step {step}" if tau is not None else f"weights after step {step}"
    launches = launch_lines(target, "THIS_FOLDER", config.block_size)
    return f"""---
library_name: transformers
tags: [dflash, speculative-decoding, draftsmith]
---

# DFlash drafter for `{target}`

A block-diffusion drafter (DFlash, arXiv 2602.06036) trained with draftsmith: it drafts {config.block_size - 1}
tokens in one pass, the target verifies them, the output stays the target's own. State: {measured}.

- Layers: {len(config.layer_types)} ({", ".join(sorted(set(config.layer_types)))}), hidden {config.hidden_size},
  block size {config.block_size}
- Taps (outputs of target layers): {", ".join(map(str, config.target_layer_ids))} of {config.num_target_layers}
- Mask token id: {config.mask_token_id}

It works with this target only: another fine-tune, tokenizer or chat template lowers the acceptance.
`draftsmith.json` holds the target's fingerprint and every decision of the run.

    {launches["vLLM"]}

    {launches["SGLang"]}
"""
