"""Functions of rows beside PyTorch's in float64: reductions, orders, norms, softmaxes, distances."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

import treadle as td
from point_rows import INF, NAN

Call = Callable[..., Any]


class AxisRow(NamedTuple):
    ours: Call  # of (rows, n), along the last axis
    theirs: Call


LINES: dict[str, list[float]] = {
    "plain": [1.0, 2.0, 4.0],
    "zeros": [0.0, 0.0, 0.0],
    "signed zeros": [-0.0, 0.0, -0.0],
    "equal": [2.0, 2.0, 2.0],
    "two greatest": [3.0, 1.0, 3.0],
    "two least": [1.0, 3.0, 1.0],
    "one zero": [2.0, 0.0, 3.0],
    "two zeros": [0.0, 2.0, 0.0],
    "small": [1e-8, -1e-8, 0.0],
    "denormal": [1e-310, 2e-310, 0.0],
    "far": [1e6, 1e6 + 1, 1e6 - 1],
    "large": [1e200, -1e200, 1.0],
    "∞": [INF, 1.0, 2.0],
    "−∞": [-INF, 1.0, 2.0],
    "all −∞": [-INF, -INF, -INF],
    "two ∞": [INF, INF, 1.0],
    "±∞": [INF, -INF, 1.0],
    "NaN": [1.0, NAN, 3.0],
    "NaN first": [NAN, 1.0, 2.0],
}


def first(found: Any) -> Any:
    return found[0] if isinstance(found, tuple) else found


def along(names: str, **others: str) -> dict[str, AxisRow]:
    """Functions of an axis by one name in both libraries, or by another in PyTorch."""
    pairs = [(getattr(td, n), getattr(torch, others.get(n, n))) for n in names.split()]
    return {
        ours.__name__: AxisRow(
            lambda x, f=ours: first(f(x, -1)), lambda x, f=theirs: first(f(x, -1))
        )
        for ours, theirs in pairs
    }


def norms() -> dict[str, AxisRow]:
    found = {}
    for p in (0.5, 1, 2, 3, 4, INF):
        found[f"vector_norm {p}"] = AxisRow(
            lambda x, p=p: td.vector_norm(x, p),
            lambda x, p=p: torch.linalg.vector_norm(x, p, dim=-1),
        )
    for p in (1, 2, 3):
        found[f"normalize {p}"] = AxisRow(
            lambda x, p=p: td.normalize(x, p, -1), lambda x, p=p: F.normalize(x, p, -1)
        )
        found[f"pairwise_distance {p}"] = AxisRow(
            lambda x, p=p: td.pairwise_distance(x, x * 0 + 1, p),
            lambda x, p=p: F.pairwise_distance(x, x * 0 + 1, p),
        )
    return found


AXIS: dict[str, AxisRow] = {
    **along("sum prod max min mean median var std logsumexp softmax log_softmax", max="amax", min="amin"),
    **along("cumsum cumprod cummax cummin logcumsumexp sort argmax argmin any all argsort"),
    "var without correction": AxisRow(lambda x: td.var(x, -1, 0), lambda x: x.var(-1, correction=0)),
    "std without correction": AxisRow(lambda x: td.std(x, -1, 0), lambda x: x.std(-1, correction=0)),
    "norm": AxisRow(lambda x: td.norm(x, axis=-1), lambda x: torch.linalg.vector_norm(x, dim=-1)),
    **norms(),
    "sort descending": AxisRow(
        lambda x: td.sort(x, -1, descending=True)[0],
        lambda x: torch.sort(x, dim=-1, descending=True, stable=True)[0],
    ),
    "topk": AxisRow(lambda x: td.topk(x, 1)[0], lambda x: x.topk(1)[0]),
    "topk least": AxisRow(
        lambda x: td.topk(x, 1, largest=False)[0], lambda x: x.topk(1, largest=False)[0]
    ),
    "quantile": AxisRow(lambda x: td.quantile(x, 0.3, -1), lambda x: x.quantile(0.3, -1)),
    "diff": AxisRow(td.diff, torch.diff),
    "layer_norm": AxisRow(td.layer_norm, lambda x: F.layer_norm(x, x.shape[-1:])),
    "rms_norm": AxisRow(td.rms_norm, lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-6)),
    "cosine_similarity": AxisRow(
        lambda x: td.cosine_similarity(x, x * 0 + 1, -1),
        lambda x: F.cosine_similarity(x, x * 0 + 1, -1),
    ),
    "cdist": AxisRow(lambda x: td.cdist(x, [[1.0, 1, 1]]), lambda x: torch.cdist(x, x[:1] * 0 + 1)),
    "squared_distances": AxisRow(
        lambda x: td.squared_distances(x, [[1.0, 0, 2]]),
        lambda x: ((x - torch.tensor([1.0, 0, 2])) ** 2).sum(-1, keepdim=True),
    ),
    "softmin": AxisRow(lambda x: td.softmax(-x), lambda x: F.softmin(x, -1)),
    "max_pool": AxisRow(lambda x: td.max_pool(x[:, None], 2, 1), lambda x: F.max_pool1d(x[:, None], 2, 1)),
    "avg_pool": AxisRow(lambda x: td.avg_pool(x[:, None], 2, 1), lambda x: F.avg_pool1d(x[:, None], 2, 1)),
    "adaptive_max_pool": AxisRow(
        lambda x: td.adaptive_max_pool(x[:, None], 2), lambda x: F.adaptive_max_pool1d(x[:, None], 2)
    ),
    "adaptive_avg_pool": AxisRow(
        lambda x: td.adaptive_avg_pool(x[:, None], 2), lambda x: F.adaptive_avg_pool1d(x[:, None], 2)
    ),
    "lp_pool": AxisRow(
        lambda x: td.lp_pool(x[:, None], 2.0, 2, 1), lambda x: F.lp_pool1d(x[:, None], 2.0, 2, 1)
    ),
    "max_pool_with_indices": AxisRow(
        lambda x: td.max_pool_with_indices(x[:, None], 2, 1)[0],
        lambda x: F.max_pool1d(x[:, None], 2, 1),
    ),
    "max_unpool": AxisRow(
        lambda x: td.max_unpool(*td.max_pool_with_indices(x[:, None], 2, 1), 2, 1),
        lambda x: F.max_unpool1d(*F.max_pool1d(x[:, None], 2, 1, return_indices=True), 2, 1),
    ),
    "matmul": AxisRow(
        lambda x: td.matmul(x, np.eye(3)), lambda x: x @ torch.eye(3, dtype=torch.float64)
    ),
    **{
        f"segment_{n}": AxisRow(
            lambda x, f=ours: f(x.T, np.array([0, 0, 1]), 2).T,
            lambda x, n=n: torch.stack([getattr(x[:, :2], f"a{n}")(-1), x[:, 2]], -1),
        )
        for n, ours in (("max", td.segment_max), ("min", td.segment_min))
    },
    "segment_softmax": AxisRow(
        lambda x: td.segment_softmax(x.T, np.array([0, 0, 0]), 1).T, lambda x: x.softmax(-1)
    ),
    "searchsorted": AxisRow(
        lambda x: td.searchsorted([1.0, 2.0, 3.0], x),
        lambda x: torch.searchsorted(torch.tensor([1.0, 2.0, 3.0]).double(), x),
    ),
    "searchsorted right": AxisRow(
        lambda x: td.searchsorted([1.0, 2.0, 3.0], x, right=True),
        lambda x: torch.searchsorted(torch.tensor([1.0, 2.0, 3.0]).double(), x, right=True),
    ),
    "scatter_max": AxisRow(
        lambda x: td.scatter_max(x * 0, -1, np.array([[0, 1, 1]] * 1) + np.zeros(x.shape, int), x),
        lambda x: (x * 0).scatter_reduce(
            -1, torch.tensor([[0, 1, 1]]).expand(x.shape), x, "amax"
        ),
    ),
}  # fmt: skip

# Row and lines → what may differ there, and why. Where the value is NaN derivatives may be anything,
# and a NaN of PyTorch's is no reference for one.
EXCUSES: dict[str, tuple[str, str, str]] = {
    "prod": ("large ∞ −∞ two_∞ ±∞", "Hessian", "∞ · 0, at other places than in PyTorch"),
    "cumprod": ("large ∞ −∞ two_∞ ±∞", "Hessian", "∞ · 0, at other places than in PyTorch"),
    "logcumsumexp": ("large", "gradient", "the share of each of equals; PyTorch's is the first's"),
    "var": ("large", "gradient", "1 beside 1e200"),
    "var without correction": ("large", "gradient", "1 beside 1e200"),
    "cosine_similarity": ("small", "Hessian", "PyTorch's has a slope below its ε"),
    "squared_distances": ("∞ −∞ all_−∞ two_∞ ±∞", "value", "by one matmul: ∞ − ∞"),
    "max_unpool": ("∞ all_−∞ two_∞ ±∞", "gradient", "0 for infinite values"),
    "vector_norm 0.5": ("denormal ∞ −∞ two_∞ ±∞", "Hessian", "it has none at 0, and ∞ − ∞"),
    "segment_max": (
        "zeros signed_zeros equal all_−∞ two_∞",
        "gradient",
        "one of equals has it all",
    ),
    "segment_min": (
        "zeros signed_zeros equal all_−∞ two_∞",
        "gradient",
        "one of equals has it all",
    ),
    "scatter_max": ("zeros signed_zeros equal", "gradient", "shared by the greatest and x, as max"),
}
