"""The last shaping of a kernel: values held in registers, loops merged, lanes chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from treadle.kernel.access import (
    accesses,
    changed_in,
    loads_of,
    locals_in,
    map_loads,
    names_in,
    read_in,
    written_in,
)
from treadle.kernel.contraction import size
from treadle.kernel.index import Index, Var, variable
from treadle.kernel.nodes import (
    Accumulate,
    Apply,
    Buffer,
    Convert,
    For,
    Guarded,
    Kernel,
    Let,
    Load,
    Local,
    Matmul,
    Position,
    Role,
    Statement,
    Store,
    Update,
    Value,
    Within,
)
from treadle.kernel.races import conflicts_in
from treadle.kernel.target import Fusion, Target
from treadle.kernel.traverse import (
    indices_of,
    loop_names,
    loop_variables,
    map_statements,
    map_values,
    replace_value,
    substituted,
    subvalues,
    walk,
    with_locals,
)
from treadle.kernel.traverse import nested as nested_loops
from treadle.schedule.nests import Body, is_sum, let, moves, nested
from treadle.schedule.phases import in_phases
from treadle.schedule.split import split, with_blocks


def finished(kernel: Kernel, target: Target) -> Kernel:
    """The kernel as it is rendered; loops get lanes where threads do not take their place."""
    counter = _Names(names_in(kernel.body))
    body = map_statements(forwarded(kernel.body, counter, {}), _merged)
    kernel = without_dead_scratch(replace(kernel, body=body))
    merged = map_statements(kernel.body, _merged)
    if target.is_spmd:
        return replace(kernel, body=merged)
    taken = names_in(merged) | loop_names(merged)
    body = tuple(split(in_phases(merged, taken, target.fusion), taken, target.fusion))
    kernel = vectorised(replace(kernel, body=body), target.fusion)
    taken = names_in(kernel.body) | loop_names(kernel.body)
    body = with_blocks(kernel.body, taken, target.reductions)
    counter.taken |= taken
    return replace(kernel, body=hoisted(body, counter))


class _Names:
    def __init__(self, taken: set[str]):
        self.taken, self.count = taken, 0

    def fresh(self, stem: str) -> str:
        while True:
            self.count += 1
            name = f"{stem}{self.count}"
            if name not in self.taken:
                return name


Known = dict[tuple[str, Index], Local]


def forwarded(body: Sequence[Statement], names: _Names, known: Known) -> list[Statement]:
    """What is stored and then loaded from the same element stays in a register.

    What is known already may be used, inside loops too.
    """
    found: list[Statement] = []

    def in_register(load: Load) -> Value:
        return known.get((load.buffer, load.index), load)

    for statement in body:
        if isinstance(statement, For):
            _forget(known, statement.body)
            inner = tuple(forwarded(statement.body, names, dict(known)))
            found.append(replace(statement, body=inner))
            continue
        if known:
            statement = map_values(statement, lambda value: map_loads(value, in_register))
        if isinstance(statement, Store) and statement.guard is None:
            value = statement.value
            if not isinstance(value, Local):
                named, value = let(names.fresh("v"), value)
                found.append(named)
            _forget(known, [statement])
            known[statement.buffer, statement.index] = value
            found.append(replace(statement, value=value))
            continue
        _forget(known, [statement])
        found.append(statement)
    return found


def _forget(known: Known, body: Sequence[Statement]) -> None:
    """Elements that some statements may have changed, and locals that they set."""
    if not known:
        return
    written = written_in(body)
    changed = changed_in(body) | names_in(body)
    for key in [k for k, v in known.items() if k[0] in written or v.name in changed]:
        del known[key]


def without_dead_scratch(kernel: Kernel) -> Kernel:
    """The kernel without scratch that is written but never read."""
    if not kernel.scratch:
        return kernel
    read = read_in(kernel.body)
    read |= {s.buffer for s in walk(kernel.body) if isinstance(s, Update)}
    dead = {b.name for b in kernel.scratch} - read
    if not dead:
        return kernel

    def living(s: Statement) -> list[Statement]:
        match s:
            case For():
                is_dead = not s.body
            case Matmul(target):
                is_dead = target.buffer in dead
            case _:
                is_dead = isinstance(s, Store) and s.buffer in dead
        return [] if is_dead else [s]

    scratch = tuple(b for b in kernel.scratch if b.name not in dead)
    return replace(kernel, body=map_statements(kernel.body, living), scratch=scratch)


# Loops


def _merged(outer: Statement) -> list[Statement]:
    """Two loops, one right inside the other, become one where every index counts both in order."""
    inner = outer.body[0] if isinstance(outer, For) and len(outer.body) == 1 else None
    if not isinstance(outer, For) or not isinstance(inner, For):
        return [outer]
    is_whole = outer.stop is None and inner.stop is None
    if inner.role is not outer.role or not is_whole or not _counts_together(outer.var, inner):
        return [outer]
    both = Var(f"{outer.var.name}{inner.var.name}", outer.var.extent * inner.var.extent)
    # Every index has the pair as factor · (outer · extent + inner): the inner one stands for both.
    values = {outer.var: Index(), inner.var: variable(both)}
    return [For(both, outer.role, substituted(inner.body, values))]


def _counts_together(outer: Var, inner: For) -> bool:
    if any(isinstance(s, Matmul) for s in inner.body):
        return False
    for index in indices_of(inner.body):
        outer_step, step = index.factor_of(outer), index.factor_of(inner.var)
        if outer_step is None or step is None or outer_step != step * inner.var.extent:
            return False
    return True


def vectorised(kernel: Kernel, sizes: Fusion) -> Kernel:
    """Loops with roles: lanes along the innermost loop that goes through memory in order.

    Lanes run in lockstep, so they may not meet in memory. Scratch in which they would, and which
    only this loop uses, becomes private: an iteration reads nothing there that it did not write.
    """
    writer = _Lanes(kernel, sizes)
    body = map_statements(kernel.body, writer.with_lanes)
    scratch = tuple(writer.private.get(b.name, b) for b in kernel.scratch)
    return replace(kernel, body=body, scratch=scratch)


class _Lanes:
    def __init__(self, kernel: Kernel, sizes: Fusion):
        self.sizes = sizes
        self.scratch = {b.name: b for b in kernel.scratch}
        self.uses = Counter(a.buffer for a in accesses(kernel.body))
        self.private: dict[str, Buffer] = {}

    def with_lanes(self, statement: Statement) -> list[Statement]:
        if not isinstance(statement, For):
            return [statement]
        rows = self._of_few_columns(statement)
        if rows is not None and self._are_apart(rows):
            return [replace(rows, role=Role.VECTOR)]
        if self._is_lanes(statement):
            return [replace(statement, role=Role.VECTOR)]
        return [statement]

    def _of_few_columns(self, loop: For) -> For | None:
        """A loop over sums of few terms, too few for lanes along them, with those in order."""
        if loop.role is not Role.PARALLEL or loop.var.extent < self.sizes.least_rows:
            return None
        inside = [loops for _, loops in nested_loops(loop.body)]
        is_few = all(size([s.var for s in loops]) <= self.sizes.few_columns for loops in inside)
        has_lanes = any(s.role is Role.VECTOR for loops in inside for s in loops)
        has_sums = any(isinstance(s, Accumulate) for s in walk(loop.body))
        is_short = len(list(accesses(loop.body))) <= self.sizes.most_row_accesses
        if not (has_lanes and has_sums and is_few and is_short):
            return None
        found = replace(loop, body=map_statements(loop.body, _in_order))
        return found if _takes_lanes(found) else None

    def _is_lanes(self, loop: For) -> bool:
        if loop.role is Role.PARALLEL:
            return _takes_lanes(loop) and self._are_apart(loop)
        return _sums_in_lanes(loop, self.sizes.least_lanes)

    def _are_apart(self, loop: For) -> bool:
        """Whether the iterations meet nowhere, once some scratch is private."""
        shared = conflicts_in(loop)
        used = Counter(a.buffer for a in accesses(loop.body))
        if any(n not in self.scratch or used[n] != self.uses[n] for n in shared):
            return False
        lanes = self.sizes.most_private_lanes
        while lanes * sum(self.scratch[n].nbytes for n in shared) > self.sizes.private_bytes:
            lanes //= 2
        if lanes < self.sizes.fewest_private_lanes:
            return False
        self.private |= {n: replace(self.scratch[n], lanes=lanes) for n in shared}
        return True


def _in_order(statement: Statement) -> list[Statement]:
    if isinstance(statement, For) and statement.role is Role.VECTOR:
        return [replace(statement, role=Role.SEQUENTIAL)]
    return [statement]


def _takes_lanes(loop: For) -> bool:
    """Whether a parallel loop may become lanes: nothing inside it is parallel, or lanes already."""
    return not any(
        isinstance(s, Matmul) or (isinstance(s, For) and s.role in (Role.PARALLEL, Role.VECTOR))
        for s in walk(loop.body)
    )


def _sums_in_lanes(loop: For, least: int) -> bool:
    """Whether a loop only accumulates, in order of memory: its iterations can be lanes."""
    if loop.var.extent < least or not is_sum(replace(loop, stop=None)):
        return False
    _, body = nested(loop)
    steps = [load.index.factor_of(loop.var) for s in body for load in loads_of(s)]
    return 1 in steps and all(step in (0, 1) for step in steps)


# What does not change inside a loop is computed before it.


def hoisted(body: Sequence[Statement], names: _Names) -> Body:
    """Loops, each after what is the same in all of its iterations."""

    def lifted(statement: Statement) -> list[Statement]:
        if not isinstance(statement, For):
            return [statement]
        lifter = _Lifter(statement.var, statement.body, names)
        inner = _without_aliases([lifter.without_fixed(s) for s in statement.body], lifter)
        before = [Let(name, value) for value, name in lifter.lifted.items()]
        return [*before, replace(statement, body=inner)]

    return map_statements(body, lifted)


def _without_aliases(body: list[Statement], lifter: _Lifter) -> tuple[Statement, ...]:
    """Statements that name what was lifted out of a loop as it is named there.

    A name of a loop's own would be one of each lane, and what it is an index of read lane by lane.
    """
    lifted, changed = set(lifter.lifted.values()), changed_in(body)
    names: dict[str, str] = {}
    for s in body:
        if isinstance(s, Let) and isinstance(s.value, Local) and s.value.name in lifted:
            names |= {s.local: s.value.name} if s.local not in changed else {}
    left = [s for s in body if not (isinstance(s, Let) and s.local in names)]
    return tuple(with_locals(left, names)) if names else tuple(body)


class _Lifter:
    """Finds what a loop recomputes: the same in each of its iterations."""

    def __init__(self, var: Var, body: Sequence[Statement], names: _Names):
        self.var, self.names = var, names
        self.variables = {var, *loop_variables(body)}
        self.locals = changed_in(body) | names_in(body)
        self.written = written_in(body)
        self.lifted: dict[Value, str] = {}

    def without_fixed(self, statement: Statement) -> Statement:
        is_guarded = isinstance(statement, Store) and statement.guard is not None
        if is_guarded or isinstance(statement, For):
            return statement
        return map_values(statement, lambda value: replace_value(value, self.chosen))

    def chosen(self, value: Value) -> Value | None:
        """What stands for a value: a name, or itself where a guard holds it back."""
        if isinstance(value, (Load, Apply, Convert, Guarded)) and self.is_fixed(value):
            if value not in self.lifted:
                self.lifted[value] = self.names.fresh("h")
            return Local(self.lifted[value], value.dtype)
        return value if isinstance(value, Guarded) else None

    def is_fixed(self, value: Value) -> bool:
        if locals_in(value) & self.locals:
            return False
        for part in subvalues(value):
            match part:
                case Load(buffer) if buffer in self.written:
                    return False
                case Load(_, index) | Position(index) | Within(index):
                    if any(moves(index, v) for v in self.variables):
                        return False
                case _:
                    pass
        return True
