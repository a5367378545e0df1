"""Analyses of a graph by patterns: what a library call can write by itself, what is read once.

They rewrite nothing. Epilogues of library calls are results written with a bias, or as a part of a
tensor; the nodes that would have added or moved the result then have nothing to do. Sums of
squares around a mean can be computed with the sum itself, in one read: `sums` lowers such a pair as
one kernel on a GPU, where norms over columns read a large tensor twice otherwise. Each part of the
tensor is summed around its own first row, which is close to its mean, so that little is lost where
squares are subtracted; parts are then combined by their means.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from treadle.base.dtypes import FLOAT8, float32
from treadle.ir.composites import ATTENTION_GRAD
from treadle.ir.graph import Graph, Node
from treadle.ir.graph import Value as TensorValue
from treadle.ir.op import Attributes
from treadle.ir.ops import elementwise as e
from treadle.ir.ops import linear, reductions, shaping
from treadle.ir.rewrite import use_counts
from treadle.kernel.contraction import contraction_of
from treadle.kernel.target import CPU, Matmuls, Target
from treadle.rules.pattern import Anything, Root, apply, captures, in_each_order
from treadle.rules.rule import Match
from treadle.schedule.templates import HEADS_LAST, is_of_library

MOST_SCALES = 2  # of a product: one for each operand
_ALONG_ROWS = apply(shaping.BROADCAST, Anything("bias"), name="rows")
BIASED = apply(e.ADD, Anything("term"), _ALONG_ROWS, commutes=True)

_HEADS = apply(ATTENTION_GRAD, name="gradient", single_use=True)
_HEADS_LAST = apply(shaping.PERMUTE, _HEADS, name="heads_last", single_use=True)
_SIDE_BY_SIDE = apply(shaping.RESHAPE, _HEADS_LAST, name="inner", single_use=True)
PADDED_GRADIENT = apply(shaping.PAD, _SIDE_BY_SIDE)

Uses = Counter[TensorValue]
Layouts = Mapping[TensorValue, tuple[int, ...]]  # axes in their order in memory


@dataclass(frozen=True, slots=True)
class Scale:
    """A number of the device that a product is multiplied by: an element of a vector of float32."""

    vector: TensorValue
    element: int


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What a matmul writes in its stead: times some numbers, plus a vector along its last axis."""

    sum: TensorValue
    bias: TensorValue | None = None
    scales: tuple[Scale, ...] = ()

    @property
    def read(self) -> set[TensorValue]:
        """What must be in memory for it."""
        found = {scale.vector for scale in self.scales}
        return found if self.bias is None else found | {self.bias}


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor whose rows are a part of the rows of another, from a column on."""

    whole: TensorValue
    start: int


def matmul_epilogues(
    graph: Graph, materialized: Mapping[TensorValue, None], limits: Matmuls
) -> dict[TensorValue, Epilogue]:
    """Matmuls of narrow floats that only a sum with one vector reads, or a multiple of float8's.

    The sum must be materialized: elsewhere the vector is added for nothing by whoever reads it.
    """
    uses = use_counts(graph)
    found: dict[TensorValue, Epilogue] = {}
    for position, node in enumerate(graph.nodes):
        value = TensorValue(position)
        if node.op not in (e.ADD, e.MUL) or value not in materialized:
            continue
        if not node.types[0].dtype.is_narrow:
            continue
        for term, bias in _biases(graph, node, uses) if node.op is e.ADD else [(value, None)]:
            matmul, scales = _unscaled(graph, term, uses)
            is_float8 = _is_float8(graph, matmul)
            is_scaled = bool(scales) == is_float8 and (limits.scales_float8 or not is_float8)
            if not is_scaled or graph.nodes[matmul.node].op is not linear.CONTRACT:
                continue
            if bias is None or _ends_in_columns(graph, graph.nodes[matmul.node], limits):
                found[matmul] = Epilogue(value, bias, scales)
                break
    return found


def _biases(graph: Graph, node: Node, uses: Uses) -> list[tuple[TensorValue, TensorValue]]:
    """Ways in which a node adds a vector to the rows of what nothing else reads."""
    matches = _matches(graph, BIASED, node, uses)
    found = [(m["term"], m["bias"]) for m in matches if _is_along_rows(m)]
    return [(term, bias) for term, bias in found if uses[term] == 1]


def _is_float8(graph: Graph, value: TensorValue) -> bool:
    operands = graph.nodes[value.node].operands
    return bool(operands) and graph.type_of(operands[0]).dtype in FLOAT8


def _unscaled(
    graph: Graph, value: TensorValue, uses: Uses
) -> tuple[TensorValue, tuple[Scale, ...]]:
    """What is multiplied by up to two elements of vectors, and read by nothing else."""
    scales: list[Scale] = []
    while graph.nodes[value.node].op is e.MUL and len(scales) < MOST_SCALES:
        pairs = graph.nodes[value.node].operands
        ways = [(a, s) for a, b in (pairs, pairs[::-1]) if (s := _scale_of(graph, b)) is not None]
        if not ways or uses[ways[0][0]] != 1:
            break
        value, scale = ways[0]
        scales.append(scale)
    return value, tuple(scales)


def _scale_of(graph: Graph, value: TensorValue) -> Scale | None:
    """The element of a vector of float32 that a value is everywhere."""
    node = graph.nodes[value.node]
    if node.op is not shaping.BROADCAST or graph.type_of(node.operands[0]).size != 1:
        return None
    while node.op in (shaping.BROADCAST, shaping.RESHAPE, e.CAST):
        (value,) = node.operands
        node = graph.nodes[value.node]
    if not isinstance(node.attributes, shaping.Slice) or graph.type_of(value).size != 1:
        return None
    (vector,) = node.operands
    type_ = graph.type_of(vector)
    is_vector = type_.rank == 1 and type_.dtype is float32
    return Scale(vector, node.attributes.starts[0]) if is_vector else None


def _matches(graph: Graph, pattern: Root, node: Node, uses: Uses) -> list[Match]:
    """Every way in which a node matches."""
    ordered = (captures(graph, p, node, uses) for p in in_each_order(pattern))
    return [Match(graph, node, found, CPU) for found in ordered if found is not None]


def _is_along_rows(match: Match) -> bool:
    """Whether a vector is repeated along all axes but the last."""
    spread = match.node("rows").attributes
    assert isinstance(spread, shaping.Broadcast)
    return spread.axes == (match.type.rank - 1,) and match.type_of("bias").rank == 1


def _ends_in_columns(graph: Graph, node: Node, limits: Matmuls) -> bool:
    """Whether a library's matmul of one dtype writes rows of columns as the result counts them."""
    found = contraction_of(graph, node)
    if not found.is_for_library(limits) or not found.columns:
        return False
    dtype = node.types[0].dtype
    types = [graph.type_of(v) for v in node.operands]
    is_one_dtype = all(t.dtype is dtype for t in types) or types[0].dtype in FLOAT8
    return is_one_dtype and not found.batch and found.result == found.rows + found.columns


def concatenated_gradients(
    graph: Graph, layouts: Layouts, target: Target
) -> dict[TensorValue, Part]:
    """A library's gradients of attention that are only laid side by side, by a sum of padded views.

    One call writes all of them.
    """
    if not layouts:
        return {}
    uses = use_counts(graph)
    adds = [TensorValue(i) for i, node in enumerate(graph.nodes) if node.op is e.ADD]
    sums = {value: _terms(graph, value, uses) for value in adds}
    inner = {  # a larger sum has all of the terms
        operand
        for value, terms in sums.items()
        if all(graph.nodes[t.node].op is shaping.PAD for t in terms)
        for operand in graph.nodes[value.node].operands
    }
    found: dict[TensorValue, Part] = {}
    for value, terms in sums.items():
        type_ = graph.type_of(value)
        if uses[value] == 0 or value in inner or not type_.rank:
            continue
        views = [m for term in terms for m in _padded_gradients(graph, term, uses, layouts)]
        known = {m["gradient"]: Part(value, _pad(m).low[-1]) for m in views}
        width = sum(m.type_of("inner").shape[-1] for m in views)
        is_one_call = all(is_of_library(graph, graph.nodes[v.node], target) for v in known)
        if is_one_call and len(known) == len(terms) > 1 and width == type_.shape[-1]:
            found |= known
    return found


def _terms(graph: Graph, value: TensorValue, uses: Uses) -> list[TensorValue]:
    """What a sum adds, sums that only it reads taken apart."""
    found: list[TensorValue] = []
    pending = list(graph.nodes[value.node].operands[::-1])
    while pending:
        term = pending.pop()
        is_inner = graph.nodes[term.node].op is e.ADD and uses[term] == 1
        if is_inner:
            pending += graph.nodes[term.node].operands[::-1]
        else:
            found.append(term)
    return found


def _padded_gradients(graph: Graph, term: TensorValue, uses: Uses, layouts: Layouts) -> list[Match]:
    """What a term is, if that is zeros along the last axis of rows of all heads of a position."""
    found = _matches(graph, PADDED_GRADIENT, graph.nodes[term.node], uses)
    return [
        match
        for match in found
        if uses[term] == 1
        and layouts.get(match["gradient"]) == HEADS_LAST
        and _has_heads_side_by_side(match)
        and _pads_last_axis(_pad(match))
    ]


def _has_heads_side_by_side(match: Match) -> bool:
    batch, heads, time, depth = match.type_of("gradient").shape
    permute = match.node("heads_last").attributes
    assert isinstance(permute, shaping.Permute)
    is_in_rows = match.type_of("inner").shape == (batch, time, heads * depth)
    return is_in_rows and permute.axes == HEADS_LAST


def _pad(match: Match) -> shaping.Pad:
    pad = match.root.attributes
    assert isinstance(pad, shaping.Pad)
    return pad


def _pads_last_axis(pad: shaping.Pad) -> bool:
    is_last = not (any(pad.interior) or any(pad.low[:-1]) or any(pad.high[:-1]))
    return is_last and float(pad.value) == 0


X = Anything("x")
_CENTRE = apply(shaping.BROADCAST, Anything("centre"), name="spread")
_DEVIATION = apply(e.SUB, X, _CENTRE, name="deviation")
# Σ (x − c)² with a c for each sum: Σ x / n, or the mean of several such sums
SQUARED_DEVIATIONS = apply(reductions.REDUCE_SUM, apply(e.MUL, _DEVIATION, _DEVIATION))


def spreads(graph: Graph) -> dict[TensorValue, tuple[TensorValue, TensorValue]]:
    """Sums of squares around a centre: the sum of the same terms before them, and the centre."""
    found: dict[TensorValue, tuple[TensorValue, TensorValue]] = {}
    totals: dict[tuple[TensorValue, Attributes], TensorValue] = {}
    for position, node in enumerate(graph.nodes):
        if node.op is not reductions.REDUCE_SUM:
            continue
        totals.setdefault((node.operands[0], node.attributes), TensorValue(position))
        for match in _matches(graph, SQUARED_DEVIATIONS, node, Counter()):
            total = totals.get((match["x"], node.attributes))
            if total is not None and _is_one_each(match):
                found[TensorValue(position)] = total, match["centre"]
    return found


def _is_one_each(match: Match) -> bool:
    """Whether a centre is the same for all terms of a sum of floats."""
    x = match.type_of("x")
    summed = match.root.attributes
    spread = match.node("spread").attributes
    assert isinstance(summed, reductions.Reduce)
    assert isinstance(spread, shaping.Broadcast)
    others = tuple(i for i in range(x.rank) if i not in summed.axes)
    return x.dtype.is_float and spread.axes == others
