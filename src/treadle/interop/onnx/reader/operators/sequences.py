"""Sequences of tensors, whose lengths are known while tracing."""

from __future__ import annotations

import numpy as np

from treadle.frontend.coerce import as_tensor
from treadle.frontend.functions import shaping as s
from treadle.frontend.tensor import Tensor
from treadle.interop.onnx.reader.calls import Call, Value, operator, rank_of
from treadle.interop.onnx.reader.operators.shaping import MOST_PARTS


@operator("SequenceConstruct")
def _construct(call: Call, *values: Value) -> list[Value]:
    return [tuple(values)]


@operator("SequenceEmpty")
def _empty(call: Call) -> list[Value]:
    return [()]


@operator("SequenceLength")
def _length(call: Call, sequence: Value) -> np.ndarray:
    return np.array(len(_sequence(call, sequence)), np.int64)


def _sequence(call: Call, value: Value) -> tuple[Value, ...]:
    if not isinstance(value, tuple):
        raise call.refuse("its operand is no sequence")
    return value


@operator("SequenceAt")
def _at(call: Call, sequence: Value, position: Value) -> Value:
    items = _sequence(call, sequence)
    return items[call.axis(int(call.number(position, "the position")), len(items))]


@operator("SequenceInsert")
def _insert(call: Call, sequence: Value, value: Value, position: Value = None) -> list[Value]:
    items = list(_sequence(call, sequence))
    at = len(items) if position is None else int(call.number(position, "the position"))
    items.insert(call.axis(at, len(items)) if at != len(items) else at, value)
    return [tuple(items)]


@operator("SequenceErase")
def _erase(call: Call, sequence: Value, position: Value = None) -> list[Value]:
    items = list(_sequence(call, sequence))
    at = -1 if position is None else int(call.number(position, "the position"))
    del items[call.axis(at, len(items))]
    return [tuple(items)]


@operator("ConcatFromSequence")
def _concat_sequence(call: Call, sequence: Value) -> Tensor:
    items = [as_tensor(v) for v in _sequence(call, sequence)]
    if call.flag("new_axis"):
        return s.stack(items, call.axis(call.integer("axis"), items[0].ndim + 1))
    return s.concat(items, call.axis(call.integer("axis"), items[0].ndim))


@operator("SplitToSequence")
def _split_to_sequence(call: Call, x: Value, split: Value = None) -> list[Value]:
    tensor = as_tensor(x)
    axis = call.axis(call.integer("axis", 0), tensor.ndim)
    size = tensor.shape[axis]
    if split is not None and rank_of(split) == 1:
        parts = call.whole(split, "the sizes of the parts")
    else:
        each = 1 if split is None else int(call.number(split, "the size of a part"))
        if each < 1 or size // each > MOST_PARTS:
            raise call.refuse(f"{tensor.type} in parts of {each}")
        parts = tuple(min(each, size - i) for i in range(0, size, each))
    found = s.split(tensor, parts, axis)
    if split is None and not call.flag("keepdims", True):
        found = tuple(s.squeeze(t, axis) for t in found)
    return [tuple(found)]
