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

from treadle.runtime.cpu.ceilings import CHAINS, STREAMS, UNROLLED, fma_text, memory_text
from treadle.runtime.cpu.native import LibraryCall, chosen_target

FMA_TURNS = 500_000  # more than 10 ms: waking the threads does not count
SIDE_BY_SIDE = 4  # vectors of each array in a turn of a loop over several
APART = 208  # elements: arrays that start at the same place of a page get into each other's way
BYTES = 128 << 20  # a thread's array: more than the caches hold


def threads() -> int:
    return len(os.sched_getaffinity(0))


def target_width() -> int:
    """Lanes of the target that the environment names: its ceiling, not the processor's."""
    return chosen_target("native").width


def fma_flops() -> int:
    """In one step of the contender, all threads together."""
    return 2 * target_width() * CHAINS * UNROLLED * FMA_TURNS * threads()


def on_all_threads(work: Callable[[int], object], kept: object) -> Running:
    """A step is one call of `work` for each thread, at the same time.

    `kept` lives as long as this: the code that runs, at least.
    """
    workers = ThreadPoolExecutor(threads())

    def step() -> None:
        list(workers.map(work, range(threads())))

    return Running(step, lambda: kept, lambda: 0.0)


def prepare_fma(task: dict[str, Any]) -> Callable[[], Running]:
    def start() -> Running:
        width = target_width()
        library = LibraryCall.from_text(fma_text(width))
        kinds = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_float)
        loop = ctypes.CFUNCTYPE(None, *kinds)(library.address("loop"))
        out = np.zeros((threads(), CHAINS * width), np.float32)

        def work(thread: int) -> None:
            loop(out[thread].ctypes.data, FMA_TURNS, 0.5, 0.25)

        return on_all_threads(work, library)

    return start


def prepare_memory(copies: bool) -> Callable[[dict[str, Any]], Callable[[], Running]]:
    def start() -> Running:
        width = target_width()
        library = LibraryCall.from_text(memory_text(width, copies))
        kinds = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
        loop = ctypes.CFUNCTYPE(None, *kinds)(library.address("loop"))
        source = np.ones((threads(), BYTES // 4), np.float32)
        size = BYTES // 4 if copies else STREAMS * width
        out = np.zeros((threads(), size), np.float32)

        def work(thread: int) -> None:
            loop(out[thread].ctypes.data, source[thread].ctypes.data, BYTES // 4 // width)

        return on_all_threads(work, library)

    return lambda task: start


def streams_text(width: int, updated: int, read: int) -> str:
    """Arrays side by side: the sum of those that are read is added to each that is updated."""
    vector = f"<{width} x float>"
    names = [f"u{i}" for i in range(updated)] + [f"r{i}" for i in range(read)]
    lines = ["define void @loop(ptr %table, i64 %first, i64 %end) nounwind {", "entry:"]
    for k, name in enumerate(names):
        lines += [
            f"  %at_{name} = getelementptr ptr, ptr %table, i64 {k}",
            f"  %{name} = load ptr, ptr %at_{name}",
        ]
    lines += ["  br label %top", "top:", "  %i = phi i64 [ %first, %entry ], [ %next, %top ]"]
    for v in range(SIDE_BY_SIDE):
        lines.append(f"  %j{v} = add i64 %i, {v}")
        for name in names:
            lines += [
                f"  %p_{name}_{v} = getelementptr {vector}, ptr %{name}, i64 %j{v}",
                f"  %x_{name}_{v} = load {vector}, ptr %p_{name}_{v}, align 4",
            ]
        total = "zeroinitializer"
        for name in names[updated:]:
            lines.append(f"  %s_{name}_{v} = fadd {vector} %x_{name}_{v}, {total}")
            total = f"%s_{name}_{v}"
        for name in names[:updated]:
            lines += [
                f"  %y_{name}_{v} = fadd {vector} %x_{name}_{v}, {total}",
                f"  store {vector} %y_{name}_{v}, ptr %p_{name}_{v}, align 4",
            ]
    lines += [
        f"  %next = add i64 %i, {SIDE_BY_SIDE}",
        "  %more = icmp slt i64 %next, %end",
        "  br i1 %more, label %top, label %done",
        "done:",
        "  ret void",
        "}",
    ]
    return "\n".join(lines)


def prepare_streams(task: dict[str, Any]) -> Callable[[], Running]:
    """A loop over arrays of a number of elements each, some updated in place, some only read."""
    updated, read, elements = task["updated"], task["read"], task["elements"]

    def start() -> Running:
        width = target_width()
        library = LibraryCall.from_text(streams_text(width, updated, read))
        kinds = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
        loop = ctypes.CFUNCTYPE(None, *kinds)(library.address("loop"))
        turns = elements // (width * SIDE_BY_SIDE)
        memory = [np.zeros(elements + (i + 1) * APART, np.float32) for i in range(updated + read)]
        arrays = [m[i * APART :] for i, m in enumerate(memory)]
        for array in arrays:
            array[:] = 1e-3  # pages are there from now on
        table = np.array([a.ctypes.data for a in arrays], np.int64)
        ends = [turns * t // threads() * SIDE_BY_SIDE for t in range(threads() + 1)]

        def work(thread: int) -> None:
            loop(table.ctypes.data, ends[thread], ends[thread + 1])

        return on_all_threads(work, (library, arrays))

    return start


CONTENDERS = {
    "fma": Contender("fma", (), prepare_fma),
    "read": Contender("read", (), prepare_memory(copies=False)),
    "copy": Contender("copy", (), prepare_memory(copies=True)),
}
