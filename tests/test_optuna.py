"""Pruning of Optuna's trials by a callback of the trainer."""

from __future__ import annotations

import sys

import numpy as np
import optuna
import pytest

import treadle as td
from refusals import refused
from treadle import data, losses, nn, optim
from treadle.interop.optuna import PruningCallback

X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
ROWS = {"x": X, "y": X @ np.ones((3, 1), np.float32)}
optuna.logging.set_verbosity(optuna.logging.WARNING)


@pytest.fixture(scope="module")
def step() -> td.TrainStep:
    def loss(model, batch):
        return losses.mse(model(batch["x"]), batch["y"])

    example = {name: array[:8] for name, array in ROWS.items()}
    return td.compile_step(nn.Linear(3, 1), loss, optim.sgd(0.1), example, device="oracle")


def trained(step: td.TrainStep, trial: optuna.Trial, lr: float, **options) -> float:
    step.reset(0)
    step.learning_rate = lr
    trainer = td.Trainer(step, [PruningCallback(trial, **options)], progress="off")
    held_out = None if options else data.ArrayLoader(ROWS, 8)
    history = trainer.fit(data.ArrayLoader(ROWS, 8), epochs=4, validation=held_out)
    return history.last(options.get("monitor", "val/loss")).value


@pytest.mark.parametrize("options", [{}, {"monitor": "loss"}], ids=["validated", "training"])
def test_trials_that_promise_little_are_pruned(step, options) -> None:
    study = optuna.create_study(pruner=optuna.pruners.MedianPruner(n_startup_trials=2))
    rates = iter([0.1, 0.2, 1e-5, 0.15])
    study.optimize(lambda trial: trained(step, trial, next(rates), **options), n_trials=4)
    states = [trial.state.name for trial in study.trials]
    assert states == ["COMPLETE", "COMPLETE", "PRUNED", "COMPLETE"]
    assert sorted(study.trials[0].intermediate_values) == [1, 2, 3, 4]  # validations
    assert sorted(study.trials[2].intermediate_values) == [1]
    assert study.best_value < 0.1


def test_the_study_goes_the_way_of_the_metric() -> None:
    for direction, monitor in (("minimize", "val/accuracy"), ("maximize", "val/loss")):
        trial = optuna.create_study(direction=direction).ask()
        refused(
            lambda trial=trial, monitor=monitor: PruningCallback(trial, monitor),
            td.ArgumentError,
            "PruningCallback",
            "create_study(direction=",
        )
        PruningCallback(trial, "val/gap")
    PruningCallback(optuna.create_study(direction="maximize").ask(), "val/accuracy")


def test_a_failure_of_another_callback_is_still_named(step) -> None:
    study = optuna.create_study()
    pruning = PruningCallback(study.ask())
    assert pruning.passes == (optuna.TrialPruned,)
    broken = td.callbacks.Lambda(on_eval_end=lambda run: 1 / 0)
    trainer = td.Trainer(step, [pruning, broken], progress="off")
    with pytest.raises(td.CallbackError, match="Lambda"):
        trainer.fit(data.ArrayLoader(ROWS, 8), epochs=1, validation=data.ArrayLoader(ROWS, 8))


def test_what_cannot_be_pruned(step) -> None:
    both = optuna.create_study(directions=["minimize", "minimize"])
    trial = both.ask()
    refused(lambda: PruningCallback(trial), td.ArgumentError, "PruningCallback", "2 objectives")
    one = optuna.create_study().ask()
    trainer = td.Trainer(step, [PruningCallback(one)], progress="off")
    with pytest.raises(td.CallbackError, match="validation="):
        trainer.fit(data.ArrayLoader(ROWS, 8), epochs=1)


def test_packages_that_are_missing_are_named(monkeypatch) -> None:
    trial = optuna.create_study().ask()
    monkeypatch.setitem(sys.modules, "optuna", None)
    refused(lambda: PruningCallback(trial), td.ArgumentError, "PruningCallback", "treadle[optuna]")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refused(
        lambda: td.interop.tables.loader({"a": [1]}, batch_size=1),
        td.ArgumentError,
        "tables.loader",
        "treadle[tables]",
    )
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused(
        lambda: td.interop.datasets.loader([], batch_size=1),
        td.ArgumentError,
        "datasets.loader",
        "treadle[tables]",
    )
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    monkeypatch.delitem(sys.modules, "treadle.interop.sklearn", raising=False)
    monkeypatch.delitem(vars(td.interop), "sklearn", raising=False)
    with pytest.raises(ImportError, match=r"treadle\[sklearn\]"):
        td.interop.sklearn  # noqa: B018
