"""State that a compiled program changes in place: what reads it sees what was there before."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import treadle as td
from backend import build
from treadle import nn, optim
from treadle.ir.graph import GraphBuilder, Output, OutputKind
from treadle.ir.op import NONE
from treadle.ir.ops import elementwise as e
from treadle.ir.ops import leaves
from treadle.ir.types import TensorType

SHAPE = (5, 7)


class Changing(nn.Module):
    """Two states that a function changes beside a parameter that is trained."""

    def __init__(self, change: Callable):
        self.change = change
        self.w = nn.Parameter(SHAPE, nn.init.normal())
        self.p, self.q = nn.State(SHAPE, nn.init.normal()), nn.State(SHAPE, nn.init.normal())

    def forward(self, x):
        seen = self.change(self, x)
        return (self.w * x).sum() + td.stop_gradient(td.sum(seen)) * 1e-3


def read_late(m, x):
    """An elementwise value of the old state, used after the update."""
    old = m.p * m.p + 1
    td.update(m.p, m.p + x)
    return old


def shift(m, x):
    td.update(m.q, m.p)
    td.update(m.p, m.p + x)
    return x


def swap(m, x):
    td.update(m.p, m.q)
    td.update(m.q, m.p)
    return m.p - m.q * x


def swap_computed(m, x):
    td.update(m.p, m.q * 2)
    td.update(m.q, m.p * 2)
    return x


def stay(m, x):
    td.update(m.p, m.p)
    td.update(m.q, m.q + 1)
    return m.p


def write_only(m, x):
    """The last value seen, which nothing reads."""
    td.update(m.p, x)
    td.update(m.q, td.tanh(x))
    return x


def same_value(m, x):
    new = td.exp(x * 0.1)
    td.update(m.p, new)
    td.update(m.q, new)
    return m.p


def roll(m, x):
    """Each place takes its neighbour's."""
    td.update(m.p, td.roll(m.p, 1, 0) + td.flip(m.q, 1))
    td.update(m.q, td.concat([m.q[1:], x[:1]], 0))
    return m.q


def constant(m, x):
    td.update(m.p, td.ones(SHAPE))
    td.update(m.q, td.tensor(np.arange(35.0, dtype=np.float32).reshape(SHAPE)))
    return m.p


def summed(m, x):
    """A state that is a sum, which is no elementwise kernel."""
    td.update(m.p, td.cumsum(m.p, 0) * 0.1 + td.expand(m.p.sum(0), *SHAPE) * 0.01)
    td.update(m.q, td.expand((m.q * m.p).mean(1)[:, None], *SHAPE))
    return m.p * m.q


def in_a_scan(m, x):
    last, rows = td.scan(lambda c, r: (c * 0.5 + r, c * r), m.p[0], m.q)
    td.update(m.p, rows)
    td.update(m.q, td.expand(last, *SHAPE))
    return rows


CHANGES = [read_late, shift, swap, swap_computed, stay, write_only, same_value, roll]
CHANGES += [constant, summed, in_a_scan]


@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_states_change_as_on_the_oracle(change: Callable, optimize: bool) -> None:
    def make(device: str) -> td.TrainStep:
        return td.compile_step(
            Changing(change),
            lambda model, x: model(x),
            optim.sgd(0.1, momentum=0.9),
            td.Spec(SHAPE),
            device=device,
            options=td.CompileOptions(optimize=optimize),
        )

    rng = np.random.default_rng(0)
    ours, exact = make("cpu"), make("oracle")
    for _ in range(3):
        x = rng.normal(size=SHAPE)
        assert ours(x).loss == pytest.approx(exact(x).loss, rel=1e-4, abs=1e-4)
        for name, value in exact.params.items():
            np.testing.assert_allclose(ours.params[name], value, 1e-4, 1e-5, err_msg=name)


def test_a_capture_of_what_is_updated_is_what_it_was() -> None:
    class Captured(nn.Module):
        def __init__(self) -> None:
            self.w, self.seen = nn.Parameter((3,), nn.init.ones), nn.State((3,))

        def forward(self, x):
            td.capture("w", self.w)
            td.capture("seen", self.seen)
            td.update(self.seen, x)
            return (self.w * x).sum()

    step = td.compile_step(
        Captured(), lambda model, x: model(x), optim.sgd(1.0), td.Spec((3,)), device="cpu"
    )
    first = step(np.arange(3.0), captures=True)
    second = step(np.arange(3.0), captures=True)
    assert first.captures["w"].tolist() == [1, 1, 1]
    assert first.captures["seen"].tolist() == [0, 0, 0]
    assert second.captures["w"].tolist() == [1, 0, -1]
    assert second.captures["seen"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("fuse", [True, False])
def test_running_a_program_leaves_the_given_values(fuse: bool) -> None:
    """An update over its leaf, one that is copied at the end, and one of a leaf not read."""
    type_ = TensorType((4,))
    builder = GraphBuilder()
    p, q = (builder.add(leaves.STATE, leaves.Leaf(n, type_), ())[0] for n in "pq")
    (new,) = builder.add(e.ADD, NONE, (p, q))
    (late,) = builder.add(e.MUL, NONE, (q, new))
    updates = {"p": new, "q": p, "r": late}
    graph = builder.build([Output(OutputKind.UPDATE, n, v) for n, v in updates.items()], "updates")
    program = build(graph, fuse, in_place=True).on(1)
    values = {"p": np.arange(4, dtype=np.float32), "q": np.full(4, 2, np.float32)}
    for _ in range(2):
        found = program.run(values)
        assert [f.tolist() for f in found] == [[2, 3, 4, 5], [0, 1, 2, 3], [4, 6, 8, 10]]
    assert values["p"].tolist() == [0, 1, 2, 3]
    assert values["q"].tolist() == [2, 2, 2, 2]
    assert set(program.plan.updated) == {"p", "q", "r"}


def test_an_empty_state_is_no_trouble() -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            self.w, self.none = nn.Parameter((3,)), nn.State((0, 3))

        def forward(self, x):
            td.update(self.none, td.expand(self.w, 0, 3) * 2)
            return (self.w * x).sum() + td.sum(self.none)

    step = td.compile_step(
        Empty(), lambda model, x: model(x), optim.adamw(0.1), td.Spec((3,)), device="cpu"
    )
    assert step(np.ones(3)).loss == 0
    assert step.params["none"].shape == (0, 3)
