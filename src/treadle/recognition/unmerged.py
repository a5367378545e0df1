"""Contractions over axes that were merged by reshapes or joined from parts, written without.

An index over channels and a kernel's places is a quotient and a remainder; two indices are plain.
A product with parts that were joined is the sum of the products with each.
"""

from __future__ import annotations

from treadle.base.dtypes import DType
from treadle.ir.graph import Graph, GraphBuilder, Node, Output, Value
from treadle.ir.op import NONE
from treadle.ir.ops.elementwise import ADD
from treadle.ir.ops.linear import CONTRACT, Contraction, canonical_spec
from treadle.ir.ops.shaping import CONCAT, RESHAPE, SLICE, Concat, Reshape, Slice
from treadle.ir.rewrite import copied, remove_dead_code, walk
from treadle.recognition.axes import Axes


def unmerged(graph: Graph) -> Graph:
    """An equal graph whose contractions read what their operands are reshapes of."""
    builder = GraphBuilder()

    def visit(position: int, operands: tuple[Value, ...]) -> tuple[Value, ...]:
        node = graph.nodes[position]
        if node.op is CONTRACT and isinstance(node.attributes, Contraction):
            for rewritten in (_of_parts, _of_sources):
                found = rewritten(builder, node.attributes, operands)
                if found is not None:
                    return (found,)
        return copied(builder, node, operands)

    values = walk(graph, visit)
    outputs = [Output(o.kind, o.name, v) for o, v in zip(graph.outputs, values, strict=True)]
    return remove_dead_code(builder.build(outputs, graph.name))


def _labelled(
    builder: GraphBuilder, attributes: Contraction, operands: tuple[Value, ...]
) -> tuple[Axes, list[list[str]]]:
    """The labels of operands and of the result."""
    axes, names = Axes(), dict[str, str]()
    for labels, v in zip(attributes.labels[:2], operands, strict=True):
        for label, n in zip(labels, builder.type_of(v).shape, strict=True):
            if label not in names:
                names[label] = axes.new(n)
    return axes, [[names[x] for x in labels] for labels in attributes.labels]


def _of_parts(
    builder: GraphBuilder, attributes: Contraction, operands: tuple[Value, ...]
) -> Value | None:
    """A contraction along an axis that joins parts, as the sum over parts."""
    for side in (0, 1):
        joined = builder.nodes[_source(builder, operands[side]).node]
        if joined.op is not CONCAT or not isinstance(joined.attributes, Concat):
            continue
        axes, groups = _labelled(builder, attributes, operands)
        own = axes.grouped(groups[side], joined.types[0].shape)
        along = own[joined.attributes.axis] if own is not None else ""
        parts = [axes.resolved("".join(g)) for g in groups]
        if len(along) != 1 or along in parts[2]:
            continue
        whole = _reshaped(builder, operands[1 - side], axes.shape(parts[1 - side]))
        terms = _terms(builder, joined, whole, axes, parts, along, side, attributes.dtype)
        return _reshaped(builder, _sum(builder, terms), tuple(map(axes.size, groups[2])))
    return None


def _terms(
    builder: GraphBuilder,
    joined: Node,
    whole: Value,
    axes: Axes,
    parts: list[str],
    along: str,
    side: int,
    dtype: DType,
) -> list[Value]:
    """The products of each part with what stands opposite to it."""
    assert isinstance(joined.attributes, Concat)
    spec, start, found = Contraction(canonical_spec(*parts), dtype), 0, list[Value]()
    at, shape = parts[1 - side].index(along), builder.type_of(whole).shape
    for part in joined.operands:
        n = builder.type_of(part).shape[joined.attributes.axis]
        sizes = tuple(n if x == along else axes.sizes[x] for x in parts[side])
        starts = tuple(start if i == at else 0 for i in range(len(shape)))
        stops = tuple(start + n if i == at else m for i, m in enumerate(shape))
        (opposite,) = builder.add(SLICE, Slice(starts, stops, (1,) * len(shape)), (whole,))
        pair = (_reshaped(builder, part, sizes), opposite)
        found += builder.add(CONTRACT, spec, pair if side == 0 else pair[::-1])
        start += n
    return found


def _sum(builder: GraphBuilder, terms: list[Value]) -> Value:
    total = terms[0]
    for term in terms[1:]:
        (total,) = builder.add(ADD, NONE, (total, term))
    return total


def _of_sources(
    builder: GraphBuilder, attributes: Contraction, operands: tuple[Value, ...]
) -> Value | None:
    """A contraction of what its operands are reshapes of."""
    axes, groups = _labelled(builder, attributes, operands)
    sources = [_source(builder, v) for v in operands]
    if sources == list(operands):
        return None
    for of_source, v in zip(groups[:2], sources, strict=True):
        if axes.grouped(of_source, builder.type_of(v).shape) is None:
            return None
    parts = [axes.resolved("".join(g)) for g in groups]
    apart = [_reshaped(builder, v, axes.shape(p)) for v, p in zip(sources, parts, strict=False)]
    spec = Contraction(canonical_spec(*parts), attributes.dtype)
    (value,) = builder.add(CONTRACT, spec, apart)
    return _reshaped(builder, value, tuple(map(axes.size, groups[2])))


def _source(builder: GraphBuilder, value: Value) -> Value:
    node = builder.nodes[value.node]
    return node.operands[0] if node.op is RESHAPE else value


def _reshaped(builder: GraphBuilder, value: Value, shape: tuple[int, ...]) -> Value:
    if builder.type_of(value).shape == shape:
        return value
    return builder.add(RESHAPE, Reshape(shape), (value,))[0]
