"""A function that programs call between their kernels: it adds arrays, and calls MPI by pointers.

Its argument is a table of rows of twelve words. ADD: to, from, how many float32. COPY: to, from,
how many bytes. CALL: a function and up to eight arguments; what it returns is not 0 where it
failed, and is kept in the row. WAIT: a function of four arguments that is called until the third,
an address, has something else than 0; then the address of two words, how often was waited and
whether it is, and that of the nanoseconds that it took. A row of zeros is the end.
"""

from __future__ import annotations

from functools import cache

from treadle.runtime.cpu.native import LibraryCall

WORDS = 12
END, ADD, CALL, COPY, WAIT = range(5)
CODE = 10  # the word of a row that has what a call returned
LANES = 8
SPINS = 2000  # looks without a pause
PAUSE = 50  # microseconds between later ones: other ranks may need this core

_SOURCE = """
declare i32 @sched_yield()
declare i32 @usleep(i32)
declare i32 @clock_gettime(i32, ptr)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)

define internal i64 @now() nounwind {{
  %time = alloca [2 x i64], align 8
  %ignored = call i32 @clock_gettime(i32 1, ptr %time)
  %seconds = load i64, ptr %time, align 8
  %rest_at = getelementptr inbounds i64, ptr %time, i64 1
  %rest = load i64, ptr %rest_at, align 8
  %whole = mul i64 %seconds, 1000000000
  %found = add i64 %whole, %rest
  ret i64 %found
}}

define void @exchange(i64 %begin, i64 %end, ptr %scratch, ptr %table, i64 %iteration) nounwind {{
entry:
  br label %next
next:
  %row = phi ptr [ %table, %entry ], [ %following, %added ], [ %following, %called ],
    [ %following, %copies ], [ %following, %waited ]
  %kind = load i64, ptr %row, align 8
  %following = getelementptr inbounds i64, ptr %row, i64 {words}
  %w1_at = getelementptr inbounds i64, ptr %row, i64 1
  %w2_at = getelementptr inbounds i64, ptr %row, i64 2
  %w3_at = getelementptr inbounds i64, ptr %row, i64 3
  %w1 = load ptr, ptr %w1_at, align 8
  %w2 = load i64, ptr %w2_at, align 8
  %w3 = load i64, ptr %w3_at, align 8
  switch i64 %kind, label %done [
    i64 {add}, label %sums
    i64 {call}, label %calls
    i64 {copy}, label %copies
    i64 {wait}, label %waits
  ]
copies:
  %copied = inttoptr i64 %w2 to ptr
  call void @llvm.memcpy.p0.p0.i64(ptr %w1, ptr %copied, i64 %w3, i1 false)
  br label %next
waits:
  %flag_at = getelementptr inbounds i64, ptr %row, i64 4
  %flag = load ptr, ptr %flag_at, align 8
  %statuses_at = getelementptr inbounds i64, ptr %row, i64 5
  %statuses = load i64, ptr %statuses_at, align 8
  %noted_at = getelementptr inbounds i64, ptr %row, i64 6
  %noted = load ptr, ptr %noted_at, align 8
  %taken_at = getelementptr inbounds i64, ptr %row, i64 7
  %taken = load ptr, ptr %taken_at, align 8
  %flag_word = ptrtoint ptr %flag to i64
  %waits_before = load i64, ptr %noted, align 8
  %waits_now = add i64 %waits_before, 1
  store i64 %waits_now, ptr %noted, align 8
  %is_waiting_at = getelementptr inbounds i64, ptr %noted, i64 1
  store atomic i64 1, ptr %is_waiting_at release, align 8
  %began = call i64 @now()
  br label %look
look:
  %looks = phi i64 [ 0, %waits ], [ %more, %yield ], [ %more, %sleep ]
  %answer = call i32 %w1(i64 %w2, i64 %w3, i64 %flag_word, i64 %statuses)
  %answer_wide = sext i32 %answer to i64
  %answer_at = getelementptr inbounds i64, ptr %row, i64 {code}
  store i64 %answer_wide, ptr %answer_at, align 8
  %has_failed = icmp ne i32 %answer, 0
  %there = load i32, ptr %flag, align 4
  %is_there = icmp ne i32 %there, 0
  %is_over = or i1 %has_failed, %is_there
  %more = add i64 %looks, 1
  br i1 %is_over, label %waited, label %not_yet
not_yet:
  %is_long = icmp sgt i64 %looks, {spins}
  br i1 %is_long, label %sleep, label %yield
yield:
  %yielded = call i32 @sched_yield()
  br label %look
sleep:
  %slept = call i32 @usleep(i32 {pause})
  br label %look
waited:
  store atomic i64 0, ptr %is_waiting_at release, align 8
  %ended = call i64 @now()
  %lasted = sub i64 %ended, %began
  %before = load i64, ptr %taken, align 8
  %after = add i64 %before, %lasted
  store i64 %after, ptr %taken, align 8
  br label %next
sums:
  %from = inttoptr i64 %w2 to ptr
  %whole = and i64 %w3, -{lanes}
  br label %pack
pack:
  %i = phi i64 [ 0, %sums ], [ %i_next, %body ]
  %is_pack = icmp slt i64 %i, %whole
  br i1 %is_pack, label %body, label %rest
body:
  %to_at = getelementptr inbounds float, ptr %w1, i64 %i
  %from_at = getelementptr inbounds float, ptr %from, i64 %i
  %new = load <{lanes} x float>, ptr %to_at, align 4
  %old = load <{lanes} x float>, ptr %from_at, align 4
  %sum = fadd <{lanes} x float> %old, %new
  store <{lanes} x float> %sum, ptr %to_at, align 4
  %i_next = add i64 %i, {lanes}
  br label %pack
rest:
  %j = phi i64 [ %whole, %pack ], [ %j_next, %single ]
  %is_left = icmp slt i64 %j, %w3
  br i1 %is_left, label %single, label %added
single:
  %to_one = getelementptr inbounds float, ptr %w1, i64 %j
  %from_one = getelementptr inbounds float, ptr %from, i64 %j
  %new_one = load float, ptr %to_one, align 4
  %old_one = load float, ptr %from_one, align 4
  %sum_one = fadd float %old_one, %new_one
  store float %sum_one, ptr %to_one, align 4
  %j_next = add i64 %j, 1
  br label %rest
added:
  br label %next
calls:
  %w4_at = getelementptr inbounds i64, ptr %row, i64 4
  %w5_at = getelementptr inbounds i64, ptr %row, i64 5
  %w6_at = getelementptr inbounds i64, ptr %row, i64 6
  %w7_at = getelementptr inbounds i64, ptr %row, i64 7
  %w8_at = getelementptr inbounds i64, ptr %row, i64 8
  %w9_at = getelementptr inbounds i64, ptr %row, i64 9
  %w4 = load i64, ptr %w4_at, align 8
  %w5 = load i64, ptr %w5_at, align 8
  %w6 = load i64, ptr %w6_at, align 8
  %w7 = load i64, ptr %w7_at, align 8
  %w8 = load i64, ptr %w8_at, align 8
  %w9 = load i64, ptr %w9_at, align 8
  %code = call i32 %w1(i64 %w2, i64 %w3, i64 %w4, i64 %w5, i64 %w6, i64 %w7, i64 %w8, i64 %w9)
  %wide = sext i32 %code to i64
  %code_at = getelementptr inbounds i64, ptr %row, i64 {code}
  store i64 %wide, ptr %code_at, align 8
  br label %called
called:
  br label %next
done:
  ret void
}}
"""


@cache
def _library() -> LibraryCall:
    return LibraryCall.from_text(
        _SOURCE.format(
            words=WORDS,
            add=ADD,
            call=CALL,
            copy=COPY,
            wait=WAIT,
            code=CODE,
            lanes=LANES,
            spins=SPINS,
            pause=PAUSE,
        )
    )


def exchange_address() -> int:
    """The function's address."""
    return _library().address("exchange")
