"""Which numbers an integer input may have: those that every gather, one-hot and loss can take.

Inputs are followed forwards through a graph. On the way their elements are moved (reshapes, slices,
concatenation, the rows of a scan) and changed by functions that are linear in pieces (casts,
offsets, clamps, `where` on themselves). Where they arrive as indices, the interval that is right
there is taken back to the input. Of anything else nothing is claimed: an index that depends on two
inputs or on parameters, or a remainder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from treadle.base.dtypes import bool_
from treadle.base.origin import Origin
from treadle.domains import piecewise
from treadle.domains.moves import MOVES, Move, positions_after, rows_of, then
from treadle.domains.piecewise import Function, Intervals
from treadle.ir import composites as c
from treadle.ir.composites import definition_graph
from treadle.ir.control import Call, Scan
from treadle.ir.graph import Graph, Node, Value
from treadle.ir.literal import ArrayLiteral
from treadle.ir.op import Attributes, Op, RuleTable, Types
from treadle.ir.ops import elementwise as e
from treadle.ir.ops import indexing as i
from treadle.ir.ops import shaping as s
from treadle.ir.ops.leaves import CONSTANT, INPUT, IOTA, Constant, Iota, Leaf
from treadle.ir.types import TensorType


class IndexRange(NamedTuple):
    """The numbers that some elements of an input may have, and where they index."""

    leaf: str
    positions: np.ndarray | None  # flat, ascending; None: all of them
    allowed: Intervals
    op: str
    size: int  # how many things the index chooses from
    origin: Origin | None


class Source(NamedTuple):
    """Elements of an input that were moved and changed."""

    leaf: str
    moves: tuple[Move, ...]
    function: Function

    @property
    def place(self) -> tuple[object, ...]:
        """Equal for values whose elements come from the same element of the input."""
        return self.leaf, self.moves


@dataclass(frozen=True, slots=True)
class Fixed:
    """A constant, all of it between two numbers."""

    low: int
    high: int


Known = tuple[Source, ...] | Fixed | None  # several sources after a concatenation

# Position of the indices among the operands, and how many things they choose from.
_Sized = Callable[..., tuple[int, int]]
INDEXED: RuleTable[_Sized] = RuleTable("indices")


@INDEXED(i.GATHER)
def _gather(attributes: i.Gather, *types: TensorType) -> tuple[int, int]:
    return 1, types[0].shape[attributes.axis]


@INDEXED(i.SCATTER_ADD)
def _scatter_add(attributes: i.ScatterAdd, *types: TensorType) -> tuple[int, int]:
    return 1, attributes.size


@INDEXED(c.ONE_HOT)
def _one_hot(attributes: c.OneHot, *types: TensorType) -> tuple[int, int]:
    return 0, attributes.classes


@INDEXED(c.EMBEDDING)
def _embedding(*types: TensorType) -> tuple[int, int]:
    return 1, types[0].shape[0]


@INDEXED(c.CROSS_ENTROPY)
def _cross_entropy(attributes: c.CrossEntropy, *types: TensorType) -> tuple[int, int]:
    return 1, types[0].shape[-1]


@INDEXED(c.LINEAR_CROSS_ENTROPY)
def _linear_cross_entropy(attributes: c.HeadCrossEntropy, *types: TensorType) -> tuple[int, int]:
    return 2, types[1].shape[0]


@INDEXED(c.LINEAR_CROSS_ENTROPY_GRAD)
def _linear_cross_entropy_grad(
    attributes: c.HeadCrossEntropy, *types: TensorType
) -> tuple[int, int]:
    return 3, types[2].shape[0]


def index_ranges(graph: Graph, is_part: bool = False) -> tuple[IndexRange, ...]:
    """What a graph asks of its integer inputs, in the order of use.

    An input of a part of a graph may be an index of one axis that was checked outside.
    """
    walk = _Walk(is_part)
    given: dict[int, Known] = {}
    for at in graph.inputs:
        attributes, type_ = graph.nodes[at].attributes, graph.nodes[at].types[0]
        if isinstance(attributes, Leaf) and type_.dtype.is_integer and type_.size:
            given[at] = (Source(attributes.name, (), piecewise.identity(type_.dtype)),)
    if given:
        walk.through(graph, given, None)
    types = {name: graph.nodes[at].types[0] for name, at in graph.leaves.items()}
    placed = [_placed(key[1], claim, types[claim.leaf]) for key, claim in walk.claims.items()]
    return tuple(_merged([p for p in placed if p is not None], types))


def asks_the_same(a: Graph, b: Graph, is_part: bool = False) -> bool:
    """Whether two graphs of the same inputs allow the same numbers in each of their integers."""
    of_a, of_b = index_ranges(a, is_part), index_ranges(b, is_part)
    return all(any(_implies(y, x) for y in of_b) for x in of_a) and all(
        any(_implies(x, y) for x in of_a) for y in of_b
    )


# The walk


class _Walk:
    """Everything that is known of the values of a graph, and what is asked of inputs."""

    def __init__(self, is_part: bool) -> None:
        self.is_part = is_part
        self.claims: dict[tuple[str, tuple[Move, ...], Intervals], IndexRange] = {}
        self.scans = 0

    def through(self, graph: Graph, given: dict[int, Known], within: Node | None) -> list[Known]:
        """What is known of a graph's outputs; `within` is the composite that it defines."""
        known: dict[Value, Known] = {Value(at): k for at, k in given.items() if k is not None}
        for at, node in enumerate(graph.nodes):
            operands = [known.get(v) for v in node.operands]
            user = within or node  # whose line is not ours
            if node.op in INDEXED:
                self._ask(graph, node, user, known)
            if node.op is INPUT or (operands and all(k is None for k in operands)):
                continue
            for output, found in enumerate(self._results(graph, node, user, operands)):
                if found is not None:
                    known[Value(at, output)] = found
        return [known.get(o.value) for o in graph.outputs]

    def _results(
        self, graph: Graph, node: Node, user: Node, operands: Sequence[Known]
    ) -> Sequence[Known]:
        types = tuple(graph.type_of(v) for v in node.operands)
        if node.op is CONSTANT or node.op is IOTA:
            return (_fixed(node.attributes),)
        if node.op in MOVES:
            return (_moved(node, operands, types),)
        if node.op in _CHANGES:
            return (_changed(node, operands),)
        if not any(isinstance(k, tuple) for k in operands):
            return ()
        match node.attributes:
            case Call(body):
                return self._body(body, operands, None)
            case Scan() as scan if scan.length:
                self.scans += 1
                first = scan.constants + scan.carries
                rows = [_rows(k, t, self.scans) for k, t in zip(operands, types, strict=True)]
                self._body(scan.body, [*operands[:first], *rows[first:]], None)
                return ()  # carries and stacks of later steps
        if node.op.is_composite and node.op not in INDEXED:
            body = definition_graph(node.op, node.attributes, types)
            return self._body(body, operands, user)
        return ()

    def _body(self, body: Graph, operands: Sequence[Known], within: Node | None) -> list[Known]:
        return self.through(body, dict(zip(body.inputs, operands, strict=True)), within)

    def _ask(self, graph: Graph, node: Node, user: Node, known: dict[Value, Known]) -> None:
        """An index must lie in 0 … size − 1."""
        types = [graph.type_of(v) for v in node.operands]
        rule = INDEXED[node.op]
        at, size = rule(node.attributes, *types) if node.op.has_attributes else rule(*types)
        indices = node.operands[at]
        if not types[at].size:
            return
        is_sum = graph.nodes[indices.node].op is e.ADD
        digits = _digits(graph, indices, size, known, self.is_part) if is_sum else None
        for value, count in digits or [(indices, size)]:
            sources = known.get(value)
            for source in sources if isinstance(sources, tuple) else ():
                self._claim(source, count, user)

    def _claim(self, source: Source, size: int, node: Node) -> None:
        allowed = piecewise.preimage(source.function, 0, size - 1)
        key = source.leaf, source.moves, allowed
        claim = IndexRange(source.leaf, None, allowed, node.op.name, size, node.origin)
        self.claims[key] = _plainer(self.claims.get(key, claim), claim)


def _fixed(attributes: Attributes) -> Fixed | None:
    if isinstance(attributes, Iota):
        last = attributes.shape[attributes.axis] - 1
        return Fixed(0, last) if attributes.dtype.is_integer and last >= 0 else None
    assert isinstance(attributes, Constant)
    if attributes.type.dtype.is_float or not attributes.type.size:
        return None
    if isinstance(attributes.value, ArrayLiteral):
        array = attributes.value.array
        return Fixed(int(array.min()), int(array.max()))
    return Fixed(int(attributes.value), int(attributes.value))


# Moves


def _moved(node: Node, operands: Sequence[Known], types: Types) -> Known:
    fixed = [k for k in operands if isinstance(k, Fixed)]
    if len(fixed) == len(operands):
        return _hull(node.attributes, fixed)
    found: list[Source] = []
    for position, known in enumerate(operands):
        if isinstance(known, tuple):
            move = Move(node.op, node.attributes, position, types)
            found += [source._replace(moves=then(source.moves, move)) for source in known]
    return tuple(found) or None


def _hull(attributes: Attributes, fixed: Sequence[Fixed]) -> Fixed:
    ends = [*(k.low for k in fixed), *(k.high for k in fixed)]
    if isinstance(attributes, s.Pad):
        ends.append(int(attributes.value))
    return Fixed(min(ends), max(ends))


def _rows(known: Known, type_: TensorType, scan: int) -> Known:
    """A slice of a scan as its body sees it: every row."""
    if not isinstance(known, tuple):
        return known
    move = rows_of(type_, scan)
    return tuple(source._replace(moves=(*source.moves, move)) for source in known)


# Changes


def _absolute(f: Function) -> Function | None:
    negative = piecewise.sub(piecewise.constant(0, f), f)
    return None if negative is None else piecewise.larger(f, negative)


_CHANGES: dict[Op, Callable[..., Function | None]] = {
    e.CAST: lambda f: f,
    e.STOP_GRADIENT: lambda f: f,
    e.ADD: piecewise.add,
    e.SUB: piecewise.sub,
    e.MUL: piecewise.mul,
    e.NEG: lambda f: piecewise.sub(piecewise.constant(0, f), f),
    e.ABS: _absolute,
    e.MAX: piecewise.larger,
    e.MIN: piecewise.smaller,
    e.EQ: piecewise.equal,
    e.LT: piecewise.less,
    e.LE: piecewise.at_most,
    e.WHERE: piecewise.choose,
    e.NOT: lambda f: piecewise.sub(piecewise.constant(1, f), f),
    e.AND: piecewise.both,
    e.OR: piecewise.either,
}
_OF_FLAGS = frozenset([e.NOT, e.AND, e.OR])  # bitwise on integers, of which nothing is known


def _changed(node: Node, operands: Sequence[Known]) -> Known:
    """An elementwise op on elements of one place, and on numbers."""
    dtype = node.types[0].dtype
    if dtype.is_float or (node.op in _OF_FLAGS and dtype is not bool_):
        return None
    if node.op is e.CAST and isinstance(operands[0], Fixed):
        low, high = dtype.range()
        return operands[0] if low <= operands[0].low and operands[0].high <= high else None
    by_place: list[dict[tuple[object, ...], Source] | int] = []
    for known in operands:
        if isinstance(known, tuple):
            by_place.append({k.place: k for k in known})
        elif known is not None and known.low == known.high:
            by_place.append(known.low)
        else:
            return None
    tables = [t for t in by_place if isinstance(t, dict)]
    found: list[Source] = []
    for place, source in tables[0].items() if tables else ():
        if all(place in t for t in tables):
            functions = [
                piecewise.constant(t, source.function) if isinstance(t, int) else t[place].function
                for t in by_place
            ]
            function = _CHANGES[node.op](*functions)
            is_cast = node.op is e.CAST
            function = None if function is None else piecewise.held(function, dtype, is_cast)
            if function is not None:
                found.append(source._replace(function=function))
    return tuple(found) or None


# x[i, j]: one index into merged axes


def _digits(
    graph: Graph, value: Value, size: int, known: dict[Value, Known], is_part: bool
) -> list[tuple[Value, int]] | None:
    """Indices of several axes that were joined as i · n + j, with the size of each axis.

    Only where each counts from the end of its own axis if it is negative, as in `x[i, j]`, or is a
    constant, or an input of a part: what else is added up may be meant.
    """
    node = graph.nodes[value.node]
    if node.op is not e.ADD:
        is_digit = _is_digit(graph, value, size, known, is_part)
        return [(value, size)] if is_digit else None
    for high, low in (node.operands, node.operands[::-1]):
        product = graph.nodes[high.node]
        if product.op is not e.MUL:
            continue
        for index, factor in (product.operands, product.operands[::-1]):
            n = _number(known.get(factor))
            if n is None or n < 1 or size % n or not _is_digit(graph, low, n, known, is_part):
                continue
            rest = _digits(graph, index, size // n, known, is_part)
            if rest is not None:
                return [*rest, (low, n)]
    return None


def _number(known: Known) -> int | None:
    return known.low if isinstance(known, Fixed) and known.low == known.high else None


def _is_digit(
    graph: Graph, value: Value, size: int, known: dict[Value, Known], is_part: bool
) -> bool:
    """Whether an index is a constant in 0 … size − 1, where(i < 0, i + size, i), or given."""
    fixed = known.get(value)
    if isinstance(fixed, Fixed):
        return fixed.low >= 0 and fixed.high < size
    node = graph.nodes[value.node]
    if node.op in (s.BROADCAST, s.RESHAPE, e.CAST):
        return _is_digit(graph, node.operands[0], size, known, is_part)
    if node.op is INPUT:
        return is_part
    if node.op is not e.WHERE:
        return False
    condition, wrapped, index = node.operands
    below, sum_ = graph.nodes[condition.node], graph.nodes[wrapped.node]
    if below.op is not e.LT or sum_.op is not e.ADD or index not in sum_.operands:
        return False
    added = [_number(known.get(v)) for v in sum_.operands if v != index]
    return (
        below.operands[0] == index
        and _number(known.get(below.operands[1])) == 0
        and (added == [size])
    )


# What was found

_OF_GRADIENTS = frozenset([c.ONE_HOT.name, c.LINEAR_CROSS_ENTROPY_GRAD.name, i.SCATTER_ADD.name])


def _placed(moves: tuple[Move, ...], claim: IndexRange, type_: TensorType) -> IndexRange | None:
    """A claim with the elements it is about; None where it asks for nothing."""
    is_everything = claim.allowed == (type_.dtype.range(),)
    positions = None if is_everything else positions_after(type_, moves)
    if is_everything or (positions is not None and not len(positions)):
        return None
    return claim._replace(positions=positions)


def _merged(claims: Sequence[IndexRange], types: dict[str, TensorType]) -> list[IndexRange]:
    """Claims of the same numbers are one, about the elements of all; those that follow go."""
    found: dict[tuple[str, Intervals], IndexRange] = {}
    for claim in claims:
        key = claim.leaf, claim.allowed
        first = found.get(key, claim)
        positions = _union(first.positions, claim.positions, types[claim.leaf].size)
        found[key] = _plainer(first, claim)._replace(positions=positions)
    ranges = list(found.values())
    return [r for r in ranges if not any(_implies(other, r) for other in ranges if other is not r)]


def _plainer(a: IndexRange, b: IndexRange) -> IndexRange:
    """The one to tell of: gradients of losses and tables have ops that the user did not write."""
    return b if a.op in _OF_GRADIENTS and b.op not in _OF_GRADIENTS else a


def _union(a: np.ndarray | None, b: np.ndarray | None, size: int) -> np.ndarray | None:
    if a is None or b is None:
        return None
    both = np.union1d(a, b)
    return None if len(both) == size else both


def _implies(a: IndexRange, b: IndexRange) -> bool:
    """Whether a check of `a` makes one of `b` needless."""
    if a.leaf != b.leaf or not (a.positions is None or b.positions is not None):
        return False
    if (
        a.positions is not None
        and b.positions is not None
        and not np.isin(b.positions, a.positions).all()
    ):
        return False
    return all(any(lo >= x and hi <= y for x, y in b.allowed) for lo, hi in a.allowed)
