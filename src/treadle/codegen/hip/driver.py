"""The source of a program in HIP C++: the text of CUDA's printer, as AMD's compiler reads it.

Kernels are the same: what differs is the prelude's own instructions, exchanges among the threads of
a warp (32 or 64, as the kernels say), a grid's synchronization, and a few words of declarations.
"""

from __future__ import annotations

import re
from dataclasses import replace

from treadle.codegen.cuda import driver as cuda
from treadle.codegen.cuda.driver import CudaSource
from treadle.kernel.mapped import geometry_of
from treadle.kernel.nodes import Kernel, library_call_of
from treadle.kernel.program import Program

HEAD = r"""
#ifndef __HIPCC_RTC__
#include <hip/hip_runtime.h>
#endif
#ifndef __align__
#define __align__(n) __attribute__((aligned(n)))
#endif
#define WARP {warp}
typedef {mask} lanes_t;  // a bit for each thread of a warp
static __device__ __forceinline__ unsigned short as_bf16(float x) {{
  unsigned b = __float_as_uint(x);
  return x != x ? 0x7fff : (unsigned short)((b + 0x7fffu + ((b >> 16) & 1u)) >> 16); }}
static __device__ __forceinline__ float nan_max(float a, float b) {{
  return a != a ? a : b != b ? b : a == b ? (signbit(a) ? b : a) : a > b ? a : b; }}
static __device__ __forceinline__ float nan_min(float a, float b) {{
  return a != a ? a : b != b ? b : a == b ? (signbit(a) ? a : b) : a < b ? a : b; }}
static __device__ __forceinline__ void sync_warp() {{  // threads of a warp run in step
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "workgroup"); __builtin_amdgcn_wave_barrier(); }}
static __device__ __forceinline__ lanes_t ballot(bool x) {{
  unsigned long long every = __ballot(x);
  return (lanes_t)(every >> (__lane_id() / WARP * WARP)); }}
"""

# What the prelude says in NVIDIA's instructions, and what is said of launches and exchanges.
SPELLING = [
    (
        r'asm\("cvt\.rn\.f16\.f32 .*?"f"\(x\)\);',
        "_Float16 h = (_Float16)x; __builtin_memcpy(&r, &h, 2);",
    ),
    (
        r'asm\("cvt\.f32\.f16 .*?"h"\(b\)\);',
        "_Float16 h; __builtin_memcpy(&h, &b, 2); r = (f32)h;",
    ),
    (
        r'asm\("cvt\.rn\.bf16x2.*?"=r"\((\w+)\) : "f"\((.*?)\), "f"\((.*?)\)\);',
        r"\1 = ((u32)as_bf16(\2) << 16) | as_bf16(\3);",
    ),
    (r'asm\("max\.NaN.*?"f"\(b\)\);', "r = nan_max(a, b);"),
    (r'asm\("min\.NaN.*?"f"\(b\)\);', "r = nan_min(a, b);"),
    (r'asm\("rcp\.approx.*?"f"\(y\)\);', "r = __builtin_amdgcn_rcpf(y);"),
    (
        r'asm\("ex2\.approx.*?"=f"\(r\)\s*: "f"\((.*?)\)\); return',
        r"r = __builtin_amdgcn_exp2f(\1); return",
    ),
    (r'asm\("div\.full.*?"f"\(y\)\);', "r = x / y;"),
    (r'asm\("tanh\.approx.*?"f"\(x\)\);', "r = tanhf(x);"),
    (r"#if __CUDA_ARCH__ >= 900.*?#endif\n", ""),  # a launch starts when the one before is done
    (
        r'asm volatile\("ld\.relaxed\.gpu.*?\);',
        "here = __hip_atomic_load(arrived, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);",
    ),
    (
        r'asm volatile\("red\.release.*?\);',
        "__hip_atomic_fetch_add(arrived, 1ull, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_AGENT);",
    ),
    (
        r'asm volatile\("ld\.acquire.*?\);',
        "here = __hip_atomic_load(arrived, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_AGENT);",
    ),
    (r'asm volatile\("" :.*?\); __builtin_assume\(__isGlobal\(p\)\);', ""),
    (r"__shfl_xor_sync\(0xffffffffu, (.*?), m\)", r"__shfl_xor(\1, m, WARP)"),
    (r"int N = 32,", "int N = WARP,"),
    (r"\(threadIdx\.x & 31\)", "(threadIdx.x % WARP)"),
    (r"parts\[threadIdx\.x & 31\]", "parts[threadIdx.x % WARP]"),
    (r"threadIdx\.x >> 5", "threadIdx.x / WARP"),
    (r"__syncwarp\(\)", "sync_warp()"),
    (r"const unsigned every = __ballot_sync\(0xffffffffu, ", "const lanes_t every = ballot("),
    (r"__popc\(every & \(\(1u << lane\) - 1u\)\)", "__popcll(every & (((lanes_t)1 << lane) - 1))"),
    (r"__popc\(every\)", "__popcll(every)"),
    (r"const __grid_constant__ ", "const "),
    (r"__launch_bounds__\((\d+), \d+\)", r"__launch_bounds__(\1)"),  # AMD's second one is another
]


def render_program(program: Program) -> CudaSource:
    """The text of a program and its launches, numbered as `Program.distinct` numbers kernels."""
    source = cuda.render_program(program)
    own = [k for k in program.distinct() if library_call_of(k) is None]
    warps = {geometry_of(k).warp for k in own if k.geometry is not None}
    assert len(warps) <= 1, f"warps of one device differ: {sorted(warps)}"
    warp = warps.pop() if warps else 64
    return replace(source, parts=tuple(as_hip(part, warp) for part in source.parts))


def render_kernel(kernel: Kernel) -> str:
    """One kernel's source, with what it calls."""
    return as_hip(cuda.render_kernel(kernel), geometry_of(kernel).warp)


def as_hip(text: str, warp: int) -> str:
    """CUDA's text of mapped kernels as HIP C++, for warps of a size."""
    for pattern, found in SPELLING:
        text = re.sub(pattern, found, text, flags=re.DOTALL)
    mask = "unsigned" if warp == 32 else "unsigned long long"
    return HEAD.format(warp=warp, mask=mask) + text
