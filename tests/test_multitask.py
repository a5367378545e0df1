"""Several losses in one step: learned weights, GradNorm and PCGrad beside plain programs."""

from __future__ import annotations

from itertools import permutations, product
from typing import Any

import numpy as np
import pytest
import torch

import treadle as td
from refusals import refused
from treadle import losses, nn, optim

SIZES = {"shared": (4, 19), "a": (19, 3), "b": (19, 3), "c": (19, 3)}  # lanes and a remainder
rng = np.random.default_rng(0)
FIRST = {n: (0.5 * rng.normal(size=s)).astype(np.float32) for n, s in SIZES.items()}
BATCH = {
    "x": rng.normal(size=(6, 4)).astype(np.float32),
    **{n: (i + 1) * rng.normal(size=(6, 3)).astype(np.float32) for i, n in enumerate("abc")},
}
SCALE = {"a": 1.0, "b": 0.7, "c": 2.0}


def model(tasks: str) -> dict[str, np.ndarray]:
    return {n: v for n, v in FIRST.items() if n in ("shared", *tasks)}


def losses_of(m: Any, batch: Any, tasks: str, lib: Any) -> dict[str, Any]:
    """In either library: heads on shared rows, which pull these in different directions."""
    h = lib.tanh(batch["x"] @ m["shared"])
    return {n: ((h @ m[n] - batch[n]) ** 2).mean() for n in tasks}


def loss_of(tasks: str, rest: float = 0.0):
    def loss(m, batch):
        parts = losses_of(m, batch, tasks, td)
        total = losses.weighted(**{n: (SCALE[n], part) for n, part in parts.items()})
        return total + rest * (m["shared"] ** 2).sum()

    return loss


def compiled(tasks: str, transform: optim.Transform, rest: float = 0.0, **options: Any):
    optimizer = optim.chain(transform, optim.sgd(0.1))
    options = {"device": "oracle"} | options
    return td.compile_step(model(tasks), loss_of(tasks, rest), optimizer, BATCH, **options)


class Torch:
    """The same parameters, losses and gradients in float64."""

    def __init__(self, tasks: str, rest: float = 0.0):
        self.tasks, self.rest = tasks, rest
        self.params = {
            n: torch.tensor(v, dtype=torch.float64, requires_grad=True)
            for n, v in model(tasks).items()
        }
        self.batch = {n: torch.tensor(v, dtype=torch.float64) for n, v in BATCH.items()}

    def losses(self) -> dict[str, torch.Tensor]:
        found = losses_of(self.params, self.batch, self.tasks, torch)
        return {n: SCALE[n] * v for n, v in found.items()}

    def gradient(self, loss: torch.Tensor) -> np.ndarray:
        """One line of numbers."""
        parts = torch.autograd.grad(
            loss, list(self.params.values()), retain_graph=True, allow_unused=True
        )
        pairs = zip(parts, self.params.values(), strict=True)
        return np.concatenate(
            [(torch.zeros_like(p) if g is None else g).numpy().ravel() for g, p in pairs]
        )

    def descend(self, gradient: np.ndarray) -> None:
        at = 0
        rest = self.rest * (self.params["shared"] ** 2).sum()
        whole = gradient + (self.gradient(rest) if self.rest else 0)
        for p in self.params.values():
            p.data -= 0.1 * torch.tensor(whole[at : at + p.numel()]).reshape(p.shape)
            at += p.numel()

    def assert_same(self, step: td.TrainStep, rtol: float) -> None:
        for name, p in self.params.items():
            np.testing.assert_allclose(step.params[name], p.detach(), rtol=rtol, atol=rtol)


# PCGrad


def projected(gradients: list[np.ndarray], orders: Any = None) -> np.ndarray:
    """As the paper's algorithm says it, on whole gradients."""
    total = np.zeros_like(gradients[0])
    for i, own in enumerate(gradients):
        g = own.copy()
        for j in range(len(gradients)) if orders is None else orders[i]:
            other = gradients[j]
            if j != i and g @ other < 0:
                g -= g @ other / (other @ other) * other
        total += g
    return total


@pytest.mark.parametrize(
    ("tasks", "rest", "device"),
    [("ab", 0.0, "oracle"), ("abc", 0.3, "oracle"), ("abc", 0.3, "cpu")],
)
def test_pcgrad_is_the_papers(tasks: str, rest: float, device: str) -> None:
    step = compiled(tasks, optim.pcgrad(shuffle=False), rest, device=device)
    reference = Torch(tasks, rest)
    conflicts = 0
    for _ in range(5):
        step(BATCH)
        gradients = [reference.gradient(v) for v in reference.losses().values()]
        surgery = projected(gradients)
        conflicts += not np.allclose(surgery, np.sum(gradients, 0))
        reference.descend(surgery)
        reference.assert_same(step, 1e-6 if device == "oracle" else 2e-5)
    assert conflicts


def test_pcgrad_projects_in_random_order() -> None:
    """Every step draws an order for each task; what it makes is what one of them makes."""
    slopes = [np.array(g) for g in ([1.0, 0.0, 0.2], [-0.5, 1.0, 0.0], [-0.6, -1.0, 0.4])]

    def loss(m, batch):
        return losses.weighted(**{f"t{i}": (m["w"] * g).sum() for i, g in enumerate(slopes)})

    orders = list(product(permutations(range(3)), repeat=3))
    possible = [-projected(slopes, order) for order in orders]
    chained = optim.chain(optim.pcgrad(), optim.sgd(1.0))
    start = {"w": np.zeros(3, np.float32)}
    step = td.compile_step(start, loss, chained, BATCH["x"], device="oracle")
    seen, before = set(), np.zeros(3)
    for _ in range(12):
        step(BATCH["x"])
        moved, before = step.params["w"] - before, step.params["w"]
        near = [i for i, p in enumerate(possible) if np.allclose(moved, p, atol=1e-6)]
        assert near
        seen.add(near[0])
    assert len(seen) > 2


def test_some_of_the_parts() -> None:
    """Those that are named are projected, the others summed as they are."""
    step, reference = compiled("abc", optim.pcgrad("a", "c")), Torch("abc")
    step(BATCH)
    a, b, c = (reference.gradient(v) for v in reference.losses().values())
    reference.descend(projected([a, c]) + b)
    reference.assert_same(step, 1e-6)


def test_tasks_without_conflict_are_summed() -> None:
    def loss(m, batch):
        return losses.weighted(one=(m["w"] ** 2).sum(), two=((m["w"] - 0.5) ** 2).sum())

    start = {"w": np.full(7, 2.0, np.float32)}
    plain = td.compile_step(start, loss, optim.sgd(0.1), BATCH["x"], device="oracle")
    surgery = optim.chain(optim.pcgrad(), optim.sgd(0.1))
    other = td.compile_step(start, loss, surgery, BATCH["x"], device="oracle")
    plain(BATCH["x"]), other(BATCH["x"])
    np.testing.assert_allclose(plain.params["w"], other.params["w"], rtol=1e-6)


# GradNorm


@pytest.mark.parametrize(
    ("tasks", "alpha", "select", "device"),
    [
        ("ab", 1.5, None, "oracle"),
        ("abc", 0.5, None, "oracle"),
        pytest.param("abc", 1.5, "shared", "cpu", marks=pytest.mark.slow),
        ("abc", 0.0, ["shared", "a"], "oracle"),
    ],
)
def test_gradnorm_is_the_papers(tasks: str, alpha: float, select: Any, device: str) -> None:
    """Weights by descent on Σ |Gᵢ − Ḡ rᵢ^α|, whose gradient PyTorch takes, and scaled to sum to T."""
    transform = optim.gradnorm(*tasks, alpha=alpha, rate=0.05, select=select)
    step, reference = compiled(tasks, transform, 0.1, device=device), Torch(tasks, 0.1)
    names = ["shared", "a"] if isinstance(select, list) else ["shared"]
    weights = torch.ones(len(tasks), dtype=torch.float64, requires_grad=True)
    first = None
    for _ in range(6):
        step(BATCH)
        parts = reference.losses()
        values = torch.stack([v.detach() for v in parts.values()])
        first = values if first is None else first
        gradients = [reference.gradient(v) for v in parts.values()]
        measured = [
            torch.autograd.grad(
                v, [reference.params[n] for n in names], retain_graph=True, allow_unused=True
            )
            for v in parts.values()
        ]
        norms = torch.stack(
            [sum((g**2).sum() for g in gs if g is not None).sqrt() for gs in measured]
        )
        scaled = weights * norms
        relative = values / first
        wanted = (scaled.mean() * (relative / relative.mean()) ** alpha).detach()
        (slope,) = torch.autograd.grad((scaled - wanted).abs().sum(), weights)
        own = weights.detach().numpy()
        reference.descend(sum(w * g for w, g in zip(own, gradients, strict=True)))
        moved = (weights.detach() - 0.05 * slope).clamp(min=1e-4)
        weights = (moved * len(tasks) / moved.sum()).requires_grad_(True)
        near = 1e-5 if device == "oracle" else 1e-4
        reference.assert_same(step, near)
        state = step.state_dict()["step:optimizer:transforms.0.weights"]
        np.testing.assert_allclose(state, weights.detach(), rtol=near)
    assert not np.allclose(state, 1, atol=1e-3)


def test_numbers_of_gradnorm_are_hyperparameters() -> None:
    step = compiled("ab", optim.gradnorm("a", "b"))
    assert step.hyperparameters["gradnorm.0.alpha"] == 1.5
    step.hyperparameters["gradnorm.0.rate"] = 0.0
    step.run([BATCH] * 3)
    assert (step.state_dict()["step:optimizer:transforms.0.weights"] == 1).all()


# Uncertainty


@pytest.mark.parametrize("device", ["oracle", pytest.param("cpu", marks=pytest.mark.slow)])
def test_uncertainty_weighting_is_its_formula(device: str) -> None:
    """Σ exp(−s) L + s with s learned, from PyTorch's gradients; parts and s are reported."""

    def loss(m, batch):
        return losses.uncertainty(m["s"], **losses_of(m, batch, "abc", td))

    start = model("abc") | {"s": np.array([0.1, -0.2, 0.0], np.float32)}
    step = td.compile_step(start, loss, optim.sgd(0.1), BATCH, device=device)
    reference = Torch("abc")
    s = torch.tensor(start["s"], dtype=torch.float64, requires_grad=True)
    for _ in range(4):
        out = step(BATCH)
        parts = losses_of(reference.params, reference.batch, "abc", torch)
        total = sum(torch.exp(-s[i]) * part + s[i] for i, part in enumerate(parts.values()))
        np.testing.assert_allclose(out.loss, total.item(), rtol=1e-5)
        np.testing.assert_allclose(out.metrics["b"], parts["b"].item(), rtol=1e-5)
        np.testing.assert_allclose(out.metrics["log_variance/c"], s[2].item(), rtol=1e-4, atol=1e-6)
        (slope,) = torch.autograd.grad(total, s, retain_graph=True)
        reference.descend(reference.gradient(total))
        s = (s - 0.1 * slope).detach().requires_grad_(True)
    reference.assert_same(step, 1e-5)
    np.testing.assert_allclose(step.params["s"], s.detach(), rtol=1e-4)


def test_uncertainty_keeps_means_exact() -> None:
    """Means of one weight stay one mean: micro-batches of unequal weight add up to the whole."""

    def loss(m, batch):
        weight = batch["mask"].sum()
        fit = ((m["lin"](batch["x"])[:, 0] - batch["y"]) ** 2 * batch["mask"]).sum()
        size = ((m["lin"](batch["x"])[:, 0]) ** 2 * batch["mask"]).sum()
        return losses.uncertainty(m["s"], fit=td.Mean(fit, weight), size=td.Mean(size, weight))

    whole = {
        "x": rng.normal(size=(8, 3)).astype(np.float32),
        "y": rng.normal(size=8).astype(np.float32),
        "mask": np.array([1, 1, 1, 1, 1, 0, 0, 0], np.float32),
    }
    halves = [{n: v[i : i + 4] for n, v in whole.items()} for i in (0, 4)]
    models = {"lin": nn.Linear(3, 1), "s": nn.Parameter((2,))}
    one = td.compile_step(models, loss, optim.sgd(0.1), whole, device="oracle")
    two = td.compile_step(models, loss, optim.sgd(0.1), halves[0], accumulate=2, device="oracle")
    one(whole)
    two.run(halves)
    for name, value in one.params.items():
        np.testing.assert_allclose(two.params[name], value, rtol=1e-9)


# With the rest of a step


@pytest.mark.slow
def test_float16_scales_the_gradients_of_parts() -> None:
    """The loss scale is in the gradients of parts as in those of the loss."""
    values = []
    for precision in ("float32", "float16"):
        step = compiled("ab", optim.pcgrad(), precision=precision, device="cpu")
        for _ in range(30):  # the first scales overflow
            step(BATCH)
            if step.count:
                break
        values.append(step.params)
    for name, value in values[0].items():
        np.testing.assert_allclose(values[1][name], value, atol=3e-3)


def test_parts_are_captures() -> None:
    step = compiled("ab", optim.pcgrad())
    out = step(BATCH, captures=True)
    assert np.isclose(out.captures["loss.b"], 0.7 * out.metrics["b"])
    assert np.isclose(out.loss, out.captures["loss.a"] + out.captures["loss.b"])


@pytest.mark.parametrize(
    ("call", "operation", "said"),
    [
        (lambda: optim.pcgrad("a"), "pcgrad", "the tasks are 'a'"),
        (lambda: optim.pcgrad(["a", "b"]), "pcgrad", "['a', 'b']"),
        (lambda: optim.pcgrad("a", "a"), "pcgrad", "'a', 'a'"),
        (lambda: optim.gradnorm(), "gradnorm", "none"),
        (lambda: optim.gradnorm("a", "b", alpha=-1.0), "gradnorm", "alpha"),
        (lambda: optim.gradnorm("a", "b", select=3), "gradnorm", "select = 3"),
        (lambda: losses.uncertainty(td.zeros((2,)), a=td.ones(())), "uncertainty", "float32[2]"),
        (lambda: losses.uncertainty(td.zeros((1,)), a=td.ones((3,))), "uncertainty", "not a sc"),
        (lambda: losses.uncertainty(td.zeros((0,))), "uncertainty", "0 losses"),
    ],
    ids=range(9),
)
def test_wrong_arguments(call: Any, operation: str, said: str) -> None:
    refused(call, td.ArgumentError, operation, said)


@pytest.mark.parametrize(
    ("transform", "options", "said"),
    [
        (optim.pcgrad("a", "z"), {}, "no part z"),
        (optim.gradnorm("a", "z"), {}, "no part z"),
        (optim.pcgrad(), {"accumulate": 2}, "accumulate=1"),
        (optim.pcgrad(), {"clip_norm": 1.0}, "clip_by_global_norm"),
    ],
    ids=range(4),
)
def test_what_a_step_cannot_do(transform: Any, options: dict, said: str) -> None:
    with pytest.raises(td.ArgumentError, match=said):
        compiled("ab", transform, **options)


def test_a_loss_without_parts() -> None:
    chained = optim.chain(optim.pcgrad(), optim.sgd(0.1))
    with pytest.raises(td.ArgumentError, match=r"no parts.*losses\.weighted"):
        td.compile_step(
            nn.Linear(4, 3), lambda m, b: m(b["x"]).sum(), chained, BATCH, device="oracle"
        )
