"""NCCL: what GPUs exchange by themselves, as part of the graph that a step is.

The library is that of the package nvidia-nccl, which PyTorch brings too, or the system's.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from treadle.base.errors import DeviceError
from treadle.runtime.cuda.device import device

NAME = "libnccl.so.2"
OLDEST = 21200  # the first that knows CUDA 12; graphs have been captured since 2.9
_BYTES = 1  # NCCL's number for uint8
INSTALL = "pip install nvidia-nccl-cu13 (or -cu12), which PyTorch for CUDA brings too."


class UniqueId(ctypes.Structure):
    """What all ranks of a communicator know of each other."""

    _fields_ = (("words", ctypes.c_uint8 * 128),)


def _places() -> Iterator[str]:
    """Where the library may be: as NVIDIA's packages lie, beside PyTorch, on the system."""
    with contextlib.suppress(Exception):  # one that does not know NCCL, or does not find it
        from cuda.pathfinder import load_nvidia_dynamic_lib

        found = load_nvidia_dynamic_lib("nccl").abs_path
        if found:
            yield found
    for folder in sys.path:
        for inside in ("nvidia/nccl/lib", "torch/lib"):
            path = Path(folder or ".") / inside / NAME
            if path.is_file():
                yield str(path)
    yield NAME


@functools.cache
def library() -> Any:
    """NCCL; a DeviceError where it is not installed."""
    for place in _places():
        with contextlib.suppress(OSError):
            found = ctypes.CDLL(place)
            _declare(found)
            return found
    raise DeviceError("cuda", "NCCL is not installed", INSTALL)


def _declare(found: Any) -> None:
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    found.ncclCommInitRank.argtypes = [
        ctypes.POINTER(pointer), ctypes.c_int, UniqueId, ctypes.c_int,
    ]  # fmt: skip
    for name in ("ncclSend", "ncclRecv"):
        getattr(found, name).argtypes = [
            pointer, size, ctypes.c_int, ctypes.c_int, pointer, pointer,
        ]  # fmt: skip
    found.ncclAllGather.argtypes = [pointer, pointer, size, ctypes.c_int, pointer, pointer]
    found.ncclCommDestroy.argtypes = [pointer]
    found.ncclGetErrorString.restype = ctypes.c_char_p


def why_not() -> str | None:
    """Why NCCL cannot be used in this process; None where it can."""
    try:
        found = version()
    except (DeviceError, AttributeError) as error:
        return getattr(error, "cause", str(error))
    return None if found >= OLDEST else f"NCCL is {shown_version()}, from before CUDA 12"


@functools.cache
def version() -> int:
    found = ctypes.c_int()
    _checked(library().ncclGetVersion(ctypes.byref(found)))
    return found.value


def shown_version() -> str:
    number = version()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _checked(code: int) -> None:
    if code:
        told = library().ncclGetErrorString(code)
        raise DeviceError("nccl", f"NCCL says {told.decode() if told else code} ({code})")


def new_id() -> bytes:
    """What one rank makes and tells the others."""
    found = UniqueId()
    _checked(library().ncclGetUniqueId(ctypes.byref(found)))
    return bytes(found.words)


class NcclCommunicator:
    """The ranks of a job, each with a GPU of its own. Making it waits for all of them."""

    _handle: ctypes.c_void_p | None = None

    def __init__(self, identity: bytes, rank: int, size: int):
        self.rank, self.size = rank, size
        device().enter()
        handle, given = ctypes.c_void_p(), UniqueId()
        ctypes.memmove(given.words, identity, len(identity))
        _checked(library().ncclCommInitRank(ctypes.byref(handle), size, given, rank))
        self._handle = handle

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Inside, exchanges are one: none waits for another."""
        _checked(library().ncclGroupStart())
        try:
            yield
        finally:
            code = library().ncclGroupEnd()
        _checked(code)

    def all_to_all(self, given: int, taken: int, nbytes: int, stream: Any) -> None:
        """Rows of some bytes, by their addresses, inside a group."""
        nccl, where = library(), int(stream)
        for rank in range(self.size):
            at = rank * nbytes
            _checked(nccl.ncclSend(given + at, nbytes, _BYTES, rank, self._handle, where))
            _checked(nccl.ncclRecv(taken + at, nbytes, _BYTES, rank, self._handle, where))

    def all_gather(self, given: int, taken: int, nbytes: int, stream: Any) -> None:
        """What each rank gives, one after the other; the own part may be in its place already."""
        handle, where = self._handle, int(stream)
        _checked(library().ncclAllGather(given, taken, nbytes, _BYTES, handle, where))

    def close(self) -> None:
        if self._handle is not None:
            library().ncclCommDestroy(self._handle)
            self._handle = None
