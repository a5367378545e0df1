"""Which claims a program makes: each call, what its buffers hold before and after it, and where.

A call is between values of one graph: the program's, or that of a scan's body, whose kernels see a
row of a buffer, or a carry, as a value of the body. Calls of one kernel between equal parts of
graphs are one claim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from treadle.ir.control import CALL, SCAN
from treadle.ir.graph import Graph, Value
from treadle.ir.op import OPS
from treadle.ir.ops import reductions
from treadle.ir.ops.elementwise import LOG
from treadle.ir.ops.leaves import Leaf
from treadle.kernel.bindings import Binding, Work
from treadle.kernel.program import Call, Phase, Program, Repeat, Step
from treadle.kernel.states import START, around, is_call, stated

POSITIONS = frozenset(
    [reductions.ARGMAX, reductions.ARGMIN, reductions.SORT, reductions.TOP_K]
)  # ops that choose by comparing

LOGARITHMS = frozenset(
    op for op in OPS.values() if op is LOG or op.is_composite or op in (CALL, SCAN)
)


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """One call: the graph that it belongs to, and what its buffers hold before and after it.

    `graph` is None where the buffers belong to no one graph.
    """

    call: Call
    scope: str
    graph: Graph | None
    before: Mapping[str, Binding]
    after: Mapping[str, Binding]
    ordered: bool  # whether positions are chosen by comparing on the way
    has_logs: bool  # whether there may be logarithms on the way
    earlier: tuple[Call, ...]  # those that wrote the same buffers before it, of its scope
    is_last: bool  # whether no other writes them later
    chain: tuple[Call, ...] = ()  # those that made numbers of an algorithm, which it goes on with
    equal: Mapping[Value, Value] = field(default_factory=dict)  # values that are one in memory


def sites(program: Program) -> Iterator[Site]:
    """Every distinct claim, in the program's order; of calls that fill one buffer the last's."""
    return _Walk(program).sites()


class _Walk:
    def __init__(self, program: Program):
        self.program = program
        self.graphs = {s: g for s, g in program.bindings.graphs if not is_call(s)}
        self.every: dict[tuple[str, str], list[Binding]] = {}
        for b in program.bindings.every:
            self.every.setdefault((b.scope, b.buffer), []).append(b)
        self.held: dict[tuple[str, str], Binding] = {}
        self.same: dict[tuple[str, str], tuple[Value, ...]] = {}  # values of a buffer at one time
        self.made: dict[tuple[int, str], Binding] = {}
        for b, since in stated(program):
            if since == START:
                known = self.held.setdefault((b.scope, b.buffer), b)
                equal = self.same.get((b.scope, b.buffer), (known.value,))
                self.same[b.scope, b.buffer] = (*equal, b.value)
            self.made[since, b.buffer] = b
        self.given = set(self.held)  # what no call of the scope has made
        self.seen: set[object] = set()
        self.writers: dict[tuple[str, str], list[Call]] = {}
        self.readers: Counter[tuple[str, str]] = Counter()
        self.begun: dict[str, list[Site]] = {}  # algorithms that later calls go on with
        for call, around_it in _calls(program.steps):
            if isinstance(call, Repeat):
                continue
            scope = self._scope(call, around_it) or ""
            for a in call.written:
                self.writers.setdefault((scope, a.buffer), []).append(call)
            for a in call.arguments[: len(call.kernel.inputs)]:
                self.readers[scope, a.buffer] += 1

    def sites(self) -> Iterator[Site]:
        number = 0
        for call, around_it in _calls(self.program.steps):
            if isinstance(call, Repeat):
                self._pass(call, around_it)
                continue
            scope = self._scope(call, around_it)
            site = self._unknown(call) if scope is None else self._site(call, scope, number)
            number += 1
            if scope is not None and self._goes_on(scope, site):
                continue
            key = id(call.kernel), None if scope is None else _signature(site)
            if key not in self.seen and site.is_last:
                self.seen.add(key)
                yield site

    def _pass(self, repeat: Repeat, scope: str) -> None:
        """After a scan its carries hold what it gives to the graph around it."""
        if repeat.scope == scope:
            return
        position = around(repeat.scope)[2]
        for (where, buffer), every in self.every.items():
            if where == scope and (repeat.scope, buffer) in self.writers:
                for b in (b for b in every if b.value.node == position):
                    self.held[scope, buffer] = b
                    self.given.add((scope, buffer))
                    self.same.pop((scope, buffer), None)

    def _scope(self, call: Call, scope: str) -> str | None:
        """The graph whose values a call's buffers hold: of the repeat around it, or of a scan for
        which it makes what stays the same."""
        names = {a.buffer for a in call.arguments}
        inside = (s for s in self.graphs if s and around(s)[0] == scope)
        some = (s for s in (scope, *inside) if all((s, n) in self.every for n in names))
        return next(some, None)

    def _goes_on(self, scope: str, site: Site) -> bool:
        """Whether a call makes nothing but numbers of an algorithm, for calls after it."""
        made = [site.after[a.buffer] for a in site.call.written]
        work = [b for b in made if isinstance(b.content, Work) and self.readers[scope, b.buffer]]
        if work:
            self.begun.setdefault(scope, []).append(site)
        return len(work) == len(made)

    def _chain(self, scope: str, call: Call, before: Mapping[str, Binding]) -> tuple[Call, ...]:
        """Calls that made the numbers of an algorithm that a call is given, in order."""
        found: list[Call] = []
        names = [a.buffer for a in call.arguments]
        wanted = {n for n in names if isinstance(before[n].content, Work)}
        for site in reversed(self.begun.get(scope, [])):
            written = {a.buffer for a in site.call.written}
            if written & wanted:
                found.append(site.call)
                bound = site.before.items()
                wanted |= {n for n, b in bound if isinstance(b.content, Work)}
        return tuple(reversed(found))

    def _unknown(self, call: Call) -> Site:
        return Site(call, "", None, {}, {}, False, False, (), True)

    def _site(self, call: Call, scope: str, number: int) -> Site:
        names = [a.buffer for a in call.arguments]
        before = {n: self.held.get((scope, n)) or self.every[scope, n][0] for n in names}
        same = [self.same[scope, n] for n in names if (scope, n) in self.same]
        after = dict(before)
        for name in (a.buffer for a in call.written):
            known = self.made.get((number, name), before[name])
            if known is before[name] and (scope, name) in self.given:
                known = replace(known)  # the same once more, of what is there
            # What else a call leaves is of a definition.
            after[name] = known if known.scope == scope else self.every[scope, name][-1]
            self.same.pop((scope, name), None)
            self.given.discard((scope, name))
        self.held |= {(scope, name): b for name, b in after.items()}
        graph = self.graphs[scope]
        earlier, is_last = list[Call](), True
        for a in call.written:
            writers = self.writers[scope, a.buffer]
            at = next(i for i, c in enumerate(writers) if c is call)
            earlier += [c for c in writers[:at] if c not in earlier]
            is_last &= at + 1 == len(writers)
        chain = self._chain(scope, call, before)
        given = {name: b for c in chain for name, b in self._given(scope, c).items()}
        between = _nodes_between(graph, (*chain, call), given | before, after)
        ops = {graph.nodes[i].op for i in between}
        ordered, has_logs = bool(ops & POSITIONS), bool(ops & LOGARITHMS)
        facts = ordered, has_logs, tuple(earlier), is_last, chain
        equal = {v: values[0] for values in same for v in values[1:]}
        return Site(call, scope, graph, given | before, after, *facts, equal)

    def _given(self, scope: str, call: Call) -> dict[str, Binding]:
        names = (a.buffer for a in call.arguments)
        return {n: self.held.get((scope, n)) or self.every[scope, n][0] for n in names}


def _calls(steps: tuple[Step, ...], scope: str = "") -> Iterator[tuple[Call | Repeat, str]]:
    """Calls in order, repeats behind what they repeat, and the scope that each is in."""
    for step in steps:
        match step:
            case Phase(calls):
                yield from ((call, scope) for call in calls)
            case Repeat(_, _, inner, own):
                yield from _calls(inner, own)
                yield step, scope


def given_values(calls: Sequence[Call], before: Mapping[str, Binding]) -> dict[Value, int]:
    """Values that some calls are given, by the position of the buffer among all of theirs."""
    names = [a.buffer for c in calls for a in c.arguments[: len(c.kernel.inputs)]]
    whole = [(i, n) for i, n in enumerate(names) if not isinstance(before[n].content, Work)]
    return {before[n].value: i for i, n in reversed(whole)}


def _nodes_between(
    graph: Graph,
    calls: Sequence[Call],
    before: Mapping[str, Binding],
    after: Mapping[str, Binding],
) -> list[int]:
    """Nodes between what some calls are given and what the last gives, operands first."""
    given = given_values(calls, before)
    made = [after[a.buffer].value for a in calls[-1].written]
    pending = [v.node for v in made if v not in given]
    found: set[int] = set()
    while pending:
        position = pending.pop()
        if position not in found:
            found.add(position)
            pending += [v.node for v in graph.nodes[position].operands if v not in given]
    return sorted(found)


def _signature(site: Site) -> object:
    """What a call is between, whatever the names are."""
    graph, call, before, after = site.graph, site.call, site.before, site.after
    assert graph is not None
    calls, known = (*site.chain, call), dict[int, int]()
    given = given_values(calls, before)
    replaced = [
        (i, a.buffer)
        for i, a in enumerate(call.arguments)
        if before[a.buffer] is not after[a.buffer]
    ]
    given |= {before[name].value: i for i, name in replaced if before[name].value not in given}

    def form(value: Value) -> object:
        return ("given", given[value]) if value in given else (known[value.node], value.output)

    for position in _nodes_between(graph, calls, before, after):
        node = graph.nodes[position]
        own = node.attributes.name if isinstance(node.attributes, Leaf) else node.attributes
        known[position] = hash((node.op.name, own, node.types, *map(form, node.operands)))
    contents = tuple(
        (str(before[a.buffer].content), str(after[a.buffer].content)) for a in call.arguments
    )
    chain = tuple(id(c.kernel) for c in (*site.chain, *site.earlier)), site.is_last
    return contents, tuple(form(after[a.buffer].value) for a in call.written), chain
