"""Vector loops: lanes run in lockstep, and never meet in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import treadle as td
from test_kernels import evaluate, run
from treadle.domains.float64 import evaluate_float64
from treadle.ir.graph import Graph
from treadle.kernel.access import accesses
from treadle.kernel.index import Bounded, Index, Var, data, divide, variable
from treadle.kernel.nodes import (
    Accumulate,
    Buffer,
    For,
    Kernel,
    Let,
    Literal,
    Load,
    Local,
    Matmul,
    Matrix,
    Role,
    Statement,
    Store,
    StridedAxis,
)
from treadle.kernel.races import conflicts_in
from treadle.kernel.verify import verify
from treadle.schedule import finish, order
from treadle.schedule.schedule import schedule

F32 = td.float32
ZERO = Literal(0.0, F32)
I40, J, K = Var("i", 40), Var("j", 6), Var("k", 3)
AT = variable(I40)


def stores(*indices: Index, loops: tuple[Var, ...] = (), role: Role = Role.PARALLEL) -> For:
    """A loop over i that stores to y at some indices, inside other loops."""
    body: tuple[Statement, ...] = tuple(Store("y", index, ZERO) for index in indices)
    for var in loops:
        body = (For(var, Role.SEQUENTIAL, body),)
    return For(I40, role, body)


rows, columns = AT * 6 + variable(J), variable(J) * 40 + AT
far, near = divide(AT, 8)
APART = {
    "rows": stores(rows, loops=(J,)),
    "columns": stores(columns, loops=(J,)),
    "part of a row": stores(AT * 7 + variable(J), loops=(J,)),
    "two stores": stores(AT * 2, AT * 2 + 1),
    "far stores": stores(AT, AT + 40),
    "blocks": stores(near * 5 + far),
    "a step of a loop outside": stores(AT + variable(K) * 3),
    "an index of one value": stores(AT + data("t", 1)),
    "data outside": stores(AT + data("t", 100)),
    "bounded": stores(Index(((Bounded(AT - 3, 8), 1),))),
}
MEETING = {
    "one element": stores(Index()),
    "overlapping rows": stores(AT * 5 + variable(J), loops=(J,)),
    "overlapping columns": stores(variable(J) * 39 + AT, loops=(J,)),
    "neighbours": stores(AT, AT + 1),
    "only the quotient": stores(far),
    "other factors": stores(AT, AT * 2),
    "a digit below that overlaps": stores(AT * 1 + variable(J) * 5, loops=(J,)),
    "wrapped": stores(AT, AT + variable(J) * 20, loops=(J,)),
}


@pytest.mark.parametrize("name", APART)
def test_iterations_that_stay_apart(name: str) -> None:
    assert not conflicts_in(APART[name])


@pytest.mark.parametrize("name", MEETING)
def test_iterations_that_may_meet(name: str) -> None:
    assert conflicts_in(MEETING[name]) == {"y"}


@pytest.mark.parametrize("name", [*APART, *MEETING])
def test_what_is_said_of_iterations_holds(name: str) -> None:
    """By counting: elements that two iterations touch, over all values of everything inside."""
    loop = (APART | MEETING)[name]
    for k in range(K.extent):  # of a loop outside: the same for all
        owners: dict[int, set[int]] = {}
        for i in range(I40.extent):
            for access in accesses(loop.body):
                for element in _elements(access.index, {"i": i, "k": k, "t": 5}):
                    owners.setdefault(element, set()).add(i)
        assert all(len(o) == 1 for o in owners.values()) == (name in APART)


def _elements(index: Index, values: dict[str, int]) -> set[int]:
    if J.name in str(index):
        return {evaluate(index, {**values, J.name: j}) for j in range(J.extent)}
    is_held = "[" not in str(index) or 0 <= values["i"] - 3 < 8  # a guard stands before it
    return {evaluate(index, values)} if is_held else set()


def test_a_read_of_what_another_iteration_writes_is_a_meeting() -> None:
    shifted = Load("y", AT + 1, F32)
    assert conflicts_in(For(I40, Role.VECTOR, (Store("y", AT, shifted),))) == {"y"}
    assert not conflicts_in(For(I40, Role.VECTOR, (Store("y", AT, Load("y", AT, F32)),)))
    assert not conflicts_in(For(I40, Role.VECTOR, (Store("y", AT, Load("x", AT + 1, F32)),)))


def test_products_in_panels_stay_apart() -> None:
    """Columns of a panel are part of a row: other panels have the rest of it."""

    def matmul(step: int) -> For:
        whole = Matrix("x", Index(), StridedAxis(8, 4), StridedAxis(4))
        target = Matrix("y", variable(J) * step, StridedAxis(8, 96), StridedAxis(16))
        right = Matrix("w", variable(J) * 16, StridedAxis(4, 96), StridedAxis(16))
        return For(J, Role.PARALLEL, (Matmul(target, whole, right),))

    assert not conflicts_in(matmul(16))
    assert conflicts_in(matmul(15)) == {"y"}


# The verifier


def kernel(*body: Statement, scratch: tuple[Buffer, ...] = ()) -> Kernel:
    return Kernel("k", (Buffer("x", F32, 240),), (Buffer("y", F32, 240),), body, (), scratch)


SUM = Accumulate("acc", "add", Load("x", AT, F32))
START = Let("acc", ZERO)
ONE = Buffer("s", F32, 1)
PRIVATE = replace(ONE, lanes=8)
THROUGH = (Store("s", Index(), Load("x", AT, F32)), Store("y", AT, Load("s", Index(), F32)))
REFUSED = {
    "shared scratch": (kernel(For(I40, Role.VECTOR, THROUGH), scratch=(ONE,)), "lanes of i may meet in s"),
    "private to two loops": (
        kernel(For(I40, Role.VECTOR, THROUGH), For(I40, Role.VECTOR, THROUGH[:1]), scratch=(PRIVATE,)),
        "more than one loop",
    ),
    "private outside lanes": (
        kernel(Store("s", Index(), ZERO), For(I40, Role.VECTOR, THROUGH), scratch=(PRIVATE,)),
        "more than one loop",
    ),
    "two sums of one local": (
        kernel(START, For(I40, Role.VECTOR, (SUM, Accumulate("acc", "max", Load("x", AT, F32))))),
        "accumulate acc by",
    ),
    "a sum that is read": (
        kernel(START, For(I40, Role.VECTOR, (SUM, Store("y", AT, Local("acc", F32))))),
        "read what they accumulate",
    ),
    "an end of its own": (
        kernel(For(J, Role.VECTOR, (For(I40, Role.SEQUENTIAL, (Store("y", variable(J) * 40 + AT, ZERO),), variable(J)),))),
        "end i at other times",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_the_verifier_refuses(name: str) -> None:
    wrong, cause = REFUSED[name]
    with pytest.raises(td.GraphError, match=cause):
        verify(wrong)


def test_the_verifier_accepts_private_scratch() -> None:
    verify(kernel(For(I40, Role.VECTOR, THROUGH), scratch=(PRIVATE,)))
    verify(kernel(For(I40, Role.PARALLEL, THROUGH), scratch=(ONE,)))  # a thread's own
    verify(kernel(START, For(I40, Role.VECTOR, (SUM,)), Store("y", Index(), Local("acc", F32))))


# Reductions that are used again, at several widths

Function = Callable[[td.Tensor], td.Tensor]
USED_AGAIN: dict[str, Function] = {
    "logsumexp": lambda x: td.logsumexp(x, -1),
    "logsumexp of columns": lambda x: td.logsumexp(x, 0),
    "var": lambda x: td.var(x, 1),
    "softmax of columns": lambda x: td.softmax(x, 0),
    "norm": lambda x: x / td.norm(x, axis=1, keepdims=True),
    "running sum": lambda x: td.cumsum(x, 1).max(1),
    "median": lambda x: td.sort(x, 1)[0][:, 1],
    "guarded": lambda x: td.logsumexp(td.pad(td.cumsum(x, 1), [(0, 0), (1, 2)]), 1),
}
SHAPE = (37, 3)


def sample(f: Function) -> tuple[Graph, np.ndarray, np.ndarray]:
    x = np.random.default_rng(3).normal(size=SHAPE).astype(np.float32)
    graph = td.trace(f, td.Spec(SHAPE))
    (expected,) = evaluate_float64(graph, {"x": x})
    return graph, x, expected


@pytest.mark.parametrize("width", [1, 4, 8, 16])
@pytest.mark.parametrize("name", USED_AGAIN)
def test_the_interpreter_runs_lanes_in_lockstep(name: str, width: int) -> None:
    graph, x, expected = sample(USED_AGAIN[name])
    (found,) = run(schedule(graph), {"x": x}, width)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", USED_AGAIN)
def test_native_code_keeps_lanes_apart(name: str) -> None:
    _, x, expected = sample(USED_AGAIN[name])
    found = td.compile(USED_AGAIN[name], td.Spec(SHAPE), device="cpu")(x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


# Without the mend: lanes that share a thread's scratch are found three times over

RUNNING = USED_AGAIN["running sum"]


@pytest.fixture
def shared_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler as it was: it gives loops to lanes without a look at scratch."""
    monkeypatch.setattr(finish, "conflicts_in", lambda loop: set())


@pytest.fixture
def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "verify", lambda kernel: kernel)
    monkeypatch.setenv("TREADLE_CACHE", "off")


@pytest.mark.usefixtures("shared_scratch")
def test_shared_scratch_is_refused_by_the_verifier() -> None:
    with pytest.raises(td.GraphError, match="lanes of .* may meet in s0"):
        schedule(td.trace(RUNNING, td.Spec(SHAPE)))


@pytest.mark.usefixtures("shared_scratch", "unverified")
@pytest.mark.parametrize("width", [4, 8, 16])
def test_shared_scratch_is_seen_by_the_interpreter(width: int) -> None:
    graph, x, expected = sample(RUNNING)
    (found,) = run(schedule(graph), {"x": x}, width)
    assert np.abs(found - expected).max() > 0.1


@pytest.mark.usefixtures("shared_scratch", "unverified")
def test_shared_scratch_is_seen_by_a_comparison_with_the_oracle() -> None:
    _, x, expected = sample(RUNNING)
    found = td.compile(RUNNING, td.Spec(SHAPE), device="cpu")(x)
    assert np.abs(found - expected).max() > 0.1
