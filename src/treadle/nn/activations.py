"""Activations as modules: PyTorch's names, arguments and defaults."""

from __future__ import annotations

from treadle.base.errors import ArgumentError
from treadle.base.numbers import (
    FINITE,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    check_choice,
    check_integer,
    check_number,
    check_whole,
)
from treadle.frontend import random
from treadle.frontend.coerce import as_tensor
from treadle.frontend.functions import activations, arithmetic
from treadle.frontend.functions.arithmetic import where
from treadle.frontend.tensor import Operand, Tensor
from treadle.nn.init import constant
from treadle.nn.module import Module, Parameter


class _InPlace(Module):
    """What takes `inplace` as in PyTorch, where it changes no result."""

    def __init__(self, inplace: bool = False):
        """Nothing is kept."""


class ReLU(_InPlace):
    """max(x, 0)."""

    def forward(self, x: Operand) -> Tensor:
        return activations.relu(x)


class ReLU6(_InPlace):
    """x limited to 0 … 6."""

    def forward(self, x: Operand) -> Tensor:
        return activations.relu6(x)


class SELU(_InPlace):
    """The self-normalising exponential unit."""

    def forward(self, x: Operand) -> Tensor:
        return activations.selu(x)


class SiLU(_InPlace):
    """x · sigmoid(x)."""

    def forward(self, x: Operand) -> Tensor:
        return activations.silu(x)


class Mish(_InPlace):
    """x · tanh(softplus(x))."""

    def forward(self, x: Operand) -> Tensor:
        return activations.mish(x)


class Hardsigmoid(_InPlace):
    """x / 6 + ½, limited to 0 … 1."""

    def forward(self, x: Operand) -> Tensor:
        return activations.hardsigmoid(x)


class Hardswish(_InPlace):
    """x · hardsigmoid(x)."""

    def forward(self, x: Operand) -> Tensor:
        return activations.hardswish(x)


class Sigmoid(Module):
    """1 / (1 + e⁻ˣ)."""

    def forward(self, x: Operand) -> Tensor:
        return activations.sigmoid(x)


class LogSigmoid(Module):
    """log sigmoid(x)."""

    def forward(self, x: Operand) -> Tensor:
        return activations.log_sigmoid(x)


class Softsign(Module):
    """x / (1 + |x|)."""

    def forward(self, x: Operand) -> Tensor:
        return activations.softsign(x)


class Tanhshrink(Module):
    """x − tanh x."""

    def forward(self, x: Operand) -> Tensor:
        return activations.tanhshrink(x)


class Tanh(Module):
    """The hyperbolic tangent."""

    def forward(self, x: Operand) -> Tensor:
        return arithmetic.tanh(x)


class GELU(Module):
    """x · Φ(x)."""

    def __init__(self, approximate: str = "none"):
        check_choice("GELU", "approximate", approximate, ("none", "tanh"))
        self.approximate = approximate

    def forward(self, x: Operand) -> Tensor:
        return activations.gelu(x, self.approximate)


class LeakyReLU(Module):
    """x above 0, negative_slope · x below."""

    def __init__(self, negative_slope: float = 0.01, inplace: bool = False):
        self.negative_slope = check_number("LeakyReLU", "negative_slope", negative_slope, FINITE)

    def forward(self, x: Operand) -> Tensor:
        return activations.leaky_relu(x, self.negative_slope)


class ELU(Module):
    """x above 0, alpha · (eˣ − 1) below."""

    def __init__(self, alpha: float = 1.0, inplace: bool = False):
        self.alpha = check_number("ELU", "alpha", alpha, FINITE)

    def forward(self, x: Operand) -> Tensor:
        return activations.elu(x, self.alpha)


class CELU(Module):
    """x above 0, alpha · (e^(x / alpha) − 1) below."""

    def __init__(self, alpha: float = 1.0, inplace: bool = False):
        self.alpha = check_number("CELU", "alpha", alpha, POSITIVE)

    def forward(self, x: Operand) -> Tensor:
        return activations.celu(x, self.alpha)


class Hardtanh(Module):
    """x limited to min_val … max_val."""

    def __init__(self, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False):
        self.min_val = check_number("Hardtanh", "min_val", min_val, FINITE)
        self.max_val = check_number("Hardtanh", "max_val", max_val, FINITE)

    def forward(self, x: Operand) -> Tensor:
        return activations.hardtanh(x, self.min_val, self.max_val)


class Threshold(Module):
    """x above the threshold, otherwise the value."""

    def __init__(self, threshold: float, value: float, inplace: bool = False):
        self.threshold = check_number("Threshold", "threshold", threshold, FINITE)
        self.value = check_number("Threshold", "value", value, FINITE)

    def forward(self, x: Operand) -> Tensor:
        return activations.threshold(x, self.threshold, self.value)


class Softplus(Module):
    """log(1 + e^(beta·x)) / beta; x itself where beta · x > threshold."""

    def __init__(self, beta: float = 1.0, threshold: float = 20.0):
        self.beta = check_number("Softplus", "beta", beta, POSITIVE)
        self.threshold = check_number("Softplus", "threshold", threshold, FINITE)

    def forward(self, x: Operand) -> Tensor:
        return activations.softplus(x, self.beta, self.threshold)


class Softshrink(Module):
    """x moved towards 0 by lambd; 0 where it is not further away."""

    def __init__(self, lambd: float = 0.5):
        self.lambd = check_number("Softshrink", "lambd", lambd, NOT_NEGATIVE)

    def forward(self, x: Operand) -> Tensor:
        return activations.softshrink(x, self.lambd)


class Hardshrink(Module):
    """x where it is further than lambd from 0, otherwise 0."""

    def __init__(self, lambd: float = 0.5):
        self.lambd = check_number("Hardshrink", "lambd", lambd, NOT_NEGATIVE)

    def forward(self, x: Operand) -> Tensor:
        return activations.hardshrink(x, self.lambd)


class Softmax(Module):
    """eˣ / Σ eˣ along an axis."""

    def __init__(self, dim: int = -1):
        self.dim = check_integer("Softmax", "dim", dim)

    def forward(self, x: Operand) -> Tensor:
        return activations.softmax(x, self.dim)


class Softmin(Module):
    """e⁻ˣ / Σ e⁻ˣ along an axis."""

    def __init__(self, dim: int = -1):
        self.dim = check_integer("Softmin", "dim", dim)

    def forward(self, x: Operand) -> Tensor:
        return activations.softmax(-as_tensor(x), self.dim)


class LogSoftmax(Module):
    """log softmax along an axis."""

    def __init__(self, dim: int = -1):
        self.dim = check_integer("LogSoftmax", "dim", dim)

    def forward(self, x: Operand) -> Tensor:
        return activations.log_softmax(x, self.dim)


class GLU(Module):
    """a · sigmoid(b) for the halves a, b of an axis: (…, 2 · D) → (…, D)."""

    def __init__(self, dim: int = -1):
        self.dim = check_integer("GLU", "dim", dim)

    def forward(self, x: Operand) -> Tensor:
        return activations.glu(x, self.dim)


class PReLU(Module):
    """x above 0, weight · x below; the weight is learned, one or one for each channel (axis 1)."""

    def __init__(self, num_parameters: int = 1, init: float = 0.25):
        check_whole("PReLU", "num_parameters", num_parameters)
        first = check_number("PReLU", "init", init, FINITE)
        self.weight = Parameter((num_parameters,), constant(first))

    def forward(self, x: Operand) -> Tensor:
        return activations.prelu(x, self.weight)


class RReLU(Module):
    """x above 0, slope · x below: a random slope in training, the mean of the bounds otherwise."""

    def __init__(self, lower: float = 1 / 8, upper: float = 1 / 3, inplace: bool = False):
        self.lower = check_number("RReLU", "lower", lower, FRACTION)
        self.upper = check_number("RReLU", "upper", upper, FRACTION)
        if self.lower > self.upper:
            raise ArgumentError("RReLU", f"lower {lower} above upper {upper}", "Swap them.")

    def forward(self, x: Operand) -> Tensor:
        value = as_tensor(x)
        if not self.training:
            return activations.leaky_relu(value, (self.lower + self.upper) / 2)
        slope = random.uniform(value.shape, self.lower, self.upper, value.dtype)
        return where(value > 0, value, value * slope)
