"""Floats beyond an integer's range: every device says the same."""

from __future__ import annotations

import numpy as np
import pytest

import treadle as td


@pytest.mark.parametrize("device", ["oracle", "cpu"])
@pytest.mark.parametrize("dtype", [td.int8, td.uint8, td.int32, td.uint32, td.int64])
def test_casts_end_at_the_range_and_nan_is_0(device: str, dtype: td.DType) -> None:
    x = np.array([np.nan, np.inf, -np.inf, 1e30, -1e30, 300.7, -300.7, 2.9, -2.9], np.float32)
    low, high = dtype.range()
    expected = [0, high, low, high, low, min(300, high), max(-300, low), 2, max(-2, low)]
    program = td.compile(lambda x: td.cast(x, dtype), td.Spec((9,)), device=device)
    assert [int(v) for v in program(x)] == expected
