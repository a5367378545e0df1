"""Every optimizer and transform on parameters of few columns and many rows, beside its reference.

One program for each has a parameter (batch, features) of every size, and a vector of each number of
features, whose gradient is a sum over rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import optimizer_references as r
import treadle as td
from sizes import SIZES, SOME, assert_near, options, rounded
from test_gradient_transforms import PENALTIES, norm, torch_clipped
from test_optimizers import NUMPY, TORCH, evaluated, float64_scalars  # noqa: F401
from treadle import nn, optim

STEPS = 4
Arrays = dict[str, np.ndarray]
Sizes = list[tuple[int, int]]


class Training:
    """A parameter of each size, beside data of its shape, and vectors beside the rows of that."""

    def __init__(self, sizes: Sizes):
        self.data = {f"m{f}x{n}": (n, f) for f, n in sizes}
        self.vectors = {f"v{f}": name for name, (_, f) in self.data.items()}  # beside the last
        self.shapes = self.data | {v: self.data[k][1:] for v, k in self.vectors.items()}

    def start(self) -> Arrays:
        rng = np.random.default_rng(3)
        return {n: rounded(rng.normal(0, 0.6, s)) for n, s in self.shapes.items()}

    def batch(self, t: int) -> Arrays:
        rng = np.random.default_rng(t)
        return {n: rounded(rng.normal(size=s)) for n, s in self.data.items()}

    def loss(self, model: Any, batch: Any) -> Any:
        """Its Hessian is diagonal: Sophia's estimate does not depend on what is drawn."""
        beside = {name: name for name in self.data} | self.vectors
        terms = [(td.tanh(model[p]) * batch[x]).sum() / len(batch[x]) for p, x in beside.items()]
        return sum(terms[1:], terms[0])

    def gradients(self, params: Arrays, t: int) -> Arrays:
        factors = {name: x / len(x) for name, x in self.batch(t).items()}
        factors |= {vector: factors[name].sum(0) for vector, name in self.vectors.items()}
        return {n: k * (1 - np.tanh(params[n]) ** 2) for n, k in factors.items()}

    def hessian(self, params: Arrays, t: int) -> Arrays:
        slopes = self.gradients(params, t)
        return {n: -2 * np.tanh(params[n]) * g for n, g in slopes.items()}


# References that are put together of others


class Torch(r.Reference):
    """An optimizer of PyTorch: `make` takes a list of parameters."""

    def __init__(self, make: Callable[..., Any], chosen: Callable[[str], bool] = lambda n: True):
        super().__init__()
        self.make, self.chosen = make, chosen

    def step(self, params: Arrays, grads: Arrays, grad_at: r.GradAt) -> None:
        if not self.s:
            self.s = {n: torch.nn.Parameter(torch.tensor(p)) for n, p in params.items()
                      if self.chosen(n)}  # fmt: skip
            self.optimizer = self.make(list(self.s.values()))
        for n, p in self.s.items():
            p.grad = torch.tensor(grads[n])
        self.optimizer.step()
        for n, p in self.s.items():
            params[n] = p.detach().numpy().copy()


class Both(r.Reference):
    """One optimizer for some parameters, another for the rest."""

    def __init__(self, *parts: r.Reference):
        super().__init__()
        self.parts = parts

    def step(self, params: Arrays, grads: Arrays, grad_at: r.GradAt) -> None:
        for part in self.parts:
            part.step(params, grads, grad_at)


class Descent(r.Reference):
    """Gradient descent at 0.1, of gradients that are changed first, with what comes after."""

    def __init__(
        self,
        before: Callable[[Arrays, Arrays], Arrays] = lambda grads, params: grads,
        after: Callable[[np.ndarray], np.ndarray] = lambda p: p,
    ):
        super().__init__()
        self.before, self.after = before, after

    def step(self, params: Arrays, grads: Arrays, grad_at: r.GradAt) -> None:
        changed = self.before(grads, params)
        for n in params:
            params[n] = self.after(params[n] - 0.1 * changed[n])


class Averaged(Descent):
    """Evaluation at a mean of what descent gives: `share` of the newest by its number."""

    def __init__(self, share: Callable[[int], float]):
        super().__init__()
        self.share = share

    def step(self, params: Arrays, grads: Arrays, grad_at: r.GradAt) -> None:
        super().step(params, grads, grad_at)
        self.t += 1
        for n, p in params.items():
            mean = self.slot(n, p, "mean")
            mean += (1.0 if self.t == 1 else self.share(self.t)) * (p - mean)

    def eval_params(self, params: Arrays) -> Arrays:
        return {n: self.s["mean", n] for n in params}


def lengths(x: np.ndarray) -> np.ndarray:
    """Of the rows of a matrix; of a vector, its own."""
    return np.linalg.norm(x, axis=-1, keepdims=True)


def bounded_rows(p: np.ndarray) -> np.ndarray:
    return p * (0.7 / np.maximum(lengths(p), 0.7)) if p.ndim > 1 else p


def adaptively(grads: Arrays, params: Arrays) -> Arrays:
    found = {}
    for n, g in grads.items():
        limit = 0.01 * np.maximum(lengths(params[n]), 1e-3)
        found[n] = g * np.minimum(1.0, limit / np.maximum(lengths(g), 1e-6))
    return found


class Percentile:
    """Scaled to the median of the norms so far."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def __call__(self, grads: Arrays, params: Arrays) -> Arrays:
        self.norms.append(norm(grads))
        scale = min(1.0, np.percentile(self.norms, 50.0) / (self.norms[-1] + 1e-6))
        return {n: g * scale for n, g in grads.items()}


def penalised(name: str, scale: float = 1.0) -> Callable[[Arrays, Arrays], Arrays]:
    """Gradients with that of the penalty's formula, by PyTorch."""

    def changed(grads: Arrays, params: Arrays) -> Arrays:
        found = {}
        for n, p in params.items():
            t = torch.tensor(p, requires_grad=True)
            (scale * PENALTIES[name][1](t)).backward()
            found[n] = grads[n] + t.grad.numpy()
        return found

    return changed


def clipped(clip: Callable[..., Any]) -> Callable[[Arrays, Arrays], Arrays]:
    return lambda grads, params: torch_clipped(grads, clip)


# The tables: ours, and a reference


Row = tuple[Callable[[], optim.Optimizer], Callable[[Training], r.Reference]]
clips = torch.nn.utils


def by_torch(name: str) -> Row:
    ours, theirs = TORCH[name]
    return ours, lambda training: Torch(theirs)


def by_numpy(name: str) -> Row:
    return NUMPY[name].ours, lambda training: NUMPY[name].reference()


def is_matrix(name: str) -> bool:
    return name.startswith("m")


def muon(training: Training) -> r.Reference:
    return Both(
        Torch(lambda p: torch.optim.Muon(p, 0.02, nesterov=True), is_matrix),
        Torch(lambda p: torch.optim.AdamW(p, 0.01), lambda n: not is_matrix(n)),
    )


SOPHIA = {"lr": 0.01, "betas": (0.9, 0.95), "rho": 0.03, "eps": 1e-12, "wd": 0.1, "interval": 2}

OPTIMIZERS: dict[str, Row] = {
    "sgd": by_torch("nesterov"),
    "adam": by_torch("adam decay"),
    "adamw": by_torch("adamw amsgrad"),
    "adagrad": by_torch("adagrad all"),
    "rmsprop": by_torch("rmsprop all"),
    "adadelta": by_torch("adadelta all"),
    "nadam": by_torch("nadam decay"),
    "radam": by_torch("radam decay"),
    "adamax": by_torch("adamax decay"),
    "asgd": by_torch("asgd all"),
    "rprop": by_torch("rprop all"),
    "adafactor": by_torch("adafactor all"),
    "adabelief": by_numpy("adabelief decay"),
    "ademamix": by_numpy("ademamix all"),
    "laprop": by_numpy("laprop decay"),
    "lion": by_numpy("lion decay"),
    "adamp": by_numpy("adamp"),
    "lamb": by_numpy("lamb"),
    "lars": by_numpy("lars"),
    "galore": by_numpy("galore"),
    "prodigy": by_numpy("prodigy"),
    "schedule_free_adamw": by_numpy("schedule free all"),
    "sam": by_numpy("asam"),
    "muon": (lambda: optim.muon(0.02, others=optim.adamw(0.01)), muon),
    "sophia": (
        lambda: optim.sophia(0.01, (0.9, 0.95), 0.03, weight_decay=0.1, interval=2),
        lambda training: r.Sophia(training.hessian, **SOPHIA),
    ),
    "lookahead": (
        lambda: optim.lookahead(optim.sgd(0.1), 2, 0.3),
        lambda training: r.Lookahead(lr=0.1, k=2, alpha=0.3),
    ),
    "ema": (lambda: optim.ema(optim.sgd(0.1), 0.6), lambda training: Averaged(lambda t: 0.4)),
    "swa": (lambda: optim.swa(optim.sgd(0.1), start=1), lambda training: Averaged(lambda t: 1 / t)),
    "max_norm": (
        lambda: optim.max_norm(optim.sgd(0.1), 0.7),
        lambda training: Descent(after=bounded_rows),
    ),
}

# Before descent at 0.1.
TRANSFORMS: dict[str, tuple[optim.Transform, Callable[[], Any]]] = {
    "clip_by_global_norm": (
        optim.clip_by_global_norm(0.5),
        lambda: clipped(lambda ts: clips.clip_grad_norm_(ts, 0.5)),
    ),
    "clip_by_norm": (
        optim.clip_by_norm(0.1),
        lambda: clipped(lambda ts: [clips.clip_grad_norm_([t], 0.1) for t in ts]),
    ),
    "clip_by_value": (
        optim.clip_by_value(0.05),
        lambda: clipped(lambda ts: clips.clip_grad_value_(ts, 0.05)),
    ),
    "clip_adaptively": (optim.clip_adaptively(), lambda: adaptively),
    "clip_by_percentile": (optim.clip_by_percentile(50.0, 6), Percentile),
    "normalize_gradients": (
        optim.normalize_gradients(),
        lambda: lambda grads, params: {n: g / (np.linalg.norm(g) + 1e-8) for n, g in grads.items()},
    ),
    "centralize_gradients": (
        optim.centralize_gradients(),
        lambda: (
            lambda grads, params: {
                n: g - g.mean(1, keepdims=True) if g.ndim > 1 else g for n, g in grads.items()
            }
        ),
    ),
    "l1_penalty": (PENALTIES["l1"][0], lambda: penalised("l1")),
    "l2_penalty": (PENALTIES["l2"][0], lambda: penalised("l2")),
    "elastic_net_penalty": (PENALTIES["elastic net"][0], lambda: penalised("elastic net")),
    "group_lasso_penalty": (PENALTIES["group lasso"][0], lambda: penalised("group lasso")),
    "orthogonal_penalty": (optim.orthogonal_penalty(3e-4), lambda: penalised("orthogonal", 1e-3)),
}
EVALUATES_ELSEWHERE = {"schedule_free_adamw", "lookahead", "ema", "swa"}
# What takes a parameter by rows and columns; to the others it is a line of numbers.
BY_ROWS = {
    "adafactor", "adamp", "galore", "muon", "max_norm", "clip_adaptively", "centralize_gradients",
    "group_lasso_penalty", "orthogonal_penalty",
}  # fmt: skip

REASONS = {
    **dict.fromkeys(("chain", "freeze", "group", "groups", "only"), "put others together"),
    **dict.fromkeys(("shampoo", "soap"), "matrices as long as an axis: test_optimizers.py"),
    "lbfgs": "one vector of all parameters: test_optimizers.py",
    **dict.fromkeys(("gradnorm", "pcgrad"), "of losses with parts: test_multitask.py"),
    **dict.fromkeys(("Domain", "Context", "Optimizer", "Transform", "Schedule"), "types"),
    **dict.fromkeys(
        ("cosine_restarts", "cyclic", "one_cycle", "triangular", "constant", "cosine",
         "exponential", "join", "linear", "multi_step", "noam", "polynomial", "schedule",
         "step_decay", "warmup_cosine"),
        "numbers by step, without a shape: test_schedules.py",
    ),
    **dict.fromkeys(("ReduceOnPlateau", "RangeTest", "find_learning_rate"), "on the host"),
}  # fmt: skip


def test_every_optimizer_has_a_row_or_a_reason() -> None:
    public = {
        n for n, v in vars(optim).items() if not n.startswith("_") and not inspect.ismodule(v)
    }
    tables = (OPTIMIZERS, TRANSFORMS, REASONS)
    assert set().union(*tables) == public
    assert sum(map(len, tables)) == len(public)


def check(
    optimizer: optim.Optimizer, reference: r.Reference, training: Training, has_other_eval: bool
) -> None:
    parameters = {n: nn.Parameter(s) for n, s in training.shapes.items()}
    specs = {n: td.Spec(s) for n, s in training.data.items()}
    step = td.compile_step(
        parameters, training.loss, optimizer, specs, device="cpu", options=options()
    )
    params = training.start()
    step.load_params(params)
    for t in range(STEPS):
        step(training.batch(t))
        here = training.gradients(params, t)
        reference.step(params, here, lambda other, t=t: training.gradients(other, t))
    for n, expected in params.items():
        assert_near(step.params[n], expected, n)
    if has_other_eval:
        found = evaluated(step)
        for n, expected in reference.eval_params(params).items():
            assert_near(found[n], expected, f"{n} in evaluation")


def updates(name: str, sizes: Sizes) -> None:
    training = Training(sizes)
    if name in OPTIMIZERS:
        ours, reference = OPTIMIZERS[name]
        check(ours(), reference(training), training, name in EVALUATES_ELSEWHERE)
    else:
        transform, before = TRANSFORMS[name]
        check(optim.chain(transform, optim.sgd(0.1)), Descent(before()), training, False)


@pytest.mark.parametrize("name", [*OPTIMIZERS, *TRANSFORMS])
def test_updates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "muon":  # PyTorch iterates in bfloat16; here it is made to keep float64
        monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
    updates(name, SIZES if name in BY_ROWS else SOME)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*OPTIMIZERS, *TRANSFORMS} - BY_ROWS))
def test_updates_of_every_size(name: str) -> None:
    updates(name, SIZES)
