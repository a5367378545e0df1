"""Patterns of the file of rules, found in an e-graph.

A pattern is compiled once. Matching tries each node of a class; a class has a bit for each op in
it, so that most tries end before they begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from treadle.base.errors import ArgumentError
from treadle.egraph.expressions import Expression, evaluate, expression
from treadle.egraph.graph import NUMBER, EGraph
from treadle.egraph.language import COMMUTATIVE, DataRule, Term, Text, applied, to_text
from treadle.ir.op import OPS, Op

LABELS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
Names = dict[str, Any]  # tensors are nodes, by number


class Name(NamedTuple):
    """Any class."""

    name: str


class Rest(NamedTuple):
    """The operands that are left."""

    name: str


class Number(NamedTuple):
    """A class that is one number: the given one, or any by a name."""

    value: Any
    name: str = ""


class Use(NamedTuple):
    """A node of an op."""

    op: str
    fields: tuple[tuple[str, Term], ...]
    operands: tuple[Pattern, ...]
    orders: tuple[tuple[int, ...], ...]  # in which operands are tried

    @property
    def depth(self) -> int:
        return 1 + max((p.depth for p in self.operands if isinstance(p, Use)), default=0)


Pattern = Name | Rest | Number | Use


class Found(NamedTuple):
    """What names stand for, nodes in the order of the pattern, equalities that the match needs."""

    names: Names
    matched: tuple[int, ...]
    sides: tuple[tuple[int, int], ...]


class CompiledRule(NamedTuple):
    """A rule with its patterns compiled."""

    rule: DataRule
    sources: tuple[Use, ...]
    depth: int
    tensors: frozenset[str]  # names of tensors
    lets: tuple[tuple[str, Expression], ...]
    conditions: tuple[Expression, ...]
    targets: tuple[Made | str, ...]


class Made(NamedTuple):
    """A node of a replacement: operands are made too, or names of tensors."""

    op: Op
    fields: tuple[tuple[str, Expression], ...]
    operands: tuple[Made | str, ...]


def compiled(rule: DataRule) -> CompiledRule:
    sources = tuple(_pattern(rule, s) for s in rule.sources)
    if not all(isinstance(s, Use) for s in sources):
        raise ArgumentError("rules", f"{rule.name} begins with no op", "A pattern is (op …).")
    uses = tuple(s for s in sources if isinstance(s, Use))
    tensors = frozenset(n for use in uses for n in _tensors(use))
    lets = tuple((name, expression(term)) for name, term in rule.lets)
    conditions = tuple(map(expression, (*rule.when, *rule.worth)))
    targets = tuple(_made(rule, t) for t in rule.targets)
    depth = max(u.depth for u in uses)
    return CompiledRule(rule, uses, depth, tensors, lets, conditions, targets)


def _made(rule: DataRule, term: Term) -> Made | str:
    if isinstance(term, str) and not isinstance(term, Text):
        return term
    use = applied(term)
    if use is None or use.op not in OPS:
        raise ArgumentError("rules", f"{rule.name}: {to_text(term)} in to", "Use (op …) or a name.")
    fields = tuple((field, expression(value)) for field, value in use.fields)
    return Made(OPS[use.op], fields, tuple(_made(rule, t) for t in use.operands))


def _pattern(rule: DataRule, term: Term) -> Pattern:
    match term:
        case ("number", str(name)):
            return Number(None, name)
        case Text():
            pass
        case str(name):
            return Rest(name) if name.endswith("...") else Name(name)
        case tuple():
            use = applied(term)
            if use is not None and use.op in OPS:
                operands = tuple(_pattern(rule, t) for t in use.operands)
                return Use(use.op, use.fields, operands, _orders(use.op, len(operands)))
        case _:
            return Number(term)
    raise ArgumentError("rules", f"{rule.name}: {term!r} is no pattern", "Use (op …), a name, 1.")


def _orders(op: str, count: int) -> tuple[tuple[int, ...], ...]:
    usual = tuple(range(count))
    return (usual, (1, 0)) if op in COMMUTATIVE and count == 2 else (usual,)


def _tensors(pattern: Pattern) -> Iterator[str]:
    match pattern:
        case Use():
            for p in pattern.operands:
                yield from _tensors(p)
        case Name(name):
            yield name
        case _:
            pass


def needs(graph: EGraph, pattern: Use) -> tuple[tuple[tuple[int, int], ...], ...]:
    """For each order of operands: bits that the classes of some children must have."""
    every = []
    for order in pattern.orders:
        bits = ((i, _bit(graph, p)) for i, p in zip(order, pattern.operands, strict=True))
        every.append(tuple((i, bit) for i, bit in bits if bit))
    return tuple(every)


def _bit(graph: EGraph, pattern: Pattern) -> int:
    if isinstance(pattern, Use):
        return graph.bit_of(pattern.op)
    return graph.bit_of(NUMBER) if isinstance(pattern, Number) else 0


def matches(graph: EGraph, pattern: Use, node: int, names: Names) -> Iterator[Found]:
    """Every way in which a node matches, given what names stand for already."""
    head = graph.heads[graph.head[node]]
    if head.op.name != pattern.op:
        return
    children, wanted = graph.children[node], pattern.operands
    has_rest = bool(wanted) and isinstance(wanted[-1], Rest)
    count = len(wanted) - has_rest
    if len(children) < count if has_rest else len(children) != count:
        return
    for order in pattern.orders:
        if not _may_match(graph, pattern, children, order, count):
            continue
        bound = _fields(pattern, head.fields, names) if pattern.fields else names
        if bound is None:
            return
        if has_rest:
            rest = wanted[-1]
            assert isinstance(rest, Rest)
            bound = {**bound, rest.name: children[count:]}
        start = Found(bound, (node,), ())
        yield from _operands(graph, pattern, [children[i] for i in order], 0, count, start)


def _may_match(
    graph: EGraph, pattern: Use, children: tuple[int, ...], order: tuple[int, ...], count: int
) -> bool:
    for i in range(count):
        bit = _bit(graph, pattern.operands[i])
        if bit and not graph.ops[graph.find(children[order[i]])] & bit:
            return False
    return True


def _operands(
    graph: EGraph, pattern: Use, children: list[int], i: int, count: int, so_far: Found
) -> Iterator[Found]:
    """The ways in which operands from the i-th on match."""
    if i == count:
        yield so_far
        return
    wanted, child = pattern.operands[i], children[i]
    if isinstance(wanted, Use):
        for node in tuple(graph.members[graph.find(child)]):
            for inner in matches(graph, wanted, node, so_far.names):
                matched = so_far.matched + inner.matched
                sides = (*so_far.sides, (child, node), *inner.sides)
                found = Found(inner.names, matched, sides)
                yield from _operands(graph, pattern, children, i + 1, count, found)
        return
    bound = _bound(graph, wanted, child, so_far)
    if bound is not None:
        yield from _operands(graph, pattern, children, i + 1, count, bound)


def _bound(graph: EGraph, wanted: Pattern, child: int, so_far: Found) -> Found | None:
    """What is known after a name or a number stands for a child."""
    names, class_ = so_far.names, graph.find(child)
    if isinstance(wanted, Number):
        constant = graph.numbers[class_]
        number, sides = graph.number_of(constant), (*so_far.sides, (child, constant))
        if wanted.value is None:
            return Found({**names, wanted.name: number}, so_far.matched, sides)
        is_it = number == wanted.value and str(number).startswith("-") == (wanted.value < 0)
        return Found(names, so_far.matched, sides) if is_it else None
    assert isinstance(wanted, Name)
    known = names.get(wanted.name)
    if known is None:
        return Found({**names, wanted.name: child}, so_far.matched, so_far.sides)
    if graph.find(known) != class_:
        return None
    return Found(names, so_far.matched, (*so_far.sides, (known, child)))


def _fields(pattern: Use, fields: Any, names: Names) -> Names | None:
    """What names stand for after a pattern's fields are compared; None where one differs."""
    bound = dict(names)
    renamed: dict[str, str] = {}
    in_order = pattern.fields
    if pattern.op == "contract":  # labels that have names already come first
        in_order = tuple(sorted(in_order, key=lambda field: field[1] not in bound))
    for field, term in in_order:
        value = fields[field]
        if pattern.op == "contract" and field != "dtype":
            value = _relabelled(value, bound.get(str(term)), renamed, bound)
            if value is None:
                return None
        is_name = isinstance(term, str) and not isinstance(term, Text)
        wanted = bound.setdefault(str(term), value) if is_name else evaluate(term, {})
        if wanted != value:
            return None
    return bound


def _relabelled(
    labels: tuple[str, ...], wanted: Any, renamed: dict[str, str], bound: Names
) -> tuple[str, ...] | None:
    """Labels by the names they have in the rest of the match, or by names that are free there."""
    if wanted is not None and len(wanted) != len(labels):
        return None
    used = {c for v in bound.values() if isinstance(v, tuple) for c in v} | set(renamed.values())
    free = (c for c in LABELS if c not in used)
    for i, label in enumerate(labels):
        if label not in renamed:
            new = next(free) if wanted is None else wanted[i]
            if new in renamed.values():
                return None
            renamed[label] = new
    return tuple(renamed[c] for c in labels)
