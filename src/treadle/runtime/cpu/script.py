"""What every thread of a pool executes: it follows a program's script, word by word.

A script is an array of 64-bit words. Its first eight: the threads' scratch and the bytes of each,
the counters of tasks and the bytes of a set of them, how often it was followed to its end, then
unused. Instructions of eight words follow. A call's tasks are shared out first by number, so that a
thread finds its own rows in the next phase, then taken from whoever is behind: a busy
processor delays a program by a task, not by its share.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from treadle.kernel.plan import (
    CUT,
    Entry,
    Plan,
    PlannedCall,
    PlannedPhase,
    PlannedRepeat,
    PlannedStep,
    Point,
)
from treadle.kernel.target import CPU

LINE = 128  # bytes between what two threads write: no false sharing
WORDS = 8  # of an instruction, and of the head
RUNS = 4  # the word that counts runs
END, PHASE, CALL, REPEAT, NEXT = range(5)
DEEPEST = 8  # repeats inside repeats


class Script(NamedTuple):
    """A script without its head, the arguments it points to, and the calls of a phase at most.

    `ends` are the words after each call of each step of the plan; a repeat counts as one.
    """

    words: np.ndarray
    arguments: np.ndarray
    most_calls: int
    ends: list[list[int]]


def script_words(plan: Plan, table: np.ndarray, symbols: Sequence[int]) -> Script:
    pairs = sum(len(c.slots) for c in planned_calls(plan.steps))
    arguments = np.zeros((max(1, pairs), 2), np.int64)
    writer = _ScriptWriter(plan, table, symbols, arguments)
    ends = [writer.step(step) for step in plan.steps]
    writer.add(END)
    return Script(np.array(writer.words, np.int64), arguments, writer.most_calls, ends)


def with_calls(
    words: np.ndarray, ends: Sequence[Sequence[int]], calls: Mapping[Point, tuple[int, int]]
) -> np.ndarray:
    """A script in which the first thread calls a function with an argument at some points.

    After the last call of a step it has waited for all threads; in the middle it waits for none.
    """
    words, parts, start = words.copy(), [], 0
    for point in sorted(calls):
        function, argument = calls[point]
        end = ends[point.step][point.call]
        parts.append(words[start:end])
        if point.call == len(ends[point.step]) - 1:
            parts.append(np.array([PHASE, 1, 0, *[0] * (WORDS - 3)], np.int64))
            if words[end] == PHASE:  # which waits too, also where it is one thread's
                words[end + 1] = 1
        parts.append(np.array([CALL, function, 0, 0, argument, 0, -1, 0], np.int64))
        start = end
    return np.concatenate([*parts, words[start:]])


def _cut(entry: Entry, tasks: int) -> int:
    """A mask for where tasks begin: at whole vectors, several of them where there are enough."""
    fits = (n for n in (4 * CUT, CUT) if entry.is_vector and entry.iterations >= n * max(1, tasks))
    return -next(fits, 1)


def planned_calls(steps: Sequence[PlannedStep]) -> list[PlannedCall]:
    found: list[PlannedCall] = []
    for step in steps:
        found += step.calls if isinstance(step, PlannedPhase) else planned_calls(step.steps)
    return found


class _ScriptWriter:
    def __init__(
        self, plan: Plan, table: np.ndarray, symbols: Sequence[int], arguments: np.ndarray
    ):
        self.plan, self.table, self.symbols, self.arguments = plan, table, symbols, arguments
        self.words: list[int] = []
        self.pairs, self.most_calls = 0, 1
        self.was_serial = False

    def add(self, *words: int) -> None:
        self.words += [*words, *[0] * (WORDS - len(words))]

    def step(self, step: PlannedStep) -> list[int]:
        """The words after each of its calls, or after a repeat."""
        if isinstance(step, PlannedPhase):
            return self.phase(step)
        self.repeat(step)
        return [len(self.words)]

    def phase(self, phase: PlannedPhase) -> list[int]:
        """One thread after itself needs no barrier."""
        needs_barrier = not (phase.is_serial and self.was_serial)
        self.was_serial = phase.is_serial
        self.most_calls = max(self.most_calls, len(phase.calls))
        self.add(PHASE, needs_barrier, not phase.is_serial)
        ends = []
        for i, call in enumerate(phase.calls):
            entry = self.plan.entries[call.entry]
            tasks = 0 if phase.is_serial else call.tasks
            mask = _cut(entry, tasks)
            address = self.arguments.ctypes.data + 16 * self.pairs
            self.add(CALL, self.symbols[call.entry], entry.iterations, tasks, address, i, mask)
            for slot, row in zip(call.slots, call.rows, strict=True):
                self.arguments[self.pairs] = np.int64(self.table[slot]), row
                self.pairs += 1
            ends.append(len(self.words))
        return ends or [len(self.words)]

    def repeat(self, repeat: PlannedRepeat) -> None:
        if not repeat.length:
            self.pairs += sum(len(c.slots) for c in planned_calls(repeat.steps))
            return
        self.was_serial = False
        self.add(REPEAT, repeat.length, repeat.reverse)
        for step in repeat.steps:
            self.step(step)
        self.was_serial = False
        self.add(NEXT, repeat.length, repeat.reverse)


def _pause() -> tuple[str, str]:
    """How a thread that waits tells the processor so: a declaration and a call."""
    if platform.machine() in ("x86_64", "AMD64"):
        return "declare void @llvm.x86.sse2.pause()", "call void @llvm.x86.sse2.pause()"
    if platform.machine() in ("aarch64", "arm64"):
        return "declare void @llvm.aarch64.hint(i32)", "call void @llvm.aarch64.hint(i32 1)"
    return "", ""


def pause_call() -> str:
    return _pause()[1]


# %control: a line of the pool's own words, then a line for each thread, whose first word counts
# the barriers it has come to.
_BARRIER = """
declare i32 @sched_yield()

define internal void @barrier(i64 %tid, i64 %threads, ptr %control) nounwind noinline {{
entry:
  %line = add i64 %tid, 1
  %offset = mul i64 %line, {line}
  %mine = getelementptr inbounds i8, ptr %control, i64 %offset
  %old = load i64, ptr %mine, align 8
  %arrived = add i64 %old, 1
  store atomic i64 %arrived, ptr %mine release, align 8
  br label %next
next:
  %other = phi i64 [ 0, %entry ], [ %following, %there ]
  %is_other = icmp slt i64 %other, %threads
  br i1 %is_other, label %look, label %done
look:
  %their_line = add i64 %other, 1
  %their_offset = mul i64 %their_line, {line}
  %theirs = getelementptr inbounds i8, ptr %control, i64 %their_offset
  br label %wait
wait:
  %spins = phi i64 [ 0, %look ], [ %more, %again ]
  %seen = load atomic i64, ptr %theirs acquire, align 8
  %is_there = icmp sge i64 %seen, %arrived
  br i1 %is_there, label %there, label %spin
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
there:
  %following = add i64 %other, 1
  br label %next
done:
  ret void
}}
"""

_SHARE = """
; The tasks of one call: this thread's own, then those of the others that are left.
define internal void @share(ptr %at, ptr %counters, i64 %tid, i64 %threads, ptr %scratch,
    i64 %iteration) nounwind noinline {{
entry:
  %kernel_at = getelementptr inbounds i64, ptr %at, i64 1
  %kernel = load ptr, ptr %kernel_at, align 8
  %iterations_at = getelementptr inbounds i64, ptr %at, i64 2
  %iterations = load i64, ptr %iterations_at, align 8
  %tasks_at = getelementptr inbounds i64, ptr %at, i64 3
  %tasks = load i64, ptr %tasks_at, align 8
  %arguments_at = getelementptr inbounds i64, ptr %at, i64 4
  %arguments = load ptr, ptr %arguments_at, align 8
  %index_at = getelementptr inbounds i64, ptr %at, i64 5
  %index = load i64, ptr %index_at, align 8
  %mask_at = getelementptr inbounds i64, ptr %at, i64 6
  %mask = load i64, ptr %mask_at, align 8
  %first = mul i64 %index, %threads
  br label %owners
owners:
  %n = phi i64 [ 0, %entry ], [ %n_next, %exhausted ]
  %is_left = icmp slt i64 %n, %threads
  br i1 %is_left, label %owner, label %done
owner:
  %sum = add i64 %tid, %n
  %is_over = icmp sge i64 %sum, %threads
  %wrapped = sub i64 %sum, %threads
  %who = select i1 %is_over, i64 %wrapped, i64 %sum
  %who_next = add i64 %who, 1
  %low_product = mul i64 %tasks, %who
  %low = udiv i64 %low_product, %threads
  %high_product = mul i64 %tasks, %who_next
  %high = udiv i64 %high_product, %threads
  %counter_number = add i64 %first, %who
  %counter_offset = mul i64 %counter_number, {line}
  %counter = getelementptr inbounds i8, ptr %counters, i64 %counter_offset
  br label %take
take:
  %taken = atomicrmw add ptr %counter, i64 1 monotonic, align 8
  %task = add i64 %low, %taken
  %is_mine = icmp slt i64 %task, %high
  br i1 %is_mine, label %run, label %exhausted
run:
  %after = add i64 %task, 1
  %begin_scaled = mul i64 %iterations, %task
  %begin_raw = udiv i64 %begin_scaled, %tasks
  %begin = and i64 %begin_raw, %mask
  %end_scaled = mul i64 %iterations, %after
  %end_raw = udiv i64 %end_scaled, %tasks
  %end_cut = and i64 %end_raw, %mask
  %is_last = icmp eq i64 %after, %tasks
  %end = select i1 %is_last, i64 %iterations, i64 %end_cut
  call void %kernel(i64 %begin, i64 %end, ptr %scratch, ptr %arguments, i64 %iteration)
  br label %take
exhausted:
  %n_next = add i64 %n, 1
  br label %owners
done:
  ret void
}}
"""

_FOLLOW = """
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)

define void @follow(ptr %script, i64 %tid, i64 %threads, ptr %control) nounwind {{
entry:
  %scratch_base = load ptr, ptr %script, align 8
  %stride_at = getelementptr inbounds i64, ptr %script, i64 1
  %stride = load i64, ptr %stride_at, align 8
  %scratch_offset = mul i64 %stride, %tid
  %scratch = getelementptr inbounds i8, ptr %scratch_base, i64 %scratch_offset
  %counters_at = getelementptr inbounds i64, ptr %script, i64 2
  %counters = load ptr, ptr %counters_at, align 8
  %set_at = getelementptr inbounds i64, ptr %script, i64 3
  %set_bytes = load i64, ptr %set_at, align 8
  %calls = sdiv i64 %set_bytes, {line}
  %set_size = mul i64 %calls, %threads
  %set = mul i64 %set_size, {line}
  %both = mul i64 %set, 2
  %toggles = getelementptr inbounds i8, ptr %counters, i64 %both
  %toggle_offset = mul i64 %tid, {line}
  %toggle_at = getelementptr inbounds i8, ptr %toggles, i64 %toggle_offset
  %pc = alloca ptr, align 8
  %iteration_at = alloca i64, align 8
  %now_at = alloca ptr, align 8
  %depth_at = alloca i64, align 8
  %stack = alloca [{stack} x i64], align 8
  %start = getelementptr inbounds i64, ptr %script, i64 {words}
  store ptr %start, ptr %pc, align 8
  store i64 0, ptr %iteration_at, align 8
  store i64 0, ptr %depth_at, align 8
  store ptr %counters, ptr %now_at, align 8
  br label %next
next:
  %at = load ptr, ptr %pc, align 8
  %op = load i64, ptr %at, align 8
  %one_at = getelementptr inbounds i64, ptr %at, i64 1
  %one = load i64, ptr %one_at, align 8
  %two_at = getelementptr inbounds i64, ptr %at, i64 2
  %two = load i64, ptr %two_at, align 8
  %following = getelementptr inbounds i64, ptr %at, i64 {words}
  store ptr %following, ptr %pc, align 8
  switch i64 %op, label %end [
    i64 1, label %phase
    i64 2, label %call
    i64 3, label %repeat
    i64 4, label %again
  ]
phase:
  %is_barrier = icmp ne i64 %one, 0
  br i1 %is_barrier, label %meet, label %met
meet:
  call void @barrier(i64 %tid, i64 %threads, ptr %control)
  br label %met
met:
  %is_shared = icmp ne i64 %two, 0
  br i1 %is_shared, label %turnover, label %next
turnover:
  %old_toggle = load i64, ptr %toggle_at, align 8
  %toggle = xor i64 %old_toggle, 1
  store i64 %toggle, ptr %toggle_at, align 8
  %now_offset = mul i64 %toggle, %set
  %now = getelementptr inbounds i8, ptr %counters, i64 %now_offset
  store ptr %now, ptr %now_at, align 8
  %is_first = icmp eq i64 %tid, 0
  br i1 %is_first, label %clear, label %next
clear:
  %old_offset = mul i64 %old_toggle, %set
  %old = getelementptr inbounds i8, ptr %counters, i64 %old_offset
  call void @llvm.memset.p0.i64(ptr %old, i8 0, i64 %set, i1 false)
  br label %next
call:
  %iteration = load i64, ptr %iteration_at, align 8
  %tasks_at = getelementptr inbounds i64, ptr %at, i64 3
  %tasks = load i64, ptr %tasks_at, align 8
  %is_many = icmp sgt i64 %tasks, 1
  br i1 %is_many, label %many, label %single
many:
  %counters_now = load ptr, ptr %now_at, align 8
  call void @share(ptr %at, ptr %counters_now, i64 %tid, i64 %threads, ptr %scratch, i64 %iteration)
  br label %next
single:
  %index_at = getelementptr inbounds i64, ptr %at, i64 5
  %index = load i64, ptr %index_at, align 8
  %spread = mul i64 %index, %tasks
  %owner = urem i64 %spread, %threads
  %is_owner = icmp eq i64 %owner, %tid
  br i1 %is_owner, label %alone, label %next
alone:
  %kernel = inttoptr i64 %one to ptr
  %arguments_at = getelementptr inbounds i64, ptr %at, i64 4
  %arguments = load ptr, ptr %arguments_at, align 8
  call void %kernel(i64 0, i64 %two, ptr %scratch, ptr %arguments, i64 %iteration)
  br label %next
repeat:
  %depth = load i64, ptr %depth_at, align 8
  %frame = mul i64 %depth, 3
  %frame_at = getelementptr inbounds i64, ptr %stack, i64 %frame
  %start_int = ptrtoint ptr %following to i64
  store i64 %start_int, ptr %frame_at, align 8
  %left_at = getelementptr inbounds i64, ptr %frame_at, i64 1
  store i64 %one, ptr %left_at, align 8
  %before = load i64, ptr %iteration_at, align 8
  %before_at = getelementptr inbounds i64, ptr %frame_at, i64 2
  store i64 %before, ptr %before_at, align 8
  %deeper = add i64 %depth, 1
  store i64 %deeper, ptr %depth_at, align 8
  %is_reverse = icmp ne i64 %two, 0
  %last = sub i64 %one, 1
  %first_iteration = select i1 %is_reverse, i64 %last, i64 0
  store i64 %first_iteration, ptr %iteration_at, align 8
  br label %next
again:
  %depth_now = load i64, ptr %depth_at, align 8
  %top = sub i64 %depth_now, 1
  %top_frame = mul i64 %top, 3
  %top_at = getelementptr inbounds i64, ptr %stack, i64 %top_frame
  %left_now_at = getelementptr inbounds i64, ptr %top_at, i64 1
  %left_old = load i64, ptr %left_now_at, align 8
  %left = sub i64 %left_old, 1
  store i64 %left, ptr %left_now_at, align 8
  %is_more = icmp sgt i64 %left, 0
  br i1 %is_more, label %back, label %leave
back:
  %start_again = load i64, ptr %top_at, align 8
  %start_ptr = inttoptr i64 %start_again to ptr
  store ptr %start_ptr, ptr %pc, align 8
  %iteration_old = load i64, ptr %iteration_at, align 8
  %is_down = icmp ne i64 %two, 0
  %step = select i1 %is_down, i64 -1, i64 1
  %iteration_new = add i64 %iteration_old, %step
  store i64 %iteration_new, ptr %iteration_at, align 8
  br label %next
leave:
  %outer_at = getelementptr inbounds i64, ptr %top_at, i64 2
  %outer = load i64, ptr %outer_at, align 8
  store i64 %outer, ptr %iteration_at, align 8
  store i64 %top, ptr %depth_at, align 8
  br label %next
end:
  ret void
}}
"""


def follower_source() -> str:
    """The functions that follow a script, as LLVM text."""
    declaration, pause = _pause()
    parts = (_BARRIER, _SHARE, _FOLLOW)
    spins = CPU.tasks.barrier_spins
    filled = (
        p.format(line=LINE, spins=spins, pause=pause, words=WORDS, stack=3 * DEEPEST) for p in parts
    )
    return "\n".join([declaration, *filled])
