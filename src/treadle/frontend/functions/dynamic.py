"""Windows at places that are data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treadle.base.errors import ShapeError
from treadle.frontend.coerce import as_tensor, common_dtype
from treadle.frontend.coerce import cast as cast_to
from treadle.frontend.functions.shaping import fitted, integers_of, stack
from treadle.frontend.scopes import bind1
from treadle.frontend.tensor import Operand, Placeholder, Tensor
from treadle.ir.ops import shaping as s


def dynamic_slice(x: Operand, starts: Operand, sizes: Sequence[int]) -> Tensor:
    """A window of fixed sizes whose start indices are data, moved to lie inside: x → sizes.

    `starts` is a tensor, or one integer or scalar tensor for each axis: `(0, position)`.
    """
    fixed = tuple(integers_of("dynamic_slice", "a size", (sizes,)))
    at = _starts("dynamic_slice", starts)
    return bind1(s.DYNAMIC_SLICE, s.DynamicSlice(fixed), as_tensor(x), at)


def dynamic_update_slice(x: Operand, update: Operand, starts: Operand) -> Tensor:
    """x with a window replaced whose start indices are data; it is moved to lie inside.

    `starts` is a tensor, or one integer or scalar tensor for each axis: `(0, position)`.

    Shapes: x (A, B), update (C, D) → (A, B).
    """
    x = as_tensor(x)
    given = fitted("dynamic_update_slice", update, x)
    at = _starts("dynamic_update_slice", starts)
    return bind1(s.DYNAMIC_UPDATE, s.DynamicUpdate(), x, given, at)


def _starts(name: str, starts: Any) -> Tensor:
    """Start indices in one row, where some are numbers and some are tensors."""
    is_row = isinstance(starts, (list, tuple))
    if not is_row or not any(isinstance(n, (Tensor, Placeholder)) for n in starts):
        return as_tensor(starts)
    dtype = common_dtype(starts)
    found = [as_tensor(n) for n in starts]
    wrong = [t for t in found if t.shape != () or not t.dtype.is_integer]
    if wrong:
        raise ShapeError(
            name,
            f"a start is {wrong[0].type}, not one integer",
            "Give an integer or a scalar tensor of integers for each axis.",
        )
    return stack([cast_to(t, dtype) for t in found])
