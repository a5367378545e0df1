"""Python values and arrays as tensors; dtype promotion and broadcasting made explicit."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from treadle.base import dtypes
from treadle.base.arrays import FILL, lost_mask, lost_range
from treadle.base.dtypes import DType
from treadle.base.errors import ArgumentError, DTypeError, ShapeError
from treadle.base.shapes import Shape, broadcast_shapes
from treadle.domains.float64 import lift
from treadle.frontend.scopes import EAGER, bind1, current_trace
from treadle.frontend.tensor import Operand, Placeholder, Tensor
from treadle.ir.literal import ArrayLiteral, Number
from treadle.ir.ops.elementwise import CAST, Cast
from treadle.ir.ops.leaves import CONSTANT, Constant
from treadle.ir.ops.shaping import BROADCAST, RESHAPE, Broadcast, Reshape
from treadle.ir.types import TensorType, as_dtype


def tensor(data: object, dtype: object = None) -> Tensor:
    """An eager tensor: the same functions run on it at once, through the float64 oracle.

    Python floats become float32, Python integers int32; arrays keep their dtype.
    """
    if isinstance(data, (Tensor, Placeholder)):
        data = as_tensor(data)
        return data if dtype is None else cast(data, as_dtype(dtype))
    # Rounded to the dtype once, so that what goes in is what the tensor says it holds.
    array = _array_of(data, None if dtype is None else as_dtype(dtype))
    type_ = TensorType(array.shape, dtype_of_data(array, array))
    return EAGER.wrap(lift(array, type_), type_)


def _array_of(data: object, dtype: DType | None = None) -> np.ndarray:
    """The data in a dtype: the given one, or else its own."""
    array = _raw(data)
    is_number = array.dtype.kind not in "OSUMmc"
    chosen = dtype if dtype and is_number else dtype_of_data(data, array)
    if chosen.is_integer and array.dtype != chosen.numpy and array.size:
        _check_range(array, chosen)
    lost = lost_range(array, chosen) if chosen.is_float else None
    if lost:
        raise ArgumentError(
            "tensor", f"the data {lost}", "Give a wider dtype, for instance dtype=td.float64."
        )
    return array.astype(chosen.numpy)


def _raw(data: object) -> np.ndarray:
    lost = lost_mask(data)
    if lost:
        raise ArgumentError("tensor", f"the data {lost}", FILL)
    try:
        return np.asarray(data)
    except ValueError as error:
        raise ShapeError(
            "tensor", f"the data is not an array: {error}", "Rows must have equal lengths."
        ) from error


def _check_range(array: np.ndarray, dtype: DType) -> None:
    low, high = dtype.range()
    worst = array.min() if not array.min() >= low else array.max()
    if not low <= worst <= high:
        raise ArgumentError(
            "tensor",
            f"{worst} is not a {dtype} (integers from {low} to {high})",
            "Give a wider dtype, for instance dtype=td.int64.",
        )


def dtype_of_data(data: object, array: np.ndarray) -> DType:
    found = dtypes.from_numpy(array.dtype)
    if found is None:
        names = ", ".join(dtypes.BY_NAME)
        raise DTypeError(
            "tensor", f"data of dtype {array.dtype} has no counterpart", f"There are: {names}."
        )
    if isinstance(data, (np.ndarray, np.generic)):
        return found
    return {dtypes.float64: dtypes.float32, dtypes.int64: dtypes.int32}.get(found, found)


def constant(value: Number, shape: Shape = (), dtype: DType = dtypes.float32) -> Tensor:
    """A number spread over a shape; a node, never memory."""
    return bind1(CONSTANT, Constant(value, TensorType(shape, dtype)))


def literal(array: np.ndarray) -> Tensor:
    """An array inside the program (a trace) or an eager tensor of it."""
    if current_trace() is None:
        return tensor(array)
    exact = ArrayLiteral(_array_of(array))
    return bind1(CONSTANT, Constant(exact, TensorType(array.shape, exact.dtype)))


def is_weak(value: object) -> bool:
    """Python and NumPy scalars take the dtype of the tensor they meet; fractions stay exact."""
    return isinstance(value, (bool, int, float, Fraction, np.generic))


def as_tensor(value: Operand) -> Tensor:
    """A tensor from anything a function accepts."""
    if isinstance(value, Tensor):
        # An eager tensor is a constant of the trace before anything spreads it.
        trace = current_trace() if value.scope is EAGER else None
        return value if trace is None else trace.adopt(value)
    if isinstance(value, Placeholder):
        return value.tensor()
    if isinstance(value, (bool, int, float, Fraction)):
        return constant(value, (), _weak_dtype(value))
    return literal(_array_of(value))


def _weak_dtype(value: object) -> DType:
    if isinstance(value, (bool, np.bool_)):
        return dtypes.bool_
    return dtypes.int32 if isinstance(value, (int, np.integer)) else dtypes.float32


def cast(x: Tensor, dtype: DType) -> Tensor:
    return x if x.dtype is dtype else bind1(CAST, Cast(dtype), x)


def common_dtype(values: Sequence[Operand]) -> DType:
    """The dtype a result of these values has. Weak scalars count only by their class."""
    strong = [_strong_dtype(v) for v in values if not is_weak(v)]
    weak = [_weak_dtype(v) for v in values if is_weak(v)]
    if not strong:
        result = weak[0]
        for dtype in weak[1:]:
            result = dtypes.promote(result, dtype)
        return result
    result = strong[0]
    for dtype in strong[1:]:
        result = dtypes.promote(result, dtype)
    for dtype in weak:
        if _rank(dtype) > _rank(result):
            result = dtype
    return result


def _strong_dtype(value: Operand) -> DType:
    if isinstance(value, (Tensor, Placeholder)):
        return as_tensor(value).dtype
    return dtype_of_data(value, _raw(value))


def _rank(dtype: DType) -> int:
    return {"bool": 0, "uint": 1, "int": 1, "float": 2}[dtype.kind]


def align(name: str, *values: Operand, dtype: DType | None = None) -> tuple[Tensor, ...]:
    """The values with one dtype (the common one unless given) and one shape."""
    chosen = dtype or common_dtype(values)
    shape = common_shape(name, values)
    return tuple(spread(v, shape, chosen) for v in values)


def common_shape(name: str, values: Sequence[Operand]) -> Shape:
    """The shape that all values broadcast to."""
    shapes = [_shape_of(v) for v in values]
    shape = broadcast_shapes(*shapes)
    if shape is None:
        shown = " and ".join(str(s) for s in shapes)
        raise ShapeError(
            name,
            f"shapes do not broadcast: {shown}",
            "Sizes must be equal or 1, counted from the last axis; reshape one operand.",
        )
    return shape


def _shape_of(value: Operand) -> Shape:
    if isinstance(value, (Tensor, Placeholder)):
        return as_tensor(value).shape
    return () if is_weak(value) else _raw(value).shape


def spread(value: Operand, shape: Shape, dtype: DType) -> Tensor:
    """A value with a dtype and a shape it broadcasts to; scalars become constants of that shape."""
    if is_weak(value):
        return constant(_python_number(value, dtype), shape, dtype)
    return broadcast_to(cast(as_tensor(value), dtype), shape)


def _python_number(value: Any, dtype: DType) -> Number:
    if isinstance(value, np.generic):
        value = value.item()
    number: Number = value
    return bool(number) if dtype is dtypes.bool_ else number


def broadcast_to(x: Tensor, shape: Shape) -> Tensor:
    """Repeat `x` to a shape it broadcasts to (checked by the caller)."""
    if x.shape == shape:
        return x
    offset = len(shape) - x.ndim
    kept = [i for i, n in enumerate(x.shape) if n == shape[i + offset]]
    if len(kept) < x.ndim:
        x = bind1(RESHAPE, Reshape(tuple(x.shape[i] for i in kept)), x)
    return bind1(BROADCAST, Broadcast(shape, tuple(i + offset for i in kept)), x)
