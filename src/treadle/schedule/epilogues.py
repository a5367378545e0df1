"""Elementwise kernels that a matmul's own warps run: its result need not be read again.

A kernel that walks the elements of a matmul's result, one by one or summing columns in parts, is
what follows each element of a tile while the next one is multiplied. It reads the product as it
would have been stored, so that nothing is rounded otherwise; what nobody else reads is not stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from treadle.base import dtypes
from treadle.kernel.access import accesses, loads_of, map_loads, names_in
from treadle.kernel.geometry import Geometry, Warpgroups
from treadle.kernel.index import Index, Var, data_locals, variable
from treadle.kernel.nodes import (
    Accumulate,
    Apply,
    Convert,
    For,
    Kernel,
    Let,
    Literal,
    Load,
    Local,
    Matmul,
    Matrix,
    Role,
    Statement,
    Store,
    Value,
    standalone_matmul,
)
from treadle.kernel.program import Argument, Call, Phase, Program, Step, calls_in
from treadle.kernel.target import Matmuls
from treadle.kernel.traverse import loop_names, map_statements, map_values, substituted, subvalues
from treadle.kernel.verify import verify
from treadle.schedule.mapping.groups import nest
from treadle.schedule.mapping.shapes import peeled
from treadle.schedule.nests import (
    Body,
    anonymous,
    apply,
    flat_index,
    fresh,
    fused_kernel,
    is_cleared,
    with_buffer_names,
)

SLOW = 12  # operations that a function of a wide float counts as
FUNCTIONS = frozenset("exp log sin cos tanh erf pow div sqrt rsqrt atan2".split())
MOST_SUMS = 2  # of columns, for which a block has shared memory


def fuse_epilogues(program: Program, limits: Matmuls) -> Program:
    """The program with matmuls that compute what the next phase makes of their elements."""
    if not limits.finishes:
        return program
    return _Fusing(program, limits).program()


@dataclass
class _Fusing:
    source: Program
    limits: Matmuls
    # Kernels by what they are made of, and which of its buffers they take; None: nothing is fused.
    made: dict[tuple[object, ...], tuple[Kernel, list[int]] | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reads: dict[str, int] = {}  # calls that read a buffer, and outputs
        self.rewritten: set[str] = set()  # buffers that several calls write
        written: set[str] = set()
        for step in self.source.steps:
            for call in calls_in(step):
                for name in {a.buffer for a in call.read}:
                    self.reads[name] = self.reads.get(name, 0) + 1
                for a in call.written:
                    self.rewritten |= {a.buffer} & written
                    written.add(a.buffer)
        for _, name, _ in self.source.outputs:
            self.reads[name] = self.reads.get(name, 0) + 1
        self.rewritten |= {n for n, _ in self.source.leaves}

    def program(self) -> Program:
        steps: list[Step] = list(self.source.steps)
        gone: set[str] = set()
        for i in range(len(steps) - 1):
            first, second = steps[i], steps[i + 1]
            if isinstance(first, Phase) and isinstance(second, Phase):
                for call in first.calls:
                    found = self._follower(call, first, second)
                    made = None if found is None else self._fused(call, found)
                    if found is None or made is None:
                        continue
                    first = Phase(tuple(made if c is call else c for c in first.calls))
                    second = Phase(tuple(c for c in second.calls if c is not found))
                    gone |= {a.buffer for a in call.written} - {a.buffer for a in made.arguments}
                steps[i : i + 2] = first, second
        kept = tuple(s for s in steps if not isinstance(s, Phase) or s.calls)
        buffers = tuple(b for b in self.source.buffers if b.name not in gone)
        held = self.source.bindings
        bindings = held.restricted(b.buffer for b in held.every if b.buffer not in gone)
        return replace(self.source, steps=kept, buffers=buffers, bindings=bindings)

    def _follower(self, call: Call, first: Phase, second: Phase) -> Call | None:
        """The one call of the next phase that reads a matmul's result, and could run beside it."""
        if standalone_matmul(call.kernel) is None or any(a.row for a in call.arguments):
            return None
        (target,) = (a.buffer for a in call.written)
        readers = [c for c in second.calls if any(a.buffer == target for a in c.read)]
        if len(readers) != 1 or target in self.rewritten:
            return None
        (found,) = readers
        written = {a.buffer for c in first.calls for a in c.written}
        touched = {a.buffer for c in first.calls for a in c.arguments}
        own_read, own_written = ({a.buffer for a in s} for s in (found.read, found.written))
        is_ready = own_read & written == {target} and not own_written & touched
        # What others of its phase write it does not touch, as no calls of one phase do.
        is_plain = not own_written & own_read and not any(a.row for a in found.arguments)
        return found if is_ready and is_plain else None

    def _fused(self, call: Call, follower: Call) -> Call | None:
        """Both as one call; equal layers have one kernel, which is made once."""
        (target,) = (a.buffer for a in call.written)
        is_kept = self.reads[target] > 1
        every = [a.buffer for a in (*call.arguments, *follower.arguments)]
        names = list(dict.fromkeys(every))
        key = (id(call.kernel), id(follower.kernel), *map(names.index, every), is_kept)
        if key not in self.made:
            first, second = (_with_arguments(c) for c in (call, follower))
            made = _Epilogue(first, second, target, self.limits, is_kept).kernel()
            taken = [] if made is None else [names.index(b.name) for b in made.buffers]
            self.made[key] = None if made is None else (anonymous(made), taken)
        found = self.made[key]
        if found is None:
            return None
        kernel, positions = found
        origins = tuple(dict.fromkeys((*call.origins, *follower.origins)))
        return Call(kernel, tuple(Argument(names[i]) for i in positions), origins)


def _with_arguments(call: Call) -> Kernel:
    """The kernel with its buffers named as the program's."""
    buffers = zip(call.kernel.buffers, call.arguments, strict=True)
    return with_buffer_names(call.kernel, {b.name: a.buffer for b, a in buffers})


@dataclass(frozen=True, slots=True)
class _Walk:
    """How a kernel walks a matrix: loops of the grid, those of a part, and an element's index."""

    lets: Body
    outer: Var
    column: Var
    inner: Var | None
    before: Body
    element: Body
    after: Body

    @property
    def at(self) -> Index:
        rows = [self.outer, *([] if self.inner is None else [self.inner])]
        return flat_index([*rows, self.column])


@dataclass(frozen=True, slots=True)
class _Epilogue:
    """A matmul and what follows it, by names of the program's buffers."""

    first: Kernel
    second: Kernel
    target: str
    limits: Matmuls
    is_kept: bool

    def kernel(self) -> Kernel | None:
        """Both as one, mapped; None where they cannot be, or should not."""
        found = standalone_matmul(self.first)
        if found is None or found[0] or self.second.scratch:
            return None
        matmul = found[1]
        if matmul.adds or matmul.bias is not None or matmul.scales or not self._fits(matmul):
            return None
        walk = _walk_of(self.second, matmul)
        if walk is None or not self._follows(walk) or not self._pays(walk, matmul):
            return None
        return self._made(walk, matmul)

    def _fits(self, matmul: Matmul) -> bool:
        """Whether matrices lie in lines that are copied, and the result in rows."""
        types = {b.name: b.dtype for b in self.first.buffers}
        narrow = {types[m.buffer] for m in matmul.matrices}
        m, n = matmul.target.rows.count, matmul.target.columns.count
        target = matmul.target
        in_rows = (target.rows.stride, target.columns.stride) == (n, 1) and target.index.same(
            Index()
        )
        is_narrow = len(narrow) == 1 and next(iter(narrow)) in (dtypes.bfloat16, dtypes.float16)
        blocks = -(-m // Warpgroups.ROWS) * -(-n // Warpgroups.COLUMNS)
        is_large = blocks >= self.limits.finished_blocks and n % Warpgroups.LANES == 0
        return in_rows and is_narrow and is_large and all(map(_in_lines, matmul.matrices[1:]))

    def _follows(self, walk: _Walk) -> bool:
        """Whether an element of the result is read where it is walked, and nothing else of it."""
        at = walk.at
        body = (*walk.lets, *walk.before, *walk.element, *walk.after)
        every = [a for a in accesses(body) if a.buffer == self.target]
        own = [a for a in accesses(walk.element) if a.buffer == self.target]
        is_plain = len(own) == len(every) > 0 and all(a.index.same(at) for a in own)
        indices = [a.index for a in accesses(body)]
        return is_plain and not any(data_locals(i) for i in indices)

    def _pays(self, walk: _Walk, matmul: Matmul) -> bool:
        """Whether what is saved is worth it, and warps have time for the rest."""
        depth, passes = matmul.left.columns.count, 1 if self.is_kept else 2
        work = sum(map(_work, walk.element))
        is_shallow = depth <= passes * self.limits.finished_depth
        return is_shallow and work * self.limits.finished_work <= depth

    def _made(self, walk: _Walk, matmul: Matmul) -> Kernel:
        inner = (*walk.before, *walk.element, *walk.after)
        names = names_in((*walk.lets, *inner))
        total, rounded = fresh("sum", names), fresh("rounded", names)
        taken = loop_names(self.second.body)
        depth = Var(fresh("depth", taken), matmul.left.columns.count)
        dtype = next(b.dtype for b in self.first.outputs)
        row, local = self._row(walk), Local(rounded, dtype)

        def read(matrix: Matrix, down: Index, across: Index) -> Value:
            at = matrix.index + down * matrix.rows.stride + across * matrix.columns.stride
            return Convert(Load(matrix.buffer, at, dtype), dtypes.float32)

        left = read(matmul.left, row, variable(depth))
        right = read(matmul.right, variable(depth), variable(walk.column))
        step = Accumulate(total, "add", apply("mul", left, right))
        product: list[Statement] = [
            Let(total, Literal(0, dtypes.float32)),
            *nest([depth], Role.SEQUENTIAL, [step]),
            Let(rounded, Convert(Local(total, dtypes.float32), dtype)),
        ]
        product += [Store(self.target, walk.at, local)] if self.is_kept else []

        def known(load: Load) -> Value:
            return local if load.buffer == self.target else load

        element = map_statements(
            walk.element, lambda s: [map_values(s, lambda v: map_loads(v, known))]
        )
        body: Body = (*product, *element)
        if walk.inner is not None:
            body = (*walk.before, *nest([walk.inner], Role.SEQUENTIAL, body), *walk.after)
        loops = nest([walk.outer, walk.column], Role.GRID, body, Warpgroups.LANES)
        sums = len({s.local for s in walk.element if isinstance(s, Accumulate)})
        template = Warpgroups(walk.outer, walk.inner, walk.column, depth, rounded, sums)
        geometry = Geometry(Warpgroups.THREADS, template=template)
        both = fused_kernel(self.first, self.second, (*walk.lets, *loops))
        kept = tuple(b for b in both.outputs if self.is_kept or b.name != self.target)
        inputs = tuple(b for b in both.inputs if b.name != self.target)
        return verify(replace(both, inputs=inputs, outputs=kept, geometry=geometry))

    def _row(self, walk: _Walk) -> Index:
        return flat_index([walk.outer, *([] if walk.inner is None else [walk.inner])])


def _in_lines(matrix: Matrix) -> bool:
    """Whether lines of a matrix lie at multiples of 16 bytes."""
    steps = sorted((matrix.rows.stride, matrix.columns.stride))
    is_plain = not matrix.index.terms and not matrix.rows.listed and not matrix.columns.listed
    pack = Warpgroups.LANES
    return is_plain and steps[0] == 1 and steps[1] % pack == 0 == matrix.index.offset % pack


def _walk_of(kernel: Kernel, matmul: Matmul) -> _Walk | None:
    """How a kernel walks a matmul's result: by rows and columns, or by parts of rows."""
    m, n = matmul.target.rows.count, matmul.target.columns.count
    lets, loops, body = peeled(kernel)
    extents = [v.extent for v in loops]
    if extents == [m * n]:
        taken = loop_names(kernel.body)
        row, column = Var(fresh("row", taken), m), Var(fresh("column", taken), n)
        body = substituted(body, {loops[0]: flat_index([row, column])})
        loops = row, column
    if len(loops) != 2 or loops[1].extent != n:
        return None
    outer, column = loops
    if outer.extent == m:
        return _Walk(lets, outer, column, None, (), body, ()) if _are_elements(body) else None
    return _parts_of(lets, outer, column, body, m)


def _parts_of(lets: Body, outer: Var, column: Var, body: Body, m: int) -> _Walk | None:
    at = [i for i, s in enumerate(body) if isinstance(s, For)]
    if len(at) != 1:
        return None
    loop, before, after = body[at[0]], body[: at[0]], body[at[0] + 1 :]
    assert isinstance(loop, For)
    is_whole = loop.stop is None and outer.extent * loop.var.extent == m
    if not is_whole or loop.var.extent % Warpgroups.ROWS or loop.role is not Role.SEQUENTIAL:
        return None
    sums = [s for s in loop.body if isinstance(s, Accumulate)]
    are_sums = all(s.op == "add" and is_cleared(before, s) for s in sums)
    are_wide = all(s.value.dtype is dtypes.float32 for s in sums)
    locals_ = {s.local for s in sums}
    is_plain = len(locals_) == len(sums) == len(before) <= MOST_SUMS and are_sums and are_wide
    rest = tuple(s for s in loop.body if not isinstance(s, Accumulate))
    if not is_plain or not _are_elements(rest) or not _are_elements(after):
        return None
    if any(locals_ & _locals(s) for s in loop.body):
        return None  # a sum is looked at before it is whole
    return _Walk(lets, outer, column, loop.var, before, loop.body, after)


def _are_elements(body: Sequence[Statement]) -> bool:
    """Whether statements name values and store them, whatever is found."""
    return all(
        isinstance(s, Let) or (isinstance(s, Store) and s.guard is None) for s in body
    ) and any(isinstance(s, Store) for s in body)


def _locals(statement: Statement) -> set[str]:
    values = _values(statement)
    return {v.name for value in values for v in subvalues(value) if isinstance(v, Local)}


def _values(statement: Statement) -> Iterator[Value]:
    if isinstance(statement, Let | Store | Accumulate):
        yield statement.value


def _work(statement: Statement) -> int:
    """Operations of a thread on an element: a function of a wide float takes several."""
    every = [v for value in _values(statement) for v in subvalues(value)]
    slow = sum(isinstance(v, Apply) and v.op in FUNCTIONS and not v.dtype.is_narrow for v in every)
    return (
        sum(isinstance(v, Apply | Convert) for v in every)
        + slow * (SLOW - 1)
        + len(loads_of(statement))
    )
