"""The callbacks that come with the package."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import treadle as td
from treadle import callbacks, data, losses, metrics, nn, optim
from treadle.metrics.direction import direction_of
from treadle.train.callback import Callbacks
from treadle.train.run import Run

SPEC = {"x": td.Spec((4, 2)), "y": td.Spec((4, 1))}


def rows(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).normal(size=(count, 2)).astype(np.float32)
    return {"x": x, "y": x.sum(1, keepdims=True)}


def loss(model, batch):
    return losses.mse(model(batch["x"]), batch["y"])


def make(optimizer=None, **keywords) -> td.TrainStep:
    chosen = optimizer or optim.sgd(0.05)
    return td.compile_step(nn.Linear(2, 1), loss, chosen, SPEC, device="oracle", **keywords)


def loader() -> data.ArrayLoader:
    return data.ArrayLoader(rows(22), 4, shuffle=True)


def trainer(step: td.TrainStep, *chosen: callbacks.Callback) -> td.Trainer:
    return td.Trainer(step, chosen, progress=False)


def told(callback: callbacks.Callback, values: list[dict[str, float]]) -> tuple[Run, int]:
    """A callback that is told of validations: the run, and how many it took until it stopped."""
    run = Run(make(), td.loggers.Loggers())
    run.validates = True
    callback.on_fit_start(run)
    for count, value in enumerate(values, 1):
        run.evaluation, run.evaluated_at = value, run.steps
        callback.on_eval_end(run)
        if run.stop_reason:
            return run, count
    return run, 0


def losses_of(*values: float) -> list[dict[str, float]]:
    return [{"val/loss": v} for v in values]


@pytest.mark.parametrize(
    ("keywords", "values", "stops"),
    [
        ({"patience": 2}, losses_of(3, 2, 2, 2, 1), 4),
        ({"patience": 2}, losses_of(3, 2, 2, 1, 1), 0),
        ({"patience": 1}, losses_of(3, 3), 2),
        ({"patience": 2, "min_delta": 0.5}, losses_of(3, 2.9, 2.8, 2.7), 3),
        ({"patience": 1, "mode": "max"}, losses_of(1, 2, 3, 3), 4),
        ({"patience": 2}, losses_of(np.nan, np.nan, 1), 2),
        ({"patience": 1}, losses_of(np.inf, 1, np.nan), 3),
    ],
)
def test_early_stopping(keywords: dict, values: list, stops: int) -> None:
    assert told(callbacks.EarlyStopping(**keywords), values)[1] == stops


def values_of(name: str, *values: float) -> list[dict[str, float]]:
    return [{name: v} for v in values]


@pytest.mark.parametrize("name", ["val/acc", "val/accuracy", "val/f1_macro", "d/auc"])
def test_what_should_rise_is_not_minimised(name: str) -> None:
    """The numbers of a run whose accuracy rose: it went on, and its last parameters are kept."""
    rising = values_of(name, 0.348, 0.5, 0.61, 0.7, 0.747)
    stopper = callbacks.EarlyStopping(name, patience=2)
    assert told(stopper, rising)[1] == 0
    assert stopper.improvement.best == {name: 0.747}
    assert told(callbacks.EarlyStopping(name, patience=2), rising[::-1])[1] == 3
    plateau = callbacks.ReduceOnPlateau(name, patience=0, threshold=0.0)
    assert told(plateau, rising)[0].step.lr_scale == 1
    assert told(plateau, rising[::-1])[0].step.lr_scale < 1


def test_a_number_of_unknown_direction_needs_a_mode() -> None:
    """Before training, where neither its name nor the trainer's metric of that name says it."""
    for kind in (callbacks.EarlyStopping, callbacks.ReduceOnPlateau):
        match = f"{kind.__name__}: nothing says whether a small or a large 'val/gap' is good"
        with pytest.raises(td.ArgumentError, match=match):
            told(kind("val/gap"), [])
        with pytest.raises(td.CallbackError, match="Pass mode="):
            trainer(make(), kind("loss/scale")).fit(loader(), epochs=1)
        assert told(kind("val/gap", mode="max", patience=1), values_of("val/gap", 1, 2, 3))[1] == 0
    group = metrics.Group({"mine": metrics.Accuracy(), "other": metrics.Perplexity()})
    run = td.Trainer(make(), metrics=group, progress=False)._run
    assert (run.direction_of("val/mine"), run.direction_of("val/other")) == ("max", "min")


@pytest.mark.parametrize(
    ("name", "direction"),
    [
        *[(n, "min") for n in ("loss", "g/loss", "val/error_rate", "ppl", "rmse", "cross_entropy")],
        *[(n, "max") for n in ("accuracy_top5", "top_1_acc", "roc_auc", "mean_iou", "r2", "ap50")],
        *[(n, None) for n in ("loss_scale", "grad_norm", "score", "entropy", "lr", "acc_loss", "")],
        *[(n, None) for n in ("false_positive_rate", "loss/classes")],
    ],
)
def test_directions_of_names(name: str, direction: str | None) -> None:
    assert direction_of(name) == direction


def test_our_metrics_carry_their_direction() -> None:
    """All that are one number; the others, and means of anything, have none."""
    kinds = [m for m in vars(metrics).values() if isinstance(m, type)]
    found = {m.__name__: m.direction for m in kinds if issubclass(m, metrics.Metric)}
    small = {"ECE", "MCE", "Perplexity"}
    none = {"Average", "ConfusionMatrix", "Metric", "PrecisionRecallCurve", "RocCurve"}
    assert {n for n, d in found.items() if d == "min"} == small
    assert {n for n, d in found.items() if d is None} == none
    for name, direction in found.items():
        assert direction_of(name) in (direction, None), name


def test_early_stopping_by_several_metrics() -> None:
    both = {"val/loss": "min", "val/f1": "max"}
    pairs = [(1, 0.1), (2, 0.2), (0.5, 0.1), (0.6, 0.2), (0.6, 0.1)]
    values = [{"val/loss": a, "val/f1": b} for a, b in pairs]
    stopper = callbacks.EarlyStopping(both, patience=2)
    run, count = told(stopper, values)
    assert count == 5
    assert run.stop_reason == "val/loss, val/f1 did not improve for 2 validations"
    assert stopper.improvement.best == {"val/loss": 0.5, "val/f1": 0.2}


def test_watching_what_is_not_there() -> None:
    with pytest.raises(td.CallbackError, match="val/loss is of a validation, and there is none"):
        trainer(make(), callbacks.EarlyStopping()).fit(loader(), epochs=1)
    with pytest.raises(td.CallbackError, match="there is no val/f1. There are: loss, grad_norm, v"):
        trainer(make(), callbacks.EarlyStopping("val/f1")).fit(
            loader(), epochs=1, validation=[rows(4)]
        )
    for wrong in ({"mode": "least"}, {"patience": 0}, {"metrics": {}}, {"min_delta": -1}):
        with pytest.raises(td.ArgumentError):
            callbacks.EarlyStopping(**wrong)


def test_early_stopping_without_validation() -> None:
    stopper = callbacks.EarlyStopping("loss", patience=2, min_delta=1e9)
    history = trainer(make(), stopper).fit(loader(), epochs=9)
    assert len(history) == 15
    assert history.stopped is not None


def test_the_best_parameters_are_restored() -> None:
    kept = {}

    def spoil(run):
        kept[run.epoch] = run.step.params
        if run.epoch >= 1:
            run.step.load_params({"bias": np.full(1, 9.0 + run.epoch)}, strict=False)

    step = make()
    stopper = callbacks.EarlyStopping(patience=2, restore_best=True)
    spoiler = callbacks.Lambda(on_epoch_start=spoil)
    trainer(step, spoiler, stopper).fit(loader(), epochs=9, validation=[rows(9, seed=1)])
    assert sorted(kept) == [0, 1, 2]
    assert all(np.array_equal(kept[1][n], v) for n, v in step.params.items())


def test_plateaus_lower_the_rate() -> None:
    plateau = callbacks.ReduceOnPlateau(patience=1, factor=0.1, min_scale=0.005)
    other, scales, expected = make(), [], []
    by_hand = optim.ReduceOnPlateau(other, patience=1, factor=0.1, min_scale=0.005)
    run, _ = told(plateau, [])
    for value in (3, 2, 2, 2, 2, 2, np.nan, 2, 1, 1, 1, 1):
        run.evaluation, run.evaluated_at = {"val/loss": value}, run.steps
        plateau.on_eval_end(run)
        by_hand.update(value)
        scales.append(run.step.lr_scale)
        expected.append(other.lr_scale)
        state = json.loads(json.dumps(plateau.state_dict()))
        plateau.on_fit_start(run)  # as after a restart
        plateau.load_state_dict(state)
    assert scales == expected
    assert scales[-1] < 0.1
    for wrong in ({"factor": 1}, {"mode": "least"}, {"coolness": 1}):
        with pytest.raises((td.ArgumentError, TypeError)):
            callbacks.ReduceOnPlateau(**wrong)


def test_plateaus_of_the_training_loss() -> None:
    step = make(optim.sgd(1e-9))
    plateau = callbacks.ReduceOnPlateau("loss", patience=0, threshold=1e9, threshold_mode="abs")
    trainer(step, plateau).fit(loader(), epochs=3)
    assert np.isclose(step.lr_scale, 0.01)
    with pytest.raises(td.CallbackError, match="there is none"):
        trainer(step, callbacks.ReduceOnPlateau()).fit(loader(), epochs=3)


def test_ema_by_hand() -> None:
    step, other = make(), make()
    average = callbacks.EMA(decay=0.8)
    history = trainer(step, average).fit(loader(), epochs=3, validation=[rows(9, seed=1)])
    expected, seen, count = None, [], 0
    batches = loader()
    for _ in range(3):
        for batch in batches:
            other(batch)
            decay = min(0.8, (1 + count) / (10 + count))
            params = other.params
            if expected is None:
                expected = params
            expected = {n: expected[n] + (1 - decay) * (params[n] - expected[n]) for n in expected}
            count += 1
        trained = other.params
        other.load_params(expected)
        seen.append(other.evaluate(rows(9, seed=1)).loss)
        other.load_params(trained)
    found = average.params
    assert all(np.allclose(found[n], v, rtol=1e-12) for n, v in expected.items())
    assert all(np.array_equal(step.params[n], v) for n, v in other.params.items())
    assert np.allclose(history.series("val/loss")[1], seen, rtol=1e-12)
    with pytest.raises(td.ArgumentError, match="decay = 1"):
        callbacks.EMA(decay=1)


def test_swa_is_the_mean_of_epochs() -> None:
    seen = []
    note = callbacks.Lambda(on_epoch_end=lambda run: seen.append(run.step.params))
    step, average = make(), callbacks.SWA(start=2, load_at_end=True)
    trainer(step, note, average).fit(loader(), epochs=5)
    expected = {n: np.mean([s[n] for s in seen[2:]], axis=0) for n in seen[0]}
    assert all(np.allclose(step.params[n], v, rtol=1e-12) for n, v in expected.items())


def test_averages_are_taken_back_when_a_validation_fails() -> None:
    step, other = make(), make()
    bad = [{"x": np.zeros((3, 7))}]
    with pytest.raises(td.BatchError):
        trainer(step, callbacks.EMA(0.5)).fit(loader(), epochs=1, validation=bad)
    trainer(other).fit(loader(), epochs=1)
    assert all(np.array_equal(step.params[n], v) for n, v in other.params.items())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradient_monitor(accumulate: int) -> None:
    step, other = make(accumulate=accumulate), make(accumulate=accumulate)
    history = trainer(step, callbacks.GradientMonitor(every=2)).fit(loader(), steps=4)
    batches, expected = loader(), []
    while len(expected) < 4:
        for batch in batches:
            out = other(batch, grad_norms=True)
            if other.micro_step == 0:
                expected.append(out.grad_norms["weight"])
    steps, found = history.series("grad_norm/weight")
    assert steps.tolist() == [2, 4]
    assert found.tolist() == [expected[1], expected[3]]
    assert all(np.array_equal(step.params[n], v) for n, v in other.params.items()) == (
        other.count == 4
    )


def test_histograms() -> None:
    kept = callbacks.Histograms(every=2, bins=8, most=2)
    trainer(make(accumulate=2), kept).fit(loader(), steps=7)
    assert [r.step for r in kept.records] == [4, 6]
    assert set(kept.records[0].gradients) == set(kept.records[0].parameters) == {"weight", "bias"}
    assert kept.records[0].parameters["weight"].counts.shape == (8,)


def test_profiler(tmp_path: Path) -> None:
    profiler = callbacks.Profiler()
    trainer(make(), profiler).fit(
        loader(), epochs=2, validation=[rows(9)], checkpoint=tmp_path / "c"
    )
    assert profiler.counts["step"] == 10
    assert profiler.counts["validation"] == 2
    assert profiler.counts["checkpoint"] == 2
    assert all(seconds >= 0 for seconds in profiler.seconds.values())
    assert str(profiler).splitlines()[0].split() == [
        "phase",
        "times",
        "seconds",
        "ms",
        "each",
        "share",
    ]
    profiler.to_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len([e for e in events if e["name"] == "step"]) == 10
    assert all(a["ts"] <= b["ts"] for a, b in pairwise(events))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("rate", [0.05, optim.warmup_cosine(0.05, 3, 50)])
def test_rate_finder_starts_with_what_it_found(rate, accumulate: int) -> None:
    finder, seen = callbacks.RateFinder(low=1e-4, high=1, count=20), []

    def note(run):
        first = run.batch["x"].tolist()
        seen.append((run.step.learning_rate, first, run.step.params["weight"].tolist()))

    step = make(optim.sgd(rate), accumulate=accumulate)
    start = step.params["weight"].tolist()
    history = trainer(step, finder, callbacks.Lambda(on_step_start=note)).fit(loader(), steps=3)
    assert finder.test is not None
    assert np.isclose(seen[0][0], finder.test.suggestion)
    assert seen[0][1:] == (next(iter(loader()))["x"].tolist(), start)
    assert len(history) == 3
    worse = callbacks.RateFinder(low=5, high=10, count=4)
    with pytest.raises(td.CallbackError, match="the loss fell at no rate from 5 to 10"):
        trainer(make(), worse).fit([rows(4)], steps=1)


def test_lambda_takes_hooks_only() -> None:
    with pytest.raises(td.ArgumentError, match="no hook on_batch_end. There are on_fit_start"):
        callbacks.Lambda(on_batch_end=print)
    with pytest.raises(td.ArgumentError, match="no hooks"):
        callbacks.Lambda()


def test_names_of_equal_callbacks() -> None:
    chosen = [callbacks.EMA(), callbacks.EMA(), callbacks.Profiler(), callbacks.EMA()]
    assert list(Callbacks(chosen).named()) == ["EMA", "EMA.2", "Profiler", "EMA.3"]


def test_several_callbacks_that_fail() -> None:
    class Other(callbacks.Callback):
        def on_epoch_start(self, run):
            raise KeyError("two")

    def fail(run):
        raise ValueError("one")

    with pytest.raises(td.CallbackError, match=r"Lambda raised ValueError.*Other: KeyError\('two'"):
        trainer(make(), callbacks.Lambda(on_epoch_start=fail), Other()).fit(loader(), epochs=1)
