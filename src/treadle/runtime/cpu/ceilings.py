"""What one processor can do at most, measured on the spot: arithmetic, and memory."""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable

import numpy as np

from treadle.runtime.cpu.native import LibraryCall, host
from treadle.runtime.executable import Ceilings

CHAINS = 12  # independent: more than latency × units of processors so far
UNROLLED = 8  # multiply-adds of a chain in an iteration of the loop
STREAMS = 8  # vectors in an iteration of the loop
FMA_ITERATIONS = 100_000
BYTES = 64 << 20  # more than caches hold


@functools.cache
def ceilings() -> Ceilings:
    """Of one thread of the host, the best of a few; once a process, some tens of milliseconds."""
    width = host().width
    return Ceilings(_fma_rate(width), _memory_rate(width))


def _fma_rate(width: int) -> float:
    library = LibraryCall.from_text(fma_text(width))
    kinds = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_float)
    loop = ctypes.CFUNCTYPE(None, *kinds)(library.address("loop"))
    out = np.zeros(CHAINS * width, np.float32)
    seconds = _best(lambda: loop(out.ctypes.data, FMA_ITERATIONS, 0.5, 0.25))
    return 2 * width * CHAINS * UNROLLED * FMA_ITERATIONS / seconds


def _memory_rate(width: int) -> float:
    library = LibraryCall.from_text(memory_text(width, copies=False))
    kinds = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    loop = ctypes.CFUNCTYPE(None, *kinds)(library.address("loop"))
    source, out = np.ones(BYTES // 4, np.float32), np.zeros(STREAMS * width, np.float32)
    vectors = BYTES // 4 // width
    return BYTES / _best(lambda: loop(out.ctypes.data, source.ctypes.data, vectors))


def _best(run: Callable[[], None]) -> float:
    found = float("inf")
    for _ in range(5):
        start = time.thread_time()
        run()
        found = min(found, time.thread_time() - start)
    return found


def fma_text(width: int) -> str:
    """x ← x · a + b in registers; a and b are arguments, so that nothing is known of them.

    One instruction, or two where a processor has none for both.
    """
    vector = f"<{width} x float>"
    splat = f"shufflevector {vector} %{{0}}0, {vector} poison, <{width} x i32> zeroinitializer"
    lines = [
        f"declare {vector} @llvm.fmuladd.v{width}f32({vector}, {vector}, {vector})",
        "define void @loop(ptr %out, i64 %iterations, float %a, float %b) nounwind {",
        "entry:",
    ]
    for name in "ab":
        lines += [
            f"  %{name}0 = insertelement {vector} poison, float %{name}, i32 0",
            f"  %{name}s = {splat.format(name)}",
        ]
    lines += ["  br label %top", "top:", "  %i = phi i64 [ 0, %entry ], [ %next, %top ]"]
    for c in range(CHAINS):
        lines.append(f"  %x{c}_0 = phi {vector} [ %bs, %entry ], [ %x{c}_{UNROLLED}, %top ]")
    for u in range(UNROLLED):
        for c in range(CHAINS):
            operands = f"{vector} %x{c}_{u}, {vector} %as, {vector} %bs"
            lines.append(f"  %x{c}_{u + 1} = call {vector} @llvm.fmuladd.v{width}f32({operands})")
    lines += [
        "  %next = add i64 %i, 1",
        "  %more = icmp slt i64 %next, %iterations",
        "  br i1 %more, label %top, label %done",
        "done:",
    ]
    for c in range(CHAINS):
        lines += [
            f"  %p{c} = getelementptr {vector}, ptr %out, i64 {c}",
            f"  store {vector} %x{c}_{UNROLLED}, ptr %p{c}, align 4",
        ]
    return "\n".join([*lines, "  ret void", "}"])


def memory_text(width: int, copies: bool) -> str:
    """Read an array and keep its sums; or copy it to another."""
    vector = f"<{width} x float>"
    lines = [
        "define void @loop(ptr %out, ptr %from, i64 %vectors) nounwind {",
        "entry:",
        "  br label %top",
        "top:",
        "  %i = phi i64 [ 0, %entry ], [ %next, %top ]",
    ]
    if not copies:
        lines += [
            f"  %s{k} = phi {vector} [ zeroinitializer, %entry ], [ %t{k}, %top ]"
            for k in range(STREAMS)
        ]
    for k in range(STREAMS):
        lines += [
            f"  %j{k} = add i64 %i, {k}",
            f"  %p{k} = getelementptr {vector}, ptr %from, i64 %j{k}",
            f"  %x{k} = load {vector}, ptr %p{k}, align 4",
        ]
        if copies:
            lines += [
                f"  %q{k} = getelementptr {vector}, ptr %out, i64 %j{k}",
                f"  store {vector} %x{k}, ptr %q{k}, align 4",
            ]
        else:
            lines.append(f"  %t{k} = fadd {vector} %s{k}, %x{k}")
    lines += [
        f"  %next = add i64 %i, {STREAMS}",
        "  %more = icmp slt i64 %next, %vectors",
        "  br i1 %more, label %top, label %done",
        "done:",
    ]
    if not copies:
        for k in range(STREAMS):
            lines += [
                f"  %o{k} = getelementptr {vector}, ptr %out, i64 {k}",
                f"  store {vector} %t{k}, ptr %o{k}, align 4",
            ]
    return "\n".join([*lines, "  ret void", "}"])
