"""Whether a region is what is proposed for it: by normal form, or by exact evaluation."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations_with_replacement

import numpy as np

from treadle.base.dtypes import DType
from treadle.base.rewrites import Exactness, Status
from treadle.domains.field import equal_graphs
from treadle.domains.index_ranges import asks_the_same
from treadle.ir.graph import Graph, GraphBuilder, Output, Value
from treadle.ir.literal import ArrayLiteral
from treadle.ir.ops import elementwise as e
from treadle.ir.ops.indexing import GATHER, Gather
from treadle.ir.ops.leaves import CONSTANT, INPUT, Constant, Leaf
from treadle.ir.ops.linear import CONTRACT, Contraction
from treadle.ir.ops.reductions import Reduce
from treadle.ir.ops.shaping import RESHAPE, Reshape
from treadle.ir.rewrite import Visit, copied, inline_into, walk
from treadle.recognition.meanings import over_reals
from treadle.recognition.regions import numbers_of
from treadle.recognition.scores import HIDES
from treadle.recognition.unflattened import unflattened
from treadle.recognition.unmerged import unmerged
from treadle.rules.expansion import expand
from treadle.verify import normal_form
from treadle.verify.normal_form import Assumption, decide

ALLOWED = normal_form.EXACT | {Assumption.ROUNDED_CONSTANTS}
UNEQUAL = "the normal forms differ"
MOST_ULPS = 2  # between two constants that are taken for the same number
MOST_ELEMENTS = 1 << 20  # of all tensors of a region that is evaluated: chosen, 0.1 s
MOST_PRODUCTS = 1 << 24
ELEMENTS_OF_A_PRODUCT = 256  # evaluated in the time of a product of atoms: 0.1 s and 25 µs above
MOST_LOGARITHMS = 256  # 0.02 s each time: one is found by a thousand steps


@dataclass(frozen=True, slots=True)
class Verdict:
    """Two graphs are equal: of which class, and how that is known."""

    kind: Exactness
    status: Status


def judge(region: Graph, proposal: Graph) -> Verdict | None:
    """How a region is known to be what is proposed; None where it is not, or not known to be.

    Values behind a `stop_gradient` of the region are inputs of their own: what does not depend on
    them at all has the gradient of what does not stop it.

    Elements are compared for indices in range alone. What is out of range must be so in both: a
    label that the region masks is none that its composite may refuse.
    """
    if rounds(region) or not asks_the_same(region, proposal, is_part=True):
        return None
    left = unflattened(unmerged(expand(over_reals(unstopped(without_ones(region))))))
    right = unmerged(expand(over_reals(without_ones(proposal))))
    verdict = _equal(left, right)
    if verdict is None:
        nearby = snapped(left, right)
        found = None if nearby is None else _equal(nearby, right, normal_form.EXACT)
        return None if found is None else replace(found, kind=Exactness.ROUNDED)
    return verdict


def sums_nothing(proposal: Graph) -> bool:
    """Whether all reductions of a proposal are along one element.

    Softmax of one element is 1 whatever it is, and so is much else: what is equal there says
    nothing of what was written.
    """
    graph = expand(proposal)
    lengths = [
        math.prod(graph.type_of(n.operands[0]).shape[a] for a in n.attributes.axes)
        for n in graph.nodes
        if isinstance(n.attributes, Reduce)
    ]
    return bool(lengths) and max(lengths) == 1


def rounds(graph: Graph) -> bool:
    """Whether something is cast to a narrower float and right back, which only rounds it.

    Over the reals that is nothing; whoever writes it means it.
    """
    for node in graph.nodes:
        inner = graph.nodes[node.operands[0].node] if node.op is e.CAST else node
        if inner is not node and inner.op is e.CAST and node.types[0].is_float:
            first, narrow = graph.type_of(inner.operands[0]), inner.types[0]
            if first.is_float and narrow.is_float and narrow.dtype.bits < first.dtype.bits:
                return True
    return False


def _equal(left: Graph, right: Graph, allowed: frozenset[Assumption] = ALLOWED) -> Verdict | None:
    """Proved by normal form, or where that takes too much, the same on random elements."""
    proof = normal_form.equal(left, right, allowed)
    if proof.is_proved:
        is_rounded = Assumption.ROUNDED_CONSTANTS in proof.assumptions
        return Verdict(Exactness.ROUNDED if is_rounded else Exactness.EXACT, Status.PROVED)
    if proof.reason == UNEQUAL or not _is_small(left) or not _is_small(right):
        return None
    decide.spend(sum(map(_elements, (left, right))) // ELEMENTS_OF_A_PRODUCT)
    is_same = equal_graphs(left, right, _indices(left, right))
    return Verdict(Exactness.EXACT, Status.TESTED) if is_same else None


def _indices(*graphs: Graph) -> dict[str, object]:
    """Integers and flags for every leaf that is not a float."""
    found: dict[str, object] = {}
    rng = np.random.default_rng(0)
    most = min((_classes(g) for g in graphs), default=2)
    for name, position in graphs[0].leaves.items():
        type_ = graphs[0].nodes[position].types[0]
        if not type_.is_float:
            bound = most if type_.dtype.is_integer else 2
            found[name] = rng.integers(0, bound, type_.shape).astype(type_.dtype.numpy)
    return found


def _classes(graph: Graph) -> int:
    """Elements of the shortest axis that something is taken from."""
    taken = [
        graph.type_of(n.operands[0]).shape[n.attributes.axis]
        for n in graph.nodes
        if n.op is GATHER and isinstance(n.attributes, Gather)
    ]
    return min(taken, default=2)


def _is_small(graph: Graph) -> bool:
    if sum(n.types[0].size for n in graph.nodes if n.op is e.LOG) > MOST_LOGARITHMS:
        return False
    return (
        _elements(graph) <= MOST_ELEMENTS
        and sum(map(_products, _contractions(graph))) <= MOST_PRODUCTS
    )


def _elements(graph: Graph) -> int:
    return sum(t.size for n in graph.nodes for t in n.types)


def _contractions(graph: Graph) -> Iterable[dict[str, int]]:
    for node in graph.nodes:
        if node.op is CONTRACT:
            assert isinstance(node.attributes, Contraction)
            of_x, of_y, _ = node.attributes.labels
            x, y = (graph.type_of(v).shape for v in node.operands)
            yield dict(zip(of_x, x, strict=True)) | dict(zip(of_y, y, strict=True))


def _products(sizes: dict[str, int]) -> int:
    return math.prod(sizes.values())


def without_ones(graph: Graph) -> Graph:
    """The graph with a result without axes of one element."""
    builder = GraphBuilder()
    (value,) = inline_into(builder, graph, {})
    shape = tuple(n for n in graph.output_types[0].shape if n != 1)
    if shape != graph.output_types[0].shape:
        (value,) = builder.add(RESHAPE, Reshape(shape), (value,))
    return builder.build([replace(graph.outputs[0], value=value)], graph.name)


def unstopped(graph: Graph) -> Graph:
    """The graph with an input in place of each `stop_gradient`."""
    if not any(n.op is e.STOP_GRADIENT for n in graph.nodes):
        return graph
    builder = GraphBuilder()

    def visit(position: int, operands: tuple[Value, ...]) -> tuple[Value, ...]:
        node = graph.nodes[position]
        if node.op is e.STOP_GRADIENT:
            return builder.add(INPUT, Leaf(f"stopped {position}", node.types[0]), ())
        return copied(builder, node, operands)

    return _walked(graph, builder, visit)


def _walked(graph: Graph, builder: GraphBuilder, visit: Visit) -> Graph:
    values = walk(graph, visit)
    outputs = [Output(o.kind, o.name, v) for o, v in zip(graph.outputs, values, strict=True)]
    return builder.build(outputs, graph.name)


def saturated(graph: Graph) -> Graph:
    """The graph with −∞ for every number that hides a score."""
    nodes = list(graph.nodes)
    for position, node in enumerate(nodes):
        value = node.attributes.value if isinstance(node.attributes, Constant) else None
        if isinstance(value, (int, float)) and node.types[0].is_float and value <= HIDES:
            nodes[position] = replace(node, attributes=Constant(-math.inf, node.types[0]))
    return replace(graph, nodes=tuple(nodes))


# What a float can hold: products of two constants may lie beyond.
LEAST, MOST = (Fraction(getattr(sys.float_info, end)) for end in ("min", "max"))


def snapped(graph: Graph, other: Graph) -> Graph | None:
    """The graph with constants that are nearly products of two of the other's made the same.

    None where there are none.
    """
    numbers = [n for n in numbers_of(other) if n != 0]
    nearby = {abs(n) for n in (*numbers, *(1 / n for n in numbers), *(1 - n for n in numbers))}
    products = {a * b for a, b in combinations_with_replacement(sorted(nearby), 2)}
    wanted = sorted(n for n in nearby | products if LEAST <= n <= MOST)
    nodes = list(graph.nodes)
    for position, node in enumerate(nodes):
        if node.op is CONSTANT and node.types[0].is_float:
            number = _snapped(node.attributes, wanted)
            if number is not None:
                nodes[position] = replace(node, attributes=Constant(number, node.types[0]))
    return replace(graph, nodes=tuple(nodes)) if nodes != list(graph.nodes) else None


def _snapped(attributes: object, wanted: list[Fraction]) -> Fraction | None:
    assert isinstance(attributes, Constant)
    value = attributes.value
    if isinstance(value, ArrayLiteral) or not math.isfinite(value) or value == int(value):
        return None
    exact = Fraction(value)
    near = [n for n in wanted if abs(abs(exact) - n) <= MOST_ULPS * _ulp(n, attributes.type.dtype)]
    if not near or abs(exact) in near:
        return None
    found = min(near, key=lambda n: abs(abs(exact) - n))
    return -found if exact < 0 else found


def _ulp(number: Fraction, dtype: DType) -> Fraction:
    """The distance of neighbouring floats there: of float32 for what is narrower."""
    bits = 52 if dtype.bits == 64 else 23
    return Fraction(2) ** (math.frexp(float(number))[1] - 1 - bits)
