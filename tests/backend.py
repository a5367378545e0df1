"""What the tests of compiled programs share: building them, and how far from the oracle they may be.

A program must be as exact as its ops' contracts promise. What that allows is found by evaluating the
graph with every op's result moved by the whole of its own error, up or down at random: how far the
outputs then lie apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from unittest import mock

import numpy as np

from treadle.base import dtypes
from treadle.base.dtypes import DType, accumulator
from treadle.codegen.llvm.driver import render_program
from treadle.domains.domain import Typed, evaluate
from treadle.domains.float64 import MEANING, Float64, evaluate_float64, lift
from treadle.ir.contract import SumError, Ulps
from treadle.ir.graph import Graph, GraphBuilder, Output
from treadle.ir.op import Attributes, Op, Types
from treadle.ir.ops import indexing, leaves, linear, reductions
from treadle.ir.types import TensorType
from treadle.kernel.machine import NATIVE, target_name
from treadle.kernel.plan import Plan
from treadle.memory import assemble as assembling
from treadle.memory.plan import plan_buffers
from treadle.runtime.cpu import NativeProgram
from treadle.runtime.native import compile_object, processor
from treadle.runtime.targets import target_of
from treadle.schedule.schedule import schedule

Arrays = Mapping[str, np.ndarray]
THREADS = (1, 2, 3, 8)
TURNS = 6  # noisy evaluations
# Values that rounding makes equal have another order than the oracle's, whatever the noise shows.
ROUNDED = Float64(frozenset(d for d in dtypes.ALL if d.is_float))
# Noise of random sign is not the worst there is: errors of a program of several ops may agree.
AGREE = 8.0


@dataclass(frozen=True)
class Built:
    """A compiled graph, to be loaded for any number of threads."""

    graph: Graph
    plan: Plan
    objects: tuple[bytes, ...]
    constants: Arrays

    def on(self, threads: int) -> NativeProgram:
        return NativeProgram(self.graph, self.plan, self.objects, self.constants, threads)


def build(
    graph: Graph,
    fuse: bool = True,
    width: int | None = None,
    in_place: bool = False,
    shared: bool = False,
    target: str | int = NATIVE,
) -> Built:
    """A graph compiled for a target, or this processor with a width.

    `shared` cuts even the smallest kernel into tasks for all threads.
    """
    machine = target_of(target_name(width or target), processor())
    program = schedule(graph, fuse, 2 * machine.width, in_place)
    serial, task = (0, 1) if shared else (assembling.SERIAL, assembling.TASK)
    with mock.patch.multiple(assembling, SERIAL=serial, TASK=task):
        plan = assembling.assemble(program, plan_buffers(program))
    objects = (compile_object(render_program(program, machine.machine), machine),)
    return Built(graph, plan, objects, dict(program.constants))


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


# How far from the oracle a result may be


_LEAST = {"float64": -1022, "float32": -126, "bfloat16": -126, "float16": -14}


def ulp(x: np.ndarray, dtype: DType) -> np.ndarray:
    """The distance of neighbours of a dtype around values."""
    with np.errstate(all="ignore"):
        exponent = np.floor(np.log2(np.abs(x)))
    exponent = np.where(np.isfinite(exponent), exponent, -np.inf)
    return np.exp2(np.maximum(exponent, _LEAST[dtype.name]) - dtype.fraction_bits)


def terms(op: Op, attributes: Attributes, operands: Sequence[Typed[np.ndarray]]) -> int:
    """How many terms a sum has."""
    shape = operands[0].type.shape
    match attributes:
        case reductions.Reduce(axes):
            return math.prod(shape[a] for a in axes)
        case reductions.Cumulate(axis):
            return shape[axis]
        case linear.Contraction():
            x, _, result = attributes.labels
            return math.prod(n for label, n in zip(x, shape, strict=True) if label not in result)
        case linear.Unwindow(window):
            return math.prod(window.sizes)
        case indexing.ScatterAdd():
            return operands[1].value.size
    raise AssertionError(op)


class Noisy(Float64):
    """The oracle with every op's result moved by its contract's error."""

    def __init__(self, turn: int):
        super().__init__()
        self.rng, self.turn = np.random.default_rng(turn), turn
        self.is_alike = turn % 2 == 1  # equal elements are rounded alike: all of a tensor one way

    def apply(
        self,
        op: Op,
        attributes: Attributes,
        operands: Sequence[Typed[np.ndarray]],
        types: Types,
    ) -> Sequence[np.ndarray]:
        found = super().apply(op, attributes, operands, types)
        return [
            r + self.signs(r) * self.error(op, attributes, operands, r, t) if t.is_float else r
            for r, t in zip(found, types, strict=True)
        ]

    def signs(self, result: np.ndarray) -> np.ndarray:
        """Either way; after the first turn by not quite the whole, as equal errors may cancel."""
        shape = () if self.is_alike else result.shape
        part = self.rng.uniform(0.6, 1.0, shape) if self.turn else 1.0
        return self.rng.choice((-1.0, 1.0), shape) * part

    def error(
        self,
        op: Op,
        attributes: Attributes,
        operands: Sequence[Typed[np.ndarray]],
        result: np.ndarray,
        type_: TensorType,
    ) -> np.ndarray:
        dtype, bound = type_.dtype, op.contract.error
        if isinstance(bound, Ulps):
            return bound.count * ulp(result, dtype)
        if isinstance(bound, SumError):
            sizes = [np.abs(o.value) if o.type.is_float else o.value for o in operands]
            total = MEANING[op](attributes, *sizes)
            u = accumulator(operands[0].type.dtype).unit_roundoff
            own = bound.factor * terms(op, attributes, operands) * u * total
            return own + 0.5 * ulp(result, dtype)
        if op is leaves.CONSTANT:  # rounded once, to its dtype
            return np.abs(result.astype(dtype.numpy).astype(np.float64) - result)
        return np.zeros_like(result)


def allowed(graph: Graph, inputs: Arrays, agree: float = AGREE) -> list[np.ndarray]:
    """How far from the oracle each element of each output may be."""
    lifted = {n: lift(inputs[n], graph.nodes[i].types[0]) for n, i in graph.leaves.items()}
    exact = evaluate(graph, lifted, Float64())
    found = [np.zeros(x.shape) for x in exact]
    with np.errstate(all="ignore"):
        for domain in [Noisy(0)] if agree == 1 else [*map(Noisy, range(TURNS)), ROUNDED]:
            moved = evaluate(graph, lifted, domain)
            apart = (np.abs(a - b) for a, b in zip(moved, exact, strict=True) if a.dtype == float)
            for k, distance in zip(
                (k for k, x in enumerate(exact) if x.dtype == float), apart, strict=True
            ):
                found[k] = np.fmax(found[k], distance)
    if agree == 1:
        return found
    # Noise may cancel by chance: the last roundings are always allowed, and a part of what is usual.
    return [
        agree * np.maximum(f, np.median(f) / 4 if f.size else 0) + 2 * ulp(x, t.dtype)
        if t.is_float
        else f
        for f, x, t in zip(found, exact, graph.output_types, strict=True)
    ]


def assert_within(
    graph: Graph,
    inputs: Arrays,
    found: Sequence[np.ndarray],
    agree: float = AGREE,
    bounds: Sequence[np.ndarray] | None = None,
) -> None:
    """Every output of the graph's type, and as near to the oracle as its contracts promise."""
    expected = evaluate_float64(graph, inputs)
    bounds = allowed(graph, inputs, agree) if bounds is None else bounds
    outputs = zip(graph.outputs, found, expected, graph.output_types, bounds, strict=True)
    for output, ours, theirs, type_, bound in outputs:
        assert ours.shape == type_.shape, output.name
        assert ours.dtype == type_.dtype.numpy, output.name
        if not type_.is_float:
            np.testing.assert_array_equal(ours, theirs, err_msg=output.name)
            continue
        wide, is_finite = ours.astype(np.float64), np.isfinite(theirs)
        np.testing.assert_array_equal(wide[~is_finite], theirs[~is_finite], err_msg=output.name)
        with np.errstate(all="ignore"):
            apart = np.abs(wide - theirs)[is_finite]
        # A trillionth for the oracle's own rounding, which matters for float64 alone.
        slack = bound[is_finite] * (1 + 1e-12) + 1e-15 * np.abs(theirs[is_finite])
        if type_.dtype is dtypes.float64:
            slack = slack * 4
        worst = int(np.argmax(apart - slack)) if apart.size else 0
        assert np.all(apart <= slack), (
            f"{output.name}: {wide[is_finite][worst]!r} is {apart[worst]:.3g} from "
            f"{theirs[is_finite][worst]!r}, {slack[worst]:.3g} is allowed ({type_})"
        )


def same_bits(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> bool:
    return all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))
