"""Random training programs: forward, backward and update, small, of every op there is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import treadle as td
from treadle import losses, nn, optim
from treadle.domains.philox import make_key
from treadle.frontend.functions.activations import cross_entropy_rows
from treadle.frontend.scopes import RANDOM_STATE, bind1
from treadle.ir import composites as c
from treadle.ir.graph import Graph

SIZES = (1, 2, 3, 5, 8, 17)
GREATEST = 30.0  # of values that programs may have: larger ones say little about rounding
OPTIMIZERS: tuple[Callable[[], optim.Optimizer], ...] = (
    lambda: optim.sgd(0.1),
    lambda: optim.sgd(0.05, momentum=0.9, nesterov=True, weight_decay=1e-2),
    lambda: optim.adam(1e-2),
    lambda: optim.adamw(1e-2, weight_decay=0.1),
)


class RandomModel(nn.Module):
    """Some steps of random ops on matrices (n, n) and vectors (n,)."""

    def __init__(self, seed: int, n: int, steps: int):
        self.seed, self.n, self.steps = seed, n, steps
        normal = nn.init.normal(0.0, 0.7)
        self.a, self.b = nn.Parameter((n, n), normal), nn.Parameter((n, n), normal)
        self.v = nn.Parameter((n,), normal)
        self.running, self.last = nn.State((n, n)), nn.State((n,))

    def forward(self, x, y):
        rng = np.random.default_rng(self.seed)
        values = [self.a * 1.0, self.b * 1.0, self.v * 1.0, x]
        for _ in range(self.steps):
            values.append(Steps(rng, values, y, self.n).one())
        total = sum((matrix(r, self.n) * 0.1).mean() for r in values[-3:])
        td.update(self.running, self.running * 0.9 + matrix(values[-1], self.n) * 0.1)
        td.update(self.last, self.v)
        td.metric("running", (self.running * self.running).sum())
        return total + (self.a * self.b * self.v).mean() * 0.01  # every parameter counts


def matrix(x: td.Tensor, n: int) -> td.Tensor:
    return x if x.ndim == 2 else td.expand(x, n, n)


@dataclass
class Steps:
    """What a step may be, given the values so far."""

    rng: np.random.Generator
    values: list
    y: td.Tensor
    n: int

    def one(self) -> td.Tensor:
        kinds = (self.moves, self.sums, self.functions, self.layers, self.orders)
        kind = kinds[int(self.rng.integers(len(kinds)))]
        choices = kind(self.pick(), self.pick())
        return choices[int(self.rng.integers(len(choices)))]()

    def pick(self) -> td.Tensor:
        return self.values[int(self.rng.integers(len(self.values)))]

    def axis(self, x: td.Tensor) -> int:
        return int(self.rng.integers(x.ndim))

    def moves(self, x: td.Tensor, y: td.Tensor) -> list:
        n, axis = self.n, self.axis(x)
        m = matrix(x, n)
        start = int(self.rng.integers(n + 1))
        cut = [slice(start, start + n) if i == axis else slice(None) for i in range(x.ndim)]
        return [
            lambda: td.concat([x, x], axis)[tuple(cut)],
            lambda: td.flip(x, axis),
            lambda: m.T,
            lambda: td.pad(m, [(1, 0), (0, 2)], interior=[1, 0])[1 : n + 1, :n],
            lambda: td.take(x, self.y, axis),
            lambda: td.take_along_axis(m, td.argsort(m, 0), 1),
            lambda: td.scatter_add(m, self.y, matrix(y, n), 0),
            lambda: td.embedding(self.y, m),
            lambda: td.dynamic_slice(td.concat([m, m]), td.stack([self.y[0], 0]), (n, n)),
            lambda: td.dynamic_update_slice(m, m[:1, :] * 2, td.stack([self.y[-1], 0])),
            lambda: td.roll(m, 1, 0).reshape(-1).reshape(n, n),
            lambda: td.stop_gradient(x) * y,
        ]

    def sums(self, x: td.Tensor, y: td.Tensor) -> list:
        n, axis = self.n, self.axis(x)
        m, other = matrix(x, n), matrix(y, n)
        return [
            lambda: m @ other * 0.5,
            lambda: td.einsum("ij,kj->ki", m, other),
            lambda: td.einsum("ij,ij->j", m, other),
            lambda: td.linear(m, other, other[0]),
            lambda: m.sum(int(self.rng.integers(2))),
            lambda: m.mean(0),
            lambda: td.var(m, 1, correction=0),
            lambda: td.cumsum(x, axis, reverse=bool(self.rng.integers(2))),
            lambda: td.prod(td.tanh(m) + 1.5, 1) * 0.1,
            lambda: td.logsumexp(m, 0),
            lambda: td.norm(m, 1),
            lambda: td.max(m, 1),
            lambda: td.min(m, 0),
            lambda: x * td.mean(y),
        ]

    def functions(self, x: td.Tensor, y: td.Tensor) -> list:
        return [
            lambda: x + y,
            lambda: x - y,
            lambda: x * y,
            lambda: x / (1 + y * y),
            lambda: td.exp(x * 0.1),
            lambda: td.log(1 + x * x),
            lambda: td.sqrt(1 + x * x) - td.rsqrt(2 + y * y),
            lambda: td.sin(x) + td.cos(y),
            lambda: td.tanh(x),
            lambda: td.erf(x),
            lambda: td.pow(1.5 + td.tanh(x), td.tanh(y)),
            lambda: td.maximum(x, y),
            lambda: td.minimum(x, y),
            lambda: td.where(x > 0, x, x * x),
            lambda: td.where(td.logical_and(x > -1, y <= 1), x, y),
            lambda: td.where(td.logical_or(td.eq(x, y), td.logical_not(x < 0)), x, -y),
            lambda: td.where(td.logical_xor(x > 0, y > 0), x, y),
            lambda: td.abs(x) * td.sign(y),
            lambda: x - td.floor(x) + td.remainder(y, 1.7),
            lambda: td.floor_divide(x, 0.7) * y,
            lambda: td.cast(td.cast(x * 1.5, td.bfloat16) + 0.25, td.float32),
            lambda: td.cast(td.cast(x, td.float64) * 3, td.float32),
            lambda: td.cast(td.cast(td.tanh(x), td.float16) * 2, td.float32),
        ]

    def layers(self, x: td.Tensor, y: td.Tensor) -> list:
        n, axis = self.n, self.axis(x)
        m, other = matrix(x, n), matrix(y, n)
        padded = td.pad(m[None], [(0, 0), (0, 1), (0, 1)])
        kernel = other[:1, :1].reshape(1, 1, 1, 1)
        return [
            lambda: td.softmax(x, axis),
            lambda: td.log_softmax(x, axis),
            lambda: td.layer_norm(x),
            lambda: td.layer_norm(m, other[0], other[-1]),
            lambda: td.rms_norm(x),
            lambda: bind1(c.BATCH_NORM, c.BatchNorm(1e-2), m, other[0], other[-1]),
            lambda: td.relu(x) + td.silu(y),
            lambda: td.gelu(x) - td.gelu(y, approximate="tanh"),
            lambda: td.sigmoid(x) * td.softplus(y),
            lambda: cross_entropy_rows(m, self.y, label_smoothing=0.1),
            lambda: losses.linear_cross_entropy(m, other, self.y, reduction="none"),
            lambda: td.one_hot(self.y, n) * m,
            lambda: td.attention(m[None, None], other[None, None], m[None, None], causal=True)[
                0, 0
            ],
            lambda: td.attention(m[None, None], m[None, None], other[None, None], other)[0, 0],
            lambda: td.conv(m[None, None], kernel, padding=0)[0, 0],
            lambda: td.conv(padded[None], td.expand(other[:1, :1], 1, 1, 2, 2))[0, 0],
            lambda: td.max_pool(padded, (2, 2), 1)[0],
            lambda: td.avg_pool(padded, (2, 2), 1)[0],
            lambda: x * td.random.bernoulli(0.7, x.shape) + td.random.uniform(y.shape) * y,
            lambda: td.checkpoint(lambda a, b: td.tanh(a * b) + a)(x, x),
        ]

    def orders(self, x: td.Tensor, y: td.Tensor) -> list:
        n, axis = self.n, self.axis(x)
        m = matrix(x, n)
        return [
            lambda: td.sort(x, axis)[0],
            lambda: td.sort(m, 1, descending=True)[0],
            lambda: td.expand(td.topk(m, 1, 1)[0].reshape(n), n, n),
            lambda: td.cast(td.argmax(m, 1) + td.argmin(m, 0), td.float32) * x,
            lambda: td.cast(td.bitwise_xor(self.y, 3) // 2 % 5, td.float32) + matrix(y, n)[0],
            lambda: td.scan(lambda c, r: (td.tanh(c * r + r), c * r), matrix(y, n)[0], m)[1],
            lambda: td.scan(
                lambda c, r: (c * 0.5 + r @ m * 0.3, td.softmax(c)),
                m[0],
                matrix(y, n),
                reverse=True,
            )[1],
            lambda: td.scan(lambda c, r: (td.sin(c) + r, c), m[0], m, recompute=True)[0],
            lambda: x + td.iota(x.shape, axis, td.float32) * 0.1,
        ]


@dataclass(frozen=True)
class Training:
    """A whole step as a graph, and values for its leaves."""

    graph: Graph
    values: dict[str, np.ndarray]


def random_training(seed: int, steps: int) -> Training:
    """A training step of a random model with a random optimizer, after one step was done."""
    rng = np.random.default_rng(seed)
    n = int(rng.choice(SIZES))
    step = td.compile_step(
        RandomModel(seed, n, steps),
        lambda model, batch: model(batch["x"], batch["y"]),
        OPTIMIZERS[int(rng.integers(len(OPTIMIZERS)))](),
        {"x": td.Spec((n, n)), "y": td.Spec((n,), td.int32)},
        clip_norm=float(rng.choice([0.1, 10.0])),
        device="oracle",
        seed=seed,
    )
    batch = {"x": rng.normal(size=(n, n)) * 0.7, "y": rng.integers(0, n, n)}
    step(batch)
    values = {f"batch:{name}": a for name, a in batch.items()}
    values |= step.session.values | {RANDOM_STATE: make_key(seed, 1)}
    return Training(step.graph, {n: values[n] for n in step.graph.leaves})
