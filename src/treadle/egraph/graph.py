"""The e-graph: hash-consed nodes, classes of equal ones, and why they are equal.

Nodes are numbers and live in parallel lists: this is where a compile spends its time. A node is one
result of an op over nodes, `children` as they were given; equality is of classes.
"""

from __future__ import annotations

from typing import NamedTuple

from treadle.egraph.attributes import Fields, fields_of
from treadle.egraph.language import COMMUTATIVE
from treadle.ir import literal
from treadle.ir.op import Attributes, Op, infer_types
from treadle.ir.ops.leaves import CONSTANT, Constant
from treadle.ir.types import TensorType

Children = tuple[int, ...]
Key = tuple[int, ...]


NUMBER = "number"  # in place of an op: the bit of classes that are one number


class Head:
    """What a node applies: an op with attributes, and which of its results."""

    __slots__ = ("_fields", "attributes", "bit", "commutes", "op", "output")

    def __init__(self, op: Op, attributes: Attributes, output: int, bit: int) -> None:
        self.op, self.attributes, self.output, self.bit = op, attributes, output, bit
        self.commutes = op.name in COMMUTATIVE
        self._fields: Fields | None = None

    @property
    def fields(self) -> Fields:
        """Attributes as rules see them."""
        if self._fields is None:
            self._fields = fields_of(self.attributes)
        return self._fields


class Congruence(NamedTuple):
    """Two nodes are equal because their children are, in order or `crossed`."""

    left: int
    right: int
    crossed: bool


class Application(NamedTuple):
    """A rule was applied: `roots` equal `results`, each to the one at its place.

    `matched` are the nodes that the patterns stand on, in the order of the patterns, each before
    its operands; `sides` the equalities of children and nodes that the match used.
    """

    rule: str
    roots: Children
    results: Children
    matched: Children
    sides: tuple[tuple[int, int], ...]


Reason = Congruence | Application


class EGraph:
    """Classes of equal nodes. Merging is done by `merge`, and `rebuild` restores congruence."""

    def __init__(self) -> None:
        self.heads: list[Head] = []
        self.head: list[int] = []  # of a node
        self.children: list[Children] = []
        self.types: list[TensorType] = []
        self.parent: list[int] = []  # union-find
        self.members: dict[int, list[int]] = {}  # of a class
        self.users: dict[int, list[int]] = {}  # of a class: nodes that have it as a child
        self.ops: dict[int, int] = {}  # of a class: a bit for each op in it
        self.numbers: dict[int, int] = {}  # of classes that are one number everywhere: a constant
        self.proof: list[tuple[int, Reason | None]] = []  # a forest: next node, and why
        self.changed: set[int] = set()  # classes that matching has not seen as they are
        self.log: list[Application] = []
        self._heads: dict[tuple[Op, Attributes, int], int] = {}
        self._bits: dict[str, int] = {}
        self._known: dict[Key, int] = {}
        self._pending: list[tuple[int, int]] = []

    def bit_of(self, op: str) -> int:
        """The bit of an op, by name."""
        known = self._bits.get(op)
        if known is None:
            known = self._bits[op] = 1 << len(self._bits)
        return known

    def head_of(self, op: Op, attributes: Attributes, output: int = 0) -> int:
        key = (op, attributes, output)
        known = self._heads.get(key)
        if known is None:
            known = self._heads[key] = len(self.heads)
            self.heads.append(Head(op, attributes, output, self.bit_of(op.name)))
        return known

    def find(self, node: int) -> int:
        parent = self.parent
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    def add(self, head: int, children: Children, type_: TensorType | None = None) -> int:
        """The node, or one that is equal by its children. Checks types if none is given."""
        key = self._key(head, children)
        known = self._known.get(key)
        if known is not None:
            return known
        made = self.heads[head]
        if type_ is None:
            types = tuple([self.types[c] for c in children])
            type_ = infer_types(made.op, made.attributes, types)[made.output]
        node = len(self.parent)
        self.parent.append(node)
        self.head.append(head)
        self.children.append(children)
        self.types.append(type_)
        self.proof.append((node, None))
        self._known[key] = node
        self.members[node] = [node]
        self.users[node] = []
        self.ops[node] = made.bit
        for child in set(key[1:]):
            self.users[child].append(node)
        if made.op is CONSTANT:
            self._note_number(node, made.attributes)
        self.changed.add(node)
        return node

    def _key(self, head: int, children: Children) -> Key:
        """What equal nodes have in common; commutative operands in one order."""
        parent = self.parent
        classes = [c if parent[c] == c else self.find(c) for c in children]
        if len(classes) == 2 and classes[1] < classes[0] and self.heads[head].commutes:
            return (head, classes[1], classes[0])
        return (head, *classes)

    def _note_number(self, node: int, attributes: Attributes) -> None:
        assert isinstance(attributes, Constant)
        if not isinstance(attributes.value, literal.ArrayLiteral):
            self.numbers[node] = node
            self.ops[node] |= self.bit_of(NUMBER)

    def number_of(self, constant: int) -> literal.Number:
        """The number that a constant is everywhere."""
        attributes = self.heads[self.head[constant]].attributes
        assert isinstance(attributes, Constant)
        assert not isinstance(attributes.value, literal.ArrayLiteral)
        return attributes.value

    def merge(self, left: int, right: int, reason: Reason) -> bool:
        """Make two nodes equal; whether they were not. Requires equal types."""
        a, b = self.find(left), self.find(right)
        if a == b:
            return False
        self._explain(left, right, reason)
        if len(self.users[a]) > len(self.users[b]):
            a, b = b, a
        self.parent[a] = b
        self.members[b] += self.members.pop(a)
        self.ops[b] |= self.ops.pop(a)
        if a in self.numbers:
            self.numbers.setdefault(b, self.numbers.pop(a))
        self._pending.append((a, b))
        self.changed.add(b)
        return True

    def _explain(self, left: int, right: int, reason: Reason) -> None:
        """An edge of the forest: the path above `left` is turned round."""
        proof = self.proof
        node, (above, why) = left, proof[left]
        proof[left] = (right, reason)
        while above != node:
            further, further_why = proof[above]
            proof[above] = (node, why)
            node, above, why = above, further, further_why

    def rebuild(self) -> None:
        """Merge nodes whose children have become equal, until there are none."""
        while self._pending:
            pending, self._pending = self._pending, []
            for gone, _ in pending:
                for user in self.users.pop(gone):
                    key = self._key(self.head[user], self.children[user])
                    known = self._known.setdefault(key, user)
                    if known != user:
                        self.merge(user, known, self._congruence(user, known))
                    self.users[self.find(gone)].append(user)
                    self.changed.add(self.find(user))

    def _congruence(self, left: int, right: int) -> Congruence:
        pairs = zip(self.children[left], self.children[right], strict=True)
        return Congruence(left, right, any(self.find(a) != self.find(b) for a, b in pairs))

    def nodes_of(self, op: str) -> list[int]:
        """Nodes of an op, in order."""
        wanted = self._bits.get(op, 0)
        return [n for n, h in enumerate(self.head) if self.heads[h].bit == wanted]

    def __len__(self) -> int:
        return len(self.parent)
