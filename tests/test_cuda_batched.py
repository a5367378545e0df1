"""Weight gradients of equal layers: in one phase, at one distance, within a bound of memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

import treadle as td
from backend import same_bits
from cuda_backend import scheduled
from test_kernels import run_steps
from treadle import nn, optim
from treadle.codegen.cuda.driver import render_program
from treadle.ir.graph import Graph
from treadle.kernel.launch import matmul_call_of
from treadle.kernel.nodes import Kernel
from treadle.kernel.program import Argument, Call, Phase, Program
from treadle.kernel.target import Arena
from treadle.memory.assemble import assemble
from treadle.memory.plan import BufferPlan, plan_buffers
from treadle.runtime.cuda.batches import batches_in
from treadle.schedule import batched
from treadle.schedule.batched import Member, with_series
from treadle.schedule.lower import lower
from treadle.schedule.schedule import CPU, GPU, Target, schedule


def with_busy(tiles: int) -> Target:
    return replace(GPU, matmuls=replace(GPU.matmuls, busy_tiles=tiles))


APART = with_busy(0)
LAYERS = 3


class Block(nn.Module):
    """Two projections of one operand, as a gated layer has, and the way back."""

    def __init__(self, d: int):
        self.norm = nn.LayerNorm(d)
        self.gate, self.up = nn.Linear(d, 2 * d, bias=False), nn.Linear(d, 2 * d, bias=False)
        self.out = nn.Linear(2 * d, d)

    def forward(self, x):
        y = self.norm(x)
        return x + self.out(td.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self, layers: int, d: int):
        self.blocks = nn.ModuleList(Block(d) for _ in range(layers))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Chain(nn.Module):
    """Layers that keep nothing but what weight gradients read: putting these off takes memory."""

    def __init__(self, layers: int, d: int):
        self.layers = nn.ModuleList(nn.Linear(d, d, bias=False) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = td.relu(layer(x))
        return x


class Projections(nn.Module):
    """Four products of one shape in a layer: three share an operand, the last has its own."""

    def __init__(self, layers: int, d: int):
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(layers))
        self.parts = nn.ModuleList(
            nn.ModuleList(nn.Linear(d, d, bias=False) for _ in range(4)) for _ in range(layers)
        )

    def forward(self, x):
        for norm, (q, k, v, out) in zip(self.norms, self.parts, strict=True):
            y = norm(x)
            x = x + out(td.tanh(q(y)) * k(y) + v(y))
        return x


def training(
    rows: int = 32, layers: int = LAYERS, d: int = 32, make: type = Model
) -> tuple[Graph, dict]:
    """A step in bfloat16, whose products are a library's at any size, and values for it."""
    step = td.compile_step(
        make(layers, d), lambda m, b: (m(b["x"]) ** 2).mean(), optim.adamw(1e-2),
        {"x": td.Spec((rows, d))}, clip_norm=1.0, precision="bfloat16", device="oracle",
    )  # fmt: skip
    values = dict(step.session.values)
    values["batch:x"] = np.random.default_rng(0).normal(size=(rows, d))
    return step.graph, {n: values[n] for n in step.graph.leaves}


def gradients_in(program: Program) -> list[list[int]]:
    """For each phase, how many equal products it has of those that can be batches."""
    found = []
    for step in program.steps:
        calls = step.calls if isinstance(step, Phase) else ()
        counts = Counter(id(c.kernel) for c in calls if matmul_call_of(c.kernel) is not None)
        found.append(sorted(n for n in counts.values() if n > 1))
    return [f for f in found if f]


def in_arena(program: Program, plan: BufferPlan, values: dict) -> list[np.ndarray]:
    """A program through the interpreter, its temporary buffers where the plan puts them."""
    arena = np.full(plan.size, 0xFF, np.uint8)  # not a number, whatever the dtype
    held = {}
    for b in program.buffers:
        at = plan.offsets.get(b.name)
        held[b.name] = np.zeros(b.size, b.dtype.numpy)
        if at is not None:
            held[b.name] = arena[at : at + b.nbytes].view(b.dtype.numpy)
    for name, type_ in program.leaves:
        held[name] = np.asarray(values[name]).astype(type_.dtype.numpy).reshape(-1)
    for name, array in program.constants:
        held[name] = array.reshape(-1)
    run_steps(program.steps, held, 0)
    return [held[name].reshape(t.shape) for _, name, t in program.outputs]


def are_even(offsets: Sequence[int]) -> bool:
    return len({b - a for a, b in pairwise(offsets)}) == 1


def test_gradients_of_equal_layers_are_batches() -> None:
    """A gate's and its twin's, which share an operand, and those of the way back."""
    program = scheduled(training()[0], in_place=True)
    plan = assemble(program, plan_buffers(program))
    found = batches_in(plan, render_program(program).launches)
    # A gate's batch and its twin's are alike but for where they are.
    assert [n for _, n, _ in found].count(LAYERS) == 2
    assert [n for phase in gradients_in(program) for n in phase if n > 2] == [LAYERS, 2 * LAYERS]


def test_products_of_one_shape_are_told_apart_by_what_they_do() -> None:
    program = scheduled(training(make=Projections)[0], in_place=True)
    plan = assemble(program, plan_buffers(program))
    found = batches_in(plan, render_program(program).launches)
    assert max(n for _, n, _ in found) == LAYERS
    assert len(program.series) == 4 * 3 - 2  # the shared operand is one series
    assert all(len(names) == LAYERS for names in program.series)


def run_of(*names: tuple[str, str, str]) -> list[Member]:
    """Calls by left, right and target."""
    kernel = Kernel("product", (), (), ())
    calls = [Call(kernel, tuple(map(Argument, n))) for n in names]
    return [Member(call, i, 0, 9) for i, call in enumerate(calls)]


def test_a_buffer_is_in_one_series() -> None:
    """Runs may share one; a run that needs a buffer in another order or company is left out."""
    first = run_of(("x0", "a0", "t0"), ("x1", "a1", "t1"))
    shares = run_of(("x0", "b0", "u0"), ("x1", "b1", "u1"))
    turned = run_of(("x1", "c0", "v0"), ("x0", "c1", "v1"))
    longer = run_of(("x0", "d0", "w0"), ("x1", "d1", "w1"), ("x2", "d2", "w2"))
    same = run_of(("y", "e0", "z0"), ("y", "e1", "z1"))
    twice = run_of(("f0", "f0", "p0"), ("f1", "f1", "p1"))
    kept, series = with_series([first, shares, turned, longer, same, twice])
    assert kept == [first, shares, same]
    assert set(series) == {
        ("x0", "x1"), ("a0", "a1"), ("t0", "t1"), ("b0", "b1"), ("u0", "u1"), ("e0", "e1"),
        ("z0", "z1"),
    }  # fmt: skip


def test_they_are_apart_where_a_target_says_nothing_of_tiles() -> None:
    program = scheduled(training()[0], in_place=True, target=APART)
    assert program.series == ()
    assert max(n for phase in gradients_in(program) for n in phase) == 2  # of one layer


def test_a_series_lies_at_one_distance() -> None:
    program = scheduled(training()[0], in_place=True)
    offsets = plan_buffers(program).offsets
    assert len(program.series) == 8  # three products have nine operands, of which one is shared
    for names in program.series:
        assert len(names) == LAYERS
        assert are_even([offsets[n] for n in names])


@pytest.mark.slow
def test_results_are_the_same_bits_in_the_planned_memory() -> None:
    graph, values = training()
    found = []
    for target in (GPU, APART):
        program = scheduled(graph, in_place=True, target=target)
        found.append(in_arena(program, plan_buffers(program), values))
    assert same_bits(*found)
    assert all(np.isfinite(a).all() for a in found[0])


def sizes_of(graph: Graph) -> tuple[int, int]:
    """Bytes of the arena without series and with them."""
    old, new = (plan_buffers(scheduled(graph, in_place=True, target=t)).size for t in (APART, GPU))
    return old, new


def test_memory_of_a_deep_model_hardly_grows() -> None:
    graph, _ = training(rows=1 << 16, layers=8, d=128)
    old, new = sizes_of(graph)
    assert max(map(len, scheduled(graph, in_place=True).series)) >= 7
    assert new <= old * 106 // 100


def test_as_many_are_put_off_as_memory_allows() -> None:
    """All of small matrices, few at a time of large ones."""
    small, large = (training(rows, 24, 64, Chain)[0] for rows in (1 << 10, 1 << 20))
    assert max(map(len, scheduled(small, in_place=True).series)) >= 22
    assert max(map(len, scheduled(large, in_place=True).series)) < 12
    old, new = sizes_of(large)
    limits = GPU.matmuls
    most = old + old // limits.batch_memory_part + old // GPU.arena.part
    assert old + limits.batch_memory < new <= most


def test_series_that_take_much_memory_are_given_up() -> None:
    """Two buffers of one place in turn, which a series keeps apart."""
    program = scheduled(training(layers=5)[0], in_place=True)
    plain = plan_buffers(replace(program, series=()))
    full = replace(GPU, arena=Arena(part=1 << 40, nbytes=0))
    assert plan_buffers(program, full).size <= plain.size < plan_buffers(program).size


def test_products_that_fill_a_device_stay_where_they_are() -> None:
    graph = training()[0]
    assert scheduled(graph, target=with_busy(1)).series == ()
    assert scheduled(graph, target=with_busy(2)).series != ()


def test_what_is_read_in_between_is_not_put_off() -> None:
    """The gradient of the first weight goes into the loss that the others are computed from."""

    def loss(x, y, v, w):
        first = (y.transpose(0, 1) @ td.tanh(x)) * 0.1  # (D, D)
        second = (td.tanh(y @ first).transpose(0, 1) @ td.tanh(x)) * 0.1
        third = td.tanh(y @ second).transpose(0, 1) @ td.tanh(x @ w)
        return [first, second, third, v]

    type_ = td.Spec((64, 64), td.bfloat16)
    program = scheduled(td.trace(loss, *[type_] * 4))  # `check_phases` looks at it
    assert program.series == ()


def test_a_processor_gets_what_it_got() -> None:
    graph = training()[0]
    assert CPU.matmuls.busy_tiles == 0
    program = schedule(graph, in_place=True)
    assert program.series == ()
    assert program.steps == lower(graph, in_place=True).steps
    assert batched.batch_matmuls(program, GPU.matmuls).steps == program.steps
