"""Exchanges that programs begin themselves: where in a plan, and that nothing else changes."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

import distributed_cases as cases
import treadle as td
from treadle.kernel.plan import Point, last_uses, points_after
from treadle.runtime.executable import CallingProgram
from treadle.step.parallel.overlap import LOOKS

# A kernel's arguments: first and last iteration, scratch, a table, the iteration of a repeat.
FUNCTION = ctypes.CFUNCTYPE(
    None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64
)


def several(model: Any, batch: Any) -> Any:
    """A few phases, a loop, and calls that threads share."""
    x = batch["x"]
    carry, rows = td.scan(lambda c, row: (td.tanh(c + row), c * row), x[0] * 0, x)
    return x @ x.T, carry, td.softmax(rows, -1), (x * x).sum(0)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_function_is_called_at_every_point_of_a_plan(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TREADLE_THREADS", str(threads))
    x = np.random.default_rng(0).standard_normal((96, 64), np.float32)
    forward = td.compile_forward({}, several, {"x": x}, device="cpu")
    wanted = forward({"x": x})
    program = forward._programs.built(forward.inputs).program
    assert isinstance(program, CallingProgram)
    assert program.threads == threads
    called: list[int] = []
    function = FUNCTION(lambda begin, end, scratch, table, iteration: called.append(table or 0))
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    points = points_after(program.plan, Point(0, 0))
    assert len(points) > len(program.plan.steps) > 1, "points in the middle of a step"
    program.call_after({point: (address, 1 + i) for i, point in enumerate(points)})
    with program.calling():
        found = forward({"x": x})
    assert called == list(range(1, len(points) + 1)), "in the order of the plan, once each"
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    forward({"x": x})
    assert len(called) == len(points), "not outside"


def test_gradients_are_sent_while_others_are_computed() -> None:
    """A message takes about six looks of both sides: most bytes are begun in time for them."""
    step = cases.compiled("gpt")
    programs = step._programs.built(step._inputs).programs
    plan = programs.shard().plan
    begun, shared = last_uses(plan), last_uses(plan, threads=2)
    sizes = {programs.names.gradient(n): t.nbytes for n, t in programs.gradients.items()}
    looks = {n: LOOKS * (len(points_after(plan, begun[n])) - 1) for n in sizes}
    in_time = sum(nbytes for n, nbytes in sizes.items() if looks[n] >= 6)
    assert in_time >= 0.8 * sum(sizes.values())
    assert all(begun[n] <= shared[n] for n in sizes)
    assert any(begun[n] < shared[n] for n in sizes), "one thread need not wait for a step's end"
