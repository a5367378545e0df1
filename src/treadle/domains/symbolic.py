"""Graphs as a domain: values are places in a builder, and evaluating copies a graph there."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.base.origin import Origin
from treadle.domains.domain import Typed
from treadle.ir.control import CALL, SCAN
from treadle.ir.graph import GraphBuilder, Value
from treadle.ir.op import Attributes, Op, Types
from treadle.ir.table import all_composites


class Symbolic:
    """Each op becomes a node."""

    keeps: frozenset[Op] = frozenset([CALL, SCAN, *all_composites()])

    def __init__(self, builder: GraphBuilder, origin: Origin | None = None):
        self.builder = builder
        self.origin = origin

    def apply(
        self, op: Op, attributes: Attributes, operands: Sequence[Typed[Value]], types: Types
    ) -> Sequence[Value]:
        return self.builder.add(op, attributes, [o.value for o in operands], self.origin)
