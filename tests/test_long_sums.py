"""Long sums are made in blocks: their error does not grow with the number of terms."""

from __future__ import annotations

import numpy as np
import pytest

import treadle as td
from test_kernels import run
from treadle import losses
from treadle.kernel.nodes import For, Role, Statement
from treadle.kernel.target import CPU
from treadle.schedule.schedule import schedule

# Every value is positive, so that the largest relative error is that of the sum.
MEANS = {
    "columns": ((20_000, 8), 0),
    "few columns": ((4099, 3), 0),
    "middle": ((3, 5000, 2), 1),
    "everything": ((257, 509), (0, 1)),
    "rows": ((3, 50_257), 1),
    "outer axes": ((70, 3, 90), (0, 2)),
}


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_is_as_near_as_rounding_allows(name: str) -> None:
    shape, axes = MEANS[name]
    x = np.random.default_rng(1).uniform(0, 1, shape).astype(np.float32)
    found = td.compile(lambda x: td.mean(x, axes), td.Spec(shape), device="cpu")(x)
    expected = x.astype(np.float64).mean(axes)
    assert np.abs(found / expected - 1).max() < 4e-7  # in order: up to 2e-6


@pytest.mark.parametrize(("rows", "classes"), [(2048, 100), (8191, 7)])
def test_a_mean_loss_is_near(rows: int, classes: int) -> None:
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(rows, classes)).astype(np.float32), rng.integers(0, classes, rows)

    def loss(x: td.Tensor, y: td.Tensor) -> td.Tensor:
        mean = losses.cross_entropy(x, y)
        return mean.total / mean.weight

    specs = td.Spec(x.shape), td.Spec(y.shape, td.int32)
    found, expected = (
        td.compile(loss, *specs, device=device)(x, y.astype(np.int32))
        for device in ("cpu", "oracle")
    )
    assert abs(found / expected - 1) < 3e-7


@pytest.mark.parametrize("extent", [63, 64, 65, 67, 127, 128, 131, 1000, 4096, 4099, 100_003])
@pytest.mark.parametrize("columns", [1, 3])
def test_blocks_of_any_length(extent: int, columns: int) -> None:
    graph = td.trace(lambda x: x.sum(0), td.Spec((extent, columns)))
    program = schedule(graph)
    if extent <= 4099:
        x = np.random.default_rng(3).integers(-8, 9, (extent, columns)).astype(np.float32)
        for width in (1, 8):
            (found,) = run(program, {"x": x}, width)
            np.testing.assert_array_equal(found, x.sum(0))
    for kernel in program.distinct():
        for loop in (s for s in walk(kernel.body) if isinstance(s, For)):
            sizes = CPU.reductions
            limit = max(sizes.longest_sum, 2 * int(extent**0.5) + 2)
            assert loop.role is not Role.SEQUENTIAL or loop.var.extent <= limit
            assert loop.role is not Role.VECTOR or loop.var.extent <= sizes.longest_lane_sum


def walk(body: tuple[Statement, ...]) -> list[Statement]:
    return [s for t in body for s in (t, *(walk(t.body) if isinstance(t, For) else ()))]


def test_integers_and_running_sums_stay_in_order() -> None:
    """They are exact, or every sum on the way is wanted."""
    for f, dtype in ((lambda x: x.sum(0), td.int32), (lambda x: td.cumsum(x, 0), td.float32)):
        (kernel, *_) = schedule(td.trace(f, td.Spec((200, 3), dtype))).distinct()
        extents = {s.var.extent for s in walk(kernel.body) if isinstance(s, For)}
        assert 200 in extents
