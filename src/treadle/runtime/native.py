"""LLVM text to machine code in this process, through llvmlite. Imported where it is used."""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Target:
    """The machine that is compiled for."""

    cpu: str
    features: str
    width: int  # float32 lanes of a vector
    permutes: bool  # whether lanes look numbers up in a register of 16


@functools.cache
def host() -> Target:
    llvm = _llvm()
    features = llvm.get_host_cpu_features()
    is_wide = bool(features.get("avx512f"))
    width = 16 if is_wide else 8 if features.get("avx2") else 4
    return Target(llvm.get_host_cpu_name(), features.flatten(), width, is_wide)


# Code and its constants are in pages of their own, which may be more than 2 GiB apart in a process
# that has mapped much; LLVM ends the process where distances of 32 bits do not reach.
CODE_MODEL = "large"


def compiler_version() -> str:
    """What object code depends on beside its source and the target."""
    import llvmlite

    llvm = ".".join(map(str, _llvm().llvm_version_info))
    return f"llvmlite {llvmlite.__version__}, LLVM {llvm}, {CODE_MODEL} code"


def compile_object(text: str) -> bytes:
    """Machine code of LLVM text, as an object file."""
    module = _parsed(text)
    found: bytes = _machine().emit_object(module)
    return found


def assembly(text: str) -> str:
    """Machine code of LLVM text, to read."""
    found: str = _machine().emit_assembly(_parsed(text))
    return found


def _parsed(text: str) -> Any:
    # A context of its own: several threads may compile at a time.
    llvm = _llvm()
    module = llvm.parse_assembly(text, llvm.create_context())
    module.verify()
    return module


class Library:
    """Compiled functions; the code lives as long as this object."""

    def __init__(self, objects: list[bytes]):
        llvm = _llvm()
        self._engine: Any = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())
        for code in objects:
            self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()

    @classmethod
    def from_text(cls, text: str) -> Library:
        return cls([compile_object(text)])

    def address(self, name: str) -> int:
        found: int = self._engine.get_function_address(name)
        if not found:
            raise LookupError(f"no function {name} in the compiled code")
        return found


def is_object(code: bytes) -> bool:
    """Whether bytes are whole object code: ELF with its table of sections, or Mach-O.

    LLVM does not ask: it crashes on what is none.
    """
    if code[:4] == b"\xcf\xfa\xed\xfe":
        return True
    if code[:5] != b"\x7fELF\x02" or len(code) < _ELF.size:
        return False
    header = _ELF.unpack_from(code)
    start, size, count = header[6], header[11], header[12]
    return start > 0 and size == _SECTION and count > 0 and start + size * count <= len(code)


_ELF = struct.Struct(
    "<16sHHIQQQIHHHHHH"
)  # the header of 64 bits: start, size and count of sections
_SECTION = 64


def give_back_memory() -> None:
    """What building freed goes back to the system, where the C library would keep it.

    Values are made in float64 and copied: a process would stay larger than its report says.
    """
    if os.name == "posix":
        with suppress(AttributeError, OSError):  # other C libraries have no such function
            ctypes.CDLL(None).malloc_trim(0)


def _machine() -> Any:
    target = host()
    return (
        _llvm()
        .Target.from_default_triple()
        .create_target_machine(
            cpu=target.cpu,
            features=target.features,
            opt=2,
            reloc="pic",
            codemodel=CODE_MODEL,
            jit=True,
        )
    )


@functools.cache
def _llvm() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm
