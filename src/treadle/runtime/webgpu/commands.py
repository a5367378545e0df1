"""A plan's launches bound to memory: pipelines, bind groups, and where each buffer starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from treadle.base.errors import DeviceError
from treadle.kernel.plan import Plan
from treadle.kernel.shaders import Dispatch, Place, Shader, dispatches, module
from treadle.runtime.executable import Timing
from treadle.runtime.webgpu.device import ALIGNMENT, device, padded


class Bound(NamedTuple):
    """A launch as it goes into a command buffer."""

    entry: int
    calls: int
    pipeline: Any
    arenas: Any
    offset: Any  # of its arguments, as C has it
    workgroups: tuple[int, int, int]


Kind = tuple[int, tuple[int, ...]]  # an entry, and which binding has each of its buffers


def _kind(dispatch: Dispatch) -> Kind:
    return dispatch.entry, dispatch.bindings


class Commands:
    """All launches of a run, in order."""

    def __init__(
        self, plan: Plan, shaders: Sequence[Shader], places: Sequence[Place], buffers: Sequence[Any]
    ):
        self._device, self.plan = device(), plan
        found = list(dispatches(plan, shaders, places))
        sizes = [padded(d.words.nbytes) for d in found]
        most = max(sizes, default=ALIGNMENT)
        offsets = np.cumsum([0, *sizes])
        words = np.zeros((int(offsets[-1]) + most) // 4, np.uint32)
        for dispatch, offset in zip(found, offsets, strict=False):
            words[offset // 4 : offset // 4 + dispatch.words.size] = dispatch.words
        self._arguments = self._uniform(words, most)
        groups: dict[tuple[int, ...], Any] = {}
        pipelines = self._pipelines(found, shaders)
        self.launches: list[Bound] = []
        for dispatch, offset in zip(found, offsets, strict=False):
            if dispatch.arenas not in groups:
                own = [buffers[a] for a in dispatch.arenas]
                groups[dispatch.arenas] = self._device.arena_group(own)
            pipeline, group = pipelines[_kind(dispatch)], groups[dispatch.arenas]
            at, calls = self._device.ffi.new("uint32_t[]", [int(offset)]), dispatch.workgroups[2]
            self.launches.append(
                Bound(dispatch.entry, calls, pipeline, group, at, dispatch.workgroups)
            )

    def _pipelines(self, found: Sequence[Dispatch], shaders: Sequence[Shader]) -> dict[Kind, Any]:
        arenas = {_kind(d): len(d.arenas) for d in found}
        texts = {kind: module(shaders[kind[0]], kind[1]) for kind in arenas}
        made = self._device.pipelines({texts[kind]: n for kind, n in arenas.items()})
        return {kind: made[text] for kind, text in texts.items()}

    def _uniform(self, words: np.ndarray, size: int) -> Any:
        """The arguments of all launches, of which each sees its own."""
        here, flags = self._device, self._device.wgpu.BufferUsage
        with here.checked("webgpu"):
            self.buffer = here.device.create_buffer_with_data(data=words, usage=flags.UNIFORM)
            resource = {"buffer": self.buffer, "offset": 0, "size": size}
            return here.device.create_bind_group(
                layout=here.arguments_layout, entries=[{"binding": 0, "resource": resource}]
            )

    def encode(self, encoder: Any) -> None:
        """All launches into one pass."""
        part = encoder.begin_compute_pass()
        self._encode(part, self.launches)
        part.end()

    def _encode(self, part: Any, launches: Sequence[Bound]) -> None:
        """By the library's own functions: wgpu's methods take several times as long as the calls.

        What is wrong is said when the command buffer is finished.
        """
        library, own, arguments = self._device.library, part._internal, self._arguments._internal
        set_pipeline, set_group, dispatch = (
            library.wgpuComputePassEncoderSetPipeline,
            library.wgpuComputePassEncoderSetBindGroup,
            library.wgpuComputePassEncoderDispatchWorkgroups,
        )
        none, pipeline, arenas = self._device.ffi.NULL, None, None
        for launch in launches:
            if launch.pipeline is not pipeline:
                pipeline = launch.pipeline
                set_pipeline(own, pipeline._internal)
            if launch.arenas is not arenas:
                arenas = launch.arenas
                set_group(own, 0, arenas._internal, 0, none)
            set_group(own, 1, arguments, 1, launch.offset)
            dispatch(own, *launch.workgroups)

    def timed(self) -> list[Timing]:
        """What each kernel takes in a run, by timestamps around each launch."""
        if not self._device.has_timestamps:
            cause = f"{self._device.name} has no timestamps"
            raise DeviceError("profile", cause, "Profile on another device.")
        count = len(self.launches)
        seconds, calls = dict[int, float](), Counter[int]()
        most = 2048  # timestamps of a set, at most 4,096
        for first in range(0, count, most):
            some = self.launches[first : first + most]
            for launch, taken in zip(some, self._timestamps(some), strict=True):
                seconds[launch.entry] = seconds.get(launch.entry, 0.0) + taken
                calls[launch.entry] += launch.calls
        return [Timing(((entry, calls[entry]),), seconds[entry]) for entry in calls]

    def _timestamps(self, launches: Sequence[Bound]) -> list[float]:
        here, flags = self._device, self._device.wgpu.BufferUsage
        count = 2 * len(launches)
        with here.checked("profile"):
            queries = here.device.create_query_set(type="timestamp", count=count)
            usage = flags.QUERY_RESOLVE | flags.COPY_SRC
            buffer = here.device.create_buffer(size=padded(8 * count), usage=usage)
            encoder = here.device.create_command_encoder()
            for i, launch in enumerate(launches):
                writes = {
                    "query_set": queries,
                    "beginning_of_pass_write_index": 2 * i,
                    "end_of_pass_write_index": 2 * i + 1,
                }
                part = encoder.begin_compute_pass(timestamp_writes=writes)
                self._encode(part, [launch])
                part.end()
            encoder.resolve_query_set(queries, 0, count, buffer, 0)
            here.queue.submit([encoder.finish()])
            ticks = np.frombuffer(here.queue.read_buffer(buffer, 0, 8 * count), np.uint64)
        spans = np.diff(ticks.reshape(-1, 2).astype(np.int64), axis=1)[:, 0]
        return [max(0.0, float(t)) * 1e-9 for t in spans]  # wgpu's ticks are nanoseconds
