"""Linear recurrences in blocks of iterations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

import treadle as td
from backend import assert_within, draw
from test_kernels import run as interpreted
from test_scans import scans, specs
from treadle.domains.field import equal_graphs
from treadle.ir.verify import verify as verify_graph
from treadle.kernel.target import CPU, GPU
from treadle.rules.expansion import expand
from treadle.rules.recurrences import scans_in_blocks
from treadle.rules.scans import split_scans
from treadle.schedule.schedule import schedule

BLOCKED = replace(GPU, rewriting=replace(GPU.rewriting, least_blocked_scan=8))
Function = Callable[..., object]


def decayed(h, a, b, reverse=False):
    rates = td.sigmoid(a)
    return list(td.scan(lambda c, x: (c * x[0] + x[1], c), h, (rates, b), reverse=reverse))


def both(h, a, b):
    """The carry before and after, and a sum beside it."""

    def step(carry, x):
        h, total = carry
        new = x[1] - (h * 0.5) * td.exp(-td.abs(x[0]))
        return (new, total + x[0]), (h, new, total)

    (h, total), stacks = td.scan(step, (h, h), (a, b))
    return [h, total, *stacks]


def selective(h, a, b):
    """Rates as a selective scan has them, computed inside."""

    def step(h, x):
        h = td.exp(td.abs(x[0]) * -td.exp(x[1])) * h + x[1]
        return h, h

    return list(td.scan(step, h, (a, b)))


def gradients(h, a, b):
    def loss(h, a, b):
        last, stack = td.scan(lambda c, x: (c * x[0] + x[1], c), h, (td.tanh(a), b))
        return (last * last).sum() + (stack * stack * stack).sum()

    return list(td.grad(loss, (0, 1, 2))(h, a, b))


FUNCTIONS: dict[str, Function] = {
    "decayed": decayed,
    "reversed": lambda h, a, b: decayed(h, a, b, True),
    "both": both,
    "selective": selective,
    "gradients": gradients,
    "last": lambda h, a, b: decayed(h, a, b)[0],
}


@pytest.mark.parametrize("length", [8, 9, 37])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_blocks_of_iterations(name: str, length: int) -> None:
    """Equal over the field, with no long scan left, and right as a program."""
    shape = (3, 5)
    graph = td.trace(FUNCTIONS[name], *specs(shape, *((length, *shape),) * 2))
    split = split_scans(expand(graph, BLOCKED), BLOCKED)
    found = verify_graph(scans_in_blocks(split, BLOCKED))
    assert len(scans(found)) >= 2 * len(scans(split)) > 0
    assert max(s.length for s in scans(found)) < length
    assert equal_graphs(graph, found)
    arrays = draw(graph, 7, 0.5)
    assert_within(graph, arrays, interpreted(schedule(graph, target=BLOCKED), arrays), 16.0)


def squared(h, a, b):
    return td.scan(lambda c, x: (c * c * x[0] + x[1], c), h, (a, b))[1]


def crossed(h, a, b):
    return td.scan(lambda c, x: ((c[1] * x[0], c[0] + x[1]), c[0]), (h, h), (a, b))[1]


def turned(h, a, b):
    return td.scan(lambda c, x: (td.flip(c, -1) * x[0] + x[1], c), h, (a, b))[1]


def chosen(h, a, b):
    return td.scan(lambda c, x: (td.where(c > 0, x[0], c) + x[1], c), h, (a, b))[1]


def divided(h, a, b):
    return td.scan(lambda c, x: (x[0] / c + x[1], c), h, (a, b))[1]


def grown(h, a, b):
    """Rates that may be above 1: products of them would overflow where the loop does not."""
    return td.scan(lambda c, x: (c * x[0] + x[1], c), h, (a, b))[1]


def doubled(h, a, b):
    return td.scan(lambda c, x: (c + c * td.tanh(x[0]) + x[1], c), h, (a, b))[1]


def reset(h, a, b):
    """Where a row begins anew, what was before counts for nothing, were it NaN."""
    return td.scan(lambda c, x: (td.where(x[0] > 0, 0.5 * c, 0.0) + x[1], c), h, (a, b))[1]


@pytest.mark.parametrize(
    "function", [squared, crossed, turned, chosen, divided, grown, doubled, reset]
)
def test_what_is_no_decay_of_its_own_carry_stays(function: Function) -> None:
    graph = td.trace(function, *specs((3, 5), *((9, 3, 5),) * 2))
    split = split_scans(expand(graph, BLOCKED), BLOCKED)
    assert scans_in_blocks(split, BLOCKED) is split or scans(scans_in_blocks(split, BLOCKED)) == (
        scans(split)
    )


def test_only_few_elements_on_a_device_that_would_idle() -> None:
    graph = td.trace(decayed, *specs((3, 5), *((9, 3, 5),) * 2))
    for target in (
        CPU,
        GPU,
        replace(BLOCKED, rewriting=replace(GPU.rewriting, most_blocked_scan=14)),
    ):
        split = split_scans(expand(graph, target), target)
        assert scans(scans_in_blocks(split, target)) == scans(split)
