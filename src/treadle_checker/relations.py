"""What the graph after a stage must be, derived from the one before it, and that it is that.

equal: the same outputs. gradients: the same outputs, and beside them the gradient of the first one
at every parameter that it depends on, by the checker's own reverse mode. updates: a training step
as the checker composes it (`updates.py`). part: some of the outputs, of updates all or none; they
may be guarded by a flag, and be the old values where it is false.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from treadle_checker.budget import Budget
from treadle_checker.building import Building
from treadle_checker.draws import WHOLE, Effort
from treadle_checker.equality import Equality, Outcome
from treadle_checker.field import is_float
from treadle_checker.reading import NotEstablished, Rejected
from treadle_checker.reverse import Reverse
from treadle_checker.types import LEAVES, Graph, Output, Value

Key = tuple[str, str, int]
Pairs = Iterable[tuple[Value, Value]]


class Derived(NamedTuple):
    """A graph that the checker has made, what it rests on, and hints for the comparison."""

    graph: Graph
    pairs: list[tuple[Value, Value]]
    conditions: tuple[str, ...] = ()


def check_equal(
    before: Graph,
    after: Graph,
    pairs: Pairs,
    effort: Effort = WHOLE,
    budget: Budget | None = None,
    is_part: bool = False,
    assumes: bool = False,
    is_close: bool = False,
) -> Outcome:
    """That both have the same outputs; of a part, that it has no others than the whole."""
    whole = budget or Budget(effort.spent)
    own = whole.part(effort.spent // 2) if assumes else whole  # the rest is for other stages
    equality = Equality(before, after, effort, own, assumes)
    proposed: dict[Value, list[int]] = {}
    for a, b in pairs:
        proposed.setdefault(b, []).append(equality.first[a])
    equality.is_close = is_close or (assumes and bool(proposed))
    second = equality.classes(after, proposed)
    old, new = _by_name(before), _by_name(after)
    differing = old.keys() ^ new.keys()
    if is_part:
        updates = {key for key in old if key[0] == "update"} if has_updates(after) else set()
        differing = (new.keys() - old.keys() - {FLAG_KEY}) | (updates - new.keys())
    if differing or not old.keys() & new.keys():
        raise Rejected(f"the outputs differ: {sorted(differing)[:3]}")
    has_flag, reasons = is_part and FLAG_KEY not in old, list[NotEstablished]()
    flag = new.get(FLAG_KEY, NO_FLAG) if has_flag else NO_FLAG
    equality.budget = whole.part(effort.spent // 8) if assumes else whole
    for key in (key for key in old if key in new):
        try:
            _check_output(equality, key, old[key], new[key], second, flag)
        except NotEstablished as reason:
            reasons.append(reason)
    if equality.assumed:
        raise NotEstablished(f"{equality.assumed} values on the way take too long to compare")
    if reasons:
        raise reasons[0]
    return equality.outcome


def check_composed(
    step: Graph, after: Graph, effort: Effort = WHOLE, budget: Budget | None = None
) -> Outcome:
    """That a stage gave the step that the checker has composed."""
    return check_equal(step, after, (), effort, budget, is_close=True)


def check_derived(
    derived: Derived, after: Graph, effort: Effort = WHOLE, budget: Budget | None = None
) -> Outcome:
    return check_equal(derived.graph, after, derived.pairs, effort, budget, assumes=True)


def with_gradients(
    before: Graph, after: Graph, frozen: Sequence[str], pairs: Pairs, cotangents: Pairs
) -> Derived:
    """The graph before with gradients of its first result, by the checker's own reverse mode; the
    hints say of which value a value of the graph after may be the cotangent."""
    if any(kind == "gradient" for kind, _, _ in before.outputs):
        raise NotEstablished("the gradients are the user's own")
    made, own = Building(before.nodes), set[str]()
    loss = before.outputs[0][2]
    seed = made.number(1, before.type_of(loss))
    nodes, given = before.nodes, [n for kind, n, _ in after.outputs if kind == "gradient"]
    leaves = {
        name: Value(i)
        for name, i in before.leaves.items()
        if (nodes[i].op == "parameter" or name in given) and is_float(nodes[i].types[0].dtype)
    }
    wanted = {name: v for name, v in leaves.items() if name not in frozen}
    if not wanted.keys() >= set(given):
        raise Rejected(
            f"gradients of what is not trained: {sorted(set(given) - wanted.keys())[:3]}"
        )
    cts = Reverse(made, own).run({loss: seed}, wanted.values())
    outputs: list[Output] = []
    for name in [*given, *(n for n, v in wanted.items() if v in cts and n not in given)]:
        leaf = wanted[name]
        ct = cts.get(leaf)
        zero = before.type_of(leaf)
        outputs.append(("gradient", name, made.number(0, zero) if ct is None else ct))
    graph = made.finished([*before.outputs, *outputs], before.name)
    hints = [*pairs, *((cts[v], w) for v, w in cotangents if v in cts)]
    told = [f"the gradient of {name} is the one that it has in the file" for name in sorted(own)]
    told += [f"{name} is not trained" for name in sorted(set(frozen) & leaves.keys())]
    return Derived(graph, hints, tuple(told))


# The result that says whether indices of the batch are in range.
FLAG_KEY = ("result", "indices", 0)
NO_FLAG = Value(-1)


def _by_name(graph: Graph) -> dict[Key, Value]:
    """Outputs by kind and name, and by how many of the same there are before."""
    found: dict[Key, Value] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for kind, name, value in graph.outputs:
        counts[kind, name] += 1
        found[kind, name, counts[kind, name] if kind == "print" else 0] = value
    if len(found) != len(graph.outputs):
        raise Rejected(f"two outputs of {graph.name!r} have one name")
    return found


def has_updates(graph: Graph) -> bool:
    return any(kind == "update" for kind, _, _ in graph.outputs)


def _check_output(
    equality: Equality, key: Key, old: Value, new: Value, second: dict[Value, int], flag: Value
) -> None:
    a, after = equality.first[old], equality.graphs[1]
    node = after.nodes[new.node]
    if equality.try_(a, second[new]):
        return
    is_guarded = node.op == "where" and second[node.operands[0]] == second.get(flag, -1)
    if is_guarded and key[0] == "update":
        held = after.nodes[node.operands[2].node]
        is_old = held.op in LEAVES and held.attributes["name"] == key[1]
        if is_old and equality.try_(a, second[node.operands[1]]):
            return
    told = f"the {key[0]} {key[1]!r} could not be shown to be what it should be [{node.line}]"
    if equality.is_refuted(a):
        differing = equality.refuted.get(equality.find(a), next(iter(equality.refuted.values())))
        raise Rejected(f"{told}: a value differs at {differing}")
    raise NotEstablished(told)
