"""The normal distribution of vectors."""

from __future__ import annotations

import math

from treadle.base.errors import ArgumentError, ShapeError
from treadle.base.shapes import Shape
from treadle.distributions.distribution import (
    REAL,
    Distribution,
    common_shape,
    parameters,
    standard_normal,
)
from treadle.frontend.coerce import broadcast_to, cast
from treadle.frontend.functions.arithmetic import as_real, log
from treadle.frontend.functions.linear import matmul
from treadle.frontend.functions.sequences import diagonal
from treadle.frontend.tensor import Operand, Tensor
from treadle.linalg.elimination import inv
from treadle.linalg.matrices import turned
from treadle.linalg.triangular import cholesky, solve_triangular


class MultivariateNormal(Distribution):
    """The normal distribution of vectors, as torch.distributions.MultivariateNormal.

    Give one of `covariance_matrix`, `precision_matrix` and `scale_tril`.
    """

    has_rsample = True

    def __init__(
        self,
        loc: Operand,
        covariance_matrix: Operand | None = None,
        precision_matrix: Operand | None = None,
        scale_tril: Operand | None = None,
    ) -> None:
        (mean,) = parameters(self._name, loc=(loc, REAL))
        given = [m for m in (covariance_matrix, precision_matrix, scale_tril) if m is not None]
        if len(given) != 1:
            cause = f"{len(given)} of covariance_matrix, precision_matrix and scale_tril are given"
            raise ArgumentError(self._name, cause, "Give one.")
        if not mean.shape:
            raise ArgumentError(self._name, "loc is one number", "Give a vector.")
        matrix = as_real(given[0])
        if matrix.ndim < 2 or matrix.shape[-2:] != (mean.shape[-1],) * 2:
            raise ShapeError(
                self._name,
                f"a matrix of shape {matrix.shape} for vectors of shape {mean.shape}",
                "Give a square matrix of the vector's length.",
            )
        shapes = {"loc": mean.shape[:-1], "matrix": matrix.shape[:-2]}
        batch = common_shape(self._name, shapes)
        self.loc = broadcast_to(mean, (*batch, mean.shape[-1]))
        matrix = cast(matrix, mean.dtype)
        if scale_tril is not None:
            triangle = matrix
        elif covariance_matrix is not None:
            triangle = cholesky(matrix)
        else:
            triangle = cholesky(inv(matrix))
        self.scale_tril = broadcast_to(triangle, (*batch, *matrix.shape[-2:]))
        super().__init__(batch, mean.shape[-1:], mean.dtype)

    @property
    def covariance_matrix(self) -> Tensor:
        return matmul(self.scale_tril, turned(self.scale_tril))

    @property
    def mean(self) -> Tensor:
        return self.loc

    @property
    def mode(self) -> Tensor:
        return self.loc

    @property
    def variance(self) -> Tensor:
        return (self.scale_tril * self.scale_tril).sum(-1)

    def rsample(self, sample_shape: Shape = ()) -> Tensor:
        z = standard_normal(self.extended(sample_shape), self.dtype)
        return self.loc + matmul(self.scale_tril, z.reshape((*z.shape, 1))).reshape(z.shape)

    def half_log_det(self) -> Tensor:
        return log(diagonal(self.scale_tril, axis1=-2, axis2=-1)).sum(-1)

    def log_prob(self, value: Operand) -> Tensor:
        apart = self._value(value) - self.loc
        shape = apart.shape
        triangle = broadcast_to(self.scale_tril, (*shape, shape[-1]))
        z = solve_triangular(triangle, apart.reshape((*shape, 1)), upper=False).reshape(shape)
        size = shape[-1] * 0.5 * math.log(2 * math.pi)
        return -0.5 * (z * z).sum(-1) - self.half_log_det() - size

    def entropy(self) -> Tensor:
        return self.half_log_det() + 0.5 * self.loc.shape[-1] * (1 + math.log(2 * math.pi))
