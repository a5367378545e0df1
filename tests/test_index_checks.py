"""Labels, tokens and other indices of a batch that are out of range: an error before anything runs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import treadle as td
from treadle import losses, nn, optim
from treadle.domains.float64 import evaluate_float64
from treadle.domains.index_ranges import index_ranges
from treadle.ir.graph import Graph
from treadle.ir.rewrite import remove_dead_code
from treadle.nn.tracing import Inputs
from treadle.optim.append import Mode
from treadle.pipeline import CompileReport, StepRecipe, build_step
from treadle.step.index_checks import IndexChecks
from treadle.step.index_guard import FLAG, Guarded, Unlooked, guarded
from treadle.step.programs import UNWATCHED, Variants

Array = NDArray[Any]
Spec, i32 = td.Spec, td.int32
DEVICES = ["cpu", "oracle"]
TABLE = np.arange(20, dtype=np.float32).reshape(5, 4)


def ranges_of(f: Any, *specs: Spec) -> list[tuple[str, Any, Any]]:
    """Which numbers are allowed, and where if not everywhere, by input."""
    found = index_ranges(td.trace(f, *specs))
    return [(r.leaf, r.allowed, None if r.positions is None else list(r.positions)) for r in found]


# What is known: exact for every function that is linear in pieces

X = td.tensor(TABLE)
CHANGES: dict[str, Any] = {
    "as it comes": lambda i: i,
    "from one": lambda i: i - 1,
    "backwards": lambda i: 4 - i,
    "negated": lambda i: -i,
    "doubled": lambda i: i * 2,
    "doubled and moved": lambda i: 3 - 2 * i,
    "clamped": lambda i: td.clamp(i, 0, 4),
    "clamped too far": lambda i: td.clamp(i, -1, 7),
    "below": lambda i: td.minimum(i, 4),
    "absolute": lambda i: abs(i),
    "ignored": lambda i: td.where(i == -100, 0, i),
    "ignored otherwise": lambda i: td.where(i != 9, i, 2),
    "two are ignored": lambda i: td.where((i == 99) | (i == -1), 0, i),
    "no padding": lambda i: td.where(i >= 0, i, 0),
    "no padding at all": lambda i: td.where((i >= 0) & (i < 5), i, 0),
    "a window": lambda i: td.where(~((i > 10) & (i <= 20)), 1, i - 12),
    "wider": lambda i: i.astype(i32),
    "narrower": lambda i: i.astype(td.uint8),
    "signed": lambda i: i.astype(td.int8),
    "wider, then back": lambda i: (i.astype(i32) + 100).astype(td.uint8),
    "a flag": lambda i: (i > 3).astype(i32) * 5,
    "a flag of a number": lambda i: i.astype(td.bool_).astype(i32) + 4,
    "from the end": lambda i: td.where(i < 0, i + 5, i),
    "itself twice": lambda i: i + i,
    "stopped": lambda i: td.stop_gradient(i) + 1,
}  # fmt: skip


SIGNED = ("ignored", "two are ignored", "clamped too far")  # with constants below 0
EIGHT_BITS = [(n, d) for n in CHANGES for d in (td.int8, td.uint8)]
EIGHT_BITS = [(n, d) for n, d in EIGHT_BITS if n not in SIGNED or d is td.int8]


@pytest.mark.parametrize(("name", "dtype"), EIGHT_BITS, ids=str)
def test_what_is_allowed_is_what_leads_into_the_axis(name: str, dtype: td.DType) -> None:
    """Every number of 8 bits, beside what the oracle makes of it."""
    low, high = dtype.range()
    numbers = np.arange(low, high + 1).astype(dtype.numpy)
    index = evaluate_float64(td.trace(CHANGES[name], Spec(numbers.shape, dtype)), {"i": numbers})[0]
    right = numbers[(index >= 0) & (index < 5)].tolist()
    found = ranges_of(lambda i: td.take(X, CHANGES[name](i)), Spec((3,), dtype))
    allowed = [(low, high)] if not found else found[0][1]
    assert [n for a, b in allowed for n in range(a, b + 1)] == right


def test_wide_integers_do_not_wrap_into_the_axis() -> None:
    spec = Spec((3,), td.int64)
    assert ranges_of(lambda i: td.take(X, i.astype(i32)), spec) == [("i", ((0, 4),), None)]
    assert ranges_of(lambda i: td.take(X, i * 3), spec) == [("i", ((0, 1),), None)]
    assert ranges_of(lambda i: td.take(X, i), Spec((3,), td.uint32)) == [("i", ((0, 4),), None)]

    def signed(i: Any) -> Any:
        index = i.astype(i32)
        return td.take(X, td.where(index == -1, 0, index))

    allowed = ((0, 4), (2**32 - 1, 2**32 - 1))
    assert ranges_of(signed, Spec((3,), td.uint32)) == [("i", allowed, None)]


NOT_CLAIMED: dict[str, Any] = {
    "a remainder": lambda i, m: td.take(X, i % 5),
    "a quotient": lambda i, m: td.take(X, i // 5),
    "another input decides": lambda i, m: td.take(X, td.where(m == 1, i, 0)),
    "two inputs": lambda i, m: td.take(X, i + m),
    "a sum": lambda i, m: td.take(X, i.sum()),
    "the largest": lambda i, m: td.take(X, i.max()),
    "a position is added": lambda i, m: td.take(X, i + td.arange(3)),
    "starts of a slice": lambda i, m: td.dynamic_slice(X, i[:2], (2, 2)),
    "through a float": lambda i, m: td.take(X, (i.astype(td.float32) * 2).astype(i32)),
    "narrow on purpose": lambda i, m: td.take(td.arange(256), i.astype(td.uint8)),
    "not an index": lambda i, m: (i * 2, m == 3),
    "nothing is indexed": lambda i, m: td.take(X, i[:0]),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_CLAIMED)
def test_of_what_is_computed_nothing_is_claimed(name: str) -> None:
    assert ranges_of(NOT_CLAIMED[name], Spec((3,), i32), Spec((3,), i32)) == []


def test_inputs_that_meet_at_the_same_element_only() -> None:
    """Two rows of one input are two inputs: a comparison of one says nothing of the other."""

    def crossed(i: Any) -> Any:
        return td.take(X, td.where(i[0] == 7, 0, i[1]))

    assert ranges_of(crossed, Spec((2, 3), i32)) == []

    def rows(i: Any) -> Any:
        def outer(total: Any, a: Any) -> Any:
            def inner(carry: Any, b: Any) -> Any:
                return carry + td.take(X, td.where(a == 7, 0, b)).sum(), None

            return td.scan(inner, total, i)[0], None

        return td.scan(outer, 0.0, i)[0]

    assert ranges_of(rows, Spec((6,), i32)) == []


# Where elements go


MOVED: dict[str, tuple[Any, Any]] = {
    "reshaped": (lambda t: t.reshape(-1), None),
    "permuted and flipped": (lambda t: td.flip(t.permute(1, 0), 0), None),
    "broadcast": (lambda t: t + td.zeros((3, 1, 1), i32), None),
    "padded": (lambda t: td.pad(t, ((1, 0), (0, 2))), None),
    "stacked": (lambda t: td.stack([t, t * 0]), None),
    "a column": (lambda t: t[:, 1], [1, 5]),
    "every other": (lambda t: t[:, ::2], [0, 2, 4, 6]),
    "backwards": (lambda t: t[1, ::-1], [4, 5, 6, 7]),
    "all but the last": (lambda t: t[:, :-1], [0, 1, 2, 4, 5, 6]),
    "moved right": (
        lambda t: td.concat([td.zeros((2, 1), i32), t[:, :-1]], 1),
        [0, 1, 2, 4, 5, 6],
    ),
    "both sides": (lambda t: td.concat([t[:, :-1], t[:, 1:]], 0), None),
    "an odd part": (lambda t: td.concat([t[0], t[1, :1]], 0), [0, 1, 2, 3, 4]),
    "a part of a pad": (lambda t: td.pad(t, ((0, 0), (2, 0)))[:, :3], [0, 4]),
    "parts that are joined again": (lambda t: td.concat(td.chunk(t, 2, 1), 1), None),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVED)
def test_elements_are_followed_through_moves(name: str) -> None:
    moved, places = MOVED[name]
    found = ranges_of(lambda t: td.embedding(moved(t), X), Spec((2, 4), i32))
    assert found == [("t", ((0, 4),), places)]
    wrong = np.zeros((2, 4), np.int32)
    wrong.flat[(places or [7])[-1]] = 9
    program = td.compile(lambda t: td.embedding(moved(t), X), Spec((2, 4), i32), device="oracle")
    with pytest.raises(td.IndexRangeError, match=r"0\[\d, \d\] is 9"):
        program(wrong)
    if places is not None:
        others = np.full((2, 4), 9, np.int32)
        others.flat[places] = 3
        program(others)


def test_scans_and_calls_are_entered() -> None:
    def rows(t: Any) -> Any:
        return td.scan(lambda c, row: (c + td.take(X, row[:2]).sum(), None), 0.0, t)[0]

    assert ranges_of(rows, Spec((2, 3), i32)) == [("t", ((0, 4),), [0, 1, 3, 4])]

    def carried(t: Any) -> Any:
        return td.scan(lambda c, _: ((c + 1) % 5, td.take(X, c)), t, None, length=3)[1]

    assert ranges_of(carried, Spec((2,), i32)) == [("t", ((0, 4),), None)]

    def constant(t: Any) -> Any:
        return td.scan(lambda c, row: (c + td.take(X, t - 1).sum() * row, None), 0.0, td.ones(3))[0]

    assert ranges_of(constant, Spec((2,), i32)) == [("t", ((1, 5),), None)]

    def again(t: Any) -> Any:
        return td.checkpoint(lambda w, i: td.embedding(i, w).sum())(X, t)

    assert ranges_of(again, Spec((2,), i32)) == [("t", ((0, 4),), None)]


def test_several_uses_of_one_input() -> None:
    """The same range is looked at once; of two, the narrower."""

    def both(t: Any) -> Any:
        return td.take(X, t), td.embedding(t, td.ones((9, 2))), td.one_hot(t[:1], 3)

    found = ranges_of(both, Spec((4,), i32))
    assert found == [("t", ((0, 4),), None), ("t", ((0, 2),), [0])]


# Every op that takes indices, on every device

LOGITS = np.zeros((3, 4), np.float32)
LABELS = np.array([0, 3, 1], np.int32)
OPS: dict[str, tuple[Any, list[int], list[int], str]] = {
    "take": (lambda y: td.take(X, y), [0, 4], [-1, 5], "gather has 5"),
    "x[i]": (lambda y: X[y], [-5, 4], [-6, 5], "gather has 5"),
    "x[:, i]": (lambda y: X[:, y], [-4, 3], [-5, 4], "gather has 4"),
    "x[i, j]": (lambda y: X[y, td.arange(3)], [-5, 4], [-6, 5], "gather has 5"),
    "x[j, i]": (lambda y: X[td.arange(3), y], [-4, 3], [-5, 4], "gather has 4"),
    "x[i, i]": (lambda y: X[y, y], [-4, 3], [-5, 4], "gather has 4"),
    "take_along_axis": (
        lambda y: td.take_along_axis(X[:3], y[:, None], 1), [0, 3], [-1, 4], "gather has 4",
    ),
    "scatter_add": (
        lambda y: td.scatter_add(X, y, td.ones((3, 4))), [0, 4], [-1, 5], "scatter_add has 5",
    ),
    "one_hot": (lambda y: td.one_hot(y, 6), [0, 5], [-1, 6], "one_hot has 6 classes"),
    "embedding": (lambda y: td.embedding(y, X), [0, 4], [-1, 5], "embedding has 5 rows"),
    "cross_entropy": (
        lambda y: losses.cross_entropy(td.tensor(LOGITS), y),
        [0, 3, -100], [-1, 4, -99], "cross_entropy has 4 classes",
    ),
    "cross_entropy that ignores": (
        lambda y: losses.cross_entropy(td.tensor(LOGITS), y, ignore_index=7),
        [0, 3, 7], [-1, 4, -100], "cross_entropy has 4 classes",
    ),
    "cross_entropy by weight, smoothed": (
        lambda y: losses.cross_entropy(
            td.tensor(LOGITS), y, weight=td.ones(4), label_smoothing=0.1, reduction="sum"
        ),
        [0, 3, -100], [-1, 4], "gather has 4",
    ),
    "nll": (
        lambda y: losses.nll(td.tensor(LOGITS), y, ignore_index=-1),
        [0, 3, -1], [-2, 4, -100], "gather has 4",
    ),
    "linear_cross_entropy": (
        lambda y: losses.linear_cross_entropy(td.tensor(LOGITS), X, y),
        [0, 4, -100], [-1, 5], "linear_cross_entropy has 5 classes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPS)
def test_every_op_that_takes_indices(name: str, device: str) -> None:
    function, right, wrong, what = OPS[name]
    program = td.compile(function, Spec((3,), i32), device=device)
    for value in right:
        program(np.array([0, value, 1], np.int32))
    for value in wrong:
        with pytest.raises(td.IndexRangeError) as caught:
            program(np.array([0, value, 1], np.int32))
        for part in (f"0[1] is {value},", what, "test_index_checks.py", "Count from"):
            assert part in str(caught.value)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [td.int8, td.uint8, td.int32, td.uint32, td.int64], ids=str)
def test_every_integer(dtype: td.DType, device: str) -> None:
    program = td.compile(lambda y: td.embedding(y, X), Spec((3,), dtype), device=device)
    low, high = dtype.range()
    for value in (0, 4):
        assert program(np.full(3, value, dtype.numpy)).shape == (3, 4)
    for value in {5, 127, low, high} - {0}:
        with pytest.raises(td.IndexRangeError, match=rf"0\[0\] is {value},"):
            program(np.full(3, value, dtype.numpy))


def test_arrays_of_every_kind() -> None:
    program = td.compile(lambda y: td.embedding(y, X), Spec((2, 3), i32))
    wide = np.zeros((2, 6), np.int64)
    kinds: dict[str, Array] = {
        "another width": wide[:, :3].copy(),
        "bytes": wide[:, :3].astype(np.uint8),
        "strided": wide[:, ::2].astype(np.int32)[:, :3],
        "a view": wide.astype(np.int32)[:, ::2],
        "read backwards": wide.astype(np.int32)[:, 5:2:-1],
        "in Fortran's order": np.asfortranarray(wide[:, :3].astype(np.int32)),
        "of the other byte order": wide[:, :3].astype(">i4"),
    }
    for name, array in kinds.items():
        program(array)
        array[1, 2] = 5
        with pytest.raises(td.IndexRangeError, match=r"0\[1, 2\] is 5,"):
            program(array)
        assert array[1, 2] == 5, name
    long = td.compile(lambda y: td.take(td.zeros(1000), y), Spec((3,), i32))
    for dtype in (np.int8, np.int16, np.int64):
        long(np.array([0, 1, 127], dtype))
        with pytest.raises(td.IndexRangeError, match=r"0\[1\] is -1,"):
            long(np.array([0, -1, 2], dtype))
    one = td.compile(lambda y: td.take(X, y), Spec((), i32))
    with pytest.raises(td.IndexRangeError, match="0 is 6,"):
        one(np.int32(6))


@pytest.mark.parametrize("ignored", [-100, 2, 7])
@pytest.mark.parametrize("weight", [None, np.ones(4, np.float32)], ids=["plain", "weighted"])
def test_labels_that_pytorch_takes(ignored: int, weight: Array | None) -> None:
    """And no others."""

    def loss(x: Any, y: Any) -> Any:
        return losses.cross_entropy(x, y, weight=weight, ignore_index=ignored, reduction="sum")

    program = td.compile(loss, Spec((3, 4)), Spec((3,), td.int64))
    torch_weight = None if weight is None else torch.tensor(weight)
    logits = np.linspace(-1, 2, 12, dtype=np.float32).reshape(3, 4)
    for value in (-101, -100, -1, 0, 3, 4, 7):
        labels = np.array([1, value, 0])
        try:
            expected = torch.nn.functional.cross_entropy(
                torch.tensor(logits), torch.tensor(labels), torch_weight,
                ignore_index=ignored, reduction="sum",
            )  # fmt: skip
        except IndexError:
            with pytest.raises(td.IndexRangeError, match=rf"1\[1\] is {value},"):
                program(logits, labels)
            continue
        np.testing.assert_allclose(program(logits, labels), expected.numpy(), rtol=1e-5)


ROWS: dict[str, Any] = {
    "reshaped": lambda p, y: (p.reshape(24, 5), y.reshape(24)),
    "reshaped and permuted": lambda p, y: (p.reshape(6, 4, 5).permute(0, 2, 1), y.reshape(6, 4)),
    "permuted": lambda p, y: (p.permute(0, 3, 1, 2), y),
    "permuted and reshaped": lambda p, y: (p.permute(1, 0, 2, 3).reshape(24, 5), y.permute(1, 0, 2).reshape(24)),
}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ignored", [-100, 77])
@pytest.mark.parametrize("name", ROWS)
def test_labels_that_a_loss_ignores_are_taken_wherever_its_rows_are(
    name: str, ignored: int, device: str
) -> None:
    """A cross-entropy that is recognised asks of labels what was written, and no more."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 3, 4, 5)).astype(np.float32), rng.integers(0, 5, (2, 3, 4))
    y[0, 0, 0] = y[1, 2, 3] = ignored

    def loss(x: td.Tensor, y: td.Tensor) -> td.Tensor:
        logs, labels = ROWS[name](td.log_softmax(x, -1), y)
        return losses.nll(logs, labels, ignore_index=ignored)

    specs = Spec(x.shape), Spec(y.shape, td.int64)
    compiled = td.compile(td.value_and_grad(loss), *specs, device=device)
    value, gradient = compiled(x, y)
    given = torch.tensor(x, requires_grad=True)
    logs, labels = ROWS[name](torch.log_softmax(given, -1), torch.tensor(y))
    expected = torch.nn.functional.nll_loss(logs.contiguous(), labels, ignore_index=ignored)
    expected.backward()
    np.testing.assert_allclose(value, expected.item(), rtol=1e-5)
    np.testing.assert_allclose(gradient, given.grad.numpy(), rtol=1e-5, atol=1e-7)
    y[0, 1, 1] = 5
    with pytest.raises(td.IndexRangeError, match=r"\[0, 1, 1\] is 5"):
        compiled(x, y)


def test_an_index_into_all_rows_may_reach_the_next() -> None:
    """What is added to a row's start is no label of that row, though a cross-entropy's would be."""
    x = np.random.default_rng(0).normal(size=(4, 16)).astype(np.float32)

    def loss(x: td.Tensor, y: td.Tensor) -> td.Tensor:
        flat = td.log_softmax(x, -1).reshape(64)
        return -td.take(flat, td.arange(4) * 16 + y, 0)

    y = np.array([20, 3, -2, 0])
    compiled = td.compile(loss, Spec((4, 16)), Spec((4,), td.int64), device="cpu")
    logs = torch.log_softmax(torch.tensor(x), -1).numpy()
    expected = -logs.reshape(64)[np.arange(4) * 16 + y]
    np.testing.assert_allclose(compiled(x, y), expected, rtol=1e-5)


# Steps


class Tokens(nn.Module):
    def __init__(self) -> None:
        self.table, self.scores = nn.Embedding(7, 4), nn.Linear(4, 5)

    def forward(self, x: Any) -> Any:
        return self.scores(self.table(x).mean(1))


def loss(model: Any, batch: Any) -> Any:
    return losses.cross_entropy(model(batch["x"]), batch["y"])


def batch_of(dtype: type = np.int32, **changed: int) -> dict[str, Array]:
    batch = {"x": np.full((8, 3), 6, dtype), "y": np.full(8, 4, dtype)}
    for name, value in changed.items():
        batch[name].flat[5] = value
    return batch


def step_of(device: str = "cpu", accumulate: int = 1, **options: Any) -> td.TrainStep:
    return td.compile_step(
        Tokens(), loss, optim.adamw(0.1), batch_of(), device=device, accumulate=accumulate,
        options=td.CompileOptions(**options),
    )  # fmt: skip


def is_unchanged(step: td.TrainStep, before: dict[str, Array]) -> bool:
    after = step.state_dict()
    return all(np.array_equal(v, after[n], equal_nan=True) for n, v in before.items())


WRONG = [("x", 7), ("x", -1), ("y", 5), ("y", -1)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_step_that_is_refused_changes_nothing(name: str, value: int, device: str) -> None:
    step = step_of(device)
    step(batch_of())
    before = step.state_dict()
    attached = step.attach(loss, batch_of())
    calls = {
        "step": step, "evaluate": step.evaluate, "gradients": step.gradients,
        "run": lambda b: step.run([b]), "loss": attached, "find_anomaly": step.find_anomaly,
    }  # fmt: skip
    place, what = ("x[1, 2]", "embedding has 7 rows") if name == "x" else ("y[5]", "5 classes")
    for operation, call in calls.items():
        with pytest.raises(td.IndexRangeError) as caught:
            call(batch_of(**{name: value}))
        for part in (f"{operation}: {place} is {value}, and", what, "test_index_checks.py"):
            assert part in str(caught.value)
        assert is_unchanged(step, before)
    assert step.count == 1
    assert np.isfinite(step(batch_of()).loss)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_a_run_stops_at_the_batch_that_is_refused(device: str, lazy: bool) -> None:
    """What came before it is done, and nothing of it."""
    step, other = step_of(device), step_of(device)
    batches = [batch_of(), batch_of(y=2), batch_of(y=9), batch_of()]
    with pytest.raises(td.IndexRangeError, match=r"run: y\[5\] is 9"):
        step.run(iter(batches) if lazy else batches)
    other.run(batches[:2])
    assert step.count == 2
    assert is_unchanged(step, other.state_dict())


def test_micro_steps_that_are_refused_do_not_count() -> None:
    step = step_of(accumulate=2)
    step(batch_of())
    with pytest.raises(td.IndexRangeError):
        step(batch_of(x=7))
    assert (step.micro_step, step.count) == (1, 0)
    assert step(batch_of()).updated


def test_what_is_ignored_passes() -> None:
    assert np.isfinite(step_of()(batch_of(y=-100)).loss)


@pytest.mark.parametrize("value", [-1, 5, 10**6])
def test_checks_can_be_turned_off(value: int) -> None:
    step = step_of(check_indices=False)
    for name in "xy":
        assert np.isfinite(step(batch_of(**{name: value})).loss)
        assert np.isfinite(step.evaluate(batch_of(**{name: value})).loss)
    assert np.isfinite(step.attach(loss, batch_of())(batch_of(y=value)))


def test_debugging_is_for_computed_indices() -> None:
    """Inputs are looked at before, whatever is computed from them after."""

    def computed(model: Any, batch: Any) -> Any:
        return losses.cross_entropy(model(batch["x"] * batch["by"]), batch["y"])

    batch = batch_of() | {"by": np.ones((8, 3), np.int32)}
    wrong = batch | {"by": np.full((8, 3), 2, np.int32)}

    def compiled(**options: Any) -> td.TrainStep:
        chosen = td.CompileOptions(**options)
        return td.compile_step(Tokens(), computed, optim.sgd(0.1), batch, options=chosen)

    assert np.isfinite(compiled()(wrong).loss)
    step = compiled(debug=True)
    before = step.state_dict()
    with pytest.raises(td.IndexRangeError, match="indices from 12 to 12 for an axis of 7"):
        step(wrong)
    with pytest.raises(td.IndexRangeError, match=r"step: y\[5\] is 5"):
        step(batch | {"y": batch_of(y=5)["y"]})
    assert is_unchanged(step, before)


def test_batches_that_are_not_flat() -> None:
    def nested(model: Any, batch: Any) -> Any:
        return losses.cross_entropy(model(batch[0]["x"]), batch[1])

    def pair(**changed: int) -> tuple[Any, Any]:
        batch = batch_of(**changed)
        return {"x": batch["x"]}, batch["y"]

    step = td.compile_step(Tokens(), nested, optim.sgd(0.1), pair())
    step(pair())
    for name, shown in (("x", r"0\.x\[1, 2\]"), ("y", r"1\[5\]")):
        with pytest.raises(td.IndexRangeError, match=rf"{shown} is 50"):
            step(pair(**{name: 50}))


def test_new_shapes_are_looked_at_too() -> None:
    step = step_of(on_new_shape="specialise")
    small = {name: array[:4] for name, array in batch_of().items()}
    step(small)
    small["y"][3] = 5
    with pytest.raises(td.IndexRangeError, match=r"y\[3\] is 5"):
        step(small)


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt_nano", "lstm"])
def test_workloads_of_the_benchmarks(name: str) -> None:
    """What the user wrote is named, not what its gradient uses; and their batches pass."""
    path = Path(__file__).parents[1] / "bench" / "models.py"
    source = importlib.util.spec_from_file_location("bench_models", path)
    assert source is not None
    assert source.loader is not None
    models = importlib.util.module_from_spec(source)
    sys.modules["bench_models"] = models
    source.loader.exec_module(models)
    workload = models.WORKLOADS[name]
    recipe = StepRecipe(
        workload.make(), models.loss, optim.sgd(0.1), "step0:", 1, None, td.float32,
        td.CompileOptions(),
    )  # fmt: skip
    report = CompileReport("cpu", "float32")
    inputs = Inputs.of(workload.specs())
    graph = build_step(recipe, recipe.plan(), inputs, report)[Mode.UPDATE]
    checks = IndexChecks(graph)
    found = [(c.range.leaf, c.range.op, c.range.size, c.part) for c in checks.checks]
    labels = ("batch:y", "cross_entropy", workload.classes, None)
    tokens = [("batch:x", "embedding", workload.classes, None)] if workload.tokens else []
    assert found == [*tokens, labels]
    checks.check("step", {f"batch:{n}": a for n, a in workload.batch().items()})


def test_trainers_look_too() -> None:
    trainer = td.Trainer(step_of(), progress="off")
    with pytest.raises(td.IndexRangeError, match=r"y\[5\] is 9"):
        trainer.fit([batch_of(), batch_of(y=9)], epochs=1)
    assert trainer.step.count == 1
    trainer = td.Trainer(step_of(), progress="off")
    with pytest.raises(td.IndexRangeError, match=r"evaluate: y\[5\] is 9"):
        trainer.fit([batch_of()], epochs=1, validation=[batch_of(y=9)])
    with pytest.raises(td.IndexRangeError, match=r"x\[1, 2\] is 7"):
        trainer.predict([{"x": batch_of(x=7)["x"]}])
    loose = td.Trainer(step_of(check_indices=False), progress="off")
    loose.fit([batch_of(y=9)], epochs=1)
    assert loose.predict([{"x": batch_of(x=7)["x"]}]).shape == (8, 5)


# Programs that look themselves: what a GPU runs when the indices are there already


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_guarded_program_writes_nothing_if_an_index_is_wrong(accumulate: int) -> None:
    step = step_of(accumulate=accumulate)
    variants = step._programs.built(step._inputs)
    mode = Mode.UPDATE if accumulate == 1 else Mode.ACCUMULATE
    on_device = Variants(variants.graphs, step.report, step.recipe.options, on_device=True)
    program = on_device.step(mode, UNWATCHED)
    before = step.state_dict()
    for name, value in [*WRONG, ("y", -99), ("y", 2**31 - 1), ("x", -(2**31))]:
        arrays = {f"batch:{n}": a for n, a in batch_of(**{name: value}).items()}
        assert not step.session.run(program, arrays)[f"result:{FLAG}"]
        assert is_unchanged(step, before)
    right = {f"batch:{n}": a for n, a in batch_of(y=-100).items()}
    outputs = step.session.run(program, right)
    assert outputs[f"result:{FLAG}"]
    assert not is_unchanged(step, before)
    assert outputs["result:loss"] == step_of(accumulate=accumulate)(batch_of(y=-100)).loss


@pytest.mark.parametrize("name", MOVED)
def test_a_guarded_program_looks_at_what_is_used(name: str) -> None:
    moved, places = MOVED[name]
    graph = td.trace(lambda t: td.embedding(moved(t), X) + 0, Spec((2, 4), i32))
    flagged = guarded(graph, IndexChecks(graph))
    right = np.full((2, 4), 3 if places is None else 9, np.int32)
    right.flat[places or []] = 3
    wrong = right.copy()
    wrong.flat[(places or [7])[-1]] = 5
    # The flag alone: on the way to the rest the oracle would raise.
    alone = remove_dead_code(Graph(flagged.nodes, flagged.outputs[-1:], "flag"))
    assert flagged.outputs[-1].name == FLAG
    assert evaluate_float64(alone, {"t": right})[0]
    assert not evaluate_float64(alone, {"t": wrong})[0]


def test_an_error_comes_when_results_are_looked_at_or_some_steps_later() -> None:
    def refuse() -> None:
        raise td.IndexRangeError("step", "y[0] is 9")

    right, wrong = ({f"result:{FLAG}": flag, "result:loss": 1.0} for flag in (True, False))
    assert dict(Guarded(right, refuse)) == {"result:loss": 1.0}
    with pytest.raises(td.IndexRangeError):
        Guarded(wrong, refuse)["result:loss"]

    class Looked:
        indices = IndexChecks(td.trace(lambda y: td.take(X, y), Spec((2,), i32)))

    arrays, counted = {"y": np.array([1, 9])}, [0]

    def undo() -> None:
        counted[0] -= 1

    waiting = Unlooked()
    told = waiting.add("step", Looked(), arrays, wrong, undo)
    with pytest.raises(td.IndexRangeError, match=r"y\[1\] is 9"):
        told.look()
    waiting.add("step", Looked(), arrays, wrong, undo)
    for _ in range(3):
        waiting.look()
        waiting.add("step", Looked(), arrays, right)
    with pytest.raises(td.IndexRangeError, match=r"y\[1\] is 9"):
        waiting.look()
    assert counted == [-2]
    arrays["y"][1] = 0
    with pytest.raises(td.IndexRangeError, match="was out of range when the program ran"):
        waiting.add("step", Looked(), arrays, wrong).look()
