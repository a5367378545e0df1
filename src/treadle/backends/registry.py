"""The devices by name. A backend is imported when it is first asked for: compilers are heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.base.errors import DeviceError

if TYPE_CHECKING:  # the loop IR, which a process needs when it first compiles
    from treadle.backends.protocol import Backend

DEVICES = ("oracle", "cpu", "cuda", "webgpu")
FASTEST = ("cuda", "webgpu", "cpu")  # what "auto" tries, in this order; the last is always there
REFERENCE = "oracle"  # what the others are compared with


def backend(name: str) -> Backend:
    """A device's backend, whether or not it can be used here."""
    match name:
        case "oracle":
            from treadle.backends.oracle.backend import ORACLE

            return ORACLE
        case "cpu":
            from treadle.backends.cpu.backend import CPU

            return CPU
        case "cuda":
            from treadle.backends.cuda.backend import CUDA

            return CUDA
        case "webgpu":
            from treadle.backends.webgpu.backend import WEBGPU

            return WEBGPU
    raise DeviceError(
        "device", f"{name!r} is not available", f'Use "auto" or one of: {", ".join(DEVICES)}.'
    )


def _why_not_by_itself(name: str) -> str | None:
    """Why a device is not used unless it is asked for; None if it is."""
    if name == "webgpu":
        from treadle.runtime.webgpu.device import why_not_by_itself

        return why_not_by_itself()
    return backend(name).why_not()


def choose_device(device: str) -> str:
    """A device by its name. `"auto"` is what trains fastest here; the oracle is asked for by name.

    The report says which it is.
    """
    if device == "auto":
        device = next(name for name in FASTEST if _why_not_by_itself(name) is None)
    backend(device).require()
    return device
