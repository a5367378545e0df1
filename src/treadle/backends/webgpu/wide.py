"""Values of 64 bits, which WGSL has not: counts that 32 bits hold are taken, others refused."""

from __future__ import annotations

import numpy as np

from treadle.base import dtypes
from treadle.base.errors import DTypeError
from treadle.base.words import WORD
from treadle.ir.control import bodies
from treadle.ir.graph import Graph, Node, Value
from treadle.ir.literal import ArrayLiteral
from treadle.ir.ops.elementwise import ADD, CAST, WHERE
from treadle.ir.ops.leaves import CONSTANT, STATE, Constant
from treadle.ir.ops.reductions import CUMSUM, REDUCE_SUM, Cumulate
from treadle.ir.ops.shaping import BROADCAST, FLIP, PERMUTE, RESHAPE, SLICE

COUNTING = (STATE, CONSTANT, ADD, WHERE, BROADCAST)  # what makes counters of steps
MOVING = (BROADCAST, FLIP, PERMUTE, RESHAPE, SLICE)
MOST = 2**31 - 1


def refuse_wide(graph: Graph) -> None:
    """Raise an error that names the first value of 64 bits that 32 bits may not hold.

    Taken are counters (sums of states and constants: no step is made 2³¹ times), and sums of bool
    and of integers of 8 bits that cannot reach 2³¹.
    """
    known: dict[Value, int] = {}
    for position, node in enumerate(graph.nodes):
        for body in bodies(node.attributes):
            refuse_wide(body)
        wide = [t.dtype for t in node.types if t.dtype.itemsize > WORD]
        if not wide:
            continue
        largest = None if wide[0].is_float else _largest(graph, node, known)
        if largest is not None and largest <= MOST:
            known[Value(position)] = largest
        elif wide[0].is_float or node.op not in COUNTING:
            raise DTypeError(
                "webgpu",
                f"{node.op.name} gives {wide[0]}, and WGSL computes in 32 bits",
                "Use float32 and int32: dtype=td.int32 of a sum, td.Spec(…, td.int32) for a batch. "
                'Or device="cpu".',
                origin=node.origin,
            )


def _largest(graph: Graph, node: Node, known: dict[Value, int]) -> int | None:
    """A bound of the magnitudes of an int64 value, where its operands have one."""
    if isinstance(node.attributes, Constant):
        value = node.attributes.value
        array = value.array if isinstance(value, ArrayLiteral) else np.asarray(value)
        return int(np.abs(array.astype(np.int64)).max(initial=0))
    types = [graph.type_of(v) for v in node.operands]
    if node.op is CAST and not types[0].is_float and types[0].dtype.bits <= 8:
        return max(map(abs, types[0].dtype.range()))
    of_wide = [known.get(v) for v, t in zip(node.operands, types) if t.dtype is dtypes.int64]
    if not of_wide or None in of_wide:
        return None
    operands = [n for n in of_wide if n is not None]
    if node.op is REDUCE_SUM:
        return operands[0] * (types[0].size // max(1, node.types[0].size))
    if isinstance(node.attributes, Cumulate) and node.op is CUMSUM:
        return operands[0] * types[0].shape[node.attributes.axis]
    if node.op is ADD:
        return sum(operands)
    return max(operands) if node.op in (WHERE, *MOVING) else None
