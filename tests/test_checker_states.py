"""What buffers hold, call by call: the checker follows it, and refuses what does not hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

import nested_scans
import treadle as td
from checked_programs import graphs_of, record_of, survivors
from test_cuda_text import chunks_of, head_gradients, head_types
from treadle.base.dtypes import bfloat16, float32
from treadle.kernel.program import Program, Repeat
from treadle.kernel.states import stated
from treadle.kernel.verify import verify
from treadle.schedule.schedule import CPU, GPU, schedule
from treadle.verify.certificate.left import judged
from treadle.verify.kernels import check_kernels
from treadle_checker.kernel_checks import check_program
from treadle_checker.program import read_program
from treadle_checker.reading import Rejected

# Rows, and how many a chunk has: two chunks, a repeat, a repeat with rows left over, one chunk.
CHUNKS = [(8, 4, 4), (12, 4, 2), (11, 4, 2), (8, 8, 8)]


def head(n: int, most: int, least: int, **kinds: Any) -> tuple[Program, Any]:
    dtype, has_bias = kinds.pop("dtype", float32), kinds.pop("has_bias", False)
    function = head_gradients(kinds.pop("rounded", True), **kinds)
    graph = td.trace(function, *head_types(n, 42, dtype, has_bias))
    target = chunks_of(most, least)
    return schedule(graph, target=target), target


def reasons(program: Program, target: Any, change: Callable[[Any], None] = lambda r: None) -> set:
    record = record_of(program, target)
    change(record)
    claims = check_program(read_program(json.loads(json.dumps(record))), graphs_of(program))
    return {c.reason for c in claims if not c.is_established}


@pytest.mark.parametrize("sizes", CHUNKS)
@pytest.mark.parametrize(
    "kinds",
    [
        {},
        {"dtype": bfloat16, "rounded": False, "has_bias": True},
        {"dtype": bfloat16, "smoothing": 0.1, "has_bias": True},
    ],
)
def test_heads_by_chunks_are_established(sizes: tuple[int, int, int], kinds: Any) -> None:
    """All but products that a library makes."""
    program, target = head(*sizes, **kinds)
    assert any("linear_cross_entropy" in k.name for k in program.distinct())
    assert all("is a library's" in reason for reason in reasons(program, target))


def test_full_verification_leaves_nothing_of_a_head() -> None:
    program, _ = head(8, 4, 4)
    claims = judged(program, check_kernels(program))
    assert claims
    assert all(c.is_established or "is a library's" in c.reason for c in claims)


def test_defects_in_heads_by_chunks_are_rejected() -> None:
    """All but those of the maximum that exponentials are shifted by: any shift gives the same."""
    found = survivors([head(12, 4, 2, has_bias=True)], 60)
    assert len(found) <= 5, "\n".join(found)


def chunk_bindings(record: Any, kind: str) -> list[Any]:
    found = [b for b in record["bindings"] if b[0].endswith(kind) and b[4][0] == "layout"]
    assert found
    return found


def other_rows(record: Any) -> None:
    """The logits of a chunk are said to be those of other rows."""
    chunk_bindings(record, ".logits")[0][4][3][0][0] += 1


def longer_sum(record: Any) -> None:
    """A gradient is said to be summed over a row more."""
    chunk_bindings(record, ".2")[0][4][4][0][2] += 1


def held_later(record: Any) -> None:
    """What the rows leave is said to be left by the next call."""
    last = max(chunk_bindings(record, ".logits"), key=lambda b: b[5])
    last[5] += 1


def another_leaf(record: Any) -> None:
    """A leaf is said to hold another one."""
    first, second = [b for b in record["bindings"] if b[5] == -1][:2]
    first[2], second[2] = second[2], first[2]


def no_scope(record: Any) -> None:
    for b in record["bindings"]:
        b[1] = b[1].replace("call", "scan")


def standing_rows(record: Any) -> None:
    """Iterations of a repeat all take the first rows."""
    for step in record["steps"]:
        for phase in step[4] if step[0] == "repeat" else ():
            for call in phase[1]:
                call[1] = [[name, 0] for name, _ in call[1]]


@pytest.mark.parametrize(
    "change", [other_rows, longer_sum, held_later, another_leaf, no_scope, standing_rows]
)
def test_wrong_statements_are_refused(change: Callable[[Any], None]) -> None:
    program, target = head(12, 4, 2)
    assert any(isinstance(step, Repeat) for step in program.steps)
    with pytest.raises(Rejected):
        reasons(program, target, change)


def test_the_rows_of_one_chunk_twice_are_refused() -> None:
    program, target = head(8, 4, 4)
    record = record_of(program, target)
    rows = [k for k in record["kernels"] if k["name"].endswith("_rows")]
    assert len(rows) == 2
    numbers = [record["kernels"].index(k) for k in rows]

    def change(record: Any) -> None:
        calls = [c for step in record["steps"] for c in step[1] if c[0] in numbers]
        calls[1][0] = calls[0][0]

    with pytest.raises(Rejected):
        reasons(program, target, change)


# Scans in scans

TARGETS = {"cpu": CPU, "gpu": GPU}


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("seed", [*range(8), 89])  # 89: a step adds a product without cotangent
def test_random_scans_in_scans_are_established(seed: int, kind: str) -> None:
    """The compiler refuses none; threads share no memory that has a carry of each."""
    program = schedule(nested_scans.graph_of(seed), target=TARGETS[kind])
    for kernel in program.distinct():
        verify(kernel)
    check_kernels(program)
    assert reasons(program, TARGETS[kind]) == set()


@pytest.mark.slow
@pytest.mark.parametrize("kind", TARGETS)
def test_many_random_scans_in_scans_are_established(kind: str) -> None:
    for seed in range(8, 150):
        test_random_scans_in_scans_are_established(seed, kind)


def swapped(h, x):
    """Carries that start alike and change places."""

    def body(carried, row):
        a, b = carried
        return (b, a + row), a

    (a, b), rows = td.scan(body, (h, h), x)
    return a.sum() + (b * b).sum() + rows.sum()


def scans_of(record: Any) -> list[Any]:
    found = [step for step in record["steps"] if step[0] == "repeat"]
    assert found
    return found


def stale_carry(record: Any) -> None:
    """The last call of an iteration, which makes the next carry, is not made."""
    (repeat,) = scans_of(record)
    repeat[4] = repeat[4][:-1]


def longer(record: Any) -> None:
    for repeat in scans_of(record):
        repeat[1] -= 1


def exchanged(record: Any) -> None:
    """Each carry begins with the other's value in the body."""
    carried = [b for b in record["bindings"] if b[1] and b[5] == -1 and "carry" in b[0]]
    carried[0][2], carried[1][2] = carried[1][2], carried[0][2]


@pytest.mark.parametrize("change", [stale_carry, longer, exchanged])
def test_wrong_scans_are_refused(change: Callable[[Any], None]) -> None:
    program = schedule(td.trace(swapped, td.Spec((4,)), td.Spec((5, 4))), target=CPU)
    assert reasons(program, CPU) == set()
    with pytest.raises(Rejected):
        reasons(program, CPU, change)


def test_every_call_says_what_it_leaves() -> None:
    """Of each call and buffer at most one thing; all numbers are those of calls."""
    program, _ = head(12, 4, 2, has_bias=True)
    count = len(list(program.calls()))
    made = [(since, b.buffer) for b, since in stated(program) if since >= 0]
    assert len(made) == len(set(made))
    assert all(since < count for since, _ in made)
