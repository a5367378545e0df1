"""Optimizers of matrices: Muon by Newton–Schulz, GaLore in a subspace of the gradients."""

from __future__ import annotations

import math

from treadle.base.errors import ArgumentError
from treadle.base.numbers import (
    FINITE,
    NOT_NEGATIVE,
    STEPS,
    check_betas,
    check_choice,
    check_flag,
    check_number,
    check_whole,
    numbers,
)
from treadle.base.trees import Tree
from treadle.frontend.coerce import constant
from treadle.frontend.control import scan
from treadle.frontend.functions.arithmetic import cos, eq, gt, maximum, remainder, sqrt, where
from treadle.frontend.functions.linear import matmul
from treadle.frontend.functions.reductions import length as norm
from treadle.frontend.functions.shaping import eye, iota
from treadle.frontend.tensor import Tensor
from treadle.optim.building import One, Parts, Rate, per_parameter, zeros
from treadle.optim.grouping import partition
from treadle.optim.optimizer import Optimizer, Params, check_inner
from treadle.optim.selecting import Selector
from treadle.optim.standard import New

COEFFICIENTS = (3.4445, -4.775, 2.0315)
ADJUSTMENTS = ("original", "match_rms_adamw")
Triple = tuple[float, float, float]


def muon(
    lr: Rate = 1e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_coefficients: Triple = COEFFICIENTS,
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr: str = "original",
    others: Optimizer | None = None,
    decay: Selector | None = None,
) -> Optimizer:
    """Momentum of matrices made orthogonal by Newton–Schulz iterations, as torch.optim.Muon.

    It is for matrices; `others` trains what is not one. The iterations compute in the dtype of the
    parameters (PyTorch: bfloat16).
    """
    given = numbers(
        "muon",
        weight_decay=(weight_decay, NOT_NEGATIVE),
        momentum=(momentum, NOT_NEGATIVE),
        eps=(eps, NOT_NEGATIVE),
    )
    check_flag("muon", nesterov=nesterov)
    check_whole("muon", "ns_steps", ns_steps)
    check_choice("muon", "adjust_lr", adjust_lr, ADJUSTMENTS)
    _check_coefficients(ns_coefficients)

    def rule(one: One) -> New:
        m = one.average("m", one.g, "momentum")
        ahead = one.g + (m - one.g) * one.hyper["momentum"] if nesterov else m
        step = orthogonalized(ahead, ns_coefficients, ns_steps, one.hyper["eps"])
        rows, columns = one.p.shape
        if adjust_lr == "original":
            scale = math.sqrt(max(1.0, rows / columns))
        else:
            scale = 0.2 * math.sqrt(max(rows, columns))
        return one.p - step * (one.rate * scale), {"m": m}

    def matrices_only(p: Tensor) -> Tensor:
        assert p.ndim == 2, p.type
        return zeros(p)

    own = per_parameter("muon", lr, given, rule, Parts({"m": matrices_only}), decay)
    if others is None:
        return partition("muon", [("", own)], lambda name, p: 0, _refuse_others)
    check_inner("muon", others)
    return partition("muon", [("", own), ("others.", others)], lambda name, p: int(p.ndim != 2))


def _check_coefficients(values: object) -> None:
    if not isinstance(values, (tuple, list)) or len(values) != 3:
        raise ArgumentError("muon", f"ns_coefficients = {values!r}", "Give three numbers.")
    for value in values:
        check_number("muon", "ns_coefficients", value, FINITE)


def _refuse_others(params: Params) -> None:
    wrong = [f"{n} {p.shape}" for n, p in params.items() if p.ndim != 2]
    if wrong:
        raise ArgumentError(
            "muon",
            f"{', '.join(wrong)} are no matrices",
            "Train them otherwise: others=optim.adamw(1e-3), or optim.groups.",
        )


def orthogonalized(x: Tensor, coefficients: Triple, steps: int, eps: Tensor) -> Tensor:
    """About U Vᵀ for x = U S Vᵀ: X ← aX + (bA + cA²)X with A = XXᵀ brings S to about 1."""
    a, b, c = coefficients
    is_tall = x.shape[0] > x.shape[1]
    y = x.T if is_tall else x
    y = y / maximum(norm(y), eps)
    for _ in range(steps):
        gram = matmul(y, y.T)
        y = y * a + matmul(gram * b + matmul(gram, gram) * c, y)
    return y.T if is_tall else y


def galore(
    lr: Rate = 1e-3,
    rank: int = 128,
    update_interval: int = 200,
    scale: float = 0.25,
    iterations: int = 2,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decay: Selector | None = None,
) -> Optimizer:
    """Adam whose moments live in a subspace of the gradients (Zhao and others, 2024).

    For a matrix with both sides longer than `rank`, the gradient is projected on the `rank` leading
    directions of its shorter side, found every `update_interval` updates by `iterations` subspace
    iterations from those before. Other parameters get plain AdamW.
    """
    given = numbers(
        "galore",
        **check_betas("galore", betas),
        eps=(eps, NOT_NEGATIVE),
        weight_decay=(weight_decay, NOT_NEGATIVE),
        update_interval=(update_interval, STEPS),
        scale=(scale, NOT_NEGATIVE),
    )
    check_whole("galore", "rank", rank)
    check_whole("galore", "iterations", iterations)

    def is_projected(p: Tensor) -> bool:
        return p.ndim == 2 and min(p.shape) > rank

    def moment(p: Tensor) -> Tensor:
        return constant(0, (rank, max(p.shape)), p.dtype) if is_projected(p) else zeros(p)

    def basis(p: Tensor) -> Tensor | None:
        return _first_basis(min(p.shape), rank, p) if is_projected(p) else None

    def rule(one: One) -> New:
        p, g, new = one.p, one.g, {}
        if is_projected(p):
            g = g if p.shape[0] <= p.shape[1] else g.T  # (short, long)
            is_turn = eq(remainder(one.t - 1, one.hyper["update_interval"]), 0)
            old = one.state["basis"]
            directions = where(is_turn, leading_directions(g, old, iterations), old)
            new["basis"] = directions
            g = matmul(directions.T, g)  # (rank, long)
        m = new["m"] = one.average("m", g, "beta1")
        v = new["v"] = one.average("v", g * g, "beta2")
        root = sqrt(v) / sqrt(one.correction("beta2")) + one.hyper["eps"]
        step = m / root / one.correction("beta1")
        if is_projected(p):
            step = matmul(new["basis"], step) * one.hyper["scale"]
            step = step if p.shape[0] <= p.shape[1] else step.T
        return p - step * one.rate, new

    parts = Parts({"m": moment, "v": moment, "basis": basis})
    return per_parameter("galore", lr, given, rule, parts, decay)


def _first_basis(size: int, rank: int, p: Tensor) -> Tensor:
    """Orthonormal columns in no special direction: cosines of growing frequency.

    They are those of the discrete cosine transform at the middles of `size` cells.
    """
    row = iota((size, rank), 0, p.dtype) + 0.5
    column = iota((size, rank), 1, p.dtype) + 1
    wave = cos(row * column * (math.pi / size))
    return wave * math.sqrt(2 / size)


def leading_directions(g: Tensor, basis: Tensor, iterations: int) -> Tensor:
    """Orthonormal columns that span the leading left singular vectors of g, from a basis near it.

    A little of the old basis stays in, which decides where g has no direction of its own.
    """
    for _ in range(iterations):
        image = matmul(g, matmul(g.T, basis))
        size = norm(image)
        is_there = gt(size, 0)
        image = where(is_there, image / where(is_there, size, 1.0), 0.0) + basis * 1e-6
        basis = orthonormal_columns(image)
    return basis


def orthonormal_columns(x: Tensor) -> Tensor:
    """Gram–Schmidt, each column cleared of those before it twice."""
    size, rank = x.shape

    def column(found: Tensor, row: Tree) -> tuple[Tensor, None]:
        values, place = row  # (size,), one-hot (rank,)
        for _ in range(2):
            values = values - matmul(found, matmul(values, found))
        length = norm(values)
        unit = values / maximum(length, 1e-30)
        return found + unit.reshape((size, 1)) * place, None

    start = constant(0, (size, rank), x.dtype)
    rows = (x.T, eye(rank, dtype=x.dtype))
    found, _ = scan(column, start, rows)
    return found
