"""Random graphs for property tests: small, typed, made of everything that can be differentiated."""

from __future__ import annotations

import numpy as np

import treadle as td
from treadle.ir.graph import Graph
from treadle.ir.types import TensorType

SIZE = 3


def random_graph(seed: int, steps: int, polynomial: bool = False) -> Graph:
    """A traced function of two matrices and a vector; all values are (3, 3) or (3,)."""

    def function(a, b, v):
        rng = np.random.default_rng(seed)
        values = [a, b, v]
        for _ in range(steps):
            values.append(_step(rng, values, polynomial))
        return tuple(values[-2:])

    specs = TensorType((SIZE, SIZE)), TensorType((SIZE, SIZE)), TensorType((SIZE,))
    return td.trace(function, *specs, name="random")


def _pick(rng: np.random.Generator, values: list) -> td.Tensor:
    return values[int(rng.integers(len(values)))]


def _matrix(x: td.Tensor) -> td.Tensor:
    return x if x.ndim == 2 else td.expand(x, SIZE, SIZE)


def _step(rng: np.random.Generator, values: list, polynomial: bool) -> td.Tensor:
    x, y = _pick(rng, values), _pick(rng, values)
    axis = int(rng.integers(x.ndim))
    moves = [
        lambda: x + y,
        lambda: x - y,
        lambda: x * y,
        lambda: -x * 0.5,
        lambda: _matrix(x) @ _matrix(y),
        lambda: _matrix(x).T,
        lambda: _matrix(x).sum(int(rng.integers(2))),
        lambda: _matrix(x).mean(0),
        lambda: td.cumsum(x, axis, reverse=bool(rng.integers(2))),
        lambda: td.concat([x, x], axis)[tuple(_slices(rng, x, axis))],
        lambda: td.flip(x, axis),
        lambda: td.prod(_matrix(x), 1),
        lambda: td.take(x, [2, 0, 0], axis),
        lambda: td.pad(_matrix(x), [(1, 0), (0, 2)], interior=[1, 0])[1:4, :SIZE],
        lambda: td.avg_pool(td.pad(_matrix(x)[None], [(0, 0), (0, 1), (0, 1)]), (2, 2), 1)[0],
        lambda: td.einsum("ij,kj->ki", _matrix(x), _matrix(y)),
        lambda: td.checkpoint(lambda a, b: a * b + a)(x, x),
        lambda: td.scan(lambda c, r: (c * r + r, c), _matrix(y)[0], _matrix(x))[1],
    ]
    smooth = [
        lambda: td.exp(x * 0.1),
        lambda: td.tanh(x),
        lambda: td.sin(x),
        lambda: td.relu(x),
        lambda: td.maximum(x, y),
        lambda: td.where(x > 0, x, x * x),
        lambda: td.abs(x),
        lambda: td.softmax(x, axis),
        lambda: td.logsumexp(_matrix(x), 0),
        lambda: td.layer_norm(x),
        lambda: td.gelu(x),
        lambda: td.sigmoid(x),
        lambda: td.max(_matrix(x), 1),
        lambda: td.sort(x, axis)[0],
        lambda: x / (1 + y * y),
        lambda: td.sqrt(1 + x * x),
        lambda: td.max_pool(td.pad(_matrix(x)[None], [(0, 0), (0, 1), (0, 1)]), (2, 2), 1)[0],
    ]
    choices = moves if polynomial else moves + smooth
    return choices[int(rng.integers(len(choices)))]()


def _slices(rng: np.random.Generator, x: td.Tensor, axis: int) -> list[slice]:
    start = int(rng.integers(SIZE + 1))
    return [slice(start, start + SIZE) if i == axis else slice(None) for i in range(x.ndim)]
