"""Scans: split into what is in order and what is not, and run as one kernel where they can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

import treadle as td
from backend import assert_within, draw
from cuda_on_host import no_host_compiler, run_on_host
from test_kernels import run as interpreted
from treadle.domains.field import equal_graphs
from treadle.frontend.scopes import bind1
from treadle.ir.control import SCAN, Scan
from treadle.ir.graph import Graph
from treadle.ir.ops.indexing import RANDOM_BITS, RandomBits
from treadle.ir.ops.linear import CONTRACT
from treadle.ir.verify import verify as verify_graph
from treadle.kernel.program import Program, Repeat, calls_in
from treadle.kernel.target import CPU, GPU, Target
from treadle.kernel.verify import verify
from treadle.rules.expansion import expand
from treadle.rules.scans import split_scans
from treadle.runtime.oracle import OracleProgram
from treadle.schedule.schedule import schedule

Function = Callable[..., td.Tensor]
# Programs of these sizes are small; as in a large one, what a library multiplies is left to it.
LARGE = replace(GPU, matmuls=replace(GPU.matmuls, launch_flops_of_graph=-1))


def repeats(program: Program) -> int:
    return sum(isinstance(s, Repeat) for s in program.steps)


def specs(*shapes: tuple[int, ...], dtype: td.DType = td.float32) -> list[td.Spec]:
    return [td.Spec(s, dtype) for s in shapes]


def decayed(h, a, b):
    """A linear recurrence whose rates are data."""
    return td.scan(lambda c, x: (c * x[0] + x[1], c), h, (a, b))


def read(h, a, b, c, reverse=False):
    """The same, read by a sum over its states: a selective scan."""

    def step(carry, row):
        rate, new, reads = row
        carry = carry * rate + new
        return carry, (carry * reads[:, None, :]).sum(-1)

    return td.scan(step, h, (a, b, c), reverse=reverse)


def selective(h, a, b, c):
    last, y = read(h, a, b, c)
    return [last, y]


def selective_gradients(h, a, b, c, reverse=False):
    def loss(h, a, b, c):
        last, y = read(h, td.sigmoid(a), b, c, reverse)
        return (last * last).sum() + (y * y).sum()

    return list(td.grad(loss, (0, 1, 2, 3))(h, a, b, c))


def reversed_gradients(h, a, b, c):
    return selective_gradients(h, a, b, c, True)


def two_carries(h, a, b):
    """Carries of two dtypes that need each other."""

    def step(carry, x):
        h, n = carry
        h = td.where(n > 1, h * 0.5 + x[0], h - x[1])
        return (h, n + td.cast(x[0] > 0, td.int32)), td.tanh(h) * x[1]

    return td.scan(step, (h, td.cast(h > 0, td.int32)), (a, b))[1]


def masked(h, a, lengths):
    """Rows that stop at a length of their own."""

    def step(carry, x):
        row, t = x
        new = td.tanh(carry * 0.5 + row)
        kept = td.where((t < lengths)[:, None], new, carry)
        return kept, td.where((t < lengths)[:, None], new, 0.0)

    return td.scan(step, h, (a, td.arange(a.shape[0])))[1]


def neighbours(h, a, b):
    """Elements that read their neighbours: a row is a block's."""

    def step(carry, x):
        left = td.concat([carry[:, -1:], carry[:, :-1]], 1)
        return td.logaddexp(carry, left) + x[0], carry * x[1]

    return td.scan(step, h, (a, b))[1]


def neighbour_gradients(h, a, b):
    return list(td.grad(lambda *xs: (neighbours(*xs) ** 2).sum(), (0, 1, 2))(h, a, b))


def softmaxes(h, a, b):
    return td.scan(lambda c, x: (td.softmax(c + x[0]), c * x[1]), h, (a, b))


def spread_gradients(h, a, rates, b):
    """Rates and inputs of every state, made of one number for each channel: never in memory."""

    def loss(h, a, rates, b):
        decay = td.exp(a[..., None] * -td.exp(rates))
        inputs = a[..., None] * b[:, :, None, :]
        y = td.scan(lambda c, x: (c * x[0] + x[1], c), h, (decay, inputs))[1]
        return (y * y).sum()

    return list(td.grad(loss, (0, 1, 2, 3))(h, a, rates, b))


TWO = ((5, 3, 37),) * 2
ONE_KERNEL: dict[str, tuple[Function, Sequence[tuple[int, ...]]]] = {
    "linear": (lambda h, a, b: decayed(h, a, b)[1], ((3, 37), *TWO)),
    "last": (lambda h, a, b: decayed(h, a, b)[0], ((3, 37), *TWO)),
    "single": (lambda h, a, b: decayed(h, a, b)[1], ((3, 37), *((1, 3, 37),) * 2)),
    "packs": (lambda h, a, b: decayed(h, a, b)[1], ((64,), *((3, 64),) * 2)),
    "selective": (selective, ((2, 5, 16), *((4, 2, 5, 16),) * 2, (4, 2, 16))),
    "selective_gradients": (
        selective_gradients,
        ((2, 5, 16), *((4, 2, 5, 16),) * 2, (4, 2, 16)),
    ),
    "reversed_gradients": (
        reversed_gradients,
        ((2, 5, 3), *((6, 2, 5, 3),) * 2, (6, 2, 3)),
    ),
    "spread_gradients": (spread_gradients, ((2, 5, 16), (4, 2, 5), (5, 16), (4, 2, 16))),
    "two_carries": (two_carries, ((3, 37), *TWO)),
    "neighbours": (neighbours, ((3, 37), *TWO)),
    "neighbour_gradients": (neighbour_gradients, ((3, 37), *TWO)),
    "softmaxes": (softmaxes, ((3, 37), *TWO)),
}


@pytest.mark.parametrize("name", ONE_KERNEL)
@pytest.mark.parametrize(
    ("target", "dtype"), [(GPU, td.float32), (LARGE, td.bfloat16)], ids=["small", "large"]
)
def test_a_scan_of_parts_is_one_kernel(name: str, dtype: td.DType, target: Target) -> None:
    function, shapes = ONE_KERNEL[name]
    graph = td.trace(function, *specs(*shapes, dtype=dtype))
    program = schedule(graph, target=target)
    assert repeats(program) == 0
    for kernel in program.distinct():
        verify(kernel, GPU.mapping)
    arrays = draw(graph, 7, 0.5)
    assert_within(graph, arrays, interpreted(program, arrays), 8.0)


def test_masks_by_lengths() -> None:
    graph = td.trace(masked, *specs((3, 37), (5, 3, 37)), td.Spec((3,), td.int32))
    program = schedule(graph, target=GPU)
    assert repeats(program) == 0
    arrays = draw(graph, 7, 0.5) | {"lengths": np.array([5, 1, 3], np.int32)}
    assert_within(graph, arrays, interpreted(program, arrays), 8.0)


@pytest.mark.skipif(no_host_compiler() is not None, reason=str(no_host_compiler()))
@pytest.mark.parametrize("name", ["selective_gradients", "neighbours"])
def test_the_text_of_such_a_kernel(name: str) -> None:
    function, shapes = ONE_KERNEL[name]
    graph = td.trace(function, *specs(*shapes))
    program = schedule(graph, target=LARGE)
    arrays = draw(graph, 7, 0.5)
    assert_within(graph, arrays, run_on_host(program, arrays), 8.0)


def test_parts_that_are_long_stay_launches() -> None:
    """One row that is too long for a block: its iterations are shared by the whole device."""
    shapes = ((1, 70_000), *((3, 1, 70_000),) * 2)
    assert repeats(schedule(td.trace(neighbours, *specs(*shapes)), target=GPU)) == 1


@pytest.mark.parametrize("count", [40, 42])
def test_bits_for_several_keys(count: int) -> None:
    """A last pack of bits that reaches beyond its row must not be taken for part of the next."""

    def bits(keys: td.Tensor) -> td.Tensor:
        return td.vmap(lambda key: bind1(RANDOM_BITS, RandomBits(0, (count,)), key))(keys)

    graph = td.trace(bits, td.Spec((3, 6), td.uint32))
    arrays = {"keys": np.arange(18, dtype=np.uint32).reshape(3, 6)}
    (found,) = interpreted(schedule(graph, target=GPU), arrays)
    np.testing.assert_array_equal(found, OracleProgram(graph).run(arrays)[0])


# What is split off


def rnn(h, x, w, u):
    """The input's matmul is inside, where it need not be; so is the reader's."""

    def step(carry, row):
        carry = td.tanh(carry @ w + row @ u)
        return carry, carry @ u

    return td.scan(step, h, x)[1]


RNN = ((4, 8), (6, 4, 8), (8, 8), (8, 8))


def matmuls(graph: Graph) -> int:
    return sum(n.op is CONTRACT for n in graph.nodes)


def scans(graph: Graph) -> list[Scan]:
    return [n.attributes for n in graph.nodes if n.op is SCAN]


@pytest.mark.parametrize("target", [CPU, GPU], ids=["cpu", "gpu"])
def test_matmuls_that_read_no_carry_leave_the_scan(target: Target) -> None:
    graph = td.trace(rnn, *specs(*RNN))
    found = verify_graph(split_scans(expand(graph, target), target))
    assert equal_graphs(graph, found)
    assert matmuls(graph) == 0
    assert matmuls(found) == 2
    assert [matmuls(s.body) for s in scans(found)] == [1]
    arrays = draw(graph, 3, 0.5)
    assert_within(graph, arrays, interpreted(schedule(graph, target=target), arrays), 8.0)


@pytest.mark.parametrize("dtype", [td.float32, td.bfloat16])
def test_weight_gradients_are_one_matmul(dtype: td.DType) -> None:
    """In mixed precision weights are cast inside the body: no carry sums their gradients."""

    def loss(h, x, w, b):
        def step(carry, row):
            wide = td.cast(carry, dtype) @ td.cast(w, dtype)
            carry = td.tanh(td.cast(wide, td.float32) + row + b)
            return carry, carry

        return (td.scan(step, h, x)[1] ** 2).sum()

    shapes = specs((4, 8), (6, 4, 8), (8, 8), (4, 8))
    graph = td.trace(td.grad(loss, (0, 1, 2, 3)), *shapes)
    assert [s.carries for s in scans(graph)] == [1, 1]
    assert matmuls(graph) == 1
    arrays = draw(graph, 3, 0.5)
    unsplit = [np.asarray(x) for x in td.grad(loss, (0, 1, 2, 3))(*map(td.tensor, arrays.values()))]
    for ours, theirs in zip(interpreted(schedule(graph), arrays), unsplit, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=0.02 * np.abs(theirs).max())


def test_only_states_are_as_large_as_states() -> None:
    """Rates, inputs and states moved on by one are computed where they are read."""
    sizes = replace(LARGE.materialization, spread_bytes=0)
    target = replace(LARGE, materialization=sizes)
    shapes = ((2, 20, 16), (4, 2, 20), (20, 16), (4, 2, 16))
    graph = td.trace(spread_gradients, *specs(*shapes))
    program = schedule(graph, target=target)
    large = [b.name for b in program.buffers if b.size == 4 * 2 * 20 * 16]
    # The states, their cotangents from the loss and in all, and what two sums of rates read.
    assert len(large) == 4
    arrays = draw(graph, 7, 0.5)
    assert_within(graph, arrays, interpreted(program, arrays), 8.0)


# Beside a library's matmul


def lstm(x, w):
    """Gates from a matmul in bfloat16, everything else in float32."""
    width = w.shape[0]

    def step(carry, row):
        h, c = carry
        gates = td.cast(td.cast(h, td.bfloat16) @ td.cast(w, td.bfloat16), td.float32) + row
        i, f, g, o = (gates[:, k * width : (k + 1) * width] for k in range(4))
        new = td.sigmoid(f) * c + td.sigmoid(i) * td.tanh(g)
        out = td.sigmoid(o) * td.tanh(new)
        return (out, new), out

    start = td.zeros((x.shape[1], width))
    return td.scan(step, (start, start), x)[1]


def gru(x, w):
    width = w.shape[0]

    def step(h, row):
        gates = td.cast(td.cast(h, td.bfloat16) @ td.cast(w, td.bfloat16), td.float32)
        z = td.sigmoid(gates[:, :width] + row[:, :width])
        r = td.sigmoid(gates[:, width : 2 * width] + row[:, width : 2 * width])
        n = td.tanh(r * gates[:, 2 * width :] + row[:, 2 * width :])
        h = (1 - z) * n + z * h
        return h, h

    return td.scan(step, td.zeros((x.shape[1], width)), x)[1]


@pytest.mark.parametrize(("cell", "gates"), [(lstm, 4), (gru, 3)])
def test_an_iteration_is_a_matmul_and_one_kernel(cell: Function, gates: int) -> None:
    function = td.grad(lambda x, w: (cell(x, w) ** 2).sum(), (0, 1))
    graph = td.trace(function, *specs((2, 8, gates * 64), (64, gates * 64)))
    program = schedule(graph, target=LARGE)
    loops = [s for s in program.steps if isinstance(s, Repeat)]
    assert [len(calls_in(loop)) for loop in loops] == [2, 2]
    arrays = draw(graph, 3, 0.3)
    assert_within(graph, arrays, interpreted(program, arrays), 8.0)


def kept_twice(h, x, w):
    """A carry that is a result as it was, and is saved for the backward pass."""
    return td.scan(lambda h, v: (td.tanh(h @ w + v), h), h, x, recompute=True)[1]


def swapped(h, x, w):
    """Carries that take each other's place, one of them a result as it was."""

    def body(carry, v):
        a, b = carry
        return (b, td.tanh(a @ w + v)), b

    return td.scan(body, (h, h), x)[1]


@pytest.mark.parametrize("function", [kept_twice, swapped], ids=lambda f: f.__name__)
def test_carries_that_somebody_else_reads_as_they_were(function: Function) -> None:
    def slopes(h, x, w):
        return td.grad(lambda *a: (function(*a) ** 2).sum(), (0, 1, 2))(h, x, w)

    given = specs((3, 4), (5, 3, 4), (4, 4))
    arrays = [np.random.default_rng(i).normal(size=s.shape) for i, s in enumerate(given)]
    arrays = [a.astype(np.float32) for a in arrays]
    found = td.compile(slopes, *given, device="cpu")(*arrays)
    expected = td.compile(slopes, *given, device="oracle")(*arrays)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


def counted(h, x, at):
    """Rows are added to places that each iteration has of its own."""
    return td.scan(lambda c, v: (c * 0.5 + td.segment_sum(v[0], v[1], 4), c), h, (x, at))[1]


def read_where_told(h, x, at):
    """Rows of what was read are found by indices: the gradient adds to those places."""

    def step(carry, row):
        values, places = row
        picked = td.take(td.tanh(carry), places, 0)
        return carry * 0.5 + values + picked.sum(0), picked

    return td.scan(step, h, (td.pad(x, [(0, 0), (0, 1), (0, 0)]), at), reverse=True)[1]


@pytest.mark.parametrize("function", [counted, read_where_told], ids=lambda f: f.__name__)
def test_an_iteration_adds_to_zeros_of_its_own(function: Function) -> None:
    def slopes(h, x, at):
        return td.grad(lambda h, x: (function(h, x, at) ** 2).sum(), (0, 1))(h, x)

    given = [*specs((4, 6), (5, 3, 6)), td.Spec((5, 3), td.int32)]
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=s.shape).astype(np.float32) for s in given[:2]]
    arrays.append(rng.integers(0, 4, (5, 3)).astype(np.int32))
    for of in (function, slopes):
        found, expected = (
            td.compile(of, *given, device=device)(*arrays) for device in ("cpu", "oracle")
        )
        pairs = zip(found, expected, strict=True) if of is slopes else [(found, expected)]
        for x, y in pairs:
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-4)
