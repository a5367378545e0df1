"""What a file says, as frozen values: bodies of steps with plain attributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Union

import numpy as np

from treadle.base.dtypes import DType
from treadle.interop.onnx.library import DTYPES
from treadle.interop.onnx.reader.tensors import Folder, Taken, array_of, numpy_type, text_of

MOST_DEPTH = 16  # bodies inside bodies
MOST_STEPS = 200_000  # nodes of a file, those of functions where they are called


@dataclass(frozen=True)
class Reference:
    """An attribute of a function's body that its caller gives."""

    name: str


Attribute = Union[int, float, str, np.ndarray, tuple[Any, ...], "Body", Reference]


@dataclass(frozen=True, eq=False)
class Step:
    """One node."""

    op: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Attribute]

    @property
    def title(self) -> str:
        return f"{self.domain}.{self.op}" if self.domain else self.op

    def bodies(self) -> Iterator[Body]:
        return (a for a in self.attributes.values() if isinstance(a, Body))


@dataclass(frozen=True)
class Port:
    """A named input or output; what the file says of its type."""

    name: str
    dtype: DType | None = None
    shape: tuple[int | str | None, ...] | None = None


@dataclass(frozen=True, eq=False)
class Body:
    """A graph, or the body of a function."""

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    steps: tuple[Step, ...]
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)
    defaults: Mapping[str, Attribute] = field(default_factory=dict)  # of a function's attributes


@dataclass(frozen=True, eq=False)
class Program:
    """A whole file."""

    body: Body
    opset: int
    functions: Mapping[tuple[str, str], Body]


class Reading:
    """Protobuf messages to values, with what is counted on the way."""

    def __init__(self, folder: Folder):
        self.folder = folder
        self.steps = 0
        self.taken = Taken()

    def program(self, model: Any) -> Program:
        functions = {}
        for proto in model.functions:
            key = (_domain(proto.domain), text_of(proto.name))
            if key in functions:
                raise self.folder.refuse(f"two functions are named {key[1][:80]!r}")
            functions[key] = self._function(proto)
        body = self.body(model.graph, 0)
        versions = [o.version for o in model.opset_import if not _domain(o.domain)]
        if len(versions) != 1 and model.graph.node:
            cause = f"it names {len(versions)} versions of ONNX's operators"
            raise self.folder.refuse(cause)
        return Program(body, versions[0] if versions else 0, functions)

    def body(self, graph: Any, depth: int) -> Body:
        if depth > MOST_DEPTH:
            raise self.folder.refuse(f"bodies inside bodies, more than {MOST_DEPTH} deep")
        if graph.sparse_initializer:
            raise self.folder.refuse("it has sparse initializers", "Write them dense.")
        constants: dict[str, np.ndarray] = {}
        for tensor in graph.initializer:
            name = text_of(tensor.name)
            if name in constants:
                raise self.folder.refuse(f"two initializers are named {name[:80]!r}")
            constants[name] = array_of(tensor, self.folder, self.taken)
        inputs = [self._port(v) for v in graph.input if text_of(v.name) not in constants]
        outputs = [self._port(v) for v in graph.output]
        steps = self._steps(graph.node, depth)
        return Body(text_of(graph.name), tuple(inputs), tuple(outputs), steps, constants)

    def _function(self, proto: Any) -> Body:
        defaults = {text_of(a.name): self._attribute(a, 0) for a in proto.attribute_proto}
        ports = [tuple(Port(text_of(n)) for n in names) for names in (proto.input, proto.output)]
        steps = self._steps(proto.node, 0)
        return Body(text_of(proto.name), ports[0], ports[1], steps, defaults=defaults)

    def _steps(self, nodes: Any, depth: int) -> tuple[Step, ...]:
        self.steps += len(nodes)
        if self.steps > MOST_STEPS:
            raise self.folder.refuse(f"it has more than {MOST_STEPS:,} nodes")
        return tuple(self._step(n, depth) for n in nodes)

    def _step(self, node: Any, depth: int) -> Step:
        attributes = {text_of(a.name): self._attribute(a, depth) for a in node.attribute}
        inputs, outputs = tuple(map(text_of, node.input)), tuple(map(text_of, node.output))
        name = text_of(node.name) or (outputs[0] if outputs else "")
        return Step(
            text_of(node.op_type), _domain(node.domain), name[:80], inputs, outputs, attributes
        )

    def _attribute(self, a: Any, depth: int) -> Attribute:
        if a.ref_attr_name:
            return Reference(text_of(a.ref_attr_name))
        match a.type:
            case 1:
                return float(a.f)
            case 2:
                return int(a.i)
            case 3:
                return text_of(a.s)
            case 4:
                return array_of(a.t, self.folder, self.taken, f"the attribute {a.name[:80]!r}")
            case 5:
                return self.body(a.g, depth + 1)
            case 6:
                return tuple(map(float, a.floats))
            case 7:
                return tuple(map(int, a.ints))
            case 8:
                return tuple(map(text_of, a.strings))
        cause = f"the attribute {a.name[:80]!r} is of type {a.type}, which is not read"
        raise self.folder.refuse(cause, "Numbers, texts, tensors and graphs are.")

    def _port(self, info: Any) -> Port:
        if not info.type.HasField("tensor_type"):
            return Port(text_of(info.name))
        type_ = info.type.tensor_type
        if type_.elem_type:
            numpy_type(type_.elem_type, self.folder, f"{text_of(info.name)[:80]!r}")
        if not type_.HasField("shape"):
            return Port(text_of(info.name), DTYPES.get(type_.elem_type))
        shape = tuple(self._size(d, info.name) for d in type_.shape.dim)
        return Port(text_of(info.name), DTYPES.get(type_.elem_type), shape)

    def _size(self, dim: Any, name: str) -> int | str | None:
        if dim.HasField("dim_value"):
            if dim.dim_value < 0:
                raise self.folder.refuse(f"{name[:80]!r} has the size {dim.dim_value}")
            return int(dim.dim_value)
        return text_of(dim.dim_param) or None


def _domain(domain: str | bytes) -> str:
    found = text_of(domain)
    return "" if found == "ai.onnx" else found
