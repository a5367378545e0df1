"""CUDA text to machine code, through NVRTC: no compiler is installed, no file is written."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

from treadle.base.errors import DeviceError
from treadle.runtime.cuda.device import INSTALL

CUBIN = b"\x7fELF"


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise DeviceError("cuda", "the package cuda-bindings is not installed", INSTALL) from error
    return nvrtc


@functools.cache
def compiler_version() -> str:
    nvrtc = _nvrtc()
    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:
        raise DeviceError("cuda", "NVRTC is not installed", INSTALL) from error
    return f"NVRTC {major}.{minor}"


def compile_parts(parts: Sequence[str], architecture: str) -> tuple[bytes, ...]:
    """Machine code of each part; parts are compiled at the same time."""
    compiler_version()
    found: list[bytes | BaseException] = [b""] * len(parts)

    def one(i: int) -> None:
        try:
            found[i] = compile_source(parts[i], architecture)
        except BaseException as error:
            found[i] = error

    threads = [threading.Thread(target=one, args=(i,)) for i in range(1, len(parts))]
    for thread in threads:
        thread.start()
    if parts:
        one(0)
    for thread in threads:
        thread.join()
    done: list[bytes] = []
    for item in found:
        if isinstance(item, BaseException):
            raise item
        done.append(item)
    return tuple(done)


def compile_source(text: str, architecture: str) -> bytes:
    nvrtc = _nvrtc()
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"treadle.cu", 0, [], [])
    options = [f"-arch={architecture}".encode(), b"-std=c++17", b"-w"]
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
