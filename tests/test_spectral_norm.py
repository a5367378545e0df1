"""`nn.spectral_norm` beside PyTorch's: names, values, gradients, singular vectors."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.parametrizations import spectral_norm as theirs_of

import treadle as td
from refusals import refused
from treadle import losses, nn, optim


class Row(NamedTuple):
    layer: str
    arguments: tuple[Any, ...]
    shape: tuple[int, ...]
    options: Mapping[str, Any] = MappingProxyType({})


ROWS = [
    Row("Linear", (5, 7), (3, 5)),
    Row("Linear", (9, 1), (3, 9), {"n_power_iterations": 3}),
    Row("Linear", (5, 7), (3, 5), {"dim": 1, "name": "weight"}),
    Row("Linear", (33, 17), (4, 33), {"name": "bias"}),  # a vector has length 1
    Row("Conv1d", (3, 4, 3), (2, 3, 6), {"eps": 1e-3}),
    Row("Conv2d", (4, 8, 3, 2, 1), (2, 4, 5, 6)),
    Row("ConvTranspose2d", (3, 5, 3), (2, 3, 4, 4)),
]
IDS = [f"{i} {row.layer}" for i, row in enumerate(ROWS)]


def pair(row: Row) -> tuple[nn.Module, torch.nn.Module, dict[str, np.ndarray]]:
    torch.manual_seed(3)
    theirs = theirs_of(getattr(torch.nn, row.layer)(*row.arguments).double(), **row.options)
    ours = nn.spectral_norm(getattr(nn, row.layer)(*row.arguments), **row.options)
    state = theirs.state_dict()
    for name, value in state.items():
        if name.endswith(("_u", "_v")):  # far from where they go
            value.copy_(torch.nn.functional.normalize(torch.randn_like(value), dim=0))
    return ours, theirs, {n: t.numpy().copy() for n, t in state.items()}


def inputs(row: Row, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=row.shape)


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_names_values_and_gradients(row: Row) -> None:
    ours, theirs, values = pair(row)
    assert {n: d.shape for n, d in ours.declarations().items()} == {
        n: v.shape for n, v in values.items()
    }
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    x = inputs(row)
    for training in (True, False):
        theirs.train(training)
        theirs.load_state_dict({n: torch.tensor(v) for n, v in values.items()})
        expected = theirs(torch.tensor(x))
        ct = np.random.default_rng(1).normal(size=tuple(expected.shape))
        expected_gradients = torch.autograd.grad(
            expected, list(theirs.parameters()), torch.tensor(ct)
        )
        states = {n: values[n] for n, _ in ours.named_states()}
        params = {n: values[n] for n, _ in ours.named_parameters()}

        def applied(params, training=training, states=states):
            return ours.apply(params | states, x, training=training)

        found, pull = td.vjp(applied, params)
        np.testing.assert_allclose(found.numpy(), expected.detach(), rtol=1e-10, atol=1e-10)
        (gradients,) = pull(ct)
        for (name, g), e in zip(gradients.items(), expected_gradients, strict=True):
            np.testing.assert_allclose(g.numpy(), e, rtol=1e-9, atol=1e-9, err_msg=name)


@pytest.mark.parametrize(
    ("row", "device"),
    [(ROWS[0], "oracle"), (ROWS[2], "oracle"), (ROWS[5], "cpu"), (ROWS[6], "oracle")],
)
def test_singular_vectors_move_in_training_only(row: Row, device: str) -> None:
    """Three training calls, then evaluation: the buffers of PyTorch at each."""
    ours, theirs, values = pair(row)
    near = {"rtol": 1e-9, "atol": 1e-9} if device == "oracle" else {"rtol": 2e-5, "atol": 2e-5}
    spec = td.Spec(row.shape)
    train = td.compile_forward(ours, lambda m, x: m(x), spec, training=True, device=device)
    test = td.compile_forward(ours, lambda m, x: m(x), spec, share=train, device=device)
    train.load_params(values)
    for call in range(3):
        x = inputs(row, call)
        np.testing.assert_allclose(train(x), theirs(torch.tensor(x)).detach(), **near)
        for name, value in theirs.state_dict().items():
            np.testing.assert_allclose(train.params[name], value, err_msg=name, **near)
    moved = [n for n, v in train.params.items() if not np.allclose(v, values[n], atol=1e-6)]
    assert sorted(n[-2:] for n in moved) == ["_u", "_v"]
    theirs.eval()
    before = test.params
    np.testing.assert_allclose(test(x), theirs(torch.tensor(x)).detach(), **near)
    assert all((test.params[n] == v).all() for n, v in before.items())


def test_a_step_trains_it_and_bounds_the_layer() -> None:
    """A critic that is called twice a step: one power iteration, and norm 1 in the end."""
    critic = nn.Sequential(nn.spectral_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 1))

    def loss(model, batch):
        return losses.mse(model(batch["a"]), model(batch["b"]) + 1.0)

    rng = np.random.default_rng(0)
    batch = {k: rng.normal(size=(8, 4)).astype(np.float32) for k in "ab"}
    step = td.compile_step(critic, loss, optim.adam(0.02), batch, device="oracle")
    first = step(batch).loss
    last = step.run([batch] * 40).losses[-1]
    assert last < first
    weight = step.params["0.parametrizations.weight.original"]
    u, v = (step.params[f"0.parametrizations.weight.0._{k}"] for k in "uv")
    top = np.linalg.svd(weight, compute_uv=False)[0]
    np.testing.assert_allclose(u @ weight @ v, top, rtol=1e-2)
    np.testing.assert_allclose([np.linalg.norm(u), np.linalg.norm(v)], 1, rtol=1e-5)


def test_inside_a_loop_and_where_it_stays() -> None:
    """The vectors are updated once, outside of the loop; eval() keeps them."""

    class Walk(nn.Module):
        def __init__(self):
            self.cell = nn.spectral_norm(nn.Linear(3, 3))

        def forward(self, x):
            return td.scan(lambda h, row: (td.tanh(self.cell(h) + row),) * 2, x[0] * 0, x)[1]

    model = Walk()
    x = np.ones((5, 3))
    name = "cell.parametrizations.weight.0._u"
    for stays in (False, True):
        model.cell.train(not stays)
        walk = td.compile_forward(model, lambda m, x: m(x), x, training=True, device="oracle")
        before = walk.params[name]
        walk(x)
        assert np.array_equal(walk.params[name], before) == stays


def test_what_it_is_not_for() -> None:
    layer = nn.spectral_norm(nn.Linear(2, 3))
    for call, said in (
        (lambda: nn.spectral_norm(layer), "made of another already"),
        (lambda: nn.spectral_norm(nn.ReLU()), "ReLU.weight"),
        (lambda: nn.spectral_norm(nn.Linear(2, 3), "kernel"), "Linear.kernel"),
        (lambda: nn.spectral_norm(nn.Linear), "not a parameter"),
        (lambda: nn.spectral_norm(nn.Linear(2, 3), dim=2), "dim = 2"),
        (lambda: nn.spectral_norm(nn.Linear(2, 3), n_power_iterations=0), "n_power_iterations"),
        (lambda: nn.spectral_norm(nn.Linear(2, 3), eps=0.0), "eps"),
    ):
        refused(call, td.ArgumentError, "spectral_norm", said)
    assert layer.weight.shape == (3, 2)
    assert "Parametrized" in repr(layer.weight)
