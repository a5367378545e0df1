"""Which claims a program makes: its calls in order, with what every buffer holds by then.

A call claims that, between what its inputs hold and what its outputs hold, its kernel computes what
the graph does. Calls of one kernel between equal parts of a graph are one claim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from treadle_checker.memory import given_to
from treadle_checker.program import Binding, Call, Kernel, Program, calls_of
from treadle_checker.types import Graph, Value


@dataclass(frozen=True, eq=False)
class Site:
    """One call, and what its buffers hold before and after it. No graph: they belong to several."""

    call: Call
    kernel: Kernel
    graph: Graph | None
    before: Mapping[str, Binding]
    after: Mapping[str, Binding]
    earlier: tuple[Call, ...]  # that wrote the same buffers
    is_last: bool  # of those that write them

    @property
    def pairs(self) -> list[tuple[str, str, bool]]:
        """Names of buffers: the kernel's and the program's, and whether they are outputs."""
        count = len(self.kernel.inputs)
        names = zip(self.kernel.buffers, self.call.arguments, strict=True)
        return [(b.name, name, i >= count) for i, (b, (name, _)) in enumerate(names)]


class Walk:
    """Calls in the program's order, with what every buffer holds by then."""

    def __init__(self, program: Program, graphs: Mapping[str, Graph]):
        self.program, self.graphs = program, graphs
        self.every: dict[tuple[str, str], list[Binding]] = {}
        for b in program.bindings:
            self.every.setdefault((b.scope, b.buffer), []).append(b)
        inner = {name for scope, name in self.every if scope}
        for name in inner:  # what a carry is around its scan is found from the scan itself
            if len(self.every.get(("", name), ())) > 1:
                del self.every["", name]
        self.held = {key: found[0] for key, found in self.every.items()}
        self.numbers: dict[object, int] = {}
        self.writers: dict[tuple[str, str], list[Call]] = {}
        for call, repeated in calls_of(program.steps):
            for name in given_to(program, call)[1]:
                self.writers.setdefault((self._scope(call, repeated) or "", name), []).append(call)

    def sites(self) -> Iterator[Site]:
        seen: set[object] = set()
        for call, repeated in calls_of(self.program.steps):
            scope = self._scope(call, repeated)
            kernel = self.program.kernels[call.kernel]
            if scope is None:
                site = self._beside_a_scan(call, kernel, repeated)
            else:
                site = self._site(call, kernel, scope)
            key = call.kernel, site.graph and self._signature(site, site.graph)
            if key not in seen and site.is_last:
                seen.add(key)
                yield site

    def _scope(self, call: Call, repeated: int | None) -> str | None:
        """The graph whose values a call's buffers hold: a body's first where it is repeated."""
        order = sorted(self.graphs, key=lambda scope: (scope == "") == (repeated is not None))
        names = {name for name, _ in call.arguments}
        return next((s for s in order if all((s, n) in self.every for n in names)), None)

    def _site(self, call: Call, kernel: Kernel, scope: str) -> Site:
        before = {name: self.held[scope, name] for name, _ in call.arguments}
        written = given_to(self.program, call)[1]
        after = before | {name: self.every[scope, name][-1] for name in written}
        self.held |= {(scope, name): b for name, b in after.items()}
        earlier, is_last = dict[Call, None](), True
        for name in written:
            writers = self.writers[scope, name]
            at = writers.index(call)
            earlier |= dict.fromkeys(writers[:at])
            is_last &= at + 1 == len(writers)
        return Site(call, kernel, self.graphs[scope], before, after, tuple(earlier), is_last)

    def _beside_a_scan(self, call: Call, kernel: Kernel, repeated: int | None) -> Site:
        """A call whose buffers belong to a scan and to what is around it, as one around it."""
        written, before = given_to(self.program, call)[1], dict[str, Binding | None]()
        for name, _ in call.arguments:
            before[name] = self.held.get(("", name)) or self._around_a_scan(name, name in written)
        known = {name: b for name, b in before.items() if b is not None}
        own = {name: self.every["", name][-1] for name in written if ("", name) in self.every}
        self.held |= {("", name): b for name, b in own.items()}
        if repeated is None and len(known) == len(before):
            return Site(call, kernel, self.graphs[""], known, known | own, (), True)
        return Site(call, kernel, None, {}, {}, (), True)

    def _around_a_scan(self, name: str, is_written: bool) -> Binding | None:
        """What a buffer of a scan holds of the graph around it: what a carry is given is an operand
        of the scan, and what it has in the end is a result."""
        outer = self.graphs[""]
        for scope, body in self.graphs.items():
            found, at = self.every.get((scope, name)), scope.removeprefix("scan").removesuffix(":")
            position = int(at) if found and at.isdecimal() else len(outer.nodes)
            if not found or position >= len(outer.nodes) or outer.nodes[position].op != "scan":
                continue
            node = outer.nodes[position]
            first, carries = node.attributes["constants"], node.attributes["carries"]
            if is_written:
                inside = [Value(i) for i in body.inputs[first : first + carries]]
                outside = list(node.operands[first : first + carries])
            else:
                inside = [v for _, _, v in body.outputs[:carries]]
                outside = [Value(position, k) for k in range(carries)]
            binding = found[0] if is_written else found[-1]
            if value_of(binding) in inside:
                to = outside[inside.index(value_of(binding))]
                return replace(binding, scope="", node=to.node, output=to.output)
        return None

    def _signature(self, site: Site, graph: Graph) -> object:
        """What a call is between, whatever buffers and nodes are called."""
        given = {
            value_of(site.before[n]): i for i, (_, n, made) in enumerate(site.pairs) if not made
        }
        for i, (_, name, _) in enumerate(site.pairs):
            if site.before[name] is not site.after[name]:
                given.setdefault(value_of(site.before[name]), i)
        known: dict[int, int] = {}
        for position in nodes_between(graph, site):
            node = graph.nodes[position]
            operands = tuple(
                ("given", given[v]) if v in given else (known[v.node], v.output)
                for v in node.operands
            )
            form = (node.key or node.op, str(node.attributes.get("name")), node.types, operands)
            known[position] = self.numbers.setdefault(form, len(self.numbers))
        contents = tuple((site.before[n].content, site.after[n].content) for _, n, _ in site.pairs)
        made = (value_of(site.after[n]) for _, n, is_output in site.pairs if is_output)
        ends = tuple(("given", given[v]) if v in given else (known[v.node], v.output) for v in made)
        return contents, ends, tuple(c.kernel for c in site.earlier)


def value_of(binding: Binding) -> Value:
    return Value(binding.node, binding.output)


def nodes_between(graph: Graph, site: Site) -> list[int]:
    """Nodes between what a call is given and what it gives, operands first."""
    given = {value_of(site.before[name]) for _, name, made in site.pairs if not made}
    wanted = [value_of(site.after[name]) for _, name, made in site.pairs if made]
    pending, found = [v.node for v in wanted if v not in given], set[int]()
    while pending:
        position = pending.pop()
        if position not in found:
            found.add(position)
            pending += [v.node for v in graph.nodes[position].operands if v not in given]
    return sorted(found)
