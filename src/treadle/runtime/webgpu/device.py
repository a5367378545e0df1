"""The adapter that WebGPU finds: its limits, its memory, and what it says when something is wrong.

One device for the process. Adapters that are a processor (lavapipe, SwiftShader) are used only
where the device is asked for by name.
"""

from __future__ import annotations

import functools
import glob
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from treadle.base.errors import DeviceError, OutOfMemoryError
from treadle.kernel.machine import COOPERATIVE_MATRIX
from treadle.kernel.shaders import AS_DEVICE, BY_DEVICE
from treadle.kernel.target_webgpu import BASE, FULL, WebGpuLimits

ALIGNMENT = 256  # bytes: where bindings may start
PATIENCE = 2e-2  # seconds for which a result is asked for before the thread sleeps
LESS_MEMORY = "Use a smaller batch, accumulate micro-batches, or give compile a memory_budget."
_ORDER = {"DiscreteGPU": 0, "IntegratedGPU": 1, "VirtualGPU": 2, "Unknown": 3, "CPU": 4}
_FEATURES = ("subgroup", "subgroup-barrier", "shader-f16", "timestamp-query")
_SUBGROUPS = {0x10DE: 32, 0x106B: 32}  # of vendors that have one size alone: NVIDIA, Apple


_ROUNDING = f"""enable f16;
@group(0) @binding(0) var<storage, read> given: array<f32>;
@group(0) @binding(1) var<storage, read_write> made: array<f32>;
@group(0) @binding(2) var<storage, read_write> halves: array<f16>;
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {{
  let zero = bitcast<u32>(given[0]); let x = given[id.x];
  made[id.x] = {BY_DEVICE}; halves[id.x] = f16(x); }}
"""


def rounding_cases() -> np.ndarray:
    """Every float16 that is finite, what is halfway to its neighbour, and numbers beside that."""
    finite = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    halfway = (finite + np.append(finite[1:], np.float32(65536))) / np.float32(2)
    beside = [np.nextafter(halfway, np.float32(end)) for end in (0, np.inf)]
    found = np.concatenate([finite, halfway, *beside, [np.inf, 1e30, 1e-30, 0]])
    found = np.concatenate([found, -found]).astype(np.float32)
    return np.pad(found, (0, -found.size % 64))


def bindings() -> Any:
    """The package, or an error that says how to get it."""
    if importlib.util.find_spec("wgpu") is None:
        raise DeviceError("webgpu", "wgpu is not installed", "pip install 'treadle[webgpu]'")
    import wgpu
    from wgpu.backends.wgpu_native import extras

    return wgpu, extras


def padded(nbytes: int) -> int:
    return -(-max(1, nbytes) // ALIGNMENT) * ALIGNMENT


@functools.cache
def _adapters() -> tuple[Any, ...]:
    """All of the machine, the best first; OpenGL's are those of another API once more."""
    wgpu, extras = bindings()
    kinds = ("Metal",) if sys.platform == "darwin" else ("Vulkan", "DX12")
    extras.set_instance_extras(
        backends=[k for k in kinds if k != "DX12" or sys.platform == "win32"]
    )
    found = wgpu.gpu.enumerate_adapters_sync()
    return tuple(sorted(found, key=lambda a: _ORDER.get(a.info["adapter_type"], 3)))


def _limits_of(adapter: Any) -> WebGpuLimits:
    """What an adapter allows; subgroups only where their size is known.

    wgpu says 4 to 128 where it did not ask the driver: then the vendor decides.
    """
    limits, info, features = adapter.limits, adapter.info, adapter.features
    least, most = (
        next((int(info[k]) for k in info if k.endswith(f"group_{end}_size")), 0)
        for end in ("min", "max")
    )
    size = least if least == most else _SUBGROUPS.get(info.get("vendor_id", 0), 0)
    has_subgroups = {"subgroup", "subgroup-barrier"} <= set(features) and size > 1
    invocations = min(limits["max-compute-invocations-per-workgroup"], FULL.invocations)
    binding = min(limits["max-storage-buffer-binding-size"], limits["max-buffer-size"])
    return replace(
        FULL if has_subgroups else BASE,
        invocations=1 << (invocations.bit_length() - 1),
        workgroup_bytes=limits["max-compute-workgroup-storage-size"],
        storage_buffers=min(limits["max-storage-buffers-per-shader-stage"], FULL.storage_buffers),
        binding_bytes=binding // ALIGNMENT * ALIGNMENT,
        buffer_bytes=limits["max-buffer-size"] // ALIGNMENT * ALIGNMENT,
        subgroup=size if has_subgroups else 0,
        has_f16="shader-f16" in features,
        has_matrices=has_subgroups and COOPERATIVE_MATRIX in features,
    )


class Device:
    """An adapter's device, its queue, and pipelines by their text."""

    def __init__(self) -> None:
        wgpu, _ = bindings()
        adapters = _adapters()
        if not adapters:
            raise DeviceError("webgpu", "no adapter was found", 'Install a driver, or use "cpu".')
        adapter = adapters[0]
        self.wgpu, self.limits, self.info = wgpu, _limits_of(adapter), adapter.info
        self.name = f"{self.info['device']} ({self.info['backend_type']})"
        self.is_processor = self.info["adapter_type"] == "CPU"
        wanted = {
            "max-compute-invocations-per-workgroup": self.limits.invocations,
            "max-compute-workgroup-size-x": self.limits.invocations,
            "max-compute-workgroup-storage-size": self.limits.workgroup_bytes,
            "max-storage-buffers-per-shader-stage": self.limits.storage_buffers,
            "max-storage-buffer-binding-size": adapter.limits["max-storage-buffer-binding-size"],
            "max-buffer-size": adapter.limits["max-buffer-size"],
        }
        features = [f for f in _FEATURES if f in adapter.features]
        self.has_timestamps = "timestamp-query" in features
        self.device = self._requested(adapter, features, wanted)
        self.queue = self.device.queue
        from wgpu.backends.wgpu_native import ffi, lib

        self.library, self.ffi = lib, ffi
        self.lock = threading.RLock()
        self.lost, self.checkpoint = "", ""
        self._pipelines: dict[str, Any] = {}
        self._layouts: dict[int, tuple[Any, Any]] = {}

    def _requested(self, adapter: Any, features: list[str], limits: dict[str, int]) -> Any:
        """A device with matrices, if the adapter says it has them and wgpu gives them."""

        def request(features: list[str]) -> Any:
            return adapter.request_device_sync(required_features=features, required_limits=limits)

        if self.limits.has_matrices:
            try:
                return request([*features, COOPERATIVE_MATRIX])
            except (self.wgpu.GPUError, RuntimeError):  # experimental features may be refused
                self.limits = replace(self.limits, has_matrices=False)
        return request(features)

    @contextmanager
    def checked(self, operation: str, what: str = "") -> Iterator[None]:
        """What wgpu raises as errors that say what to do."""
        if self.lost:
            raise self.lost_error(operation)
        try:
            yield
        except self.wgpu.GPUOutOfMemoryError as error:
            raise OutOfMemoryError(
                operation, f"{what or error} on {self.name}", LESS_MEMORY
            ) from error
        except (self.wgpu.GPUError, RuntimeError) as error:
            cause = str(error).strip().splitlines()
            if "lost" in str(error).lower():
                self.lost = cause[0]
                raise self.lost_error(operation) from error
            raise DeviceError(operation, f"wgpu says: {' '.join(cause)}") from error

    def lost_error(self, operation: str) -> DeviceError:
        """Values on the device are gone; what was read or written to files before is not."""
        kept = f"the last is {self.checkpoint}" if self.checkpoint else "there is no checkpoint yet"
        return DeviceError(
            operation,
            f"the device is lost to this process: {self.lost}",
            f"Start a new process from a checkpoint: {kept}.",
        )

    # Memory

    def buffer(self, nbytes: int, what: str = "an array") -> Any:
        """Memory of the device, all zeros."""
        size, most = padded(nbytes), self.limits.binding_bytes
        if size > most:
            cause = (
                f"{what} needs {size:,} bytes in one buffer, and {self.name} has at most {most:,}"
            )
            raise OutOfMemoryError("webgpu", cause, LESS_MEMORY)
        flags = self.wgpu.BufferUsage
        usage = flags.STORAGE | flags.COPY_DST | flags.COPY_SRC
        with self.checked("webgpu", f"{what} needs {size:,} bytes, which are not free"):
            return self.device.create_buffer(size=size, usage=usage)

    def staging(self, nbytes: int) -> Any:
        flags = self.wgpu.BufferUsage
        with self.checked("webgpu", f"results need {nbytes:,} bytes, which are not free"):
            return self.device.create_buffer(
                size=padded(nbytes), usage=flags.COPY_DST | flags.MAP_READ
            )

    def write(self, buffer: Any, offset: int, words: np.ndarray) -> None:
        if words.nbytes:
            with self.lock, self.checked("webgpu"):
                self.queue.write_buffer(buffer, offset, np.ascontiguousarray(words))

    def read(self, buffer: Any, offset: int, nbytes: int) -> np.ndarray:
        """Words, when all work before is done."""
        if not nbytes:
            return np.zeros(0, np.uint32)
        with self.lock, self.checked("webgpu"):
            return np.frombuffer(self.queue.read_buffer(buffer, offset, nbytes), np.uint32)

    def mapped(self, buffer: Any) -> np.ndarray:
        """Words of memory that the host can map, when all work before is done.

        By the library's own functions: wgpu's method submits once more and waits in another thread.
        What is nearly done is asked for over and over: to be woken takes longer than small work.
        """
        library, ffi, found = self.library, self.ffi, list[str]()

        @ffi.callback("void(WGPUMapAsyncStatus, WGPUStringView, void *, void *)")  # type: ignore[untyped-decorator]
        def done(status: int, message: Any, _first: Any, _second: Any) -> None:
            is_good = status == library.WGPUMapAsyncStatus_Success
            said = "" if is_good or not message.length else ffi.unpack(message.data, message.length)
            found.append("" if is_good else f"a buffer is not mapped ({status}): {said!r}")

        info = ffi.new("WGPUBufferMapCallbackInfo *")
        info.mode, info.callback = library.WGPUCallbackMode_AllowProcessEvents, done
        with self.lock, self.checked("results"):
            own, size = buffer._internal, buffer.size
            library.wgpuBufferMapAsync(own, library.WGPUMapMode_Read, 0, size, info[0])
            patience = time.perf_counter() + (0.0 if self.is_processor else PATIENCE)
            while not found:
                waits = time.perf_counter() > patience
                library.wgpuDevicePoll(self.device._internal, waits, ffi.NULL)
            if found[0]:
                raise RuntimeError(found[0])
            memory = library.wgpuBufferGetConstMappedRange(own, 0, size)
            words = np.frombuffer(ffi.buffer(memory, size), np.uint32).copy()
            library.wgpuBufferUnmap(own)
        return words

    # Pipelines

    def layouts(self, arenas: int) -> tuple[Any, Any]:
        """Of bind groups with so many arenas, and of pipelines that have them."""
        if arenas not in self._layouts:
            own = [self._entry(i, "storage") for i in range(arenas)]
            group = self.device.create_bind_group_layout(entries=own)
            both = [group, self.arguments_layout]
            pipeline = self.device.create_pipeline_layout(bind_group_layouts=both)
            self._layouts[arenas] = group, pipeline
        return self._layouts[arenas]

    @functools.cached_property
    def arguments_layout(self) -> Any:
        return self.device.create_bind_group_layout(entries=[self._entry(0, "uniform")])

    def _entry(self, binding: int, type_: str) -> dict[str, object]:
        buffer = {"type": type_, "has_dynamic_offset": type_ == "uniform"}
        visibility = self.wgpu.ShaderStage.COMPUTE
        return {"binding": binding, "visibility": visibility, "buffer": buffer}

    def pipelines(self, wanted: Mapping[str, int]) -> dict[str, Any]:
        """Of modules with so many arenas each; equal texts have one.

        Several are made at once: a driver compiles each by one thread.
        """
        with self.lock:
            new = [text for text in wanted if text not in self._pipelines]
            layouts = {n: self.layouts(n)[1] for n in set(wanted.values())}
            rounds = any(AS_DEVICE in text for text in new) and self.rounds_halves

            def made(text: str) -> Any:
                with self.checked("compile"):
                    compute = {"module": self._module(text), "entry_point": "main"}
                    if rounds and f"override {AS_DEVICE}:" in text:
                        compute["constants"] = {AS_DEVICE: 1.0}
                    layout = layouts[wanted[text]]
                    return self.device.create_compute_pipeline(layout=layout, compute=compute)

            with ThreadPoolExecutor(min(len(new) or 1, os.cpu_count() or 1)) as pool:
                self._pipelines.update(zip(new, pool.map(made, new), strict=True))
            return {text: self._pipelines[text] for text in wanted}

    @functools.cached_property
    def rounds_halves(self) -> bool:
        """Whether float32 becomes the nearest float16, denormal numbers and infinities too.

        WGSL leaves it open, so numbers are converted and looked at.
        """
        with self.lock, self.checked("compile"):
            module = self.device.create_shader_module(code=_ROUNDING)
            pipeline = self.device.create_compute_pipeline(
                layout="auto", compute={"module": module, "entry_point": "main"}
            )
            given = rounding_cases()
            usage = self.wgpu.BufferUsage.STORAGE | self.wgpu.BufferUsage.COPY_SRC
            source = self.device.create_buffer_with_data(data=given, usage=usage)
            made = self.device.create_buffer(size=given.nbytes, usage=usage)
            halves = self.device.create_buffer(size=given.size * 2, usage=usage)
            entries = [
                {"binding": i, "resource": {"buffer": b, "offset": 0, "size": b.size}}
                for i, b in enumerate((source, made, halves))
            ]
            layout = pipeline.get_bind_group_layout(0)
            group = self.device.create_bind_group(layout=layout, entries=entries)
            encoder = self.device.create_command_encoder()
            part = encoder.begin_compute_pass()
            part.set_pipeline(pipeline)
            part.set_bind_group(0, group)
            part.dispatch_workgroups(given.size // 64)
            part.end()
            self.queue.submit([encoder.finish()])
            found = np.frombuffer(self.queue.read_buffer(made), np.uint32)
            stored = np.frombuffer(self.queue.read_buffer(halves), np.uint16)
        with np.errstate(over="ignore"):
            rounded = given.astype(np.float16)
        is_right = (found == rounded.astype(np.float32).view(np.uint32)).all()
        return bool(is_right and (stored == rounded.view(np.uint16)).all())

    def _module(self, text: str) -> Any:
        """A module whose accesses are not tested once more: the verifier proved them in bounds.

        Nor are loops counted, all of which end. wgpu's own method has no way to say so; the library
        below it has.
        """
        from wgpu.backends.wgpu_native import _api

        create = getattr(_api.libf, "wgpuDeviceCreateShaderModuleTrusted", None)
        if create is None:
            return self.device.create_shader_module(code=text)
        new, code = self.ffi.new, self.ffi.new("char[]", text.encode())
        source = new("WGPUShaderSourceWGSL *")
        source.chain.sType = self.library.WGPUSType_ShaderSourceWGSL
        source.code.data, source.code.length = code, len(code) - 1
        description = new("WGPUShaderModuleDescriptor *")
        description.nextInChain = self.ffi.cast("WGPUChainedStruct *", source)
        made = create(self.device._internal, description, 0)
        return _api.GPUShaderModule("", made, self.device)

    def arena_group(self, buffers: Sequence[Any]) -> Any:
        """Whole buffers as a bind group."""
        if len(buffers) > self.limits.storage_buffers:
            raise OutOfMemoryError(
                "webgpu",
                f"a kernel's arrays lie in {len(buffers)} buffers, and a shader of {self.name} "
                f"binds at most {self.limits.storage_buffers}",
                LESS_MEMORY,
            )
        entries = [
            {"binding": i, "resource": {"buffer": buffer, "offset": 0, "size": buffer.size}}
            for i, buffer in enumerate(buffers)
        ]
        with self.checked("webgpu"):
            return self.device.create_bind_group(
                layout=self.layouts(len(buffers))[0], entries=entries
            )


@functools.cache
def device() -> Device:
    """The one of this process."""
    return Device()


@functools.cache
def why_not() -> str | None:
    """Why no adapter can be used; None where one can."""
    try:
        device()
    except DeviceError as error:
        return error.cause
    return None


def why_not_by_itself() -> str | None:
    """Why nobody who did not ask for it gets it: there is no adapter of a real GPU.

    On Linux no library is loaded to find out that there is none.
    """
    nodes = ("/dev/dri/render*", "/dev/nvidia[0-9]*", "/dev/dxg", "/dev/mali*", "/dev/kgsl*")
    if sys.platform == "linux" and not any(glob.glob(n) for n in nodes):
        return "there is no GPU"
    if why_not() is not None:
        return why_not()
    return "its adapter is a processor" if device().is_processor else None
