"""Random numbers of a shard: those that its elements have in the whole batch.

A call of `random_bits` in the whole batch has an axis that is as many times longer as there are
shards. If that is the first, a shard's numbers follow those of the shards before it; otherwise they
are a slice of all. What is as large in a shard as in the batch is the same for all shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from treadle.base import dtypes
from treadle.base.errors import ArgumentError
from treadle.base.shapes import Shape, size_of
from treadle.frontend.coerce import cast, constant
from treadle.frontend.functions.arithmetic import floor_divide
from treadle.frontend.functions.dynamic import dynamic_slice
from treadle.frontend.functions.shaping import concat, slice_along
from treadle.frontend.scopes import Trace, isolated_tracing
from treadle.ir.control import Call, Scan, bodies
from treadle.ir.graph import Graph, Output, Value
from treadle.ir.op import Attributes
from treadle.ir.ops.indexing import RANDOM_BITS, RandomBits
from treadle.ir.rewrite import copied, walk


def sites(graph: Graph) -> dict[int, Shape]:
    """The shape of each call, those inside bodies too."""
    found: dict[int, Shape] = {}
    for node in graph.nodes:
        if isinstance(node.attributes, RandomBits):
            found[node.attributes.site] = node.attributes.shape
        for body in bodies(node.attributes):
            found |= sites(body)
    return found


def as_of_shard(graph: Graph, whole: Mapping[int, Shape], shards: int) -> Graph:
    """A shard's graph that draws what the whole batch's would; `whole` has that one's shapes."""
    own = sites(graph)
    if not own or shards == 1:
        return graph
    return _Drawing(whole, shards).graph(graph)


def _with_bodies(attributes: Attributes, changed: Mapping[Graph, Graph]) -> Attributes:
    assert isinstance(attributes, (Call, Scan))
    if isinstance(attributes, Scan) or attributes.backward is None:
        return replace(attributes, body=changed[attributes.body])
    backward = changed[attributes.backward]
    return replace(attributes, body=changed[attributes.body], backward=backward)


class _Drawing:
    """Every call of a graph and of its bodies."""

    def __init__(self, whole: Mapping[int, Shape], shards: int):
        self.whole, self.shards = whole, shards

    def graph(self, graph: Graph) -> Graph:
        if not sites(graph):
            return graph
        with isolated_tracing(graph.name) as trace:

            def visit(position: int, operands: tuple[Value, ...]) -> tuple[Value, ...]:
                node = graph.nodes[position]
                if isinstance(node.attributes, RandomBits):
                    return (self.drawn(trace, node.attributes, operands[0]),)
                changed = {b: self.graph(b) for b in bodies(node.attributes)}
                if any(new is not old for old, new in changed.items()):
                    attributes = _with_bodies(node.attributes, changed)
                    return trace.builder.add(node.op, attributes, operands, node.origin)
                return copied(trace.builder, node, operands)

            values = walk(graph, visit)
            outputs = [
                Output(o.kind, o.name, v) for o, v in zip(graph.outputs, values, strict=True)
            ]
            return trace.finish_outputs(outputs)

    def drawn(self, trace: Trace, call: RandomBits, key: Value) -> Value:
        axis = self.axis(call)
        if axis is None:
            return trace.builder.add(RANDOM_BITS, call, (key,))[0]
        size = size_of(call.shape)
        if size_of(call.shape[:axis]) == 1 and size % 4 == 0:
            return trace.builder.add(RANDOM_BITS, replace(call, blocks=size // 4), (key,))[0]
        wider = replace(call, shape=self.whole[call.site])
        every = trace.tensor(trace.builder.add(RANDOM_BITS, wider, (key,))[0])
        last = slice_along(trace.tensor(key), 0, 5, 6)
        number = cast(floor_divide(last, constant(1 << 16, (1,), last.dtype)), dtypes.int32)
        zero = constant(0, (1,), dtypes.int32)
        starts = [number * call.shape[i] if i == axis else zero for i in range(len(call.shape))]
        return dynamic_slice(every, concat(starts), call.shape).handle

    def axis(self, call: RandomBits) -> int | None:
        """The axis along which the batch is cut; None where nothing is."""
        whole = self.whole.get(call.site)
        if whole == call.shape:
            return None
        if whole is not None and len(whole) == len(call.shape):
            longer = [i for i, (n, m) in enumerate(zip(call.shape, whole, strict=True)) if n != m]
            if len(longer) == 1 and call.shape[longer[0]] * self.shards == whole[longer[0]]:
                return longer[0]
        raise ArgumentError(
            "compile_step",
            f"random numbers of the shape {call.shape} in a shard and {whole} in the whole batch: "
            "no axis of them is the batch's",
            "Draw numbers with the batch as one axis, or of a shape that does not depend on it.",
        )
