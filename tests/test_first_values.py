"""First values are drawn while a program is compiled: the same ones, with the same errors."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import treadle as td
from treadle import nn, optim
from treadle.step import first_values

BATCH = {"x": td.Spec((2, 64))}


def compiled(model: nn.Module) -> td.TrainStep:
    return td.compile_step(model, lambda m, b: m(b["x"]).sum(), optim.sgd(0.1), BATCH, device="cpu")


def test_values_are_those_that_are_drawn_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(first_values, "MANY", 1)
    beside = compiled(nn.Linear(64, 64)).params
    monkeypatch.setattr(first_values, "MANY", 1 << 60)
    for name, value in compiled(nn.Linear(64, 64)).params.items():
        np.testing.assert_array_equal(beside[name], value)


class Own(nn.Module):
    """An initialiser of a user's: it notes its thread, and may fail."""

    def __init__(self, fails: bool = False) -> None:
        self.linear, self.threads, self.fails = nn.Linear(64, 64), list[str](), fails
        self.scale = nn.Parameter((64,), self.first)

    def first(self, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
        self.threads.append(threading.current_thread().name)
        if self.fails:
            raise ZeroDivisionError("an initialiser of mine")
        return np.ones(shape)

    def __call__(self, x: td.Tensor) -> td.Tensor:
        return self.linear(x) * self.scale


def test_initialisers_of_a_user_run_in_the_thread_that_compiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(first_values, "MANY", 1)
    model = Own()
    compiled(model)
    assert set(model.threads) == {threading.current_thread().name}


def test_an_error_of_an_initialiser_is_the_compile_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_values, "MANY", 1)
    with pytest.raises(ZeroDivisionError, match="an initialiser of mine"):
        compiled(Own(fails=True))
    huge = nn.Linear(64, 64)
    huge.weight = nn.Parameter((64, 64), nn.init.normal(0, 1e300))
    with pytest.raises(td.ArgumentError, match="first value of weight"):
        compiled(huge)
