"""LLVM text to machine code in this process, through llvmlite. Imported where it is used.

llvmlite is called aside, so that an interrupt of a compile leaves it whole (`aside.py`).
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from treadle.base.errors import DeviceError
from treadle.kernel.machine import NATIVE
from treadle.runtime.cpu.aside import aside, with_next
from treadle.runtime.cpu.objects import missing_names
from treadle.runtime.cpu.targets import Processor, Target, named_target, target_of

# Code and its constants are in pages of their own, which may be more than 2 GiB apart in a process
# that has mapped much; LLVM ends the process where distances of 32 bits do not reach.
CODE_MODEL = "large"
# Addresses as they are: with a table of offsets LLVM's loader takes the first object's for all.
RELOCATION = "static"

IsWanted = Callable[[], bool]  # whether a call aside is still waited for


@functools.cache
def processor() -> Processor:
    """The one that this process runs on."""

    def look(_: IsWanted) -> Processor:
        llvm = _llvm()
        features = dict(llvm.get_host_cpu_features())
        return Processor(llvm.get_default_triple(), llvm.get_host_cpu_name(), features)

    return aside(look)


@functools.cache
def host() -> Target:
    """Everything that this processor has."""
    return target_of(NATIVE, processor())


def chosen_target(given: str | int) -> Target:
    """The target of an option, or that of the environment where the option is the default."""
    return target_of(named_target(given), processor())


@functools.cache
def compiler_version() -> str:
    """What object code depends on beside its source and the target."""
    import llvmlite

    llvm = ".".join(map(str, aside(lambda _: _llvm().llvm_version_info)))
    return f"llvmlite {llvmlite.__version__}, LLVM {llvm}, {CODE_MODEL} {RELOCATION} code"


def compile_object(text: str, target: Target | None = None) -> bytes:
    """Machine code of LLVM text, as an object file; for this processor if nothing else is said."""
    chosen = target or host()

    def compiled(_: IsWanted) -> bytes:
        found: bytes = _machine(chosen).emit_object(_parsed(text))
        return found

    return aside(compiled)


def compile_objects(texts: Sequence[str], target: Target, threads: int) -> tuple[bytes, ...]:
    """Machine code of texts that call one another, several compiled at a time."""

    def compiled(is_wanted: IsWanted) -> tuple[bytes, ...]:
        def one(text: str) -> bytes:
            if not is_wanted():  # the compile was interrupted
                return b""
            return compile_object(text, target) if threads == 1 else _emitted(text, target)

        if len(texts) == 1 or threads == 1:
            return tuple(map(one, texts))
        with ThreadPoolExecutor(threads) as pool:
            return tuple(pool.map(one, texts))

    return aside(compiled)


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
    chosen = target or host()

    def compiled(_: IsWanted) -> str:
        found: str = _machine(chosen).emit_assembly(_parsed(text))
        return found

    return aside(compiled)


def _parsed(text: str) -> Any:
    # A context of its own: several threads may compile at a time.
    llvm = _llvm()
    module = llvm.parse_assembly(text, llvm.create_context())
    module.verify()
    return module


# Engines by number. Collected garbage that had one would free it in the thread that collects.
_engines: dict[int, Any] = {}
_numbers = itertools.count()


class LibraryCall:
    """Compiled functions; the code lives as long as this object."""

    def __init__(self, objects: list[bytes]):
        target = host()

        self._number = number = next(_numbers)

        def loaded(is_wanted: IsWanted) -> list[str]:
            llvm = _llvm()
            engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine(target))
            missing = _missing(objects)  # the first engine makes the process's own functions known
            if not missing:
                for code in objects:
                    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
                engine.finalize_object()
            if is_wanted():
                _engines[number] = engine
            return missing

        _refuse(aside(loaded))

    def __del__(self) -> None:
        with_next(functools.partial(_engines.pop, self._number, None))

    @classmethod
    def from_text(cls, text: str) -> LibraryCall:
        return cls([compile_object(text)])

    def address(self, name: str) -> int:
        return self.addresses([name])[0]

    def addresses(self, names: Sequence[str]) -> list[int]:
        """Of functions by name, in order."""
        engine = _engines[self._number]
        found = aside(lambda _: [engine.get_function_address(name) for name in names])
        for name, address in zip(names, found, strict=True):
            if not address:
                raise LookupError(f"no function {name} in the compiled code")
        return found


def _missing(objects: list[bytes]) -> list[str]:
    """What code calls and the process has not: LLVM would end it at the first call."""
    find = _llvm().address_of_symbol
    return [name for name in missing_names(objects) if not find(name)]


def _refuse(missing: list[str]) -> None:
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
