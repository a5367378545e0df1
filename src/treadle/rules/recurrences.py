"""First-order linear recurrences in blocks: where there are few elements, iterations fill a device.

h' = a h + b, with a and b that read no carry and |a| ≤ 1, is affine in h, and so are several
iterations together: h ↦ p h + q. Blocks of iterations compute p and q side by side, a scan over
the blocks gives each the h that it begins with, and p h + q is then the carry after every
iteration. Blocks of √T of T iterations make 2 √T in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from treadle.base.dtypes import float32, float64
from treadle.ir.control import SCAN, Scan
from treadle.ir.graph import Graph, GraphBuilder, Output, OutputKind, Value
from treadle.ir.op import NONE, Op
from treadle.ir.ops import elementwise as e
from treadle.ir.ops.leaves import CONSTANT, INPUT, Constant, Leaf
from treadle.ir.ops.shaping import (
    BROADCAST,
    PAD,
    PERMUTE,
    RESHAPE,
    SLICE,
    Broadcast,
    Pad,
    Permute,
    Reshape,
    Slice,
)
from treadle.ir.types import TensorType
from treadle.kernel.target import Target
from treadle.rules.driver import rewrite
from treadle.rules.pattern import apply
from treadle.rules.ranges import ANY, Range, range_of
from treadle.rules.rule import Body, Exactness, Match, Rule, RuleSet
from treadle.rules.scans import AllAtOnce, Around, Iteration, iteration_of


def _rates(at: Iteration, carry: Value, value: Value) -> list[Value] | None:
    """What a carry is multiplied by on the way to its next value, element by element.

    None where that is not ± a · b · … · carry + rest, or another carry is in it. A choice is none:
    where a carry is not chosen, what it is counts for nothing, were it NaN.
    """
    if value == carry:
        return []
    node = at.body.nodes[value.node]
    reads = [v for v in node.operands if v.node in at.from_carries]
    if len(reads) != 1 or value in at.carries or node.types[0] != at.body.type_of(carry):
        return None
    if node.op not in (e.ADD, e.SUB, e.MUL, e.NEG):
        return None
    found = _rates(at, carry, reads[0])
    if found is None or node.op is not e.MUL:
        return found
    return [*found, *(v for v in node.operands if v != reads[0])]


def _decays(match: Match, at: Iteration, rate: Value) -> bool:
    """Whether a rate is never beyond ±1: products of many neither grow nor overflow."""
    given = dict(zip(at.inputs, match.root.operands, strict=True))

    def outside(value: Value) -> Range:
        if value not in given or value in at.carries:
            return ANY
        return range_of(match.graph, given[value], lambda _: ANY)

    low, high = range_of(at.body, rate, outside)
    return low >= -1 and high <= 1


def _is_linear(match: Match, at: Iteration) -> bool:
    """Whether every carry decays by itself alone, and only carries are stacked."""
    types = [at.body.type_of(v) for v in at.carries]
    if any(t.dtype not in (float32, float64) for t in types):
        return False
    told = {*at.carries, *at.next}
    if any(v not in told for v in at.stacked) or at.scan.recompute:
        return False
    if any(v.node not in at.from_carries for v in at.next):
        return False
    independent = [
        v for n in at.to_carries if n in at.from_carries for v in at.body.nodes[n].operands
    ]
    if any(v.node not in at.from_carries and at.sources(v) is None for v in independent):
        return False
    rates = [_rates(at, c, n) for c, n in zip(at.carries, at.next, strict=True)]
    return all(r is not None and all(_decays(match, at, v) for v in r) for r in rates)


def is_narrow(match: Match) -> bool:
    """carries are h' = a h + b with |a| ≤ 1, of few elements, over many iterations: a GPU idles"""
    scan, sizes = match.root.attributes, match.target.rewriting
    assert isinstance(scan, Scan)
    if scan.length < sizes.least_blocked_scan or not scan.carries:
        return False
    at = iteration_of(match)
    elements = [at.body.type_of(v).size for v in at.carries]
    return 0 < max(elements) <= sizes.most_blocked_scan and _is_linear(match, at)


Stack = Callable[[Value], Value]  # a value of the body that reads no carry, for all iterations


class _Affine:
    """Coefficients of the values of one iteration in a carry, for all iterations at once."""

    def __init__(self, builder: GraphBuilder, at: Iteration, carry: Value, stack: Stack):
        self.builder, self.at, self.carry, self._stack = builder, at, carry, stack
        self.type = at.body.type_of(carry)
        self.type = self.type.with_shape((at.scan.length, *self.type.shape))

    def of(self, value: Value) -> tuple[Value | None, Value | None]:
        """The factor and the rest; None for a factor of 0, or a rest of 0."""
        if value == self.carry:
            return number(self.builder, 1, self.type), None
        if value.node not in self.at.from_carries:
            return None, self._stack(value)
        node = self.at.body.nodes[value.node]
        if node.op is e.MUL:
            return self._scaled(*node.operands)
        parts = [self.of(v) for v in node.operands]
        first, second = (self._sum(node.op, list(p)) for p in zip(*parts, strict=True))
        return first, second

    def _scaled(self, x: Value, y: Value) -> tuple[Value | None, Value | None]:
        if x.node not in self.at.from_carries:
            x, y = y, x  # a product, of which the second reads the carry
        scale = self._stack(y)
        first, second = (
            None if v is None else add(self.builder, e.MUL, v, scale) for v in self.of(x)
        )
        return first, second

    def _sum(self, op: Op, parts: list[Value | None]) -> Value | None:
        x, y = parts[0], parts[-1] if len(parts) == 2 else None
        if op is e.NEG:
            return None if x is None else add(self.builder, e.NEG, x)
        if y is None:
            return x
        if x is None:
            return add(self.builder, e.NEG, y) if op is e.SUB else y
        return add(self.builder, op, x, y)


def add(builder: GraphBuilder, op: Op, *operands: Value) -> Value:
    return builder.add(op, NONE, operands)[0]


def number(builder: GraphBuilder, value: int, type_: TensorType) -> Value:
    return builder.add(CONSTANT, Constant(value, type_), ())[0]


@dataclass(frozen=True)
class _Blocks:
    """How iterations are cut: into blocks, of as many iterations each."""

    length: int
    blocks: int
    each: int
    is_reverse: bool

    @classmethod
    def of(cls, scan: Scan) -> _Blocks:
        each = 1 << (scan.length.bit_length() // 2)
        return cls(scan.length, -(-scan.length // each), each, scan.reverse)

    def apart(self, builder: GraphBuilder, x: Value, filling: int) -> Value:
        """(T, …) as (iterations of a block, blocks, …); what is added changes no carry."""
        shape = builder.type_of(x).shape[1:]
        none, more = (0,) * len(shape), self.blocks * self.each - self.length
        if more:
            (x,) = builder.add(PAD, Pad((0, *none), (more, *none), (0, *none), filling), (x,))
        (x,) = builder.add(RESHAPE, Reshape((self.blocks, self.each, *shape)), (x,))
        return self._swapped(builder, x)

    def together(self, builder: GraphBuilder, x: Value) -> Value:
        """What `apart` did, undone."""
        x = self._swapped(builder, x)
        shape = builder.type_of(x).shape[2:]
        (x,) = builder.add(RESHAPE, Reshape((self.blocks * self.each, *shape)), (x,))
        if self.blocks * self.each == self.length:
            return x
        starts, strides = (0,) * (1 + len(shape)), (1,) * (1 + len(shape))
        return builder.add(SLICE, Slice(starts, (self.length, *shape), strides), (x,))[0]

    def _swapped(self, builder: GraphBuilder, x: Value) -> Value:
        rank = len(builder.type_of(x).shape)
        return builder.add(PERMUTE, Permute((1, 0, *range(2, rank))), (x,))[0]


def _step(type_: TensorType, with_factor: bool, gives_old: bool) -> Graph:
    """One iteration of h' = a h + b; with a factor, of p' = a p as well.

    Operands are the carries (p), h and the slices a, b.
    """
    inner = GraphBuilder()
    names = [*(["p"] if with_factor else []), "h", "a", "b"]
    given = {n: inner.add(INPUT, Leaf(n, type_), ())[0] for n in names}
    scaled = add(inner, e.MUL, given["a"], given["h"])
    following = [add(inner, e.ADD, scaled, given["b"])]
    if with_factor:
        following.insert(0, add(inner, e.MUL, given["a"], given["p"]))
    stacked = [given["h"]] if gives_old else following
    results = [*following, *stacked]
    outputs = [Output(OutputKind.RESULT, str(i), v) for i, v in enumerate(results)]
    return inner.build(outputs, "recurrence")


def _in_blocks(
    builder: GraphBuilder, cut: _Blocks, a: Value, b: Value, first: Value
) -> tuple[Value, Value]:
    """The last carry, and the stack of next ones, of h' = a h + b."""
    a, b = cut.apart(builder, a, 1), cut.apart(builder, b, 0)
    type_ = builder.type_of(first)
    side = type_.with_shape((cut.blocks, *type_.shape))
    inner = Scan(_step(side, True, False), 0, 2, cut.each, cut.is_reverse)
    start = number(builder, 1, side), number(builder, 0, side)
    p, q, ps, qs = builder.add(SCAN, inner, (*start, a, b))
    outer = Scan(_step(type_, False, True), 0, 1, cut.blocks, cut.is_reverse)
    last, begins = builder.add(SCAN, outer, (first, p, q))
    shape = builder.type_of(ps).shape
    spread = Broadcast(shape, tuple(range(1, len(shape))))
    (begins,) = builder.add(BROADCAST, spread, (begins,))
    every = add(builder, e.ADD, add(builder, e.MUL, ps, begins), qs)
    return last, cut.together(builder, every)


def _blocked(match: Match, builder: GraphBuilder) -> Body:
    at = iteration_of(match)
    around = Around(at)
    here, cut = around.builder, _Blocks.of(at.scan)
    every = AllAtOnce(around, at, {})
    last: list[Value] = []
    stacks: dict[Value, Value] = {}
    for carry, following in zip(at.carries, at.next, strict=True):
        affine = _Affine(here, at, carry, every.stack)
        a, b = affine.of(following)
        a = number(here, 0, affine.type) if a is None else a
        b = number(here, 0, affine.type) if b is None else b
        end, stack = _in_blocks(here, cut, a, b, around.given[carry])
        last.append(end)
        stacks[following] = stack
        stacks.setdefault(carry, around.moved_back(stack, around.given[carry]))
    return around.body([*last, *(stacks[v] for v in at.stacked)], match)


IN_BLOCKS = Rule(
    "linear_scan_in_blocks",
    "A first-order linear recurrence is one of its blocks, each of which begins where one ended.",
    apply(SCAN),
    _blocked,
    is_narrow,
    Exactness.ROUNDING,
)
RECURRENCES = RuleSet("recurrences", (IN_BLOCKS,))


def scans_in_blocks(graph: Graph, target: Target) -> Graph:
    """The graph with long linear recurrences of few elements in blocks."""
    if not target.rewriting.most_blocked_scan or not any(n.op is SCAN for n in graph.nodes):
        return graph
    return rewrite(graph, RECURRENCES, target)
