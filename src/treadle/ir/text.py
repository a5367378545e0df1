"""Graphs as text: stable, readable, and parsed back by `parse`."""

from __future__ import annotations

import base64
import dataclasses
from fractions import Fraction

from treadle.base.dtypes import DType
from treadle.ir.control import bodies
from treadle.ir.graph import Graph, Node, Value
from treadle.ir.literal import ArrayLiteral
from treadle.ir.op import Attributes
from treadle.ir.types import TensorType


def to_text(graph: Graph, origins: bool = False) -> str:
    """One line a node. Bodies come before the graph that uses them, each once.

    graph mlp {
      %0 = input(name="x", type=float32[2,3]) : float32[2,3]
      %1 = reduce_sum(%0; axes=(1,)) : float32[2]
      result "0" = %1
    }
    """
    names: dict[Graph, str] = {}
    parts = [
        _graph_text(body, f"@{i}", names, origins) for i, body in enumerate(_nested(graph, names))
    ]
    parts.append(_graph_text(graph, graph.name, names, origins))
    return "\n".join(parts)


def _nested(graph: Graph, names: dict[Graph, str]) -> list[Graph]:
    """All graphs inside, inner ones first, without recursion on depth."""
    order: list[Graph] = []
    stack = [(graph, False)]
    while stack:
        current, children_done = stack.pop()
        if children_done:
            if current is not graph and current not in names:
                names[current] = f"@{len(names)}"
                order.append(current)
            continue
        stack.append((current, True))
        inner = [b for n in current.nodes for b in bodies(n.attributes) if b not in names]
        stack.extend((b, False) for b in reversed(inner))
    return order


def _graph_text(graph: Graph, title: str, names: dict[Graph, str], origins: bool) -> str:
    lines = [f"graph {title} {{"]
    for i, node in enumerate(graph.nodes):
        line = f"  {_node_text(i, node, names)}"
        if origins and node.origin is not None:
            line = f"{line}  # {node.origin}"
        lines.append(line)
    for output in graph.outputs:
        lines.append(f"  {output.kind.value} {quote(output.name)} = {value_text(output.value)}")
    lines.append("}")
    return "\n".join(lines)


def _node_text(position: int, node: Node, names: dict[Graph, str]) -> str:
    operands = ", ".join(value_text(v) for v in node.operands)
    attributes = _fields_text(node.attributes, names)
    arguments = "; ".join(part for part in (operands, attributes) if part)
    types = ", ".join(map(str, node.types))
    return f"%{position} = {node.op.name}({arguments}) : {types}"


def value_text(value: Value) -> str:
    return f"%{value.node}.{value.output}" if value.output else f"%{value.node}"


def quote(text: str) -> str:
    escaped = (
        text.replace("\\", "\\\\").replace("#", "\\#").replace('"', '\\"').replace("\n", "\\n")
    )
    return f'"{escaped}"'


def _fields_text(attributes: Attributes, names: dict[Graph, str]) -> str:
    assert dataclasses.is_dataclass(attributes), attributes
    fields = ((f.name, getattr(attributes, f.name)) for f in dataclasses.fields(attributes))
    return ", ".join(f"{name}={_attribute_text(value, names)}" for name, value in fields)


def _attribute_text(value: object, names: dict[Graph, str]) -> str:
    match value:
        case str():
            return quote(value)
        case bool() | None | int() | float() | DType() | TensorType():
            return str(value)
        case Fraction():
            return f"{value.numerator}/{value.denominator}"
        case tuple():
            inner = ", ".join(_attribute_text(v, names) for v in value)
            return f"({inner},)" if len(value) == 1 else f"({inner})"
        case ArrayLiteral():
            type_ = TensorType(value.array.shape, value.dtype)
            return f'array({type_}, "{base64.b64encode(value.array.tobytes()).decode()}")'
        case Graph():
            return names[value]
        case Attributes():
            return f"{type(value).__name__}({_fields_text(value, names)})"
        case _:
            raise AssertionError(f"no text for {value!r}")
