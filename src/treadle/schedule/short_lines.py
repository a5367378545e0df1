"""Short lines in order, each in the memory of a group of threads, by merging runs there."""

from __future__ import annotations

import math
from dataclasses import replace

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.ir.graph import Node
from treadle.ir.graph import Value as TensorValue
from treadle.kernel.index import Index, Var, constant, data, divide, variable
from treadle.kernel.nodes import (
    Buffer,
    For,
    Kernel,
    Let,
    Literal,
    Load,
    Local,
    Position,
    Role,
    Set,
    Statement,
    Value,
)
from treadle.schedule.lower import Lowering
from treadle.schedule.nests import apply, compare, parallel
from treadle.schedule.ordering import Line, Ordering, comes_before


def fits_group(lowering: Lowering, dtype: DType, n: int) -> bool:
    """Whether a group of threads has memory for a line while it is merged."""
    mapping, word = lowering.target.mapping, lowering.target.word
    assert mapping is not None
    nbytes = sum(side.values.held(word) + side.origins.held(word) for side in _near(dtype, n))
    return n <= mapping.sorted_row and nbytes <= mapping.shared_limit // 2


def _near(dtype: DType, n: int) -> list[Line]:
    """Both sides of a line that is merged in a group's own memory."""
    return [
        Line(Buffer(f"runs_{side}", dtype, n), Buffer(f"from_{side}", dtypes.int32, n))
        for side in "ab"
    ]


def sorted_in_group(lowering: Lowering, position: int, node: Node, order: Ordering) -> Kernel:
    """A line for each group of threads, which merges runs in its own memory."""
    results, axis = [TensorValue(position, i) for i in range(2)], order.axis
    source = lowering.graph.type_of(node.operands[0])
    n, others = source.shape[axis], source.shape[:axis] + source.shape[axis + 1 :]
    line = Var("line", math.prod(others))
    sides, reader = _near(source.dtype, n), lowering.reader()
    place = _unflattened(variable(line), others)

    def at(index: Index) -> list[Index]:
        return [*place[:axis], index, *place[axis:]]

    i = Var("i", n)
    element = reader.at(node.operands[0], tuple(at(variable(i))))
    first = sides[0].stores(variable(i), element, Position(variable(i), dtypes.int32))
    body: list[Statement] = [*parallel([i], [*reader.lets, *first])]
    rounds = (n - 1).bit_length()
    for round_ in range(rounds):
        one, other = sides[round_ % 2], sides[1 - round_ % 2]
        is_last = round_ == rounds - 1
        here = Var(f"at{round_}", order.size if is_last else n)
        lets, value, origin = _found_near(one, here, n, 1 << round_, order.descending)
        stores = other.stores(variable(here), value, origin)
        if is_last:
            pairs = zip(results, (value, origin), strict=True)
            stores = [lowering.store(v, at(variable(here)), x) for v, x in pairs]
        body += parallel([here], [*lets, *stores])
    kernel = lowering.kernel(position, reader, results, parallel([line], body))
    return replace(kernel, scratch=tuple(b for s in sides for b in (s.values, s.origins)))


def _found_near(
    runs: Line, at: Var, n: int, width: int, descending: bool
) -> tuple[list[Statement], Value, Value]:
    """As `_found`, with the search as a loop: a kernel has many of them, and compilers are slow."""

    def whole(name: str) -> Local:
        return Local(name, dtypes.int32)

    def number(value: int) -> Literal:
        return Literal(value, dtypes.int32)

    def load(at: Local) -> tuple[Load, Load]:
        return runs.loads(constant(0) + data(at.name, n))

    start, k, middle, end, left, most, step, more = map(
        whole, ("start", "k", "middle", "end", "left", "most", "step", "more")
    )
    last, next_, own, other = map(whole, ("last", "next", "own", "other"))
    cut, _ = divide(variable(at), 2 * width)
    is_first = compare("not", comes_before(load(next_)[0], load(last)[0], descending))
    is_among = compare("and", compare("le", more, most), is_first)
    search: list[Statement] = [
        Let("more", apply("add", left, step)),
        Let("last", apply("add", start, apply("sub", more, number(1)))),
        Let("next", apply("add", middle, apply("sub", k, more))),
        Set("left", apply("where", is_among, more, left)),
        Set("step", apply("floordiv", step, number(2))),
    ]
    ours, theirs = load(own), load(other)
    is_next = compare(
        "or", compare("le", middle, own), comes_before(theirs[0], ours[0], descending)
    )
    takes = Local("takes", dtypes.bool_)
    lets: list[Statement] = [
        Let("start", Position(cut * (2 * width), k.dtype)),
        Let("k", apply("sub", Position(variable(at), k.dtype), start)),
        Let("middle", apply("min", apply("add", start, number(width)), number(n))),
        Let("end", apply("min", apply("add", start, number(2 * width)), number(n))),
        Let("left", apply("max", apply("sub", k, apply("sub", end, middle)), number(0))),
        Let("most", apply("min", k, apply("sub", middle, start))),
        Let("step", number(width)),
        For(Var(f"bit_{at.name}", width.bit_length()), Role.SEQUENTIAL, tuple(search), unroll=0),
        Let("own", apply("add", start, left)),
        Let("other", apply("add", middle, apply("sub", k, left))),
        Let("takes", compare("and", compare("lt", other, end), is_next)),
    ]
    value, origin = (apply("where", takes, b, a) for a, b in zip(ours, theirs, strict=True))
    return lets, value, origin


def _unflattened(flat: Index, shape: tuple[int, ...]) -> list[Index]:
    """The index along each axis of an element by its number."""
    found: list[Index] = []
    for size in shape[:0:-1]:
        flat, rest = divide(flat, size)
        found.insert(0, rest)
    return [flat, *found] if shape else []
