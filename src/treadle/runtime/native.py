"""LLVM text to machine code in this process, through llvmlite. Imported where it is used."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Target:
    """The machine that is compiled for."""

    cpu: str
    features: str
    width: int  # float32 lanes of a vector


@functools.cache
def host() -> Target:
    llvm = _llvm()
    features = llvm.get_host_cpu_features()
    width = 16 if features.get("avx512f") else 8 if features.get("avx2") else 4
    return Target(llvm.get_host_cpu_name(), features.flatten(), width)


class Library:
    """Compiled functions; the code lives as long as this object."""

    def __init__(self, text: str):
        llvm = _llvm()
        module = llvm.parse_assembly(text)
        module.verify()
        target = host()
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=target.cpu,
            features=target.features,
            opt=2,
            reloc="pic",
            codemodel="default",
            jit=True,
        )
        self._engine: Any = llvm.create_mcjit_compiler(module, machine)
        self._engine.finalize_object()

    def address(self, name: str) -> int:
        found: int = self._engine.get_function_address(name)
        return found


@functools.cache
def _llvm() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm
