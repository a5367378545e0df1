"""Measured choices: programs of a target's other sizes are timed, and the fastest is remembered."""

from __future__ import annotations

import dataclasses
import json
import operator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle as td
from treadle import nn, optim
from treadle.backends import search
from treadle.backends.protocol import RescheduleError
from treadle.backends.registry import backend
from treadle.base.errors import ArgumentError, DeviceError
from treadle.kernel.choices import (
    CPU_CHOICES,
    GPU_CHOICES,
    Choice,
    from_numbers,
    numbered,
    with_choices,
)
from treadle.kernel.target import CPU, GPU
from treadle.runtime.cache import PlanCache

CLASSES, ROWS = 5, 24
MEASURED = td.CompileOptions(search="measured", seconds=60)


def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"x": rng.integers(0, 11, ROWS).astype(np.int32), "y": np.zeros(ROWS, np.int32)}


def compiled(options: td.CompileOptions) -> td.TrainStep:
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, CLASSES))
    specs = {n: td.Spec((ROWS,), td.int32) for n in "xy"}

    def loss(m: Any, b: Any) -> td.Tensor:
        return td.losses.cross_entropy(m(b["x"]), b["y"])

    return td.compile_step(model, loss, optim.adamw(1e-2), specs, device="cpu", options=options)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two fields are tried, one of which changes the kernels of the small model."""
    choices = (
        Choice("materialization.most_operations", (0,)),
        Choice("matmuls.split_depth", (1 << 29,)),
    )
    monkeypatch.setattr(search, "choices_of", lambda target: choices)
    monkeypatch.setattr(search, "TURN", 1e-4)


@pytest.mark.parametrize(("target", "choices"), [(CPU, CPU_CHOICES), (GPU, GPU_CHOICES)])
def test_every_choice_is_another_value_of_a_field(target: Any, choices: tuple[Choice, ...]) -> None:
    assert len({c.name for c in choices}) == len(choices)
    for choice in choices:
        for value in choice.values:
            changed = with_choices(target, [(choice.name, value)])
            assert changed != target, (choice.name, value)
            usual = operator.attrgetter(choice.name)(target)
            assert type(value) is type(usual), "the same kind of value"
            assert operator.attrgetter(choice.name)(changed) == value


def test_choices_survive_a_file_and_nothing_else_is_taken() -> None:
    chosen = (("matmuls.depth", 2048), ("cache", 1 << 19))
    numbers = json.loads(json.dumps(numbered(chosen, CPU_CHOICES)))
    assert from_numbers(numbers, CPU_CHOICES) == chosen
    for wrong in (
        [],
        None,
        {"name": 0},
        {"cache": 2},
        {"cache": -1},
        {"cache": True},
        {"cache": 0.0},
    ):
        assert from_numbers(wrong, CPU_CHOICES) is None


def test_a_search_takes_what_is_faster(
    cache: Path, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times are given: the candidate counts as twice as fast, and is what runs."""
    usual = compiled(td.CompileOptions())
    monkeypatch.setattr(search._Search, "ratio", lambda self, candidate, best: 0.5)
    step = compiled(MEASURED)
    # The second field changes nothing in a model without deep matmuls: it is not compiled.
    assert [(t.name, t.is_taken) for t in step.report.trials] == [
        ("materialization.most_operations", True)
    ]
    assert step.report.chosen == (("materialization.most_operations", 0),)
    assert "most_operations = 0" in str(step.report)
    assert len(step.report.kernels) != len(usual.report.kernels)
    data = batch()
    for _ in range(3):
        assert abs(float(step(data).loss) - float(usual(data).loss)) < 1e-5
    assert step.profile(data).kernels  # rows belong to the kernels that were chosen
    # Once more: what was found comes from the disk, and so does the program.
    monkeypatch.setattr(search._Search, "run", None)
    again = compiled(MEASURED)
    assert again.report.chosen == step.report.chosen
    assert again.report.cache_hits
    assert not again.report.trials


def test_a_search_keeps_what_it_has_where_nothing_is_faster(cache: Path, few: None) -> None:
    search_ = search._Search(*_parts())
    found = search_.candidate(())
    assert found is not None
    assert search_.candidate(()) is None  # the same kernels
    assert search_.seconds(found.program) > 0
    assert 0.2 < search_.ratio(found.program, found.program) < 5


def test_a_search_goes_on_without_a_call_that_a_library_has_not() -> None:
    toolchain, graph, options = _parts()
    lacks = []

    class Lacking(type(toolchain)):  # type: ignore[misc]
        def load(self, graph: Any, built: Any) -> Any:
            if not lacks:
                lacks.append(self.chosen)
                raise RescheduleError(dataclasses.replace(toolchain, chosen=self.chosen))
            return super().load(graph, built)

    chosen = (("materialization.most_operations", 0),)
    search_ = search._Search(Lacking(toolchain.processor), graph, options)
    found = search_.candidate(chosen)
    assert lacks == [chosen]
    assert found is not None
    assert found.program.chosen == chosen
    assert type(search_.toolchain) is type(toolchain)
    assert search_.toolchain.chosen == ()


def test_a_search_ends_when_its_time_is_over(cache: Path, few: None) -> None:
    search_ = search._Search(*_parts())
    assert search_.run(0.0) == ()
    assert not search_.trials
    assert search_.is_cut


def test_more_time_than_before_is_used(
    cache: Path, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search that was cut short is no answer to one that has more time; a whole one always is."""
    asked = []

    def run(self: Any, seconds: float) -> tuple[Any, ...]:
        asked.append(seconds)
        self.is_cut = seconds < 30
        return ()

    monkeypatch.setattr(search._Search, "run", run)
    for seconds in (2.0, 1.0, 20.0, 20.0, 30.0, 100.0):
        compiled(dataclasses.replace(MEASURED, seconds=seconds))
    assert asked == [2.0, 20.0, 30.0]


def test_a_damaged_result_is_searched_for_anew(
    cache: Path, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def run(self: Any, seconds: float) -> tuple[Any, ...]:
        asked.append(seconds)
        return ()

    monkeypatch.setattr(search._Search, "run", run)
    compiled(MEASURED)
    original = PlanCache.get
    for damaged in (b"{", b"[1]", b'{"cache": 99}', b"\xff"):

        def get(self: Any, key: str, damaged: bytes = damaged) -> Any:
            found = original(self, key)
            return {"chosen": damaged} if found and "chosen" in found else found

        monkeypatch.setattr(PlanCache, "get", get)
        compiled(MEASURED)
    assert len(asked) == 5


def _parts() -> tuple[Any, Any, td.CompileOptions]:
    graph = td.trace(lambda x, w: td.gelu(x @ w).sum(), td.Spec((8, 8)), td.Spec((8, 8)))
    toolchain = backend("cpu").toolchain(MEASURED)
    return toolchain, graph, MEASURED


def test_indices_are_in_range_and_floats_are_ordinary() -> None:
    def f(table: td.Tensor, rows: td.Tensor) -> td.Tensor:
        return td.take(table, rows, 0)

    graph = td.trace(f, td.Spec((7, 3)), td.Spec((1000,), td.int32))
    values = search.plausible_values(graph)
    assert values["rows"].min() == 0
    assert values["rows"].max() == 6
    assert np.isfinite(values["table"]).all()
    assert (values["table"] > 0).all()


def test_options_are_checked() -> None:
    with pytest.raises(ArgumentError, match="search"):
        td.CompileOptions(search="always")
    for seconds in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ArgumentError, match="seconds"):
            td.CompileOptions(seconds=seconds)


def test_rates_are_measured_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from treadle.backends import rates

    found = td.calibrate("cpu")
    assert found.flops > 1e8
    assert found.nbytes > 1e7
    toolchain: Any = backend("cpu").toolchain(td.CompileOptions())
    assert rates.rates_of(toolchain) == found
    for damaged in (b"", b"[1]", b"[0, 1]", b'["a", 2]', b"[1, NaN]"):
        assert rates._read(damaged) is None
    with pytest.raises(DeviceError, match="interprets"):
        td.calibrate("oracle")
