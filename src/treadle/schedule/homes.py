"""Which kernels read each value, where what is inlined is read where its users are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from treadle.ir.graph import Graph
from treadle.ir.graph import Value as TensorValue


class Readers:
    """Kernels that read each value, noted from the end of a graph: sets of one's users are final
    when it is met, and until then a value that has several users has a set of its own.
    """

    def __init__(self) -> None:
        self.found: dict[TensorValue, set[int]] = {}
        self._own: set[TensorValue] = set()

    def add(self, operands: Sequence[TensorValue], home: set[int]) -> None:
        found, own = self.found, self._own
        for operand in operands:
            known = found.get(operand)
            if known is None:
                found[operand] = home
            elif operand in own:
                known |= home
            elif known is not home:
                found[operand] = known | home
                own.add(operand)


def last_reads(
    graph: Graph, stored: Collection[TensorValue], recomputed: Mapping[int, TensorValue]
) -> dict[int, int]:
    """The node in whose kernel each node's value is read last."""
    late = {v: {position} for position, v in recomputed.items()}
    found: dict[int, int] = {}
    for value, homes in homes_of(graph, stored, late).items():
        found[value.node] = max(found.get(value.node, -1), *homes)
    return found


def homes_of(
    graph: Graph,
    stored: Collection[TensorValue],
    late: Mapping[TensorValue, set[int]] | None = None,
) -> dict[TensorValue, set[int]]:
    """The nodes whose kernels read a value: what is inlined is read where its users are.

    What is made `late` is made by kernels of other nodes.
    """
    readers = Readers()
    found = readers.found
    for position in range(len(graph.nodes) - 1, -1, -1):
        value, own = TensorValue(position), {position}
        home = (late or {}).get(value, own) if value in stored else found.get(value, own)
        readers.add(graph.nodes[position].operands, home)
    return found
