"""An update in parts, so that the first parameters are on their way while others are updated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from treadle.ir.graph import Graph, Output, OutputKind
from treadle.ir.ops.leaves import Leaf
from treadle.ir.rewrite import remove_dead_code
from treadle.step.parallel.graphs import Names

MOST_PARTS = 4


@dataclass(frozen=True, slots=True)
class Part:
    """Some parameters, and the graph that updates their rows and the state that goes with them."""

    graph: Graph
    parameters: tuple[str, ...]


def parts_of(graph: Graph, sizes: Mapping[str, int], names: Names) -> list[Part]:
    """The update of each of several groups of parameters, numbers in the last of them.

    Parts are run one after the other: what one writes no other reads. Where state goes with
    several parameters, there is one part.
    """
    whole = [Part(graph, tuple(sizes))]
    read = _read_arrays(graph)
    totals = {names.total(n): n for n in sizes}
    owners: list[tuple[Output, str | None]] = []
    for output in graph.outputs:
        if not graph.type_of(output.value).shape:
            owners.append((output, None))
            continue
        found = {totals[n] for n in read[output.value.node] if n in totals}
        if output.kind is not OutputKind.UPDATE or len(found) != 1:
            return whole
        owners.append((output, found.pop()))
    groups = _groups(sizes)
    parts = [[o for o, owner in owners if owner in group] for group in groups]
    parts[-1] += [o for o, owner in owners if owner is None]
    written = [{o.name for o in part} for part in parts]
    for number, part in enumerate(parts):
        needed = set[str]().union(*(read[o.value.node] for o in part))
        if any(needed & w for i, w in enumerate(written) if i != number):
            return whole
    return [
        Part(remove_dead_code(Graph(graph.nodes, tuple(part), graph.name)), tuple(group))
        for part, group in zip(parts, groups, strict=True)
    ]


def _groups(sizes: Mapping[str, int]) -> list[list[str]]:
    """Parameters in their order, in groups of about equal size."""
    found: list[list[str]] = [[]]
    most, reached = sum(sizes.values()) / MOST_PARTS, 0
    for name, size in sizes.items():
        if found[-1] and reached >= most * len(found):
            found.append([])
        found[-1].append(name)
        reached += size
    return found


def _read_arrays(graph: Graph) -> Sequence[frozenset[str]]:
    """The leaves that each node depends on, but for numbers."""
    found: list[frozenset[str]] = []
    for node in graph.nodes:
        if isinstance(node.attributes, Leaf) and node.attributes.type.shape:
            found.append(frozenset([node.attributes.name]))
        else:
            found.append(frozenset[str]().union(*(found[v.node] for v in node.operands)))
    return found
