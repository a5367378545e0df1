"""The GPU as this process sees it: one context, one stream, memory by address.

NVIDIA's bindings are imported when a GPU is first asked for.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from treadle.base.errors import DeviceError

INSTALL = 'Install Treadle with its CUDA packages: pip install "treadle[cuda]".'
OLDEST_DRIVER = 12000  # the CUDA version that a driver must know, as it numbers them
OLDEST_CHIP = 80  # the first with bfloat16
ALIGNMENT = 256


def bindings() -> Any:
    """The driver's interface; a DeviceError where it is not installed."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceError("cuda", "the package cuda-bindings is not installed", INSTALL) from error
    return driver


def checked(found: tuple[Any, ...], operation: str) -> Any:
    """The results of a driver's call; a DeviceError that names what failed."""
    code = int(found[0])
    if code:
        name = getattr(found[0], "name", str(code)).removeprefix("CUDA_ERROR_")
        raise DeviceError(operation, f"the CUDA driver says {name} ({code})", _remedy(name))
    return found[1] if len(found) == 2 else found[1:]


def _remedy(name: str) -> str:
    match name:
        case "OUT_OF_MEMORY":
            return 'Use a smaller batch, accumulate=…, or precision="bfloat16".'
        case "NO_DEVICE":
            return 'There is no GPU that this process may use: use device="cpu".'
        case "ILLEGAL_ADDRESS" | "LAUNCH_FAILED" | "ECC_UNCORRECTABLE" | "DEVICE_UNAVAILABLE":
            return "The device is lost to this process: start again from the last checkpoint."
        case _:
            return ""


class Device:
    """A GPU, its context and the stream that everything runs on."""

    def __init__(self) -> None:
        self.driver = driver = bindings()
        try:
            found = driver.cuInit(0)
        except RuntimeError as error:
            cause = f"there is no NVIDIA driver ({str(error).splitlines()[0]})"
            raise DeviceError("cuda", cause, 'Install one, or use device="cpu".') from error
        checked(found, "cuda")
        version = int(checked(driver.cuDriverGetVersion(), "cuda"))
        if version < OLDEST_DRIVER:
            raise DeviceError(
                "cuda",
                f"the driver knows CUDA {version // 1000}.{version % 1000 // 10}",
                f"Install one for CUDA {OLDEST_DRIVER // 1000}.0 or later.",
            )
        if not int(checked(driver.cuDeviceGetCount(), "cuda")):
            raise DeviceError("cuda", "the driver sees no GPU", 'Use device="cpu".')
        self.handle = checked(driver.cuDeviceGet(0), "cuda")
        self.name = checked(driver.cuDeviceGetName(64, self.handle), "cuda")
        self.name = self.name.split(b"\0")[0].decode()
        kinds = driver.CUdevice_attribute
        self.chip = 10 * self._fact(
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
        ) + self._fact(kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        if self.chip < OLDEST_CHIP:
            raise DeviceError(
                "cuda",
                f"{self.name} has compute capability {self.chip / 10}, without bfloat16",
                'At least 8.0 is needed: use device="cpu".',
            )
        self.context = checked(driver.cuDevicePrimaryCtxRetain(self.handle), "cuda")
        self.enter()
        self.stream = checked(driver.cuStreamCreate(0), "cuda")

    def _fact(self, kind: Any) -> int:
        return int(checked(self.driver.cuDeviceGetAttribute(kind, self.handle), "cuda"))

    @property
    def architecture(self) -> str:
        """What the compiler is asked for: with the chip's own instructions from 9.0 on."""
        return f"sm_{self.chip}a" if self.chip >= 90 else f"sm_{self.chip}"

    def enter(self) -> None:
        """The context is a thread's: whoever calls makes it its own."""
        checked(self.driver.cuCtxSetCurrent(self.context), "cuda")

    def memory(self) -> tuple[int, int]:
        """Bytes that are free, and all there are."""
        free, total = checked(self.driver.cuMemGetInfo(), "cuda")
        return int(free), int(total)

    def wait(self) -> None:
        checked(self.driver.cuStreamSynchronize(self.stream), "cuda")


@functools.cache
def device() -> Device:
    return Device()


@functools.cache
def why_not() -> str | None:
    """Why no GPU can be used; None where one can."""
    try:
        device()
    except DeviceError as error:
        return error.cause
    return None


class Block:
    """Memory of the device, given back when nothing refers to it."""

    def __init__(self, nbytes: int):
        self.device, self.nbytes = device(), nbytes
        self.address = 0
        if nbytes:
            found = self.device.driver.cuMemAlloc(nbytes)
            if getattr(found[0], "name", "") == "CUDA_ERROR_OUT_OF_MEMORY":
                raise out_of_memory(nbytes)
            self.address = int(checked(found, "cuda"))

    def __del__(self) -> None:
        # At the interpreter's end the driver's interface may be gone, and the memory with it.
        free = getattr(self.device.driver, "cuMemFree", None) if self.__dict__ else None
        if self.__dict__.get("address") and free is not None:
            free(self.address)

    def write(self, array: np.ndarray, offset: int = 0) -> None:
        """Copy in; the array may change afterwards."""
        if array.nbytes:
            source = np.ascontiguousarray(array)
            found = self.device.driver.cuMemcpyHtoD(
                self.address + offset, source.ctypes.data, source.nbytes
            )
            checked(found, "cuda")

    def set(self, number: np.generic) -> None:
        """One number of at most four bytes everywhere."""
        size, driver = number.dtype.itemsize, self.device.driver
        setter = {1: driver.cuMemsetD8, 2: driver.cuMemsetD16, 4: driver.cuMemsetD32}[size]
        bits = int(np.frombuffer(number.tobytes(), f"u{size}")[0])
        checked(setter(self.address, bits, self.nbytes // size), "cuda")
        self.device.wait()

    def fill(self, source: Block) -> None:
        """Copies of another block's bytes, one after the other, into the stream."""
        for start in range(0, self.nbytes, source.nbytes):
            size = min(source.nbytes, self.nbytes - start)
            found = self.device.driver.cuMemcpyDtoDAsync(
                self.address + start, source.address, size, self.device.stream
            )
            checked(found, "cuda")

    def read(self, array: np.ndarray, offset: int = 0) -> np.ndarray:
        """Copy out into a contiguous array, when all work before is done."""
        self.device.wait()
        if array.nbytes:
            found = self.device.driver.cuMemcpyDtoH(
                array.ctypes.data, self.address + offset, array.nbytes
            )
            checked(found, "cuda")
        return array


def out_of_memory(needed: int) -> DeviceError:
    free, total = device().memory()
    return DeviceError(
        "cuda",
        f"{needed / 2**30:.2f} GiB are needed at once, {free / 2**30:.2f} of "
        f"{total / 2**30:.2f} GiB are free",
        'Use a smaller batch, accumulate=…, or precision="bfloat16".',
    )


class Pinned:
    """Host memory that the device copies from and to by itself."""

    def __init__(self, nbytes: int):
        self.device = device()
        self.address = int(checked(self.device.driver.cuMemHostAlloc(max(1, nbytes), 0), "cuda"))
        memory = (ctypes.c_uint8 * max(1, nbytes)).from_address(self.address)
        self.array = np.ctypeslib.as_array(memory)

    def __del__(self) -> None:
        free = getattr(self.device.driver, "cuMemFreeHost", None) if self.__dict__ else None
        if self.__dict__.get("address") and free is not None:
            free(self.address)


class Event:
    """A point in the stream."""

    def __init__(self, timed: bool = False):
        self.device = device()
        self.handle = checked(self.device.driver.cuEventCreate(0 if timed else 2), "cuda")

    def record(self) -> None:
        checked(self.device.driver.cuEventRecord(self.handle, self.device.stream), "cuda")

    def wait(self) -> None:
        checked(self.device.driver.cuEventSynchronize(self.handle), "cuda")

    def milliseconds_since(self, start: Event) -> float:
        return float(
            checked(self.device.driver.cuEventElapsedTime(start.handle, self.handle), "cuda")
        )


def padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
