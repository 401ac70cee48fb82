"""Runs inside the virtual environment of speculators: draft logits of `DFlashDraftModel`, given features and tokens.

Usage: python run_speculators.py FOLDER INPUTS.safetensors OUT.safetensors

INPUTS holds features_TF, tokens_T and anchors_N; OUT gets logits_NBV. The library draws anchors among the positions
that its loss mask allows, at most as many as asked for: asked for as many as there are, it takes all of them, sorted.
"""

import sys

import torch
from safetensors.torch import load_file, save_file
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig

folder, inputs_file, out_file = sys.argv[1:]
torch.set_num_threads(1)
inputs = load_file(inputs_file)
features_TF, tokens_T, anchors_N = inputs["features_TF"], inputs["tokens_T"], inputs["anchors_N"]
config = DFlashSpeculatorConfig.from_pretrained(folder)
config.transformer_layer_config._attn_implementation = "eager"  # flex attention has no CPU kernel worth waiting for
model = DFlashDraftModel.from_pretrained(folder, config=config, dtype=torch.float32).eval()
length, block = len(tokens_T), model.block_size
allowed_1T = torch.zeros(1, length)
allowed_1T[0, anchors_N] = 1
with torch.no_grad():
    logits_1QV = model._backbone_forward(
        features_TF[None],
        tokens_T[None],
        allowed_1T,
        torch.zeros(1, length, model.hidden_size),
        torch.zeros(1, length, dtype=torch.long),
        max_anchors=len(anchors_N),
    )[1]
save_file({"logits_NBV": logits_1QV[0].view(len(anchors_N), block, -1).contiguous()}, out_file)
