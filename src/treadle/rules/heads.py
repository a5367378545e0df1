"""A matmul that only a cross-entropy reads becomes one composite with it.

Logits are then never stored all at once. The composite says what the matmul rounds its result to,
so the values are the same.
"""

from __future__ import annotations

import math
from collections import Counter

from treadle.ir import composites as c
from treadle.ir.graph import Graph, GraphBuilder, Value
from treadle.ir.ops import elementwise as e
from treadle.ir.ops.linear import CONTRACT, Contraction
from treadle.ir.ops.shaping import BROADCAST, RESHAPE, Broadcast, Reshape
from treadle.kernel.target import Target
from treadle.rules.driver import rewrite
from treadle.rules.pattern import Anything, apply
from treadle.rules.rule import Exactness, Match, Rule, RuleSet

_LOGITS = apply(CONTRACT, Anything("x"), Anything("weight"), name="logits", single_use=True)
_SPREAD = apply(BROADCAST, Anything("bias"), name="spread")
_BIASED = apply(e.ADD, _LOGITS, _SPREAD, single_use=True, commutes=True)
_WIDE_LOGITS = apply(e.CAST, _LOGITS, name="wide", single_use=True)
_WIDE_BIASED = apply(e.CAST, _BIASED, name="wide", single_use=True)


def is_large_linear(match: Match) -> bool:
    """logits are x · weightᵀ in one float dtype, with as many classes and elements as pay"""
    limits, shape = match.target.rewriting, match.type_of("logits").shape
    is_large = shape[-1] >= limits.least_classes and math.prod(shape) >= limits.least_head_logits
    return is_large and _is_linear(match)


def _is_linear(match: Match) -> bool:
    attributes = match.node("logits").attributes
    assert isinstance(attributes, Contraction)
    of_x, of_weight, of_logits = attributes.labels
    is_linear = len(of_weight) == 2 and of_weight == of_logits[-1] + of_x[-1]
    dtypes = {match.type_of(name).dtype for name in ("x", "weight", "logits")}
    is_one = len(dtypes) == 1 and dtypes.pop().is_float
    return is_linear and of_logits[:-1] == of_x[:-1] and is_one


def is_widened_large_linear(match: Match) -> bool:
    """the cast is to more bytes; logits are x · weightᵀ in one float dtype, as large as pays"""
    narrow, wide = (match.type_of(n).dtype.itemsize for n in ("logits", "wide"))
    return narrow < wide and is_large_linear(match)


def is_large_biased_linear(match: Match) -> bool:
    """the bias has a number for each class; logits are x · weightᵀ in one float dtype, and large"""
    attributes, last = match.node("spread").attributes, match.type_of("spread").rank - 1
    assert isinstance(attributes, Broadcast)
    is_of_classes = attributes.axes == (last,) and match.type_of("bias").shape == (
        match.type_of("spread").shape[-1],
    )
    return is_of_classes and is_large_linear(match)


def is_widened_large_biased_linear(match: Match) -> bool:
    """the cast is to more bytes; the bias has a number for each class; logits are large"""
    return is_widened_large_linear(match) and is_large_biased_linear(match)


def _loss_of_rows(match: Match, builder: GraphBuilder) -> Value:
    return _head(match, builder, rounded=False)


def _loss_of_rounded_rows(match: Match, builder: GraphBuilder) -> Value:
    return _head(match, builder, rounded=True)


def _head(match: Match, builder: GraphBuilder, rounded: bool) -> Value:
    """The loss of each row, rows in the shape that they have."""
    assert isinstance(match.root.attributes, c.CrossEntropy)
    attributes = c.HeadCrossEntropy(match.root.attributes.label_smoothing, rounded)
    shape, width = match.type.shape, match.type_of("x").shape[-1]
    count = math.prod(shape)
    flat = _reshaped(match, builder, match["x"], (count, width))
    targets = _reshaped(match, builder, match["targets"], (count,))
    bias = [match["bias"]] if "bias" in match.values else []
    operands = (flat, match["weight"], targets, *bias)
    (rows,) = builder.add(c.LINEAR_CROSS_ENTROPY, attributes, operands, match.root.origin)
    return _reshaped(match, builder, rows, shape)


def _reshaped(match: Match, builder: GraphBuilder, value: Value, shape: tuple[int, ...]) -> Value:
    if builder.type_of(value).shape == shape:
        return value
    return builder.add(RESHAPE, Reshape(shape), (value,), match.root.origin)[0]


HEAD = Rule(
    "linear_cross_entropy",
    "The cross-entropy of x · weightᵀ is that of a linear head.",
    apply(c.CROSS_ENTROPY, _LOGITS, Anything("targets")),
    _loss_of_rows,
    is_large_linear,
    Exactness.ROUNDING,
)

ROUNDED_HEAD = Rule(
    "rounded_linear_cross_entropy",
    "The cross-entropy of x · weightᵀ, widened, is that of a head with rounded logits.",
    apply(c.CROSS_ENTROPY, _WIDE_LOGITS, Anything("targets")),
    _loss_of_rounded_rows,
    is_widened_large_linear,
    Exactness.ROUNDING,
)

BIASED_HEAD = Rule(
    "biased_linear_cross_entropy",
    "The cross-entropy of x · weightᵀ + bias is that of a linear head with a bias.",
    apply(c.CROSS_ENTROPY, _BIASED, Anything("targets")),
    _loss_of_rows,
    is_large_biased_linear,
    Exactness.ROUNDING,
)

ROUNDED_BIASED_HEAD = Rule(
    "rounded_biased_linear_cross_entropy",
    "The cross-entropy of x · weightᵀ + bias, widened, is that of a head with rounded logits.",
    apply(c.CROSS_ENTROPY, _WIDE_BIASED, Anything("targets")),
    _loss_of_rounded_rows,
    is_widened_large_biased_linear,
    Exactness.ROUNDING,
)

HEADS = RuleSet("heads", (HEAD, ROUNDED_HEAD, BIASED_HEAD, ROUNDED_BIASED_HEAD))


def recognise_heads(graph: Graph, target: Target, fired: Counter[str] | None = None) -> Graph:
    """The graph with `linear_cross_entropy` where the target asks for it."""
    return rewrite(graph, HEADS, target, fired) if target.rewriting.fuses_heads else graph
