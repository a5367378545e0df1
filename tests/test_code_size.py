"""How much code programs become: bounded by the graph, whatever the sizes of its tensors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import treadle as td
from treadle.base import dtypes
from treadle.codegen.llvm.driver import render_kernel, render_program
from treadle.ir.graph import Graph
from treadle.kernel.index import Var, bounded, variable
from treadle.kernel.machine import Machine
from treadle.kernel.nodes import (
    Apply,
    Buffer,
    For,
    Guarded,
    Kernel,
    Let,
    Literal,
    Load,
    Local,
    Role,
    Store,
    Within,
)
from treadle.kernel.program import Program
from treadle.kernel.text import to_text
from treadle.schedule.schedule import schedule

WIDE = Machine(16, permutes=16, registers=32)
F32 = dtypes.float32


def scheduled(graph: Graph) -> Program:
    return schedule(graph, True, 2 * WIDE.width)


def text_lines(program: Program) -> int:
    """Of the kernels' text."""
    return sum(to_text(k).count("\n") for k in program.distinct())


def code_lines(program: Program) -> int:
    """Of the kernels' LLVM IR."""
    return render_program(program, WIDE).count("\n")


def gradient(function: Callable[..., td.Tensor], shape: tuple[int, ...]) -> Graph:
    return td.trace(td.grad(lambda x: (function(x) * 1.5).sum()), td.Spec(shape))


@pytest.mark.parametrize(
    "shape", [(1536,), (3072,), (4096,), (10_000,), (7, 3072), (3072, 7)], ids=str
)
def test_the_gradient_of_prod_is_as_much_code_at_any_size(shape: tuple[int, ...]) -> None:
    axis = None if len(shape) == 1 else int(np.argmax(shape))
    large = scheduled(gradient(lambda x: td.prod(x, axis), shape))
    small = scheduled(gradient(td.prod, (1000,)))
    assert text_lines(large) <= 3 * text_lines(small), "levels of the tree, not its elements"
    assert code_lines(large) <= 4 * code_lines(small)


def halved(x: td.Tensor) -> td.Tensor:
    """A tree by hand, with arithmetic between its levels."""
    while x.shape[0] > 1:
        x = td.pad(x, [(0, x.shape[0] % 2)])
        x = x[0::2] * x[1::2] + td.tanh(x[0::2])
    return x


def doubled(x: td.Tensor) -> td.Tensor:
    """Running products by doubling."""
    count, n = 1, x.shape[0]
    while count < n:
        x = x * td.concat([td.ones((count,)), x[: n - count]], 0)
        count *= 2
    return x


def butterflies(x: td.Tensor) -> td.Tensor:
    """As in a fast Fourier transform: each level reads both halves of the one before."""
    n, apart = x.shape[0], 1
    while apart < n:
        parts = x.reshape(n // (2 * apart), 2, apart)
        a, b = parts[:, 0], parts[:, 1]
        x = td.stack([a + b, a - b], 1).reshape(n)
        apart *= 2
    return x


TREES = {"halved": halved, "doubled": doubled, "butterflies": butterflies}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("name", TREES)
def test_code_grows_with_the_graph_alone(name: str, backward: bool) -> None:
    """The graph grows with the logarithm of the size, and expressions stay small."""
    for n in (1024, 4096):
        function = TREES[name]
        graph = gradient(function, (n,)) if backward else td.trace(function, td.Spec((n,)))
        program = scheduled(graph)
        assert text_lines(program) <= 3 * len(graph.nodes)
        assert code_lines(program) <= 300 * len(graph.nodes)


OPS = {
    "cumsum": lambda x: td.cumsum(x, 0),
    "sort": lambda x: td.sort(x, 0)[0],
    "topk": lambda x: td.topk(x, 5, 0)[0],
    "logsumexp": lambda x: td.logsumexp(x, 0),
    "pad": lambda x: td.pad(td.exp(x), [(1, 2)], interior=[2]),
    "concat": lambda x: td.concat([x, td.exp(x), td.flip(x, (0,))], 0),
    "convolution": lambda x: td.conv(x[None, None], td.ones((2, 1, 3))),
}


@pytest.mark.parametrize("name", OPS)
def test_code_of_ops_does_not_grow_with_their_operands(name: str) -> None:
    small, large = (scheduled(gradient(OPS[name], (n,))) for n in (1000, 10_000))
    assert code_lines(large) <= 2 * code_lines(small)


def guarded_chain(count: int) -> Kernel:
    """As many locals, each behind a guard and made from the one before and from memory."""
    i = Var("i", 256)
    guard = Within(variable(i), 3, 200)
    body: list[Let | Store] = [Let("t0", Load("x", variable(i) * 3, F32))]
    for k in range(count):
        load = Load("x", bounded(variable(i) - 3, 197) * 3 + k, F32)
        value = Apply("mul", (load, Local(f"t{k}", F32)), F32)
        body.append(Let(f"t{k + 1}", Guarded(guard, value, Literal(0, F32), F32)))
    body.append(Store("y", variable(i), Local(f"t{count}", F32), None))
    size = 3 * 256 + count
    return Kernel(
        "chain",
        (Buffer("x", F32, size),),
        (Buffer("y", F32, 256),),
        (For(i, Role.VECTOR, tuple(body)),),
    )


def test_code_of_guarded_lanes_grows_with_the_kernel_alone() -> None:
    """Each lane takes the locals that it uses, not all that there are."""
    few, many = (render_kernel(guarded_chain(n), WIDE).count("\n") for n in (10, 40))
    assert many <= 4.5 * few


def test_guarded_arithmetic_is_done_by_all_lanes_at_once() -> None:
    """Neighbours are read under a mask: no exponential for each lane alone."""
    i = Var("i", 64)
    load = Load("x", bounded(variable(i) - 3, 61), F32)
    inner = Guarded(Within(variable(i), 0, 50), Apply("exp", (load,), F32), Literal(1, F32), F32)
    value = Apply("add", (inner, load), F32)
    held = Guarded(Within(variable(i) - 3, 0, 61), value, Literal(0, F32), F32)
    kernel = Kernel(
        "padded",
        (Buffer("x", F32, 61),),
        (Buffer("y", F32, 64),),
        (For(i, Role.VECTOR, (Store("y", variable(i), held, None),)),),
    )
    text = render_kernel(kernel, WIDE)
    assert "masked.load" in text
    assert "extractelement" not in text


@pytest.mark.parametrize("n", [1, 15, 33, 50])
def test_padded_functions_are_right(n: int) -> None:
    """Lanes outside read nothing, also where their neighbours are infinite."""

    def padded(x: td.Tensor) -> td.Tensor:
        hidden = td.pad(td.exp(x) / (1 + td.log(x)), [(0, 0), (2, 3)], interior=[0, 1])
        return td.pad(td.sqrt(hidden + 1), [(1, 0), (1, 2)])

    x = np.random.default_rng(n).uniform(0.5, 2, (3, n)).astype(np.float32)
    x[1] = 0  # log is −inf
    found, expected = (
        td.compile(padded, td.Spec(x.shape), device=device)(x) for device in ("cpu", "oracle")
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_products_of_many_are_right() -> None:
    """What was cut into kernels still multiplies everything."""
    x = np.exp(np.random.default_rng(0).normal(scale=0.05, size=3072)).astype(np.float32)
    found = td.compile(td.grad(td.prod), td.Spec((3072,)), device="cpu")(x)
    np.testing.assert_allclose(found, np.prod(x.astype(np.float64)) / x, rtol=1e-4)
