"""Optimizers and schedules beside PyTorch, and that no number of theirs recompiles."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import treadle as td
from treadle import nn, optim

CASES = {
    "sgd": (lambda: optim.sgd(0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "momentum": (lambda: optim.sgd(0.1, 0.9), lambda p: torch.optim.SGD(p, 0.1, 0.9)),
    "dampening": (
        lambda: optim.sgd(0.1, 0.9, dampening=0.3),
        lambda p: torch.optim.SGD(p, 0.1, 0.9, dampening=0.3),
    ),
    "nesterov": (
        lambda: optim.sgd(0.1, 0.8, weight_decay=0.01, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.1, 0.8, weight_decay=0.01, nesterov=True),
    ),
    "adam": (lambda: optim.adam(0.05), lambda p: torch.optim.Adam(p, 0.05)),
    "adam decay": (
        lambda: optim.adam(0.05, (0.8, 0.95), 1e-6, 0.1),
        lambda p: torch.optim.Adam(p, 0.05, (0.8, 0.95), 1e-6, 0.1),
    ),
    "amsgrad": (
        lambda: optim.adam(0.05, amsgrad=True),
        lambda p: torch.optim.Adam(p, 0.05, amsgrad=True),
    ),
    "adamw": (lambda: optim.adamw(0.05), lambda p: torch.optim.AdamW(p, 0.05)),
    "adamw amsgrad": (
        lambda: optim.adamw(0.05, weight_decay=0.2, amsgrad=True),
        lambda p: torch.optim.AdamW(p, 0.05, weight_decay=0.2, amsgrad=True),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_hundred_steps_beside_pytorch(name: str) -> None:
    ours, theirs = CASES[name]
    step = td.compile_step(
        nn.Linear(4, 3), lambda m, x: (td.tanh(m(x)) ** 2).mean(), ours(), td.Spec((6, 4))
    )
    reference = torch.nn.Linear(4, 3).double()
    reference.load_state_dict({n: torch.tensor(v) for n, v in step.params.items()})
    optimizer = theirs(reference.parameters())
    rng = np.random.default_rng(0)
    for _ in range(100):
        x = rng.normal(size=(6, 4))
        step(x)
        optimizer.zero_grad()
        (torch.tanh(reference(torch.tensor(x))) ** 2).mean().backward()
        optimizer.step()
    for key, value in reference.state_dict().items():
        np.testing.assert_allclose(step.params[key], value.numpy(), rtol=1e-10, atol=1e-12)


def rates(schedule: optim.Schedule, count: int) -> list[float]:
    step = td.compile_step(
        nn.Linear(1, 1), lambda m, x: (m(x) ** 2).mean(), optim.sgd(schedule), td.Spec((1, 1))
    )
    found = []
    for _ in range(count):
        found.append(step.learning_rate)
        step(np.ones((1, 1)))
    return found


def torch_rates(make, count: int, start: float) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], start)
    scheduler = make(optimizer)
    found = []
    for _ in range(count):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_cosine_equals_pytorch_up_to_its_end_and_stays_there() -> None:
    expected = torch_rates(
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10, eta_min=0.02), 11, 0.5
    )
    found = rates(optim.cosine(0.5, 10, 0.02), 14)
    np.testing.assert_allclose(found[:11], expected, rtol=1e-12)
    np.testing.assert_allclose(found[11:], 0.02, rtol=1e-12)


def test_linear_equals_pytorch() -> None:
    expected = torch_rates(
        lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.1, total_iters=8), 12, 0.5
    )
    np.testing.assert_allclose(rates(optim.linear(0.5, 0.05, 8), 12), expected, rtol=1e-12)


def test_constant_is_constant() -> None:
    assert rates(optim.constant(0.3), 4) == [0.3] * 4


def test_no_number_of_a_step_recompiles() -> None:
    optimizer = optim.chain(
        optim.clip_by_global_norm(1.0),
        optim.groups(
            ("weight", optim.adamw(optim.warmup_cosine(0.1, 3, 20))), ("*", optim.sgd(0.1, 0.9))
        ),
    )
    step = td.compile_step(
        nn.Linear(3, 2), lambda m, x: (m(x) ** 2).mean(), optimizer, td.Spec((4, 3)), clip_norm=5.0
    )
    x = np.random.default_rng(0).normal(size=(4, 3))
    step(x)
    compiles = step.report.compiles
    for name in step.hyperparameters:
        step.hyperparameters[name] = step.hyperparameters[name] * 0.9
        step(x)
    step.lr_scale, step.clip_norm = 0.5, 2.0
    step(x)
    assert step.report.compiles == compiles
    assert len(step.hyperparameters) == 13
    assert "clip_by_global_norm.0.max_norm" in step.hyperparameters
