"""Which claims a program makes: each call, what its buffers hold before and after it, and where.

A call is between values of one graph: the program's, or that of a scan's body, whose kernels see a
row of a buffer, or a carry, as a value of the body. Calls of one kernel between equal parts of
graphs are one claim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from treadle.ir.control import CALL, SCAN
from treadle.ir.graph import Graph, Value
from treadle.ir.op import OPS, Op
from treadle.ir.ops import reductions
from treadle.ir.ops.elementwise import LOG
from treadle.ir.ops.leaves import Leaf
from treadle.kernel.bindings import Binding
from treadle.kernel.program import Call, Phase, Program, Repeat, Step

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


def sites(program: Program) -> Iterator[Site]:
    """Every distinct claim, in the program's order; of calls that fill one buffer the last's."""
    return _Walk(program).sites()


class _Walk:
    def __init__(self, program: Program):
        self.program = program
        self.graphs = dict(program.bindings.graphs)
        self.every: dict[tuple[str, str], list[Binding]] = {}
        for b in program.bindings.every:
            self.every.setdefault((b.scope, b.buffer), []).append(b)
        self.held = {key: found[0] for key, found in self.every.items()}
        self.seen: set[object] = set()
        self.writers: dict[tuple[str, str], list[Call]] = {}
        for call, is_repeated in _calls(program.steps, False):
            scope = self._scope(call, is_repeated) or ""
            for a in call.written:
                self.writers.setdefault((scope, a.buffer), []).append(call)

    def sites(self) -> Iterator[Site]:
        for call, is_repeated in _calls(self.program.steps, False):
            scope = self._scope(call, is_repeated)
            site = self._unknown(call) if scope is None else self._site(call, scope)
            key = id(call.kernel), None if scope is None else _signature(site)
            if key not in self.seen and site.is_last:
                self.seen.add(key)
                yield site

    def _scope(self, call: Call, is_repeated: bool) -> str | None:
        """The graph whose values a call's buffers hold: a body's first where it is repeated."""
        names = {a.buffer for a in call.arguments}
        order = sorted(self.graphs, key=lambda s: (s == "") == is_repeated)
        return next((s for s in order if all((s, n) in self.every for n in names)), None)

    def _unknown(self, call: Call) -> Site:
        return Site(call, "", None, {}, {}, False, False, (), True)

    def _site(self, call: Call, scope: str) -> Site:
        before = {a.buffer: self.held[scope, a.buffer] for a in call.arguments}
        after = before | {a.buffer: self.every[scope, a.buffer][-1] for a in call.written}
        self.held |= {(scope, name): b for name, b in after.items()}
        graph = self.graphs[scope]
        earlier, is_last = list[Call](), True
        for a in call.written:
            writers = self.writers[scope, a.buffer]
            at = next(i for i, c in enumerate(writers) if c is call)
            earlier += [c for c in writers[:at] if c not in earlier]
            is_last &= at + 1 == len(writers)
        ops = _ops_between(graph, call, before, after)
        ordered, has_logs = bool(ops & POSITIONS), bool(ops & LOGARITHMS)
        return Site(call, scope, graph, before, after, ordered, has_logs, tuple(earlier), is_last)


def _calls(steps: tuple[Step, ...], is_repeated: bool) -> Iterator[tuple[Call, bool]]:
    for step in steps:
        match step:
            case Phase(calls):
                yield from ((call, is_repeated) for call in calls)
            case Repeat(_, _, inner):
                yield from _calls(inner, True)


def given_values(call: Call, before: Mapping[str, Binding]) -> dict[Value, int]:
    """Values that a call is given, by the position of the buffer."""
    names = [a.buffer for a in call.arguments[: len(call.kernel.inputs)]]
    return {before[n].value: i for i, n in reversed(list(enumerate(names)))}


def _nodes_between(
    graph: Graph, call: Call, before: Mapping[str, Binding], after: Mapping[str, Binding]
) -> list[int]:
    """Nodes between what a call is given and what it gives, operands first."""
    given = given_values(call, before)
    made = [after[a.buffer].value for a in call.written]
    pending = [v.node for v in made if v not in given]
    found: set[int] = set()
    while pending:
        position = pending.pop()
        if position not in found:
            found.add(position)
            pending += [v.node for v in graph.nodes[position].operands if v not in given]
    return sorted(found)


def _ops_between(
    graph: Graph, call: Call, before: Mapping[str, Binding], after: Mapping[str, Binding]
) -> set[Op]:
    return {graph.nodes[i].op for i in _nodes_between(graph, call, before, after)}


def _signature(site: Site) -> object:
    """What a call is between, whatever the names are."""
    graph, call, before, after = site.graph, site.call, site.before, site.after
    assert graph is not None
    given, known = given_values(call, before), dict[int, int]()
    replaced = [
        (i, a.buffer)
        for i, a in enumerate(call.arguments)
        if before[a.buffer] is not after[a.buffer]
    ]
    given |= {before[name].value: i for i, name in replaced if before[name].value not in given}

    def form(value: Value) -> object:
        return ("given", given[value]) if value in given else (known[value.node], value.output)

    for position in _nodes_between(graph, call, before, after):
        node = graph.nodes[position]
        own = node.attributes.name if isinstance(node.attributes, Leaf) else node.attributes
        known[position] = hash((node.op.name, own, node.types, *map(form, node.operands)))
    contents = tuple(
        (str(before[a.buffer].content), str(after[a.buffer].content)) for a in call.arguments
    )
    chain = tuple(id(c.kernel) for c in site.earlier), site.is_last
    return contents, tuple(form(after[a.buffer].value) for a in call.written), chain
