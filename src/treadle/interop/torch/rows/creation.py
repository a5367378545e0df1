"""Rows of ops that make tensors: constants, ranges, random numbers, dropout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from treadle.base.dtypes import DType, bool_, float32, int64
from treadle.frontend import random
from treadle.frontend.coerce import as_tensor, cast, literal
from treadle.frontend.functions import sequences
from treadle.frontend.functions import shaping as s
from treadle.frontend.functions.arithmetic import floor, where
from treadle.frontend.functions.elementary import dropout
from treadle.frontend.functions.reductions import argsort
from treadle.frontend.tensor import Operand, Tensor
from treadle.interop.torch.rows.table import aten


def _filled(shape: Sequence[int], value: Any, dtype: DType | None) -> Tensor:
    if isinstance(value, Tensor):
        return s.expand(value if dtype is None else cast(value, dtype), tuple(shape))
    chosen = dtype or (bool_ if isinstance(value, bool) else None)
    chosen = chosen or (int64 if isinstance(value, int) else float32)
    return s.full(tuple(shape), value, chosen)


@aten("full")
def _full(size: Sequence[int], value: Any, dtype: DType | None = None) -> Tensor:
    return _filled(size, value, dtype)


@aten("full_like")
def _full_like(x: Tensor, value: Any, dtype: DType | None = None) -> Tensor:
    return _filled(x.shape, value, dtype or x.dtype)


@aten("new_full")
def _new_full(x: Tensor, size: Sequence[int], value: Any, dtype: DType | None = None) -> Tensor:
    return _filled(size, value, dtype or x.dtype)


@aten("zeros", "empty.memory_format")
def _zeros(size: Sequence[int], dtype: DType | None = None) -> Tensor:
    """Memory that nobody has written is zeros here."""
    return s.zeros(tuple(size), dtype or float32)


@aten("ones")
def _ones(size: Sequence[int], dtype: DType | None = None) -> Tensor:
    return s.ones(tuple(size), dtype or float32)


@aten("zeros_like", "empty_like", "zero")
def _zeros_like(x: Tensor, dtype: DType | None = None) -> Tensor:
    return s.zeros(x.shape, dtype or x.dtype)


@aten("ones_like")
def _ones_like(x: Tensor, dtype: DType | None = None) -> Tensor:
    return s.ones(x.shape, dtype or x.dtype)


@aten("new_zeros", "new_empty")
def _new_zeros(x: Tensor, size: Sequence[int], dtype: DType | None = None) -> Tensor:
    return s.zeros(tuple(size), dtype or x.dtype)


@aten("new_ones")
def _new_ones(x: Tensor, size: Sequence[int], dtype: DType | None = None) -> Tensor:
    return s.ones(tuple(size), dtype or x.dtype)


@aten("empty_strided")
def _empty_strided(size: Sequence[int], stride: object, dtype: DType | None = None) -> Tensor:
    return s.zeros(tuple(size), dtype or float32)


@aten("empty_permuted")
def _empty_permuted(size: Sequence[int], layout: object, dtype: DType | None = None) -> Tensor:
    return s.zeros(tuple(size), dtype or float32)


@aten("fill.Scalar", "fill.Tensor")
def _fill(x: Tensor, value: Operand) -> Tensor:
    return s.expand(cast(as_tensor(value), x.dtype), x.shape)


@aten("scalar_tensor")
def _scalar_tensor(value: Any, dtype: DType | None = None) -> Tensor:
    return _filled((), value, dtype)


@aten("arange")
def _arange(end: float, dtype: DType | None = None) -> Tensor:
    return _range(0, end, 1, dtype)


@aten("arange.start")
def _arange_from(start: float, end: float, dtype: DType | None = None) -> Tensor:
    return _range(start, end, 1, dtype)


@aten("arange.start_step")
def _range(start: float, end: float, step: float = 1, dtype: DType | None = None) -> Tensor:
    is_whole = all(isinstance(n, int) for n in (start, end, step))
    chosen = dtype or (int64 if is_whole else float32)
    count = max(0, int(np.ceil((end - start) / step)))
    places = s.iota((count,), 0, chosen)
    return places if (start, step) == (0, 1) else places * step + start


@aten("linspace")
def _linspace(start: float, end: float, steps: int, dtype: DType | None = None) -> Tensor:
    return sequences.linspace(start, end, steps, dtype or float32)


@aten("eye")
def _eye(n: int, dtype: DType | None = None) -> Tensor:
    return s.eye(n, n, dtype or float32)


@aten("eye.m")
def _eye_of(n: int, m: int, dtype: DType | None = None) -> Tensor:
    return s.eye(n, m, dtype or float32)


@aten("tril_indices")
def _tril_indices(rows: int, columns: int, offset: int = 0, dtype: object = None) -> Tensor:
    return literal(np.stack(np.tril_indices(rows, offset, columns)).astype(np.int64))


@aten("triu_indices")
def _triu_indices(rows: int, columns: int, offset: int = 0, dtype: object = None) -> Tensor:
    return literal(np.stack(np.triu_indices(rows, offset, columns)).astype(np.int64))


# Random numbers are Treadle's: a seed of PyTorch's gives others


@aten("rand")
def _rand(size: Sequence[int], dtype: DType | None = None) -> Tensor:
    return random.uniform(tuple(size), dtype=dtype or float32)


@aten("randn")
def _randn(size: Sequence[int], dtype: DType | None = None) -> Tensor:
    return random.normal(tuple(size), dtype=dtype or float32)


@aten("rand_like")
def _rand_like(x: Tensor, dtype: DType | None = None) -> Tensor:
    return random.uniform(x.shape, dtype=dtype or x.dtype)


@aten("randn_like")
def _randn_like(x: Tensor, dtype: DType | None = None) -> Tensor:
    return random.normal(x.shape, dtype=dtype or x.dtype)


@aten("randint")
def _randint(high: int, size: Sequence[int], dtype: DType | None = None) -> Tensor:
    return _randint_from(0, high, size, dtype)


@aten("randint.low")
def _randint_from(low: int, high: int, size: Sequence[int], dtype: DType | None = None) -> Tensor:
    drawn = floor(random.uniform(tuple(size)) * (high - low)) + low
    return cast(drawn, dtype or int64)


@aten("randint_like")
def _randint_like(x: Tensor, high: int, dtype: DType | None = None) -> Tensor:
    return _randint_from(0, high, x.shape, dtype or x.dtype)


@aten("randint_like.low_dtype")
def _randint_like_from(x: Tensor, low: int, high: int, dtype: DType | None = None) -> Tensor:
    return _randint_from(low, high, x.shape, dtype or x.dtype)


@aten("randperm")
def _randperm(n: int, dtype: DType | None = None) -> Tensor:
    return cast(argsort(random.uniform((n,)), 0), dtype or int64)


@aten("uniform")
def _uniform(x: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    return random.uniform(x.shape, low, high, x.dtype)


@aten("normal_functional")
def _normal(x: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return random.normal(x.shape, mean, std, x.dtype)


@aten("bernoulli")
def _bernoulli(p: Tensor) -> Tensor:
    return cast(random.bernoulli(p), p.dtype)


@aten("bernoulli.p")
def _bernoulli_like(x: Tensor, p: float = 0.5) -> Tensor:
    return cast(random.bernoulli(p, x.shape), x.dtype)


@aten("dropout")
def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    return dropout(x, p, train)


@aten("native_dropout")
def _native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """The result, and what was kept."""
    if train is False or p == 0:
        return x, s.ones(x.shape, bool_)
    kept = random.bernoulli(1 - p, x.shape)
    return where(kept, x * (1 / (1 - p) if p < 1 else 0.0), 0.0), kept
