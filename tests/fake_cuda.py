"""A driver that runs no kernels: memory is the host's, copies are made, launches are counted.

With it everything around the kernels is tested without a GPU: captured graphs repeat their copies,
and any call can be told to fail.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import treadle.loading as loading
from treadle.runtime.cuda import device as devices
from treadle.runtime.cuda.compiler import CUBIN


class Code(int):
    """A result as the driver gives it: a number with a name."""

    name = "CUDA_SUCCESS"


def failure(number: int, name: str) -> Code:
    code = Code(number)
    code.name = f"CUDA_ERROR_{name}"
    return code


class _Anything:
    """An enumeration whose members are their names."""

    def __getattr__(self, name: str) -> str:
        return name


class FakeDriver:
    """Counts calls; `fail` makes one of them answer an error from then on."""

    def __init__(self, free: int = 8 << 30, chip: tuple[int, int] = (9, 0)):
        self.free, self.total, self.chip = free, 8 << 30, chip
        self.calls: Counter[str] = Counter()
        self.failing: dict[str, Code] = {}
        self.memory: dict[int, Any] = {}
        self.capture: list[Callable[[], None]] | None = None
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
        failing = self.failing.get(name)
        return found if failing is None else lambda *_: (failing, 0, 0)

    def _do(self, work: Callable[[], None]) -> tuple[Code]:
        if self.capture is None:
            work()
        else:
            self.capture.append(work)
        return (Code(0),)

    def _new(self, nbytes: int) -> tuple[Code, int]:
        memory = (ctypes.c_uint8 * (max(1, nbytes) + 256))()
        address = -(-ctypes.addressof(memory) // 256) * 256
        self.memory[address] = memory
        return Code(0), address

    def _gone(self, address: int) -> tuple[Code]:
        del self.memory[int(address)]
        return (Code(0),)

    def _copied(self, target: int, source: int, nbytes: int, *_: object) -> tuple[Code]:
        return self._do(lambda: ctypes.memmove(int(target), int(source), nbytes) and None)

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
        return Code(0), 1

    def cuDeviceGet(self, number: int) -> tuple[Code, int]:
        return Code(0), number

    def cuDeviceGetName(self, size: int, device: int) -> tuple[Code, bytes]:
        return Code(0), b"Fake 9000\0\0"

    def cuDeviceGetAttribute(self, kind: str, device: int) -> tuple[Code, int]:
        known = {"MAJOR": self.chip[0], "MINOR": self.chip[1], "COUNT": 132}
        return Code(0), known[kind.rpartition("_")[2]]

    def cuMemGetInfo(self) -> tuple[Code, int, int]:
        return Code(0), self.free, self.total

    def cuMemAlloc(self, nbytes: int) -> tuple[Code, int]:
        if nbytes > self.free:
            return failure(2, "OUT_OF_MEMORY"), 0
        return self._new(nbytes)

    def cuMemHostAlloc(self, nbytes: int, flags: int) -> tuple[Code, int]:
        return self._new(nbytes)

    def cuStreamBeginCapture(self, stream: int, mode: str) -> tuple[Code]:
        self.capture = []
        return (Code(0),)

    def cuStreamEndCapture(self, stream: int) -> tuple[Code, Any]:
        found, self.capture = self.capture, None
        return Code(0), found

    def cuGraphInstantiate(self, graph: Any, flags: int) -> tuple[Code, Any]:
        return Code(0), graph

    def cuGraphLaunch(self, graph: Any, stream: int) -> tuple[Code]:
        for work in graph:
            work()
        return (Code(0),)

    def cuLaunchKernelEx(self, config: Any, function: str, *_: object) -> tuple[Code]:
        return self._do(lambda: self.launched.append(SimpleNamespace(name=function)))

    def cuModuleGetFunction(self, module: object, name: bytes) -> tuple[Code, str]:
        return Code(0), name.decode()


def _answer(*found: object) -> Callable[..., tuple[object, ...]]:
    return lambda *_: (Code(0), *found)


for _name in (
    "cuCtxSetCurrent", "cuStreamSynchronize", "cuEventRecord", "cuEventSynchronize",
    "cuGraphDestroy", "cuGraphExecDestroy", "cuFuncSetAttribute",
):  # fmt: skip
    setattr(FakeDriver, _name, _answer())
for _name, _value in (
    ("cuDevicePrimaryCtxRetain", 1), ("cuStreamCreate", 7), ("cuEventCreate", 1),
    ("cuModuleLoadData", 1), ("cuEventElapsedTime", 1.0),
):  # fmt: skip
    setattr(FakeDriver, _name, staticmethod(_answer(_value)))
for _name in ("cuMemFree", "cuMemFreeHost"):
    setattr(FakeDriver, _name, FakeDriver._gone)
for _name in (
    "cuMemcpyHtoD", "cuMemcpyDtoH", "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuMemcpyDtoDAsync",
):  # fmt: skip
    setattr(FakeDriver, _name, FakeDriver._copied)


@contextlib.contextmanager
def fake_gpu(driver: FakeDriver | None = None) -> Iterator[FakeDriver]:
    """The device is a fake one, and nothing is compiled for it."""
    driver = driver or FakeDriver()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "bindings", lambda: driver)
        patch.setattr(loading, "compile_parts", lambda parts, chip: (CUBIN,))
        patch.setattr(loading, "has_dnn", lambda: False)
        patch.setattr(loading, "plan_cache", lambda: None)
        devices.device.cache_clear()
        devices.why_not.cache_clear()
        try:
            yield driver
        finally:
            devices.device.cache_clear()
            devices.why_not.cache_clear()
