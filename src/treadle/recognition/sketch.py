"""Graphs that are written down to be compared: what a region may be, in composites."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.base.dtypes import DType
from treadle.ir.graph import Graph, GraphBuilder, Output, OutputKind, Value
from treadle.ir.op import NONE, Attributes, Op, Types
from treadle.ir.ops import elementwise as e
from treadle.ir.ops.leaves import INPUT, Leaf
from treadle.ir.ops.shaping import PERMUTE, RESHAPE, Permute, Reshape
from treadle.ir.rewrite import inline_into, remove_dead_code
from treadle.ir.types import TensorType


class Sketch:
    """A graph over inputs of given types, named 0, 1, …"""

    def __init__(self, types: Types):
        self.builder = GraphBuilder()
        leaves = (self.builder.add(INPUT, Leaf(str(i), t), ()) for i, t in enumerate(types))
        self.inputs = tuple(v for (v,) in leaves)

    def add(self, op: Op, attributes: Attributes, *operands: Value) -> Value:
        return self.builder.add(op, attributes, operands)[0]

    def copied(self, graph: Graph, value: Value) -> Value:
        """A value of another graph whose inputs are named as these."""
        outputs = [Output(OutputKind.RESULT, "0", value)]
        part = remove_dead_code(Graph(graph.nodes, tuple(outputs)))
        leaves = {str(i): v for i, v in enumerate(self.inputs)}
        return inline_into(self.builder, part, leaves)[0]

    def negated(self, value: Value) -> Value:
        return self.add(e.NEG, NONE, value)

    def cast(self, value: Value, dtype: DType) -> Value:
        is_same = self.builder.type_of(value).dtype is dtype
        return value if is_same else self.add(e.CAST, e.Cast(dtype), value)

    def reshaped(self, value: Value, shape: Sequence[int]) -> Value:
        is_same = self.builder.type_of(value).shape == tuple(shape)
        return value if is_same else self.add(RESHAPE, Reshape(tuple(shape)), value)

    def permuted(self, value: Value, axes: Sequence[int]) -> Value:
        is_same = tuple(axes) == tuple(range(len(axes)))
        return value if is_same else self.add(PERMUTE, Permute(tuple(axes)), value)

    def result(self, value: Value, type_: TensorType) -> Graph:
        """The graph that gives a value in the dtype of a type."""
        final = self.cast(value, type_.dtype)
        return self.builder.build([Output(OutputKind.RESULT, "0", final)], "composite")
