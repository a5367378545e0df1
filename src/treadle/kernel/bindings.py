"""What every buffer of a program holds: a graph's value in some layout, a copy, or partial sums.

A binding is stated by the schedule, beside the kernels that fill the buffer and those that read it.
Without it nothing could be checked: a kernel is compared with the graph between what its inputs
hold and what its outputs hold. Everything here is plain data, so that another program can read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from treadle.base.errors import GraphError
from treadle.ir.graph import Graph
from treadle.ir.graph import Value as TensorValue
from treadle.kernel.index import Index, Var
from treadle.kernel.nodes import Within


@dataclass(frozen=True, slots=True)
class Whole:
    """All elements of a value: axes in this order in memory, rows a pitch apart."""

    order: tuple[int, ...] = ()  # none: as they are counted
    pitch: int = 0  # elements from row to row; 0: as many as a row has

    def __str__(self) -> str:
        order = f" in the order {self.order}" if self.order else ""
        return order + (f", rows {self.pitch} apart" if self.pitch else "")


@dataclass(frozen=True, slots=True)
class Elements:
    """Where elements lie: at `address` the one at `element`, for all values of the variables.

    Where a guard does not hold there is a zero.
    """

    variables: tuple[Var, ...]
    address: Index
    element: tuple[Index, ...]
    guards: tuple[Within, ...] = ()

    def __str__(self) -> str:
        loops = ", ".join(f"{v}<{v.extent}" for v in self.variables)
        where = ", ".join(map(str, self.element))
        held = "".join(f" if {g}" for g in self.guards)
        return f"[{where}]{held} at {self.address} for {loops}"


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements of a value, in an order of its own: packed weights, operands of a library."""

    elements: Elements

    def __str__(self) -> str:
        return f" copied: {self.elements}"


# Terms of a part up to which its spread, computed from differences d to the first term, is positive
# whatever is rounded. Of n terms Σ d² is at most n times the spread, and Σ d² − (Σ d)² / n is off
# by less than 3 n u of that, u = 2⁻²⁴. In longer parts 0 replaces what rounding makes negative.
SURE_SPREAD = 1024


@dataclass(frozen=True, slots=True)
class Partial:
    """What the terms of a sum give in parts: `op` over the summed variables, at each address.

    The value is a reduction, whose terms are its operand's elements, or a contraction, whose terms
    are products: `element` has the indices of its result, then those along its depth. The op
    "spread" is the sum of squared differences from the part's own mean, at least 0 where a part is
    long (`SURE_SPREAD`).
    """

    elements: Elements
    summed: tuple[Var, ...]
    op: str = "add"

    def __str__(self) -> str:
        over = ", ".join(f"{v}<{v.extent}" for v in self.summed)
        return f" in parts: {self.op} over {over or 'nothing'} of terms {self.elements}"


ITERATION = "iteration"  # of a repeat over parts of buffers: a variable of what these hold


@dataclass(frozen=True, slots=True)
class Work:
    """Numbers of an algorithm, between what its node is given and what it gives."""

    purpose: str

    def __str__(self) -> str:
        return f" on the way: {self.purpose}"


@dataclass(frozen=True, slots=True)
class Runs(Work):
    """What a sort by merges has on its way: lines one after another, each as runs in order.

    Runs of `width` elements are the first that are stored. From one side to the other and back a
    run becomes four times as long.
    """

    width: int = 1

    def __str__(self) -> str:
        return f" on the way: runs of {self.width}"

    def after(self, stores: int) -> Runs:
        """What is there once runs were stored so many times more."""
        return replace(self, width=self.width * 4**stores)


@dataclass(frozen=True, slots=True)
class Starts(Work):
    """How many of the ascending indices of a scattered sum lie below each row, and below all."""


Content = Whole | Copy | Partial | Work


@dataclass(frozen=True, slots=True)
class Binding:
    """What a buffer holds: of a value of the graph of a scope, the program's or a scan's body.

    A leaf that is updated has two, the second from its update on. A body's value is in the same
    buffer at every iteration, or in the iteration's row of it.
    """

    buffer: str
    scope: str
    value: TensorValue
    content: Content

    def __str__(self) -> str:
        return (
            f"{self.buffer} holds {self.scope}%{self.value.node}.{self.value.output}{self.content}"
        )

    @property
    def record(self) -> dict[str, object]:
        """As JSON has it."""
        return {
            "buffer": self.buffer,
            "scope": self.scope,
            "value": list(self.value),
            "holds": type(self.content).__name__.lower(),
            "how": str(self.content).strip(),
        }


@dataclass(frozen=True, slots=True, eq=False)
class Bindings:
    """All bindings of a program, and the graphs whose values they name: the program's is ''."""

    graphs: tuple[tuple[str, Graph], ...] = ()
    every: tuple[Binding, ...] = ()

    def of(self, buffer: str) -> list[Binding]:
        return [b for b in self.every if b.buffer == buffer]

    def restricted(self, buffers: Iterable[str]) -> Bindings:
        """Those of some buffers."""
        wanted = set(buffers)
        return Bindings(self.graphs, tuple(b for b in self.every if b.buffer in wanted))

    def with_copies(self, copies: Mapping[str, str]) -> Bindings:
        """With buffers, by those that hold the same."""
        found = (replace(b, buffer=copies[b.buffer]) for b in self.every if b.buffer in copies)
        return Bindings(self.graphs, (*self.every, *found))

    def check(self, buffers: Iterable[str]) -> None:
        """A GraphError that names the buffers of which nothing is said."""
        known = {b.buffer for b in self.every}
        missing = [name for name in buffers if name not in known]
        if missing:
            raise GraphError("verify", f"nothing says what {', '.join(missing)} hold")
