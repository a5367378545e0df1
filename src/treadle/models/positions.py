"""Rotations of queries and keys by position: the rates of `transformers`, and their use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from treadle.base import dtypes
from treadle.base.errors import ArgumentError
from treadle.frontend.coerce import as_tensor, cast
from treadle.frontend.functions.arithmetic import cos, sin
from treadle.frontend.functions.shaping import chunk, concat, unsqueeze
from treadle.frontend.tensor import Tensor

WIDEST = 1 << 16  # elements of a head whose rates are computed; real ones have some 2⁷
TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Rotation:
    """The cosines and sines of a batch's positions, each (B, 1, T, D / 2)."""

    cos: Tensor
    sin: Tensor

    @staticmethod
    def of(positions: Tensor, rates: np.ndarray, factor: float) -> Rotation:
        angle = unsqueeze(cast(positions, dtypes.float32), -1) * as_tensor(rates)  # (B, T, D / 2)
        c, s = cos(angle), sin(angle)
        if factor != 1.0:
            c, s = c * factor, s * factor
        return Rotation(unsqueeze(c, 1), unsqueeze(s, 1))

    def __call__(self, x: Tensor) -> Tensor:
        """(B, H, T, D), halves paired."""
        a, b = chunk(x, 2, -1)
        c, s = cast(self.cos, x.dtype), cast(self.sin, x.dtype)
        return concat([a * c - b * s, b * c + a * s], -1)


def rotary_rates(dim: int, base: float, scaling: Mapping[str, Any]) -> tuple[np.ndarray, float]:
    """Angles per position of each pair, float32, and what cosines and sines are multiplied by."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if dim > WIDEST:
        cause = f"a head has {dim:,} elements, more than {WIDEST:,}"
        raise ArgumentError("rope", cause, "Check head_dim and the number of heads.")
    if not 0 < base < 1e30:
        raise ArgumentError("rope", f"rope_theta = {base!r}", "It is a positive number.")
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    rates = np.float32(1.0) / np.float32(base) ** exponents
    if kind == "default":
        return rates, 1.0
    if kind == "linear":
        return rates / np.float32(_number(scaling, "factor")), 1.0
    if kind == "llama3":
        return _llama3(rates, scaling), 1.0
    if kind == "yarn":
        return _yarn(rates, dim, base, scaling)
    known = ", ".join(TYPES)
    raise ArgumentError("rope", f"the scaling of positions is {kind!r}", f"Known are: {known}.")


def _number(scaling: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = scaling.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e12:
        raise ArgumentError("rope", f"{name} = {value!r}", "It is a positive number.")
    return float(value)


def _llama3(rates: np.ndarray, scaling: Mapping[str, Any]) -> np.ndarray:
    """Long waves are slowed by the factor, short ones stay, those between are mixed."""
    factor = _number(scaling, "factor")
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    if low >= high:
        raise ArgumentError("rope", f"low_freq_factor {low} of {high}", "It is the lesser one.")
    before = _number(scaling, "original_max_position_embeddings")
    waves = 2 * math.pi / rates
    slowed = np.where(waves > before / low, rates / factor, rates)
    share = (before / waves - low) / (high - low)
    mixed = (1 - share) * slowed / factor + share * slowed
    is_between = ~(waves < before / high) & ~(waves > before / low)
    return np.where(is_between, mixed, slowed).astype(np.float32)


def _yarn(
    rates: np.ndarray, dim: int, base: float, scaling: Mapping[str, Any]
) -> tuple[np.ndarray, float]:
    """Pairs that turn often stay, those that turn seldom are slowed, with a ramp between."""
    factor = _number(scaling, "factor")
    before = _number(scaling, "original_max_position_embeddings")

    def pair(turns: float) -> float:
        return dim * math.log(before / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair(_number(scaling, "beta_fast", 32.0)), pair(_number(scaling, "beta_slow", 1.0))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = (high - low) or 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / width, 0, 1)
    slowed = rates / factor
    return (slowed * ramp + rates * (1 - ramp)).astype(np.float32), _yarn_factor(factor, scaling)


def _yarn_factor(factor: float, scaling: Mapping[str, Any]) -> float:
    if scaling.get("attention_factor") is not None:
        return _number(scaling, "attention_factor")

    def scale(by: float) -> float:
        return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return scale(_number(scaling, "mscale")) / scale(_number(scaling, "mscale_all_dim"))
    return scale(1.0)
