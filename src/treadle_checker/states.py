"""What buffers hold, and what a scan makes of that: of what is around it, of an iteration's end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from treadle_checker.memory import given_to
from treadle_checker.program import Binding, Content, Program, Repeat, Whole, calls_of
from treadle_checker.reading import Rejected
from treadle_checker.scopes import Scopes, around
from treadle_checker.types import Value

START = -1  # in a call's place: what holds from the start on


@dataclass(frozen=True, eq=False)
class Held:
    """What a buffer holds: a value, and others that are the same."""

    stated: Binding
    value: Value
    content: Content
    also: tuple[Value, ...] = ()
    of: tuple[Value, ...] = ()  # what it is made of, if that is generic, and it is not

    @property
    def buffer(self) -> str:
        return self.stated.buffer

    @property
    def values(self) -> tuple[Value, ...]:
        return (self.value, *self.also)

    @property
    def given(self) -> dict[Value, int]:
        """What is generic where it is read; values with one number are the same."""
        return {v: k for k, v in enumerate(self.of)} or dict.fromkeys(self.values, 0)


# By buffer, and by how many elements an iteration of a scan moves on in it.
State = dict[str, dict[int, Held]]


def add(state: State, row: int, held: Held) -> None:
    """What a buffer holds beside what is there: both are the same."""
    known = state.setdefault(held.buffer, {})
    if row in known:
        if known[row].content != held.content:
            raise Rejected(f"{held.buffer} holds two values, each in an order of its own")
        held = replace(known[row], also=(*known[row].also, held.value))
    known[row] = held


class Scan:
    """A repeat that makes the iterations of a scan."""

    def __init__(self, program: Program, scopes: Scopes, step: Repeat, scope: str):
        self.program, self.step, self.outer = program, step, scopes.opened[scope]
        self.node, self.body = scopes.body_of(step.scope)
        outer, kind, self.position = around(step.scope)
        a = self.node.attributes
        is_same = (a["length"], a["reverse"]) == (step.length, step.reverse)
        if (outer, kind) != (scope, "scan") or not is_same:
            raise Rejected(f"a repeat is not that of {step.scope}")
        self.scope, self.inner = scope, scopes.opened[step.scope]
        self.constants, self.carries = a["constants"], a["carries"]
        self.changing = self.body.made_of(self.body.inputs)
        carried = map(Value, self.body.inputs[self.constants :][: self.carries])
        ends = [v for _, _, v in self.body.outputs]
        if not step.length:  # carries stay what they are
            ends[: self.carries] = carried
        self.results = [self.inner.place(step.scope, v) for v in ends]

    def begun(self, stated: Iterable[Binding], state: State) -> State:
        """What the first iteration is given; Rejected where that is not what is around it."""
        found: State = {}
        for b in stated:
            value, row = Value(b.node, b.output), 0
            if b.node in self.body.inputs:
                k = self.body.inputs.index(b.node)
                wanted = self.outer.place(self.scope, self.node.operands[k])
                if k >= self.constants + self.carries:
                    row = self.body.nodes[b.node].types[0].size
            else:
                wanted = self.outer.place(b.scope, value)
            held = state.get(b.buffer, {}).get(0)
            is_held = held is not None and wanted in held.values and held.content == b.content
            is_constant = b.buffer in self.program.constants and b.node not in self.changing
            is_whole = not row or b.content == Whole()
            if not (is_held or is_constant) or not is_whole:
                raise Rejected(f"{b.buffer} does not hold what {b.scope} is given")
            add(found, row, Held(b, self.inner.place(b.scope, value), b.content))
        return found

    def check_next(self, stated: Iterable[Binding], begun: State, end: State) -> None:
        """Rejected where an iteration does not leave what the next one is given."""
        carried = self.body.inputs[self.constants :][: self.carries]
        following = dict(zip(carried, self.results, strict=False))
        changing = self.body.made_of(self.body.inputs[self.constants :])
        for b in stated:
            wanted = {row: {*held.values} for row, held in begun[b.buffer].items()}
            wanted = {0: {following[b.node]}} if b.node in following else wanted
            held = end[b.buffer]
            stays = all(row in held and wanted[row] <= {*held[row].values} for row in wanted)
            if not stays or any(h.content != b.content for h in held.values()):
                raise Rejected(f"{b.buffer} does not hold what the next iteration reads")
            if b.node in changing and b.node not in self.body.inputs:
                raise Rejected(f"{b.buffer} is made once, and changes from iteration to iteration")

    def leave(self, end: State, state: State) -> None:
        """Behind the scan: what the last iteration left of its carries, and the rows of all."""
        calls = calls_of(self.step.steps)
        written = {name for call in calls for name in given_to(self.program, call)[1]}
        for name in written:
            state.pop(name, None)
        every = [(row, held) for rows in end.values() for row, held in rows.items()]
        for k, result in enumerate(self.results):
            size = self.inner.graph.type_of(result).size
            for row, held in every:
                is_row = held.buffer in written and row == size and held.content == Whole()
                if result in held.values and (is_row if k >= self.carries else not row):
                    b = Binding(held.buffer, self.scope, self.position, k, held.content, START)
                    value = self.outer.place(self.scope, Value(self.position, k))
                    add(state, 0, Held(b, value, held.content))
