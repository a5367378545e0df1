"""What is compared for equality is one value on every device, and casts round before arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

import treadle as td
from cuda_on_host import no_host_compiler, run_on_host
from treadle.base import dtypes
from treadle.domains.float64 import evaluate_float64
from treadle.ir.graph import Graph
from treadle.kernel.nodes import Apply, Kernel, Let, Literal, Local, Value
from treadle.kernel.target import CPU, GPU, Target
from treadle.kernel.target_webgpu import FULL, target_of
from treadle.kernel.traverse import subvalues, values_of, walk
from treadle.schedule.compared import compared_values
from treadle.schedule.schedule import schedule

needs_host = pytest.mark.skipif(no_host_compiler() is not None, reason=f"{no_host_compiler()}")
TARGETS = {
    "small": GPU,
    "launches": replace(GPU, mapping=replace(GPU.mapping, is_cooperative=False)),
    "webgpu": target_of(FULL),
}


def bell(x: td.Tensor) -> td.Tensor:
    centred = x - x.min(1, keepdims=True)
    return td.exp(-centred * centred)


def spread(x: td.Tensor) -> td.Tensor:
    return x * x.flip(1) - x * 0.3


def greatest(f: Callable[[td.Tensor], td.Tensor]) -> Graph:
    return td.trace(td.grad(lambda x: (f(x).max(1) * f(x).min(1)).sum()), td.Spec((37, 9)))


def sorted_hits(f: Callable[[td.Tensor], td.Tensor]) -> Graph:
    def hits(x: td.Tensor) -> td.Tensor:
        y = f(x)
        return td.cast(td.eq(y, td.sort(y, 1)[0][:, 4:5]), td.float32).sum(1)

    return td.trace(hits, td.Spec((37, 9)))


GRAPHS = [greatest(bell), greatest(spread), sorted_hits(bell), sorted_hits(spread)]


def computed(kernel: Kernel) -> Iterator[Value]:
    """What comparisons of a kernel compute themselves rather than read or select."""
    named = {s.local: s.value for s in walk(kernel.body) if isinstance(s, Let)}
    values = (v for s in walk(kernel.body) for value in values_of(s) for v in subvalues(value))
    for compared in values:
        if not isinstance(compared, Apply) or compared.op not in ("eq", "lt", "le"):
            continue
        if any(isinstance(o, Literal) or not o.dtype.is_float for o in compared.operands):
            continue
        for operand in compared.operands:
            value = operand
            while isinstance(value, Local) and value.name in named:
                value = named[value.name]
            if isinstance(value, Apply) and value.op not in ("max", "min", "where"):
                yield value


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_comparisons_read_one_value(graph: Graph, target: Target) -> None:
    program = schedule(graph, target=target)
    assert not [v for c in program.calls() for v in computed(c.kernel)]


def test_a_target_that_rounds_every_op_recomputes() -> None:
    """The check finds what is computed twice: processors and GPUs differ by one fact."""
    rounding = replace(GPU, contracts=False)
    program = schedule(greatest(bell), target=rounding)
    assert [v for c in program.calls() for v in computed(c.kernel)]
    assert GPU.contracts
    assert not CPU.contracts


def test_what_is_compared_with_itself() -> None:
    def f(x: td.Tensor, y: td.Tensor) -> td.Tensor:
        doubled, other = x * 2, y + 1
        far = td.eq(doubled, td.maximum(doubled.max(0), 1.0))
        return td.where(far, other, td.where(other > doubled, x, y))

    graph = td.trace(f, td.Spec((5, 3)), td.Spec((5, 3)))
    (found,) = compared_values(graph)
    assert graph.nodes[found.node].op.name == "mul", "others are compared with other values"


@needs_host
@pytest.mark.parametrize("graph", GRAPHS)
def test_compared_values_on_the_host(graph: Graph) -> None:
    x = np.random.default_rng(0).normal(size=(37, 9)).astype(np.float32)
    (name,) = graph.leaves
    (expected,) = evaluate_float64(graph, {name: x})
    for target in (TARGETS["launches"], GPU):
        (found,) = run_on_host(schedule(graph, target=target), {name: x})
        assert np.allclose(found, expected, atol=1e-4 * np.abs(expected).max())


@needs_host
def test_casts_round_before_arithmetic() -> None:
    """The greatest of a row minus the row's maximum is 0, whoever rounds which of them."""

    def f(x: td.Tensor) -> td.Tensor:
        narrow = td.cast(x, dtypes.bfloat16)
        return (narrow - narrow.max(1, keepdims=True)) * 1000

    x = np.random.default_rng(0).normal(size=(8, 40)).astype(np.float32)
    graph = td.trace(f, td.Spec((8, 40)))
    (found,) = run_on_host(schedule(graph, target=TARGETS["launches"]), {"x": x})
    assert (np.asarray(found, np.float32).max(1) == 0).all()


@needs_host
@pytest.mark.parametrize("width", [1, 2])
def test_a_norm_over_one_element_has_no_gradient(width: int) -> None:
    def f(x: td.Tensor, g: td.Tensor) -> td.Tensor:
        c = x - x.mean(1, keepdims=True)
        y = c * td.rsqrt((c * c).mean(1, keepdims=True) + 0.001)
        return (td.cast(y, td.float32) * g).sum()

    rng = np.random.default_rng(0)
    x, g = rng.normal(size=(6, width)), rng.normal(size=(6, width))
    graph = td.trace(td.grad(f), td.Spec((6, width), td.bfloat16), td.Spec((6, width)))
    arrays = dict(zip(graph.leaves, (x.astype(dtypes.bfloat16.numpy), g.astype(np.float32))))
    (found,) = run_on_host(schedule(graph, target=TARGETS["launches"]), arrays)
    (expected,) = evaluate_float64(graph, arrays)
    assert np.allclose(np.asarray(found, np.float64), expected, atol=0.0 if width == 1 else 0.5)
