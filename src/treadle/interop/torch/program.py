"""An exported program as frozen values: calls of rows, run on whatever tensors it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treadle.base.dtypes import DType
from treadle.base.errors import ArgumentError, ShapeError
from treadle.frontend.coerce import as_tensor, cast
from treadle.frontend.tensor import Tensor

Size = int | str  # one that may differ from call to call has a name


@dataclass(frozen=True, slots=True)
class Ref:
    """The value with this number: inputs come first, then calls in their order."""

    index: int


@dataclass(frozen=True, slots=True)
class Known:
    """The type that PyTorch found for a tensor."""

    shape: tuple[Size, ...]
    dtype: DType

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether all sizes that are numbers are these."""
        pairs = zip(self.shape, shape, strict=False)
        return len(self.shape) == len(shape) and all(isinstance(a, str) or a == b for a, b in pairs)


@dataclass(frozen=True, slots=True)
class Call:
    """A row with its arguments, among which are references; and what PyTorch says it gives."""

    op: str
    row: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    known: Known | tuple[Known | None, ...] | None


@dataclass(frozen=True, slots=True)
class Program:
    """Calls in order. `results` are references, or plain values."""

    inputs: int
    calls: tuple[Call, ...]
    results: tuple[Any, ...]

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        assert len(inputs) == self.inputs
        values = list(inputs)
        for call in self.calls:
            arguments = [_filled(a, values) for a in call.arguments]
            keywords = {k: _filled(v, values) for k, v in call.keywords.items()}
            values.append(_typed(call, call.row(*arguments, **keywords)))
        return [_filled(r, values) for r in self.results]


def _filled(part: Any, values: Sequence[Any]) -> Any:
    """Values in place of references."""
    if isinstance(part, Ref):
        return values[part.index]
    if isinstance(part, (list, tuple)):
        return [_filled(p, values) for p in part]
    return part


def _typed(call: Call, found: Any) -> Any:
    """Results in the dtypes of PyTorch's; another shape is a row's mistake, or an input's."""
    known = call.known
    if isinstance(known, Known):
        return _as_known(call, known, found)
    if known is None or not isinstance(found, (list, tuple)):
        return found
    pairs = zip(found, known, strict=False)
    return [f if k is None or f is None else _as_known(call, k, f) for f, k in pairs]


def _as_known(call: Call, known: Known, found: Any) -> Any:
    if found is None:
        cause = f"{call.op} reads a result of an op that is not computed here"
        raise ArgumentError("from_module", cause, "Write the model without it.")
    if not isinstance(found, Tensor):
        return found
    if not known.fits(found.shape):
        raise ShapeError(
            "from_module",
            f"{call.op} gives {found.type}, and gave {known} when it was exported",
            "Sizes that change from call to call are named in `dynamic`.",
        )
    return cast(as_tensor(found), known.dtype)
