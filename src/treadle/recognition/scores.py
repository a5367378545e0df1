"""Scores: products of queries and keys with what happens to them before a softmax.

An analysis of sums: scores are a number times one contraction, plus terms that do not read it, and
−∞ where masks say so. Whatever the order in which that is written, the parts are the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from treadle.ir.graph import Value
from treadle.ir.ops import elementwise as e
from treadle.ir.ops.linear import CONTRACT, Contraction
from treadle.ir.ops.shaping import PERMUTE, RESHAPE, Broadcast, Permute
from treadle.recognition.axes import Axes, Groups
from treadle.recognition.regions import Flow
from treadle.rules.pattern import number_of

HIDES = -1e4  # a score of that or less is taken for −∞: its exponential is 0 beside any other


@dataclass(frozen=True, slots=True)
class Term:
    """What is added to scores, or where they stay and are not hidden."""

    value: Value
    groups: Groups
    is_mask: bool = False
    is_hidden: bool = False  # a mask that says where they are hidden
    number: float = -math.inf  # what hides them
    is_subtracted: bool = False


@dataclass(frozen=True, slots=True)
class Labelled:
    """A value and what its axes are."""

    value: Value
    groups: Groups


@dataclass(frozen=True, slots=True)
class Scores:
    """Products of two labelled values, summed along `depth`."""

    operands: tuple[Labelled, Labelled]
    depth: str
    scale: float = 1.0
    terms: tuple[Term, ...] = ()


def scores_of(flow: Flow, axes: Axes, value: Value, groups: Groups) -> Scores | None:
    """The scores that a value is, if it is some."""
    node = flow.node(value)
    operands = node.operands
    if node.op is CONTRACT:
        return _products(flow, axes, value, groups)
    if node.op is e.CAST:
        is_float = flow.graph.type_of(operands[0]).is_float
        return scores_of(flow, axes, operands[0], groups) if is_float else None
    if node.op in (PERMUTE, RESHAPE):
        before = viewed(flow, axes, value, groups)
        return None if before is None else scores_of(flow, axes, operands[0], before)
    if node.op in (e.MUL, e.DIV):
        return _scaled(flow, axes, value, groups)
    if node.op is e.WHERE:
        return _masked(flow, axes, value, groups)
    if node.op is e.SUB:
        found = _added(flow, axes, operands[0], operands[1], groups)
        return None if found is None else _subtracting(found)
    if node.op is not e.ADD:
        return None
    for inner, other in (operands, operands[::-1]):
        found = _added(flow, axes, inner, other, groups)
        if found is not None:
            return found
    return None


def viewed(flow: Flow, axes: Axes, value: Value, groups: Groups) -> Groups | None:
    """The groups of what a value is a view of."""
    node = flow.node(value)
    match node.attributes:
        case Permute(order):
            turned = sorted(range(len(groups)), key=order.__getitem__)
            return tuple(groups[i] for i in turned)
        case Broadcast(_, kept):
            return tuple(groups[i] for i in kept)
        case _:
            shape = flow.graph.type_of(node.operands[0]).shape
            return axes.grouped(groups, shape) if node.op is RESHAPE else None


def _products(flow: Flow, axes: Axes, value: Value, groups: Groups) -> Scores | None:
    node = flow.node(value)
    assert isinstance(node.attributes, Contraction)
    left, right, result = node.attributes.labels
    summed = sorted(set(left + right) - set(result))
    if len(summed) != 1:
        return None
    names = dict(zip(result, groups, strict=True))
    x, y = node.operands
    depth = axes.new(flow.graph.type_of(x).shape[left.index(summed[0])])
    names[summed[0]] = depth
    first, by_first = _unscaled(flow, axes, Labelled(x, tuple(names[i] for i in left)))
    second, by_second = _unscaled(flow, axes, Labelled(y, tuple(names[i] for i in right)))
    return Scores((first, second), depth, by_first * by_second)


def _unscaled(flow: Flow, axes: Axes, labelled: Labelled) -> tuple[Labelled, float]:
    """What an operand is a number times, or a view of that, and the number.

    Scores that are multiplied by it instead need nobody to store the multiple.
    """
    found, factor = labelled, 1.0
    value, groups = labelled.value, labelled.groups
    while True:
        node = flow.node(value)
        if node.op in (PERMUTE, RESHAPE):
            before = viewed(flow, axes, value, groups)
            if before is None:
                return found, factor
            value, groups = node.operands[0], before
            continue
        pair = _times_number(flow, value)
        if pair is None:
            return found, factor
        value, factor = pair[0], factor * pair[1]
        found = Labelled(value, groups)


def _times_number(flow: Flow, value: Value) -> tuple[Value, float] | None:
    """A value and the finite number, not 0, that it is multiplied by or divided by."""
    node = flow.node(value)
    if node.op not in (e.MUL, e.DIV):
        return None
    pairs = [node.operands] if node.op is e.DIV else [node.operands, node.operands[::-1]]
    for inner, other in pairs:
        number = number_of(flow.graph, other)
        if number is not None and math.isfinite(float(number)) and number != 0:
            return inner, float(number) if node.op is e.MUL else 1 / float(number)
    return None


def _scaled(flow: Flow, axes: Axes, value: Value, groups: Groups) -> Scores | None:
    """Times a number, or divided by one; what was hidden stays hidden by a positive one."""
    pair = _times_number(flow, value)
    if pair is None:
        return None
    inner, factor = pair
    found = scores_of(flow, axes, inner, groups)
    if found is None:
        return None
    stays = all(t.is_mask and t.number * factor <= HIDES for t in found.terms)
    if not found.terms or factor == 1 or (factor > 0 and stays):
        terms = tuple(replace(t, number=t.number * factor) for t in found.terms)
        return replace(found, scale=found.scale * factor, terms=terms)
    return None


def _masked(flow: Flow, axes: Axes, value: Value, groups: Groups) -> Scores | None:
    """Scores where a condition holds, or where it does not, and a number that hides elsewhere."""
    condition, *both = flow.node(value).operands
    for inner, other, is_hidden in ((both[0], both[1], False), (both[1], both[0], True)):
        number = number_of(flow.graph, other)
        if number is not None and float(number) <= HIDES:
            found = scores_of(flow, axes, inner, groups)
            if found is not None:
                term = Term(condition, groups, True, is_hidden, float(number))
                return replace(found, terms=(*found.terms, term))
    return None


def _added(flow: Flow, axes: Axes, inner: Value, other: Value, groups: Groups) -> Scores | None:
    found = scores_of(flow, axes, inner, groups)
    return None if found is None else replace(found, terms=(*found.terms, Term(other, groups)))


def _subtracting(scores: Scores) -> Scores:
    """Scores whose last term is subtracted."""
    last = replace(scores.terms[-1], is_subtracted=True)
    return replace(scores, terms=(*scores.terms[:-1], last))
