"""What is kept as good is finite: a finite loss may leave parameters that are not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import treadle as td
from cuda_backend import needs_gpu
from treadle import losses, nn, optim

SPEC = {"x": td.Spec((4, 2)), "y": td.Spec((4,), td.int32)}
Arrays = dict[str, np.ndarray]
DEVICES = ["oracle", "cpu", pytest.param("cuda", marks=needs_gpu)]


def loss(model, batch):
    """Finite where x is infinite, with a gradient of 0 · inf."""
    return losses.cross_entropy(td.tanh(model(batch["x"])), batch["y"])


def batches(count: int, broken: int | None = None) -> list[Arrays]:
    rng = np.random.default_rng(0)
    y = np.arange(4, dtype=np.int32) % 2
    found = [{"x": rng.normal(size=(4, 2)).astype(np.float32), "y": y} for _ in range(count)]
    if broken is not None:
        found[broken]["x"][0, 0] = np.inf
    return found


def make(device: str = "oracle", model: object = None, **keywords) -> td.TrainStep:
    optimizer = keywords.pop("optimizer", optim.adam(0.05))
    function = keywords.pop("loss", loss)
    return td.compile_step(
        model or nn.Linear(2, 2), function, optimizer, SPEC, device=device, **keywords
    )


def trainer(step: td.TrainStep, *callbacks: td.callbacks.Callback, **keywords) -> td.Trainer:
    return td.Trainer(step, callbacks, progress="off", **keywords)


def numbers_of(folder: Path) -> list[int]:
    return [c.extra["steps"] for c in td.CheckpointManager(folder, read_only=True).list()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("broken", [5, 7])  # in the middle, and the last one
def test_a_run_ends_where_its_parameters_do(broken: int, device: str, tmp_path: Path) -> None:
    step = make(device)
    arguments = {"epochs": 1, "checkpoint": tmp_path, "checkpoint_every": 2}
    with pytest.raises(td.NotFiniteError, match="is not finite: weight, ") as caught:
        trainer(step).fit(batches(8, broken), **arguments)
    error = caught.value
    at = broken + 1
    assert f"what step {at} (epoch 0, batch {at}) left" in error.cause
    assert (error.step, error.names[0]) == (at, "weight")
    assert error.loss is not None
    assert np.isfinite(error.loss)
    assert f"The last good one is {error.checkpoint}" in error.remedy
    assert numbers_of(tmp_path) == list(range(2, at, 2))
    assert step.not_finite()[0] == "weight"
    # With the same data it ends there again, and with good data it goes on from the good one.
    with pytest.raises(td.NotFiniteError, match=f"what step {at} "):
        trainer(make(device)).fit(batches(8, broken), resume="auto", **arguments)
    again = make(device)
    history = trainer(again).fit(batches(8), resume="auto", **arguments)
    assert history["step"].tolist() == list(range(1, 9))
    assert again.not_finite() == ()
    whole = make(device)
    trainer(whole).fit(batches(8), epochs=1)
    assert all(np.array_equal(v, whole.params[n]) for n, v in again.params.items())


def test_without_checkpoints_too() -> None:
    for arguments in ({"epochs": 1}, {"fast_dev_run": 8}):
        with pytest.raises(td.NotFiniteError, match="what step 8 .*There is no checkpoint"):
            trainer(make()).fit(batches(8, 7), **arguments)


def test_parameters_that_a_callback_broke(tmp_path: Path) -> None:
    """No gradient tells: the look before a checkpoint, or at the end, does."""

    def spoil(run):
        if run.steps == 4:
            run.step.load_params({"bias": np.array([np.inf, 0.0])}, strict=False)

    def sum_of_weights(model, batch):
        return (model.weight * batch["x"][0]).sum()

    spoiler = td.callbacks.Lambda(on_step_end=spoil)
    for steps, every in ((4, 10), (6, 2)):
        folder = tmp_path / str(steps)
        with pytest.warns(td.UnreachedWarning):
            step = make(loss=sum_of_weights)
        with pytest.raises(
            td.NotFiniteError, match="step 4 .*left is not finite: bias|step 4 left"
        ):
            trainer(step, spoiler).fit(
                batches(8), steps=steps, checkpoint=folder, checkpoint_every=every
            )
        assert numbers_of(folder) == ([] if every == 10 else [2])


def test_a_run_that_does_not_stop_keeps_the_good_one(tmp_path: Path) -> None:
    step = make()
    with pytest.warns(td.CheckpointWarning, match="goes on: .*not finite: weight") as caught:
        history = trainer(step, stop_on_nan=False).fit(
            batches(8, 3), epochs=1, checkpoint=tmp_path, checkpoint_every=2
        )
    assert len(history) == 8
    assert len(caught) == 3
    assert numbers_of(tmp_path) == [2]


def test_an_error_elsewhere_does_not_keep_what_is_broken(tmp_path: Path) -> None:
    def fails(run):
        if run.steps == 4:
            run.step.load_params({"bias": np.full(2, np.nan)}, strict=False)
            raise ValueError("mine")

    with (
        pytest.warns(td.CheckpointWarning, match="no checkpoint at the end.*not finite: bias"),
        pytest.raises(td.CallbackError, match="mine"),
    ):
        trainer(make(), td.callbacks.Lambda(on_step_end=fails)).fit(
            batches(8), epochs=1, checkpoint=tmp_path, checkpoint_every=2
        )
    assert numbers_of(tmp_path) == [2]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loop_by_hand_is_told(accumulate: int, device: str, tmp_path: Path) -> None:
    step = make(device, accumulate=accumulate)
    with td.CheckpointManager(tmp_path) as checkpoints:
        good = checkpoints.save(step)
        step(batches(1, 0)[0])
        with pytest.raises(td.NotFiniteError) as caught:
            checkpoints.save(step)
        expected = "weight" if accumulate == 1 else "step:accumulator:gradient:weight"
        assert (caught.value.operation, caught.value.names[0]) == ("save", expected)
        assert caught.value.checkpoint == good.path
        assert checkpoints.list() == (good,)
        checkpoints.restore(step)
        assert step.not_finite() == ()


class Watched(nn.Module):
    """A running minimum that begins at infinity, a mask, and a mean that does not."""

    def __init__(self) -> None:
        self.fc = nn.Linear(2, 2)
        self.least = nn.State((), nn.init.constant(np.inf))
        self.mask = nn.State((2,))
        self.mean = nn.State(())

    def forward(self, x):
        td.update(self.mean, x.mean())
        return self.fc(x) + td.exp(self.mask)


@pytest.mark.parametrize("device", DEVICES)
def test_what_begins_infinite_may_stay_so(device: str, tmp_path: Path) -> None:
    step = make(device, Watched())
    step.load_params({"mask": np.array([0.0, -np.inf])}, strict=False)
    step(batches(1)[0])
    with td.CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(step)
        other = make(device, Watched())
        checkpoints.restore(other)
        assert np.isinf(other.params["mask"][1])
        checkpoints.save(other)  # a mask that was restored may have them as well
        other.reset()
        assert other.not_finite() == ()
        step(batches(1, 0)[0])
        assert step.not_finite()[:2] == ("fc.weight", "mean")
        assert "least" not in step.not_finite()


def infinite_slot(inner: optim.Optimizer) -> optim.Optimizer:
    """An optimizer that remembers the least norm of a gradient, from infinity on."""

    def init(params):
        return {
            "least": td.full((), float("inf")),
            "last": td.zeros(()),
            "inner": inner.init(params),
        }

    def update(grads, state, params, context):
        after, own = inner.update(grads, state["inner"], params, context)
        last = state["last"] + sum(g.sum() for g in grads.values())
        return after, {"least": state["least"], "last": last, "inner": own}

    return optim.Optimizer("remembering", init, update, inner.hyper, inner.schedules)


def test_slots_that_begin_infinite_may_stay_so() -> None:
    step = make(optimizer=infinite_slot(optim.sgd(0.1)))
    step(batches(1)[0])
    assert step.not_finite() == ()
    step(batches(1, 0)[0])
    assert step.not_finite() == ("weight", "step:optimizer:last")


def test_a_metric_that_is_not_a_number_is_kept(tmp_path: Path) -> None:
    def with_metric(model, batch):
        td.metric("share", batch["x"].sum() * 0.0 / 0.0, 1.0)
        return losses.cross_entropy(model(batch["x"]), batch["y"])

    step = make(loss=with_metric, accumulate=2)
    step(batches(1)[0])
    assert np.isnan(step.state_dict()["step:accumulator:metric:share"])
    with td.CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(step)


def test_float16_sums_may_overflow(tmp_path: Path) -> None:
    """The update they belong to is skipped: parameters stay finite, and training goes on."""

    def steep(model, batch):
        return (model(batch["x"]) * 3e4).sum()

    step = make(loss=steep, precision="float16", accumulate=2)
    with td.CheckpointManager(tmp_path) as checkpoints:
        step(batches(1)[0])
        sums = {n: v for n, v in step.state_dict().items() if "accumulator:gradient" in n}
        assert not all(np.isfinite(v).all() for v in sums.values())
        checkpoints.save(step)
        assert step(batches(1)[0]).skipped
        checkpoints.save(step)
