"""Rows of the table of functions: a call of ours, PyTorch's of the same, and what both are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

import treadle as td
from sizes import Problem, rounded
from test_more_functions import SHAPES, distinct, normal, positive

Call = Callable[..., Any]
rng = np.random.default_rng(12)


class Row(NamedTuple):
    name: str
    ours: Call
    theirs: Call
    arrays: tuple[np.ndarray, ...]
    has_gradient: bool = True  # whether PyTorch gives one for the floats


def row(name: str, ours: Call, theirs: Call, *arrays: np.ndarray) -> Row:
    return Row(name, ours, theirs, arrays)


def options(name: str, theirs: Call, arrays: tuple[np.ndarray, ...], *given: Any) -> list[Row]:
    """A function with the same arrays and several sets of options: `(ours, theirs)` or both alike."""
    ours = getattr(td, name)
    found = []
    for each in given:
        mine, others = each if isinstance(each, tuple) else (each, each)
        call = lambda *x, f=ours, o=mine: f(*x, **o)  # noqa: E731
        found.append(Row(name, call, lambda *x, o=others: theirs(*x, **o), arrays))
    return found


def unary(names: str, draw: Call = normal, module: Any = torch, **aliases: str) -> list[Row]:
    return [
        row(n, getattr(td, n), getattr(module, aliases.get(n, n)), draw(*s))
        for n in names.split()
        for s in SHAPES
    ]


def binary(names: str, *draws: Call, has_gradient: bool = True, **aliases: str) -> list[Row]:
    pairs = [*((s, s) for s in SHAPES), ((5, 3), (3,)), ((4, 1), (1, 6))]
    first, second = draws or (normal, normal)
    return [
        Row(
            n,
            getattr(td, n),
            getattr(torch, aliases.get(n, n)),
            (first(*a), second(*b)),
            has_gradient,
        )
        for n in names.split()
        for a, b in pairs
    ]


def whole(*shape: int) -> np.ndarray:
    return rng.integers(-9, 9, shape).astype(np.int32)


def below(n: int, *shape: int) -> np.ndarray:
    return rng.integers(0, n, shape).astype(np.int32)


def flags(*shape: int) -> np.ndarray:
    return rng.integers(0, 2, shape) > 0


def away_from_zero(*shape: int) -> np.ndarray:
    return rounded(np.where(flags(*shape), 1, -1) * positive(*shape))


def near_one(*shape: int) -> np.ndarray:
    """Factors of either sign whose products neither overflow nor vanish."""
    return rounded(np.where(flags(*shape), 1, -1) * rng.uniform(0.6, 1.6, shape))


def divisors(*shape: int) -> np.ndarray:
    return (rng.integers(1, 7, shape) * np.where(flags(*shape), 1, -1)).astype(np.int32)


# Elementwise

ELEMENTWISE = [
    *unary("abs ceil cos erf exp floor neg reciprocal round sign sin square tanh", away_from_zero),
    *unary("log log1p log2 rsqrt sqrt", positive),
    *unary("isnan isfinite isinf logical_not", lambda *s: np.where(flags(*s), normal(*s), np.inf)),
    *unary("stop_gradient", stop_gradient="detach", module=torch.Tensor),
    *unary("bitwise_not", whole),
    *binary("add sub mul maximum minimum"),
    *binary("div", normal, away_from_zero),
    *binary("remainder", normal, away_from_zero, has_gradient=False),
    *binary("floor_divide", normal, away_from_zero, has_gradient=False),
    *binary("remainder floor_divide", whole, divisors),
    *binary("pow", positive, normal),
    *binary("eq ne lt le gt ge", whole, whole),
    *binary("lt ge", normal, normal, has_gradient=False),
    *binary("logical_and logical_or logical_xor", flags, flags),
    *binary("bitwise_and bitwise_or bitwise_xor", whole, whole),
    *(
        row("pow", lambda x, e=e: td.pow(x, e), lambda x, e=e: torch.pow(x, e), positive(17, 5))
        for e in (-2, 0.5, 2, 3, 5, 2.5)
    ),
    *(
        row("clamp", lambda x, a=a: td.clamp(x, *a), lambda x, a=a: torch.clamp(x, *a), normal(*s))
        for a, s in zip(((-0.5, 0.5), (0.1, None), (None, 0.3), (-2, 1), (1, -1)), SHAPES)
    ),
    row("clamp", td.clamp, torch.clamp, normal(5, 3), normal(3) - 2, normal(5, 1) + 2),
    *(
        row("where", td.where, torch.where, flags(*a), normal(*b), normal(*c))
        for a, b, c in [*((s, s, s) for s in SHAPES), ((5, 3), (3,), (5, 1))]
    ),
    *(
        row(
            "masked_fill",
            lambda x, m: td.masked_fill(x, m, -2.0),
            lambda x, m: x.masked_fill(m, -2.0),
            normal(*s),
            flags(*s),
        )
        for s in SHAPES
    ),
    *(
        row("cast", lambda x, d=d: td.cast(x, d), lambda x, t=t: x.to(t), draw(*s))
        for d, t, draw, s in zip(
            (td.int32, td.bool_, td.float32, td.int64),
            (torch.int32, torch.bool, torch.float64, torch.int64),
            (away_from_zero, whole, whole, away_from_zero),
            SHAPES,
        )
    ),
    row("cast", lambda x: td.cast(td.cast(x, td.float64), td.float32), lambda x: x, normal(1, 33)),
]

# Activations and normalisation


def halves(activation: Call) -> Call:
    def gated(x: torch.Tensor) -> torch.Tensor:
        gate, value = x.chunk(2, -1)
        return activation(gate) * value

    return gated


def exact_hardsigmoid(x: torch.Tensor) -> torch.Tensor:
    """torch's own backward has a sixth in 32 bits."""
    return torch.clamp(x / 6 + 0.5, 0, 1)


PAIRED = [(8,), (5, 4), (2, 3, 6), (17, 10), (1, 34)]
ACTIVATIONS = [
    *unary("relu sigmoid", away_from_zero),
    *unary("elu leaky_relu softplus silu gelu celu", away_from_zero, F),
    *unary("relu6 selu mish hardswish softsign tanhshrink softshrink hardshrink", distinct, F),
    *unary("hardtanh", distinct, F),
    *unary("log_sigmoid", normal, F, log_sigmoid="logsigmoid"),
    *(row("hardsigmoid", td.hardsigmoid, exact_hardsigmoid, normal(*s) * 4) for s in SHAPES),
    *options("gelu", F.gelu, (normal(17, 5),), {"approximate": "tanh"}),
    *options("elu", F.elu, (normal(17, 5),), {"alpha": 0.3}),
    *options("celu", F.celu, (normal(17, 5),), {"alpha": 0.5}),
    *options("leaky_relu", F.leaky_relu, (normal(17, 5),), {"negative_slope": 0.3}),
    *options("softplus", F.softplus, (normal(17, 5) * 9,), {"beta": 2.0, "threshold": 5.0}),
    *options("hardtanh", F.hardtanh, (normal(17, 5),), {"min_val": -0.3, "max_val": 2.0}),
    *options("softshrink", F.softshrink, (normal(17, 5),), {"lambd": 0.2}),
    *options("hardshrink", F.hardshrink, (normal(17, 5),), {"lambd": 1.0}),
    *(
        row(
            "threshold",
            lambda x: td.threshold(x, 0.2, -3.0),
            lambda x: F.threshold(x, 0.2, -3.0),
            normal(*s),
        )
        for s in SHAPES
    ),
    *(
        row("prelu", td.prelu, F.prelu, normal(*s), normal(n))
        for s, n in [((7,), 1), ((5, 3), 3), ((2, 3, 4), 3), ((17, 5), 1), ((2, 6, 3, 2), 6)]
    ),
    *(row("swiglu", td.swiglu, halves(F.silu), normal(*s)) for s in PAIRED),
    *(row("geglu", td.geglu, halves(F.gelu), normal(*s)) for s in PAIRED),
    *(
        row("glu", lambda x, a=a: td.glu(x, a), lambda x, a=a: F.glu(x, a), normal(*s))
        for s, a in [*((s, -1) for s in PAIRED), ((6, 3), 0), ((2, 8, 3), 1)]
    ),
    *(
        row(
            n,
            lambda x, n=n, a=a: getattr(td, n)(x, a),
            lambda x, n=n, a=a: getattr(x, n)(a),
            normal(*s),
        )
        for n in ("softmax", "log_softmax")
        for s, a in [*((s, -1) for s in SHAPES), ((17, 5), 0), ((2, 33, 3), 1)]
    ),
    *(
        row(
            "layer_norm",
            lambda x, *p, d=d: td.layer_norm(x, *p, dims=d, eps=1e-3),
            lambda x, *p, d=d: F.layer_norm(x, x.shape[-d:], *p, eps=1e-3),
            normal(*s),
            *(normal(*s[-d:]) for _ in range(count)),
        )
        for s, d, count in [
            ((5, 3), 1, 0),
            ((17, 5), 1, 1),
            ((3, 33), 1, 2),
            ((2, 3, 4), 2, 2),
            ((64, 16), 1, 2),
        ]
    ),
    *(
        row(
            "rms_norm",
            lambda x, *p, d=d: td.rms_norm(x, *p, dims=d, eps=1e-3),
            lambda x, *p, d=d: F.rms_norm(x, x.shape[-d:], *p, eps=1e-3),
            normal(*s),
            *(normal(*s[-d:]) for _ in range(count)),
        )
        for s, d, count in [
            ((5, 3), 1, 0),
            ((17, 5), 1, 1),
            ((3, 33), 1, 1),
            ((2, 3, 4), 2, 1),
            ((64, 16), 1, 1),
        ]
    ),
]

# Shapes

SHAPING = [
    *(
        row("reshape", lambda x, t=t: td.reshape(x, t), lambda x, t=t: x.reshape(t), normal(*s))
        for s, t in [
            ((6,), (2, 3)),
            ((5, 3), (-1,)),
            ((2, 3, 4), (4, -1)),
            ((17, 6), (3, 34)),
            ((1, 33), (33, 1)),
        ]
    ),
    *(
        row("permute", lambda x, a=a: td.permute(x, a), lambda x, a=a: x.permute(a), normal(*s))
        for s, a in [
            ((6,), (0,)),
            ((5, 3), (1, 0)),
            ((2, 3, 4), (2, 0, 1)),
            ((17, 33), (1, 0)),
            ((2, 5, 7, 3), (-1, 1, 0, 2)),
        ]
    ),
    *(
        row(n, lambda x, n=n, a=a: getattr(td, n)(x, *a), lambda x, t=t, a=a: t(x, *a), normal(*s))
        for n, t in (("transpose", torch.transpose), ("moveaxis", torch.moveaxis))
        for s, a in [
            ((5, 3), (0, 1)),
            ((2, 3, 4), (0, -1)),
            ((17, 33), (1, 0)),
            ((2, 5, 7, 3), (1, 2)),
            ((1, 9), (-1, 0)),
        ]
    ),
    *(
        row("flatten", lambda x, a=a: td.flatten(x, *a), lambda x, a=a: x.flatten(*a), normal(*s))
        for s, a in [
            ((7,), ()),
            ((5, 3), (1,)),
            ((2, 3, 4), (0, 1)),
            ((17, 5, 2), (1, 2)),
            ((2, 3, 4, 5), (-2, -1)),
        ]
    ),
    *(
        row("squeeze", lambda x, a=a: td.squeeze(x, *a), lambda x, a=a: x.squeeze(*a), normal(*s))
        for s, a in [
            ((1, 3, 1), ()),
            ((1, 33), (0,)),
            ((17, 1, 5), (1,)),
            ((1, 3, 1), (-1,)),
            ((1, 4, 1), ((0, 2),)),
        ]
    ),
    *(
        row("unsqueeze", lambda x, a=a: td.unsqueeze(x, a), lambda x, a=a: x.unsqueeze(a), normal(*s))
        for s, a in zip(SHAPES, (0, -1, 1, 0, 2))
    ),
    *(
        row("expand", lambda x, t=t: td.expand(x, t), lambda x, t=t: x.expand(t), normal(*s))
        for s, t in [
            ((1,), (7,)),
            ((5, 1), (5, 3)),
            ((1, 3, 1), (2, 3, 4)),
            ((33,), (17, 33)),
            ((), (5,)),
        ]
    ),
    *(
        row(n, lambda x, n=n, a=a: getattr(td, n)(x, *a), lambda x, n=n, a=a: getattr(x, n)(*a), normal(*s))
        for n, cases in (
            ("split", [((9,), (4,)), ((5, 6), (2, 1)), ((17, 4), ([1, 9, 7],)), ((33, 2), (16,)), ((2, 3, 4), (3, -1))]),
            ("chunk", [((9,), (2,)), ((5, 6), (3, 1)), ((17, 4), (4,)), ((33, 2), (2,)), ((2, 3, 4), (9, -1))]),
            ("roll", [((9,), (2, 0)), ((5, 6), (-1, 1)), ((17, 4), (20, 0)), ((33, 2), (16, 0)), ((2, 3, 4), (-6, -1))]),
            ("repeat", [((9,), (2,)), ((5, 3), (2, 3)), ((17,), (3, 2)), ((2, 3, 4), (1, 2, 1)), ((1, 33), (5, 1))]),
            ("tril", [((4, 4), ()), ((5, 3), (1,)), ((17, 33), (-2,)), ((2, 3, 4), (9,)), ((2, 17, 5), (-1,))]),
            ("triu", [((4, 4), ()), ((5, 3), (1,)), ((17, 33), (-2,)), ((2, 3, 4), (9,)), ((2, 17, 5), (-1,))]),
        )
        for s, a in cases
    ),
    *(
        row("flip", lambda x, a=a: td.flip(x, a), lambda x, a=a: x.flip(a), normal(*s))
        for s, a in [((9,), (0,)), ((5, 6), (0, 1)), ((17, 33), (1,)), ((2, 3, 4), (-1,)), ((33, 2), (0,))]
    ),
    *(
        row(n, lambda *x, n=n, a=a: getattr(td, n)(x, a), lambda *x, t=t, a=a: t(x, a), *(normal(*s) for _ in range(3)))
        for n, t in (("concat", torch.cat), ("stack", torch.stack))
        for s, a in [((7,), 0), ((5, 3), 1), ((17, 5), 0), ((2, 3, 4), -1), ((2, 33), 1)]
    ),
    *(
        row(n, getattr(td, n), getattr(torch, n), normal(*s))
        for n in ("zeros_like", "ones_like")
        for s in SHAPES
    ),
]  # fmt: skip


def f_pad(x: torch.Tensor, amounts: Any, **given: Any) -> torch.Tensor:
    return F.pad(x, [n for pair in reversed(amounts) for n in pair], **given)


def spatial_pad(mode: str) -> list[Row]:
    amounts = [(1, 2)], [(2, 1), (0, 3)], [(1, 1), (1, 0), (0, 1)]
    shapes = (2, 3, 9), (1, 2, 5, 6), (1, 2, 3, 4, 3)
    return [
        row(
            "pad",
            lambda x, a=a: td.pad(x, [(0, 0), (0, 0), *a], mode=mode),
            lambda x, a=a: f_pad(x, a, mode=mode),
            normal(*s),
        )
        for a, s in zip(amounts, shapes)
    ]


def update(x: torch.Tensor, new: torch.Tensor, starts: Any) -> torch.Tensor:
    index = tuple(slice(int(s), int(s) + n) for s, n in zip(starts, new.shape))
    mask = torch.zeros_like(x, dtype=torch.bool)
    mask[index] = True
    spread = F.pad(new, [n for i, s in reversed([*enumerate(starts)]) for n in (int(s), x.shape[i] - int(s) - new.shape[i])])  # fmt: skip
    return torch.where(mask, spread, x)


WINDOWS = [((9,), (2,), (4,)), ((5, 6), (1, 2), (3, 4)), ((17, 33), (0, 16), (17, 16)), ((2, 3, 4), (1, 0, 2), (1, 2, 2)), ((33, 2), (5, 1), (20, 1))]  # fmt: skip


def filled(name: str, *calls: tuple[tuple[Any, ...], Any]) -> list[Row]:
    """Tensors made from nothing: beside NumPy's arrays."""
    return [
        row(name, lambda a=a: getattr(td, name)(*a), lambda e=e: torch.as_tensor(e))
        for a, e in calls
    ]


MAKING = [
    *filled("full", *((((s), 1.5), np.full(s, 1.5)) for s in SHAPES)),
    *filled("zeros", *((((s),), np.zeros(s)) for s in SHAPES)),
    *filled("ones", *((((s),), np.ones(s)) for s in SHAPES)),
    *filled("iota", *(((s, a), np.indices(s)[a]) for s, a in zip(SHAPES, (0, 0, 1, -1, 1)))),
    *filled("arange", *((a, np.arange(*a)) for a in ((5,), (2, 35, 2), (5, -2, -2), (0, 33), (3, 3)))),
    *filled("eye", *((a, np.eye(*a)) for a in ((1,), (5,), (2, 4), (17, 3), (33,)))),
    *(
        row("pad", lambda x, a=a, v=v: td.pad(x, a, v), lambda x, a=a, v=v: f_pad(x, a, value=v), normal(*s))
        for s, a, v in [((7,), [(1, 2)], 0.0), ((5, 3), [(0, 2), (3, 0)], 1.5), ((17, 5), [(-1, 2), (0, -2)], 0.0), ((2, 3, 4), [(0, 0)] * 3, 9.0), ((1, 33), [(2, 2), (0, 15)], -1.0)]
    ),
    *(r for mode in ("reflect", "replicate", "circular") for r in spatial_pad(mode)),
    *(
        row("dynamic_slice", lambda x, i, n=n: td.dynamic_slice(x, i, n), lambda x, i, n=n: x[tuple(slice(int(a), int(a) + k) for a, k in zip(i, n))], normal(*s), np.array(a, np.int32))
        for s, a, n in WINDOWS
    ),
    *(
        row("dynamic_update_slice", td.dynamic_update_slice, update, normal(*s), normal(*n), np.array(a, np.int32))
        for s, a, n in WINDOWS
    ),
]  # fmt: skip

# Reductions and ordering

AXES = [((7,), None), ((5, 3), 0), ((17, 5), 1), ((2, 3, 4), (0, 2)), ((33, 17), -1), ((64, 3), 0)]
KEPT = {"axis": "dim", "keepdims": "keepdim"}


def over(names: str, draw: Call = normal, has_gradient: bool = True, **theirs: Call) -> list[Row]:
    """Every function over the axes above, every second one with axes kept."""
    found = []
    for name in names.split():
        call = theirs.get(name) or getattr(torch, name)
        for i, (shape, axis) in enumerate(AXES):
            axes = tuple(range(len(shape))) if axis is None else axis
            mine = lambda x, n=name, a=axis, k=i % 2 > 0: getattr(td, n)(x, axis=a, keepdims=k)  # noqa: E731
            found.append(
                Row(
                    name,
                    mine,
                    lambda x, f=call, a=axes, k=i % 2 > 0: f(x, a, k),
                    (draw(*shape),),
                    has_gradient,
                )
            )
    return found


def product(x: torch.Tensor, axes: Any, keep: bool) -> torch.Tensor:
    listed = sorted((a % x.ndim for a in ([axes] if isinstance(axes, int) else axes)), reverse=True)
    for axis in listed:
        x = x.prod(axis, keep)
    return x


def along(name: str, theirs: Call, draw: Call = distinct, **given: Any) -> list[Row]:
    shapes = [((9,), 0), ((5, 3), 0), ((17, 5), -1), ((2, 33, 3), 1), ((3, 64), -1)]
    return [
        row(
            name,
            lambda x, a=a: getattr(td, name)(x, axis=a, **given),
            lambda x, a=a: theirs(x, dim=a, **given),
            draw(*s),
        )
        for s, a in shapes
    ]


def nearest(index: Call) -> list[Row]:
    name = index.__name__
    return [
        row(
            name,
            lambda x, a=a, k=k: getattr(td, name)(x, a, k),
            lambda x, a=a, k=k: index(x, a, k),
            distinct(*s),
        )
        for s, a, k in [
            ((9,), 0, False),
            ((5, 3), 0, True),
            ((17, 5), -1, False),
            ((2, 33, 3), 1, True),
            ((3, 4), None, False),
        ]
    ]


REDUCTIONS = [
    *over("sum mean"),
    *over("max min", distinct, max=torch.amax, min=torch.amin),
    *over("prod", near_one, prod=product),
    *over("logsumexp"),
    *over("norm", norm=lambda x, a, k: torch.linalg.vector_norm(x, 2, a, k)),
    *over("var std", var=lambda x, a, k: torch.var(x, a, keepdim=k), std=lambda x, a, k: torch.std(x, a, keepdim=k)),
    *over("any all", flags),
    *nearest(torch.argmax), *nearest(torch.argmin),
    *along("cumsum", torch.cumsum, normal),
    *along("sort", lambda x, dim: tuple(torch.sort(x, dim=dim, stable=True))),
    *along("sort", lambda x, dim, descending: tuple(torch.sort(x, dim=dim, descending=descending, stable=True)), descending=True),
    *along("argsort", torch.argsort),
    *along("topk", lambda x, k, dim: tuple(torch.topk(x, k, dim)), k=3),
    *along("topk", lambda x, k, dim, largest: tuple(torch.topk(x, k, dim, largest)), k=2, largest=False),
]  # fmt: skip

# Products, convolutions, windows

MATMULS = [((5, 3), (3, 4)), ((17, 33), (33, 5)), ((2, 3, 4), (4, 5)), ((6, 1, 2, 3), (5, 3, 17)), ((33,), (33, 2)), ((64, 16), (16, 16))]  # fmt: skip
EINSUMS = [
    ("ij,jk->ik", (5, 3), (3, 17)),
    ("bij,bjk->bik", (2, 3, 4), (2, 4, 33)),
    ("ii->i", (17, 17)),
    ("i,j->ij", (7,), (33,)),
    ("...i,...i", (2, 3, 17), (3, 17)),
    ("bhtd,bhsd->bhts", (2, 3, 4, 5), (2, 3, 6, 5)),
    ("ij,jk,kl->il", (2, 3), (3, 4), (4, 5)),
]
CONVS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 3, 9), (4, 3, 3), {}),
    ((2, 4, 17), (6, 2, 2), {"stride": 2, "padding": 1, "groups": 2}),
    ((2, 3, 7, 6), (4, 3, 3, 2), {"padding": (2, 1), "dilation": (2, 1)}),
    ((3, 4, 8, 8), (16, 4, 3, 3), {"padding": "same"}),
    ((1, 2, 3, 4, 3), (3, 2, 2, 2, 2), {"stride": (1, 2, 1)}),
]
TRANSPOSED: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 3, 9), (3, 4, 3), {}),
    ((2, 4, 17), (4, 3, 2), {"stride": 2, "padding": 1, "groups": 2}),
    ((2, 3, 7, 6), (3, 4, 3, 2), {"padding": (2, 1), "dilation": (2, 1)}),
    ((3, 4, 4, 4), (4, 5, 3, 3), {"stride": 2, "output_padding": 1}),
    ((1, 2, 3, 2, 3), (2, 3, 2, 2, 2), {"stride": (1, 2, 1)}),
]


def by_dims(stem: str) -> Call:
    """F.conv1d, F.conv2d or F.conv3d, by the axes of what it is given."""
    return lambda x, *rest, **o: getattr(F, f"{stem}{x.ndim - 2}d")(x, *rest, **o)


def convolutions(name: str, theirs: Call, table: Any, outputs: Call) -> list[Row]:
    return [
        row(
            name,
            lambda *a, o=o: getattr(td, name)(*a, **o),
            lambda *a, o=o: theirs(*a, **o),
            normal(*s),
            normal(*w),
            normal(outputs(w, o)),
        )
        for s, w, o in table
    ]


def pools(name: str, theirs: Call, cases: Any) -> list[Row]:
    """Options of ours, and PyTorch's kernel_size for our kernel."""
    return [
        row(
            name,
            lambda x, o=o: getattr(td, name)(x, **o),
            lambda x, o=o: theirs(x, o["kernel"], **{n: v for n, v in o.items() if n != "kernel"}),
            distinct(*s),
        )
        for s, o in cases
    ]


POOLS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((2, 3, 9), {"kernel": 2}),
    ((2, 3, 17), {"kernel": 3, "stride": 2, "padding": 1}),
    ((2, 2, 7, 6), {"kernel": (3, 2), "stride": (1, 2)}),
    ((1, 2, 8, 8), {"kernel": 3, "stride": 2, "ceil_mode": True}),
    ((1, 2, 4, 3, 5), {"kernel": 2, "padding": 1}),
]
ADAPTIVE = [((2, 3, 9), 2), ((2, 3, 17), 1), ((2, 2, 7, 6), (3, 2)), ((1, 2, 8, 8), 4), ((1, 2, 4, 3, 5), 2)]  # fmt: skip


def unpool_rows() -> list[Row]:
    found = []
    for kernel, spatial in ((2, (5,)), (3, (17,)), (2, (3, 4)), (1, (5, 2)), (2, (2, 1, 2))):
        shape = (2, 2, *spatial)
        length, count = int(np.prod([n * kernel for n in spatial])), int(np.prod(spatial))
        index = np.stack([rng.permutation(length)[:count] for _ in range(4)]).reshape(shape)
        theirs = getattr(F, f"max_unpool{len(spatial)}d")
        found.append(
            row(
                "max_unpool",
                lambda x, i, k=kernel: td.max_unpool(x, i, k),
                lambda x, i, k=kernel, f=theirs: f(x, i.long(), k),
                normal(*shape),
                index,
            )
        )
    return found


def torch_attention(q: Any, k: Any, v: Any, bias: Any = None, causal: bool = False) -> Any:
    return F.scaled_dot_product_attention(q, k, v, bias, is_causal=causal, enable_gqa=True)


PRODUCTS = [
    *(row("matmul", td.matmul, torch.matmul, normal(*a), normal(*b)) for a, b in MATMULS),
    *(row("einsum", lambda *x, e=e: td.einsum(e, *x), lambda *x, e=e: torch.einsum(e, *x), *(normal(*s) for s in shapes)) for e, *shapes in EINSUMS),
    *(row("linear", td.linear, F.linear, normal(*s), normal(5, s[-1]), normal(5)) for s in [(4,), (17, 3), (2, 3, 33), (64, 16), (1, 7)]),
    *convolutions("conv", by_dims("conv"), CONVS, lambda w, o: w[0]),
    *convolutions("conv_transpose", by_dims("conv_transpose"), TRANSPOSED, lambda w, o: w[1] * o.get("groups", 1)),
    *(
        row("attention", lambda *a, c=c: td.attention(*a, causal=c), lambda *a, c=c: torch_attention(*a, causal=c), normal(*q), normal(*k), normal(*k), *(normal(*b) for b in bias))
        for q, k, c, bias in [
            ((2, 4, 5, 3), (2, 4, 5, 3), False, ()),
            ((2, 4, 7, 8), (2, 2, 7, 8), True, ()),
            ((1, 6, 4, 2), (1, 1, 9, 2), False, ()),
            ((2, 2, 17, 4), (2, 2, 33, 4), False, ((17, 33),)),
            ((1, 2, 16, 16), (1, 2, 16, 16), True, ()),
        ]
    ),
    *pools("max_pool", by_dims("max_pool"), POOLS),
    *pools("avg_pool", by_dims("avg_pool"), POOLS),
    *pools("max_pool_with_indices", lambda x, *k, **o: getattr(F, f"max_pool{x.ndim - 2}d")(x, *k, return_indices=True, **o), [(s, {n: v for n, v in o.items() if n != "ceil_mode"}) for s, o in POOLS]),
    *(row(n, lambda x, n=n, o=o: getattr(td, n)(x, o), lambda x, t=t, o=o: getattr(F, f"{t}{x.ndim - 2}d")(x, o), distinct(*s)) for n, t in (("adaptive_avg_pool", "adaptive_avg_pool"), ("adaptive_max_pool", "adaptive_max_pool")) for s, o in ADAPTIVE),
    *(row("lp_pool", lambda x, a=a: td.lp_pool(x, *a), lambda x, a=a: getattr(F, f"lp_pool{x.ndim - 2}d")(x, *a), positive(*s)) for s, a in [((2, 3, 9), (2, 2)), ((2, 3, 17), (3, 3, 2)), ((2, 2, 7, 6), (2, (3, 2))), ((1, 2, 8, 8), (1, 2)), ((1, 2, 4, 3, 5), (2, 2))]),
    *unpool_rows(),
    *(row("pixel_shuffle", lambda x, r=r: td.pixel_shuffle(x, r), lambda x, r=r: F.pixel_shuffle(x, r), normal(*s)) for s, r in [((2, 8, 3, 4), 2), ((1, 9, 2, 2), 3), ((2, 3, 4, 4), 1), ((4, 3, 5), 2), ((2, 16, 5, 3), 4)]),
    *(row("pixel_unshuffle", lambda x, r=r: td.pixel_unshuffle(x, r), lambda x, r=r: F.pixel_unshuffle(x, r), normal(*s)) for s, r in [((2, 2, 6, 4), 2), ((1, 1, 6, 9), 3), ((2, 3, 4, 4), 1), ((3, 4, 2), 2), ((2, 3, 8, 12), 4)]),
    *(row("channel_shuffle", lambda x, r=r: td.channel_shuffle(x, r), lambda x, r=r: F.channel_shuffle(x, r), normal(*s)) for s, r in [((2, 6, 3, 4), 2), ((1, 6, 2, 2), 3), ((2, 3, 4, 4), 1), ((2, 4, 5), 4), ((2, 34, 3), 17)]),
    *(row("unfold", lambda x, a=a: td.unfold(x, *a), lambda x, a=a: F.unfold(x, *a), normal(*s)) for s, a in [((2, 3, 4, 5), (2,)), ((2, 2, 4, 4), (3, 1, 1)), ((1, 2, 5, 6), ((2, 3), 1, (1, 0), (2, 1))), ((1, 2, 5, 5), (2, 2)), ((1, 3, 17, 2), (1,))]),
    *(row("fold", lambda x, a=a: td.fold(x, *a), lambda x, a=a: F.fold(x, *a), normal(*s)) for s, a in [((2, 12, 12), ((4, 5), 2)), ((1, 18, 16), ((4, 4), 3, 1, 1)), ((1, 12, 12), ((5, 6), (2, 3), 1, (1, 0), (2, 1))), ((1, 8, 9), ((5, 5), 2, 2)), ((1, 3, 34), ((17, 2), 1))]),
]  # fmt: skip

# Indices


def one_each(*shape: int) -> np.ndarray:
    """Distinct indices along the last axis: nothing is written twice."""
    rows = [rng.permutation(shape[-1]) for _ in range(int(np.prod(shape[:-1])))]
    return np.stack(rows).reshape(shape).astype(np.int32)


INDICES = [
    *(
        row("take", lambda x, i, a=a: td.take(x, i, a), lambda x, i, a=a: torch.movedim(torch.movedim(x, a, 0)[i.long()], tuple(range(i.ndim)), tuple(range(a, a + i.ndim))), normal(*s), below(s[a], *n))
        for s, a, n in [((7,), 0, (5,)), ((5, 3), 1, (4,)), ((17, 33), 0, (2, 3)), ((2, 9, 4), 1, (33,)), ((4, 2), 0, ())]
    ),
    *(
        row("take_along_axis", lambda x, i, a=a: td.take_along_axis(x, i, a), lambda x, i, a=a: x.gather(a, i.long()), normal(*s), below(s[a], *n))
        for s, a, n in [((7,), 0, (5,)), ((5, 3), 1, (5, 4)), ((17, 33), 0, (9, 33)), ((2, 9, 4), 1, (2, 33, 4)), ((4, 2), -1, (4, 1))]
    ),
    *(
        row("scatter_add", lambda x, i, u, a=a: td.scatter_add(x, i, u, a), lambda x, i, u, a=a: x.index_add(a, i.long(), u), normal(*s), below(s[a], n), normal(*s[:a], n, *s[a + 1 :]))
        for s, a, n in [((7,), 0, 5), ((5, 3), 1, 4), ((17, 33), 0, 40), ((2, 9, 4), 1, 3), ((4, 2), 0, 1)]
    ),
    *(
        row("scatter", lambda x, i, u, a=a: td.scatter(x, a, i, u), lambda x, i, u, a=a: x.scatter(a, i.long(), u), normal(*s), one_each(*s), normal(*s))
        for s, a in [((7,), 0), ((5, 3), 1), ((3, 33), 1), ((2, 3, 17), 2), ((1, 2), 1)]
    ),
    *(
        row("scatter_max", lambda x, i, u, a=a: td.scatter_max(x, a, i, u), lambda x, i, u, a=a: x.scatter_reduce(a, i.long(), u, "amax"), normal(*s), below(s[a], *n), normal(*n))
        for s, a, n in [((7,), 0, (5,)), ((5, 3), 1, (5, 4)), ((9, 3), 0, (17, 3)), ((2, 9, 4), 1, (2, 3, 4)), ((1, 2), 1, (1, 1))]
    ),
    *(
        row("one_hot", lambda i, n=n: td.one_hot(i, n), lambda i, n=n: F.one_hot(i.long(), n), below(n, *s))
        for s, n in [((7,), 3), ((5, 3), 17), ((2, 3, 4), 33), ((17,), 5), ((1,), 1)]
    ),
    *(
        row("embedding", td.embedding, lambda i, w: F.embedding(i.long(), w), below(n, *s), normal(n, d))
        for s, n, d in [((7,), 3, 5), ((5, 3), 17, 4), ((2, 3, 4), 33, 16), ((64,), 5, 33), ((1,), 1, 1)]
    ),
    *(
        row("squared_distances", td.squared_distances, lambda x, y: ((x.unsqueeze(-2) - y.unsqueeze(-3)) ** 2).sum(-1), normal(*a), normal(*b))
        for a, b in [((5, 3), (4, 3)), ((17, 2), (33, 2)), ((2, 4, 3), (2, 5, 3)), ((1, 1), (9, 1)), ((16, 8), (16, 8))]
    ),
]  # fmt: skip

ROWS = [
    *ELEMENTWISE,
    *ACTIVATIONS,
    *SHAPING,
    *MAKING,
    *REDUCTIONS,
    *PRODUCTS,
    *INDICES,
]


def problem(r: Row) -> Problem:
    """Floats have gradients; whatever comes out is a float, times a unit that has one too."""
    named = {f"argument {i}": a for i, a in enumerate(r.arrays)}
    floats = {n: a for n, a in named.items() if a.dtype.kind == "f" and r.has_gradient}
    constants = {n: a for n, a in named.items() if n not in floats}

    def ours(given: Any, fixed: Any) -> Any:
        both = {**given, **fixed}
        found = r.ours(*(both[n] for n in named))
        parts = found if isinstance(found, tuple) else (found,)
        return [_float(part) * both["unit"] for part in parts]

    def theirs(given: Any, fixed: Any) -> Any:
        both = {**given, **fixed}
        found = r.theirs(*(both[n] for n in named))
        parts = found if isinstance(found, (tuple, list)) else (found,)
        return [part.double() * both["unit"] for part in parts]

    return Problem(ours, theirs, {**floats, "unit": np.ones(())}, constants)


def _float(x: td.Tensor) -> td.Tensor:
    return x if x.dtype.is_float else td.cast(x, td.float32)
