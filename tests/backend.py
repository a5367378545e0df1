"""What the tests of compiled programs share: building them, and comparing them with the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from treadle.codegen.llvm.driver import render_program
from treadle.domains.float64 import evaluate_float64
from treadle.ir.graph import Graph, GraphBuilder, Output
from treadle.ir.ops import leaves
from treadle.kernel.machine import NATIVE, target_name
from treadle.kernel.plan import Plan
from treadle.kernel.program import Program
from treadle.kernel.target import CPU
from treadle.memory.assemble import assemble
from treadle.memory.plan import plan_buffers
from treadle.runtime.cpu.native import compile_object, processor
from treadle.runtime.cpu.program import NativeProgram
from treadle.runtime.cpu.targets import target_of
from treadle.schedule.schedule import schedule
from treadle.verify.bounds import AGREE, Arrays, allowed, careful_spread, complaint, over

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
        return NativeProgram(self.graph, self.plan, self.objects, self.constants, threads)


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


def rounded_inputs(graph: Graph, arrays: Arrays) -> dict[str, np.ndarray]:
    """Inputs as their dtypes hold them, so that only the arithmetic differs."""
    types = {n: graph.nodes[i].types[0] for n, i in graph.leaves.items()}
    with np.errstate(all="ignore"):
        return {n: np.asarray(arrays[n]).astype(t.dtype.numpy) for n, t in types.items()}


def draw(graph: Graph, seed: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    """Normal numbers for every leaf, rounded to its dtype; small integers where it is one."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, i in graph.leaves.items():
        type_ = graph.nodes[i].types[0]
        drawn = rng.normal(size=type_.shape) * scale
        arrays[name] = drawn if type_.is_float else rng.integers(0, 2, type_.shape)
    return rounded_inputs(graph, arrays)


def merged(graphs: Sequence[Graph]) -> Graph:
    """Several graphs as one: leaves and outputs of the k-th are named "k/…"."""
    builder, outputs = GraphBuilder(), list[Output]()
    for k, graph in enumerate(graphs):
        moved: list[int] = []
        for node in graph.nodes:
            attributes = node.attributes
            operands = [type(v)(moved[v.node], v.output) for v in node.operands]
            if isinstance(attributes, leaves.Leaf):
                renamed = leaves.Leaf(f"{k}/{attributes.name}", attributes.type)
                moved.append(builder.add(node.op, renamed, ())[0].node)
            else:
                moved.append(builder.copy(node, operands))
        for output in graph.outputs:
            value = type(output.value)(moved[output.value.node], output.value.output)
            outputs.append(Output(output.kind, f"{k}/{output.name}", value))
    return builder.build(outputs, "merged")


def merged_arrays(arrays: Sequence[Arrays]) -> dict[str, np.ndarray]:
    return {f"{k}/{name}": a for k, given in enumerate(arrays) for name, a in given.items()}


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
