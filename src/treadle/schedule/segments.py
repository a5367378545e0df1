"""Sums whose indices ascend: each row of the result adds up a run of updates.

Where runs start is found by a binary search of each row. Every element of the result is then a sum
of its own, in the order of the updates.
"""

from __future__ import annotations

from dataclasses import replace

from treadle.base import dtypes
from treadle.base.dtypes import accumulator
from treadle.ir.graph import Graph, Node
from treadle.ir.graph import Value as TensorValue
from treadle.ir.ops import indexing
from treadle.ir.ops.reductions import SORT, Sort
from treadle.kernel.bindings import Starts
from treadle.kernel.index import Var, data, variable
from treadle.kernel.nodes import (
    Accumulate,
    Buffer,
    Convert,
    For,
    Kernel,
    Let,
    Literal,
    Load,
    Local,
    Position,
    Role,
    Statement,
    Store,
    Value,
)
from treadle.schedule.lower import Lowering, attributes_of
from treadle.schedule.nests import along, apply, as_dtype, axis_vars, compare, parallel
from treadle.schedule.operands import Site, reading

I64 = dtypes.int64


def has_runs(graph: Graph, node: Node) -> bool:
    """Whether rows are added along the first axis at indices that were sorted."""
    given: indexing.ScatterAdd = attributes_of(node)
    index = node.operands[1]
    source = graph.nodes[index.node]
    is_sorted = source.op is SORT and index.output == 0
    is_sorted = (
        is_sorted and isinstance(source.attributes, Sort) and not source.attributes.descending
    )
    return is_sorted and graph.type_of(index).rank == 1 and given.axis == given.batch == 0


def run_sums(lowering: Lowering, position: int, node: Node) -> list[Kernel]:
    """Where runs start, and their sums."""
    starts, first = _starts(lowering, position, node)
    value, (updates, index) = TensorValue(position), node.operands
    type_, wide = lowering.graph.type_of(value), accumulator(node.types[0].dtype)
    count = lowering.graph.type_of(index).size
    axes, k = axis_vars("i", type_.shape), Var("k", count)
    reader = reading(lowering, [starts.name])
    at = along(axes)
    start, end = (Load(starts.name, at[0] + step, starts.dtype) for step in (0, 1))
    element = reader.at(updates, (data("place", count), *at[1:]))
    place = apply("add", Local("start", I64), Position(variable(k), I64))
    inner: list[Statement] = [Let("place", place), *reader.lets]
    inner.append(Accumulate("acc", "add", as_dtype(element, wide)))
    body: list[Statement] = [
        Let("start", Convert(start, I64)),
        Let("many", apply("sub", Convert(end, I64), Local("start", I64))),
        Let("acc", Literal(0, wide)),
        For(k, Role.SEQUENTIAL, tuple(inner), data("many", count + 1)),
        lowering.store(value, at, as_dtype(Local("acc", wide), lowering.buffer(value).dtype)),
    ]
    kernel = lowering.kernel(position, reader, [value], parallel(axes, body))
    # By itself: loops of others would be merged with its own, and runs end at rows.
    return [first, replace(kernel, is_standalone=True)]


def _starts(lowering: Lowering, position: int, node: Node) -> tuple[Buffer, Kernel]:
    """How many indices are below each row's, and below the number of rows."""
    index, size = node.operands[1], node.types[0].shape[0]
    count = lowering.graph.type_of(index).size
    into = Site(lowering, position).memory("starts", dtypes.int32, size + 1, Starts("starts"))
    reader, row = lowering.reader(), Var("row", size + 1)
    bits = count.bit_length()
    lets: list[Statement] = [Let(f"below{bits}", Literal(0, I64))]
    for bit in reversed(range(bits)):
        below, more = Local(f"below{bit + 1}", I64), Local(f"more{bit}", I64)
        last = Local(f"last{bit}", I64)
        found: Value = Convert(reader.at(index, (data(last.name, count),)), I64)
        is_less = compare("lt", found, Position(variable(row), I64))
        is_below = compare("and", compare("le", more, Literal(count, I64)), is_less)
        lets += [
            Let(more.name, apply("add", below, Literal(1 << bit, I64))),
            Let(last.name, apply("sub", more, Literal(1, I64))),
            *reader.lets,
            Let(f"below{bit}", apply("where", is_below, more, below)),
        ]
        reader.lets.clear()
    store = Store(into.name, variable(row), Convert(Local("below0", I64), into.dtype))
    body = parallel([row], [*lets, store])
    return into, lowering.kernel(position, reader, [], body, "_starts", (into,))
