"""Indices out of range on a GPU: on the host before a step, on the device with its results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import treadle as td
from cuda_backend import needs_gpu
from test_index_checks import batch_of, is_unchanged, loss, step_of
from treadle.step.index_guard import AHEAD

pytestmark = needs_gpu


def there(batch: dict[str, np.ndarray]) -> dict[str, Any]:
    """The batch on the device."""
    specs = {n: td.Spec(a.shape, td.int32) for n, a in batch.items()}
    move = td.compile_forward(
        {}, lambda model, b: {n: t + 0 for n, t in b.items()}, specs, device="cuda"
    )
    moved = move(batch, on_device=True)
    assert not any(type(a) is np.ndarray for a in moved.values())
    return moved


@pytest.mark.parametrize(("name", "value"), [("x", 7), ("x", -1), ("y", 5), ("y", -1)])
def test_arrays_on_the_host(name: str, value: int) -> None:
    step = step_of("cuda")
    step(batch_of())
    before = step.state_dict()
    for call in (step, step.evaluate, step.gradients, step.attach(loss, batch_of())):
        with pytest.raises(td.IndexRangeError, match=f"is {value}, and"):
            call(batch_of(**{name: value}))
        assert is_unchanged(step, before)


@pytest.mark.parametrize(("name", "value"), [("x", 7), ("x", -1), ("y", 5), ("y", -1)])
def test_arrays_on_the_device(name: str, value: int) -> None:
    step, other = step_of("cuda"), step_of("cuda")
    step(there(batch_of()))
    other(batch_of())
    before = step.state_dict()
    assert is_unchanged(other, before), "to look changes no number"
    out = step(there(batch_of(**{name: value})))
    with pytest.raises(td.IndexRangeError, match=f"is {value}, and"):
        out.loss  # noqa: B018
    assert is_unchanged(step, before)
    wrong = there(batch_of(**{name: value}))
    for call in (step.evaluate, step.gradients, step.attach(loss, batch_of())):
        with pytest.raises(td.IndexRangeError, match=f"is {value}, and"):
            call(wrong)
    assert is_unchanged(step, before)
    assert step(there(batch_of(y=-100))).loss == other(batch_of(y=-100)).loss


def test_what_nobody_looks_at_is_an_error_some_steps_later() -> None:
    step = step_of("cuda")
    right = there(batch_of())
    step(there(batch_of(y=5)))
    for _ in range(AHEAD):
        step(right)
    with pytest.raises(td.IndexRangeError, match=r"step: y\[5\] is 5"):
        step(right)
    assert step.count == AHEAD


def test_a_run_leaves_out_what_is_wrong() -> None:
    step, other = step_of("cuda"), step_of("cuda")
    right = there(batch_of())
    result = step.run([right, there(batch_of(x=7)), right])
    with pytest.raises(td.IndexRangeError, match=r"run: x\[1, 2\] is 7"):
        result.losses  # noqa: B018
    other.run([right, right])
    assert step.count == 2
    assert all((v == other.params[n]).all() for n, v in step.params.items())


def test_nothing_is_looked_at_if_not_asked_for() -> None:
    step = step_of("cuda", check_indices=False)
    assert np.isfinite(step(there(batch_of(y=9))).loss)
    assert np.isfinite(step(batch_of(x=70)).loss)


def test_an_ensemble_refuses_indices_there_at_once() -> None:
    many = td.ensemble(step_of("cuda"), 2)
    right, wrong = there(batch_of()), there(batch_of(x=7))
    first = many(right).losses
    before = many.state_dict()
    for call in (many, many.evaluate, lambda batch: many.run([batch])):
        with pytest.raises(td.IndexRangeError, match="is 7, and"):
            call(wrong).losses  # noqa: B018
    after = many.state_dict()
    assert all((after[n] == v).all() for n, v in before.items() if n != "step:counters")
    assert first.shape == many(right).losses.shape == (2,)
