"""Several steps in one trainer: a function calls them; all that a trainer does holds for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle as td
from refusals import refused
from treadle import callbacks, data, losses, nn, optim

BATCH, ROWS = 4, 20
REAL = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)


def critic_loss(models, real):
    drawn = td.stop_gradient(models["g"](td.random.normal((BATCH, 2))))
    on_real, on_drawn = models["d"](real), models["d"](drawn)
    td.metric("gap", (on_real - on_drawn).mean())
    return losses.mse(on_real, td.ones_like(on_real)) + losses.mse(on_drawn, on_drawn * 0)


def maker_loss(models, noise):
    scores = models["d"](models["g"](noise))
    return losses.mse(scores, td.ones_like(scores))


class Gan:
    """Two steps on one set of parameters, and a forward that draws noise for the second."""

    def __init__(self, **options: Any):
        models = {"g": nn.Linear(2, 3), "d": nn.Linear(3, 1)}
        spec, noise = td.Spec((BATCH, 3)), td.Spec((BATCH, 2))
        options = {"device": "oracle", "seed": 1} | options
        d = td.compile_step(
            models, critic_loss, optim.only("d.*", optim.adam(0.05)), spec, **options
        )
        g = td.compile_step(
            models, maker_loss, optim.only("g.*", optim.adam(0.05)), noise, share=d, **options
        )
        self.steps = {"d": d, "g": g}
        self.draw = d.attach(lambda models, x: td.random.normal((BATCH, 2)), spec)
        self.fails_at: int | None = None

    def __call__(self, steps, batch):
        out = {"d": steps["d"](batch), "g": None}
        if self.fails_at == steps["d"].count:
            raise RuntimeError("between the two")
        out["g"] = steps["g"](self.draw(batch))
        return out | {"scale": np.float32(batch.std())}


def loader() -> data.ArrayLoader:
    return data.ArrayLoader(REAL, BATCH, shuffle=True, seed=2)


def trainer(gan: Gan, *own: callbacks.Callback, **options: Any) -> td.Trainer:
    return td.Trainer(gan.steps, own, training_step=gan, progress="off", **options)


def same(one: Gan, other: Gan) -> bool:
    states = [
        g.steps["d"].state_dict() | {"g": g.steps["g"].state_dict()["step:counters"]}
        for g in (one, other)
    ]
    return all(np.array_equal(states[0][n], states[1][n]) for n in states[0])


def test_a_fit_is_the_loop_by_hand() -> None:
    by_hand, fitted = Gan(), Gan()
    history = trainer(fitted).fit(loader(), epochs=2)
    batches, rows = loader(), []
    for _ in range(2):
        for batch in batches:
            d = by_hand.steps["d"](batch)
            rows.append((d.loss, d.metrics["gap"], by_hand.steps["g"](by_hand.draw(batch)).loss))
    assert same(by_hand, fitted)
    assert set(history.columns) == {
        "step", "d/loss", "d/grad_norm", "d/gap", "g/loss", "g/grad_norm", "scale", "lr"
    }  # fmt: skip
    found = zip(history["d/loss"], history["d/gap"], history["g/loss"], strict=True)
    assert list(found) == rows
    assert len(history) == 2 * ROWS // BATCH


@pytest.mark.parametrize("stop", [3, pytest.param(6, marks=pytest.mark.slow)])
def test_a_run_that_is_stopped_goes_on_with_the_same_bits(stop: int, tmp_path: Path) -> None:
    """Both steps, what the forward draws, history, callbacks and log files."""

    def run(gan: Gan, folder: Path, steps: int) -> td.History:
        log = td.loggers.CSVLogger(folder / "log.csv")
        own = [callbacks.EMA(0.9, step="g"), callbacks.GradientMonitor(every=2)]
        with trainer(gan, *own, loggers=[log]) as fitting:
            return fitting.fit(
                loader(), steps=steps, checkpoint=folder / "c", checkpoint_every=2, resume="auto"
            )

    whole, part, rest = Gan(), Gan(), Gan()
    expected = run(whole, tmp_path / "whole", 9)
    run(part, tmp_path / "parts", stop)
    found = run(rest, tmp_path / "parts", 9)
    assert same(whole, rest)
    assert repr(list(found.rows())) == repr(list(expected.rows()))
    assert (tmp_path / "parts/log.csv").read_bytes() == (tmp_path / "whole/log.csv").read_bytes()
    np.testing.assert_array_equal(rest.draw(REAL[:BATCH]), whole.draw(REAL[:BATCH]))
    reader = td.CheckpointManager(tmp_path / "parts/c", read_only=True)
    assert set(reader.latest().records) == {"d", "g"}


def test_an_error_between_two_steps_is_not_saved(tmp_path: Path) -> None:
    """Half a call is none: the last checkpoint is gone on from. Before the first, all is saved."""
    whole, broken, rest = Gan(), Gan(), Gan()
    trainer(whole).fit(loader(), steps=8)
    broken.fails_at = 4
    with pytest.raises(RuntimeError, match="between the two") as caught:
        trainer(broken).fit(loader(), steps=8, checkpoint=tmp_path / "c", checkpoint_every=2)
    assert not any("is saved" in n for n in getattr(caught.value, "__notes__", []))
    reader = td.CheckpointManager(tmp_path / "c", read_only=True)
    assert reader.latest().count == 2
    trainer(rest).fit(loader(), steps=8, checkpoint=tmp_path / "c", resume="auto")
    assert same(whole, rest)

    def careless(run: callbacks.Run) -> None:
        if run.steps == 3:
            raise RuntimeError("before the first")

    other = Gan()
    with pytest.raises(td.CallbackError):
        trainer(other, callbacks.Lambda(on_step_start=careless)).fit(
            loader(), steps=8, checkpoint=tmp_path / "other"
        )
    assert td.CheckpointManager(tmp_path / "other", read_only=True).latest().count == 3


def test_callbacks_know_the_steps(tmp_path: Path) -> None:
    seen = []

    def look(run: callbacks.Run) -> None:
        assert run.named_steps["g"].count == run.steps
        assert run.out["g"].loss == run.values["g/loss"]
        seen.append(run.values["scale"])

    gan = Gan()
    average = callbacks.EMA(0.5, step="g", load_at_end=True)
    own = [
        average,
        callbacks.GradientMonitor(every=2),
        callbacks.Histograms(every=3),
        callbacks.ReduceOnPlateau("d/gap", mode="max", patience=1, factor=0.5, step="g"),
        callbacks.EarlyStopping("g/loss", patience=2, restore_best=True),
        callbacks.Lambda(on_step_end=look),
    ]
    history = trainer(gan, *own).fit(loader(), epochs=6)
    assert len(seen) == len(history)
    assert {"grad_norm/d/d.weight", "grad_norm/g/g.bias"} <= set(history.columns)
    assert set(average.params) == {"g.weight", "g.bias"}
    assert {"d/d.weight", "g/g.weight"} <= set(own[2].records[0].gradients)
    assert gan.steps["d"].lr_scale == 1
    wrong = callbacks.EMA(step="critic")
    with pytest.raises(td.CallbackError, match="there is no step 'critic'"):
        trainer(Gan(), wrong).fit(loader(), steps=1)
    with pytest.raises(td.CallbackError, match="training_step of its own"):
        trainer(Gan(), callbacks.RateFinder()).fit(loader(), steps=1)


def test_progress_shows_each_loss(capsys: pytest.CaptureFixture[str]) -> None:
    gan = Gan()
    td.Trainer(gan.steps, training_step=gan, progress="lines").fit(loader(), epochs=1)
    said = capsys.readouterr().out
    assert "d/loss" in said
    assert "g/loss" in said
    assert "step 5/5" in said


def test_fast_dev_run_leaves_all_steps_as_they_were() -> None:
    gan, untouched = Gan(), Gan()
    trainer(gan).fit(loader(), fast_dev_run=3)
    assert same(gan, untouched)
    np.testing.assert_array_equal(gan.draw(REAL[:BATCH]), untouched.draw(REAL[:BATCH]))


def test_the_first_step_validates_and_counts(tmp_path: Path) -> None:
    gan = Gan(accumulate=2)
    fitting = trainer(gan)
    history = fitting.fit(loader(), epochs=2, validation=data.ArrayLoader(REAL, BATCH))
    assert len(history) == ROWS // BATCH  # two batches make an update
    assert (
        history.last("val/loss").value == fitting.evaluate([*data.ArrayLoader(REAL, BATCH)])["loss"]
    )
    scores = fitting.predict(loader(), lambda models, x: models["d"](x))
    assert scores.shape == (ROWS, 1)


def test_a_loss_of_any_step_that_is_not_finite_ends_training(tmp_path: Path) -> None:
    gan = Gan()

    def spoiled(steps, batch):
        d = steps["d"](batch)
        noise = np.full((BATCH, 2), np.inf if steps["g"].count == 3 else 0.1, np.float32)
        return {"d": d, "g": steps["g"](noise)}

    fitting = td.Trainer(gan.steps, training_step=spoiled, progress="off")
    with pytest.raises(td.NotFiniteError) as caught:
        fitting.fit(loader(), steps=9, checkpoint=tmp_path / "c", checkpoint_every=1)
    assert caught.value.step == 4
    assert td.CheckpointManager(tmp_path / "c", read_only=True).latest().count == 3


def test_one_step_with_a_function_of_its_own() -> None:
    """An inner loop: two updates for each batch; one result, as if the step had been called."""
    models = {"g": nn.Linear(2, 3), "d": nn.Linear(3, 1)}
    only = optim.only("d.*", optim.sgd(0.1))
    step = td.compile_step(models, critic_loss, only, td.Spec((BATCH, 3)), device="oracle")

    def twice(step, batch):
        step(batch)
        return step(batch)

    history = td.Trainer(step, training_step=twice, progress="off").fit(loader(), epochs=1)
    assert step.count == 2 * len(history)
    assert "loss" in history.columns


def test_wrong_trainers() -> None:
    gan = Gan()
    for call, said in (
        (lambda: td.Trainer(gan.steps), "Pass training_step="),
        (lambda: td.Trainer(gan.steps, training_step=3), "training_step is 3"),
        (lambda: td.Trainer({"d": gan.draw}, training_step=gan), "'d' is not a step"),
        (lambda: td.Trainer({}, training_step=gan), "is not a step"),
        (lambda: td.Trainer({"a.b": gan.steps["d"]}, training_step=gan), "plain name"),
    ):
        refused(call, td.ArgumentError, "Trainer", said)
    for returned, said in ((None, "returns None"), ({}, "returns {}"), ({"a": "b"}, "a: 'b'")):

        def call(returned=returned):
            fitting = td.Trainer(gan.steps, training_step=lambda s, b: returned, progress="off")
            fitting.fit(loader(), steps=1)

        refused(call, td.ArgumentError, "fit", said)
