"""A driver that runs no kernels: memory is the host's, copies are made, launches are counted.

With it everything around the kernels is tested without a GPU: captured graphs repeat their copies,
and any call can be told to fail. What a capture must not meet ends it, as the driver's strictest
mode has it: frees, allocations and waits on the capturing thread, and any wait for its stream.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from treadle.backends import compiled
from treadle.backends.cuda import backend as cuda_backend
from treadle.runtime.cuda import blas
from treadle.runtime.cuda import device as devices
from treadle.runtime.cuda.compiler import CUBIN


class Code(int):
    """A result as the driver gives it: a number with a name."""

    name = "CUDA_SUCCESS"


def failure(number: int, name: str) -> Code:
    code = Code(number)
    code.name = f"CUDA_ERROR_{name}"
    return code


# What the thread that captures must not call meanwhile.
UNSAFE = frozenset(
    [
        "cuMemAlloc", "cuMemFree", "cuMemHostAlloc", "cuMemFreeHost", "cuModuleLoadData",
        "cuModuleUnload", "cuEventDestroy", "cuGraphExecDestroy", "cuStreamSynchronize",
        "cuMemcpyHtoD", "cuMemcpyDtoH", "cuMemsetD8", "cuMemsetD16", "cuMemsetD32",
    ]
)  # fmt: skip


class Capture:
    """What is captured of a stream, by whom, and the call that ended it before its end."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []
        self.thread = threading.get_ident()
        self.ended_by = ""


class _Anything:
    """An enumeration whose members are their names."""

    def __getattr__(self, name: str) -> str:
        return name


class FakeDriver:
    """Counts calls; `fail` makes one of them answer an error from then on."""

    def __init__(self, free: int = 8 << 30, chip: tuple[int, int] = (9, 0)):
        self.free, self.total, self.chip = free, 8 << 30, chip
        self.most_shared = 227 << 10  # bytes of a block
        self.devices = 1
        self.calls: Counter[str] = Counter()
        self.failing: dict[str, Code] = {}
        self.memory: dict[int, Any] = {}
        self.captures: dict[int, Capture] = {}  # by stream
        self.streams: list[int] = []  # the flags of each
        self.contexts = threading.local()  # a stack for each thread
        self.during: Counter[str] = Counter()  # calls by whoever captures, meanwhile
        self.events: set[int] = set()
        self.modules: set[int] = set()
        self.graphs: list[Any] = []  # instantiated
        self.launched: list[SimpleNamespace] = []
        for name in ("CUdevice_attribute", "CUfunction_attribute", "CUlaunchAttributeID"):
            setattr(self, name, _Anything())
        self.CUstreamCaptureMode = _Anything()
        self.CUlaunchConfig = SimpleNamespace
        self.CUlaunchAttribute = lambda: SimpleNamespace(value=SimpleNamespace())

    def fail(self, call: str, number: int, name: str) -> None:
        self.failing[call] = failure(number, name)

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if not name.startswith("cu"):
            return found
        self.calls[name] += 1
        for capture in self.captures.values():
            if capture.thread == threading.get_ident():
                self.during[name] += 1
                if name in UNSAFE:
                    capture.ended_by = name
                    return lambda *_: (failure(900, "STREAM_CAPTURE_UNSUPPORTED"), 0, 0)
        failing = self.failing.get(name)
        return found if failing is None else lambda *_: (failing, 0, 0)

    def _do(self, work: Callable[[], None], stream: int | None = None) -> tuple[Code]:
        """Work that is captured if its stream is; without a stream, after all that block."""
        if stream is None and any(self.streams[s] == 0 for s in self.captures):
            for capture in self.captures.values():
                capture.ended_by = "the default stream"
            return (failure(906, "STREAM_CAPTURE_IMPLICIT"),)
        capture = None if stream is None else self.captures.get(stream)
        if capture is None:
            work()
        elif capture.ended_by:
            return (failure(901, "STREAM_CAPTURE_INVALIDATED"),)
        else:
            capture.work.append(work)
        return (Code(0),)

    def _new(self, nbytes: int) -> tuple[Code, int]:
        memory = (ctypes.c_uint8 * (max(1, nbytes) + 256))()
        address = -(-ctypes.addressof(memory) // 256) * 256
        self.memory[address] = memory
        return Code(0), address

    def _gone(self, address: int) -> tuple[Code]:
        if not self._stack():
            return (failure(201, "INVALID_CONTEXT"),)
        del self.memory[int(address)]
        return (Code(0),)

    def _copied(
        self, target: int, source: int, nbytes: int, stream: int | None = None
    ) -> tuple[Code]:
        return self._do(lambda: ctypes.memmove(int(target), int(source), nbytes) and None, stream)

    def _set(self, address: int, value: int, count: int, size: int) -> tuple[Code]:
        word = (int(value) & (1 << 8 * size) - 1).to_bytes(size, "little")
        return self._do(lambda: ctypes.memmove(int(address), word * count, size * count) and None)

    def cuMemsetD8(self, address: int, value: int, count: int) -> tuple[Code]:
        return self._set(address, value, count, 1)

    def cuMemsetD16(self, address: int, value: int, count: int) -> tuple[Code]:
        return self._set(address, value, count, 2)

    def cuMemsetD32(self, address: int, value: int, count: int) -> tuple[Code]:
        return self._set(address, value, count, 4)

    # What is asked of the driver

    def cuInit(self, flags: int) -> tuple[Code]:
        return (Code(0),)

    def cuDriverGetVersion(self) -> tuple[Code, int]:
        return Code(0), 13000

    def cuDeviceGetCount(self) -> tuple[Code, int]:
        return Code(0), self.devices

    def cuDeviceGet(self, number: int) -> tuple[Code, int]:
        return Code(0), number

    def cuDeviceGetName(self, size: int, device: int) -> tuple[Code, bytes]:
        return Code(0), b"Fake 9000\0\0"

    def cuDeviceGetAttribute(self, kind: str, device: int) -> tuple[Code, int]:
        known = {"MAJOR": self.chip[0], "MINOR": self.chip[1], "COUNT": 132}
        known["OPTIN"] = self.most_shared
        return Code(0), known[kind.rpartition("_")[2]]

    def cuDeviceGetPCIBusId(self, size: int, device: int) -> tuple[Code, bytes]:
        return Code(0), b"0000:01:00.0\0\0"

    def cuMemGetInfo(self) -> tuple[Code, int, int]:
        return Code(0), self.free, self.total

    def cuMemAlloc(self, nbytes: int) -> tuple[Code, int]:
        if nbytes > self.free:
            return failure(2, "OUT_OF_MEMORY"), 0
        return self._new(nbytes)

    def cuMemHostAlloc(self, nbytes: int, flags: int) -> tuple[Code, int]:
        return self._new(nbytes)

    def cuStreamCreate(self, flags: int) -> tuple[Code, int]:
        self.streams.append(flags)
        return Code(0), len(self.streams) - 1

    def cuStreamSynchronize(self, stream: int) -> tuple[Code]:
        if stream in self.captures:
            self.captures[stream].ended_by = "cuStreamSynchronize"
            return (failure(900, "STREAM_CAPTURE_UNSUPPORTED"),)
        return (Code(0),)

    def cuStreamBeginCapture(self, stream: int, mode: str) -> tuple[Code]:
        if stream in self.captures:
            return (failure(401, "ILLEGAL_STATE"),)
        self.captures[stream] = Capture()
        return (Code(0),)

    def cuStreamEndCapture(self, stream: int) -> tuple[Code, Any]:
        capture = self.captures.pop(stream, None)
        if capture is None:
            return failure(401, "ILLEGAL_STATE"), None
        if capture.ended_by:
            return failure(901, "STREAM_CAPTURE_INVALIDATED"), None
        return Code(0), capture.work

    def cuGraphInstantiate(self, graph: Any, flags: int) -> tuple[Code, Any]:
        self.graphs.append(graph)
        return Code(0), graph

    def cuGraphExecDestroy(self, graph: Any) -> tuple[Code]:
        self.graphs = [g for g in self.graphs if g is not graph]
        return (Code(0),)

    def cuGraphLaunch(self, graph: Any, stream: int) -> tuple[Code]:
        for work in graph:
            self._do(work, stream)
        return (Code(0),)

    def cuLaunchKernelEx(self, config: Any, function: str, *_: object) -> tuple[Code]:
        launched = SimpleNamespace(name=function)
        return self._do(lambda: self.launched.append(launched), config.hStream)

    def _stack(self) -> list[int]:
        if not hasattr(self.contexts, "stack"):
            self.contexts.stack = []
        return self.contexts.stack

    def cuCtxPushCurrent(self, context: int) -> tuple[Code]:
        self._stack().append(context)
        return (Code(0),)

    def cuCtxPopCurrent(self) -> tuple[Code, int]:
        return Code(0), self._stack().pop()

    def cuCtxSetCurrent(self, context: int) -> tuple[Code]:
        self._stack()[-1:] = [context]
        return (Code(0),)

    def cuEventCreate(self, flags: int) -> tuple[Code, int]:
        self.events.add(handle := self.calls["cuEventCreate"])
        return Code(0), handle

    def cuEventDestroy(self, event: int) -> tuple[Code]:
        self.events.remove(event)
        return (Code(0),)

    def cuModuleLoadData(self, code: bytes) -> tuple[Code, int]:
        self.modules.add(handle := self.calls["cuModuleLoadData"])
        return Code(0), handle

    def cuModuleUnload(self, module: int) -> tuple[Code]:
        self.modules.remove(module)
        return (Code(0),)

    def cuModuleGetFunction(self, module: object, name: bytes) -> tuple[Code, str]:
        return Code(0), name.decode()


def _answer(*found: object) -> Callable[..., tuple[object, ...]]:
    return lambda *_: (Code(0), *found)


for _name in (
    "cuEventRecord", "cuEventRecordWithFlags", "cuEventSynchronize", "cuGraphDestroy", "cuFuncSetAttribute",
):  # fmt: skip
    setattr(FakeDriver, _name, _answer())
for _name, _value in (
    ("cuDevicePrimaryCtxRetain", 1), ("cuEventElapsedTime", 1.0), ("cuFuncGetAttribute", 0),
):  # fmt: skip
    setattr(FakeDriver, _name, staticmethod(_answer(_value)))
for _name in ("cuMemFree", "cuMemFreeHost"):
    setattr(FakeDriver, _name, FakeDriver._gone)
for _name in (
    "cuMemcpyHtoD", "cuMemcpyDtoH", "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuMemcpyDtoDAsync",
):  # fmt: skip
    setattr(FakeDriver, _name, FakeDriver._copied)


OF_A_DEVICE: list[object] = []


@contextlib.contextmanager
def fake_gpu(driver: FakeDriver | None = None) -> Iterator[FakeDriver]:
    """The device is a fake one, and nothing is compiled for it."""
    driver = driver or FakeDriver()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "bindings", lambda: driver)
        patch.setattr(cuda_backend, "Compiling", lambda parts, chip, contracts: (CUBIN,))
        patch.setattr(cuda_backend, "has_dnn", lambda: False)
        patch.setattr(cuda_backend, "begin_libraries", lambda: None)  # real ones
        patch.setattr(cuda_backend, "begin_dnn", lambda: None)
        patch.setattr(compiled, "plan_cache", lambda: None)
        # Blocks that all matmuls share are a device's: a real one's stay, for its programs.
        for shared in (blas.noise, blas.workspace):
            if shared.is_known:
                OF_A_DEVICE.append(shared())
            shared.cache_clear()
        devices.forget_device()
        try:
            yield driver
        finally:
            blas.noise.cache_clear()
            blas.workspace.cache_clear()
            devices.forget_device()
