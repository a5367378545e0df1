"""The source of a program: its kernels, and for each an entry that takes pointers from memory.

An entry is `void @kernel.N(i64 begin, i64 end, ptr scratch, ptr arguments, i64 iteration)`:
arguments are pairs of a pointer and the bytes that an iteration of the repeat around moves it.
"""

from __future__ import annotations

from treadle.codegen.llvm.emitter import Function, Reg
from treadle.codegen.llvm.module import Module
from treadle.codegen.llvm.render import render
from treadle.kernel.machine import Machine
from treadle.kernel.nodes import Kernel
from treadle.kernel.program import Program


def render_program(program: Program, machine: Machine) -> str:
    """The text of a program's kernels, numbered as `Program.distinct` numbers them."""
    return _module(program, machine).text()


def render_parts(program: Program, machine: Machine) -> list[str]:
    """The same in several texts, which may be compiled side by side."""
    return _module(program, machine).texts(machine.lines_at_once)


def _module(program: Program, machine: Machine) -> Module:
    module, moved = Module(machine), dict[int, set[int]]()
    for call in program.calls():
        rows = moved.setdefault(id(call.kernel), set())
        rows |= {i for i, argument in enumerate(call.arguments) if argument.row}
    for i, kernel in enumerate(program.distinct()):
        render(kernel, f"body.{i}", module)
        module.add(_entry(i, len(kernel.buffers), moved[id(kernel)]))
    return module


def render_kernel(kernel: Kernel, machine: Machine) -> str:
    """The text of one kernel, with what it calls."""
    module = Module(machine)
    render(kernel, kernel.name, module, linkage="")
    return module.text()


def _entry(number_: int, count: int, moved: set[int]) -> Function:
    scratch, arguments, iteration = (
        Reg("ptr", "%scratch"),
        Reg("ptr", "%arguments"),
        Reg("i64", "%iteration"),
    )
    given = [Reg("i64", "%begin"), Reg("i64", "%end"), scratch]
    f = Function(f"kernel.{number_}", [*given, arguments, iteration], linkage="")
    for i in range(count):
        pointer = f.load("ptr", f.offset(arguments, 2 * i, "i64"), 8)
        if i in moved:  # in some call
            row = f.load("i64", f.offset(arguments, 2 * i + 1, "i64"), 8)
            pointer = f.offset(pointer, f.binary("mul", row, iteration))
        given.append(pointer)
    f.do(f"call void @body.{number_}({', '.join(map(str, given))})")
    f.do("ret void")
    return f
