"""Generated CUDA text run on the processor: a block's threads are fibers that meet at barriers.

Slow, and only as exact as the host's functions; but it runs the text that a GPU would.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from test_kernels import MEANINGS
from treadle.codegen.cuda.driver import CudaSource, render_program
from treadle.kernel.interpret import interpret
from treadle.kernel.launch import CooperativeLaunch, Launch
from treadle.kernel.program import Call, Program, Repeat, Step

HEAD = r"""
#include <ucontext.h>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
struct Dim { int x, y, z; };
static Dim threadIdx, blockIdx, gridDim = {1, 1, 1};
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static
#define __builtin_assume(x)
static unsigned char shared[256 << 10] __attribute__((aligned(16)));
struct __align__(16) uint4 { unsigned x, y, z, w; };
struct __align__(8) uint2 { unsigned x, y; };
template <class T> static T __ldg(const T *p) { return *p; }
template <class A, class B> static A bits_of(B b) { A a; memcpy(&a, &b, sizeof a); return a; }
static float __uint_as_float(unsigned b) { return bits_of<float>(b); }
static unsigned __float_as_uint(float f) { return bits_of<unsigned>(f); }
static double __longlong_as_double(long long b) { return bits_of<double>(b); }
static long long __double_as_longlong(double f) { return bits_of<long long>(f); }
static unsigned __umulhi(unsigned a, unsigned b) {
  return (unsigned)(((unsigned long long)a * b) >> 32); }
static int __popc(unsigned x) { return __builtin_popcount(x); }
static float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static unsigned short host_bf16(float x) {
  unsigned b = bits_of<unsigned>(x);
  return x != x ? 0x7fff : (unsigned short)((b + 0x7fff + ((b >> 16) & 1)) >> 16); }
static unsigned host_pair(float high, float low) {
  return ((unsigned)host_bf16(high) << 16) | host_bf16(low); }
static unsigned short host_f16(float x) { return bits_of<unsigned short>((_Float16)x); }
static float host_of_f16(unsigned short b) { return (float)bits_of<_Float16>(b); }
template <class T> static T atomicAdd(T *p, T x) { T old = *p; *p = old + x; return old; }
static float host_max(float a, float b) { return a != a || b != b ? NAN : a > b ? a : b; }
static float host_min(float a, float b) { return a != a || b != b ? NAN : a < b ? a : b; }

enum { MOST = 1024, STACK = 128 << 10, GOES = 0, WARP_WAITS = 1, BLOCK_WAITS = 2 };
static ucontext_t home, fibers[MOST];
static char *stacks;
static int alive[MOST], state[MOST], flag[MOST], me, count;
static unsigned long long given[MOST];
static void wait_as(int kind) {
  int own = me; state[own] = kind; swapcontext(&fibers[own], &home); threadIdx.x = own; }
static void __syncthreads() { wait_as(BLOCK_WAITS); }
static void __syncwarp() { wait_as(WARP_WAITS); }
static bool __syncthreads_and(int own) {
  flag[me] = own; wait_as(BLOCK_WAITS);
  bool all = true;
  for (int i = 0; i < count; i++) all = all && (!alive[i] || flag[i]);
  wait_as(BLOCK_WAITS); return all; }
template <class T> static T exchanged(T x, int from) {
  memcpy(&given[me], &x, sizeof x); wait_as(WARP_WAITS);
  T found; memcpy(&found, &given[from], sizeof x); wait_as(WARP_WAITS); return found; }
template <class T> static T __shfl_xor_sync(unsigned, T x, int m) { return exchanged(x, me ^ m); }
template <class T> static T __shfl_up_sync(unsigned, T x, int m) {
  return exchanged(x, (me & 31) >= m ? me - m : me); }
template <class T> static T __shfl_sync(unsigned, T x, int m) {
  return exchanged(x, (me & ~31) + m); }
static unsigned __ballot_sync(unsigned, int own) {
  flag[me] = own; wait_as(WARP_WAITS);
  unsigned found = 0; int first = me & ~31;
  for (int i = 0; i < 32; i++)
    if (first + i < count && alive[first + i] && flag[first + i]) found |= 1u << i;
  wait_as(WARP_WAITS); return found; }
"""

TAIL = r"""
static bool let_go(int from, int to, int kind) {
  int waiting = 0;
  for (int i = from; i < to && i < count; i++) {
    if (alive[i] && state[i] != kind) return false;
    waiting += alive[i]; }
  for (int i = from; i < to && i < count; i++) if (alive[i]) state[i] = GOES;
  return waiting > 0; }
static void run_block(void (*body)(), int threads) {
  count = threads;
  if (!stacks) stacks = (char *)malloc((size_t)MOST * STACK);
  memset(shared, 0x7f, sizeof shared);
  for (int i = 0; i < threads; i++) {
    getcontext(&fibers[i]);
    fibers[i].uc_stack.ss_sp = stacks + (size_t)i * STACK;
    fibers[i].uc_stack.ss_size = STACK; fibers[i].uc_link = &home;
    makecontext(&fibers[i], body, 0); alive[i] = 1; state[i] = GOES; }
  for (int left = threads; left;) {
    bool moved = false; left = 0;
    for (int i = 0; i < threads; i++) if (alive[i] && state[i] == GOES) {
      me = threadIdx.x = i; moved = true; swapcontext(&home, &fibers[i]); }
    for (int w = 0; w < threads; w += 32) moved |= let_go(w, w + 32, WARP_WAITS);
    moved |= let_go(0, threads, BLOCK_WAITS);
    for (int i = 0; i < threads; i++) left += alive[i];
    if (left && !moved) { fprintf(stderr, "threads wait for each other\n"); abort(); } } }
template <class A> struct Launched {
  static A *given; static void (*kernel)(A);
  static void body() { kernel(*given); alive[me] = 0; } };
template <class A> A *Launched<A>::given;
template <class A> void (*Launched<A>::kernel)(A);
template <class A> static void launch(void (*kernel)(A), void *given, int grid, int threads) {
  Launched<A>::kernel = kernel; Launched<A>::given = (A *)given;
  for (int x = 0; x < grid; x++) { blockIdx = {x, 0, 0}; run_block(&Launched<A>::body, threads); } }
"""

# What the prelude says in the GPU's own instructions, as the host says it.
INSTRUCTIONS = [
    (r'asm\("cvt\.rn\.f16\.f32 .*?"f"\(x\)\);', "r = host_f16(x);"),
    (r'asm\("cvt\.f32\.f16 .*?"h"\(b\)\);', "r = host_of_f16(b);"),
    (
        r'asm\("cvt\.rn\.bf16x2.*?"=r"\((\w+)\) : "f"\((.*?)\), "f"\((.*?)\)\);',
        r"\1 = host_pair(\2, \3);",
    ),
    (r'asm\("max\.NaN.*?"f"\(b\)\);', "r = host_max(a, b);"),
    (r'asm\("min\.NaN.*?"f"\(b\)\);', "r = host_min(a, b);"),
    (r'asm\("rcp\.approx.*?"f"\(y\)\);', "r = 1.0f / y;"),
    (r'asm\("ex2\.approx.*?"=f"\(r\)\s*: "f"\((.*?)\)\); return', r"r = exp2f(\1); return"),
    (r'asm\("div\.full.*?"f"\(y\)\);', "r = x / y;"),
    (r'asm\("tanh\.approx.*?"f"\(x\)\);', "r = tanhf(x);"),
    (r'asm volatile\("" :.*?\);', ""),
    (r'asm volatile\("ld\.relaxed\.gpu.*?\);', "here = 0;"),  # one block meets nobody
    (r'asm volatile\("red\.release.*?\);', ""),
    (r'asm volatile\("ld\.acquire.*?\);', "here = until;"),
    (r"extern __shared__ .*?;", ""),
    (r"const __grid_constant__ ", ""),
]


def no_host_compiler() -> str | None:
    """Why text cannot be run here; None where it can."""
    return None if shutil.which("g++") else "g++ is not installed"


def _as_host(text: str) -> str:
    for pattern, found in INSTRUCTIONS:
        text = re.sub(pattern, found, text, flags=re.DOTALL)
    return text


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="cuda_on_host")


@functools.cache
def _compiled(part: str) -> ctypes.CDLL:
    names = re.findall(r"__global__ void .*?\b((?:kernel|cooperative|joint)_\d+)\(", part)
    calls = [
        f'extern "C" void run_{n}(void *a, int grid, int threads) '
        f"{{ launch<{n}_args>({n}, a, grid, threads); }}"
        for n in names
    ]
    text = "\n".join([HEAD, _as_host(part), TAIL, *calls])
    path = Path(_folder().name) / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.cpp"
    path.write_text(text)
    library = path.with_suffix(".so")
    options = ["-O1", "-std=c++20", "-w", "-fPIC", "-shared", "-fno-strict-aliasing"]
    command = ["g++", *options, "-o", str(library), str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:2000]
    return ctypes.CDLL(str(library))


class _Host:
    def __init__(self, program: Program, source: CudaSource, memory: dict[str, np.ndarray]):
        self.memory, self.launches = memory, source.launches
        self.numbers = {id(k): i for i, k in enumerate(program.distinct())}
        self.libraries = {
            name: _compiled(part)
            for part in source.parts
            for name in re.findall(r"\b((?:kernel|cooperative|joint)_\d+)_args \{", part)
        }
        self.cooperative = {(b.path, b.first): b for b in source.cooperative}

    def steps(self, steps: tuple[Step, ...], turn: int, path: tuple[int, ...] = ()) -> None:
        skipped = 0
        for i, step in enumerate(steps):
            run = self.cooperative.get((path, i))
            if run is not None:
                self.together(run, steps[i : i + len(run.phases)], turn)
                skipped = len(run.phases)
            if skipped:
                skipped -= 1
            elif isinstance(step, Repeat):
                turns = range(step.length)
                for j in reversed(turns) if step.reverse else turns:
                    self.steps(step.steps, j, (*path, i))
            else:
                for call in step.calls:
                    self.call(call, turn)

    def views(self, call: Call, turn: int) -> dict[str, np.ndarray]:
        pairs = zip(call.kernel.buffers, call.arguments, strict=True)
        return {
            b.name: self.memory[a.buffer][a.row * turn : a.row * turn + b.size] for b, a in pairs
        }

    def together(self, run: CooperativeLaunch, steps: tuple[Step, ...], turn: int) -> None:
        """Phases as one launch, of a single block that takes all blocks of each in turn."""
        places: list[int] = []
        for phase, step in zip(run.phases, steps, strict=True):
            for entry, count in phase:
                calls = [c for c in step.calls if self.numbers[id(c.kernel)] == entry]
                assert len(calls) == count
                places += [v.ctypes.data for c in calls for v in self.views(c, turn).values()]
        given = (ctypes.c_void_p * max(1, len(places)))(*places)
        call = getattr(self.libraries[run.symbol], f"run_{run.symbol}")
        call(ctypes.byref(given), 1, run.block)

    def call(self, call: Call, turn: int) -> None:
        views = self.views(call, turn)
        launch: Launch = self.launches[self.numbers[id(call.kernel)]]
        if launch.matmul is not None or launch.called is not None:
            interpret(call.kernel, views, MEANINGS)
        elif launch.grid:
            places = [v.ctypes.data for v in views.values()]
            given = (ctypes.c_void_p * (launch.calls * max(1, len(places))))(*places)
            run = getattr(self.libraries[launch.symbol], f"run_{launch.symbol}")
            run(ctypes.byref(given), launch.grid, launch.block)


def run_on_host(program: Program, arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
    """A program through its text; matmuls as the interpreter computes them.

    Cooperative launches are slow here: a single block takes all blocks of each phase.
    """
    memory = {}
    for b in program.buffers:
        fill = 0 if b.dtype.numpy.kind in "biu" else np.nan  # what is not written is seen
        memory[b.name] = np.full(b.size, fill, b.dtype.numpy)
    for name, type_ in program.leaves:
        given = np.asarray(arrays[name]).astype(type_.dtype.numpy)
        memory[name] = np.ascontiguousarray(given).reshape(-1)
    for name, array in program.constants:
        memory[name] = np.ascontiguousarray(array).reshape(-1)
    source = render_program(program)
    _Host(program, source, memory).steps(program.steps, 0)
    return [memory[name].reshape(t.shape) for _, name, t in program.outputs]
