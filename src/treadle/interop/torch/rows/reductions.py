"""Rows of reductions, running sums, sorting and norms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from treadle.base.dtypes import DType, bool_, int64
from treadle.frontend.coerce import cast
from treadle.frontend.functions import reductions as r
from treadle.frontend.functions import sequences, statistics
from treadle.frontend.functions.arithmetic import mul, ne, sqrt, where
from treadle.frontend.functions.indexing import getitem, take_along_axis
from treadle.frontend.functions.shaping import reshape, squeeze
from treadle.frontend.tensor import Tensor
from treadle.interop.torch.rows.table import aten

Dims = int | Sequence[int] | None


def axes(dim: Dims) -> tuple[int, ...] | None:
    """All axes where none is named."""
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return None
    return (dim,) if isinstance(dim, int) else tuple(dim)


def _typed(x: Tensor, dtype: DType | None) -> Tensor:
    """In a dtype that was asked for; integers are added up as PyTorch's, in 64 bits."""
    if dtype is not None:
        return cast(x, dtype)
    return x if x.dtype.is_float else cast(x, int64)


@aten("sum", "sum.dim_IntList")
def _sum(x: Tensor, dim: Dims = None, keepdim: bool = False, dtype: DType | None = None) -> Tensor:
    return r.sum(x, axes(dim), keepdim, dtype)


@aten("mean", "mean.dim")
def _mean(x: Tensor, dim: Dims = None, keepdim: bool = False, dtype: DType | None = None) -> Tensor:
    return r.mean(_typed(x, dtype), axes(dim), keepdim)


@aten("prod", "prod.dim_int")
def _prod(x: Tensor, dim: Dims = None, keepdim: bool = False, dtype: DType | None = None) -> Tensor:
    return r.prod(x, axes(dim), keepdim, dtype)


@aten("nansum")
def _nansum(x: Tensor, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    return _sum(where(ne(x, x), 0, x), dim, keepdim, dtype)


@aten("amax")
def _amax(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return r.max(x, axes(dim), keepdim)


@aten("amin")
def _amin(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return r.min(x, axes(dim), keepdim)


@aten("max")
def _max(x: Tensor) -> Tensor:
    return r.max(x)


@aten("min")
def _min(x: Tensor) -> Tensor:
    return r.min(x)


@aten("aminmax")
def _aminmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return r.min(x, dim, keepdim), r.max(x, dim, keepdim)


def _chosen(x: Tensor, at: Callable[..., Tensor], dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
    """What lies at an index of each row, and the index; only that gets the gradient."""
    if not x.ndim:
        return x, cast(mul(x, 0), int64)
    index = at(x, dim, True)
    values = take_along_axis(x, index, dim)
    return (values, index) if keepdim else (squeeze(values, dim), squeeze(index, dim))


@aten("max.dim")
def _max_dim(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _chosen(x, r.argmax, dim, keepdim)


@aten("min.dim")
def _min_dim(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _chosen(x, r.argmin, dim, keepdim)


@aten("argmax")
def _argmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return r.argmax(x, dim, keepdim)


@aten("argmin")
def _argmin(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return r.argmin(x, dim, keepdim)


@aten("any", "any.dim", "any.dims")
def _any(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return r.any(x, axes(dim), keepdim)


@aten("all", "all.dim", "all.dims")
def _all(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return r.all(x, axes(dim), keepdim)


@aten("count_nonzero", "count_nonzero.dim_IntList")
def _count_nonzero(x: Tensor, dim: Dims = None) -> Tensor:
    return r.sum(cast(x, bool_), axes(dim))


# Variances


@aten("var.correction")
def _var(x: Tensor, dim: Dims = None, correction: Any = None, keepdim: bool = False) -> Tensor:
    return r.var(x, axes(dim), 1 if correction is None else correction, keepdim)


@aten("std.correction")
def _std(x: Tensor, dim: Dims = None, correction: Any = None, keepdim: bool = False) -> Tensor:
    return r.std(x, axes(dim), 1 if correction is None else correction, keepdim)


@aten("var", "var.dim")
def _var_dim(x: Tensor, *given: Any) -> Tensor:
    return r.var(x, *_unbiased(*given))


@aten("std", "std.dim")
def _std_dim(x: Tensor, *given: Any) -> Tensor:
    return r.std(x, *_unbiased(*given))


def _unbiased(*given: Any) -> tuple[Any, ...]:
    """(axes, correction, keepdims) of (dim, unbiased, keepdim), or of (unbiased,) alone."""
    if not given or isinstance(given[0], bool):
        return None, int(given[0]) if given else 1, False
    dim, unbiased, keepdim = [*given, True, False] if len(given) == 1 else [*given, False][:3]
    return axes(dim), int(unbiased), keepdim


@aten("var_mean.correction")
def _var_mean(
    x: Tensor, dim: Dims = None, correction: Any = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    return _var(x, dim, correction, keepdim), r.mean(x, axes(dim), keepdim)


@aten("std_mean.correction")
def _std_mean(
    x: Tensor, dim: Dims = None, correction: Any = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    return _std(x, dim, correction, keepdim), r.mean(x, axes(dim), keepdim)


# Logarithms of sums, norms


@aten("logsumexp")
def _logsumexp(x: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    return r.logsumexp(x, axes(dim), keepdim)


@aten("linalg_vector_norm")
def _vector_norm(
    x: Tensor, ord: float = 2, dim: Dims = None, keepdim: bool = False, dtype: Any = None
) -> Tensor:
    value, over = _typed(x, dtype), axes(dim)
    return r.norm_over(value, ord, over, keepdim)


@aten("norm.Scalar", "norm.ScalarOpt_dim")
def _norm(x: Tensor, p: float | None = 2, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return _vector_norm(x, 2 if p is None else p, dim, keepdim)


@aten("dist")
def _dist(x: Tensor, y: Tensor, p: float = 2) -> Tensor:
    return _vector_norm(x - y, p)


@aten("frobenius_norm.dim")
def _frobenius(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return sqrt(r.sum(x * x, axes(dim), keepdim))


@aten("trace")
def _trace(x: Tensor) -> Tensor:
    return r.sum(sequences.diagonal(x))


# Along an axis


@aten("cumsum")
def _cumsum(x: Tensor, dim: int, dtype: DType | None = None) -> Tensor:
    return r.cumsum(x, dim, dtype=dtype) if x.ndim else r.accumulated(x, dtype)


@aten("cumprod")
def _cumprod(x: Tensor, dim: int, dtype: DType | None = None) -> Tensor:
    return sequences.cumprod(x, dim, dtype)


@aten("logcumsumexp")
def _logcumsumexp(x: Tensor, dim: int) -> Tensor:
    return sequences.logcumsumexp(x, dim)


@aten("cummax")
def _cummax(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return sequences.cummax(x, dim)


@aten("cummin")
def _cummin(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return sequences.cummin(x, dim)


@aten("sort")
def _sort(x: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    return r.sort(x, dim, descending)


@aten("sort.stable")
def _sort_stable(
    x: Tensor, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Tensor, Tensor]:
    return r.sort(x, dim, descending)


@aten("argsort")
def _argsort(x: Tensor, dim: int = -1, descending: bool = False) -> Tensor:
    return r.argsort(x, dim, descending)


@aten("argsort.stable")
def _argsort_stable(
    x: Tensor, stable: bool = True, dim: int = -1, descending: bool = False
) -> Tensor:
    return r.argsort(x, dim, descending)


@aten("topk")
def _topk(
    x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    return r.topk(x, k, dim, largest)


@aten("kthvalue")
def _kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    values, index = (_at(t, dim, k - 1) for t in r.sort(x, dim))
    return (values, index) if keepdim else (squeeze(values, dim), squeeze(index, dim))


def _at(x: Tensor, dim: int, k: int) -> Tensor:
    return getitem(x, (*(slice(None),) * (dim % x.ndim), slice(k, k + 1)))


@aten("median.dim")
def _median_dim(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The lower of the two in the middle."""
    return _kthvalue(x, (x.shape[dim] + 1) // 2, dim, keepdim)


@aten("median")
def _median(x: Tensor) -> Tensor:
    return _median_dim(reshape(x, -1), 0)[0]


@aten("diff")
def _diff(x: Tensor, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Tensor:
    return statistics.diff(x, n, dim, prepend, append)
