"""Schedules beside PyTorch to 1e-12, boundaries included; dicts, plateaus, the range test."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as L

import treadle as td
from treadle import nn, optim
from treadle.step.hyperparameters import schedule_value


def rates(schedule: optim.Schedule, count: int) -> list[float]:
    return [schedule_value(schedule, n, schedule.hyper) for n in range(count)]


def torch_rates(make: Callable, count: int, start: float) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], start, momentum=0.9)
    scheduler = make(optimizer)
    found = []
    for _ in range(count):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return found


# Ours, theirs, their first rate, how many updates. Theirs ends or repeats where ours stays.
TORCH = {
    "constant": (optim.constant(0.3), lambda o: L.LambdaLR(o, lambda n: 1.0), 0.3, 5),
    "step": (optim.step_decay(0.5, 3), lambda o: L.StepLR(o, 3), 0.5, 14),
    "step gamma": (optim.step_decay(0.5, 4, 0.7), lambda o: L.StepLR(o, 4, 0.7), 0.5, 30),
    "multi-step": (optim.multi_step(0.5, [2, 5, 6], 0.3), lambda o: L.MultiStepLR(o, [2, 5, 6], 0.3), 0.5, 12),
    "multi-step at 0": (optim.multi_step(0.5, (1,)), lambda o: L.MultiStepLR(o, [1]), 0.5, 4),
    "exponential": (optim.exponential(0.5, 0.93), lambda o: L.ExponentialLR(o, 0.93), 0.5, 60),
    "linear": (optim.linear(0.5, 0.05, 8), lambda o: L.LinearLR(o, 1.0, 0.1, total_iters=8), 0.5, 12),
    "linear up": (optim.linear(0.1, 0.5, 5), lambda o: L.LinearLR(o, 0.2, 1.0, total_iters=5), 0.5, 9),
    "cosine": (optim.cosine(0.5, 10, 0.02), lambda o: L.CosineAnnealingLR(o, 10, eta_min=0.02), 0.5, 11),
    "polynomial": (optim.polynomial(0.5, 9, 2.5), lambda o: L.PolynomialLR(o, 9, 2.5), 0.5, 13),
    "polynomial 1": (optim.polynomial(0.5, 9), lambda o: L.PolynomialLR(o, 9), 0.5, 13),
    "restarts": (optim.cosine_restarts(0.5, 7, final=0.01), lambda o: L.CosineAnnealingWarmRestarts(o, 7, eta_min=0.01), 0.5, 40),
    "restarts 2": (optim.cosine_restarts(0.5, 3, 2), lambda o: L.CosineAnnealingWarmRestarts(o, 3, 2), 0.5, 200),
    "restarts 3": (optim.cosine_restarts(0.5, 1, 3, 0.1), lambda o: L.CosineAnnealingWarmRestarts(o, 1, 3, eta_min=0.1), 0.5, 130),
    "one cycle": (optim.one_cycle(0.5, 20), lambda o: L.OneCycleLR(o, 0.5, 20), 0.02, 20),
    "one cycle linear": (optim.one_cycle(0.5, 20, 0.25, "linear", 10.0, 100.0), lambda o: L.OneCycleLR(o, 0.5, 20, pct_start=0.25, anneal_strategy="linear", div_factor=10.0, final_div_factor=100.0), 0.05, 20),
    "one cycle in three": (optim.one_cycle(0.5, 30, 0.3, three_phase=True), lambda o: L.OneCycleLR(o, 0.5, 30, pct_start=0.3, three_phase=True), 0.02, 30),
    "triangular": (optim.triangular(0.1, 0.5, 4), lambda o: L.CyclicLR(o, 0.1, 0.5, 4), 0.1, 30),
    "triangular uneven": (optim.triangular(0.1, 0.5, 3, 5), lambda o: L.CyclicLR(o, 0.1, 0.5, 3, 5), 0.1, 30),
    "cyclic 2": (optim.cyclic(0.1, 0.5, 3, 5, "triangular2"), lambda o: L.CyclicLR(o, 0.1, 0.5, 3, 5, "triangular2"), 0.1, 40),
    "cyclic exp": (optim.cyclic(0.1, 0.5, 4, mode="exp_range", gamma=0.97), lambda o: L.CyclicLR(o, 0.1, 0.5, 4, mode="exp_range", gamma=0.97), 0.1, 40),
}  # fmt: skip


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.filterwarnings("ignore:Detected call")
def test_beside_pytorch(name: str) -> None:
    ours, theirs, start, count = TORCH[name]
    expected = torch_rates(theirs, count, start)
    np.testing.assert_allclose(rates(ours, count), expected, rtol=1e-12, atol=1e-15)


def test_warmup_cosine_and_noam_as_they_are_defined() -> None:
    found = rates(optim.warmup_cosine(0.4, 4, 12, 0.1), 15)
    part = np.minimum(np.arange(11) / 8, 1)
    falling = 0.1 + 0.3 * (1 + np.cos(np.pi * part)) / 2
    np.testing.assert_allclose(found, [0.1, 0.2, 0.3, 0.4, *falling], rtol=1e-12)
    t = np.arange(1, 31)
    expected = 2.0 * 64**-0.5 * np.minimum(t**-0.5, t * 10**-1.5)
    np.testing.assert_allclose(rates(optim.noam(64, 10, 2.0), 30), expected, rtol=1e-12)


# Ours beyond the end: the count, the rate from there on.
ENDS = {
    "linear": (optim.linear(0.5, 0.05, 8), 8, 0.05),
    "cosine": (optim.cosine(0.5, 8, 0.02), 8, 0.02),
    "warm-up": (optim.warmup_cosine(0.5, 3, 8, 0.02), 8, 0.02),
    "polynomial": (optim.polynomial(0.5, 8, 3.0, 0.02), 8, 0.02),
    "one cycle": (optim.one_cycle(0.5, 8), 7, 0.5 / 25 / 1e4),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_end_stays(name: str) -> None:
    schedule, end, rate = ENDS[name]
    found = rates(schedule, end + 4)
    np.testing.assert_allclose(found[end:], rate, rtol=1e-12)
    assert abs(found[end - 1] - rate) > 1e-9


@pytest.mark.parametrize(("steps", "part"), [(10, 0.1), (1, 0.3), (2, 0.5), (3, 0.3)])
def test_one_cycle_of_hardly_any_steps(steps: int, part: float) -> None:
    """A rise of no width, for which PyTorch divides by zero, is over at once."""
    found = rates(optim.one_cycle(0.5, steps, part), steps + 2)
    assert np.isfinite(found).all()
    assert found[0] <= 0.5
    np.testing.assert_allclose(found[max(steps - 1, 1) :], 0.5 / 25 / 1e4)
    assert rates(optim.one_cycle(0.5, 10, 0.1), 1) == [0.5]


def test_join_beside_its_parts() -> None:
    parts = [optim.linear(0.0, 0.4, 4), optim.constant(0.4), optim.cosine(0.4, 6, 0.1)]
    joined = optim.join(parts, [4, 7])
    expected = rates(parts[0], 4) + rates(parts[1], 3) + rates(parts[2], 8)
    np.testing.assert_allclose(rates(joined, 15), expected, rtol=1e-12)
    nested = optim.join([joined, optim.exponential(0.1, 0.5)], [15])
    np.testing.assert_allclose(rates(nested, 18), [*expected, 0.1, 0.05, 0.025], rtol=1e-12)


ALL = {name: case[0] for name, case in TORCH.items()} | {
    "noam": optim.noam(32, 8),
    "warm-up": optim.warmup_cosine(0.4, 4, 12, 0.1),
    "join": optim.join([optim.linear(0.0, 0.4, 4), optim.cosine(0.4, 6)], [4]),
}


@pytest.mark.parametrize("name", ALL)
def test_a_dict_and_back(name: str) -> None:
    """Through JSON, so that nothing but plain values is in it; the rates are the same bits."""
    schedule = ALL[name]
    plain = json.loads(json.dumps(schedule.to_dict()))
    again = optim.Schedule.from_dict(plain)
    assert again.to_dict() == schedule.to_dict()
    assert again.hyper == schedule.hyper
    assert rates(again, 12) == rates(schedule, 12)


@pytest.mark.parametrize("name", ALL)
def test_the_rate_inside_a_step(name: str) -> None:
    """Plain descent on a slope of 1 moves by the rate."""
    step = td.compile_step(
        {"w": nn.Parameter(())},
        lambda m, x: m["w"] * x,
        optim.sgd(ALL[name]),
        td.Spec(()),
        device="oracle",
    )
    found = []
    for _ in range(10):
        before = float(step.params["w"])
        step(np.float32(1.0))
        found.append(before - float(step.params["w"]))
    np.testing.assert_allclose(found, rates(ALL[name], 10), rtol=1e-9, atol=1e-12)


def test_rates_natively_in_float32() -> None:
    """All schedules in one program, boundaries included: a floor must not be off by one there."""
    program = td.compile(
        lambda count, hyper: {n: s.value(count, hyper[n]) for n, s in ALL.items()},
        td.Spec(()),
        {n: {k: td.Spec(()) for k in s.hyper} for n, s in ALL.items()},
        device="cpu",
    )
    hyper = {n: {k: np.float32(v) for k, v in s.hyper.items()} for n, s in ALL.items()}
    found = [program(np.float32(count), hyper) for count in range(60)]
    for name, schedule in ALL.items():
        native = [float(f[name]) for f in found]
        np.testing.assert_allclose(native, rates(schedule, 60), rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("first", [3, 5, 7, 10])
@pytest.mark.parametrize("multiply", [2, 3, 5])
def test_restarts_are_at_the_right_update_in_float32(first: int, multiply: int) -> None:
    """A logarithm finds the cycle; at every start the rate is the peak, on the device too."""
    schedule = optim.cosine_restarts(1.0, first, multiply)
    rate = td.compile(
        lambda count: schedule.value(count, {k: td.tensor(v) for k, v in schedule.hyper.items()}),
        td.Spec(()),
        device="cpu",
    )
    start, length = 0, first
    for _ in range(7):
        assert rate(np.float32(start)) == 1.0
        assert rate(np.float32(start - 1)) < 0.5 or start == 0
        start, length = start + length, length * multiply


def test_a_schedule_of_your_own_is_registered() -> None:
    @optim.schedule
    def inverse_root(lr: float, shift: int = 1) -> optim.Schedule:
        return optim.Schedule(
            "mine",
            {"lr": lr, "shift": shift},
            lambda count, hyper: hyper["lr"] * td.rsqrt(count + hyper["shift"]),
        )

    found = inverse_root(0.5)
    assert found.to_dict() == {"schedule": "inverse_root", "lr": 0.5, "shift": 1}
    assert rates(optim.Schedule.from_dict(found.to_dict()), 4)[3] == 0.25
    loose = optim.Schedule("loose", {"lr": 0.1}, lambda count, hyper: hyper["lr"])
    with pytest.raises(
        td.ArgumentError, match=r"'loose' was not made by a registered.*optim.sched"
    ):
        loose.to_dict()
    with pytest.raises(td.NameTakenError, match="there is a schedule 'cosine'"):

        @optim.schedule
        def cosine(lr: float) -> optim.Schedule:
            return optim.constant(lr)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.Schedule.from_dict({"schedule": "sine"}), "names no schedule.*cosine"),
        (lambda: optim.Schedule.from_dict({}), "names no schedule"),
        (lambda: optim.Schedule.from_dict([1]), "names no schedule"),
        (lambda: optim.Schedule.from_dict({"schedule": "cosine", "peak": 1}), "missing a required"),
        (
            lambda: optim.Schedule.from_dict({"schedule": "constant", "rate": "1"}),
            "lr = '1' is a str",
        ),
        (lambda: optim.constant("1e-3"), "lr = '1e-3' is a str, not a number"),
        (lambda: optim.constant(-1.0), "lr = -1.0"),
        (lambda: optim.linear(0.1, math.nan, 5), "end = nan"),
        (lambda: optim.cosine(0.1, 0), "steps = 0. It is a number of at least 1"),
        (lambda: optim.warmup_cosine(0.1, 5, 5), "warmup = 5 of 5 steps"),
        (lambda: optim.warmup_cosine(0.1, "5", 5), "warmup = '5' is a str"),
        (lambda: optim.step_decay(0.1, 3, 0.0), "gamma = 0.0. It is a positive number"),
        (lambda: optim.multi_step(0.1, 3), r"milestones = 3.*\[30, 80\]"),
        (lambda: optim.multi_step(0.1, []), r"milestones = \[\]"),
        (lambda: optim.multi_step(0.1, ["a"]), "milestone0 = 'a' is a str"),
        (lambda: optim.exponential(0.1, -1), "gamma = -1"),
        (lambda: optim.polynomial(0.1, 5, None), "power = None is a NoneType"),
        (lambda: optim.noam(0, 5), "d_model = 0"),
        (lambda: optim.cosine_restarts(0.1, 5, 1.5), "multiply = 1.5. It is a whole number"),
        (lambda: optim.one_cycle(0.1, 10, 1.0), "pct_start = 1.0"),
        (lambda: optim.one_cycle(0.1, 10, 0.6, three_phase=True), "pct_start = 0.6 with three"),
        (lambda: optim.one_cycle(0.1, 10, anneal="sine"), "anneal = 'sine'. It is one of \"cos\""),
        (lambda: optim.cyclic(0.1, 0.2, 5, mode="square"), "mode = 'square'"),
        (lambda: optim.join([optim.constant(0.1)], []), "Give two schedules or more"),
        (
            lambda: optim.join([optim.constant(0.1)] * 3, [5, 5]),
            r"milestones = \[5, 5\]. They grow",
        ),
        (lambda: optim.join([optim.constant(0.1), "x"], [5]), "lr = 'x' is a str"),
        (lambda: optim.Schedule("mine", {"lr": -1.0}, lambda c, h: h["lr"]), "lr = -1.0"),
    ],
)
def test_wrong_schedules_are_refused(make, message: str) -> None:
    with pytest.raises(td.ArgumentError, match=message):
        make()


def test_numbers_of_a_schedule_are_checked_while_it_runs() -> None:
    step = small_step(optim.sgd(optim.cosine(0.1, 10)))
    for key, value in (("steps", 0), ("peak", -1), ("final", math.nan), ("steps", "10")):
        with pytest.raises(td.ArgumentError, match=f"{key} = "):
            step.hyperparameters[key] = value
    step.hyperparameters["steps"] = 20
    assert step.learning_rate == pytest.approx(0.1)


def test_a_schedule_and_an_optimizer_share_no_name() -> None:
    mine = optim.Schedule("mine", {"eps": 0.1}, lambda count, hyper: hyper["eps"])
    with pytest.raises(td.ArgumentError, match="both have a number eps"):
        optim.adam(mine)


def small_step(optimizer: optim.Optimizer, **options) -> td.TrainStep:
    return td.compile_step(
        nn.Linear(3, 2), lambda m, x: (m(x) ** 2).mean(), optimizer, td.Spec((4, 3)), **options
    )


# Plateaus

VALUES = [1.0, 0.9, 0.9, 0.95, 0.9, 0.89995, 0.8, 0.81, math.nan, 0.9, 0.9, 0.7, 0.71, 0.71, 0.71,
          0.71, 0.69, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7]  # fmt: skip


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("threshold_mode", ["rel", "abs"])
@pytest.mark.parametrize("cooldown", [0, 2])
def test_plateau_beside_pytorch(mode: str, threshold_mode: str, cooldown: int) -> None:
    options = {"mode": mode, "factor": 0.3, "patience": 1, "threshold": 0.01, "cooldown": cooldown}
    theirs = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1.0)
    scheduler = L.ReduceLROnPlateau(theirs, threshold_mode=threshold_mode, min_lr=0.05, **options)
    step = small_step(optim.sgd(1.0))
    plateau = optim.ReduceOnPlateau(step, threshold_mode=threshold_mode, min_scale=0.05, **options)
    scales = []
    for value in VALUES:
        value = value if mode == "min" else -value
        scheduler.step(value)
        before = step.lr_scale
        assert plateau.update(value) == (step.lr_scale < before)
        assert step.lr_scale == pytest.approx(theirs.param_groups[0]["lr"])
        scales.append(step.learning_rate)
    assert len(set(scales)) > 2


def test_a_plateau_continues_where_it_was() -> None:
    whole, first = small_step(optim.sgd(1.0)), small_step(optim.sgd(1.0))
    a, b = (optim.ReduceOnPlateau(s, patience=1, cooldown=1) for s in (whole, first))
    for value in VALUES[:11]:
        a.update(value)
        b.update(value)
    state = json.loads(json.dumps(b.state_dict()))
    second = small_step(optim.sgd(1.0))
    second.load_state_dict(first.state_dict())
    c = optim.ReduceOnPlateau(second, patience=1, cooldown=1)
    c.load_state_dict(state)
    for value in VALUES[11:]:
        assert a.update(value) == c.update(value)
    assert whole.lr_scale == second.lr_scale < 1
    with pytest.raises(td.LoadError, match="the state has"):
        c.load_state_dict({"best": 1.0})
    with pytest.raises(td.ArgumentError, match="bad = -1"):
        c.load_state_dict(state | {"bad": -1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "least"}, "mode = 'least'"),
        ({"factor": 1.0}, "factor = 1.0"),
        ({"patience": -1}, "patience = -1"),
        ({"patience": 1.5}, "patience = 1.5"),
        ({"threshold": "0"}, "threshold = '0' is a str"),
        ({"threshold_mode": "both"}, "threshold_mode = 'both'"),
        ({"cooldown": None}, "cooldown = None"),
        ({"min_scale": 2.0}, "min_scale = 2.0"),
    ],
)
def test_wrong_plateaus_are_refused(options, message: str) -> None:
    with pytest.raises(td.ArgumentError, match=message):
        optim.ReduceOnPlateau(small_step(optim.sgd(1.0)), **options)


# The range test


def linear_data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(32, 3))
    return x, x @ np.array([[1.0, -2.0, 0.5]]).T


def regression(optimizer: optim.Optimizer, **options) -> td.TrainStep:
    return td.compile_step(
        nn.Linear(3, 1),
        lambda m, b: ((m(b["x"]) - b["y"]) ** 2).mean(),
        optimizer,
        {"x": td.Spec((32, 3)), "y": td.Spec((32, 1))},
        **options,
    )


def test_the_range_test_finds_a_rate_and_leaves_no_trace() -> None:
    x, y = linear_data()
    step = regression(optim.sgd(0.01, momentum=0.9))
    step({"x": x, "y": y})
    before = step.state_dict()
    found = optim.find_learning_rate(step, [{"x": x, "y": y}], 1e-5, 10.0, 60)
    after = step.state_dict()
    assert all(np.array_equal(before[n], after[n]) for n in before)
    assert len(found.rates) == len(found.losses) == len(found.smoothed) < 60  # it diverged
    np.testing.assert_allclose(found.rates, np.geomspace(1e-5, 10, 60)[: len(found.rates)])
    # The suggested rate trains, a hundred times less hardly, a thousand times more diverges.
    finals = []
    for factor in (0.01, 1.0, 1000.0):
        trial = regression(optim.sgd(found.suggestion * factor, momentum=0.9))
        finals.append(trial.run([{"x": x, "y": y}] * 30).losses)
    assert finals[1][-1] < 0.1 * finals[1][0]
    assert finals[1][-1] < 0.5 * finals[0][-1]
    assert not finals[2][-1] < finals[2][0]


def test_the_rates_are_those_of_the_step() -> None:
    """Each loss is that of training by hand at these rates."""
    x, y = linear_data()
    batch = {"x": x, "y": y}
    found = optim.find_learning_rate(
        regression(optim.sgd(optim.exponential(0.5, 0.9))), iter([batch]), 1e-3, 1e-1, 8, 0.0
    )
    by_hand = regression(optim.sgd(1.0))
    losses = []
    for rate in np.geomspace(1e-3, 1e-1, 8):
        by_hand.learning_rate = rate
        losses.append(by_hand(batch).loss)
    np.testing.assert_allclose(found.losses, losses, rtol=1e-5)
    np.testing.assert_array_equal(found.losses, found.smoothed)


def test_the_range_test_with_groups_and_micro_batches() -> None:
    x, y = linear_data()
    two = optim.groups(("weight", optim.sgd(0.1)), ("*", optim.sgd(0.2)))
    step = regression(two, accumulate=2)
    step({"x": x, "y": y})  # in the middle of an update
    found = optim.find_learning_rate(step, [{"x": x, "y": y}], 1e-2, 1.0, 5)
    assert len(found.rates) == 5
    assert step.state_dict()["step:counters"][3] == 1
    np.testing.assert_allclose(found.rates[[0, -1]], [1e-2, 1.0])


def test_a_failing_batch_leaves_no_trace_either() -> None:
    x, y = linear_data()
    step = regression(optim.sgd(0.1))
    before = step.state_dict()
    with pytest.raises(td.BatchError):
        optim.find_learning_rate(step, [{"x": x, "y": y}] * 3 + [{"x": x}])
    after = step.state_dict()
    assert all(np.array_equal(before[n], after[n]) for n in before)


def test_no_suggestion_where_nothing_falls() -> None:
    x, y = linear_data()
    step = regression(optim.sgd(0.1), device="oracle")
    step.load_params({"weight": [[1.0, -2.0, 0.5]], "bias": [0.0]})  # the solution
    found = optim.find_learning_rate(step, [{"x": x, "y": y}], 1e-3, 1e-1, 10)
    assert math.isnan(found.suggestion)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"low": 0.0}, "low = 0.0"),
        ({"low": 1.0, "high": 0.1}, "low = 1.0, high = 0.1"),
        ({"count": 2}, "count = 2"),
        ({"smoothing": 1.0}, "smoothing = 1.0"),
        ({"diverged": 0.5}, "diverged = 0.5"),
        ({"batches": []}, "there are no batches"),
    ],
)
def test_wrong_range_tests_are_refused(options, message: str) -> None:
    x, y = linear_data()
    arguments = {"batches": [{"x": x, "y": y}]} | options
    with pytest.raises(td.ArgumentError, match=message):
        optim.find_learning_rate(regression(optim.sgd(0.1)), **arguments)


def test_a_rate_of_zero_has_no_range() -> None:
    x, y = linear_data()
    step = regression(optim.sgd(optim.linear(0.0, 0.1, 10)))
    with pytest.raises(td.ArgumentError, match="the schedule's rate is 0 at update 0"):
        optim.find_learning_rate(step, [{"x": x, "y": y}])


def small_range_test() -> optim.RangeTest:
    x, y = linear_data()
    return optim.find_learning_rate(regression(optim.sgd(0.1)), [{"x": x, "y": y}], 1e-3, 1e-1, 10)


def test_the_plot_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(td.ArgumentError, match=r"matplotlib is not installed.*treadle\[plot\]"):
        small_range_test().plot()


def test_the_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    small_range_test().plot(tmp_path / "range.svg")
    text = (tmp_path / "range.svg").read_text(encoding="utf-8")
    assert "</svg>" in text
