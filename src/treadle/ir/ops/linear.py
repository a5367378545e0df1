"""`contract`, every product; `window` and its adjoint, which convolution and pooling use."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.base.dtypes import FLOAT8, DType
from treadle.base.errors import ArgumentError, AxisError, DTypeError, ShapeError
from treadle.base.shapes import Shape, windows
from treadle.ir.contract import Contract, Determinism, Exact, SumError
from treadle.ir.op import Attributes, Op, Precision, Types, declare
from treadle.ir.types import TensorType

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Contraction(Attributes):
    """A product of two tensors by labelled axes, like "abc,dc->abd", and the dtype of the result.

    A label stands at most once in each place and in at least two of the three. In both operands and
    the result it is a batch axis, in both operands only it is summed.
    """

    spec: str
    dtype: DType

    @property
    def labels(self) -> tuple[str, str, str]:
        operands, result = self.spec.split("->")
        x, y = operands.split(",")
        return x, y, result


@dataclass(frozen=True, slots=True)
class Window(Attributes):
    """Windows over `axes`: each becomes the window's position; the window's own axes come last."""

    axes: Ints
    sizes: Ints
    strides: Ints
    dilations: Ints

    def starts(self, shape: Shape) -> Ints:
        """How many windows there are along each of `axes`."""
        parts = zip(self.axes, self.sizes, self.strides, self.dilations, strict=True)
        return tuple(windows(shape[a], k, s, d) for a, k, s, d in parts)

    def windowed_shape(self, shape: Shape) -> Shape:
        counts = dict(zip(self.axes, self.starts(shape), strict=True))
        return (*(counts.get(i, n) for i, n in enumerate(shape)), *self.sizes)


@dataclass(frozen=True, slots=True)
class Unwindow(Attributes):
    """The adjoint of `window` on a tensor of `shape`: overlapping elements are added."""

    window: Window
    shape: Shape


def canonical_spec(x: str, y: str, result: str) -> str:
    """The same contraction with labels a, b, c, … in order of first appearance."""
    names: dict[str, str] = {}
    for label in x + y + result:
        names.setdefault(label, _LABELS[len(names)])
    renamed = ["".join(names[c] for c in labels) for labels in (x, y, result)]
    return f"{renamed[0]},{renamed[1]}->{renamed[2]}"


_LABELS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _contract_type(attributes: Contraction, x: TensorType, y: TensorType) -> Types:
    spec = attributes.spec
    lx, ly, lr = attributes.labels
    if len(lx) != x.rank or len(ly) != y.rank:
        raise ShapeError("contract", f"{spec!r} does not fit {x} and {y}")
    for labels in (lx, ly, lr):
        if len(set(labels)) != len(labels):
            raise ArgumentError("contract", f"a label repeats within {labels!r} of {spec!r}")
    for label in set(lx + ly + lr):
        if (label in lx) + (label in ly) + (label in lr) < 2:
            raise ArgumentError(
                "contract", f"label {label!r} stands alone in {spec!r}", "Sum it first."
            )
    are_float8 = x.dtype in FLOAT8 and y.dtype in FLOAT8
    if x.dtype is not y.dtype and not are_float8:
        raise DTypeError("contract", f"dtypes differ: {x} and {y}", "Cast one of them.")
    least = 16 if are_float8 else x.dtype.bits  # a float of 8 bits holds no sum
    if attributes.dtype.kind != x.dtype.kind or attributes.dtype.bits < least:
        raise DTypeError("contract", f"{x} cannot give {attributes.dtype}")
    sizes = dict(zip(lx, x.shape, strict=True))
    for label, n in zip(ly, y.shape, strict=True):
        if sizes.setdefault(label, n) != n:
            raise ShapeError(
                "contract", f"{spec!r} of {x} and {y}: {label} is {sizes[label]} and {n}"
            )
    return (TensorType(tuple(sizes[c] for c in lr), attributes.dtype),)


def _check_window(window: Window, shape: Shape) -> None:
    lengths = {len(window.axes), len(window.sizes), len(window.strides), len(window.dilations)}
    if len(lengths) != 1 or any(not 0 <= a < len(shape) for a in window.axes):
        raise AxisError("window", f"{window} does not fit the shape {shape}")
    if list(window.axes) != sorted(set(window.axes)):
        raise AxisError("window", f"axes {window.axes} are not ascending and distinct")
    if min((*window.sizes, *window.strides, *window.dilations), default=1) < 1:
        raise ArgumentError("window", f"sizes, strides and dilations must be at least 1: {window}")
    if any(n == 0 for n in window.starts(shape)):
        raise ShapeError(
            "window", f"no window of {window.sizes} fits into {shape}", "Pad, or use a smaller one."
        )


def _window_type(attributes: Window, x: TensorType) -> Types:
    _check_window(attributes, x.shape)
    return (x.with_shape(attributes.windowed_shape(x.shape)),)


def _unwindow_type(attributes: Unwindow, x: TensorType) -> Types:
    _check_window(attributes.window, attributes.shape)
    expected = attributes.window.windowed_shape(attributes.shape)
    if x.shape != expected:
        raise ShapeError("unwindow", f"{x} is not {expected}, the windows of {attributes.shape}")
    return (x.with_shape(attributes.shape),)


CONTRACT = declare(
    Op(
        "contract",
        Contraction,
        _contract_type,
        Precision.NARROW,
        Contract(SumError(), "all values; integers wrap; narrow floats accumulate in float32"),
    )
)
WINDOW = declare(
    Op(
        "window",
        Window,
        _window_type,
        Precision.FOLLOW,
        Contract(Exact(), "all values", "linear", Determinism.EVERYWHERE),
    )
)
UNWINDOW = declare(
    Op(
        "unwindow",
        Unwindow,
        _unwindow_type,
        Precision.FOLLOW,
        Contract(SumError(), "all values", "linear"),
    )
)
