"""Loops whose iterations take turns become a loop for each: what is left to choose, and values."""

from __future__ import annotations

import numpy as np
import pytest

import treadle as td
from treadle.kernel.text import to_text
from treadle.schedule.schedule import schedule


def halves(x, y):
    """Elements of two tensors in turns."""
    return td.stack([td.exp(x), y * 2], -1).reshape(x.shape[0], -1)


def thirds(x, y):
    return td.stack([x, y, x * y], -1).reshape(x.shape[0], -1)


def spread(x, y):
    """Zeros between elements."""
    return td.pad(td.exp(x) + y, [(0, 0), (1, 2)], interior=[0, 1])


def resized(x, y):
    return td.interpolate((x + y)[None, None], scale_factor=2, mode="bilinear")


def strided(x, y):
    """The gradient of a strided convolution's operand, by its phases."""
    weight = td.ones((1, 1, 3, 3)) * y[0, 0]

    def loss(x):
        return (td.conv(td.tanh(x)[None, None], weight, stride=2, padding=1) ** 2).sum()

    return td.grad(loss)(x)


FUNCTIONS = {f.__name__: f for f in (halves, thirds, spread, resized, strided)}


@pytest.mark.parametrize("shape", [(3, 16), (4, 40), (2, 7), (5, 33)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(name, shape):
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(np.float32) for _ in range(2)]
    specs = [td.Spec(shape)] * 2
    found, expected = (
        td.compile(FUNCTIONS[name], *specs, device=device)(*arrays) for device in ("cpu", "oracle")
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("function", [halves, thirds])
def test_nothing_is_left_to_choose(function):
    specs = [td.Spec((6, 32))] * 2
    program = schedule(td.trace(function, *specs))
    texts = [to_text(call.kernel) for call in program.calls()]
    assert not any(" if " in text for text in texts), texts
