"""Rows of functions that have PyTorch's names: a call of ours, PyTorch's, and what both are given."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import treadle as td
from function_rows import AXES, Call, Row, away_from_zero, below, flags, near_one, row, whole
from test_more_functions import SHAPES, chances, distinct, normal, positive

rng = np.random.default_rng(41)


def alike(name: str, *cases: tuple[Any, ...]) -> list[Row]:
    """A function by PyTorch's name: arrays, and keywords of both sides or one dict each."""
    folder, _, own = name.rpartition(".")
    ours = getattr(getattr(td, folder) if folder else td, own)
    theirs = getattr(getattr(torch, folder) if folder else torch, own)
    return [calls(public(name), ours, theirs, *case) for case in cases]


def public(name: str) -> str:
    """The names of torch.special are those of `td` itself."""
    return name.removeprefix("special.")


def calls(name: str, ours: Call, theirs: Call, *case: Any) -> Row:
    arrays = [a for a in case if isinstance(a, np.ndarray)]
    options = [o for o in case if isinstance(o, dict)] or [{}]
    mine, others = options[0], options[-1]
    return row(
        name, lambda *x: ours(*x, **mine), lambda *x: as_given(theirs(*x, **others)), *arrays
    )


def as_given(found: Any) -> Any:
    return tuple(found) if isinstance(found, list) else found


def with_gaps(*shape: int) -> np.ndarray:
    """Some elements are NaN, one of each row at most."""
    found = normal(*shape)
    found.reshape(-1)[::5] = np.nan
    return found


def shapes_of_two() -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [*((s, s) for s in SHAPES), ((5, 3), (3,)), ((4, 1), (1, 6))]


def two(name: str, first: Call, second: Call) -> list[Row]:
    return alike(name, *((first(*a), second(*b)) for a, b in shapes_of_two()))


def dims(names: str, draw: Call) -> list[Row]:
    found = []
    for name in names.split():
        for i, (shape, axis) in enumerate(AXES):
            given = {"dim": axis} if axis is not None else {}
            keep = {"keepdim": True} if i % 2 and name != "count_nonzero" and given else {}
            found += alike(name, (draw(*shape), {**given, **keep}))
    return found


ELEMENTWISE = [
    *two("fmax", normal, normal), *two("fmin", normal, normal),
    *two("fmod", normal, away_from_zero), *two("copysign", away_from_zero, normal),
    *(r for n in ("erfc", "special.ndtr", "special.log_ndtr") for r in alike(n, *((normal(*s) * 3,) for s in SHAPES))),
    *alike("erfinv", *((chances(*s),) for s in SHAPES)),
    *alike("logit", *((rng.uniform(0.05, 0.95, s).astype(np.float32).astype(np.float64),) for s in SHAPES), (chances(5, 3), {"eps": 0.2})),
    *alike("special.entr", *((positive(*s),) for s in SHAPES)),
    *two("xlogy", normal, positive),
    *(row("polygamma", lambda x, n=n: td.polygamma(n, x), lambda x, n=n: torch.polygamma(n, x), positive(*s)) for s, n in zip(SHAPES, (0, 1, 2, 3, 1))),
    *(Row(n, getattr(td, n), getattr(torch, n), (positive(*s), positive(*s)), False) for n in ("igamma", "igammac") for s in SHAPES),
    *alike("signbit", *((normal(*s),) for s in SHAPES)),
]  # fmt: skip

REDUCTIONS = [
    *dims("nansum nanmean", with_gaps),
    *dims("count_nonzero", lambda *s: whole(*s) // 3 * 1),
    *alike("cov", (normal(7),), (normal(3, 5),), (normal(4, 17), {"correction": 0}), (normal(1, 33),), (normal(5, 2),)),
    row("cov", lambda x, f: td.cov(x, fweights=f), lambda x, f: torch.cov(x, fweights=f.long()), normal(3, 9), below(4, 9) + 1),
    row("cov", lambda x, a: td.cov(x, aweights=a), lambda x, a: torch.cov(x, aweights=a), normal(3, 9), positive(9)),
    row("cov", lambda x, f, a: td.cov(x, 2, f, a), lambda x, f, a: torch.cov(x, correction=2, fweights=f.long(), aweights=a), normal(2, 17), below(4, 17) + 1, positive(17)),
    *alike("corrcoef", *((normal(*s),) for s in ((3, 5), (2, 17), (4, 3), (33, 9), (5, 40)))),
    *alike(
        "trapezoid", (normal(9),), (normal(5, 3), {"dx": 0.3}), (normal(2, 17), {"dim": 0}),
        (normal(5), np.sort(normal(5))), (normal(3, 4), normal(3, 4)), (normal(4, 3), normal(4), {"dim": 0}),
        (normal(2, 5), normal(1, 5)),
    ),
    *alike(
        "cumulative_trapezoid", (normal(9),), (normal(5, 3), {"dx": 0.3}), (normal(2, 17), {"dim": 0}),
        (normal(5), np.sort(normal(5))), (normal(3, 4), normal(3, 4)), (normal(4, 3), normal(4), {"dim": 0}),
    ),
]  # fmt: skip

SHAPING = [
    *alike("broadcast_tensors", (normal(3), normal(2, 1)), (normal(4),), (normal(1, 5), normal(3, 1), normal(2, 1, 1)), (normal(17, 1), normal(33)), (normal(2, 2), normal(2, 2))),
    *(row("tensor_split", lambda x, n=n, a=a: td.tensor_split(x, n, dim=a), lambda x, n=n, a=a: x.tensor_split(n, dim=a), normal(*s)) for s, n, a in [((7,), 3, 0), ((5, 3), 2, 1), ((2, 17), (3, 9), 1), ((6,), (4, 2, 9), 0), ((9, 2), (-3, -1), 0), ((3, 4), 5, -1)]),
    *alike("rot90", *((normal(*s), {"k": k, "dims": d}) for s, k, d in [((3, 4), 1, (0, 1)), ((3, 4), 2, (0, 1)), ((2, 3, 5), 3, (1, 2)), ((2, 3, 5), -1, (2, 0)), ((17, 2), 4, (0, 1)), ((4, 4), 5, (1, 0))])),
    *alike("block_diag", (normal(2, 3), normal(1, 2)), (normal(3),), (normal(2, 2), normal(4), normal(5, 1)), (normal(17, 2), normal(3, 33)), (normal(1, 1), normal(1, 1))),
    row("block_diag", lambda x: td.block_diag(x, 2.0), lambda x: torch.block_diag(x, torch.tensor(2.0)), normal(2, 2)),
    *alike("isin", *((below(6, *s), below(6, *t), o) for s, t, o in [((7,), (3,), {}), ((5, 3), (2, 2), {"invert": True}), ((2, 17), (1,), {}), ((33,), (9,), {}), ((4,), (0,), {})])),
    *alike("cross", (normal(3), normal(3)), (normal(5, 3), normal(5, 3)), (normal(3, 4), normal(3, 4)), (normal(2, 3, 4), normal(2, 3, 4), {"dim": 1}), (normal(17, 3), normal(1, 3))),
]  # fmt: skip


def moderate(*shape: int) -> np.ndarray:
    """Matrices whose powers neither vanish nor overflow."""
    return (normal(*shape) / np.sqrt(shape[-1])).astype(np.float32).astype(np.float64)


def invertible(*shape: int) -> np.ndarray:
    return (0.3 * moderate(*shape) + np.eye(shape[-1])).astype(np.float32).astype(np.float64)


MATRICES = [
    *alike("linalg.cross", (normal(3), normal(3)), (normal(5, 3), normal(5, 3)), (normal(3, 4), normal(3, 4), {"dim": 0}), (normal(2, 4, 3), normal(1, 4, 3)), (normal(17, 3), normal(1, 3))),
    *alike("linalg.matrix_power", *((invertible(*s), {"n": n}) for s, n in [((3, 3), 2), ((2, 4, 4), 3), ((5, 5), -2), ((2, 2), 0), ((3, 3), 7), ((1, 1), 1), ((17, 17), -1)])),
    *alike("linalg.matrix_exp", (moderate(3, 3),), (moderate(2, 4, 4),), (moderate(1, 1),), (moderate(5, 5) * 4,), (moderate(17, 17),), (np.diag([1.0, -30.0, 2.0]),)),
    *(
        row("linalg.multi_dot", lambda *x: td.linalg.multi_dot(x), lambda *x: torch.linalg.multi_dot(x), *(normal(*s) for s in shapes))
        for shapes in [((2, 3), (3, 4)), ((3,), (3, 4), (4, 2)), ((5, 1), (1, 9), (9,)), ((2, 17), (17, 3), (3, 5), (5, 2)), ((4,), (4, 4), (4,)), ((8, 2), (2, 8), (8, 2))]
    ),
]  # fmt: skip


def apart(n: int, *shape: int) -> np.ndarray:
    """Distinct indices below n."""
    return rng.permutation(n)[: int(np.prod(shape))].reshape(shape).astype(np.int32)


def reduced(reduce: str, **given: Any) -> list[Row]:
    """Of several sizes: indices in a smaller part of x and src, and of places that no index has."""
    sizes = [((7,), (5,), (5,), 0), ((5, 3), (5, 4), (5, 4), 1), ((9, 3), (17, 2), (17, 2), 0), ((2, 9, 4), (2, 3, 4), (2, 3, 4), 1), ((1, 2), (1, 1), (1, 1), 1)]  # fmt: skip
    return [
        row(
            "scatter_reduce",
            lambda x, i, u, a=a: td.scatter_reduce(x, a, i, u, reduce, **given),
            lambda x, i, u, a=a: x.scatter_reduce(a, i.long(), u, reduce, **given),
            distinct(*s) if reduce != "prod" else near_one(*s),
            below(s[a], *n),
            distinct(*m) + 0.11 if reduce != "prod" else near_one(*m),
        )
        for s, n, m, a in sizes
    ]


def along_index(name: str, *cases: Any) -> list[Row]:
    return [
        row(
            name,
            lambda x, i, *u, a=a: getattr(td, name)(x, a, i, *(u or (1.5,))),
            lambda x, i, *u, a=a: getattr(x, name)(a, i.long(), *(u or (1.5,))),
            *arrays,
        )
        for a, *arrays in cases
    ]


SCATTERING = [
    *(r for kind in ("sum", "mean", "prod", "amax", "amin") for r in reduced(kind)),
    *(r for kind in ("sum", "mean", "prod", "amax", "amin") for r in reduced(kind, include_self=False)),
    *along_index("index_add", (0, normal(7), below(7, 5), normal(5)), (1, normal(5, 3), below(3, 4), normal(5, 4)), (0, normal(17, 3), below(17, 9), normal(9, 3)), (-1, normal(2, 3, 4), below(4, 2), normal(2, 3, 2)), (0, normal(4, 2), below(4, 1), normal(1, 2))),
    row("index_add", lambda x, i, u: td.index_add(x, 0, i, u, alpha=2.5), lambda x, i, u: x.index_add(0, i.long(), u, alpha=2.5), normal(7), below(7, 5), normal(5)),
    *along_index("index_copy", (0, normal(7), apart(7, 5), normal(5)), (1, normal(5, 3), apart(3, 2), normal(5, 2)), (0, normal(17, 3), apart(17, 9), normal(9, 3)), (-1, normal(2, 3, 4), apart(4, 4), normal(2, 3, 4)), (0, normal(4, 2), apart(4, 1), normal(1, 2))),
    *along_index("index_fill", (0, normal(7), below(7, 5)), (1, normal(5, 3), below(3, 4)), (0, normal(17, 3), below(17, 9)), (-1, normal(2, 3, 4), below(4, 2)), (1, normal(4, 2), below(2, 0))),
    row("index_fill", lambda x, i, v: td.index_fill(x, 0, i, v), lambda x, i, v: x.index_fill(0, i.long(), v), normal(5, 2), below(5, 3), normal(1)[0]),
    *(
        row("index_put", lambda x, i, j, v, o=o: td.index_put(x, (i, j), v, **o), lambda x, i, j, v, o=o: x.index_put((i.long(), j.long()), v, **o), normal(*s), i, j, normal(*v))
        for s, i, j, v, o in [
            ((5, 3), apart(5, 4), below(3, 4), (4,), {}),
            ((5, 3), below(5, 9), below(3, 9), (9,), {"accumulate": True}),
            ((4, 6, 2), apart(4, 3, 1), apart(6, 4), (2,), {}),
            ((4, 6, 2), below(4, 3, 1), below(6, 4) - 6, (3, 4, 2), {"accumulate": True}),
            ((3, 3), below(3, 0), below(3, 0), (1,), {}),
        ]
    ),
    row("index_put", lambda x, m: td.index_put(x, (m,), td.tensor(2.0)), lambda x, m: x.index_put((m,), torch.tensor(2.0, dtype=torch.float64)), normal(5, 3), flags(5)),
    row("index_put", lambda x, v, m: td.index_put(x, (m,), v), lambda x, v, m: x.index_put((m,), v), normal(4, 2), normal(3, 2), np.array([True, False, True, True])),
    *(
        row("masked_scatter", td.masked_scatter, lambda x, m, u: x.masked_scatter(m, u), normal(*s), flags(*m), normal(*u))
        for s, m, u in [((7,), (7,), (7,)), ((5, 3), (5, 3), (4, 4)), ((2, 17), (17,), (34,)), ((3, 1, 2), (3, 1, 2), (9,)), ((4, 4), (4, 1), (17,))]
    ),
]  # fmt: skip

WINDOW = (np.hanning(12) + 0.1).astype(np.float32)
SPECTRA: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((2, 50), {"n_fft": 16}),
    ((40,), {"n_fft": 12, "hop_length": 3, "window": True}),
    ((2, 50), {"n_fft": 16, "win_length": 12, "window": True, "normalized": True}),
    ((1, 33), {"n_fft": 9, "hop_length": 2, "onesided": False}),
    ((3, 36), {"n_fft": 12, "hop_length": 4, "window": True, "center": False}),
]


def of_window(options: dict[str, Any], lib: Any) -> dict[str, Any]:
    window = lib.tensor(WINDOW)
    given = window.double() if lib is torch else window
    return {n: given if n == "window" else v for n, v in options.items()}


def torch_window(options: dict[str, Any]) -> dict[str, Any]:
    """PyTorch warns where there is no window."""
    ones = torch.ones(options.get("win_length", options["n_fft"]), dtype=torch.float64)
    return {"window": ones, **of_window(options, torch)}


def torch_stft(x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    return torch.view_as_real(torch.stft(x, return_complex=True, **torch_window(options)))


def torch_istft(z: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    return torch.istft(torch.view_as_complex(z), **torch_window(options))


def spectrum(shape: tuple[int, ...], options: dict[str, Any]) -> np.ndarray:
    return np.ascontiguousarray(torch_stft(torch.tensor(normal(*shape)), options).numpy())


def torch_shift(name: str, x: torch.Tensor, dim: Any) -> torch.Tensor:
    if x.shape[-1] == 2:
        return torch.view_as_real(getattr(torch.fft, name)(torch.view_as_complex(x), dim))
    return getattr(torch.fft, name)(x, dim)


TRANSFORMS = [
    *(row("stft", lambda x, o=o: td.stft(x, **of_window(o, td)), lambda x, o=o: torch_stft(x, o), normal(*s)) for s, o in SPECTRA),
    row("stft", lambda x: td.stft(x, 8, pad_mode="constant"), lambda x: torch_stft(x, {"n_fft": 8, "pad_mode": "constant"}), normal(17)),
    *(row("istft", lambda z, o=o: td.istft(z, **of_window(o, td)), lambda z, o=o: torch_istft(z, o), spectrum(s, o)) for s, o in SPECTRA),
    *(row("istft", lambda z, o=o: td.istft(z, **of_window(o, td)), lambda z, o=o: torch_istft(z, o), spectrum(s, {"n_fft": 16})) for s, o in [((50,), {"n_fft": 16, "length": 40}), ((50,), {"n_fft": 16, "length": 60})]),
    *(row(f"fft.{n}", lambda x, n=n, a=a: getattr(td.fft, n)(x, a), lambda x, n=n, a=a: torch_shift(n, x, a), normal(*s)) for n in ("fftshift", "ifftshift") for s, a in [((5,), None), ((4, 7), None), ((3, 4, 2), None), ((3, 5, 2), (0,)), ((17, 6), -1)]),
]  # fmt: skip

ROWS: list[Row] = [*TRANSFORMS, *ELEMENTWISE, *REDUCTIONS, *SHAPING, *MATRICES, *SCATTERING]
