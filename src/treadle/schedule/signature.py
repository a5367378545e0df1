"""What an element-by-element kernel is made of, so that an equal one is used again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

from treadle.ir.graph import Graph
from treadle.ir.graph import Value as TensorValue

Signature = tuple[Hashable, ...]


def signature(
    graph: Graph,
    value: TensorValue,
    buffer_of: Callable[[TensorValue], str | None],
    uses: Mapping[TensorValue, int],
) -> tuple[Signature, list[str]]:
    """The ops behind a tensor down to what is in memory, and the buffers those are, in order.

    Tensors with equal signatures have equal kernels on other buffers; a buffer that appears twice,
    as one that is updated in place does, is one buffer in both.
    """
    buffers: dict[str, int] = {buffer_of(value) or "": 0}
    positions: dict[TensorValue, int] = {}
    rows: list[Hashable] = []
    pending = [value]
    while pending:
        current = pending[-1]
        name = None if current == value else buffer_of(current)
        if current in positions:
            pending.pop()
            continue
        node = graph.nodes[current.node]
        missing = [] if name is not None else [v for v in node.operands if v not in positions]
        if missing:
            pending += reversed(missing)
            continue
        pending.pop()
        positions[current] = len(positions)
        if name is not None:
            rows.append((buffers.setdefault(name, len(buffers)), node.types[current.output]))
        else:
            operands = tuple(positions[v] for v in node.operands)
            is_shared = uses.get(current, 0) > 1
            rows.append((node.op, node.attributes, operands, node.types, current.output, is_shared))
    return tuple(rows), list(buffers)
