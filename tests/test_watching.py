"""Watching a step: norms, histograms, and the node that made a NaN or an infinity."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import treadle as td
from treadle import losses, nn, optim
from treadle.ir.graph import OutputKind
from treadle.runtime.session import Session

Spec = td.Spec
DEVICES = ("oracle", "cpu")
WATCHFUL = td.CompileOptions(detect_anomaly=True)


class Net(nn.Module):
    def __init__(self):
        self.fc1, self.fc2 = nn.Linear(4, 6), nn.Linear(6, 3)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        return self.fc2(self.dropout(td.tanh(self.fc1(x))))


def loss(model, batch):
    return losses.cross_entropy(model(batch["x"]), batch["y"])


SPECS = {"x": Spec((5, 4)), "y": Spec((5,), td.int32)}


def batch(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(5, 4)).astype(np.float32), "y": rng.integers(0, 3, 5)}


def make(device: str = "oracle", **keywords: Any) -> td.TrainStep:
    return td.compile_step(Net(), loss, optim.adamw(1e-2), SPECS, device=device, **keywords)


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[n], b[n], equal_nan=True) for n in a)


# Norms and histograms


@pytest.mark.parametrize("device", DEVICES)
def test_norms_and_histograms_are_those_of_the_gradients(device: str) -> None:
    step = make(device)
    gradients = step.gradients(batch())
    out = step(batch(), grad_norms=True, histograms=True)
    assert out.grad_norms.keys() == out.histograms.keys() == gradients.keys()
    for name, g in gradients.items():
        assert out.grad_norms[name] == pytest.approx(np.linalg.norm(g), rel=1e-5)
        histogram = out.histograms[name]
        counts, edges = np.histogram(g.astype(np.float64), 64)
        assert histogram.counts.sum() == g.size
        np.testing.assert_allclose(histogram.edges, edges, rtol=1e-5, atol=1e-8)
        assert np.abs(np.cumsum(histogram.counts) - np.cumsum(counts)).max() <= 1
        assert histogram.mean == pytest.approx(g.mean(), rel=1e-4, abs=1e-8)
        assert histogram.std == pytest.approx(g.std(), rel=1e-4, abs=1e-8)


@pytest.mark.parametrize("device", DEVICES)
def test_watching_changes_nothing(device: str) -> None:
    """The same bits as without, and no program but the one that was asked for."""
    plain, watched = make(device), make(device)
    for i in range(4):
        expected = plain(batch(i))
        out = watched(batch(i), grad_norms=i % 2 == 1, histograms=i % 2 == 1)
        assert (out.loss, out.grad_norm) == (expected.loss, expected.grad_norm)
        assert bool(out.histograms) == (i % 2 == 1)
        assert not expected.histograms
    assert same(plain.state_dict(), watched.state_dict())
    assert (plain.report.compiles, watched.report.compiles) == (1, 2)


def outputs_of_hot_program(monkeypatch: pytest.MonkeyPatch, step: td.TrainStep) -> list[str]:
    names: list[str] = []
    run = Session.run

    def seen(self: Session, program, inputs):
        names.extend(f"{o.kind.value}:{o.name}" for o in program.graph.outputs)
        return run(self, program, inputs)

    monkeypatch.setattr(Session, "run", seen)
    step(batch())
    return names


@pytest.mark.parametrize("options", [None, WATCHFUL])
def test_the_hot_program_computes_none_of_it(monkeypatch: pytest.MonkeyPatch, options) -> None:
    step = make(options=options)
    step(batch(), grad_norms=True, histograms=True)
    names = outputs_of_hot_program(monkeypatch, step)
    assert "result:grad_norm" in names
    assert not [n for n in names if n.startswith(("gradient:", "result:grad_norm:"))]


def test_histograms_under_accumulation_are_of_the_mean_gradient() -> None:
    step = make(accumulate=2)
    parts = [step.gradients(batch(i)) for i in range(2)]
    first, second = (step(batch(i), histograms=True, grad_norms=True) for i in range(2))
    assert first.histograms == first.grad_norms == {}
    # Dropout of the second micro-step differs from that of its gradients: compare what it spans.
    assert second.histograms.keys() == parts[0].keys()
    for name, norm in second.grad_norms.items():
        h = second.histograms[name]
        size = h.counts.sum()
        assert np.sqrt(size * (h.std**2 + h.mean**2)) == pytest.approx(norm, rel=1e-9)


def test_a_histogram_counts_everything_once() -> None:
    array = np.array([0.0, 1.0, -1.0, np.nan, np.inf, -np.inf, 0.0, 1.0])
    h = td.Histogram.of(array, bins=4)
    np.testing.assert_array_equal(h.counts, [1, 0, 2, 2])
    np.testing.assert_array_equal(h.edges, [-1, -0.5, 0, 0.5, 1])
    assert (h.zeros, h.not_finite, h.mean) == (2, 3, pytest.approx(0.2))
    assert repr(h) == (
        "Histogram(5 values from -1 to 1, mean 0.2, std 0.7483, 2 zeros, 3 not finite)"
    )


@pytest.mark.parametrize(
    ("array", "total"),
    [
        (np.zeros((0, 3)), 0),
        (np.full(5, 7.0), 5),
        (np.array([np.nan]), 0),
        (np.arange(6, dtype=np.int32), 6),
        (np.array([1.0, 2.0], td.bfloat16.numpy), 2),
        (np.float32(3), 1),
    ],
)
def test_any_array_has_a_histogram(array, total: int) -> None:
    h = td.Histogram.of(array)
    assert h.counts.sum() == total
    assert len(h.edges) == len(h.counts) + 1
    assert h.not_finite == np.size(array) - total


def test_a_histogram_has_bins() -> None:
    with pytest.raises(td.ArgumentError, match="bins = 0"):
        td.Histogram.of(np.zeros(3), bins=0)


# Anomalies


@dataclass(frozen=True)
class Case:
    """A loss that goes wrong, and what is to be said about it."""

    loss: Callable[..., Any]
    op: str
    made: str
    part: str
    line: str = ""  # a piece of the line that is named
    data: Callable[[dict[str, np.ndarray]], Any] = lambda b: b


def log_of_negative(model, batch):
    scores = model(batch["x"])
    return td.log(scores - 100.0).mean()


def zero_by_zero(model, batch):
    scores = model(batch["x"])
    gap = scores - scores
    return (gap / gap).mean()


def exp_too_large(model, batch):
    large = td.exp(model(batch["x"]) + 800.0)
    return large.mean()


def root_at_zero(model, batch):
    scores = model(batch["x"])
    return td.where(scores > 0, td.sqrt(scores * 0.0), scores).sum()


def all_masked(model, batch):
    scores = model(batch["x"])
    hidden = td.where(batch["y"][:, None] >= 0, float("-inf"), scores)
    return td.softmax(hidden, -1).sum()


def harmless_infinity(model, batch):
    """log 0 is masked and harmless; what comes after it is not."""
    scores = model(batch["x"])
    safe = td.where(scores * 0.0 > 1.0, td.log(scores * 0.0), scores)
    return td.log(safe.sum() * 0.0 - 1.0)


def in_a_scan(model, batch):
    def grow(carry, x):
        carry = td.exp(carry * 4.0)
        return carry, carry

    _, all_of_them = td.scan(grow, model(batch["x"]) * 0.0 + 1.0, td.zeros((5, 1)))
    return all_of_them.mean()


def in_a_checkpoint(model, batch):
    def block(x):
        shifted = x - 50.0
        return td.log(shifted)

    return td.checkpoint(block)(model(batch["x"])).mean()


def with_x(value: float) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    def changed(b: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        x = b["x"].copy()
        x[2, 1] = value
        return b | {"x": x}

    return changed


FORWARD, BACKWARD = "forward pass", "backward pass"
CASES = {
    "log of a negative number": Case(
        log_of_negative, "log", "NaN", FORWARD, "td.log(scores - 100.0)"
    ),
    "zero by zero": Case(zero_by_zero, "div", "NaN", FORWARD, "(gap / gap)"),
    "overflow": Case(exp_too_large, "exp", "infinity", FORWARD, "large = td.exp"),
    "a gradient only": Case(root_at_zero, "div", "NaN", BACKWARD, "td.sqrt(scores * 0.0)"),
    "a row that is all masked": Case(all_masked, "softmax", "NaN", FORWARD, "td.softmax(hidden"),
    "after a harmless infinity": Case(
        harmless_infinity, "log", "NaN", FORWARD, "safe.sum() * 0.0 - 1.0"
    ),
    "inside a scan": Case(in_a_scan, "exp", "infinity", FORWARD, "td.exp(carry * 4.0)"),
    "inside a checkpoint": Case(in_a_checkpoint, "log", "NaN", FORWARD, "td.log(shifted)"),
    "NaN in the batch": Case(loss, "input", "NaN", FORWARD, data=with_x(np.nan)),
    "infinity in the batch": Case(
        lambda m, b: td.square(m(td.abs(td.tanh(b["x"])))).mean() + b["x"].sum(),
        "input",
        "infinity",
        FORWARD,
        data=with_x(np.inf),
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_the_node_is_named_and_nothing_changes(name: str, device: str) -> None:
    case = CASES[name]
    step = td.compile_step(
        Net(), case.loss, optim.adamw(1e-2), SPECS, device=device, options=WATCHFUL
    )
    before = step.state_dict()
    data = case.data(batch())
    with pytest.raises(td.AnomalyError) as caught:
        step(data)
    error, anomaly = caught.value, caught.value.anomaly
    assert anomaly is not None
    assert same(before, step.state_dict())
    assert (anomaly.op, anomaly.made, anomaly.part) == (case.op, case.made, case.part)
    assert "Nothing was updated" in str(error)
    assert str(anomaly) in str(error)
    if case.line:
        assert error.origin is not None
        assert error.origin.file == __file__
        named = inspect.getsource(inspect.getmodule(case.loss)).splitlines()[error.origin.line - 1]
        assert case.line in named
    # On demand, without the option: the same answer.
    assert step.find_anomaly(data) == anomaly


def test_messages_say_where_and_from_what() -> None:
    step = td.compile_step(Net(), log_of_negative, optim.sgd(0.1), SPECS, options=WATCHFUL)
    with pytest.raises(td.AnomalyError) as caught:
        step(batch())
    text = str(caught.value)
    assert text.startswith(
        "step: loss is nan: log made NaN in the forward pass: 15 of 15 elements, first at [0, 0]; "
        "of float32[5,3] from -10"
    )
    assert "in log_of_negative]" in text
    nan = with_x(np.nan)(batch())
    with pytest.raises(
        td.AnomalyError, match=r"batch:x has NaN in 1 of 20 elements, first at \[2, 1\]"
    ):
        make(options=WATCHFUL)(nan)
    scan = td.compile_step(Net(), in_a_scan, optim.sgd(0.1), SPECS, options=WATCHFUL)
    found = scan.find_anomaly(batch())
    assert found is not None
    assert found.scan_step == 1  # exp(4 e⁴) is beyond float32
    assert "step 1 of a scan" in str(found)


def test_a_parameter_that_is_not_finite_is_named() -> None:
    step = make(options=WATCHFUL)
    weights = step.params["fc2.weight"]
    weights[1, 3] = np.inf
    step.load_params({"fc2.weight": weights}, strict=False)
    before = step.state_dict()
    with pytest.raises(td.AnomalyError, match="fc2.weight has infinity in 1 of 18 elements"):
        step(batch())
    assert same(before, step.state_dict())


@pytest.mark.parametrize("device", DEVICES)
def test_healthy_steps_are_as_without(device: str) -> None:
    plain, watchful = make(device, accumulate=2), make(device, accumulate=2, options=WATCHFUL)
    for i in range(6):
        assert watchful.find_anomaly(batch(i)) is None
        assert watchful(batch(i)) == plain(batch(i))
    assert same(plain.state_dict(), watchful.state_dict())


@pytest.mark.parametrize("device", DEVICES)
def test_training_goes_on_as_if_the_bad_batch_had_not_come(device: str) -> None:
    plain, watchful = make(device, accumulate=3), make(device, accumulate=3, options=WATCHFUL)
    bad = with_x(np.nan)(batch(9))
    for i in range(7):
        with pytest.raises(td.AnomalyError):
            watchful(bad)
        assert watchful.micro_step == plain.micro_step
        plain(batch(i))
        watchful(batch(i))
    assert same(plain.state_dict(), watchful.state_dict())


def test_run_stops_at_an_anomaly() -> None:
    step, other = make(options=WATCHFUL), make()
    with pytest.raises(td.AnomalyError, match="batch:x has NaN"):
        step.run([batch(0), batch(1), with_x(np.nan)(batch(2)), batch(3)])
    other.run([batch(0), batch(1)])
    assert same(step.state_dict(), other.state_dict())


def test_an_anomaly_in_a_micro_step_is_seen_at_once() -> None:
    """Its gradient would otherwise hide in the accumulators until the update."""

    def rooted(model, batch):
        return td.sqrt(model["w"] * batch["x"]).sum()

    step = td.compile_step(
        {"w": np.ones(2, np.float32)},
        rooted,
        optim.sgd(0.1),
        {"x": Spec((2,))},
        accumulate=3,
        options=WATCHFUL,
    )
    step({"x": np.ones(2)})
    with pytest.raises(td.AnomalyError) as caught:
        step({"x": np.array([1.0, 0.0])})  # the loss is finite, its gradient is not
    assert caught.value.anomaly is not None
    assert caught.value.anomaly.part == BACKWARD
    assert "step0:accumulator:gradient:w is no longer finite" in str(caught.value)
    assert step.micro_step == 1
    step({"x": np.ones(2)})
    assert step({"x": np.ones(2)}).updated


def test_a_micro_batch_without_weight_is_no_anomaly() -> None:
    def masked(model, batch):
        td.metric("mean", (model["w"] * batch["m"]).sum() / batch["m"].sum(), batch["m"].sum())
        return td.Mean((model["w"] * batch["m"]).sum(), batch["m"].sum())

    keywords = {"accumulate": 2, "options": WATCHFUL}
    start, spec = {"w": np.ones(2, np.float32)}, {"m": Spec((2,))}
    step = td.compile_step(start, masked, optim.sgd(0.1), spec, **keywords)
    assert np.isnan(step({"m": np.zeros(2)}).loss)
    assert step({"m": np.ones(2)}).loss == 1


def test_an_update_that_overflows_is_named() -> None:
    def line(model, batch):
        return (model["w"] * batch["x"]).sum()

    step = td.compile_step(
        {"w": np.ones(2, np.float32)},
        line,
        optim.sgd(1e38),
        {"x": Spec((2,))},
        device="cpu",
        options=WATCHFUL,
    )
    with pytest.raises(td.AnomalyError) as caught:
        step({"x": np.array([1.0, 100.0], np.float32)})
    assert caught.value.anomaly is not None
    assert caught.value.anomaly.part == "update"
    assert "w is no longer finite" in str(caught.value)
    np.testing.assert_array_equal(step.params["w"], [1, 1])


def test_float16_that_overflows_is_skipped_and_no_anomaly() -> None:
    def amplified(model, batch):
        return losses.mse(model(batch["x"]) * batch["factor"], td.zeros((5, 3)))

    spec = {"x": Spec((5, 4)), "factor": Spec(())}
    step = td.compile_step(
        nn.Linear(4, 3), amplified, optim.sgd(1e-9), spec, precision="float16", options=WATCHFUL
    )
    x = batch()["x"]
    outs = [step({"x": x, "factor": np.float32(f)}) for f in (1e-3, 1e4, 1e-3)]
    assert [o.updated for o in outs] == [True, False, True]
    with pytest.raises(td.AnomalyError, match="batch:x has NaN"):
        step({"x": x * np.nan, "factor": np.float32(1)})


def test_float16_may_overflow_between_micro_steps_too() -> None:
    def amplified(model, batch):
        return losses.mse(model(batch["x"]) * batch["factor"], td.zeros((5, 3)))

    spec = {"x": Spec((5, 4)), "factor": Spec(())}
    step = td.compile_step(
        nn.Linear(4, 3),
        amplified,
        optim.sgd(1e-9),
        spec,
        precision="float16",
        accumulate=2,
        options=WATCHFUL,
    )
    x = batch()["x"]
    outs = [step({"x": x, "factor": np.float32(f)}) for f in (1e4, 1e-3, 1e-3, 1e-3)]
    assert [o.updated for o in outs] == [False, False, False, True]


def test_what_only_the_device_makes_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that gives NaN where the graph does not: a device's mistake, not the user's."""
    step = make(options=WATCHFUL)
    before = step.state_dict()
    run = Session.run

    def wrong(self: Session, program, inputs):
        return run(self, program, inputs) | {"result:loss": np.array(np.nan)}

    monkeypatch.setattr(Session, "run", wrong)
    with pytest.raises(td.AnomalyError, match="node by node everything is finite") as caught:
        step(batch())
    assert caught.value.anomaly is None
    assert same(before, step.state_dict())


def test_values_that_were_infinite_may_stay_so() -> None:
    class Best(nn.Module):
        def __init__(self):
            self.w = nn.Parameter((), nn.init.ones)
            self.best = nn.State((), nn.init.literal(np.array(np.inf)))
            self.never = nn.State((), nn.init.literal(np.array(-np.inf)))

        def forward(self, x):
            value = (self.w * x).sum()
            td.update(self.best, td.minimum(self.best, td.stop_gradient(value)))
            td.update(self.never, self.never - 1.0)
            return value

    step = td.compile_step(Best(), lambda m, x: m(x), optim.sgd(0.1), Spec((2,)), options=WATCHFUL)
    step(np.ones(2))
    assert step.params["best"] == 2
    assert step.params["never"] == -np.inf


def test_the_options_say_what_they_are() -> None:
    assert not td.CompileOptions().detect_anomaly
    kinds = {o.kind for o in make(options=WATCHFUL).graph.outputs}
    assert kinds == {o.kind for o in make().graph.outputs}
    assert OutputKind.UPDATE in kinds
