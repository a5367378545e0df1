"""Cross-entropy through a head by chunks of rows: the logits of a chunk at a time, never all."""

from __future__ import annotations

from treadle.ir import composites as c
from treadle.ir.graph import Node
from treadle.schedule.cross_entropy_blocks import block_drafts
from treadle.schedule.cross_entropy_head import Head
from treadle.schedule.cross_entropy_rows import row_drafts
from treadle.schedule.keep import CHUNKED
from treadle.schedule.lower import Draft, Lowering


@CHUNKED(c.LINEAR_CROSS_ENTROPY)
def linear_cross_entropy_drafts(lowering: Lowering, position: int, node: Node) -> list[Draft]:
    return _drafts(Head(lowering, position, node, None, node.operands))


@CHUNKED(c.LINEAR_CROSS_ENTROPY_GRAD)
def linear_cross_entropy_grad_drafts(lowering: Lowering, position: int, node: Node) -> list[Draft]:
    return _drafts(Head(lowering, position, node, node.operands[0], node.operands[1:]))


def _drafts(head: Head) -> list[Draft]:
    """Full rows of logits where a library multiplies, blocks of classes where loops do."""
    by_library = head.lowering.target.matmuls.by_library
    return row_drafts(head) if by_library else block_drafts(head)
