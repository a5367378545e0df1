"""`td.calibrate`: a device's rates, measured anew."""

from __future__ import annotations

from treadle.backends.rates import measured
from treadle.backends.registry import backend, choose_device
from treadle.base.errors import DeviceError
from treadle.compile_report import CompileOptions
from treadle.runtime.executable import Ceilings


def calibrate(device: str = "auto") -> Ceilings:
    """Measure a device's rates: operations a second and bytes a second; later profiles use them.

    On the CPU those of one core. On a GPU a large matmul in bfloat16 and a copy on the device.
    """
    name = choose_device(device)
    toolchain = backend(name).toolchain(CompileOptions())
    if toolchain is None:
        cause = f"{name} interprets programs: it has no rate to compare with"
        raise DeviceError("calibrate", cause, 'Use "cpu", "cuda" or "webgpu".')
    return measured(toolchain)
