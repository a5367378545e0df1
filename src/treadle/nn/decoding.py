"""Keys and values of positions that were seen, for decoding one after the other."""

from __future__ import annotations

import math

from treadle.base import dtypes
from treadle.base.errors import ShapeError
from treadle.base.numbers import check_whole
from treadle.frontend.coerce import as_tensor, cast
from treadle.frontend.functions.arithmetic import (
    logical_not,
    where,
)
from treadle.frontend.functions.dynamic import dynamic_update_slice
from treadle.frontend.functions.shaping import iota, reshape
from treadle.frontend.tensor import Operand, Tensor
from treadle.nn import init
from treadle.nn.module import Module, State, update


class KVCache(Module):
    """Keys and values (B, heads, T, D) of all positions so far, in states of a fixed length.

    `keys, values, mask = cache(k, v, position)` writes those of new positions and gives all, with a
    bias (1, 1, T_new, length) that hides what is not written yet. `position` may be a tensor.

    Shapes: two of (B, heads, T_new, D) and a position → two of (B, heads, length, D) and (1, 1,
    T_new, length).
    """

    def __init__(
        self,
        batch: int,
        heads: int,
        length: int,
        head_dim: int,
        dtype: dtypes.DType = dtypes.float32,
    ):
        for label, n in (("batch", batch), ("heads", heads), ("length", length)):
            check_whole("KVCache", label, n)
        check_whole("KVCache", "head_dim", head_dim)
        shape = (batch, heads, length, head_dim)
        self.keys, self.values = State(shape, init.zeros, dtype), State(shape, init.zeros, dtype)

    def forward(self, k: Operand, v: Operand, position: Operand) -> tuple[Tensor, Tensor, Tensor]:
        new_keys, new_values, at = as_tensor(k), as_tensor(v), as_tensor(position)
        b, heads, length, d = self.keys.shape
        for label, x in (("keys", new_keys), ("values", new_values)):
            fits = x.ndim == 4 and (x.shape[:2], x.shape[3]) == ((b, heads), d)
            if not fits or x.shape[2] > length:
                raise ShapeError(
                    "KVCache", f"{label} are {x.type}", f"They are ({b}, {heads}, T, {d})."
                )
        starts = (0, 0, at, 0)
        keys = dynamic_update_slice(self.keys, new_keys, starts)
        values = dynamic_update_slice(self.values, new_values, starts)
        update(self.keys, keys)
        update(self.values, values)
        t = new_keys.shape[2]
        is_seen = iota((t, length), 1) <= iota((t, length), 0) + cast(at, dtypes.int32)
        zero = as_tensor(0.0).astype(keys.dtype)
        mask = where(logical_not(is_seen), as_tensor(-math.inf).astype(keys.dtype), zero)
        return keys, values, reshape(mask, (1, 1, t, length))
