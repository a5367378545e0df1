"""Padding with a number, or with what is there: reflected, repeated, or around the corner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treadle.base.errors import ArgumentError, ShapeError
from treadle.base.numbers import check_choice
from treadle.frontend.coerce import as_tensor, broadcast_to
from treadle.frontend.functions import shaping
from treadle.frontend.functions.shaping import concat, flip, slice_along
from treadle.frontend.tensor import Operand, Tensor
from treadle.ir.literal import Number

MODES = ("constant", "reflect", "replicate", "circular")


def pad(
    x: Operand,
    amounts: Sequence[tuple[int, int]],
    value: Number = 0,
    interior: Sequence[int] | None = None,
    mode: str = "constant",
) -> Tensor:
    """Each axis made longer by (before, after), filled with `value`: (A,) → (before + A + after,).

    `interior` puts as many between neighbours.

    Negative amounts take elements away.

    Other modes fill with elements of x: "reflect" mirrors at the edge element, "replicate" repeats
    it, "circular" goes on at the other end.
    """
    check_choice("pad", "mode", mode, MODES)
    if mode == "constant":
        tensor, more = _cropped(as_tensor(x), amounts)
        return shaping.pad(tensor, more, value, interior)
    if interior is not None or value != 0:
        raise ArgumentError(
            "pad", f"mode {mode!r} with a value or interior padding", "They are for constants."
        )
    tensor = as_tensor(x)
    shaping.pad(tensor, amounts)  # refuses what are no amounts
    for axis, (before, after) in enumerate(amounts):
        if before < 0 or after < 0:
            raise ArgumentError("pad", f"mode {mode!r} by {amounts}", "Amounts are not negative.")
        if before or after:
            tensor = _along(tensor, axis, before, after, mode)
    return tensor


def _cropped(x: Tensor, amounts: Any) -> tuple[Tensor, Any]:
    """Without what negative amounts take away, and the amounts that are left."""
    is_list = isinstance(amounts, Sequence) and len(amounts) == x.ndim
    is_plain = is_list and all(isinstance(p, Sequence) and len(p) == 2 for p in amounts)
    if not is_plain or not all(isinstance(n, int) for pair in amounts for n in pair):
        return x, amounts  # refused further down
    for axis, (before, after) in enumerate(amounts):
        start, stop = max(0, -before), x.shape[axis] - max(0, -after)
        if start > stop:
            raise ShapeError("pad", f"{amounts} of {x.type}", "That leaves nothing.")
        if before < 0 or after < 0:
            x = slice_along(x, axis, start, stop)
    return x, [(max(0, before), max(0, after)) for before, after in amounts]


def _along(x: Tensor, axis: int, before: int, after: int, mode: str) -> Tensor:
    n = x.shape[axis]
    most = {"reflect": n - 1, "circular": n, "replicate": max(before, after) if n else -1}[mode]
    if max(before, after) > most:
        raise ShapeError(
            "pad",
            f"{before} before and {after} after the {n} elements of axis {axis}, mode {mode!r}",
            f"At most {max(most, 0)} fit.",
        )
    if mode == "reflect":
        ends = (
            flip(slice_along(x, axis, 1, before + 1), axis),
            flip(slice_along(x, axis, n - 1 - after, n - 1), axis),
        )
    elif mode == "circular":
        ends = slice_along(x, axis, n - before, n), slice_along(x, axis, 0, after)
    else:
        ends = _repeated(x, axis, 0, before), _repeated(x, axis, n - 1, after)
    return concat([part for part in (ends[0], x, ends[1]) if part.shape[axis]], axis)


def _repeated(x: Tensor, axis: int, at: int, count: int) -> Tensor:
    """One element of an axis, a number of times."""
    one = slice_along(x, axis, at, at + 1)
    return broadcast_to(one, (*x.shape[:axis], count, *x.shape[axis + 1 :]))
