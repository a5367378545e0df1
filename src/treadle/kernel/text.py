"""Kernels as text."""

from __future__ import annotations

from typing import assert_never

from treadle.kernel.nodes import (
    Accumulate,
    Apply,
    Convert,
    For,
    Guarded,
    Kernel,
    Let,
    Library,
    Literal,
    Load,
    Local,
    Matrix,
    Multiply,
    Position,
    Set,
    Statement,
    Store,
    Update,
    Value,
    View,
    Walk,
    Within,
)


def to_text(kernel: Kernel) -> str:
    """One line a statement, loops indented."""
    inputs = ", ".join(map(str, kernel.inputs))
    outputs = ", ".join(map(str, kernel.outputs))
    lines = [f"kernel {kernel.name}({inputs}) -> {outputs} {{"]
    lines += [f"  scratch {buffer}" for buffer in kernel.scratch]
    for statement in kernel.body:
        lines += _statement(statement, 1)
    return "\n".join([*lines, "}"])


def _statement(statement: Statement, depth: int) -> list[str]:
    pad = "  " * depth
    match statement:
        case For(var, role, body, stop):
            end = var.extent if stop is None else f"{stop} of {var.extent}"
            lines = [f"{pad}for {var.name} in {end} {role.value}:"]
            for inner in body:
                lines += _statement(inner, depth + 1)
            return lines
        case Let(local, value):
            return [f"{pad}{local} = {value_text(value)}"]
        case Accumulate(local, op, value):
            return [f"{pad}{local} = {op}({local}, {value_text(value)})"]
        case Set(local, value):
            return [f"{pad}{local} := {value_text(value)}"]
        case Store(buffer, index, value, guard):
            condition = "" if guard is None else f" if {value_text(guard)}"
            return [f"{pad}{buffer}[{index}] = {value_text(value)}{condition}"]
        case Update(buffer, index, value):
            return [f"{pad}{buffer}[{index}] += {value_text(value)}"]
        case Multiply(target, left, right, adds, bias):
            sign, more = "+=" if adds else "=", "" if bias is None else f" + {bias}"
            return [f"{pad}{_matrix(target)} {sign} {_matrix(left)} · {_matrix(right)}{more}"]
        case Library(name, results, operands):
            made, given = (", ".join(map(_view, views)) for views in (results, operands))
            return [f"{pad}{made} = {name}({given})"]
        case _:
            assert_never(statement)


def _view(view: View) -> str:
    steps = ", ".join(f"{n} step {s}" for n, s in zip(view.shape, view.strides, strict=True))
    return f"{view.buffer}[{view.start}: {steps}]"


def _matrix(matrix: Matrix) -> str:
    rows, columns = _walk(matrix.rows), _walk(matrix.columns)
    return f"{matrix.buffer}[{matrix.index}: {rows} by {columns}]"


def _walk(walk: Walk) -> str:
    if walk.listed:
        return f"{walk.count} at {walk.listed[0]}…{walk.listed[-1]}"
    return f"{walk.count}" if walk.stride == 1 else f"{walk.count} step {walk.stride}"


def value_text(value: Value) -> str:
    match value:
        case Literal(number, dtype):
            return f"{number}:{dtype}"
        case Load(buffer, index, _):
            return f"{buffer}[{index}]"
        case Local(name, _):
            return name
        case Position(index, dtype):
            return f"({index}):{dtype}"
        case Apply(op, operands, _):
            return f"{op}({', '.join(map(value_text, operands))})"
        case Convert(inner, dtype):
            return f"{dtype}({value_text(inner)})"
        case Within(index, low, high, _):
            return f"{low} <= {index} < {high}"
        case Guarded(guard, inner, other, _):
            return f"({value_text(inner)} if {value_text(guard)} else {value_text(other)})"
        case _:
            assert_never(value)
