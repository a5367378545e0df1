"""Attention by blocks: any length, any bias, causal or not, with gradients; no scores in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import treadle as td
from backend import AGREE, assert_within, build, draw, same_bits
from treadle.autodiff.backward import differentiate
from treadle.ir.graph import Graph
from treadle.ir.types import TensorType
from treadle.kernel.target import CPU
from treadle.schedule.attention_blocks import blocks_of, queries_of
from treadle.schedule.schedule import schedule

Shape = tuple[int, ...]
# batch, heads, groups, queries, keys, width, value width, the bias's shape, causal
CASES: list[tuple[int, int, int, int, int, int, int, Shape, bool]] = [
    (2, 2, 1, 15, 15, 5, 4, (2, 1, 1, 15), False),
    (1, 2, 2, 65, 65, 8, 8, (), False),
    (1, 1, 1, 83, 83, 4, 4, (), True),
    (1, 2, 2, 197, 197, 8, 8, (1, 1, 1, 197), False),
    (2, 1, 1, 33, 100, 4, 3, (), True),
    (1, 2, 1, 100, 33, 4, 3, (1, 2, 100, 33), True),
    (2, 4, 2, 17, 19, 4, 4, (1, 4, 17, 19), False),
]
# Every set of axes that a bias may have.
SUBSETS = [
    (
        2,
        4,
        2,
        5,
        7,
        3,
        2,
        tuple(n if bits >> i & 1 else 1 for i, n in enumerate((2, 4, 5, 7))),
        False,
    )
    for bits in range(16)
]
SLOW = [(1, 1, 1, 331, 331, 4, 4, (1, 1, 331, 331), causal) for causal in (False, True)]


def graph_of(case: tuple[int, int, int, int, int, int, int, Shape, bool]) -> Graph:
    """The squared result and the gradients of all operands."""
    b, heads, groups, t, s, d, e, bias, causal = case
    shapes = [(b, heads, t, d), (b, groups, s, d), (b, groups, s, e), *([bias] if bias else [])]
    types = map(TensorType, shapes)

    def biased(q, k, v, bias):
        return (td.attention(q, k, v, bias, causal) ** 2).sum()

    def plain(q, k, v):
        return (td.attention(q, k, v, causal=causal) ** 2).sum()

    wrt = ["q", "k", "v", *(["bias"] if bias else [])]
    return differentiate(td.trace(biased if bias else plain, *types), wrt).graph


def checked(graph: Graph, seed: int = 0) -> None:
    arrays, built = draw(graph, seed), build(graph, shared=True)
    found = built.on(1).run(arrays)
    assert_within(graph, arrays, found, AGREE)
    assert same_bits(built.on(3).run(arrays), found)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_and_its_gradients_by_blocks(case) -> None:
    graph = graph_of(case)
    checked(graph)
    names = {k.name.split("_")[0] for k in schedule(graph).distinct()}
    assert "attention" in names
    assert "contract" not in names


@pytest.mark.parametrize(
    "case",
    [
        *SUBSETS[5:12:2],
        *(pytest.param(x, marks=pytest.mark.slow) for x in SUBSETS[::2] + SUBSETS[13:] + SLOW),
    ],
    ids=str,
)
def test_a_bias_of_any_axes_and_its_gradient(case) -> None:
    checked(graph_of(case))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_scores_are_never_in_memory(causal: bool, has_bias: bool) -> None:
    b, heads, t, d = 2, 4, 263, 8
    graph = graph_of((b, heads, heads, t, t, d, d, (1, heads, t, t) if has_bias else (), causal))
    program = schedule(graph)
    rows, bias = b * heads * t * d, heads * t * t
    most = bias if has_bias else rows
    assert max(buffer.size for buffer in program.buffers) == most < b * heads * t * t
    scratch = sum(s.size for k in program.distinct() for s in k.scratch)
    assert scratch < 8 * 64 * t


def test_the_gradient_of_a_mask_is_not_computed() -> None:
    case = (2, 2, 2, 33, 33, 4, 4, (2, 1, 33, 33), False)
    wanted, program = schedule(graph_of(case)), None
    types = [TensorType((2, 2, 33, 4))] * 3 + [TensorType((2, 1, 33, 33))]

    def loss(q, k, v, bias):
        return (td.attention(q, k, v, bias) ** 2).sum()

    program = schedule(differentiate(td.trace(loss, *types), ["q", "k", "v"]).graph)
    (grad,) = (k for k in program.distinct() if k.name.startswith("attention_grad"))
    (full,) = (k for k in wanted.distinct() if k.name.startswith("attention_grad"))
    assert (len(grad.outputs), len(full.outputs)) == (3, 4)


@pytest.mark.parametrize("t", [5, 70])
def test_rows_that_see_nothing_are_zero(t: int) -> None:
    """Of a whole batch element, and of some queries; values and gradients as PyTorch's."""
    rng = np.random.default_rng(t)
    q, k, v, ct = (rng.normal(size=(2, 2, t, 4)).astype(np.float32) for _ in range(4))
    bias = rng.normal(size=(2, 1, t, t)).astype(np.float32)
    bias[0], bias[1, :, 1:3], bias[1, :, :, 3] = -math.inf, -math.inf, -math.inf

    def f(q, k, v, bias):
        result = td.attention(q, k, v, bias)
        return result, td.grad(lambda *x: (td.attention(*x, bias) * ct).sum(), (0, 1, 2))(q, k, v)

    compiled = td.compile(f, *(td.Spec(a.shape) for a in (q, k, v, bias)))
    result, gradients = compiled(q, k, v, bias)
    leaves = [torch.tensor(a, requires_grad=True) for a in (q, k, v)]
    expected = F.scaled_dot_product_attention(*leaves, attn_mask=torch.tensor(bias))
    np.testing.assert_allclose(result, expected.detach().numpy(), rtol=1e-5, atol=1e-6)
    assert not np.asarray(result)[0].any()
    for a, x in zip(gradients, torch.autograd.grad((expected * torch.tensor(ct)).sum(), leaves)):
        np.testing.assert_allclose(a, x.numpy(), rtol=1e-4, atol=1e-5)


def lengths() -> Iterator[int]:
    yield from range(1, 400)
    yield from (509, 512, 1021, 1024)


def test_gradients_of_the_scores_of_a_single_key_are_zero() -> None:
    """Exactly: its weight is 1, whatever the scores are."""

    def slopes(q, k, v, bias, w):
        return td.grad(lambda q, k, bias: (td.attention(q, k, v, bias) * w).sum(), (0, 1, 2))(
            q, k, bias
        )

    shapes = [(1, 6, 129, 64), (1, 2, 1, 64), (1, 2, 1, 64), (1, 6, 129, 1), (1, 6, 129, 64)]
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    for found in td.compile(slopes, *map(td.Spec, shapes), device="cpu")(*arrays):
        assert not found.any()


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_cover_every_position_once(causal: bool) -> None:
    limits = CPU.rewriting
    for n in lengths():
        blocks = blocks_of(n, 64, 16)
        assert [b.first for b in blocks[1:]] == [b.end for b in blocks[:-1]]
        assert (blocks[0].first, blocks[-1].end) == (0, n)
        assert len(blocks) <= 2
        assert all(min(n, 16) <= b.size < 64 + 16 for b in blocks)
        for count in (1, n, n + 13, max(1, n - 13)):
            every = queries_of(n, count, causal, limits)
            assert [q.blocks.first for q in every[1:]] == [q.blocks.end for q in every[:-1]]
            assert every[-1].blocks.end == n
            for queries in every:
                ends = [keys.blocks.end for keys in queries.keys]
                assert ends[:-1] == [keys.blocks.first for keys in queries.keys[1:]]
                wanted = queries.blocks.end if queries.is_causal else count
                assert ends[-1] == wanted
