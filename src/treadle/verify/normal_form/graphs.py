"""Graphs as forms: the element of each output at index variables.

Elements are computed from the outputs down, at the indices that are asked for, and kept: a value
that is read at the same indices twice is looked at once. Ops of which nothing is known become atoms
of their whole operands, so that equal operands still give equal results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from treadle.base import dtypes
from treadle.domains.domain import Typed, evaluate
from treadle.ir.control import SCAN
from treadle.ir.graph import Graph, GraphBuilder, Node, Output, Value
from treadle.ir.op import Attributes, Op, RuleTable, Types
from treadle.ir.ops.leaves import Leaf
from treadle.verify.normal_form import index as ix
from treadle.verify.normal_form.algebra import of_atom
from treadle.verify.normal_form.form import Atom, BudgetError, Form, Kind, bound_atom
from treadle.verify.normal_form.functions import Work
from treadle.verify.normal_form.index import Index
from treadle.verify.normal_form.sizes import Sizes

At = tuple[Index, ...]
_MOST_DEPTH = 150  # ops in a chain: elements are read by recursion

# What an element of an op's only result is: by the reader, the node and the indices.
ELEMENT: RuleTable[Callable[..., Form]] = RuleTable("element")


class Reader:
    """Reads elements of a graph's values at indices."""

    def __init__(self, graph: Graph, work: Work, sizes: Sizes):
        self.graph, self.work, self.sizes = graph, work, sizes
        self.known: dict[tuple[Value, At], Form] = {}
        self.depth = 0

    def shape(self, value: Value) -> At:
        return tuple(self.sizes.index(n) for n in self.graph.type_of(value).shape)

    def size(self, n: int) -> Index:
        return self.sizes.index(n)

    def at(self, value: Value, at: Sequence[Index]) -> Form:
        """The element of a value."""
        key = value, tuple(at)
        found = self.known.get(key)
        if found is None:
            self.work.spend()
            self.depth += 1
            if self.depth > _MOST_DEPTH:
                raise BudgetError(f"a chain of more than {_MOST_DEPTH} ops")
            found = self.known[key] = self._element(value, key[1])
            self.depth -= 1
        return found

    def _element(self, value: Value, at: At) -> Form:
        node = self.graph.nodes[value.node]
        if isinstance(node.attributes, Leaf):
            is_flag = node.types[0].dtype is dtypes.bool_
            return of_atom(Atom(Kind.LEAF, node.attributes.name, at, is_flag=is_flag))
        entry = ELEMENT.get(node.op)
        if entry is None:
            return self._whole(value, node, at)
        return entry(self, node, at)

    def _whole(self, value: Value, node: Node, at: At) -> Form:
        """An op of which nothing is known."""
        binders, forms = [], []
        for operand in node.operands:
            own = [self.work.fresh(n) for n in self.shape(operand)]
            forms.append(self.at(operand, [ix.of_letter(v) for v in own]))
            binders += own
        label = f"{node.op.name}.{value.output} {node.attributes!r} {list(node.types)}"
        return of_atom(bound_atom(Kind.WHOLE, binders, tuple(forms), label, at))

    def operands(self, node: Node, at: At) -> list[Form]:
        """Elements of all operands at the same indices."""
        return [self.at(v, at) for v in node.operands]


class _Opening:
    """Graphs as a domain that takes composites and calls apart; scans stay."""

    keeps: frozenset[Op] = frozenset([SCAN])

    def __init__(self) -> None:
        self.builder = GraphBuilder()

    def apply(
        self, op: Op, attributes: Attributes, operands: Sequence[Typed[Value]], types: Types
    ) -> Sequence[Value]:
        return self.builder.add(op, attributes, [o.value for o in operands])


def opened(graph: Graph) -> Graph:
    """The graph in primitives and scans."""
    opening = _Opening()
    leaves = {
        name: opening.builder.add(graph.nodes[i].op, graph.nodes[i].attributes, ())[0]
        for name, i in graph.leaves.items()
    }
    values = evaluate(graph, leaves, opening)
    outputs = [Output(o.kind, o.name, v) for o, v in zip(graph.outputs, values, strict=True)]
    return opening.builder.build(outputs, graph.name)
