"""Dual numbers over any domain: forward mode.

Over float64 it gives directional derivatives, over a finite field exact ones, and over graphs the
graph of the derivative (`td.jvp`). It shares no rule with reverse mode: the two check each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from treadle.domains.algebra import Num
from treadle.domains.domain import Domain, Typed, apply, bind, evaluate, input_names, number
from treadle.domains.symbolic import Symbolic
from treadle.ir.composites import SIGMOID, SILU
from treadle.ir.control import SCAN, Scan
from treadle.ir.graph import Graph, GraphBuilder, Output, OutputKind, Value
from treadle.ir.op import Attributes, Op, RuleTable, Types
from treadle.ir.ops.leaves import INPUT, Leaf
from treadle.ir.types import TensorType

V = TypeVar("V")


@dataclass(frozen=True, slots=True, eq=False)
class DualNumber(Generic[V]):
    """A value and its derivative; None is a derivative that is zero whatever the inputs."""

    primal: V
    tangent: V | None = None


@dataclass(frozen=True, slots=True)
class Push(Generic[V]):
    """What a tangent rule sees: operands, their tangents, results."""

    domain: Domain[V]
    op: Op
    attributes: Any  # the op's own attributes class
    primals: tuple[Num[V], ...]
    tangents: tuple[Num[V] | None, ...]
    results: tuple[Num[V], ...]

    @property
    def out(self) -> Num[V]:
        return self.results[0]

    def again(self, *operands: Num[V]) -> Num[V]:
        """The op itself on other operands."""
        return operands[0].apply(self.op, self.attributes, *operands[1:])


# Tangents of the results, in order. None stands for zero.
Tangents = tuple[Num[Any] | None, ...]
TANGENT: RuleTable[Callable[[Push[Any]], Tangents]] = RuleTable("tangent")


class Dual(Generic[V]):
    """Dual numbers over `base`. Calls are taken apart, and composites without a rule of their own.

    Sigmoids have one: by their definitions the derivative is ∞ · 0 where e⁻ˣ overflows.
    """

    keeps: frozenset[Op] = frozenset([SCAN, SIGMOID, SILU])

    def __init__(self, base: Domain[V]):
        self.base = base

    def apply(
        self, op: Op, attributes: Attributes, operands: Sequence[Typed[DualNumber[V]]], types: Types
    ) -> Sequence[DualNumber[V]]:
        if op is SCAN:
            assert isinstance(attributes, Scan)
            return self._scan(attributes, operands)
        primals = [Typed(o.type, o.value.primal) for o in operands]
        values = apply(self.base, op, attributes, primals, types)
        if all(o.value.tangent is None for o in operands):
            return [DualNumber(v) for v in values]
        push = Push(
            self.base,
            op,
            attributes,
            tuple(Num(self.base, p.type, p.value) for p in primals),
            tuple(
                None if o.value.tangent is None else Num(self.base, o.type, o.value.tangent)
                for o in operands
            ),
            tuple(Num(self.base, t, v) for t, v in zip(types, values, strict=True)),
        )
        tangents = TANGENT[op](push)
        for tangent, type_ in zip(tangents, types, strict=True):
            assert tangent is None or tangent.type == type_, (op, tangent, type_)
        return [
            DualNumber(v, None if t is None else t.value)
            for v, t in zip(values, tangents, strict=True)
        ]

    def _scan(
        self, attributes: Scan, operands: Sequence[Typed[DualNumber[V]]]
    ) -> Sequence[DualNumber[V]]:
        """A scan of dual numbers is one scan whose body carries values and derivatives."""
        active = [o.value.tangent is not None for o in operands]
        body, active, stacked = _dual_body(attributes, active)
        split = attributes.constants + attributes.carries
        groups = (
            slice(0, attributes.constants),
            slice(attributes.constants, split),
            slice(split, None),
        )
        given: list[Typed[V]] = []
        for group in groups:
            chosen = list(zip(operands[group], active[group], strict=True))
            given += [Typed(o.type, o.value.primal) for o, _ in chosen]
            given += [self._tangent_or_zero(o) for o, is_active in chosen if is_active]
        moving = active[groups[1]]
        outer = Scan(
            body,
            attributes.constants + sum(active[groups[0]]),
            attributes.carries + sum(moving),
            attributes.length,
            attributes.reverse,
            attributes.recompute,
        )
        values = [t.value for t in bind(self.base, SCAN, outer, *given)]
        carried = _pair_up(values[: len(moving) + sum(moving)], moving)
        return carried + _pair_up(values[len(moving) + sum(moving) :], stacked)

    def _tangent_or_zero(self, operand: Typed[DualNumber[V]]) -> Typed[V]:
        if operand.value.tangent is None:
            return number(self.base, 0, operand.type)
        return Typed(operand.type, operand.value.tangent)


def _pair_up(values: Sequence[V], active: Sequence[bool]) -> list[DualNumber[V]]:
    """Primals first, then the tangents of the active ones."""
    tangents = iter(values[len(active) :])
    return [
        DualNumber(v, next(tangents) if is_active else None)
        for v, is_active in zip(values, active, strict=False)
    ]


def _dual_body(attributes: Scan, active: list[bool]) -> tuple[Graph, list[bool], list[bool]]:
    """The body over dual numbers, which operands have a tangent in it, and which stacked outputs.

    A carry whose derivative becomes non-zero in the body has one from the start, so the set grows
    until it is stable.
    """
    active = list(active)
    constants, carries = attributes.constants, attributes.carries
    while True:
        builder = GraphBuilder()
        outputs = _evaluate_dual_body(attributes, active, builder)
        moving = [o.tangent is not None for o in outputs[:carries]]
        grown = [
            a or m for a, m in zip(active[constants : constants + carries], moving, strict=True)
        ]
        if grown == active[constants : constants + carries]:
            break
        active[constants : constants + carries] = grown
    types = attributes.body.output_types
    stacked = [o.tangent is not None for o in outputs[carries:]]
    values = _flat_outputs(builder, outputs[:carries], types, grown)
    values += _flat_outputs(builder, outputs[carries:], types[carries:], stacked)
    named = [Output(OutputKind.RESULT, str(i), v) for i, v in enumerate(values)]
    return builder.build(named, f"{attributes.body.name}.dual"), active, stacked


def _evaluate_dual_body(
    attributes: Scan, active: Sequence[bool], builder: GraphBuilder
) -> tuple[DualNumber[Value], ...]:
    body = attributes.body
    names = input_names(body)
    types = [body.nodes[i].types[0] for i in body.inputs]
    split = attributes.constants + attributes.carries
    groups = (
        range(attributes.constants),
        range(attributes.constants, split),
        range(split, len(names)),
    )
    inputs: dict[str, DualNumber[Value]] = {}
    for group in groups:
        primals = {i: builder.add(INPUT, Leaf(names[i], types[i]), ())[0] for i in group}
        for i in group:
            tangent = (
                builder.add(INPUT, Leaf(f"{names[i]}'", types[i]), ())[0] if active[i] else None
            )
            inputs[names[i]] = DualNumber(primals[i], tangent)
    return evaluate(body, inputs, Dual(Symbolic(builder)))


def _flat_outputs(
    builder: GraphBuilder,
    outputs: Sequence[DualNumber[Value]],
    types: Sequence[TensorType],
    active: Sequence[bool],
) -> list[Value]:
    domain = Symbolic(builder)
    tangents = []
    for output, type_, is_active in zip(outputs, types, active, strict=False):
        if is_active:
            zero = number(domain, 0, type_).value if output.tangent is None else output.tangent
            tangents.append(zero)
    return [o.primal for o in outputs] + tangents
