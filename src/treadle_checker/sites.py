"""Which claims a program makes: its calls in order, with what every buffer holds by then.

A call claims that, between what its inputs hold and what its outputs hold, its kernel computes what
the graph does. The file says from which call on a buffer holds a value. That every call reads what
its buffers hold by then, also from one iteration to the next and behind a repeat, is looked at here
for all of them. Calls of one kernel between equal parts of a graph are one claim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from treadle_checker import program as ir
from treadle_checker.bounds import reads_what_it_writes, stored_elements, written_span
from treadle_checker.coverage import OfData, Runs, held_runs, is_covered, stores_to
from treadle_checker.layouts import is_all, layout_of
from treadle_checker.program import (
    Binding,
    Call,
    Kernel,
    Layout,
    Phase,
    Program,
    Repeat,
    Whole,
    Work,
)
from treadle_checker.reading import NotEstablished, Rejected
from treadle_checker.scopes import Scopes
from treadle_checker.states import START, Held, Scan, State, add
from treadle_checker.types import LEAVES, Graph, Value


@dataclass(frozen=True, eq=False)
class Site:
    """One call, and what its buffers hold before and after it, by the names its kernel has."""

    call: Call
    kernel: Kernel
    graph: Graph
    before: Mapping[str, Held]
    after: Mapping[str, Held]
    iteration: int = 0  # of a repeat that is no scan's
    by_others: Mapping[str, int] | None = None  # elements of the same that other calls store
    meets: str = ""  # another call may store the same element
    missing: str = ""  # why it is not known that all elements are stored

    @property
    def names(self) -> dict[str, tuple[str, int]]:
        """The program's buffers by the kernel's, and where in them these begin."""
        pairs = zip(self.kernel.buffers, self.call.arguments, strict=True)
        return {b.name: (name, row * self.iteration) for b, (name, row) in pairs}


class Walk:
    """Calls in the program's order, with what every buffer holds by then."""

    def __init__(self, program: Program, graphs: Mapping[str, Graph]):
        self.program, self.graphs = program, graphs
        self.calls = {call: i for i, call in enumerate(ir.calls_of(program.steps))}
        self.made: dict[tuple[int, str], Binding] = {}
        self.given: dict[str, list[Binding]] = {}
        for b in program.bindings:
            if b.since == START:
                self.given.setdefault(b.scope, []).append(b)
            elif self.made.setdefault((b.since, b.buffer), b) is not b:
                raise Rejected(f"{b.buffer} holds two things from one call on")
        self.scopes = Scopes(graphs, {b.scope for b in program.bindings})
        self.numbers: dict[object, int] = {}
        self.covered: dict[tuple[Binding, str, int], str | None] = {}  # None: it is not

    def sites(self) -> Iterator[Site]:
        """Every distinct claim; Rejected where a buffer does not hold what is read of it."""
        every, seen = self._visited(), set[object]()
        writers: dict[tuple[Binding, str], dict[Call, str]] = {}
        for site in every:
            for b in site.kernel.outputs:
                key = site.after[b.name].stated, site.names[b.name][0]
                writers.setdefault(key, {})[site.call] = b.name
        for site in every:
            site = self._beside_others(site, writers)
            site = replace(site, missing=self._missing(site, writers))
            form = site.call.kernel, site.iteration, self._signature(site)
            if form not in seen:
                seen.add(form)
                yield site

    def _beside_others(
        self, site: Site, writers: Mapping[tuple[Binding, str], Mapping[Call, str]]
    ) -> Site:
        """With what other calls do that write the same."""
        meets, stored = "", Counter[str]()
        for own in (b.name for b in site.kernel.outputs):
            held = site.after[own]
            low, high, _ = self._span(site.call, own, held)
            for call, name in writers[held.stated, site.names[own][0]].items():
                kernel, is_own = self.program.kernels[call.kernel], call is site.call
                first, last, times = self._span(call, name, held)
                stored[own] += stored_elements(kernel)[name] * (times - is_own)
                if last < first or (not is_own and first <= high and low <= last):
                    meets = held.buffer
        return replace(site, by_others=stored, meets=meets)

    def _missing(
        self, site: Site, writers: Mapping[tuple[Binding, str], Mapping[Call, str]]
    ) -> str:
        """Why it is not known that all elements of what a call fills are stored, by this call and
        others; Rejected if some are not."""
        for own in (b.name for b in site.kernel.outputs):
            held, name = site.after[own], site.names[own][0]
            if isinstance(held.content, Work) or _may_leave(site, own):
                continue
            key = held.stated, name, site.iteration
            if key not in self.covered:
                try:
                    found = self._is_filled(site, held, writers[held.stated, name])
                    self.covered[key] = "" if found else None
                except OfData:  # how often something is stored is counted with the kernel
                    self.covered[key] = ""
                except NotEstablished as reason:
                    self.covered[key] = str(reason)
            missing = self.covered[key]
            if missing is None:
                told = f"some elements of {held.buffer} are never stored"
                raise Rejected(f"kernel {site.kernel.name}: {told}")
            if missing:
                return missing
        return ""

    def _is_filled(self, site: Site, held: Held, writers: Mapping[Call, str]) -> bool:
        content = held.stated.content
        is_same = ir.in_iteration(content, 0) == ir.in_iteration(content, 1)
        stored = list[Runs]()
        for call, own in writers.items():
            kernel = self.program.kernels[call.kernel]
            row = {b.name: row for b, (_, row) in zip(kernel.buffers, call.arguments, strict=True)}
            times = self.times[call] if is_same else 1
            for runs in stores_to(kernel, own, row[own], times):
                shift = 0 if is_same else row[own] * site.iteration
                stored.append(Runs(runs.starts + shift, runs.length))
        assert not isinstance(held.content, Work)
        layout = layout_of(held.content, site.graph.type_of(held.value))
        return is_covered(held_runs(layout), stored)

    def _span(self, call: Call, own: str, held: Held) -> tuple[int, int, int]:
        """The first and the last element of a buffer that a call stores, and in how many iterations
        it stores parts of the same. The last is before the first where these may meet."""
        kernel, content = self.program.kernels[call.kernel], held.stated.content
        is_same = ir.in_iteration(content, 0) == ir.in_iteration(content, 1)
        times = self.times[call] if is_same else 1
        rows = dict(zip((b.name for b in kernel.buffers), call.arguments, strict=True))
        row, (low, high) = rows[own][1], written_span(kernel, own)
        last = low - 1 if times > 1 and row <= high - low else high + row * (times - 1)
        return low, last, times

    # What buffers hold, call by call

    def _visited(self) -> list[Site]:
        """All calls in order, those of repeats in some iterations."""
        state: State = {}
        self.times: dict[Call, int] = {}  # iterations of repeats that are no scan's
        whole = self.graphs[""]
        leafy = whole.made_of(whole.leaves.values())
        for b in self.given.get("", ()):
            node, buffer = whole.nodes[b.node], self.program.buffers[b.buffer]
            is_leaf = node.op in LEAVES and node.attributes["name"] == b.buffer
            is_known = is_leaf and b.buffer in self.program.leaves
            is_known |= b.node not in leafy and b.buffer in self.program.constants
            if b.buffer in state or (buffer.size and not is_known):
                raise Rejected(f"{b.buffer} is not given, and holds something from the start")
            add(state, 0, Held(b, self._place("", b), b.content))
        given = Counter((name, Value(*value)) for name, value, _ in self.program.outputs)
        if given != Counter((name, value) for _, name, value in whole.outputs):
            raise Rejected("the outputs of the program are not those of its graph")
        found = list(self._steps(self.program.steps, "", state))
        for name, value, buffer in self.program.outputs:
            held = state.get(buffer, {}).get(0)
            place = self.scopes.opened[""].place("", Value(*value))
            if held is None or place not in held.values or held.content != Whole():
                raise Rejected(f"the output {name} is not what {buffer} holds")
        return found

    def _place(self, scope: str, b: Binding, value: Value | None = None) -> Value:
        return self.scopes.opened[scope].place(b.scope, value or Value(b.node, b.output))

    def _steps(
        self, steps: tuple[ir.Step, ...], scope: str, state: State, at: int = 0, times: int = 0
    ) -> Iterator[Site]:
        for step in steps:
            if isinstance(step, Phase):
                for call in step.calls:
                    self.times[call] = max(1, times)
                    yield self._call(call, scope, state, at, is_chunk=times > 0)
            elif times:
                raise Rejected("a repeat stands in one over parts of buffers")
            elif step.scope == scope:
                yield from self._chunks(step, state)
            else:
                yield from self._scan(step, scope, state)

    def _call(self, call: Call, scope: str, state: State, at: int, is_chunk: bool) -> Site:
        kernel = self.program.kernels[call.kernel]
        before, after = dict[str, Held](), dict[str, Held]()
        pairs = zip(kernel.buffers, call.arguments, strict=True)
        rows = [(b, name, 0 if is_chunk else row) for b, (name, row) in pairs]
        for b, name, row in rows:
            if row and b.size > row:
                raise Rejected(f"kernel {kernel.name} takes more of {name} than a row")
            if row in state.get(name, {}):
                before[b.name] = state[name][row]
            elif b in kernel.inputs:
                told = f"nothing says what it reads of {name}"
                raise Rejected(f"kernel {kernel.name}: {told}")
        for b, name, row in rows[len(kernel.inputs) :]:
            stated = self.made.get((self.calls[call], name))
            if stated is not None:
                content = ir.in_iteration(stated.content, at)
                of = tuple(self._place(scope, stated, Value(*v)) for v in stated.of)
                after[b.name] = Held(stated, self._place(scope, stated), content, (), of)
            elif b.name in before:  # the same once more, or more of what a call has begun
                is_begun = before[b.name].stated.since != START
                after[b.name] = before[b.name] if is_begun else replace(before[b.name])
            else:
                raise Rejected(f"kernel {kernel.name}: nothing says what it writes to {name}")
            state[name] = {row: after[b.name]}
        return Site(call, kernel, self.scopes.opened[scope].graph, before, after, at)

    def _chunks(self, step: Repeat, state: State) -> Iterator[Site]:
        """A repeat over parts of buffers: its first iterations and its last one. What one leaves,
        the next is given."""
        if step.reverse:
            raise Rejected("parts of buffers are gone through from the last on")
        calls = {self.calls[call] for call in ir.calls_of(step.steps)}
        for i in sorted({0, 1, step.length - 1} & {*range(step.length)}):
            for name, rows in state.items():
                if 0 in rows and rows[0].stated.since in calls:
                    content = ir.in_iteration(rows[0].stated.content, i - 1)
                    state[name] = {0: replace(rows[0], content=content)}
            yield from self._steps(step.steps, step.scope, state, i, step.length)
        graph = self.scopes.opened[step.scope].graph
        for name, rows in state.items():
            held = rows.get(0)
            parts = held and isinstance(held.content, Layout) and held.content
            if held and parts and is_all(parts, graph.nodes[held.value.node]):
                state[name] = {0: replace(held, content=Whole())}

    def _scan(self, step: Repeat, scope: str, state: State) -> Iterator[Site]:
        """One iteration, which is given what is around the scan, and leaves what the next is."""
        scan = Scan(self.program, self.scopes, step, scope)
        every = [h.stated for rows in state.values() for h in rows.values()]
        given = [b for b in every if b.scope == step.scope] + self.given.get(step.scope, [])
        begun = scan.begun(given, state)
        end = {name: dict(rows) for name, rows in begun.items()}
        if step.length:
            yield from self._steps(step.steps, step.scope, end)
        if step.length > 1:
            scan.check_next(given, begun, end)
        scan.leave(end, state)

    def _signature(self, site: Site) -> object:
        """What a call is between, whatever buffers and nodes are called."""
        graph, made = site.graph, [b.name for b in site.kernel.outputs]
        given: dict[Value, object] = {}
        for own, held in site.before.items():
            if own not in made or held is not site.after[own]:
                given = {v: (own, k) for v, k in held.given.items()} | given
        known: dict[int, int] = {}

        def form(v: Value) -> object:
            return given[v] if v in given else (known[v.node], v.output)

        for position in nodes_between(site):
            node = graph.nodes[position]
            name = str(node.attributes.get("name"))
            key = (node.key, node.op, name, node.types, tuple(map(form, node.operands)))
            known[position] = self.numbers.setdefault(key, len(self.numbers))
        contents = tuple((own, h.content) for own, h in (*site.before.items(), *site.after.items()))
        ends = tuple(form(site.after[own].value) for own in made)
        inside = tuple((own, form(h.value)) for own, h in site.before.items() if h.of)
        return contents, ends, inside, site.meets, site.missing


def _may_leave(site: Site, own: str) -> bool:
    """What is made of what was there, or added to a number, may leave some of it."""
    held, before = site.after[own], site.before.get(own)
    if before is None or before is held:
        return False
    is_number = site.graph.nodes[before.value.node].op == "constant"
    adds = is_number and reads_what_it_writes(site.kernel, own)
    return adds or held.value.node in site.graph.made_of([before.value.node])


def nodes_between(site: Site) -> list[int]:
    """Nodes between what a call is given and what it gives, operands first."""
    made = {b.name for b in site.kernel.outputs}
    given = {v for own, held in site.before.items() if own not in made for v in held.given}
    every = [*site.after.values(), *(held for held in site.before.values() if held.of)]
    pending = [held.value.node for held in every if held.value not in given]
    found = set[int]()
    while pending:
        position = pending.pop()
        if position not in found:
            found.add(position)
            pending += [v.node for v in site.graph.nodes[position].operands if v not in given]
    return sorted(found)
