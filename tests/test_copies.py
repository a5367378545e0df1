"""Copies of what holds programs and memory: an error, and what it says to do instead."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle as td
from treadle import nn, optim

BATCH = {"x": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)}
WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "an old pickle": lambda thing: pickle.dumps(thing, protocol=0),
    "inside a dict": lambda thing: copy.deepcopy({"held": thing}),
}


def loss(model: Any, batch: Any) -> Any:
    return td.square(model(batch["x"])).mean()


def step_of(share: Any = None) -> td.TrainStep:
    return td.compile_step(nn.Linear(4, 2), loss, optim.adam(0.1), BATCH, device="cpu", share=share)


MAKES: dict[str, Callable[[], Any]] = {
    "TrainStep": step_of,
    "Forward": lambda: step_of().attach(lambda m, b: m(b["x"]), BATCH),
    "Program": lambda: td.compile(lambda x: x * 2, td.Spec((3,)), device="cpu"),
    "Session": lambda: step_of().session,
    "Trainer": lambda: td.Trainer(step_of(), progress="off"),
    "Ensemble": lambda: td.ensemble(step_of(), 2),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MAKES)
def test_a_copy_is_an_error_with_a_remedy(name: str, way: str) -> None:
    with pytest.raises(td.CopyError, match=f"copy: .* {name} holds .* cannot be copied") as caught:
        WAYS[way](MAKES[name]())
    assert isinstance(caught.value, TypeError)


def test_a_step_goes_on_where_another_was(tmp_path: Path) -> None:
    step = step_of()
    step(BATCH)
    by_state, by_file = step_of(), step_of()
    by_state.load_state_dict(step.state_dict())
    step.save(tmp_path / "step.safetensors")
    by_file.load(tmp_path / "step.safetensors")
    shared = step_of(share=step)
    np.testing.assert_array_equal(shared.params["weight"], step.params["weight"])
    found = [s(BATCH).loss for s in (step, by_state, by_file)]
    assert found[0] == found[1] == found[2]
    np.testing.assert_array_equal(shared.params["weight"], step.params["weight"])


def test_models_may_be_copied() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.Tanh())
    again = copy.deepcopy(model)
    assert [*again.declarations()] == [*model.declarations()]
    assert again[0] is not model[0]
