"""That a buffer still holds what its reader is to compute from, when it is read.

A buffer may hold one value of a graph and then another: a carry of a scan and its next value, a
leaf and its update. A call that reads it afterwards and is to make something of the first value is
refused, unless something else that it reads gives that value. At the end of an iteration, and of a
program, every such buffer must hold the last of its values.

It goes by bindings and the graph alone, so that it costs next to nothing: what kernels compute is
not looked at. Calls come from a program, or from a schedule in the making, where kernels that will
be fused are still apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from treadle.base.errors import GraphError
from treadle.base.origin import Origin
from treadle.ir.graph import Graph, Value
from treadle.ir.ops.leaves import Leaf
from treadle.ir.ops.shaping import Concat, Slice
from treadle.kernel.program import Phase, Program, Repeat, Step, calls_in


@dataclass(frozen=True, slots=True)
class Touch:
    """What a call reads and writes, by the names of buffers."""

    kernel: str
    origins: tuple[Origin, ...]
    read: tuple[str, ...]
    written: tuple[str, ...]


Passed = frozenset[str]  # what a repeat inside writes: its carries go on to their next value
Held = Mapping[str, Sequence[Value]]  # the values of each buffer, one after another


def check_held(program: Program) -> Program:
    """The program itself; a GraphError that names a kernel which reads a value that is gone."""
    every: dict[str, dict[str, list[Value]]] = {}
    for b in program.bindings.every:
        every.setdefault(b.scope, {}).setdefault(b.buffer, []).append(b.value)
    for scope, graph in program.bindings.graphs:
        if not scope and tuple(o for o, _, _ in program.outputs) != graph.outputs:
            raise GraphError("verify", "the outputs of the program are not those of its graph")
        steps = _repeated(program.steps, scope) if scope else program.steps
        if steps is not None:
            check_scope(graph, every.get(scope, {}), list(_touches(steps)))
    return program


def _repeated(steps: Sequence[Step], scope: str) -> Sequence[Step] | None:
    """The steps of a scan's iteration; None where it is a kernel, or makes none."""
    for step in steps:
        if isinstance(step, Repeat):
            found = step.steps if step.scope == scope else _repeated(step.steps, scope)
            if found is not None:
                return found
    return None


def _written(step: Step) -> Passed:
    return frozenset(a.buffer for call in calls_in(step) for a in call.written)


def _touches(steps: Sequence[Step]) -> Iterator[Touch | Passed]:
    for step in steps:
        if not isinstance(step, Phase):
            yield _written(step)
            continue
        for call in step.calls:
            read, written = ([a.buffer for a in some] for some in (call.read, call.written))
            yield Touch(call.kernel.name, call.origins, tuple(read), tuple(written))


def check_scope(graph: Graph, held: Held, touches: Sequence[Touch | Passed]) -> None:
    """The same of one graph: a program's, or a body's of which `touches` are an iteration."""
    _Scope(graph, held, touches).check()


class _Scope:
    """Buffers of one graph, with what they hold by now."""

    def __init__(self, graph: Graph, held: Held, touches: Sequence[Touch | Passed]):
        self.graph, self.held, self.touches = graph, held, touches
        self.made = {n for t in touches for n in (t.written if isinstance(t, Touch) else t)}
        several = {n: tuple(dict.fromkeys(held[n])) for n in held if len(held[n]) > 1}
        # Leaves that nothing writes are one buffer by two names.
        self.changing = {
            n: values
            for n, values in several.items()
            if len(values) > 1 and (n in self.made or not all(map(self._is_leaf, values)))
        }
        self.now = dict.fromkeys(self.changing, 0)  # which of its values a buffer holds
        # A leaf is in the first buffer that is bound to it; others are copies.
        first = {values[0]: n for n, values in reversed([*held.items()])}
        self.begun = {n for value, n in first.items() if self._is_leaf(value)}
        # A call writes what the repeats after it begin with.
        passed = (t for t in touches if not isinstance(t, Touch))
        self.to_come = Counter(n for some in passed for n in some & self.changing.keys())

    def check(self) -> None:
        for touch in self.touches:
            if isinstance(touch, Touch):
                self._check_written(touch)
                self._check_current(touch)
                self._write(touch.written)
            else:
                self.to_come.subtract(touch & self.changing.keys())
                self._write(touch)
        for name, values in self.changing.items():
            if self.now[name] + 1 < len(values) and self.graph.type_of(values[-1]).size:
                told = f"{name} does not hold its next value in the end"
                raise GraphError("verify", told, origin=self.graph.nodes[values[-1].node].origin)

    def _check_written(self, touch: Touch) -> None:
        """What is made here is not read before: an iteration would see what the last one left."""
        early = [n for n in touch.read if n in self.made and n not in self.begun]
        if early:
            told = f"kernel {touch.kernel} reads {early[0]} before it is written"
            raise GraphError("verify", told, origin=self._line(touch))

    def _check_current(self, touch: Touch) -> None:
        """What something is to be made of is not gone from where it is read."""
        changed = [n for n in touch.read if self.now.get(n)]
        if not changed:
            return
        gone = {v: n for n in changed for v in self.changing[n]}
        replaced = [n for n in touch.written if n in self.changing]  # a kernel may read it before
        given = {v for n in (*touch.read, *replaced) for v in self._values(n)}
        for name in touch.written:
            lost = [v for v in self._needed(self._wanted(name), given) if v in gone]
            # What is not given may still be made of what is.
            for value in (v for v in lost if any(map(self._is_leaf, self._needed([v], given)))):
                (now,) = self._values(gone[value])
                told = f"kernel {touch.kernel} makes {name} of %{value.node}, and reads "
                told += f"{gone[value]}, which holds %{now.node} by then"
                raise GraphError("verify", told, origin=self._line(touch))

    def _write(self, names: Iterable[str]) -> None:
        self.begun.update(names)
        self.now |= {n: self._after(n) for n in names if n in self.changing}

    def _after(self, name: str) -> int:
        return max(0, len(self.changing[name]) - 1 - self.to_come[name])

    def _values(self, name: str) -> Sequence[Value]:
        """What a buffer holds: several, where nothing tells them apart."""
        values = self.changing.get(name)
        return self.held.get(name, ()) if values is None else (values[self.now[name]],)

    def _wanted(self, name: str) -> Sequence[Value]:
        """What a buffer is to hold once it is written."""
        values = self.changing.get(name)
        return self.held.get(name, ()) if values is None else (values[self._after(name)],)

    def _needed(self, wanted: Iterable[Value], given: set[Value]) -> Iterator[Value]:
        """Values that others are made of, and that are not given."""
        pending, seen = list(wanted), set[Value]()
        while pending:
            value = pending.pop()
            if value not in seen and value not in given:
                seen.add(value)
                yield value
                pending += self._operands(value, given)

    def _operands(self, value: Value, given: set[Value]) -> Sequence[Value]:
        """What a value is made of; a slice of parts put together, of those that it reaches."""
        node = self.graph.nodes[value.node]
        if not isinstance(node.attributes, Slice) or node.operands[0] in given:
            return node.operands
        joined = self.graph.nodes[node.operands[0].node]
        if not isinstance(joined.attributes, Concat):
            return node.operands
        axis, found, end = joined.attributes.axis, list[Value](), 0
        start, stop = node.attributes.starts[axis], node.attributes.stops[axis]
        for part in joined.operands:
            begin, end = end, end + self.graph.type_of(part).shape[axis]
            if begin < stop and start < end:
                found.append(part)
        return found

    def _is_leaf(self, value: Value) -> bool:
        return isinstance(self.graph.nodes[value.node].attributes, Leaf)

    def _line(self, touch: Touch) -> Origin | None:
        """Of the call, or of a value that its buffers hold: copies have no line of their own. A
        body's inputs have none either: then the line of what it gives."""
        names = (*touch.read, *touch.written)
        values = [v for n in names for v in self.held.get(n, ())]
        values += [o.value for o in self.graph.outputs]
        origins = (self.graph.nodes[v.node].origin for v in values)
        return next((o for o in (*touch.origins, *origins) if o), None)
