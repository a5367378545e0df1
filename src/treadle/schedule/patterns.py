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

from treadle.ir.composites import ATTENTION_GRAD
from treadle.ir.graph import Graph, Node
from treadle.ir.graph import Value as TensorValue
from treadle.ir.op import Attributes
from treadle.ir.ops import elementwise as e
from treadle.ir.ops import linear, reductions, shaping
from treadle.ir.rewrite import use_counts
from treadle.kernel.contraction import contraction_of
from treadle.kernel.target import CPU, Matmuls
from treadle.rules.pattern import Anything, Root, apply, captures, in_each_order
from treadle.rules.rule import Match
from treadle.schedule.templates import HEADS_LAST

_MATMUL = apply(linear.CONTRACT, Anything("a"), Anything("b"), name="matmul", single_use=True)
_ALONG_ROWS = apply(shaping.BROADCAST, Anything("bias"), name="rows")
BIASED_MATMUL = apply(e.ADD, _MATMUL, _ALONG_ROWS, commutes=True)

_HEADS = apply(ATTENTION_GRAD, name="gradient", single_use=True)
_HEADS_LAST = apply(shaping.PERMUTE, _HEADS, name="heads_last", single_use=True)
_SIDE_BY_SIDE = apply(shaping.RESHAPE, _HEADS_LAST, name="inner", single_use=True)
PADDED_GRADIENT = apply(shaping.PAD, _SIDE_BY_SIDE)

Uses = Counter[TensorValue]
Layouts = Mapping[TensorValue, tuple[int, ...]]  # axes in their order in memory


@dataclass(frozen=True, slots=True)
class Biased:
    """A matmul's sum with a vector along its last axis, which is written in its stead."""

    sum: TensorValue
    bias: TensorValue


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor whose rows are a part of the rows of another, from a column on."""

    whole: TensorValue
    start: int


def biased_matmuls(
    graph: Graph, materialized: Mapping[TensorValue, None], limits: Matmuls
) -> dict[TensorValue, Biased]:
    """Matmuls of narrow floats that only a sum with one vector reads.

    The sum must be materialized: elsewhere the vector is added for nothing by whoever reads it.
    """
    uses = use_counts(graph)
    found: dict[TensorValue, Biased] = {}
    for position, node in enumerate(graph.nodes):
        value = TensorValue(position)
        if node.op is not e.ADD or value not in materialized or not node.types[0].dtype.is_narrow:
            continue
        for match in _matches(graph, BIASED_MATMUL, node, uses):
            matmul = match.node("matmul")
            if _is_along_rows(match) and _ends_in_columns(graph, matmul, limits):
                found[match["matmul"]] = Biased(value, match["bias"])
                break
    return found


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
    is_one_dtype = all(graph.type_of(v).dtype is dtype for v in node.operands)
    return is_one_dtype and not found.batch and found.result == found.rows + found.columns


def concatenated_gradients(graph: Graph, layouts: Layouts) -> dict[TensorValue, Part]:
    """Attention's gradients that are only laid side by side, by a sum of padded views."""
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
        if len(known) == len(terms) > 1 and width == type_.shape[-1]:
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
