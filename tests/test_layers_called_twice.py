"""Layers with running statistics that are called on several batches in one trace, as PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import treadle as td
from treadle import nn, optim

Layer = Callable[[Any], Any]
LAYERS: dict[str, tuple[Layer, tuple[int, ...]]] = {
    "batch norm": (lambda library: library.BatchNorm1d(3), (5, 3)),
    "all batches alike": (lambda library: library.BatchNorm2d(3, momentum=None), (4, 3, 2, 2)),
    "images": (
        lambda library: library.InstanceNorm1d(3, affine=True, track_running_stats=True),
        (4, 3, 6),
    ),
}


def thrice(layer: Any, x: Any) -> Any:
    """The layer of three batches, of which the last is made from the first."""
    first, second = layer(x), layer(2 * x + 1)
    return layer(first * x + second)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("device", ["oracle", "cpu"])
def test_statistics_follow_each_other(name: str, device: str) -> None:
    make, shape = LAYERS[name]
    forward = td.compile_forward(make(nn), thrice, td.Spec(shape), training=True, device=device)
    theirs = make(torch.nn)
    for call in range(2):
        x = np.random.default_rng(call).normal(size=shape).astype(np.float32)
        expected = thrice(theirs, torch.as_tensor(x))
        np.testing.assert_allclose(forward(x), expected.detach(), rtol=1e-4, atol=1e-4)
        for key, value in theirs.state_dict().items():
            np.testing.assert_allclose(forward.params[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transform", ["checkpoint", "grad"])
def test_statistics_of_calls_in_traces_of_their_own(transform: str) -> None:
    def wrapped(layer: Any, x: Any) -> Any:
        if transform == "checkpoint":
            return td.checkpoint(lambda x: layer(x) * 2)(x)
        return td.grad(lambda x: (layer(x) ** 3).sum())(x)

    def program(layer: Any, x: Any) -> Any:
        return wrapped(layer, x) + wrapped(layer, 3 * x - 1) + layer(x * x)

    forward = td.compile_forward(
        nn.BatchNorm1d(3), program, td.Spec((5, 3)), training=True, device="cpu"
    )
    theirs = torch.nn.BatchNorm1d(3)
    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    forward(x)
    for batch in (x, 3 * x - 1, x * x):
        theirs(torch.as_tensor(batch))
    for key, value in theirs.state_dict().items():
        np.testing.assert_allclose(forward.params[key], value, rtol=1e-5, atol=1e-6)


def test_a_step_of_two_views_in_parts() -> None:
    """A Siamese network; states move with every micro-step."""

    class Siamese(nn.Module):
        def __init__(self) -> None:
            self.fc, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)

        def forward(self, x):
            return self.norm(self.fc(x))

    step = td.compile_step(
        Siamese(),
        lambda m, b: ((m(b["a"]) - m(b["b"])) ** 2).mean(),
        optim.sgd(0.1),
        {"a": td.Spec((6, 4)), "b": td.Spec((6, 4))},
        accumulate=2,
        device="cpu",
    )
    theirs = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    with torch.no_grad():
        theirs[0].weight.copy_(torch.as_tensor(step.params["fc.weight"]))
        theirs[0].bias.copy_(torch.as_tensor(step.params["fc.bias"]))
    rng = np.random.default_rng(0)
    for _ in range(2):
        batch = {n: rng.normal(size=(6, 4)).astype(np.float32) for n in "ab"}
        step(batch)
        for array in batch.values():
            theirs(torch.as_tensor(array))
    assert step.params["norm.num_batches_tracked"] == 4
    for key in ("running_mean", "running_var"):
        expected = theirs.state_dict()[f"1.{key}"]
        np.testing.assert_allclose(step.params[f"norm.{key}"], expected, rtol=1e-4, atol=1e-5)
