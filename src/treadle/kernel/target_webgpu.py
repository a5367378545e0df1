"""Targets of WebGPU: what an adapter allows, as data, and how kernels are shaped for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from treadle.base.errors import DeviceError
from treadle.kernel.machine import COOPERATIVE_MATRIX, features_in
from treadle.kernel.target import GPU, Target


@dataclass(frozen=True, slots=True)
class WebGpuLimits:
    """What shaders and bindings may be. The defaults are what every WebGPU device has."""

    name: str = "webgpu-base"
    invocations: int = 256  # of a workgroup
    workgroup_bytes: int = 16 << 10
    storage_buffers: int = 8  # of a shader
    binding_bytes: int = 128 << 20
    buffer_bytes: int = 256 << 20
    subgroup: int = 0  # invocations that exchange values; 0 where none do
    has_f16: bool = False
    has_matrices: bool = False  # cooperative ones


BASE = WebGpuLimits()
# What NVIDIA's Vulkan driver offers on an H200, with subgroups of 32.
FULL = WebGpuLimits(
    "vulkan-full", 1024, 48 << 10, 32, (1 << 31) - 4, (1 << 62), 32, has_f16=True, has_matrices=True
)


def asked_of(limits: WebGpuLimits, target: str | int) -> WebGpuLimits:
    """What of an adapter's limits a target uses: experimental features where it names them."""
    wants = COOPERATIVE_MATRIX in features_in(target)
    if wants and not limits.has_matrices:
        cause = f"there is no {COOPERATIVE_MATRIX}: the adapter has none, or wgpu refuses it"
        advice = f'Leave "+{COOPERATIVE_MATRIX}" out of the target, or see docs/webgpu.md.'
        raise DeviceError("webgpu", cause, advice)
    return replace(limits, has_matrices=wants)


# Of a workgroup's memory: what sums combine in, and lists of a scattered sum.
COMBINED = 2 << 10


def target_of(limits: WebGpuLimits) -> Target:
    """The target of an adapter: kernels of our own alone, each a launch."""
    assert GPU.mapping is not None
    threads = min(256, limits.invocations)
    mapping = replace(
        GPU.mapping,
        warp=limits.subgroup or 32,
        exchanges=limits.subgroup > 0,
        lanes=1,  # a word of four bytes for each invocation
        pack=16,  # four words of a workgroup's memory
        threads=threads,
        warp_threads=min(128, threads),
        few_threads=threads,
        most_threads=limits.invocations,
        tile_step=16,
        tile_thread=8,
        tile_steps=4,
        least_depth=8,  # windows of 3 by 3 of one channel
        in_flight=32,
        matrices=16 if limits.has_matrices and limits.subgroup else 0,
        packs_narrow=limits.has_f16,
        has_matmul=False,
        adds_together=frozenset(),
        scans=False,
        scatter_threads=threads,
        scatter_noted=32,
        is_cooperative=False,
    )
    room = limits.workgroup_bytes - COMBINED
    return replace(
        GPU,
        name=limits.name,
        fuses_column_sums=False,
        # What is recomputed reads no more than it would take: an H200 spent 8.4 ms of a step of
        # SmolLM2 on probabilities of 151 MB, each time from scores of 302 MB.
        materialization=replace(GPU.materialization, masks_in_place=True, recomputed_reads=1),
        word=4,
        # Scores that take more than a quarter of a binding: their gradients lie beside them.
        rewriting=replace(GPU.rewriting, least_scores=limits.binding_bytes // 16, scanned_row=0),
        fusion=replace(GPU.fusion, shared_memory=min(GPU.fusion.shared_memory, room)),
        mapping=mapping.within(room),
    )
