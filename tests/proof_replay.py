"""A second reader of proofs: congruence closure and rules from the file, apart from the e-graph.

It is what a checker does. Nodes are (op, fields, children); a step is taken only if the nodes that it
names match the rule's pattern under equalities that are known by then.
"""

from __future__ import annotations

from typing import Any

from treadle.egraph.attributes import fields_of
from treadle.egraph.expressions import evaluate
from treadle.egraph.graph import Application
from treadle.egraph.language import COMMUTATIVE, DataRule, applied
from treadle.egraph.optimize import Optimised
from treadle.ir.graph import Graph

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Wrong(Exception):  # noqa: N818
    """A proof that proves nothing."""


def frozen(fields: Any) -> tuple[Any, ...]:
    return tuple(sorted((k, repr(v)) for k, v in fields.items()))


class Replay:
    """Equalities that follow from the steps so far."""

    def __init__(self, nodes: list[tuple[Any, ...]]):
        self.nodes = nodes  # (op, output, fields, children, type)
        self.parent = list(range(len(nodes)))
        self.close()

    def find(self, a: int) -> int:
        while self.parent[a] != a:
            a = self.parent[a]
        return a

    def key(self, op: str, output: int, fields: Any, children: Any) -> Any:
        classes = [self.find(c) for c in children]
        classes = sorted(classes) if op in COMMUTATIVE else classes
        return op, output, frozen(fields), tuple(classes)

    def close(self) -> None:
        """Nodes over equal children are equal: by going over all of them until nothing changes."""
        while True:
            self.known: dict[Any, int] = {}
            merged = False
            for i, (op, output, fields, children, _) in enumerate(self.nodes):
                other = self.find(self.known.setdefault(self.key(op, output, fields, children), i))
                if other != self.find(i):
                    self.parent[self.find(i)] = other
                    merged = True
            if not merged:
                return

    def take(self, rule: DataRule, step: Application) -> None:
        matched = list(step.matched)
        each = [self.match(rule.sources[0], root, matched, {}) for root in step.roots]
        if matched:
            raise Wrong("nodes are left over")
        member = rule.member
        tensors = tuple(names[member] for names in each) if member else ()
        for i, (names, root, result) in enumerate(zip(each, step.roots, step.results, strict=True)):
            if member:
                shared = {k: v for k, v in names.items() if k != member}
                first = {k: v for k, v in each[0].items() if k != member}
                if {k: self.same(v) for k, v in shared.items()} != {
                    k: self.same(v) for k, v in first.items()
                }:
                    raise Wrong("the members differ in more than one tensor")
                names = names | {f"{member}...": tensors, f"{member}.before": tensors[:i]}
            self.check(rule, names, root, result)
        for root, result in zip(step.roots, step.results, strict=True):
            self.parent[self.find(root)] = self.find(result)
        self.close()

    def same(self, value: Any) -> Any:
        return self.find(value) if isinstance(value, int) else value

    def match(self, pattern: Any, node: int, matched: list[int], names: dict[str, Any]) -> Any:
        """What names stand for if the next of the matched nodes, equal to `node`, fits."""
        use = applied(pattern)
        assert use is not None
        here = matched.pop(0)
        if self.find(here) != self.find(node):
            raise Wrong("a matched node is not equal to what is read")
        op, _, fields, children, _ = self.nodes[here]
        if op != use.op:
            raise Wrong(f"{op} is not {use.op}")
        names = self.fields(use, fields, names)
        for order in [children, children[::-1]] if op in COMMUTATIVE else [children]:
            left = list(matched)
            try:
                found = self.operands(use.operands, order, left, names)
            except Wrong:
                continue
            matched[:] = left
            return found
        raise Wrong("operands do not match")

    def operands(self, patterns: Any, children: Any, matched: list[int], names: Any) -> Any:
        for i, p in enumerate(patterns):
            if isinstance(p, str) and p.endswith("..."):
                return names | {p: tuple(children[i:])}
            if isinstance(p, tuple) and p[0] == "number":
                names = names | {p[1]: self.number(children[i])}
            elif isinstance(p, tuple):
                names = self.match(p, children[i], matched, names)
            elif not isinstance(p, str):
                if self.number(children[i]) != p:
                    raise Wrong("another number")
            elif self.same(names.get(p, children[i])) != self.find(children[i]):
                raise Wrong(f"{p} stands for two tensors")
            else:
                names = {p: children[i]} | names
        return names

    def number(self, node: int) -> Any:
        for i, (op, _, fields, _, _) in enumerate(self.nodes):
            if op == "constant" and self.find(i) == self.find(node) and fields["value"] is not None:
                return fields["value"]
        raise Wrong("no number")

    def fields(self, use: Any, fields: Any, names: dict[str, Any]) -> dict[str, Any]:
        names, labels = dict(names), dict[str, str]()
        in_order = sorted(use.fields, key=lambda f: use.op == "contract" and f[1] not in names)
        for field, term in in_order:
            value = fields[field]
            if use.op == "contract" and field != "dtype":
                wanted = names.get(term)
                used = {c for v in names.values() if isinstance(v, tuple) for c in v}
                free = [c for c in LETTERS if c not in used and c not in labels.values()]
                for i, c in enumerate(value):
                    labels.setdefault(c, wanted[i] if wanted else free[len(labels)])
                if len(set(labels.values())) != len(labels):
                    raise Wrong("labels fall together")
                value = tuple(labels[c] for c in value)
            if names.setdefault(term, value) != value if isinstance(term, str) else term != value:
                raise Wrong(f"{field} is {value}, not {term}")
        return names

    def check(self, rule: DataRule, given: dict[str, Any], root: int, result: int) -> None:
        """Whether the result is what the rule says, under its conditions."""
        names = self.typed(rule, given) | {"root": self.nodes[root][4]}
        for name, term in rule.lets:
            names[name] = evaluate(term, names)
        if not all(evaluate(t, names) for t in rule.when):
            raise Wrong("a condition does not hold")
        made = self.made(rule.targets[0], names, given)
        if made != self.find(result) or self.nodes[result][4] != self.nodes[root][4]:
            raise Wrong("the result is another one")

    def typed(self, rule: DataRule, given: dict[str, Any]) -> dict[str, Any]:
        tensors = tensor_names(rule.sources[0])
        names: dict[str, Any] = {}
        for k, v in given.items():
            if k in tensors:
                names[k] = self.nodes[v][4]
            elif rule.member and k in (f"{rule.member}...", f"{rule.member}.before"):
                names[k] = tuple(self.nodes[n][4] for n in v)
            else:
                names[k] = v
        return names

    def made(self, term: Any, names: dict[str, Any], given: dict[str, Any]) -> int:
        """The class of a replacement, whose nodes are all among those of the proof."""
        if isinstance(term, str):
            return self.find(given[term])
        use = applied(term)
        assert use is not None
        children: list[int] = []
        for t in use.operands:
            is_rest = isinstance(t, str) and t.endswith("...")
            children += given[t] if is_rest else [self.made(t, names, given)]
        fields = {f: evaluate(t, names) for f, t in use.fields}
        if use.op == "contract":
            fields = canonical(fields)
        found = self.known.get(self.key(use.op, 0, fields, children))
        if found is None:
            raise Wrong(f"no node {use.op} {fields}")
        return self.find(found)


def canonical(fields: dict[str, Any]) -> dict[str, Any]:
    names: dict[str, str] = {}
    for label in (*fields["x"], *fields["y"], *fields["out"]):
        names.setdefault(label, LETTERS[len(names)])
    return {k: tuple(names[c] for c in fields[k]) for k in ("x", "y", "out")} | {
        "dtype": fields["dtype"]
    }


def tensor_names(pattern: Any) -> set[str]:
    use = applied(pattern)
    if use is None:
        return set()
    found = {t for t in use.operands if isinstance(t, str) and not t.endswith("...")}
    return found.union(*(tensor_names(t) for t in use.operands if isinstance(t, tuple)))


def replay(graph: Graph, found: Optimised, rules: dict[str, DataRule]) -> None:
    """Raises unless the steps show that the graph found equals the one before."""
    egraph = found.search
    nodes = []
    for i in range(len(egraph)):
        head = egraph.heads[egraph.head[i]]
        fields = fields_of(head.attributes)
        nodes.append((head.op.name, head.output, fields, egraph.children[i], egraph.types[i]))
    state = Replay(nodes)
    before = [state_of(state, graph, o.value) for o in graph.outputs]
    for step in found.steps:
        state.take(rules[step.rule], step)
    after = [state_of(state, found.graph, o.value) for o in found.graph.outputs]
    if list(map(state.find, before)) != list(map(state.find, after)):
        raise Wrong("an output is another one")


def state_of(state: Replay, graph: Graph, wanted: Any) -> int:
    """The class of a value of a graph, whose nodes are looked up one by one."""
    places: list[list[int]] = []
    for node in graph.nodes:
        children = [places[v.node][v.output] for v in node.operands]
        fields = fields_of(node.attributes)
        results = []
        for k in range(len(node.types)):
            found = state.known.get(state.key(node.op.name, k, fields, children))
            if found is None:
                raise Wrong(f"{node.op.name} is not in the proof")
            results.append(found)
        places.append(results)
    return places[wanted.node][wanted.output]
