"""Products of 8-bit floats where no library multiplies them: bfloat16 holds all of their values."""

from __future__ import annotations

from treadle.base.dtypes import FLOAT8, bfloat16
from treadle.ir.graph import GraphBuilder, Value
from treadle.ir.ops.elementwise import CAST, Cast
from treadle.ir.ops.linear import CONTRACT
from treadle.kernel.contraction import contraction_of, is_float8_for_library
from treadle.rules.pattern import Anything, apply
from treadle.rules.rule import Exactness, Match, Rule


def is_float8_elsewhere(match: Match) -> bool:
    """operands are floats of 8 bits, and the target's library does not multiply them so"""
    types = match.type_of("a"), match.type_of("b")
    if types[0].dtype not in FLOAT8:
        return False
    found = contraction_of(match.graph, match.root)
    return not is_float8_for_library(found, types, match.target.matmuls)


def _widened(match: Match, builder: GraphBuilder) -> Value:
    origin = match.root.origin
    wide = [builder.add(CAST, Cast(bfloat16), (match[n],), origin)[0] for n in ("a", "b")]
    return builder.add(CONTRACT, match.root.attributes, wide, origin)[0]


WIDENED_FLOAT8 = Rule(
    "widened_float8",
    "A product of 8-bit floats is the product of the same numbers in bfloat16.",
    apply(CONTRACT, Anything("a"), Anything("b")),
    _widened,
    is_float8_elsewhere,
    Exactness.ROUNDING,
)
