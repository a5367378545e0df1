"""Kernels and programs as text."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from treadle.kernel.nodes import Kernel
from treadle.kernel.program import Call, Phase, Program, Repeat, Step
from treadle.kernel.traverse import nested


def to_text(kernel: Kernel) -> str:
    """One line a statement, loops indented."""
    inputs = ", ".join(map(str, kernel.inputs))
    outputs = ", ".join(map(str, kernel.outputs))
    lines = [f"kernel {kernel.name}({inputs}) -> {outputs} {{"]
    lines += [f"  launch {kernel.geometry}"] if kernel.geometry is not None else []
    lines += [f"  scratch {buffer}" for buffer in kernel.scratch]
    for statement, loops in nested(kernel.body):
        lines.append(f"{'  ' * (1 + len(loops))}{statement}")
    return "\n".join([*lines, "}"])


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
    lines += [str(binding) for binding in program.bindings.every]
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
