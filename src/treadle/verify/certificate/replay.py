"""The graphs around a stage, compared by the checker while a step is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from treadle.base.errors import GraphError
from treadle.ir.graph import Graph
from treadle.ir.ops.leaves import Leaf
from treadle.ir.types import TensorType
from treadle.kernel.evidence import Passage, Relation
from treadle.verify.certificate.graphs import Records, operand_types, ordered, use_record
from treadle_checker.budget import Budget
from treadle_checker.equality import Effort, check_related
from treadle_checker.graph import SCHEMA, key_of, read_attributes
from treadle_checker.reading import NotEstablished, Rejected
from treadle_checker.types import Graph as Known
from treadle_checker.types import Node, Type, Value

# A compile waits for all of its comparisons together, 0.2 s at most: what takes longer is left to
# `treadle check`.
QUICK = Effort(spent=2**22, samples=2)


def replayed(passages: Sequence[Passage]) -> list[Passage]:
    """Each passage, with the reason if its graphs are not known to be equal; a GraphError if they
    differ. Stages that take numbers for others that are near are not looked at.
    """
    known = _Graphs()  # what graphs have in common is translated once
    budget = Budget(QUICK.spent)
    return [_replayed(passage, known, budget) for passage in passages]


def _replayed(passage: Passage, known: _Graphs, budget: Budget) -> Passage:
    before, after = passage.before, passage.after
    if passage.relation is not Relation.EQUAL or before == after:
        return passage
    if passage.assumptions:
        return replace(passage, reason=f"equal but for {' and '.join(passage.assumptions)}")
    proposed: Any = passage.pairs
    try:
        check_related("equal", known.of(before), known.of(after), proposed, QUICK, budget)
    except NotEstablished as reason:
        return replace(passage, reason=str(reason))
    except Rejected as wrong:
        cause = f"{passage.stage} gave a graph that is not equal to the one before: {wrong}"
        raise GraphError("verify", cause, "Compile with rewrite=False, and report it.") from wrong
    return passage


def _type(t: TensorType) -> Type:
    return Type(t.dtype.name, t.shape)


class _Graphs:
    """Treadle's graphs as the checker has them, without a file between."""

    def __init__(self) -> None:
        self.records = Records()
        self.uses: dict[Any, tuple[str, Any, str, Sequence[int] | None]] = {}
        self.types: dict[Any, tuple[Type, ...]] = {}
        self.graphs: dict[str, Known] = {}

    def of(self, graph: Graph, name: str = "") -> Known:
        """Its values and lines are taken as they are: they look the same, and there are many."""
        nodes, uses, every = list[Node](), self.uses, self.types
        for node in graph.nodes:
            use = node.op, node.attributes, operand_types(graph, node)
            known = uses.get(use)
            if known is None:
                known = uses[use] = self._use(*use)
            types = every.get(node.types)
            if types is None:
                types = tuple(map(_type, node.types))
                every[node.types] = types
            op, attributes, key, order = known
            operands: Any = node.operands if order is None else tuple(ordered(node, order))
            line: Any = node.origin or ""
            nodes.append(Node(op, attributes, operands, types, line, key))
        outputs = tuple((o.kind.value, o.name, Value(*o.value)) for o in graph.outputs)
        return Known(tuple(nodes), outputs, graph.name, name)

    def _use(
        self, op: Any, attributes: Any, operands: Any
    ) -> tuple[str, Any, str, Sequence[int] | None]:
        if isinstance(attributes, Leaf):  # most uses are: they need no record
            leaf = {"name": attributes.name, "type": _type(attributes.type)}
            dtype, shape = leaf["type"]
            return op.name, leaf, f'{op.name} ["{dtype}", {shape}] {attributes.name!r}', None
        name, raw, order = use_record(op, attributes, operands, self.records)
        if name not in SCHEMA:  # one that somebody added
            raise NotEstablished(f"the checker does not know the op {name}")
        return name, read_attributes(name, raw, self._body), key_of(name, raw), order

    def _body(self, name: str) -> Known:
        if name not in self.graphs:
            self.graphs[name] = self.of(self.records.by_name[name], name)
        return self.graphs[name]
