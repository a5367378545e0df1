"""The whole op table: importing this declares every row."""

from __future__ import annotations

from treadle.ir import composites, control
from treadle.ir.op import OPS, Op
from treadle.ir.ops import elementwise, indexing, leaves, linear, reductions, shaping

FAMILIES = (leaves, elementwise, reductions, shaping, linear, indexing, control, composites)


def primitives() -> list[Op]:
    return [op for op in OPS.values() if not op.is_composite]


def all_composites() -> list[Op]:
    return [op for op in OPS.values() if op.is_composite]
