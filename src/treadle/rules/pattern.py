"""Patterns of a graph: an op over patterns of its operands, with names for what is captured.

A pattern is data. It says what a part of a graph looks like; conditions on shapes, attributes and
sizes are functions beside it, in the rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Protocol

from treadle.ir import literal
from treadle.ir.graph import Node, Value
from treadle.ir.op import Op
from treadle.ir.ops.leaves import Constant
from treadle.ir.types import TensorType


@dataclass(frozen=True, slots=True)
class Anything:
    """Any value. The same name twice in a pattern stands for one value."""

    name: str


X = Anything("x")


@dataclass(frozen=True, slots=True)
class Number:
    """A constant that is one number everywhere: a given one, or any. −0 is not 0."""

    value: int | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class Apply:
    """A use of one of some ops. Without operands: over any, however many.

    `single_use` asks that nothing else reads the value. That is a question of cost: a rewrite that
    keeps the value for other readers is right, and computes it twice. `commutes` also tries the
    operands in reverse.
    """

    ops: frozenset[Op]
    operands: tuple[Pattern, ...] | None = None
    name: str = ""
    single_use: bool = False
    commutes: bool = False


@dataclass(frozen=True, slots=True)
class Composite:
    """A use of any composite, over any operands; those declared later count too."""

    name: str = ""


Pattern = Anything | Number | Apply | Composite
Root = Apply | Composite


def apply(
    op: Op | frozenset[Op],
    *operands: Pattern,
    name: str = "",
    single_use: bool = False,
    commutes: bool = False,
) -> Apply:
    """The pattern of an op over patterns; over any operands where none are given."""
    ops = op if isinstance(op, frozenset) else frozenset([op])
    return Apply(ops, operands or None, name, single_use, commutes)


class Nodes(Protocol):
    """What can be matched: a graph, or one that is being built."""

    @property
    def nodes(self) -> Sequence[Node]: ...

    def type_of(self, value: Value) -> TensorType: ...


def is_root(pattern: Root, op: Op) -> bool:
    """Whether a use of the op may match at all."""
    return op in pattern.ops if isinstance(pattern, Apply) else op.is_composite


def in_each_order(pattern: Root) -> tuple[Root, ...]:
    """Patterns of one order each, which stand for one whose operands may commute."""
    if isinstance(pattern, Composite) or pattern.operands is None:
        return (pattern,)
    orders = [in_each_order(p) if isinstance(p, Apply) else (p,) for p in pattern.operands]
    every = list(product(*orders))
    if pattern.commutes:
        every += [operands[::-1] for operands in every]
    return tuple(replace(pattern, operands=operands, commutes=False) for operands in every)


def captures(
    graph: Nodes, pattern: Root, node: Node, uses: Mapping[Value, int]
) -> dict[str, Value] | None:
    """The values that a pattern names, if a node over operands in the graph matches it.

    The node itself need not be in the graph. Operands are compared in the order they have.
    """
    found: dict[str, Value] = {}
    return found if _matches_node(graph, pattern, node, uses, found) else None


def _matches_node(
    graph: Nodes, pattern: Root, node: Node, uses: Mapping[Value, int], found: dict[str, Value]
) -> bool:
    if isinstance(pattern, Composite):
        return node.op.is_composite
    if node.op not in pattern.ops:
        return False
    wanted, operands = pattern.operands, node.operands
    if wanted is None:
        return True
    if len(wanted) != len(operands):
        return False
    return all(_matches(graph, wanted[i], v, uses, found) for i, v in enumerate(operands))


def _matches(
    graph: Nodes, pattern: Pattern, value: Value, uses: Mapping[Value, int], found: dict[str, Value]
) -> bool:
    # Most of a pass over a graph is spent here: `isinstance` costs half of what `match` does.
    if isinstance(pattern, Number):
        if not _is(number_of(graph, value), pattern.value):
            return False
    elif not isinstance(pattern, Anything):
        if isinstance(pattern, Apply) and pattern.single_use and uses[value] != 1:
            return False
        if not _matches_node(graph, pattern, graph.nodes[value.node], uses, found):
            return False
    return not pattern.name or found.setdefault(pattern.name, value) == value


def number_of(graph: Nodes, value: Value) -> literal.Number | None:
    """The number that a value is everywhere, if it is a constant of one number."""
    attributes = graph.nodes[value.node].attributes
    if isinstance(attributes, Constant) and not isinstance(attributes.value, literal.ArrayLiteral):
        return attributes.value
    return None


def _is(number: literal.Number | None, wanted: int | None) -> bool:
    if number is None or wanted is None:
        return number is not None
    return number == wanted and not str(number).startswith("-")


def needs_uses(pattern: Pattern) -> bool:
    """Whether a pattern asks how often values are read."""
    if not isinstance(pattern, Apply):
        return False
    return pattern.single_use or any(map(needs_uses, pattern.operands or ()))


def to_text(pattern: Pattern) -> str:
    """A pattern in one line: `once` for what nothing else may read, `name=` for what is named."""
    match pattern:
        case Anything(name):
            return name
        case Number(value, name):
            return f"number {name}" if value is None else str(value)
        case Composite():
            return "composite(…)"
        case Apply(ops, operands, name):
            op = " | ".join(sorted(o.name for o in ops))
            inner = "…" if operands is None else ", ".join(map(to_text, operands))
            text = f"{op}({inner})" if len(ops) == 1 else f"({op})({inner})"
            text = f"once {text}" if pattern.single_use else text
            text = f"{text} in either order" if pattern.commutes else text
            return f"{name}={text}" if name else text
