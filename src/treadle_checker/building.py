"""Graphs that the checker makes itself, node by node; each is typed as those of files are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from treadle_checker.forms import key_of
from treadle_checker.index import Index, summed
from treadle_checker.reading import Rejected
from treadle_checker.types import LEAVES, Graph, Node, Output, Read, Shape, Type, Value, infer


class Building:
    """A graph in the making; what is made has the line of `line`."""

    def __init__(self, nodes: Iterable[Node] = ()):
        self.nodes = list(nodes)
        self.line = ""
        self._leaves: dict[str, Value] = {}
        self._seen = 0  # how many nodes have been looked through for leaves

    def type_of(self, value: Value) -> Type:
        return self.nodes[value.node].types[value.output]

    def add(self, op: str, attributes: Mapping[str, Any], operands: Sequence[Value]) -> Value:
        """The first result of a new node."""
        types = infer(op, attributes, tuple([self.type_of(v) for v in operands]))
        key = key_of(op, attributes)
        self.nodes.append(Node(op, attributes, tuple(operands), types, self.line, key))
        return Value(len(self.nodes) - 1)

    def apply(self, op: str, *operands: Value) -> Value:
        """An elementwise op."""
        return self.add(op, {}, operands)

    def leaf(self, op: str, name: str, type_: Type) -> Value:
        """A leaf, once for each name."""
        for i in range(self._seen, len(self.nodes)):
            if self.nodes[i].op in LEAVES:
                self._leaves[self.nodes[i].attributes["name"]] = Value(i)
        self._seen = len(self.nodes)
        found = self._leaves.get(name)
        if found is None:
            return self.add(op, {"name": name, "type": type_}, ())
        known = self.nodes[found.node]
        if (known.op, known.types[0]) != (op, type_):
            raise Rejected(f"{name!r} is the {known.op} {known.types[0]}, not the {op} {type_}")
        return found

    def number(self, value: object, type_: Type) -> Value:
        return self.add("constant", {"value": value, "type": type_}, ())

    def cast(self, value: Value, dtype: str) -> Value:
        is_there = self.type_of(value).dtype == dtype
        return value if is_there else self.add("cast", {"dtype": dtype}, [value])

    def total(self, value: Value, other: Value | None) -> Value:
        """A sum with what there is so far."""
        return value if other is None else self.apply("add", other, value)

    def read(self, op: str, shape: Shape, operands: Sequence[Value], **parts: Any) -> Value:
        """A move or a reduction; its operands are read in order, unless `reads` says otherwise."""
        given = {
            "name": "", "shape": shape, "over": (), "indices": 0, "value": 0,
            "dtype": self.type_of(operands[0]).dtype,
        }  # fmt: skip
        return self.add(op, {**given, **parts}, operands)

    def spread(self, value: Value, shape: Shape) -> Value:
        """Repeated along new leading or trailing axes: of a scalar, or along the first axes."""
        own = self.type_of(value).shape
        if own == shape:
            return value
        read = Read((), flat_index(own, [variable(i) for i in range(len(own))]))
        return self.read("move", shape, [value], reads=(read,))

    def summed(self, value: Value) -> Value:
        """The sum of all elements."""
        shape = self.type_of(value).shape
        if not shape:
            return value
        read = Read((), flat_index(shape, [variable(i) for i in range(len(shape))]))
        return self.read("reduce_sum", (), [value], reads=(read,), over=shape)

    def inlined(self, graph: Graph, given: Sequence[Value]) -> list[Value]:
        """A body's nodes, with values for its inputs; where its outputs are."""
        return self._inlined(graph, dict(zip(graph.inputs, given, strict=True)))

    def inlined_by_name(self, graph: Graph, given: Mapping[str, Value]) -> list[Value]:
        """The same with values for inputs by name; other leaves are those of this graph."""
        known: dict[int, Value] = {}
        for name, position in graph.leaves.items():
            node = graph.nodes[position]
            if node.op == "input" and name not in given:
                raise Rejected(f"{graph.name!r} reads {name!r}, which nothing gives")
            is_given = node.op == "input"
            known[position] = given[name] if is_given else self.leaf(node.op, name, node.types[0])
            if self.type_of(known[position]) != node.types[0]:
                raise Rejected(f"{graph.name!r} reads {name!r} as a {node.types[0]}")
        return self._inlined(graph, known)

    def _inlined(self, graph: Graph, given: Mapping[int, Value]) -> list[Value]:
        places: list[int] = []
        for position, node in enumerate(graph.nodes):
            places.append(len(self.nodes))
            if position not in given:
                operands = tuple([_moved(v, places, given) for v in node.operands])
                self.nodes.append(node._replace(operands=operands))
        return [_moved(v, places, given) for _, _, v in graph.outputs]

    def finished(self, outputs: Iterable[Output], name: str = "graph", digest: Any = "") -> Graph:
        return Graph(tuple(self.nodes), tuple(outputs), name, digest)


def _moved(value: Value, places: Sequence[int], given: Mapping[int, Value]) -> Value:
    found = given.get(value.node)
    return Value(places[value.node], value.output) if found is None else found


def variable(name: int | str) -> Index:
    return Index(0, ((1, str(name)),))


def flat_index(shape: Shape, index: Sequence[Index]) -> Index:
    """Where an element is among all, row by row; an axis of one element says nothing."""
    offset, terms = 0, list[Any]()
    for i, (n, own) in enumerate(zip(shape, index, strict=False)):
        step = math.prod(shape[i + 1 :])
        if n != 1:
            offset += step * own.offset
            terms += [(step * factor, atom) for factor, atom in own.terms]
    return summed(offset, terms)
