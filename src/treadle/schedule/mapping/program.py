"""The pass: every kernel of a program mapped to a GPU, and phases that are one launch.

A launch costs more than what a small kernel does. Where all of a program is small, its kernels are
parts of one function, a cooperative launch: every block takes blocks of the phase's kernels in
turn, then waits until all have arrived. Such a wait is shorter than a launch, and kernels of one
phase run side by side.

Narrow floats that only smooth arithmetic uses may stay as exact as they are computed. But a
comparison must see the same bits wherever a value is computed: if a program compares narrow floats
that it computes, all of its kernels round after every op.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from treadle.base import dtypes
from treadle.kernel import cost
from treadle.kernel.access import changed_in
from treadle.kernel.arithmetic import SMOOTH
from treadle.kernel.launch import CooperativeLaunch
from treadle.kernel.mapped import PACK, blocks_of, column_bytes, geometry_of, shared_bytes
from treadle.kernel.nodes import (
    Accumulate,
    Apply,
    Convert,
    Kernel,
    Let,
    Literal,
    Local,
    Set,
    Statement,
    Store,
    Value,
    library_call_of,
    standalone_matmul,
)
from treadle.kernel.program import Phase, Program, Step
from treadle.kernel.scatter import is_scatter
from treadle.kernel.target import Mapping, Target
from treadle.kernel.traverse import operands_of, subvalues, values_of, walk
from treadle.kernel.verify_mapping import verify_mapping
from treadle.kernel.warpgroups import template_of
from treadle.schedule.mapping.groups import PACKED
from treadle.schedule.mapping.kernels import map_kernel
from treadle.schedule.mapping.packed import lane_name


def map_to(program: Program, target: Target) -> Program:
    """The program with its kernels as the threads of a GPU run them.

    A kernel that is called in a cooperative launch and outside of one becomes two.
    """
    mapping = target.mapping
    assert mapping is not None, f"{target.name} has no threads to map loops to"
    runs = cooperative_runs(program, mapping) if mapping.is_cooperative else ()
    mapper = _Mapper(program, mapping, runs)
    steps = mapper.steps(program.steps, ())
    mapped = replace(program, steps=steps)
    kernels = mapped.distinct()
    numbers = {id(k): i for i, k in enumerate(kernels)}

    def renumbered(phase: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        return tuple((numbers[id(mapper.kernel(i, True))], n) for i, n in phase)

    runs = tuple(replace(b, phases=tuple(map(renumbered, b.phases))) for b in runs)
    if not runs and mapping.is_cooperative:
        runs = joint_phases(mapped, mapping, numbers)
    return replace(mapped, cooperative=tuple(sized(b, kernels) for b in runs))


def joint_phases(
    program: Program, mapping: Mapping, numbers: dict[int, int]
) -> tuple[CooperativeLaunch, ...]:
    """Phases of several kernels that are one launch each: their blocks run side by side.

    Only where no library is called, all kernels of a phase have as many threads in a block, and one
    launch takes their pointers and their memory. Equal phases, of a model's layers, are one
    function.
    """
    if any(_is_library(call.kernel) for call in program.calls()):
        return ()
    symbols: dict[tuple[tuple[int, int], ...], str] = {}
    found: list[CooperativeLaunch] = []
    for first, step in enumerate(program.steps):
        kernels = [call.kernel for call in step.calls] if isinstance(step, Phase) else []
        threads = {geometry_of(k).threads for k in kernels}
        is_plain = all(geometry_of(k).template is None for k in kernels)
        is_plain = is_plain and _fits(kernels, mapping)
        phase = tuple(Counter(numbers[id(k)] for k in kernels).items())
        if len(phase) > 1 and len(threads) == 1 and is_plain:
            symbol = symbols.setdefault(phase, f"joint_{len(symbols)}")
            found.append(CooperativeLaunch(symbol, (), first, (phase,)))
    return tuple(found)


def _fits(kernels: Sequence[Kernel], mapping: Mapping) -> bool:
    """Whether one launch has room for the pointers of a phase's calls, and one function for the
    memory of all its kernels' sums of columns, as much as one kernel may have."""
    pointers = sum(len(k.buffers) for k in kernels)
    columns = sum(map(column_bytes, {id(k): k for k in kernels}.values()))
    return 8 * pointers <= mapping.arguments and columns <= mapping.column_bytes


def _is_library(kernel: Kernel) -> bool:
    return library_call_of(kernel) is not None or standalone_matmul(kernel) is not None


class _Mapper:
    """Maps each kernel once for launches of its own, and once for cooperative ones."""

    def __init__(self, program: Program, mapping: Mapping, runs: Sequence[CooperativeLaunch]):
        self.mapping = mapping
        self.kernels = program.distinct()
        self.numbers = {id(k): i for i, k in enumerate(self.kernels)}
        self.exceeds = may_exceed(self.kernels)
        self.beside = shares(runs, self.kernels, mapping)
        self.inside = {(b.path, b.first + i) for b in runs for i in range(len(b.phases))}
        sizes = {b.name: b.dtype.itemsize for b in program.buffers}
        self.calls, self.odd = _most_calls(program.steps), _unaligned(program, sizes)
        self.mapped: dict[tuple[int, bool], Kernel] = {}  # by number, and whether in such a launch

    def steps(self, steps: Sequence[Step], path: tuple[int, ...]) -> tuple[Step, ...]:
        found: list[Step] = []
        for i, step in enumerate(steps):
            if not isinstance(step, Phase):
                found.append(replace(step, steps=self.steps(step.steps, (*path, i))))
                continue
            is_joint = (path, i) in self.inside
            kernels = (self.kernel(self.numbers[id(c.kernel)], is_joint) for c in step.calls)
            calls = zip(step.calls, kernels, strict=True)
            found.append(Phase(tuple(replace(c, kernel=kernel) for c, kernel in calls)))
        return tuple(found)

    def kernel(self, number: int, is_joint: bool) -> Kernel:
        """A kernel by its number, as part of a cooperative launch or for launches of its own."""
        key = number, is_joint
        if key not in self.mapped:
            self.mapped[key] = self._mapped(number, is_joint)
        return self.mapped[key]

    def _mapped(self, number: int, is_joint: bool) -> Kernel:
        kernel = self.kernels[number]
        beside = self.beside[number] if is_joint else None
        room = self.mapping.arguments // (8 * max(1, len(kernel.buffers)))
        is_alone = is_joint or template_of(kernel) is not None
        calls = 1 if is_alone else max(1, min(self.calls[id(kernel)], room))
        found = map_kernel(kernel, self.mapping, id(kernel) not in self.odd, beside, calls)
        if found.geometry is None:
            return found
        unrounded = unrounded_locals(kernel.body) if self.exceeds else None
        if unrounded is not None and found.geometry.packs:
            unrounded |= {lane_name(name, u) for name in unrounded for u in range(1, PACKED)}
        geometry = replace(
            found.geometry, calls=calls, is_cooperative=is_joint, unrounded=unrounded
        )
        mapped = replace(found, geometry=geometry)
        verify_mapping(mapped, self.mapping)
        return mapped


def _most_calls(steps: Sequence[Step]) -> Counter[int]:
    """How often a phase calls each kernel at most: such calls are one launch."""
    found: Counter[int] = Counter()
    for phase in _phases(steps):
        found |= Counter(id(c.kernel) for c in phase.calls)
    return found


def _unaligned(program: Program, itemsize: dict[str, int]) -> set[int]:
    """Kernels that are called on rows which do not start at whole packs."""
    return {
        id(call.kernel)
        for call in program.calls()
        if any(a.row * itemsize[a.buffer] % PACK for a in call.arguments)
    }


def cooperative_runs(program: Program, mapping: Mapping) -> tuple[CooperativeLaunch, ...]:
    """Runs of phases that are one launch, by kernels' numbers; none if some phase is not small."""
    if not all(_is_light(phase, mapping) for phase in _phases(program.steps)):
        return ()
    runs = _Runs(mapping, {id(k): i for i, k in enumerate(program.distinct())})
    found = runs.of(program.steps, ())
    return tuple(replace(b, symbol=f"cooperative_{i}") for i, b in enumerate(found))


def _phases(steps: Sequence[Step]) -> Iterator[Phase]:
    for step in steps:
        if isinstance(step, Phase):
            yield step
        else:
            yield from _phases(step.steps)


def _is_light(phase: Phase, mapping: Mapping) -> bool:
    own = [call.kernel for call in phase.calls]
    if any(map(_is_library, own)):
        return False
    if sum(map(cost.traffic, own)) > mapping.light_bytes:
        return False
    return sum(map(cost.work, own)) <= mapping.light


class _Runs:
    """Runs of phases, as long as what a launch takes: pointers, and functions to compile."""

    def __init__(self, mapping: Mapping, numbers: dict[int, int]):
        self.mapping, self.numbers = mapping, numbers
        self.most = mapping.arguments // 8  # pointers

    def of(self, steps: Sequence[Step], path: tuple[int, ...]) -> Iterator[CooperativeLaunch]:
        run: list[tuple[tuple[int, int], ...]] = []
        first, pointers = 0, 0
        for i, step in enumerate(steps):
            if not isinstance(step, Phase):
                yield from _done(path, first, run)
                run, first, pointers = [], i + 1, 0
                yield from self.of(step.steps, (*path, i))
                continue
            calls, wanted = self._calls(step), self._pointers(step)
            is_full = pointers + wanted > self.most
            if is_full or sum(map(len, run)) + len(calls) > self.mapping.most_parts:
                yield from _done(path, first, run)
                run, first, pointers = [], i, 0
            if wanted > self.most:
                first = i + 1
                continue
            run.append(tuple(calls.items()))
            pointers += wanted
        yield from _done(path, first, run)

    def _calls(self, phase: Phase) -> Counter[int]:
        """How often each kernel is called, the longest first: what is left at the end is short."""
        longest = sorted(phase.calls, key=lambda c: -cost.work(c.kernel))
        return Counter(self.numbers[id(call.kernel)] for call in longest)

    def _pointers(self, phase: Phase) -> int:
        if any(is_scatter(call.kernel, self.mapping) for call in phase.calls):
            return self.most + 1  # blocks of a scattered sum are larger
        return sum(len(call.arguments) for call in phase.calls)


def _done(
    path: tuple[int, ...], first: int, run: Sequence[tuple[tuple[int, int], ...]]
) -> Iterator[CooperativeLaunch]:
    if sum(map(len, run)) > 1:
        yield CooperativeLaunch("", path, first, tuple(run))


def shares(
    found: Sequence[CooperativeLaunch], kernels: Sequence[Kernel], mapping: Mapping
) -> dict[int, int]:
    """Blocks that each kernel gets beside the others of its phase."""
    given: dict[int, int] = {}
    for phase in (p for b in found for p in b.phases):
        work = {i: n * cost.work(kernels[i]) for i, n in phase}
        for i, own in work.items():
            share = _share(own, sum(work.values()), mapping)
            given[i] = min(given.get(i, mapping.blocks), share)
    return given


def _share(work: int, total: int, mapping: Mapping) -> int:
    """Blocks for a kernel beside others that run at the same time."""
    if 8 * work >= 7 * total:
        return mapping.blocks
    return max(mapping.fewest_blocks, mapping.blocks * work // max(1, total))


def sized(run: CooperativeLaunch, kernels: Sequence[Kernel]) -> CooperativeLaunch:
    """The launch with the blocks that its largest phase can use, and its shared memory."""
    entries = {i for phase in run.phases for i, _ in phase}
    grid = max(sum(blocks_of(kernels[i]) * n for i, n in phase) for phase in run.phases)
    shared = max(shared_bytes(kernels[i]) for i in entries)
    threads = max(geometry_of(kernels[i]).threads for i in entries)
    return replace(run, grid=max(1, grid), block=threads, shared=shared)


def may_exceed(kernels: Sequence[Kernel]) -> bool:
    """Whether no kernel of a program compares, orders or cuts off narrow floats it computes.

    A largest number changes as little as what it is the largest of. It matters which one that was
    only where a program compares numbers with each other: the gradient of a maximum does.
    """
    orders = any(map(_orders, kernels))
    return not any(_compares(k.body, _computed_locals(k.body), orders) for k in kernels)


def _orders(kernel: Kernel) -> bool:
    """Whether a kernel compares floats with each other, and not with a number that is written."""
    every = (v for s in walk(kernel.body) for value in values_of(s) for v in subvalues(value))
    return any(
        isinstance(v, Apply)
        and v.dtype is dtypes.bool_
        and all(o.dtype.is_float and not isinstance(o, Literal) for o in v.operands)
        for v in every
    )


def _computed_locals(body: Sequence[Statement]) -> set[str]:
    """Locals from arithmetic on narrow floats, also by way of a loop's last iteration."""
    found: set[str] = set()
    named = [(s.local, s.value) for s in walk(body) if isinstance(s, (Let, Set))]
    known = -1
    while len(found) > known:  # twice, but for locals that are set further down
        known = len(found)
        found |= {name for name, value in named if _is_computed(value, found)}
    return found


def _compares(body: Sequence[Statement], computed: Collection[str], orders: bool) -> bool:
    for s in walk(body):
        is_extreme = orders and isinstance(s, Accumulate) and s.op in ("max", "min")
        if is_extreme and any(_is_computed(v, computed) for v in values_of(s)):
            return True
        if any(_cuts(v, computed) for value in values_of(s) for v in subvalues(value)):
            return True
    return False


def _cuts(value: Value, computed: Collection[str]) -> bool:
    """Whether a small change of what a value is computed from may change it much."""
    match value:
        case Apply(op, operands):
            is_smooth = op == "where" or op in SMOOTH
            return not is_smooth and any(_is_computed(o, computed) for o in operands)
        case Convert(inner, dtype):
            cuts = inner.dtype.is_float and not dtype.is_float
            return cuts and _is_computed(inner, computed)
        case _:
            return False


def _is_computed(value: Value, computed: Collection[str]) -> bool:
    """Whether a value comes from arithmetic on narrow floats in this kernel.

    A condition that does is compared itself.
    """
    for part in subvalues(value):
        match part:
            case Local(name):
                is_narrow = name in computed
            case Convert(inner, dtype):
                is_narrow = dtype.is_narrow and not isinstance(inner, Local)
            case _:
                is_narrow = isinstance(part, Apply) and part.dtype.is_narrow
        if is_narrow:
            return True
    return False


def unrounded_locals(body: Sequence[Statement]) -> frozenset[str]:
    """Locals of narrow floats that only smooth arithmetic and stores use.

    Casts that arithmetic uses are rounded. Otherwise x minus the mean of a row of equal x would not
    be 0 where the mean was rounded.
    """
    every = list(walk(body))
    named = {s.local for s in every if isinstance(s, Let) and s.value.dtype.is_narrow}
    strict = changed_in(body)
    for s in every:
        # Whether a local is unrounded is not known yet: what it is computed from must be for both.
        for value in values_of(s):
            strict |= _strict_in(value, isinstance(s, Store))
    casts = {s.local for s in every if isinstance(s, Let) and _is_cast(s.value)}
    return frozenset(named - strict - (casts & _computed_with(every)))


def _is_cast(value: Value) -> bool:
    """Whether a value is a cast to a narrow float, or a choice of one."""
    chosen = subvalues(value, lambda v: isinstance(v, Apply) and v.op == "where")
    return any(isinstance(v, Convert) and v.dtype.is_narrow for v in chosen)


def _computed_with(statements: Sequence[Statement]) -> set[str]:
    """Locals that are operands of arithmetic, which a choice is not."""
    every = (v for s in statements for value in values_of(s) for v in subvalues(value))
    computing = (v for v in every if isinstance(v, Apply) and v.op != "where")
    return {part.name for v in computing for part in subvalues(v) if isinstance(part, Local)}


def _strict_in(value: Value, may_exceed: bool) -> set[str]:
    """Locals that a value needs rounded."""
    match value:
        case Local(name):
            return set() if may_exceed else {name}
        case Apply(op, operands):
            is_chosen = may_exceed and op == "where"
            allowed = (op in SMOOTH or (is_chosen and i > 0) for i in range(len(operands)))
            parts = map(_strict_in, operands, allowed)
            return set().union(*parts)
        case _:
            return set().union(*(_strict_in(o, False) for o in operands_of(value)))
