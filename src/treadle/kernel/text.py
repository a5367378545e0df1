"""Kernels and programs as text."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import assert_never

from treadle.kernel.nodes import (
    Accumulate,
    Apply,
    Barrier,
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
from treadle.kernel.traverse import fold, nested


def to_text(kernel: Kernel) -> str:
    """One line a statement, loops indented."""
    inputs = ", ".join(map(str, kernel.inputs))
    outputs = ", ".join(map(str, kernel.outputs))
    lines = [f"kernel {kernel.name}({inputs}) -> {outputs} {{"]
    lines += [f"  launch {kernel.geometry}"] if kernel.geometry is not None else []
    lines += [f"  scratch {buffer}" for buffer in kernel.scratch]
    for statement, loops in nested(kernel.body):
        lines.append("  " * (1 + len(loops)) + _line(statement))
    return "\n".join([*lines, "}"])


def _line(statement: Statement) -> str:
    match statement:
        case For(var, role, _, stop):
            end = var.extent if stop is None else f"{stop} of {var.extent}"
            lanes = f", lanes {statement.lanes}" if statement.lanes > 1 else ""
            return f"for {var.name} in {end} {role.value}{lanes}:"
        case Let(local, value):
            return f"{local} = {value_text(value)}"
        case Accumulate(local, op, value):
            return f"{local} = {op}({local}, {value_text(value)})"
        case Set(local, value):
            return f"{local} := {value_text(value)}"
        case Store(buffer, index, value, guard):
            condition = "" if guard is None else f" if {value_text(guard)}"
            return f"{buffer}[{index}] = {value_text(value)}{condition}"
        case Update(buffer, index, value):
            return f"{buffer}[{index}] += {value_text(value)}"
        case Matmul(target, left, right, adds, bias):
            sign, more = "+=" if adds else "=", "" if bias is None else f" + {bias}"
            return f"{_matrix(target)} {sign} {_matrix(left)} · {_matrix(right)}{more}"
        case Barrier(scope):
            return f"barrier of the {scope.value}"
        case LibraryCall(name, results, operands):
            made, given = (", ".join(map(_view, views)) for views in (results, operands))
            return f"{made} = {name}({given})"
        case _:
            assert_never(statement)


def _view(view: View) -> str:
    steps = ", ".join(f"{n} step {s}" for n, s in zip(view.shape, view.strides, strict=True))
    return f"{view.buffer}[{view.start}: {steps}]"


def _matrix(matrix: Matrix) -> str:
    rows, columns = _axis(matrix.rows), _axis(matrix.columns)
    return f"{matrix.buffer}[{matrix.index}: {rows} by {columns}]"


def _axis(axis: StridedAxis) -> str:
    if axis.listed:
        return f"{axis.count} at {axis.listed[0]}…{axis.listed[-1]}"
    return f"{axis.count}" if axis.stride == 1 else f"{axis.count} step {axis.stride}"


def value_text(value: Value) -> str:
    return fold(value, _value_text)


def _value_text(value: Value, parts: Sequence[str]) -> str:
    match value:
        case Literal(number, dtype):
            return f"{number}:{dtype}"
        case Load(buffer, index, _):
            return f"{buffer}[{index}]"
        case Local(name, _):
            return name
        case Position(index, dtype):
            return f"({index}):{dtype}"
        case Apply(op, _, _):
            return f"{op}({', '.join(parts)})"
        case Convert(_, dtype):
            return f"{dtype}({parts[0]})"
        case Within(index, low, high, _):
            return f"{low} <= {index} < {high}"
        case Guarded():
            return f"({parts[1]} if {parts[0]} else {parts[2]})"
        case _:
            assert_never(value)


def program_text(program: Program) -> str:
    """What goes in and out, the calls phase by phase, and every distinct kernel once."""
    kernels = program.distinct()
    numbers = {id(kernel): i for i, kernel in enumerate(kernels)}
    lines = [f"leaf {name}: {type_}" for name, type_ in program.leaves]
    for name, array in program.constants:
        digest = hashlib.sha256(array.tobytes()).hexdigest()[:16]
        lines.append(f"constant {name}: {array.dtype}{list(array.shape)} {digest}")
    known = {name for name, _ in (*program.leaves, *program.constants)}
    lines += [f"buffer {b}" for b in program.buffers if b.name not in known]
    lines += [f"adjacent {', '.join(names)}" for names in program.series]
    lines += _steps(program.steps, numbers, 0)
    lines += [
        f"cooperative {'.'.join(map(str, (*b.path, b.first)))}: {len(b.phases)} phases"
        for b in program.cooperative
    ]
    lines += [f"output {o.kind.value} {o.name}: {t} = {name}" for o, name, t in program.outputs]
    lines += [f"updated {name}" for name in program.updated]
    texts = (f"{i}: {to_text(kernel)}" for i, kernel in enumerate(kernels))
    return "\n".join([*lines, *texts]) + "\n"


def _steps(steps: Sequence[Step], numbers: Mapping[int, int], depth: int) -> list[str]:
    lines, pad = list[str](), "  " * depth
    for step in steps:
        match step:
            case Phase(calls):
                lines.append(f"{pad}phase:")
                lines += [f"{pad}  {_call(call, numbers)}" for call in calls]
            case Repeat(length, reverse, inner):
                lines.append(f"{pad}repeat {length}{' in reverse' if reverse else ''}:")
                lines += _steps(inner, numbers, depth + 1)
    return lines


def _call(call: Call, numbers: Mapping[int, int]) -> str:
    names = [f"{a.buffer}{f'@{a.row}' if a.row else ''}" for a in call.arguments]
    count = len(call.kernel.inputs)
    given, made = ", ".join(names[:count]), ", ".join(names[count:])
    return f"{made} = {call.kernel.name}#{numbers[id(call.kernel)]}({given})"
