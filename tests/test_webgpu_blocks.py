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
from treadle.kernel.mapped import shared_bytes
from treadle.kernel.nodes import Kernel, Matmul, Matrix, Space
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
MORE = [(2, 1, 35, 50, 16, False), (2, 2, 33, 33, 64, True), (3, 1, 16, 70, 48, False)]


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


_PLACE = r"&(\w+)\[(.*)\], (\d+)u\)"
_LOAD = re.compile(rf"(?:let|var) (\w+) = coopLoad(T?)<coop_mat16x16<f\d+, [ABC]>>\({_PLACE};")
_STORE = re.compile(rf"coopStoreT\((\w+), {_PLACE};")
_ADD = re.compile(r"(\w+) = coopMultiplyAdd\((\w+), (\w+), (\w+)\);")
_NUMBER = re.compile(r"let (\w+) = (\(?warp .*);")
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
        if found := _NUMBER.fullmatch(text):
            self.numbers[found[1]] = int(eval(found[2].replace("/", "//"), {}, self.numbers))
        elif found := _CLEAR.fullmatch(text):
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
    given = {at[b.name]: rng.normal(size=b.size) for b in shared}
    found = {name: array.copy() for name, array in given.items()}
    m, (left, right) = (
        product.target,
        (given[at[x.buffer]][places_of(x)] for x in product.matrices[1:]),
    )
    assert kernel.geometry is not None
    warps = [Warp(i, found, packed) for i in range(kernel.geometry.threads // 32)]
    held = dict.fromkeys(re.findall(r"\bheld_\d+_\d+\b", block))
    start = rng.normal(size=(len(warps), len(held), 16, 16))
    for warp, matrices in zip(warps, start, strict=True):
        warp.matrices |= dict(zip(held, matrices, strict=True))
        for line in block.splitlines():
            warp.line(line.strip())
    if not product.adds:
        expected = given[at[m.buffer]].copy()
        expected[places_of(m)] = left @ right
        np.testing.assert_allclose(found[at[m.buffer]], expected, atol=1e-9)
        return
    rows = [np.hstack([w.matrices[name] for name in held]) for w in warps]
    before = np.vstack([np.hstack(list(matrices)) for matrices in start])
    np.testing.assert_allclose(np.vstack(rows), before + left @ right, atol=1e-9)


def places_of(m: Matrix) -> np.ndarray:
    rows, columns = np.arange(m.rows.count), np.arange(m.columns.count)
    return m.rows.stride * rows[:, None] + m.columns.stride * columns


def test_matrices_that_warps_hold_are_cleared_and_stored_in_parts() -> None:
    for kernel in kernels(gradients((4, 2, 96, 96, 64, True))):
        text = shader(kernel, halves=True).text
        totals = set(re.findall(r"\bheld_\d+_\d+\b", text))
        stored = re.findall(
            r"coopStoreT\((held_\d+_\d+), &(\w+)\[warp \* 144 \+ (\d)\], 9u\);", text
        )
        assert sorted(name for name, _, _ in stored) == sorted(totals)
        assert all(int(at) == int(name[-1]) % 2 * 4 for name, _, at in stored)
        for name in totals:
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
