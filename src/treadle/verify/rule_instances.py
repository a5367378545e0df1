"""Instances of rules that are data: graphs of both sides, for given shapes and attributes.

This reads rules by itself, beside the e-graph's matcher: the two share the file and its language,
and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treadle.base import dtypes
from treadle.base.errors import ArgumentError, TreadleError
from treadle.egraph.attributes import attributes_of
from treadle.egraph.expressions import evaluate
from treadle.egraph.language import Applied, DataRule, Term, Text, applied, to_text
from treadle.ir.graph import Graph, GraphBuilder, Output, OutputKind, Value
from treadle.ir.op import OPS
from treadle.ir.ops.leaves import CONSTANT, INPUT, Constant, Leaf
from treadle.ir.types import TensorType

Names = dict[str, Any]
# Values for numbers of a pattern: far from the values of sizes, and held by every float32.
NUMBERS = (1009, 2003, 3001)
_ARITHMETIC = frozenset("+-*")


@dataclass(frozen=True, slots=True)
class Instance:
    """Both sides of a rule over the same leaves, output by output."""

    left: Graph
    right: Graph
    names: Mapping[str, Any]  # what the pattern's names stand for


class NoInstanceError(Exception):
    """The rule does not apply to these shapes and attributes."""


def symbols_of(case: Mapping[str, Term], labels: frozenset[str]) -> list[str]:
    """The sizes of a case, in order of appearance."""
    found: dict[str, None] = {}

    def look(term: Term) -> None:
        if isinstance(term, tuple):
            for part in term:
                look(part)
        elif isinstance(term, str) and term not in dtypes.EVERY and term not in _ARITHMETIC:
            found[term] = None

    for name, term in case.items():
        if name not in labels:
            look(term)
    return list(found)


def label_fields(rule: DataRule) -> frozenset[str]:
    """Names that stand for labels of contractions."""
    found: set[str] = set()

    def look(term: Term) -> None:
        use = applied(term) if isinstance(term, tuple) and term else None
        if use is None:
            return
        if use.op == "contract":
            found.update(str(v) for f, v in use.fields if f != "dtype" and isinstance(v, str))
        for operand in use.operands:
            look(operand)

    for source in rule.sources:
        look(source)
    return frozenset(found)


def of_case(rule: DataRule, case: Mapping[str, Term], sizes: Mapping[str, int]) -> Instance:
    """The instance of a case, with values for its sizes."""
    labels = label_fields(rule)
    names: Names = {}
    tensors, numbers = _tensors(rule), _numbers(rule)
    for name, term in case.items():
        if name in labels:
            names[name] = term
        elif name in tensors or name in numbers:
            names[name] = _type(term, sizes)
        elif name.endswith("..."):
            assert isinstance(term, tuple)
            names[name] = tuple(_type(t, sizes) for t in term)
        else:
            names[name] = _value(term, sizes)
    return instance(rule, names)


def _type(term: Term, sizes: Mapping[str, int]) -> TensorType:
    parts = list(term) if isinstance(term, tuple) else [term]
    dtype = dtypes.float32
    first = parts[0] if parts else None
    if isinstance(first, str) and first in dtypes.EVERY:
        dtype = dtypes.EVERY[first]
        del parts[0]
    return TensorType(tuple(_value(p, sizes) for p in parts), dtype)


def _value(term: Term, sizes: Mapping[str, int]) -> Any:
    if isinstance(term, tuple):
        if term and term[0] in _ARITHMETIC:
            return evaluate(term, sizes)
        return tuple(_value(t, sizes) for t in term)
    return sizes.get(term, term) if isinstance(term, str) else term


def _patterns(rule: DataRule) -> Iterator[Term]:
    stack = list(rule.sources)
    while stack:
        term = stack.pop()
        yield term
        use = applied(term) if isinstance(term, tuple) and term else None
        stack += list(use.operands) if use is not None else []


def _tensors(rule: DataRule) -> frozenset[str]:
    found = (t for t in _patterns(rule) if isinstance(t, str) and not isinstance(t, Text))
    return frozenset(t for t in found if not t.endswith("..."))


def _numbers(rule: DataRule) -> frozenset[str]:
    pairs = (t for t in _patterns(rule) if isinstance(t, tuple) and t and t[0] == "number")
    return frozenset(str(t[1]) for t in pairs)


def instance(rule: DataRule, names: Mapping[str, Any]) -> Instance:
    """Both sides for what names stand for: types of tensors and numbers, values of fields."""
    building = _Building(rule, names)
    try:
        if rule.member:
            return building.of_each()
        return building.of_one()
    except (TreadleError, IndexError, ValueError, KeyError, AttributeError) as error:
        raise NoInstanceError(f"{type(error).__name__}: {error}") from error


class _Building:
    """Graphs in the making, of one rule for given names."""

    def __init__(self, rule: DataRule, names: Mapping[str, Any]):
        self.rule, self.given = rule, names
        self.numbers = dict(zip(sorted(_numbers(rule)), NUMBERS, strict=False))
        self.tensors = _tensors(rule)

    def leaves(self, builder: GraphBuilder) -> dict[str, Any]:
        """A leaf for each tensor."""
        found: dict[str, Any] = {}
        for name, given in sorted(self.given.items()):
            if name in self.tensors:
                found[name] = builder.add(INPUT, Leaf(name, given), ())[0]
            elif name.endswith("..."):
                found[name] = tuple(
                    builder.add(INPUT, Leaf(f"{name[:-3]}{i}", t), ())[0]
                    for i, t in enumerate(given)
                )
        return found

    def of_one(self) -> Instance:
        left, right = GraphBuilder(), GraphBuilder()
        before = self.leaves(left)
        sources = [self.source(left, s, before, None) for s in self.rule.sources]
        after = self.leaves(right)
        names = self.names(left.type_of(sources[0]), {})
        targets = [self.target(right, t, after, names) for t in self.rule.targets]
        return self.checked(left, sources, right, targets)

    def of_each(self) -> Instance:
        """A rule about several nodes that differ in one tensor."""
        member, rule = self.rule.member, self.rule
        left, right = GraphBuilder(), GraphBuilder()
        before, after = self.leaves(left), self.leaves(right)
        every = self.given[f"{member}..."]
        sources, targets = [], []
        for i, type_ in enumerate(every):
            named = {**before, member: before[f"{member}..."][i]}
            sources.append(self.source(left, rule.sources[0], named, None))
            extra = {member: type_, f"{member}.before": every[:i]}
            names = self.names(left.type_of(sources[-1]), extra)
            named = {**after, member: after[f"{member}..."][i]}
            targets.append(self.target(right, rule.targets[0], named, names))
        return self.checked(left, sources, right, targets)

    def names(self, root: TensorType, extra: Names) -> Names:
        """Names as expressions see them; raises where a condition fails."""
        names: Names = {**self.given, **self.numbers, **extra, "root": root}
        for name, term in self.rule.lets:
            names[name] = evaluate(term, names)
        for condition in self.rule.when:
            if not evaluate(condition, names):
                raise NoInstanceError(f"{to_text(condition)} does not hold")
        return names

    def source(
        self, builder: GraphBuilder, term: Term, tensors: Names, like: TensorType | None
    ) -> Value:
        """A pattern as nodes; a number has the type of what it stands beside."""
        if isinstance(term, tuple) and term and term[0] == "number":
            name = str(term[1])
            type_ = self.given[name]
            return builder.add(CONSTANT, Constant(self.numbers[name], type_), ())[0]
        use = applied(term) if isinstance(term, tuple) else None
        if use is not None:
            operands = self.operands(builder, use, tensors)
            given = {f: self.field(v) for f, v in use.fields}
            kind = OPS[use.op]
            missing = (
                _fields_of(kind.attributes) if use.op != "contract" else ("x", "y", "out", "dtype")
            )
            for name in missing:
                if name not in given and name in self.given:
                    given[name] = self.given[name]
            return builder.add(kind, attributes_of(kind, given), operands)[0]
        if isinstance(term, str):
            found = tensors[term]
            assert isinstance(found, Value)
            return found
        if like is None:
            raise ArgumentError("rules", f"{self.rule.name}: {term!r} has no shape", "Add (op …).")
        assert isinstance(term, int | float) or hasattr(term, "numerator")
        return builder.add(CONSTANT, Constant(term, like), ())[0]  # type: ignore[arg-type]

    def operands(self, builder: GraphBuilder, use: Applied, tensors: Names) -> list[Value]:
        found: dict[int, Sequence[Value]] = {}
        is_literal = [not isinstance(t, str | tuple) for t in use.operands]
        for i in sorted(range(len(use.operands)), key=lambda i: is_literal[i]):
            term = use.operands[i]
            if isinstance(term, str) and term.endswith("..."):
                found[i] = tensors[term]
                continue
            like = next((builder.type_of(v[0]) for v in found.values()), None)
            found[i] = [self.source(builder, term, tensors, like)]
        return [v for i in range(len(use.operands)) for v in found[i]]

    def field(self, term: Term) -> Any:
        if isinstance(term, str) and not isinstance(term, Text):
            return self.given.get(term, term)
        return evaluate(term, {})

    def target(self, builder: GraphBuilder, term: Term, tensors: Names, names: Names) -> Value:
        if isinstance(term, str):
            found = tensors[term]
            assert isinstance(found, Value)
            return found
        use = applied(term)
        if use is None:
            raise ArgumentError("rules", f"{self.rule.name}: {to_text(term)} in to", "Use (op …).")
        operands: list[Value] = []
        for part in use.operands:
            if isinstance(part, str) and part.endswith("..."):
                operands += tensors[part]
            else:
                operands.append(self.target(builder, part, tensors, names))
        kind = OPS[use.op]
        given = {f: evaluate(v, names) for f, v in use.fields}
        return builder.add(kind, attributes_of(kind, given), operands)[0]

    def checked(
        self,
        left: GraphBuilder,
        sources: Sequence[Value],
        right: GraphBuilder,
        targets: Sequence[Value],
    ) -> Instance:
        types = [left.type_of(v) for v in sources], [right.type_of(v) for v in targets]
        if types[0] != types[1]:
            raise NoInstanceError(f"{types[0]} becomes {types[1]}")
        return Instance(_graph(left, sources), _graph(right, targets), self.given)


def _fields_of(kind: type) -> tuple[str, ...]:
    return tuple(getattr(kind, "__dataclass_fields__", ()))


def _graph(builder: GraphBuilder, values: Sequence[Value]) -> Graph:
    outputs = (Output(OutputKind.RESULT, str(i), v) for i, v in enumerate(values))
    return builder.build(outputs)
