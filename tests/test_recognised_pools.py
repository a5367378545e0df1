"""Pooling that is written out becomes pooling; what is only like it does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from itertools import product
from typing import Any

import numpy as np
import pytest

import treadle as td
from test_recognition import found_in
from treadle import nn, optim
from treadle.base import dtypes
from treadle.base.rewrites import Exactness, Status
from treadle.ir import composites as c
from treadle.ir.ops.leaves import INPUT
from treadle.ir.types import TensorType

IMAGES = TensorType((2, 3, 8, 12))
ROWS = TensorType((2, 3, 9))
CHANNELS_LAST = TensorType((2, 8, 12, 3))
NARROW = TensorType((2, 3, 8, 12), dtypes.bfloat16)
Function = Callable[..., Any]


def blocks(x):
    n, channels, h, w = x.shape
    return x.reshape(n, channels, h // 2, 2, w // 2, 2)


def parts(x, size=2, stride=2, dilation=1):
    lengths = [(n - dilation * (size - 1) - 1) // stride + 1 for n in x.shape[2:]]
    starts = product(range(0, dilation * size, dilation), repeat=len(lengths))
    places = [
        [slice(i, i + (n - 1) * stride + 1, stride) for i, n in zip(start, lengths, strict=True)]
        for start in starts
    ]
    return [x[:, :, *place] for place in places]


def padded(x, by, value=0.0):
    return td.pad(x, ((0, 0), (0, 0), *[(by, by)] * (x.ndim - 2)), value)


def lowest(x, by=1):
    return padded(x, by, -math.inf)


def greatest(values):
    return reduce(td.maximum, values)


def unfolded(x):
    n, channels, h, w = x.shape
    return td.unfold(x, 2, stride=2).reshape(n, channels, 4, h // 2, w // 2)


def tree(x):
    a, b, d, e = parts(x)
    return td.maximum(td.maximum(a, b), td.maximum(d, e))


def last_axes(x):
    a, b = x[:, ::2], x[:, 1::2]
    return td.maximum(
        td.maximum(a[:, :, ::2], a[:, :, 1::2]), td.maximum(b[:, :, ::2], b[:, :, 1::2])
    )


SIDE_BY_SIDE = c.Pool((2, 2), (2, 2), (0, 0), (1, 1))
OVERLAPPING = c.Pool((3, 3), (2, 2), (1, 1), (1, 1))
OF_PADDED = c.Pool((3, 3), (2, 2), (0, 0), (1, 1))  # the padding stays a step of its own
DILATED = c.Pool((2, 2), (1, 1), (0, 0), (2, 2))
OF_ROWS = c.Pool((3,), (1,), (1,), (1,))

SPELLINGS: dict[str, tuple[Function, TensorType, c.Pool]] = {
    "max of blocks": (lambda x: td.max(blocks(x), (3, 5)), IMAGES, SIDE_BY_SIDE),
    "max of blocks, one axis at a time": (lambda x: td.max(td.max(blocks(x), 5), 3), IMAGES, SIDE_BY_SIDE),
    "max of columns": (lambda x: td.max(unfolded(x), 2), IMAGES, SIDE_BY_SIDE),
    "max of slices": (lambda x: greatest(parts(x)), IMAGES, SIDE_BY_SIDE),
    "max of slices by twos": (tree, IMAGES, SIDE_BY_SIDE),
    "max of a stack": (lambda x: td.max(td.stack(parts(x)), 0), IMAGES, SIDE_BY_SIDE),
    "max, padded, overlapping": (lambda x: greatest(parts(lowest(x), 3)), IMAGES, OF_PADDED),
    "max, dilated": (lambda x: greatest(parts(x, 2, 1, 2)), IMAGES, DILATED),
    "max of rows": (lambda x: greatest(parts(lowest(x), 3, 1)), ROWS, OF_ROWS),
    "max, channels last": (last_axes, CHANNELS_LAST, SIDE_BY_SIDE),
    "max in narrow floats": (lambda x: greatest(parts(x)), NARROW, SIDE_BY_SIDE),
    "mean of blocks": (lambda x: td.mean(blocks(x), (3, 5)), IMAGES, SIDE_BY_SIDE),
    "mean of columns": (lambda x: td.mean(unfolded(x), 2), IMAGES, SIDE_BY_SIDE),
    "mean of slices": (lambda x: sum(parts(x)) / 4, IMAGES, SIDE_BY_SIDE),
    "mean of slices by a factor": (lambda x: 0.25 * reduce(td.add, parts(x)), IMAGES, SIDE_BY_SIDE),
    "mean, padded, overlapping": (lambda x: sum(parts(padded(x, 1), 3)) / 9, IMAGES, OVERLAPPING),
    "mean of rows": (lambda x: td.mean(td.stack(parts(padded(x, 1), 3, 1)), 0), ROWS, OF_ROWS),
    "mean in narrow floats": (lambda x: sum(parts(x)) / 4, NARROW, SIDE_BY_SIDE),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_pooling(name: str) -> None:
    function, type_, pool = SPELLINGS[name]
    found, after = found_in(function, type_)
    op = c.MAX_POOL if name.startswith("max") else c.AVG_POOL
    (node,) = (n for n in after.nodes if n.op in (c.MAX_POOL, c.AVG_POOL))
    assert (node.op, node.attributes) == (op, pool)
    told = [(op.name, Exactness.EXACT, Status.PROVED)]
    assert [(f.name, f.exactness, f.status) for f in found] == told


NEAR: dict[str, tuple[Function, TensorType]] = {
    "one part twice": (lambda x: greatest([*parts(x)[:3], parts(x)[2]]), IMAGES),
    "three of four parts": (lambda x: greatest(parts(x)[:3]), IMAGES),
    "a part that is moved": (lambda x: greatest([*parts(x)[:3], td.flip(parts(x)[3], 2)]), IMAGES),
    "blocks of the other axes": (lambda x: td.max(x.reshape(2, 3, 2, 4, 2, 6), (2, 4)), IMAGES),
    "padded by 0": (lambda x: greatest(parts(padded(x, 1), 3)), IMAGES),
    "beyond the end": (lambda x: greatest(parts(td.pad(x, ((0, 0), (0, 0), (0, 1)), -math.inf))), ROWS),
    "least": (lambda x: reduce(td.minimum, parts(x)), IMAGES),
    "the greatest of some, plus one": (lambda x: td.maximum(parts(x)[0], parts(x)[1] + 1), IMAGES),
    "absolute values of a part": (lambda x: greatest([*parts(x)[:3], td.abs(parts(x)[3])]), IMAGES),
    "mean of four by three": (lambda x: sum(parts(x)) / 3, IMAGES),
    "mean of all": (lambda x: td.mean(x.reshape(2, 3, 1, 8, 1, 12), (3, 5)), IMAGES),
    "sum": (lambda x: sum(parts(x)), IMAGES),
    "mean of weighted parts": (lambda x: (parts(x)[0] * 2 + sum(parts(x)[2:])) / 4, IMAGES),
    "mean without the padding": (lambda x: sum(parts(padded(x, 1), 3)) / (sum(parts(padded(td.ones_like(x), 1), 3))), IMAGES),
    "mean of squares": (lambda x: sum(p * p for p in parts(x)) / 4, IMAGES),
    "mean of the wrong stride": (lambda x: (x[:, :, :8:2] + x[:, :, 1:5]) / 2, ROWS),
    "max of the wrong stride": (lambda x: td.maximum(x[:, :, :8:2], x[:, :, 1:5]), ROWS),
    "mean of a part that is stopped": (lambda x: (sum(parts(x)[:3]) + td.stop_gradient(parts(x)[3])) / 4, IMAGES),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR)
def test_what_is_no_pooling(name: str) -> None:
    function, type_ = NEAR[name]
    """Nothing is pooling of what is given; what was padded by others than it pads by may be."""
    found, after = found_in(function, type_)
    pools = [n for n in after.nodes if n.op in (c.MAX_POOL, c.AVG_POOL)]
    assert not any(after.nodes[n.operands[0].node].op is INPUT for n in pools), found


def test_equals_share_the_gradient() -> None:
    """As `td.max` has it; of those in a window of `td.max_pool` the first has all of it."""

    class Model(nn.Module):
        def __init__(self) -> None:
            self.x = nn.Parameter((1, 1, 2, 4), nn.init.zeros)

        def forward(self):
            return td.max(blocks(self.x), (3, 5)).sum()

    def gradient(numerics: str) -> list[float]:
        step = td.compile_step(
            Model(), lambda model, batch: model() + 0 * batch["y"].sum(), optim.sgd(1.0),
            {"y": td.Spec((1,))}, device="cpu", options=td.CompileOptions(numerics=numerics),
        )  # fmt: skip
        step({"y": np.zeros(1, np.float32)})
        return np.asarray(step.params["x"]).ravel().tolist()

    assert gradient("equal") == gradient("strict") == [-0.25] * 8
