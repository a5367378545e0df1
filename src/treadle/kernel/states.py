"""From which call on a buffer holds what its bindings say: what a certificate states of each.

A buffer of several bindings holds one after another. Those of leaves and constants, and of what a
scan's body is given, hold from the start; the others are what calls leave, in the order of the
calls. What a repeat leaves of its carries and rows follows from the scan and is not stated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from treadle.ir.control import SCAN, Scan
from treadle.ir.graph import Graph
from treadle.ir.ops.leaves import Leaf
from treadle.kernel.access import accesses
from treadle.kernel.bindings import Binding, Copy, Runs, Whole
from treadle.kernel.nodes import Let, Literal, Local, Store
from treadle.kernel.program import Call, Phase, Program, Step
from treadle.kernel.traverse import walk

START = -1  # from the start on
_LAST = re.compile(r"(call|scan)(\d+):$")


def call_scope(scope: str, position: int) -> str:
    """Of a composite's definition: its values have names of their own."""
    return f"{scope}call{position}:"


def around(scope: str) -> tuple[str, str, int]:
    """The scope around another, and of which node there it is: a call's or a scan's."""
    found = _LAST.search(scope)
    assert found is not None, scope
    return scope[: found.start()], found[1], int(found[2])


def scoped_calls(steps: Sequence[Step], scope: str = "") -> Iterator[tuple[Call, str]]:
    """Every call in order, and the scope of the repeat that is around it."""
    for step in steps:
        if isinstance(step, Phase):
            yield from ((call, scope) for call in step.calls)
        else:
            yield from scoped_calls(step.steps, step.scope)


Key = tuple[str, str]  # the scope of calls, and a buffer


def stated(program: Program) -> list[tuple[Binding, int]]:
    """Bindings, and the number of the call from which on each holds."""
    return _States(program).found()


def zeroed(program: Program, every: Sequence[tuple[Binding, int]]) -> dict[int, int]:
    """Bindings, by position, whose first call leaves nothing but zeros, and the later call that
    adds to these."""
    calls, found = [call for call, _ in scoped_calls(program.steps)], dict[int, int]()
    for i, (b, since) in enumerate(every):
        if since != START and isinstance(b.content, Whole | Copy):
            later = range(since + 1, len(calls)) if _is_zeroed(calls[since], b.buffer) else ()
            writers = [n for n in later if any(a.buffer == b.buffer for a in calls[n].written)]
            found |= {i: writers[0]} if writers else {}
    return found


def _is_zeroed(call: Call, buffer: str) -> bool:
    """Whether a call stores zeros to a buffer, and does nothing else with it."""
    own, every = _own_names(call, buffer), list(walk(call.kernel.body))
    lets = {s.local: s.value for s in every if isinstance(s, Let)}
    stores = [s for s in every if isinstance(s, Store) and s.buffer in own]
    values = [lets.get(s.value.name) if isinstance(s.value, Local) else s.value for s in stores]
    touched = sum(a.buffer in own for a in accesses(call.kernel.body))
    is_zero = (isinstance(v, Literal) and v.value == 0 for v in values)
    return touched == len(stores) > 0 and all(is_zero)


class _States:
    def __init__(self, program: Program):
        self.program = program
        self.graphs: Mapping[str, Graph] = dict(program.bindings.graphs)
        calls = list(scoped_calls(program.steps))
        self.written = {(scope, a.buffer) for call, scope in calls for a in call.written}
        self.empty = {b.name for b in program.buffers if not b.size}
        self.constants = {name for name, _ in program.constants}
        self.given = {name for name, _ in program.leaves} | self.constants
        self.every: dict[Key, list[Binding]] = {}
        # What is inside a composite comes before what it gives.
        for b in sorted(program.bindings.every, key=lambda b: not is_call(b.scope)):
            known = self.every.setdefault((_home(b.scope), b.buffer), [])
            if not any(b.value == k.value and b.content == k.content for k in known):
                known.append(b)

    def found(self) -> list[tuple[Binding, int]]:
        writers: dict[Key, list[int]] = {}
        made = list(scoped_calls(self.program.steps))
        for number, (call, scope) in enumerate(made):
            for a in call.written:
                writers.setdefault(self._key(scope, a.buffer), []).append(number)
        found: list[tuple[Binding, int]] = []
        for key, every in self.every.items():
            first = [b for b in every if self._is_given(b)]
            calls = writers.get(key, [])
            later = [b for b in every if b not in first and not self._is_result(b)]
            later = [each for b in later for each in _in_turn(b, [made[n][0] for n in calls])]
            found += [(b, START) for b in first]
            # Calls beyond the last of them write more of it; values beyond the last call are what
            # a repeat over parts has left.
            found += zip(later, calls, strict=False)
        return found

    def _key(self, scope: str, buffer: str) -> Key:
        """Of the calls' own scope; what is made once before a scan's iterations is the scan's."""
        if (scope, buffer) in self.every:
            return scope, buffer
        inside = (s for s, b in self.every if b == buffer and s and around(s)[0] == scope)
        return next(inside, scope), buffer

    def _is_given(self, b: Binding) -> bool:
        """Whether a buffer holds it from the start: a leaf, a constant, what a scan is given."""
        if b.buffer in self.empty:
            return True
        graph = self.graphs[b.scope]
        leaf = graph.nodes[b.value.node].attributes
        is_leaf = isinstance(leaf, Leaf)
        if not b.scope or is_call(b.scope):
            # A leaf may become another: then its buffer holds that one's value later.
            is_own = isinstance(leaf, Leaf) and (b.scope or leaf.name == b.buffer)
            return b.buffer in self.constants or (bool(is_own) and b.buffer in self.given)
        if not is_leaf:
            return b.buffer in self.constants
        outer, _, position = around(b.scope)
        node, at = self.graphs[outer].nodes[position], graph.inputs.index(b.value.node)
        assert isinstance(node.attributes, Scan)
        first = node.attributes.constants
        carried = graph.inputs[first : first + node.attributes.carries]
        known = self.every[b.scope, b.buffer][0]
        if b is not known and {b.value.node, known.value.node} & {*carried}:
            return False  # a carry becomes another input
        return any(o.value == node.operands[at] for o in self.every.get((outer, b.buffer), ()))

    def _is_result(self, b: Binding) -> bool:
        """Whether a repeat leaves it."""
        inner = f"{b.scope}scan{b.value.node}:"
        is_scan = self.graphs[b.scope].nodes[b.value.node].op is SCAN
        return is_scan and (inner, b.buffer) in self.written


def _in_turn(b: Binding, calls: Sequence[Call]) -> list[Binding]:
    """What each call that writes a buffer leaves of a binding: of runs longer ones every time that
    they are stored, which a kernel of several passes does more than once."""
    if not isinstance(b.content, Runs):
        return [b]
    found, stores = list[Binding](), -1
    for call in calls:
        own = _own_names(call, b.buffer)
        stores += sum(isinstance(s, Store) and s.buffer in own for s in walk(call.kernel.body))
        found.append(replace(b, content=b.content.after(stores)))
    return found


def _own_names(call: Call, buffer: str) -> set[str]:
    """What a call's kernel calls a buffer."""
    pairs = zip(call.kernel.buffers, call.arguments, strict=True)
    return {b.name for b, a in pairs if a.buffer == buffer}


def is_call(scope: str) -> bool:
    """Whether a scope is that of a composite's definition."""
    return bool(scope) and around(scope)[1] == "call"


def _home(scope: str) -> str:
    """The scope of the calls that make values of a scope."""
    return around(scope)[0] if is_call(scope) else scope
