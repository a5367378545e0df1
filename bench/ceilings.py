"""What the processor can do at most: multiply-adds a second in registers, bytes a second of memory.

Loops in LLVM IR, run by all threads at once. They are contenders like any other, so that they are
measured in turns with what is compared with them.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from turns import Contender, Running

from treadle.runtime.native import Library, host

CHAINS = 12  # independent: more than latency × units of processors so far
UNROLLED = 8  # multiply-adds of a chain in a turn of the loop
FMA_TURNS = 500_000  # more than 10 ms: waking the threads does not count
BYTES = 128 << 20  # a thread's array: more than the caches hold
STREAMS = 8  # vectors in a turn of the loop


def threads() -> int:
    return len(os.sched_getaffinity(0))


def fma_flops() -> int:
    """In one step of the contender, all threads together."""
    return 2 * host().width * CHAINS * UNROLLED * FMA_TURNS * threads()


def fma_text(width: int) -> str:
    """x ← x · a + b in registers; a and b are arguments, so that nothing is known of them."""
    vector = f"<{width} x float>"
    splat = f"shufflevector {vector} %{{0}}0, {vector} poison, <{width} x i32> zeroinitializer"
    lines = [
        f"declare {vector} @llvm.fma.v{width}f32({vector}, {vector}, {vector})",
        "define void @loop(ptr %out, i64 %turns, float %a, float %b) nounwind {",
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
            lines.append(f"  %x{c}_{u + 1} = call {vector} @llvm.fma.v{width}f32({operands})")
    lines += [
        "  %next = add i64 %i, 1",
        "  %more = icmp slt i64 %next, %turns",
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


def on_all_threads(work: Callable[[int], object], library: Library) -> Running:
    """A step is one call of `work` for each thread, at the same time."""
    workers = ThreadPoolExecutor(threads())

    def step() -> None:
        list(workers.map(work, range(threads())))

    return Running(step, lambda: library, lambda: 0.0)  # the code lives as long as this


def prepare_fma(task: dict[str, Any]) -> Callable[[], Running]:
    def start() -> Running:
        width = host().width
        library = Library.from_text(fma_text(width))
        kinds = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_float)
        loop = ctypes.CFUNCTYPE(None, *kinds)(library.address("loop"))
        out = np.zeros((threads(), CHAINS * width), np.float32)

        def work(thread: int) -> None:
            loop(out[thread].ctypes.data, FMA_TURNS, 0.5, 0.25)

        return on_all_threads(work, library)

    return start


def prepare_memory(copies: bool) -> Callable[[dict[str, Any]], Callable[[], Running]]:
    def start() -> Running:
        width = host().width
        library = Library.from_text(memory_text(width, copies))
        kinds = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
        loop = ctypes.CFUNCTYPE(None, *kinds)(library.address("loop"))
        source = np.ones((threads(), BYTES // 4), np.float32)
        size = BYTES // 4 if copies else STREAMS * width
        out = np.zeros((threads(), size), np.float32)

        def work(thread: int) -> None:
            loop(out[thread].ctypes.data, source[thread].ctypes.data, BYTES // 4 // width)

        return on_all_threads(work, library)

    return lambda task: start


CONTENDERS = {
    "fma": Contender("fma", (), prepare_fma),
    "read": Contender("read", (), prepare_memory(copies=False)),
    "copy": Contender("copy", (), prepare_memory(copies=True)),
}
