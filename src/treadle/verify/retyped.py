"""Samples of ops in every dtype that they take, and several of them as one graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.base.errors import TreadleError
from treadle.frontend.functions.arithmetic import tanh
from treadle.frontend.tensor import Tensor
from treadle.frontend.tracing import trace
from treadle.ir.contract import DefinitionError
from treadle.ir.control import Call, Scan
from treadle.ir.graph import Graph, GraphBuilder, Output
from treadle.ir.literal import ArrayLiteral
from treadle.ir.op import OPS, Op, infer_types
from treadle.ir.ops import elementwise as e
from treadle.ir.ops import indexing, leaves
from treadle.ir.types import TensorType
from treadle.verify.bounds import AGREE
from treadle.verify.samples import samples_of
from treadle.verify.sampling import Sample, sample_graph

COMPUTED = [op for op in OPS.values() if op not in leaves.NAMED_LEAVES]
Arrays = dict[str, np.ndarray]


def swapped(type_: TensorType, dtype: DType) -> TensorType:
    """A sample's float32 as another float, its int32 as another integer."""
    if type_ == indexing.KEY_TYPE:
        return type_
    is_float = type_.dtype is dtypes.float32 and dtype.is_float
    is_integer = type_.dtype is dtypes.int32 and dtype.is_integer
    return type_.with_dtype(dtype) if is_float or is_integer else type_


def retyped_body(body: Graph, dtype: DType) -> Graph:
    """A body of elementwise ops on inputs of another dtype."""
    types = [swapped(body.nodes[i].types[0], dtype) for i in body.inputs]
    if len(types) == 2:
        return trace(lambda x, y: (tanh(x) * y, x + y), *types)

    def turn(w: Tensor, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        new = tanh(h * w + x)
        return new, new * h

    return trace(turn, *types)


def retyped(op: Op, sample: Sample, dtype: DType) -> Sample | None:
    """The sample in another dtype; None where the op does not take it."""
    operands = tuple(replace(d, type=swapped(d.type, dtype)) for d in sample.operands)
    attributes: Any = sample.attributes
    if isinstance(attributes, leaves.Constant):
        type_, value = swapped(attributes.type, dtype), attributes.value
        if isinstance(value, ArrayLiteral):
            value = ArrayLiteral(np.clip(value.array, -1e4, 1e4).astype(type_.dtype.numpy))
        attributes = leaves.Constant(value, type_)
    elif isinstance(attributes, (Call, Scan)):
        attributes = replace(attributes, body=retyped_body(attributes.body, dtype))
    elif op is not e.CAST and "dtype" in {f.name for f in fields(attributes)}:
        found = swapped(TensorType((), attributes.dtype), dtype).dtype
        attributes = replace(attributes, dtype=found)
    try:
        infer_types(op, attributes, tuple(d.type for d in operands))
    except TreadleError:
        return None
    return Sample(attributes, operands)


def samples_in(op: Op, dtype: DType) -> list[Sample]:
    """The samples that change with the dtype, or all of them in the dtypes they are written in."""
    is_own = dtype in (dtypes.float32, dtypes.int32)
    found = []
    for sample in samples_of(op):
        other = retyped(op, sample, dtype)
        if other is not None and (is_own or other != sample):
            found.append(other)
    return found


def spread(samples: list[Sample], most: int) -> list[Sample]:
    """At most so many samples, from the first to the last."""
    if len(samples) <= most:
        return samples
    return [samples[i * (len(samples) - 1) // (most - 1)] for i in range(most)]


def merged(graphs: Sequence[Graph]) -> Graph:
    """Several graphs as one: leaves and outputs of the k-th are named "k/…"."""
    builder, outputs = GraphBuilder(), list[Output]()
    for k, graph in enumerate(graphs):
        moved: list[int] = []
        for node in graph.nodes:
            attributes = node.attributes
            operands = [type(v)(moved[v.node], v.output) for v in node.operands]
            if isinstance(attributes, leaves.Leaf):
                renamed = leaves.Leaf(f"{k}/{attributes.name}", attributes.type)
                moved.append(builder.add(node.op, renamed, ())[0].node)
            else:
                moved.append(builder.copy(node, operands))
        for output in graph.outputs:
            value = type(output.value)(moved[output.value.node], output.value.output)
            outputs.append(Output(output.kind, f"{k}/{output.name}", value))
    return builder.build(outputs, "merged")


def merged_arrays(arrays: Sequence[Mapping[str, np.ndarray]]) -> Arrays:
    return {f"{k}/{name}": a for k, given in enumerate(arrays) for name, a in given.items()}


def rounded_inputs(graph: Graph, arrays: Mapping[str, np.ndarray]) -> Arrays:
    """Inputs as their dtypes hold them, so that only the arithmetic differs."""
    types = {n: graph.nodes[i].types[0] for n, i in graph.leaves.items()}
    with np.errstate(all="ignore"):
        return {n: np.asarray(arrays[n]).astype(t.dtype.numpy) for n, t in types.items()}


def prepared(op: Op, dtype: DType, seed: int, most: int = 1 << 20) -> tuple[Graph, Arrays]:
    """The samples of an op as one graph, and its inputs."""
    return together(op, spread(samples_in(op, dtype), most), seed)


def together(op: Op, samples: Sequence[Sample], seed: int) -> tuple[Graph, Arrays]:
    """Some samples as one graph, and its inputs."""
    graph = merged([sample_graph(op, s) for s in samples])
    return graph, rounded_inputs(graph, merged_arrays([s.arrays(seed) for s in samples]))


def agreement(op: Op) -> float:
    """A primitive has the error of its own contract, to the last bit."""
    return AGREE if isinstance(op.contract.error, DefinitionError) else 1.0
