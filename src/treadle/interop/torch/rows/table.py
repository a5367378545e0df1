"""The table: an ATen op's name and overload to a function over Treadle's tensors.

A row takes the arguments of the op's schema: what is positional there by position, the rest by
name. Tensors are Treadle's, dtypes too, sizes are Python's integers, and devices, layouts and
memory formats are left out. It may return another dtype than PyTorch does: results are cast to what
the exported program says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Row = Callable[..., Any]
F = TypeVar("F", bound=Row)

ROWS: dict[str, Row] = {}  # by name and overload: "add.Tensor", or "operator.add"


def aten(*names: str) -> Callable[[F], F]:
    """Declare one function for some ops; a name without an overload is the default one."""

    def declared(function: F) -> F:
        for name in names:
            declare(name, function)
        return function

    return declared


def declare(name: str, function: Row) -> None:
    whole = name if "." in name else f"{name}.default"
    assert whole not in ROWS, whole
    ROWS[whole] = function


def declare_all(functions: Mapping[str, Row]) -> None:
    """Ops that are functions of Treadle under the names on the left."""
    for name, function in functions.items():
        declare(name, function)
