"""Attention by groups of threads: no scores in memory, on WebGPU and as CUDA text on the host."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import browser
import treadle as td
from backend import AGREE, assert_within, draw, rounded_inputs, same_bits
from cuda_on_host import no_host_compiler, run_on_host
from test_attention import CASES, SLOW, SUBSETS, graph_of
from treadle.autodiff.backward import differentiate
from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.ir.graph import Graph
from treadle.ir.types import TensorType
from treadle.kernel.index import Index, Remainder, Var, bounded, unflatten, variable
from treadle.kernel.mapped import shared_bytes
from treadle.kernel.nodes import For, Literal, Role, Store, Within
from treadle.kernel.races import conflicts_in
from treadle.kernel.shaders import module
from treadle.kernel.target import GPU
from treadle.kernel.target_webgpu import BASE, target_of
from treadle.schedule.nests import parallel
from treadle.schedule.schedule import schedule
from treadle.verify.certificate.left import judged
from treadle.verify.kernels import check_kernels
from webgpu_backend import needs_adapter, on_adapter, rendered, scheduled

STREAMING = replace(BASE, name="streaming", binding_bytes=16)  # a score is too much to store
CUDA = replace(
    GPU, has_attention=False, has_conv=False, rewriting=replace(GPU.rewriting, least_scores=1)
)
MORE = [(1, 2, 1, 40, 70, 64, 64, (), True), (1, 1, 1, 37, 20, 130, 7, (1, 1, 37, 20), False)]
QUICK = (CASES[4],)
EVERY = [*CASES, *MORE, *SUBSETS, *SLOW]


def marked(cases: list, quick: tuple) -> list:
    return [pytest.param(c, id=str(c), marks=() if c in quick else pytest.mark.slow) for c in cases]


@needs_adapter
@pytest.mark.parametrize("case", marked(EVERY, QUICK))
def test_attention_and_its_gradients_on_an_adapter(case) -> None:
    graph = graph_of(case)
    arrays, program = draw(graph, 3), on_adapter(graph, limits=STREAMING)
    found = program.run(arrays)
    assert_within(graph, arrays, found, AGREE)
    assert same_bits(program.run(arrays), found)


@pytest.mark.skipif(no_host_compiler() is not None, reason="no compiler of C++")
@pytest.mark.parametrize("case", marked([*CASES, *MORE, SUBSETS[5]], (CASES[0],)))
def test_attention_and_its_gradients_as_cuda_text(case) -> None:
    graph = graph_of(case)
    arrays, program = draw(graph, 3), schedule(graph, target=CUDA)
    assert any("attention_grad" in k.name for k in program.distinct())
    assert_within(graph, arrays, run_on_host(program, arrays), AGREE)


@pytest.mark.slow
@needs_adapter
@pytest.mark.parametrize("dtype", [dtypes.float16, dtypes.bfloat16], ids=str)
def test_narrow_floats_are_summed_in_float32(dtype: DType) -> None:
    shape = TensorType((1, 2, 40, 8), dtype)

    def loss(q, k, v):
        return (td.attention(q, k, v, causal=True).astype(td.float32) ** 2).sum()

    graph = differentiate(td.trace(loss, shape, shape, shape), ["q", "k", "v"]).graph
    arrays = rounded_inputs(graph, draw(graph, 2))
    program = scheduled(graph, limits=STREAMING)
    assert any(k.name.startswith("attention") for k in program.distinct())
    assert_within(graph, arrays, on_adapter(graph, limits=STREAMING).run(arrays), AGREE)


@pytest.mark.slow
@needs_adapter
def test_rows_that_see_nothing_are_zero() -> None:
    """As on the CPU, whose rows are compared with PyTorch's."""
    shapes = [(2, 2, 37, 4)] * 3 + [(2, 1, 37, 37)]
    bias = np.random.default_rng(1).normal(size=shapes[3]).astype(np.float32)
    bias[0], bias[1, :, 1:3], bias[1, :, :, 3] = -math.inf, -math.inf, -math.inf

    def loss(q, k, v, bias):
        return (td.attention(q, k, v, bias) ** 2).sum()

    graph = differentiate(td.trace(loss, *map(TensorType, shapes)), ["q", "k", "v"]).graph
    arrays = draw(graph, 5) | {"bias": bias}
    found = on_adapter(graph, limits=STREAMING).run(arrays)
    assert all(np.isfinite(x).all() for x in found)
    assert_within(graph, arrays, found, AGREE)


@pytest.mark.slow
@pytest.mark.skipif(browser.why_not() is not None, reason=str(browser.why_not()))
def test_shaders_are_valid_for_chromium_too(tmp_path: Path) -> None:
    """Its compiler shows that barriers are reached by all threads, which naga does not ask."""
    graphs = [graph_of(case) for case in (*CASES[4:6], MORE[0])]
    shaders = [s for g in graphs for s in rendered(g, STREAMING)]
    texts = [module(s, [0] * s.buffers) for s in shaders]
    script = """(async () => {
      const device = await (await navigator.gpu.requestAdapter()).requestDevice();
      const found = [];
      for (const code of TEXTS) {
        const made = await device.createShaderModule({code}).getCompilationInfo();
        found.push(...made.messages.filter((m) => m.type == "error").map((m) => m.message));
      }
      return found;
    })()"""
    (tmp_path / "index.html").write_text("<html></html>")
    with browser.served(tmp_path) as address, browser.browser(timeout=120) as page:
        page.open(address)
        assert page.run(script.replace("TEXTS", json.dumps(texts))) == []


def packed_graph() -> Graph:
    """Queries, keys and values from one product, as GPTs have them, and the gradient of both."""
    batch, length, heads, depth = 2, 37, 2, 4

    def loss(x, w):
        parts = td.chunk(x @ w, 3, -1)
        q, k, v = (p.reshape(batch, length, heads, depth).permute(0, 2, 1, 3) for p in parts)
        return (td.attention(q, k, v, causal=True) ** 2).sum()

    wide = heads * depth
    types = TensorType((batch, length, wide)), TensorType((wide, 3 * wide))
    return differentiate(td.trace(loss, *types), ["x", "w"]).graph


@pytest.mark.skipif(no_host_compiler() is not None, reason="no compiler of C++")
def test_queries_keys_and_values_of_one_product() -> None:
    graph = packed_graph()
    arrays, program = draw(graph, 4), schedule(graph, target=CUDA)
    assert any("attention_grad" in k.name for k in program.distinct())
    assert_within(graph, arrays, run_on_host(program, arrays), AGREE)


# What is scheduled


def stored(graph: Graph, target) -> int:
    return max(b.size for b in schedule(graph, target=target).buffers)


@pytest.mark.parametrize("causal", [False, True])
def test_scores_are_never_in_memory(causal: bool) -> None:
    b, heads, t, d = 2, 4, 263, 8
    graph = graph_of((b, heads, heads, t, t, d, d, (), causal))
    for target in (CUDA, target_of(STREAMING)):
        assert stored(graph, target) == b * heads * t * d


def test_small_scores_are_stored_and_large_ones_are_not() -> None:
    def names(length: int) -> set[str]:
        shape = TensorType((1, 4, length, 16))
        graph = td.trace(lambda q, k, v: td.attention(q, k, v), shape, shape, shape)
        return {k.name.split("_")[0] for k in scheduled(graph).distinct()}

    assert "attention" not in names(1024)
    assert names(2048) == {"attention"}


@pytest.mark.parametrize("width", [3, 16, 64, 128])
def test_blocks_have_room_in_the_least_shared_memory(width: int) -> None:
    graph = graph_of((1, 1, 1, 600, 600, width, width, (1, 1, 600, 600), False))
    mapped = scheduled(graph, limits=STREAMING).distinct()
    streamed = [k for k in mapped if k.name.startswith("attention")]
    assert len(streamed) >= 5
    assert all(shared_bytes(k) <= target_of(BASE).mapping.shared_limit for k in streamed)


def test_the_gradient_of_a_mask_is_not_computed() -> None:
    types = [TensorType((2, 2, 33, 4))] * 3 + [TensorType((2, 1, 33, 33))]

    def loss(q, k, v, bias):
        return (td.attention(q, k, v, bias) ** 2).sum()

    graph = differentiate(td.trace(loss, *types), ["q", "k", "v"]).graph
    assert not any("bias" in k.name for k in schedule(graph, target=CUDA).distinct())


@pytest.mark.parametrize("case", marked(CASES, (CASES[4],)))
def test_every_kernel_computes_its_part_of_the_graph(case) -> None:
    """Over the finite field, where what is scaled down for a greater score cancels exactly."""
    program = schedule(graph_of(case), in_place=True, target=CUDA)
    claims = judged(program, check_kernels(program))
    streamed = [c for c in claims if "attention" in str(c)]
    assert len(streamed) >= 3
    assert all("established" in str(c) and not c.reason for c in streamed), streamed


# Groups that own blocks of rows


def rows_of_blocks(step: int, block: int, length: int) -> For:
    """Blocks of rows, each cut off at the end; `step` rows from one block to the next."""
    group, i = Var("group", 12), Var("i", block)
    head, number = unflatten(variable(group), (3, 4))
    row = number * step + variable(i)
    at = head * length + bounded(row, length)
    store = Store("out", at, Literal(0, dtypes.float32), Within(row, 0, length))
    (loop,) = parallel([group], parallel([i], [store]))
    assert isinstance(loop, For)
    return loop


def test_blocks_of_rows_stay_apart_if_they_do_not_overlap() -> None:
    assert not conflicts_in(rows_of_blocks(8, 8, 29))
    assert not conflicts_in(rows_of_blocks(9, 8, 29))
    assert conflicts_in(rows_of_blocks(7, 8, 29)) == {"out"}
    assert conflicts_in(rows_of_blocks(0, 8, 29)) == {"out"}


def test_rows_that_no_head_tells_apart_meet() -> None:
    group, i = Var("group", 12), Var("i", 8)
    row = Index(((Remainder(variable(group), 4), 8),)) + variable(i)
    store = Store("out", bounded(row, 29), Literal(0, dtypes.float32), Within(row, 0, 29))
    (loop,) = parallel([group], [For(i, Role.PARALLEL, (store,))])
    assert isinstance(loop, For)
    assert conflicts_in(loop) == {"out"}
