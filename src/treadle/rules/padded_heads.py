"""Heads of attention filled up with zeros, where a library takes whole packs of elements alone.

Zeros add nothing to a product of queries and keys. Columns of zeros in the values are columns of
zeros in the result, which are left out again.
"""

from __future__ import annotations

from treadle.ir import composites as c
from treadle.ir.graph import GraphBuilder, Output, OutputKind, Value
from treadle.ir.ops.leaves import INPUT, Leaf
from treadle.ir.ops.shaping import PAD, SLICE, Pad, Slice
from treadle.rules.pattern import apply
from treadle.rules.rule import Body, Exactness, Match, Rule

# Which operands have heads: neither logarithms of sums nor a bias.
_HEADS = {c.ATTENTION: (0, 1, 2), c.ATTENTION_GRAD: (0, 1, 3, 4, 5)}


def has_odd_heads(match: Match) -> bool:
    """a library computes attention of narrow floats, and heads are no whole packs of elements"""
    types = tuple(map(match.graph.type_of, match.root.operands))
    limits = match.target.matmuls
    widths = [types[i].shape[3] for i in _HEADS[match.root.op]]
    is_odd = any(n % limits.pack for n in widths)
    fits = all(_filled(n, limits.pack) <= limits.most_depth for n in widths)
    return match.target.has_attention and types[0].dtype.is_narrow and is_odd and fits


def _filled(width: int, pack: int) -> int:
    return -(-width // pack) * pack


def _padded(match: Match, builder: GraphBuilder) -> Body:
    """The same composite over wider heads, and of its results the columns that there were."""
    inner, pack, operands = GraphBuilder(), match.target.matmuls.pack, list[Value]()
    for i, operand in enumerate(match.root.operands):
        type_ = match.graph.type_of(operand)
        (value,) = inner.add(INPUT, Leaf(str(i), type_), ())
        more = _filled(type_.shape[-1], pack) - type_.shape[-1]
        if i in _HEADS[match.root.op] and more:
            pad = Pad((0, 0, 0, 0), (0, 0, 0, more), (0, 0, 0, 0))
            (value,) = inner.add(PAD, pad, (value,))
        operands.append(value)
    results = inner.add(match.root.op, match.root.attributes, operands, match.root.origin)
    outputs: list[Output] = []
    for i, (value, wanted) in enumerate(zip(results, match.root.types, strict=True)):
        whole, shape = inner.type_of(value) == wanted, wanted.shape
        part = Slice((0,) * len(shape), shape, (1,) * len(shape))
        kept = value if whole else inner.add(SLICE, part, (value,))[0]
        outputs.append(Output(OutputKind.RESULT, str(i), kept))
    return Body(inner.build(outputs, match.root.op.name), match.root.operands)


PADDED_HEADS = Rule(
    "padded_heads",
    "Attention is a part of attention with wider heads, filled up with zeros.",
    apply(frozenset(_HEADS)),
    _padded,
    has_odd_heads,
    Exactness.ROUNDING,
)
