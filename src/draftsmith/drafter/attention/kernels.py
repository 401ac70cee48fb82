"""Attention of one chunk, forward and backward: the fused CPU kernel where this torch has it, else public SDPA.

The fused CPU kernel is a private operator of PyTorch. It is used only where its schema is the one we tested (torch
2.11 to 2.15); elsewhere the chunk goes through `scaled_dot_product_attention` and its backward recomputes the chunk.
Shapes: queries [1, G, q, D], keys and values [1, G, k, D], additive mask [1, 1, q, k] in the dtype of the queries.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
_TESTED = {
    _FORWARD: ["query", "key", "value", "dropout_p", "is_causal", "attn_mask", "scale"],
    f"{_FORWARD}_backward": [
        *["grad_out", "query", "key", "value", "out", "logsumexp", "dropout_p", "is_causal", "attn_mask", "scale"]
    ],
}


def fused_cpu_available() -> bool:
    """Does this torch have the fused CPU attention operators with the signature that we tested?"""
    for name, arguments in _TESTED.items():
        packet = getattr(torch.ops.aten, name, None)
        if packet is None or [a.name for a in packet.default._schema.arguments] != arguments:
            return False
    return True


_FUSED_CPU = fused_cpu_available()


def gives_logsumexp(device: torch.device) -> bool:
    """Does `chunk_forward` on this device return the log-sum-exp, so that calls over different keys can be merged?"""
    return _FUSED_CPU and device.type == "cpu"


def chunk_forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Output [1, G, q, D] and its log-sum-exp [1, G, q], or None where the kernel does not tell it."""
    if gives_logsumexp(q.device):
        out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=mask)
        return out, logsumexp
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask), None


def chunk_backward(
    grad: Tensor, q: Tensor, out: Tensor, logsumexp: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values for `chunk_forward`.

    If `out` and `logsumexp` are those over more keys than these, the gradients are these keys' share of the whole.
    Without the fused kernel neither is read.
    """
    if gives_logsumexp(q.device):
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, logsumexp, 0.0, False, attn_mask=mask
        )
        return dq, dk, dv
    with torch.enable_grad():
        q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
        dq, dk, dv = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, attn_mask=mask), (q, k, v), grad)
    return dq, dk, dv
