"""A program as plain data: kernels, calls, what buffers hold, and where they lie in memory.

Every node is a list whose first element says what it is. Equal kernels are there once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import assert_never

from treadle.base.shapes import Shape
from treadle.ir.control import Scan
from treadle.ir.graph import Node
from treadle.ir.graph import Value as TensorValue
from treadle.ir.literal import Number
from treadle.ir.ops.reductions import Reduce
from treadle.kernel.bindings import Content, Copy, Elements, Partial, Whole, Work
from treadle.kernel.geometry import Geometry, Scattered, Tiled, Warpgroups
from treadle.kernel.index import (
    Bounded,
    Data,
    Index,
    Quotient,
    Remainder,
    Var,
    constant,
    variable,
)
from treadle.kernel.nodes import (
    Accumulate,
    Apply,
    Barrier,
    Buffer,
    Convert,
    For,
    Guarded,
    Kernel,
    Let,
    LibraryCall,
    Literal,
    Load,
    Local,
    Matmul,
    Matrix,
    Position,
    Set,
    Statement,
    Store,
    StridedAxis,
    Update,
    Value,
    View,
    Within,
)
from treadle.kernel.program import Call, Phase, Program, Repeat, Step
from treadle.kernel.states import START, around, is_call, scoped_calls, stated, zeroed
from treadle.memory.plan import BufferPlan
from treadle.verify.certificate.graphs import Records
from treadle.verify.certificate.on_the_way import Stated

Record = dict[str, object]


def program_records(
    program: Program, plan: BufferPlan, records: Records
) -> tuple[Record, dict[str, str]]:
    """Everything that a checker needs: the program, and by scope the hashes of the graphs whose
    values its buffers hold. Definitions of composites are the bodies of calls."""
    stated_graphs = {
        scope: Stated(graph, [b for b in program.bindings.every if b.scope == scope], _index)
        for scope, graph in program.bindings.graphs
    }
    bindings = list(_bindings(program, stated_graphs))
    graphs = {
        scope: records.add(graph.record(records)) if graph.nodes else records.graph(graph.graph)
        for scope, graph in stated_graphs.items()
        if not is_call(scope)
    }
    return _program_record(program, plan, bindings), graphs


def _program_record(program: Program, plan: BufferPlan, bindings: list[list[object]]) -> Record:
    kernels = program.distinct()
    numbers = {id(kernel): i for i, kernel in enumerate(kernels)}
    return {
        "kernels": [kernel_record(kernel) for kernel in kernels],
        "buffers": [_buffer(b) for b in program.buffers],
        "leaves": [name for name, _ in program.leaves],
        "constants": [name for name, _ in program.constants],
        "updated": list(program.updated),
        "outputs": [[o.name, list(o.value), buffer] for o, buffer, _ in program.outputs],
        "steps": [_step(step, numbers) for step in program.steps],
        "bindings": bindings,
        "arena": plan.size,
        "offsets": [[name, at] for name, at in plan.offsets.items()],
    }


def _step(step: Step, numbers: dict[int, int]) -> list[object]:
    match step:
        case Phase(calls):
            return ["phase", [_call(call, numbers) for call in calls]]
        case Repeat(length, reverse, steps, scope):
            return ["repeat", length, reverse, scope, [_step(s, numbers) for s in steps]]
        case _:
            assert_never(step)


def _call(call: Call, numbers: dict[int, int]) -> list[object]:
    lines = [str(origin) for origin in call.origins]
    return [numbers[id(call.kernel)], [[a.buffer, a.row] for a in call.arguments], lines]


def _buffer(b: Buffer) -> list[object]:
    return [b.name, b.dtype.name, b.size, b.lanes, b.space.value, b.pack]


# What buffers hold


def _bindings(program: Program, graphs: Mapping[str, Stated]) -> Iterator[list[object]]:
    """Each with the number of the call from which on it holds, and the values that are any numbers
    in place of what the buffer holds."""
    every, scopes = stated(program), [scope for _, scope in scoped_calls(program.steps)]
    begun = zeroed(program, every)
    for i, (b, since) in enumerate(every):
        graph = graphs[b.scope]
        value, elements, of = graph.value(b)
        if value == b.value:
            content = _content(b.content, graph.graph.nodes[value.node], value.output)
        else:
            content = ["whole"] if elements is None else _content_of(elements)
        if i in begun:
            yield [b.buffer, b.scope, *graph.zeros(value), content, since, []]
        if since != START and not is_call(b.scope) and scopes[since] != b.scope:
            of = of or _constants(b.scope, graphs)
        now = begun.get(i, since)
        yield [b.buffer, b.scope, *value, content, now, [list(v) for v in of]]


def _constants(scope: str, graphs: Mapping[str, Stated]) -> tuple[TensorValue, ...]:
    """What a scan's values are made of that are made once, before it."""
    outer, _, position = around(scope)
    attributes = graphs[outer].graph.nodes[position].attributes
    assert isinstance(attributes, Scan)
    inputs = graphs[scope].graph.inputs
    return tuple(TensorValue(i) for i in inputs[: attributes.constants])


def _content_of(elements: Elements) -> list[object]:
    return ["layout", *_elements(elements), [], ""]


def _content(content: Content, node: Node, output: int) -> list[object]:
    match content:
        case Whole((), 0):
            return ["whole"]
        case Whole(order, pitch):
            return _content_of(_in_memory(node.types[output].shape, order, pitch))
        case Copy(elements):
            return _content_of(elements)
        case Partial(_, _, "spread"):
            return ["work", "a spread of many terms, held at 0 or above"]
        case Partial(elements, summed, op):
            terms = replace(elements, element=_result_first(elements.element, node))
            return ["layout", *_elements(terms), _variables(summed), op]
        case Work(purpose):
            return ["work", purpose]
        case _:
            assert_never(content)


def _in_memory(shape: Shape, order: Shape, pitch: int) -> Elements:
    """All elements of a value, of axes in an order; rows begin a pitch apart."""
    held, step = (*shape[:-1], pitch) if pitch else shape, 1
    variables = {i: Var(f"axis {i}", n) for i, n in enumerate(shape) if n != 1}
    address = constant(0)
    for i in reversed(order or range(len(shape))):
        address = address + variable(variables[i]) * step if i in variables else address
        step *= held[i]
    index = [variable(variables[i]) if i in variables else constant(0) for i in range(len(shape))]
    return Elements(tuple(variables.values()), address, tuple(index))


def _result_first(element: tuple[Index, ...], node: Node) -> tuple[Index, ...]:
    """Indices of a sum's terms as a product has them: along the result, then along its depth."""
    if not isinstance(node.attributes, Reduce):
        return element
    summed = node.attributes.axes
    kept = [index for i, index in enumerate(element) if i not in summed]
    return (*kept, *(element[i] for i in summed))


def _elements(e: Elements) -> list[object]:
    element = [_index(i) for i in e.element]
    guards = [[_index(g.index), g.low, g.high] for g in e.guards]
    return [_variables(e.variables), _index(e.address), element, guards]


def _variables(variables: Sequence[Var]) -> list[list[object]]:
    return [[v.name, v.extent] for v in variables]


# Kernels


def kernel_record(kernel: Kernel) -> Record:
    return {
        "name": kernel.name,
        "inputs": [_buffer(b) for b in kernel.inputs],
        "outputs": [_buffer(b) for b in kernel.outputs],
        "scratch": [_buffer(b) for b in kernel.scratch],
        "geometry": None if kernel.geometry is None else _geometry(kernel.geometry),
        "body": [_statement(s) for s in kernel.body],
    }


def _geometry(g: Geometry) -> list[object]:
    template: list[object] = []
    match g.template:
        case Tiled() as t:
            groups = [[v.name for v in vs] for vs in (t.batch, t.rows, t.columns, t.depth)]
            tile = [t.left.length, t.right.length, t.down, t.across, t.shares]
            template = ["tiled", *groups, *tile]
        case Scattered(rows, blocks):
            template = ["scattered", rows, blocks]
        case Warpgroups() | None:  # threads share nothing but what the loops say
            pass
    return [g.threads, g.share, g.warp, g.combine.value, template]


def _statement(s: Statement) -> list[object]:
    match s:
        case For(var, role, body, stop, lanes):
            end = None if stop is None else _index(stop)
            inner = [_statement(i) for i in body]
            return ["for", var.name, var.extent, role.value, end, lanes, inner]
        case Let(local, value):
            return ["assign", "let", local, _value(value)]
        case Set(local, value):
            return ["assign", "set", local, _value(value)]
        case Accumulate(local, op, value, scanned):
            return ["assign", f"{op} so far" if scanned else op, local, _value(value)]
        case Store(buffer, index, value, guard):
            held = None if guard is None else _value(guard)
            return ["store", buffer, _index(index), _value(value), held, "set"]
        case Update(buffer, index, value, shared):
            how = "add together" if shared else "add"
            return ["store", buffer, _index(index), _value(value), None, how]
        case Barrier(scope):
            return ["barrier", scope.value]
        case Matmul(target, left, right, adds, bias, scales):
            matrices = [_matrix(m) for m in (target, left, right)]
            columns = [target.columns.count, 1, []]
            added = None if bias is None else [bias, [0], [columns]]
            return ["matmul", *matrices, adds, added, [[name, [at], []] for name, at in scales]]
        case LibraryCall(name, results, operands):
            return ["library", name, *([_view(v) for v in views] for views in (results, operands))]
        case _:
            assert_never(s)


def _matrix(m: Matrix) -> list[object]:
    return [m.buffer, _index(m.index), [_axis(m.rows), _axis(m.columns)]]


def _axis(axis: StridedAxis) -> list[object]:
    return [axis.count, axis.stride, list(axis.listed)]


def _view(v: View) -> list[object]:
    axes = [[count, stride, []] for count, stride in zip(v.shape, v.strides, strict=True)]
    return [v.buffer, [v.start], axes]


def _value(value: Value) -> list[object]:
    match value:
        case Literal(number, dtype):
            return ["literal", dtype.name, _number(number)]
        case Load(buffer, index, dtype):
            return ["load", dtype.name, buffer, _index(index)]
        case Local(name, dtype):
            return ["local", dtype.name, name]
        case Position(index, dtype):
            return ["position", dtype.name, _index(index)]
        case Apply(op, operands, dtype):
            return ["apply", dtype.name, op, *(_value(v) for v in operands)]
        case Convert(inner, dtype):
            return ["convert", dtype.name, _value(inner)]
        case Within(index, low, high):
            return ["within", _index(index), low, high]
        case Guarded(guard, inner, other, dtype):
            return ["guarded", dtype.name, _value(guard), _value(inner), _value(other)]
        case _:
            assert_never(value)


def _number(value: Number) -> bool | int | str:
    """Exactly: whole numbers as they are, others as text, which JSON cannot round."""
    if isinstance(value, (bool, int)):
        return value
    if isinstance(value, Fraction):
        return f"{value.numerator}/{value.denominator}"
    return value.hex() if math.isfinite(value) else repr(value)


def _index(index: Index) -> list[object]:
    """The offset, then pairs of a factor and what it multiplies."""
    return [index.offset, *([factor, _atom(atom)] for atom, factor in index.terms)]


def _atom(atom: Var | Data | Quotient | Remainder | Bounded) -> object:
    match atom:
        case Var(name):
            return name
        case Data(local, extent):
            return ["data", local, extent]
        case Quotient(index, divisor):
            return ["quotient", _index(index), divisor]
        case Remainder(index, divisor):
            return ["remainder", _index(index), divisor]
        case Bounded(index, extent):
            return ["bounded", _index(index), extent]
        case _:
            assert_never(atom)
