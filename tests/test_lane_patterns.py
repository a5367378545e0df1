"""Where lanes lie: what is said of their patterns holds, and code reads them as they lie."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

import treadle as td
from test_kernels import evaluate
from treadle import nn
from treadle.codegen.llvm.addresses import fits, reciprocal
from treadle.codegen.llvm.driver import render_program
from treadle.codegen.llvm.emitter import Function, Reg
from treadle.codegen.llvm.patterns import ANYWHERE, Start, neighbours, pattern, step_of
from treadle.domains.float64 import evaluate_float64
from treadle.kernel.index import Bounded, Index, Quotient, Remainder, Var, variable
from treadle.kernel.machine import Machine
from treadle.schedule.schedule import schedule

AXIS, J = Var("i", 96), Var("j", 5)
AT, OTHER = variable(AXIS), variable(J)


def quotient(index: Index, divisor: int) -> Index:
    return Index(((Quotient(index, divisor), 1),))


def remainder(index: Index, divisor: int) -> Index:
    return Index(((Remainder(index, divisor), 1),))


INDICES = {
    "linear": AT * 3 + OTHER * 7 + 2,
    "runs of eight": quotient(AT, 8) * 50 + remainder(AT, 8),
    "runs as long as a vector": quotient(AT, 16) * 50 + remainder(AT, 16),
    "longer runs": quotient(AT, 48) * 100 + remainder(AT, 48),
    "runs that begin inside": quotient(AT + 4, 8) * 50 + remainder(AT + 4, 8),
    "repeated": quotient(AT, 4),
    "turned": remainder(AT, 4) * 8 + remainder(quotient(AT, 4), 2),
    "runs of seven": quotient(AT, 7) * 50 + remainder(AT, 7),
    "moved by another": quotient(AT + OTHER * 8, 8) + remainder(AT + OTHER * 8, 8) * 9,
    "moved by less": quotient(AT + OTHER * 4, 8),
    "bounded": Index(((Bounded(AT - 3, 90), -2),), 7),
    "grid to blocks": quotient(quotient(AT, 7) * 4 + OTHER, 7) * 9
    + remainder(quotient(AT, 7) * 4 + OTHER, 7),
}


@pytest.mark.parametrize("name", INDICES)
@pytest.mark.parametrize("width", [4, 8, 16, 32])
def test_patterns_are_those_of_every_vector(name: str, width: int) -> None:
    """By counting, for all first lanes that are as they are said to be."""
    index = INDICES[name]
    for start in (ANYWHERE, Start(width), *(Start(0, at) for at in range(0, 40, 3))):
        said = pattern(index, AXIS, width, start)
        if said is None:
            continue
        step = start.multiple
        firsts = range(0, AXIS.extent - width + 1, step) if step else [start.offset]
        for first, j in itertools.product(firsts, range(J.extent)):
            found = [evaluate(index, {"i": first + k, "j": j}) for k in range(width)]
            assert tuple(f - found[0] for f in found) == said


def test_what_is_known_of_a_first_lane_is_used() -> None:
    runs = INDICES["runs of eight"]
    assert pattern(runs, AXIS, 16, ANYWHERE) is None
    found = pattern(runs, AXIS, 16, Start(16))
    assert found is not None
    assert neighbours(found) == 8
    assert step_of(pattern(INDICES["longer runs"], AXIS, 16, Start(16)) or ()) == 1
    assert pattern(INDICES["runs of seven"], AXIS, 16, Start(16)) is None
    assert pattern(INDICES["runs of seven"], AXIS, 16, Start(0, 16)) is not None
    assert step_of(pattern(quotient(AT, 32), AXIS, 16, Start(16)) or ()) == 0


def test_quotients_by_a_product_are_exact() -> None:
    for divisor in (*range(1, 70), 97, 128, 1000, 4095):
        for most in (1, 15, 63, 1000, 5000, 65_535):
            found = reciprocal(divisor, most)
            if found is None:
                assert most > 1000  # small numbers always have one
                continue
            factor, shift = found
            x = np.arange(most + 1, dtype=np.uint64)
            products = x * np.uint64(factor)
            assert products.max() < 1 << 32
            np.testing.assert_array_equal(products >> np.uint64(shift), x // np.uint64(divisor))


def test_an_index_that_32_bits_do_not_hold_is_said_to_be_one() -> None:
    wide = variable(Var("i", 1 << 33))
    assert fits(AT * (1 << 24))
    assert not fits(AT * (1 << 26))
    assert not fits(quotient(wide, 1 << 20))


def blocks(x: td.Tensor) -> td.Tensor:
    """From windows of 7 × 7 to a grid of as many."""
    n, c = x.shape[0], x.shape[-1]
    whole = x.reshape(n, 4, 4, 7, 7, c).permute(0, 1, 3, 2, 4, 5).reshape(n, 28, 28, c)
    grid = whole.reshape(n, 7, 4, 7, 4, c).permute(0, 2, 4, 1, 3, 5)
    return (grid.reshape(n * 16, 49, c) ** 2).sum(-1)


def shuffled(x: td.Tensor) -> td.Tensor:
    n, c = x.shape[:2]
    parts = x.reshape(n, 2, c // 2, *x.shape[2:]).transpose(1, 2).reshape(x.shape)
    return parts * td.sigmoid(parts.mean((2, 3), keepdims=True))


def upsampled(x: td.Tensor) -> td.Tensor:
    return td.tanh(td.interpolate(x, scale_factor=2, mode="nearest")) * td.flip(
        td.interpolate(x, scale_factor=2, mode="nearest"), (3,)
    )


FUNCTIONS: dict[str, tuple[Callable[[td.Tensor], td.Tensor], tuple[int, ...]]] = {
    "blocks": (blocks, (2, 16, 49, 3)),
    "shuffled": (shuffled, (2, 6, 5, 7)),
    "upsampled": (upsampled, (1, 3, 6, 11)),
    "reflected": (lambda x: td.exp(nn.ReflectionPad2d((2, 3, 3, 2))(x)), (2, 3, 9, 10)),
    "pooled": (lambda x: td.max_pool(x, 3, 2, 1), (2, 3, 13, 11)),
    "looked up": (lambda x: td.take_along_axis(x, (x * 3).astype(td.int32) % 5, -1), (6, 37)),
}


@pytest.mark.parametrize("target", ["native", "v2", "v3"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_lanes_anywhere_have_the_oracle_s_values_and_gradients(name: str, target: str) -> None:
    function, shape = FUNCTIONS[name]
    x = np.random.default_rng(3).uniform(0.1, 2, shape).astype(np.float32)

    def both(x: td.Tensor) -> tuple[td.Tensor, td.Tensor]:
        return function(x), td.grad(lambda v: (function(v) * function(v)).sum())(x)

    options = td.CompileOptions(target=target)
    program = td.compile(both, td.Spec(shape), device="cpu", options=options)
    graph = td.trace(both, td.Spec(shape))
    expected = evaluate_float64(graph, {"x": x})
    for found, wanted in zip(program(x), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-5)


def test_lanes_that_lie_apart_are_one_instruction() -> None:
    """A kernel of windows and grids had 16 lanes of divisions for every load."""
    graph = td.trace(blocks, td.Spec((2, 16, 49, 24)))
    text = render_program(schedule(graph, True, 32), Machine(16, permutes=16, registers=32))
    assert "llvm.masked.gather" in text
    assert text.count("\n") < 400


def test_what_a_branch_computed_is_not_known_after_it() -> None:
    f = Function("f", [Reg("i64", "%n"), Reg("i1", "%c")])
    n = Reg("i64", "%n")
    before = f.binary("mul", n, 3)
    with f.when(Reg("i1", "%c")):
        assert f.binary("mul", n, 3) == before
        inside = f.binary("add", n, 5)
    assert f.binary("mul", n, 3) == before
    assert f.binary("add", n, 5) != inside
    with f.loop(0, n, 1):
        later = f.binary("sub", n, 1)
    assert f.binary("sub", n, 1) != later
    f.label("anywhere")
    assert f.binary("mul", n, 3) != before
