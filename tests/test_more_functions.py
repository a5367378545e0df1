"""Functions beside PyTorch's, values and gradients, natively; methods; NumPy's calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import treadle as td
from refusals import refused
from sizes import Problem, check, rounded

rng = np.random.default_rng(11)
SHAPES = [(7,), (5, 3), (2, 3, 4), (17, 5), (1, 33)]


class Case(NamedTuple):
    """Arguments of a function, arrays with gradients if they are floats, and its options."""

    name: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]


def normal(*shape: int) -> np.ndarray:
    return rounded(rng.standard_normal(shape))


def chances(*shape: int) -> np.ndarray:
    return rounded(rng.uniform(-0.95, 0.95, shape))


def above_one(*shape: int) -> np.ndarray:
    return rounded(rng.uniform(1.05, 9, shape))


def positive(*shape: int) -> np.ndarray:
    return rounded(rng.uniform(0.1, 9, shape))


def distinct(*shape: int) -> np.ndarray:
    return rounded(rng.permutation(int(np.prod(shape))).reshape(shape) * 0.37 - 3)


def unary(name: str, draw: Callable[..., np.ndarray] = normal, **options: Any) -> list[Case]:
    return [Case(name, (draw(*s),), options) for s in SHAPES]


def binary(name: str, draw: Callable[..., np.ndarray] = normal, **options: Any) -> list[Case]:
    pairs = [(s, s) for s in SHAPES] + [((5, 3), (3,)), ((4, 1), (1, 6))]
    return [Case(name, (draw(*a), draw(*b)), options) for a, b in pairs]


def along(name: str, draw: Callable[..., np.ndarray] = normal, **options: Any) -> list[Case]:
    return [
        Case(name, (draw(*s),), {**options, "axis": axis})
        for s in [(9,), (5, 3), (2, 17, 4), (33, 2)]
        for axis in (0, -1)
    ]


def index(n: int, *shape: int) -> np.ndarray:
    return rng.integers(0, n, shape)


def segmented(name: str) -> list[Case]:
    shapes = [((9,), 4), ((17, 3), 5), ((33, 2, 2), 7), ((5,), 1), ((6, 4), 9)]
    return [Case(name, (distinct(*s), index(n, s[0])), {"count": n}) for s, n in shapes]


TABLE = [
    *(c for name in ("expm1", "sinh", "cosh", "tan", "asinh") for c in unary(name)),
    *(c for name in ("expm1", "sinh", "asinh") for c in unary(name, lambda *s: normal(*s) * 1e-4)),
    *unary("asinh", lambda *s: normal(*s) * 1e6),
    *unary("acosh", above_one),
    *unary("acosh", lambda *s: above_one(*s) * 1e5),
    *unary("atanh", chances),
    *unary("atan"), *unary("atan", lambda *s: normal(*s) * 1e6),
    *unary("asin", chances), *unary("asin", lambda *s: chances(*s) * 1e-5),
    *unary("acos", chances), *binary("atan2"),
    *unary("log10", positive),
    *(c for name in ("lgamma", "digamma") for c in unary(name, positive)),
    *(c for name in ("lgamma", "digamma") for c in unary(name, lambda *s: -distinct(*s) / 5)),
    *unary("lgamma", lambda *s: above_one(*s) * 1e6),
    *unary("trunc"), *unary("frac"),
    *unary("nan_to_num"),
    *binary("logaddexp"), *binary("hypot"),
    *[Case("lerp", (normal(*s), normal(*s), normal(*s)), {}) for s in SHAPES],
    *[Case("addcmul", (normal(*s), normal(*s), normal(*s)), {"value": 0.3}) for s in SHAPES],
    *[Case("addcdiv", (normal(*s), normal(*s), positive(*s)), {"value": 0.3}) for s in SHAPES],
    *along("cumprod"), *along("cummax", distinct), *along("cummin", distinct), *along("logcumsumexp"),
    Case("cumprod", (np.array([[1.0, 0.0, 2.0, 0.0, 3.0], [0.0, 1.0, 2.0, 3.0, 4.0]]),), {"axis": 1}),
    *[Case("outer", (normal(n), normal(m)), {}) for n, m in [(3, 4), (17, 1), (1, 5), (33, 2), (8, 8)]],
    *[Case("diagonal", (normal(*s),), {"offset": o}) for s, o in [((4, 4), 0), ((3, 5), 1), ((5, 3), -2), ((2, 3), 9), ((3, 4, 5), 1)]],
    *[Case("diag", (normal(*s),), {"offset": o}) for s, o in [((4,), 0), ((3,), 1), ((5,), -2), ((3, 4), 1), ((1,), 0)]],
    *[Case("diag_embed", (normal(*s),), {"offset": o}) for s, o in [((4,), 0), ((2, 3), 1), ((2, 5), -2), ((1, 1), 0), ((2, 2, 3), -1)]],
    *[Case("repeat_interleave", (normal(*s),), o) for s, o in [((4,), {"repeats": 2}), ((2, 3), {"repeats": 3, "axis": 1}), ((2, 3), {"repeats": [2, 0, 1], "axis": -1}), ((3, 2), {"repeats": 2}), ((5, 7), {"repeats": 4, "axis": 0})]],
    *[Case("meshgrid", (normal(3), normal(4)), {"indexing": i}) for i in ("ij", "xy")],
    *[Case("meshgrid", (normal(2), normal(3), normal(4)), {"indexing": i}) for i in ("ij", "xy")],
    Case("meshgrid", (normal(17),), {"indexing": "ij"}),
    *[Case("scatter_add_along", (normal(*s), index(s[a], *t), normal(*t)), {"axis": a}) for s, t, a in [((4, 3), (6, 3), 0), ((4, 3), (4, 2), 1), ((9,), (17,), 0), ((2, 5, 3), (2, 4, 3), 1), ((2, 5, 7), (2, 5, 33), 2)]],
    *[Case("searchsorted", (np.sort(normal(n)), normal(*s)), {"right": r}) for n, s, r in [(5, (7,), False), (17, (3, 4), True), (1, (5,), False), (33, (33,), True), (4, (1, 9), False)]],
    *[Case("bincount", (index(6, n),), {"size": 6}) for n in (1, 7, 33)],
    *[Case("bincount", (index(6, n), normal(n)), {"size": 6}) for n in (5, 17)],
    *segmented("segment_sum"), *segmented("segment_mean"), *segmented("segment_max"), *segmented("segment_min"), *segmented("segment_softmax"),
    *[Case("vector_norm", (normal(*s),), {"p": p, "axis": -1}) for s in [(7,), (5, 3), (2, 17)] for p in (1, 2, 3.5, np.inf)],
    *[Case("normalize", (normal(*s),), {"p": p, "axis": a}) for s, a in [((5, 3), 1), ((2, 4, 3), -1), ((17, 33), 0)] for p in (1, 2)],
    *[Case("cosine_similarity", (normal(*s), normal(*s)), {"axis": a}) for s, a in [((5, 3), 1), ((2, 4, 3), -1), ((17, 33), 0), ((7,), 0), ((1, 2), 1)]],
    *[Case("pairwise_distance", (normal(*s), normal(*s)), {"p": p}) for s in [(5, 3), (17, 4), (7,)] for p in (1, 2)],
    *[Case("cdist", (normal(*s), normal(*t)), {"p": p}) for s, t in [((5, 3), (4, 3)), ((2, 17, 2), (2, 3, 2)), ((1, 1), (33, 1))] for p in (1, 2)],
    *[Case("nonzero", (index(2, n),), {"size": k}) for n, k in [(7, 7), (17, 5), (33, 40), (5, 1), (1, 3)]],
    *[Case("linspace", (), {"start": a, "end": b, "steps": n}) for a, b, n in [(0.0, 1.0, 5), (-3.0, 2.0, 1), (1.0, 1.0, 3), (5.0, -5.0, 33), (0.0, 1.0, 2)]],
    *[Case("logspace", (), {"start": a, "end": b, "steps": n}) for a, b, n in [(0.0, 1.0, 5), (-3.0, 2.0, 1), (1.0, 1.0, 3), (2.0, -2.0, 33), (0.0, 1.0, 2)]],
    *[Case("interpolate", (normal(1, 2, 6, 5),), {"size": n, "mode": "area"}) for n in (1, 2, 3, 5, (3, 5))],
    *[Case("kron", (normal(*s), normal(*t)), {}) for s, t in [((3,), (4,)), ((2, 3), (3, 2)), ((5,), (2, 3)), ((1, 2), (17, 1)), ((2, 2, 2), (1, 3))]],
    *[Case("diff", (normal(*s),), {"n": n, "axis": a}) for s, n, a in [((9,), 1, -1), ((5, 3), 2, 0), ((2, 17), 3, 1), ((1, 4), 1, 0), ((3, 33), 0, -1)]],
    *[Case("median", (distinct(*s),), o) for s, o in [((9,), {}), ((4, 5), {}), ((4, 6), {"axis": 1}), ((17, 2, 3), {"axis": 0, "keepdims": True}), ((1, 3), {"axis": 0})]],
    *[Case("quantile", (distinct(*s),), o) for s, o in [((9,), {"q": 0.3}), ((4, 5), {"q": [0.0, 0.5, 1.0]}), ((4, 6), {"q": 0.9, "axis": 1}), ((17, 2), {"q": [0.25, 0.6], "axis": 0, "keepdims": True}), ((1,), {"q": 0.5})]],
    *[Case("quantile", (distinct(6, 4),), {"q": 0.37, "axis": 0, "interpolation": i}) for i in ("lower", "higher", "nearest", "midpoint")],
    *[Case("grid_sample", (normal(2, 3, 5, 4), normal(2, 3, 6, 2)), {"mode": m, "padding_mode": p, "align_corners": c}) for m in ("bilinear", "nearest") for p in ("zeros", "border", "reflection") for c in (False, True)],
    *[Case("grid_sample", (normal(1, 2, 3, 4, 5), normal(1, 2, 3, 4, 3) * 0.5), {"mode": m}) for m in ("bilinear", "nearest")],
    Case("grid_sample", (normal(3, 1, 1, 7), normal(3, 4, 1, 2)), {"padding_mode": "reflection", "align_corners": True}),
    *[Case("affine_grid", (normal(2, len(s), len(s) + 1),), {"size": (2, 3, *s), "align_corners": c}) for s in [(4, 5), (3, 2), (2, 3, 4)] for c in (False, True)],
]  # fmt: skip


def per_segment(
    function: Callable[[torch.Tensor], torch.Tensor], empty: float
) -> Callable[..., Any]:
    def found(x: torch.Tensor, segments: torch.Tensor, count: int) -> torch.Tensor:
        parts = [x[segments == i] for i in range(count)]
        none = torch.full(x.shape[1:], empty, dtype=x.dtype)
        return torch.stack([function(p) if len(p) else none for p in parts])

    return found


def segment_softmax(x: torch.Tensor, segments: torch.Tensor, count: int) -> torch.Tensor:
    out = torch.zeros_like(x)
    for i in range(count):
        if (segments == i).any():
            out = out.index_put(
                ((segments == i).nonzero()[:, 0],), torch.softmax(x[segments == i], 0)
            )
    return out


def with_axis(function: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch says dim."""

    def found(*given: Any, axis: int | None = None, **options: Any) -> Any:
        return function(*given, **({} if axis is None else {"dim": axis}), **options)

    return found


def repeat_interleave(x: Any, repeats: Any, axis: int | None = None) -> Any:
    return torch.repeat_interleave(x, torch.as_tensor(repeats), axis)


def nonzero(x: Any, size: int) -> Any:
    found = x.nonzero()[:size, 0]
    return F.pad(found, (0, size - len(found)))


def median(x: Any, axis: int | None = None, keepdims: bool = False) -> Any:
    return torch.median(x) if axis is None else torch.median(x, axis, keepdims).values


def quantile(x: Any, q: Any, axis: Any = None, keepdims: bool = False, **options: Any) -> Any:
    return torch.quantile(x, torch.as_tensor(q, dtype=x.dtype), axis, keepdims, **options)


def diff(x: Any, n: int, axis: int) -> Any:
    return torch.diff(x, n, axis)


THEIRS: dict[str, Callable[..., Any]] = {
    "median": median,
    "quantile": quantile,
    "diff": diff,
    "grid_sample": lambda x, y, **o: F.grid_sample(x, y, **{"align_corners": False, **o}),
    "affine_grid": lambda x, size, align_corners: F.affine_grid(x, list(size), align_corners),
    **{n: with_axis(getattr(torch, n)) for n in ("cumprod", "cummax", "cummin", "logcumsumexp")},
    "searchsorted": torch.searchsorted,
    "bincount": lambda x, w=None, size=0: torch.bincount(x, w, size),
    "scatter_add_along": lambda x, i, s, axis: x.scatter_add(axis, i, s),
    "segment_sum": per_segment(lambda p: p.sum(0), 0.0),
    "segment_mean": per_segment(lambda p: p.mean(0), 0.0),
    "segment_max": per_segment(lambda p: p.amax(0), -np.inf),
    "segment_min": per_segment(lambda p: p.amin(0), np.inf),
    "segment_softmax": segment_softmax,
    "vector_norm": lambda x, p, axis: torch.linalg.vector_norm(x, p, axis),
    "normalize": lambda x, p, axis: F.normalize(x, p, axis),
    "cosine_similarity": with_axis(F.cosine_similarity),
    "pairwise_distance": F.pairwise_distance,
    "repeat_interleave": repeat_interleave,
    "nonzero": nonzero,
    "linspace": lambda **o: torch.linspace(**o, dtype=torch.float64),
    "logspace": lambda **o: torch.logspace(**o, dtype=torch.float64),
    "interpolate": F.interpolate,
    "meshgrid": lambda *x, indexing: list(torch.meshgrid(*x, indexing=indexing)),
    "diag": lambda x, offset: torch.diag(x, offset),
    "diag_embed": lambda x, offset: torch.diag_embed(x, offset),
    "cdist": lambda x, y, p: torch.cdist(x, y, p, compute_mode="donot_use_mm_for_euclid_dist"),
}


def problem(c: Case) -> Problem:
    named = {f"argument {i}": a for i, a in enumerate(c.arguments)}
    is_counted = c.name in ("searchsorted", "bincount", "trunc", "linspace", "logspace")
    floats = {n: a for n, a in named.items() if a.dtype.kind == "f" and not is_counted}
    constants = {n: a for n, a in named.items() if n not in floats}
    floats["unit"] = np.ones(())  # so that integers have something to be differentiated by

    def ours(given: Any, fixed: Any) -> Any:
        both = {**given, **fixed}
        options = dict(c.options)
        arguments = [both[n] for n in named]
        if c.name == "scatter_add_along":
            arguments.insert(1, options.pop("axis"))
        if c.name == "bincount":
            options["weights"] = arguments.pop() if len(arguments) > 1 else None
        found = getattr(td, c.name)(*arguments, **options)
        parts = found if isinstance(found, tuple) else (found,)
        return [td.cast(part, td.float32) * both["unit"] for part in parts]

    def theirs(given: Any, fixed: Any) -> Any:
        both = {**given, **fixed}
        function = THEIRS.get(c.name) or getattr(torch, c.name)
        found = function(*(both[n] for n in named), **c.options)
        parts = found if isinstance(found, (tuple, list)) else (found,)
        return [part.double() * both["unit"] for part in parts]

    return Problem(ours, theirs, floats, constants)


NAMES = sorted({c.name for c in TABLE})


@pytest.mark.parametrize("name", NAMES)
def test_natively(name: str) -> None:
    found = [c for c in TABLE if c.name == name]
    assert len(found) >= 5
    check({f"{name} {i}": problem(c) for i, c in enumerate(found)})


# What is read off rather than compared


def test_scatter_and_scatter_max() -> None:
    x = np.arange(8.0).reshape(2, 4)
    index, src = np.array([[3, 0], [1, 1]]), np.array([[10.0, 20.0], [30.0, 30.0]])
    expected = torch.tensor(x).scatter(1, torch.tensor(index), torch.tensor(src)).numpy()
    np.testing.assert_array_equal(td.scatter(x, 1, index, src).numpy(), expected)
    greatest = td.scatter_max(x, 1, index, src - 15).numpy()
    reduced = torch.tensor(x).scatter_reduce(1, torch.tensor(index), torch.tensor(src - 15), "amax")
    np.testing.assert_array_equal(greatest, reduced.numpy())


def test_max_pool_gives_the_indices_of_pytorch() -> None:
    x = normal(2, 3, 7, 6).astype(np.float32)
    for options in ((2,), (3, 2, 1), ((2, 3), (1, 2), (1, 0), (2, 1))):
        function = lambda x, o=options: td.max_pool_with_indices(x, *o)  # noqa: E731
        values, indices = td.compile(function, td.Spec(x.shape), device="cpu")(x)
        expected = F.max_pool2d(torch.tensor(x), *options, return_indices=True)
        np.testing.assert_array_equal(values, expected[0].numpy())
        np.testing.assert_array_equal(indices, expected[1].numpy())
        size = tuple(x.shape)
        if options == (2,):
            back = td.max_unpool(values, indices, 2, output_size=size[2:]).numpy()
            theirs = F.max_unpool2d(*expected, 2, output_size=size[2:]).numpy()
            np.testing.assert_array_equal(back, theirs)


def test_infinities() -> None:
    x = np.array([np.inf, -np.inf, np.nan, 1.0, 0.0])
    np.testing.assert_array_equal(td.isinf(x).numpy(), np.isinf(x))
    np.testing.assert_array_equal(td.nan_to_num(x, 7.0, 8.0, 9.0).numpy(), [8, 9, 7, 1, 0])
    for name in ("sinh", "cosh", "asinh", "expm1", "trunc"):
        expected = getattr(np, {"asinh": "arcsinh"}.get(name, name))(x)
        np.testing.assert_allclose(getattr(td, name)(x).numpy(), expected, rtol=1e-15)
    both = td.logaddexp(np.array([np.inf, -np.inf, -np.inf]), np.array([np.inf, -np.inf, 1.0]))
    np.testing.assert_array_equal(both.numpy(), [np.inf, -np.inf, 1.0])


def test_medians_know_nan_and_integers() -> None:
    x = normal(4, 5)
    x[1, 2] = np.nan
    expected = torch.tensor(x).median(1).values.numpy()
    np.testing.assert_array_equal(td.median(x, 1).numpy(), expected)
    expected = torch.quantile(torch.tensor(x), 0.25, 0).numpy()
    np.testing.assert_allclose(td.quantile(x, 0.25, dim=0).numpy(), expected, 1e-12)
    whole = index(9, 3, 4)
    expected = torch.tensor(whole).median(1).values.numpy()
    np.testing.assert_array_equal(td.tensor(whole).median(1).numpy(), expected)
    refused(lambda: td.quantile(x, 1.5), td.ArgumentError, "quantile", "from 0 to 1")
    refused(lambda: td.median(np.zeros((0, 3)), 0), td.ArgumentError, "median")


def test_differences_of_what_is_put_beside() -> None:
    x, first, last = normal(3, 4), normal(3, 1), normal(3, 2)
    expected = torch.diff(*map(torch.tensor, (x,)), 1, -1, torch.tensor(first), torch.tensor(last))
    np.testing.assert_allclose(td.diff(x, prepend=first, append=last).numpy(), expected.numpy())
    refused(lambda: td.diff(x, -1), td.ArgumentError, "diff", "n = -1")


def test_grids_that_do_not_fit_are_refused() -> None:
    x = np.zeros((2, 3, 4, 5))
    for shape in ((2, 4, 2), (1, 4, 4, 2), (2, 4, 4, 3)):
        refused(lambda s=shape: td.grid_sample(x, np.zeros(s)), td.ShapeError, "grid_sample")
    refused(lambda: td.affine_grid(np.zeros((2, 2, 2)), x.shape), td.ShapeError, "affine_grid")
    wrong = lambda: td.grid_sample(x, np.zeros((2, 4, 4, 2)), "bicubic")  # noqa: E731
    refused(wrong, td.ArgumentError, "grid_sample", "bilinear")


def test_samples_of_classes_with_gradients() -> None:
    """The largest falls on each class as often as softmax says, whatever the temperature."""
    chances = np.array([0.1, 0.2, 0.7])
    logits = np.broadcast_to(np.log(chances), (20000, 3)).astype(np.float32)

    def drawn(x):
        soft, hard = (td.random.gumbel_softmax(x, 0.5, h) for h in (False, True))
        cotangent = td.grad(lambda y: (td.random.gumbel_softmax(y, 0.5, True)[:, 0]).sum())(x)
        return soft, hard, cotangent

    soft, hard, slope = td.compile(drawn, td.Spec(logits.shape), device="cpu")(logits)
    np.testing.assert_allclose(soft.sum(1), 1, 1e-5)
    np.testing.assert_allclose(hard, hard.round(), atol=1e-6)
    for found in (hard.mean(0), np.bincount(soft.argmax(1)) / len(soft)):
        np.testing.assert_allclose(found, chances, atol=0.015)
    assert abs(slope).max() > 0.1, "that of the softmax"
    np.testing.assert_allclose(slope.sum(1), 0, atol=1e-5)
    refused(lambda: td.random.gumbel_softmax(logits, 0.0), td.ArgumentError, "gumbel_softmax")


def test_dropout_scales_what_is_left() -> None:
    x = td.ones((1000,))
    found = td.compile(lambda x: td.dropout(x, 0.25), td.Spec((1000,)), device="cpu")(x.numpy())
    assert set(np.unique(found)) == {np.float32(0), np.float32(1 / 0.75)}
    assert 0.65 < (found > 0).mean() < 0.85
    assert td.dropout(x, 0.5, training=False) is x


METHODS = [
    "exp",
    "sqrt",
    "square",
    "relu",
    "sigmoid",
    "abs",
    "floor",
    "sinh",
    "expm1",
    "contiguous",
]


@pytest.mark.parametrize("name", METHODS)
def test_methods_are_the_functions(name: str) -> None:
    x = positive(3, 4)
    expected = getattr(torch.tensor(x), name)().numpy()
    np.testing.assert_allclose(getattr(td.tensor(x), name)().numpy(), expected, rtol=1e-12)


def test_methods_of_pytorch() -> None:
    x = td.tensor(normal(3, 4))
    t = torch.tensor(x.numpy())
    index = np.array([[0, 1], [2, 3], [1, 1]])
    for ours, theirs in (
        (x.view(2, 6), t.view(2, 6)),
        (x.clamp(-1, 1), t.clamp(-1, 1)),
        (x.masked_fill(x > 0, -1.0), t.masked_fill(t > 0, -1.0)),
        (x.gather(1, index), t.gather(1, torch.tensor(index))),
        (x.index_select(1, np.array([2, 0])), t.index_select(1, torch.tensor([2, 0]))),
        (x.t(), t.t()),
        (x.amax(1), t.amax(1)),
        (x.cumsum(1), t.cumsum(1)),
        (x.mm(x.t()), t.mm(t.t())),
        (x.chunk(2, 1)[1], t.chunk(2, 1)[1]),
        (x.detach(), t.detach()),
        (x.std(1), t.std(1)),
    ):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-12)
    assert x.float().dtype is td.float32
    assert x.long().dtype is td.int64
    assert x.to(td.bfloat16).dtype is td.bfloat16


def test_functions_of_numpy_on_traced_tensors() -> None:
    def function(x: Any) -> Any:
        rows = np.concatenate([np.sin(x), np.exp(x) * np.float32(2)], axis=1)
        return np.sum(np.maximum(rows, 0.5), axis=0) + np.ones(6, np.float32) @ x.T.reshape(6, 1)

    x = normal(2, 3).astype(np.float32)
    found = td.compile(function, td.Spec((2, 3)), device="cpu")(x)
    rows = np.concatenate([np.sin(x), np.exp(x) * 2], 1)
    expected = np.maximum(rows, 0.5).sum(0) + np.ones(6) @ x.T.reshape(6, 1)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_functions_of_numpy_on_eager_tensors() -> None:
    x = normal(2, 3)
    assert isinstance(np.sum(td.tensor(x)), np.floating)
    np.testing.assert_allclose(np.median(td.tensor(x)), np.median(x))
    np.testing.assert_allclose(np.sin(td.tensor(x)).numpy(), np.sin(x))


def test_what_numpy_cannot_do_with_a_traced_tensor() -> None:
    x = td.Spec((2, 3))
    refused(lambda: td.compile(lambda x: np.median(x), x), td.TraceError, "np.median", "td")
    refused(lambda: td.compile(lambda x: np.spacing(x), x), td.TraceError, "np.spacing", "td")
    refused(lambda: td.compile(lambda x: np.add.reduce(x), x), td.TraceError, "np.add.reduce", "td")


def test_refusals() -> None:
    x = td.tensor(normal(4, 3))
    refused(lambda: td.segment_sum(x, td.tensor([0, 1]), 2), td.ShapeError, "segment_sum")
    refused(lambda: td.bincount(td.tensor([0, 1]), 0), td.ArgumentError, "bincount")
    refused(lambda: td.diagonal(x, 0, 1, 1), td.ShapeError, "diagonal", "axes 1 and 1")
    refused(lambda: td.repeat_interleave(x, [1, 2], 0), td.ShapeError, "repeat_interleave")
    refused(lambda: td.interpolate(x, 3), td.ShapeError, "interpolate")
    refused(lambda: td.pad(x, [(0, 0), (9, 0)], mode="reflect"), td.ShapeError, "pad", "At most 2")
    refused(lambda: td.conv_transpose(x, x), td.ShapeError, "conv_transpose")
    refused(lambda: td.cdist(x, td.ones((2, 2))), td.ShapeError, "cdist")


def test_squared_distances() -> None:
    x, y = normal(5, 3), normal(4, 3)
    expected = ((x[:, None] - y[None]) ** 2).sum(-1)
    np.testing.assert_allclose(td.squared_distances(x, y).numpy(), expected, rtol=1e-10)
