"""Worker threads that run native programs together with the caller."""

from __future__ import annotations

import ctypes
import os
import threading

import numpy as np

from treadle.runtime.native import Library

LINE = 128
# The control block's first line has words of 8 bytes: how many programs were launched, whether to
# stop, the program, its table, the number of threads. Then a line for each thread: its flag at
# barriers, and the last launch it has come back from (so that code is not freed under its feet).

# Between steps workers spin for a while, then nap: an idle pool costs little.
_WORKER = """
declare i32 @usleep(i32)
declare void @llvm.x86.sse2.pause()

define void @worker(ptr %control, i64 %tid) nounwind {
entry:
  br label %top
top:
  %seen = phi i64 [ 0, %entry ], [ %now, %ran ]
  br label %wait
wait:
  %turns = phi i64 [ 0, %top ], [ %more, %again ]
  %now = load atomic i64, ptr %control acquire, align 8
  %is_new = icmp ne i64 %now, %seen
  br i1 %is_new, label %go, label %idle
idle:
  call void @llvm.x86.sse2.pause()
  %more = add i64 %turns, 1
  %is_long = icmp sgt i64 %more, 200000
  br i1 %is_long, label %nap, label %again
nap:
  %z = call i32 @usleep(i32 200)
  br label %again
again:
  br label %wait
go:
  %stop_at = getelementptr inbounds i64, ptr %control, i64 1
  %stop = load atomic i64, ptr %stop_at acquire, align 8
  %is_stop = icmp ne i64 %stop, 0
  br i1 %is_stop, label %done, label %run
run:
  %program_at = getelementptr inbounds i64, ptr %control, i64 2
  %program = load ptr, ptr %program_at, align 8
  %table_at = getelementptr inbounds i64, ptr %control, i64 3
  %table = load ptr, ptr %table_at, align 8
  %threads_at = getelementptr inbounds i64, ptr %control, i64 4
  %threads = load i64, ptr %threads_at, align 8
  call void %program(ptr %table, i64 %tid, i64 %threads, ptr %control)
  %line = add i64 %tid, 1
  %offset = mul i64 %line, 128
  %own = getelementptr inbounds i8, ptr %control, i64 %offset
  %back_at = getelementptr inbounds i64, ptr %own, i64 1
  store atomic i64 %now, ptr %back_at release, align 8
  br label %ran
ran:
  br label %top
done:
  ret void
}

define void @launch(ptr %control, ptr %program, ptr %table, i64 %threads) nounwind {
entry:
  %program_at = getelementptr inbounds i64, ptr %control, i64 2
  store ptr %program, ptr %program_at, align 8
  %table_at = getelementptr inbounds i64, ptr %control, i64 3
  store ptr %table, ptr %table_at, align 8
  %threads_at = getelementptr inbounds i64, ptr %control, i64 4
  store i64 %threads, ptr %threads_at, align 8
  %old = load i64, ptr %control, align 8
  %new = add i64 %old, 1
  store atomic i64 %new, ptr %control release, align 8
  call void %program(ptr %table, i64 0, i64 %threads, ptr %control)
  br label %next
next:
  %tid = phi i64 [ 1, %entry ], [ %after, %arrived ]
  %is_other = icmp slt i64 %tid, %threads
  br i1 %is_other, label %wait, label %done
wait:
  %line = add i64 %tid, 1
  %offset = mul i64 %line, 128
  %own = getelementptr inbounds i8, ptr %control, i64 %offset
  %back_at = getelementptr inbounds i64, ptr %own, i64 1
  %back = load atomic i64, ptr %back_at acquire, align 8
  %is_back = icmp eq i64 %back, %new
  br i1 %is_back, label %arrived, label %spin
spin:
  call void @llvm.x86.sse2.pause()
  br label %wait
arrived:
  %after = add i64 %tid, 1
  br label %next
done:
  ret void
}
"""


def default_threads() -> int:
    """The processors this process may use."""
    return max(1, len(os.sched_getaffinity(0)))


class Pool:
    """A fixed number of threads, the caller counted. One program runs at a time."""

    def __init__(self, threads: int):
        self.threads = threads
        self.process = os.getpid()
        self._lock = threading.Lock()
        self._library = Library(_WORKER)
        words = (threads + 2) * LINE // 8
        self._memory = np.zeros(words + LINE // 8, np.int64)
        start = self._memory.ctypes.data
        self._control = start + (-start) % LINE
        self._launch = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3, ctypes.c_int64)(
            self._library.address("launch")
        )
        worker = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(
            self._library.address("worker")
        )
        for tid in range(1, threads):
            threading.Thread(target=worker, args=(self._control, tid), daemon=True).start()

    def run(self, program: int, table: int) -> None:
        """A program on all threads; returns when all are done."""
        with self._lock:
            self._launch(self._control, program, table, self.threads)


_pools: dict[int, Pool] = {}
_making = threading.Lock()


def pool(threads: int) -> Pool:
    """The pool of a number of threads; a forked child makes its own."""
    with _making:
        found = _pools.get(threads)
        if found is None or found.process != os.getpid():
            # A pool is never dropped: its workers run its code.
            found = _pools[threads] = Pool(threads)
        return found
