"""Products of matrices inside a workgroup: what is multiplied, and by which text.

No adapter here has cooperative matrices: kernels are interpreted, and the lines of each product are
carried out warp by warp.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

import treadle as td
from backend import draw
from test_kernels import run
from treadle.autodiff.backward import differentiate
from treadle.base import dtypes
from treadle.codegen.wgsl.driver import shader
from treadle.domains.float64 import evaluate_float64
from treadle.ir.graph import Graph
from treadle.ir.types import TensorType
from treadle.kernel.mapped import held_matrices, is_of_warps, shared_bytes
from treadle.kernel.nodes import Barrier, For, Kernel, Matmul, Matrix, Role, Space
from treadle.kernel.target import Target
from treadle.kernel.target_webgpu import FULL, target_of
from treadle.kernel.traverse import walk
from treadle.kernel.verify_mapping import verify_mapping
from treadle.schedule.schedule import schedule

Sizes = tuple[int, int, int, int, int, bool]  # heads of queries and keys, positions, elements


def gradients(sizes: Sizes) -> Graph:
    heads, groups, length, count, depth, causal = sizes
    q = TensorType((1, heads, length, depth), dtypes.float16)
    k = TensorType((1, groups, count, depth), dtypes.float16)

    def squares(q, k, v):
        return (td.attention(q, k, v, causal=causal).astype(td.float32) ** 2).sum()

    return differentiate(td.trace(squares, q, k, k), ["q", "k", "v"]).graph


def always() -> Target:
    target = target_of(FULL)
    return replace(target, rewriting=replace(target.rewriting, least_matrix_scores=1))


def kernels(graph: Graph) -> list[Kernel]:
    found = schedule(graph, target=always()).distinct()
    return [k for k in found if any(isinstance(s, Matmul) for s in walk(k.body))]


QUICK = (2, 1, 40, 40, 16, True)
MORE = [
    (2, 1, 90, 140, 16, True),
    (2, 1, 35, 50, 16, False),
    (2, 2, 33, 33, 64, True),
    (3, 1, 16, 70, 48, False),
]


@pytest.mark.parametrize("sizes", [QUICK, *(pytest.param(s, marks=pytest.mark.slow) for s in MORE)])
def test_streamed_attention_is_attention(sizes: Sizes) -> None:
    graph = gradients(sizes)
    arrays = {n: a.astype(np.float16) for n, a in draw(graph, 1).items()}
    found = run(schedule(graph, target=always()), arrays)
    for ours, theirs in zip(found, evaluate_float64(graph, arrays), strict=True):
        most = np.abs(np.asarray(theirs)).max()
        assert np.abs(np.asarray(ours, np.float64) - theirs).max() <= 2e-3 * most


def test_blocks_fit_a_workgroup() -> None:
    mapping = target_of(FULL).mapping
    assert mapping is not None
    found = kernels(gradients((9, 3, 1024, 1024, 64, True)))
    assert [k.name.rpartition("_")[2] for k in found if "grad" in k.name] == ["queries", "keys"]
    for kernel in found:
        verify_mapping(kernel, mapping)
        assert shared_bytes(kernel) <= mapping.shared_limit


def test_scores_that_grow_scale_sums_down() -> None:
    """Later keys have much greater scores: what was summed before has to become smaller."""
    heads, length, depth = 1, 80, 16
    type_ = TensorType((1, heads, length, depth), dtypes.float16)
    graph = td.trace(lambda q, k, v: [td.attention(q, k, v)], type_, type_, type_)
    arrays = {n: a.astype(np.float16) for n, a in draw(graph, 1).items()}
    arrays["q"] = np.full(type_.shape, 1.0, np.float16)
    grown = np.linspace(-8, 8, length)[:, None] * np.ones(depth)  # scores from -32 to 32
    arrays["k"] = np.broadcast_to(grown, type_.shape).astype(np.float16)
    (found,) = run(schedule(graph, target=always()), arrays)
    (expected,) = evaluate_float64(graph, arrays)
    most = np.abs(np.asarray(expected)).max()
    assert np.abs(np.asarray(found, np.float64) - expected).max() <= 2e-3 * most


def test_warps_have_strips() -> None:
    """Threads of a group wait for each other where a block comes and goes, and nowhere else."""
    for kernel in kernels(gradients((4, 2, 256, 256, 64, True))):
        geometry = kernel.geometry
        assert geometry is not None
        assert geometry.threads == geometry.share == 256
        loops = [s for s in walk(kernel.body) if isinstance(s, For) and s.role is Role.SEQUENTIAL]
        steps = [s for s in loops if any(isinstance(x, For) and is_of_warps(x) for x in s.body)]
        assert steps
        for step in steps:
            scopes = [s.scope for s in step.body if isinstance(s, Barrier)]
            assert scopes == [Role.GROUP, Role.GROUP]


def test_short_rows_have_fewer_strips() -> None:
    threads = {k.geometry.threads for k in kernels(gradients((2, 1, 40, 40, 16, True)))}
    assert threads == {128}


def test_what_only_products_read_is_held_by_warps() -> None:
    forward, queries, keys = kernels(gradients((4, 2, 256, 256, 64, True)))
    for kernel, count in ((forward, 2), (queries, 3), (keys, 4)):
        held = held_matrices(kernel)
        assert len(held) == count
        spaces = {b.name: b.space for b in kernel.scratch}
        assert {name for name, space in spaces.items() if space is Space.PRIVATE} == held
        shared = replace(
            kernel, scratch=tuple(replace(b, space=Space.SHARED) for b in kernel.scratch)
        )
        with pytest.raises(td.TreadleError, match="not private"):
            verify_mapping(shared)


def test_the_next_block_is_loaded_while_one_is_multiplied() -> None:
    for kernel in kernels(gradients((4, 2, 256, 256, 64, True))):
        text = shader(kernel, halves=True).text
        names = re.findall(r"var (ahead_\d+) = (.*);", text)
        assert names
        for name, first in names:
            (stored,) = re.finditer(rf"\[.*\] = {name};", text)
            (loaded,) = re.finditer(rf"^ +{name} = (.*);", text, re.MULTILINE)
            between = text[stored.end() : loaded.start()]
            assert between.count("workgroupBarrier();") == 1
            assert "coopMultiplyAdd" not in between
            # The same place, one iteration on.
            assert re.sub(r"after_\d+", "0", _numbered(loaded[1])) == _numbered(first)


def _numbered(text: str) -> str:
    """Without the numbers of names."""
    return re.sub(r"\b(i_\w+?)_\d+\b", r"\1", text)


_PLACE = r"&(\w+)\[(.*)\], (\d+)u\)"
_LOAD = re.compile(rf"(?:let|var) (\w+) = coopLoad(T?)<coop_mat16x16<f\d+, [ABC]>>\({_PLACE};")
_STORE = re.compile(rf"coopStoreT\((\w+), {_PLACE};")
_ADD = re.compile(r"(\w+) = coopMultiplyAdd\((\w+), (\w+), (\w+)\);")
_CLEAR = re.compile(r"var (\w+) = coop_mat16x16<f32, C>\(\);")


class Warp:
    """Lines of a product as one warp carries them out, on memory of numbers."""

    def __init__(self, number: int, memory: dict[str, np.ndarray], packed: set[str]):
        self.numbers, self.memory, self.packed = {"warp": number}, memory, packed
        self.matrices: dict[str, np.ndarray] = {}

    def places(self, buffer: str, start: str, step: str, is_by_rows: bool) -> np.ndarray:
        text = re.sub(r"\b(\d+)u\b", r"\1", start).replace("u32", "").replace("/", "//")
        first, far = int(eval(text, {}, self.numbers)), int(step)
        if buffer in self.packed:
            first, far = 4 * first, 4 * far
        lines = first + far * np.arange(16)[:, None] + np.arange(16)
        return lines if is_by_rows else lines.T

    def line(self, text: str) -> None:
        if found := _CLEAR.fullmatch(text):
            self.matrices[found[1]] = np.zeros((16, 16))
        elif found := _LOAD.fullmatch(text):
            name, transposed, buffer, start, step = found.groups()
            places = self.places(buffer, start, step, bool(transposed))
            self.matrices[name] = self.memory[buffer][places].copy()
        elif found := _ADD.fullmatch(text):
            total, a, b, c = (found[i] for i in range(1, 5))
            self.matrices[total] = self.matrices[a] @ self.matrices[b] + self.matrices[c]
        elif found := _STORE.fullmatch(text):
            name, buffer, start, step = found.groups()
            self.memory[buffer][self.places(buffer, start, step, True)] = self.matrices[name]
        else:
            raise AssertionError(text)


@pytest.mark.parametrize("depth", [16, 48, 64])
def test_texts_multiply_what_the_kernel_says(depth: int) -> None:
    for kernel in kernels(gradients((4, 2, 96, 96, depth, True))):
        text = shader(kernel, halves=True).text
        blocks = re.findall(r"^ +\{\n((?: .*;\n)+) +\}$", text, re.MULTILINE)
        blocks = [b for b in blocks if "coopMultiplyAdd" in b]
        products = [s for s in walk(kernel.body) if isinstance(s, Matmul)]
        assert len(blocks) == len(products) >= 2
        for block, product in zip(blocks, products, strict=True):
            carry_out(kernel, text, block, product)


def carry_out(kernel: Kernel, text: str, block: str, product: Matmul) -> None:
    """Lines of one product, by all warps, on numbers: memory, or the matrices that they hold."""
    shared = [b for b in kernel.scratch if b.space is Space.SHARED]
    at = {b.name: f"shared_{i + 1}" for i, b in enumerate(shared)}
    packed = set(re.findall(r"var<workgroup> (\w+): array<vec4<f(?:16|32)>", text))
    rng = np.random.default_rng(0)
    given = {at.get(b.name, b.name): rng.normal(size=b.size) for b in kernel.scratch}
    found = {name: array.copy() for name, array in given.items()}
    target, left, right = product.matrices
    products = [_ADD.fullmatch(line.strip()) for line in block.splitlines()]
    factors = list(dict.fromkeys(m[2] for m in products if m and m[2].startswith("held")))
    totals = list(dict.fromkeys(m[1] for m in products if m))
    assert kernel.geometry is not None
    for number in range(kernel.geometry.threads // 32):
        warp = Warp(number, found, packed)
        before, a, b = (
            given[at.get(m.buffer, m.buffer)][places_of(m, number)] for m in product.matrices
        )
        warp.matrices |= dict(zip(factors, np.hsplit(a, a.shape[1] // 16)))
        if product.adds:
            warp.matrices |= dict(zip(totals, np.hsplit(before, before.shape[1] // 16)))
        for line in block.splitlines():
            warp.line(line.strip())
        expected = a @ b + (before if product.adds else 0)
        made = np.hstack([warp.matrices[name] for name in totals])
        np.testing.assert_allclose(made, expected, atol=1e-9)
        if not product.adds:
            stored = found[at[target.buffer]][places_of(target, number)]
            np.testing.assert_allclose(stored, expected, atol=1e-9)
    assert bool(factors) == (left.buffer not in at)
    assert right.buffer in at


def places_of(m: Matrix, strip: int) -> np.ndarray:
    rows, columns = np.arange(m.rows.count), np.arange(m.columns.count)
    first = m.index.offset + sum(factor * strip for _, factor in m.index.terms)
    return first + m.rows.stride * rows[:, None] + m.columns.stride * columns


def test_sums_that_warps_hold_are_cleared_and_stored_in_parts() -> None:
    for kernel in kernels(gradients((4, 2, 96, 96, 64, True))):
        text = shader(kernel, halves=True).text
        sums = re.findall(r"var (held_\d+_0_\d) = coop_mat16x16<f32, C>\(\);", text)
        stored = re.findall(
            r"coopStoreT\((held_\d+_0_(\d)), &(\w+)\[u32\(warp \* \d+ .* (\d+)\) >> 2u\]", text
        )
        assert {name for name, _, _, _ in stored} == set(sums)
        assert all(int(at) == int(column) % 2 * 16 for _, column, _, at in stored)
        for name in sums:
            assert text.count(f"{name} = coop_mat16x16<f32, C>();") == 2


def test_rows_of_float16_are_read_and_stored_by_fours() -> None:
    def scaled(x, w):
        return [x * w / (x * x).sum(axis=-1, keepdims=True).astype(td.float16)]

    types = TensorType((6, 576), dtypes.float16), TensorType((576,), dtypes.float16)
    graph = td.trace(scaled, *types)
    program = schedule(graph, target=target_of(FULL))
    packed = [k for k in program.distinct() if k.geometry is not None and k.geometry.packs]
    assert packed
    assert any("= vec4<f16>(" in shader(k, halves=True).text for k in packed)
    arrays = {n: a.astype(np.float16) for n, a in draw(graph, 1).items()}
    for ours, theirs in zip(run(program, arrays), evaluate_float64(graph, arrays), strict=True):
        most = np.abs(np.asarray(theirs)).max()
        assert np.abs(np.asarray(ours, np.float64) - theirs).max() <= 4e-3 * most
