"""The pass: every kernel of a program mapped to a GPU, and phases that are one launch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from treadle.kernel.launch import CooperativeLaunch
from treadle.kernel.mapped import PACK
from treadle.kernel.nodes import Kernel
from treadle.kernel.program import Phase, Program, Step
from treadle.kernel.target import Mapping, Target
from treadle.kernel.verify_mapping import verify_mapping
from treadle.schedule.mapping.cooperative import cooperative_runs, shares, sized
from treadle.schedule.mapping.kernels import map_kernel
from treadle.schedule.mapping.precision import may_exceed, unrounded_locals


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
        return tuple((numbers[id(mapper.joint[i])], n) for i, n in phase)

    runs = tuple(replace(b, phases=tuple(map(renumbered, b.phases))) for b in runs)
    return replace(mapped, cooperative=tuple(sized(b, kernels) for b in runs))


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
        self.alone: dict[int, Kernel] = {}  # by number
        self.joint: dict[int, Kernel] = {}

    def steps(self, steps: Sequence[Step], path: tuple[int, ...]) -> tuple[Step, ...]:
        found: list[Step] = []
        for i, step in enumerate(steps):
            if not isinstance(step, Phase):
                found.append(replace(step, steps=self.steps(step.steps, (*path, i))))
                continue
            mapped = self._joint if (path, i) in self.inside else self._alone
            calls = (replace(c, kernel=mapped(self.numbers[id(c.kernel)])) for c in step.calls)
            found.append(Phase(tuple(calls)))
        return tuple(found)

    def _alone(self, number: int) -> Kernel:
        if number not in self.alone:
            pointers = max(1, len(self.kernels[number].buffers))
            room = self.mapping.arguments // (8 * pointers)
            calls = max(1, min(self.calls[id(self.kernels[number])], room))
            self.alone[number] = self._mapped(number, None, calls)
        return self.alone[number]

    def _joint(self, number: int) -> Kernel:
        if number not in self.joint:
            self.joint[number] = self._mapped(number, self.beside[number], 1)
        return self.joint[number]

    def _mapped(self, number: int, beside: int | None, calls: int) -> Kernel:
        kernel = self.kernels[number]
        found = map_kernel(kernel, self.mapping, id(kernel) not in self.odd, beside)
        if found.geometry is None:
            return found
        unrounded = unrounded_locals(kernel.body) if self.exceeds else None
        geometry = replace(
            found.geometry,
            calls=calls,
            is_cooperative=beside is not None,
            unrounded=unrounded,
        )
        mapped = replace(found, geometry=geometry)
        verify_mapping(mapped, self.mapping)
        return mapped


def _most_calls(steps: Sequence[Step]) -> Counter[int]:
    """How often a phase calls each kernel at most: such calls are one launch."""
    found: Counter[int] = Counter()
    for step in steps:
        found |= (
            Counter(id(c.kernel) for c in step.calls)
            if isinstance(step, Phase)
            else _most_calls(step.steps)
        )
    return found


def _unaligned(program: Program, itemsize: dict[str, int]) -> set[int]:
    """Kernels that are called on rows which do not start at whole packs."""
    return {
        id(call.kernel)
        for call in program.calls()
        if any(a.row * itemsize[a.buffer] % PACK for a in call.arguments)
    }
