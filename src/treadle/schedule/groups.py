"""A contraction as a product of matrices: its labels by what they do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from treadle.ir.composites import CONV, CONV_GRAD_W, CONV_GRAD_X
from treadle.ir.control import SCAN
from treadle.ir.graph import Graph, Node
from treadle.ir.ops.linear import CONTRACT

LEAST_FLOPS = 1 << 16  # below which threads that sum one element each are as fast
LEAST_DEPTH = 4
FEW_FLOPS = 1 << 26  # of a product that takes no longer than a launch or two
LIBRARYS = frozenset([CONV, CONV_GRAD_X, CONV_GRAD_W])  # launches of their own in any case
ALL_FLOPS = 1 << 28  # of a graph whose launches cost more than its arithmetic


@dataclass(frozen=True)
class Groups:
    """Labels of both operands and the result, of one and the result, and of what is summed."""

    batch: str
    rows: str
    columns: str
    depth: str
    sizes: dict[str, int]

    @property
    def flops(self) -> int:
        return 2 * math.prod(self.sizes.values())

    @property
    def is_large(self) -> bool:
        """Whether a library is worth asking."""
        is_deep = math.prod(self.sizes[c] for c in self.depth) >= LEAST_DEPTH
        return self.flops >= LEAST_FLOPS and is_deep


def groups_of(graph: Graph, node: Node) -> Groups | None:
    """The labels of a product of floats; None where an operand is summed by itself."""
    attributes: Any = node.attributes
    lx, ly, lr = attributes.labels
    sizes: dict[str, int] = {}
    for operand, labels in zip(node.operands, (lx, ly), strict=True):
        type_ = graph.type_of(operand)
        if not type_.is_float:
            return None
        sizes |= dict(zip(labels, type_.shape, strict=True))
    depth = "".join(c for c in lx if c not in lr)
    if set(depth) != {c for c in ly if c not in lr}:
        return None
    batch = "".join(c for c in lr if c in lx and c in ly)
    rows = "".join(c for c in lr if c in lx and c not in ly)
    columns = "".join(c for c in lr if c in ly and c not in lx)
    return Groups(batch, rows, columns, depth, sizes)


def is_small(graph: Graph) -> bool:
    """Whether launches would cost more than the products of a graph, which loops then compute.

    What is around a loop can be fused into it, what is around a library's product cannot. Only wide
    floats are counted: narrow ones are for units that a library drives better.
    """
    return _wide_flops(graph) <= ALL_FLOPS


def _wide_flops(graph: Graph) -> float:
    """Operations of all products, those of loops as often as they run; infinite if one is large."""
    total = 0.0
    for node in graph.nodes:
        if node.op is SCAN:
            attributes: Any = node.attributes
            total += attributes.length * _wide_flops(attributes.body)
        elif node.op in LIBRARYS:
            return math.inf
        elif node.op is CONTRACT and (groups := groups_of(graph, node)) is not None:
            if node.types[0].dtype.is_narrow or groups.flops > FEW_FLOPS:
                return math.inf
            total += groups.flops
    return total
