"""Functions and their gradients at the sizes that people have, against PyTorch in float64.

Other random tests have sizes around vectors and blocks, which are small: choices that depend on
hundreds of columns, long depths or many channels are made here. A seed draws the same case again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import treadle as td

CHANNELS = [1, 2, 3, 7, 8, 16, 17, 24, 32, 33, 48, 64, 100]
LENGTHS = [2, 3, 7, 13, 16, 33, 50, 64, 77, 128, 197, 256, 300]
AXES = [1, 2, 3, 4, 5, 7, 8, 16, 17, 30, 33, 50, 64, 65, 100, 128, 129, 197, 300]
MOST_FLOPS, MOST_ELEMENTS = 2e8, 1e6
# Of the largest element: float32 sums of thousands of terms; bfloat16 rounded between ops.
WITHIN = {"float32": 2e-4, "bfloat16": 4e-2}


@dataclass(frozen=True)
class Case:
    told: str
    shapes: list[tuple[int, ...]]
    ours: Callable[..., Any]
    theirs: Callable[..., Any]


def _pick(r: random.Random, choices: list[int], count: int) -> tuple[int, ...]:
    return tuple(r.choice(choices) for _ in range(count))


def convolution(r: random.Random) -> Case | None:
    d = r.choice([1, 2, 2, 2, 3])
    groups = r.choice([1, 1, 1, 1, 2, 4])
    inputs, outputs = groups * r.choice(CHANNELS), groups * r.choice(CHANNELS)
    if r.random() < 0.15:
        groups, outputs = inputs, inputs * r.choice([1, 2])
    kernel, dilation = _pick(r, [1, 2, 3, 3, 3, 4, 5, 7], d), r.choice([1, 1, 1, 2])
    space = tuple(r.randint((k - 1) * dilation + 1, (3000, 320, 40)[d - 1]) for k in kernel)
    x, w = (r.choice([1, 2, 3, 5]), inputs, *space), (outputs, inputs // groups, *kernel)
    how: dict[str, Any] = {
        "stride": _pick(r, [1, 1, 2, 2, 3], d),
        "padding": tuple(r.randint(0, k // 2) for k in kernel),
        "dilation": dilation,
        "groups": groups,
    }
    if math.prod(x) * math.prod(w) / inputs > MOST_FLOPS or math.prod(x) > MOST_ELEMENTS:
        return None
    theirs = getattr(F, f"conv{d}d")
    return Case(
        f"conv {x} {w} {how}",
        [x, w],
        lambda x, w: td.conv(x, w, **how),
        lambda x, w: theirs(x, w, **how),
    )


def transposed(r: random.Random) -> Case | None:
    d, k, s = r.choice([1, 2]), r.choice([1, 2, 3, 4, 5]), r.choice([1, 2, 2, 3])
    inputs, outputs = r.choice(CHANNELS), r.choice(CHANNELS)
    space = tuple(r.randint(2, (400, 60)[d - 1]) for _ in range(d))
    x, w = (r.choice([1, 2, 3]), inputs, *space), (inputs, outputs, *[k] * d)
    how = {"stride": s, "padding": r.randint(0, k // 2), "output_padding": r.randint(0, s - 1)}
    if math.prod(x) * outputs * k**d > MOST_FLOPS:
        return None
    theirs = getattr(F, f"conv_transpose{d}d")
    return Case(
        f"conv_transpose {x} {w} {how}",
        [x, w],
        lambda x, w: td.conv_transpose(x, w, **how),
        lambda x, w: theirs(x, w, **how),
    )


def pooling(r: random.Random) -> Case | None:
    d, k, s = r.choice([1, 2, 2, 3]), r.choice([2, 3, 3, 4]), r.choice([1, 2, 2, 3])
    space = tuple(r.randint(k, (2000, 200, 30)[d - 1]) for _ in range(d))
    x, kind, pad = (
        (r.choice([1, 2, 5]), r.choice(CHANNELS), *space),
        r.choice(["max", "avg"]),
        r.randint(0, k // 2),
    )
    if math.prod(x) > MOST_ELEMENTS:
        return None
    ours, theirs = getattr(td, f"{kind}_pool"), getattr(F, f"{kind}_pool{d}d")
    return Case(
        f"{kind}_pool {x} {k} {s} {pad}",
        [x],
        lambda x: ours(x, k, s, pad),
        lambda x: theirs(x, k, s, pad),
    )


def contraction(r: random.Random) -> Case | None:
    labels = "abcdef"[: r.randint(3, 6)]
    sizes = {c: r.choice(AXES) for c in labels}
    left = r.sample(labels, r.randint(1, len(labels)))
    right = [c for c in labels if c not in left] + r.sample(left, r.randint(0, len(left)))
    r.shuffle(right)
    out = [c for c in labels if r.random() < (0.75 if (c in left) != (c in right) else 0.45)]
    r.shuffle(out)
    spec = f"{''.join(left)},{''.join(right)}->{''.join(out)}"
    shapes = [tuple(sizes[c] for c in some) for some in (left, right)]
    if math.prod(sizes.values()) > MOST_FLOPS / 4 or not right:
        return None
    if max(math.prod(s) for s in [*shapes, tuple(sizes[c] for c in out)]) > MOST_ELEMENTS:
        return None
    return Case(
        f"einsum {spec} {shapes}",
        shapes,
        lambda a, b: td.einsum(spec, a, b),
        lambda a, b: torch.einsum(spec, a, b),
    )


def attention(r: random.Random) -> Case | None:
    b, h, t, s = r.choice([1, 2, 5]), r.choice([1, 3, 4, 8]), r.choice(LENGTHS), r.choice(LENGTHS)
    width, causal = r.choice([1, 3, 8, 16, 17, 32, 40, 64, 65, 80, 128]), r.random() < 0.4
    s = t if causal else s
    bias = None if causal else r.choice([None, None, (t, s), (b, 1, 1, s), (1, h, t, s)])
    if b * h * t * s * width > MOST_FLOPS / 4:
        return None

    def ours(q, k, v, *more):
        return td.attention(q, k, v, *more, causal=causal)

    def theirs(q, k, v, *more):
        return F.scaled_dot_product_attention(q, k, v, *more, is_causal=causal)

    shapes = [(b, h, t, width), (b, h, s, width), (b, h, s, width), *([bias] if bias else [])]
    return Case(f"attention {shapes} causal={causal}", shapes, ours, theirs)


def reduction(r: random.Random) -> Case | None:
    shape = _pick(
        r,
        [1, 2, 3, 5, 7, 8, 16, 17, 31, 33, 64, 65, 100, 129, 257, 500, 1000, 3000],
        r.randint(1, 5),
    )
    axes = tuple(sorted(r.sample(range(len(shape)), r.randint(1, len(shape)))))
    if math.prod(shape) > MOST_ELEMENTS:
        return None

    def normal(x):
        gap = x - x.mean(axes, keepdim=True)
        return gap / ((gap * gap).mean(axes, keepdim=True) + 1e-3) ** 0.5

    kinds: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "sum": (lambda x: x.sum(axes), lambda x: x.sum(axes)),
        "normal": (normal, normal),
        "softmax": (lambda x: td.softmax(x, axes[0]) * x, lambda x: torch.softmax(x, axes[0]) * x),
        "logsumexp": (lambda x: td.logsumexp(x, axes), lambda x: torch.logsumexp(x, axes)),
        "max": (lambda x: td.max(x, axes), lambda x: torch.amax(x, axes)),
        "cumsum": (lambda x: td.cumsum(x, axes[0]), lambda x: torch.cumsum(x, axes[0])),
    }
    kind = r.choice(list(kinds))
    return Case(f"{kind} {shape} {axes}", [shape], *kinds[kind])


FAMILIES = {
    "convolution": convolution, "transposed": transposed, "pooling": pooling,
    "contraction": contraction, "attention": attention, "reduction": reduction,
}  # fmt: skip


def drawn(family: str, seed: int) -> Case:
    r = random.Random(f"{family} {seed}")
    return next(case for case in iter(lambda: FAMILIES[family](r), 0) if isinstance(case, Case))


def check(case: Case, seed: int, device: str = "cpu", dtype: td.DType = td.float32) -> None:
    """The result, and gradients along a random direction of it."""
    rng = np.random.default_rng(seed)

    def numbers(shape: tuple[int, ...]) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32).astype(dtype.numpy)

    arrays = [numbers(s) for s in case.shapes]
    leaves = [torch.tensor(a.astype(float), requires_grad=True) for a in arrays]
    result = case.theirs(*leaves)
    weights = numbers(tuple(result.shape))
    (result * torch.tensor(weights.astype(float))).sum().backward()

    def both(*given):
        def loss(*xs):
            return (case.ours(*xs) * given[-1]).sum()

        gradients = td.grad(loss, argnums=tuple(range(len(arrays))))(*given[:-1])
        return case.ours(*given[:-1]), *gradients

    specs = [td.Spec(a.shape, dtype) for a in (*arrays, weights)]
    found = td.compile(both, *specs, device=device)(*arrays, weights)
    wanted = [result.detach(), *(x.grad for x in leaves)]
    terms = max(float(abs(w).max()) for w in wanted[1:])  # gradients that cancel are near nothing
    for ours, theirs in zip(found, wanted, strict=True):
        assert theirs is not None
        most = max(float(abs(theirs).max()), 1e-3 * terms, 1e-3)
        error = float(abs(np.asarray(ours).astype(float) - theirs.numpy()).max()) / most
        assert error <= WITHIN[dtype.name], f"{case.told}: {error:.2g}"


@pytest.mark.parametrize("family", FAMILIES)
def test_some_sizes(family: str) -> None:
    for seed in range(2):
        check(drawn(family, seed), seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 150))
@pytest.mark.parametrize("family", FAMILIES)
def test_many_sizes(family: str, seed: int) -> None:
    check(drawn(family, seed), seed)
