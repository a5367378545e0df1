"""Reverse mode: the gradients of a graph's result, as nodes that the checker adds by its own rules.

Nodes are visited backwards; each passes the cotangent of its result on to its operands. What has a
body is differentiated through it: a call becomes a call, a scan becomes a scan in the other
direction over the carries that a forward scan gives. A function that has a gradient of its own in
the file has that one, and its name is noted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from treadle_checker.adjoints import pulled_read
from treadle_checker.building import Building, flat_index, variable
from treadle_checker.derivatives import has_partials, pulled
from treadle_checker.field import is_float
from treadle_checker.index import Atom, Index
from treadle_checker.reading import NotEstablished
from treadle_checker.types import Graph, Node, Read, Type, Value

Cotangents = dict[Value, Value]
Found = Iterable[tuple[int, Value | None]]  # of operands, by their positions
_READS = frozenset("move reduce_sum reduce_prod reduce_max reduce_min".split())
_OTHERS = frozenset(["call", "scan", "order", "scatter_add"])
MOST_BODIES = 4096  # whose gradients are known


class Reverse:
    """A walk backwards over what a building has; `own` are functions with their own gradients."""

    def __init__(self, made: Building, own: set[str]):
        self.made, self.own = made, own
        self.cts: Cotangents = {}

    def run(self, seeds: Mapping[Value, Value], wanted: Iterable[Value]) -> Cotangents:
        """Cotangents of all values that lie between; what nothing reaches has none."""
        made, cts, nodes = self.made, self.cts, tuple(self.made.nodes)
        active = active_values(nodes, wanted)
        cts.update(seeds)
        for position in reversed(range(len(nodes))):
            node = nodes[position]
            outputs = [Value(position, k) for k in range(len(node.types))]
            needed = [v in active for v in node.operands]
            if not passes(node.op) or not any(needed) or not any(v in cts for v in outputs):
                continue
            made.line = node.line
            for k, ct in self._pulled(node, outputs, needed):
                value = node.operands[k]
                if ct is not None and needed[k]:
                    own = made.cast(ct, made.type_of(value).dtype)
                    cts[value] = made.total(own, cts.get(value))
        return cts

    def _pulled(self, node: Node, outputs: Sequence[Value], needed: Sequence[bool]) -> Found:
        given = [self.cts.get(v) for v in outputs]
        if node.op == "call":
            return self._call(node, outputs, given, needed)
        if node.op == "scan":
            return self._scan(node, given, needed)
        ct = given[0]
        if ct is None:
            return []
        if node.op == "order":
            return [(0, self._ordered(node, outputs, ct))]
        if node.op == "scatter_add":
            return [(0, self._scattered(node, ct))]
        if node.op in _READS:
            rule = _EXTREMES.get(node.op, pulled_read)
            count = len(node.operands) - node.attributes["indices"]
            which = (k for k in range(count) if needed[k])
            return [(k, rule(self.made, node, outputs[0], k, ct)) for k in which]
        which = (k for k, is_needed in enumerate(needed) if is_needed)
        return [(k, pulled(self.made, node.op, k, ct, outputs[0], node.operands)) for k in which]

    def _ordered(self, node: Node, outputs: Sequence[Value], ct: Value) -> Value | None:
        """A value's cotangent goes back to the place that it came from."""
        a, made = node.attributes, self.made
        if a["places"] != (False, True):
            return None
        step, length, asked = a["step"], a["length"], a["asked"]
        flat = variable("flat")
        line = Index(0, ((1, Atom("remainder", flat, step)),))
        block = (step * length, Atom("quotient", flat, step * asked))
        place = [] if length == 1 else [(step, Atom("data", "1", length))]
        address = Index(line.offset, (*line.terms, block, *place))
        reads = Read((), address), Read((), flat)
        operands = [node.operands[0], outputs[1]]
        shape = node.types[0].shape
        moved = made.read("move", shape, operands, reads=reads, indices=1)
        return pulled_read(made, made.nodes[moved.node], moved, 0, ct)

    def _scattered(self, node: Node, ct: Value) -> Value:
        """What was added reads the cotangent of where it was added."""
        a, made = node.attributes, self.made
        (updates, index) = (made.type_of(v).shape for v in node.operands)
        axis, batch, count = a["axis"], a["batch"], len(index) - a["batch"]
        own = [variable(i) for i in range(len(updates))]
        data = Index(0, ((1, Atom("data", "1", a["size"])),)) if a["size"] > 1 else Index(0)
        at = flat_index(made.type_of(ct).shape, [*own[:axis], data, *own[axis + count :]])
        by = flat_index(index, [*own[:batch], *own[axis : axis + count]])
        reads = Read((), at), Read((), by)
        return made.read("move", updates, [ct, node.operands[1]], reads=reads, indices=1)

    def _call(
        self,
        node: Node,
        outputs: Sequence[Value],
        given: list[Value | None],
        needed: Sequence[bool],
    ) -> Found:
        made, a = self.made, node.attributes
        if a["backward"] is not None:
            self.own.add(a["name"])
            return self._own_backward(a["backward"], node, outputs, given)
        present = tuple(ct is not None for ct in given)
        body, reached = gradient_body(a["body"], present, tuple(needed), self.own)
        if not reached:
            return []
        attributes = {"body": body, "name": a["name"], "recompute": False, "backward": None}
        operands = [*node.operands, *(ct for ct in given if ct is not None)]
        called = made.add("call", attributes, operands)
        return [(k, Value(called.node, place)) for place, k in enumerate(reached)]

    def _own_backward(
        self, graph: Graph, node: Node, outputs: Sequence[Value], given: list[Value | None]
    ) -> Found:
        """Its inputs are cotangents of the results, the results and the operands."""
        made = self.made
        count = (len(graph.inputs) - len(node.operands)) // 2
        pairs = zip(outputs[:count], given, strict=False)
        cts = [made.number(0, made.type_of(v)) if ct is None else ct for v, ct in pairs]
        found = made.inlined(graph, [*cts, *outputs[:count], *node.operands])
        places = (int(name) for _, name, _ in graph.outputs)
        return [(k, v) for k, v in zip(places, found, strict=True) if k < len(node.operands)]

    def _scan(self, node: Node, given: list[Value | None], needed: Sequence[bool]) -> Found:
        made, a, operands = self.made, node.attributes, node.operands
        constants, carries = a["constants"], a["carries"]
        names = "constants carries length reverse recompute".split()
        numbers = {name: a[name] for name in names}
        # Once more, with what each iteration begins with.
        body = a["body"]
        before = [("result", f"before {i}", Value(i)) for i in body.inputs[constants:][:carries]]
        keeping = Graph(body.nodes, (*body.outputs, *before), body.name, ("keeping", body.digest))
        kept = made.add("scan", {**numbers, "body": keeping}, operands)
        stacks = [Value(kept.node, len(body.outputs) + k) for k in range(carries)]
        # Backwards, each iteration from what it began with.
        stacked = tuple(given[k] is not None for k in range(carries, len(given)))
        back = step_body(body, constants, carries, tuple(needed), stacked, self.own)
        cts = [
            given[k] if given[k] is not None else made.number(0, node.types[k])
            for k in back.carries
        ]
        sums = [made.number(0, made.type_of(operands[k])) for k in back.constants]
        slices = [*stacks, *operands[constants + carries :]]
        slices += [ct for ct in given[carries:] if ct is not None]
        attributes = {
            **numbers, "body": back.graph, "carries": len(cts) + len(sums),
            "reverse": not a["reverse"],
        }  # fmt: skip
        whole = [*operands[:constants], *(c for c in cts if c is not None), *sums]
        found = made.add("scan", attributes, [*whole, *slices])
        which = [*(constants + k for k in back.carries), *back.constants, *back.slices]
        return [(k, Value(found.node, place)) for place, k in enumerate(which)]


def _pulled_extreme(made: Building, node: Node, out: Value, k: int, ct: Value) -> Value:
    """Shared evenly among the elements that equal the extreme."""
    terms, spread = _terms(made, node), made.type_of(out)
    is_extreme = made.apply("eq", terms, made.spread(out, _whole(node)))
    hits = made.cast(is_extreme, spread.dtype)
    count = _over_last(made, "reduce_sum", hits, spread.shape)
    share = made.spread(made.apply("div", ct, count), _whole(node))
    found = made.apply("mul", hits, share)
    return pulled_read(made, made.nodes[terms.node], terms, k, found)


def _pulled_product(made: Building, node: Node, out: Value, k: int, ct: Value) -> Value:
    """Each factor gets the product of all others, without dividing."""
    terms, shape, whole = _terms(made, node), node.types[0].shape, _whole(node)
    over, rank = node.attributes["over"], len(node.types[0].shape)
    dtype = made.type_of(terms).dtype
    pairs = (*whole, *over)  # of a factor and all factors
    others = [variable(i) for i in (*range(rank), *range(len(whole), len(pairs)))]
    read = Read((), flat_index(whole, others))
    every = made.read("move", pairs, [terms], reads=(read,))
    places = made.number(1, Type("bool", pairs))
    for i in range(len(over)):
        sides = [
            made.add("iota", {"axis": rank + i + j, "shape": pairs, "dtype": "int64"}, ())
            for j in (0, len(over))
        ]
        places = made.apply("and", places, made.apply("eq", *sides))
    kept = made.apply("where", places, made.number(1, Type(dtype, pairs)), every)
    product = _over_last(made, "reduce_prod", kept, whole)
    found = made.apply("mul", product, made.spread(made.cast(ct, dtype), (*shape, *over)))
    return pulled_read(made, made.nodes[terms.node], terms, k, found)


_EXTREMES = {
    "reduce_max": _pulled_extreme, "reduce_min": _pulled_extreme, "reduce_prod": _pulled_product,
}  # fmt: skip


def _whole(node: Node) -> tuple[int, ...]:
    return (*node.types[0].shape, *node.attributes["over"])


def _terms(made: Building, node: Node) -> Value:
    """The terms of a reduction of one operand, not reduced."""
    if len(node.operands) - node.attributes["indices"] != 1:
        raise NotEstablished(f"the derivative of a {node.op} of products is not known")
    shape = _whole(node)
    return made.add("move", {**node.attributes, "shape": shape, "over": ()}, node.operands)


def _over_last(made: Building, op: str, value: Value, shape: tuple[int, ...]) -> Value:
    """A reduction over the last axes, all that are not in a shape."""
    whole = made.type_of(value).shape
    read = Read((), flat_index(whole, [variable(i) for i in range(len(whole))]))
    return made.read(op, shape, [value], reads=(read,), over=whole[len(shape) :])


def passes(op: str) -> bool:
    """Whether an op has a derivative."""
    return op in _READS or op in _OTHERS or has_partials(op)


def active_values(nodes: Sequence[Node], wanted: Iterable[Value]) -> set[Value]:
    """Floats that depend on some values by ops that have a derivative."""
    active = set(wanted)
    for position, node in enumerate(nodes):
        if passes(node.op) and any(v in active for v in node.operands):
            active |= {Value(position, k) for k, t in enumerate(node.types) if is_float(t.dtype)}
    return active


_bodies: dict[object, tuple[Graph, tuple[int, ...], frozenset[str]]] = {}


def gradient_body(
    body: Graph, present: tuple[bool, ...], needed: tuple[bool, ...], own: set[str]
) -> tuple[Graph, tuple[int, ...]]:
    """A body's gradients, and of which of its inputs they are. Inputs are the body's own, then a
    cotangent for each result that is present."""
    key = body.digest, present, needed
    if key not in _bodies:
        if len(_bodies) > MOST_BODIES:
            _bodies.clear()
        made, names = Building(body.nodes), set[str]()
        seeds: Cotangents = {}
        for k, (_, _, value) in enumerate(body.outputs):
            if present[k]:
                ct = made.leaf("input", f"ct {k}", body.type_of(value))
                seeds[value] = made.total(ct, seeds.get(value))
        inputs = [Value(i) for i in body.inputs]
        wanted = [v for v, is_needed in zip(inputs, needed, strict=True) if is_needed]
        cts = Reverse(made, names).run(seeds, wanted)
        reached = tuple(k for k, v in enumerate(inputs) if needed[k] and v in cts)
        outputs = [("gradient", str(k), cts[inputs[k]]) for k in reached]
        graph = made.finished(outputs, f"{body.name} reversed", ("reversed", *key))
        _bodies[key] = graph, reached, frozenset(names)
    graph, reached, found = _bodies[key]
    own |= found
    return graph, reached


class Step:
    """One iteration of a scan backwards, and whose cotangents it carries and gives."""

    def __init__(
        self, graph: Graph, carries: list[int], constants: list[int], slices: list[int]
    ) -> None:
        self.graph = graph
        self.carries = carries  # among the carries
        self.constants, self.slices = constants, slices  # operands


def step_body(
    body: Graph, constants: int, carries: int, needed: tuple[bool, ...], stacked: tuple[bool, ...],
    own: set[str],
) -> Step:  # fmt: skip
    """Inputs: constants, cotangents of carries, sums of those of constants, what the carries were,
    slices, cotangents of what is stacked. Results: the cotangents, the sums, those of slices."""
    made = Building()
    types = [body.nodes[i].types[0] for i in body.inputs]
    floats = [is_float(t.dtype) for t in types]
    given = [made.leaf("input", f"constant {k}", t) for k, t in enumerate(types[:constants])]
    moving = [k for k in range(carries) if floats[constants + k]]
    cts = [made.leaf("input", f"ct {k}", types[constants + k]) for k in moving]
    summed = [k for k in range(constants) if floats[k] and needed[k]]
    sums = [made.leaf("input", f"sum {k}", types[k]) for k in summed]
    given += [made.leaf("input", f"given {k}", t) for k, t in enumerate(types[constants:])]
    results = made.inlined(body, given)
    seeds: Cotangents = {}
    for k, ct in zip(moving, cts, strict=True):
        seeds[results[k]] = made.total(ct, seeds.get(results[k]))
    for k, is_present in enumerate(stacked):
        if is_present:
            value = results[carries + k]
            ct = made.leaf("input", f"ct of {k}", made.type_of(value))
            seeds[value] = made.total(ct, seeds.get(value))
    sliced = [k for k in range(constants + carries, len(types)) if floats[k] and needed[k]]
    wanted = [given[k] for k in (*summed, *(constants + k for k in moving), *sliced)]
    found = Reverse(made, own).run(seeds, wanted)

    def ct_of(k: int) -> Value:
        return found[given[k]] if given[k] in found else made.number(0, types[k])

    outputs = [ct_of(constants + k) for k in moving]
    outputs += [made.total(ct_of(k), s) for k, s in zip(summed, sums, strict=True)]
    outputs += [ct_of(k) for k in sliced]
    named = [("gradient", str(i), v) for i, v in enumerate(outputs)]
    digest = ("step", body.digest, constants, carries, needed, stacked)
    return Step(made.finished(named, f"{body.name} reversed", digest), moving, summed, sliced)
