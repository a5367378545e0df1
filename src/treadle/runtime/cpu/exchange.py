"""A function that programs call between their kernels: it adds arrays, and calls MPI by pointers.

Its argument is a table of rows of ten words. ADD: to, from, how many float32. CALL: a function and
up to eight arguments; what it returns is not 0 where it failed, and is kept in the row's last word.
A row of zeros is the end.
"""

from __future__ import annotations

from functools import cache

from treadle.runtime.cpu.native import LibraryCall

WORDS = 12
END, ADD, CALL = range(3)
CODE = 10  # the word of a row that has what a call returned
LANES = 8

_SOURCE = """
define void @exchange(i64 %begin, i64 %end, ptr %scratch, ptr %table, i64 %iteration) nounwind {{
entry:
  br label %next
next:
  %row = phi ptr [ %table, %entry ], [ %following, %added ], [ %following, %called ]
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
  ]
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
        _SOURCE.format(words=WORDS, add=ADD, call=CALL, code=CODE, lanes=LANES)
    )


def exchange_address() -> int:
    """The function's address."""
    return _library().address("exchange")
