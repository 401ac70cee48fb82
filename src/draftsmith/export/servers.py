"""Who reads which layout, and what a drafter may have that its readers would not take the same way.

The facts are those of the named versions; `tests/export` replays their reading rules. Files: dflash `model.py` · vLLM
`model_executor/models/qwen3_dflash.py`, `transformers_utils/configs/speculators/algos.py` · SGLang
`srt/models/dflash.py`, `srt/speculative/dflash_worker_v2.py` · speculators `models/dflash/{config,core,attention}.py`.
"""

from draftsmith.drafter.config import SLIDING, DrafterConfig

ZLAB, SPECULATORS = "zlab", "speculators"
READERS = {
    ZLAB: ("dflash 0.1.0", "vLLM 0.33.0", "SGLang 0.5.23"),
    SPECULATORS: ("speculators 0.9.0", "vLLM 0.33.0"),
}


def disagreements(config: DrafterConfig, layout: str) -> list[str]:
    """Why the readers of a layout would make different drafters of this one; empty if they all read it alike."""
    reasons = []
    if config.is_causal is not None:
        reasons.append(
            f"is_causal {config.is_causal} overrides layer_types, which SGLang before 0.5.23 ignores and a speculators "
            "config cannot say"
        )
    if config.input_embedding_scale != 1.0:
        reasons.append(
            f"input_embedding_scale {config.input_embedding_scale} is ignored by vLLM 0.33.0, speculators 0.9.0 and "
            "SGLang 0.5.23 (which asks the target's class)"
        )
    for key, value in {
        "output_multiplier": config.output_multiplier != 1.0 and config.output_multiplier,
        "final_logit_softcapping": config.final_logit_softcapping,
    }.items():
        if value:
            reasons.append(f"{key} {value} is ignored by vLLM 0.33.0, SGLang 0.5.23 and speculators 0.9.0")
    if layout == SPECULATORS and SLIDING in config.layer_types:
        reasons.append(
            "a sliding window is counted from the anchor by speculators 0.9.0 and from each slot by vLLM 0.33.0, which "
            "also makes full layers causal beside causal sliding ones (zlab has neither problem)"
        )
    return reasons
