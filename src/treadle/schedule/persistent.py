"""A scan as one kernel: parts of its carries that need nothing of each other go through all
iterations by themselves.

An iteration's kernels are made one at as many rows as they can be. If a row reads and writes no
carry but its own part of each, rows need not wait for each other between iterations: the loop over
the iterations moves inside the loop over rows. A part of one element stays in a register, a larger
one in memory that a block shares. So one launch takes the place of several in every iteration.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from treadle.kernel import cost
from treadle.kernel.access import accesses, map_loads, names_in
from treadle.kernel.index import Index, Var, variable
from treadle.kernel.nodes import (
    Buffer,
    For,
    Kernel,
    Let,
    LibraryCall,
    Load,
    Local,
    Matmul,
    Role,
    Set,
    Statement,
    Store,
    Update,
    Value,
)
from treadle.kernel.program import Argument
from treadle.kernel.races import conflicts_in
from treadle.kernel.target import Target
from treadle.kernel.traverse import (
    loop_names,
    map_statements,
    map_values,
    rewritten,
    walk,
    with_buffers,
)
from treadle.schedule.fuse import fused_at, in_rows, peeled, row, row_counts
from treadle.schedule.nests import (
    Body,
    Parts,
    divisors,
    flat_index,
    fresh,
    parallel,
    with_buffer_names,
)
from treadle.schedule.order import Bound


@dataclass(frozen=True)
class Iterations:
    """The loop of a scan: its length and direction, buffers that are rows, and all their sizes."""

    length: int
    reverse: bool
    rows: Mapping[str, Argument]
    sizes: Mapping[str, int]  # elements of each buffer
    carries: Mapping[str, tuple[str, str]]  # buffers where each starts, and where it ends


def named(bound: Bound) -> Kernel:
    """A kernel with the names of the buffers that it is used on."""
    own = (b.name for b in bound.kernel.buffers)
    kernel = with_buffer_names(bound.kernel, dict(zip(own, bound.names, strict=True)))
    return replace(kernel, origins=bound.origins)


def as_one_kernel(
    kernels: Sequence[Kernel], iterations: Iterations, target: Target
) -> Kernel | None:
    """All iterations as one kernel, its rows as short as they can be; None if there is no way."""
    if not kernels or any(_is_apart(k) for k in kernels):
        return None
    found = _by_elements(kernels, iterations, target)
    # Loops may have become one: what divides them is a number of rows too.
    counts = {n for k in kernels for n in divisors(max(row_counts(k), default=1))}
    for count in sorted(counts, reverse=True):
        if found is not None:
            break
        whole = _at_rows(kernels, count)
        if whole is None or cost.work(whole) > count * target.fusion.scan_part:
            continue
        found = _by_rows(whole, count, iterations, target)
    found = None if found is None else _over_wholes(found, iterations)
    return found if found is not None and _stay_apart(found) else None


def _stay_apart(kernel: Kernel) -> bool:
    """Whether it can be shown that parallel iterations do not meet.

    A last pack that reaches beyond its row of a stack, where a guard stops it, looks as if it met
    the next row. Rows have memory of their own, which threads that share a row have in common: a
    scan inside that keeps its carries there is none of theirs.
    """
    loops = (s for s in walk(kernel.body) if isinstance(s, For) and s.role is Role.PARALLEL)
    own = [b.name for b in kernel.scratch]
    rows = kernel.body[0] if len(kernel.body) == 1 else None
    return not any(conflicts_in(loop, own if loop is rows else ()) for loop in loops)


def _is_apart(kernel: Kernel) -> bool:
    """Whether a kernel is a library's, or its threads meet otherwise than by rows."""
    kinds = (Matmul, LibraryCall, Update)
    return kernel.is_standalone or any(isinstance(s, kinds) for s in walk(kernel.body))


def _at_rows(kernels: Sequence[Kernel], count: int) -> Kernel | None:
    """All kernels of an iteration as one, at a number of rows."""
    whole: Kernel | None = kernels[0]
    for kernel in kernels[1:]:
        whole = whole and fused_at(whole, kernel, count, True)
    return whole


def _own(
    kernel: Kernel, body: Body, iteration: Index, count: int, iterations: Iterations
) -> set[str] | None:
    """Buffers that an iteration changes and no row of the stacks; None if parts meet in one."""
    rows = iterations.rows
    own = {b.name for b in kernel.outputs if b.name not in rows}
    parts = Parts(iteration, count, {b.name: b.size for b in kernel.buffers})
    return own if all(parts.has(a) for a in accesses(body) if a.buffer in own) else None


# A thread for each element


def _by_elements(
    kernels: Sequence[Kernel], iterations: Iterations, target: Target
) -> Kernel | None:
    """One kernel whose carries are one element of each iteration of its loops: in registers."""
    if len(kernels) != 1 or kernels[0].scratch:
        return None
    (kernel,) = kernels
    variables, body = peeled(kernel)
    count = 1
    for var in variables:
        count *= var.extent
    own = _own(kernel, body, flat_index(variables), count, iterations)
    if own is None or any(isinstance(s, For) for s in walk(body)):
        return None
    dtypes = {b.name: b.dtype for b in kernel.outputs}
    at = {a.buffer: a.index for a in accesses(body) if a.buffer in own}
    if any(iterations.sizes[n] != count for n in own) or not _is_plain(body, own):
        return None
    taken = names_in(body)
    stems = {n: "carry" if n in iterations.carries else "next" for n in sorted(own)}
    locals_ = {n: Local(fresh(stem, taken), dtypes[n]) for n, stem in stems.items()}
    carried = {n: locals_[n] for n in iterations.carries}
    before = [
        Let(x.name, Load(iterations.carries[n][0], at[n], x.dtype)) for n, x in carried.items()
    ]
    after = [Store(iterations.carries[n][1], at[n], x) for n, x in carried.items()]
    inside = map_statements(body, lambda s: [_in_registers(s, locals_, carried.keys())])
    loop = _loop(inside, iterations, loop_names(kernel.body))
    ahead = 1 if target.mapping is None else target.mapping.scan_ahead
    loop = replace(loop, unroll=min(ahead, iterations.length))
    return _of_carries(kernel, parallel(variables, [*before, loop, *after]), own, iterations)


def _of_carries(kernel: Kernel, body: Body, own: set[str], iterations: Iterations) -> Kernel:
    """The kernel with other statements, on buffers where carries start and end."""
    buffers = {b.name: b for b in kernel.outputs if b.name in own}
    inputs = {b.name: b for b in kernel.inputs}
    outputs = {b.name: b for b in kernel.outputs if b.name not in own}
    for name, (first, last) in iterations.carries.items():
        inputs[first] = replace(buffers[name], name=first)
        outputs[last] = replace(buffers[name], name=last)
    return replace(
        kernel, inputs=tuple(inputs.values()), outputs=tuple(outputs.values()), body=body
    )


def _is_plain(body: Body, own: set[str]) -> bool:
    """Whether stores of what stays in registers are made always, and once."""
    stores = [s for s in body if isinstance(s, Store) and s.buffer in own]
    return all(s.guard is None for s in stores) and len(stores) == len({s.buffer for s in stores})


def _in_registers(
    statement: Statement, locals_: Mapping[str, Local], carried: Collection[str]
) -> Statement:
    def read(load: Load) -> Value:
        return locals_.get(load.buffer, load)

    moved = map_values(statement, lambda value: map_loads(value, read))
    if not isinstance(moved, Store) or moved.buffer not in locals_:
        return moved
    local = locals_[moved.buffer].name
    return Set(local, moved.value) if moved.buffer in carried else Let(local, moved.value)


# A group of threads for each row


def _by_rows(kernel: Kernel, count: int, iterations: Iterations, target: Target) -> Kernel | None:
    """The kernel at a number of rows, what a row changes in memory of its own."""
    body = in_rows(kernel, count)
    if body is None:
        return None
    var = row(count)
    own = _own(kernel, body, variable(var), count, iterations)
    if own is None:
        return None
    buffers = [b for b in kernel.outputs if b.name in own]
    room = sum(b.held(target.word) // count for b in (*buffers, *kernel.scratch))
    limit = target.fusion.shared_memory if target.mapping is None else target.mapping.staged
    if room > limit:
        return None
    lengths = {b.name: b.size // count for b in buffers}
    near = {b.name: Buffer(f"{b.name}.near", b.dtype, lengths[b.name]) for b in buffers}

    def at(buffer: str, index: Index) -> Index:
        return index - variable(var) * lengths[buffer] if buffer in near else index

    def name_of(buffer: str) -> str:
        return near[buffer].name if buffer in near else buffer

    inside = rewritten(body, at, name_of)
    taken = loop_names(kernel.body) | {var.name}
    loop = _loop(inside, iterations, taken)
    before, after = list[Statement](), list[Statement]()
    for name, (first, last) in iterations.carries.items():
        before += _copy(first, near[name].name, near[name], var, taken, True)
        after += _copy(near[name].name, last, near[name], var, taken, False)
    whole = parallel([var], [*before, loop, *after])
    found = _of_carries(kernel, whole, own, iterations)
    return replace(found, scratch=(*kernel.scratch, *near.values()))


def _copy(
    source: str, target: str, near: Buffer, var: Var, taken: set[str], is_first: bool
) -> Body:
    """A row's part of a carry into memory of its own, or back."""
    i = Var(fresh("c", taken), near.size)
    far, here = variable(var) * near.size + variable(i), variable(i)
    load, store = (far, here) if is_first else (here, far)
    return parallel([i], [Store(target, store, Load(source, load, near.dtype))])


# The loop over iterations


def _loop(body: Sequence[Statement], iterations: Iterations, taken: set[str]) -> For:
    """The iterations in order, each at its own rows of the stacks."""
    var = Var(fresh("t", taken), iterations.length)
    at = variable(var)
    if iterations.reverse:
        at = at * -1 + (iterations.length - 1)

    def moved(buffer: str, index: Index) -> Index:
        found = iterations.rows.get(buffer)
        return index if found is None else index + at * found.row

    inside = rewritten(body, moved)
    return For(var, Role.SEQUENTIAL, inside)


def _over_wholes(kernel: Kernel, iterations: Iterations) -> Kernel | None:
    """The kernel on buffers of which it goes through all rows; None if it writes one it reads."""
    rows = iterations.rows

    def whole(buffer: Buffer) -> Buffer:
        found = rows.get(buffer.name)
        if found is None:
            return buffer
        return Buffer(found.buffer, buffer.dtype, iterations.sizes[found.buffer])

    body = with_buffers(kernel.body, lambda n: rows[n].buffer if n in rows else n)
    inputs = {b.name: b for b in map(whole, kernel.inputs)}
    outputs = [whole(b) for b in kernel.outputs]
    names = [b.name for b in outputs]
    if len(set(names)) < len(names) or any(n in inputs for n in names):
        return None
    return replace(kernel, inputs=tuple(inputs.values()), outputs=tuple(outputs), body=body)
