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

from treadle.runtime.ceilings import CHAINS, STREAMS, UNROLLED, fma_text, memory_text
from treadle.runtime.native import Library, host

FMA_TURNS = 500_000  # more than 10 ms: waking the threads does not count
BYTES = 128 << 20  # a thread's array: more than the caches hold


def threads() -> int:
    return len(os.sched_getaffinity(0))


def fma_flops() -> int:
    """In one step of the contender, all threads together."""
    return 2 * host().width * CHAINS * UNROLLED * FMA_TURNS * threads()


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
