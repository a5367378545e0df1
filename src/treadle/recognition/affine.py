"""Norms that are scaled and shifted: the weights become operands of the composite."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

from treadle.ir import composites as c
from treadle.ir.graph import Graph, Node, Value
from treadle.ir.op import NONE
from treadle.ir.ops import elementwise as e
from treadle.ir.ops.leaves import INPUT
from treadle.ir.ops.shaping import BROADCAST, PERMUTE, Broadcast, Permute
from treadle.recognition.judge import judge
from treadle.recognition.proposals import Region
from treadle.recognition.regions import Flow
from treadle.recognition.sketch import Sketch

ANCHORS = frozenset([c.LAYER_NORM, c.RMS_NORM, c.BATCH_NORM, c.GROUP_NORM])
MOST_WEIGHTS = 2


def weighted_norms(region: Region) -> Iterator[Graph]:
    """The norm of a region with each choice of its weights: a scale, or a scale and a shift."""
    norms = [n for n in region.graph.nodes if n.op in ANCHORS]
    weights = range(1, len(region.inputs))
    if len(norms) != 1 or region.reduces or region.repeats or not 1 <= len(weights) <= MOST_WEIGHTS:
        return
    if norms[0].op is not c.RMS_NORM or len(weights) == 1:
        for order in permutations(weights):
            found = _weighted(region, norms[0], order)
            if found is not None and _is_affine(region, norms[0], order):
                yield found


def _is_affine(region: Region, norm: Node, order: tuple[int, ...]) -> bool:
    """Whether a region is its norm, scaled and shifted, whatever the norm is.

    The normal form of a norm is long, and what is not equal without it would be so by chance.
    """
    flow, root = Flow(region.graph), region.graph.outputs[0].value
    normed = Value(region.graph.nodes.index(norm))
    weights = [Value(region.graph.inputs[i]) for i in order]
    inputs = normed, *weights
    inside = flow.between(root, set(inputs))
    if any(flow.graph.nodes[i].op is INPUT for i in inside):
        return False
    sketch = Sketch(tuple(flow.graph.type_of(v) for v in inputs))
    value, type_ = sketch.inputs[0], norm.types[0]
    dims = _dims(norm)
    axes = (1,) if dims is None else tuple(range(type_.rank - dims, type_.rank))
    for op, weight in zip((e.MUL, e.ADD), sketch.inputs[1:], strict=False):
        wide = sketch.cast(weight, type_.dtype)
        spread = sketch.add(BROADCAST, Broadcast(type_.shape, axes), wide)
        value = sketch.add(op, NONE, value, spread)
    for i in inside:
        node = flow.graph.nodes[i]
        if isinstance(node.attributes, Permute) and node.operands == (normed,):
            value = sketch.permuted(value, node.attributes.axes)
    if sketch.builder.type_of(value).shape != region.type.shape:
        return False
    return judge(flow.extract(root, inputs), sketch.result(value, region.type)) is not None


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
