"""The drafter: a few Qwen3-style layers whose blocks look at the target's features (DFlash, arXiv 2602.06036).

Training and decoding run the same layers. They differ only in where the context keys come from (a row, or a cache)
and in the attention function handed in, so there is one forward to get right. Tensor names are those that servers
load: no prefix, no embedding, no head.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from draftsmith.compile import guard
from draftsmith.drafter.attention import BLOCKWISE, Backend, BlockLayout
from draftsmith.drafter.config import DrafterConfig
from draftsmith.errors import InputError
from draftsmith.nouns import Blocks

# (layer, q_AQD, slot keys_GQD, slot values_GQD) -> output_AQD
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Rotation = tuple[Tensor, Tensor]  # cos, sin, each [tokens, D]


class RMSNorm(nn.Module):
    """Root-mean-square norm with the weight itself stored (never weight - 1)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        out: Tensor = _RMSNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return out


class _RMSNorm(torch.autograd.Function):
    """`F.rms_norm` with half the passes in its backward (427 instead of 792 µs for [1200, 128] on one CPU core).

    Without gradients the library's own is faster: 14 instead of 32 µs for a block of 8.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        normed = x * scale  # fp32, also under autocast
        ctx.save_for_backward(normed, scale, weight)
        out: Tensor = (normed * weight).to(x.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, scale, weight = ctx.saved_tensors
        size, grad = weight.shape[0], grads[0].to(normed.dtype)
        weighted = (grad * normed).reshape(-1, size)
        along = (weighted @ weight).view(scale.shape).div_(-size)
        dx = torch.addcmul(grad * weight, normed, along).mul_(scale)
        return dx.to(grads[0].dtype), weighted.sum(0), None


class Attention(nn.Module):
    """Projections of one draft layer. Keys and values of context and block come from the same weights."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        hidden, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, hidden, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def keys_values(self, hidden_TH: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Rotated keys and values, each [G, T, D]."""
        keys_TGD = self.k_norm(self.k_proj(hidden_TH).unflatten(-1, (-1, self.head_dim)))
        values_TGD = self.v_proj(hidden_TH).unflatten(-1, (-1, self.head_dim))
        return rotate(keys_TGD.transpose(0, 1), rotation), values_TGD.transpose(0, 1)

    def queries(self, hidden_QH: Tensor, rotation: Rotation) -> Tensor:
        """Rotated queries [A, Q, D]."""
        queries_QAD = self.q_norm(self.q_proj(hidden_QH).unflatten(-1, (-1, self.head_dim)))
        return rotate(queries_QAD.transpose(0, 1), rotation)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(gated(self.gate_proj(x), self.up_proj(x)))
        return out


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, elementwise."""
    if not torch.is_grad_enabled():
        return F.silu(gate).mul_(up)
    out: Tensor = _Gated.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


class _Gated(torch.autograd.Function):
    """Keeps two tensors for the backward where autograd would keep three, and makes three where it would make five: on
    a CPU most of the time of such an operation goes into fresh memory (11.4 against 7.1 ms for [4096, 768], two cores).
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        dgate = grads[0] * up
        torch.ops.aten.silu_backward.grad_input(dgate, gate, grad_input=dgate)
        return dgate, F.silu(gate).mul_(grads[0])


class DraftLayer(nn.Module):
    """Pre-norm transformer layer over the block's slots; the context enters only as keys and values."""

    def __init__(self, config: DrafterConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def context(self, context_TH: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Rotated keys and values of context features, each [G, T, D]."""
        return self.self_attn.keys_values(context_TH, rotation)

    def forward(self, hidden_QH: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        normed_QH = self.input_layernorm(hidden_QH)
        queries_AQD = self.self_attn.queries(normed_QH, rotation)
        mixed_AQD = attend(self.index, queries_AQD, *self.self_attn.keys_values(normed_QH, rotation))
        hidden_QH = hidden_QH + self.self_attn.o_proj(mixed_AQD.transpose(0, 1).flatten(1))
        out: Tensor = hidden_QH + self.mlp(self.post_attention_layernorm(hidden_QH))
        return out


class Drafter(nn.Module):
    """The trainable model. One row (or one decoded sequence) at a time; there is no batch dimension.

    With `checkpointing` a layer keeps only its input for the backward, which computes the layer once more.
    """

    def __init__(self, config: DrafterConfig, backend: Backend = BLOCKWISE, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.config, self.backend, self.checkpointing = config, backend, checkpointing
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config, index) for index in range(len(config.layer_types)))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    @property
    def stack(self) -> list[DraftLayer]:
        """The layers, bottom first."""
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]

    def context(self, features_TF: Tensor) -> Tensor:
        """The target's features as every layer sees them [T, H]: `hidden_norm(fc(features))`."""
        out: Tensor = self.hidden_norm(self.fc(features_TF))
        return out

    def embed(self, tokens_Q: Tensor, embedding_VH: Tensor) -> Tensor:
        """Slots enter through the target's raw embedding weight, scaled only if the checkpoint says so."""
        return F.embedding(tokens_Q, embedding_VH) * self.config.input_embedding_scale

    def run_layers(self, hidden_QH: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """All layers and the final norm: [Q, H] -> [Q, H], ready for the target's head."""
        run = _recomputed if self.checkpointing and torch.is_grad_enabled() else _guarded
        for layer in self.stack:
            hidden_QH = run(layer, hidden_QH, rotation, attend)
        out: Tensor = self.norm(hidden_QH)
        return out

    def forward(
        self, features_TF: Tensor, positions_T: Tensor, blocks: Blocks, embedding_VH: Tensor, rotary: "RotaryTable"
    ) -> Tensor:
        """Training: the outputs of all slots of a row, [Q, H].

        Args:
            features_TF: the target's hidden states of the row.
            positions_T: position of each row token inside its document.
            blocks: what to draft.
            embedding_VH: the target's input embedding, frozen.
            rotary: cosines and sines, on the same device.
        """
        context_TH = self.context(features_TF)
        rotation_T = rotary.at(positions_T)
        plans: dict[int | None, Any] = {}  # one per window that occurs among the layers

        def attend(layer: int, q_AQD: Tensor, keys_GQD: Tensor, values_GQD: Tensor) -> Tensor:
            window = self.config.window(layer)
            if window not in plans:
                plans[window] = self._plan(blocks, window, values_GQD)
            context_keys_GTD, context_values_GTD = self.stack[layer].context(context_TH, rotation_T)
            return self.backend.attend(plans[window], q_AQD, context_keys_GTD, context_values_GTD, keys_GQD, values_GQD)

        hidden_QH = self.embed(blocks.tokens_NB.flatten(), embedding_VH)
        return self.run_layers(hidden_QH, rotary.at(blocks.positions_NB.flatten()), attend)

    def _plan(self, blocks: Blocks, window: int | None, like: Tensor) -> Any:
        config = self.config
        assert config.is_causal is None, "such drafters are only decoded with"
        layout = BlockLayout(blocks.anchors, blocks.starts, config.block_size, window)
        return self.backend.plan(
            layout, config.num_attention_heads // config.num_key_value_heads, like.dtype, like.device
        )


def _guarded(layer: DraftLayer, hidden_QH: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
    """A layer as eager model code beside a compiler. The backward calls it too, from whichever thread autograd uses."""
    with guard.shared():
        out: Tensor = layer(hidden_QH, rotation, attend)
    return out


def _recomputed(layer: DraftLayer, hidden_QH: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
    """`_guarded`, once now and once more in the backward, with nothing in between kept.

    Never re-entrant: that variant runs a backward inside the backward, and since the first layer's input is a frozen
    embedding, no layer would get a gradient. Nothing here draws random numbers, so no generator is rewound.
    """
    out: Tensor = checkpoint(
        _guarded, layer, hidden_QH, rotation, attend, use_reentrant=False, preserve_rng_state=False
    )
    return out


class RotaryTable:
    """Cosines and sines of positions 0 .. length - 1, computed once, as transformers computes them for Qwen3: in fp32,
    then rounded to the dtype of the queries and keys they rotate."""

    def __init__(
        self, config: DrafterConfig, length: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        """
        Raises:
            InputError: `rope_parameters` lack a number, or have something else in its place.
        """
        try:
            qwen3 = Qwen3Config(
                head_dim=config.head_dim,
                hidden_size=config.hidden_size,
                num_attention_heads=config.num_attention_heads,
                max_position_embeddings=config.max_position_embeddings,
                rope_parameters=dict(config.rope_parameters),
            )
            embedding = Qwen3RotaryEmbedding(qwen3)
        except (TypeError, ValueError, ArithmeticError, LookupError, StrictDataclassError) as error:
            raise InputError(
                f"the drafter's rope_parameters {dict(config.rope_parameters)} cannot be used: "
                f"{' '.join(str(error).split())}; mend its config.json"
            ) from error
        with guard.shared():
            cos, sin = embedding(torch.zeros(1), torch.arange(length)[None])
        self.cos_LD: Tensor = cos[0].to(device, dtype)
        self.sin_LD: Tensor = sin[0].to(device, dtype)

    def at(self, positions: Tensor | slice) -> Rotation:
        """Rows of the table, by index or by range."""
        return self.cos_LD[positions], self.sin_LD[positions]


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotary position embedding, half-split layout: x [heads, tokens, D]."""
    if not torch.is_grad_enabled():
        return _rotated(x, *rotation)
    out: Tensor = _Rotate.apply(x, *rotation)  # type: ignore[no-untyped-call]
    return out


class _Rotate(torch.autograd.Function):
    """A rotation's gradient is the rotation back: one pass over x each way, where autograd would take five."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out
