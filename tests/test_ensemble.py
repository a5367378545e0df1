"""Ensembles: each member is what its own step would be, and all of them are one program."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import treadle as td
from cuda_backend import needs_gpu
from refusals import refused
from treadle import losses, nn, optim

ROWS, RATES = 6, [1e-3, 3e-2, 1e-2]
SPECS = {"x": td.Spec((ROWS, 5)), "y": td.Spec((ROWS,), td.int32)}


class Net(nn.Module):
    """What can go wrong: noise, statistics, and a rate of dropping that is a value."""

    def __init__(self) -> None:
        self.first, self.norm = nn.Linear(5, 7), nn.BatchNorm1d(7)
        self.drop, self.last = nn.Dropout(0.2), nn.Linear(7, 3)
        self.rate = nn.State((), nn.init.zeros)

    def forward(self, x: td.Tensor) -> td.Tensor:
        # A bias right before a norm would have no gradient but rounding, which AdamW makes large.
        hidden = self.norm(td.tanh(self.first(x)))
        if self.training:
            hidden = td.where(td.random.uniform(hidden.shape) < self.rate, 0.0, hidden)
        return self.last(self.drop(hidden))


def loss(model: Net, batch: dict[str, td.Tensor]) -> td.Tensor:
    scores = model(batch["x"])
    td.metric("largest", td.max(scores))
    return losses.cross_entropy(scores, batch["y"])


def compiled(**options: Any) -> td.TrainStep:
    return td.compile_step(Net(), loss, optim.adamw(1e-3), SPECS, **({"clip_norm": 1.0} | options))


def batches(count: int, *lead: int) -> list[dict[str, np.ndarray]]:
    draw = np.random.default_rng(3)
    return [
        {
            "x": draw.normal(size=(*lead, ROWS, 5)).astype(np.float32),
            "y": draw.integers(0, 3, (*lead, ROWS)).astype(np.int32),
        }
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def step() -> td.TrainStep:
    return compiled(device="oracle")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_each_member_is_its_own_training(device) -> None:
    step, data = compiled(device=device), batches(4)
    many = td.ensemble(step, 3, seeds=[4, 0, 9], lr=RATES, weight_decay=0.1)
    told = [many(batch) for batch in data[:2]]
    found = np.concatenate([np.stack([t.losses for t in told]), many.run(data[2:])])  # (4, n)
    assert told[0].metrics["largest"].shape == told[0].grad_norms.shape == (3,)
    assert told[0].loss == pytest.approx(told[0].losses.mean())
    for i, (seed, rate) in enumerate(zip([4, 0, 9], RATES, strict=True)):
        step.reset(seed)
        step.hyperparameters["weight_decay"] = 0.1
        step.hyperparameters["lr"] = rate
        np.testing.assert_allclose(found[:, i], [step(b).loss for b in data], rtol=1e-5)
        state = step.state_dict()
        for name, value in many.member_state(i).items():
            np.testing.assert_allclose(value, state[name], rtol=1e-4, atol=1e-6, err_msg=name)
        evaluated = many.evaluate(data[0]).losses[i]
        assert evaluated == pytest.approx(step.evaluate(data[0]).loss, rel=1e-5)
    assert many.count.tolist() == [4, 4, 4]


def test_a_member_goes_on_by_itself_and_the_ensemble_from_a_file(step, tmp_path) -> None:
    data = batches(3)
    many = td.ensemble(step, 2)
    many.run(data[:2])
    many.save(tmp_path / "many.safetensors")
    one = many.member(-1)
    expected = many(data[2]).losses
    assert one(data[2]).loss == pytest.approx(float(expected[-1]), rel=1e-5)
    again = td.ensemble(step, 2, seeds=[7, 8])
    again.load(tmp_path / "many.safetensors")
    assert again.seeds == many.seeds
    np.testing.assert_array_equal(again(data[2]).losses, expected)


def test_members_may_begin_with_the_values_of_a_step(step) -> None:
    data = batches(2)
    step.reset(3)
    step(data[0])
    before = step.state_dict()
    many = td.ensemble(step, 2, fresh=False, seeds=[3, 4])
    assert many.evaluate(data[1]).losses.std() == 0  # the same values
    assert many(data[1]).losses.std() > 0  # and noise of their own
    np.testing.assert_array_equal(step.state_dict()["first.weight"], before["first.weight"])
    assert many.member_state(0)["step:count"] == 2


def test_batches_of_their_own_and_values_that_differ() -> None:
    step = compiled(accumulate=2, clip_norm=None, device="oracle")
    data = batches(4, 2)
    many = td.ensemble(step, 2, own_batches=True)
    many.load_params({"rate": np.array([0.0, 0.5], np.float32)}, strict=False)
    found = np.stack([many(batch).losses for batch in data])
    for i in range(2):
        step.reset(i)
        step.load_params({"rate": np.float32([0.0, 0.5][i])}, strict=False)
        own = [{name: value[i] for name, value in batch.items()} for batch in data]
        np.testing.assert_allclose(found[:, i], [step(b).loss for b in own], rtol=1e-6)
    assert many.count.tolist() == [2, 2]


def test_other_shapes_bring_their_own_accumulators() -> None:
    def counted(model: nn.Module, x: td.Tensor) -> td.Tensor:
        out = model(x)
        td.metric(f"of {x.shape[0]}", out.mean())
        return (out**2).mean()

    options = td.CompileOptions(on_new_shape="specialise")
    step = td.compile_step(
        nn.Linear(3, 1),
        counted,
        optim.sgd(0.1),
        td.Spec((4, 3)),
        accumulate=2,
        device="oracle",
        options=options,
    )
    many = td.ensemble(step, 2)
    rows = np.ones((4, 3), np.float32)
    told = [many(rows[:n]) for n in (4, 4, 2, 2)]
    assert [list(t.metrics) for t in told] == [["of 4"], ["of 4"], ["of 2"], ["of 2"]]
    assert many.count.tolist() == [2, 2]
    for i in range(2):
        step.reset(i)
        own = [step(rows[:n]).loss for n in (4, 4, 2, 2)]
        np.testing.assert_allclose([t.losses[i] for t in told], own, rtol=1e-6)


def test_predictions_are_combined(step) -> None:
    many = td.ensemble(step, 3)
    (batch,) = batches(1)
    predicted = many.attach(lambda model, x: model(x), td.Spec((ROWS, 5)))
    scores = predicted(batch["x"])
    assert scores.shape == (3, ROWS, 3)
    np.testing.assert_allclose(predicted.mean(batch["x"]), scores.mean(0), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(predicted.std(batch["x"]), scores.std(0), rtol=1e-5)
    votes = scores.argmax(-1)
    expected = [np.bincount(votes[:, row], minlength=3).argmax() for row in range(ROWS)]
    np.testing.assert_array_equal(predicted.vote(batch["x"]), expected)
    member = many.member(1).attach(lambda model, x: model(x), td.Spec((ROWS, 5)))
    np.testing.assert_allclose(scores[1], member(batch["x"]), rtol=1e-5, atol=1e-6)


def test_what_no_ensemble_can_be(step) -> None:
    refused(lambda: td.ensemble(Net(), 2), td.ArgumentError, "ensemble", "compile_step")
    refused(
        lambda: td.ensemble(step, 3, seeds=[1, 2]), td.ArgumentError, "ensemble", "2 seeds for 3"
    )
    watched = compiled(device="oracle", options=td.CompileOptions(detect_anomaly=True))
    refused(lambda: td.ensemble(watched, 2), td.ArgumentError, "ensemble", "find_anomaly")
    many = td.ensemble(step, 2)

    def numbers(**given: Any) -> Any:
        return lambda: many.hyperparameters.update(given)

    refused(numbers(momentum=0.9), td.ArgumentError, "ensemble", "momentum", "weight_decay")
    refused(numbers(lr=[1, 2, 3]), td.ShapeError, "ensemble", "3 values for 2")
    refused(numbers(lr=[0.1, -1.0]), td.ArgumentError, "adamw", "lr")
    refused(lambda: many.member(2), td.ArgumentError, "ensemble", "no member 2", "0 to 1")
    state = step.state_dict()
    refused(lambda: many.load_state_dict(state), td.LoadError, "load_state_dict", "2 members")
