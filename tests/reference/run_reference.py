"""Runs inside the reference's own virtual environment: greedy decoding by `dflash`, printed as JSON.

Usage: python run_reference.py TARGET DRAFT PROMPT_IDS.json MAX_NEW_TOKENS
"""

import json
import sys
import time
from pathlib import Path

import dflash.model
import torch
from dflash.model import DFlashDraftModel, dflash_generate
from transformers import AutoModelForCausalLM

target_folder, draft_folder, prompts_file, max_new_tokens = sys.argv[1:]
torch.set_num_threads(1)
dflash.model._cuda_time = time.perf_counter  # its stopwatch asks for CUDA; nothing that it computes does
target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32, attn_implementation="sdpa").eval()
draft = DFlashDraftModel.from_pretrained(draft_folder, dtype=torch.float32, attn_implementation="sdpa").eval()
eos = target.generation_config.eos_token_id
results, drafts, compute = [], [], draft.compute_logits


def recorded(hidden, head):
    logits = compute(hidden, head)
    drafts.append(logits[0].argmax(-1).tolist())
    return logits


draft.compute_logits = recorded
for ids in json.loads(Path(prompts_file).read_text()):
    drafts.clear()
    out = dflash_generate(
        draft,
        target=target,
        input_ids=torch.tensor([ids]),
        max_new_tokens=int(max_new_tokens),
        stop_token_ids=[eos] if isinstance(eos, int) else eos,
        return_stats=True,
    )
    tokens = out.output_ids[0, len(ids) :].tolist()
    results.append({"tokens": tokens, "rounds": out.acceptance_lengths, "drafts": list(drafts)})
print(json.dumps(results))
