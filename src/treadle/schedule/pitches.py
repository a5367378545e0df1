"""Tensors inside the program whose rows are further apart than they are long.

Rows of matrices that a library multiplies start at whole packs: 16 bytes of narrow floats. Its fast
kernels want them so.

What a processor reads across, as tokens read an image's channels, has its lines at places of the
cache of their own: planes of 4 KiB would share one, and each line would be fetched again for every
element of it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

from treadle.ir.control import SCAN
from treadle.ir.graph import Graph, Node
from treadle.ir.graph import Value as TensorValue
from treadle.ir.ops.linear import CONTRACT
from treadle.ir.ops.shaping import PERMUTE, RESHAPE, Permute
from treadle.kernel.contraction import contraction_of
from treadle.kernel.target import Target
from treadle.schedule.homes import homes_of
from treadle.schedule.inline import ELEMENTWISE
from treadle.schedule.keep import is_root

Pitches = Mapping[TensorValue, int]  # elements from row to row


def row_pitches(
    graph: Graph, stored: Collection[TensorValue], besides: Collection[TensorValue], target: Target
) -> dict[TensorValue, int]:
    """Of tensors that matmuls of a library read or write as rows, where packs do not divide them.

    Those that leave the program, or that something else lays out, are none of them.
    """
    limits = target.matmuls
    outside = {o.value for o in graph.outputs} | set(besides)
    outside |= {v for n in graph.nodes if n.op is SCAN for v in n.operands}
    found: dict[TensorValue, int] = {}
    for value in _multiplied(graph, target):
        type_, node = graph.type_of(value), graph.nodes[value.node]
        is_own = value in stored and value not in outside
        is_plain = node.op is CONTRACT or not is_root(graph, node)
        if not is_own or not is_plain or not type_.dtype.is_narrow or type_.rank < 2:
            continue
        width = type_.shape[-1]
        if width % limits.pack and width >= limits.least_pitched:
            found[value] = width + -width % limits.pack
    return found


def _multiplied(graph: Graph, target: Target) -> set[TensorValue]:
    """Operands and results of a library's matmuls, and what they are views of."""
    found: set[TensorValue] = set()
    for i, node in enumerate(graph.nodes):
        if node.op is CONTRACT and _is_for_library(graph, node, target):
            found |= {TensorValue(i), *(_rows_behind(graph, v) for v in node.operands)}
    return found


def _is_for_library(graph: Graph, node: Node, target: Target) -> bool:
    is_float = node.types[0].is_float and target.matmuls.by_library and not target.is_small
    return is_float and contraction_of(graph, node).is_for_library(target.matmuls)


def _rows_behind(graph: Graph, value: TensorValue) -> TensorValue:
    """What a value is a view of, as long as rows stay rows."""
    node = graph.nodes[value.node]
    while node.op is PERMUTE or (node.op is RESHAPE and _keeps_rows(graph, node)):
        (value,) = node.operands
        node = graph.nodes[value.node]
    return value


def _keeps_rows(graph: Graph, node: Node) -> bool:
    source, result = graph.type_of(node.operands[0]).shape, node.types[0].shape
    return source[-1:] == result[-1:]


LINE = 64  # bytes


def crossed_pitches(
    graph: Graph, stored: Collection[TensorValue], besides: Collection[TensorValue], target: Target
) -> dict[TensorValue, int]:
    """Of tensors that are made and read element by element, and read along another axis than rows.

    Kernels that take rows as they lie (matmuls, windows, sorts) are none of their readers.
    """
    found: dict[TensorValue, int] = {}
    if not target.way:
        return found
    outside = {o.value for o in graph.outputs} | set(besides)
    homes = homes_of(graph, stored) if any(n.op is PERMUTE for n in graph.nodes) else {}
    for value, step in _crossed(graph, stored, target):
        type_, node = graph.type_of(value), graph.nodes[value.node]
        readers = (graph.nodes[i] for i in homes.get(value, ()))
        if value in outside or node.op not in ELEMENTWISE or type_.rank < 2:
            continue
        if any(is_root(graph, reader) for reader in readers) or step % type_.shape[-1]:
            continue
        # Planes end up a line or more further apart, whatever the number of their rows.
        rows, line = step // type_.shape[-1], LINE // type_.dtype.itemsize
        found[value] = type_.shape[-1] + max(1, line // rows)
    return found


def _crossed(
    graph: Graph, stored: Collection[TensorValue], target: Target
) -> Iterator[tuple[TensorValue, int]]:
    """Tensors in memory that a permutation reads across, and how far their elements are apart."""
    for node in graph.nodes:
        type_ = node.types[0]
        if not isinstance(node.attributes, Permute) or 0 in (type_.rank, type_.size):
            continue
        (operand,), axis = node.operands, node.attributes.axes[-1]
        shape, dtype = graph.type_of(operand).shape, graph.type_of(operand).dtype
        step = math.prod(shape[axis + 1 :])
        apart = math.gcd(step * dtype.itemsize, target.way)
        if step < 2 or shape[axis] * apart <= target.ways * target.way or apart < LINE:
            continue
        pending = [operand]
        while pending:
            value = pending.pop()
            behind = graph.nodes[value.node]
            if value in stored:
                yield value, step
            elif behind.op is RESHAPE or behind.op in ELEMENTWISE:
                pending += [v for v in behind.operands if graph.type_of(v).size == math.prod(shape)]
