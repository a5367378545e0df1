"""What users of other libraries write first: each is a named error with the remedy, or works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import treadle as td
from refusals import refused
from treadle import losses, metrics, nn, optim

X, Y = np.ones((4, 3), np.float32), np.zeros((4, 2), np.float32)
BATCH = {"x": X, "y": Y}


def loss(model, batch):
    return losses.mse(model(batch["x"]), batch["y"])


def compiled(**options: Any) -> td.TrainStep:
    return td.compile_step(nn.Linear(3, 2), loss, optim.sgd(0.1), BATCH, device="oracle", **options)


STEP = compiled()
FORWARD = STEP.attach(lambda model, x: model(x), X)
DICT = 'a dict: {"x": ..., "y": ...}'


# A batch is one argument


@pytest.mark.parametrize(
    ("call", "operation", "said"),
    [
        (lambda: STEP(X, Y), "step", (DICT, "captures is of ndarray")),
        (lambda: STEP(BATCH, False, Y), "step", (DICT, "grad_norms")),
        (lambda: STEP.evaluate(X, Y), "evaluate", (DICT, "captures")),
        (lambda: FORWARD(X, Y), "function", ("on_device", "an array")),
        (lambda: STEP((X, Y)), "step", (DICT, "x is missing", "0 is unexpected")),
        (lambda: STEP([X, Y]), "step", (DICT,)),
        (lambda: STEP(X), "step", (DICT, "x: float32[4,3]")),
        (lambda: STEP.gradients((X, Y)), "gradients", (DICT,)),
    ],
    ids=range(8),
)
def test_arrays_in_place_of_a_dict(call: Callable, operation: str, said: tuple[str, ...]) -> None:
    before = STEP.params
    refused(call, td.BatchError, operation, *said)
    assert all((STEP.params[n] == v).all() for n, v in before.items())
    assert STEP.count == 0


def test_flags_of_numpy_are_flags() -> None:
    step = compiled()
    assert step(BATCH, np.True_).captures == {}
    assert step.evaluate(BATCH, captures=np.False_).loss >= 0


def test_a_number_under_a_key_that_is_not_there() -> None:
    """It is not a list of numbers; what it may be meant as is said, and works."""
    remedy = "A number that changes is an input too: compile with td.Spec(()) for lr."
    refused(lambda: STEP({**BATCH, "lr": 0.1}), td.BatchError, "step", "lr is unexpected", remedy)
    with pytest.raises(td.BatchError) as caught:
        STEP({**BATCH, "lr": 0.1})
    assert "lists" not in str(caught.value)
    refused(lambda: STEP({"x": X.tolist(), "y": Y}), td.BatchError, "step", "use np.asarray")

    def scaled(model, batch):
        return loss(model, batch) * batch["scale"]

    spec = {**BATCH, "scale": td.Spec(())}
    step = td.compile_step(nn.Linear(3, 2), scaled, optim.sgd(0.0), spec, device="oracle")
    assert np.isclose(step({**BATCH, "scale": 2.0}).loss, 2 * step({**BATCH, "scale": 1.0}).loss)


# A name is one string


@pytest.mark.parametrize(
    ("call", "operation"),
    [
        (lambda: td.capture(["a"], td.ones(2)), "capture"),
        (lambda: td.capture(td.ones(2), "a"), "capture"),
        (lambda: td.metric(["a"], 1.0), "metric"),
        (lambda: STEP.hyperparameters[["lr"]], "hyperparameters"),
        (lambda: nn.Linear(2, 2).get_submodule(["a"]), "get_submodule"),
        (lambda: td.History()[["loss"]], "History"),
        (lambda: td.CheckpointManager("nowhere", metric=["loss"]), "CheckpointManager"),
        (lambda: metrics.Group([metrics.Accuracy()]), "Group"),
    ],
    ids=range(8),
)
def test_lists_where_a_name_is_wanted(call: Callable, operation: str) -> None:
    refused(call, td.ArgumentError, operation)


def test_lists_where_they_have_a_meaning() -> None:
    stopping = td.callbacks.EarlyStopping(["val/loss", "val/error"], mode="min")
    assert stopping.improvement.modes == {"val/loss": "min", "val/error": "min"}
    group = metrics.Group({"accuracy": metrics.Accuracy(), "f1": metrics.F1()})
    found = group.update(np.ones((3, 2)), np.ones(3, int), only="accuracy")
    assert list(found) == ["accuracy"]


# Tensors do not change


def assigned(x):
    x[0] = 1
    return x


def increased(x):
    x[0] += 1
    return x


def deleted(x):
    del x[0]


@pytest.mark.parametrize("change", [assigned, increased, deleted])
def test_assignment_to_a_part(change: Callable) -> None:
    given = (td.ones(3), None) if change is increased else (td.ones(3), nn.Parameter((3,)), None)
    for x in given:
        with pytest.raises(td.TraceError, match=r"td\.where\(mask, value, x\)") as caught:
            change(x) if x is not None else td.trace(change, td.Spec((3,)))
        assert f"in {change.__name__}]" in str(caught.value)


# Masks

VALUES = np.arange(24.0, dtype=np.float32).reshape(2, 3, 4)
ROWS, COLUMNS = np.array([True, False]), np.array([True, False, True])
MASKS = [
    VALUES > 5,
    ROWS,
    VALUES[..., 0] > 3,
    (0, COLUMNS),
    (slice(None), COLUMNS),
    (slice(None), [True, False, True]),
    (..., VALUES[0] > 3),
    (ROWS, ..., 0),
    (None, ROWS),
    (ROWS, slice(1, 3), [0]),
    np.zeros((2, 3, 4), bool),
]


@pytest.mark.parametrize("mask", MASKS, ids=range(len(MASKS)))
def test_masks_that_are_known_select(mask: Any) -> None:
    expected = VALUES[mask]
    np.testing.assert_array_equal(td.tensor(VALUES)[mask].numpy(), expected)
    program = td.compile(lambda x: x[mask], td.Spec(VALUES.shape), device="oracle")
    np.testing.assert_array_equal(program(VALUES), expected)


def test_a_mask_selects_on_the_cpu_with_its_gradient() -> None:
    mask = VALUES > 5
    f = td.compile(td.grad(lambda x: (x[mask] ** 2).sum()), td.Spec(VALUES.shape), device="cpu")
    np.testing.assert_array_equal(f(VALUES), np.where(mask, 2 * VALUES, 0))


@pytest.mark.parametrize(
    "mask",
    [np.ones(3, bool), (0, np.ones(2, bool)), (..., np.ones(3, bool)), np.ones((2, 4), bool)],
)
def test_masks_of_the_wrong_shape(mask: Any) -> None:
    remedy = "A mask has the sizes of the axes that it selects from."
    x = td.tensor(VALUES)
    refused(lambda: x[mask], td.ShapeError, "index", "float32[2,3,4]", remedy)


def test_traced_masks() -> None:
    """Their shape is looked at first; that they cannot select is said with the remedy."""
    spec, mask = td.Spec((3,)), td.Spec((4,), td.bool_)
    call = lambda: td.trace(lambda x, m: x[m], spec, mask)  # noqa: E731
    refused(call, td.ShapeError, "index", "a mask of shape (4,) for float32[3]")
    refused(lambda: td.trace(lambda x: x[x > 0], spec), td.DTypeError, "index", "td.where(mask")
    call = lambda: td.trace(lambda x, m: td.where(m, x, 0), spec, mask)  # noqa: E731
    refused(call, td.ShapeError, "where", "(4,)", "(3,)")
    call = lambda: td.trace(lambda x, m: x.masked_fill(m, 0), spec, mask)  # noqa: E731
    refused(call, td.ShapeError, "where", "(4,)", "(3,)")


# Places that are data


def test_a_traced_index_among_numbers() -> None:
    def function(x, position):
        return x[0, 0, position, 0], x[:, 1, position], x[..., position, :]

    spec = td.Spec(VALUES[None].shape), td.Spec((), td.int32)
    program = td.compile(function, *spec, device="oracle")
    for at in (0, 2, -1):
        found = program(VALUES[None], np.int32(at))
        expected = function(VALUES[None], at)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, b)


# Constants beyond float16


@pytest.mark.parametrize("device", ["oracle", "cpu"])
def test_constants_that_float16_cannot_hold_are_infinite(device: str) -> None:
    """As when they are cast; NumPy does not warn, and warnings are errors here."""

    def function(x):
        masked = td.where(x > 1, x, -1e9)
        return masked, x * 1e6, x + td.full((3,), -7e4, td.float16), x.masked_fill(x > 1, 1e30)

    x = np.array([0.5, 1.5, 2.0], np.float16)
    program = td.compile(function, td.Spec((3,), td.float16), device=device)
    masked, large, low, filled = program(x)
    np.testing.assert_array_equal(masked, [-np.inf, 1.5, 2.0])
    np.testing.assert_array_equal(large, np.full(3, np.inf))
    np.testing.assert_array_equal(low, np.full(3, -np.inf))
    np.testing.assert_array_equal(filled, [0.5, np.inf, np.inf])


@pytest.mark.slow
def test_a_mask_of_large_numbers_in_a_float16_step() -> None:
    """The masked scores of an attention: −1e9 is −∞ there, and the step is the float32 one."""
    rows = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    later = np.triu(np.ones((5, 5), bool), 1)

    def masked(model, x):
        h = model(x)
        scores = td.where(later, -1e9, h @ h.T)
        return losses.mse(td.softmax(scores) @ h, x)

    values = []
    for precision in ("float32", "float16"):
        step = td.compile_step(
            nn.Linear(4, 4), masked, optim.sgd(0.0), rows, device="cpu", precision=precision
        )
        values.append(step(rows).loss)
    assert np.isclose(*values, rtol=5e-3)
