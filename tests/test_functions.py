"""Every public function, eager and traced, against PyTorch, NumPy or SciPy in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import treadle as td
from treadle.base import trees
from treadle.domains.float64 import evaluate_float64

SHAPES = [(), (5,), (3, 4), (2, 3, 4), (0,), (3, 0), (2, 0, 4)]


class Case(NamedTuple):
    """One call of one function, and what it must agree with."""

    name: str
    call: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: tuple[np.ndarray, ...]
    label: str = ""


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed + len(shape)).normal(size=shape))


def positive(*shape: int) -> np.ndarray:
    return np.abs(normal(*shape)) + 0.1


def whole(*shape: int, high: int = 7, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-high, high, shape).astype(np.int32)


def shapes_label(inputs: Sequence[np.ndarray]) -> str:
    return "·".join("x".join(map(str, x.shape)) or "()" for x in inputs)


def case(
    name: str, call: Callable[..., Any], reference: Callable[..., Any], *inputs: np.ndarray
) -> Case:
    arrays = tuple(np.asarray(x) for x in inputs)
    return Case(name, call, reference, arrays, shapes_label(arrays))


# Elementwise -------------------------------------------------------------------------------------

EDGES = np.array([-np.inf, -2.5, -1.5, -0.5, -0.0, 0.0, 0.5, 1.5, 2.5, np.inf, np.nan])
UNARY: dict[str, Callable[..., Any]] = {
    "neg": torch.neg,
    "abs": torch.abs,
    "sign": lambda x: torch.where(torch.isnan(x), x, torch.sign(x)),  # NaN stays NaN here
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "exp": torch.exp,
    "square": torch.square,
    "reciprocal": torch.reciprocal,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "isnan": torch.isnan,
    "isfinite": torch.isfinite,
    "logical_not": torch.logical_not,
    "stop_gradient": lambda x: x,
    "relu": torch.relu,
    "elu": F.elu,
    "leaky_relu": F.leaky_relu,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
}
POSITIVE: dict[str, Callable[..., Any]] = {
    "log": torch.log,
    "log2": torch.log2,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
}
# Finite arguments only: x · sigmoid(x) is NaN at −∞, where PyTorch has a limit.
FINITE: dict[str, Callable[..., Any]] = {"silu": F.silu, "gelu": F.gelu}
BINARY: dict[str, Callable[..., Any]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "floor_divide": torch.floor_divide,
    "remainder": torch.remainder,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "logical_xor": torch.logical_xor,
}
BITS: dict[str, Callable[..., Any]] = {
    "bitwise_and": torch.bitwise_and,
    "bitwise_or": torch.bitwise_or,
    "bitwise_xor": torch.bitwise_xor,
}
PAIRS = [((), ()), ((3, 4), (3, 4)), ((3, 4), (4,)), ((3, 1), (1, 4)), ((2, 3, 4), ()), ((0, 3), 3)]


def elementwise_cases() -> Iterator[Case]:
    for name, reference in (UNARY | FINITE).items():
        for shape in SHAPES:
            yield case(name, getattr(td, name), reference, normal(*shape) * 2)
        if name not in FINITE:
            yield case(name, getattr(td, name), reference, EDGES)
    for name, reference in POSITIVE.items():
        for shape in SHAPES:
            yield case(name, getattr(td, name), reference, positive(*shape))
        yield case(name, getattr(td, name), reference, np.array([0.0, np.inf, -2.0, np.nan]))
    small = np.array([1e-300, 1e-20, -1e-17, 1e-9, -1e-3, 0.4, -0.7, 1.0, 3e9, -1.0, np.inf, -2.0])
    yield case("log1p", lambda x: td.log1p(x) / x, lambda x: torch.log1p(x) / x, small)
    yield case("log1p", td.log1p, torch.log1p, np.array([0.0, -0.0, np.nan]))
    for name, reference in BINARY.items():
        for a, b in PAIRS:
            x, y = normal(*a), normal(*np.atleast_1d(b), seed=9) if b else normal(seed=9)
            yield case(name, getattr(td, name), reference, x, y)
        if name not in ("div", "floor_divide", "remainder"):
            left, right = (x.reshape(-1) for x in np.meshgrid(EDGES, EDGES))
            yield case(name, getattr(td, name), reference, left, right)
    for name, reference in BITS.items():
        yield case(name, getattr(td, name), reference, whole(3, 4), whole(4, seed=1))
        yield case(name, getattr(td, name), reference, whole(3) > 0, whole(3, seed=1) > 0)
    yield case("bitwise_not", td.bitwise_not, torch.bitwise_not, whole(3, 4))
    yield case("bitwise_not", td.bitwise_not, torch.bitwise_not, whole(3, 4) > 0)
    integers = whole(40), np.where(whole(40, seed=1) == 0, 3, whole(40, seed=1)).astype(np.int32)
    yield case("floor_divide", td.floor_divide, torch.floor_divide, *integers)
    yield case("remainder", td.remainder, torch.remainder, *integers)
    yield from power_cases()
    yield from choice_cases()
    yield case("leaky_relu", lambda x: td.leaky_relu(x, 0.3), lambda x: F.leaky_relu(x, 0.3), EDGES)
    yield case("elu", lambda x: td.elu(x, 0.7), lambda x: F.elu(x, 0.7), EDGES)
    yield case(
        "gelu",
        lambda x: td.gelu(x, "tanh"),
        lambda x: F.gelu(x, approximate="tanh"),
        normal(3, 4) * 3,
    )
    yield case(
        "softplus",
        lambda x: td.softplus(x, 2.0, 5.0),
        lambda x: F.softplus(x, 2.0, 5.0),
        np.linspace(-30, 30, 41),
    )


def power_cases() -> Iterator[Case]:
    for exponent in (-5, -4, -3, -2, -1, -0.5, 0, 0.5, 1, 2, 3, 4, 5, 2.5):
        label = Case(
            "pow",
            lambda x, e=exponent: td.pow(x, e),
            lambda x, e=exponent: torch.pow(x, e),
            (positive(3, 4),),
            f"^{exponent}",
        )
        yield label
    yield case("pow", td.pow, torch.pow, positive(3, 4), normal(4))
    yield case("pow", lambda y: td.pow(2.0, y), lambda y: torch.pow(2.0, y), normal(3, 4))
    yield case("pow", td.pow, torch.pow, np.array([-2.0, 0.0, 0.0, -1.5]), np.array([3.0, 0, 2, 2]))
    yield case("pow", lambda x: td.pow(x, 3), lambda x: torch.pow(x, 3), whole(5))


def choice_cases() -> Iterator[Case]:
    for low, high in ((-0.5, 0.5), (-0.5, None), (None, 0.5), (1, -1)):
        yield Case(
            "clamp",
            lambda x, a=low, b=high: td.clamp(x, a, b),
            lambda x, a=low, b=high: torch.clamp(x, a, b),
            (EDGES,),
            f"{low}:{high}",
        )
    yield case("clamp", td.clamp, torch.clamp, normal(3, 4), normal(4) - 1, normal(3, 1) + 1)
    yield case("where", td.where, torch.where, normal(3, 4) > 0, normal(4), normal(3, 1))
    yield case(
        "where",
        lambda c, x: td.where(c, x, 0),
        lambda c, x: torch.where(c, x, 0.0),
        normal(3, 4) > 0,
        normal(3, 4),
    )
    yield case("cast", lambda x: td.cast(x, td.int32), lambda x: x.to(torch.int32), normal(5) * 9)
    yield case(
        "cast", lambda x: td.cast(x, "bool"), lambda x: x.to(torch.bool), whole(3, 4, high=2)
    )


# Shaping -----------------------------------------------------------------------------------------

X = normal(2, 3, 4)


def shaping_cases() -> Iterator[Case]:
    rows: list[tuple[str, Callable[..., Any], Callable[..., Any], np.ndarray]] = [
        ("reshape", lambda x: td.reshape(x, 4, -1), lambda x: x.reshape(4, -1), X),
        ("reshape", lambda x: td.reshape(x, (24,)), lambda x: x.reshape(24), X),
        ("reshape", lambda x: td.reshape(x, ()), lambda x: x.reshape(()), normal(1, 1)),
        ("reshape", lambda x: td.reshape(x, -1, 3), lambda x: x.reshape(-1, 3), normal(0, 3)),
        ("permute", lambda x: td.permute(x, 2, 0, 1), lambda x: x.permute(2, 0, 1), X),
        ("permute", lambda x: td.permute(x, (-1, 1, 0)), lambda x: x.permute(-1, 1, 0), X),
        ("permute", lambda x: td.permute(x, ()), lambda x: x.permute(()), normal()),
        ("transpose", lambda x: td.transpose(x, 0, -1), lambda x: x.transpose(0, -1), X),
        ("moveaxis", lambda x: td.moveaxis(x, 0, -1), lambda x: torch.moveaxis(x, 0, -1), X),
        ("moveaxis", lambda x: td.moveaxis(x, -1, 1), lambda x: torch.moveaxis(x, -1, 1), X),
        ("flatten", td.flatten, torch.flatten, X),
        ("flatten", td.flatten, torch.flatten, normal()),
        ("flatten", lambda x: td.flatten(x, 1), lambda x: torch.flatten(x, 1), X),
        ("flatten", lambda x: td.flatten(x, 0, 1), lambda x: torch.flatten(x, 0, 1), X),
        ("squeeze", td.squeeze, torch.squeeze, normal(1, 3, 1)),
        ("squeeze", lambda x: td.squeeze(x, -1), lambda x: x.squeeze(-1), normal(1, 3, 1)),
        ("squeeze", lambda x: td.squeeze(x, (0, 2)), lambda x: x.squeeze((0, 2)), normal(1, 3, 1)),
        ("unsqueeze", lambda x: td.unsqueeze(x, -1), lambda x: x.unsqueeze(-1), X),
        ("unsqueeze", lambda x: td.unsqueeze(x, 0), lambda x: x.unsqueeze(0), normal()),
        ("expand", lambda x: td.expand(x, 5, 3, 4), lambda x: x.expand(5, 3, 4), normal(3, 1)),
        ("expand", lambda x: td.expand(x, (2, 0)), lambda x: x.expand(2, 0), normal(2, 1)),
        ("split", lambda x: td.split(x, 2, -1), lambda x: x.split(2, -1), X),
        ("split", lambda x: td.split(x, 3, -1), lambda x: x.split(3, -1), X),
        ("split", lambda x: td.split(x, [1, 0, 2], 1), lambda x: x.split([1, 0, 2], 1), X),
        ("split", lambda x: td.split(x, 2, 0), lambda x: x.split(2, 0), normal(0, 3)),
        ("chunk", lambda x: td.chunk(x, 2, -1), lambda x: x.chunk(2, -1), X),
        ("chunk", lambda x: td.chunk(x, 2, 1), lambda x: x.chunk(2, 1), X),
        ("chunk", lambda x: td.chunk(x, 9, 1), lambda x: x.chunk(9, 1), X),
        ("chunk", lambda x: td.chunk(x, 2, 0), lambda x: x.chunk(2, 0), normal(0, 3)),
        ("flip", lambda x: td.flip(x, (0, -1)), lambda x: x.flip(0, -1), X),
        ("flip", td.flip, lambda x: x.flip(0, 1, 2), X),
        ("flip", lambda x: td.flip(x, 0), lambda x: x.flip(0), normal(0, 3)),
        ("roll", lambda x: td.roll(x, 1, 1), lambda x: x.roll(1, 1), X),
        ("roll", lambda x: td.roll(x, -6, -1), lambda x: x.roll(-6, -1), X),
        ("roll", lambda x: td.roll(x, 2, 0), lambda x: x.roll(2, 0), normal(0, 3)),
        ("repeat", lambda x: td.repeat(x, 2, 3), lambda x: x.repeat(2, 3), normal(3)),
        ("repeat", lambda x: td.repeat(x, (2, 1, 3)), lambda x: x.repeat(2, 1, 3), X),
        ("repeat", lambda x: td.repeat(x, 0, 2), lambda x: x.repeat(0, 2), normal(3, 4)),
        ("zeros_like", td.zeros_like, torch.zeros_like, X),
        ("ones_like", td.ones_like, torch.ones_like, X),
    ]
    for row in rows:
        yield case(*row)
    for diagonal, name in product((0, 1, -2, 9), ("tril", "triu")):
        yield Case(
            name,
            lambda x, n=name, d=diagonal: getattr(td, n)(x, d),
            lambda x, n=name, d=diagonal: getattr(torch, n)(x, d),
            (X,),
            str(diagonal),
        )
    yield case("tril", td.tril, torch.tril, normal(3, 3) > 0)
    yield from joining_cases()
    yield from window_cases()
    yield from making_cases()


def joining_cases() -> Iterator[Case]:
    three = X, X + 1, X - 1
    for axis in (0, 1, -1):
        yield Case(
            "concat",
            lambda *xs, a=axis: td.concat(xs, a),
            lambda *xs, a=axis: torch.cat(xs, a),
            three,
            str(axis),
        )
    for axis in (0, 3, -1, -4):
        yield Case(
            "stack",
            lambda *xs, a=axis: td.stack(xs, a),
            lambda *xs, a=axis: torch.stack(xs, a),
            three,
            str(axis),
        )
    yield case("concat", lambda x: td.concat([x]), lambda x: x, X)
    yield case("concat", lambda *xs: td.concat(xs), lambda *xs: torch.cat(xs), *map(normal, (0, 3)))
    yield case("stack", lambda *xs: td.stack(xs), lambda *xs: torch.stack(xs), normal(), normal())


def torch_pad(x: torch.Tensor, amounts: Sequence[tuple[int, int]], value: float) -> torch.Tensor:
    return F.pad(x, [n for pair in reversed(amounts) for n in pair], value=value)


def spread_apart(x: np.ndarray) -> np.ndarray:
    result = np.full((5, 7), 9.0)
    result[1::3, ::2] = x
    return result


def window_cases() -> Iterator[Case]:
    amounts = [(1, 0), (0, 2), (3, 1)]
    yield case("pad", lambda x: td.pad(x, amounts), lambda x: torch_pad(x, amounts, 0.0), X)
    yield case("pad", lambda x: td.pad(x, amounts, -1.5), lambda x: torch_pad(x, amounts, -1.5), X)
    yield case("pad", lambda x: td.pad(x, [(0, 0)] * 3), lambda x: x, X)
    yield case("pad", lambda x: td.pad(x, []), lambda x: x, normal())
    yield case(
        "pad",
        lambda x: td.pad(x, [(1, 0), (0, 0)], 9, [2, 1]),
        lambda x: spread_apart(x.numpy()),
        normal(2, 4),
    )
    for start in ([0, 1, 2], [5, -3, 1]):  # the second is moved to lie inside
        inside = [min(max(s, 0), n - k) for s, n, k in zip(start, X.shape, (1, 2, 2))]
        window = tuple(slice(s, s + k) for s, k in zip(inside, (1, 2, 2)))
        starts = np.array(start, np.int32)
        yield case(
            "dynamic_slice",
            lambda x, s: td.dynamic_slice(x, s, (1, 2, 2)),
            lambda x, s, w=window: x[w],
            X,
            starts,
        )
        yield case(
            "dynamic_update_slice",
            lambda x, u, s: td.dynamic_update_slice(x, u, s),
            lambda x, u, s, w=window: updated(x.numpy(), w, u.numpy()),
            X,
            normal(1, 2, 2),
            starts,
        )


def updated(x: np.ndarray, window: tuple[slice, ...], update: np.ndarray) -> np.ndarray:
    result = x.copy()
    result[window] = update
    return result


def making_cases() -> Iterator[Case]:
    rows: list[tuple[str, Callable[..., Any], Callable[..., Any]]] = [
        ("full", lambda: td.full((2, 3), 1.5, td.float64), lambda: np.full((2, 3), 1.5)),
        ("full", lambda: td.full((2,), 7, td.int32), lambda: np.full(2, 7)),
        ("zeros", lambda: td.zeros((2, 0), td.float64), lambda: np.zeros((2, 0))),
        ("ones", lambda: td.ones((), td.float64), lambda: np.ones(())),
        ("iota", lambda: td.iota((2, 3), 0), lambda: np.indices((2, 3))[0]),
        ("iota", lambda: td.iota((2, 3)), lambda: np.indices((2, 3))[1]),
        ("iota", lambda: td.iota(3, 0, td.float64), lambda: np.arange(3.0)),
        ("arange", lambda: td.arange(5), lambda: np.arange(5)),
        ("arange", lambda: td.arange(2, 11, 3), lambda: np.arange(2, 11, 3)),
        ("arange", lambda: td.arange(5, -2, -2), lambda: np.arange(5, -2, -2)),
        ("arange", lambda: td.arange(5, 0, -1, td.uint8), lambda: np.arange(5, 0, -1)),
        ("arange", lambda: td.arange(3, 3), lambda: np.arange(0)),
        ("arange", lambda: td.arange(1, 4, dtype=td.float64), lambda: np.arange(1.0, 4)),
        ("eye", lambda: td.eye(3, dtype=td.float64), lambda: np.eye(3)),
        ("eye", lambda: td.eye(2, 4, td.int32), lambda: np.eye(2, 4, dtype=int)),
    ]
    for name, call, reference in rows:
        yield case(name, call, reference)


# Reductions --------------------------------------------------------------------------------------

AXES: dict[tuple[int, ...], list[Any]] = {
    (): [None, ()],
    (5,): [None, 0, -1],
    (2, 3, 4): [None, 0, -1, (0, 2), (-1, 1), (0, 1, 2), ()],
    (2, 0, 4): [None, 1, -1],
}
REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": np.sum,
    "prod": np.prod,
    "mean": np.mean,
    "max": np.max,
    "min": np.min,
    "any": np.any,
    "all": np.all,
    "logsumexp": lambda x, axis, keepdims: np.log(np.sum(np.exp(x), axis, keepdims=keepdims)),
    "norm": lambda x, axis, keepdims: np.sqrt(np.sum(x * x, axis=axis, keepdims=keepdims)),
    "var": lambda x, axis, keepdims: np.var(x, axis=axis, keepdims=keepdims, ddof=1),
    "std": lambda x, axis, keepdims: np.std(x, axis=axis, keepdims=keepdims, ddof=1),
}
NEED_ELEMENTS = {"max", "min", "logsumexp", "argmax", "argmin"}
NEED_TWO = {"var", "std"}


def reduced_sizes(shape: tuple[int, ...], axis: Any) -> list[int]:
    axes = range(len(shape)) if axis is None else np.atleast_1d(np.array(axis, int))
    return [shape[a] for a in axes]


def reduction_cases() -> Iterator[Case]:
    for name, reference in REDUCTIONS.items():
        for (shape, axes), keepdims in product(AXES.items(), (False, True)):
            for axis in axes:
                count = int(np.prod(reduced_sizes(shape, axis)))
                if (name in NEED_ELEMENTS and count == 0) or (name in NEED_TWO and count < 2):
                    continue
                if name == "mean" and count == 0:
                    continue  # NumPy warns; see test_empty_means
                yield Case(
                    name,
                    lambda x, n=name, a=axis, k=keepdims: getattr(td, n)(x, axis=a, keepdims=k),
                    lambda x, f=reference, a=axis, k=keepdims: f(x.numpy(), axis=a, keepdims=k),
                    (np.asarray(normal(*shape) * (normal(*shape, seed=3) > -1)),),
                    f"{shapes_label([normal(*shape)])} {axis} {'kept' if keepdims else ''}",
                )
    for correction, name in product((0, 1, 2), ("var", "std")):
        yield Case(
            name,
            lambda x, n=name, c=correction: getattr(td, n)(x, -1, correction=c),
            lambda x, n=name, c=correction: getattr(torch, n)(x, -1, correction=c),
            (X,),
            f"correction {correction}",
        )
    infinite = np.array([[-np.inf, -np.inf], [np.inf, 1.0], [-np.inf, 2.0], [800.0, 801.0]])
    yield case("logsumexp", lambda x: td.logsumexp(x, -1), lambda x: x.logsumexp(-1), infinite)
    yield from ordering_cases()


def ordering_cases() -> Iterator[Case]:
    ties = whole(3, 5, high=2).astype(np.float64)
    for (shape, axis), keepdims in product([((5,), 0), ((2, 3, 4), -2)], (False, True)):
        for name in ("argmax", "argmin"):
            yield Case(
                name,
                lambda x, n=name, a=axis, k=keepdims: getattr(td, n)(x, a, keepdims=k),
                lambda x, n=name, a=axis, k=keepdims: getattr(np, n)(x.numpy(), a, keepdims=k),
                (normal(*shape),),
                f"{axis} {keepdims}",
            )
    for name in ("argmax", "argmin"):
        for x in (ties, normal(), normal(2, 3, 4), np.array([1.0, np.nan, 2.0, np.nan])):
            yield case(name, getattr(td, name), lambda x, n=name: getattr(np, n)(x.numpy()), x)
    for axis in (0, 1, -1):
        yield Case(
            "cumsum",
            lambda x, a=axis: td.cumsum(x, a),
            lambda x, a=axis: x.cumsum(a),
            (X,),
            str(axis),
        )
    yield case("cumsum", lambda x: td.cumsum(x, 1, True), lambda x: x.flip(1).cumsum(1).flip(1), X)
    yield case("cumsum", lambda x: td.cumsum(x, 0), lambda x: x.cumsum(0), normal(0, 3))
    for values, axis, down in product((X[0], ties, normal(3, 0)), (0, -1), (False, True)):
        keywords = {"stable": True, "descending": down}
        yield case(
            "sort",
            lambda x, a=axis, d=down: td.sort(x, a, d),
            lambda x, a=axis, k=keywords: tuple(torch.sort(x, dim=a, **k)),
            values,
        )
        yield case(
            "argsort",
            lambda x, a=axis, d=down: td.argsort(x, a, d),
            lambda x, a=axis, k=keywords: torch.argsort(x, dim=a, **k),
            values,
        )
    for k, axis, largest in product((0, 1, 3), (0, -1), (True, False)):
        yield Case(
            "topk",
            lambda x, k=k, a=axis, g=largest: td.topk(x, k, a, g),
            lambda x, k=k, a=axis, g=largest: tuple(torch.topk(x, k, a, g)),
            (normal(3, 4),),
            f"{k} {axis} {largest}",
        )


# Products ----------------------------------------------------------------------------------------

EINSUMS: list[tuple[str, list[tuple[int, ...]]]] = [
    ("ij,jk->ik", [(2, 3), (3, 4)]),
    ("bij,bjk->bik", [(5, 2, 3), (5, 3, 4)]),
    ("ij,jk", [(2, 3), (3, 4)]),
    ("ba", [(2, 3)]),
    ("ii->i", [(3, 3)]),
    ("ii", [(3, 3)]),
    ("iij->j", [(3, 3, 4)]),
    ("iji,j->i", [(3, 4, 3), (4,)]),
    ("ijk->ki", [(2, 3, 4)]),
    ("i,j->ij", [(2,), (3,)]),
    ("i,i->", [(4,), (4,)]),
    ("ij,ij->ij", [(2, 3), (2, 3)]),
    ("...ij,...jk->...ik", [(5, 2, 3), (5, 3, 4)]),
    ("...ij,jk->...ik", [(5, 6, 2, 3), (3, 4)]),
    ("...i,...i", [(2, 3, 4), (3, 4)]),
    ("i...->...i", [(2, 3, 4)]),
    ("...i,...i->...", [(1, 3, 4), (2, 1, 4)]),
    ("ij,jk->ik", [(2, 1), (3, 4)]),
    ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 5)]),
    ("i,ij,j->", [(2,), (2, 3), (3,)]),
    ("i,j,k->kji", [(2,), (3,), (4,)]),
    ("ij,k->i", [(2, 3), (4,)]),
    ("bhtd,bhsd->bhts", [(2, 3, 4, 5), (2, 3, 6, 5)]),
    (" i j , j -> i ", [(2, 3), (3,)]),
    ("Ab,bA->", [(2, 3), (3, 2)]),
    ("ij,jk->ik", [(2, 0), (0, 4)]),
    (",i->i", [(), (3,)]),
]
MATMULS: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((3,), (3,)),
    ((3,), (3, 4)),
    ((2, 3), (3,)),
    ((2, 3), (3, 4)),
    ((3,), (5, 3, 4)),
    ((5, 2, 3), (3,)),
    ((5, 2, 3), (3, 4)),
    ((2, 3), (5, 3, 4)),
    ((5, 2, 3), (5, 3, 4)),
    ((1, 2, 3), (5, 3, 4)),
    ((6, 1, 2, 3), (5, 3, 4)),
    ((1, 1, 2, 3), (1, 3, 4)),
    ((6, 5, 2, 3), (6, 5, 3, 4)),
    ((6, 1, 2, 3), (1, 5, 3, 4)),
    ((0, 2, 3), (1, 3, 4)),
    ((2, 0), (0, 4)),
    ((0, 3), (3, 4)),
    ((1, 1), (1, 1)),
]


def product_cases() -> Iterator[Case]:
    for spec, shapes in EINSUMS:
        inputs = tuple(normal(*shape, seed=i) for i, shape in enumerate(shapes))
        yield Case(
            "einsum",
            lambda *xs, s=spec: td.einsum(s, *xs),
            lambda *xs, s=spec: np.einsum(s, *(x.numpy() for x in xs)),
            inputs,
            f"{spec} {shapes_label(inputs)}",
        )
    for a, b in MATMULS:
        yield case(
            "matmul",
            td.matmul,
            lambda x, y: np.matmul(x.numpy(), y.numpy()),
            normal(*a),
            normal(*b, seed=5),
        )
    integers = whole(2, 3), whole(3, 4, seed=1)
    yield case("matmul", td.matmul, torch.matmul, *integers)
    for shape in [(4,), (3, 4), (2, 3, 4), (0, 4)]:
        yield case("linear", td.linear, F.linear, normal(*shape), normal(5, 4), normal(5))
        yield case("linear", td.linear, F.linear, normal(*shape), normal(5, 4))


# dims, channels, outputs, kernel, keywords
CONVS: list[tuple[int, int, int, tuple[int, ...], dict[str, Any]]] = [
    (1, 3, 4, (3,), {}),
    (1, 4, 6, (2,), {"stride": 2, "padding": 1, "groups": 2}),
    (1, 3, 4, (4,), {"padding": "same"}),
    (1, 3, 4, (3,), {"padding": "same", "dilation": 2}),
    (1, 3, 4, (3,), {"padding": "valid"}),
    (2, 3, 4, (3, 2), {}),
    (2, 3, 4, (3, 3), {"stride": 2, "padding": 1}),
    (2, 3, 4, (3, 2), {"stride": (1, 2), "padding": (2, 1), "dilation": (2, 1)}),
    (2, 4, 4, (3, 3), {"groups": 4, "padding": 1}),
    (2, 4, 8, (3, 3), {"groups": 2, "padding": "same", "dilation": (1, 2)}),
    (2, 3, 4, (1, 1), {"stride": 3}),
    (3, 2, 3, (2, 3, 2), {"stride": (2, 1, 2), "padding": (0, 1, 1)}),
    (3, 2, 4, (2, 2, 2), {"groups": 2, "dilation": 2}),
    (3, 2, 3, (3, 2, 3), {"padding": "same"}),
]
TORCH_CONV: list[Callable[..., Any]] = [F.conv1d, F.conv2d, F.conv3d]
TORCH_MAX: list[Callable[..., Any]] = [F.max_pool1d, F.max_pool2d, F.max_pool3d]
TORCH_AVG: list[Callable[..., Any]] = [F.avg_pool1d, F.avg_pool2d, F.avg_pool3d]
SPATIAL = (7, 6, 5)
POOLS: list[dict[str, Any]] = [
    {"kernel": 2},
    {"kernel": 3, "stride": 1},
    {"kernel": 3, "stride": 2, "padding": 1},
    {"kernel": 2, "stride": 3},
]


def window_product_cases() -> Iterator[Case]:
    for dims, channels, outputs, kernel, keywords in CONVS:
        x = normal(2, channels, *SPATIAL[:dims])
        w = normal(outputs, channels // keywords.get("groups", 1), *kernel)
        for bias in ((), (normal(outputs),)):
            yield Case(
                "conv",
                lambda *xs, k=keywords: td.conv(*xs, **k),
                lambda *xs, f=TORCH_CONV[dims - 1], k=keywords: f(*xs, **k),
                (x, w, *bias),
                f"{kernel} {keywords} {'bias' if bias else ''}",
            )
    yield case("conv", td.conv, F.conv2d, normal(0, 3, 5, 5), normal(4, 3, 2, 2))
    for dims, keywords in product((1, 2, 3), POOLS):
        yield from pool_cases(dims, keywords)
    for keywords in ({"kernel": (3, 2), "dilation": 2}, {"kernel": 2, "dilation": (3, 1)}):
        yield Case(
            "max_pool",
            lambda x, k=keywords: td.max_pool(x, **k),
            lambda x, k=keywords: F.max_pool2d(x, k["kernel"], dilation=k["dilation"]),
            (normal(2, 3, 7, 6),),
            str(keywords),
        )


def pool_cases(dims: int, keywords: dict[str, Any]) -> Iterator[Case]:
    x = normal(2, 3, *SPATIAL[:dims])
    sizes = dict(keywords)
    kernel = sizes.pop("kernel")
    label = f"{dims}d {keywords}"
    yield Case(
        "max_pool",
        lambda x: td.max_pool(x, **keywords),
        lambda x: TORCH_MAX[dims - 1](x, kernel, **sizes),
        (x,),
        label,
    )
    for included in (True, False):
        yield Case(
            "avg_pool",
            lambda x, i=included: td.avg_pool(x, **keywords, count_include_pad=i),
            lambda x, i=included: TORCH_AVG[dims - 1](x, kernel, **sizes, count_include_pad=i),
            (x,),
            f"{label} {included}",
        )


def torch_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    if causal and bias is not None:  # PyTorch takes one or the other
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        bias, causal = torch.where(seen, bias, -torch.inf), False
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=bias, is_causal=causal, scale=scale, enable_gqa=True
    )


def attention_cases() -> Iterator[Case]:
    heads = [
        ((2, 4, 5, 3), (2, 4, 5, 3)),
        ((2, 4, 5, 3), (2, 2, 7, 3)),
        ((1, 6, 4, 2), (1, 1, 4, 2)),
    ]
    for (q, k), causal, scale in product(heads, (False, True), (None, 0.3)):
        inputs = normal(*q), normal(*k, seed=1), normal(*k[:3], 6, seed=2)
        keywords = {"causal": causal, "scale": scale}
        for shape in (None, (*q[:3], k[2]), (1, q[1], 1, k[2]), (q[2], k[2])):
            bias = () if shape is None else (normal(*shape, seed=3),)
            yield Case(
                "attention",
                lambda *xs, k=keywords: td.attention(*xs, **k),
                lambda *xs, k=keywords: torch_attention(*xs, **k),
                (*inputs, *bias),
                f"{q} {k} {keywords} bias {shape}",
            )
    hidden = np.where(normal(5, 5) > 1, -np.inf, 0.0)
    yield case("attention", td.attention, torch_attention, *[normal(2, 4, 5, 3)] * 3, hidden)


# Normalisation and indexing ----------------------------------------------------------------------


def gated(activation: Callable[..., Any]) -> Callable[..., Any]:
    def reference(x: torch.Tensor) -> torch.Tensor:
        gate, value = x.chunk(2, -1)
        return activation(gate) * value

    return reference


def activation_cases() -> Iterator[Case]:
    for shape in [(4,), (3, 4), (2, 3, 4), (0, 4), (3, 0)]:
        yield case("swiglu", td.swiglu, gated(F.silu), normal(*shape))
        yield case("geglu", td.geglu, gated(F.gelu), normal(*shape))
    for axis, x in product((0, -1), (X, X * 500, normal(3, 0), normal(0, 3))):
        yield case("softmax", lambda x, a=axis: td.softmax(x, a), lambda x, a=axis: x.softmax(a), x)
        yield case(
            "log_softmax",
            lambda x, a=axis: td.log_softmax(x, a),
            lambda x, a=axis: x.log_softmax(a),
            x,
        )
    masked = np.array([[0.0, -np.inf, 1.0]])
    yield case("softmax", td.softmax, lambda x: x.softmax(-1), masked)
    yield case("log_softmax", td.log_softmax, lambda x: x.log_softmax(-1), masked)
    for dims, affine in product((1, 2), (0, 1, 2)):
        given = [normal(*X.shape[-dims:], seed=i) for i in range(affine)]
        yield Case(
            "layer_norm",
            lambda x, *p, d=dims: td.layer_norm(x, *p, dims=d),
            lambda x, *p, d=dims: F.layer_norm(x, x.shape[-d:], *p),
            (X, *given),
            f"{dims} axes, {affine} parameters",
        )
        if affine < 2:
            yield Case(
                "rms_norm",
                lambda x, *p, d=dims: td.rms_norm(x, *p, dims=d, eps=1e-3),
                lambda x, *p, d=dims: F.rms_norm(x, x.shape[-d:], *p, eps=1e-3),
                (X, *given),
                f"{dims} axes, {affine} parameters",
            )
    yield case("layer_norm", td.layer_norm, lambda x: F.layer_norm(x, (4,)), normal(0, 4))


def torch_take(x: torch.Tensor, index: torch.Tensor, axis: int) -> np.ndarray:
    return np.take(x.numpy(), index.numpy(), axis)


def torch_scatter(x: torch.Tensor, index: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    return x.index_add(1, index.long(), updates)


def indexing_cases() -> Iterator[Case]:
    for axis, shape in product((0, 1, -1), ((), (4,), (2, 3), (0,))):
        index = np.random.default_rng(1).integers(0, 2, shape).astype(np.int32)
        yield Case(
            "take",
            lambda x, i, a=axis: td.take(x, i, a),
            lambda x, i, a=axis: torch_take(x, i, a),
            (X, np.asarray(index)),
            f"{axis} {shape}",
        )
    yield case("take", lambda x: td.take(x, [0, -1]), lambda x: x[[0, -1]], X)
    for axis in (0, -1):
        shape = (5, 3, 4) if axis == 0 else (2, 3, 5)
        index = np.random.default_rng(2).integers(0, X.shape[axis], shape)
        yield Case(
            "take_along_axis",
            lambda x, i, a=axis: td.take_along_axis(x, i, a),
            lambda x, i, a=axis: x.gather(a, i),
            (X, index),
            str(axis),
        )
    index = np.array([2, 0, 2, 1], np.int32)
    yield case(
        "scatter_add",
        lambda x, i, u: td.scatter_add(x, i, u, 1),
        torch_scatter,
        X,
        index,
        normal(2, 4, 4),
    )
    for given in (whole(2, 3, high=4) % 4, np.array([5, 0, 3], np.uint8)):
        yield case(
            "one_hot",
            lambda i: td.one_hot(i, 300, td.int32),
            lambda i: F.one_hot(i.long(), 300),
            given,
        )
    for shape in ((), (3,), (2, 3), (0,)):
        index = np.asarray(np.random.default_rng(3).integers(0, 5, shape).astype(np.int32))
        yield case("embedding", td.embedding, F.embedding, index, normal(5, 4))


CASES = [
    *elementwise_cases(),
    *shaping_cases(),
    *reduction_cases(),
    *product_cases(),
    *window_product_cases(),
    *attention_cases(),
    *activation_cases(),
    *indexing_cases(),
]


def eager(call: Callable[..., Any], inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    results, _ = trees.flatten(call(*(td.tensor(x) for x in inputs)))
    return [r.numpy() for r in results]


def traced(call: Callable[..., Any], inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    graph = td.trace(call, *inputs)
    values = evaluate_float64(graph, dict(zip(graph.leaves, inputs)))
    return [v.astype(t.dtype.numpy) for v, t in zip(values, graph.output_types)]


def as_arrays(found: Any) -> list[np.ndarray]:
    parts = found if isinstance(found, (tuple, list)) else [found]
    return [np.asarray(p) for p in parts]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("case", CASES, ids=[f"{c.name} {c.label}" for c in CASES])
def test_function(case: Case) -> None:
    found = eager(case.call, case.inputs)
    expected = as_arrays(case.reference(*(torch.from_numpy(x) for x in case.inputs)))
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected):
        assert ours.shape == theirs.shape
        assert (ours.dtype.kind == "f") == (theirs.dtype.kind == "f")
        assert (ours.dtype == bool) == (theirs.dtype == bool)
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)
    for ours, compiled in zip(found, traced(case.call, case.inputs), strict=True):
        assert ours.dtype == compiled.dtype
        assert ours.shape == compiled.shape
        assert ours.tobytes() == compiled.tobytes()


def is_smooth(case: Case) -> bool:
    """Whether the call takes floats, and finite ones only."""
    floats = [x for x in case.inputs if x.dtype == np.float64]
    return bool(floats) and all(np.isfinite(x).all() for x in floats)


SMOOTH = [c for c in CASES if is_smooth(c)]


@pytest.mark.parametrize("case", SMOOTH, ids=[f"{c.name} {c.label}" for c in SMOOTH])
def test_forward_and_reverse_mode_agree(case: Case) -> None:
    """⟨ct, J v⟩ = ⟨Jᵀ ct, v⟩; the two modes share no rule."""
    rng = np.random.default_rng(0)
    moves = [np.asarray(rng.normal(size=x.shape)) for x in case.inputs]
    tangents = [m if x.dtype == np.float64 else x for x, m in zip(case.inputs, moves)]
    results, slopes = (trees.flatten(t)[0] for t in td.jvp(case.call, case.inputs, tangents))
    primal, pull = td.vjp(case.call, *case.inputs)
    structure = trees.flatten(primal)[1]
    cts = [np.asarray(rng.normal(size=r.shape), r.dtype.numpy) for r in results]
    pulled = pull(structure.rebuild(cts))
    pairs = zip(slopes, cts)
    forward = sum((s.numpy() * ct).sum() for s, ct in pairs if s.dtype.is_float)
    reverse = sum((g.numpy() * t).sum() for g, t in zip(pulled, tangents) if g.dtype.is_float)
    np.testing.assert_allclose(forward, reverse, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["mean", "var", "std"])
def test_empty_means_are_nan(name: str) -> None:
    assert np.isnan(getattr(td, name)(td.zeros((0,))).item())


METHODS = [
    "reshape", "permute", "transpose", "flatten", "squeeze", "unsqueeze", "sum", "mean", "var",
    "max", "min", "prod", "argmax", "argmin",
]  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_methods_are_the_functions(name: str) -> None:
    arguments = {
        "reshape": (4, 6),
        "permute": (2, 1, 0),
        "transpose": (0, 1),
        "unsqueeze": (1,),
    }.get(name, ())
    x = td.tensor(X)
    method, function = getattr(x, name)(*arguments), getattr(td, name)(x, *arguments)
    np.testing.assert_array_equal(method.numpy(), function.numpy())


def test_operators() -> None:
    x, y = normal(3, 4), positive(3, 4)
    a, b = td.tensor(x), td.tensor(y)
    np.testing.assert_array_equal((-a + b * 2 - a / b).numpy(), -x + y * 2 - x / y)
    np.testing.assert_array_equal((1 - a + 2 * b + 1 / b).numpy(), 1 - x + 2 * y + 1 / y)
    np.testing.assert_array_equal((a // b).numpy(), x // y)
    np.testing.assert_array_equal((a % b).numpy(), x % y)
    np.testing.assert_allclose((2**a + b**1.5).numpy(), 2**x + y**1.5, rtol=1e-15)
    np.testing.assert_array_equal((abs(a) @ b.T).numpy(), abs(x) @ y.T)
    flags = (a > 0) & (b < 1) | ~(a >= b) ^ (a == b) | (a != b) & (a <= b)
    np.testing.assert_array_equal(
        flags.numpy(), (x > 0) & (y < 1) | ~(x >= y) ^ (x == y) | (x != y) & (x <= y)
    )


@pytest.mark.parametrize("dtype", [td.int32, td.uint32, td.uint8, td.int8, td.bool_])
def test_sums_of_integers_do_not_wrap(dtype: td.Spec) -> None:
    """In 64 bits, as PyTorch's."""
    most = np.full(300, 1 if dtype is td.bool_ else dtype.range()[1])
    x = td.tensor(most.astype(dtype.numpy))
    for total in (td.sum(x), td.cumsum(x, 0)[-1]):
        assert total.dtype is td.int64
        assert total.item() == int(most.astype(np.int64).sum())
    for total in (td.prod(x[:2]), td.cumprod(x[:2], 0)[-1]):
        assert total.dtype is td.int64
        assert total.item() == int(np.prod(most[:2].astype(np.int64)))


def test_sums_in_a_dtype_that_is_given() -> None:
    x = td.tensor(np.array([200, 100], np.uint8))
    for total in (
        td.sum(x, dtype=td.int32),
        x.sum(0, False, td.int32),
        td.cumsum(x, 0, dtype=td.int32)[-1],
    ):
        assert total.dtype is td.int32
        assert total.item() == 300
    assert td.mean(x, dtype=td.float32).item() == 150
    assert td.prod(x, dtype=td.float64).dtype is td.float64
    assert td.cumprod(x, 0, dtype=td.float32).tolist() == [200, 20000]


@pytest.mark.parametrize("function", [td.norm, td.std])
def test_roots_have_no_gradient_at_zero_as_in_torch(function: Callable[..., Any]) -> None:
    gradient = td.grad(lambda x: function(x))(td.zeros((3,)))
    np.testing.assert_array_equal(gradient.numpy(), np.zeros(3))


def test_log1p_has_an_exact_gradient_for_small_arguments() -> None:
    x = np.array([0.0, 1e-20, -1e-15, 1e-9, -0.3, 1.0, 1e6])
    gradient = td.grad(lambda x: td.log1p(x).sum())(x)
    np.testing.assert_allclose(gradient.numpy(), 1 / (1 + x), rtol=1e-14)


def test_max_pool_pads_integers_with_their_least() -> None:
    x = np.full((1, 1, 3), -5, np.int32)
    np.testing.assert_array_equal(td.max_pool(td.tensor(x), 3, 1, 1).numpy(), x)
