"""Updates read what was there before the step, on every device, in whatever order they are written.

A native program writes over state in place; each optimizer here reads some state that another write
has already reached if the order is wrong.
"""

from __future__ import annotations

import numpy as np
import pytest

import treadle as td
from treadle import nn, optim


def zeros(params):
    return {n: td.zeros_like(p) for n, p in params.items()}


def stepped(grads, params, also=None):
    return {
        n: p - grads[n] * 0.1 + (0 if also is None else also[n] * 0.05) for n, p in params.items()
    }


def previous(grads, state, params, context):
    """The parameters as they were are kept while they are overwritten."""
    moved = {n: p - state["a"][n] for n, p in params.items()}
    return stepped(grads, params, moved), {"a": dict(params), "b": state["b"]}


def exchanged(grads, state, params, context):
    return stepped(grads, params, state["a"]), {"a": state["b"], "b": state["a"]}


def shifted(grads, state, params, context):
    return stepped(grads, params, state["b"]), {"a": dict(grads), "b": state["a"]}


def old_and_new(grads, state, params, context):
    """The parameter reads a state before and after its update."""
    between = {n: p + (state["a"][n] - p) * 0.25 for n, p in params.items()}
    new = {n: a - grads[n] * 0.3 for n, a in state["a"].items()}
    mixed = {n: (between[n] - new[n]) * 0.9 + new[n] for n in params}
    return mixed, {"a": new, "b": state["b"]}


def only_written(grads, state, params, context):
    """Nothing in the step reads these."""
    doubled = {n: g * 2 for n, g in grads.items()}
    return stepped(grads, params), {"a": dict(params), "b": doubled}


UPDATES = [previous, exchanged, shifted, old_and_new, only_written]


@pytest.mark.parametrize("update", UPDATES, ids=lambda u: u.__name__)
def test_native_state_follows_the_oracle(update) -> None:
    optimizer = optim.Optimizer(
        update.__name__, lambda p: {"a": dict(p), "b": zeros(p)}, update, {}, {}
    )
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    found = []
    for device in ("oracle", "cpu"):
        step = td.compile_step(
            nn.Linear(3, 2),
            lambda m, x: (m(x) ** 2).mean(),
            optimizer,
            td.Spec((4, 3)),
            device=device,
        )
        for _ in range(5):
            step(x)
        found.append(step.state_dict())
    for name, expected in found[0].items():
        np.testing.assert_allclose(found[1][name], expected, rtol=1e-5, atol=1e-6, err_msg=name)
