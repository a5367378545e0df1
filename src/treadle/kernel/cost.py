"""What a kernel costs, counted: turns, operations, bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from treadle.kernel.access import Access, accesses
from treadle.kernel.nodes import (
    Accumulate,
    Apply,
    Buffer,
    Convert,
    For,
    Guarded,
    Kernel,
    Let,
    Library,
    Multiply,
    Role,
    Set,
    Statement,
    Store,
    Update,
    Value,
)

LINE = 64  # bytes
_SPREAD = (Role.PARALLEL, Role.GRID, Role.VECTOR)


def padded(nbytes: int) -> int:
    """Bytes rounded up to whole lines."""
    return -(-nbytes // LINE) * LINE


def scratch_bytes(kernel: Kernel) -> int:
    """What a thread needs of its own while it runs a kernel."""
    return sum(padded(b.nbytes) for b in kernel.scratch)


def outermost(kernel: Kernel) -> For | None:
    """The loop whose turns threads share; None where a kernel has one turn.

    Values may be named before it: every task computes them.
    """
    if not kernel.body or not all(isinstance(s, Let) for s in kernel.body[:-1]):
        return None
    last = kernel.body[-1]
    if isinstance(last, For) and last.role in _SPREAD and last.stop is None:
        return last
    return None


def turns(kernel: Kernel) -> int:
    loop = outermost(kernel)
    return 1 if loop is None else loop.var.extent


def flops(kernel: Kernel) -> int:
    """Arithmetic of all turns: an elementwise op counts as one, whichever it is."""
    return _flops(kernel.body)


def _flops(body: Sequence[Statement]) -> int:
    found = 0
    for statement in body:
        match statement:
            case For(var, _, inner):
                found += var.extent * _flops(inner)
            case Multiply() | Library():
                found += statement.flops
            case Accumulate(_, _, value):
                found += 1 + _operations(value)
            case Let(_, value) | Set(_, value) | Store(_, _, value) | Update(_, _, value):
                found += _operations(value)
    return found


def _operations(value: Value) -> int:
    match value:
        case Apply(_, operands, _):
            return 1 + sum(map(_operations, operands))
        case Convert(inner, _):
            return 1 + _operations(inner)
        case Guarded(guard, inner, other, _):
            return sum(map(_operations, (guard, inner, other)))
        case _:
            return 0


def traffic(kernel: Kernel) -> int:
    """Bytes that a kernel must at least move: what it reads of each buffer and what it writes.

    A buffer that is updated in place is both; what a kernel reads back after writing it is near.
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
    for statement in body:
        if isinstance(statement, For):
            yield from _in_order(statement.body)
        else:
            yield from sorted(accesses([statement]), key=lambda a: a.writes)


def largest(buffers: Sequence[Buffer]) -> int:
    return max((b.size for b in buffers), default=0)


def statements(body: Sequence[Statement]) -> int:
    """How often the innermost statements run: a measure of work."""
    found = 0
    for s in body:
        found += s.var.extent * statements(s.body) if isinstance(s, For) else 1
    return found


def work(kernel: Kernel) -> int:
    """Operations and statements: about how many lanes' cycles a kernel takes."""
    return flops(kernel) + statements(kernel.body)
