"""Values of a graph at some of their elements, asked for by flat index; ops ask their operands.

What is asked for is an array of indices, what is found one of elements. All elements are asked for
in the same way as some. Slopes, where elements have them, move and sum as elements do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np

from treadle_checker import field as numbers
from treadle_checker.field import Array, Element, Field, chosen, is_float, joined, plain
from treadle_checker.reading import NotEstablished
from treadle_checker.types import Graph, Literal, Node, Type, Value, labels, window_starts

Source = Callable[[Array], Element]  # elements by flat index
Shape = tuple[int, ...]
MOST = 2**23  # elements of anything that is made at once
BLOCK = 2**21  # terms of sums that are made at once


def unravel(at: Array, shape: Shape) -> list[Array]:
    """Indices along each axis."""
    found: list[Array] = []
    for n in reversed(shape):
        found.append(at % n)
        at = at // n
    return found[::-1]


def ravel(index: list[Array], shape: Shape, length: int) -> Array:
    at = np.zeros(length, np.int64)
    for i, n in zip(index, shape, strict=True):
        at = at * n + i
    return at


def table(rows: list[Array | None], columns: list[Array | None], sizes: Shape) -> Array:
    """Flat indices of rows by columns: of each axis, either is given and the other is None."""
    parts = [c[None, :] if r is None else r[:, None] for r, c in zip(rows, columns, strict=True)]  # type: ignore[index]
    at = np.zeros((1, 1), np.int64)
    for i, n in zip(parts, sizes, strict=True):
        at = at * n + i
    return at


def _distinct(at: Array, size: int) -> tuple[Array, Array]:
    """Different indices in order, and where each is among them; many are noted, not sorted."""
    if size > 4 * len(at):
        unique, places = np.unique(at, return_inverse=True)
        return unique, places
    is_asked = np.zeros(size, bool)
    is_asked[at] = True
    return np.flatnonzero(is_asked), (np.cumsum(is_asked) - 1)[at]


def _limited(count: int) -> int:
    if count > MOST:
        raise NotEstablished(f"{count} elements of a graph are needed at once")
    return count


class Elements:
    """The values of one graph. `given` says which of them have a source of their own."""

    def __init__(self, graph: Graph, field: Field, given: Callable[[Value], Source | None]):
        self.graph, self.field, self.given = graph, field, given
        self.known: dict[Value, Element] = {}  # of all elements
        self.some: dict[tuple[Value, bytes], Element] = {}
        self.bodies: dict[int, Elements] = {}

    def at(self, value: Value, at: Array) -> Element:
        self.field.spend(_limited(len(at)))
        source = self.given(value)
        if source is not None:
            return source(at)
        if value in self.known:
            return self.known[value].map(lambda a: a[at])
        size = self.graph.type_of(value).size
        unique, places = _distinct(at, size)
        if 2 * len(unique) >= size:
            return self.whole(value).map(lambda a: a[at])
        key = value, unique.tobytes()
        if key not in self.some:
            self.some[key] = self._made(value, unique)
        return self.some[key].map(lambda a: a[places])

    def table(self, value: Value, at: Array) -> Element:
        """The same for indices of any shape."""
        return self.at(value, at.reshape(-1)).map(lambda a: a.reshape(at.shape))

    def whole(self, value: Value) -> Element:
        """All elements in order."""
        if value not in self.known:
            every = np.arange(_limited(self.graph.type_of(value).size))
            source = self.given(value)
            self.known[value] = source(every) if source is not None else self._made(value, every)
        return self.known[value]

    def outputs(self) -> list[Element]:
        """All elements of all outputs; nodes in order, so that no chain is too deep."""
        needed = {v.node for _, _, v in self.graph.outputs}
        for i in reversed(range(len(self.graph.nodes))):
            if i in needed:
                needed |= {v.node for v in self.graph.nodes[i].operands}
        for i in sorted(needed):
            for output in range(len(self.graph.nodes[i].types)):
                self.whole(Value(i, output))
        return [self.whole(v) for _, _, v in self.graph.outputs]

    def _made(self, value: Value, at: Array) -> Element:
        node = self.graph.nodes[value.node]
        if not len(at):
            return plain(np.zeros(0, np.int64))
        if node.op in numbers.ELEMENTWISE:
            xs = [self.at(v, at) for v in node.operands]
            given = [self.graph.type_of(v).dtype for v in node.operands]
            found = self.field.apply(node.op, xs, given, node.types[0].dtype)
        elif node.op == "call":
            body = self._body(value.node, node)
            found = body.at(body.graph.outputs[value.output][2], at)
        elif node.op == "scan":
            found = self._scan(value, node).map(lambda a: a[at])
        elif node.op in RULES:
            found = RULES[node.op](_Use(self, node, at, value.output))
        else:
            raise NotEstablished(f"nothing gives {node.op} {node.attributes.get('name', '')}")
        return found.spread(at.shape)

    def _body(self, at: int, node: Node) -> Elements:
        if at not in self.bodies:
            body = node.attributes["body"]
            operands = dict(zip(body.inputs, node.operands, strict=True))

            def source(value: Value) -> Source | None:
                outer = operands.get(value.node)
                return None if outer is None else lambda at: self.at(outer, at)

            self.bodies[at] = Elements(body, self.field, source)
        return self.bodies[at]

    def _scan(self, value: Value, node: Node) -> Element:
        """One iteration after another, of all elements of all results."""
        a = node.attributes
        body, constants, carries, length = a["body"], a["constants"], a["carries"], a["length"]
        work = length * sum(t.size for n in body.nodes for t in n.types)
        if work > 4 * MOST or length > 4096:
            raise NotEstablished(f"a scan of {length} iterations and {work} elements")
        given = [self.whole(v) for v in node.operands]
        carried, stacked = given[constants : constants + carries], list[list[Element]]()
        for i in range(length)[:: -1 if a["reverse"] else 1]:
            slices = [_row(x, i, length) for x in given[constants + carries :]]
            held = dict(zip(body.inputs, [*given[:constants], *carried, *slices], strict=True))
            results = Elements(body, self.field, _held(held)).outputs()
            carried = results[:carries]
            stacked.append(results[carries:])
        rows = zip(*stacked[:: -1 if a["reverse"] else 1], strict=True)
        found = [*carried, *map(joined, rows)]
        found += [plain(np.zeros(0, np.int64))] * (len(node.types) - len(found))
        for k, x in enumerate(found):
            if self.given(Value(value.node, k)) is None:  # else it has elements of its own
                self.known[Value(value.node, k)] = x
        return found[value.output]


def _row(x: Element, i: int, length: int) -> Element:
    return x.map(lambda a: a.reshape(length, -1)[i])


def _held(inputs: dict[int, Element]) -> Callable[[Value], Source | None]:
    def source(value: Value) -> Source | None:
        held = inputs.get(value.node)
        return None if held is None else lambda at: held.map(lambda a: a[at])

    return source


class _Use:
    """A node at some of its elements, for the rules below."""

    def __init__(self, on: Elements, node: Node, at: Array, output: int):
        self.on, self.node, self.at, self.output = on, node, at, output
        self.field, self.a, self.count = on.field, node.attributes, len(at)
        types: list[Type] = [on.graph.type_of(v) for v in node.operands]
        self.shapes = [t.shape for t in types]
        self.dtype = (types or node.types)[0].dtype  # of the first operand
        self.index = unravel(at, node.types[output].shape)

    def zero(self, value: float = 0) -> Element:
        return self.field.number(value, self.dtype)

    def moved(self, index: list[Array], operand: int = 0, count: int | None = None) -> Element:
        """An operand's elements by their index along each axis."""
        flat = ravel(index, self.shapes[operand], self.count if count is None else count)
        return self.on.at(self.node.operands[operand], flat)

    def within(self, places: list[Array], sizes: Shape, rest: Element, operand: int = 0) -> Element:
        """An operand's elements where an index lies inside it, else the rest."""
        inside, inner = np.ones(self.count, bool), []
        for place, n in zip(places, sizes, strict=True):
            inside &= (place >= 0) & (place < n)
            inner.append(np.clip(place, 0, max(n - 1, 0)))
        return chosen(inside, self.moved(inner, operand), rest) if inside.any() else rest

    def lines(self, axes: Shape, terms: Array, across: list[Array]) -> Element:
        """The operand along axes that are reduced, as columns: terms by elements."""
        _limited(len(terms) * len(across[0]) if across else len(terms))
        shape = self.shapes[0]
        along, rest = iter(unravel(terms, tuple(shape[i] for i in axes))), iter(across)
        rows = [next(along) if i in axes else None for i in range(len(shape))]
        columns = [None if i in axes else next(rest) for i in range(len(shape))]
        at = table(rows, columns, shape)
        return self.on.table(self.node.operands[0], np.broadcast_to(at, (len(terms), self.count)))


def _constant(use: _Use) -> Element:
    value, dtype = use.a["value"], use.dtype
    if isinstance(value, Literal):
        return use.field.array(value.array.reshape(-1)[use.at], dtype)
    return use.field.number(value, dtype)


def _iota(use: _Use) -> Element:
    return use.field.integers(use.index[use.a["axis"]], use.dtype)


def _moved(use: _Use) -> Element:
    """Every element is one of the operand's."""
    a, index, rank = use.a, use.index, len(use.shapes[0])
    match use.node.op:
        case "reshape":
            return use.on.at(use.node.operands[0], use.at)
        case "permute":
            inner = [index[a["axes"].index(i)] for i in range(rank)]
        case "broadcast":
            inner = [index[i] for i in a["axes"]]
        case "slice":
            inner = [i * s + b for i, s, b in zip(index, a["strides"], a["starts"], strict=True)]
        case "flip":
            ends = enumerate(zip(index, use.shapes[0], strict=True))
            inner = [n - 1 - i if k in a["axes"] else i for k, (i, n) in ends]
        case _:
            inner = index[:rank]
            rows = zip(a["axes"], a["strides"], index[rank:], a["dilations"], strict=True)
            for axis, stride, place, apart in rows:
                inner[axis] = inner[axis] * stride + place * apart
    return use.moved(inner)


def _pad(use: _Use) -> Element:
    places, n = [], -1  # nothing lies between elements that are spread out
    for i, low, gap in zip(use.index, use.a["low"], use.a["interior"], strict=True):
        place, rest = np.divmod(i - low, gap + 1)
        places.append(np.where(rest == 0, place, n))
    return use.within(places, use.shapes[0], use.zero(use.a["value"]).spread(use.at.shape))


def _concat(use: _Use) -> Element:
    axis, index, first = use.a["axis"], use.index, 0
    found = use.zero().spread(use.at.shape)
    for k, shape in enumerate(use.shapes):
        places = [*index[:axis], index[axis] - first, *index[axis + 1 :]]
        found = use.within(places, shape, found, k)
        first += shape[axis]
    return found


def _reduce(use: _Use) -> Element:
    axes, shape = use.a["axes"], use.shapes[0]
    op = {"reduce_sum": "add", "reduce_prod": "mul"}.get(use.node.op, use.node.op[-3:])
    count = math.prod(shape[i] for i in axes)
    if count == 0:
        return use.zero(op == "mul")
    found: Element | None = None
    for terms in _blocks(count, use.count):
        part = use.field.reduced(op, use.lines(axes, terms, use.index), use.dtype)
        found = part if found is None else use.field.combined(op, found, part, use.dtype)
    assert found is not None
    return found


def _blocks(count: int, lines: int) -> Iterator[Array]:
    """Terms one after another: nobody holds all of them."""
    size = max(1, BLOCK // max(1, lines))
    return (np.arange(i, min(count, i + size)) for i in range(0, count, size))


def _along(use: _Use) -> Element:
    """Ops that need whole lines: sums along them, or their elements in order."""
    op, a, index = use.node.op, use.a, list(use.index)
    axis, dtype = a["axis"], use.dtype
    every = np.arange(_limited(use.shapes[0][axis]))
    place = np.zeros(use.count, np.int64) if op.startswith("arg") else index.pop(axis)
    lines = use.lines((axis,), every, index)
    if op == "cumsum":
        taken = every[:, None]
        within = taken >= place if a["reverse"] else taken <= place
        return use.field.reduced("add", chosen(within, lines, use.zero()), dtype)
    order = use.field.order(lines, dtype)
    if op.startswith("arg"):
        return plain((order.argmax(0) if op == "argmax" else order.argmin(0)).astype(np.int32))
    if a["descending"] if op == "sort" else a["largest"]:
        order = -order
    found = np.take_along_axis(np.argsort(order, axis=0, kind="stable"), place[None, :], 0)
    if use.output == 1:
        return plain(found[0].astype(np.int32))
    return lines.map(lambda a: np.take_along_axis(a, found, 0)[0])


def _dynamic(use: _Use) -> Element:
    """A window that begins where an operand says, moved so that it lies inside."""
    shape, is_update = use.shapes[0], use.node.op == "dynamic_update_slice"
    sizes = use.shapes[1] if is_update else use.a["sizes"]
    given = use.on.whole(use.node.operands[-1]).p
    starts = [min(max(int(s), 0), n - k) for s, k, n in zip(given, sizes, shape, strict=True)]
    if not is_update:
        return use.moved([i + s for i, s in zip(use.index, starts, strict=True)])
    places = [i - s for i, s in zip(use.index, starts, strict=True)]
    return use.within(places, sizes, use.moved(use.index), 1)


def _contract(use: _Use) -> Element:
    """Sums of products, a block of terms at a time: as matrices where the elements that are asked
    for fill one, else one by one."""
    lx, ly, out = labels(use.a["spec"])
    sizes = dict(zip(lx + ly, use.shapes[0] + use.shapes[1], strict=True))
    index, dtype = dict(zip(out, use.index, strict=True)), use.node.types[0].dtype
    summed = [c for c in lx if c in ly and c not in out]
    depth = tuple(sizes[c] for c in summed)
    kept = [[c for c in out if c in part] for part in (lx, ly)]
    lines, places = zip(*[_lines_of(k, index, sizes) for k in kept], strict=True)
    is_matrix = is_float(dtype) and math.prod(map(_length, lines)) <= 2 * use.count + 64
    rows = [index, index]
    if is_matrix:
        rows = [dict(zip(k, x, strict=True)) for k, x in zip(kept, lines, strict=True)]
    longest = max(map(_length, lines)) if is_matrix else use.count
    found: Element | None = None
    for terms in _blocks(math.prod(depth), longest):
        of_terms = dict(zip(summed, unravel(terms, depth), strict=True))
        a, b = (
            _factor(use, k, part, row, of_terms, sizes, len(terms))
            for k, (part, row) in enumerate(zip((lx, ly), rows, strict=True))
        )
        if is_matrix and a.infinite is None and b.infinite is None:
            both = use.field.matmul(a.map(np.transpose), b)
            both = both.map(lambda m: m[places[0], places[1]])
        else:
            if is_matrix:
                a, b = a.map(lambda m: m[:, places[0]]), b.map(lambda m: m[:, places[1]])
            both = use.field.apply("mul", [a, b], [dtype] * 2, dtype)
            both = use.field.reduced("add", both, dtype)
        found = both if found is None else use.field.combined("add", found, both, dtype)
    return use.field.number(0, dtype) if found is None else found


def _length(line: list[Array]) -> int:
    return len(line[0]) if line else 1


def _lines_of(kept: list[str], index: Any, sizes: Any) -> tuple[list[Array], Array]:
    """Different lines of an operand, and which of them each element needs."""
    if not kept:
        return [], np.zeros((), np.int64)
    shape, along = tuple(sizes[c] for c in kept), [index[c] for c in kept]
    unique, places = np.unique(ravel(along, shape, len(along[0])), return_inverse=True)
    return unravel(unique, shape), places


def _factor(
    use: _Use, k: int, part: str, rows: Any, terms: Any, sizes: dict[str, int], count: int
) -> Element:
    """Terms of an operand by its lines."""
    down, across = [terms.get(c) for c in part], [rows.get(c) for c in part]
    at = table(down, across, tuple(sizes[c] for c in part))
    lines = len(next(iter(rows.values()))) if rows else 1
    return use.on.table(use.node.operands[k], np.broadcast_to(at, (count, lines)))


def _unwindow(use: _Use) -> Element:
    """Each element is the sum of those of the windows that it lies in."""
    window, index = use.a["window"], use.index
    counts = dict(zip(window["axes"], window_starts(window, use.a["shape"]), strict=True))
    total, nothing = use.zero().spread(use.at.shape), use.zero().spread(use.at.shape)
    use.field.spend(math.prod(window["sizes"]) * 2**12)
    for offset in product(*map(range, window["sizes"])):
        places = list(index)
        rows = zip(window["axes"], offset, window["strides"], window["dilations"], strict=True)
        for axis, o, stride, apart in rows:
            place, rest = np.divmod(index[axis] - o * apart, stride)
            places[axis] = np.where((rest == 0) & (place < counts[axis]), place, -1)
        places += [np.full(use.count, o) for o in offset]
        term = use.within(places, use.shapes[0], nothing)
        if term is not nothing:
            total = use.field.combined("add", total, term, use.dtype)
    return total


def _gather(use: _Use) -> Element:
    axis, batch, index = use.a["axis"], use.a["batch"], use.index
    count, size = len(use.shapes[1]) - batch, use.shapes[0][axis]
    found = use.moved([*index[:batch], *index[axis : axis + count]], 1).p.astype(np.int64)
    place = np.clip(found, 0, max(0, size - 1))
    return use.moved([*index[:axis], place, *index[axis + count :]])


def _scatter_add(use: _Use) -> Element:
    """The sum of the updates whose index is the element's: pairs of both, found by sorting."""
    axis, batch, size, index = use.a["axis"], use.a["batch"], use.a["size"], use.index
    places = use.shapes[1]
    spots = unravel(np.arange(_limited(math.prod(places))), places)
    wanted = use.on.whole(use.node.operands[1]).p.astype(np.int64)
    inside = (wanted >= 0) & (wanted < size)
    groups = (*places[:batch], size)
    keys = np.where(inside, ravel([*spots[:batch], wanted], groups, len(wanted)), -1)
    order = np.argsort(keys, kind="stable")
    own = ravel([*index[:batch], index[axis]], groups, use.count)
    first, last = (np.searchsorted(keys[order], own, side) for side in ("left", "right"))
    count = _limited(int((last - first).sum()))
    element = np.repeat(np.arange(use.count), last - first)
    spot = np.arange(count) - np.repeat(np.cumsum(last - first) - last, last - first)
    chosen_spots = [s[order[spot]] for s in spots[batch:]]
    inner = [i[element] for i in index]
    terms = use.moved([*inner[:axis], *chosen_spots, *inner[axis + 1 :]], 0, count)
    nothing = use.field.number(0, use.dtype).spread(use.at.shape)
    return use.field.scattered(terms, element, nothing, use.dtype)


def _random_bits(use: _Use) -> Element:
    """Philox4x32-10: word i mod 4 of block i div 4, of the counter (block, scan, step, site)."""
    key = use.on.whole(use.node.operands[0]).p
    seed0, seed1, step, micro, scan, first = (int(w) for w in key)
    last = ((micro << 16) + ((use.a["site"] + first) & 0xFFFF)) & 0xFFFFFFFF
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    later = np.uint64((first >> 16) * use.a["blocks"])  # of the shards before
    blocks = ((use.at // 4).astype(np.uint64) + later) & mask
    words = [blocks, *(np.full_like(blocks, w) for w in (scan, step, last))]
    keys = [seed0, seed1]
    for _ in range(10):
        a, b = words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)
        left, right = (b >> half) ^ words[1], (a >> half) ^ words[3]
        words = [left ^ np.uint64(keys[0]), b & mask, right ^ np.uint64(keys[1]), a & mask]
        keys = [(k + w) & 0xFFFFFFFF for k, w in zip(keys, (0x9E3779B9, 0xBB67AE85), strict=True)]
    return plain(np.take_along_axis(np.stack(words), (use.at % 4)[None], 0)[0].astype(np.uint32))


_BY_RULE: dict[Callable[[_Use], Element], str] = {
    _constant: "constant", _iota: "iota", _pad: "pad", _concat: "concat", _contract: "contract",
    _moved: "reshape permute broadcast slice flip window", _unwindow: "unwindow",
    _reduce: "reduce_sum reduce_prod reduce_max reduce_min", _gather: "gather",
    _along: "argmax argmin cumsum sort top_k", _scatter_add: "scatter_add",
    _dynamic: "dynamic_slice dynamic_update_slice", _random_bits: "random_bits",
}  # fmt: skip
RULES = {op: rule for rule, ops in _BY_RULE.items() for op in ops.split()}
