"""Numbers that kernels have on the way, as values of a graph which nothing else in it reads.

Runs of a sort, where rows of a scattered sum begin, the zeros that another one begins with, and
sums and spreads of parts of a variance have no place in a graph that was compiled. A certificate
states a graph that has them too, behind its own nodes: as sorts of shorter lines, numbers of
smaller indices, constants, and sums. A kernel that reads them needs more of them than that they are
any numbers: that runs are in order, or that a spread is one of the same terms as a sum. So the
binding says what they are made of, which is any numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from treadle.base.dtypes import DType
from treadle.ir.graph import Graph, Node, Value
from treadle.ir.ops.reductions import SORT, TOP_K, Reduce, Sort, TopK
from treadle.kernel.bindings import SURE_SPREAD, Binding, Elements, Partial, Runs, Starts
from treadle.kernel.index import Index as KernelIndex
from treadle.kernel.index import variable
from treadle.kernel.states import is_call
from treadle.verify.certificate.graphs import Records, graph_record, number_record
from treadle.verify.certificate.reads import Index, Read, Reads, address, plain, plus, times, var

Shape = tuple[int, ...]
IndexRecord = Callable[[Any], Index]


class Stated:
    """A graph with further nodes; `bindings` are those of its scope."""

    def __init__(self, graph: Graph, bindings: Iterable[Binding], index_record: IndexRecord):
        self.graph, self.index_record = graph, index_record
        self.nodes: list[list[Any]] = []
        self.known: dict[object, list[Value]] = {}
        contents = [(b.value, b.content) for b in bindings]
        parts = [(v, c) for v, c in contents if isinstance(c, Partial) and c.op == "spread"]
        self.moments = {v for v, c in parts if _is_plain(c)}

    def record(self, records: Records) -> dict[str, Any]:
        found = graph_record(self.graph, records)
        return {**found, "nodes": [*found["nodes"], *self.nodes]}

    def value(self, b: Binding) -> tuple[Value, Elements | None, tuple[Value, ...]]:
        """The value that a buffer holds, where its elements are if they do not lie in order, and
        the values that are any numbers in its place, if it is not."""
        node, content = self.graph.nodes[b.value.node], b.content
        if is_call(b.scope):  # a definition is what its composite says, and nothing else
            return b.value, None, ()
        match content:
            case Runs():
                made = self._once((b.value.node, content.width), self._runs, node, content.width)
                return made[b.value.output], None, node.operands
            case Starts():
                index = node.operands[1]
                made = self._once(b.value.node, self._starts, index, node.types[0].shape[0])
                return made[0], None, self.graph.nodes[index.node].operands
            case Partial(elements, _, "add" | "spread" as op) if b.value in self.moments:
                made = self._once((b.value.node, elements), self._moments, node, content)
                at = Elements(elements.variables, elements.address, _along(elements))
                return made[op == "spread"], at, node.operands
        return b.value, None, node.operands if node.op in (SORT, TOP_K) else ()

    def zeros(self, value: Value) -> Value:
        """As many zeros as a value has elements."""
        type_ = self.graph.type_of(value)
        return self._once(type_, lambda: [self._number(0, type_.dtype.name, type_.shape)])[0]

    def _once(self, key: object, make: Callable[..., list[Value]], *given: Any) -> list[Value]:
        if key not in self.known:
            self.known[key] = make(*given)
        return self.known[key]

    def _add(
        self, op: str, attributes: dict[str, Any], operands: Sequence[Value], *types: Any
    ) -> Value:
        self.nodes.append([op, attributes, [list(v) for v in operands], plain(list(types)), -1])
        return Value(len(self.graph.nodes) + len(self.nodes) - 1)

    def _read(self, name: str, form: Reads, operands: Sequence[Value], dtype: DType) -> Value:
        value = number_record(form.value)
        type_ = [dtype.name, list(form.shape)]
        return self._add(form.op, form.record(name, dtype.name, value), operands, type_)

    def _number(self, value: int, dtype: str, shape: Shape) -> Value:
        type_ = [dtype, list(shape)]
        return self._add("constant", {"value": value, "type": plain(type_)}, (), type_)

    def _iota(self, axis: int, dtype: str, shape: Shape) -> Value:
        given = {"axis": axis, "shape": list(shape), "dtype": dtype}
        return self._add("iota", plain([given])[0], (), [dtype, list(shape)])

    def _elementwise(self, op: str, dtype: str, shape: Shape, *operands: Value) -> Value:
        return self._add(op, {}, operands, [dtype, list(shape)])

    # What there is

    def _runs(self, node: Node, width: int) -> list[Value]:
        """Lines in runs of a width, each in order, and where along the line elements were; lines
        are one after another."""
        a, (x,) = node.attributes, node.operands
        assert isinstance(a, Sort | TopK)
        is_down = a.descending if isinstance(a, Sort) else a.largest
        type_ = self.graph.type_of(x)
        outer, n, step = (math.prod(s) for s in _around(type_.shape, a.axis))
        count = -(-n // width)
        shape, whole = (outer, step, count, width), (outer, step, n)
        place = plus(var(2, width), var(3))
        at = plus(var(0, n * step), var(1), times(place, step))
        guards = [(place, 0, n)] if count * width > n else []
        filled = Reads(shape, ((guards, at),), value=_last(type_.dtype, is_down))
        lines = self._read("runs", filled, [x], type_.dtype)
        given = {
            "name": "runs", "shape": plain(list(shape)), "step": 1, "length": width,
            "asked": width, "descending": is_down, "places": [False, True],
        }  # fmt: skip
        types = [[dtype, list(shape)] for dtype in (type_.dtype.name, "int32")]
        ordered = self._add("order", given, [lines], *types)
        first = self._iota(2, "int32", shape)
        first = self._elementwise("mul", "int32", shape, first, self._number(width, "int32", shape))
        places = self._elementwise("add", "int32", shape, Value(ordered.node, 1), first)
        back = plus(var(0, step * count * width), var(1, count * width), var(2))
        cut = Reads(whole, (([], back),))
        int32 = node.types[1].dtype
        return [
            self._read("runs", cut, [ordered], type_.dtype),
            self._read("runs", cut, [places], int32),
        ]

    def _starts(self, index: Value, size: int) -> list[Value]:
        """How many indices are less than each number up to a size."""
        type_ = self.graph.type_of(index)
        (n,), rows = type_.shape, size + 1
        shape = (rows, n)
        spread = self._read("starts", Reads(shape, (([], var(1)),)), [index], type_.dtype)
        wide = self._add("cast", {"dtype": "int64"}, [spread], ["int64", list(shape)])
        is_less = self._elementwise("lt", "bool", shape, wide, self._iota(0, "int64", shape))
        ones = self._add("cast", {"dtype": "int32"}, [is_less], ["int32", list(shape)])
        at = plus(var(0, n), var(1))
        form = Reads((rows,), (([], at),), (n,), op="reduce_sum")
        given = form.record("starts", "int32", 0)
        return [self._add("reduce_sum", given, [ones], ["int32", [rows]])]

    def _moments(self, node: Node, partial: Partial) -> list[Value]:
        """Sums of parts, and the sums of squared differences from each part's own mean."""
        (x,), a = node.operands, node.attributes
        assert isinstance(a, Reduce)
        type_ = self.graph.type_of(x)
        variables = (*partial.elements.variables, *partial.summed)
        names = {v.name: str(i) for i, v in enumerate(variables)}
        index = [_renamed(self.index_record(i), names) for i in partial.elements.element]
        at = address(type_.shape, index)
        shape = tuple(v.extent for v in partial.elements.variables)
        over = tuple(v.extent for v in partial.summed)
        whole, name, dtype = (*shape, *over), type_.dtype.name, type_.dtype
        kept = [var(i) for i in range(len(shape))]
        every = [var(i) for i in range(len(whole))]
        added = Reads(shape, (([], at),), over, op="reduce_sum")
        sums = self._read("sums", added, [x], dtype)
        terms = self._read("terms", Reads(whole, (([], at),)), [x], dtype)
        spread = Reads(whole, (([], address(shape, kept)),))
        total = self._read("sums", spread, [sums], dtype)
        count = self._number(math.prod(over), name, whole)
        mean = self._elementwise("div", name, whole, total, count)
        gap = self._elementwise("sub", name, whole, terms, mean)
        term: Read = ([], address(whole, every))
        squares = Reads(shape, (term, term), over, operands=(0, 1), op="reduce_sum")
        return [sums, self._read("spreads", squares, [gap, gap], dtype)]


def _is_plain(content: Partial) -> bool:
    """Whether a spread is what its terms give over the reals, without anything against rounding."""
    terms = math.prod(v.extent for v in content.summed)
    return not content.elements.guards and terms <= SURE_SPREAD


def _along(elements: Elements) -> tuple[KernelIndex, ...]:
    """Each part is the element at its variables."""
    return tuple(variable(v) for v in elements.variables)


def _around(shape: Shape, axis: int) -> tuple[Shape, Shape, Shape]:
    return shape[:axis], shape[axis : axis + 1], shape[axis + 1 :]


def _last(dtype: DType, is_down: bool) -> int | float:
    """What comes last in an order."""
    if dtype.is_float:
        return -math.inf if is_down else math.inf
    return dtype.range()[not is_down]


def _renamed(index: Index, names: dict[str, str]) -> Index:
    """An index over other variables."""

    def atom(given: Any) -> Any:
        if isinstance(given, str):
            return names[given]
        kind, of, size = given
        return [kind, _renamed(of, names), size]

    return [index[0], *([factor, atom(a)] for factor, a in index[1:])]
