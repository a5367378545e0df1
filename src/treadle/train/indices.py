"""Labels and tokens, looked at before a step: programs hold a wrong index inside its axis."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from treadle.base import trees
from treadle.base.errors import IndexRangeError
from treadle.base.trees import Tree
from treadle.ir.composites import CROSS_ENTROPY, EMBEDDING
from treadle.ir.graph import Graph, Node, Value
from treadle.ir.ops.elementwise import CAST, EQ, NOT, WHERE
from treadle.ir.ops.indexing import GATHER, Gather
from treadle.ir.ops.leaves import CONSTANT, INPUT, Constant, Leaf
from treadle.ir.ops.shaping import BROADCAST, RESHAPE
from treadle.nn.tracing import INPUT_PREFIX

# As unsigned numbers negative ones are large, so that one pass finds both. NumPy finds the place of
# the largest in half the time of its value.
UNSIGNED = {np.dtype(f"{kind}{n}"): np.dtype(f"u{n}") for kind in "iu" for n in (1, 2, 4, 8)}


class IndexRange(NamedTuple):
    """An array of the batch whose numbers choose one of `size` things."""

    path: str
    size: int
    ignored: int | None  # a number that stands for nothing
    op: str
    line: str  # of the user


class IndexRanges:
    """All such arrays of a graph, as far as they are used as they come."""

    def __init__(self, graph: Graph):
        found = (_range_of(graph, node) for node in graph.nodes)
        self.ranges = tuple(dict.fromkeys(r for r in found if r is not None))

    def check(self, operation: str, batch: Tree) -> None:
        """Raise for the first number that is out of its range."""
        for range_ in self.ranges:
            leaf = _leaf(batch, range_.path)
            unsigned = UNSIGNED.get(leaf.dtype)
            if unsigned is not None and leaf.size:  # the step refuses or casts anything else
                numbers = leaf.view(unsigned)
                if numbers.item(numbers.argmax()) >= range_.size:
                    _refuse(operation, leaf, range_)


def _leaf(batch: Tree, path: str) -> np.ndarray:
    leaf = batch.get(path) if type(batch) is dict else None
    if type(leaf) is np.ndarray:
        return leaf
    named = dict(zip(trees.paths(batch), trees.flatten(batch)[0], strict=True))
    return np.asarray(named.get(path))


def _refuse(operation: str, array: np.ndarray, range_: IndexRange) -> None:
    is_wrong = (array < 0) | (array >= range_.size)
    if range_.ignored is not None:
        is_wrong &= array != range_.ignored
    if not is_wrong.any():
        return
    place = tuple(int(i) for i in np.argwhere(is_wrong)[0])
    name = f"{range_.path or 'the array'}[{', '.join(map(str, place))}]"
    kind = "classes" if range_.op == "cross_entropy" else "rows"
    remedy = f"Count from 0 to {range_.size - 1}"
    if range_.op == "cross_entropy":
        remedy += ": LabelEncoder does that. If there are more classes, the model needs more scores"
    raise IndexRangeError(
        operation,
        f"{name} is {int(array[place])}, and {range_.op} has {range_.size} {kind}{range_.line}",
        f"{remedy}.",
    )


def _range_of(graph: Graph, node: Node) -> IndexRange | None:
    if node.op is CROSS_ENTROPY:
        size = graph.type_of(node.operands[0]).shape[-1]
    elif node.op is EMBEDDING:
        size = graph.type_of(node.operands[0]).shape[0]
    elif node.op is GATHER and isinstance(node.attributes, Gather):
        size = graph.type_of(node.operands[0]).shape[node.attributes.axis]
    else:
        return None
    source = _source(graph, node.operands[1])
    if source is None:
        return None
    line = "" if node.origin is None else f" at {node.origin}"
    path, ignored = source
    return IndexRange(path, size, ignored, node.op.name, line)


def _source(graph: Graph, value: Value) -> tuple[str, int | None] | None:
    """The array of the batch that indices are, all of it, and the number that is left out."""
    ignored: int | None = None
    while True:
        node = graph.nodes[value.node]
        if node.op is INPUT and isinstance(node.attributes, Leaf):
            name = node.attributes.name
            is_batch = name.startswith(INPUT_PREFIX)
            return (name[len(INPUT_PREFIX) :], ignored) if is_batch else None
        if node.op in (CAST, RESHAPE, BROADCAST):
            value = node.operands[0]
        elif node.op is WHERE and ignored is None:
            left_out = _left_out(graph, *node.operands)
            if left_out is None:
                return None
            value, ignored = node.operands[1], left_out
        else:
            return None


def _left_out(graph: Graph, kept: Value, index: Value, other: Value) -> int | None:
    """k in where(index ≠ k, index, 0), as losses write it."""
    condition = graph.nodes[kept.node]
    if condition.op is not NOT or _number(graph, other) != 0:
        return None
    equality = graph.nodes[condition.operands[0].node]
    if equality.op is not EQ or index not in equality.operands:
        return None
    numbers = [_number(graph, operand) for operand in equality.operands]
    return next((n for n in numbers if n is not None), None)


def _number(graph: Graph, value: Value) -> int | None:
    """Of a constant that is one whole number everywhere."""
    node = graph.nodes[value.node]
    if node.op is BROADCAST:
        return _number(graph, node.operands[0])
    if node.op is not CONSTANT or not isinstance(node.attributes, Constant):
        return None
    number = node.attributes.value
    return number if isinstance(number, int) else None
