"""Kernels that walk the same rows become one: rows are independent, and stay in the cache.

Two kernels are fused at n rows if each runs in parallel over n equal parts and, of every buffer
that one writes and the other touches, part r is touched in turn r alone. That holds for chains of
elementwise work, for reductions along rows with what comes before and after, and for products by
blocks of rows with all of these around them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul

from treadle.kernel.access import accesses, is_local
from treadle.kernel.cost import flops
from treadle.kernel.index import Index, Var, unflatten, variable
from treadle.kernel.nodes import (
    Buffer,
    For,
    Kernel,
    Multiply,
    Role,
    Set,
    Statement,
    Store,
    Update,
)
from treadle.kernel.rowsums import row_sums_of
from treadle.kernel.target import CPU, Reductions, Target
from treadle.kernel.traverse import loop_names, peel, rewrite, substituted, walk
from treadle.schedule.nests import Parts, fresh, joined_kernel, nest, with_own_names
from treadle.schedule.rowsums import started, with_rows, with_sum
from treadle.schedule.sum_fusion import fused_sums, sum_of, with_producer


@dataclass(frozen=True, slots=True)
class Rows:
    """A kernel's statements for one of its parts."""

    var: Var
    body: tuple[Statement, ...]


def peeled(kernel: Kernel) -> tuple[list[Var], tuple[Statement, ...]]:
    """Variables of the parallel loops around everything, and what is inside."""
    loops, body = peel(kernel.body, Role.PARALLEL)
    return [loop.var for loop in loops], body


def in_rows(kernel: Kernel, turns: int) -> Rows | None:
    """The kernel as that many parts, if its parallel loops divide so."""
    turn = Var("turn", turns)
    first = kernel.body[0] if len(kernel.body) == 1 else None
    if isinstance(first, For) and first.var == turn and first.role is Role.PARALLEL:
        return Rows(turn, first.body)  # it was fused at as many rows before
    variables, body = peeled(kernel)
    taken = {"turn", *loop_names(body)}
    digits: list[int] = []
    inner: list[tuple[Var, Var | None, int]] = []  # the loop, what is left of it, its length
    left = turns
    for var in variables:
        if left % var.extent == 0:
            digits.append(var.extent)
            left //= var.extent
            inner.append((var, None, 1))
        elif var.extent % left == 0:
            digits.append(left)
            length = var.extent // left
            left = 1
            inner.append((var, Var(fresh(var.name, taken), length), length))
        else:
            return None
    if left != 1:
        return None
    parts = unflatten(variable(turn), digits) if digits else ()
    values: dict[Var, Index] = {}
    for (var, rest, length), part in zip(inner, parts, strict=True):
        values[var] = part * length if rest is None else part * length + variable(rest)
    loops = [rest for _, rest, _ in inner if rest is not None]
    return Rows(turn, nest(loops, Role.PARALLEL, substituted(body, values)))


def turn_counts(kernel: Kernel) -> list[int]:
    """Into how many rows a kernel divides: the last axis stays whole, as vectors run along it."""
    variables, body = peeled(kernel)
    products = list(accumulate((v.extent for v in variables), mul))
    has_loops = any(isinstance(s, (For, Multiply)) for s in body)
    return products if has_loops or len(products) < 2 else products[:-1]


def outer_turns(kernel: Kernel) -> int:
    """Turns of the outermost parallel loop, at which outputs are made a turn's own."""
    variables, _ = peeled(kernel)
    return variables[0].extent if variables else 1


def spread(kernel: Kernel, wanted: int) -> Kernel:
    """The kernel with its parallel loops as one, as far as threads need iterations to share."""
    counts = turn_counts(kernel)
    if len(counts) < 2 or counts[0] >= wanted:
        return kernel
    turns = next((n for n in counts if n >= wanted), counts[-1])
    rows = in_rows(kernel, turns)
    if rows is None or turns == counts[0]:
        return kernel
    return replace(kernel, body=(For(rows.var, Role.PARALLEL, rows.body),))


def _elements(kernel: Kernel) -> int:
    """How many elements a kernel computes each by itself; 0 if it has other loops."""
    variables, body = peeled(kernel)
    is_map = not any(isinstance(s, (For, Multiply)) for s in body)
    return math.prod(v.extent for v in variables) if is_map else 0


def work(kernel: Kernel) -> int:
    return max((b.size for b in (*kernel.buffers, *kernel.scratch)), default=0)


def footprint(first: Kernel, second: Kernel, turns: int) -> int:
    """Bytes that a turn of both together writes."""
    outputs = {b.name: b for b in (*first.outputs, *second.outputs)}
    scratch = sum(b.nbytes for b in first.scratch + second.scratch)
    return scratch + sum(b.nbytes // turns for b in outputs.values())


def is_serial(kernel: Kernel) -> bool:
    """Whether some loop's iterations depend on each other otherwise than by a sum."""
    return any(
        isinstance(loop, For)
        and loop.role is Role.SEQUENTIAL
        and any(isinstance(s, (Set, Store, Update)) for s in loop.body)
        for loop in walk(kernel.body)
    )


def panels(first: Kernel, second: Kernel) -> int:
    """Bytes of right operands that every block of rows reads, if both kernels have products."""
    found: list[dict[str, int]] = []
    for kernel in (first, second):
        sizes = {b.name: b.nbytes for b in kernel.inputs}
        names = {m.right.buffer for m in products_in(kernel.body)}
        found.append({n: sizes[n] for n in names if n in sizes})
    return sum((found[0] | found[1]).values()) if all(found) else 0


def products_in(body: Sequence[Statement]) -> Iterator[Multiply]:
    return (s for s in walk(body) if isinstance(s, Multiply))


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
        whole = _with_row_sums(first, second, is_needed, target.reductions)
        if whole is not None:
            return whole
    if len({b.name for b in (*first.buffers, *second.buffers)}) > target.most_buffers:
        return None
    if panels(first, second) > target.panels:
        return None
    if target.fuses_column_sums:
        large = target.fusion.read_once
        found = with_producer(first, second, large) if is_needed else None
        found = found or fused_sums(first, second, large)
        if found is not None:
            return found
    if target.keeps_serial_apart and (is_serial(first) or is_serial(second)):
        return None
    counts = [turn_counts(k) for k in (first, second)]
    both = sorted({*counts[0], *counts[1]}, reverse=True)
    least = min(target.least_rows, *(max(c, default=1) for c in counts))
    is_alone = max(counts[0], default=1) == 1 and not target.is_spmd  # one iteration already
    is_small = (is_alone or work(first) < target.small) and work(second) < target.small
    is_small = is_small and statements_in(first.body) < target.most_small_statements
    wanted = [n for n in both if n >= max(2, least)]
    if target.is_spmd:
        # A row that was a block's or a thread's stays one: fewer rows would leave most idle.
        most = max(both, default=1)
        is_enough = most >= target.least_rows or max(work(first), work(second)) <= target.few
        # What is as many elements as there are rows waits for nothing but its row.
        is_enough = is_enough or (max(counts[0], default=1) == work(second) == most)
        wanted = [most] if most > 1 and is_enough else []
        sizes = {_elements(k) for k in (first, second)}
        if len(sizes) == 1 and (size := sizes.pop()) > most:
            wanted = [*wanted, size]  # elementwise work of one size, element by element
    if target.is_small:
        # Unless a row takes less than a launch: then the one that follows is spared.
        cost = flops(first) + flops(second)
        wanted += [n for n in both if 1 < n < most and cost <= n * target.fusion.row_flops]
        is_small = is_small and cost <= target.fusion.block_flops
    if is_single:
        wanted = []
    if is_small and (is_single or target.has_launches):
        wanted = [*wanted, 1]
    for turns in wanted:
        if turns < max(both, default=1) and footprint(first, second, turns) > target.cache:
            break
        found = _fused_at(first, second, turns, is_needed)
        if found is not None:
            return found
    return None


def _with_row_sums(
    first: Kernel, second: Kernel, is_needed: bool, sizes: Reductions
) -> Kernel | None:
    """Rows of a kernel and sums of their columns as one."""
    rows = row_sums_of(first)
    if rows is not None and not is_needed:
        return with_sum(rows, first, second, sizes)  # of what the rows read too
    if not is_needed:
        return None
    if rows is None:
        found = sum_of(second)
        if found is None or first.scratch or not _has_row_loops(first, sizes.least_columns):
            return None
        parts = math.prod(v.extent for v in found.around[:-1])
        inner = math.prod(v.extent for v in found.loops)
        walked = in_rows(first, parts * inner)
        is_short = parts < sizes.least_row_parts or inner < sizes.least_part_rows
        if walked is None or is_short:
            return None
        rows = started(parts, inner, walked.body, walked.var)
        return with_sum(rows, first, second, sizes)
    whole = with_sum(rows, first, second, sizes)
    if whole is None and not is_serial(second) and sum_of(second) is None:
        walked = in_rows(second, rows.part.extent * rows.row.extent)
        if walked is not None:
            whole = with_rows(rows, first, second, walked.body, walked.var)
    return whole


def _has_row_loops(kernel: Kernel, least: int) -> bool:
    """Whether a kernel's iteration walks a row, one that is long enough to be a warp's."""
    _, body = peeled(kernel)
    return any(isinstance(s, For) and s.var.extent >= least for s in body)


def _fused_at(first: Kernel, second: Kernel, turns: int, is_needed: bool) -> Kernel | None:
    a, b = in_rows(first, turns), in_rows(second, turns)
    if a is None or b is None:
        return None
    second, moved = with_own_names(second, b.body, first, a.body)
    sizes = {b.name: b.size for b in (*first.buffers, *second.buffers)}
    parts = Parts(variable(a.var), turns, sizes)
    if not parts.separate(a.body, moved):
        return None
    if not is_needed and not _share_parts(a.body, moved, parts):
        return None
    body = nest([a.var], Role.PARALLEL, _joined(a.body, moved, parts))
    return joined_kernel(first, second, body, second.scratch)


def _share_parts(first: Sequence[Statement], second: Sequence[Statement], parts: Parts) -> bool:
    """Whether both touch some buffer, each iteration its own part alone."""
    own: list[set[str]] = []
    for body in (first, second):
        every = list(accesses(body))
        own.append({a.buffer for a in every} - {a.buffer for a in every if not parts.has(a)})
    return bool(own[0] & own[1])


def _joined(
    first: tuple[Statement, ...], second: tuple[Statement, ...], parts: Parts
) -> tuple[Statement, ...]:
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


def localised(kernel: Kernel, names: set[str]) -> Kernel:
    """The kernel with some of its outputs, which no other kernel touches, in memory of a thread."""
    variables, body = peeled(kernel)
    if not names:
        return kernel
    turn = variables[0] if len(variables) >= 1 else Var("turn", 1)
    if len(variables) > 1:
        body = kernel.body[0].body if isinstance(kernel.body[0], For) else body
    every = list(accesses(body))
    sizes = {b.name: b.size for b in kernel.outputs}
    own = {
        n
        for n in names
        if all(is_local(a, variable(turn), sizes[n], turn.extent) for a in every if a.buffer == n)
    }
    moved = tuple(_shifted(s, turn, {n: sizes[n] // turn.extent for n in own}) for s in body)
    loops: tuple[Statement, ...] = (For(turn, Role.PARALLEL, moved),) if variables else moved
    scratch = tuple(
        Buffer(b.name, b.dtype, b.size // turn.extent) for b in kernel.outputs if b.name in own
    )
    outputs = tuple(b for b in kernel.outputs if b.name not in own)
    return replace(kernel, body=loops, outputs=outputs, scratch=kernel.scratch + scratch)


def _shifted(statement: Statement, turn: Var, parts: dict[str, int]) -> Statement:
    """Places in some buffers counted from the start of the turn's part."""
    return rewrite(
        statement,
        lambda buffer, index: index - variable(turn) * parts[buffer] if buffer in parts else index,
    )
