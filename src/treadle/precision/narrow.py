"""Mixed precision as a pass over the traced graph, driven by the op table's column.

Requires a graph before differentiation; ensures that its interface (leaves and outputs) keeps its
types. Parameters stay float32: the narrow copy an op reads is a cast of the parameter, one node
however often it is read.
"""

from __future__ import annotations

import dataclasses
import math

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.base.errors import ArgumentError
from treadle.base.origin import Origin
from treadle.ir.control import CALL, SCAN, Call, Scan
from treadle.ir.graph import Graph, GraphBuilder, Node, Output, Value
from treadle.ir.literal import ArrayLiteral
from treadle.ir.op import Attributes, Precision
from treadle.ir.ops.elementwise import CAST, Cast
from treadle.ir.ops.leaves import CONSTANT, PARAMETER, Constant, Leaf
from treadle.ir.ops.linear import Contraction
from treadle.ir.rewrite import remove_dead_code


def apply_precision(graph: Graph, precision: DType) -> Graph:
    """The graph with float32 work done in `precision` where the op table says so.

    NARROW ops (products, attention, convolution) compute narrow and accumulate in float32. WIDEN
    ops (norms, softmax, losses, reductions) compute in float32. FOLLOW ops compute in what reaches
    them, parameters and constants adapting. FIRST ops take what there is and give back what their
    first operand is. float32 and float64 change nothing. A float8 is bfloat16 here: which products
    are narrower is decided afterwards, and only where a step trains (`float8`).
    """
    if precision in dtypes.FLOAT8:
        return apply_precision(graph, dtypes.bfloat16)
    if not precision.is_float:
        raise ArgumentError("precision", f"{precision} is not a float", "Use bfloat16 or float16.")
    if not precision.is_narrow:
        return graph
    return remove_dead_code(_Narrowing(graph, precision).run())


class _Narrowing:
    """One walk over a graph; `moved` holds each old node's new outputs."""

    def __init__(self, graph: Graph, narrow: DType):
        self.graph = graph
        self.narrow = narrow
        self.builder = GraphBuilder()
        self.moved: list[tuple[Value, ...]] = []

    def run(self) -> Graph:
        for node in self.graph.nodes:
            self.moved.append(self._move(node))
        outputs = []
        for output in self.graph.outputs:
            original = self.graph.type_of(output.value).dtype
            origin = self.graph.nodes[output.value.node].origin
            value = self._cast(self._new(output.value), original, origin)
            outputs.append(Output(output.kind, output.name, value))
        return self.builder.build(outputs, self.graph.name)

    def _move(self, node: Node) -> tuple[Value, ...]:
        if isinstance(node.attributes, Leaf):
            return self.builder.add(node.op, node.attributes, (), node.origin)
        if node.op in (CALL, SCAN):
            operands = [self._original(v, node.origin) for v in node.operands]
            return self.builder.add(node.op, self._inside(node.attributes), operands, node.origin)
        if node.op is CAST:
            assert isinstance(node.attributes, Cast)
            return (self._cast(self._new(node.operands[0]), node.attributes.dtype, node.origin),)
        if node.op.precision is Precision.FIRST:
            given = [self._new(v) for v in node.operands]
            return self.builder.add(node.op, node.attributes, given, node.origin)
        dtype = self._dtype_for(node)
        operands = [self._operand(v, dtype, node.origin) for v in node.operands]
        return self.builder.add(node.op, _retyped(node.attributes, dtype), operands, node.origin)

    def _inside(self, attributes: Attributes) -> Attributes:
        """Bodies are narrowed inside and keep their interface."""
        assert isinstance(attributes, Call | Scan)
        return dataclasses.replace(attributes, body=apply_precision(attributes.body, self.narrow))

    def _dtype_for(self, node: Node) -> DType:
        """What the float32 operands of a node become."""
        match node.op.precision:
            case Precision.NARROW:
                return self.narrow
            case Precision.WIDEN:
                return dtypes.float32
            case Precision.FOLLOW | Precision.FIRST:
                return self._followed(node)

    def _followed(self, node: Node) -> DType:
        """Narrow unless something wide arrives; parameters count as narrow, constants not."""
        arriving = [v for v in node.operands if self.graph.type_of(v).dtype is dtypes.float32]
        ops = [self.graph.nodes[v.node].op for v in arriving]
        found = {
            self.builder.type_of(self._new(v)).dtype
            for v, op in zip(arriving, ops, strict=True)
            if op not in (PARAMETER, CONSTANT)
        }
        if dtypes.float32 in found or any(self._is_beyond(v) for v in arriving):
            return dtypes.float32
        return self.narrow if found or PARAMETER in ops else dtypes.float32

    def _is_beyond(self, value: Value) -> bool:
        """Whether it is a number that the narrow dtype has not: it would be infinite there."""
        constant = self.graph.nodes[value.node].attributes
        if not isinstance(constant, Constant) or isinstance(constant.value, ArrayLiteral):
            return False
        size = constant.value if constant.value > 0 else -constant.value
        return self.narrow.largest < size < math.inf

    def _operand(self, value: Value, dtype: DType, origin: Origin | None) -> Value:
        if self.graph.type_of(value).dtype is not dtypes.float32:
            return self._new(value)  # integers, bool, and floats the user chose
        return self._cast(self._new(value), dtype, origin)

    def _original(self, value: Value, origin: Origin | None) -> Value:
        return self._cast(self._new(value), self.graph.type_of(value).dtype, origin)

    def _new(self, value: Value) -> Value:
        return self.moved[value.node][value.output]

    def _cast(self, value: Value, dtype: DType, origin: Origin | None) -> Value:
        if self.builder.type_of(value).dtype is dtype:
            return value
        constant = self.builder.nodes[value.node].attributes
        if isinstance(constant, Constant) and isinstance(constant.value, int | float):
            # Numbers are exact until they are lowered, so the cast is the number in another dtype.
            typed = Constant(constant.value, constant.type.with_dtype(dtype))
            return self.builder.add(CONSTANT, typed, (), origin)[0]
        return self.builder.add(CAST, Cast(dtype), (value,), origin)[0]


def _retyped(attributes: Attributes, dtype: DType) -> Attributes:
    """A product's result follows its operands; it is accumulated in float32 and rounded once."""
    if isinstance(attributes, Contraction) and attributes.dtype is dtypes.float32:
        return Contraction(attributes.spec, dtype)
    return attributes
