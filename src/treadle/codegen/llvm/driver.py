"""The source of a program: its kernels, and for each an entry that takes pointers from memory.

An entry is `void @kernel.N(i64 begin, i64 end, ptr scratch, ptr arguments, i64 iteration)`:
arguments are pairs of a pointer and the bytes that an iteration of the repeat around moves it.
"""

from __future__ import annotations

from treadle.codegen.llvm.emitter import Function, Reg, number
from treadle.codegen.llvm.module import Module
from treadle.codegen.llvm.render import render
from treadle.kernel.machine import Machine
from treadle.kernel.nodes import Kernel
from treadle.kernel.program import Program


def render_program(program: Program, machine: Machine) -> str:
    """The text of a program's kernels, numbered as `Program.distinct` numbers them."""
    module = Module(machine)
    for i, kernel in enumerate(program.distinct()):
        render(kernel, f"body.{i}", module)
        module.add(_entry(i, len(kernel.buffers)))
    return module.text()


def render_kernel(kernel: Kernel, machine: Machine) -> str:
    """The text of one kernel, with what it calls."""
    module = Module(machine)
    render(kernel, kernel.name, module, linkage="")
    return module.text()


def _entry(number_: int, count: int) -> Function:
    parameters = [
        Reg("i64", "%begin"),
        Reg("i64", "%end"),
        Reg("ptr", "%scratch"),
        Reg("ptr", "%arguments"),
        Reg("i64", "%iteration"),
    ]
    f = Function(f"kernel.{number_}", parameters, linkage="")
    given = [str(p) for p in parameters[:3]]
    for i in range(count):
        base = _word(f, 2 * i, "ptr")
        row = _word(f, 2 * i + 1, "i64")
        moved = f.binary("mul", row, Reg("i64", "%iteration"))
        given.append(str(f.value("ptr", f"getelementptr inbounds i8, {base}, {moved}")))
    f.do(f"call void @body.{number_}({', '.join(given)})")
    f.do("ret void")
    return f


def _word(f: Function, i: int, type_: str) -> Reg:
    address = f.value("ptr", f"getelementptr inbounds i64, ptr %arguments, {number(i, 'i64')}")
    return f.value(type_, f"load {type_}, {address}, align 8")
