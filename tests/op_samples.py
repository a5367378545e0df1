"""Samples of every op and composite in every dtype it takes; no test runner is needed to use them."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

import treadle as td
from backend import AGREE, merged, merged_arrays, rounded_inputs
from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.base.errors import TreadleError
from treadle.ir.contract import DefinitionError
from treadle.ir.control import Call, Scan
from treadle.ir.graph import Graph
from treadle.ir.literal import ArrayLiteral
from treadle.ir.op import OPS, Op, infer_types
from treadle.ir.ops import elementwise as e
from treadle.ir.ops import indexing, leaves
from treadle.ir.types import TensorType
from treadle.verify.samples import samples_of
from treadle.verify.sampling import Sample, sample_graph

COMPUTED = [op for op in OPS.values() if op not in leaves.NAMED_LEAVES]


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
        return td.trace(lambda x, y: (td.tanh(x) * y, x + y), *types)

    def turn(w, h, x):
        new = td.tanh(h * w + x)
        return new, new * h

    return td.trace(turn, *types)


def retyped(op: Op, sample: Sample, dtype: DType) -> Sample | None:
    """The sample in another dtype; None where the op does not take it."""
    operands = tuple(replace(d, type=swapped(d.type, dtype)) for d in sample.operands)
    attributes = sample.attributes
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


def prepared(
    op: Op, dtype: DType, seed: int, most: int = 1 << 20
) -> tuple[Graph, dict[str, np.ndarray]]:
    """The samples of an op as one graph, and its inputs."""
    samples = spread(samples_in(op, dtype), most)
    graph = merged([sample_graph(op, s) for s in samples])
    arrays = merged_arrays([s.arrays(seed) for s in samples])
    return graph, rounded_inputs(graph, arrays)


def agreement(op: Op) -> float:
    """A primitive has the error of its own contract, to the last bit."""
    return AGREE if isinstance(op.contract.error, DefinitionError) else 1.0
