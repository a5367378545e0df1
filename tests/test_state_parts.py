"""A part of a state that is updated: in place, where nothing reads what was there afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import treadle as td
from cuda_on_host import run_on_host
from treadle import nn
from treadle.kernel.cost import statements
from treadle.kernel.target import CPU, GPU
from treadle.runtime.oracle import OracleProgram
from treadle.schedule.schedule import schedule

SLOTS, WIDTH = 37, 5


class Cache(nn.Module):
    def __init__(self) -> None:
        self.rows = nn.State((SLOTS, WIDTH), nn.init.normal())


def plain(m: Any, x: Any, at: Any) -> Any:
    new = td.dynamic_update_slice(m.rows, x * 2, (at, 0))
    td.update(m.rows, new)
    return td.sum(new * td.iota((SLOTS, WIDTH), 0).astype(td.float32), 0)


def old_afterwards(m: Any, x: Any, at: Any) -> Any:
    new = td.dynamic_update_slice(m.rows, x, (at, 0))
    td.update(m.rows, new)
    return td.cumsum(new, 0) - m.rows


def from_itself(m: Any, x: Any, at: Any) -> Any:
    """What is written was elsewhere in the state: rows 1 to 3 move to where they are put."""
    new = td.dynamic_update_slice(m.rows, m.rows[1:4] + x, (at, 0))
    td.update(m.rows, new)
    return new


def flipped(m: Any, x: Any, at: Any) -> Any:
    part = td.dynamic_slice(m.rows, (at, 0), (3, WIDTH))
    new = td.dynamic_update_slice(m.rows, td.flip(part, 0), (at, 0))
    td.update(m.rows, new)
    return new + x[:1]


def twice(m: Any, x: Any, at: Any) -> Any:
    first = td.dynamic_update_slice(m.rows, x, (at, 0))
    new = td.dynamic_update_slice(first, -x, (at + 2, 0))
    td.update(m.rows, new)
    return new


CASES = [plain, old_afterwards, from_itself, flipped, twice]
STARTS = (0, 20, SLOTS - 3, SLOTS + 5, -4)  # those outside are held so that the window fits


def compiled(change: Callable[..., Any], device: str) -> td.Forward:
    batch = {"x": td.Spec((3, WIDTH)), "at": td.Spec((), td.int32)}

    def forward(m: Any, given: Any) -> Any:
        return change(m, given["x"], given["at"])

    return td.compile_forward(Cache(), forward, batch, device=device)


@pytest.mark.parametrize("change", CASES, ids=lambda c: c.__name__)
def test_a_part_of_a_state(change: Callable[..., Any]) -> None:
    ours, exact = compiled(change, "cpu"), compiled(change, "oracle")
    rng = np.random.default_rng(0)
    for at in STARTS:
        batch = {"x": rng.normal(size=(3, WIDTH)).astype(np.float32), "at": np.array(at, np.int32)}
        np.testing.assert_allclose(ours(batch), exact(batch), 1e-4, 1e-4)
        np.testing.assert_allclose(ours.params["rows"], exact.params["rows"], 1e-5, 1e-5)


def only_written(m: Any, x: Any, at: Any) -> Any:
    td.update(m.rows, td.dynamic_update_slice(m.rows, x, (at, 0)))
    return x


@pytest.mark.parametrize("target", [CPU, GPU], ids=lambda t: t.name)
def test_only_the_part_is_written(target: Any) -> None:
    """As many statements run as elements are written, not as many as there are."""
    graph = compiled(only_written, "oracle").graph
    program = schedule(graph, in_place=True, target=target)
    (writer,) = (c for c in program.calls() if "rows" in [a.buffer for a in c.written])
    assert statements(writer.kernel.body) < SLOTS * WIDTH // 2


def test_the_text_for_a_gpu() -> None:
    graph = compiled(plain, "oracle").graph
    rng = np.random.default_rng(1)
    arrays = {"rows": rng.normal(size=(SLOTS, WIDTH)).astype(np.float32)}
    arrays["batch:x"] = rng.normal(size=(3, WIDTH)).astype(np.float32)
    arrays["batch:at"] = np.array(9, np.int32)
    wanted = OracleProgram(graph).run(arrays)
    found = run_on_host(schedule(graph, in_place=True, target=GPU), arrays)
    for ours, exact in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, np.asarray(exact, np.float32), 1e-4, 1e-4)


@pytest.mark.parametrize("target", [CPU, GPU], ids=lambda t: t.name)
def test_loops_around_a_window_that_starts_anywhere(target: Any) -> None:
    """Where it starts is read inside all loops, and is the same in all of their iterations."""

    class Keys(nn.Module):
        def __init__(self) -> None:
            self.rows = nn.State((1, 3, 64, 8), nn.init.normal())

    def forward(m: Any, given: Any) -> Any:
        x = td.concat([given["x"][..., 4:], -given["x"][..., :4]], -1)
        td.update(m.rows, td.dynamic_update_slice(m.rows, x, (0, 0, given["at"], 0)))
        return given["x"]

    batch = {"x": td.Spec((1, 3, 16, 8)), "at": td.Spec((), td.int32)}
    graph = td.compile_forward(Keys(), forward, batch, device="oracle").graph
    program = schedule(graph, in_place=True, target=target)
    rng = np.random.default_rng(1)
    arrays = {"rows": rng.normal(size=(1, 3, 64, 8)).astype(np.float32)}
    arrays["batch:x"] = rng.normal(size=(1, 3, 16, 8)).astype(np.float32)
    arrays["batch:at"] = np.array(11, np.int32)
    if target is GPU:
        for ours, exact in zip(
            run_on_host(program, arrays), OracleProgram(graph).run(arrays), strict=True
        ):
            np.testing.assert_allclose(ours, np.asarray(exact, np.float32), 1e-4, 1e-4)
