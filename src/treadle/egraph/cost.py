"""What a node costs on a target, in picoseconds, counted from types alone.

Elementwise ops and views are fused into what reads them, so they cost their arithmetic; what ends a
kernel costs a launch, and a contraction what it computes or moves, whichever takes longer. Only
differences between equal graphs matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod

from treadle.ir.op import Attributes, Op
from treadle.ir.ops import elementwise, leaves, reductions, shaping
from treadle.ir.ops.linear import CONTRACT, Contraction
from treadle.ir.types import TensorType
from treadle.kernel.costs import Costs
from treadle.kernel.target import Target

FREE = frozenset([*leaves.NAMED_LEAVES, leaves.CONSTANT, leaves.IOTA, shaping.RESHAPE])
MOVES = frozenset(
    [shaping.BROADCAST, shaping.SLICE, shaping.FLIP, shaping.PAD, shaping.PERMUTE, elementwise.CAST]
)
REDUCTIONS = frozenset(
    [reductions.REDUCE_SUM, reductions.REDUCE_MAX, reductions.REDUCE_MIN, reductions.REDUCE_PROD]
)


def cost_of(
    op: Op, attributes: Attributes, operands: Sequence[TensorType], result: TensorType, to: Target
) -> float:
    """Picoseconds of one use of an op."""
    costs = to.costs
    if op in FREE:
        return 0.0
    if op is CONTRACT:
        assert isinstance(attributes, Contraction)
        return _contraction(attributes, operands, result, to)
    if op is shaping.CONCAT:  # the whole is written, each part is read
        return costs.launch + 2 * result.nbytes * costs.byte
    if op in REDUCTIONS:
        return costs.launch + operands[0].size * costs.element
    if op.is_composite or op not in _ELEMENTWISE:
        moved = sum(t.nbytes for t in operands) + result.nbytes
        return costs.launch + moved * costs.byte
    return result.size * costs.element


_ELEMENTWISE = MOVES | {
    op
    for op in vars(elementwise).values()
    if isinstance(op, Op) and op is not elementwise.STOP_GRADIENT
}


def _contraction(
    attributes: Contraction, operands: Sequence[TensorType], result: TensorType, to: Target
) -> float:
    costs = to.costs
    left, right = operands
    labels = attributes.labels
    sizes = dict(zip(labels[0] + labels[1], left.shape + right.shape, strict=True))
    flops = 2 * prod(sizes.values())
    moved = left.nbytes + right.nbytes + result.nbytes
    rate = costs.narrow_flop if left.dtype.itemsize < 4 else costs.flop
    busy = _busy(labels, sizes, to.matmuls.tile, costs)
    return costs.launch + max(flops * rate / busy, moved * costs.byte)


def _busy(labels: tuple[str, str, str], sizes: dict[str, int], tile: int, costs: Costs) -> float:
    """The part of a device that computes while the tiles of a contraction are shared out."""
    if not costs.units:
        return 1.0
    x, y, out = labels
    rows = prod(sizes[c] for c in out if c not in y)
    columns = prod(sizes[c] for c in out if c not in x)
    batch = prod(sizes[c] for c in out if c in x and c in y)
    parts = ceil(prod(sizes[c] for c in x if c not in out) / costs.split)  # of a long sum
    tiles = max(1, batch * ceil(rows / tile) * ceil(columns / tile) * parts)
    return tiles / (costs.units * ceil(tiles / costs.units))
