"""The loop IR: every op's kernels, interpreted, are what the oracle says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treadle as td
from graphs import random_graph
from treadle.autodiff.backward import differentiate
from treadle.domains.float64 import MEANING, evaluate_float64
from treadle.ir.graph import Graph
from treadle.ir.op import OPS, Op
from treadle.ir.ops.leaves import NAMED_LEAVES
from treadle.kernel.coverage import check_filled
from treadle.kernel.index import (
    Bounded,
    Data,
    Index,
    Quotient,
    Remainder,
    Var,
    constant,
    divide,
    flatten,
    unflatten,
    variable,
)
from treadle.kernel.interpret import interpret
from treadle.kernel.nodes import Buffer, For, Kernel, Let, Literal, Load, Local, Role, Store, Within
from treadle.kernel.program import Phase, Program, Repeat, check_phases
from treadle.kernel.text import to_text
from treadle.kernel.verify import verify
from treadle.schedule import roots as roots
from treadle.schedule.schedule import schedule
from treadle.verify.samples import samples_of
from treadle.verify.sampling import Sample, sample_graph

MEANINGS = {op.name: MEANING[op] for op in OPS.values() if op in MEANING}
MEANINGS["mulhi"] = lambda x, y: (x.astype(np.uint64) * y.astype(np.uint64)) >> np.uint64(32)


def run(program: Program, arrays: dict[str, np.ndarray], width: int = 1) -> list[np.ndarray]:
    """A program through the interpreter, in the dtypes it declares, at a width of vectors."""
    memory = {b.name: np.zeros(b.size, b.dtype.numpy) for b in program.buffers}
    for name, type_ in program.leaves:
        memory[name] = np.asarray(arrays[name]).astype(type_.dtype.numpy).reshape(-1)
    for name, array in program.constants:
        memory[name] = array.reshape(-1)
    run_steps(program.steps, memory, 0, width)
    return [memory[name].reshape(t.shape) for _, name, t in program.outputs]


def run_steps(steps, memory: dict[str, np.ndarray], turn: int, width: int = 1) -> None:
    for step in steps:
        if isinstance(step, Repeat):
            turns = range(step.length)
            for i in reversed(turns) if step.reverse else turns:
                run_steps(step.steps, memory, i, width)
            continue
        for call in step.calls:
            views = {}
            for buffer, argument in zip(call.kernel.buffers, call.arguments, strict=True):
                start = argument.row * turn
                views[buffer.name] = memory[argument.buffer][start : start + buffer.size]
            interpret(call.kernel, views, MEANINGS, width)


def check(
    graph: Graph, arrays: dict[str, np.ndarray], fuse: bool = True, scale: float = 1.0
) -> Program:
    program = schedule(graph, fuse)
    # Inputs are rounded to their dtypes first, so that only the arithmetic differs.
    types = {n: graph.nodes[i].types[0] for n, i in graph.leaves.items()}
    rounded = {n: np.asarray(a).astype(types[n].dtype.numpy) for n, a in arrays.items()}
    expected = evaluate_float64(graph, rounded)
    for ours, theirs, type_ in zip(
        run(program, rounded), expected, graph.output_types, strict=True
    ):
        assert ours.shape == theirs.shape
        if type_.is_float:
            u = type_.dtype.unit_roundoff
            np.testing.assert_allclose(
                ours.astype(np.float64), theirs, rtol=200 * u * scale, atol=200 * u * scale
            )
        else:
            np.testing.assert_array_equal(ours, theirs)
    return program


CASES = [
    pytest.param(op, sample, id=f"{op.name}-{i}")
    for op in OPS.values()
    if op not in NAMED_LEAVES
    for i, sample in enumerate(samples_of(op))
]


@pytest.mark.parametrize(("op", "sample"), CASES)
def test_kernels_of_every_op_equal_the_oracle(op: Op, sample: Sample) -> None:
    check(sample_graph(op, sample), sample.arrays(4))
    check(sample_graph(op, sample), sample.arrays(4), fuse=False)


@given(st.integers(0, 2**32), st.integers(2, 8))
@settings(max_examples=25, deadline=None)
def test_random_programs_with_gradients(seed: int, steps: int) -> None:
    graph = random_graph(seed, steps)
    rng = np.random.default_rng(seed)
    arrays = {n: rng.uniform(-1, 1, graph.nodes[i].types[0].shape) for n, i in graph.leaves.items()}
    loss = td.trace(
        lambda a, b, v: sum((r * 0.1).sum() for r in _emit(graph, a, b, v)), *_types(graph)
    )
    both = differentiate(loss, ["a", "b", "v"]).graph
    if all(np.abs(x).max(initial=0) < 50 for x in evaluate_float64(both, arrays)):
        check(both, arrays, scale=50)


def _types(graph: Graph) -> list[td.Spec]:
    return [graph.nodes[i].types[0] for i in graph.inputs]


def _emit(graph: Graph, *tensors: td.Tensor) -> list[td.Tensor]:
    from treadle.frontend.tracing import emit

    return emit(graph, dict(zip("abv", tensors, strict=True)))


def test_elementwise_chains_are_one_kernel() -> None:
    def function(x, b):
        return td.tanh((x * 2 + b).T).reshape(2, 6) - 1

    program = check(
        td.trace(function, td.Spec((4, 3)), td.Spec((3,))),
        {"x": np.arange(12.0).reshape(4, 3), "b": np.ones(3)},
    )
    assert len(list(program.calls())) == 1


def test_loops_that_walk_memory_in_order_are_one_vector_loop() -> None:
    program = schedule(td.trace(lambda x, y: x * y + 1, td.Spec((4, 3, 5)), td.Spec((4, 3, 5))))
    (call,) = program.calls()
    (loop,) = call.kernel.body
    assert isinstance(loop, For)
    assert loop.role is Role.VECTOR
    assert loop.var.extent == 60


def test_a_bias_keeps_two_loops() -> None:
    program = schedule(td.trace(lambda x, b: x + b, td.Spec((4, 3)), td.Spec((3,))))
    text = to_text(next(program.calls()).kernel)
    assert "for i0 in 4 parallel:" in text
    assert "for i1 in 3 vector:" in text


# Indices


def evaluate(index: Index, values: Mapping[str, int]) -> int:
    """The number an index stands for, variables and locals given by name."""
    total = index.offset
    for atom, factor in index.terms:
        match atom:
            case Var(name, _):
                value = values[name]
            case Data(local, extent):
                value = min(max(values[local], 0), extent - 1)
            case Quotient(inner, divisor):
                value = evaluate(inner, values) // divisor
            case Remainder(inner, divisor):
                value = evaluate(inner, values) % divisor
            case Bounded(inner, _):
                value = evaluate(inner, values)
        total += factor * value
    return total


shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(shapes, st.integers(0, 10**6))
def test_flatten_and_unflatten_are_inverse(shape: list[int], seed: int) -> None:
    variables = [Var(f"v{i}", n) for i, n in enumerate(shape)]
    flat = flatten([variable(v) for v in variables], shape)
    again = unflatten(flat, shape)
    assert again == tuple(variable(v) for v in variables), "nothing is left to divide"
    rng = np.random.default_rng(seed)
    values = {v.name: int(rng.integers(v.extent)) for v in variables}
    assert evaluate(flat, values) == np.ravel_multi_index(
        [values[v.name] for v in variables], shape
    )


@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(0, 5),
    st.integers(1, 6),
    st.integers(0, 10**6),
)
def test_division_is_right_whatever_simplifies(
    m: int, n: int, offset: int, divisor: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    a, b = Var("a", m), Var("b", n)
    index = variable(a) * int(rng.integers(0, 7)) + variable(b) * int(rng.integers(0, 7)) + offset
    quotient, rest = divide(index, divisor)
    for i in range(m):
        for j in range(n):
            values = {"a": i, "b": j}
            expected = divmod(evaluate(index, values), divisor)
            assert (evaluate(quotient, values), evaluate(rest, values)) == expected
    low, high = rest.range
    assert low >= 0
    assert high < divisor or divisor == 1


# The verifier


I4 = Var("i", 4)
X, Y = Buffer("x", td.float32, 4), Buffer("y", td.float32, 4)
AT = variable(I4)


def kernel(*body, inputs=(X,), outputs=(Y,)) -> Kernel:
    return Kernel("k", inputs, outputs, body)


def loop(*body, role: Role = Role.PARALLEL, var: Var = I4) -> For:
    return For(var, role, body)


COPY = Store("y", AT, Load("x", AT, td.float32))

WRONG = {
    "out of bounds": (kernel(loop(Store("y", AT + 1, Load("x", AT, td.float32)))), "may be 1 to 4, outside"),
    "below": (kernel(loop(Store("y", AT, Load("x", AT - 1, td.float32)))), "may be -1 to 2"),
    "race": (kernel(loop(Store("y", constant(0), Load("x", AT, td.float32)))), "iterations of i may meet in y"),
    "overlap": (
        kernel(loop(loop(Store("y", AT + variable(Var("j", 1)) + variable(Var("k", 2)), Literal(0.0, td.float32)),
                         var=Var("k", 2))), outputs=(Buffer("y", td.float32, 9),)),
        "may meet in y",
    ),
    "dtype": (kernel(loop(Store("y", AT, Literal(1, td.int32)))), "a store to y has int32"),
    "load dtype": (kernel(loop(Store("y", AT, Load("x", AT, td.int32)))), "a load of x has int32"),
    "unknown buffer": (kernel(loop(Store("z", AT, Literal(0.0, td.float32)))), "z is not a buffer"),
    "input written": (kernel(loop(Store("x", AT, Literal(0.0, td.float32)))), "x is written but is not an output"),
    "unnamed local": (kernel(loop(Store("y", AT, Local("t", td.float32)))), "t is read before it is named"),
    "outside loop": (kernel(COPY), "used outside its loop"),
    "parallel sum": (
        kernel(Let("acc", Literal(0.0, td.float32)),
               loop(roots.Accumulate("acc", "add", Load("x", AT, td.float32)))),
        "accumulate into acc",
    ),
    "no guard": (
        kernel(loop(Store("y", AT, Load("x", roots.bounded(AT + 1, 4), td.float32)))),
        "no guard holds i \\+ 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_the_verifier_refuses(name: str) -> None:
    wrong, cause = WRONG[name]
    with pytest.raises(td.GraphError, match=cause):
        verify(wrong)


def test_the_verifier_accepts_what_is_right() -> None:
    verify(kernel(loop(COPY)))
    guard = Within(AT + 1, 0, 4)
    held = roots.Guarded(
        guard, Load("x", roots.bounded(AT + 1, 4), td.float32), Literal(0.0, td.float32), td.float32
    )
    verify(kernel(loop(Store("y", AT, held))))
    verify(
        kernel(loop(Store("y", AT * 2, Literal(0.0, td.float32))), outputs=(replace(Y, size=8),))
    )


def test_an_index_out_of_range_never_leaves_the_axis() -> None:
    graph = td.trace(lambda x, i: x[i], td.Spec((3,)), td.Spec((2,), td.int32))
    (found,) = run(schedule(graph), {"x": np.array([1.0, 2.0, 3.0]), "i": np.array([2, 99])})
    assert found[0] == 3.0
    assert found[1] in (1.0, 2.0, 3.0)


def test_text_of_a_kernel() -> None:
    graph = td.trace(lambda x: td.exp(x).sum(1), td.Spec((2, 3)))
    assert to_text(next(schedule(graph).calls()).kernel) == "\n".join(
        [
            "kernel reduce_sum_2(p0: float32[6]) -> p1: float32[2] {",
            "  for i0 in 2 vector:",
            "    acc = 0:float32",
            "    for i1 in 3 sequential:",
            "      acc = add(acc, exp(p0[3*i0 + i1]))",
            "    p1[i0] = acc",
            "}",
        ]
    )


def test_index_text() -> None:
    assert str(Index()) == "0"
    assert str(variable(I4) * 3 - 2) == "3*i - 2"


def test_phases_are_checked() -> None:
    """Calls of one phase may come in any order: none reads or writes what another writes."""
    graph = td.trace(lambda x: td.sum(x * x) * x, td.Spec((300, 300)))
    program = schedule(graph, fuse=False)
    phases = [s for s in program.steps if isinstance(s, Phase)]
    assert len(phases) > 1
    together = Phase(tuple(c for p in phases for c in p.calls))
    for wrong in ((together,), tuple(reversed(phases)), (phases[0], Phase(phases[1].calls * 2))):
        with pytest.raises(AssertionError, match=r"phase|before"):
            check_phases(replace(program, steps=wrong))


UNFILLED = {
    "elements": (lambda x, y: td.exp(x) + y, 1),
    "a matmul": (lambda x, y: x @ y, 1),
    "sums": (lambda x, y: td.sum(x * y, 1), 1),
    "windows": (lambda x, y: td.conv(x.reshape(2, 1, 8, 200), y[:24, :9].reshape(24, 1, 3, 3)), 1),
}


@pytest.mark.parametrize("name", UNFILLED)
def test_a_missing_loop_is_found(name: str) -> None:
    """What stores reach is counted: a kernel without one of its outer loops fills too little."""
    function, least = UNFILLED[name]
    program = schedule(
        td.trace(function, td.Spec((40, 80)), td.Spec((80, 80) if "matmul" in name else (40, 80)))
    )
    found = 0
    for i, step in enumerate(program.steps):
        assert isinstance(step, Phase)
        for j, call in enumerate(step.calls):
            loop = call.kernel.body[0]
            if not isinstance(loop, For) or loop.var.extent == 1:
                continue
            kernel = replace(call.kernel, body=(*loop.body, *call.kernel.body[1:]))
            calls = (*step.calls[:j], replace(call, kernel=kernel), *step.calls[j + 1 :])
            steps = (*program.steps[:i], Phase(calls), *program.steps[i + 1 :])
            with pytest.raises(td.GraphError, match=r"elements of \S+ are stored"):
                check_filled(replace(program, steps=steps))
            found += 1
    assert found >= least
