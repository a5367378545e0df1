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
    module = Module(machine)
    for i, kernel in enumerate(program.distinct()):
        render(kernel, f"body.{i}", module)
        module.add(_entry(i, len(kernel.buffers)))
    return module


def render_kernel(kernel: Kernel, machine: Machine) -> str:
    """The text of one kernel, with what it calls."""
    module = Module(machine)
    render(kernel, kernel.name, module, linkage="")
    return module.text()


def _entry(number_: int, count: int) -> Function:
    scratch, arguments, iteration = (
        Reg("ptr", "%scratch"),
        Reg("ptr", "%arguments"),
        Reg("i64", "%iteration"),
    )
    given = [Reg("i64", "%begin"), Reg("i64", "%end"), scratch]
    f = Function(f"kernel.{number_}", [*given, arguments, iteration], linkage="")
    for i in range(count):
        base, row = (
            f.load(type_, f.offset(arguments, 2 * i + word, "i64"), 8)
            for word, type_ in enumerate(("ptr", "i64"))
        )
        given.append(f.offset(base, f.binary("mul", row, iteration)))
    f.do(f"call void @body.{number_}({', '.join(map(str, given))})")
    f.do("ret void")
    return f
