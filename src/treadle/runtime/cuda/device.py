"""The GPU as this process sees it: one context, one stream for all work, memory by address.

NVIDIA's bindings are imported when a GPU is first asked for.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import socket
import threading
from typing import Any, NamedTuple

import numpy as np

from treadle.base.errors import DeviceError
from treadle.base.launch import local_rank
from treadle.runtime.cuda.once import once
from treadle.runtime.cuda.releases import Releases

INSTALL = 'Install Treadle with its CUDA packages: pip install "treadle[cuda]".'
OLDEST_DRIVER = 12000  # the CUDA version that a driver must know, as it numbers them
OLDEST_CHIP = 80  # the first with bfloat16
FLOAT8_CHIP = 89  # the first that multiplies floats of 8 bits
WARPGROUP_CHIP = 90  # the one whose tensor cores four warps use together
ALIGNMENT = 256
_FOLLOWS, _NON_BLOCKING = 0, 1  # streams: after the default one's work, or beside it
_EXTERNAL = 1  # an event of a graph that can be looked at from outside


def bindings() -> Any:
    """The driver's interface; a DeviceError where it is not installed."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceError("cuda", "the package cuda-bindings is not installed", INSTALL) from error
    return driver


LESS_MEMORY = (
    'Use a smaller batch, accumulate=…, precision="bfloat16", or td.checkpoint around parts.'
)
# Errors after which the driver refuses everything that this process asks of the device.
_FATAL = frozenset(
    [
        "ILLEGAL_ADDRESS", "LAUNCH_FAILED", "LAUNCH_TIMEOUT", "ILLEGAL_INSTRUCTION",
        "MISALIGNED_ADDRESS", "INVALID_ADDRESS_SPACE", "INVALID_PC", "HARDWARE_STACK_ERROR",
        "ASSERT", "ECC_UNCORRECTABLE", "CONTEXT_IS_DESTROYED", "DEVICE_UNAVAILABLE",
        "NVLINK_UNCORRECTABLE", "EXTERNAL_DEVICE", "MPS_CONNECTION_FAILED",
    ]
)  # fmt: skip


def checked(found: tuple[Any, ...], operation: str) -> Any:
    """The results of a driver's call; a DeviceError that names what failed."""
    code = int(found[0])
    if code:
        name = said(found[0])
        if name in _FATAL and device.is_known:  # it was there
            device().lose(f"{name} ({code})")
            raise device().lost_error(operation)
        raise DeviceError(operation, f"the CUDA driver says {name} ({code})", _remedy(name))
    return found[1] if len(found) == 2 else found[1:]


def said(code: Any) -> str:
    """What the driver calls a result."""
    return getattr(code, "name", str(int(code))).removeprefix("CUDA_ERROR_")


def _remedy(name: str) -> str:
    match name:
        case "OUT_OF_MEMORY":
            return LESS_MEMORY
        case "NO_DEVICE":
            return 'There is no GPU that this process may use: use device="cpu".'
        case _:
            return ""


class Started(NamedTuple):
    """A device's context, its streams, and what is given back to it."""

    context: Any
    stream: Any
    capturing: Any
    releases: Releases


class Device:
    """A GPU, its context and the stream that everything runs on.

    `lock` is held by whoever captures, or uses the handle of a library: one thread at a time.
    """

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
        count = int(checked(driver.cuDeviceGetCount(), "cuda"))
        if not count:
            raise DeviceError("cuda", "the driver sees no GPU", 'Use device="cpu".')
        # Processes that a launcher has started on one host take its GPUs in turn.
        self.handle = checked(driver.cuDeviceGet(local_rank() % count), "cuda")
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
        self.multiprocessors = self._fact(kinds.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        # Bytes of shared memory that a block may have where a kernel asks for them.
        self.most_shared = self._fact(kinds.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        self.lost = ""  # what the driver said when it gave the device up
        self.checkpoint = ""  # the last that was written, and when
        self.lock = threading.RLock()
        self.captured_again = 0  # captures that the driver had given up
        # Takes the driver long, and Python's lock is free meanwhile: whoever needs it waits.
        self._started = once(self._start)

    def _start(self) -> Started:
        driver = self.driver
        context = checked(driver.cuDevicePrimaryCtxRetain(self.handle), "cuda")
        checked(driver.cuCtxSetCurrent(context), "cuda")
        stream = checked(driver.cuStreamCreate(_FOLLOWS), "cuda")
        capturing = checked(driver.cuStreamCreate(_NON_BLOCKING), "cuda")
        releases = Releases(driver, context, stream)
        atexit.register(releases.close)
        return Started(context, stream, capturing, releases)

    @property
    def context(self) -> Any:
        return self._started().context

    @property
    def stream(self) -> Any:
        """That everything runs on."""
        return self._started().stream

    @property
    def capturing(self) -> Any:
        """The stream that graphs are captured from."""
        return self._started().capturing

    @property
    def releases(self) -> Releases:
        return self._started().releases

    def _fact(self, kind: Any) -> int:
        return int(checked(self.driver.cuDeviceGetAttribute(kind, self.handle), "cuda"))

    @property
    def architecture(self) -> str:
        """What the compiler is asked for: with the chip's own instructions from 9.0 on."""
        return f"sm_{self.chip}a" if self.chip >= 90 else f"sm_{self.chip}"

    @property
    def place(self) -> str:
        """Which of all GPUs it is: the host's name, and where it is connected there."""
        found = checked(self.driver.cuDeviceGetPCIBusId(64, self.handle), "cuda")
        return f"{socket.gethostname()} {bytes(found).split(bytes(1))[0].decode()}"

    def lose(self, cause: str) -> None:
        """From now on nothing on the device can be read, computed or written."""
        self.lost = self.lost or cause

    def lost_error(self, operation: str) -> DeviceError:
        """Values on the device are gone; what was read or written to files before is not."""
        kept = f"the last is {self.checkpoint}" if self.checkpoint else "there is no checkpoint yet"
        return DeviceError(
            operation,
            f"the device is lost to this process: the CUDA driver says {self.lost}",
            f"Start a new process from a checkpoint: {kept}.",
        )

    def enter(self) -> None:
        """The context is a thread's: whoever calls makes it its own."""
        if self.lost:
            raise self.lost_error("cuda")
        checked(self.driver.cuCtxSetCurrent(self.context), "cuda")

    def memory(self) -> tuple[int, int]:
        """Bytes that are free, and all there are."""
        free, total = checked(self.driver.cuMemGetInfo(), "cuda")
        return int(free), int(total)

    def reclaim(self) -> None:
        """Memory of programs that nothing refers to: theirs may be waiting to be collected."""
        gc.collect()
        with self.lock:  # what waits for another thread's capture goes back after it
            self.releases.drain()

    def wait(self) -> None:
        checked(self.driver.cuStreamSynchronize(self.stream), "cuda")


@once
def device() -> Device:
    """The one of this process: threads that ask at once are given the same, with one stream."""
    return Device()


def forget_device() -> None:
    """The next that asks finds out anew."""
    device.cache_clear()
    why_not.cache_clear()


@functools.cache
def why_not() -> str | None:
    """Why no GPU can be used; None where one can."""
    try:
        device().enter()  # one that has no context for us cannot be used either
    except DeviceError as error:
        return error.cause
    return None


class Block:
    """Memory of the device, given back when nothing refers to it."""

    address = 0

    def __init__(self, nbytes: int):
        self.device, self.nbytes = device(), nbytes
        if nbytes:
            self.device.releases.drain()
            found = self.device.driver.cuMemAlloc(nbytes)
            if said(found[0]) == "OUT_OF_MEMORY":
                self.device.reclaim()
                found = self.device.driver.cuMemAlloc(nbytes)
            if said(found[0]) == "OUT_OF_MEMORY":
                raise out_of_memory(nbytes)
            self.address = int(checked(found, "cuda"))

    def __del__(self) -> None:
        if self.address:
            self.device.releases.give("cuMemFree", self.address)

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


def out_of_memory(needed: int, what: str = "an array") -> DeviceError:
    """How much is needed, what there is, and what helps."""
    free, total = device().memory()
    return DeviceError(
        "cuda",
        f"{what} needs {_amount(needed)} at once; of {_amount(total)} on {device().name}, "
        f"{_amount(free)} are free",
        LESS_MEMORY,
    )


def _amount(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:.1f} MiB"


class Pinned:
    """Host memory that the device copies from and to by itself."""

    address = 0

    def __init__(self, nbytes: int):
        self.device = device()
        self.address = int(checked(self.device.driver.cuMemHostAlloc(max(1, nbytes), 0), "cuda"))
        memory = (ctypes.c_uint8 * max(1, nbytes)).from_address(self.address)
        self.array = np.ctypeslib.as_array(memory)

    def __del__(self) -> None:
        if self.address:
            self.device.releases.give("cuMemFreeHost", self.address)


class Event:
    """A point in the stream."""

    handle: Any = None

    def __init__(self, timed: bool = False):
        self.device = device()
        self.handle = checked(self.device.driver.cuEventCreate(0 if timed else 2), "cuda")

    def __del__(self) -> None:
        if self.handle is not None:
            self.device.releases.give("cuEventDestroy", self.handle)

    def record(self) -> None:
        checked(self.device.driver.cuEventRecord(self.handle, self.device.stream), "cuda")

    def record_in_graph(self, stream: Any) -> None:
        """A node of the graph that the stream captures: each launch records the event anew."""
        found = self.device.driver.cuEventRecordWithFlags(self.handle, stream, _EXTERNAL)
        checked(found, "profile")

    def wait(self) -> None:
        checked(self.device.driver.cuEventSynchronize(self.handle), "cuda")

    def milliseconds_since(self, start: Event) -> float:
        return float(
            checked(self.device.driver.cuEventElapsedTime(start.handle, self.handle), "cuda")
        )


def padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
