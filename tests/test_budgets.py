"""Compiles end: comparisons stop by counts of work, and what was cut is not established."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import treadle as td
from treadle import nn, optim
from treadle.base import dtypes
from treadle.compile_report import CompileReport
from treadle.frontend.tensor import Tensor
from treadle.ir.graph import Graph, Output, OutputKind
from treadle.ir.graph import Value as TensorValue
from treadle.kernel.evidence import Passage
from treadle.kernel.target import CPU
from treadle.nn.tracing import Inputs
from treadle.pipeline import StepRecipe, build_step, recognise
from treadle.recognition import search
from treadle.schedule import keep
from treadle.schedule.schedule import schedule
from treadle.verify.certificate import replay
from treadle.verify.normal_form.decide import all_spent
from treadle_checker import certificate
from treadle_checker.budget import Budget
from treadle_checker.certificate import check_bytes
from treadle_checker.draws import Effort
from treadle_checker.elements import Elements
from treadle_checker.field import Array, Element, Field
from treadle_checker.randomness import safe_prime
from treadle_checker.reading import NotEstablished
from treadle_checker.residues import Lane
from treadle_checker.types import Value

MOST = 2**22  # elements that a default compile asks for, and those that it draws


class Weights(nn.Module):
    def __init__(self, *shapes: tuple[int, ...]):
        self.w = [nn.Parameter(shape, nn.init.normal(0.1)) for shape in shapes]


Loss = Callable[[Weights, dict[str, Tensor]], Tensor]
Case = tuple[Weights, Loss, dict[str, td.Spec]]


def fixed_point() -> Case:
    """A convolution, again and again on what it gave."""

    def loss(model: Weights, batch: dict[str, Tensor]) -> Tensor:
        def cell(h: Tensor, _: None) -> tuple[Tensor, None]:
            return td.tanh(td.conv(h, model.w[0], padding="same") + batch["x"]), None

        h, _ = td.scan(cell, td.zeros((64, 128, 32, 32)), length=16)
        return (h * h).sum()

    return Weights((128, 128, 3, 3)), loss, {"x": td.Spec((64, 128, 32, 32))}


def two_products() -> Case:
    """A scan of two products of matrices."""

    def loss(model: Weights, batch: dict[str, Tensor]) -> Tensor:
        def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            h = td.tanh(td.tanh(h @ model.w[0]) @ model.w[1] + x)
            return h, h

        _, every = td.scan(cell, td.zeros((1024, 128)), batch["x"])
        return (every * every).sum()

    return Weights((128, 128), (128, 128)), loss, {"x": td.Spec((24, 1024, 128))}


def differential_equation() -> Case:
    """Four looks at a small network in each of a hundred iterations."""

    def loss(model: Weights, batch: dict[str, Tensor]) -> Tensor:
        def slope(h: Tensor) -> Tensor:
            return td.tanh(h @ model.w[0]) @ model.w[1]

        def cell(h: Tensor, _: None) -> tuple[Tensor, None]:
            a = slope(h)
            b = slope(h + 0.5 * a)
            c = slope(h + 0.5 * b)
            return h + (a + 2 * b + 2 * c + slope(h + c)) / 60, None

        h, _ = td.scan(cell, batch["x"], length=100)
        return (h * h).sum()

    return Weights((64, 256), (256, 64)), loss, {"x": td.Spec((1024, 64))}


def recurrent() -> Case:
    """Layers of the library, whose products are moved out of their loops."""

    class Model(nn.Module):
        def __init__(self) -> None:
            self.encoder, self.decoder = nn.GRU(256, 512), nn.GRU(256, 512)
            self.head = nn.Linear(512, 256)

        def forward(self, x: Tensor) -> Tensor:
            _, state = self.encoder(x)
            return self.head(self.decoder(x, state)[0])

    model = Model()

    def loss(model: Model, batch: dict[str, Tensor]) -> Tensor:
        y = model(batch["x"])
        return (y * y).mean()

    return model, loss, {"x": td.Spec((64, 64, 256))}  # type: ignore[return-value]


CASES = [fixed_point, two_products, differential_equation, recurrent]


def passages(case: Case) -> list[Passage]:
    """The stages of a default compile, compared as it does."""
    model, loss, batch = case
    options, report = td.CompileOptions(), CompileReport("cpu", "float32")
    recipe = StepRecipe(model, loss, optim.adamw(1e-3), "step0:", 1, None, dtypes.float32, options)
    build_step(recipe, recipe.plan(), Inputs.of(batch), report)
    report.evidence.settle()
    return report.evidence.passages


class Counted:
    """What is asked of graphs and drawn, whoever asks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.elements = 0
        at, keyed = Elements.at, Field.keyed

        def counted(on: Elements, value: Value, some: Array) -> Element:
            self.add(len(some))
            return at(on, value, some)

        def drawn(field: Field, name: str, dtype: str, some: Array, most: int = 2**15) -> Element:
            self.add(np.size(some))
            return keyed(field, name, dtype, some, most)

        monkeypatch.setattr(Elements, "at", counted)
        monkeypatch.setattr(Field, "keyed", drawn)

    def add(self, elements: int) -> None:
        self.elements += elements
        assert self.elements <= MOST


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_default_compile_looks_at_a_bounded_number_of_elements(
    case: Callable[[], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(monkeypatch)
    found = passages(case())
    assert counted.elements
    # The first output that is cut ends a comparison: gradients are looked at once more, alone.
    last = next(p for p in found if p.stage == "optimize")
    graphs = [replace(g, outputs=_gradients(g)) for g in (last.before, last.after)]
    counted.elements = 0
    replay.replayed([replace(last, before=graphs[0], after=graphs[1], reason="")])
    assert counted.elements


def _gradients(graph: Graph) -> tuple[Output, ...]:
    return tuple(o for o in graph.outputs if o.kind is OutputKind.GRADIENT)


def test_what_is_too_much_work_is_not_established() -> None:
    cut = [p for p in passages(fixed_point()) if p.reason]
    assert [p.stage for p in cut] == ["differentiate", "optimize"]


def test_programs_run_as_they_do_without_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets are of looks at programs, and change none."""

    def made() -> tuple[list[np.ndarray], int, bytes]:
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        specs = {"x": td.Spec((4, 6)), "y": td.Spec((4, 2))}
        step = td.compile_step(
            model, lambda m, b: ((m(b["x"]) - b["y"]) ** 2).mean(), optim.adamw(1e-2), specs,
            device="cpu",
        )  # fmt: skip
        rng = np.random.default_rng(0)
        for _ in range(2):
            step({n: rng.normal(size=s.shape).astype(np.float32) for n, s in specs.items()})
        values = [np.asarray(v) for v in step.params.values()]
        cut = sum(bool(p.reason) for p in step.report.evidence.passages)
        return values, cut, step.certificate.to_bytes()

    monkeypatch.setenv("TREADLE_CACHE", "0")
    values, cut, file = made()
    assert not cut
    monkeypatch.setattr(replay, "QUICK", Effort(spent=0, samples=2))
    others, cut, _ = made()
    assert cut
    assert all(np.array_equal(a, b) for a, b in zip(values, others, strict=True))
    # A file is accepted however little is looked at: a cut is no defect of what was cut.
    whole = check_bytes(file)
    monkeypatch.setattr(certificate, "Budget", lambda: Budget(0))
    report = check_bytes(file)
    assert (whole.verdict, report.verdict) == ("accepted", "accepted")
    reasons = [c.reason for c in report.claims if not c.is_established]
    assert len(reasons) > len([c for c in whole.claims if not c.is_established])
    assert any("operations" in reason for reason in reasons)


def test_parts_of_a_budget_count_in_the_whole() -> None:
    whole = Budget(100)
    part = whole.part(60)
    part.need(60)
    assert whole.spent == part.spent == 0
    part.spend(50)
    assert (whole.spent, part.spent) == (50, 50)
    with pytest.raises(NotEstablished, match="60 operations"):
        part.spend(11)
    other = whole.part(80)
    with pytest.raises(NotEstablished):
        other.spend(51)
    assert (whole.spent, part.spent, other.spent) == (50, 50, 0)


def test_long_chains_take_memory_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule notes of each node what its expression computes: as far as it is cut, no further."""
    noted = 0
    original = keep._too_wide

    def counted(graph: Graph, stored: Collection[TensorValue], most: int) -> set[TensorValue]:
        nonlocal noted
        tracemalloc.start()
        found = original(graph, stored, most)
        noted = max(noted, tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        return found

    def chain(x: Tensor, w: Tensor) -> Tensor:
        for i in range(600):
            x = td.sin(x * w[i % 7] + 0.1) + x
        return x

    monkeypatch.setattr(keep, "_too_wide", counted)
    graph = td.trace(chain, td.Spec((128,)), td.Spec((7, 128)))
    program = schedule(graph, target=CPU)
    assert 0 < noted < 2**24
    assert len(program.distinct()) <= 2  # of pieces that are cut


def test_logarithms_of_few_elements_are_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are found by steps, many of which are looked for together."""
    lane, calls = Lane(safe_prime(1), 0), 0
    search = np.searchsorted

    def counted(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return search(*given, **named)

    monkeypatch.setattr(np, "searchsorted", counted)
    known = np.array([0, 1, 12345, lane.modulus // 2 - 1], np.int64)
    values = lane.exponential(known, np.array([0, 1, 0, 1]))
    exponents, signs = lane.logarithm(values)
    assert np.array_equal(exponents, known)
    assert np.array_equal(signs, [0, 1, 0, 1])
    assert 0 < calls <= 8


def test_recognition_counts_all_that_it_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms of different widths are compared one by one, until a budget is spent."""

    def norms(x: Tensor, *weights: Tensor) -> Tensor:
        for w in weights:
            x = x @ w
            centred = x - x.mean(-1, keepdims=True)
            x = centred / td.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return x

    widths = [16, 20, 24, 28, 32]
    graph = td.trace(norms, td.Spec((8, 16)), *map(td.Spec, pairwise(widths)))

    def found(most: int) -> tuple[int, int]:
        monkeypatch.setattr(search, "MOST", most)
        before = all_spent()
        ops = [n.op.name for n in recognise(graph).nodes]
        return ops.count("layer_norm"), all_spent() - before

    every, spent = found(search.MOST)
    assert every == len(widths) - 1
    some, less = found(spent // 2)
    assert 0 < some < every
    assert less < spent
    assert found(0)[0] == 0
