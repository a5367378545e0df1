"""Program and buffer plan to the plan that a runtime follows: slots, tasks, the script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from treadle.base import dtypes
from treadle.ir.types import TensorType
from treadle.kernel import cost
from treadle.kernel.nodes import Kernel, Role
from treadle.kernel.plan import (
    CUT,
    Entry,
    KernelFacts,
    Plan,
    PlannedCall,
    PlannedConstant,
    PlannedOutput,
    PlannedPhase,
    PlannedRepeat,
    PlannedStep,
    Slot,
)
from treadle.kernel.program import Call, Phase, Program, Step
from treadle.kernel.target import CPU, Target, Tasks
from treadle.memory.plan import BufferPlan


def assemble(program: Program, buffers: BufferPlan, target: Target = CPU) -> Plan:
    """The plan of a program whose buffers have their offsets."""
    kernels = program.distinct()
    numbers = {id(k): i for i, k in enumerate(kernels)}
    slots = {b.name: i for i, b in enumerate(program.buffers)}
    itemsize = {b.name: b.dtype.itemsize for b in program.buffers}
    assembler = _Assembler(kernels, numbers, slots, itemsize, target.tasks)
    return Plan(
        tuple(_entry(kernel, i) for i, kernel in enumerate(kernels)),
        tuple(map(assembler.step, program.steps)),
        tuple(Slot(b.name, b.nbytes, buffers.offsets.get(b.name, -1)) for b in program.buffers),
        tuple((name, slots[name], type_) for name, type_ in program.leaves),
        tuple(_constant(n, slots[n], a) for n, a in program.constants if n in slots),
        tuple(PlannedOutput(o.kind, o.name, slots[n], t) for o, n, t in program.outputs),
        program.updated,
        buffers.size,
        _facts(program, kernels, numbers),
        _again(program),
        program.uncut,
        program.most,
        program.held,
    )


def _constant(name: str, slot: int, array: np.ndarray) -> PlannedConstant:
    return PlannedConstant(slot, name, TensorType(array.shape, dtypes.of_memory(array.dtype)))


def _entry(kernel: Kernel, number: int) -> Entry:
    loop = cost.outermost(kernel)
    is_vector = loop is not None and loop.role is Role.VECTOR
    return Entry(f"kernel.{number}", cost.iterations(kernel), is_vector, cost.scratch_bytes(kernel))


def _facts(
    program: Program, kernels: Sequence[Kernel], numbers: Mapping[int, int]
) -> tuple[KernelFacts, ...]:
    """One for each distinct kernel."""
    counts: dict[int, int] = {}
    for call, times in program.counted_calls():
        i = numbers[id(call.kernel)]
        counts[i] = counts.get(i, 0) + times
    names = _distinct_names(kernels)
    return tuple(
        KernelFacts(names[i], counts[i], cost.flops(k), cost.traffic(k))
        for i, k in enumerate(kernels)
    )


def _again(program: Program) -> tuple[KernelFacts, ...]:
    """What is run a second time, one for each kernel's name."""
    found: dict[tuple[str, int, int], int] = {}
    for rerun in program.again:
        key = rerun.kernel, rerun.flops, rerun.nbytes
        found[key] = found.get(key, 0) + 1
    return tuple(KernelFacts(name, calls, *costs) for (name, *costs), calls in found.items())


def _distinct_names(kernels: Sequence[Kernel]) -> list[str]:
    """Names of kernels, numbered where several were fused from the same one."""
    found: list[str] = []
    for i, kernel in enumerate(kernels):
        found.append(f"{kernel.name}.{i}" if kernel.name in found else kernel.name)
    return found


class _Assembler:
    def __init__(
        self,
        kernels: Sequence[Kernel],
        numbers: Mapping[int, int],
        slots: Mapping[str, int],
        itemsize: Mapping[str, int],
        tasks: Tasks,
    ):
        self.numbers, self.slots, self.itemsize = numbers, slots, itemsize
        self.tasks = tasks
        self.work = {id(k): cost.work(k) for k in kernels}

    def step(self, step: Step) -> PlannedStep:
        if not isinstance(step, Phase):
            return PlannedRepeat(step.length, step.reverse, tuple(map(self.step, step.steps)))
        total = sum(self.work[id(c.kernel)] for c in step.calls)
        is_small = total < self.tasks.serial
        is_single = len(step.calls) == 1 and cost.iterations(step.calls[0].kernel) == 1
        is_serial = is_small or is_single
        # The longest first: what is left at the end is short.
        ordered = sorted(step.calls, key=lambda c: -self.work[id(c.kernel)])
        return PlannedPhase(tuple(map(self.call, ordered)), is_serial)

    def call(self, call: Call) -> PlannedCall:
        iterations, loop = cost.iterations(call.kernel), cost.outermost(call.kernel)
        if loop is not None and loop.role is Role.VECTOR:
            iterations //= CUT  # less than a vector would be taken one by one
        return PlannedCall(
            self.numbers[id(call.kernel)],
            tasks_of(iterations, self.work[id(call.kernel)], self.tasks),
            tuple(self.slots[a.buffer] for a in call.arguments),
            tuple(a.row * self.itemsize[a.buffer] for a in call.arguments),
        )


def tasks_of(iterations: int, work: int, sizes: Tasks) -> int:
    """How many a call is cut into: of three, one of two threads would have two.

    With equal shares a thread also reads the rows that it wrote in the step before.
    """
    wanted = min(work // sizes.operations, sizes.most)
    if wanted > sizes.even:
        wanted = -(-wanted // sizes.even) * sizes.even
    elif wanted > 1:
        wanted = 1 << (wanted - 1).bit_length()
    return max(1, min(wanted, iterations))
