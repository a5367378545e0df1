"""That two graphs are equal over the reals, value by value.

Nodes of one op over equal operands are equal; casts between floats change nothing over the reals.
For other pairs that are proposed, the nodes that lead to both from values that they share are
evaluated over the field, those values being generic, at some elements. Pairs that cannot be shown
to be equal are left alone: only the outputs must be equal in the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from treadle_checker.budget import Budget
from treadle_checker.draws import Effort, agree
from treadle_checker.field import is_float
from treadle_checker.forms import key_of
from treadle_checker.reading import NotEstablished
from treadle_checker.types import LEAVES, Graph, Node, Type, Value, is_identity

COMMUTATIVE = frozenset(["add", "mul", "max", "min", "and", "or", "xor", "eq"])
MOST_NODES = 300  # between two values and those that they share
MOST_TRIES = 6  # of deeper cuts
MOST_OPEN = 1200  # nodes between two values and the leaves of their graphs


@dataclass
class Outcome:
    """How many values are equal by their form, and what was compared over the field."""

    congruent: int = 0
    compared: int = 0
    distinct: int = 0


FormKey = tuple[int, int, tuple[int, ...]]  # an op, which output, and the classes it reads


class Equality:
    """Classes of values that are known to be equal, of a graph and of the one that came of it.

    With `assumes`, proposals that take too long are assumed and counted: what follows is known
    under them, so that wrong outputs are found; that right ones are right is not established.
    """

    def __init__(
        self, before: Graph, after: Graph, effort: Effort, budget: Budget, assumes: bool = False
    ):
        self.graphs, self.effort, self.budget = (before, after), effort, budget
        self.assumes, self.assumed = assumes, 0
        self.is_close = False  # what is equal is so at the nearest cut: deeper ones cost too much
        self.parent: list[int] = []
        self.made: list[tuple[Node, int]] = []  # what a class is an output of
        self.operands: list[tuple[int, ...]] = []  # the classes that it reads
        self.known: dict[FormKey, int] = {}
        self.judged: dict[tuple[object, object], bool | None] = {}
        self.refuted: dict[int, str] = {}  # lines of values that no value after is equal to
        self.outcome = Outcome()
        self.first = self.classes(before, {})
        self.limit = len(self.parent)  # classes below are of the graph before

    def find(self, c: int) -> int:
        parent = self.parent
        while parent[c] != c:
            parent[c] = c = parent[parent[c]]
        return c

    def classes(self, graph: Graph, pairs: dict[Value, list[int]]) -> dict[Value, int]:
        places: dict[Value, int] = {}
        find = self.find
        for i, node in enumerate(graph.nodes):
            children = tuple([find(places[v]) for v in node.operands])
            for output in range(len(node.types)):
                value = Value(i, output)
                place = places[value] = self._class(node, output, children)
                if value in pairs:
                    for other in pairs[value]:
                        self._propose(other, place)
        return places

    def _propose(self, a: int, b: int) -> None:
        try:
            if self.try_(a, b):
                return
        except NotEstablished:
            if not self.assumes:
                raise
        a, b = self.find(a), self.find(b)
        if self.assumes and a not in self.refuted and _are_alike(self._type(a), self._type(b)):
            self.parent[max(a, b)] = min(a, b)
            self.assumed += 1

    def is_refuted(self, a: int) -> bool:
        """Whether a value after was compared with it, and is another one."""
        return self.find(a) in self.refuted or (bool(self.refuted) and not self.assumed)

    def _class(self, node: Node, output: int, children: tuple[int, ...]) -> int:
        is_same = node.op == "cast" or is_identity(node)
        if is_same and _are_alike(self._type(children[0]), node.types[0]):
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
        return node.key, output, classes

    def _type(self, place: int) -> Type:
        node, output = self.made[place]
        return node.types[output]

    def try_(self, a: int, b: int) -> bool:
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
            self.judged[key] = self._are_equal(*bodies)
        return bool(self.judged[key])

    def _are_equal(self, before: Graph, after: Graph) -> bool:
        """Whether all results of two bodies are equal, in their order."""
        if before.output_types and len(before.outputs) == len(after.outputs):
            try:
                bodies = _by_position(before), _by_position(after)
                inner = Equality(*bodies, self.effort, self.budget)
                second = inner.classes(inner.graphs[1], {})
                ends = zip(before.outputs, after.outputs, strict=True)
                return all(inner.try_(inner.first[v], second[w]) for (*_, v), (*_, w) in ends)
            except NotEstablished:
                pass
        return False

    def _agree(self, a: int, b: int) -> bool:
        """Over the field, from the nearest values that both come from. Where values that are equal
        are so at the nearest cut, what differs there and is not compared deeper is refuted."""
        differs = False  # at a cut so far
        try:
            for agree in self._cuts(a, b):
                if agree:
                    return True
                differs = differs or agree is False
        except NotEstablished:
            if not (differs and self.is_close):
                raise
        if differs and self.is_close:
            self.refuted[a] = self.made[b][0].line or self.made[b][0].op
        return False

    def _cuts(self, a: int, b: int) -> Iterator[bool | None]:
        """Whether they agree at one cut after the other; None where it takes too long."""
        sides = [_Side(self, a), _Side(self, b)]
        tries, agree, most, odd = 0, None, MOST_NODES, list[int]()
        most_tries = self.effort.cuts if self.is_close else MOST_TRIES
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
                yield agree
                odd = [c for c in first | second if self.made[c][0].op not in LEAVES]
                if agree is None or not odd or (self.is_close and tries > most_tries):
                    break
                most = MOST_OPEN if tries > MOST_TRIES else most  # cut values may be of another
            # Those of the graph after alone, then the one that was made last.
            latest = max(odd, key=lambda c: (c >= self.limit, c))
            for side in sides:
                side.open(latest)
        if agree is False and (not odd or tries > MOST_TRIES):
            self.refuted[a] = self.made[b][0].line or self.made[b][0].op

    def _evaluated(self, a: Graph, b: Graph) -> bool | None:
        """Whether they agree; None if that is not known."""
        key = a.digest, b.digest
        if key not in self.judged:
            self.outcome.distinct += 1
            try:
                self.judged[key] = agree(a, b, self.effort, self.budget)
            except NotEstablished:
                self.judged[key] = None
        return self.judged[key]


def _by_position(body: Graph) -> Graph:
    """A body whose inputs are named by their order, as arguments are."""
    nodes = list(body.nodes)
    for k, i in enumerate(body.inputs):
        attributes = {"name": str(k), "type": nodes[i].types[0]}
        nodes[i] = Node("input", attributes, (), nodes[i].types, "", key_of("input", attributes))
    return Graph(tuple(nodes), body.outputs, body.name, body.digest)


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
            nodes.append(Node("input", {"name": str(k)}, (), (type_,)))
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
