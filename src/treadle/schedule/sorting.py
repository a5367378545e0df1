"""Kernels that order: short axes by counting, long ones by merging runs.

Where few elements are wanted of a long axis, a processor keeps them in order while it goes through
all. It merges two runs element after element. A GPU's threads each find one element of the
merged run, by a binary search for how many of the elements before it are the left run's. All are
stable, and NaN counts as the greatest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.ir.graph import Node
from treadle.ir.graph import Value as TensorValue
from treadle.ir.ops import reductions
from treadle.ir.types import TensorType
from treadle.kernel.bindings import Runs
from treadle.kernel.index import Index, Var, bounded, constant, data, divide, variable
from treadle.kernel.nodes import (
    Accumulate,
    Buffer,
    Convert,
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
    Store,
    Value,
    Within,
)
from treadle.schedule.keep import ROOTS
from treadle.schedule.lower import Lowering, attributes_of
from treadle.schedule.nests import (
    Body,
    Buffers,
    accumulated,
    along,
    apply,
    axis_vars,
    compare,
    flat_index,
    in_order,
    parallel,
)
from treadle.schedule.operands import Site, reading
from treadle.schedule.ordering import Line, Ordering, comes_before, is_same, negated
from treadle.schedule.short_lines import fits_group, sorted_in_group


@ROOTS(reductions.SORT, reductions.TOP_K)
def _ordered(lowering: Lowering, position: int, node: Node) -> list[Kernel]:
    a: reductions.Sort | reductions.TopK = attributes_of(node)
    n, target = lowering.graph.type_of(node.operands[0]).shape[a.axis], lowering.target
    order = (
        Ordering(a.axis, a.descending, n)
        if isinstance(a, reductions.Sort)
        else Ordering(a.axis, a.largest, a.k)
    )
    if n <= target.reductions.counted or not order.size:
        return [_counted(lowering, position, node, order)]
    if target.is_spmd and fits_group(lowering, lowering.graph.type_of(node.operands[0]).dtype, n):
        return [sorted_in_group(lowering, position, node, order)]
    if target.is_spmd:
        return _searched(lowering, position, node, order)
    if order.size <= target.reductions.selected and order.size < n:
        return [_selected(lowering, position, node, order)]
    return [_merged(lowering, position, node, order)]


def _counted(lowering: Lowering, position: int, node: Node, order: Ordering) -> Kernel:
    """Each element goes to its rank: how many others come before it."""
    values, origins, axis = TensorValue(position, 0), TensorValue(position, 1), order.axis
    source = lowering.graph.type_of(node.operands[0])
    n, size = source.shape[axis], order.size
    every = axis_vars("i", source.shape)
    other = Var("j", n)
    reader = lowering.reader()
    own = along(every)
    here = reader.at(node.operands[0], own)
    others = (*own[:axis], variable(other), *own[axis + 1 :])
    named = list(reader.lets)
    reader.lets.clear()
    there = reader.at(node.operands[0], others)
    before = _before(there, Local("here", source.dtype), other, every[axis], order.descending)
    rank = Local("rank", dtypes.int64)
    counted = Accumulate("rank", "add", Convert(before, dtypes.int64))
    ranked = data(rank.name, n)
    guard = None if size == n else Within(ranked, 0, size)
    target = ranked if guard is None else bounded(ranked, size)
    indices = [*own[:axis], target, *own[axis + 1 :]]
    inner: list[Statement] = [
        *named,
        Let("here", here),
        Let("rank", Literal(0, dtypes.int64)),
        *in_order([other], [*reader.lets, counted]),
    ]
    if size:
        at = Position(variable(every[axis]), dtypes.int32)
        inner += [
            lowering.store(values, indices, Local("here", source.dtype), guard),
            lowering.store(origins, indices, at, guard),
        ]
    rows = [v for i, v in enumerate(every) if i != axis]
    body = parallel(rows, in_order([every[axis]], inner))
    return lowering.kernel(position, reader, [values, origins], body)


def _selected(lowering: Lowering, position: int, node: Node, order: Ordering) -> Kernel:
    """The first elements in order so far are kept, while blocks of an axis are gone through.

    Lanes look whether any element of a block comes before the last one kept. That is seldom: only
    then elements are taken one by one.
    """
    results, axis = [TensorValue(position, i) for i in range(2)], order.axis
    source = lowering.graph.type_of(node.operands[0])
    every = axis_vars("i", source.shape)
    own, reader, kept = along(every), lowering.reader(), _Kept(source.dtype, order)

    def element(at: Index) -> tuple[list[Statement], Value]:
        found = reader.at(node.operands[0], (*own[:axis], at, *own[axis + 1 :]))
        lets, reader.lets = reader.lets, []
        return lets, found

    def taken(at: Index, name: str = "") -> list[Statement]:
        lets, value = element(at)
        return [*lets, *kept.taken(value, at, name)]

    length = lowering.target.reductions.selected
    blocks, rest = divmod(source.shape[axis], length)
    block, left, j = Var("block", blocks), Var("left", rest), Var("j", order.size)
    lane, e = Var("lane", length), Var("e", length)
    start, found = variable(block) * length, Local("found", dtypes.int32)
    lets, value = element(start + variable(lane))
    is_first = compare("lt", Position(variable(block), dtypes.int64), _number(1))
    is_any = compare("or", is_first, compare("lt", Literal(0, dtypes.int32), found))
    looked: list[Statement] = [
        *accumulated(
            "add", dtypes.int32, [lane], lets, Convert(kept.is_next(value), found.dtype), found.name
        ),
        Let("looks", apply("where", is_any, _number(length), _number(0))),
        For(e, Role.SEQUENTIAL, tuple(taken(start + variable(e))), data("looks", length + 1)),
    ]
    into = (*own[:axis], variable(j), *own[axis + 1 :])
    last = zip(results, kept.entry(variable(j) + 1), strict=True)
    body = [
        *kept.begun(),
        *in_order([block], looked),
        *(in_order([left], taken(variable(left) + blocks * length, "~")) if rest else ()),
        *parallel([j], [lowering.store(v, into, x) for v, x in last]),
    ]
    rows = [v for i, v in enumerate(every) if i != axis]
    kernel = lowering.kernel(position, reader, results, parallel(rows, body))
    return replace(kernel, scratch=kept.buffers)


class _Kept:
    """The first elements of an axis in order, from 1 on, and which they were, of a thread."""

    def __init__(self, dtype: DType, order: Ordering):
        self.order, size = order, order.size + 1
        self.buffers = Buffer("kept", dtype, size), Buffer("kept.from", dtypes.int32, size)

    def entry(self, at: Index) -> tuple[Value, Value]:
        value, origin = (Load(b.name, at, b.dtype) for b in self.buffers)
        return value, origin

    def _stores(self, at: Index, *values: Value) -> list[Statement]:
        pairs = zip(self.buffers, values, strict=True)
        return [Store(b.name, at, value) for b, value in pairs]

    def begun(self) -> Body:
        at, zeros = Var("empty", self.order.size + 1), [Literal(0, b.dtype) for b in self.buffers]
        return parallel([at], self._stores(variable(at), *zeros))

    def is_next(self, value: Value) -> Value:
        """Whether an element comes before the last one that is kept."""
        return comes_before(value, self.entry(constant(self.order.size))[0], self.order.descending)

    def taken(self, value: Value, number: Index, name: str) -> list[Statement]:
        """An element where it belongs, if it is one of the first; those behind it move on."""
        k, descending = self.order.size, self.order.descending
        here, filled = Local(f"here{name}", value.dtype), _whole(f"filled{name}")
        moved, moves, t = Local(f"moved{name}", dtypes.bool_), f"moves{name}", Var(f"t{name}", k)
        takes = compare("or", compare("lt", filled, _number(k)), self.is_next(here))
        slot, before = (constant(top) + variable(t) * -1 for top in (k, k - 1))
        at, above = (Position(i, filled.dtype) for i in (slot, before))
        is_there = compare("and", compare("lt", _number(0), above), compare("le", above, filled))
        is_moved = compare("and", is_there, comes_before(here, self.entry(before)[0], descending))
        is_behind = comes_before(here, self.entry(slot)[0], descending)
        is_own = compare("or", compare("lt", filled, at), is_behind)
        given: tuple[Value, Value] = (here, Position(number, dtypes.int32))
        new = [
            apply("where", moved, a, apply("where", is_own, own, b))
            for a, b, own in zip(self.entry(before), self.entry(slot), given, strict=True)
        ]
        names = f"value{name}", f"origin{name}"
        lets = [Let(local, x) for local, x in zip(names, new, strict=True)]
        into = [Local(local, x.dtype) for local, x in zip(names, new, strict=True)]
        move = [Let(moved.name, is_moved), *lets, *self._stores(slot, *into)]
        return [
            Let(here.name, value),
            Let(filled.name, apply("min", Position(number, filled.dtype), _number(k))),
            Let(moves, apply("where", takes, _number(k), _number(0))),
            For(t, Role.SEQUENTIAL, tuple(move), data(moves, k + 1)),
        ]


Put = Callable[[Index, Value, Value], list[Statement]]  # the number of an element, and it


def _merged(lowering: Lowering, position: int, node: Node, order: Ordering) -> Kernel:
    """Runs of one, two, four … elements, merged from one buffer to the other and back."""
    values, origins, axis = TensorValue(position, 0), TensorValue(position, 1), order.axis
    source = lowering.graph.type_of(node.operands[0])
    n = source.shape[axis]
    every = axis_vars("i", source.shape)
    own = along(every)
    others = [v for i, v in enumerate(every) if i != axis]
    row = flat_index(others) * n
    sides = [_runs(lowering, position, side, source) for side in "ab"]

    def put_last(number: Index, value: Value, origin: Value) -> list[Statement]:
        indices = [*own[:axis], number, *own[axis + 1 :]]
        pairs = ((values, value), (origins, origin))
        return [lowering.store(v, indices, x) for v, x in pairs]

    reader = lowering.reader()
    element = reader.at(node.operands[0], own)
    given = sides[0].stores(row + own[axis], element, Position(own[axis], dtypes.int32))
    body: list[Statement] = [*parallel([every[axis]], [*reader.lets, *given])]
    rounds = (n - 1).bit_length()
    for round_ in range(rounds - 1):
        body += _all_runs(round_, sides[round_ % 2], sides[1 - round_ % 2], row, n, order)
    width = 1 << (rounds - 1)
    last = sides[(rounds - 1) % 2]
    body += _two_runs(f"{rounds}", last, row, width, n - width, order, put_last)
    also = tuple(b for side in sides for b in (side.values, side.origins))
    loops = parallel(others, body)
    return lowering.kernel(position, reader, [values, origins], loops, "", also)


def _runs(lowering: Lowering, position: int, side: str, type_: TensorType, width: int = 0) -> Line:
    """Memory for runs; of which width the first are, if a kernel leaves some of one width."""
    site, size = Site(lowering, position), type_.size
    held = Runs("runs", width) if width else None
    values = site.memory(f"runs_{side}", type_.dtype, size, held)
    which = TensorValue(position, 1)
    return Line(values, site.memory(f"from_{side}", dtypes.int32, size, held, which))


def _all_runs(
    round_: int, source: Line, target: Line, row: Index, n: int, order: Ordering
) -> list[Statement]:
    """Every two runs of an axis as one; a last one without another is copied."""
    width = 1 << round_
    pairs, rest = divmod(n, 2 * width)
    pair = Var(f"pair{round_}", pairs)

    def put_at(low: Index) -> Put:
        return lambda number, value, origin: target.stores(low + number, value, origin)

    low = row + variable(pair) * (2 * width)
    both = _two_runs(f"{round_}", source, low, width, width, order, put_at(low))
    found = [*in_order([pair], both)]
    low = row + pairs * 2 * width
    if rest > width:
        found += _two_runs(f"{round_}~", source, low, width, rest - width, order, put_at(low))
    elif rest:
        t = Var(f"t{round_}~", min(rest, order.size))
        copied = put_at(low)(variable(t), *source.loads(low + variable(t)))
        found += parallel([t], copied)
    return found


def _two_runs(
    name: str, source: Line, low: Index, width: int, rest: int, order: Ordering, put: Put
) -> list[Statement]:
    """A run of so many elements and the one behind it, merged: the left first where they are equal.

    Of each only as many count as are wanted in the end.
    """
    sizes = min(width, order.size), min(rest, order.size)
    t = Var(f"t{name}", min(sum(sizes), order.size))
    heads = [Local(f"{side}{name}", dtypes.int64) for side in ("left", "right")]
    starts = low, low + width
    loads = [
        source.loads(start + data(head.name, size))
        for start, head, size in zip(starts, heads, sizes, strict=True)
    ]
    is_left, is_right = (
        compare("lt", head, Literal(size, dtypes.int64))
        for head, size in zip(heads, sizes, strict=True)
    )
    a, b = (Local(f"{side}_value{name}", source.values.dtype) for side in ("left", "right"))
    is_next = compare("or", negated(is_left), comes_before(b, a, order.descending))
    takes = Local(f"takes{name}", dtypes.bool_)
    value, origin = (apply("where", takes, x, y) for x, y in ((b, a), (loads[1][1], loads[0][1])))
    moves = [Convert(x, dtypes.int64) for x in (negated(takes), takes)]
    inner: list[Statement] = [
        Let(a.name, loads[0][0]),
        Let(b.name, loads[1][0]),
        Let(takes.name, compare("and", is_right, is_next)),
        *put(variable(t), value, origin),
        *(
            Set(head.name, apply("add", head, move))
            for head, move in zip(heads, moves, strict=True)
        ),
    ]
    return [*(Let(h.name, Literal(0, dtypes.int64)) for h in heads), *in_order([t], inner)]


def _searched(lowering: Lowering, position: int, node: Node, order: Ordering) -> list[Kernel]:
    """Runs of one, two, four … elements: a kernel merges all pairs, elements side by side."""
    results, axis = [TensorValue(position, i) for i in range(2)], order.axis
    source = lowering.graph.type_of(node.operands[0])
    n = source.shape[axis]
    every = axis_vars("i", source.shape)
    own, here = along(every), every[axis]
    row = flat_index([v for i, v in enumerate(every) if i != axis]) * n
    sides = [_runs(lowering, position, side, source, 1 + i) for i, side in enumerate("ab")]
    reader = lowering.reader()
    element = reader.at(node.operands[0], own)
    first = sides[0].stores(row + variable(here), element, Position(own[axis], dtypes.int32))
    body = parallel(every, [*reader.lets, *first])
    also: Buffers = (sides[0].values, sides[0].origins)
    found = [lowering.kernel(position, reader, [], body, "_runs", also)]
    rounds = (n - 1).bit_length()
    for round_ in range(rounds):
        one, other = sides[round_ % 2], sides[1 - round_ % 2]
        is_last = round_ == rounds - 1
        at = Var(here.name, order.size) if is_last else here
        loops = [at if v is here else v for v in every]
        lets, value, origin = _found(one, row, at, n, 1 << round_, order.descending)
        if is_last:
            pairs = zip(results, (value, origin), strict=True)
            stores: list[Statement] = [lowering.store(v, along(loops), x) for v, x in pairs]
            made, also = results, ()
        else:
            stores = other.stores(row + variable(at), value, origin)
            made, also = [], (other.values, other.origins)
        read = reading(lowering, [one.values.name, one.origins.name])
        body = parallel(loops, [*lets, *stores])
        found.append(lowering.kernel(position, read, made, body, f"_merge{round_}", also))
    return found


def _found(
    runs: Line, row: Index, at: Var, n: int, width: int, descending: bool
) -> tuple[list[Statement], Value, Value]:
    """An element of the run that two of a width become: its value, and which it was.

    Of the k elements before it, `left` are the left run's.
    """
    start, k, middle, end = (_whole(name) for name in ("start", "k", "middle", "end"))
    left, right, own, other = (_whole(name) for name in ("left0", "right", "own", "other"))
    whole, _ = divide(variable(at), 2 * width)
    lets: list[Statement] = [
        Let("start", Position(whole * (2 * width), k.dtype)),
        Let("k", apply("sub", Position(variable(at), k.dtype), start)),
        Let("middle", apply("min", apply("add", start, _number(width)), _number(n))),
        Let("end", apply("min", apply("add", start, _number(2 * width)), _number(n))),
        *_split(runs, row, n, width, descending),
        Let("right", apply("sub", k, left)),
        Let("own", apply("add", start, left)),
        Let("other", apply("add", middle, right)),
    ]
    ours, theirs = (runs.loads(row + data(at.name, n)) for at in (own, other))
    is_next = compare(
        "or", compare("le", middle, own), comes_before(theirs[0], ours[0], descending)
    )
    takes = Local("takes", dtypes.bool_)
    lets.append(Let("takes", compare("and", compare("lt", other, end), is_next)))
    value, origin = (apply("where", takes, b, a) for a, b in zip(ours, theirs, strict=True))
    return lets, value, origin


def _split(runs: Line, row: Index, n: int, width: int, descending: bool) -> list[Statement]:
    """How many elements of the left run are among the first k of both, as `left0`.

    It is the largest number whose last element is not greater than the right run's next one, found
    bit by bit.
    """
    start, k, middle, end = (_whole(name) for name in ("start", "k", "middle", "end"))
    bits = width.bit_length()
    fewest = apply("max", apply("sub", k, apply("sub", end, middle)), _number(0))
    lets: list[Statement] = [
        Let(f"left{bits}", fewest),
        Let("most", apply("min", k, apply("sub", middle, start))),
    ]
    for bit in reversed(range(bits)):
        less, more = _whole(f"left{bit + 1}"), _whole(f"more{bit}")
        own, other = _whole(f"own{bit}"), _whole(f"other{bit}")
        (last, _), (next_, _) = (runs.loads(row + data(at.name, n)) for at in (own, other))
        is_first = compare("not", comes_before(next_, last, descending))
        is_among = compare("and", compare("le", more, _whole("most")), is_first)
        lets += [
            Let(more.name, apply("add", less, _number(1 << bit))),
            Let(own.name, apply("add", start, apply("sub", more, _number(1)))),
            Let(other.name, apply("add", middle, apply("sub", k, more))),
            Let(f"left{bit}", apply("where", is_among, more, less)),
        ]
    return lets


def _whole(name: str) -> Local:
    return Local(name, dtypes.int64)


def _number(value: int) -> Literal:
    return Literal(value, dtypes.int64)


def _before(a: Value, b: Value, i: Var, j: Var, descending: bool) -> Value:
    """Whether element i, of value a, comes before element j, of b; equals stay in order."""
    at = [Position(variable(v), dtypes.int64) for v in (i, j)]
    earlier = compare("lt", *at)
    tied = compare("and", is_same(a, b), earlier)
    return compare("or", comes_before(a, b, descending), tied)
