"""That two graphs are equal over the reals, value by value.

Nodes of one op over equal operands are equal; casts between floats change nothing over the reals.
For other pairs that are proposed, the nodes that lead to both from values that they share are
evaluated over the field, those values being generic, at some elements. Pairs that cannot be shown
to be equal are left alone: only the outputs must be equal in the end.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from treadle_checker.budget import FILE, Budget
from treadle_checker.elements import Elements, Source
from treadle_checker.field import ELEMENTWISE, Array, Element, Field, is_float, same
from treadle_checker.reading import NotEstablished, Rejected
from treadle_checker.types import LEAVES, Graph, Node, Type, Value, bodies_of, is_view

COMMUTATIVE = frozenset(["add", "mul", "max", "min", "and", "or", "xor", "eq"])
MOST_NODES = 300  # between two values and those that they share
MOST_TRIES = 6  # of deeper cuts
MOST_OPEN = 1200  # nodes between two values and the leaves of their graphs


class Effort(NamedTuple):
    """How long may be looked, and at how much."""

    spent: int = FILE  # operations, all comparisons together; one may take an eighth
    samples: int = 14  # elements of a value, beside the first and the last; all of twice as many


WHOLE = Effort()
_without_floats = lru_cache(2**14)(partial(re.compile(r'"b?float\w*"').sub, '"float"'))
_SWITCHES = ((0, False, False), (1, False, True), (2, True, True))  # trial, ordered, has_logs


@dataclass
class Outcome:
    """How many values are equal by their form, and what was compared over the field."""

    congruent: int = 0
    compared: int = 0
    distinct: int = 0


FormKey = tuple[str, int, tuple[int, ...]]  # an op, which output, and the classes it reads


class Equality:
    """Classes of values that are known to be equal, of a graph and of the one that came of it."""

    def __init__(self, before: Graph, after: Graph, effort: Effort, budget: Budget):
        self.graphs, self.effort, self.budget = (before, after), effort, budget
        self.parent: list[int] = []
        self.made: list[tuple[Node, int]] = []  # what a class is an output of
        self.operands: list[tuple[int, ...]] = []  # the classes that it reads
        self.known: dict[FormKey, int] = {}
        self.judged: dict[tuple[object, object], bool | None] = {}
        self.refuted: dict[int, str] = {}  # lines of values that no value after is equal to
        self.outcome = Outcome()
        self.first = self._classes(before, {})
        self.limit = len(self.parent)  # classes below are of the graph before

    def find(self, c: int) -> int:
        parent = self.parent
        while parent[c] != c:
            parent[c] = c = parent[parent[c]]
        return c

    def _classes(self, graph: Graph, pairs: dict[Value, list[int]]) -> dict[Value, int]:
        places: dict[Value, int] = {}
        find = self.find
        for i, node in enumerate(graph.nodes):
            children = tuple([find(places[v]) for v in node.operands])
            for output in range(len(node.types)):
                value = Value(i, output)
                place = places[value] = self._class(node, output, children)
                if value in pairs:
                    for other in pairs[value]:
                        self._try(other, place)
        return places

    def _class(self, node: Node, output: int, children: tuple[int, ...]) -> int:
        if node.op == "cast" and _are_alike(self._type(children[0]), node.types[0]):
            return children[0]
        key = self._key(node, output, children)
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = len(self.parent)
            self.parent.append(found)
            self.made.append((node, output))
            self.operands.append(children)
        return found

    def _key(self, node: Node, output: int, children: tuple[int, ...]) -> FormKey:
        classes = tuple(sorted(children)) if node.op in COMMUTATIVE else children
        return _without_floats(node.key), output, classes

    def _type(self, place: int) -> Type:
        node, output = self.made[place]
        return node.types[output]

    def _try(self, a: int, b: int) -> bool:
        """Make one class of two, if they are equal; whether they are."""
        a, b = self.find(a), self.find(b)
        if a == b:
            self.outcome.congruent += 1
        elif _are_alike(self._type(a), self._type(b)) and (
            self._congruent(a, b) or self._agree(a, b)
        ):
            self.parent[max(a, b)] = min(a, b)
            self.refuted.pop(a, None)
        return self.find(a) == self.find(b)

    def _congruent(self, a: int, b: int) -> bool:
        """Classes may have become equal since a node was entered."""
        keys = [self._key(*self.made[c], tuple(map(self.find, self.operands[c]))) for c in (a, b)]
        if keys[0] == keys[1] or self._equal_bodies(a, b, keys):
            self.outcome.congruent += 1
            return True
        return False

    def _equal_bodies(self, a: int, b: int, keys: list[FormKey]) -> bool:
        """Calls and scans whose bodies are equal graphs."""
        (x, _), (y, _) = self.made[a], self.made[b]
        if x.op != y.op or x.op not in ("call", "scan") or keys[0][1:] != keys[1][1:]:
            return False
        numbers = ("constants", "carries", "length", "reverse")
        if any(x.attributes.get(n) != y.attributes.get(n) for n in numbers):
            return False
        bodies = x.attributes["body"], y.attributes["body"]
        key = bodies[0].digest, bodies[1].digest
        if key not in self.judged:
            try:
                check_related("equal", *bodies, [], self.effort, self.budget)
                self.judged[key] = True
            except (NotEstablished, Rejected):
                self.judged[key] = False
        return bool(self.judged[key])

    def _agree(self, a: int, b: int) -> bool:
        """Over the field, from the nearest values that both come from."""
        sides = [_Side(self, a), _Side(self, b)]
        tries, agree, most, odd = 0, None, MOST_NODES, list[int]()
        self.budget.spend(2**12)
        while sum(len(s.inside) for s in sides) <= most:
            first, second = (s.leaves for s in sides)
            self.budget.spend(2**7 + 16 * (len(first) + len(second)))
            cut = first | second if tries > MOST_TRIES else first ^ second
            odd = [c for c in cut if self.made[c][0].op not in LEAVES]
            if not odd:
                tries += 1
                agree = self._evaluated(*(s.cone(first | second) for s in sides))
                self.outcome.compared += bool(agree)
                odd = [c for c in first | second if self.made[c][0].op not in LEAVES]
                if agree or agree is None or not odd:
                    break
                most = MOST_OPEN if tries > MOST_TRIES else most  # cut values may be of another
            # Those of the graph after alone, then the one that was made last.
            latest = max(odd, key=lambda c: (c >= self.limit, c))
            for side in sides:
                side.open(latest)
        if agree is False and (not odd or tries > MOST_TRIES):
            self.refuted[a] = self.made[b][0].line or self.made[b][0].op
        return bool(agree)

    def _evaluated(self, a: Graph, b: Graph) -> bool | None:
        """Whether they agree; None if that is not known."""
        key = a.digest, b.digest
        if key not in self.judged:
            self.outcome.distinct += 1
            try:
                self.judged[key] = any(self._agreement(a, b, *s) for s in _SWITCHES)
            except NotEstablished:
                self.judged[key] = None
        return self.judged[key]

    def _agreement(self, a: Graph, b: Graph, trial: int, ordered: bool, has_logs: bool) -> bool:
        """Whether both results agree at some elements."""
        needed = _CHOICES if ordered else _LOGS if has_logs else None
        if needed is not None and not needed & (a.ops | b.ops):
            return False
        budget, samples = self.budget.part(self.effort.spent // 8), self.effort.samples
        field, size = Field(trial, ordered, has_logs, budget), a.output_types[0].size
        rng = np.random.default_rng([trial, size])
        if size == 0:
            return True
        some = np.array(sorted({*rng.integers(0, size, samples).tolist(), 0, size - 1}))
        at = np.arange(size) if size <= 2 * samples else some
        most = index_size([a, b])
        sides = [Elements(g, field, generic(g, field, most)) for g in (a, b)]
        return same(*(on.at(on.graph.outputs[0][2], at) for on in sides))


def _are_alike(x: Type, y: Type) -> bool:
    """Whether elements of both may be equal over the reals: floats are not told apart."""
    are_floats = is_float(x.dtype) and is_float(y.dtype)
    return x.shape == y.shape and (x.dtype == y.dtype or are_floats)


class _Side:
    """One of a pair: the classes inside its cone, and those that the cone begins with."""

    def __init__(self, of: Equality, root: int):
        self.of, self.root = of, root
        self.inside: set[int] = set()
        self.leaves: set[int] = {root}
        self.open(root)

    def open(self, c: int) -> None:
        """Look behind a class; what nothing decides is looked behind at once."""
        if c not in self.leaves:
            return
        self.leaves.discard(c)
        self.inside.add(c)
        for child in map(self.of.find, self.of.operands[c]):
            if child not in self.inside:
                self.leaves.add(child)
                if self.of.made[child][0].op in ("constant", "iota"):
                    self.open(child)

    def cone(self, order: set[int]) -> Graph:
        """The nodes inside as a graph, inputs for the leaves of both sides in one order; its digest
        is what it is made of."""
        nodes: list[Node] = []
        places: dict[int, Value] = {}
        for k, c in enumerate(sorted(order)):
            type_ = self.of._type(c)
            nodes.append(Node("input", {"name": str(k)}, (), (type_,), "", "input"))
            places[c] = Value(k)
        stack = [self.root]
        made: dict[tuple[int, tuple[int, ...]], int] = {}
        while stack:
            c = stack[-1]
            children = tuple(map(self.of.find, self.of.operands[c]))
            missing = [x for x in children if x not in places]
            if c in places or missing:
                stack = stack[:-1] if c in places else [*stack, *missing]
                continue
            node, output = self.of.made[c]
            at = made.setdefault((id(node), children), len(nodes))
            if at == len(nodes):
                operands = tuple([places[x] for x in children])
                nodes.append(Node(node.op, node.attributes, operands, node.types, "", node.key))
            places[c] = Value(at, output)
        root = places[self.root]
        form = root, *((n.key, n.operands, n.types[0]) for n in nodes)
        return Graph(tuple(nodes), (("result", "0", root),), "cone", form)


_LOGS = frozenset(["log"])
_CHOICES = frozenset("max min reduce_max reduce_min order lt le".split())


def generic(graph: Graph, field: Field, most: int) -> Callable[[Value], Source | None]:
    """Leaves as generic elements by their names; integers are indices inside what they index."""

    def given(value: Value) -> Source | None:
        node, dtype = graph.nodes[value.node], graph.type_of(value).dtype

        def elements(at: Array) -> Element:
            found = field.keyed(node.attributes["name"], dtype, at, most)
            if is_float(dtype) or dtype == "bool":
                return found
            return field.integers(found.p.astype(np.int64) % most, dtype)

        return elements if node.op in LEAVES else None

    return given


def index_size(graphs: Iterable[Graph]) -> int:
    """The shortest axis that anything indexes, in bodies too."""
    found = [50]
    for graph in graphs:
        found += index_sizes(graph).values()
        found += [index_size(bodies_of(node)) for node in graph.nodes]
    return max(1, min(found))


@lru_cache(maxsize=4)
def index_sizes(graph: Graph) -> dict[Value, int]:
    """How long the axes are that integers index, or are positions along."""
    found: dict[Value, int] = {}
    for position, node in reversed(list(enumerate(graph.nodes))):
        value, a = Value(position), node.attributes
        if node.op == "order":
            places = (k for k, is_place in enumerate(a["places"]) if is_place)
            found |= {Value(position, k): a["length"] for k in places}
        elif node.op == "scatter_add":
            found[node.operands[1]] = a["size"]
        elif value in found and (node.op in ELEMENTWISE or is_view(node)):
            found |= {v: found[value] for v in node.operands if v not in found}
        if a.get("indices"):  # along an axis of one element nothing reads them
            found |= dict.fromkeys(node.operands[-a["indices"] :], 1)
        for name, size in (pair for r in a.get("reads", ()) for pair in r.address.data.items()):
            found[node.operands[int(name)]] = size
    return found


Key = tuple[str, str, int]


def _by_name(graph: Graph) -> dict[Key, Value]:
    """Outputs by kind and name, and by how many of the same there are before."""
    found: dict[Key, Value] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for kind, name, value in graph.outputs:
        counts[kind, name] += 1
        found[kind, name, counts[kind, name] if kind == "print" else 0] = value
    if len(found) != len(graph.outputs):
        raise Rejected(f"two outputs of {graph.name!r} have one name")
    return found


def has_updates(graph: Graph) -> bool:
    return any(kind == "update" for kind, _, _ in graph.outputs)


Pairs = Iterable[tuple[Value, Value]]


def check_related(
    relation: str,
    before: Graph,
    after: Graph,
    pairs: Pairs,
    effort: Effort = WHOLE,
    budget: Budget | None = None,
) -> Outcome:
    """How a graph was shown to be what a stage should make of another.

    equal: the same outputs. gradients: the same outputs, and gradients beside them. updates: the
    gradients of the graph before are values of the one after. part: some of the outputs, of updates
    all or none; these may be guarded by a flag, and be the old values where it is false.
    """
    equality = Equality(before, after, effort, budget or Budget(effort.spent))
    proposed: dict[Value, list[int]] = {}
    for a, b in pairs:
        proposed.setdefault(b, []).append(equality.first[a])
    second = equality._classes(after, proposed)
    old, new = _by_name(before), _by_name(after)
    if relation == "updates":
        made = {equality.find(c) for c in second.values()}
        for (kind, name, _), value in old.items():
            if kind == "gradient" and equality.find(equality.first[value]) not in made:
                raise NotEstablished(f"the gradient of {name!r} is not seen in what is made of it")
        return equality.outcome
    lost = {"equal": old.keys() ^ new.keys(), "gradients": old.keys() - new.keys()}
    missing = lost.get(relation, set())
    if relation == "part" and has_updates(after):
        missing = {key for key in old if key[0] == "update"} - new.keys()
    if missing or not old.keys() & new.keys():
        raise Rejected(f"the outputs differ: {sorted(missing)[:3]}")
    for key in (key for key in old if key in new):
        _check_output(equality, key, old[key], new[key], second, relation == "part")
    return equality.outcome


def _check_output(
    equality: Equality, key: Key, old: Value, new: Value, second: dict[Value, int], guarded: bool
) -> None:
    a, after = equality.first[old], equality.graphs[1]
    node = after.nodes[new.node]
    if equality._try(a, second[new]):
        return
    if guarded and node.op == "where" and key[0] == "update":
        held = after.nodes[node.operands[2].node]
        is_old = held.op in LEAVES and held.attributes["name"] == key[1]
        if is_old and equality._try(a, second[node.operands[1]]):
            return
    told = f"the {key[0]} {key[1]!r} could not be shown to be what it was [{node.line}]"
    if equality.refuted:
        raise Rejected(f"{told}: a value differs at {next(iter(equality.refuted.values()))}")
    raise NotEstablished(told)
