"""Worker threads that run native programs beside the caller."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading

import numpy as np

from treadle.kernel.target import CPU
from treadle.runtime.cpu.aside import aside
from treadle.runtime.cpu.native import LibraryCall
from treadle.runtime.cpu.script import LINE, RUNS, follower_source, pause_call

# The control block's first line has words of 8 bytes: how many programs were launched, the script,
# the number of threads, how many workers sleep. Then a line for each thread: how many barriers it
# has come to, and the last launch it has come back from (so that nothing is freed under its feet).

# Between steps workers spin for a while, then sleep until the next launch: an idle pool costs
# nothing. A worker is counted as a sleeper before it sleeps, and sleeps only if none was launched
# since it looked; a launch is counted before it looks for sleepers. So one of them sees the other.
_WORKER = """
{declarations}

define void @worker(ptr %control, i64 %tid) nounwind {{
entry:
  br label %top
top:
  %seen = phi i64 [ 0, %entry ], [ %now, %run ]
  br label %wait
wait:
  %iterations = phi i64 [ 0, %top ], [ %more, %again ]
  %now = load atomic i64, ptr %control acquire, align 8
  %is_new = icmp ne i64 %now, %seen
  br i1 %is_new, label %run, label %idle
idle:
  {pause}
  %more = add i64 %iterations, 1
  %is_long = icmp sgt i64 %more, {idle_spins}
  br i1 %is_long, label %sleep, label %again
sleep:
  %sleepers_at = getelementptr inbounds i64, ptr %control, i64 3
  %sleepers = atomicrmw add ptr %sleepers_at, i64 1 seq_cst
  %expected = trunc i64 %seen to i32
  {sleep}
  %awake = atomicrmw sub ptr %sleepers_at, i64 1 seq_cst
  br label %again
again:
  br label %wait
run:
  %script_at = getelementptr inbounds i64, ptr %control, i64 1
  %script = load ptr, ptr %script_at, align 8
  %threads_at = getelementptr inbounds i64, ptr %control, i64 2
  %threads = load i64, ptr %threads_at, align 8
  call void @follow(ptr %script, i64 %tid, i64 %threads, ptr %control)
  %line = add i64 %tid, 1
  %offset = mul i64 %line, {line}
  %own = getelementptr inbounds i8, ptr %control, i64 %offset
  %back_at = getelementptr inbounds i64, ptr %own, i64 1
  store atomic i64 %now, ptr %back_at release, align 8
  br label %top
}}

define void @launch(ptr %control, ptr %script, i64 %threads) nounwind {{
entry:
  %script_at = getelementptr inbounds i64, ptr %control, i64 1
  store ptr %script, ptr %script_at, align 8
  %threads_at = getelementptr inbounds i64, ptr %control, i64 2
  store i64 %threads, ptr %threads_at, align 8
  %old = load i64, ptr %control, align 8
  %new = add i64 %old, 1
  store atomic i64 %new, ptr %control seq_cst, align 8
  %sleepers_at = getelementptr inbounds i64, ptr %control, i64 3
  %sleepers = load atomic i64, ptr %sleepers_at seq_cst, align 8
  %is_quiet = icmp eq i64 %sleepers, 0
  br i1 %is_quiet, label %work, label %wake
wake:
  {wake}
  br label %work
work:
  call void @follow(ptr %script, i64 0, i64 %threads, ptr %control)
  br label %next
next:
  %tid = phi i64 [ 1, %work ], [ %after, %arrived ]
  %is_other = icmp slt i64 %tid, %threads
  br i1 %is_other, label %look, label %done
look:
  %line = add i64 %tid, 1
  %offset = mul i64 %line, {line}
  %own = getelementptr inbounds i8, ptr %control, i64 %offset
  %back_at = getelementptr inbounds i64, ptr %own, i64 1
  br label %wait
wait:
  %spins = phi i64 [ 0, %look ], [ %more, %again ]
  %back = load atomic i64, ptr %back_at acquire, align 8
  %is_back = icmp eq i64 %back, %new
  br i1 %is_back, label %arrived, label %spin
spin:
  {pause}
  %more = add i64 %spins, 1
  %is_long = icmp sgt i64 %more, {spins}
  br i1 %is_long, label %yield, label %again
yield:
  %ignored = call i32 @sched_yield()
  br label %again
again:
  br label %wait
arrived:
  %after = add i64 %tid, 1
  br label %next
done:
  %runs_at = getelementptr inbounds i64, ptr %script, i64 {runs}
  %runs = load i64, ptr %runs_at, align 8
  %one_more = add i64 %runs, 1
  store i64 %one_more, ptr %runs_at, align 8
  ret void
}}
"""
# Several runs in one call: before each, words are set from a row of their values; after it, results
# are copied away to a row of their own. A result is three words: from, to, and its bytes.
_SEVERAL = """
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)

define void @several(ptr %control, ptr %script, i64 %threads, i64 %runs,
    ptr %addresses, ptr %values, i64 %count, ptr %results, i64 %kinds, i64 %row) nounwind {{
entry:
  br label %next
next:
  %run = phi i64 [ 0, %entry ], [ %run_after, %copied ]
  %is_run = icmp slt i64 %run, %runs
  br i1 %is_run, label %begin, label %done
begin:
  %first = mul i64 %run, %count
  br label %set
set:
  %i = phi i64 [ 0, %begin ], [ %i_after, %put ]
  %is_word = icmp slt i64 %i, %count
  br i1 %is_word, label %put, label %go
put:
  %address_at = getelementptr inbounds i64, ptr %addresses, i64 %i
  %address = load ptr, ptr %address_at, align 8
  %number = add i64 %first, %i
  %value_at = getelementptr inbounds i64, ptr %values, i64 %number
  %value = load i64, ptr %value_at, align 8
  store i64 %value, ptr %address, align 8
  %i_after = add i64 %i, 1
  br label %set
go:
  call void @launch(ptr %control, ptr %script, i64 %threads)
  %offset = mul i64 %run, %row
  br label %look
look:
  %k = phi i64 [ 0, %go ], [ %k_after, %copy ]
  %is_result = icmp slt i64 %k, %kinds
  br i1 %is_result, label %copy, label %copied
copy:
  %word = mul i64 %k, 3
  %from_at = getelementptr inbounds i64, ptr %results, i64 %word
  %from = load ptr, ptr %from_at, align 8
  %to_at = getelementptr inbounds i64, ptr %from_at, i64 1
  %to_first = load ptr, ptr %to_at, align 8
  %to = getelementptr inbounds i8, ptr %to_first, i64 %offset
  %bytes_at = getelementptr inbounds i64, ptr %from_at, i64 2
  %bytes = load i64, ptr %bytes_at, align 8
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %from, i64 %bytes, i1 false)
  %k_after = add i64 %k, 1
  br label %look
copied:
  %run_after = add i64 %run, 1
  br label %next
done:
  ret void
}}
"""

# Linux: the number of the system call `futex`; WAIT and WAKE in memory of this process alone.
_FUTEX = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE = 128, 129


def _sleeping() -> dict[str, str]:
    """How workers sleep and a launch wakes them: by a futex, or by naps where there is none."""
    number = _FUTEX.get(platform.machine()) if sys.platform == "linux" else None
    if number is None:
        nap = "%rest = call i32 @usleep(i32 1000)"
        return {"declarations": "declare i32 @usleep(i32)", "sleep": nap, "wake": ""}
    call = f"call i64 (i64, ...) @syscall(i64 {number}, ptr %control, i64"
    return {
        "declarations": "declare i64 @syscall(i64, ...)",
        "sleep": f"%rest = {call} {_WAIT}, i32 %expected, ptr null)",
        "wake": f"%woken = {call} {_WAKE}, i32 {2**31 - 1})",
    }


class Pool:
    """A fixed number of threads, the caller counted. One program runs at a time."""

    def __init__(self, threads: int):
        self.threads = threads
        self._lock = threading.Lock()
        worker = (_WORKER + _SEVERAL).format(
            line=LINE,
            pause=pause_call(),
            idle_spins=CPU.tasks.idle_spins,
            **_sleeping(),
            spins=CPU.tasks.barrier_spins,
            runs=RUNS,
        )
        self._library = LibraryCall.from_text(follower_source() + worker)
        words = (threads + 2) * LINE // 8
        self._memory = np.zeros(words + LINE // 8, np.int64)
        start = self._memory.ctypes.data
        self._control = start + (-start) % LINE
        self._launch = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 2, ctypes.c_int64)(
            self._library.address("launch")
        )
        word, pointer = ctypes.c_int64, ctypes.c_void_p
        self._several = ctypes.CFUNCTYPE(
            None, pointer, pointer, word, word, pointer, pointer, word, pointer, word, word
        )(self._library.address("several"))
        follow = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(
            self._library.address("worker")
        )
        # Workers look at the pool's memory until the process is gone, when Python has long begun to
        # take objects apart: this one it must leave alone.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        for tid in range(1, threads):
            threading.Thread(
                target=follow, args=(self._control, tid), name=f"treadle-{tid}", daemon=True
            ).start()

    def run(self, script: int) -> None:
        """A program on all threads; returns when all are done.

        An interrupt (Ctrl-C) is delivered when the program has ended: its step is whole, and the
        script's own count of runs says that it was.
        """
        with self._lock:
            self._launch(self._control, script, self.threads)

    def run_several(
        self, script: int, addresses: np.ndarray, values: np.ndarray, results: np.ndarray, row: int
    ) -> None:
        """A program once for each row of values, which are stored at their addresses before it.

        `results` are triples of an address, where a copy of it goes for the first run (for the
        next ones that many bytes further each), and its bytes.
        """
        with self._lock:
            self._several(
                self._control,
                script,
                self.threads,
                len(values),
                addresses.ctypes.data,
                values.ctypes.data,
                len(addresses),
                results.ctypes.data,
                len(results),
                row,
            )


_pools: dict[int, Pool] = {}
_making = threading.Lock()


def pool(threads: int) -> Pool:
    """The pool of a number of threads. It is never dropped: its workers run its code."""
    found = _pools.get(threads)
    return aside(lambda _: _made(threads)) if found is None else found


def _made(threads: int) -> Pool:
    with _making:
        if threads not in _pools:
            _pools[threads] = Pool(threads)
        return _pools[threads]


def _start_again() -> None:
    """A forked child has none of its parent's threads: it makes pools of its own."""
    global _making
    _pools.clear()
    _making = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_again)
