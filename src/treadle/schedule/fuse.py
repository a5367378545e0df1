"""Kernels that walk the same rows become one: rows are independent, and stay in the cache.

Two kernels are fused at n rows if each runs in parallel over n equal parts and, of every buffer
that one writes and the other touches, part r is touched in iteration r alone. That holds for chains
of elementwise work, for reductions along rows with what comes before and after, and for matmuls by
blocks of rows with all of these around them.

Results that no other kernel touches stay in memory of the iteration that computes them. Where a
block reads a result again that others need too, it is also in memory its threads share: they would
wait long to read it back from the device's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul

from treadle.kernel.access import accesses, names_in
from treadle.kernel.contraction import size
from treadle.kernel.cost import flops, largest
from treadle.kernel.index import Index, Var, unflatten, variable
from treadle.kernel.nodes import Buffer, For, Kernel, Matmul, Role, Set, Statement, Store, Update
from treadle.kernel.rowsums import RowSums, row_sums_of
from treadle.kernel.target import CPU, Reductions, Target
from treadle.kernel.traverse import loop_names, map_statements, peel, rewritten, substituted, walk
from treadle.schedule.nests import Body, Parts, fresh, fused_kernel, let, parallel, with_own_names
from treadle.schedule.sum_fusion import fused_sums, started, sum_of, with_rows, with_sum, with_terms


def peeled(kernel: Kernel) -> tuple[list[Var], Body]:
    """Variables of the parallel loops around everything, and what is inside."""
    loops, body = peel(kernel.body, Role.PARALLEL)
    return [loop.var for loop in loops], body


def row(count: int) -> Var:
    """The loop over that many parts of a kernel."""
    return Var("row", count)


def in_rows(kernel: Kernel, count: int) -> Body | None:
    """A part of the kernel, by `row(count)`, if its parallel loops divide into so many."""
    whole = row(count)
    around, _ = peel(kernel.body, Role.PARALLEL, most=1)
    if around and around[0].var == whole:
        return around[0].body  # it was fused at as many rows before
    variables, body = peeled(kernel)
    digits = _digits(variables, count)
    if digits is None:
        return None
    taken = {whole.name, *loop_names(body)}
    rests: list[Var] = []  # what is left of each loop
    for var, digit in zip(variables, digits, strict=True):
        is_whole = digit == var.extent
        rests.append(Var("" if is_whole else fresh(var.name, taken), var.extent // digit))
    parts = unflatten(variable(whole), digits) if digits else ()
    values: dict[Var, Index] = {
        var: part * rest.extent + variable(rest)
        for var, rest, part in zip(variables, rests, parts, strict=True)
    }
    return parallel(rests, substituted(body, values))


def _digits(variables: Sequence[Var], count: int) -> list[int] | None:
    """What each loop contributes to so many rows; None where they do not divide."""
    found: list[int] = []
    for var in variables:
        if count % var.extent and var.extent % count:
            return None
        found.append(math.gcd(count, var.extent))
        count //= found[-1]
    return found if count == 1 else None


def row_counts(kernel: Kernel) -> list[int]:
    """Into how many rows a kernel divides: the last axis is not cut, as vectors run along it."""
    variables, body = peeled(kernel)
    counts = list(accumulate((v.extent for v in variables), mul))
    has_loops = any(isinstance(s, (For, Matmul)) for s in body)
    return counts if has_loops or len(counts) < 2 else counts[:-1]


def outer_iterations(kernel: Kernel) -> int:
    """Of the outermost parallel loop, of which each may have outputs in memory of its own."""
    variables, _ = peeled(kernel)
    return variables[0].extent if variables else 1


def spread(kernel: Kernel, wanted: int) -> Kernel:
    """The kernel with its parallel loops as one, as far as threads need iterations to share."""
    counts = row_counts(kernel)
    if len(counts) < 2 or counts[0] >= wanted:
        return kernel
    count = next((n for n in counts if n >= wanted), counts[-1])
    rows = in_rows(kernel, count)
    if rows is None or count == counts[0]:
        return kernel
    return replace(kernel, body=(For(row(count), Role.PARALLEL, rows),))


def _elements(kernel: Kernel) -> int:
    """How many elements a kernel computes each by itself; 0 if it has other loops."""
    variables, body = peeled(kernel)
    is_map = not any(isinstance(s, (For, Matmul)) for s in body)
    return size(variables) if is_map else 0


def _size(kernel: Kernel) -> int:
    return largest((*kernel.buffers, *kernel.scratch))


def footprint(first: Kernel, second: Kernel, count: int) -> int:
    """Bytes that an iteration of both together writes."""
    outputs = {b.name: b for b in (*first.outputs, *second.outputs)}
    scratch = sum(b.nbytes for b in first.scratch + second.scratch)
    return scratch + sum(b.nbytes // count for b in outputs.values())


def is_serial(kernel: Kernel) -> bool:
    """Whether some loop's iterations depend on each other otherwise than by a sum."""
    return any(
        isinstance(loop, For)
        and loop.role is Role.SEQUENTIAL
        and any(isinstance(s, (Set, Store, Update)) for s in loop.body)
        for loop in walk(kernel.body)
    )


def panels(first: Kernel, second: Kernel) -> int:
    """Bytes of right operands that every block of rows reads, if both kernels have matmuls."""
    found: list[dict[str, int]] = []
    for kernel in (first, second):
        sizes = {b.name: b.nbytes for b in kernel.inputs}
        names = {m.right.buffer for m in matmuls_in(kernel.body)}
        found.append({n: sizes[n] for n in names if n in sizes})
    return sum((found[0] | found[1]).values()) if all(found) else 0


def matmuls_in(body: Sequence[Statement]) -> Iterator[Matmul]:
    return (s for s in walk(body) if isinstance(s, Matmul))


def statements_in(body: Sequence[Statement]) -> int:
    return sum(1 for _ in walk(body))


def fused(
    first: Kernel,
    second: Kernel,
    is_needed: bool = True,
    is_single: bool = False,
    target: Target = CPU,
) -> Kernel | None:
    """Both kernels as one, at the most rows at which they can be; None if at none.

    Kernels of which none needs the other are fused only where they read the same rows.
    `is_single` fuses small ones as a single iteration instead; where launches cost more than
    waiting, either is taken at once.
    """
    if statements_in(first.body) + statements_in(second.body) > target.most_statements:
        return None
    if target.fuses_column_sums:
        found = _with_row_sums(first, second, is_needed, target.reductions)
        if found is not None:
            return found
    if len({b.name for b in (*first.buffers, *second.buffers)}) > target.most_buffers:
        return None
    if panels(first, second) > target.panels:
        return None
    if target.fuses_column_sums:
        large = target.fusion.read_once
        found = with_terms(first, second, large) if is_needed else None
        found = found or fused_sums(first, second, large)
        if found is not None:
            return found
    if target.keeps_serial_apart and (is_serial(first) or is_serial(second)):
        return None
    most, wanted = _wanted_rows(first, second, is_single, target)
    joins = is_needed or are_alike(first, second, target)
    for count in wanted:
        if count < most and footprint(first, second, count) > target.cache:
            break
        found = fused_at(first, second, count, joins)
        if found is not None:
            return found
    return None


def _wanted_rows(
    first: Kernel, second: Kernel, is_single: bool, target: Target
) -> tuple[int, list[int]]:
    """The most rows of either kernel, and numbers of rows to fuse them at, the best first."""
    kernels = first, second
    counts = [row_counts(k) for k in kernels]
    most_of = [max(c, default=1) for c in counts]
    both, most = sorted({*counts[0], *counts[1]}, reverse=True), max(most_of)
    is_alone = most_of[0] == 1 and not target.is_spmd  # one iteration already
    is_small = (is_alone or _size(first) < target.small) and _size(second) < target.small
    is_small = is_small and statements_in(first.body) < target.most_small_statements
    if target.is_spmd:
        wanted = _rows_of_blocks(first, second, most_of, target)
    else:
        wanted = [n for n in both if n >= _fewest_rows(kernels, most_of, target)]
    if target.is_small:
        # Unless a row takes less than a launch: then the one that follows is spared.
        cost = flops(first) + flops(second)
        least = max(
            n if _is_large_sum(k, target) else 2 for k, n in zip(kernels, most_of, strict=True)
        )
        wanted += [n for n in both if least <= n < most and cost <= n * target.fusion.row_flops]
        is_small = is_small and cost <= target.fusion.block_flops
    if is_single:
        wanted = []
    if is_small and (is_single or target.has_launches):
        wanted.append(1)
    return most, wanted


def _fewest_rows(kernels: Sequence[Kernel], most_of: Sequence[int], target: Target) -> int:
    """Rows that threads can share: at least as many as sums of much have that is in memory.

    A token's product with weights is such a sum: what follows it may have a row for each head.
    """
    pairs = zip(kernels, most_of, strict=True)
    sums = [min(target.least_rows, n) for k, n in pairs if _is_large_sum(k, target)]
    return max(2, min(target.least_rows, *most_of), *sums)


def _is_large_sum(kernel: Kernel, target: Target) -> bool:
    """Whether a kernel sums much that is in memory, as long as threads are worth sharing it."""
    read, made = largest(kernel.inputs), sum(b.size for b in kernel.outputs)
    if read < target.fusion.summed * made or any(matmuls_in(kernel.body)):
        return False
    if target.has_launches:
        return read >= target.fusion.read_once
    return flops(kernel) >= target.matmuls.shared_flops


def are_alike(first: Kernel, second: Kernel, target: Target) -> bool:
    """Whether two such sums have as many results: a token's products with weights of one shape."""
    rows = [max(row_counts(k), default=1) for k in (first, second)]
    return rows[0] == rows[1] and all(_is_large_sum(k, target) for k in (first, second))


def _rows_of_blocks(first: Kernel, second: Kernel, most_of: list[int], target: Target) -> list[int]:
    """A row that was a block's or a thread's stays one: fewer rows would leave most idle."""
    most, sizes = max(most_of), (_size(first), _size(second))
    is_enough = most >= target.least_rows or max(sizes) <= target.few
    # What is as many elements as there are rows waits for nothing but its row.
    is_enough = is_enough or (most_of[0] == most and most in (sizes[1], _elements(second)))
    wanted = [most] if most > 1 and is_enough else []
    elements = _elements(first)
    if elements > most and elements == _elements(second):
        wanted.append(elements)  # elementwise work of one size, element by element
    if max(sizes) <= target.few and target.least_rows <= min(most_of) < most:
        wanted.append(min(most_of))  # so little that a launch costs more: statistics of a norm
    return wanted


def _with_row_sums(
    first: Kernel, second: Kernel, is_needed: bool, sizes: Reductions
) -> Kernel | None:
    """Rows of a kernel and sums of their columns as one."""
    rows = row_sums_of(first)
    if rows is None:
        found = sum_of(second)
        if found is None or first.scratch or not _has_row_loops(first, sizes.least_columns):
            return None
        parts, inner = size(found.around[:-1]), size(found.loops)
        divided = in_rows(first, parts * inner)
        is_short = parts < sizes.least_row_parts or inner < sizes.least_part_rows
        if divided is None or is_short:
            return None
        return with_sum(started(parts, inner, divided), first, second, sizes)
    whole = with_sum(rows, first, second, sizes)
    if whole is None and not is_serial(second):
        divided = in_rows(second, rows.part.extent * rows.row.extent)
        if divided is not None:
            whole = with_rows(rows, first, second, divided, is_needed)
    return whole


def _has_row_loops(kernel: Kernel, least: int) -> bool:
    """Whether a kernel's iteration goes along a row, one that is long enough to be a warp's."""
    _, body = peeled(kernel)
    return any(isinstance(s, For) and s.var.extent >= least for s in body)


def fused_at(first: Kernel, second: Kernel, count: int, is_needed: bool) -> Kernel | None:
    """Both kernels as one at a number of rows; None if they cannot be."""
    if any(_digits(peeled(k)[0], count) is None for k in (first, second)):
        return None  # nothing is rewritten for rows that one of them has not
    a, b = in_rows(first, count), in_rows(second, count)
    if a is None or b is None:
        return None
    sizes = {b.name: b.size for b in (*first.buffers, *second.buffers)}
    parts = Parts(variable(row(count)), count, sizes)
    if not parts.separate(a, b) or not (is_needed or parts.shared(a, b)):
        return None
    second, moved = with_own_names(second, b, first, a)
    body = parallel([row(count)], _joined(a, moved, parts))
    return fused_kernel(first, second, body, second.scratch)


def _joined(first: Body, second: Body, parts: Parts) -> Body:
    """One after the other; two loops side by side become one where their iterations are apart."""
    last, following = first[-1] if first else None, second[0] if len(second) == 1 else None
    if not isinstance(last, For) or not isinstance(following, For):
        return first + second
    same = last.role is following.role is Role.PARALLEL and last.stop is following.stop is None
    if not same or last.var.extent != following.var.extent:
        return first + second
    body = substituted(following.body, {following.var: variable(last.var)})
    extent = last.var.extent
    iteration = parts.iteration * extent + variable(last.var)
    inner = Parts(iteration, parts.count * extent, parts.sizes)
    if not inner.separate(last.body, body):
        return first + second
    return (*first[:-1], For(last.var, Role.PARALLEL, _joined(last.body, body, inner)))


def localised(kernel: Kernel, names: set[str], rows: RowSums | None = None) -> Kernel:
    """The kernel with some of its outputs, which no other kernel touches, in its own memory.

    An iteration's part of each is enough; of rows by parts that is one number a row.
    """
    around, _ = peel(kernel.body, Role.PARALLEL, most=1)
    iteration, count = Index(), 1
    if rows is not None:
        iteration, count = rows.index, rows.part.extent * rows.row.extent
    elif around:
        iteration, count = variable(around[0].var), around[0].var.extent
    sizes = {b.name: b.size for b in kernel.outputs if rows is None or b.size == count}
    parts = Parts(iteration, count, sizes)
    own = (names & sizes.keys()) - {a.buffer for a in accesses(kernel.body) if not parts.has(a)}
    lengths = {n: sizes[n] // count for n in own}

    def shifted(buffer: str, index: Index) -> Index:
        """Counted from the start of the iteration's part."""
        return index - iteration * lengths[buffer] if buffer in lengths else index

    body = rewritten(kernel.body, shifted) if own else kernel.body
    scratch = tuple(
        Buffer(b.name, b.dtype, lengths[b.name]) for b in kernel.outputs if b.name in own
    )
    outputs = tuple(b for b in kernel.outputs if b.name not in own)
    return replace(kernel, body=body, outputs=outputs, scratch=kernel.scratch + scratch)


def staged(kernel: Kernel, room: int) -> Kernel:
    """The kernel with copies, of so many bytes at most, of what one loop writes and others read."""
    loops, inner = peel(kernel.body, Role.PARALLEL, most=1)
    if not loops:
        return kernel
    var, own = loops[0].var, dict[str, Buffer]()
    for buffer in sorted(kernel.outputs, key=lambda b: b.nbytes):
        part = buffer.size // var.extent
        nbytes = part * buffer.dtype.itemsize
        if part > 1 and nbytes <= room and _is_read_again(inner, buffer, var):
            own[buffer.name] = Buffer(f"{buffer.name}.near", buffer.dtype, part)
            room -= nbytes
    if not own:
        return kernel
    taken = names_in(inner)
    body = map_statements(inner, lambda s: _copied(s, own, var, taken))
    scratch = (*kernel.scratch, *own.values())
    return replace(kernel, body=(replace(loops[0], body=body),), scratch=scratch)


def _is_read_again(body: Sequence[Statement], buffer: Buffer, var: Var) -> bool:
    """Whether only the iteration's part is touched, first by one statement's stores, then read."""
    every = [list(accesses([s], (buffer.name,))) for s in body]
    touching = [found for found in every if found]
    if not touching or any(not a.writes for a in touching[0]):
        return False
    if not any(not a.writes for found in touching[1:] for a in found):
        return False
    stores = (s for s in walk(body) if isinstance(s, (Store, Update)))
    writers = [s for s in stores if s.buffer == buffer.name]
    is_plain = all(isinstance(s, Store) and s.guard is None for s in writers)
    parts = Parts(variable(var), var.extent, {buffer.name: buffer.size})
    return is_plain and all(parts.has(a) for found in touching for a in found)


def _copied(statement: Statement, own: dict[str, Buffer], var: Var, taken: set[str]) -> Body:
    """The statement, reading the copies; a store of one is made twice."""
    if isinstance(statement, For):
        return (statement,)

    def at(buffer: str, index: Index) -> Index:
        return index - variable(var) * own[buffer].size if buffer in own else index

    def name_of(buffer: str) -> str:
        return own[buffer].name if buffer in own else buffer

    (moved,) = rewritten((statement,), at, name_of)
    if not isinstance(statement, Store) or statement.buffer not in own:
        return (moved,)
    assert isinstance(moved, Store)
    named, value = let(fresh("near", taken), moved.value)
    return named, replace(statement, value=value), replace(moved, value=value)
