"""Cross-entropy through a head by chunks of rows: the logits of a chunk at a time, never all.

A chunk's logits are computed with classes as rows and tokens as columns, as attention's scores are:
every product then reads the head's weight where it is, and what follows runs along lanes of tokens.
Blocks of classes keep their own maximum and sum; a chunk's logarithms come of these. With gradients
the exponentials stay in memory until the logarithms are known, become the gradient of the logits in
place, and are multiplied twice: the weight's gradient is added up chunk by chunk.
"""

from __future__ import annotations

from treadle.ir import composites as c
from treadle.ir.graph import Node
from treadle.kernel.index import Var, variable
from treadle.kernel.nodes import Buffer, Kernel, Literal, Role, Store
from treadle.schedule.chunk_gradients import Gradients
from treadle.schedule.chunks import Chunk
from treadle.schedule.gpu_head import gpu_drafts
from treadle.schedule.head import F32, Head, chunk_rows
from treadle.schedule.keep import STREAMS
from treadle.schedule.lower import Draft, Lowering, RepeatDraft
from treadle.schedule.nests import nest
from treadle.schedule.order import Order


@STREAMS(c.LINEAR_CROSS_ENTROPY)
def linear_cross_entropy_drafts(lowering: Lowering, position: int, node: Node) -> list[Draft]:
    return _drafts(Head(lowering, position, node, None, node.operands))


@STREAMS(c.LINEAR_CROSS_ENTROPY_GRAD)
def linear_cross_entropy_grad_drafts(lowering: Lowering, position: int, node: Node) -> list[Draft]:
    return _drafts(Head(lowering, position, node, node.operands[0], node.operands[1:]))


def _drafts(head: Head) -> list[Draft]:
    """What comes before, a repeat over chunks, and the rows that are left over."""
    if head.lowering.target.matmuls.by_library:
        return gpu_drafts(head)
    if head.ct is not None:
        for output in sorted(head.wanted - {0, 1}):  # gradients that chunks add to
            head.before.add(_cleared(head, head.result(output)))
    size = chunk_rows(head.rows)
    turns, rest = divmod(head.rows, size)
    found: list[Draft] = [*head.before.phases()]
    if turns > 1:
        found.append(RepeatDraft(turns, False, _phases(Chunk(head, size, None))))
    else:
        found += _phases(Chunk(head, size, 0))
    return [*found, *(_phases(Chunk(head, rest, turns * size)) if rest else [])]


def _phases(chunk: Chunk) -> list[Draft]:
    order = Order(chunk.head.lowering.fuse, chunk.head.lowering.memo)
    gradients = [] if chunk.head.ct is None else Gradients(chunk).kernels()
    for kernel in [*chunk.kernels(), *gradients]:
        order.add(kernel)
    return [*order.phases()]


def _cleared(head: Head, buffer: Buffer) -> Kernel:
    i = Var("i", buffer.size)
    body = nest([i], Role.PARALLEL, [Store(buffer.name, variable(i), Literal(0, F32))])
    return head.kernel("clear", (), (buffer,), body)
