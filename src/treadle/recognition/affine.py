"""Norms that are scaled and shifted: the weights become operands of the composite."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

from treadle.ir import composites as c
from treadle.ir.graph import Graph, Node
from treadle.ir.ops.shaping import PERMUTE, Permute
from treadle.recognition.proposals import Region
from treadle.recognition.sketch import Sketch

ANCHORS = frozenset([c.LAYER_NORM, c.RMS_NORM, c.BATCH_NORM, c.GROUP_NORM])
MOST_WEIGHTS = 2


def weighted_norms(region: Region) -> Iterator[Graph]:
    """The norm of a region with each choice of its weights: a scale, or a scale and a shift."""
    norms = [n for n in region.graph.nodes if n.op in ANCHORS]
    weights = range(1, len(region.inputs))
    if len(norms) != 1 or not 1 <= len(weights) <= MOST_WEIGHTS:
        return
    if norms[0].op is not c.RMS_NORM or len(weights) == 1:
        for order in permutations(weights):
            found = _weighted(region, norms[0], order)
            if found is not None:
                yield found


def _weighted(region: Region, norm: Node, order: tuple[int, ...]) -> Graph | None:
    sketch = Sketch(region.inputs)
    x = sketch.copied(region.graph, norm.operands[0])
    type_ = sketch.builder.type_of(x)
    is_narrow = _dims(norm) is None  # widened by the composite itself, which takes both or none
    if is_narrow and len(order) == 1:
        return None
    weights = [sketch.inputs[i] for i in order]
    given = weights if is_narrow else [sketch.cast(w, type_.dtype) for w in weights]
    value = sketch.add(norm.op, norm.attributes, x, *given)
    for node in region.graph.nodes:  # channels that are the last axis are moved there and back
        is_of_norm = node.op is PERMUTE and region.graph.nodes[node.operands[0].node] == norm
        if is_of_norm and isinstance(node.attributes, Permute):
            value = sketch.permuted(value, node.attributes.axes)
    if sketch.builder.type_of(value).shape != region.type.shape:
        return None
    return sketch.result(value, region.type)


def shape_of_weights(graph: Graph, norm: Node) -> tuple[int, ...]:
    """Of what may scale and shift a norm."""
    shape, dims = graph.type_of(norm.operands[0]).shape, _dims(norm)
    return shape[1:2] if dims is None else shape[-dims:]


def _dims(norm: Node) -> int | None:
    return norm.attributes.dims if isinstance(norm.attributes, c.Norm) else None
