"""Graphs as records: what `treadle_checker.graph` reads. Bodies are records of their own.

A composite is recorded as a call of its definition, and an op that moves or sums elements by what
it reads (`reads.py`), so that a file says everything in few primitives.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from treadle.base.dtypes import DType
from treadle.base.origin import Origin
from treadle.ir.composites import DEFINITIONS, definition_graph
from treadle.ir.graph import Graph, Node, Value
from treadle.ir.literal import ArrayLiteral
from treadle.ir.op import Attributes, Op
from treadle.ir.types import TensorType
from treadle.verify.certificate.reads import ORDERS, is_read, order_record, reads_of


class Records:
    """Texts by the hash of their bytes: equal ones are one."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self._graphs: dict[Graph, str] = {}
        self.by_name: dict[str, Graph] = {}

    def add(self, record: object) -> str:
        text = json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        name = hashlib.sha256(text.encode()).hexdigest()
        self.texts[name] = text
        return name

    def graph(self, graph: Graph) -> str:
        """The hash of a graph's record. A graph is there once, with the lines that it had first."""
        known = self._graphs.get(graph)
        if known is None:
            known = self._graphs[graph] = self.add(graph_record(graph, self))
            self.by_name[known] = graph
        return known


def graph_record(graph: Graph, records: Records) -> dict[str, Any]:
    lines: dict[str, int] = {}
    origins: dict[Origin | None, int] = {None: -1}
    nodes = []
    known: dict[Any, Any] = {}
    for node in graph.nodes:
        types = operand_types(graph, node)
        key = node.op, node.attributes, types
        if key not in known:
            known[key] = use_record(node.op, node.attributes, types, records)
        op, attributes, order = known[key]
        line = origins.get(node.origin)
        if line is None:
            line = lines.setdefault(str(node.origin), len(lines))
            origins[node.origin] = line
        operands = [list(v) for v in ordered(node, order)]
        nodes.append([op, attributes, operands, [type_record(t) for t in node.types], line])
    outputs = [[o.kind.value, o.name, list(o.value)] for o in graph.outputs]
    return {"name": graph.name, "lines": list(lines), "nodes": nodes, "outputs": outputs}


def operand_types(graph: Graph, node: Node) -> tuple[TensorType, ...]:
    """Those on which the record of a use depends; of elementwise ops none does."""
    if not _is_typed(node.op):
        return ()
    nodes = graph.nodes
    return tuple([nodes[v].types[k] for v, k in node.operands])


@lru_cache(maxsize=1024)
def _is_typed(op: Op) -> bool:
    return op in DEFINITIONS or op in ORDERS or is_read(op)


def use_record(
    op: Op, attributes: Attributes, operands: tuple[TensorType, ...], records: Records
) -> tuple[str, dict[str, Any], Sequence[int] | None]:
    """The name and the attributes of an op's use, and which operands it has, if not its own."""
    if op in DEFINITIONS:
        body = {"graph": records.graph(definition_graph(op, attributes, operands))}
        called = {"body": body, "name": op.name, "recompute": False, "backward": None}
        return "call", called, None
    if op in ORDERS:
        return "order", order_record(op, attributes, operands[0]), None
    if not is_read(op):
        return op.name, attributes_record(attributes, records), None
    form = reads_of(op, attributes, operands)
    dtype = getattr(attributes, "dtype", operands[form.operands[0]].dtype)
    told = form.record(op.name, dtype.name, number_record(form.value))
    return form.op, told, form.operands


def ordered(node: Node, order: Sequence[int] | None) -> Sequence[Value]:
    return node.operands if order is None else [node.operands[i] for i in order]


def type_record(type_: TensorType) -> list[Any]:
    return [type_.dtype.name, list(type_.shape)]


@lru_cache(maxsize=256)
def _names(cls: Any) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(cls))


def attributes_record(attributes: Attributes, records: Records) -> dict[str, Any]:
    cls: Any = type(attributes)
    return {n: _attribute(getattr(attributes, n), records) for n in _names(cls)}


def _attribute(value: object, records: Records) -> Any:
    match value:
        case DType():
            return value.name
        case TensorType():
            return type_record(value)
        case tuple():
            return [_attribute(v, records) for v in value]
        case Graph():
            return {"graph": records.graph(value)}
        case Attributes():
            return attributes_record(value, records)
        case None | str():
            return value
        case _:
            return number_record(value)


def number_record(value: object) -> Any:
    """A number of a graph or of a kernel, exactly."""
    match value:
        case bool():
            return value
        case int():
            return int(value)  # of subclasses, too
        case float():
            return value if math.isfinite(value) else {"float": repr(value)}
        case Fraction():
            return {"fraction": [value.numerator, value.denominator]}
        case ArrayLiteral():
            data = value.array.astype(value.array.dtype.newbyteorder("<")).tobytes()
            text = base64.b64encode(data).decode()
            return {"array": [value.dtype.name, list(value.array.shape), text]}
        case _:
            raise AssertionError(f"no record of {value!r}")
