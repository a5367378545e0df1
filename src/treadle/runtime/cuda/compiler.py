"""CUDA text to machine code, through NVRTC in processes beside this one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, overload

from treadle.base.errors import DeviceError
from treadle.runtime.cpu.processors import default_threads
from treadle.runtime.cuda.compilers import compilers
from treadle.runtime.cuda.device import INSTALL
from treadle.runtime.cuda.once import once

CUBIN = b"\x7fELF"


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise DeviceError("cuda", "the package cuda-bindings is not installed", INSTALL) from error
    return nvrtc


@once
def compiler_version() -> str:
    nvrtc = _nvrtc()
    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:
        raise DeviceError("cuda", "NVRTC is not installed", INSTALL) from error
    return f"NVRTC {major}.{minor}"


class Compiling(Sequence[bytes]):
    """Machine code of parts that are compiled at the same time, while other work goes on.

    Whoever asks for a part waits for it. With `contracts` the compiler may make one rounding of a
    product and a sum, wherever it likes to.
    """

    def __init__(self, parts: Sequence[str], architecture: str, contracts: bool = True):
        compiler_version()
        self._pool = ThreadPoolExecutor(max(1, min(len(parts), default_threads())))
        # The longest first: nobody waits for one that was begun last.
        order = sorted(range(len(parts)), key=lambda i: -len(parts[i]))
        begun = {
            i: self._pool.submit(compile_source, parts[i], architecture, contracts) for i in order
        }
        self._made = [begun[i] for i in range(len(parts))]
        self._pool.shutdown(wait=False)

    def __len__(self) -> int:
        return len(self._made)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        some = self._made[index]
        return [part.result() for part in some] if isinstance(some, list) else some.result()


# What is tried for a text at which the compiler itself crashes (NVRTC 13.5 does, at a cooperative
# launch of three small kernels): it optimises less, and last not at all.
LESSER: tuple[tuple[str, ...], ...] = ((), ("--Ofast-compile=min",), ("-G",))


def compile_source(text: str, architecture: str, contracts: bool = True) -> bytes:
    """The cubin of a text, from a process of the compiler's own."""
    options = [f"-arch={architecture}", "-std=c++17", "-w"]
    options += [] if contracts else ["-fmad=false"]
    asked = compilers()
    compiled = compiled_here if asked is None else asked.compiled
    for more in LESSER:
        found = compiled(text, [*options, *more])
        if found is not None:
            return _cubin(*found, architecture)
    names = ", ".join(re.findall(r"__global__ void [^;{]*?(\w+)\(const", text))
    raise DeviceError(
        "cuda",
        f"{compiler_version()} crashes when it compiles {names} for {architecture}",
        'Install another version of nvidia-cuda-nvrtc, or use device="cpu".',
    )


def _cubin(result: int, found: bytes, architecture: str) -> bytes:
    if result:
        told = found.rstrip(b"\0").decode(errors="replace")
        raise AssertionError(f"NVRTC refuses a kernel for {architecture}: {told[:2000]}")
    return found


def compiled_here(text: str, options: Sequence[str]) -> tuple[int, bytes]:
    """NVRTC's result in this process, and the cubin or what it said."""
    nvrtc = _nvrtc()
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"treadle.cu", 0, [], [])
    given = [option.encode() for option in options]
    result = int(nvrtc.nvrtcCompileProgram(program, len(given), given)[0])
    size, get = (
        (nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        if result
        else (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    )
    found = bytearray(size(program)[1])
    get(program, found)
    nvrtc.nvrtcDestroyProgram(program)
    return result, bytes(found)


def is_cubin(code: bytes) -> bool:
    return code.startswith(CUBIN)
