"""Values of a graph at some of their elements, asked for by flat index; ops ask their operands.

An element may have a slope, its derivative along a direction: moves and sums move and sum slopes,
`slopes.py` has the rest. What is asked for is an array of indices, what is found one of elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np

from treadle_checker import slopes
from treadle_checker.composites import DEFINITIONS, body_of
from treadle_checker.field import ELEMENTWISE, Array, Element, Field, chosen, is_float
from treadle_checker.reading import NotEstablished
from treadle_checker.types import labels, window_starts
from treadle_checker.values import Graph, Literal, Node, Type, Value

Source = Callable[[Array], Element]  # elements by flat index
MOST = 2**23  # elements of anything that is made at once
BLOCK = 2**21  # terms of sums that are made at once


def unravel(at: Array, shape: tuple[int, ...]) -> list[Array]:
    """Indices along each axis."""
    found: list[Array] = []
    for n in reversed(shape):
        found.append(at % n)
        at = at // n
    return found[::-1]


def ravel(index: list[Array], shape: tuple[int, ...], length: int) -> Array:
    at = np.zeros(length, np.int64)
    for i, n in zip(index, shape, strict=True):
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


class Elements:
    """The values of one graph. `given` says which of them have a source of their own."""

    def __init__(self, graph: Graph, field: Field, given: Callable[[Value], Source | None]):
        self.graph, self.field, self.given = graph, field, given
        self.known: dict[Value, Element] = {}  # of all elements
        self.some: dict[tuple[Value, bytes], Element] = {}
        self.bodies: dict[int, Elements] = {}

    def at(self, value: Value, at: Array) -> Element:
        if len(at) > MOST:
            raise NotEstablished(f"{len(at)} elements of a graph are needed at once")
        self.field.spend(len(at))
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

    def whole(self, value: Value) -> Element:
        """All elements in order."""
        if value not in self.known:
            size = self.graph.type_of(value).size
            if size > MOST:
                raise NotEstablished(f"{size} elements of a graph are needed at once")
            source, every = self.given(value), np.arange(size)
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
            return Element(np.zeros(0, np.int64), np.zeros(0, np.int64))
        if node.op in ELEMENTWISE:
            xs = [self.at(v, at) for v in node.operands]
            given = [self.graph.type_of(v).dtype for v in node.operands]
            found = slopes.apply(self.field, node.op, xs, given, node.types[0].dtype)
        elif node.op in RULES:
            found = RULES[node.op](self, node, at, *([value.output] if node.op in SEVERAL else []))
        elif node.op in DEFINITIONS or node.op == "call":
            body = self._body(value.node, node)
            found = body.at(body.graph.outputs[value.output][2], at)
        else:
            raise NotEstablished(f"nothing gives {node.op} {node.attributes.get('name', '')}")
        return found.map(lambda a: np.broadcast_to(a, at.shape))

    def _body(self, at: int, node: Node) -> Elements:
        if at not in self.bodies:
            types = tuple(self.graph.type_of(v) for v in node.operands)
            body = body_of(node.op, node.attributes, types)
            self.bodies[at] = Elements(body, self.field, self._arguments(body, node))
        return self.bodies[at]

    def _arguments(self, body: Graph, node: Node) -> Callable[[Value], Source | None]:
        operands = dict(zip(body.inputs, node.operands, strict=True))

        def source(value: Value) -> Source | None:
            outer = operands.get(value.node)
            return None if outer is None else lambda at: self.at(outer, at)

        return source

    def type_of(self, node: Node, operand: int = 0) -> Type:
        return self.graph.type_of(node.operands[operand])

    def operand(self, node: Node, at: Array, operand: int = 0) -> Element:
        return self.at(node.operands[operand], at)


RULES: dict[str, Callable[..., Element]] = {}
SEVERAL = ("sort", "top_k", "scan")  # ops of several results: which one comes last


def rule(*names: str) -> Callable[[Callable[..., Element]], Callable[..., Element]]:
    def enter(function: Callable[..., Element]) -> Callable[..., Element]:
        RULES.update(dict.fromkeys(names, function))
        return function

    return enter


@rule("constant")
def _constant(on: Elements, node: Node, at: Array) -> Element:
    value, type_ = node.attributes["value"], node.attributes["type"]
    if isinstance(value, Literal):
        return on.field.array(value.array.reshape(-1)[at], type_.dtype)
    return on.field.number(value, type_.dtype)


@rule("iota")
def _iota(on: Elements, node: Node, at: Array) -> Element:
    type_ = node.types[0]
    return on.field.integers(unravel(at, type_.shape)[node.attributes["axis"]], type_.dtype)


@rule("reshape")
def _reshape(on: Elements, node: Node, at: Array) -> Element:
    return on.operand(node, at)


@rule("permute", "broadcast", "slice", "flip", "window")
def _moved(on: Elements, node: Node, at: Array) -> Element:
    """Every element is one of the operand's."""
    a, old, index = node.attributes, on.type_of(node).shape, unravel(at, node.types[0].shape)
    match node.op:
        case "permute":
            inner = [index[a["axes"].index(i)] for i in range(len(old))]
        case "broadcast":
            inner = [index[i] for i in a["axes"]]
        case "slice":
            inner = [i * s + b for i, s, b in zip(index, a["strides"], a["starts"], strict=True)]
        case "flip":
            inner = [
                n - 1 - i if k in a["axes"] else i
                for k, (i, n) in enumerate(zip(index, old, strict=True))
            ]
        case _:
            inner = index[: len(old)]
            for k, axis in enumerate(a["axes"]):
                inner[axis] = (
                    inner[axis] * a["strides"][k] + index[len(old) + k] * a["dilations"][k]
                )
    return on.operand(node, ravel(inner, old, len(at)))


@rule("pad")
def _pad(on: Elements, node: Node, at: Array) -> Element:
    a, type_ = node.attributes, on.type_of(node)
    index, inside, inner = unravel(at, node.types[0].shape), np.ones(len(at), bool), []
    for i, low, gap, n in zip(index, a["low"], a["interior"], type_.shape, strict=True):
        place, rest = np.divmod(i - low, gap + 1)
        inside &= (rest == 0) & (place >= 0) & (place < n)
        inner.append(np.clip(place, 0, max(n - 1, 0)))
    fill = on.field.number(a["value"], type_.dtype)
    if not inside.any():
        return fill
    return chosen(inside, on.operand(node, ravel(inner, type_.shape, len(at))), fill)


@rule("concat")
def _concat(on: Elements, node: Node, at: Array) -> Element:
    axis, index, first = node.attributes["axis"], unravel(at, node.types[0].shape), 0
    found: Element | None = None
    for k in range(len(node.operands)):
        shape = on.type_of(node, k).shape
        place = index[axis] - first
        first += shape[axis]
        inside = (place >= 0) & (place < shape[axis])
        if inside.any():
            inner = [*index[:axis], np.clip(place, 0, shape[axis] - 1), *index[axis + 1 :]]
            part = on.operand(node, ravel(inner, shape, len(at)), k)
            found = part if found is None else chosen(inside, part, found)
    assert found is not None
    return found


def _lines(on: Elements, node: Node, at: Array, axes: tuple[int, ...], terms: Array) -> Element:
    """The operand along axes that are reduced, as rows: `terms` are flat indices along them."""
    if len(at) * len(terms) > MOST:
        raise NotEstablished(f"{len(at)} lines of {len(terms)} elements are needed at once")
    old = on.type_of(node).shape
    along = iter(unravel(terms, tuple(old[i] for i in axes)))
    across = iter(unravel(at, tuple(n for i, n in enumerate(old) if i not in axes)))
    inner = [next(along)[None, :] if i in axes else next(across)[:, None] for i in range(len(old))]
    shape = (len(at), len(terms))
    flat = ravel([np.broadcast_to(i, shape).reshape(-1) for i in inner], old, len(at) * len(terms))
    return on.operand(node, flat).map(lambda a: a.reshape(shape))


def _every(type_: Type, axis: int) -> Array:
    """All indices along an axis."""
    if type_.shape[axis] > MOST:
        raise NotEstablished(f"an axis of {type_.shape[axis]} elements is needed at once")
    return np.arange(type_.shape[axis])


@rule("reduce_sum", "reduce_prod", "reduce_max", "reduce_min")
def _reduce(on: Elements, node: Node, at: Array) -> Element:
    axes, type_, op = node.attributes["axes"], on.type_of(node), node.op.removeprefix("reduce_")
    count = math.prod(type_.shape[i] for i in axes)
    if count == 0:
        return on.field.number(1 if op == "prod" else 0, type_.dtype)
    found: Element | None = None
    block = max(1, BLOCK // len(at))
    for first in range(0, count, block):
        part = _lines(on, node, at, axes, np.arange(first, min(count, first + block)))
        part = _reduced(on, op, part, type_.dtype)
        name = {"sum": "add", "prod": "mul"}.get(op, op)
        found = part if found is None else slopes.combined(on.field, name, found, part, type_.dtype)
    assert found is not None
    return found


def _reduced(on: Elements, op: str, rows: Element, dtype: str) -> Element:
    if op == "sum":
        return on.field.total(rows, dtype)
    if op in ("max", "min"):
        order = on.field.order(rows, dtype)
        place = (order.argmax(-1) if op == "max" else order.argmin(-1))[:, None]
        return rows.map(lambda a: np.take_along_axis(a, place, -1)[:, 0])
    while rows.p.shape[1] > 1:  # pairs are multiplied
        count = rows.p.shape[1]
        left, right = (rows.map(_every_other(s, count - count % 2)) for s in (0, 1))
        pairs = slopes.apply(on.field, "mul", [left, right], [dtype, dtype], dtype)
        rows = _joined(pairs, rows.map(lambda a: a[:, -1:])) if count % 2 else pairs
    return rows.map(lambda a: a[:, 0])


def _every_other(first: int, stop: int) -> Callable[[Array], Array]:
    return lambda a: a[:, first:stop:2]


def _joined(x: Element, y: Element) -> Element:
    count = x.p.shape[1] + y.p.shape[1]
    first = np.minimum(np.arange(count), x.p.shape[1] - 1)
    return chosen(np.arange(count) < x.p.shape[1], x.map(lambda a: a[:, first]), y)


@rule("argmax", "argmin")
def _arg(on: Elements, node: Node, at: Array) -> Element:
    axis, type_ = node.attributes["axis"], on.type_of(node)
    order = on.field.order(_lines(on, node, at, (axis,), _every(type_, axis)), type_.dtype)
    found = (order.argmax(-1) if node.op == "argmax" else order.argmin(-1)).astype(np.int32)
    return Element(found, found)


@rule("cumsum", "sort", "top_k")
def _along(on: Elements, node: Node, at: Array, output: int = 0) -> Element:
    """Ops that need whole lines: sums along them, or their elements in order."""
    a, type_ = node.attributes, on.type_of(node)
    axis, index = a["axis"], unravel(at, node.types[output].shape)
    place = index.pop(axis)
    across = tuple(n for i, n in enumerate(type_.shape) if i != axis)
    rows = _lines(on, node, ravel(index, across, len(at)), (axis,), _every(type_, axis))
    if node.op == "cumsum":
        taken = _every(type_, axis)[None, :]
        within = taken >= place[:, None] if a["reverse"] else taken <= place[:, None]
        return on.field.total(chosen(within, rows, on.field.number(0, type_.dtype)), type_.dtype)
    order = on.field.order(rows, type_.dtype)
    if a["descending"] if node.op == "sort" else a["largest"]:
        order = -order
    found = np.take_along_axis(np.argsort(order, axis=-1, kind="stable"), place[:, None], -1)
    if output == 1:
        return Element(found[:, 0].astype(np.int32), found[:, 0].astype(np.int32))
    return rows.map(lambda a: np.take_along_axis(a, found, -1)[:, 0])


def _starts(on: Elements, node: Node, operand: int, sizes: tuple[int, ...]) -> list[int]:
    """Where a window begins: moved so that it lies inside."""
    found, shape = on.whole(node.operands[operand]).p, on.type_of(node).shape
    return [min(max(int(s), 0), n - k) for s, k, n in zip(found, sizes, shape, strict=True)]


@rule("dynamic_slice")
def _dynamic_slice(on: Elements, node: Node, at: Array) -> Element:
    sizes, shape = node.attributes["sizes"], on.type_of(node).shape
    starts = _starts(on, node, 1, sizes)
    inner = [i + s for i, s in zip(unravel(at, sizes), starts, strict=True)]
    return on.operand(node, ravel(inner, shape, len(at)))


@rule("dynamic_update_slice")
def _dynamic_update(on: Elements, node: Node, at: Array) -> Element:
    sizes, shape = on.type_of(node, 1).shape, on.type_of(node).shape
    places = [i - s for i, s in zip(unravel(at, shape), _starts(on, node, 2, sizes), strict=True)]
    inside = np.ones(len(at), bool)
    for place, n in zip(places, sizes, strict=True):
        inside &= (place >= 0) & (place < n)
    if not inside.any():
        return on.operand(node, at)
    inner = [np.clip(place, 0, n - 1) for place, n in zip(places, sizes, strict=True)]
    return chosen(inside, on.operand(node, ravel(inner, sizes, len(at)), 1), on.operand(node, at))


@rule("contract")
def _contract(on: Elements, node: Node, at: Array) -> Element:
    """Sums of products, a block of terms at a time."""
    product, found = _Product(on, node, at), None
    block = max(1, BLOCK // max(len(product.rows), len(product.columns), 1))
    for first in range(0, product.count, block):
        part = product.part(np.arange(first, min(product.count, first + block)))
        if found is not None:
            part = slopes.combined(on.field, "add", found, part, product.dtype)
        found = part
    return on.field.number(0, product.dtype) if found is None else found


class _Product:
    """As matrices where the elements that are asked for fill one, else one by one."""

    def __init__(self, on: Elements, node: Node, at: Array):
        self.on, self.node, self.dtype = on, node, node.types[0].dtype
        self.labels = labels(node.attributes["spec"])
        lx, ly, self.out = self.labels
        shapes = on.type_of(node).shape + on.type_of(node, 1).shape
        self.sizes = dict(zip(lx + ly, shapes, strict=True))
        self.index = dict(zip(self.out, unravel(at, node.types[0].shape), strict=True))
        self.summed = "".join(c for c in lx if c in ly and c not in self.out)
        self.count = math.prod(self._sizes(self.summed))
        (rows, self.row), (columns, self.column) = self._lines(lx, at), self._lines(ly, at)
        few = len(rows) * len(columns) <= 2 * len(at) + 64
        self.as_matrix = is_float(self.dtype) and few
        self.rows, self.columns = (rows, columns) if self.as_matrix else (at, at)

    def _sizes(self, names: str) -> tuple[int, ...]:
        return tuple(self.sizes[c] for c in names)

    def _kept(self, part: str) -> str:
        return "".join(c for c in self.out if c in part)

    def _lines(self, part: str, at: Array) -> tuple[Array, Array]:
        """Different rows of an operand, and which of them each element needs."""
        names = self._kept(part)
        flat = ravel([self.index[c] for c in names], self._sizes(names), len(at))
        unique, places = np.unique(flat, return_inverse=True)
        return unique, places

    def part(self, terms: Array) -> Element:
        """The sum of some terms."""
        a, b = self._operand(0, self.rows, terms), self._operand(1, self.columns, terms)
        if self.as_matrix and a.infinite is None and b.infinite is None:
            return slopes.matmul(self.on.field, a, b).map(lambda m: m[self.row, self.column])
        if self.as_matrix:
            a, b = a.map(_at(self.row)), b.map(_at(self.column))
        products = slopes.apply(self.on.field, "mul", [a, b], [self.dtype] * 2, self.dtype)
        return self.on.field.total(products, self.dtype)

    def _operand(self, k: int, lines: Array, terms: Array) -> Element:
        """Rows of an operand by terms."""
        part, shape = self.labels[k], (len(lines), len(terms))
        names, index = self._kept(part), self.index
        if self.as_matrix:
            index = dict(zip(names, unravel(lines, self._sizes(names)), strict=True))
        of_terms = dict(zip(self.summed, unravel(terms, self._sizes(self.summed)), strict=True))
        where = [index[c][:, None] if c in index else of_terms[c][None, :] for c in part]
        flat = [np.broadcast_to(w, shape).reshape(-1) for w in where]
        at = ravel(flat, self._sizes(part), len(lines) * len(terms))
        return self.on.operand(self.node, at, k).map(lambda a: a.reshape(shape))


def _at(places: Array) -> Callable[[Array], Array]:
    return lambda a: a[places]


@rule("unwindow")
def _unwindow(on: Elements, node: Node, at: Array) -> Element:
    """Each element is the sum of those of the windows that it lies in."""
    window, shape, type_ = node.attributes["window"], node.attributes["shape"], on.type_of(node)
    counts, index = window_starts(window, shape), unravel(at, shape)
    total = on.field.number(0, type_.dtype).map(lambda a: np.broadcast_to(a, at.shape))
    on.field.spend(math.prod(window["sizes"]) * 2**12)
    for offset in product(*map(range, window["sizes"])):
        inner, inside = list(index), np.ones(len(at), bool)
        for k, axis in enumerate(window["axes"]):
            place, rest = np.divmod(
                index[axis] - offset[k] * window["dilations"][k], window["strides"][k]
            )
            inside &= (rest == 0) & (place >= 0) & (place < counts[k])
            inner[axis] = np.clip(place, 0, counts[k] - 1)
        if inside.any():
            some = np.flatnonzero(inside)
            flat = ravel(
                [*(i[some] for i in inner), *(np.full(len(some), o) for o in offset)],
                type_.shape,
                len(some),
            )
            term = on.operand(node, flat).map(_at(np.clip(np.cumsum(inside) - 1, 0, None)))
            term = chosen(inside, term, on.field.number(0, type_.dtype))
            total = slopes.combined(on.field, "add", total, term, type_.dtype)
    return total


@rule("gather")
def _gather(on: Elements, node: Node, at: Array) -> Element:
    axis, batch, shape = node.attributes["axis"], node.attributes["batch"], on.type_of(node).shape
    places = on.type_of(node, 1).shape
    index, count = unravel(at, node.types[0].shape), len(places) - batch
    flat = ravel([*index[:batch], *index[axis : axis + count]], places, len(at))
    wanted = np.clip(on.operand(node, flat, 1).p.astype(np.int64), 0, max(0, shape[axis] - 1))
    return on.operand(node, ravel([*index[:axis], wanted, *index[axis + count :]], shape, len(at)))


@rule("scatter_add")
def _scatter_add(on: Elements, node: Node, at: Array) -> Element:
    """The sum of the updates whose index is the element's."""
    axis, batch, type_ = node.attributes["axis"], node.attributes["batch"], on.type_of(node)
    places, index = on.type_of(node, 1).shape, unravel(at, node.types[0].shape)
    count = len(places) - batch
    spots = math.prod(places[batch:])
    if len(at) * spots > MOST or spots > MOST:
        return _scattered(on, node, at)
    each = unravel(np.arange(spots), places[batch:])
    shape = (len(at), spots)

    def flat(parts: list[Array], sizes: tuple[int, ...]) -> Array:
        return ravel([np.broadcast_to(p, shape).reshape(-1) for p in parts], sizes, len(at) * spots)

    down, right = [i[:, None] for i in index], [e[None, :] for e in each]
    wanted = on.operand(node, flat([*down[:batch], *right], places), 1).p.reshape(shape)
    inner = flat([*down[:axis], *right, *down[axis + 1 :]], type_.shape)
    terms = on.operand(node, inner).map(lambda a: a.reshape(shape))
    held = chosen(wanted == index[axis][:, None], terms, on.field.number(0, type_.dtype))
    assert count >= 0
    return on.field.total(held, type_.dtype)


def _scattered(on: Elements, node: Node, at: Array) -> Element:
    """All updates at once, where many elements are asked for."""
    axis, batch, type_ = node.attributes["axis"], node.attributes["batch"], on.type_of(node)
    places, size = on.type_of(node, 1).shape, node.attributes["size"]
    count, shape = len(places) - batch, node.types[0].shape
    updates = on.whole(node.operands[0])
    if math.prod(shape) > MOST:
        raise NotEstablished(f"sums into {math.prod(shape)} elements")
    index = unravel(np.arange(type_.size), type_.shape)
    flat = ravel([*index[:batch], *index[axis : axis + count]], places, type_.size)
    wanted = on.operand(node, flat, 1).p.astype(np.int64)
    inside = (wanted >= 0) & (wanted < size)
    to = ravel(
        [*index[:axis], np.clip(wanted, 0, size - 1), *index[axis + count :]], shape, type_.size
    )

    def added(x: Element) -> Element:
        lanes = []
        for f, a in on.field.lanes(x):
            sums = np.zeros(math.prod(shape), np.int64)
            np.add.at(sums, to[inside], a[inside])
            lanes.append(sums % f.modulus)
        return Element(lanes[0], lanes[1], None, None, x.pieces, x.slope and added(x.slope))

    if not is_float(type_.dtype):
        raise NotEstablished("many sums of integers")
    return added(updates).map(lambda a: a[at])


@rule("random_bits")
def _random_bits(on: Elements, node: Node, at: Array) -> Element:
    """Philox4x32-10: word i mod 4 of block i div 4, of the counter (block, scan, step, site)."""
    seed0, seed1, step, micro, scan, first = (int(w) for w in on.whole(node.operands[0]).p)
    last = ((micro << 16) + ((node.attributes["site"] + first) & 0xFFFF)) & 0xFFFFFFFF
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    later = np.uint64((first >> 16) * node.attributes["blocks"])  # of the shards before
    blocks = ((at // 4).astype(np.uint64) + later) & mask
    words = [blocks, *(np.full_like(blocks, w) for w in (scan, step, last))]
    keys = [seed0, seed1]
    for _ in range(10):
        a, b = words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)
        words = [
            (b >> half) ^ words[1] ^ np.uint64(keys[0]), b & mask,
            (a >> half) ^ words[3] ^ np.uint64(keys[1]), a & mask,
        ]  # fmt: skip
        keys = [(k + w) & 0xFFFFFFFF for k, w in zip(keys, (0x9E3779B9, 0xBB67AE85), strict=True)]
    bits = np.take_along_axis(np.stack(words, -1), (at % 4)[:, None], -1)[:, 0].astype(np.uint32)
    return Element(bits, bits)


@rule("scan")
def _scan(on: Elements, node: Node, at: Array, output: int) -> Element:
    """One iteration after another, of all elements."""
    a = node.attributes
    body, constants, carries, length = a["body"], a["constants"], a["carries"], a["length"]
    work = length * sum(t.size for n in body.nodes for t in n.types)
    if work > 4 * MOST or length > 4096:
        raise NotEstablished(f"a scan of {length} iterations and {work} elements")
    given = [on.whole(v) for v in node.operands]
    carried, stacked = given[constants : constants + carries], [[] for _ in body.outputs[carries:]]  # type: ignore[var-annotated]
    for i in reversed(range(length)) if a["reverse"] else range(length):
        slices = [_row(x, i, length) for x in given[constants + carries :]]
        inputs: dict[int, Element] = dict(
            zip(body.inputs, [*given[:constants], *carried, *slices], strict=True)
        )
        results = Elements(body, on.field, _held(inputs)).outputs()
        carried = results[:carries]
        for rows, result in zip(stacked, results[carries:], strict=True):
            rows.append(result)
    found = [*carried, *(_stacked(rows[::-1] if a["reverse"] else rows) for rows in stacked)]
    for k, x in enumerate(found):
        value = _result(on, node, k)
        if on.given(value) is None:  # else it has elements of its own
            on.known[value] = x
    return found[output].map(lambda a: a[at])


def _result(on: Elements, node: Node, output: int) -> Value:
    return Value(next(i for i, n in enumerate(on.graph.nodes) if n is node), output)


def _row(x: Element, i: int, length: int) -> Element:
    return x.map(lambda a: a.reshape(length, -1)[i])


def _held(inputs: dict[int, Element]) -> Callable[[Value], Source | None]:
    def source(value: Value) -> Source | None:
        held = inputs.get(value.node)
        return (
            None if held is None else lambda at: held.map(lambda a: np.broadcast_to(a, a.shape)[at])
        )

    return source


def _stacked(rows: list[Element]) -> Element:
    """Rows one after another; bits beside residues where any row has them."""
    if not rows:
        return Element(np.zeros(0, np.int64), np.zeros(0, np.int64))

    def joined(name: str) -> Any:
        parts = [getattr(r, name) for r in rows]
        if all(p is None for p in parts):
            return None
        return np.concatenate(
            [
                np.zeros(r.p.shape, np.int64) if p is None else p
                for r, p in zip(rows, parts, strict=True)
            ]
        )

    slope = None
    if any(r.slope is not None for r in rows):
        slope = _stacked([r.slope or slopes.zero(r) for r in rows])
    return Element(
        joined("q"),
        joined("p"),
        joined("sign"),
        joined("infinite"),
        any(r.pieces for r in rows),
        slope,
    )
