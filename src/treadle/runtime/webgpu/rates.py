"""What a device can do at most: multiply-adds in registers, and a copy of memory."""

from __future__ import annotations

import time

from treadle.runtime.executable import Ceilings
from treadle.runtime.webgpu.device import device

_THREADS, _GROUPS, _STEPS, _COPIED = 256, 1024, 1024, 64 << 20
_ARITHMETIC = f"""
@group(0) @binding(0) var<storage, read_write> arena: array<f32>;
@compute @workgroup_size({_THREADS})
fn main(@builtin(global_invocation_id) id: vec3<u32>) {{
  var a = vec4<f32>(f32(id.x)); var b = vec4<f32>(0.5f);
  for (var i = 0; i < {_STEPS}; i++) {{ a = fma(a, b, b); b = fma(b, a, a); }}
  arena[id.x] = a.x + a.y + a.z + a.w + b.x + b.y + b.z + b.w;
}}
"""


def ceilings() -> Ceilings:
    """Operations and bytes a second, the best of three."""
    here = device()
    flags = here.wgpu.BufferUsage
    usage = flags.STORAGE | flags.COPY_SRC | flags.COPY_DST
    groups = 1 if here.is_processor else _GROUPS
    nbytes = _COPIED // 16 if here.is_processor else _COPIED
    with here.checked("calibrate"):
        one, two = (here.device.create_buffer(size=nbytes, usage=usage) for _ in range(2))
        module = here.device.create_shader_module(code=_ARITHMETIC)
        compute = {"module": module, "entry_point": "main"}
        pipeline = here.device.create_compute_pipeline(layout="auto", compute=compute)
        entries = [{"binding": 0, "resource": {"buffer": one, "offset": 0, "size": nbytes}}]
        group = here.device.create_bind_group(
            layout=pipeline.get_bind_group_layout(0), entries=entries
        )

    def timed(copies: bool, count: int) -> float:
        here.read(one, 0, 4)
        start = time.perf_counter()
        encoder = here.device.create_command_encoder()
        for _ in range(count):
            if copies:
                encoder.copy_buffer_to_buffer(one, 0, two, 0, nbytes)
                continue
            part = encoder.begin_compute_pass()
            part.set_pipeline(pipeline)
            part.set_bind_group(0, group)
            part.dispatch_workgroups(groups)
            part.end()
        here.queue.submit([encoder.finish()])
        here.read(one, 0, 4)
        return time.perf_counter() - start

    taken = {}
    with here.checked("calibrate"):
        for copies in (False, True):
            rounds = range(1 if here.is_processor else 3)
            more = min(timed(copies, 9) for _ in rounds) - min(timed(copies, 1) for _ in rounds)
            taken[copies] = max(more / 8, 1e-7)
    flops = 2 * 2 * 4 * _STEPS * _THREADS * groups
    return Ceilings(flops / taken[False], 2 * nbytes / taken[True])
