"""Attention backends of the drafter. A backend is a function with the signature of `blockwise_attention`.

`dense`, the reference that every backend is compared with, lives in the tests.
"""

from draftsmith.drafter.attention.blockwise import ChunkPlan, blockwise_attention
from draftsmith.drafter.attention.layout import BlockLayout

__all__ = ["BlockLayout", "ChunkPlan", "blockwise_attention"]
