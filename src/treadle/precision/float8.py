"""float8 products: matmuls of weights read floats of 8 bits, with scales from past steps.

Two passes around differentiation. Before it, `with_float8` replaces each product of a weight by a
call whose body, and whose backward, round their operands to 8 bits: values and weights to e4m3,
gradients to e5m2. After it, `with_history` notes the largest element of everything that was rounded
in the step's state, from which the next steps take their scales.

Scales are powers of two: multiplying by them is exact, so that all devices round the same numbers.
A product is accumulated in float32, rounded to bfloat16, and only then divided by the scales, which
changes no bit of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from treadle.base import dtypes
from treadle.base.dtypes import DType, bfloat16, float8_e4m3, float8_e5m2, float32
from treadle.frontend.coerce import cast, literal
from treadle.frontend.functions.arithmetic import abs as absolute
from treadle.frontend.functions.arithmetic import gt, isfinite, le, where
from treadle.frontend.functions.linear import contract
from treadle.frontend.functions.reductions import max as largest_of
from treadle.frontend.functions.reductions import min as least_of
from treadle.frontend.functions.shaping import concat, expand, reshape, slice_along
from treadle.frontend.scopes import Trace, isolated_tracing
from treadle.frontend.tensor import Tensor
from treadle.ir.control import CALL, Call
from treadle.ir.graph import Graph, Node, Output, OutputKind, Value
from treadle.ir.ops.elementwise import CAST, MUL, Cast
from treadle.ir.ops.leaves import PARAMETER, STATE
from treadle.ir.ops.linear import Contraction
from treadle.ir.ops.shaping import BROADCAST, PERMUTE, RESHAPE, Slice
from treadle.ir.rewrite import copied, inline_into, remove_dead_code, walk
from treadle.ir.types import TensorType

NAME = "float8"  # of calls
HISTORY = 16  # steps whose largest elements a scale is chosen for
WHOLE, LEAST = 16, 64  # features of a weight are a multiple of one, and no fewer than the other
LIMIT = 40  # scales are 2⁻⁴⁰ to 2⁴⁰
# Scales of what has no history yet: activations and weights, which are often between 2⁻¹³ and 28,
# and gradients of a mean, between 2⁻³² and 0.9.
FIRST = {float8_e4m3: 2.0**4, float8_e5m2: 2.0**16}


@dataclass(frozen=True, slots=True)
class _Slots:
    """The columns of the history that belong to a product's activation, weight and gradient."""

    activation: int
    weight: int
    gradient: int


@dataclass(frozen=True, slots=True)
class _Scales:
    """A power of two for each column of the history, and one over it."""

    scales: Tensor  # (columns,)
    inverses: Tensor


def with_float8(graph: Graph, history: str) -> Graph:
    """A bfloat16 graph whose products of weights are float8 calls; `history` names their state.

    The last products, from which no other product of a weight is reached, stay bfloat16, as do
    those inside of scans, calls and checkpoints, and those of few or odd features.
    """
    products = _products(graph)
    if not products:
        return graph
    columns = _columns(graph, products)
    with isolated_tracing(graph.name) as trace:
        given = trace.leaf(STATE, history, TensorType((HISTORY, len(columns))))
        scales = _scales(given, columns)

        def visit(position: int, operands: tuple[Value, ...]) -> tuple[Value, ...]:
            node = graph.nodes[position]
            if position not in products:
                return copied(trace.builder, node, operands)
            call = _call(graph, node, products[position], len(columns))
            also = scales.scales.handle, scales.inverses.handle
            return trace.builder.add(CALL, call, (*operands, *also), node.origin)

        values = walk(graph, visit)
        outputs = [Output(o.kind, o.name, v) for o, v in zip(graph.outputs, values, strict=True)]
        return remove_dead_code(trace.finish_outputs(outputs))


def _products(graph: Graph) -> dict[int, _Slots]:
    """Contractions that are to be float8, by position, and their columns of the history."""
    every = {i: w for i, n in enumerate(graph.nodes) if (w := _weight_of(graph, n)) is not None}
    leads: set[int] = set()  # to another product of a weight
    for position in range(len(graph.nodes) - 1, -1, -1):
        if position in every or position in leads:
            leads.update(v.node for v in graph.nodes[position].operands)
    columns: dict[tuple[Value, bool], int] = {}
    found: dict[int, _Slots] = {}
    for position, weight in every.items():
        node = graph.nodes[position]
        if position in leads and _is_whole(graph, node, weight):
            own = [columns.setdefault((v, False), len(columns)) for v in node.operands]
            gradient = columns.setdefault((Value(position), True), len(columns))
            found[position] = _Slots(own[1 - weight], own[weight], gradient)
    return found


def _weight_of(graph: Graph, node: Node) -> int | None:
    """Which operand of a bfloat16 product without batch axes is a parameter."""
    if not isinstance(node.attributes, Contraction) or node.types[0].dtype is not bfloat16:
        return None
    x, y, result = map(set, node.attributes.labels)
    is_batched = bool(x & y & result)
    found = [i for i, v in enumerate(node.operands) if _is_parameter(graph, v)]
    return found[0] if len(found) == 1 and not is_batched else None


def _is_parameter(graph: Graph, value: Value) -> bool:
    node = graph.nodes[value.node]
    while node.op in (PERMUTE, RESHAPE, CAST):
        node = graph.nodes[node.operands[0].node]
    return node.op is PARAMETER


def _is_whole(graph: Graph, node: Node, weight: int) -> bool:
    """Whether a weight has as many features, in and out, as 8-bit units multiply."""
    assert isinstance(node.attributes, Contraction)
    labels, result = node.attributes.labels[weight], node.attributes.labels[2]
    shape = graph.type_of(node.operands[weight]).shape
    features = {True: 1, False: 1}
    for label, n in zip(labels, shape, strict=True):
        features[label in result] *= n
    return all(n >= LEAST and n % WHOLE == 0 for n in features.values())


def _columns(graph: Graph, products: Mapping[int, _Slots]) -> list[DType]:
    """What each column of the history is rounded to."""
    found: dict[int, DType] = {}
    for slots in products.values():
        found |= {slots.activation: float8_e4m3, slots.weight: float8_e4m3}
        found[slots.gradient] = float8_e5m2
    return [found[i] for i in range(len(found))]


def _scales(history: Tensor, columns: list[DType]) -> _Scales:
    """The largest powers of two that keep what was largest in the range of each column."""
    recent = largest_of(history, 0)
    limits = literal(np.array([d.largest for d in columns], np.float32))
    first = np.array([FIRST[d] for d in columns], np.float32)
    powers = np.exp2(np.arange(-LIMIT, LIMIT + 1, dtype=np.float32))
    fits = le(literal(powers)[:, None] * recent[None, :], limits[None, :])
    up = largest_of(where(fits, literal(powers)[:, None], 2.0**-LIMIT), 0)
    down = least_of(where(fits, literal(1 / powers)[:, None], 2.0**LIMIT), 0)
    is_known = gt(recent, 0)
    return _Scales(where(is_known, up, literal(first)), where(is_known, down, literal(1 / first)))


def _call(graph: Graph, node: Node, slots: _Slots, columns: int) -> Call:
    """A product as a call of operands, scales and their inverses."""
    assert isinstance(node.attributes, Contraction)
    labels = node.attributes.labels
    vector = TensorType((columns,), float32)
    types = (*map(graph.type_of, node.operands), vector, vector)
    is_first = _weight_of(graph, node) == 0
    own = (slots.weight, slots.activation) if is_first else (slots.activation, slots.weight)
    with isolated_tracing(NAME) as trace:
        x, y, scales, inverses = (trace.input(str(i), t) for i, t in enumerate(types))
        given = _Scales(scales, inverses)
        sides = [_Rounded.of(v, float8_e4m3, i, given) for v, i in zip((x, y), own, strict=True)]
        body = _built(trace, [_product(sides[0], sides[1], labels)])
    with isolated_tracing(f"{NAME}.vjp") as trace:
        ct, _ = (trace.input(n, node.types[0]) for n in ("ct", "result"))
        x, y, scales, inverses = (trace.input(str(i), t) for i, t in enumerate(types))
        given = _Scales(scales, inverses)
        sides = [_Rounded.of(v, float8_e4m3, i, given) for v, i in zip((x, y), own, strict=True)]
        gradient = _Rounded.of(ct, float8_e5m2, slots.gradient, given)
        lx, ly, lr = labels
        of_x = _product(gradient, sides[1], (lr, ly, lx))
        backward = _built(trace, [of_x, _product(gradient, sides[0], (lr, lx, ly))])
    return Call(body, NAME, backward=backward)


@dataclass(frozen=True, slots=True)
class _Rounded:
    """A tensor times its scale in 8 bits, and one over the scale."""

    tensor: Tensor
    inverse: Tensor  # ()

    @staticmethod
    def of(x: Tensor, dtype: DType, column: int, given: _Scales) -> _Rounded:
        scale, inverse = (_number(v, column) for v in (given.scales, given.inverses))
        return _Rounded(cast(x * expand(scale, x.shape), dtype), inverse)


def _number(vector: Tensor, column: int) -> Tensor:
    return cast(reshape(slice_along(vector, 0, column, column + 1), ()), bfloat16)


def _product(left: _Rounded, right: _Rounded, labels: tuple[str, str, str]) -> Tensor:
    sums = contract(left.tensor, right.tensor, labels, bfloat16)
    return sums * expand(left.inverse, sums.shape) * expand(right.inverse, sums.shape)


def _built(trace: Trace, results: list[Tensor]) -> Graph:
    outputs = [Output(OutputKind.RESULT, str(i), t.handle) for i, t in enumerate(results)]
    return trace.finish_outputs(outputs)


def with_history(graph: Graph, history: str) -> Graph:
    """The differentiated graph with its float8 calls inlined, and the next history as an update."""
    if history not in graph.leaves:
        return graph
    with isolated_tracing(graph.name) as trace:
        largest = _Largest(trace)

        def visit(position: int, operands: tuple[Value, ...]) -> tuple[Value, ...]:
            node = graph.nodes[position]
            if isinstance(node.attributes, Call) and node.attributes.name == NAME:
                given = {str(i): v for i, v in enumerate(operands)}
                values = tuple(inline_into(trace.builder, node.attributes.body, given))
            else:
                values = copied(trace.builder, node, operands)
            largest.look()
            return values

        values = walk(graph, visit)
        outputs = [Output(o.kind, o.name, v) for o, v in zip(graph.outputs, values, strict=True)]
        after = largest.remembered(graph.nodes[graph.leaves[history]])
        outputs.append(Output(OutputKind.UPDATE, history, after.handle))
        return remove_dead_code(trace.finish_outputs(outputs))


class _Largest:
    """The largest elements of what a trace rounds to 8 bits, by column of the history.

    They are found where the rounding is, so that one kernel does both.
    """

    def __init__(self, trace: Trace):
        self.trace, self.seen = trace, 0
        self.found: dict[int, Tensor] = {}  # (1,)

    def look(self) -> None:
        """At the nodes that are new: x of cast(x · broadcast(scales[column]))."""
        nodes, start = self.trace.builder.nodes, self.seen
        for node in nodes[start:]:
            if not isinstance(node.attributes, Cast) or node.attributes.dtype not in dtypes.FLOAT8:
                continue
            product = nodes[node.operands[0].node]
            assert product.op is MUL, product
            source = nodes[product.operands[1].node]
            while source.op in (BROADCAST, RESHAPE, CAST):
                source = nodes[source.operands[0].node]
            assert isinstance(source.attributes, Slice), source
            (column,) = source.attributes.starts
            if column not in self.found:
                self.found[column] = _largest(self.trace.tensor(product.operands[0]))
        self.seen = len(nodes)

    def remembered(self, leaf: Node) -> Tensor:
        """The history with this step's in front; what the step did not round is 0."""
        (type_,), nothing = leaf.types, np.zeros(1, np.float32)
        numbers = [self.found.get(i, nothing) for i in range(type_.shape[1])]
        newest = reshape(concat(numbers), (1, type_.shape[1]))
        (old,) = self.trace.builder.add(leaf.op, leaf.attributes, ())
        return concat([newest, slice_along(self.trace.tensor(old), 0, 0, HISTORY - 1)])


def _largest(x: Tensor) -> Tensor:
    """The largest size of an element, (1,); 0, which says nothing, if it is not finite."""
    # Row by row first: the kernel that rounds a row finds its largest element too.
    rows = largest_of(absolute(x), -1) if x.ndim > 1 else absolute(x)
    size = cast(largest_of(rows), float32)
    return reshape(where(isfinite(size), size, 0.0), (1,))
