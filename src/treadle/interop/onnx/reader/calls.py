"""The table of ONNX's operators, and what one is called with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treadle.base.errors import LoadError, ShapeError
from treadle.base.shapes import normal_axis
from treadle.frontend.tensor import Tensor
from treadle.interop.onnx.reader.program import Attribute, Body

# A value is an array that is known while tracing, a tensor of the trace, a sequence of those, or
# an optional operand that is left out.
Value = Any
STATIC = 1 << 20  # elements of an array that an operator may make while tracing
RunBody = Callable[[Body, Sequence[Value]], list[Value]]


@dataclass(frozen=True)
class Call:
    """One use of an operator: its attributes, which outputs are read, and how to run a body.

    `spend` counts work as so many steps of a program, for what few bytes of a file can ask for.
    """

    op: str
    attributes: Mapping[str, Attribute]
    outputs: tuple[str, ...]
    opset: int
    run_body: RunBody
    spend: Callable[[int], None]

    def has(self, name: str) -> bool:
        return name in self.attributes

    def integer(self, name: str, default: int | None = None) -> int:
        return self._of(name, int, default)

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self._of(name, int, int(default)))

    def real(self, name: str, default: float | None = None) -> float:
        return float(self._of(name, (float, int), default))

    def text(self, name: str, default: str | None = None) -> str:
        return self._of(name, str, default)

    def integers(self, name: str, default: Sequence[int] | None = None) -> tuple[int, ...]:
        return tuple(self._of(name, tuple, default))

    def reals(self, name: str, default: Sequence[float] | None = None) -> tuple[float, ...]:
        return tuple(self._of(name, tuple, default))

    def texts(self, name: str, default: Sequence[str] | None = None) -> tuple[str, ...]:
        return tuple(self._of(name, tuple, default))

    def body(self, name: str) -> Body:
        return self._of(name, Body, None)

    def choice(self, name: str, default: str, known: Sequence[str]) -> str:
        found = self.text(name, default)
        if found not in known:
            raise self.refuse(f"{name} is {found[:40]!r}", f"{', '.join(known)} are read.")
        return found

    def is_read(self, output: int) -> bool:
        return output < len(self.outputs) and bool(self.outputs[output])

    def _of(self, name: str, kind: Any, default: Any) -> Any:
        found = self.attributes.get(name, default)
        if found is None or not (isinstance(found, kind) or found is default):
            shown = "is missing" if found is None else f"is {str(found)[:80]!r}"
            raise self.refuse(f"the attribute {name!r} {shown}")
        return found

    def refuse(self, cause: str, remedy: str = "") -> LoadError:
        return LoadError(self.op, cause, remedy)

    def static(self, value: Value, what: str) -> np.ndarray:
        """An operand that must be known while tracing."""
        if not isinstance(value, np.ndarray):
            shown = "missing" if value is None else "computed from the inputs"
            remedy = "Sizes, axes and the like must be constants, or follow from sizes."
            raise self.refuse(f"{what} is {shown}", remedy)
        return value

    def whole(self, value: Value, what: str) -> tuple[int, ...]:
        """An operand of integers that must be known."""
        array = self.static(value, what)
        if array.dtype.kind not in "iu" or array.ndim > 1 or array.size > 1000:
            raise self.refuse(f"{what} is {array.dtype}{list(array.shape)}", "A few integers are.")
        return tuple(int(n) for n in array.reshape(-1))

    def number(self, value: Value, what: str) -> float:
        array = self.static(value, what)
        if array.size != 1:
            raise self.refuse(f"{what} has the shape {array.shape}", "It is one number.")
        return array.reshape(-1)[0].item()

    def axis(self, axis: int, rank: int) -> int:
        found = normal_axis(axis, rank)
        if found is None:
            raise self.refuse(f"axis {axis} of {rank}")
        return found

    def axes(self, axes: Sequence[int], rank: int) -> tuple[int, ...]:
        found = tuple(self.axis(a, rank) for a in axes)
        if len(set(found)) != len(found):
            raise self.refuse(f"axes {tuple(axes)[:32]} name one twice")
        return found

    def bounded(self, *sizes: int) -> None:
        """Refuses an array of more elements than are made while tracing."""
        if any(n < 0 for n in sizes) or math.prod(sizes) > STATIC:
            raise self.refuse(f"an array of the sizes {sizes} would be made while tracing")


Operator = Callable[..., Any]  # of a call and its operands
OPERATORS: dict[str, Operator] = {}


def operator(*names: str) -> Callable[[Operator], Operator]:
    def add(function: Operator) -> Operator:
        for name in names:
            assert name not in OPERATORS, f"operator {name} is given twice"
            OPERATORS[name] = function
        return function

    return add


def shape_of(value: Value) -> tuple[int, ...]:
    if isinstance(value, (Tensor, np.ndarray)):
        return value.shape
    raise ShapeError("onnx", "a sequence or nothing stands where a tensor should")


def rank_of(value: Value) -> int:
    return len(shape_of(value))
