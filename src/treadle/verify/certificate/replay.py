"""Stages of a compile, checked while it compiles by the checker of certificates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from treadle.base.errors import GraphError
from treadle.ir.composition import Composition
from treadle.ir.graph import Graph
from treadle.ir.ops.leaves import Leaf
from treadle.ir.types import TensorType
from treadle.kernel.evidence import Passage, Relation
from treadle.verify.certificate.graphs import Records, operand_types, ordered, use_record
from treadle.verify.gradients import is_right
from treadle_checker.budget import Budget
from treadle_checker.draws import WHOLE as WHOLE
from treadle_checker.draws import Effort
from treadle_checker.forms import key_of
from treadle_checker.graph import SCHEMA, read_attributes
from treadle_checker.reading import NotEstablished, Rejected
from treadle_checker.relations import check_composed, check_derived, check_equal, with_gradients
from treadle_checker.types import Graph as Known
from treadle_checker.types import Node, Type, Value
from treadle_checker.updates import Plan, Update, composed

# A compile waits for all of its comparisons together, 0.2 s at most: what takes longer is left to
# `treadle check`.
QUICK = Effort(spent=2**22, samples=2, cuts=1, draws=4)
WRONG = {
    Relation.EQUAL: "gave a graph that is not equal to the one before",
    Relation.GRADIENTS: "gave gradients that are not those of the loss",
    Relation.UPDATES: "gave another step than the one that was asked for",
    Relation.PART: "is not a part of the step",
}


def replayed(passages: Sequence[Passage], effort: Effort = QUICK) -> list[Passage]:
    """Each passage, with the reason if it is not known to be right; a GraphError if it is wrong.

    Stages that take numbers for others that are near are not looked at.
    """
    known = _Graphs()  # what graphs have in common is translated once
    budget = Budget(effort.spent)
    return [_replayed(passage, known, effort, budget) for passage in passages]


def _replayed(passage: Passage, known: _Graphs, effort: Effort, budget: Budget) -> Passage:
    if passage.relation is Relation.EQUAL and passage.before == passage.after:
        return passage
    if passage.assumptions:
        return replace(passage, reason=f"equal but for {' and '.join(passage.assumptions)}")
    try:
        _check(passage, known, effort, budget)
    except NotEstablished as reason:
        return replace(passage, reason=str(reason))
    except Rejected as wrong:
        if passage.relation is Relation.GRADIENTS and _is_right(passage):
            return replace(passage, reason=f"forward mode finds no difference where {wrong}")
        cause = f"{passage.stage} {WRONG[passage.relation]}: {wrong}"
        raise GraphError("verify", cause, "Compile with rewrite=False, and report it.") from wrong
    return passage


def _is_right(passage: Passage) -> bool:
    return is_right(passage.before, passage.after, passage.frozen)


def _check(passage: Passage, known: _Graphs, effort: Effort, budget: Budget) -> None:
    before, after = known.of(passage.before), known.of(passage.after)
    pairs: Any = passage.pairs
    match passage.relation:
        case Relation.GRADIENTS:
            cotangents: Any = passage.cotangents
            derived = with_gradients(before, after, passage.frozen, pairs, cotangents)
            check_derived(derived, after, effort, budget)
        case Relation.UPDATES:
            assert passage.composition is not None
            plan = _plan(passage.composition(), known)
            check_composed(composed(before, plan), after, effort, budget)
        case _:
            is_part = passage.relation is Relation.PART
            check_equal(before, after, pairs, effort, budget, is_part)


def _plan(c: Composition, known: _Graphs) -> Plan:
    rate, graph = (None if g is None else known.of(g) for g in (c.rate, c.graph))
    update = Update(c.name, c.flags, c.decayed, rate, graph)
    return Plan(c.mode, c.prefix, c.clips, c.accumulates, c.scales, update, c.reason)


def _type(t: TensorType) -> Type:
    return Type(t.dtype.name, t.shape)


class _Graphs:
    """Treadle's graphs as the checker has them, without a file between."""

    def __init__(self) -> None:
        self.records = Records()
        self.uses: dict[Any, tuple[str, Any, int, Sequence[int] | None]] = {}
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
    ) -> tuple[str, Any, int, Sequence[int] | None]:
        if isinstance(attributes, Leaf):  # most uses are: they need no record
            leaf = {"name": attributes.name, "type": _type(attributes.type)}
            return op.name, leaf, key_of(op.name, leaf), None
        name, raw, order = use_record(op, attributes, operands, self.records)
        if name not in SCHEMA:  # one that somebody added
            raise NotEstablished(f"the checker does not know the op {name}")
        read = read_attributes(name, raw, self._body)
        return name, read, key_of(name, read), order

    def _body(self, name: str) -> Known:
        if name not in self.graphs:
            self.graphs[name] = self.of(self.records.by_name[name], name)
        return self.graphs[name]
