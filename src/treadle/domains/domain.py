"""What a domain is, and how a graph is evaluated over one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from treadle.base.errors import ArgumentError
from treadle.ir.composites import definition_graph
from treadle.ir.control import CALL, SCAN, Call, Scan
from treadle.ir.graph import Graph
from treadle.ir.literal import Number
from treadle.ir.op import Attributes, Op, Types, infer_types
from treadle.ir.ops.leaves import CONSTANT, Constant, Leaf
from treadle.ir.ops.shaping import CONCAT, RESHAPE, SLICE, Concat, Reshape, Slice
from treadle.ir.types import TensorType

V = TypeVar("V")


class Typed(NamedTuple, Generic[V]):
    """A value of a domain and the type it stands for."""

    type: TensorType
    value: V


class Domain(Protocol[V]):
    """A number system: it knows what each primitive does to its values."""

    @property
    def keeps(self) -> frozenset[Op]:
        """Ops with bodies that the domain handles itself; the others are taken apart for it."""
        ...

    def apply(
        self, op: Op, attributes: Attributes, operands: Sequence[Typed[V]], types: Types
    ) -> Sequence[V]:
        """The results of a primitive; `types` are the results' types."""
        ...


def evaluate(graph: Graph, inputs: Mapping[str, V], domain: Domain[V]) -> tuple[V, ...]:
    """The value of every output, in order. Leaves are given by name; values die when last used."""
    missing = [name for name in graph.leaves if name not in inputs]
    if missing:
        raise ArgumentError(
            "evaluate", f"no value for {', '.join(missing)}", "Give every leaf by its name."
        )
    last_use = last_uses(graph)
    known: list[tuple[V, ...]] = []
    for position, node in enumerate(graph.nodes):
        if isinstance(node.attributes, Leaf):
            known.append((inputs[node.attributes.name],))
        else:
            operands = [Typed(graph.type_of(v), known[v.node][v.output]) for v in node.operands]
            known.append(tuple(apply(domain, node.op, node.attributes, operands, node.types)))
        for dead in last_use.get(position, ()):
            known[dead] = ()
    return tuple(known[o.value.node][o.value.output] for o in graph.outputs)


def last_uses(graph: Graph) -> dict[int, list[int]]:
    """Which nodes are read for the last time by each node."""
    last: dict[int, int] = {}
    for position, node in enumerate(graph.nodes):
        for operand in node.operands:
            last[operand.node] = position
    for output in graph.outputs:
        last.pop(output.value.node, None)
    dying: dict[int, list[int]] = {}
    for node_id, position in last.items():
        dying.setdefault(position, []).append(node_id)
    return dying


def apply(
    domain: Domain[V], op: Op, attributes: Attributes, operands: Sequence[Typed[V]], types: Types
) -> Sequence[V]:
    """Any op over any domain. Ops with a body are taken apart unless the domain keeps them."""
    if op in domain.keeps:
        return domain.apply(op, attributes, operands, types)
    if op.is_composite:
        return _apply_body(
            domain, definition_graph(op, attributes, tuple(o.type for o in operands)), operands
        )
    if op is CALL:
        assert isinstance(attributes, Call)
        return _apply_body(domain, attributes.body, operands)
    if op is SCAN:
        assert isinstance(attributes, Scan)
        return _apply_scan(domain, attributes, operands)
    return domain.apply(op, attributes, operands, types)


def bind(
    domain: Domain[V], op: Op, attributes: Attributes, *operands: Typed[V]
) -> tuple[Typed[V], ...]:
    """`apply` with the types inferred: how rules written over any domain use ops."""
    types = infer_types(op, attributes, tuple(o.type for o in operands))
    values = apply(domain, op, attributes, operands, types)
    return tuple(Typed(t, v) for t, v in zip(types, values, strict=True))


def _apply_body(domain: Domain[V], body: Graph, operands: Sequence[Typed[V]]) -> Sequence[V]:
    return evaluate(
        body, dict(zip(input_names(body), (o.value for o in operands), strict=True)), domain
    )


def input_names(body: Graph) -> list[str]:
    """Names of a body's inputs in order."""
    found = []
    for i in body.inputs:
        attributes = body.nodes[i].attributes
        assert isinstance(attributes, Leaf)
        found.append(attributes.name)
    return found


def _apply_scan(domain: Domain[V], attributes: Scan, operands: Sequence[Typed[V]]) -> Sequence[V]:
    split = attributes.constants + attributes.carries
    constants, carries = (
        operands[: attributes.constants],
        list(operands[attributes.constants : split]),
    )
    slices = operands[split:]
    outputs = attributes.body.output_types[attributes.carries :]
    stacks: list[list[Typed[V]]] = [[] for _ in outputs]
    steps = range(attributes.length)
    for i in reversed(steps) if attributes.reverse else steps:
        given = [*constants, *carries, *(_step_of(domain, x, i) for x in slices)]
        values = _apply_body(domain, attributes.body, given)
        carries = [Typed(c.type, v) for c, v in zip(carries, values, strict=False)]
        for stack, type_, value in zip(stacks, outputs, values[attributes.carries :], strict=True):
            stack.append(Typed(type_, value))
    if attributes.reverse:
        stacks = [stack[::-1] for stack in stacks]
    stacked = [_stack(domain, stack, t) for stack, t in zip(stacks, outputs, strict=True)]
    return [*(c.value for c in carries), *stacked]


def _step_of(domain: Domain[V], x: Typed[V], i: int) -> Typed[V]:
    """Row `i` of `x`."""
    shape = x.type.shape
    window = Slice((i, *(0 for _ in shape[1:])), (i + 1, *shape[1:]), (1,) * len(shape))
    (row,) = bind(domain, SLICE, window, x)
    (flat,) = bind(domain, RESHAPE, Reshape(shape[1:]), row)
    return flat


def _stack(domain: Domain[V], rows: list[Typed[V]], type_: TensorType) -> V:
    if not rows:
        return number(domain, 0, type_.with_shape((0, *type_.shape))).value
    grown = [bind(domain, RESHAPE, Reshape((1, *type_.shape)), row)[0] for row in rows]
    (stacked,) = bind(domain, CONCAT, Concat(0), *grown)
    return stacked.value


def number(domain: Domain[V], value: Number, type_: TensorType) -> Typed[V]:
    """A constant of the domain."""
    (found,) = bind(domain, CONSTANT, Constant(value, type_))
    return found
