"""Values of PyTorch as Treadle's, and the comparison of the results of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import treadle as td
from treadle.frontend.mean import Mean
from treadle.frontend.tensor import Tensor

DTYPES = {
    torch.float64: td.float64,
    torch.float32: td.float32,
    torch.float16: td.float16,
    torch.bfloat16: td.bfloat16,
    torch.int64: td.int64,
    torch.int32: td.int32,
    torch.uint32: td.uint32,
    torch.int8: td.int8,
    torch.uint8: td.uint8,
    torch.bool: td.bool_,
}
# Absolute and relative: a float32 result of a few operations, beside one in float64.
ABSOLUTE, RELATIVE = 1e-5, 2e-5


class NotRepresentableError(Exception):
    """A sample that Treadle cannot be asked: complex numbers, int16, sparse tensors."""


def mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """A tree of arguments with every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, slice):
        return slice(*(mapped(v, change) for v in (value.start, value.stop, value.step)))
    if isinstance(value, torch.Size):
        return tuple(value)
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(v, change) for v in value)
    if isinstance(value, dict):
        return {k: mapped(v, change) for k, v in value.items()}
    return value


def static(value: Any) -> Any:
    """Arguments that are no tensors, in Treadle's words."""
    if isinstance(value, torch.dtype):
        if value not in DTYPES:
            raise NotRepresentableError(str(value))
        return DTYPES[value]
    if isinstance(value, complex):
        raise NotRepresentableError("a complex number")
    if isinstance(value, (torch.device, torch.layout, torch.memory_format, torch.Generator)):
        return str(value)
    if isinstance(value, (list, tuple)):
        return type(value)(static(v) for v in value)
    if isinstance(value, dict):
        return {k: static(v) for k, v in value.items()}
    return value


def array_of(value: torch.Tensor) -> np.ndarray:
    if value.layout is not torch.strided:
        raise NotRepresentableError(str(value.layout))
    if value.dtype not in DTYPES:
        raise NotRepresentableError(str(value.dtype))
    if value.device.type != "cpu":
        raise NotRepresentableError(str(value.device))
    plain = value.detach().resolve_conj().resolve_neg()
    if plain.dtype is torch.bfloat16 or plain.ndim > 64:
        raise NotRepresentableError(f"{value.dtype}, {plain.ndim} axes")
    return plain.numpy().copy()


def widened(value: torch.Tensor) -> torch.Tensor:
    """The same numbers in float64, as a leaf of its own."""
    wide = value.detach().double() if value.is_floating_point() else value.detach()
    return wide.clone().requires_grad_(value.requires_grad)


def copied(value: torch.Tensor) -> torch.Tensor:
    return value.detach().clone().requires_grad_(value.requires_grad)


def results_of(value: Any) -> list[Any]:
    """The tensors and numbers of a result, in order."""
    if isinstance(value, torch.Tensor):  # complex numbers are pairs in Treadle
        return [torch.view_as_real(value.resolve_conj()) if value.is_complex() else value]
    if isinstance(value, (Tensor, np.ndarray)):
        return [value]
    if isinstance(value, Mean):
        return [value.tensor()]
    if isinstance(value, dict):
        return [r for v in value.values() for r in results_of(v)]
    if isinstance(value, (list, tuple)):
        return [r for v in value for r in results_of(v)]
    return [] if value is None else [np.asarray(value)]


def plain(value: Any) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        if value.dtype not in DTYPES or value.layout is not torch.strided:
            raise NotRepresentableError(str(value.dtype))
        kept = value.detach().resolve_conj().resolve_neg()
        return (kept.float() if kept.dtype is torch.bfloat16 else kept).numpy()
    return value.numpy() if isinstance(value, Tensor) else np.asarray(value)


def type_name(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return DTYPES[value.dtype].name if value.dtype in DTYPES else str(value.dtype)
    return value.dtype.name


def value_complaint(found: np.ndarray, wide: np.ndarray, narrow: np.ndarray) -> str:
    """What differs from PyTorch's result in float64 and from that in float32, or nothing."""
    if found.shape != wide.shape:
        return f"shape {found.shape}, not {wide.shape}"
    if not found.size:
        return ""
    at_64, at_32 = _differing(found, wide, narrow), _differing(found, narrow, wide)
    if not at_64.any() or not at_32.any():
        return ""
    place = tuple(int(i) for i in np.argwhere(at_32)[0])
    return f"{found[place]!r} at {place}, not {wide[place]!r} (float32: {narrow[place]!r})"


def _differing(found: np.ndarray, expected: np.ndarray, other: np.ndarray) -> np.ndarray:
    if found.dtype.kind not in "fV" and expected.dtype.kind not in "fV":
        return found.astype(object) != expected.astype(object)
    a, b, c = (t.astype(np.float64) for t in (found, expected, other))
    is_finite = np.isfinite(b) & np.isfinite(c)
    with np.errstate(invalid="ignore"):
        # What PyTorch's own float32 result is away from its float64 one is allowed, four times.
        own = np.abs(np.where(is_finite, b - c, 0))
        slack = ABSOLUTE + RELATIVE * np.abs(b) + 4 * own
        is_near = np.abs(a - b) <= np.where(np.isfinite(b), slack, 0)
    return ~(is_near | (a == b) | (np.isnan(a) & np.isnan(b)))
