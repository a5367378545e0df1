"""Equal products of one phase as one batch: gates, projections and their gradients side by side.

Where each of a phase's calls lies as far from the one before, in all three matrices, a library
takes them at once; it does so where that is faster than one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from treadle.kernel.launch import Launch, MatrixFacts, Product
from treadle.kernel.plan import Plan, PlannedPhase, PlannedStep
from treadle.runtime.cuda.blas import Matmul, itemsize

# An entry, how many calls, and bytes from call to call of target, left and right.
Batch = tuple[int, int, tuple[int, int, int]]


def in_order(rows: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """Calls by where they write."""
    return sorted(rows, key=lambda row: row[-1])


def steps_between(product: Product, rows: Sequence[Sequence[int]]) -> tuple[int, int, int] | None:
    """Bytes between matrices of calls, by their addresses or offsets; None where they vary.

    None too where some go backwards: not every kernel of a library can.
    """
    places = [matrices(product, row)[:3] for row in in_order(rows)]
    first, second = places[:2]
    steps = (second[0] - first[0], second[1] - first[1], second[2] - first[2])
    if min(steps) < 0:
        return None
    for i, place in enumerate(places):
        if any(p != f + i * s for p, f, s in zip(place, first, steps, strict=True)):
            return None
    facts = product.target, product.left, product.right
    is_whole = all(s % itemsize(f.dtype) == 0 for s, f in zip(steps, facts, strict=True))
    return steps if is_whole and steps[0] else None


def batch_of(product: Product, count: int, steps: tuple[int, int, int]) -> Product:
    """Several calls as one product."""

    def moved(facts: MatrixFacts, step: int) -> MatrixFacts:
        return replace(facts, batch=step // itemsize(facts.dtype))

    facts = product.target, product.left, product.right
    target, left, right = (moved(f, s) for f, s in zip(facts, steps, strict=True))
    return replace(product, batch=count, target=target, left=left, right=right)


def matrices(product: Product, addresses: Sequence[int]) -> tuple[int, int, int, int]:
    """Target, left, right and bias among a call's arguments: left first, then right, the bias."""
    if product.bias < 0:
        return addresses[-1], addresses[0], addresses[-2], 0
    right = addresses[min(1, product.bias - 1)]
    return addresses[-1], addresses[0], right, addresses[product.bias]


def batches_in(plan: Plan, launches: Sequence[Launch]) -> dict[Batch, Product]:
    """Batches whose matrices all lie in the arena, where their distances are known."""
    found: dict[Batch, Product] = {}
    for phase in _phases(plan.steps):
        offsets: dict[int, list[list[int]]] = {}
        for call in phase.calls:
            places = [plan.slots[s].offset for s in call.slots]
            offsets.setdefault(call.entry, []).append(places)
        for entry, rows in offsets.items():
            product = launches[entry].product
            if product is None or launches[entry].block or product.batch > 1 or product.bias >= 0:
                continue
            if len(rows) < 2 or any(place < 0 for row in rows for place in row):
                continue
            steps = steps_between(product, rows)
            if steps is not None:
                found[entry, len(rows), steps] = batch_of(product, len(rows), steps)
    return found


def _phases(steps: Sequence[PlannedStep]) -> Iterator[PlannedPhase]:
    return (s for s in steps if isinstance(s, PlannedPhase))


def chosen_batches(
    plan: Plan,
    launches: Sequence[Launch],
    products: Mapping[int, Matmul],
    algorithms: dict[str, list[int]],
    arena: int,
) -> dict[Batch, Matmul]:
    """Batches that are faster than their products one by one, timed in the arena itself."""
    found: dict[Batch, Matmul] = {}
    lowest = {b: _lowest(plan, b, launches) for b in batches_in(plan, launches)}
    for batch, product in batches_in(plan, launches).items():
        matmul, key = Matmul(product), f"batch {product}"
        if key not in algorithms:
            places = matrices(product, [arena + o for o in lowest[batch]])
            matmul.choose(*places)
            single = products[batch[0]]
            is_faster = matmul.time(*places) < batch[1] * single.time(*places)
            algorithms[key] = matmul.words if is_faster else [0] * 8
        if any(algorithms[key]):
            matmul.use(algorithms[key])
            found[batch] = matmul
    return found


def _lowest(plan: Plan, batch: Batch, launches: Sequence[Launch]) -> list[int]:
    """Offsets of the first call of a batch."""
    entry, count, steps = batch
    product = launches[entry].product
    assert product is not None
    for phase in _phases(plan.steps):
        rows = [
            [plan.slots[s].offset for s in call.slots]
            for call in phase.calls
            if call.entry == entry
        ]
        if len(rows) == count and steps_between(product, rows) == steps:
            return list(in_order(rows)[0])
    raise LookupError(f"no phase has {batch}")
