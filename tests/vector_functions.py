"""Elementary functions of vectors, compiled and run over arrays, and what they are compared with."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import llvmlite.binding as llvm
import numpy as np
from scipy import special

from treadle.base.dtypes import DType, float32
from treadle.codegen.llvm import mathematics
from treadle.codegen.llvm.emitter import Function, Reg, element_type, number, vector
from treadle.kernel.machine import Machine

REFERENCES: dict[str, Callable[..., np.ndarray]] = {
    "exp": np.exp,
    "log": np.log,
    "tanh": np.tanh,
    "erf": special.erf,
    "sin": np.sin,
    "cos": np.cos,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "pow": np.power,
    "atan2": np.arctan2,
}


def loop_over_arrays(name: str, width: int, dtype: DType, inline: bool, machine: Machine) -> str:
    """A module with one exported function: operands, result, count (a multiple of the width)."""
    arity = mathematics.arity(name)
    pointers = [Reg("ptr", f"%p{i}") for i in range(arity + 1)]
    count = Reg("i64", "%count")
    run = Function("run", [*pointers, count], linkage="dso_local")
    element = element_type(dtype)
    definition = mathematics.define(name, width, dtype, machine)
    type_ = vector(element, width)
    with run.loop(number(0, "i64"), count, number(width, "i64")) as loop:
        at = [run.value("ptr", f"getelementptr {element}, {p}, {loop.counter}") for p in pointers]
        operands = [run.value(type_, f"load {type_}, {p}, align {dtype.itemsize}") for p in at[:-1]]
        if inline:
            result = mathematics.apply(run, name, *operands, machine=machine)
        else:
            result = run.call(definition.name, type_, *operands)
        run.do(f"store {result}, {at[-1]}, align {dtype.itemsize}")
    run.do("ret void")
    declarations = sorted(run.declarations | definition.declarations)
    return "\n".join([*declarations, definition.text(), run.text()])


def _target_machine(is_plain: bool) -> llvm.TargetMachine:
    """A new one each time, for an engine frees its own. A plain one has no extensions."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    if is_plain:
        return target.create_target_machine(opt=2, reloc="pic")
    cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    return target.create_target_machine(cpu, features, opt=2, reloc="pic")


class Compiled:
    """A function of whole arrays of any size."""

    def __init__(
        self,
        name: str,
        width: int,
        dtype: DType = float32,
        inline: bool = False,
        is_plain: bool = False,
        permutes: int = 0,
    ) -> None:
        self.width, self.dtype, self.arity = width, dtype, mathematics.arity(name)
        machine = Machine(width, permutes, has_fma=not is_plain)
        module = llvm.parse_assembly(loop_over_arrays(name, width, dtype, inline, machine))
        module.verify()
        self.engine = llvm.create_mcjit_compiler(module, _target_machine(is_plain))
        self.engine.finalize_object()
        pointers = [ctypes.c_void_p] * (self.arity + 1)
        signature = ctypes.CFUNCTYPE(None, *pointers, ctypes.c_int64)
        self.run = signature(self.engine.get_function_address("run"))

    def __call__(self, *operands: np.ndarray) -> np.ndarray:
        size = operands[0].size
        padded = [self._padded(x) for x in operands]
        out = np.empty_like(padded[0])
        self.run(*(x.ctypes.data for x in (*padded, out)), out.size)
        return out[:size]

    def _padded(self, x: np.ndarray) -> np.ndarray:
        assert x.dtype == self.dtype.numpy
        assert x.ndim == 1
        return np.ascontiguousarray(np.pad(x, (0, -x.size % self.width)))


compiled = cache(Compiled)


def exact(name: str, *operands: np.ndarray) -> np.ndarray:
    """The function of float32s in float64, whose own error is lost in half an ulp of float32."""
    with np.errstate(all="ignore"):
        return REFERENCES[name](*(x.astype(np.float64) for x in operands))


def ulps(got: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Errors of float32s, in units of the last place of the exact result; ∞ where one of the two
    is NaN or infinite, and the other is not the same."""
    with np.errstate(all="ignore"):
        rounded = expected.astype(np.float32)
        error = np.abs(got - expected) / _last_place(expected)
    same = (got == rounded) | (np.isnan(got) & np.isnan(expected))
    ordinary = np.isfinite(got) & np.isfinite(rounded)
    return np.where(ordinary, error, np.where(same, 0.0, np.inf))


def _last_place(x: np.ndarray) -> np.ndarray:
    """2^(e − 23) for 2^e ≤ |x| < 2^(e + 1), and at least the smallest float32."""
    biased = (x.view(np.int64) >> 52) & 0x7FF
    return (np.maximum(biased, 1023 - 126) - 23 << 52).view(np.float64)
