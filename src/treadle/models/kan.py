"""Kolmogorov–Arnold networks: learned functions on edges, with the names of `efficient-kan`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from treadle.base.errors import ShapeError
from treadle.base.numbers import check_sizes
from treadle.base.shapes import Shape
from treadle.frontend.coerce import as_tensor, cast
from treadle.frontend.functions import linear
from treadle.frontend.functions.arithmetic import abs as abs_
from treadle.frontend.functions.arithmetic import log
from treadle.frontend.functions.reductions import mean
from treadle.frontend.functions.reductions import sum as sum_
from treadle.frontend.functions.shaping import reshape, unsqueeze
from treadle.frontend.tensor import Operand, Tensor
from treadle.models.config import Config
from treadle.models.model import ACTIVATIONS, Model, check_activation
from treadle.nn import init
from treadle.nn.containers import ModuleList
from treadle.nn.module import Module, Parameter, State


@dataclass(frozen=True)
class KANConfig(Config):
    """Sizes of the layers, and the splines: intervals of the grid, and their degree."""

    model_type: str = "kan"
    sizes: tuple[int, ...] = (2, 5, 1)
    grid_size: int = 5
    spline_order: int = 3
    scale_noise: float = 0.1
    scale_base: float = 1.0
    scale_spline: float = 1.0
    grid_eps: float = 0.02
    grid_range: tuple[float, ...] = (-1.0, 1.0)
    hidden_act: str = "silu"

    def check(self) -> None:
        self.need(len(self.sizes) >= 2, "sizes", "Give at least two.")
        self.need(min(self.sizes) >= 1, "sizes", "Each is at least 1.")
        self.need_layers(len(self.sizes), "sizes")
        self.need(self.grid_size >= 1, "grid_size", "It is at least 1.")
        self.need(1 <= self.spline_order <= 10, "spline_order", "It is from 1 to 10.")
        fits = len(self.grid_range) == 2 and self.grid_range[0] < self.grid_range[1]
        self.need(fits, "grid_range", "It is a lower and an upper end.")
        self.need(0 <= self.grid_eps <= 1, "grid_eps", "It is from 0 to 1.")
        check_activation(self, "hidden_act")

    @property
    def coefficients(self) -> int:
        """Splines of an edge."""
        return self.grid_size + self.spline_order


def spline_bases(x: Any, grid: Any, order: int) -> Any:
    """B-splines over knots (inputs, K) at x (B, inputs), tensors or arrays: (B, inputs, S).

    The recursion of Cox and de Boor, all knots at once.
    """
    x = x[..., None]
    bases = ((x >= grid[:, :-1]) & (x < grid[:, 1:])).astype(grid.dtype)
    for k in range(1, order + 1):
        rising = (x - grid[:, : -(k + 1)]) / (grid[:, k:-1] - grid[:, : -(k + 1)])
        falling = (grid[:, k + 1 :] - x) / (grid[:, k + 1 :] - grid[:, 1:-k])
        bases = rising * bases[..., :-1] + falling * bases[..., 1:]
    return bases


def fitted(x: np.ndarray, y: np.ndarray, grid: np.ndarray, order: int) -> np.ndarray:
    """Coefficients (out, in, S) of splines that are y (N, in, out) at x (N, in)."""
    bases = spline_bases(x.astype(np.float64), grid.astype(np.float64), order)
    columns = [
        np.linalg.lstsq(bases[:, i], y[:, i].astype(np.float64), rcond=None)[0]
        for i in range(x.shape[1])
    ]
    return np.stack(columns).transpose(2, 0, 1).astype(np.float32)


def even_knots(config: KANConfig, inputs: int) -> np.ndarray:
    """Knots of equal distances, `spline_order` of them beyond each end: (inputs, K)."""
    low, high = config.grid_range
    step = (high - low) / config.grid_size
    at = np.arange(-config.spline_order, config.grid_size + config.spline_order + 1)
    return np.tile((at * step + low).astype(np.float32), (inputs, 1))


class KANLinear(Module):
    """A function of its own for each pair of an input and an output: (…, inputs) → (…, outputs)."""

    def __init__(self, inputs: int, outputs: int, config: KANConfig):
        self.inputs, self.outputs, self.config = inputs, outputs, config
        base = init.kaiming_uniform(math.sqrt(5) * config.scale_base)
        scaler = init.kaiming_uniform(math.sqrt(5) * config.scale_spline)
        self.base_weight = Parameter((outputs, inputs), base)
        self.spline_weight = Parameter((outputs, inputs, config.coefficients), self._first)
        self.spline_scaler = Parameter((outputs, inputs), scaler)
        knots = even_knots(config, inputs)
        self.grid = State(knots.shape, init.literal(knots))
        self.act = ACTIVATIONS[config.hidden_act]

    def _first(self, shape: Shape, rng: np.random.Generator) -> np.ndarray:
        """Splines through a little noise at the knots."""
        config, k = self.config, self.config.spline_order
        knots = even_knots(config, self.inputs)
        size = (config.grid_size + 1, self.inputs, self.outputs)
        noise = (rng.random(size) - 0.5) * config.scale_noise / config.grid_size
        return fitted(knots.T[k:-k], noise, knots, k)

    def forward(self, x: Operand) -> Tensor:
        given = as_tensor(x)
        if given.ndim < 1 or given.shape[-1] != self.inputs:
            raise ShapeError("KANLinear", f"x is {given.type}", f"It is (…, {self.inputs}).")
        rows = reshape(given, (-1, self.inputs))
        grid = cast(self.grid.tensor(), rows.dtype)
        bases = spline_bases(rows, grid, self.config.spline_order)
        weight = as_tensor(self.spline_weight) * unsqueeze(self.spline_scaler, -1)
        splines = linear.linear(
            reshape(bases, (bases.shape[0], -1)), reshape(weight, (self.outputs, -1))
        )
        total = linear.linear(self.act(rows), self.base_weight) + splines
        return reshape(total, (*given.shape[:-1], self.outputs))

    def regularization_loss(self, activation: float = 1.0, entropy: float = 1.0) -> Tensor:
        """Penalises large splines, and many of them instead of few."""
        sizes = mean(abs_(as_tensor(self.spline_weight)), -1)
        total = sum_(sizes)
        share = sizes / total
        return total * activation - sum_(share * log(share)) * entropy

    def moved(
        self, values: Mapping[str, np.ndarray], x: np.ndarray, margin: float
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Values with knots where the inputs are, and the layer's result for them, on the host."""
        config, order = self.config, self.config.spline_order
        old = values["grid"].astype(np.float64)
        bases = spline_bases(x, old, order)
        scaled = values["spline_weight"] * values["spline_scaler"][..., None]
        each = np.einsum("bis,ois->bio", bases, scaled)
        count = config.grid_size
        ordered = np.sort(x, 0)
        at = np.linspace(0, len(x) - 1, count + 1).astype(int)
        step = (ordered[-1] - ordered[0] + 2 * margin) / count
        even = np.arange(count + 1)[:, None] * step + ordered[0] - margin
        knots = config.grid_eps * even + (1 - config.grid_eps) * ordered[at]
        out = np.arange(1, order + 1)[:, None] * step
        grid = np.concatenate([knots[:1] - out[::-1], knots, knots[-1:] + out]).T
        fit = fitted(x, each, grid, order) / values["spline_scaler"][..., None]
        act = np.asarray(self.act(x.astype(np.float32)).numpy(), np.float64)
        result = act @ values["base_weight"].T + each.sum(1)
        new = {"grid": grid.astype(np.float32), "spline_weight": fit.astype(np.float32)}
        return {**values, **new}, result


class KAN(Model):
    """Layers of learned functions: (…, first) → (…, last)."""

    def __init__(self, config: KANConfig | Sequence[int]):
        if not isinstance(config, KANConfig):
            config = KANConfig(sizes=check_sizes("KAN", "sizes", config))
        self.config: KANConfig = config
        pairs = pairwise(config.sizes)
        self.layers = ModuleList(KANLinear(a, b, config) for a, b in pairs)

    def forward(self, x: Operand) -> Tensor:
        value = as_tensor(x)
        for layer in self.layers:
            value = layer(value)
        return value

    def regularization_loss(self, activation: float = 1.0, entropy: float = 1.0) -> Tensor:
        """The sum of those of the layers."""
        layers: Any = self.layers
        parts = [layer.regularization_loss(activation, entropy) for layer in layers]
        total: Tensor = sum(parts[1:], parts[0])
        return total

    def with_moved_grids(
        self, values: Mapping[str, np.ndarray], x: object, margin: float = 0.01
    ) -> dict[str, np.ndarray]:
        """Values whose knots follow the inputs that layers get from rows x, splines fitted again.

        `step.load_params(model.with_moved_grids(step.params, x))` between steps.
        """
        rows = np.asarray(x, np.float64).reshape(-1, self.config.sizes[0])
        if len(rows) <= self.config.coefficients:
            cause = f"{len(rows)} rows for {self.config.coefficients} splines of an input"
            raise ShapeError("with_moved_grids", cause, "Pass more.")
        found = dict(values)
        layers: Any = self.layers
        for i, layer in enumerate(layers):
            prefix = f"layers.{i}."
            own = {n: np.asarray(values[prefix + n]) for n in layer.declarations()}
            moved, rows = layer.moved(own, rows, margin)
            found |= {prefix + n: v for n, v in moved.items()}
        return found
