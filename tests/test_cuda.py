"""The CUDA backend without a GPU: schedules, text, compiled code, plans and errors."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings

import treadle as td
from backend import assert_within, draw
from cuda_backend import ALONE, needs_compiler, rendered, scheduled
from test_backend_ops import CASES, agreement, prepared
from test_backend_programs import SEEDS, SETTINGS
from test_backend_programs import prepared as random_program
from test_kernels import run as interpreted
from treadle import losses, nn, optim
from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.base.errors import DeviceError
from treadle.base.records import from_json, to_json
from treadle.codegen.cuda.driver import render_kernel, render_program
from treadle.ir.graph import Graph
from treadle.ir.op import Op
from treadle.ir.types import TensorType
from treadle.kernel.geometry import Combine, Scattered, Tiled
from treadle.kernel.index import Var, constant, divide, variable
from treadle.kernel.launch import CooperativeLaunch, Launch, call_of, matmul_call_of
from treadle.kernel.mapped import geometry_of, grid_of
from treadle.kernel.nodes import (
    Kernel,
    Matmul,
    standalone_matmul,
)
from treadle.kernel.packs import lane_step
from treadle.kernel.program import Program
from treadle.kernel.target import Target
from treadle.kernel.verify import verify
from treadle.memory.assemble import assemble
from treadle.memory.plan import plan_buffers
from treadle.runtime.cuda import device as devices
from treadle.runtime.cuda.compiler import compile_source, is_cubin
from treadle.schedule.mapping.kernels import map_kernel
from treadle.schedule.schedule import GPU, schedule
from treadle.step.programs import UNWATCHED

ARCHITECTURES = ("sm_80", "sm_90a")
WITH_ATTENTION = dataclasses.replace(GPU, has_attention=True)


# The loop IR serves a GPU: what is scheduled for one means what the oracle says


@pytest.mark.parametrize(
    ("op", "dtype"), [c for c in CASES if c.values[1] in (dtypes.float32, dtypes.bfloat16)]
)
def test_every_op_scheduled_for_a_gpu(op: Op, dtype: DType) -> None:
    graph, arrays = prepared(op, dtype, seed=6)
    assert_within(graph, arrays, interpreted(scheduled(graph), arrays), max(2.0, agreement(op)))


@given(SEEDS)
@settings(max_examples=4, **SETTINGS)
def test_random_programs_scheduled_for_a_gpu(seed: int) -> None:
    training, values, bounds = random_program(seed)
    program = scheduled(training.graph, in_place=True)
    every = {n: np.zeros(t.shape) for n, t in program.leaves}
    found = interpreted(program, {**every, **values})
    assert_within(training.graph, values, found, bounds=bounds)


# Text


def test_every_op_has_a_text() -> None:
    for case in CASES[::5]:
        source = rendered(prepared(*case.values, seed=4)[0], library=False)
        assert len(source.launches) > 0
        for part in source.parts:
            assert part.count("{") == part.count("}")


@needs_compiler
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("op", "dtype"), CASES[::40])
def test_texts_compile(op: Op, dtype: DType, architecture: str) -> None:
    source = rendered(prepared(op, dtype, seed=4)[0], library=False)
    for part in source.parts:
        assert is_cubin(compile_source(part, architecture))


def rows(x, y):
    return [td.layer_norm(x + y, y[0], y[1]), x.sum(0), td.softmax(x), td.gelu(x) * y]


def program_of(
    function, dtype: DType = dtypes.bfloat16, shape=(4096, 768), target: Target = ALONE
) -> Program:
    type_ = TensorType(shape, dtype)
    return scheduled(td.trace(function, type_, type_), target=target)


def test_rows_are_warps_and_accesses_are_packs() -> None:
    program = program_of(lambda x, y: [rows(x, y)[i] for i in (0, 2, 3)])
    assert 32 in {geometry_of(k).share for k in program.distinct()}, "a norm's row is a warp's"
    text = "\n".join(render_kernel(k) for k in program.distinct())
    assert "fetch<8>" in text, "sixteen bytes of bfloat16 at a time"
    assert "store<8>" in text
    assert "in_warp<Add>" in text


def test_sums_of_columns_are_threads_side_by_side() -> None:
    program = program_of(lambda x, y: [(x * y).sum(0)], dtypes.float32)
    parts = next(k for k in program.distinct() if k.name.endswith("_parts"))
    assert geometry_of(parts).combine is not Combine.EXCHANGE
    assert grid_of(parts).lanes == 4


def test_lanes_lie_together_where_a_place_says_so() -> None:
    i = Var("i", 64)
    row, column = divide(variable(i), 16)
    assert lane_step(variable(i), i, 4) == (1, True)
    assert lane_step(column + row * 32, i, 4) == (1, True)
    assert lane_step(variable(i) + 1, i, 4) == (1, False)
    assert lane_step(variable(i) * 2, i, 4)[0] == 2
    assert lane_step(row, i, 8)[0] == 0
    assert lane_step(divide(variable(i), 3)[0], i, 4) == (None, False)
    assert lane_step(constant(8), i, 4) == (0, True)


def test_scattered_sums_have_owners() -> None:
    def scatter(x, y):
        return [td.scatter_add(x, td.cast(td.argmax(y, 1), td.int32), y, 0)]

    program = program_of(scatter, dtypes.float32, (512, 256), ALONE.in_order())
    assert any(isinstance(geometry_of(k).template, Scattered) for k in program.distinct())


@pytest.mark.parametrize(("rows", "owned"), [(100, 1), (169, 2), (1000, 8), (8192, 32)])
def test_few_rows_of_a_scattered_sum_are_spread_over_all_blocks(rows: int, owned: int) -> None:
    """As the gradient of a table of biases: one block with 32 rows would add them one by one."""

    def scatter(x, y):
        return [td.scatter_add(td.zeros((rows, 16)), td.cast(td.argmax(y, 1), td.int32), y, 0)]

    program = program_of(scatter, dtypes.float32, (2401, 16), ALONE.in_order())
    templates = (geometry_of(k).template for k in program.distinct())
    (found,) = (t for t in templates if isinstance(t, Scattered))
    assert (found.rows, found.blocks) == (owned, -(-rows // owned))


# Rounding


def test_narrow_floats_stay_exact_only_where_nothing_is_compared() -> None:
    def exceeds(function) -> bool:
        (found,) = {geometry_of(k).unrounded is not None for k in program_of(function).distinct()}
        return found

    assert exceeds(lambda x, y: [td.gelu(x) * y])
    assert not exceeds(lambda x, y: [td.relu(x * y)])
    assert exceeds(lambda x, y: [td.max(x, 1)]), "what is loaded is exact"
    assert exceeds(lambda x, y: [td.max(x * y, 1)]), "a maximum changes as little as its terms"
    assert exceeds(lambda x, y: [td.softmax(x * y, 1)])
    assert not exceeds(lambda x, y: [td.max(x * y, 1), td.argmax(x, 1)])


# Products and attention


class Block(nn.Module):
    def __init__(self, d: int, heads: int):
        self.heads = heads
        self.ln = nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x):
        b, t, d = x.shape
        parts = td.chunk(self.qkv(self.ln(x)), 3, -1)
        q, k, v = (p.reshape(b, t, self.heads, -1).permute(0, 2, 1, 3) for p in parts)
        mixed = td.attention(q, k, v, causal=True).permute(0, 2, 1, 3).reshape(b, t, d)
        return x + self.proj(mixed)


def step_graph(model: nn.Module, loss, specs, precision: str = "bfloat16") -> Graph:
    step = td.compile_step(
        model, loss, optim.adamw(1e-3), specs, device="oracle", precision=precision, clip_norm=1.0
    )
    return step._programs.built(step._inputs).step(step._mode(), UNWATCHED).graph


def attention_program() -> Program:
    graph = step_graph(Block(64, 4), lambda m, x: (m(x) ** 2).mean(), td.Spec((4, 40, 64)))
    return schedule(graph, in_place=True, target=WITH_ATTENTION)


def test_attention_is_a_library_s_and_lies_as_products_read_it() -> None:
    program = attention_program()
    calls = {c.name: c for k in program.distinct() if (c := call_of(k)) is not None}
    assert set(calls) == {"attention", "attention_grad"}
    forward, backward = calls["attention"], calls["attention_grad"]
    assert forward.results[0].strides == (40 * 64, 16, 64, 1), "heads side by side"
    # The three gradients are parts of one tensor: nothing has to lay them side by side.
    assert len({t.argument for t in backward.results}) == 1
    assert [t.start for t in backward.results] == [0, 64, 128]


def test_a_bias_that_would_be_added_by_itself_is_the_product_s() -> None:
    biased = [
        found[1]
        for k in attention_program().distinct()
        if (found := standalone_matmul(k)) is not None and found[1].bias is not None
    ]
    assert [m.target.columns.count for m in biased] == [192], "that of q, k and v alone"


def test_products_are_whole_and_their_facts_are_stored() -> None:
    program = attention_program()
    assert plan_buffers(program).size > 0
    source = render_program(program)
    products = [launch.matmul for launch in source.launches if launch.matmul is not None]
    assert products
    assert all(p.left.dtype == "bfloat16" for p in products)
    assert from_json(tuple[Launch, ...], to_json(source.launches)) == source.launches
    plan = assemble(program, plan_buffers(program))
    assert len(plan.entries) == len(source.launches)


def test_a_product_with_a_bias_means_what_it_says() -> None:
    def linear(x, y):
        return [td.linear(x, y, y[:, 0]).reshape(-1)[:5], td.linear(x, y, y[:, 0]) @ y]

    type_ = TensorType((64, 64), dtypes.bfloat16)
    graph = td.trace(linear, type_, type_)
    arrays = draw(graph, 8)
    assert_within(graph, arrays, interpreted(scheduled(graph), arrays))


def test_operands_that_are_no_matrices_are_copied() -> None:
    def matmul(x, y):
        return [td.einsum("bihd,bjhd->bhij", x, y)]

    type_ = TensorType((3, 40, 4, 32), dtypes.bfloat16)
    program = scheduled(td.trace(matmul, type_, type_))
    names = [k.name for k in program.distinct()]
    assert sum("_matrix" in n for n in names) == 2, "batches at two strides are none"
    assert sum(isinstance(s, Matmul) for k in program.distinct() for s in _inner(k.body)) == 1
    assert [matmul_call_of(k).batch for k in program.distinct() if matmul_call_of(k)] == [12]


def _inner(body):
    for s in body:
        yield s
        yield from _inner(getattr(s, "body", ()))


# The order of a step


def test_equal_updates_are_one_launch() -> None:
    def loss(m, batch):
        return losses.cross_entropy(m(batch["x"]), batch["y"])

    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6)))
    specs = {"x": td.Spec((64, 128)), "y": td.Spec((64,), td.int32)}
    program = schedule(step_graph(model, loss, specs, "float32"), in_place=True, target=ALONE)
    counts = Counter(id(c.kernel) for c in program.steps[-1].calls)
    assert 6 in counts.values(), "all weights together"
    assert max(launch.calls for launch in render_program(program).launches) >= 6


# Small programs


def mlp_program(rows: int = 128, width: int = 128) -> Program:
    def loss(m, batch):
        return losses.cross_entropy(m(batch["x"]), batch["y"])

    model = nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10))
    specs = {"x": td.Spec((rows, 784)), "y": td.Spec((rows,), td.int32)}
    step = td.compile_step(model, loss, optim.adamw(1e-3), specs, device="oracle")
    graph = step._programs.built(step._inputs).step(step._mode(), UNWATCHED).graph
    return schedule(graph, in_place=True, target=GPU)


def test_a_small_step_is_one_launch_of_a_few_phases() -> None:
    program = mlp_program()
    source = render_program(program)
    (cooperative_launch,) = source.cooperative
    assert len(cooperative_launch.phases) == len(program.steps) <= 5
    assert not any(launch.matmul or launch.block for launch in source.launches)
    assert "".join(source.parts).count("__global__") == 1
    assert (
        from_json(tuple[CooperativeLaunch, ...], to_json(source.cooperative)) == source.cooperative
    )
    contractions = [k for k in program.distinct() if tile_of(k) is not None]
    assert [tile_of(k).sizes for k in contractions] == [
        (1, 128, 128, 784),
        (1, 10, 128, 128),
        (1, 128, 784, 128),
    ]
    # The update is done where the gradient is made: the weight is written by the product's kernel.
    assert len(grid_of(contractions[-1]).body) > 5


def tile_of(kernel: Kernel) -> Tiled | None:
    template = geometry_of(kernel).template
    return template if isinstance(template, Tiled) else None


def test_rows_between_two_products_are_one_kernel() -> None:
    """The head, the loss of each row and the gradient before the head."""
    program = mlp_program()
    (call,) = program.steps[1].calls
    assert call.kernel.body[0].var.extent == 128
    assert sum(b.size for b in call.kernel.scratch) == 20, "logits and their gradients, near"


def test_what_is_large_is_launched_by_itself() -> None:
    assert not render_program(mlp_program(4096, 512)).cooperative
    assert not render_program(attention_program()).cooperative, "a library's products are launches"


def lone_calls(program: Program, source) -> list[int]:
    """Kernels of phases that no cooperative launch has."""
    numbers = {id(k): i for i, k in enumerate(program.distinct())}
    starts = {(b.path, b.first): len(b.phases) for b in source.cooperative}

    def walk(steps, path):
        skipped = 0
        for i, step in enumerate(steps):
            skipped = starts.get((path, i), skipped)
            if skipped:
                skipped -= 1
            elif hasattr(step, "calls"):
                yield from (numbers[id(c.kernel)] for c in step.calls)
            else:
                yield from walk(step.steps, (*path, i))

    return list(walk(program.steps, ()))


def test_what_is_launched_together_and_by_itself_can_be_both() -> None:
    """A scan copies its carry before the first turn, and again at the end of each."""
    cases = [c.values for c in CASES if c.values[0].name == "scan"]
    graphs = [prepared(*c, seed=4)[0] for c in cases]
    programs = [scheduled(g, fuse, target=GPU) for g in graphs for fuse in (True, False)]
    alone = 0
    for program in programs:
        source = render_program(program)
        assert source.cooperative
        for i in lone_calls(program, source):
            alone += 1
            assert source.launches[i].block, "it has a function of its own"
    assert alone


def test_tiles_fit_any_sizes() -> None:
    for sizes in ((4, 4, 16), (5, 7, 33), (128, 10, 128), (10, 128, 4000), (1000, 300, 20)):
        m, n, k = sizes
        types = TensorType((m, k), dtypes.float32), TensorType((k, n), dtypes.float32)
        graph = td.trace(lambda x, y: [td.relu(x @ y + 1.0)], *types)
        (kernel,) = schedule(graph, target=dataclasses.replace(GPU, mapping=None)).distinct()
        for blocks in (128, 8):
            tile = tile_of(verify(map_kernel(kernel, GPU.mapping, True, blocks), GPU.mapping))
            if m * n * k < GPU.mapping.least_work:
                assert tile is None
                continue
            assert tile.sizes == (1, m, n, k)
            assert n % tile.across == 0


@needs_compiler
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("sizes", [(33, 47, 65), (40, 12, 3000)])
def test_small_products_compile(sizes: tuple[int, int, int], architecture: str) -> None:
    def products(x, y):
        return [td.relu(x @ y + y[0]), (x @ x.T).sum(0), td.softmax(x @ y)]

    m, n, k = sizes
    types = TensorType((m, k), dtypes.float32), TensorType((k, n), dtypes.float32)
    source = render_program(scheduled(td.trace(products, *types), target=GPU))
    assert source.cooperative
    assert is_cubin(compile_source(source.parts[0], architecture))


# Errors


def test_without_bindings_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings", None)
    with pytest.raises(DeviceError, match=r"cuda-bindings is not installed.*treadle\[cuda\]"):
        devices.bindings()


class _Driver:
    """A driver that answers as it is told."""

    def __init__(self, **answers: object):
        self.answers = answers

    def __getattr__(self, name: str):
        if name not in self.answers:
            raise AttributeError(name)
        return lambda *_: self.answers[name]


@pytest.mark.parametrize(
    ("answers", "cause"),
    [
        ({"cuInit": (100,)}, "100"),
        ({"cuInit": (0,), "cuDriverGetVersion": (0, 11080)}, r"knows CUDA 11\.8.*12\.0 or later"),
        (
            {"cuInit": (0,), "cuDriverGetVersion": (0, 13000), "cuDeviceGetCount": (0, 0)},
            'sees no GPU.*device="cpu"',
        ),
    ],
)
def test_drivers_that_will_not_do(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, tuple[int, ...]], cause: str
) -> None:
    monkeypatch.setattr(devices, "bindings", lambda: _Driver(**answers))
    with pytest.raises(DeviceError, match=cause):
        devices.Device()


def test_a_gpu_is_asked_for_by_name_and_missed_by_name() -> None:
    if devices.why_not() is None:
        pytest.skip("there is a GPU")
    assert td.compile(lambda x: x + 1, td.Spec((2,))).report.device == "cpu"
    with pytest.raises(DeviceError, match="cuda"):
        td.compile(lambda x: x + 1, td.Spec((2,)), device="cuda")


def test_kernels_begin_before_they_read() -> None:
    """What a kernel reads early would be what was there before the last one wrote."""
    for kernel in program_of(rows).distinct():
        text = render_kernel(kernel)
        body = text[text.index("__global__") :]
        assert body.index("begin();") < body.index("now(a.p")
        assert not re.search(r"=\s*\([^)]*\)a\.p\[", body), "every pointer goes through now()"
