"""Kernels mapped to a GPU: what they mean, what the verifier refuses, what the interpreter finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

import treadle as td
from backend import assert_within, draw
from cuda_backend import ALONE, IN_ORDER, scheduled, with_matmuls
from cuda_on_host import no_host_compiler, run_on_host
from test_backend_ops import CASES, agreement, prepared
from test_kernels import MEANINGS
from test_kernels import run as interpreted
from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.ir.op import Op
from treadle.ir.types import TensorType
from treadle.kernel.geometry import Combine, Geometry, Scattered, Tiled
from treadle.kernel.index import Var, constant, variable
from treadle.kernel.interpret import interpret
from treadle.kernel.mapped import geometry_of, group_rows, is_of_warps, shared_bytes
from treadle.kernel.nodes import (
    Accumulate,
    Barrier,
    Buffer,
    For,
    Kernel,
    Let,
    Literal,
    Load,
    Local,
    Matmul,
    Role,
    Space,
    Statement,
    Store,
    Update,
)
from treadle.kernel.program import Program
from treadle.kernel.text import to_text
from treadle.kernel.traverse import walk
from treadle.kernel.verify import verify
from treadle.kernel.verify_mapping import verify_mapping
from treadle.schedule.mapping.kernels import map_kernel
from treadle.schedule.schedule import GPU, schedule

F32 = dtypes.float32
MAPPING = GPU.mapping
assert MAPPING is not None


# What is mapped means what the oracle says


@pytest.mark.parametrize(("op", "dtype"), CASES[::6])
def test_every_op_in_cooperative_launches(op: Op, dtype: DType) -> None:
    graph, arrays = prepared(op, dtype, seed=6)
    program = scheduled(graph, target=GPU)
    for kernel in program.distinct():
        verify(kernel, MAPPING)
    assert_within(graph, arrays, interpreted(program, arrays), max(2.0, agreement(op)))


def rows(x, y):
    return [td.layer_norm(x, y[0], y[1]), td.softmax(x * y)]


def columns(x, y):
    return [(x * y).sum(0), td.max(x, 0)]


def norm_gradients(x, y):
    def loss(x, weight, bias):
        return (td.layer_norm(x, weight, bias) * y).sum()

    return list(td.grad(loss, (0, 1, 2))(x, y[0], y[1]))


def contraction(x, y):
    return [td.relu(x @ y.T + 1.0)]


def scattered(x, y):
    return [td.scatter_add(x, td.cast(td.argmax(y, 1), td.int32), y, 0)]


def in_registers(kernel: Kernel) -> bool:
    return bool(group_rows(kernel))


def is_by_warps(kernel: Kernel) -> bool:
    return any(isinstance(s, For) and is_of_warps(s) for s in walk(kernel.body))


def adds_together(kernel: Kernel) -> bool:
    return any(isinstance(s, Update) and s.shared for s in walk(kernel.body))


def is_template(kind: type) -> Callable[[Kernel], bool]:
    return lambda kernel: isinstance(geometry_of(kernel).template, kind)


def is_columns(kernel: Kernel) -> bool:
    return geometry_of(kernel).combine is not Combine.EXCHANGE


MAPPED = {
    "rows": (rows, (16, 128), in_registers),
    "columns": (columns, (256, 64), is_columns),
    "contraction": (contraction, (24, 40), is_template(Tiled)),
    "scatter": (scattered, (96, 64), adds_together),
    "scatter in order": (scattered, (96, 64), is_template(Scattered)),
}


def mapped(name: str) -> tuple[Program, list[Kernel]]:
    function, shape, wanted = MAPPED[name]
    types = [TensorType(shape, F32)] * 2
    target = IN_ORDER if name.endswith("in order") else ALONE
    program = scheduled(td.trace(function, *types), target=target)
    return program, [k for k in program.distinct() if wanted(k)]


@pytest.mark.parametrize("name", MAPPED)
def test_each_way_of_mapping_means_what_it_did(name: str) -> None:
    function, shape, _ = MAPPED[name]
    program, found = mapped(name)
    assert found, "the case has a kernel of its kind"
    for kernel in program.distinct():
        verify(kernel, MAPPING)
    graph = td.trace(function, *[TensorType(shape, F32)] * 2)
    arrays = draw(graph, 3)
    assert_within(graph, arrays, interpreted(program, arrays), 8.0)


def row_sums(start: float) -> Kernel:
    """Two parts of nine rows, and the sums of each part's columns."""
    part, row, c = Var("part", 2), Var("row", 9), Var("c", 128)
    at = variable(c)
    x, y = (Buffer(n, F32, 2 * 128 * k) for n, k in (("x", 9), ("y", 1)))
    load = Load("x", variable(part) * 1152 + variable(row) * 128 + at, F32)
    statements = (
        For(c, Role.PARALLEL, (Store("sums", at, Literal(start, F32)),)),
        For(row, Role.SEQUENTIAL, (For(c, Role.PARALLEL, (Update("sums", at, load),)),)),
        For(c, Role.PARALLEL, (Store("y", variable(part) * 128 + at, Load("sums", at, F32)),)),
    )
    body = (For(part, Role.PARALLEL, statements),)
    return Kernel("k", (x,), (y,), body, scratch=(Buffer("sums", F32, 128),))


@pytest.mark.parametrize("start", [0.0, 2.0])
def test_warps_share_rows_and_sum_their_columns(start: float) -> None:
    found = verify(map_kernel(row_sums(start), MAPPING), MAPPING)
    assert is_by_warps(found) == (start == 0), "every warp would start from it"
    x = np.random.default_rng(0).normal(size=(2, 9, 128)).astype(np.float32)
    memory = {"x": x.reshape(-1), "y": np.zeros(256, np.float32)}
    interpret(found, memory, MEANINGS)
    expected = x.astype(np.float64).sum(1).reshape(-1) + start
    np.testing.assert_allclose(memory["y"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [F32, dtypes.bfloat16], ids=str)
def test_matmuls_without_a_library_are_loops(dtype: DType) -> None:
    def matmuls(x, y):
        return [td.linear(x, y, y[:, 0]), td.einsum("ij,kj->ki", x, y), (x * 2) @ y.T]

    graph = td.trace(matmuls, TensorType((40, 48), dtype), TensorType((24, 48), dtype))
    program = scheduled(graph, fuse=False, target=with_matmuls(ALONE, False))
    assert not any(isinstance(s, Matmul) for k in program.distinct() for s in walk(k.body))
    assert any(isinstance(geometry_of(k).template, Tiled) for k in program.distinct())
    arrays = draw(graph, 3)
    for run in (interpreted, run_on_host) if no_host_compiler() is None else (interpreted,):
        assert_within(graph, arrays, run(program, arrays), 4.0)


# Kernels that are wrong


R, J = Var("i", 4), Var("j", 64)
X, Y = Buffer("x", F32, 256), Buffer("y", F32, 256)
ROW = variable(R) * 64 + variable(J)
NEAR = Buffer("near", F32, 64, space=Space.SHARED)
ONE_WARP = Geometry(128, 32)


def group(*body: Statement, role: Role = Role.SUBGROUP, lanes: int = 1) -> For:
    return For(J, role, body, None, lanes)


def kernel(
    *body: Statement, scratch: Sequence[Buffer] = (NEAR,), geometry: Geometry | None = ONE_WARP
) -> Kernel:
    return Kernel("k", (X,), (Y,), (For(R, Role.GRID, body),), (), tuple(scratch), False, geometry)


FILL = group(Store("near", variable(J), Load("x", ROW, F32)))
TURNED = Load("near", variable(J) * -1 + 63, F32)  # another thread's element
READ = group(Store("y", ROW, TURNED))
WAIT = Barrier(Role.SUBGROUP)
RIGHT = kernel(FILL, WAIT, READ)
KEPT = Buffer("kept", F32, 64, 1, Space.PRIVATE, 2)
COPY = group(Store("kept", variable(J), Load("x", ROW, F32)), lanes=2)


def test_what_is_right_is_accepted_and_computed() -> None:
    verify(RIGHT, MAPPING)
    x = np.arange(256, dtype=np.float32)
    memory = {"x": x, "y": np.zeros(256, np.float32)}
    interpret(RIGHT, memory, MEANINGS)
    np.testing.assert_array_equal(memory["y"], x.reshape(4, 64)[:, ::-1].reshape(-1))
    assert "barrier of the subgroup" in to_text(RIGHT)
    assert "near: float32[64] shared" in to_text(RIGHT)


WRONG = {
    "missing barrier": (kernel(FILL, READ), "no barrier stands between threads that meet in near"),
    "lanes that meet": (
        kernel(group(Store("near", constant(3), Load("x", ROW, F32))), WAIT, READ),
        "iterations of j may meet in near",
    ),
    "shared memory": (
        kernel(FILL, WAIT, READ, scratch=(replace(NEAR, size=1 << 16),)),
        r"needs 1048576 bytes of shared memory, and has 232448",
    ),
    "read before": (kernel(READ, WAIT, FILL), "near is read before it is written"),
    "barrier in a loop": (
        kernel(group(Store("near", variable(J), Load("x", ROW, F32)), WAIT), WAIT, READ),
        "a barrier stands inside the shared loop over j",
    ),
    "barrier of others": (
        kernel(FILL, Barrier(Role.GROUP), READ),
        "a barrier of the group is the subgroup's",
    ),
    "odd part of a warp": (
        kernel(FILL, WAIT, READ, geometry=Geometry(96, 24)),
        "24 threads are no part of a warp",
    ),
    "not mapped": (kernel(group(role=Role.PARALLEL)), "the loop over j is not mapped"),
    "one thread": (kernel(FILL, geometry=Geometry(128), scratch=(replace(NEAR, space=Space.PRIVATE),)), "one thread shares out"),
    "no geometry": (kernel(FILL, WAIT, READ, geometry=None), "there is no geometry"),
    "space": (kernel(FILL, WAIT, READ, scratch=(replace(NEAR, space=Space.GLOBAL),)), "near is global"),
    "odd lanes": (kernel(replace(FILL, lanes=3), WAIT, READ), "64 iterations are no packs of 3"),
    "row of another": (
        kernel(COPY, group(Store("y", ROW, Load("kept", variable(J) * -1 + 63, F32)), lanes=2), scratch=(KEPT,)),
        "does not walk the row kept",
    ),
    "row outside": (
        kernel(COPY, Store("y", variable(R) * 64, Load("kept", constant(0), F32)), scratch=(KEPT,)),
        "the row kept is touched outside",
    ),
    "sum that is read": (
        kernel(Let("acc", Literal(0.0, F32)),
               group(Accumulate("acc", "add", Load("x", ROW, F32)), Store("y", ROW, Local("acc", F32))), scratch=()),
        "read what they accumulate",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_the_verifier_refuses(name: str) -> None:
    wrong, cause = WRONG[name]
    with pytest.raises(td.GraphError, match=cause):
        verify(wrong, MAPPING)


@pytest.mark.parametrize("name", ["missing barrier", "lanes that meet", "row of another"])
def test_the_interpreter_finds_threads_that_meet(name: str) -> None:
    wrong, _ = WRONG[name]
    memory = {"x": np.zeros(256, np.float32), "y": np.zeros(256, np.float32)}
    with pytest.raises(td.GraphError, match="a thread"):
        interpret(wrong, memory, MEANINGS)


def without_barriers(body: Sequence[Statement]) -> tuple[Statement, ...]:
    kept = (s for s in body if not isinstance(s, Barrier))
    return tuple(
        replace(s, body=without_barriers(s.body)) if isinstance(s, For) else s for s in kept
    )


def test_barriers_of_mapped_kernels_are_needed() -> None:
    """Without them, the verifier refuses what the scheduler made, and the interpreter finds it."""

    def mixed(x, y):
        hidden = td.relu(x @ y)
        return [td.softmax(hidden @ y.T), hidden.sum(0)]

    types = TensorType((24, 40), F32), TensorType((40, 20), F32)
    program = scheduled(td.trace(mixed, *types), target=GPU)
    waiting = [k for k in program.distinct() if any(isinstance(s, Barrier) for s in walk(k.body))]
    assert waiting
    for right in waiting:
        wrong = replace(right, body=without_barriers(right.body))
        with pytest.raises(td.GraphError, match="no barrier"):
            verify(wrong)
        memory = {b.name: np.ones(b.size, b.dtype.numpy) for b in right.buffers}
        interpret(right, memory, MEANINGS)
        with pytest.raises(td.GraphError, match="without a barrier"):
            interpret(wrong, memory, MEANINGS)


def test_shared_memory_is_what_the_target_has() -> None:
    """Rows of 104,000 bytes are staged where a block may have as much; 8.6 and 8.9 allow 99 KB."""
    limited = replace(ALONE, mapping=replace(ALONE.mapping, shared_limit=99 << 10))
    graph = td.trace(lambda x: [td.softmax(x)], TensorType((2048, 26000), F32))
    used = []
    for target in (ALONE, limited):
        kernels = [verify(k, target.mapping) for k in scheduled(graph, target=target).distinct()]
        used.append(max(map(shared_bytes, kernels)))
    assert used == [104000, 0]


def test_a_device_with_less_shared_memory_stages_less() -> None:
    """99 KB a block, as compute capability 8.6 and 8.9 have."""
    assert GPU.mapping is not None
    small = GPU.mapping.within(99 << 10)
    assert small.shared_limit == small.staged == 99 << 10
    rows = td.Spec((64, 20_000))
    graph = td.trace(lambda x: td.softmax(x) * td.exp(x), rows)
    for mapping in (GPU.mapping, small):
        program = schedule(graph, target=replace(GPU, mapping=mapping))
        used = max(shared_bytes(kernel) for kernel in program.distinct())
        assert used <= mapping.shared_limit
        for kernel in program.distinct():
            verify_mapping(kernel, mapping)


@pytest.mark.parametrize(("mib", "small", "large"), [(0, 4, 4), (2, 1, 4), (6, 1, 1)])
def test_sums_share_a_launch_as_far_as_memory_allows(mib: int, small: int, large: int) -> None:
    """Sums of many parts that nothing waits for: where all are too much, the smaller ones."""

    def layers(x, w, v):
        found = []
        for _ in range(4):
            x = td.tanh(x @ w)
            y = td.tanh(x @ v)
            found += [td.cos(x).sum(0), td.cos(y).sum(0)]
            x = x + y @ v.T
        return tuple(found)

    graph = td.trace(layers, td.Spec((8192, 256)), td.Spec((256, 256)), td.Spec((256, 1024)))
    target = replace(GPU, arena=replace(GPU.arena, part=1 << 30, nbytes=mib << 20))
    launches: Counter[int] = Counter()
    for step in schedule(graph, True, target=target).steps:
        kernels = {id(call.kernel): call.kernel for call in step.calls}.values()
        launches.update(
            k.outputs[0].size
            for k in kernels
            if k.name.startswith("reduce") and len(k.outputs) == 1
        )
    assert launches[256] == small
    assert launches[1024] == large
