"""Elements of images at places that are data: grids of places, and samples there."""

from __future__ import annotations

import itertools
import math

from treadle.base import dtypes
from treadle.base.errors import DTypeError, ShapeError
from treadle.base.numbers import check_choice
from treadle.base.shapes import Shape
from treadle.frontend.coerce import as_tensor, constant
from treadle.frontend.coerce import cast as cast_to
from treadle.frontend.functions.arithmetic import (
    clamp,
    floor,
    logical_and,
    minimum,
    remainder,
    where,
)
from treadle.frontend.functions.arithmetic import round as round_of
from treadle.frontend.functions.indexing import take
from treadle.frontend.functions.linear import aligned, matmul
from treadle.frontend.functions.sequences import linspace
from treadle.frontend.functions.shaping import (
    expand,
    iota,
    moveaxis,
    reshape,
    slice_along,
    squeeze,
    stack,
    transpose,
    unsqueeze,
)
from treadle.frontend.tensor import Operand, Tensor
from treadle.ir.types import TensorType

MODES = ("bilinear", "nearest")
PADDINGS = ("zeros", "border", "reflection")


def affine_grid(theta: Operand, size: Shape, align_corners: bool = False) -> Tensor:
    """The places that affine maps take an image's to, for `grid_sample`: (N, d, d + 1) and the size
    (N, C, …) → (N, …, d).

    Places go from −1 to 1, the last axis first; with `align_corners` these are the middles of the
    outermost elements, otherwise their outer edges.
    """
    maps, sizes = as_tensor(theta), TensorType(size).shape
    _check_float("affine_grid", "theta", maps)
    space = sizes[2:]
    if not space or maps.shape != (sizes[0], len(space), len(space) + 1):
        told = f"theta is {maps.type}, the size {sizes}"
        raise ShapeError("affine_grid", told, "They are (N, d, d + 1) and (N, C, d sizes).")
    each = []
    for axis, n in reversed(list(enumerate(space))):
        most = (1.0 if align_corners else (n - 1) / n) if n > 1 else 0.0
        line = linspace(-most, most, n, maps.dtype)
        shape = tuple(n if i == axis else 1 for i in range(len(space)))
        each.append(expand(reshape(line, shape), space))
    ones = constant(1.0, space, maps.dtype)
    places = reshape(stack([*each, ones], -1), (math.prod(space), len(space) + 1))
    found = matmul(places, transpose(maps, 1, 2))
    return reshape(found, (maps.shape[0], *space, len(space)))


def _check_float(name: str, label: str, x: Tensor) -> None:
    """Places between −1 and 1 are no integers."""
    if not x.dtype.is_float:
        raise DTypeError(name, f"{label} is {x.type}, not a float", "Cast it to td.float32.")


def grid_sample(
    x: Operand,
    grid: Operand,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool = False,
) -> Tensor:
    """Elements of images at places between −1 and 1, the last axis first: (N, C, …), (N, …′, d) →
    (N, C, …′).

    `bilinear` is linear along every axis, of two or three. Places outside are zeros, the nearest
    element (`border`), or mirrored at the border (`reflection`).
    """
    check_choice("grid_sample", "mode", mode, MODES)
    check_choice("grid_sample", "padding_mode", padding_mode, PADDINGS)
    image, places = aligned(x, grid)
    _check_float("grid_sample", "the grid", places)
    space = image.shape[2:]
    fits = image.ndim == places.ndim > 2 and places.shape[0] == image.shape[0]
    if not fits or places.shape[-1] != len(space) or 0 in space:
        told = f"x is {image.type}, the grid {places.type}"
        raise ShapeError("grid_sample", told, "They are (N, C, d sizes) and (N, d sizes, d).")
    at = []
    for i, n in enumerate(reversed(space)):
        place = squeeze(slice_along(places, places.ndim - 1, i, i + 1), -1)
        place = _elements(place, n, align_corners)
        if padding_mode != "zeros":
            place = _bent(place, n, padding_mode, align_corners)
        at.append(place)
    at.reverse()
    if mode == "nearest":
        return _at(image, [round_of(p) for p in at])
    lows = [floor(p) for p in at]
    parts = [p - low for p, low in zip(at, lows, strict=True)]
    total: Tensor | None = None
    for corner in itertools.product((0.0, 1.0), repeat=len(space)):
        weight: Tensor | None = None
        for one, part in zip(corner, parts, strict=True):
            share = part if one else 1 - part
            weight = share if weight is None else weight * share
        assert weight is not None
        found = _at(image, [low + one for low, one in zip(lows, corner, strict=True)])
        term = found * unsqueeze(weight, 1)
        total = term if total is None else total + term
    assert total is not None
    return total


def _elements(place: Tensor, size: int, align_corners: bool) -> Tensor:
    """Places from −1 to 1 as numbers of elements."""
    if align_corners:
        return (place + 1.0) * ((size - 1) / 2)
    return ((place + 1.0) * float(size) - 1.0) / 2.0


def _bent(place: Tensor, size: int, padding: str, align_corners: bool) -> Tensor:
    """Places outside moved to the border, or mirrored at it."""
    if padding == "reflection":
        low, high = (0.0, size - 1.0) if align_corners else (-0.5, size - 0.5)
        width = high - low
        if width <= 0:
            return place * 0.0
        turned = remainder(place - low, 2 * width)
        place = minimum(turned, 2 * width - turned) + low
    return clamp(place, 0.0, size - 1.0)


def _at(image: Tensor, places: list[Tensor]) -> Tensor:
    """Elements at whole places, zero outside: the channels of each lie side by side."""
    batch, space = image.shape[0], image.shape[2:]
    inside: Tensor | None = None
    flat = reshape(iota((batch,), 0), (batch, *(1,) * len(space)))
    for place, n in zip(places, space, strict=True):
        is_in = logical_and(place >= 0, place <= n - 1.0)
        inside = is_in if inside is None else logical_and(inside, is_in)
        flat = flat * n + cast_to(where(is_in, place, 0.0), dtypes.int32)
    assert inside is not None
    rows = reshape(moveaxis(image, 1, -1), (batch * math.prod(space), image.shape[1]))
    found = moveaxis(take(rows, flat, 0), -1, 1)
    return where(unsqueeze(inside, 1), found, 0.0)
