"""Results that a library writes where they are wanted: with a bias, or as part of a tensor.

Both are found in the graph before anything is lowered; what would have added or moved them then has
nothing to do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from treadle.ir.composites import ATTENTION_GRAD
from treadle.ir.graph import Graph, Node
from treadle.ir.graph import Value as TensorValue
from treadle.ir.ops import elementwise as e
from treadle.ir.ops import linear, shaping
from treadle.ir.ops.leaves import Leaf
from treadle.kernel.contraction import contraction_of
from treadle.kernel.target import Matmuls


@dataclass(frozen=True, slots=True)
class Biased:
    """A product, and the sum with a vector along its last axis that takes its place."""

    sum: TensorValue
    bias: TensorValue


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor whose rows are a part of the rows of another: from a column on."""

    whole: TensorValue
    start: int


def biased_products(
    graph: Graph, kept: Mapping[TensorValue, None], limits: Matmuls
) -> dict[TensorValue, Biased]:
    """Products of narrow floats to which one vector is added, and that nothing else uses.

    Only where the sum is kept: elsewhere it costs nothing to add the vector where it is read.
    """
    uses = _uses(graph)
    found: dict[TensorValue, Biased] = {}
    for position, node in enumerate(graph.nodes):
        if node.op is not e.ADD or TensorValue(position) not in kept:
            continue
        if not node.types[0].dtype.is_narrow:
            continue
        for product, other in (node.operands, node.operands[::-1]):
            made, spread = graph.nodes[product.node], graph.nodes[other.node]
            is_product = made.op is linear.CONTRACT and uses[product] == 1
            is_biased = is_product and _is_along_last(graph, spread)
            if is_biased and _ends_in_columns(graph, made, limits):
                found[product] = Biased(TensorValue(position), spread.operands[0])
                break
    return found


def _ends_in_columns(graph: Graph, node: Node, limits: Matmuls) -> bool:
    """Whether a product is a whole one whose rows of columns lie as the result counts them."""
    found = contraction_of(graph, node)
    if not found.is_for_library(limits) or not found.columns:
        return False
    is_narrow = all(graph.type_of(v).dtype is node.types[0].dtype for v in node.operands)
    return is_narrow and not found.batch and found.result == found.rows + found.columns


def _is_along_last(graph: Graph, node: Node) -> bool:
    if node.op is not shaping.BROADCAST:
        return False
    attributes: Any = node.attributes
    source = graph.type_of(node.operands[0])
    return tuple(attributes.axes) == (len(node.types[0].shape) - 1,) and source.rank == 1


def _uses(graph: Graph) -> Counter[TensorValue]:
    found = Counter(v for n in graph.nodes for v in n.operands)
    found.update(o.value for o in graph.outputs)
    return found


def gathered_parts(
    graph: Graph, layouts: Mapping[TensorValue, tuple[int, ...]]
) -> dict[TensorValue, Part]:
    """Attention's gradients that are only laid side by side, by a sum of padded views."""
    uses, users = _uses(graph), _users(graph)
    found: dict[TensorValue, Part] = {}
    for position, node in enumerate(graph.nodes):
        value = TensorValue(position)
        if not layouts or node.op is not e.ADD or uses[value] == 0:
            continue
        if any(_is_sum_of_pads(graph, v, uses) for v in users.get(value, ())):
            continue  # a larger sum has all of its terms
        parts = [_part(graph, value, t, uses, layouts) for t in _terms(graph, value, uses)]
        known = {source: part for p in parts if p is not None for source, part in (p[:2],)}
        widths = sum(p[2] for p in parts if p is not None)
        is_whole = widths == node.types[0].shape[-1] if node.types[0].shape else False
        if len(known) == len(parts) > 1 and is_whole:
            found |= known
    return found


def _users(graph: Graph) -> dict[TensorValue, list[TensorValue]]:
    found: dict[TensorValue, list[TensorValue]] = {}
    for i, node in enumerate(graph.nodes):
        for operand in node.operands:
            found.setdefault(operand, []).append(TensorValue(i))
    return found


def _is_sum_of_pads(graph: Graph, value: TensorValue, uses: Counter[TensorValue]) -> bool:
    node = graph.nodes[value.node]
    return node.op is e.ADD and all(
        graph.nodes[t.node].op is shaping.PAD for t in _terms(graph, value, uses)
    )


def _terms(graph: Graph, value: TensorValue, uses: Counter[TensorValue]) -> list[TensorValue]:
    found: list[TensorValue] = []
    for operand in graph.nodes[value.node].operands:
        is_inner = graph.nodes[operand.node].op is e.ADD and uses[operand] == 1
        found += _terms(graph, operand, uses) if is_inner else [operand]
    return found


def _part(
    graph: Graph,
    whole: TensorValue,
    term: TensorValue,
    uses: Counter[TensorValue],
    layouts: Mapping[TensorValue, tuple[int, ...]],
) -> tuple[TensorValue, Part, int] | None:
    """What a padded term is a view of, where it starts along the last axis, and how wide it is."""
    node = graph.nodes[term.node]
    attributes: Any = node.attributes
    if node.op is not shaping.PAD or uses[term] != 1 or float(attributes.value) != 0:
        return None
    if any(attributes.interior) or any(attributes.low[:-1]):
        return None
    inner = graph.type_of(node.operands[0]).shape
    if inner[:-1] != node.types[0].shape[:-1]:
        return None
    source = _source(graph, node.operands[0], uses)
    if source is None or layouts.get(source) != (0, 2, 1, 3):
        return None
    b, h, t, d = graph.type_of(source).shape
    if inner != (b, t, h * d):
        return None
    return source, Part(whole, int(attributes.low[-1])), inner[-1]


def _source(graph: Graph, value: TensorValue, uses: Counter[TensorValue]) -> TensorValue | None:
    """The gradient of attention that reshape(permute(…)) puts heads side by side."""
    shape = graph.nodes[value.node]
    if shape.op is not shaping.RESHAPE or uses[value] != 1:
        return None
    turned = graph.nodes[shape.operands[0].node]
    attributes: Any = turned.attributes
    if turned.op is not shaping.PERMUTE or tuple(attributes.axes) != (0, 2, 1, 3):
        return None
    source = turned.operands[0]
    is_only = uses[shape.operands[0]] == 1 and uses[source] == 1
    made = graph.nodes[source.node]
    is_gradient = made.op is ATTENTION_GRAD and not isinstance(made.attributes, Leaf)
    return source if is_only and is_gradient else None
