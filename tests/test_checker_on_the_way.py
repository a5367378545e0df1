"""Numbers that kernels have on the way: what a certificate states of them, and defects of that."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import treadle as td
from checked_programs import graphs_of, record_of, survivors
from treadle.kernel.program import Program
from treadle.schedule.schedule import CPU, GPU, schedule
from treadle.verify.certificate.left import judged
from treadle.verify.kernels import check_kernels
from treadle_checker import scans
from treadle_checker.kernel_checks import check_program
from treadle_checker.program import read_program
from treadle_checker.reading import Rejected

F = td.Spec((5, 700, 3))
INTEGERS = td.Spec((3, 777), td.int32)


ORDERED = GPU.in_order()
assert ORDERED.mapping is not None
# Sums of sorted runs, and merges from memory to memory.
SORTING = replace(
    ORDERED,
    rewriting=replace(GPU.rewriting, least_sorted=1),
    mapping=replace(ORDERED.mapping, sorted_row=0),
)


def scattered(x, index):
    """A sum over equal indices, which are sorted and whose runs begin where a search says."""
    return td.segment_sum(td.tanh(x), index, 40)


def variance(x):
    return td.var(x, (0,))


GRAPHS: dict[str, Callable[[], Any]] = {
    "floats, a middle axis": lambda: td.trace(lambda x: td.sort(x, 1), F),
    "from the greatest on": lambda: td.trace(lambda x: td.sort(x, 1, descending=True), F),
    "integers": lambda: td.trace(lambda x: td.sort(x, 1), INTEGERS),
    "the greatest": lambda: td.trace(lambda x: td.topk(x, 9, 1), INTEGERS),
    "variance": lambda: td.trace(variance, td.Spec((16384, 8))),
    "scattered": lambda: td.trace(scattered, td.Spec((900, 6)), td.Spec((900,), td.int32)),
}


@cache
def program_of(name: str) -> Program:
    return schedule(GRAPHS[name](), target=SORTING)


def left(program: Program, record: Any = None) -> set[str]:
    """Why something is not established; Rejected where it is wrong."""
    record = record_of(program, GPU) if record is None else record
    claims = check_program(read_program(record), graphs_of(program))
    return {c.reason for c in claims if c.reason}


@pytest.mark.parametrize("name", GRAPHS)
def test_all_of_it_is_established(name: str) -> None:
    """By the checker, for every kernel, and by full verification with its help."""
    assert left(program_of(name)) == set()
    claims = judged(program_of(name), check_kernels(program_of(name)))
    assert all(c.is_established for c in claims)


@pytest.mark.parametrize(("name", "most"), [("integers", 6), ("variance", 2), ("scattered", 6)])
def test_defects_of_kernels_are_rejected(name: str, most: int) -> None:
    """All but those of a search that show at few places: its highest bit is set where a whole run
    comes first, and neighbours seldom are alike just where a bit is decided."""
    found = survivors([(program_of(name), GPU)], 60)
    assert len(found) <= most, "\n".join(found)


def bindings(record: Any, part: str) -> list[Any]:
    found = [b for b in record["bindings"] if part in b[0]]
    assert found
    return found


def longer_runs(record: Any) -> None:
    """What holds runs of some length is said to hold those that are made of them."""
    first, second = bindings(record, "runs_a")[:2]
    first[3] = second[3]
    first[2] = second[2]


def other_places(record: Any) -> None:
    """Values are said to be where they came from."""
    one, other = bindings(record, "from_b")[0], bindings(record, "from_a")[1]
    one[2:4] = other[2:4]


def any_runs(record: Any) -> None:
    """Runs are said to be any numbers: no merge is right for those."""
    for b in bindings(record, "runs_") + bindings(record, "from_"):
        b[6] = []


def of_themselves(record: Any) -> None:
    """The same, by what they are said to be made of."""
    for b in bindings(record, "runs_") + bindings(record, "from_"):
        b[6] = [b[2:4]]


def any_starts(record: Any) -> None:
    for b in bindings(record, "starts"):
        b[6] = []


def starts_of_another(record: Any) -> None:
    """Where runs start is said to be where they came from."""
    bindings(record, "starts")[0][2:4] = bindings(record, "b")[0][2:4]


def sums_for_spreads(record: Any) -> None:
    bindings(record, "spreads")[0][2:4] = bindings(record, "parts")[0][2:4]


def any_spreads(record: Any) -> None:
    for b in bindings(record, "spreads"):
        b[6] = []


def in_another_order(record: Any) -> None:
    """Parts along one axis are said to lie along another."""
    layout = bindings(record, "parts")[0][4]
    layout[3][0], layout[3][1] = layout[3][1], layout[3][0]


def of_nothing(record: Any) -> None:
    """Made of a value that there is not."""
    bindings(record, "")[-1][6] = [[10_000, 0]]


WRONG = [
    ("integers", longer_runs), ("integers", other_places), ("integers", any_runs),
    ("integers", of_themselves), ("scattered", starts_of_another), ("variance", sums_for_spreads),
    ("variance", in_another_order), ("variance", of_nothing),
]  # fmt: skip
LESS = [("scattered", any_starts), ("variance", any_spreads)]


@pytest.mark.parametrize(("name", "change"), WRONG, ids=lambda x: getattr(x, "__name__", x))
def test_wrong_statements_are_rejected(name: str, change: Callable[[Any], None]) -> None:
    program = program_of(name)
    record = copy.deepcopy(record_of(program, GPU))
    change(record)
    with pytest.raises(Rejected):
        left(program, record)


@pytest.mark.parametrize(("name", "change"), LESS, ids=lambda x: getattr(x, "__name__", x))
def test_what_the_graph_makes_of_what_is_given_need_not_be_said(
    name: str, change: Callable[[Any], None]
) -> None:
    """A kernel that is given indices and where their runs start is given starts of these."""
    record = copy.deepcopy(record_of(program_of(name), GPU))
    change(record)
    assert left(program_of(name), record) == set()


def test_spreads_of_many_terms_are_left() -> None:
    """They are held at 0 against rounding, which numbers of a field know nothing of."""
    program = schedule(td.trace(variance, td.Spec((2**22, 3))), target=GPU)
    assert all("held at 0" in reason for reason in left(program))
    assert left(program)


def test_zeros_that_a_sum_begins_with_are_stated() -> None:
    """A kernel that leaves ones is refused, as is one that leaves some of what was there."""

    def added(x, at):
        return td.scatter_add(td.zeros((50, 6)), at, td.exp(x), 0)

    program = schedule(td.trace(added, td.Spec((9, 6)), td.Spec((9,), td.int32)), target=CPU)
    record, changed = record_of(program, CPU), 0
    assert left(program, copy.deepcopy(record)) == set()
    text = repr(record["kernels"])
    assert "zero" in text
    for kernel in record["kernels"]:
        if kernel["name"].endswith("_zero"):
            changed += replaced(
                kernel["body"], ["literal", "float32", 0], ["literal", "float32", 1]
            )
    assert changed
    with pytest.raises(Rejected, match="_zero"):
        left(program, record)


def replaced(part: Any, old: Any, new: Any) -> int:
    """How often something stood in a record, in whose place is something else."""
    count = 0
    for i, inner in enumerate(part):
        if inner == old:
            part[i], count = new, count + 1
        elif isinstance(inner, list):
            count += replaced(inner, old, new)
    return count


# Long scans


def neighbours(h, x):
    """Each element goes on with its own and the one beside it, and with data."""

    def step(h, row):
        beside = td.pad(h[:, :-1], ((0, 0), (1, 0)))
        h = td.tanh(h * row[:, None]) + beside * row[:, None]
        return h, h.sum(1) * row

    return td.scan(step, h, x)


def long(batch: int) -> Program:
    specs = td.Spec((batch, 5)), td.Spec((40, batch))
    return schedule(td.trace(neighbours, *specs), target=GPU)


def test_a_scan_is_compared_at_some_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all of them were too many: the same is found, and defects are still seen."""
    monkeypatch.setattr(scans, "MOST", 0)
    program = long(24)
    assert left(program) == set()
    found = survivors([(program, GPU)], 40)
    assert len(found) <= 2, "\n".join(found)


def test_a_scan_that_reads_where_its_numbers_say_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scans, "MOST", 0)

    def step(h, row):
        h = td.take_along_axis(h, (h * row).astype(td.int32) % 5, 0) + row
        return h, h

    graph = td.trace(lambda h, x: td.scan(step, h, x), td.Spec((5,)), td.Spec((6, 5)))
    program = schedule(graph, target=GPU)
    assert left(program) <= {"an iteration of a long scan reads where its numbers say"}
