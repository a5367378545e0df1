"""The native program: one call runs all kernels on all threads, with barriers between them.

`run(table, tid, threads, control)` is executed by every thread. The table has a pointer for each
buffer. A kernel's turns are shared out by number: any number of threads gives the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from treadle.codegen.llvm.emitter import Function, Reg, number
from treadle.codegen.llvm.module import Module
from treadle.codegen.llvm.render import render
from treadle.kernel.nodes import Kernel
from treadle.kernel.program import Call, Program, Repeat, Step

# Below this many elements a kernel runs on one thread: a barrier costs more than it gains.
SERIAL_ELEMENTS = 2048
LINE = 128  # bytes between the flags of two threads: no false sharing
SPINS = 2000


def render_program(program: Program, width: int) -> str:
    """The text of a whole program."""
    module = Module(width)
    names: dict[Kernel, tuple[str, int]] = {}
    for call in program.calls():
        if call.kernel not in names:
            name = f"kernel.{len(names)}"
            names[call.kernel] = (name, render(call.kernel, name, module))
    slots = {b.name: i for i, b in enumerate(program.buffers)}
    module.add(_run(program, names, slots))
    return "\n".join([module.text(), barrier().text(), "declare i32 @sched_yield()\n", _PAUSE])


_PAUSE = "declare void @llvm.x86.sse2.pause()\n"


def _run(
    program: Program, names: Mapping[Kernel, tuple[str, int]], slots: Mapping[str, int]
) -> Function:
    f = Function(
        "run",
        [Reg("ptr", "%table"), Reg("i64", "%tid"), Reg("i64", "%threads"), Reg("ptr", "%control")],
        linkage="",
    )
    writer = _Driver(f, names, slots, {b.name: b.dtype.itemsize for b in program.buffers})
    writer.steps(program.steps, None)
    f.do("ret void")
    return f


class _Driver:
    def __init__(
        self,
        function: Function,
        names: Mapping[Kernel, tuple[str, int]],
        slots: Mapping[str, int],
        itemsize: Mapping[str, int],
    ):
        self.f, self.names, self.slots, self.itemsize = function, names, slots, itemsize

    def steps(self, steps: Sequence[Step], turn: Reg | None) -> None:
        """A barrier stands between two calls unless one thread runs both."""
        is_alone = True  # whether the first thread ran all calls since the last barrier
        for step in steps:
            if isinstance(step, Call):
                alone = self.is_serial(step)
                if not (is_alone and alone):
                    self.barrier()
                self.call(step, turn)
                is_alone = alone
            else:
                self.repeat(step)
                is_alone = True
        if not is_alone:
            self.barrier()

    def repeat(self, step: Repeat) -> None:
        self.barrier()
        with self.f.loop(number(0, "i64"), number(step.length, "i64"), number(1, "i64")) as loop:
            row = loop.counter
            if step.reverse:
                row = self.f.binary("sub", number(step.length - 1, "i64"), row)
            self.steps(step.steps, row)
        self.barrier()

    def barrier(self) -> None:
        self.f.do("call void @barrier(i64 %tid, i64 %threads, ptr %control)")

    def is_serial(self, call: Call) -> bool:
        return is_serial(call, self.names[call.kernel][1])

    def call(self, call: Call, turn: Reg | None) -> None:
        f, (name, turns) = self.f, self.names[call.kernel]
        begin, end = self._share(turns, self.is_serial(call))
        pointers = [self._pointer(a.buffer, a.row, turn) for a in call.arguments]
        f.do(f"call void @{name}({', '.join(map(str, (begin, end, *pointers)))})")

    def _share(self, turns: int, is_alone: bool) -> tuple[Reg, Reg]:
        """The turns of this thread."""
        f, tid, threads = self.f, Reg("i64", "%tid"), Reg("i64", "%threads")
        if is_alone:
            is_first = f.compare("icmp eq", tid, number(0, "i64"))
            return number(0, "i64"), f.select(is_first, number(turns, "i64"), number(0, "i64"))
        total = number(turns, "i64")
        after = f.binary("add", tid, number(1, "i64"))
        begin = f.binary("udiv", f.binary("mul", tid, total), threads)
        return begin, f.binary("udiv", f.binary("mul", after, total), threads)

    def _pointer(self, buffer: str, row: int, turn: Reg | None) -> Reg:
        f = self.f
        slot = f.value("ptr", f"getelementptr inbounds ptr, ptr %table, i64 {self.slots[buffer]}")
        base = f.value("ptr", f"load ptr, {slot}, align 8")
        if not row:
            return base
        assert turn is not None
        moved = f.binary("mul", turn, number(row * self.itemsize[buffer], "i64"))
        return f.value("ptr", f"getelementptr inbounds i8, {base}, {moved}")


def is_serial(call: Call, turns: int) -> bool:
    """Whether one thread runs a call: it has one turn, or too little to share."""
    return turns == 1 or max((b.size for b in call.kernel.buffers), default=0) < SERIAL_ELEMENTS


def barrier() -> Function:
    """Publish that this thread has arrived, then wait for all others: spin, then yield."""
    f = Function(
        "barrier",
        [Reg("i64", "%tid"), Reg("i64", "%threads"), Reg("ptr", "%control")],
        attributes="nounwind noinline",
    )
    mine = flag(f, Reg("i64", "%tid"))
    old = f.value("i64", f"load i64, {mine}, align 8")
    arrived = f.binary("add", old, number(1, "i64"))
    f.do(f"store atomic {arrived}, {mine} release, align 8")
    with f.loop(number(0, "i64"), Reg("i64", "%threads"), number(1, "i64")) as other:
        wait(f, flag(f, other.counter), arrived)
    f.do("ret void")
    return f


def flag(f: Function, thread: Reg) -> Reg:
    """Where a thread publishes how often it has arrived."""
    offset = f.binary("mul", f.binary("add", thread, number(1, "i64")), number(LINE, "i64"))
    return f.value("ptr", f"getelementptr inbounds i8, ptr %control, {offset}")


def wait(f: Function, place: Reg, least: Reg) -> None:
    """Until the number at a place has grown to at least this."""
    before, head, spin, rest, again, done = (
        f.block,
        *map(f.fresh, ("wait", "spin", "yield", "again", "done")),
    )
    f.jump(head)
    f.label(head)
    count = Reg("i64", f"%{f.fresh('n')}")
    at = len(f.lines)
    f.lines.append("")  # the phi, written when the end is known
    seen = f.value("i64", f"load atomic i64, {place} acquire, align 8")
    f.branch(f.compare("icmp sge", seen, least), done, spin)
    f.label(spin)
    f.do("call void @llvm.x86.sse2.pause()")
    following = f.binary("add", count, number(1, "i64"))
    f.branch(f.compare("icmp sgt", following, number(SPINS, "i64")), rest, again)
    f.label(rest)
    f.value("i32", "call i32 @sched_yield()")
    f.jump(again)
    f.label(again)
    f.jump(head)
    f.lines[at] = f"  {count.text} = phi i64 [ 0, %{before} ], [ {following.text}, %{again} ]"
    f.label(done)
