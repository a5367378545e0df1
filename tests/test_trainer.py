"""The trainer: what a hand-written loop gives, and what it adds to it."""

from __future__ import annotations

import json
import math
import signal
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest

import treadle as td
from treadle import data, losses, metrics, nn, optim
from treadle.train import progress
from treadle.train.callback import HOOKS
from treadle.train.interrupts import Interrupts

SPEC = {"x": td.Spec((4, 2)), "y": td.Spec((4,), td.int32)}


def rows(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).normal(size=(count, 2)).astype(np.float32)
    return {"x": x, "y": (x.sum(1) > 0).astype(np.int32)}


def loss(model, batch):
    scores = model(batch["x"])
    is_right = (scores.argmax(-1) == batch["y"]).astype(td.float32)
    td.metric("right", is_right.mean(), is_right.shape[0])
    return losses.cross_entropy(scores, batch["y"])


def make(**keywords) -> td.TrainStep:
    device, function = keywords.pop("device", "oracle"), keywords.pop("loss", loss)
    return td.compile_step(
        nn.Linear(2, 2), function, optim.adam(0.05), SPEC, device=device, **keywords
    )


def loader(count: int = 22, **keywords) -> data.ArrayLoader:
    return data.ArrayLoader(rows(count), 4, shuffle=True, **keywords)


def quiet(step: td.TrainStep, *callbacks: td.callbacks.Callback, **keywords) -> td.Trainer:
    return td.Trainer(step, callbacks, progress=False, **keywords)


def same(a: td.TrainStep, b: td.TrainStep) -> bool:
    one, two = a.state_dict(), b.state_dict()
    return one.keys() == two.keys() and all(np.array_equal(one[n], two[n]) for n in one)


def batches_of(arrays: dict[str, np.ndarray], size: int = 4) -> list[dict[str, np.ndarray]]:
    count = len(arrays["y"])
    return [{k: v[i : i + size] for k, v in arrays.items()} for i in range(0, count, size)]


# Training


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_fit_is_the_loop_by_hand(accumulate: int) -> None:
    step, other = make(accumulate=accumulate), make(accumulate=accumulate)
    expected: list[tuple[float, float, float]] = []
    by_hand = loader()
    for _ in range(3):
        for batch in by_hand:
            out = other(batch)
            if other.micro_step == 0:
                expected.append((out.loss, out.grad_norm, out.metrics["right"]))
    history = quiet(step).fit(loader(), epochs=3)
    assert same(step, other)
    columns = [history[name] for name in ("loss", "grad_norm", "right")]
    assert list(zip(*(c.tolist() for c in columns), strict=True)) == expected
    assert history["step"].tolist() == list(range(1, len(expected) + 1))
    assert len(expected) == 15 // accumulate


@pytest.mark.parametrize(
    ("keywords", "steps", "epoch"),
    [
        ({"epochs": 2}, 10, 2),
        ({"steps": 7}, 7, 1),
        ({"steps": 5}, 5, 0),
        ({"epochs": 2, "steps": 7}, 7, 1),
        ({"epochs": 1, "steps": 70}, 5, 1),
    ],
)
def test_how_long(keywords: dict, steps: int, epoch: int) -> None:
    seen = []
    end = td.callbacks.Lambda(on_fit_end=lambda run: seen.append((run.steps, run.epoch)))
    history = quiet(make(), end).fit(loader(), **keywords)
    assert len(history) == steps
    assert seen == [(steps, epoch)]
    assert history.stopped is None


def test_steps_are_updates() -> None:
    step = make(accumulate=4)
    seen = []
    watch = td.callbacks.Lambda(on_step_end=lambda run: seen.append((run.batches, run.steps)))
    quiet(step, watch).fit(loader(), steps=2)
    assert seen == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1), (6, 1), (7, 1), (8, 2)]
    assert step.count == 2


@pytest.mark.parametrize(
    "make_data",
    [
        lambda: batches_of(rows(20)),
        lambda: tuple(batches_of(rows(20))),
        lambda: data.IterableLoader(lambda epoch: iter(batches_of(rows(20)))),
        lambda: data.ArrayLoader(rows(20), 4),
        lambda: data.Prefetch(data.ArrayLoader(rows(20), 4)),
    ],
)
def test_any_iterable(make_data) -> None:
    step, other = make(), make()
    for batch in batches_of(rows(20)) * 2:
        other(batch)
    quiet(step).fit(make_data(), epochs=2)
    assert same(step, other)


def test_a_generator_is_one_epoch() -> None:
    step = make()
    assert len(quiet(step).fit((b for b in batches_of(rows(20))), epochs=1)) == 5
    with pytest.raises(td.ArgumentError, match="gives its items once"):
        quiet(step).fit((b for b in batches_of(rows(20))), epochs=2)


# Validation


def by_hand(step: td.TrainStep, arrays: dict[str, np.ndarray]) -> tuple[float, float]:
    out = step.evaluate(arrays)
    return out.loss, out.metrics["right"]


def test_evaluate_counts_each_row_once() -> None:
    step, arrays = make(), rows(11, seed=3)
    found = quiet(step).evaluate(data.ArrayLoader(arrays, 4))
    expected = by_hand(step, arrays)
    assert list(found) == ["loss", "right"]
    assert np.allclose(list(found.values()), expected, rtol=1e-14)


def test_evaluate_with_a_group() -> None:
    group = metrics.Group({"f1": metrics.F1(), "auc": metrics.RocAuc()})

    def captured(model, batch):
        scores = model(batch["x"])
        group.capture(scores, batch["y"])
        return losses.cross_entropy(scores, batch["y"])

    step, arrays = make(loss=captured), rows(50, seed=3)
    found = quiet(step, metrics=group).evaluate(data.ArrayLoader(arrays, 8))
    scores = step.attach(lambda m, x: m(x), arrays["x"])(arrays["x"])
    assert found["f1"] == metrics.F1()(scores, arrays["y"])
    assert found["auc"] == metrics.RocAuc()(scores, arrays["y"])
    history = quiet(step, metrics=group).fit(loader(), epochs=1, validation=[arrays])
    assert history.last("val/auc").step == 5
    with pytest.raises(td.ArgumentError, match="no captures of f1"):
        quiet(make(), metrics=group).evaluate([arrays])
    given = {"f1": metrics.F1(), "auc": metrics.RocAuc()}
    again = quiet(step, metrics=given).evaluate(data.ArrayLoader(arrays, 8))
    assert again == quiet(step, metrics=group).evaluate(data.ArrayLoader(arrays, 8))
    for wrong in (metrics.F1(), ["f1"], {"f1": 3}, {}):
        with pytest.raises(td.ArgumentError, match="Group"):
            quiet(step, metrics=wrong)


def test_when_validations_come() -> None:
    held_out = rows(9, seed=1)

    def at(**keywords) -> list[int]:
        history = quiet(make()).fit(loader(), validation=[held_out], **keywords)
        return history.series("val/loss")[0].tolist()

    assert at(epochs=3) == [5, 10, 15]
    assert at(steps=7) == [5, 7]
    assert at(epochs=3, validate_every=4) == [4, 8, 12, 15]
    assert at(epochs=2, validate_every=5) == [5, 10]
    assert at(epochs=1, validate_every=100) == [5]


def test_a_validation_changes_nothing() -> None:
    step, other = make(), make()
    quiet(step).fit(loader(), epochs=2, validation=[rows(9, seed=1)], validate_every=1)
    quiet(other).fit(loader(), epochs=2)
    assert same(step, other)


def test_validation_values_are_those_of_the_moment() -> None:
    held_out, expected = rows(9, seed=1), []
    watch = td.callbacks.Lambda(
        on_eval_end=lambda run: expected.append(by_hand(run.step, held_out))
    )
    history = quiet(make(), watch).fit(loader(), epochs=3, validation=[held_out])
    found = [history.series(f"val/{name}")[1] for name in ("loss", "right")]
    assert list(zip(*found, strict=True)) == expected


# Predictions


def test_predict_puts_batches_together() -> None:
    step, arrays = make(), rows(11, seed=3)
    trainer = quiet(step)
    expected = step.attach(lambda m, x: m(x), arrays["x"])(arrays["x"])
    for given in (
        data.ArrayLoader(arrays, 4),
        data.ArrayLoader({"x": arrays["x"]}, 4),
        data.ArrayLoader(arrays["x"], 4),
        [arrays],
    ):
        assert np.allclose(quiet(step).predict(given), expected, rtol=1e-14)
    two = trainer.predict(
        data.ArrayLoader(arrays, 4),
        lambda m, b: {
            "class": m(b["x"]).argmax(-1),
            "loss": losses.cross_entropy(m(b["x"]), b["y"]),
        },
    )
    assert two["class"].tolist() == expected.argmax(-1).tolist()
    assert two["loss"].shape == (3,)
    before = trainer.predict([arrays])
    step(rows(4))
    assert (trainer.predict([arrays]) != before).all()  # never stale
    with pytest.raises(td.ArgumentError, match="the batch has z, and no 'x'"):
        trainer.predict([{"z": arrays["x"]}])


# Trying out


def test_fast_dev_run_leaves_no_trace(tmp_path: Path) -> None:
    step, log = make(), []
    before = step.state_dict()
    trainer = td.Trainer(
        step,
        [td.callbacks.Lambda(on_step_end=lambda run: log.append(run.steps))],
        [td.loggers.CSVLogger(tmp_path / "log.csv")],
        progress=False,
    )
    batches = loader()
    history = trainer.fit(
        batches,
        epochs=9,
        validation=[rows(5), rows(5)],
        checkpoint=tmp_path / "checkpoints",
        fast_dev_run=True,
    )
    assert (log, len(history)) == ([1], 1)
    assert "val/loss" in history
    assert not list(tmp_path.iterdir())
    assert all(np.array_equal(before[n], v) for n, v in step.state_dict().items())
    assert len(trainer.history) == 0
    assert len(trainer.fit(batches, fast_dev_run=3)) == 3
    other = make()
    quiet(other).fit(loader(), epochs=1)
    trainer.fit(batches, epochs=1)
    assert same(step, other)


def test_overfit_batches() -> None:
    step, other = make(), make()
    first = [b for b, _ in zip(loader(), range(2), strict=False)]
    history = quiet(step).fit(loader(), epochs=20, overfit_batches=2, validation=[rows(9)])
    for batch in first * 20:
        other(batch)
    assert same(step, other)
    expected = [other.evaluate(b).loss for b in first]
    assert math.isclose(history.last("val/loss").value, np.mean(expected), rel_tol=1e-12)


# What is wrong


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({}, "neither epochs nor steps"),
        ({"epochs": 0}, "epochs = 0"),
        ({"steps": -1}, "steps = -1"),
        ({"epochs": 1.5}, "epochs = 1.5"),
        ({"epochs": True}, "epochs = True"),
        ({"epochs": 1, "validate_every": 0}, "validate_every = 0"),
        ({"epochs": 1, "checkpoint_every": 0}, "checkpoint_every = 0"),
        ({"epochs": 1, "overfit_batches": 0}, "overfit_batches = 0"),
    ],
)
def test_bad_arguments(keywords: dict, message: str) -> None:
    with pytest.raises(td.ArgumentError, match=message):
        quiet(make()).fit(loader(), **keywords)


def test_a_trainer_of_something_else() -> None:
    with pytest.raises(td.ArgumentError, match="Linear is not a training step"):
        td.Trainer(nn.Linear(2, 2))
    with pytest.raises(td.ArgumentError, match="progress = 'loud'"):
        td.Trainer(make(), progress="loud")
    with pytest.raises(td.ArgumentError, match="log_every = 0"):
        td.Trainer(make(), log_every=0)
    with pytest.raises(td.ArgumentError, match="EMA'> is not a callback. Make one: add ()"):
        td.Trainer(make(), [td.callbacks.EMA])
    with pytest.raises(td.ArgumentError, match="is not a callback. Derive from"):
        td.Trainer(make(), [print])


def test_empty_data() -> None:
    class Nothing:
        def __iter__(self):
            return iter(())

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    with pytest.raises(td.ArgumentError, match="empty"):
        quiet(make()).fit([], epochs=1)
    with pytest.raises(td.ArgumentError, match="epoch 0 has no batches"):
        quiet(make()).fit(Nothing(), epochs=1)
    for method in ("evaluate", "predict"):
        with pytest.raises(td.ArgumentError, match="empty"):
            getattr(quiet(make()), method)(Nothing())
    with pytest.raises(td.ArgumentError, match="no batches"):
        quiet(make()).fit(Nothing(), epochs=1, overfit_batches=2)


def test_batches_that_differ() -> None:
    wrong = [rows(4), {"x": rows(4)["x"]}]
    with pytest.raises(td.BatchError, match="batch 1 differs from the first: y is missing"):
        quiet(make()).fit(wrong, epochs=1)
    with pytest.raises(td.BatchError, match="compiled for"):
        quiet(make()).fit(data.ArrayLoader(rows(6), 4), epochs=1)


@pytest.mark.parametrize("shown", ["lines", "bar", "off"])
def test_batches_of_torch(shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A DataLoader of dicts of tensors, of lists of them, and of tensors beside arrays."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    arrays = rows(12)
    x, y = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])
    dicts = [{"x": x[i], "y": y[i]} for i in range(12)]

    def mixed(some):
        found = torch.utils.data.default_collate(some)
        return found | {"y": found["y"].numpy()}

    expected = make()
    history = quiet(expected).fit(batches_of(arrays), epochs=2)
    for loader in (DataLoader(dicts, 4), DataLoader(dicts, 4, collate_fn=mixed)):
        step = make()
        trainer = td.Trainer(step, progress=shown)
        found = trainer.fit(loader, epochs=2, validation=loader)
        assert found["loss"].tolist() == history["loss"].tolist()
        assert same(step, expected)

    def of_pairs(model, batch):
        return losses.cross_entropy(model(batch[0]), batch[1])

    specs = list(SPEC.values())
    step = td.compile_step(nn.Linear(2, 2), of_pairs, optim.adam(0.05), specs, device="oracle")
    td.Trainer(step, progress=shown).fit(DataLoader(TensorDataset(x, y), 4), epochs=2)
    assert all(np.array_equal(v, expected.params[n]) for n, v in step.params.items())
    assert ("samples/s" in capsys.readouterr().out) == (shown != "off")


def test_tokens_of_torch_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    def next_token(model, batch):
        return losses.cross_entropy(model(batch["t"]), batch["t"], axis=-1)

    spec = {"t": td.Spec((2, 5), td.int32)}
    step = td.compile_step(nn.Embedding(3, 3), next_token, optim.sgd(0.1), spec, device="oracle")
    batches = [{"t": torch.arange(10).reshape(2, 5) % 3}] * 3
    td.Trainer(step, progress="lines").fit(batches, epochs=1)
    assert "tokens/s" in capsys.readouterr().out


def test_one_loader_for_both() -> None:
    both = loader()
    with pytest.raises(td.ArgumentError, match="validation is the loader that is trained on"):
        quiet(make()).fit(both, epochs=1, validation=both)


def infinite_loss(model, batch):
    return losses.cross_entropy(model(batch["x"]), batch["y"]) / batch["x"][0, 0]


def test_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    batches = batches_of(rows(40))
    batches[6]["x"][0, 0] = 0
    step = make(loss=infinite_loss)
    trainer = quiet(step)
    with pytest.raises(td.NotFiniteError) as caught:
        trainer.fit(batches, epochs=2, checkpoint=tmp_path, checkpoint_every=4)
    error = caught.value
    last = td.CheckpointManager(tmp_path, read_only=True).latest()
    assert last is not None
    assert (error.step, last.extra["steps"], error.checkpoint) == (7, 4, last.path)
    assert f"at step 7 (epoch 0, batch 7). The last good one is {last.path}." in str(error)
    assert trainer.history.last("loss") == (7, error.loss)
    with pytest.raises(td.NotFiniteError, match="There is no checkpoint"):
        quiet(make(loss=infinite_loss)).fit(batches, epochs=2)
    history = quiet(make(loss=infinite_loss), stop_on_nan=False).fit(batches, epochs=1)
    assert len(history) == 10


def test_float16_overflows_are_not_the_end() -> None:
    def large(model, batch):
        return losses.cross_entropy(model(batch["x"]) * batch["x"][0, 0], batch["y"])

    batches = batches_of(rows(16))
    batches[1]["x"][0, 0] = 1e6
    step = make(loss=large, precision="float16")
    with warnings.catch_warnings(action="ignore"):  # NumPy's, of the oracle
        history = quiet(step).fit(batches, epochs=1)
    assert not math.isfinite(history["loss"][1])
    assert step.count == 3


# Callbacks and loggers


def test_the_order_of_hooks(tmp_path: Path) -> None:
    seen: list[str] = []

    def note(hook):
        return lambda run: seen.append(f"{hook} {run.epoch} {run.steps}")

    hooks = {hook: note(hook) for hook in HOOKS if hook != "on_exception"}
    quiet(make(), td.callbacks.Lambda(**hooks)).fit(
        loader(9), epochs=2, validation=[rows(4)], checkpoint=tmp_path
    )
    assert seen == [
        "on_fit_start 0 0",
        "on_epoch_start 0 0",
        "on_step_start 0 0",
        "on_step_end 0 1",
        "on_step_start 0 1",
        "on_step_end 0 2",
        "on_eval_start 0 2",
        "on_eval_end 0 2",
        "on_epoch_end 0 2",
        "on_save 1 2",
        "on_epoch_start 1 2",
        "on_step_start 1 2",
        "on_step_end 1 3",
        "on_step_start 1 3",
        "on_step_end 1 4",
        "on_eval_start 1 4",
        "on_eval_end 1 4",
        "on_epoch_end 1 4",
        "on_save 2 4",
        "on_fit_end 2 4",
    ]


def test_callbacks_read_the_truth_and_write_for_the_next_step() -> None:
    step, other = make(), make()
    seen = []

    def change(run):
        seen.append(run.step.params["bias"])
        if run.steps == 2:
            run.step.load_params({"bias": np.full(2, 7.0)}, strict=False)
            run.step.lr_scale = 0.5

    quiet(step, td.callbacks.Lambda(on_step_end=change)).fit(loader(), steps=4)
    for i, batch in enumerate(loader()):
        other(batch)
        assert np.array_equal(seen[i], other.params["bias"])
        if i == 1:
            other.load_params({"bias": np.full(2, 7.0)}, strict=False)
            other.lr_scale = 0.5
        if i == 3:
            break
    assert same(step, other)


def test_a_callback_may_stop_save_and_log(tmp_path: Path) -> None:
    def act(run):
        if run.steps == 3:
            run.save()
            run.log({"mine": 3.5, "matrix": np.eye(2)})
        if run.steps == 6:
            run.stop("enough")
            run.stop("later")

    history = quiet(make(), td.callbacks.Lambda(on_step_end=act)).fit(
        loader(), epochs=9, checkpoint=tmp_path
    )
    assert (len(history), history.stopped) == (6, "enough")
    assert history.series("mine")[0].tolist() == [3]
    assert "matrix" not in history
    found = td.CheckpointManager(tmp_path, read_only=True).list()
    assert [c.extra["steps"] for c in found] == [3, 5, 6]


def test_an_exception_reaches_on_exception() -> None:
    seen = []

    class Worse(td.callbacks.Callback):
        def on_exception(self, run, error):
            seen.append((run.steps, type(error)))
            raise ValueError("worse")

    def fail(run):
        if run.steps == 2:
            raise KeyError("gone")

    trainer = quiet(make(), td.callbacks.Lambda(on_step_end=fail), Worse())
    with (
        pytest.warns(RuntimeWarning, match="the callback Worse raised ValueError"),
        pytest.raises(td.CallbackError, match="the callback Lambda raised KeyError"),
    ):
        trainer.fit(loader(), epochs=1)
    assert seen == [(2, td.CallbackError)]
    assert len(trainer.history) == 2


def test_loggers_get_every_row(tmp_path: Path) -> None:
    with quiet(make(), loggers=[td.loggers.JSONLLogger(tmp_path / "a.jsonl")]) as trainer:
        history = trainer.fit(loader(), epochs=2, validation=[rows(9)])
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    assert len(lines) == 12
    first = next(history.rows())
    assert json.loads(lines[0]) == {"step": 1, "epoch": 0, **first}
    assert lines[5].startswith('{"step": 5, "val/loss": ')
    few = td.loggers.JSONLLogger(tmp_path / "b.jsonl")
    quiet(make(), loggers=[few], log_every=4).fit(loader(), epochs=2)
    steps = [line.split(",")[0] for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    assert steps == ['{"step": 4', '{"step": 5', '{"step": 8', '{"step": 10']


def test_a_logger_that_fails_warns_once() -> None:
    class Gone:
        calls = 0

        def log(self, step, values):
            self.calls += 1
            raise ConnectionError("gone")

        def resume(self, step):
            pass

        def close(self):
            pass

    gone, step, other = Gone(), make(), make()
    with pytest.warns(td.loggers.LoggerWarning, match="Gone failed") as caught:
        quiet(step, loggers=[gone]).fit(loader(), epochs=3)
    quiet(other).fit(loader(), epochs=3)
    assert (len(caught), gone.calls) == (1, 3)
    assert same(step, other)


# Progress


def test_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    td.Trainer(make()).fit(loader(), epochs=2, validation=[rows(9)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("epoch 1/2  step 5/10  loss 0.")
    for part in ("lr 0.05", "val/loss 0.", "val/right ", " samples/s", " MB", " left"):
        assert part in lines[0]
    td.Trainer(make(), progress=False).fit(loader(), epochs=2, validation=[rows(9)])
    assert capsys.readouterr().out == ""


def test_lines_come_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PAUSE", 0.0)
    td.Trainer(make(), progress="lines").fit(loader(), steps=3)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[1] for line in lines] == ["step 1/3", "step 2/3", "step 3/3"]


def test_the_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    history = td.Trainer(make(), progress="bar").fit(loader(), epochs=2, validation=[rows(9)])
    out = capsys.readouterr().out
    assert len(history) == 10
    assert "step 10/10" in out
    assert "val/loss" in out


def test_what_is_counted() -> None:
    run = td.callbacks.Run(make(), td.loggers.Loggers())
    for batch, unit, count in (
        ({"x": np.zeros((5, 3))}, "samples", 5),
        ([(np.zeros((7, 2)), 0)], "samples", 7),
        (np.zeros((2, 6), np.int32), "tokens", 12),
        (np.zeros((2, 6), np.uint8), "samples", 2),
        ({"x": 3.0}, "samples", 1),
    ):
        meter = progress.Meter(run, None, None)
        run.batch, run.batches = batch, run.batches + 1
        meter.look(run)
        assert (meter.unit, meter.units) == (unit, count)
    assert [progress.clock(s) for s in (0.4, 61, 3723)] == ["0:00", "1:01", "1:02:03"]


def test_groups_with_rates_of_their_own() -> None:
    optimizer = optim.groups(("weight", optim.sgd(0.1)), ("*", optim.sgd(0.2)))
    step = td.compile_step(nn.Linear(2, 2), loss, optimizer, SPEC, device="oracle")
    history = quiet(step).fit(loader(), epochs=1)
    assert "lr" not in history


# Interrupts


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Interrupts(terminate=True) as interrupts:
        during = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit) as caught:
            interrupts.raise_if_asked()
        assert caught.value.code == 143
    assert during == (interrupts._note, interrupts._note)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_fit_in_a_thread() -> None:
    done = []
    thread = threading.Thread(target=lambda: done.append(quiet(make()).fit(loader(), epochs=1)))
    thread.start()
    thread.join()
    assert len(done[0]) == 5


def test_native_and_oracle_agree() -> None:
    one = quiet(make(device="cpu")).fit(loader(), epochs=2)
    two = quiet(make()).fit(loader(), epochs=2)
    assert np.allclose(one["loss"], two["loss"], rtol=1e-5)
