"""What the tests of compiled programs share: building them, and comparing them with the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from treadle.backends import protocol
from treadle.backends.cpu.backend import CpuToolchain, Objects
from treadle.backends.stored import packed, unpacked
from treadle.codegen.llvm.driver import render_program
from treadle.domains.float64 import evaluate_float64
from treadle.ir.graph import Graph
from treadle.kernel.machine import NATIVE, target_name
from treadle.kernel.plan import Plan
from treadle.kernel.program import Program
from treadle.kernel.target import CPU
from treadle.memory.assemble import assemble
from treadle.memory.plan import plan_buffers
from treadle.runtime.cpu.native import compile_object, host, processor
from treadle.runtime.cpu.program import NativeProgram
from treadle.runtime.cpu.targets import target_of
from treadle.schedule.schedule import schedule
from treadle.verify.bounds import AGREE, Arrays, allowed, careful_spread, complaint, over
from treadle.verify.retyped import merged as merged
from treadle.verify.retyped import merged_arrays as merged_arrays
from treadle.verify.retyped import rounded_inputs as rounded_inputs

THREADS = (1, 2, 3, 8)


@dataclass(frozen=True)
class Built:
    """A compiled graph, to be loaded for any number of threads."""

    graph: Graph
    plan: Plan
    objects: tuple[bytes, ...]
    constants: Arrays
    program: Program

    def cut(self, tasks: int) -> Built:
        """The same code with every kernel cut into as many tasks at most, however small it is."""
        return replace(self, plan=planned(self.program, tasks))

    def on(self, threads: int) -> NativeProgram:
        """The program for some threads; for several as the plan cache would have it."""
        made = protocol.Built(self.plan, self.constants, self.objects)
        if threads > 1:
            made = _from_cache(self.graph, made)
        return NativeProgram(self.graph, made.plan, made.code, made.constants, threads)


def _from_cache(graph: Graph, made: protocol.Built[Objects]) -> protocol.Built[Objects]:
    toolchain = CpuToolchain(host())
    parts = packed(toolchain, made, None)()
    found = unpacked(toolchain, parts, graph)
    assert found is not None, "what was stored does not fit its graph"
    return found


def planned(program: Program, tasks: int | None = None) -> Plan:
    """What a runtime follows; with `tasks`, every kernel is cut into as many at most."""
    sizes = CPU.tasks
    if tasks is not None:
        sizes = replace(sizes, serial=0, operations=1, most=tasks)
    return assemble(program, plan_buffers(program), replace(CPU, tasks=sizes))


def build(
    graph: Graph,
    fuse: bool = True,
    width: int | None = None,
    in_place: bool = False,
    shared: bool = False,
    target: str | int = NATIVE,
) -> Built:
    """A graph compiled for a target, or this processor with a width.

    `shared` cuts every kernel into tasks of few iterations, or of one. Such tasks fill no lanes:
    tests of those leave kernels whole.
    """
    machine = target_of(target_name(width or target), processor())
    program = schedule(graph, fuse, 2 * machine.width, in_place)
    plan = planned(program, CPU.tasks.most if shared else None)
    objects = (compile_object(render_program(program, machine.machine), machine),)
    return Built(graph, plan, objects, dict(program.constants), program)


def draw(graph: Graph, seed: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    """Normal numbers for every leaf, rounded to its dtype; small integers where it is one."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, i in graph.leaves.items():
        type_ = graph.nodes[i].types[0]
        drawn = rng.normal(size=type_.shape) * scale
        arrays[name] = drawn if type_.is_float else rng.integers(0, 2, type_.shape)
    return rounded_inputs(graph, arrays)


def assert_within(
    graph: Graph,
    inputs: Arrays,
    found: Sequence[np.ndarray],
    agree: float = AGREE,
    bounds: Sequence[np.ndarray] | None = None,
) -> None:
    """Every output of the graph's type, and as near to the oracle as its contracts promise."""
    expected = evaluate_float64(graph, inputs)
    quick = allowed(graph, inputs, agree) if bounds is None else bounds
    wrong = _wrong(graph, found, expected, quick)
    if wrong and bounds is not None:  # of a whole program: what cancels shows in many turns only
        careful = careful_spread(over(graph, inputs), graph.output_types)
        wrong = _wrong(graph, found, expected, careful)
    assert not wrong, wrong


def _wrong(
    graph: Graph,
    found: Sequence[np.ndarray],
    expected: Sequence[np.ndarray],
    bounds: Sequence[np.ndarray],
) -> str:
    """The first output that is not near enough."""
    outputs = zip(graph.outputs, found, expected, graph.output_types, bounds, strict=True)
    for output, ours, theirs, type_, bound in outputs:
        wrong = complaint(ours, theirs, type_, bound)
        if wrong is not None:
            return f"{output.name}: {wrong}"
    return ""


def same_bits(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> bool:
    return all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))
