"""Shampoo and SOAP: a preconditioner for each axis of a parameter."""

from __future__ import annotations

from treadle.base.numbers import (
    NOT_NEGATIVE,
    UNIT,
    check_betas,
    check_flag,
    check_whole,
    numbers,
)
from treadle.base.trees import Tree
from treadle.frontend.coerce import constant
from treadle.frontend.control import scan
from treadle.frontend.functions.arithmetic import maximum, pow, sqrt
from treadle.frontend.functions.indexing import take
from treadle.frontend.functions.linear import matmul
from treadle.frontend.functions.reductions import argsort, norm
from treadle.frontend.functions.reductions import sum as sum_of
from treadle.frontend.functions.shaping import eye, moveaxis, reshape
from treadle.frontend.tensor import Tensor
from treadle.linalg.orthogonal import qr
from treadle.optim.building import One, Parts, Rate, Slot, per_parameter, zeros
from treadle.optim.optimizer import Optimizer
from treadle.optim.selecting import Selector
from treadle.optim.standard import New, corrected_root

MOST_AXES = 8  # of a parameter
ROOT_ITERATIONS = 40
KEPT = 1e-6  # of the old basis in the next one
LEAST_SIZE = 1e-30  # of a matrix of statistics, below which it counts as zero


def shampoo(
    lr: Rate = 1e-1,
    momentum: float = 0.0,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    max_size: int = 1024,
    decay: Selector | None = None,
) -> Optimizer:
    """Shampoo: the gradient times an inverse root for each axis (Gupta and others, 2018).

    For each axis of up to `max_size` elements, the products of the gradient with itself over all
    other axes are summed to a matrix H. The gradient of a parameter with k such axes is multiplied
    by (H + eps · ‖H‖ · I)^(−1/2k) along each. Longer axes have no matrix. The roots are computed
    in every step.
    """
    given = numbers(
        "shampoo",
        momentum=(momentum, UNIT),
        eps=(eps, NOT_NEGATIVE),
        weight_decay=(weight_decay, NOT_NEGATIVE),
    )
    check_whole("shampoo", "max_size", max_size)

    def rule(one: One) -> New:
        step, new = one.g, {}
        axes = _axes(one.p, max_size)
        for axis in axes:
            slot = f"statistics{axis}"
            total = new[slot] = one.state[slot] + _outer(one.g, axis)
            step = _along(step, inverse_root(total, 2 * len(axes), one.hyper["eps"]), axis)
        if momentum > 0:
            step = new["momentum"] = one.state["momentum"] * one.hyper["momentum"] + step
        return one.p - step * one.rate, new

    slots = {f"statistics{axis}": _zeros_of(axis, max_size) for axis in range(MOST_AXES)}
    if momentum > 0:
        slots["momentum"] = zeros
    return per_parameter("shampoo", lr, given, rule, Parts(slots), decay)


def inverse_root(a: Tensor, order: int, eps: Tensor) -> Tensor:
    """(A + eps · ‖A‖ · I)^(−1/order) of a symmetric matrix without negative eigenvalues.

    A coupled Newton iteration: M goes to the identity as the root is found. It multiplies matrices
    only; small eigenvalues of M grow by about (1 + 1/order)^order in each iteration.
    """
    size = maximum(norm(a), LEAST_SIZE)
    one = eye(a.shape[0], dtype=a.dtype)
    scale = (order + 1) / (2 * (1 + eps))
    matrix = (a * (1 / size) + one * eps) * scale
    root = one * pow(scale, 1 / order)

    def iteration(carry: Tree, _: Tree) -> tuple[Tree, None]:
        matrix, root = carry
        factor = (one * (order + 1) - matrix) * (1 / order)
        return (matmul(_power(factor, order), matrix), matmul(root, factor)), None

    (_, root), _ = scan(iteration, (matrix, root), None, ROOT_ITERATIONS)
    return root * pow(size, -1 / order)


def _power(a: Tensor, exponent: int) -> Tensor:
    """A matrix times itself, by squaring."""
    half = a if exponent < 2 else _power(a, exponent // 2)
    if exponent < 2:
        return half
    square = matmul(half, half)
    return matmul(square, a) if exponent % 2 else square


def soap(
    lr: Rate = 3e-3,
    betas: tuple[float, float] = (0.95, 0.95),
    shampoo_beta: float | None = None,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    max_size: int = 1024,
    correct_bias: bool = True,
    decay: Selector | None = None,
) -> Optimizer:
    """SOAP: AdamW in the eigenvectors of Shampoo's matrices (Vyas and others, 2024).

    For each axis of up to `max_size` elements, the products of the gradient with itself over all
    other axes are averaged with `shampoo_beta` (by default the second β). The eigenvectors follow
    by one orthogonal iteration in each step, from the identity on. Parameters with fewer than two
    axes get AdamW.
    """
    own = check_betas("soap", betas)
    given = numbers(
        "soap",
        **own,
        shampoo_beta=own["beta2"] if shampoo_beta is None else (shampoo_beta, UNIT),
        eps=(eps, NOT_NEGATIVE),
        weight_decay=(weight_decay, NOT_NEGATIVE),
    )
    check_whole("soap", "max_size", max_size)
    check_flag("soap", correct_bias=correct_bias)

    def turned_axes(p: Tensor) -> list[int]:
        return _axes(p, max_size) if p.ndim > 1 else []

    def rule(one: One) -> New:
        axes, new = turned_axes(one.p), {}
        m, g, v = one.average("m", one.g, "beta1"), one.g, one.state["v"]
        for axis in axes:
            slot = f"statistics{axis}"
            total = new[slot] = one.average(slot, _outer(one.g, axis), "shampoo_beta")
            basis, order = _followed(one.state[f"basis{axis}"], total)
            new[f"basis{axis}"], v = basis, take(v, order, axis)
            g = _along(g, basis, axis)
        v = v * one.hyper["beta2"] + g * g * (1 - one.hyper["beta2"])
        step = m
        for axis in axes:
            step = _along(step, new[f"basis{axis}"], axis)
        root = corrected_root(one, v) if correct_bias else sqrt(v)
        step = step / (root + one.hyper["eps"])
        for axis in axes:
            step = _along(step, new[f"basis{axis}"].T, axis)
        rate = one.rate / one.correction("beta1") if correct_bias else one.rate
        return one.p - step * rate, {**new, "m": m, "v": v}

    def first_basis(axis: int) -> Slot:
        return lambda p: eye(p.shape[axis], dtype=p.dtype) if axis in turned_axes(p) else None

    slots: dict[str, Slot] = {"m": zeros, "v": zeros}
    for axis in range(MOST_AXES):
        slots[f"statistics{axis}"] = _zeros_of(axis, max_size, least_rank=2)
        slots[f"basis{axis}"] = first_basis(axis)
    return per_parameter("soap", lr, given, rule, Parts(slots), decay)


def _followed(basis: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """One orthogonal iteration of eigenvectors, and the order that puts the largest first.

    A little of the old basis stays in: directions without a gradient would be rounding errors.
    """
    image = matmul(matrix, basis)
    order = argsort(sum_of(basis * image, 0), descending=True)
    image = image + basis * (KEPT * norm(matrix) + LEAST_SIZE)
    return qr(take(image, order, 1)).Q, order


def _axes(p: Tensor, max_size: int) -> list[int]:
    return [axis for axis, size in enumerate(p.shape[:MOST_AXES]) if size <= max_size]


def _outer(g: Tensor, axis: int) -> Tensor:
    """The products of the gradient's slices along an axis, (size, size)."""
    slices = reshape(moveaxis(g, axis, 0), (g.shape[axis], -1))
    return matmul(slices, slices.T)


def _along(x: Tensor, matrix: Tensor, axis: int) -> Tensor:
    """Each vector along an axis times a matrix."""
    return moveaxis(matmul(moveaxis(x, axis, -1), matrix), -1, axis)


def _zeros_of(axis: int, max_size: int, least_rank: int = 1) -> Slot:
    def first(p: Tensor) -> Tensor | None:
        if p.ndim < least_rank or axis not in _axes(p, max_size):
            return None
        return constant(0, (p.shape[axis], p.shape[axis]), p.dtype)

    return first
