"""Equal matmuls of one phase as batches: projections side by side, gradients of equal layers.

Where each of some calls lies as far from the one before, in all three matrices, a library takes
them at once; it does so where that is faster than one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from treadle.kernel.launch import Launch, MatmulCall, MatrixFacts
from treadle.kernel.plan import Plan, PlannedPhase, PlannedStep
from treadle.runtime.cuda.blas import Matmul, itemsize, noise, timed
from treadle.runtime.cuda.device import Block

Row = Sequence[int]  # addresses or offsets of a call's arguments
# An entry, how many calls, and bytes from call to call of target, left and right.
Batch = tuple[int, int, tuple[int, int, int]]


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Calls by where they write."""
    return sorted(rows, key=lambda row: row[-1])


def runs_of(matmul: MatmulCall, rows: Sequence[Row]) -> list[list[Row]]:
    """Calls by where they write, cut wherever the distance between matrices changes."""
    found: list[list[Row]] = []
    steps: tuple[int, int, int] | None = None
    for row in in_order(rows):
        step = steps_between(matmul, found[-1][-1], row) if found else None
        is_next = step is not None and (len(found[-1]) == 1 or step == steps)
        if is_next:
            found[-1].append(row)
            steps = step
        else:
            found.append([row])
    return found


def steps_between(matmul: MatmulCall, first: Row, second: Row) -> tuple[int, int, int] | None:
    """Bytes from the matrices of a call to those of another: target, left and right.

    None where some go backwards, as not every kernel of a library can.
    """
    pairs = zip(matrices(matmul, first)[:3], matrices(matmul, second)[:3], strict=True)
    target, left, right = (b - a for a, b in pairs)
    facts = matmul.target, matmul.left, matmul.right
    sizes = [itemsize(f.dtype) for f in facts]
    is_whole = not any(s % n for s, n in zip((target, left, right), sizes, strict=True))
    return (target, left, right) if is_whole and target > 0 and min(left, right) >= 0 else None


def batch_of(matmul: MatmulCall, count: int, steps: tuple[int, int, int]) -> MatmulCall:
    """Several calls as one batched matmul."""

    def moved(facts: MatrixFacts, step: int) -> MatrixFacts:
        return replace(facts, batch=step // itemsize(facts.dtype))

    facts = matmul.target, matmul.left, matmul.right
    target, left, right = (moved(f, s) for f, s in zip(facts, steps, strict=True))
    return replace(matmul, batch=count, target=target, left=left, right=right)


def matrices(matmul: MatmulCall, addresses: Sequence[int]) -> tuple[int, ...]:
    """Target, left, right, bias and scales among a call's arguments: left first, target last."""
    bias = addresses[matmul.bias] if matmul.bias >= 0 else 0
    scales = (addresses[i] + at * itemsize("float32") for i, at in matmul.scales)
    return addresses[-1], addresses[0], addresses[matmul.second], bias, *scales


def batch_in(entry: int, matmul: MatmulCall, run: Sequence[Row]) -> Batch:
    """A run of several calls as what tells batches apart."""
    steps = steps_between(matmul, run[0], run[1])
    assert steps is not None
    return entry, len(run), steps


def batches_in(plan: Plan, launches: Sequence[Launch]) -> dict[Batch, list[Row]]:
    """Batches whose matrices all lie in the arena, where distances are known: offsets of calls."""
    found: dict[Batch, list[Row]] = {}
    for phase in _phases(plan.steps):
        offsets: dict[int, list[Row]] = {}
        for call in phase.calls:
            found_at = [plan.slots[s].offset for s in call.slots]
            if min(found_at, default=-1) >= 0:
                offsets.setdefault(call.entry, []).append(found_at)
        for entry, rows in offsets.items():
            matmul = launches[entry].matmul
            if matmul is None or launches[entry].block or matmul.batch > 1 or matmul.bias >= 0:
                continue
            if "float8" in matmul.left.dtype:
                continue
            for run in runs_of(matmul, rows):
                if len(run) > 1:
                    found.setdefault(batch_in(entry, matmul, run), run)
    return found


def _phases(steps: Sequence[PlannedStep]) -> Iterator[PlannedPhase]:
    return (s for s in steps if isinstance(s, PlannedPhase))


def chosen_batches(
    plan: Plan,
    launches: Sequence[Launch],
    matmuls: Mapping[int, Matmul],
    algorithms: dict[str, list[int]],
    arena: Block,
) -> dict[Batch, Matmul]:
    """Batches that are faster than their matmuls one by one, timed in the arena itself.

    One choice serves all batches that differ in nothing but how far their matrices are apart.
    """
    found: dict[Batch, Matmul] = {}
    is_filled = False
    for batch, run in batches_in(plan, launches).items():
        _, count, steps = batch
        single = matmuls[batch[0]]
        matmul = Matmul(batch_of(single.matmul, count, steps))
        key = f"batch of {count}, {[bool(s) for s in steps]}: {single.matmul}"
        if key not in algorithms:
            if not is_filled:
                arena.fill(noise())
                is_filled = True
            addresses = [matrices(single.matmul, [arena.address + o for o in row]) for row in run]
            matmul.choose(*addresses[0])
            # One by one as they would run, each on its own memory.
            batched, apart = timed([(matmul, addresses[0])], [(single, p) for p in addresses])
            algorithms[key] = matmul.words if batched < apart else [0] * 8
        if any(algorithms[key]):
            matmul.use(algorithms[key])
            found[batch] = matmul
    return found
