"""Equal products of one phase as batches: where they lie, what a batch is, what is left alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from treadle.base.errors import DeviceError
from treadle.kernel.launch import Launch, MatmulCall, MatrixFacts
from treadle.kernel.plan import Entry, Plan, PlannedCall, PlannedPhase, Slot
from treadle.runtime.cuda import batches, blas
from treadle.runtime.cuda.batches import batch_of, batches_in, chosen_batches, runs_of
from treadle.runtime.cuda.blas import Matmul, timed
from treadle.runtime.cuda.launches import Runner

FACTS = MatrixFacts("bfloat16", 64, 1, 0, 0)
PRODUCT = MatmulCall(32, 64, 64, 1, FACTS, FACTS, FACTS)
LAUNCH = Launch("kernel_0", 0, 0, matmul=PRODUCT)
SIZE = 64 * 64 * 2


def plan_of(offsets: list[tuple[int, int, int]]) -> Plan:
    """Calls of one product in one phase, by the offsets of left, right and target."""
    slots: list[Slot] = []
    calls = []
    for row in offsets:
        places = tuple(range(len(slots), len(slots) + 3))
        slots += [Slot(f"s{i}", SIZE, o) for i, o in zip(places, row, strict=True)]
        calls.append(PlannedCall(0, 1, places, (0, 0, 0)))
    entry = Entry("kernel_0", 1, False, 0)
    return Plan(
        (entry,), (PlannedPhase(tuple(calls), False),), tuple(slots), (), (), (), (), 1 << 20
    )


def rows_of(*rows: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    return [(a * SIZE, b * SIZE, c * SIZE) for a, b, c in rows]


PAIR = rows_of((0, 4, 8), (0, 5, 9))
TWO_RUNS = rows_of((0, 20, 40), (1, 22, 41), (2, 24, 42), (0, 30, 50), (1, 31, 51))


def test_two_products_of_one_operand_are_a_batch() -> None:
    ((key, rows),) = batches_in(plan_of(PAIR), [LAUNCH]).items()
    assert key == (0, 2, (SIZE, 0, SIZE))
    assert [tuple(r) for r in rows] == PAIR
    found = batch_of(PRODUCT, 2, (SIZE, 0, SIZE))
    assert (found.batch, found.left.batch, found.right.batch, found.target.batch) == (
        2, 0, SIZE // 2, SIZE // 2,
    )  # fmt: skip


def test_calls_are_taken_by_where_they_write() -> None:
    assert runs_of(PRODUCT, PAIR[::-1]) == [PAIR]


def test_calls_at_other_distances_are_another_batch() -> None:
    found = batches_in(plan_of(TWO_RUNS), [LAUNCH])
    assert list(found) == [(0, 3, (SIZE, SIZE, 2 * SIZE)), (0, 2, (SIZE, SIZE, SIZE))]


def test_what_goes_backwards_or_varies_stays_apart() -> None:
    backwards = rows_of((0, 5, 8), (0, 4, 9))
    assert batches_in(plan_of(backwards), [LAUNCH]) == {}
    uneven = rows_of((0, 4, 8), (0, 5, 9), (0, 7, 10))
    assert list(batches_in(plan_of(uneven), [LAUNCH])) == [(0, 2, (SIZE, 0, SIZE))]
    halves = [(0, 4 * SIZE, 8 * SIZE), (0, 4 * SIZE + 1, 9 * SIZE)]
    assert batches_in(plan_of(halves), [LAUNCH]) == {}


def test_what_lies_outside_the_arena_stays_apart() -> None:
    assert batches_in(plan_of([(-1, 4 * SIZE, 8 * SIZE), (-1, 5 * SIZE, 9 * SIZE)]), [LAUNCH]) == {}
    assert batches_in(plan_of([(0, 4 * SIZE, 8 * SIZE)]), [LAUNCH]) == {}


# Pairs whose right operands are not as far apart as those of the others.
RUNS = [*TWO_RUNS, *rows_of((0, 60, 70), (1, 63, 71))]


class Multiplier:
    """A product that notes where it was asked to run."""

    def __init__(self, product: MatmulCall, code: int = 0):
        self.matmul, self.code, self.runs = product, code, list[tuple[int, ...]]()
        self.words = [1] * 8

    def choose(self, *places: int) -> None:
        self.words = [1] * 8

    def use(self, words: list[int]) -> None:
        self.words = words

    def run(self, *places: int, stream: object = None) -> int:
        self.runs.append(places)
        return self.code


def multiplied(found: dict[Any, Multiplier]) -> tuple[int, Multiplier]:
    """Launches of the two runs' calls, given some batches; and the product alone."""
    single = Multiplier(PRODUCT)
    runner = Runner.__new__(Runner)
    runner.launches, runner.matmuls, runner.batches = [LAUNCH], {0: single}, found  # type: ignore[assignment]
    runner.stream = None
    return runner.launch(0, [list(r) for r in TWO_RUNS]), single


def test_a_batch_is_one_launch_and_the_others_are_made_one_by_one() -> None:
    batch = Multiplier(PRODUCT)
    count, single = multiplied({(0, 3, (SIZE, SIZE, 2 * SIZE)): batch})
    assert count == 3
    assert batch.runs == [(40 * SIZE, 0, 20 * SIZE, 0)]
    assert [r[0] for r in single.runs] == [50 * SIZE, 51 * SIZE]


def test_a_batch_that_the_library_refuses_is_made_one_by_one() -> None:
    count, single = multiplied({(0, 3, (SIZE, SIZE, 2 * SIZE)): Multiplier(PRODUCT, code=7)})
    assert count == len(single.runs) == 5


@pytest.mark.parametrize("is_faster", [True, False])
def test_what_is_faster_is_found_once_and_remembered(
    is_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[list[int]] = []

    def time(*turns: list[Any]) -> list[float]:
        timed.append([len(t) for t in turns])
        return [float(is_faster == (len(t) > 1)) for t in turns]

    filled: list[object] = []
    arena: Any = SimpleNamespace(address=1 << 20, fill=filled.append)
    monkeypatch.setattr(batches, "Matmul", Multiplier)
    monkeypatch.setattr(batches, "noise", object)
    monkeypatch.setattr(batches, "timed", time)
    algorithms: dict[str, list[int]] = {}
    products: Any = {0: Multiplier(PRODUCT)}
    for _ in range(2):
        found = chosen_batches(plan_of(RUNS), [LAUNCH], products, algorithms, arena)
        assert [b[1] for b in found] == ([3, 2, 2] if is_faster else [])
        assert len({m.matmul.right.batch for m in found.values()}) == (3 if is_faster else 0)
    assert timed == [[1, 3], [1, 2]]  # of two that differ in distances, one
    assert len(filled) == 1  # numbers of zero would be faster
    assert len(algorithms) == 2


class Candidates(Matmul):
    """A product whose algorithms are numbers: how long each takes, in milliseconds."""

    def __init__(self, *times: float, refused: tuple[float, ...] = ()):
        self.matmul, self.times, self.refused = PRODUCT, times, refused
        self.algorithm, self.clock, self.count = None, 0.0, 0

    def candidates(self, *addresses: int) -> list[Any]:
        return [(t,) * 8 for t in self.times]

    def run(
        self,
        target: int,
        left: int,
        right: int,
        bias: int = 0,
        algorithm: Any = None,
        stream: Any = None,
    ) -> int:
        self.count += 1
        self.clock += (algorithm or self.algorithm)[0]
        return int((algorithm or self.algorithm)[0] in self.refused)

    def use(self, words: Any) -> None:
        self.algorithm = tuple(words)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[Candidates]:
    """Events that read the clocks of some products, which are put into this list."""
    products: list[Candidates] = []

    class Event:
        def __init__(self, timed: bool):
            self.at = 0.0

        def record(self) -> None:
            self.at = sum(p.clock for p in products)

        def wait(self) -> None:
            pass

        def milliseconds_since(self, other: Event) -> float:
            return self.at - other.at

    monkeypatch.setattr(blas, "Event", Event)
    return products


def test_the_fastest_algorithm_that_works_is_chosen(clock: list[Candidates]) -> None:
    times = [0.5 + (i * 7 % 20) / 100 for i in range(20)]
    product = Candidates(*times, refused=(min(times),))
    clock.append(product)
    product.choose(0, 0, 0)
    assert product.algorithm is not None
    assert product.algorithm[0] == sorted(times)[1]


def test_few_algorithms_of_long_products_are_run(clock: list[Candidates]) -> None:
    product = Candidates(4.0, 3.0, 5.0, 2.5, 6.0, 7.0, 1.0)
    clock.append(product)
    product.choose(0, 0, 0)
    assert product.algorithm is not None
    assert product.algorithm[0] == 2.5  # the last is not looked at
    assert product.count == blas.FEW + 1 + 2 * blas.FEW + blas.FINALISTS * blas.ROUNDS


def test_what_holds_the_device_up_is_no_algorithm_s_time(clock: list[Candidates]) -> None:
    """Now and then some runs, one after the other, wait for another process."""

    class Disturbed(Candidates):
        def run(self, *given: Any, **more: Any) -> int:
            self.clock += 5.0 if self.count % 13 < 7 else 0.0
            return super().run(*given, **more)

    product = Disturbed(0.5, 0.3, 0.4, 0.2, 0.6)
    clock.append(product)
    product.choose(0, 0, 0)
    assert product.algorithm is not None
    assert product.algorithm[0] == 0.2


def test_without_timing_the_first_that_works_is_taken() -> None:
    product = Candidates(4.0, 3.0, 1.0, refused=(4.0,))
    product.take_first(0, 0, 0)
    assert product.algorithm == (3.0,) * 8


@pytest.mark.parametrize("choose", [blas.Matmul.choose, blas.Matmul.take_first])
def test_no_algorithm_is_an_error(choose: Any, clock: list[Candidates]) -> None:
    with pytest.raises(DeviceError, match="cuBLASLt has no algorithm"):
        choose(Candidates(1.0, 2.0, refused=(1.0, 2.0)), 0, 0, 0)


def test_lists_of_products_are_timed_apart(clock: list[Candidates]) -> None:
    long, short = Candidates(3.0), Candidates(0.5)
    clock += [long, short]
    for product in clock:
        product.use([product.times[0]] * 8)
    places = (0, 0, 0, 0)
    assert timed([(long, places)], [(short, places)] * 4) == [3.0, 2.0]
    assert long.count == blas.ROUNDS * (blas.REPEATS + 1)  # some ahead
