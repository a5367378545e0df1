"""Invertible functions with the logarithm of their slope."""

from __future__ import annotations

import math
from collections.abc import Sequence

from treadle.base.errors import ArgumentError
from treadle.frontend.coerce import as_tensor
from treadle.frontend.functions.activations import log_sigmoid, sigmoid, softplus
from treadle.frontend.functions.arithmetic import abs, as_real, exp, expm1, log, log1p, pow, tanh
from treadle.frontend.tensor import Operand, Tensor


class Transform:
    """y = transform(x), x = transform.inv(y), and log |dy/dx|, element by element."""

    def __call__(self, x: Operand) -> Tensor:
        return self._forward(as_real(x))

    @property
    def inv(self) -> Transform:
        return _Inverse(self)

    @property
    def sign(self) -> float:
        """1 for an increasing function, −1 for a decreasing one."""
        return 1.0

    def log_abs_det_jacobian(self, x: Operand, y: Operand) -> Tensor:
        return self._log_slope(as_real(x), as_real(y))

    def _forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def _backward(self, y: Tensor) -> Tensor:
        raise NotImplementedError

    def _log_slope(self, x: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class _Inverse(Transform):
    def __init__(self, of: Transform) -> None:
        self.of = of

    @property
    def inv(self) -> Transform:
        return self.of

    @property
    def sign(self) -> float:
        return self.of.sign

    def _forward(self, x: Tensor) -> Tensor:
        return self.of._backward(x)

    def _backward(self, y: Tensor) -> Tensor:
        return self.of._forward(y)

    def _log_slope(self, x: Tensor, y: Tensor) -> Tensor:
        return -self.of._log_slope(y, x)


class ExpTransform(Transform):
    """y = eˣ"""

    def _forward(self, x: Tensor) -> Tensor:
        return exp(x)

    def _backward(self, y: Tensor) -> Tensor:
        return log(y)

    def _log_slope(self, x: Tensor, y: Tensor) -> Tensor:
        return x


class AffineTransform(Transform):
    """y = loc + scale · x"""

    def __init__(self, loc: Operand, scale: Operand) -> None:
        self.loc, self.scale = as_tensor(loc), as_tensor(scale)

    @property
    def sign(self) -> float:
        # A distribution function needs to know; elsewhere any scale will do.
        from_scale = self.scale.numpy()
        if not ((from_scale > 0).all() or (from_scale < 0).all()):
            raise ArgumentError("AffineTransform", "scale has both signs", "Use two transforms.")
        return 1.0 if (from_scale > 0).all() else -1.0

    def _forward(self, x: Tensor) -> Tensor:
        return self.loc + self.scale * x

    def _backward(self, y: Tensor) -> Tensor:
        return (y - self.loc) / self.scale

    def _log_slope(self, x: Tensor, y: Tensor) -> Tensor:
        return log(abs(self.scale)) + x * 0


class SigmoidTransform(Transform):
    """y = 1 / (1 + e⁻ˣ)"""

    def _forward(self, x: Tensor) -> Tensor:
        return sigmoid(x)

    def _backward(self, y: Tensor) -> Tensor:
        return log(y) - log1p(-y)

    def _log_slope(self, x: Tensor, y: Tensor) -> Tensor:
        return log_sigmoid(x) + log_sigmoid(-x)


class TanhTransform(Transform):
    """y = tanh x"""

    def _forward(self, x: Tensor) -> Tensor:
        return tanh(x)

    def _backward(self, y: Tensor) -> Tensor:
        return 0.5 * (log1p(y) - log1p(-y))

    def _log_slope(self, x: Tensor, y: Tensor) -> Tensor:
        return 2.0 * (math.log(2.0) - x - softplus(-2.0 * x))


class SoftplusTransform(Transform):
    """y = log(1 + eˣ)"""

    def _forward(self, x: Tensor) -> Tensor:
        return softplus(x)

    def _backward(self, y: Tensor) -> Tensor:
        return y + log(-expm1(-y))

    def _log_slope(self, x: Tensor, y: Tensor) -> Tensor:
        return log_sigmoid(x)


class PowerTransform(Transform):
    """y = x^exponent, for positive x"""

    def __init__(self, exponent: Operand) -> None:
        self.exponent = as_tensor(exponent)

    @property
    def sign(self) -> float:
        return 1.0 if (self.exponent.numpy() > 0).all() else -1.0

    def _forward(self, x: Tensor) -> Tensor:
        return pow(x, self.exponent)

    def _backward(self, y: Tensor) -> Tensor:
        return pow(y, 1 / self.exponent)

    def _log_slope(self, x: Tensor, y: Tensor) -> Tensor:
        return log(abs(self.exponent * y / x))


class ComposeTransform(Transform):
    """Transforms one after the other."""

    def __init__(self, parts: Sequence[Transform]) -> None:
        self.parts = tuple(parts)
        for part in self.parts:
            if not isinstance(part, Transform):
                raise ArgumentError("ComposeTransform", f"{part!r} is no transform", "Pass some.")

    @property
    def sign(self) -> float:
        return math.prod(part.sign for part in self.parts)

    def _forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part._forward(x)
        return x

    def _backward(self, y: Tensor) -> Tensor:
        for part in reversed(self.parts):
            y = part._backward(y)
        return y

    def _log_slope(self, x: Tensor, y: Tensor) -> Tensor:
        total = x * 0
        for part in self.parts:
            after = part._forward(x)
            total = total + part._log_slope(x, after)
            x = after
        return total
