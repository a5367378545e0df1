"""Rules of the file as rules of the driver: the same patterns, conditions and replacements."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from treadle.egraph import matching as m
from treadle.egraph.attributes import attributes_of, fields_of
from treadle.egraph.language import DataRule, own_rules, to_text
from treadle.ir.graph import GraphBuilder, Value
from treadle.ir.op import OPS
from treadle.rules.pattern import Anything, Apply, Number, Pattern
from treadle.rules.rule import Exactness, Match, Rule

Field = tuple[str, str, object]  # of which node, its name, what the pattern says


def driven_rules(set_: str) -> tuple[Rule, ...]:
    """The rules of one of the file's sets."""
    return tuple(driven(rule) for rule in own_rules() if rule.set == set_)


def driven(rule: DataRule) -> Rule:
    """A rule of the file, of one pattern and without contractions."""
    compiled = m.compiled(rule)
    nodes: list[m.Use] = []
    pattern = _pattern(compiled.sources[0], nodes)
    assert isinstance(pattern, Apply), rule.name
    fields = tuple(_fields(nodes))
    numbers = tuple(n for use in nodes for n in _numbers(use))

    def bound(match: Match) -> dict[str, Any] | None:
        names: dict[str, Any] = {"root": match.type}
        for node, field, term in fields:
            holder = match.root if node == "@0" else match.node(node)
            value = fields_of(holder.attributes)[field]
            wanted = names.setdefault(term, value) if isinstance(term, str) else term
            if wanted != value:
                return None
        names |= {name: match.type_of(name) for name in compiled.tensors}
        names |= {name: match.number(name) for name in numbers}
        try:
            for name, compute in compiled.lets:
                names[name] = compute(names)
            return names if all(holds(names) for holds in compiled.conditions) else None
        except (IndexError, ValueError):  # what has no value: see expressions.py
            return None

    def condition(match: Match) -> bool:
        return bound(match) is not None

    def build(match: Match, builder: GraphBuilder) -> Value:
        names = bound(match)
        assert names is not None, rule.name
        return _built(compiled.targets[0], names, match, builder)

    condition.__doc__ = " and ".join(map(to_text, rule.when)) or "always"
    exactness = Exactness.BITWISE if rule.is_exact else Exactness.ROUNDING
    return Rule(rule.name, rule.statement, pattern, build, condition, exactness)


def _pattern(pattern: m.Pattern, nodes: list[m.Use]) -> Pattern:
    match pattern:
        case m.Name(name):
            return Anything(name)
        case m.Number(value, name):
            return Number(value, name)
        case m.Use(op, _, operands, orders):
            name = f"@{len(nodes)}" if nodes else ""
            nodes.append(pattern)
            inner = tuple(_pattern(p, nodes) for p in operands)
            is_same = len(set(map(type, inner))) == 1
            commutes = len(orders) > 1 and not is_same
            return Apply(frozenset([OPS[op]]), inner or None, name, commutes=commutes)
        case m.Rest(name):
            raise AssertionError(f"{name}: the driver matches as many operands as are written")


def _fields(nodes: list[m.Use]) -> Iterator[Field]:
    for i, use in enumerate(nodes):
        for field, term in use.fields:
            yield f"@{i}", field, term


def _numbers(use: m.Use) -> Iterator[str]:
    return (p.name for p in use.operands if isinstance(p, m.Number) and p.name)


def _built(made: m.Made | str, names: dict[str, Any], match: Match, builder: GraphBuilder) -> Value:
    if isinstance(made, str):
        return match[made]
    operands = [_built(part, names, match, builder) for part in made.operands]
    attributes = attributes_of(made.op, {f: compute(names) for f, compute in made.fields})
    return builder.add(made.op, attributes, operands, match.root.origin)[0]
