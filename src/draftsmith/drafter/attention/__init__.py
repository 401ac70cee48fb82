"""Attention backends of the drafter: how a row's blocks attend, chosen once per drafter.

A backend plans a row once for all layers that share a window, then attends layer by layer. The dense reference that
backends are compared with lives in the tests.
"""

from draftsmith.drafter.attention.backend import Backend
from draftsmith.drafter.attention.blockwise import ChunkPlan, blockwise_attention
from draftsmith.drafter.attention.layout import BlockLayout

BLOCKWISE = Backend(ChunkPlan, blockwise_attention)

__all__ = ["BLOCKWISE", "Backend", "BlockLayout", "ChunkPlan", "blockwise_attention"]
