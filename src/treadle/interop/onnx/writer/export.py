"""`export`: a forward program as an ONNX file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from treadle.base import trees
from treadle.base.errors import ArgumentError, NameTakenError
from treadle.base.trees import Tree
from treadle.base.version import __version__
from treadle.frontend.scopes import RANDOM_STATE
from treadle.frontend.tracing import argument_names, function_name
from treadle.interop.onnx.library import library
from treadle.interop.onnx.writer import composites as composites  # fill the table
from treadle.interop.onnx.writer import elementwise as elementwise
from treadle.interop.onnx.writer import shaping as shaping
from treadle.interop.onnx.writer import sums as sums
from treadle.interop.onnx.writer.nodes import Nodes, tensor_proto, value_info
from treadle.interop.onnx.writer.sizes import Batch
from treadle.interop.onnx.writer.walk import Pair, Walk
from treadle.ir.graph import Graph, Output, OutputKind, Value
from treadle.ir.ops import leaves
from treadle.ir.rewrite import remove_dead_code
from treadle.ir.types import TensorType
from treadle.nn.module import Module
from treadle.nn.tracing import INPUT_PREFIX, Inputs, TracedModel, as_module, trace_model
from treadle.rules.canonical import canonicalise
from treadle.runtime.files import as_path, write_file
from treadle.step.forward import Forward, Program

LEAST_OPSET, MOST_OPSET, USUAL_OPSET = 18, 25, 20
# Beyond these bytes values go to a file of their own: a protobuf message has at most 2 GiB.
INSIDE = 1 << 30
SEPARATE = 1024  # bytes of a value from which on it goes there
ALIGNMENT = 64
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Source:
    """What is exported: a function of a model and a batch, and the model's values."""

    model: Module
    function: Callable[..., Any]
    values: Arrays
    names: tuple[str, ...] | None  # of the leaves of the batch

    def traced(self, batch: Tree) -> TracedModel:
        found = trace_model(self.model, self.function, Inputs.of(batch), training=False)
        kept = [o for o in found.graph.outputs if o.kind is OutputKind.RESULT]
        graph = Graph(found.graph.nodes, tuple(kept), found.graph.name)
        return TracedModel(remove_dead_code(canonicalise(graph)), found.structure)


def export(
    program: object,
    example_inputs: Tree,
    path: str | Path,
    *,
    opset: int = USUAL_OPSET,
    dynamic_batch: bool = False,
    params: Arrays | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    external_data: bool | None = None,
) -> None:
    """Write a forward program as an ONNX file; initializers have the names of the parameters.

    `program` is a `Forward`, a `Program`, a module or a function of tensors; a module's values are
    `params`, or those it starts from. `example_inputs` are arrays or specs: a tuple of arguments,
    or for a `Forward` its batch. With `dynamic_batch` the first axis of every input may have any
    size. Values go to a file `NAME.data` beside if they are large, or as `external_data` says.
    """
    target = as_path("export", path)
    if not LEAST_OPSET <= opset <= MOST_OPSET:
        remedy = f"Opsets {LEAST_OPSET} to {MOST_OPSET} are written."
        raise ArgumentError("export", f"opset = {opset!r}", remedy)
    known = library().defs.onnx_opset_version()
    if opset > known:
        cause = f"opset = {opset}, and the package onnx that is installed knows {known}"
        raise ArgumentError("export", cause, "pip install --upgrade onnx, or choose a lower one.")
    source = _source(program, example_inputs, params)
    batch = example_inputs
    if not isinstance(program, Forward) and not isinstance(batch, (tuple, list)):
        batch = (batch,)
    pair, structure = _graphs(source, batch, dynamic_batch)
    graph, initializers = _graph_proto(pair, structure, source, opset, input_names, output_names)
    model = library().helper.make_model(
        graph,
        opset_imports=[library().helper.make_opsetid("", opset)],
        producer_name="treadle",
        producer_version=__version__,
    )
    model.ir_version = library().helper.find_min_ir_version_for(list(model.opset_import))
    _write(target, model, initializers, external_data)


def _source(program: object, inputs: Tree, params: Arrays | None) -> Source:
    if isinstance(program, Program):
        compiled = program._forward
        return Source(compiled.model, compiled.function, {}, None)
    if isinstance(program, Forward):
        values = program.params if params is None else params
        return Source(program.model, program.function, values, None)
    arguments = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    if isinstance(program, Module):
        names = argument_names(program.forward, list(arguments))
        values = program.init(0) if params is None else params
        return Source(program, lambda model, batch: model(*batch), values, tuple(names))
    if not callable(program):
        cause = f"{program!r} is neither a compiled forward, a module nor a function"
        raise ArgumentError("export", cause, "Pass one of them.")
    function, names = program, argument_names(program, list(arguments))

    def forward(model: object, batch: Sequence[Tree]) -> Any:
        return function(*batch)

    forward.__name__ = function_name(function)
    return Source(as_module({}), forward, {}, tuple(names))


def _graphs(source: Source, batch: Tree, dynamic: bool) -> tuple[Pair, trees.Structure]:
    """The program, and traced at another size of the batch too if that is not fixed."""
    traced = source.traced(batch)
    if not dynamic:
        return Pair(traced.graph, traced.graph), traced.structure
    leaves_, structure = trees.flatten(batch)
    types = [t for _, t in Inputs.of(batch).types]
    sizes = {t.shape[0] if t.rank else None for t in types}
    if len(sizes) != 1 or None in sizes or not leaves_:
        shown = ", ".join(map(str, types))
        cause = f"the inputs {shown} have no first axis of one size"
        raise ArgumentError("export", cause, "Export them with dynamic_batch=False.")
    (size,) = sizes
    assert size is not None
    # Axes of one element broadcast, so a program of one differs from those of more.
    two = Batch(max(2, size), max(2, size) * 2 + 1)
    graphs = [
        source.traced(structure.rebuild(TensorType((n, *t.shape[1:]), t.dtype) for t in types))
        for n in (two.first, two.second)
    ]
    return Pair(graphs[0].graph, graphs[1].graph, two), traced.structure


def _graph_proto(
    pair: Pair,
    structure: trees.Structure,
    source: Source,
    opset: int,
    input_names: Sequence[str] | None,
    output_names: Sequence[str] | None,
) -> tuple[Any, dict[str, np.ndarray]]:
    """The graph without its initializers, and those."""
    nodes = Nodes(opset)
    given, values, inputs = {}, {}, []
    wanted = _input_names(pair.graph, source, input_names)
    for name, position in pair.graph.leaves.items():
        node = pair.graph.nodes[position]
        if node.op is leaves.INPUT:
            public = wanted[name]
            given[position] = _claimed(nodes, public)
            inputs.append(value_info(public, node.types[0], pair.sizes(Value(position))))
            nodes.batch_source = nodes.batch_source or public
        elif name in source.values:
            given[position] = _claimed(nodes, name)
            values[name] = _fitting(name, source.values[name], node.types[0])
        elif name == RANDOM_STATE:
            given[position] = name  # what reads it is refused
        else:
            cause = f"there is no value for {name!r}, which the program reads"
            raise ArgumentError("export", cause, "Pass params: what model.init(seed) gives.")
    made = Walk(nodes, pair, given).run()
    named = _output_names(pair.graph.outputs, structure, output_names)
    outputs = []
    for name, found, output in zip(named, made, pair.graph.outputs, strict=True):
        public = _claimed(nodes, name)
        nodes.list.append(library().helper.make_node("Identity", [found], [public], name=public))
        sizes = pair.sizes(output.value)
        outputs.append(value_info(public, pair.graph.type_of(output.value), sizes))
    return library().helper.make_graph(
        nodes.finished(named), pair.graph.name, inputs, outputs
    ), values


def _claimed(nodes: Nodes, name: str) -> str:
    if nodes.names.new(name) != name:
        cause = f"two values of the program would be named {name!r}"
        raise NameTakenError("export", cause, "Give input_names and output_names of their own.")
    return name


def _fitting(name: str, value: object, type_: TensorType) -> np.ndarray:
    array = np.asarray(value)
    if array.shape != type_.shape:
        cause = f"{name} is {type_}, its value has the shape {array.shape}"
        raise ArgumentError("export", cause, "Pass what model.init(seed) gives.")
    return array.astype(type_.dtype.numpy)


def _input_names(graph: Graph, source: Source, wanted: Sequence[str] | None) -> dict[str, str]:
    """Public names of the leaves of the batch, by leaf; those that nothing reads are left out."""
    found = [n for n in graph.leaves if n.startswith(INPUT_PREFIX)]
    if wanted is not None and len(wanted) != len(found):
        cause = f"{len(wanted)} input_names for {len(found)} inputs"
        raise ArgumentError("export", cause, "Give one for each input that the program reads.")
    if wanted is not None:
        return dict(zip(found, wanted, strict=True))
    plain = {n: n.removeprefix(INPUT_PREFIX) for n in found}
    if source.names is not None:
        by_path = {str(i): n for i, n in enumerate(source.names)}
        return {n: by_path.get(p, p) for n, p in plain.items()}
    return {n: f"input_{p}" if p.isdigit() or not p else p for n, p in plain.items()}


def _output_names(
    outputs: Sequence[Output], structure: trees.Structure, wanted: Sequence[str] | None
) -> list[str]:
    if wanted is not None:
        if len(wanted) != len(outputs):
            cause = f"{len(wanted)} output_names for {len(outputs)} outputs"
            raise ArgumentError("export", cause, "Give one for each.")
        return list(wanted)
    paths = trees.paths(structure.rebuild(range(len(outputs))))
    return [f"output_{p}" if p[:1].isdigit() else p or "output" for p in paths]


# Files


def _write(target: Path, model: Any, values: dict[str, np.ndarray], external: bool | None) -> None:
    total = sum(a.nbytes for a in values.values())
    outside = total > INSIDE if external is None else external
    location, offset, parts = f"{target.name}.data", 0, []
    for name, array in values.items():
        if not outside or array.nbytes < SEPARATE:
            model.graph.initializer.append(tensor_proto(name, array))
            continue
        proto = tensor_proto(name, array[:0].reshape(0) if array.ndim else array)
        del proto.dims[:]
        proto.dims.extend(array.shape)
        proto.ClearField("raw_data")
        proto.data_location = library().TensorProto.EXTERNAL
        offset = -(-offset // ALIGNMENT) * ALIGNMENT
        for key, value in (("location", location), ("offset", offset), ("length", array.nbytes)):
            proto.external_data.add(key=key, value=str(value))
        parts.append((offset, array))
        offset += array.nbytes
        model.graph.initializer.append(proto)
    if parts:
        write_file(target.with_name(location), lambda: _joined(parts, offset))
    write_file(target, model.SerializeToString)


def _joined(parts: Sequence[tuple[int, np.ndarray]], total: int) -> bytes:
    data = bytearray(total)
    for offset, array in parts:
        little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        data[offset : offset + array.nbytes] = little.reshape(-1).view(np.uint8).data
    return bytes(data)
