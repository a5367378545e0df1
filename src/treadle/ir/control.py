"""Ops with a body: `call` and `scan`."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.base.errors import ArgumentError, GraphError, ShapeError
from treadle.ir.contract import Contract, DefinitionError
from treadle.ir.graph import Graph
from treadle.ir.op import Attributes, Op, Precision, Types, declare
from treadle.ir.types import TensorType


@dataclass(frozen=True, slots=True)
class Call(Attributes):
    """A body applied to operands, one per input; the results are all of its outputs.

    `recompute` asks the backward to run the body again rather than keep its values.
    `backward` is a user's own: inputs are cotangents, results, operands; outputs are gradients
    named by the operand's position.
    """

    body: Graph
    name: str = "call"
    recompute: bool = False
    backward: Graph | None = None


@dataclass(frozen=True, slots=True)
class Scan(Attributes):
    """A body over a leading axis.

    Operands and the body's inputs are constants, then carries, then slices; the body's outputs are
    the next carries, then values that are stacked. `recompute` keeps only the carries for the
    backward instead of everything it uses.
    """

    body: Graph
    constants: int
    carries: int
    length: int
    reverse: bool = False
    recompute: bool = False


def body_input_types(body: Graph) -> Types:
    return tuple(body.nodes[i].types[0] for i in body.inputs)


def _call_type(attributes: Call, *operands: TensorType) -> Types:
    expected = body_input_types(attributes.body)
    if operands != expected:
        raise GraphError("call", f"{attributes.name} takes {expected}, got {operands}")
    return attributes.body.output_types


def _scan_type(attributes: Scan, *operands: TensorType) -> Types:
    constants, carries, length = attributes.constants, attributes.carries, attributes.length
    slices = operands[constants + carries :]
    if length < 0 or constants < 0 or carries < 0 or len(operands) < constants + carries:
        raise ArgumentError("scan", f"{attributes} with {len(operands)} operands")
    for x in slices:
        if x.rank == 0 or x.shape[0] != length:
            raise ShapeError("scan", f"{x} has no leading axis of {length}")
    steps = tuple(x.with_shape(x.shape[1:]) for x in slices)
    given = operands[: constants + carries] + steps
    expected = body_input_types(attributes.body)
    if given != expected:
        raise GraphError("scan", f"the body takes {expected}, got {given}")
    outputs = attributes.body.output_types
    carried = operands[constants : constants + carries]
    if outputs[:carries] != carried:
        raise GraphError("scan", f"carries change their type: {carried} to {outputs[:carries]}")
    return carried + tuple(y.with_shape((length, *y.shape)) for y in outputs[carries:])


_BY_BODY = Contract(DefinitionError(), "as the body's ops", "as the body's ops")

CALL = declare(Op("call", Call, _call_type, Precision.FOLLOW, _BY_BODY))
SCAN = declare(Op("scan", Scan, _scan_type, Precision.FOLLOW, _BY_BODY))


def bodies(attributes: Attributes) -> tuple[Graph, ...]:
    """The graphs inside an op's attributes."""
    match attributes:
        case Call(body, _, _, None):
            return (body,)
        case Call(body, _, _, backward) if backward is not None:
            return body, backward
        case Scan(body):
            return (body,)
        case _:
            return ()


def own_backwards(graph: Graph) -> list[str]:
    """Functions that bring a gradient of their own, by name, inside bodies too."""
    found: dict[str, None] = {}
    pending = [graph]
    while pending:
        for node in pending.pop().nodes:
            if isinstance(node.attributes, Call) and node.attributes.backward is not None:
                found[node.attributes.name] = None
            pending.extend(bodies(node.attributes))
    return list(found)
