"""Values of a graph at some of their elements, asked for by flat index; ops ask their operands.

What is asked for is an array of indices, what is found one of elements. All elements are asked for
in the same way as some.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import reduce

import numpy as np

from treadle_checker import field as numbers
from treadle_checker.adjoints import adjoint
from treadle_checker.budget import CALL
from treadle_checker.field import Array, Element, Field, chosen, is_float, joined, plain
from treadle_checker.index import Index, within
from treadle_checker.reading import NotEstablished
from treadle_checker.scans import Scan
from treadle_checker.types import Graph, Literal, Node, Type, Value, is_view

Source = Callable[[Array], Element]  # elements by flat index
Given = Callable[[Value], Source | None]  # which values have a source of their own
Shape = tuple[int, ...]
Variables = dict[str, Array]
MOST = 2**23  # elements of anything that is made at once
BLOCK = 2**19  # of those, and terms of sums, that are made together


def unravel(at: Array, shape: Shape) -> list[Array]:
    """Indices along each axis; a remainder takes NumPy far longer than a quotient."""
    found: list[Array] = []
    for n in reversed(shape[1:]):
        above = at // n if n != 1 else at
        found.append(at - above * n)
        at = above
    return [at, *found[::-1]] if shape else []


def ravel(index: list[Array], shape: Shape, length: int) -> Array:
    at = np.zeros(length, np.int64)
    for i, n in zip(index, shape, strict=True):
        at = at * n + i
    return at


def _distinct(at: Array, size: int) -> tuple[Array, Array]:
    """Different indices in order, and where each is among them; many are noted, not sorted."""
    if size > min(64 * len(at), 2 * MOST):
        unique, places = np.unique(at, return_inverse=True)
        return unique, places
    is_asked, place = np.zeros(size, bool), np.empty(size, np.int64)
    is_asked[at] = True
    unique = np.flatnonzero(is_asked)
    place[unique] = np.arange(len(unique))
    return unique, place[at]


def _limited(count: int) -> int:
    if count > MOST:
        raise NotEstablished(f"{count} elements of a graph are needed at once")
    return count


class Elements:
    """The values of one graph."""

    def __init__(self, graph: Graph, field: Field, given: Given):
        self.graph, self.field, self.given = graph, field, given
        self.known: dict[Value, Element] = {}  # of all elements
        self.some: dict[tuple[Value, bytes], Element] = {}
        self.bodies: dict[int, Elements] = {}
        self.lines: dict[int, tuple[Array, Element, Array]] = {}  # of orders, by their nodes
        self.scans: dict[int, Scan] = {}

    def at(self, value: Value, at: Array) -> Element:
        self.field.budget.spend(CALL + _limited(len(at)))
        source = self.given(value)
        if source is not None:
            return self._in_blocks(source, at)
        if value in self.known:
            return self.known[value].map(lambda a: a[at])
        size = self.graph.type_of(value).size
        if is_view(self.graph.nodes[value.node]) and 2 * len(at) < size:
            return self._made(value, at)  # its operand looks for those that are equal
        self.field.budget.spend(4 * len(at))
        unique, places = _distinct(at, size)
        if 2 * len(unique) >= size:
            return self.whole(value).map(lambda a: a[at])
        key = value, unique.tobytes()
        if key not in self.some:
            self.some[key] = self._made(value, unique)
        return self.some[key].map(lambda a: a[places])

    def forget(self) -> None:
        """What is known; whoever gives elements may refer to this, so that it would stay."""
        for known in (self.known, self.some, self.bodies, self.lines, self.scans):
            known.clear()

    def table(self, value: Value, at: Array) -> Element:
        """The same for indices of any shape."""
        return self.at(value, at.reshape(-1)).map(lambda a: a.reshape(at.shape))

    def whole(self, value: Value) -> Element:
        """All elements in order."""
        if value not in self.known:
            size = _limited(self.graph.type_of(value).size)
            self.field.budget.spend(CALL + 2 * size)
            every = np.arange(size)
            source = self.given(value)
            made = self._made(value, every) if source is None else self._in_blocks(source, every)
            self.known[value] = made
        return self.known[value]

    def outputs(self) -> list[Element]:
        """All elements of all outputs; nodes in order, so that no chain is too deep. What nothing
        else reads is forgotten."""
        last = {v.node: len(self.graph.nodes) for _, _, v in self.graph.outputs}  # readers
        for i in reversed(range(len(self.graph.nodes))):
            for v in self.graph.nodes[i].operands if i in last else ():
                last.setdefault(v.node, i)
        for i in sorted(last):
            for output in range(len(self.graph.nodes[i].types)):
                self.whole(Value(i, output))
            for v in self.graph.nodes[i].operands:
                if last[v.node] == i:
                    self.known.pop(v, None)
            self.some, self.bodies, self.lines = {}, {}, {}
        return [self.whole(v) for _, _, v in self.graph.outputs]

    def _made(self, value: Value, at: Array) -> Element:
        node = self.graph.nodes[value.node]
        if not len(at):
            return plain(np.zeros(0, np.int64))
        if len(at) > BLOCK and (node.op == "move" or node.op in numbers.ELEMENTWISE):
            return self._in_blocks(lambda some: self._made(value, some), at)
        if node.op in numbers.ELEMENTWISE:
            xs = [self.at(v, at) for v in node.operands]
            given = [self.graph.type_of(v).dtype for v in node.operands]
            found = self.field.apply(node.op, xs, given, node.types[0].dtype)
        elif node.op == "call":
            body = self._body(value.node, node)
            found = body.at(body.graph.outputs[value.output][2], at)
        elif node.op == "scan":
            scan = self.scans.setdefault(value.node, Scan(self, node))
            found = scan.at(value.output, at)
        elif node.op in RULES:
            found = RULES[node.op](Use(self, node, at, value.output))
        else:
            raise NotEstablished(f"nothing gives {node.op} {node.attributes.get('name', '')}")
        return found.spread(at.shape)

    def _in_blocks(self, make: Source, at: Array) -> Element:
        """One block after another."""
        if len(at) <= BLOCK:
            return make(at)
        return joined(list(map(make, self.blocks(len(at), 1, at))))

    def blocks(self, count: int, each: int, of: Array | None = None) -> Iterator[Array]:
        """Numbers below a count, or what is there of an array, some at a time if each means so many
        elements. What is computed on the way is forgotten each time."""
        known, size = dict(self.some), max(1, BLOCK // max(1, each))
        for i in range(0, count, size):
            end = min(count, i + size)
            yield np.arange(i, end) if of is None else of[i:end]
            self.some = self.some if size >= count else dict(known)

    def _body(self, at: int, node: Node) -> Elements:
        if at not in self.bodies:
            body = node.attributes["body"]
            operands = dict(zip(body.inputs, node.operands, strict=True))

            def source(value: Value) -> Source | None:
                outer = operands.get(value.node)
                return None if outer is None else lambda at: self.at(outer, at)

            self.bodies[at] = Elements(body, self.field, source)
        return self.bodies[at]


class Use:
    """A node at some of its elements, for the rules below."""

    def __init__(self, on: Elements, node: Node, at: Array, output: int = 0):
        self.on, self.node, self.at, self.output = on, node, at, output
        self.field, self.a, self.count = on.field, node.attributes, len(at)
        self.types: list[Type] = [on.graph.type_of(v) for v in node.operands]
        self.dtype = (self.types or node.types)[0].dtype  # of the first operand
        self.shape = node.types[output].shape
        self.field.budget.spend((1 + len(self.shape)) * self.count)
        self.index = unravel(at, self.shape)
        self.variables: Variables = {str(i): x for i, x in enumerate(self.index)}

    def number(self, value: float) -> Element:
        return self.field.number(value, self.dtype)

    def read(self, k: int, variables: Variables, held: Array | None = None) -> Element:
        """An operand's elements where its address says, for arrays of variables; others that are
        read are as good where they are not held."""
        at = self.number_at(self.a["reads"][k].address, variables)
        at = np.clip(at, 0, max(0, self.types[k].size - 1))
        if held is not None:
            at, held = np.broadcast_arrays(at, held)
            at = np.where(held, at, at[held][0])
        return self.on.table(self.node.operands[k], at)

    def number_at(self, index: Index, variables: Variables) -> Array:
        """An index; what is data in it is read."""
        return index.at(variables, lambda name: self.read(int(name), variables).p)

    def held(self, k: int, variables: Variables) -> Array:
        """Where an operand is read."""
        return within(self.a["reads"][k].guards, lambda index: self.number_at(index, variables))

    def operand(self, k: int, variables: Variables, otherwise: Element) -> Element:
        """What is read of an operand, or something else outside the bounds."""
        held = self.held(k, variables)
        if held.all():
            return self.read(k, variables)
        return chosen(held, self.read(k, variables, held), otherwise) if held.any() else otherwise

    def term(self, variables: Variables) -> Element:
        """What a sum adds: the product of its operands."""
        dtype, nothing, factors = self.node.types[0].dtype, self.number(self.a["value"]), []
        for k, type_ in enumerate(self.types[: len(self.types) - self.a["indices"]]):
            x = self.operand(k, variables, nothing)
            factors.append(self.field.apply("cast", [x], [type_.dtype], dtype))
        return reduce(lambda x, y: self.field.combined("mul", x, y, dtype), factors)

    def lines(self, k: int) -> tuple[Variables, Array]:
        """Different lines of an operand, by their variables, and which one each element needs."""
        names = sorted(self.variables.keys() & self.a["reads"][k].address.names)
        shape = tuple(self.node.types[0].shape[int(n)] for n in names)
        own = ravel([self.variables[n] for n in names], shape, self.count)
        unique, places = _distinct(own, math.prod(shape))
        return dict(zip(names, unravel(unique, shape), strict=True)), places


def _constant(use: Use) -> Element:
    value, dtype = use.a["value"], use.dtype
    if isinstance(value, Literal):
        return use.field.array(value.array.reshape(-1)[use.at], dtype)
    return use.field.number(value, dtype)


def _iota(use: Use) -> Element:
    return use.field.integers(use.index[use.a["axis"]], use.dtype)


def _moved(use: Use) -> Element:
    """Of the first operand that is read there; a value where none is."""
    found, variables = use.number(use.a["value"]), {**use.variables, "flat": use.at}
    for k in reversed(range(len(use.types) - use.a["indices"])):
        found = use.operand(k, variables, found)
    return found


def _reduced(use: Use) -> Element:
    """Sums of terms, a block of them at a time: as products of matrices where the elements that are
    asked for fill one, else one by one."""
    dtype, over, name = use.node.types[0].dtype, use.a["over"], use.node.op.removeprefix("reduce_")
    op = {"sum": "add", "prod": "mul"}.get(name, name)
    is_plain = not use.a["indices"] and not any(read.guards for read in use.a["reads"])
    is_product = op == "add" and len(use.types) == 2 and is_plain and is_float(dtype)
    lines = [use.lines(k) for k in range(2)] if is_product else []
    counts = [int(places.max(initial=0)) + 1 for _, places in lines] or [use.count]
    is_matrix = len(counts) == 2 and math.prod(counts) <= 2 * use.count + 64
    use.field.budget.need(math.prod(over))
    found: Element | None = None
    for terms in use.on.blocks(math.prod(over), max(counts) if is_matrix else use.count):
        inner = {str(len(use.shape) + k): i[:, None] for k, i in enumerate(unravel(terms, over))}
        part = None
        if is_matrix:
            shapes = [(len(terms), count) for count in counts]
            a, b = (use.read(k, inner | lines[k][0]).spread(shapes[k]) for k in range(2))
            if a.infinite is None and b.infinite is None:
                part = use.field.matmul(a.map(np.transpose), b)
                part = part.map(lambda m: m[lines[0][1], lines[1][1]])
        if part is None:
            term = use.term(use.variables | inner).spread((len(terms), use.count))
            part = use.field.reduced(op, term, dtype)
        found = part if found is None else use.field.combined(op, found, part, dtype)
    return use.field.number(op == "mul", dtype) if found is None else found


def _ordered(use: Use) -> Element:
    """The first elements of lines in order, and their places; a line's are a step apart."""
    step, length, asked = use.a["step"], use.a["length"], use.a["asked"]
    line, place = use.at // (step * asked) * step + use.at % step, use.at // step % asked
    none = np.zeros(0, np.int64)
    lines, given, found = use.on.lines.get(id(use.node), (none, plain(none), none))
    wanted = _distinct(line, math.prod(use.shape) // asked)[0]
    if not np.isin(wanted, lines).all():  # those that were sorted are kept
        lines = np.union1d(lines, wanted)
        use.field.budget.spend(8 * _limited(length * len(lines)))
        first = lines // step * (step * length) + lines % step
        given = use.on.table(use.node.operands[0], first + step * np.arange(length)[:, None])
        order = use.field.order(given, use.dtype) * (-1 if use.a["descending"] else 1)
        found = np.argsort(order, axis=0, kind="stable")[:asked]
        use.on.lines[id(use.node)] = lines, given, found
    which = np.searchsorted(lines, line)
    chosen_places = found[place, which]
    if use.a["places"][use.output]:
        return plain(chosen_places.astype(np.int32))
    return given.map(lambda a: a[chosen_places, which])


def _scatter_add(use: Use) -> Element:
    """The sum of the updates whose index is the element's: pairs of both, found by sorting."""
    axis, batch, size, index = use.a["axis"], use.a["batch"], use.a["size"], use.index
    places = use.types[1].shape
    each, batches = math.prod(places[batch:]), places[:batch]
    own = ravel(index[:batch], batches, use.count)
    groups, which = _distinct(own, math.prod(batches))
    use.field.budget.spend(8 * _limited(len(groups) * each))
    spots = (groups[:, None] * each + np.arange(each)).reshape(-1)
    wanted = use.on.at(use.node.operands[1], spots).p.astype(np.int64)
    inside = (wanted >= 0) & (wanted < size)
    keys = np.where(inside, np.repeat(np.arange(len(groups)) * size, each) + wanted, -1)
    order = np.argsort(keys, kind="stable")
    own = which * size + index[axis]
    first, last = (np.searchsorted(keys[order], own, side) for side in ("left", "right"))
    count = _limited(int((last - first).sum()))
    use.field.budget.spend(8 * (count + use.count))
    element = np.repeat(np.arange(use.count), last - first)
    spot = np.arange(count) - np.repeat(np.cumsum(last - first) - last, last - first)
    chosen_spots = unravel(spots[order[spot]], places)[batch:]
    inner = [i[element] for i in index]
    update = ravel([*inner[:axis], *chosen_spots, *inner[axis + 1 :]], use.types[0].shape, count)
    terms = use.on.at(use.node.operands[0], update)
    return use.field.scattered(terms, element, use.number(0).spread(use.at.shape), use.dtype)


def _random_bits(use: Use) -> Element:
    """Philox4x32-10: word i mod 4 of block i div 4, of the counter (block, scan, step, site)."""
    use.field.budget.spend(64 * use.count)
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


_BY_RULE: dict[Callable[[Use], Element], str] = {
    _constant: "constant", _iota: "iota", _moved: "move", _scatter_add: "scatter_add",
    _reduced: "reduce_sum reduce_prod reduce_max reduce_min", _random_bits: "random_bits",
    _ordered: "order", adjoint: "adjoint",
}  # fmt: skip
RULES = {op: rule for rule, ops in _BY_RULE.items() for op in ops.split()}
