"""Parameters that are made of others: `weight` is computed where it is read."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np

from treadle.base.dtypes import DType
from treadle.base.errors import ArgumentError
from treadle.base.numbers import POSITIVE, check_number, check_whole
from treadle.base.shapes import Shape, size_of
from treadle.frontend.binding import made_once
from treadle.frontend.functions.arithmetic import maximum, sqrt, stop_gradient
from treadle.frontend.functions.reductions import sum as sum_of
from treadle.frontend.functions.shaping import moveaxis, reshape
from treadle.frontend.scopes import Trace, resumed
from treadle.frontend.tensor import Placeholder, Tensor
from treadle.ir.types import TensorType
from treadle.nn.module import Module, Parameter, State, update
from treadle.nn.transposed import ConvTranspose1d, ConvTranspose2d, ConvTranspose3d

TRANSPOSED = (ConvTranspose1d, ConvTranspose2d, ConvTranspose3d)


class Parametrized(Placeholder):
    """Stands where a parameter was, for what `parts` make of it: once for each trace."""

    def __init__(self, parts: ParametrizationList):
        self._parts = parts

    @property
    def type(self) -> TensorType:
        return self._parts.original.type

    @property
    def shape(self) -> Shape:
        return self.type.shape

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def ndim(self) -> int:
        return self.type.rank

    def tensor(self) -> Tensor:
        return made_once(self._parts.original, self._parts)

    def __repr__(self) -> str:
        return f"Parametrized({self.type})"


class ParametrizationList(Module):
    """The parameter itself, as `original`, and what is done to it, as "0"."""

    def __init__(self, original: Parameter, step: SpectralNorm):
        self.original = original
        setattr(self, "0", step)

    def forward(self) -> Tensor:
        """The value that is read in place of the parameter, made where the parameter is.

        So it is outside of the loop that may be reading it.
        """
        original, step = self.original.tensor(), vars(self)["0"]
        scope = original.scope
        with resumed(scope) if isinstance(scope, Trace) else nullcontext():
            made: Tensor = step(original)
        return made


class SpectralNorm(Module):
    """Divides a weight by its largest singular value, which power iteration follows.

    The states `_u` and `_v` are its singular vectors: updated in training, used in evaluation.
    """

    def __init__(self, shape: Shape, n_power_iterations: int, dim: int, eps: float):
        self.n_power_iterations, self.dim, self.eps = n_power_iterations, dim, eps
        if len(shape) > 1:
            rows = shape[dim]
            self._u = State((rows,), _unit_vector)
            self._v = State((size_of(shape) // rows,), _unit_vector)

    def forward(self, weight: Tensor) -> Tensor:
        if weight.ndim < 2:  # the singular value of a vector is its length
            return _normalized(weight, self.eps)
        front = moveaxis(weight, self.dim, 0)
        matrix = reshape(front, (front.shape[0], -1))
        u, v = self._u.tensor(), self._v.tensor()
        if self.training:
            fixed = stop_gradient(matrix)
            for _ in range(self.n_power_iterations):
                u = _normalized(fixed @ v, self.eps)
                v = _normalized(u @ fixed, self.eps)
            update(self._u, u)
            update(self._v, v)
        return weight / sum_of(u * (matrix @ v))


def _unit_vector(shape: Shape, rng: np.random.Generator) -> np.ndarray:
    values = rng.standard_normal(shape)
    return values / max(float((values**2).sum()) ** 0.5, 1e-12)


def _normalized(x: Tensor, eps: float) -> Tensor:
    """x / max(‖x‖, eps)"""
    return x / maximum(sqrt(sum_of(x * x)), eps)


def spectral_norm(
    module: Module,
    name: str = "weight",
    n_power_iterations: int = 1,
    eps: float = 1e-12,
    dim: int | None = None,
) -> Module:
    """The module with a parameter divided by its largest singular value, as PyTorch's.

    Names are those of `torch.nn.utils.parametrizations`: "parametrizations.weight.original" and
    the singular vectors "parametrizations.weight.0._u", "…_v". They begin as random ones. A module
    that is called several times in one step makes its power iteration once.
    """
    check_whole("spectral_norm", "n_power_iterations", n_power_iterations)
    check_number("spectral_norm", "eps", eps, POSITIVE)
    given = vars(module).get(name) if isinstance(module, Module) else None
    if not isinstance(given, Parameter):
        what = f"{type(module).__name__}.{name}"
        cause = f"{what} is made of another already" if isinstance(given, Parametrized) else what
        remedy = "Pass a module and the name of one of its parameters."
        raise ArgumentError("spectral_norm", f"{cause}, not a parameter", remedy)
    axis = (1 if isinstance(module, TRANSPOSED) else 0) if dim is None else dim
    if given.ndim and not -given.ndim <= axis < given.ndim:
        cause = f"dim = {dim} of {name}, {given.type}"
        raise ArgumentError("spectral_norm", cause, "It is an axis of the parameter.")
    step = SpectralNorm(given.shape, n_power_iterations, axis, eps)
    parts = ParametrizationList(given, step)
    delattr(module, name)
    vars(module).setdefault("parametrizations", {})[name] = parts
    setattr(module, name, Parametrized(parts))
    return module
