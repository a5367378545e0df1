"""What a kernel costs, counted: iterations, operations, bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from treadle.kernel.access import Access, accesses
from treadle.kernel.costs import Costs
from treadle.kernel.nodes import (
    Accumulate,
    Apply,
    Barrier,
    Buffer,
    Convert,
    For,
    Kernel,
    Let,
    LibraryCall,
    Matmul,
    Role,
    Statement,
)
from treadle.kernel.traverse import subvalues, tally, walk

LINE = 64  # bytes


def padded(nbytes: int) -> int:
    """Bytes rounded up to whole lines."""
    return -(-nbytes // LINE) * LINE


def scratch_bytes(kernel: Kernel) -> int:
    """What a thread needs of its own while it runs a kernel."""
    return sum(padded(b.nbytes) for b in kernel.scratch)


def outermost(kernel: Kernel) -> For | None:
    """The loop whose iterations threads share; None where a kernel has one.

    Values may be named before it: every task computes them.
    """
    match kernel.body:
        case (*before, For(_, Role.PARALLEL | Role.GRID | Role.VECTOR, _, None) as last):
            return last if all(isinstance(s, Let) for s in before) else None
        case _:
            return None


def iterations(kernel: Kernel) -> int:
    loop = outermost(kernel)
    return 1 if loop is None else loop.var.extent


def flops(kernel: Kernel) -> int:
    """Arithmetic of all iterations: an elementwise op counts as one, whichever it is."""
    return tally(kernel.body, _operations)


def picoseconds(flops: int, nbytes: int, is_narrow: bool, costs: Costs) -> int:
    """What work takes in a model of a machine: its operations, then what it moves."""
    return 1 + int(flops * (costs.narrow_flop if is_narrow else costs.flop) + nbytes * costs.byte)


def _operations(statement: Statement) -> int:
    match statement:
        case Matmul() | LibraryCall():
            return statement.flops
        case For() | Barrier():
            return 0
        case _:
            parts = subvalues(statement.value)
            own = isinstance(statement, Accumulate)
            return own + sum(isinstance(v, (Apply, Convert)) for v in parts)


def traffic(kernel: Kernel) -> int:
    """Bytes that a kernel must at least move: what it reads of each buffer and what it writes.

    A buffer that is updated in place is both. What a kernel reads back after writing it is in a
    cache.
    """
    sizes = {b.name: b for b in kernel.buffers}
    spans: dict[tuple[Buffer, bool], tuple[int, int]] = {}
    for access in _in_order(kernel.body):
        buffer = sizes.get(access.buffer)  # None for scratch
        if buffer is None or (not access.writes and (buffer, True) in spans):
            continue
        low, high = access.index.range
        low, high = low + access.low, high + access.high
        least, most = spans.get((buffer, access.writes), (low, high))
        spans[buffer, access.writes] = min(least, low), max(most, high)
    return sum((high - low + 1) * b.dtype.itemsize for (b, _), (low, high) in spans.items())


def _in_order(body: Sequence[Statement]) -> Iterator[Access]:
    """Accesses as they happen: a statement reads before it writes."""
    for statement in walk(body):
        if not isinstance(statement, For):
            yield from sorted(accesses([statement]), key=lambda a: a.writes)


def largest(buffers: Sequence[Buffer]) -> int:
    return max((b.size for b in buffers), default=0)


def statements(body: Sequence[Statement]) -> int:
    """How often the innermost statements run: a measure of work."""
    return tally(body, lambda s: 1)


def work(kernel: Kernel) -> int:
    """Operations and statements: about how many lanes' cycles a kernel takes."""
    return flops(kernel) + statements(kernel.body)
