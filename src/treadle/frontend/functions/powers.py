"""Powers of floats and of integers."""

from __future__ import annotations

from treadle.frontend.coerce import align, constant
from treadle.frontend.coerce import cast as cast_to
from treadle.frontend.control import scan
from treadle.frontend.functions.arithmetic import (
    eq,
    floor_divide,
    lt,
    mul,
    numeric_dtype,
    remainder,
    where,
)
from treadle.frontend.functions.arithmetic import pow as power
from treadle.frontend.spelling import takes_dim
from treadle.frontend.tensor import Operand, Placeholder, Tensor

State = tuple[Tensor, Tensor, Tensor]


@takes_dim(exponent="y")
def pow(x: Operand, y: Operand) -> Tensor:
    """x to the power y. Small whole exponents become products, ½ a square root.

    Integers to the power of integers stay integers and wrap, as in PyTorch; below 0 the exponent
    gives 0, or ±1 for x = ±1. A number from −4 to −1 as the exponent gives a float32.
    """
    dtype = numeric_dtype(x, y)
    if dtype.is_float or not isinstance(y, (Tensor, Placeholder)):
        return power(x, y)
    return _whole_power(*align("pow", x, y, dtype=dtype))


def _whole_power(x: Tensor, y: Tensor) -> Tensor:
    """Products of squares of x, chosen by the bits of y."""

    def step(state: State, _: object) -> tuple[State, tuple[()]]:
        result, factor, rest = state
        chosen = where(eq(remainder(rest, 2), 1), mul(result, factor), result)
        return (chosen, mul(factor, factor), floor_divide(rest, 2)), ()

    start = constant(1, x.shape, x.dtype), x, where(lt(y, 0), 0, y)
    state, _ = scan(step, start, length=y.dtype.range()[1].bit_length())
    assert isinstance(state, tuple)
    result = state[0]
    assert isinstance(result, Tensor)
    if x.dtype.kind == "uint":
        return result
    sign = where(eq(remainder(y, 2), 1), -1, 1)
    below = where(eq(x, 1), 1, where(eq(x, -1), sign, 0))
    return where(lt(y, 0), cast_to(below, x.dtype), result)
