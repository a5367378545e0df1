"""Attention on a GPU without one: which is a library's, what it is given, what it all means."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import treadle as td
from backend import assert_within, draw
from cuda_backend import ALONE, needs_gpu, scheduled
from test_cuda_repeatable import Graph as Described
from test_cuda_repeatable import cudnn as cudnn
from test_kernels import MEANINGS, run
from treadle import nn
from treadle.autodiff.backward import differentiate
from treadle.backends.registry import backend
from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.base.records import from_json, to_json
from treadle.compile_report import CompileReport
from treadle.ir import composites as c
from treadle.ir.graph import Graph
from treadle.ir.types import TensorType
from treadle.kernel import target as targets
from treadle.kernel.launch import LibraryLaunch, Tensor, call_of
from treadle.kernel.program import Program
from treadle.kernel.target import GPU
from treadle.pipeline import optimize, recognise
from treadle.runtime.cuda.attention import planned_attention
from treadle.runtime.cuda.conv import NoLibraryCallError
from treadle.runtime.cuda.dnn import has_dnn
from treadle.schedule.templates import LibraryCallKey, attention_call_key
from treadle.step.programs import UNWATCHED

# Also where few scores would be faster by the definition.
SHORT = {"short_scores": 1, "short_biased_scores": 1}
WITH_ATTENTION = dataclasses.replace(
    ALONE, has_attention=True, matmuls=dataclasses.replace(ALONE.matmuls, **SHORT)
)
Shape = tuple[int, ...]
Sizes = tuple[int, int, int, int, int, int, int]  # batch, heads, groups, queries, keys, widths
BERT: Sizes = (2, 4, 4, 24, 24, 16, 16)


def graph_of(
    sizes: Sizes, bias: Shape, wrt: str, causal: bool = False, dtype: DType | None = None
) -> Graph:
    """The result and the gradients of some operands (q, k, v, b)."""
    b, heads, groups, t, s, d, e = sizes
    shapes = [(b, heads, t, d), (b, groups, s, d), (b, groups, s, e), (b, heads, t, e)]
    shapes += [bias] if bias else []
    types = [TensorType(shape, dtype or dtypes.bfloat16) for shape in shapes]

    def loss(q, k, v, w, *b):
        # The gradient of what is computed stays inside the program.
        return (td.attention(q, k, v, *(2 * x for x in b), causal=causal) * w).sum()

    def biased(q, k, v, w, b):
        return loss(q, k, v, w, b)

    def plain(q, k, v, w):
        return loss(q, k, v, w)

    return differentiate(td.trace(biased if bias else plain, *types), list(wrt)).graph


def calls_of(program: Program) -> dict[str, LibraryLaunch]:
    return {f.name: f for k in program.distinct() if (f := call_of(k)) is not None}


# What the library computes


def probabilities(
    numbers: dict[str, float], q: np.ndarray, k: np.ndarray, bias: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Those of each key for each query, and the logarithm of the sum; rows of −∞ are zeros."""
    scores = q @ repeated(k, q).swapaxes(-1, -2) * numbers["scale"]
    scores = scores + (bias[0] if bias else 0)
    if numbers["causal"]:
        t, s = scores.shape[-2:]
        scores = np.where(np.arange(s) <= np.arange(t)[:, None], scores, -math.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isinf(top), 0, top))
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + np.where(np.isinf(top), 0, top)
    return np.where(total > 0, weights / np.where(total > 0, total, 1), 0), lse[..., 0]


def repeated(k: np.ndarray, q: np.ndarray) -> np.ndarray:
    return np.repeat(k, q.shape[1] // k.shape[1], 1)


def forward(numbers: dict[str, float], shapes: Sequence[Shape], *given: np.ndarray) -> Any:
    q, k, v, *bias = (x.astype(np.float64) for x in given)
    weights, lse = probabilities(numbers, q, k, bias)
    return weights @ repeated(v, q), lse


def backward(numbers: dict[str, float], shapes: Sequence[Shape], *given: np.ndarray) -> Any:
    ct, out, _, q, k, v, *bias = (x.astype(np.float64) for x in given)
    p, _ = probabilities(numbers, q, k, bias)
    d_s = p * (ct @ repeated(v, q).swapaxes(-1, -2) - (ct * out).sum(-1, keepdims=True))
    d_q = d_s @ repeated(k, q) * numbers["scale"]
    d_k = d_s.swapaxes(-1, -2) @ q * numbers["scale"]
    d_v = p.swapaxes(-1, -2) @ ct
    parts = [x.reshape(*k.shape[:2], -1, *x.shape[2:]).sum(2) for x in (d_k, d_v)]
    axes = tuple(i for i, n in enumerate(shapes[3]) if n == 1) if len(shapes) > 3 else ()
    return [d_q, *parts, d_s.sum(axes, keepdims=True)][: len(shapes)]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MEANINGS, "attention", forward)
    monkeypatch.setitem(MEANINGS, "attention_grad", backward)


CASES: list[tuple[Sizes, Shape, str, bool]] = [
    (BERT, (2, 1, 1, 24), "qkv", False),
    (BERT, (1, 4, 24, 24), "qkvb", False),
    ((2, 4, 2, 9, 24, 8, 16), (2, 4, 9, 24), "qkvb", False),
    ((1, 2, 2, 7, 17, 16, 16), (), "qkv", True),
    ((1, 2, 1, 17, 9, 16, 8), (1, 1, 17, 9), "qkv", True),
    ((2, 2, 2, 5, 6, 16, 16), (1, 2, 1, 6), "qkvb", False),
]


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_with_any_bias_is_a_library_s(case) -> None:
    sizes, bias, wrt, causal = case
    graph = graph_of(sizes, bias, wrt, causal)
    program = scheduled(graph, target=WITH_ATTENTION)
    calls = calls_of(program)
    assert set(calls) == {"attention", "attention_grad"}
    gradient = calls["attention_grad"]
    assert len(gradient.results) == (4 if "b" in wrt else 3), "no gradient that nothing reads"
    shapes = [t.shape for t in gradient.operands]
    assert shapes[6:] == ([bias] if bias else [])
    assert not any("copy" in k.name for k in program.distinct()), "all is read where it lies"
    for made in gradient.results[3:]:
        _, heads, t, k = made.shape
        assert made.strides == (heads * t * k, t * k, k, 1)
    arrays = draw(graph, 3)
    assert_within(graph, arrays, run(program, arrays), 4)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("wrt", ["qkv", "qkvb"])
def test_heads_of_no_whole_packs_are_filled_up(wrt: str) -> None:
    graph = graph_of((2, 4, 2, 5, 9, 12, 9), (1, 4, 5, 9), wrt)
    program = scheduled(graph, target=WITH_ATTENTION)
    gradient = calls_of(program)["attention_grad"]
    assert [t.shape[-1] for t in gradient.operands] == [16, 16, 5, 16, 16, 16, 9]
    assert len(gradient.results) == len(wrt)
    arrays = draw(graph, 3)
    assert_within(graph, arrays, run(program, arrays), 4)


class Masked(nn.Module):
    """Two layers whose padding is hidden."""

    def __init__(self) -> None:
        self.layers = nn.ModuleList(
            [nn.MultiHeadAttention(32, 2, batch_first=True) for _ in range(2)]
        )

    def forward(self, x: td.Tensor, lengths: td.Tensor) -> td.Tensor:
        for layer in self.layers:
            hidden = td.arange(x.shape[1]) >= lengths.reshape(-1, 1, 1, 1)
            x = x + layer(x, bias=td.where(hidden, -math.inf, 0.0))
        return x


def test_a_mask_is_in_memory_once_and_as_small_as_it_is() -> None:
    step = td.compile_step(
        Masked(),
        lambda m, b: (m(b["x"], b["n"]) ** 2).mean(),
        td.optim.sgd(0.1),
        {"x": td.Spec((4, 48, 32)), "n": td.Spec((4,), td.int32)},
        device="oracle",
        precision="bfloat16",
    )
    graph = step._programs.built(step._inputs).step(step._mode(), UNWATCHED).graph
    program = scheduled(graph, in_place=True, target=WITH_ATTENTION)
    masks = {
        call.arguments[fact.operands[-1].argument].buffer
        for call in program.calls()
        if (fact := call_of(call.kernel)) is not None
    }
    (mask,) = (b for b in program.buffers if b.name in masks)
    assert mask.size == 4 * 48
    assert max(b.size for b in program.buffers) < 4 * 2 * 48 * 48


def test_attention_by_hand_needs_no_copies_around_its_nan() -> None:
    b, t, heads, d = 8, 64, 4, 64

    def loss(x, weight, out, hidden):
        parts = td.chunk(x @ weight, 3, -1)
        q, k, v = (p.reshape(b, t, heads, d).transpose(1, 2) for p in parts)
        scores = q @ k.transpose(-1, -2) / 8.0
        weights = td.softmax(td.where(hidden.reshape(b, 1, 1, t), -math.inf, scores))
        mixed = (weights @ v).transpose(1, 2).reshape(b, t, heads * d)
        return (mixed @ out).astype(dtypes.float32).mean()

    shapes = (b, t, 256), (256, 768), (256, 256)
    types = [TensorType(shape, dtypes.bfloat16) for shape in shapes]
    graph = recognise(td.trace(loss, *types, TensorType((b, t), dtypes.bool_)), GPU)
    step = optimize(differentiate(graph, ["weight", "out"]).graph)
    program = scheduled(step, target=WITH_ATTENTION)
    assert set(calls_of(program)) == {"attention", "attention_grad"}
    assert not any("matrix" in k.name or "copy" in k.name for k in program.distinct())


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        (BERT, dtypes.float32),
        ((1, 1, 1, 24, 24, 264, 264), dtypes.bfloat16),
        ((1, 1, 1, 24, 24, 255, 257), dtypes.bfloat16),
        ((2, 4, 4, 1, 1, 16, 16), dtypes.bfloat16),
    ],
    ids=str,
)
def test_what_the_library_does_not_take_is_the_definition(sizes: Sizes, dtype: DType) -> None:
    graph = graph_of(sizes, (), "qkv", dtype=dtype)
    assert not calls_of(scheduled(graph, target=WITH_ATTENTION))


@pytest.mark.usefixtures("library")
def test_what_the_library_refused_is_the_definition() -> None:
    graph = graph_of((1, 2, 2, 3, 4, 8, 8), (1, 2, 3, 4), "qkvb")
    node = next(n for n in graph.nodes if n.op is c.ATTENTION_GRAD)
    called = attention_call_key(node, [graph.type_of(v) for v in node.operands])
    assert from_json(LibraryCallKey, to_json(called)) == called, "the plan cache keeps it"
    fact = calls_of(scheduled(graph, target=WITH_ATTENTION))["attention_grad"]
    operands = tuple((t.shape, t.dtype) for t in fact.operands)
    assert called == (fact.name, operands, fact.numbers), "the runtime tells it by the same facts"
    without = dataclasses.replace(WITH_ATTENTION, without=frozenset([called]))
    program = scheduled(graph, target=without)
    assert set(calls_of(program)) == {"attention"}
    arrays = draw(graph, 3)
    assert_within(graph, arrays, run(program, arrays), 4)


# The library itself


def launch(results: int, bias: Shape) -> LibraryLaunch:
    shapes = [(2, 4, 8, 16)] * 2 + [(2, 4, 8)] + [(2, 4, 8, 16)] * 3 + [bias]
    shapes += [(2, 4, 8, 16)] * 3 + [bias] * (results - 3)
    tensors = [Tensor(i, "bfloat16", 0, s, s) for i, s in enumerate(shapes)]
    numbers = (("scale", 0.25), ("causal", 0.0))
    return LibraryLaunch("attention_grad", tuple(tensors[7:]), tuple(tensors[:7]), numbers)


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize("results", [3, 4])
def test_a_bias_and_its_gradient_are_described(
    results: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbered: list[int] = []
    monkeypatch.setattr(
        Described, "set_uid", lambda self, n: numbered.append(n) or self, raising=False
    )
    planned_attention(launch(results, (1, 4, 8, 8)), False)
    options = Described.made[-1].options
    assert ("bias" in options, "dBias" in options) == (True, results == 4)
    assert sorted(numbered) == list(range(1, 8 + results)), "each tensor has its own number, once"


@pytest.mark.usefixtures("cudnn")
def test_a_bias_of_one_row_is_described_as_one_for_each_query(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    described: dict[str, tuple[list[int], list[int]]] = {}

    def tensor(self: Described, name: str, dim: list[int], stride: list[int], **_: object) -> Any:
        described[name] = dim, stride
        return self

    monkeypatch.setattr(Described, "tensor", tensor, raising=False)
    planned_attention(launch(3, (2, 1, 1, 8)), False)
    dims, steps = described["bias"]
    assert (dims, steps[2]) == ([2, 1, 8, 8], 0)
    planned_attention(launch(3, (2, 1, 8, 8)), False)
    assert described["bias"] == ([2, 1, 8, 8], [2, 1, 8, 8])


@pytest.mark.usefixtures("cudnn")
def test_a_plan_that_is_refused_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise ValueError("no plan")

    monkeypatch.setattr(Described, "check_support", refused, raising=False)
    call = launch(3, (1, 4, 8, 8))
    with pytest.raises(NoLibraryCallError, match="no plan") as caught:
        planned_attention(call, False)
    assert caught.value.call is call


@pytest.mark.parametrize(
    ("queries", "keys", "bias", "is_library"),
    [
        (32, 32, (), False),
        (33, 32, (), True),
        (32, 32, (2, 1, 1, 32), False),
        (49, 49, (2, 1, 49, 49), True),  # a mask: all heads have the same
        (49, 49, (2, 1, 1, 49), True),
        (49, 49, (1, 4, 49, 49), False),  # a bias of each head, as windows of pixels have
        (96, 96, (2, 4, 96, 96), False),
        (97, 96, (2, 4, 97, 96), True),
    ],
)
def test_heads_of_few_scores_are_the_definition(
    queries: int, keys: int, bias: Shape, is_library: bool
) -> None:
    target = dataclasses.replace(ALONE, has_attention=True)
    graph = graph_of((2, 4, 4, queries, keys, 16, 16), bias, "qkvb" if bias else "qkv")
    called = calls_of(scheduled(graph, target=target))
    assert ({"attention", "attention_grad"} <= called.keys()) is is_library


# On the device

# Every set of axes that a bias may have.
BIASES = list(itertools.product((1, 2), (1, 4), (1, 40), (1, 48)))
ON_DEVICE: list[tuple[Sizes, Shape, str, bool]] = [
    *CASES,
    ((2, 4, 4, 128, 128, 64, 64), (2, 1, 1, 128), "qkv", False),
    ((2, 4, 4, 128, 128, 64, 64), (2, 1, 128, 128), "qkv", True),
    ((2, 4, 4, 65, 65, 64, 64), (2, 1, 65, 65), "qkv", False),
    ((2, 4, 4, 197, 197, 64, 64), (), "qkv", False),
    ((2, 4, 4, 33, 100, 64, 64), (2, 1, 1, 100), "qkv", False),
    ((2, 4, 1, 64, 128, 64, 64), (), "qkv", True),
    ((2, 4, 4, 1, 17, 32, 32), (1, 1, 1, 17), "qkv", False),
    ((2, 4, 4, 64, 64, 136, 136), (), "qkv", False),
    ((2, 4, 4, 64, 64, 256, 256), (), "qkv", False),
    ((64, 3, 3, 49, 49, 32, 32), (1, 3, 49, 49), "qkvb", False),
    # A number for all keys of a query has a gradient of 0.
    *(((2, 4, 4, 40, 48, 32, 32), s, "qkvb" if s[3] > 1 else "qkv", False) for s in BIASES),
]


def as_compiled(graph: Graph, arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    """By the backend, which schedules anew without what the library refuses."""
    report = CompileReport("cuda", "bfloat16")
    return backend("cuda").load(graph, report, td.CompileOptions(), "attention").run(arrays)


@needs_gpu
@pytest.mark.skipif(not has_dnn(), reason="cuDNN's frontend is not installed")
@pytest.mark.parametrize("case", ON_DEVICE, ids=str)
def test_attention_on_the_device(case, monkeypatch: pytest.MonkeyPatch) -> None:
    matmuls = dataclasses.replace(GPU.matmuls, **SHORT)
    monkeypatch.setattr(targets, "GPU", dataclasses.replace(GPU, matmuls=matmuls))
    graph = graph_of(*case)
    arrays = draw(graph, 3)
    assert_within(graph, arrays, as_compiled(graph, arrays), 4)


@needs_gpu
@pytest.mark.skipif(not has_dnn(), reason="cuDNN's frontend is not installed")
@pytest.mark.parametrize("shape", [(2, 1, 1, 64), (2, 1, 64, 64), (1, 1, 64, 64)], ids=str)
def test_rows_that_see_nothing_on_the_device(shape: Shape) -> None:
    graph = graph_of((2, 4, 4, 64, 64, 64, 64), shape, "qkv")
    arrays = draw(graph, 3)
    (name,) = (n for n, a in arrays.items() if a.shape == shape)
    arrays[name][-1, :, -7:] = -math.inf
    found = as_compiled(graph, arrays)
    assert all(np.isfinite(a.astype(np.float32)).all() for a in found)
    assert_within(graph, arrays, found, 4)
