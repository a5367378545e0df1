"""Views: reshapes, permutations, broadcasts, slices, flips and pads."""

from __future__ import annotations

from treadle.ir.graph import GraphBuilder, Value
from treadle.ir.ops import shaping
from treadle.ir.ops.leaves import CONSTANT, Constant
from treadle.ir.ops.shaping import BROADCAST, FLIP, PAD, PERMUTE, RESHAPE, SLICE
from treadle.rules.pattern import Anything, Number, apply
from treadle.rules.rule import Match, Rule

X = Anything("x")
VIEWS = frozenset([RESHAPE, PERMUTE, BROADCAST, SLICE, FLIP, PAD])


def take_x(match: Match, builder: GraphBuilder) -> Value:
    return match["x"]


def has_type_of_x(match: Match) -> bool:
    """the result has the type of x"""
    return match.type == match.type_of("x")


def adds_no_padding(match: Match) -> bool:
    """the view is no pad that adds elements"""
    return match.root.op is not PAD or match.type.shape == match.type_of("c").shape


def _number_of_view(match: Match, builder: GraphBuilder) -> Value:
    constant = Constant(match.number("c"), match.type)
    return builder.add(CONSTANT, constant, (), match.root.origin)[0]


VIEW_OF_NUMBER = Rule(
    "view_of_number",
    "A view of a tensor that is one number everywhere is that number.",
    apply(VIEWS, Number(name="c")),
    _number_of_view,
    adds_no_padding,
)


def permutes_nothing(match: Match) -> bool:
    """the axes keep their order"""
    return _is_identity(_axes_of_permute(match.root.attributes))


IDENTITY_PERMUTE = Rule(
    "identity_permute",
    "A permutation that keeps every axis gives x.",
    apply(PERMUTE, X),
    take_x,
    permutes_nothing,
)


def flips_nothing(match: Match) -> bool:
    """no axis is flipped"""
    assert isinstance(match.root.attributes, shaping.Flip)
    return not match.root.attributes.axes


EMPTY_FLIP = Rule(
    "empty_flip",
    "A flip of no axes gives x.",
    apply(FLIP, X),
    take_x,
    flips_nothing,
)

IDENTITY_VIEW = Rule(
    "identity_view",
    "A reshape, broadcast, slice or pad to the type of x gives x.",
    apply(frozenset([RESHAPE, BROADCAST, SLICE, PAD]), X),
    take_x,
    has_type_of_x,
)

RESHAPE_BACK = Rule(
    "reshape_back",
    "A reshape of x, reshaped to the type of x, is x.",
    apply(RESHAPE, apply(RESHAPE, X)),
    take_x,
    has_type_of_x,
)


def _reshape_x(match: Match, builder: GraphBuilder) -> Value:
    return builder.add(RESHAPE, match.root.attributes, (match["x"],), match.root.origin)[0]


RESHAPE_OF_RESHAPE = Rule(
    "reshape_of_reshape",
    "A reshape of a reshape of x is a reshape of x.",
    apply(RESHAPE, apply(RESHAPE, X)),
    _reshape_x,
)


def _both_permutes(match: Match) -> tuple[int, ...]:
    """Axis i of the result is this axis of x."""
    inner = _axes_of_permute(match.node("inner").attributes)
    return tuple(inner[a] for a in _axes_of_permute(match.root.attributes))


def permutes_back(match: Match) -> bool:
    """the second permutation undoes the first"""
    return _is_identity(_both_permutes(match))


def _permute_x(match: Match, builder: GraphBuilder) -> Value:
    axes = shaping.Permute(_both_permutes(match))
    return builder.add(PERMUTE, axes, (match["x"],), match.root.origin)[0]


_PERMUTES = apply(PERMUTE, apply(PERMUTE, X, name="inner"))

PERMUTE_BACK = Rule(
    "permute_back",
    "A permutation and its inverse give x.",
    _PERMUTES,
    take_x,
    permutes_back,
)

PERMUTE_OF_PERMUTE = Rule(
    "permute_of_permute",
    "A permutation of a permutation of x is one permutation of x.",
    _PERMUTES,
    _permute_x,
)


def _axes_of_permute(attributes: object) -> tuple[int, ...]:
    assert isinstance(attributes, shaping.Permute)
    return attributes.axes


def _is_identity(axes: tuple[int, ...]) -> bool:
    return axes == tuple(range(len(axes)))


RULES = (
    VIEW_OF_NUMBER,
    IDENTITY_PERMUTE,
    EMPTY_FLIP,
    IDENTITY_VIEW,
    RESHAPE_BACK,
    RESHAPE_OF_RESHAPE,
    PERMUTE_BACK,
    PERMUTE_OF_PERMUTE,
)
