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
        # What a carry is around its scan is found from the scan itself.
        for key in {(_around(scope), name) for scope, name in self.every if scope}:
            if len(self.every.get(key, ())) > 1:
                del self.every[key]
        self.held = {key: found[0] for key, found in self.every.items()}
        self.numbers: dict[object, int] = {}
        self.writers: dict[tuple[str, str], list[Call]] = {}
        for call, around in calls_of(program.steps):
            scope = self._scope(call, len(around)) or ""
            for name in given_to(program, call)[1]:
                self.writers.setdefault((scope, name), []).append(call)

    def sites(self) -> Iterator[Site]:
        seen: set[object] = set()
        for call, around in calls_of(self.program.steps):
            scope = self._scope(call, len(around))
            kernel = self.program.kernels[call.kernel]
            if scope is None:
                site = self._beside_a_scan(call, kernel, len(around))
            else:
                site = self._site(call, kernel, scope)
            key = call.kernel, site.graph and self._signature(site, site.graph)
            if key not in seen and site.is_last:
                seen.add(key)
                yield site

    def _scope(self, call: Call, depth: int) -> str | None:
        """The graph whose values a call's buffers hold: first those as deep in scans as it is, and
        not one around that where it takes a row in each iteration."""
        least = depth if any(row for _, row in call.arguments) else 0
        some = [scope for scope in self.graphs if scope.count(":") >= least]
        some.sort(key=lambda scope: abs(scope.count(":") - depth))
        return next((s for s in some if all((s, n) in self.every for n, _ in call.arguments)), None)

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

    def _beside_a_scan(self, call: Call, kernel: Kernel, depth: int) -> Site:
        """A call whose buffers belong to a scan and to what is around it, as one around it."""
        written = given_to(self.program, call)[1]
        for scope in [s for s in self.graphs if s.count(":") == depth]:
            before = {
                name: self.held.get((scope, name)) or self._seen(scope, name, name in written)
                for name, _ in call.arguments
            }
            known = {name: b for name, b in before.items() if b is not None}
            own = {n: self.every[scope, n][-1] for n in written if (scope, n) in self.every}
            self.held |= {(scope, n): b for n, b in own.items()}
            if len(known) == len(before):
                return Site(call, kernel, self.graphs[scope], known, known | own, (), True)
        return Site(call, kernel, None, {}, {}, (), True)

    def _seen(self, scope: str, name: str, is_written: bool) -> Binding | None:
        """What a buffer of a scan holds of the graph around it: what a carry is given is an operand
        of the scan, and what it has in the end is a result."""
        outer = self.graphs[scope]
        for inner, body in self.graphs.items():
            found, at = self.every.get((inner, name)), inner.removeprefix(scope)[4:-1]
            is_inside = inner and _around(inner) == scope and found and at.isdecimal()
            position = int(at) if is_inside else len(outer.nodes)
            if not found or position >= len(outer.nodes) or outer.nodes[position].op != "scan":
                continue
            node = outer.nodes[position]
            first, carries = node.attributes["constants"], node.attributes["carries"]
            binding = found[0] if is_written else found[-1]
            if is_written:
                given = map(Value, body.inputs[first : first + carries])
                pairs = dict(zip(given, node.operands[first:], strict=False))
            else:
                made = (v for _, _, v in body.outputs[:carries])
                pairs = {v: Value(position, k) for k, v in enumerate(made)}
            to = pairs.get(value_of(binding))
            if to is not None:
                return replace(binding, scope=scope, node=to.node, output=to.output)
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


def _around(scope: str) -> str:
    """The scope around a scan's: of "scan3:scan5:", where 5 is a node of a body, "scan3:"."""
    return scope[: scope[:-1].rfind(":") + 1]


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
