"""Sequences of tensors, whose lengths are known while tracing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treadle.frontend.coerce import as_tensor
from treadle.frontend.functions import shaping as s
from treadle.frontend.tensor import Tensor
from treadle.interop.onnx.reader.calls import Call, Value, operator, rank_of
from treadle.interop.onnx.reader.operators.shaping import check_parts

ITEMS_OF_STEP = 100  # items of a sequence that take the memory of a step: 8 bytes each


@operator("SequenceConstruct")
def _construct(call: Call, *values: Value) -> list[Value]:
    return _made(call, values)


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


def _made(call: Call, items: Sequence[Value]) -> list[Value]:
    """A new sequence. All that are made are held while tracing, so that their items are counted."""
    check_parts(call, len(items))
    call.spend(len(items) // ITEMS_OF_STEP)
    return [tuple(items)]


@operator("SequenceAt")
def _at(call: Call, sequence: Value, position: Value) -> Value:
    items = _sequence(call, sequence)
    return items[call.axis(int(call.number(position, "the position")), len(items))]


@operator("SequenceInsert")
def _insert(call: Call, sequence: Value, value: Value, position: Value = None) -> list[Value]:
    items = list(_sequence(call, sequence))
    at = len(items) if position is None else int(call.number(position, "the position"))
    items.insert(call.axis(at, len(items)) if at != len(items) else at, value)
    return _made(call, items)


@operator("SequenceErase")
def _erase(call: Call, sequence: Value, position: Value = None) -> list[Value]:
    items = list(_sequence(call, sequence))
    at = -1 if position is None else int(call.number(position, "the position"))
    del items[call.axis(at, len(items))]
    return _made(call, items)


@operator("ConcatFromSequence")
def _concat_sequence(call: Call, sequence: Value) -> Tensor:
    values = _sequence(call, sequence)
    call.spend(len(values))  # each may be a constant of the trace
    items = [as_tensor(v) for v in values]
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
        if each < 1:
            raise call.refuse(f"{tensor.type} in parts of {each}")
        check_parts(call, -(-size // each))
        parts = tuple(min(each, size - i) for i in range(0, size, each))
    call.spend(len(parts))  # each is a node of the trace
    found = s.split(tensor, parts, axis)
    if split is None and not call.flag("keepdims", True):
        found = tuple(s.squeeze(t, axis) for t in found)
    return [tuple(found)]
