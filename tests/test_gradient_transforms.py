"""Transforms of gradients and regularisers, each beside its definition or PyTorch's."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import treadle as td
from treadle import nn, optim

SHAPES = {"b": (4,), "k": (4, 2, 3), "s": (), "w": (6, 4)}
Arrays = dict[str, np.ndarray]


def values(seed: int, scale: float = 1.0) -> Arrays:
    rng = np.random.default_rng(seed)
    return {n: rng.normal(0, scale, s) for n, s in SHAPES.items()}


def descended(
    transform: optim.Transform, gradients: list[Arrays], params: Arrays, device: str = "oracle"
) -> tuple[td.TrainStep, list[Arrays]]:
    """The gradients that come out of a transform: the batch goes in as them."""
    step = td.compile_step(
        {n: nn.Parameter(s) for n, s in SHAPES.items()},
        lambda m, g: sum((m[n] * g[n]).sum() for n in SHAPES),
        optim.chain(transform, optim.sgd(1.0)),
        {n: td.Spec(s) for n, s in SHAPES.items()},
        device=device,
    )
    found = []
    for g in gradients:
        step.load_params(params)
        step(g)
        found.append({n: params[n] - v for n, v in step.params.items()})
    return step, found


def one(transform: optim.Transform, g: Arrays, params: Arrays | None = None) -> Arrays:
    return descended(transform, [g], params or values(1))[1][0]


def check(found: Arrays, expected: Arrays, rtol: float = 1e-9) -> None:
    assert found.keys() == expected.keys()
    for n, value in expected.items():
        np.testing.assert_allclose(found[n], value, rtol=rtol, atol=1e-12, err_msg=n)


def norm(arrays: Arrays) -> float:
    return math.sqrt(sum(float((a**2).sum()) for a in arrays.values()))


def torch_clipped(g: Arrays, clip) -> Arrays:
    tensors = {n: torch.zeros(a.shape, dtype=torch.float64) for n, a in g.items()}
    for n, t in tensors.items():
        t.grad = torch.tensor(g[n])
    clip(tensors.values())
    return {n: t.grad.numpy() for n, t in tensors.items()}


@pytest.mark.parametrize("limit", [0.5, 1e3])
def test_clips_beside_pytorch(limit: float) -> None:
    g, clips = values(0), torch.nn.utils
    check(
        one(optim.clip_by_global_norm(limit), g),
        torch_clipped(g, lambda t: clips.clip_grad_norm_(t, limit)),
    )
    check(
        one(optim.clip_by_value(limit), g),
        torch_clipped(g, lambda t: clips.clip_grad_value_(t, limit)),
    )
    each = torch_clipped(g, lambda ts: [clips.clip_grad_norm_([t], limit) for t in ts])
    check(one(optim.clip_by_norm(limit), g), each)


def test_adaptive_clipping_by_unit() -> None:
    g, params = values(0), values(1)
    params["w"][0] = 0.0  # counts as eps long
    found = one(optim.clip_adaptively(0.1, 1e-2), g, params)
    for n in SHAPES:
        units = [...] if g[n].ndim < 2 else range(len(g[n]))
        for u in units:
            length, size = np.linalg.norm(g[n][u]), max(np.linalg.norm(params[n][u]), 1e-2)
            factor = min(1.0, 0.1 * size / length)
            np.testing.assert_allclose(found[n][u], g[n][u] * factor, rtol=1e-9, err_msg=n)
    large = one(optim.clip_adaptively(1e6), g, params)
    check(large, g)


@pytest.mark.parametrize("device", ["oracle", "cpu"])
def test_percentile_clipping_beside_numpy(device: str) -> None:
    gradients = [values(i, 0.1 + 0.2 * (i * 7 % 5)) for i in range(14)]
    step, found = descended(optim.clip_by_percentile(30.0, 6), gradients, values(50), device)
    assert step.count == 14
    norms: list[float] = []
    clipped = 0
    for g, after in zip(gradients, found, strict=True):
        norms = [*norms, norm(g)][-6:]
        limit = np.percentile(norms, 30.0)
        expected = norm(g) * min(1.0, limit / (norm(g) + 1e-6))
        assert norm(after) == pytest.approx(expected, rel=1e-6 if device == "oracle" else 1e-4)
        clipped += expected < 0.99 * norm(g)
    assert 3 < clipped < 14


def test_normalisation() -> None:
    g = values(0)
    check(
        one(optim.normalize_gradients(), g),
        {n: a / (np.linalg.norm(a) + 1e-8) for n, a in g.items()},
    )
    check(
        one(optim.normalize_gradients("global"), g), {n: a / (norm(g) + 1e-8) for n, a in g.items()}
    )
    zero = {n: np.zeros(s) for n, s in SHAPES.items()}
    check(one(optim.normalize_gradients(), zero), zero)


def test_centralisation() -> None:
    g = values(0)
    expected = {
        n: a - a.mean(axis=tuple(range(1, a.ndim)), keepdims=True) if a.ndim > 1 else a
        for n, a in g.items()
    }
    check(one(optim.centralize_gradients(), g), expected)
    assert np.abs(expected["k"].sum((1, 2))).max() < 1e-12


# Penalties: beside PyTorch's gradient of the formula.


def rows(t: torch.Tensor) -> torch.Tensor:
    return t.reshape(len(t), -1) if t.ndim > 1 else t.reshape(1, -1)


def orthogonality(t: torch.Tensor) -> torch.Tensor:
    if t.ndim < 2:
        return t.sum() * 0
    m = rows(t)
    m = m.T if m.shape[0] > m.shape[1] else m
    return ((m @ m.T - torch.eye(len(m), dtype=m.dtype)) ** 2).sum()


PENALTIES = {
    "l1": (optim.l1_penalty(0.3), lambda t: 0.3 * t.abs().sum()),
    "l2": (optim.l2_penalty(0.3), lambda t: 0.3 * (t**2).sum() / 2),
    "elastic net": (optim.elastic_net_penalty(0.3, 0.2), lambda t: 0.3 * (0.2 * t.abs().sum() + 0.8 * (t**2).sum() / 2)),
    "group lasso": (optim.group_lasso_penalty(0.3), lambda t: 0.3 * rows(t).shape[1] ** 0.5 * rows(t).norm(dim=1).sum()),
    "orthogonal": (optim.orthogonal_penalty(0.3), lambda t: 0.3 * orthogonality(t)),
}  # fmt: skip


@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_beside_pytorch(name: str) -> None:
    transform, formula = PENALTIES[name]
    params, g = values(1), values(0)
    params["w"][1] = 0.0  # where the slope of a norm is 0
    expected = {}
    for n, value in params.items():
        t = torch.tensor(value, requires_grad=True)
        formula(t).backward()
        expected[n] = g[n] + t.grad.numpy()
    found = one(transform, g, params)
    check(found, expected)
    assert any(np.abs(found[n] - g[n]).max() > 1e-3 for n in SHAPES)


@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_act_where_they_may(name: str) -> None:
    make = {
        "l1": optim.l1_penalty,
        "l2": optim.l2_penalty,
        "elastic net": optim.elastic_net_penalty,
        "group lasso": optim.group_lasso_penalty,
        "orthogonal": optim.orthogonal_penalty,
    }[name]
    params, g = values(1), values(0)
    found = one(make(0.3, select=lambda n: n == "w"), g, params)
    assert {n for n in SHAPES if not np.allclose(found[n], g[n])} == {"w"}
    with pytest.raises(td.ArgumentError, match="'v' selects no parameter"):
        one(make(0.3, select="v"), g, params)
    exempt = td.compile_step(
        {"w": nn.Parameter((4, 6), nn.init.normal(), decay=False)},
        lambda m, x: (m["w"] * x).sum() * 0.0,
        optim.chain(make(0.3), optim.sgd(1.0)),
        td.Spec((4, 6)),
    )
    before = exempt.params["w"]
    exempt(np.ones((4, 6)))
    np.testing.assert_array_equal(exempt.params["w"], before)


def test_the_orthogonal_penalty_makes_rows_orthonormal() -> None:
    step = td.compile_step(
        {"w": nn.Parameter((3, 5), nn.init.normal(0, 0.3))},
        lambda m, x: (m["w"] * x).sum() * 0.0,
        optim.chain(optim.orthogonal_penalty(0.05), optim.sgd(1.0)),
        td.Spec((3, 5)),
    )
    for _ in range(200):
        step(np.ones((3, 5)))
    w = step.params["w"]
    np.testing.assert_allclose(w @ w.T, np.eye(3), atol=1e-5)


def test_max_norm_bounds_units() -> None:
    params, g = values(1), values(0)
    step = td.compile_step(
        {n: nn.Parameter(s) for n, s in SHAPES.items()},
        lambda m, g: sum((m[n] * g[n]).sum() for n in SHAPES),
        optim.max_norm(optim.sgd(1.0), 2.0),
        {n: td.Spec(s) for n, s in SHAPES.items()},
    )
    step.load_params(params)
    step(g)
    free = {n: params[n] - g[n] for n in SHAPES}
    for n in ("w", "k"):
        for row, unbound in zip(step.params[n], free[n], strict=True):
            length = np.linalg.norm(unbound)
            np.testing.assert_allclose(row, unbound * min(1.0, 2.0 / length), rtol=1e-5, atol=1e-6)
    lengths = np.linalg.norm(free["w"], axis=1)
    assert (lengths > 2).any()
    for n in ("b", "s"):
        np.testing.assert_allclose(step.params[n], free[n], rtol=1e-5, atol=1e-6)
    step.hyperparameters["max_norm.limit"] = 0.5
    step(g)
    assert np.linalg.norm(step.params["w"], axis=1).max() == pytest.approx(0.5)


def test_a_chain_of_all_and_its_numbers() -> None:
    chained = optim.chain(
        optim.clip_by_value(5.0),
        optim.centralize_gradients(),
        optim.l1_penalty(1e-3),
        optim.clip_by_percentile(50.0),
        optim.adamw(1e-2),
    )
    step = td.compile_step(
        nn.Linear(3, 2), lambda m, x: (m(x) ** 2).mean(), chained, td.Spec((4, 3))
    )
    x = np.random.default_rng(0).normal(size=(4, 3))
    first = step(x).loss
    for _ in range(30):
        out = step(x)
    assert out.loss < first
    assert list(step.hyperparameters)[:3] == [
        "clip_by_value.0.limit",
        "l1_penalty.2.amount",
        "clip_by_percentile.3.percentile",
    ]
    for key, value in (("clip_by_value.0.limit", 0.0), ("clip_by_percentile.3.percentile", 101)):
        with pytest.raises(td.ArgumentError, match=key.rpartition(".")[2]):
            step.hyperparameters[key] = value


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.clip_by_global_norm(0.0), "max_norm = 0.0. It is a positive number"),
        (lambda: optim.clip_by_global_norm("1"), "max_norm = '1' is a str"),
        (lambda: optim.clip_by_norm(math.nan), "max_norm = nan"),
        (lambda: optim.clip_by_value(-1.0), "limit = -1.0"),
        (lambda: optim.clip_adaptively(0.0), "clipping = 0.0"),
        (lambda: optim.clip_adaptively(eps=0.0), "eps = 0.0"),
        (
            lambda: optim.clip_by_percentile(150.0),
            "percentile = 150.0. It is a number from 0 to 100",
        ),
        (lambda: optim.clip_by_percentile(10.0, 0), "history = 0"),
        (lambda: optim.clip_by_percentile(10.0, 8.5), "history = 8.5"),
        (lambda: optim.normalize_gradients("all"), "by = 'all'"),
        (lambda: optim.normalize_gradients(eps=0.0), "eps = 0.0"),
        (lambda: optim.l1_penalty(-1.0), "amount = -1.0"),
        (lambda: optim.l2_penalty(None), "amount = None"),
        (lambda: optim.elastic_net_penalty(0.1, 1.5), "l1_ratio = 1.5"),
        (lambda: optim.group_lasso_penalty(0.1, 3), "select = 3"),
        (lambda: optim.orthogonal_penalty(True), "amount = True is a bool"),
        (lambda: optim.max_norm(optim.sgd(), 0.0), "limit = 0.0"),
        (lambda: optim.chain(optim.sgd(), optim.sgd()), r"part 0 \(sgd\) is not a transform"),
        (lambda: optim.chain("clip", optim.sgd()), r"part 0 \('clip'\) is not a transform"),
        (lambda: optim.groups(("*", "sgd")), r"\('\*', 'sgd'\) is not a group"),
        (lambda: optim.groups(optim.sgd()), "is not a group"),
    ],
)
def test_wrong_numbers_are_refused(make, message: str) -> None:
    with pytest.raises(td.ArgumentError, match=message):
        make()
