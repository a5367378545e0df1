"""`Tensor`: one value of a trace, or an eager array. Operators are those of NumPy and PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from treadle.base.arrays import rounded
from treadle.base.dtypes import DType
from treadle.base.elsewhere import TENSOR, unknown
from treadle.base.errors import AxisError, DTypeError, ShapeError, TraceError, UnknownNameError
from treadle.base.shapes import Shape
from treadle.ir.op import Attributes, Op
from treadle.ir.types import TensorType


class Scope(Protocol):
    """Where tensors live and ops are applied: a trace, or the eager oracle."""

    @property
    def title(self) -> str: ...

    @property
    def depth(self) -> int:
        """How deeply nested; 0 is eager."""
        ...

    @property
    def parent(self) -> Scope | None: ...

    def apply(
        self, op: Op, attributes: Attributes, operands: Sequence[Tensor]
    ) -> tuple[Tensor, ...]: ...

    def adopt(self, tensor: Tensor) -> Tensor:
        """A tensor of this scope for one of an enclosing scope."""
        ...


def _refused_change(operation: str) -> TraceError:
    return TraceError(
        operation,
        "tensors do not change: they are values of a program",
        "Make a new one: td.where(mask, value, x), td.dynamic_update_slice(x, update, starts) or "
        "td.scatter_add(x, indices, updates).",
    )


def _no_change_in_place(name: str, plain: str) -> UnknownNameError:
    return UnknownNameError(
        name, "tensors do not change: they are values of a program", f"Write x = x.{plain}(...)."
    )


class Operators:
    """Operators and methods of everything that is or stands for a tensor."""

    __slots__ = ()
    __array_ufunc__ = None  # NumPy arrays on the left leave operators to us
    __hash__ = object.__hash__

    def __setitem__(self, index: Any, value: Any) -> None:
        raise _refused_change("x[...] = value")

    def __delitem__(self, index: Any) -> None:
        raise _refused_change("del x[...]")

    if not TYPE_CHECKING:  # mypy would take every name for one that is there

        def __getattr__(self, name: str) -> object:
            if name in TENSOR:
                raise unknown(type(self).__name__, name, TENSOR)
            plain = name.removesuffix("_")
            if name != plain and not name.startswith("_") and plain in dir(Operators):
                raise _no_change_in_place(name, plain)
            return object.__getattribute__(self, name)  # raises what it raised before

    if TYPE_CHECKING:
        # Attached by frontend/methods.py, which knows the functions; these are their signatures.
        def __add__(self, other: Operand) -> Tensor: ...
        def __radd__(self, other: Operand) -> Tensor: ...
        def __sub__(self, other: Operand) -> Tensor: ...
        def __rsub__(self, other: Operand) -> Tensor: ...
        def __mul__(self, other: Operand) -> Tensor: ...
        def __rmul__(self, other: Operand) -> Tensor: ...
        def __truediv__(self, other: Operand) -> Tensor: ...
        def __rtruediv__(self, other: Operand) -> Tensor: ...
        def __floordiv__(self, other: Operand) -> Tensor: ...
        def __rfloordiv__(self, other: Operand) -> Tensor: ...
        def __mod__(self, other: Operand) -> Tensor: ...
        def __rmod__(self, other: Operand) -> Tensor: ...
        def __pow__(self, other: Operand) -> Tensor: ...
        def __rpow__(self, other: Operand) -> Tensor: ...
        def __matmul__(self, other: Operand) -> Tensor: ...
        def __rmatmul__(self, other: Operand) -> Tensor: ...
        def __neg__(self) -> Tensor: ...
        def __abs__(self) -> Tensor: ...
        def __invert__(self) -> Tensor: ...
        def __and__(self, other: Operand) -> Tensor: ...
        def __rand__(self, other: Operand) -> Tensor: ...
        def __or__(self, other: Operand) -> Tensor: ...
        def __ror__(self, other: Operand) -> Tensor: ...
        def __xor__(self, other: Operand) -> Tensor: ...
        def __rxor__(self, other: Operand) -> Tensor: ...
        def __eq__(self, other: Operand) -> Tensor: ...  # type: ignore[override]
        def __ne__(self, other: Operand) -> Tensor: ...  # type: ignore[override]
        def __lt__(self, other: Operand) -> Tensor: ...
        def __le__(self, other: Operand) -> Tensor: ...
        def __gt__(self, other: Operand) -> Tensor: ...
        def __ge__(self, other: Operand) -> Tensor: ...
        def __getitem__(self, index: Any) -> Tensor: ...
        @property
        def T(self) -> Tensor: ...
        def astype(self, dtype: object) -> Tensor: ...
        def reshape(self, *shape: Any) -> Tensor: ...
        def permute(self, *axes: Any) -> Tensor: ...
        def transpose(self, first: int, second: int) -> Tensor: ...
        def flatten(self, start: int = 0, stop: int = -1) -> Tensor: ...
        def squeeze(self, axis: Axes = None) -> Tensor: ...
        def unsqueeze(self, axis: int) -> Tensor: ...
        def sum(self, axis: Axes = None, keepdims: bool = False) -> Tensor: ...
        def mean(self, axis: Axes = None, keepdims: bool = False) -> Tensor: ...
        def var(self, axis: Axes = None, correction: int = 1, keepdims: bool = False) -> Tensor: ...
        def max(self, axis: Axes = None, keepdims: bool = False) -> Tensor: ...
        def min(self, axis: Axes = None, keepdims: bool = False) -> Tensor: ...
        def prod(self, axis: Axes = None, keepdims: bool = False) -> Tensor: ...
        def argmax(self, axis: int | None = None, keepdims: bool = False) -> Tensor: ...
        def argmin(self, axis: int | None = None, keepdims: bool = False) -> Tensor: ...


class Size(int):
    """How many elements there are; called, as PyTorch does, the shape or one size of it."""

    shape: Shape

    def __call__(self, axis: int | None = None) -> Shape | int:
        if axis is None:
            return self.shape
        if not -len(self.shape) <= axis < len(self.shape):
            raise AxisError(
                "size",
                f"axis {axis} of a tensor of shape {self.shape} does not exist",
                f"There are {len(self.shape)} axes.",
            )
        return self.shape[axis]


class Tensor(Operators):
    """A typed value. Inside a trace it has no numbers yet; an eager one (`td.tensor`) has."""

    __slots__ = ("__weakref__", "handle", "scope", "type")

    def __init__(self, scope: Scope, type: TensorType, handle: Any):
        self.scope = scope
        self.type = type
        self.handle = handle  # a graph Value in a trace, an array when eager

    @property
    def shape(self) -> Shape:
        """The sizes of the axes."""
        return self.type.shape

    @property
    def dtype(self) -> DType:
        """The type of the elements."""
        return self.type.dtype

    @property
    def ndim(self) -> int:
        """How many axes there are."""
        return self.type.rank

    @property
    def size(self) -> Size:
        """How many elements there are; `x.size(0)` is PyTorch's spelling of `x.shape[0]`."""
        count = Size(self.type.size)
        count.shape = self.shape
        return count

    def __len__(self) -> int:
        if not self.shape:
            raise TraceError(
                "len", f"{self.type} has no axes", "Only tensors with an axis have a length."
            )
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def numpy(self) -> np.ndarray:
        """The values of an eager tensor, in its dtype."""
        return rounded(self._concrete("numpy()"), self.dtype.numpy)

    def tolist(self) -> Any:
        """The values of an eager tensor, as nested lists."""
        return self.numpy().tolist()

    def item(self) -> bool | int | float:
        """The one value of an eager tensor."""
        return self._scalar("item()")

    def _scalar(self, what: str) -> bool | int | float:
        values = rounded(self._concrete(what), self.dtype.numpy)
        if values.size != 1:
            raise ShapeError(
                what, f"{self.type} has {values.size} elements, not one", "Reduce or index it."
            )
        value: bool | int | float = values.item()
        return value

    def _concrete(self, what: str) -> np.ndarray:
        if not isinstance(self.handle, np.ndarray):
            raise TraceError(
                what,
                f"the tensor {self.type} is traced: it stands for a value that does not exist yet",
                "Choose between tensors with td.where or td.cond, repeat with td.while_loop; look "
                "at values with td.debug_print or td.capture; index an array by it as "
                "td.tensor(array)[x]; or call the function with td.tensor(...) to run it eagerly.",
            )
        return self.handle

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = rounded(self._concrete("np.asarray"), self.dtype.numpy)
        return array if dtype is None else array.astype(dtype)

    def __bool__(self) -> bool:
        return bool(self._scalar("bool() of a tensor, as in `if` or `while`"))

    def __int__(self) -> int:
        return int(self._scalar("int() of a tensor"))

    def __float__(self) -> float:
        return float(self._scalar("float() of a tensor"))

    def __index__(self) -> int:
        what = "a tensor as a Python index"
        value = self._scalar(what)
        if not self.dtype.is_integer:
            raise DTypeError(what, f"{self.type} is not an integer", "Cast it, or use int(x).")
        return int(value)

    def __repr__(self) -> str:
        if isinstance(self.handle, np.ndarray):
            return f"tensor({np.array2string(self.numpy(), separator=', ')}, {self.type})"
        return f"Tensor({self.type})"


class Placeholder(Operators):
    """Something that stands for a tensor where it is used: a parameter, a state, a mean."""

    def tensor(self) -> Tensor:
        """The tensor it stands for in the current trace."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.tensor())

    def __bool__(self) -> bool:
        return bool(self.tensor())

    def __int__(self) -> int:
        return int(self.tensor())

    def __float__(self) -> float:
        return float(self.tensor())

    def __index__(self) -> int:
        return self.tensor().__index__()

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensor())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.tensor().__array__(dtype, copy)


Scalar = bool | int | float | Fraction
Operand = Tensor | Placeholder | Scalar | np.ndarray | np.generic | Sequence[Any]
Axes = int | Sequence[int] | None
