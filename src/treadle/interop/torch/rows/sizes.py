"""Rows of what programs with dynamic sizes compute with integers, and of what they assert."""

from __future__ import annotations

import math
import operator
from typing import Any

from treadle.frontend.tensor import Tensor
from treadle.interop.torch.rows.table import ROWS, Row, aten

for _function in (
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.mod,
    operator.neg,
    operator.pow,
    operator.eq,
    operator.ne,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
    operator.and_,
    operator.or_,
    operator.not_,
    operator.getitem,
):
    ROWS[f"operator.{_function.__name__}"] = _function
_PYTHON: dict[str, Row] = {
    "sym_max": max,
    "sym_min": min,
    "sym_float": float,
    "sym_int": int,
    "sym_not": operator.not_,
    "ceil": math.ceil,
    "floor": math.floor,
    "trunc": math.trunc,
}
for _name, _python in _PYTHON.items():
    ROWS[f"python.{_name}"] = _python


@aten("sym_size.int")
def _sym_size(x: Tensor, dim: int) -> int:
    return x.shape[dim]


@aten("sym_numel")
def _sym_numel(x: Tensor) -> int:
    return int(x.size)


@aten("sym_stride.int")
def _sym_stride(x: Tensor, dim: int) -> int:
    return math.prod(x.shape[dim % x.ndim + 1 :])


@aten("sym_storage_offset")
def _sym_storage_offset(x: Tensor) -> int:
    return 0


@aten(
    "_assert_scalar",
    "_assert_tensor_metadata",
    "_assert_async.msg",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
)
def _asserted(*arguments: Any, **keywords: Any) -> None:
    """Shapes are checked where a program is called."""
