"""Rows of pooling and resizing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from treadle.base.errors import ArgumentError
from treadle.frontend.functions import pooling as p
from treadle.frontend.functions.images import interpolate
from treadle.frontend.tensor import Tensor
from treadle.interop.torch.rows.table import aten, declare

Ints = Sequence[int]


def _steps(stride: Any) -> Any:
    """No stride is the kernel's size."""
    return _one(stride) or None


def _one(values: Any) -> Any:
    return values[0] if isinstance(values, Sequence) and len(values) == 1 else values


def _kernel(kernel: Any, dims: int) -> tuple[int, ...]:
    return tuple(kernel) * dims if len(kernel) == 1 else tuple(kernel)


def _max_pool(dims: int) -> Callable[..., Tensor]:
    def row(
        x: Tensor,
        kernel: Ints,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> Tensor:
        terms = _steps(stride), _one(padding), _one(dilation), ceil_mode
        return p.max_pool(x, _kernel(kernel, dims), *terms)

    return row


def _max_pool_with_indices(dims: int) -> Callable[..., tuple[Tensor, Tensor]]:
    def row(
        x: Tensor,
        kernel: Ints,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The maxima are Treadle's pooling; the indices, if they are read, are found beside it."""
        values = _max_pool(dims)(x, kernel, stride, padding, dilation, ceil_mode)
        if ceil_mode:
            return values, None
        terms = _steps(stride), _one(padding), _one(dilation)
        return values, p.max_pool_with_indices(x, _kernel(kernel, dims), *terms)[1]

    return row  # type: ignore[return-value]


def _avg_pool(dims: int) -> Callable[..., Tensor]:
    def row(
        x: Tensor,
        kernel: Ints,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        steps, pads = _steps(stride), _one(padding)
        size = _kernel(kernel, dims)
        return p.avg_pool(x, size, steps, pads, count_include_pad, ceil_mode, divisor_override)

    return row


def _adaptive_avg_pool(x: Tensor, output_size: Ints) -> Tensor:
    return p.adaptive_avg_pool(x, tuple(output_size))


def _adaptive_max_pool(x: Tensor, output_size: Ints) -> tuple[Tensor, Tensor | None]:
    """Indices only where windows are of one size."""
    sizes = x.shape[x.ndim - len(output_size) :]
    values = p.adaptive_max_pool(x, tuple(output_size))
    if any(n % out for n, out in zip(sizes, output_size, strict=True)):
        return values, None
    kernel = tuple(n // out for n, out in zip(sizes, output_size, strict=True))
    return values, p.max_pool_with_indices(x, kernel)[1]


for _dims in (1, 2, 3):
    declare(f"max_pool{_dims}d", _max_pool(_dims))
    declare(f"max_pool{_dims}d_with_indices", _max_pool_with_indices(_dims))
    declare(f"avg_pool{_dims}d", _avg_pool(_dims))
    declare(f"adaptive_avg_pool{_dims}d", _adaptive_avg_pool)
    declare(f"adaptive_max_pool{_dims}d", _adaptive_max_pool)
for _dims in (2, 3):
    declare(f"_adaptive_avg_pool{_dims}d", _adaptive_avg_pool)


@aten("max_unpool2d")
def _max_unpool(x: Tensor, indices: Tensor, output_size: Ints) -> Tensor:
    return p.max_unpool(x, indices, (1, 1), None, 0, tuple(output_size))


# Resizing: overloads with a list of factors, and with one factor for each axis


def _resized(x: Tensor, size: Any, factors: Any, mode: str, align: bool = False) -> Tensor:
    if factors is not None and all(f is not None for f in factors):
        return interpolate(x, None, tuple(factors), mode, align)
    if size is None:
        raise ArgumentError("from_module", "a resize without a size", "Give one.")
    return interpolate(x, tuple(size), None, mode, align)


def _nearest(mode: str) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    def by_list(x: Tensor, size: Any, factors: Any) -> Tensor:
        return _resized(x, size, factors, mode)

    def by_axis(x: Tensor, size: Any, *factors: Any) -> Tensor:
        return _resized(x, size, factors or None, mode)

    return by_list, by_axis


def _smooth(mode: str) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    def by_list(x: Tensor, size: Any, align: bool, factors: Any) -> Tensor:
        return _resized(x, size, factors, mode, align)

    def by_axis(x: Tensor, size: Any, align: bool, *factors: Any) -> Tensor:
        return _resized(x, size, factors or None, mode, align)

    return by_list, by_axis


for _name, (_by_list, _by_axis) in {
    **{f"upsample_nearest{d}d": _nearest("nearest") for d in (1, 2, 3)},
    **{f"_upsample_nearest_exact{d}d": _nearest("nearest-exact") for d in (1, 2, 3)},
    "upsample_linear1d": _smooth("linear"),
    "upsample_bilinear2d": _smooth("bilinear"),
    "upsample_trilinear3d": _smooth("trilinear"),
    "upsample_bicubic2d": _smooth("bicubic"),
}.items():
    declare(f"{_name}.vec", _by_list)
    declare(_name, _by_axis)
