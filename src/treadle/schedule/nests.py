"""What kernels are written with: loops, indices, arithmetic; kernels made one, and their names."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.kernel.access import (
    Access,
    accesses,
    is_local,
    locals_in,
    names_in,
    read_in,
    written_in,
)
from treadle.kernel.arithmetic import identity
from treadle.kernel.index import Index, Var, data_locals, flatten, uses, variable, variables_in
from treadle.kernel.nodes import (
    Accumulate,
    Apply,
    Buffer,
    Convert,
    For,
    Kernel,
    Let,
    Literal,
    Load,
    Local,
    Role,
    Statement,
    Store,
    Value,
)
from treadle.kernel.races import conflicts_in
from treadle.kernel.traverse import (
    loop_names,
    peel,
    substituted,
    values_of,
    with_buffers,
    with_locals,
)

Body = tuple[Statement, ...]  # of a kernel, or of a loop
Buffers = tuple[Buffer, ...]


def axis_vars(stem: str, shape: Sequence[int]) -> tuple[Var, ...]:
    return tuple(Var(f"{stem}{i}", n) for i, n in enumerate(shape))


def _nest(variables: Sequence[Var], role: Role, body: Sequence[Statement]) -> Body:
    """The body inside a loop for each variable, the first outermost; none for one iteration."""
    inner = tuple(body)
    for var in reversed(variables):
        if var.extent != 1:
            inner = (For(var, role, inner),)
    return inner


def along(axes: Iterable[Var]) -> tuple[Index, ...]:
    """The indices that loops over some axes count."""
    return tuple(map(variable, axes))


def parallel(variables: Sequence[Var], body: Sequence[Statement]) -> Body:
    """The body in loops whose iterations do not depend on each other."""
    return _nest(variables, Role.PARALLEL, body)


def in_order(variables: Sequence[Var], body: Sequence[Statement]) -> Body:
    """The body in loops that run one iteration after the other."""
    return _nest(variables, Role.SEQUENTIAL, body)


def flat_index(variables: Sequence[Var]) -> Index:
    """The index of an element that loops over some axes count in row-major order."""
    return flatten(along(variables), [v.extent for v in variables])


def is_sum(statement: Statement) -> bool:
    """Whether a loop in order only accumulates: its iterations can be shared out."""
    if not isinstance(statement, For) or statement.role is not Role.SEQUENTIAL:
        return False
    if statement.stop is not None:
        return False
    _, body = nested(statement)
    own = {s.local for s in body if isinstance(s, Let)}
    summed = {s.local for s in body if isinstance(s, Accumulate)}
    if not summed or own & summed:
        return False
    return all(isinstance(s, (Let, Accumulate)) and not summed & locals_in(s.value) for s in body)


def is_scan(statement: Statement) -> bool:
    """Whether a loop in order is the axis of a scan, and does nothing else: threads can share it.

    What it scans is read behind it alone, and its iterations do not meet in memory.
    """
    if not isinstance(statement, For) or statement.role is not Role.SEQUENTIAL:
        return False
    body = statement.body
    scanned = {s.local for s in body if isinstance(s, Accumulate) and s.scanned}
    if statement.stop is not None or not scanned:
        return False
    if not all(isinstance(s, (Let, Accumulate, Store)) for s in body):
        return False
    if any(isinstance(s, Accumulate) and not s.scanned for s in body):
        return False
    known = set[str]()
    for s in body:
        if any((locals_in(v) & scanned) - known for v in values_of(s)):
            return False
        known |= {s.local} if isinstance(s, Accumulate) else set()
    return not conflicts_in(replace(statement, role=Role.PARALLEL))


def nested(loop: For) -> tuple[list[Var], Body]:
    """Loops of one role, each right inside the other, and what they contain."""
    loops, body = peel(loop.body, loop.role)
    return [loop.var, *(s.var for s in loops)], body


def is_cleared(before: Sequence[Statement], step: Accumulate) -> bool:
    """Whether an accumulation starts from the number that changes nothing."""
    starts = {s.local: s.value for s in before if isinstance(s, Let)}
    start = starts.get(step.local)
    return isinstance(start, Literal) and start.value == identity(step.op, step.value.dtype)


def moves(index: Index, var: Var) -> bool:
    return any(uses(atom, var) for atom, _ in index.terms)


def let(name: str, value: Value) -> tuple[Let, Local]:
    """A value that gets a name, and what stands for it."""
    return Let(name, value), Local(name, value.dtype)


def as_dtype(value: Value, dtype: DType) -> Value:
    return value if value.dtype is dtype else Convert(value, dtype)


def pitched(shape: tuple[int, ...], pitch: int | None) -> tuple[int, ...]:
    """A shape with its last axis as long as rows are apart in memory."""
    return shape if pitch is None else (*shape[:-1], pitch)


def apply(op: str, *operands: Value) -> Value:
    """An op on scalars that has the dtype of the last of them."""
    return Apply(op, operands, operands[-1].dtype)


def compare(op: str, *operands: Value) -> Value:
    """An op on scalars that is true or false."""
    return Apply(op, operands, dtypes.bool_)


def accumulated(
    op: str,
    wide: DType,
    summed: Sequence[Var],
    lets: Sequence[Statement],
    element: Value,
    name: str = "acc",
) -> Body:
    """A local, combined over some loops."""
    inner = in_order(summed, [*lets, Accumulate(name, op, as_dtype(element, wide))])
    return (Let(name, Literal(identity(op, wide), wide)), *inner)


def fused_kernel(first: Kernel, second: Kernel, body: Body, scratch: Buffers = ()) -> Kernel:
    """Both kernels as one, given its statements and what it needs beside the first's scratch."""
    outputs = {b.name: b for b in (*first.outputs, *second.outputs)}
    inputs = {b.name: b for b in (*first.inputs, *second.inputs) if b.name not in outputs}
    origins = tuple(dict.fromkeys((*first.origins, *second.origins)))
    return Kernel(
        first.name,
        tuple(inputs.values()),
        tuple(outputs.values()),
        body,
        origins,
        first.scratch + scratch,
    )


@dataclass(frozen=True, slots=True)
class Parts:
    """Buffers in equal parts, one for each iteration of the loops around some statements."""

    iteration: Index
    count: int
    sizes: Mapping[str, int]  # elements of each buffer

    def has(self, access: Access) -> bool:
        """Whether an access stays in the part of its iteration."""
        size = self.sizes.get(access.buffer)
        return size is not None and is_local(access, self.iteration, size, self.count)

    def shared(self, first: Sequence[Statement], second: Sequence[Statement]) -> set[str]:
        """Buffers that both touch, each iteration its own part alone."""
        own: list[set[str]] = []
        for body in (first, second):
            every = list(accesses(body))
            own.append({a.buffer for a in every} - {a.buffer for a in every if not self.has(a)})
        return own[0] & own[1]

    def separate(self, first: Sequence[Statement], second: Sequence[Statement]) -> bool:
        """Whether what one writes and the other touches stays in its part."""
        written = [written_in(body) for body in (first, second)]
        touched = [written[0] | read_in(first), written[1] | read_in(second)]
        shared = (written[0] & touched[1]) | (written[1] & touched[0])
        shared &= self.sizes.keys()
        if not shared:
            return True
        sides = list(accesses(first, shared)), list(accesses(second, shared))
        apart = {a.buffer for side in sides for a in side if not self.has(a)}
        return all(name in written[0] and self._read_where_written(name, sides) for name in apart)

    def _read_where_written(self, buffer: str, sides: Sequence[Sequence[Access]]) -> bool:
        """Whether the second only reads the very elements that the first writes in an iteration.

        No other iteration writes them.
        """
        first, second = ([a for a in side if a.buffer == buffer] for side in sides)
        around = variables_in(self.iteration)
        if any(a.writes or a.low != a.high for a in second):
            return False
        if any(data_locals(a.index) or variables_in(a.index) - around for a in second):
            return False
        stores = [b for b in first if b.writes and b.low == b.high]
        return all(any(a.index.same(b.index) for b in stores) for a in second)


def with_own_names(kernel: Kernel, body: Body, other: Kernel, others: Body) -> tuple[Kernel, Body]:
    """A kernel and its statements with names of locals and scratch that another does not use."""
    taken = names_in(others)
    names = {n: fresh(n, taken) for n in sorted(names_in(body))}
    scratches = {b.name for b in other.scratch}
    own = {b.name: fresh(b.name, scratches) for b in kernel.scratch}
    renamed = with_buffer_names(replace(kernel, body=with_locals(body, names)), own)
    loops = loop_names(others)
    return renamed, tuple(with_own_loops(s, loops) for s in renamed.body)


def with_own_loops(statement: Statement, taken: set[str]) -> Statement:
    """The statement with loop variables whose names are not taken; siblings may share one."""
    if not isinstance(statement, For):
        return statement
    name = statement.var.name
    if name not in taken:  # it stays, so that no loop inside may be called the same
        body = tuple(with_own_loops(s, taken | {name}) for s in statement.body)
        return replace(statement, body=body)
    body = tuple(with_own_loops(s, taken) for s in statement.body)
    name = fresh(name, taken | loop_names(body))
    var = Var(name, statement.var.extent)
    return replace(statement, var=var, body=substituted(body, {statement.var: variable(var)}))


def fresh(name: str, taken: set[str]) -> str:
    """A name that is not taken; it is taken now."""
    stem = name.split("~")[0]
    found, count = name, 1
    while found in taken:
        found, count = f"{stem}~{count}", count + 1
    taken.add(found)
    return found


def anonymous(kernel: Kernel) -> Kernel:
    """The kernel with its buffers named by position."""
    names = {b.name: f"p{i}" for i, b in enumerate(kernel.buffers)}
    names |= {b.name: f"s{i}" for i, b in enumerate(kernel.scratch)}
    return with_buffer_names(kernel, names)


def with_buffer_names(kernel: Kernel, names: Mapping[str, str]) -> Kernel:
    """The kernel with some of its buffers renamed."""
    inputs, outputs, scratch = (
        tuple([Buffer(names.get(b.name, b.name), b.dtype, b.size, b.lanes) for b in buffers])
        for buffers in (kernel.inputs, kernel.outputs, kernel.scratch)
    )
    body = with_buffers(kernel.body, lambda name: names.get(name, name))
    return Kernel(
        kernel.name,
        inputs,
        outputs,
        body,
        kernel.origins,
        scratch,
        kernel.is_standalone,
        kernel.geometry,
    )


def stays(body: Sequence[Statement], leaf: str, at: Index) -> bool:
    """Whether a leaf is read only at the index that is written."""
    return all(a.index == at for a in accesses(body, (leaf,)))


def copies(source: str, target: str, like: Buffer) -> list[Kernel]:
    """The kernel that copies a buffer; none where there is nothing in it."""
    i = Var("i", like.size)
    store = Store(target, variable(i), Load(source, variable(i), like.dtype))
    read, written = (Buffer(name, like.dtype, like.size) for name in (source, target))
    return [Kernel("copy", (read,), (written,), parallel([i], [store]))] if like.size else []


def shifted(first: str, second: str, third: str, like: Buffer) -> list[Kernel]:
    """The kernel that copies a buffer to a first one, and a third one to it."""
    i = Var("i", like.size)
    at = variable(i)
    stores = [Store(t, at, Load(s, at, like.dtype)) for s, t in ((second, first), (third, second))]
    buffers = [Buffer(name, like.dtype, like.size) for name in (third, first, second)]
    body = parallel([i], stores)
    return [Kernel("copy", tuple(buffers[:1]), tuple(buffers[1:]), body)] if like.size else []


@functools.cache
def best_divisor(n: int, target: int, least: int = 1) -> int:
    """The divisor of n nearest below a target, or the smallest above; at least `least`."""
    every = divisors(n)
    below = [d for d in every if least <= d <= target]
    above = [d for d in every if d > target]
    return below[-1] if below else above[0]


def divisors(n: int) -> list[int]:
    """All of them, in order."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
