"""CUDA text to machine code, through NVRTC: no compiler is installed, no file is written."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, overload

from treadle.base.errors import DeviceError
from treadle.runtime.cpu.processors import default_threads
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


def compile_source(text: str, architecture: str, contracts: bool = True) -> bytes:
    nvrtc = _nvrtc()
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"treadle.cu", 0, [], [])
    options = [f"-arch={architecture}".encode(), b"-std=c++17", b"-w"]
    options += [] if contracts else [b"-fmad=false"]
    code = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
    if int(code):
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = bytearray(size)
        nvrtc.nvrtcGetProgramLog(program, log)
        nvrtc.nvrtcDestroyProgram(program)
        told = bytes(log).rstrip(b"\0").decode(errors="replace")
        raise AssertionError(f"NVRTC refuses a kernel for {architecture}: {told[:2000]}")
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    cubin = bytearray(size)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(cubin)


def is_cubin(code: bytes) -> bool:
    return code.startswith(CUBIN)
