"""LLVM text to machine code in this process, through llvmlite. Imported where it is used."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from treadle.base.errors import DeviceError
from treadle.kernel.machine import NATIVE
from treadle.runtime.cpu.objects import missing_names
from treadle.runtime.cpu.targets import Processor, Target, named_target, target_of

# Code and its constants are in pages of their own, which may be more than 2 GiB apart in a process
# that has mapped much; LLVM ends the process where distances of 32 bits do not reach.
CODE_MODEL = "large"
# Addresses as they are: with a table of offsets LLVM's loader takes the first object's for all.
RELOCATION = "static"


@functools.cache
def processor() -> Processor:
    """The one that this process runs on."""
    llvm = _llvm()
    features = dict(llvm.get_host_cpu_features())
    return Processor(llvm.get_default_triple(), llvm.get_host_cpu_name(), features)


@functools.cache
def host() -> Target:
    """Everything that this processor has."""
    return target_of(NATIVE, processor())


def chosen_target(given: str | int) -> Target:
    """The target of an option, or that of the environment where the option is the default."""
    return target_of(named_target(given), processor())


def compiler_version() -> str:
    """What object code depends on beside its source and the target."""
    import llvmlite

    llvm = ".".join(map(str, _llvm().llvm_version_info))
    return f"llvmlite {llvmlite.__version__}, LLVM {llvm}, {CODE_MODEL} {RELOCATION} code"


def compile_object(text: str, target: Target | None = None) -> bytes:
    """Machine code of LLVM text, as an object file; for this processor if nothing else is said."""
    module = _parsed(text)
    found: bytes = _machine(target or host()).emit_object(module)
    return found


def compile_objects(texts: Sequence[str], target: Target, threads: int) -> tuple[bytes, ...]:
    """Machine code of texts that call one another, several compiled at a time."""
    if len(texts) == 1 or threads == 1:
        return tuple(compile_object(text, target) for text in texts)
    with ThreadPoolExecutor(threads) as pool:
        return tuple(pool.map(lambda text: _emitted(text, target), texts))


def _emitted(text: str, target: Target) -> bytes:
    """As `compile_object`, while other threads do the same.

    llvmlite lets one thread at a time into LLVM, which needs that of threads that share a context.
    These share none. Where llvmlite's own function cannot be had without its lock, they take turns.
    """
    module, machine = _parsed(text), _machine(target)
    library = _llvm().ffi.lib
    emit = getattr(library.LLVMPY_TargetMachineEmitToMemory, "_cfn", None)
    if emit is None:
        found: bytes = machine.emit_object(module)
        return found
    with _llvm().ffi.OutputString() as error:
        memory = emit(machine, module, 1, error)
        if not memory:
            raise RuntimeError(str(error))
    start, size = library.LLVMPY_GetBufferStart(memory), library.LLVMPY_GetBufferSize(memory)
    try:
        return ctypes.string_at(start, size)
    finally:
        library.LLVMPY_DisposeMemoryBuffer(memory)


def assembly(text: str, target: Target | None = None) -> str:
    """Machine code of LLVM text, to read."""
    found: str = _machine(target or host()).emit_assembly(_parsed(text))
    return found


def _parsed(text: str) -> Any:
    # A context of its own: several threads may compile at a time.
    llvm = _llvm()
    module = llvm.parse_assembly(text, llvm.create_context())
    module.verify()
    return module


class LibraryCall:
    """Compiled functions; the code lives as long as this object."""

    def __init__(self, objects: list[bytes]):
        llvm = _llvm()
        self._engine: Any = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine(host()))
        _refuse_missing(objects)  # the first engine makes the process's own functions known
        for code in objects:
            self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()

    @classmethod
    def from_text(cls, text: str) -> LibraryCall:
        return cls([compile_object(text)])

    def address(self, name: str) -> int:
        found: int = self._engine.get_function_address(name)
        if not found:
            raise LookupError(f"no function {name} in the compiled code")
        return found


def _refuse_missing(objects: list[bytes]) -> None:
    """What code calls must be there: LLVM would end the process at the first call."""
    find = _llvm().address_of_symbol
    missing = [name for name in missing_names(objects) if not find(name)]
    if missing:
        raise DeviceError(
            "load",
            f"the compiled code calls {', '.join(missing)}, which this process has not",
            "Please report it with the program; another target (TREADLE_TARGET) may not need it.",
        )


def _machine(target: Target) -> Any:
    return (
        _llvm()
        .Target.from_default_triple()
        .create_target_machine(
            cpu=target.cpu,
            features=target.features,
            opt=2,
            reloc=RELOCATION,
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
