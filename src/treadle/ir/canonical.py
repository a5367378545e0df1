"""Plain canonicalisation: what holds bit for bit, whatever the numbers are.

Equal nodes are one because builders intern them. Here views of views become one view, views that
change nothing vanish, as do 1 · x, x / 1, x − 0 and − −x, and constants are folded where the result
is exact. x + 0 stays: it turns −0 into 0.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from treadle.ir.graph import Graph, GraphBuilder, Node, Output, Value
from treadle.ir.literal import ArrayLiteral, Number, to_numpy
from treadle.ir.op import RuleTable
from treadle.ir.ops import elementwise as e
from treadle.ir.ops import shaping
from treadle.ir.ops.leaves import CONSTANT, Constant
from treadle.ir.rewrite import remove_dead_code
from treadle.ir.types import TensorType

# A node with its operands in the new graph gives the value that takes its place, or None.
Rule = Callable[[GraphBuilder, Node, tuple[Value, ...]], Value | None]
SIMPLER: RuleTable[Rule] = RuleTable("simpler")


def canonicalise(graph: Graph) -> Graph:
    """An equal graph of at most as many nodes; bodies of scans and calls stay as they are."""
    builder = GraphBuilder()
    moved: list[tuple[Value, ...]] = []
    for node in graph.nodes:
        operands = tuple(moved[v.node][v.output] for v in node.operands)
        simple = SIMPLER[node.op](builder, node, operands) if node.op in SIMPLER else None
        if simple is not None:
            moved.append((simple,))
            continue
        position = builder.copy(node, operands)
        moved.append(tuple(Value(position, i) for i in range(len(node.types))))
    outputs = [Output(o.kind, o.name, moved[o.value.node][o.value.output]) for o in graph.outputs]
    return remove_dead_code(builder.build(outputs, graph.name))


def _number(builder: GraphBuilder, value: Value) -> Number | None:
    """The number that a value is everywhere, if it is a constant one."""
    attributes = builder.nodes[value.node].attributes
    if isinstance(attributes, Constant) and not isinstance(attributes.value, ArrayLiteral):
        return attributes.value
    return None


def _is(builder: GraphBuilder, value: Value, number: int) -> bool:
    """Whether a value is a number everywhere; −0 is not 0."""
    found = _number(builder, value)
    return found is not None and found == number and not str(found).startswith("-")


def _constant(builder: GraphBuilder, number: Number, type_: TensorType, node: Node) -> Value:
    return builder.add(CONSTANT, Constant(number, type_), (), node.origin)[0]


@SIMPLER(
    shaping.RESHAPE, shaping.PERMUTE, shaping.BROADCAST, shaping.SLICE, shaping.FLIP, shaping.PAD
)
def _view(builder: GraphBuilder, node: Node, operands: tuple[Value, ...]) -> Value | None:
    """A view of a number is the number; a view that changes nothing is what it looks at."""
    (x,) = operands
    number = _number(builder, x)
    is_filled = isinstance(node.attributes, shaping.Pad) and node.types[0].shape != (
        builder.type_of(x).shape
    )
    if number is not None and not is_filled:
        return _constant(builder, number, node.types[0], node)
    if _changes_nothing(node, builder.type_of(x)):
        return x
    inner = builder.nodes[x.node]
    if node.op is shaping.RESHAPE and inner.op is shaping.RESHAPE:
        if builder.type_of(inner.operands[0]) == node.types[0]:
            return inner.operands[0]
        return builder.add(node.op, node.attributes, inner.operands, node.origin)[0]
    if isinstance(node.attributes, shaping.Permute) and isinstance(
        inner.attributes, shaping.Permute
    ):
        axes = tuple(inner.attributes.axes[a] for a in node.attributes.axes)
        both = shaping.Permute(axes)
        position = builder.add(node.op, both, inner.operands, node.origin)[0]
        return inner.operands[0] if axes == tuple(range(len(axes))) else position
    return None


def _changes_nothing(node: Node, type_: TensorType) -> bool:
    match node.attributes:
        case shaping.Permute(axes):
            return axes == tuple(range(len(axes)))
        case shaping.Flip(axes):
            return not axes
        case _:
            return node.types[0] == type_ and node.op is not shaping.FLIP


@SIMPLER(e.CAST)
def _cast(builder: GraphBuilder, node: Node, operands: tuple[Value, ...]) -> Value | None:
    return operands[0] if builder.type_of(operands[0]) == node.types[0] else None


@SIMPLER(e.NEG)
def _neg(builder: GraphBuilder, node: Node, operands: tuple[Value, ...]) -> Value | None:
    inner = builder.nodes[operands[0].node]
    return inner.operands[0] if inner.op is e.NEG else None


@SIMPLER(e.MUL)
def _mul(builder: GraphBuilder, node: Node, operands: tuple[Value, ...]) -> Value | None:
    for one, other in (operands, operands[::-1]):
        if _is(builder, one, 1):
            return other
    return _folded(builder, node, operands, lambda a, b: a * b)


@SIMPLER(e.DIV)
def _div(builder: GraphBuilder, node: Node, operands: tuple[Value, ...]) -> Value | None:
    return operands[0] if _is(builder, operands[1], 1) else None


@SIMPLER(e.SUB)
def _sub(builder: GraphBuilder, node: Node, operands: tuple[Value, ...]) -> Value | None:
    if _is(builder, operands[1], 0):
        return operands[0]
    return _folded(builder, node, operands, lambda a, b: a - b)


@SIMPLER(e.ADD)
def _add(builder: GraphBuilder, node: Node, operands: tuple[Value, ...]) -> Value | None:
    return _folded(builder, node, operands, lambda a, b: a + b)


def _folded(
    builder: GraphBuilder,
    node: Node,
    operands: tuple[Value, ...],
    op: Callable[[Fraction, Fraction], Fraction],
) -> Value | None:
    """Two numbers as one, where both and the result are numbers of the dtype, and none is 0."""
    numbers = [_number(builder, v) for v in operands]
    type_ = node.types[0]
    exact = [_exact(n, type_) for n in numbers]
    if exact[0] is None or exact[1] is None:
        return None
    result = op(exact[0], exact[1])
    if not result or _exact(result, type_) is None:
        return None
    return _constant(builder, result, type_, node)


def _exact(number: Number | None, type_: TensorType) -> Fraction | None:
    """The number, if the dtype holds it as it is; zeros have a sign and are left alone."""
    if number is None or isinstance(number, bool) or not type_.is_float or not number:
        return None
    held = float(to_numpy(number, type_.dtype.numpy))
    if held != held or held in (float("inf"), float("-inf")):
        return None
    return Fraction(held) if Fraction(held) == Fraction(number) else None
