"""Equal products of one phase as a batch: where they lie, what the batch is, what is left alone."""

from __future__ import annotations

from treadle.kernel.launch import Launch, MatrixFacts, Product
from treadle.kernel.plan import Entry, Plan, PlannedCall, PlannedPhase, Slot
from treadle.runtime.cuda.batches import batch_of, batches_in, steps_between

FACTS = MatrixFacts("bfloat16", 64, 1, 0, 0)
PRODUCT = Product(32, 64, 64, 1, FACTS, FACTS, FACTS)
LAUNCH = Launch("kernel_0", 0, 0, product=PRODUCT)
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


def test_two_products_of_one_operand_are_a_batch() -> None:
    plan = plan_of([(0, 4 * SIZE, 8 * SIZE), (0, 5 * SIZE, 9 * SIZE)])
    ((key, found),) = batches_in(plan, [LAUNCH]).items()
    assert key == (0, 2, (SIZE, 0, SIZE))
    assert found == batch_of(PRODUCT, 2, (SIZE, 0, SIZE))
    assert (found.batch, found.left.batch, found.right.batch, found.target.batch) == (
        2, 0, SIZE // 2, SIZE // 2,
    )  # fmt: skip


def test_calls_are_taken_by_where_they_write() -> None:
    rows = [(0, 5 * SIZE, 9 * SIZE), (0, 4 * SIZE, 8 * SIZE)]
    assert steps_between(PRODUCT, rows) == (SIZE, 0, SIZE)


def test_what_goes_backwards_or_varies_stays_apart() -> None:
    backwards = [(0, 5 * SIZE, 8 * SIZE), (0, 4 * SIZE, 9 * SIZE)]
    assert batches_in(plan_of(backwards), [LAUNCH]) == {}
    uneven = [(0, 4 * SIZE, 8 * SIZE), (0, 5 * SIZE, 9 * SIZE), (0, 7 * SIZE, 10 * SIZE)]
    assert batches_in(plan_of(uneven), [LAUNCH]) == {}
    halves = [(0, 4 * SIZE, 8 * SIZE), (0, 4 * SIZE + 1, 9 * SIZE)]
    assert batches_in(plan_of(halves), [LAUNCH]) == {}


def test_what_lies_outside_the_arena_stays_apart() -> None:
    assert batches_in(plan_of([(-1, 4 * SIZE, 8 * SIZE), (-1, 5 * SIZE, 9 * SIZE)]), [LAUNCH]) == {}
    assert batches_in(plan_of([(0, 4 * SIZE, 8 * SIZE)]), [LAUNCH]) == {}
