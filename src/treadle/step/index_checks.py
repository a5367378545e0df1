"""Labels, tokens and other indices of a batch, looked at before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from treadle.base.errors import IndexRangeError
from treadle.base.shapes import size_of
from treadle.domains.index_ranges import IndexRange, index_ranges
from treadle.domains.piecewise import Intervals
from treadle.ir.graph import Graph
from treadle.nn.tracing import INPUT_PREFIX

# As unsigned numbers negative ones are larger than all others, so that one pass finds both. NumPy
# finds the position of the largest in half the time of its value.
UNSIGNED = {
    np.dtype(f"{kind}{n}"): (np.dtype(f"u{n}"), int(np.iinfo(f"{kind}{n}").max))
    for kind in "iu"
    for n in (1, 2, 4, 8)
}
_WHAT = {"cross_entropy": "classes", "linear_cross_entropy": "classes", "one_hot": "classes"}
_WHAT |= {"embedding": "rows", "gather": "elements along its axis"}

Part = tuple[slice, ...] | np.ndarray | None  # slices, flat positions, or all


class Check(NamedTuple):
    """A range, and how to find its elements in an array."""

    range: IndexRange
    part: Part
    most: int  # of the numbers from 0 on that are right; −1 if there is none

    def elements(self, array: np.ndarray) -> np.ndarray:
        if self.part is None:
            return array
        if isinstance(self.part, np.ndarray):
            return array.reshape(-1)[self.part]
        return array[self.part]


class IndexChecks:
    """What a program asks of the integers it is given."""

    def __init__(self, graph: Graph):
        shapes = {name: graph.nodes[at].types[0].shape for name, at in graph.leaves.items()}
        self.checks = tuple(
            Check(r, _part(r.positions, shapes[r.leaf]), _most(r.allowed))
            for r in index_ranges(graph)
        )

    def are_there(self, arrays: Mapping[str, Any]) -> bool:
        """Whether some are on a device, where the program has to look at them itself."""
        return any(type(arrays[c.range.leaf]) is not np.ndarray for c in self.checks)

    def check(self, operation: str, arrays: Mapping[str, Any]) -> None:
        """Raise for the first number on the host that is not right."""
        for check in self.checks:
            array = arrays[check.range.leaf]
            if type(array) is not np.ndarray:
                continue
            elements = array if check.part is None else check.elements(array)
            known = UNSIGNED.get(elements.dtype)
            if known is not None:
                numbers, most = elements.view(known[0]), known[1]
                largest = numbers.item(numbers.argmax())
                if largest <= check.most and largest <= most:
                    continue
            _look(operation, array, check)


class Looking(Protocol):
    """What is built from a graph, and what it asks of the integers of a batch."""

    @property
    def indices(self) -> IndexChecks: ...


NOTHING = IndexChecks(Graph((), ()))


def checks_of(graph: Graph, is_asked: bool) -> IndexChecks:
    """The checks of a graph, if they are asked for."""
    return IndexChecks(graph) if is_asked else NOTHING


def _most(allowed: Intervals) -> int:
    return next((high for low, high in allowed if low <= 0 <= high), -1)


def _part(positions: np.ndarray | None, shape: tuple[int, ...]) -> Part:
    """Slices where positions are some, which NumPy takes without a copy."""
    if positions is None:
        return None
    mask = np.zeros(size_of(shape), bool)
    mask[positions] = True
    mask = mask.reshape(shape)
    slices = []
    for axis in range(len(shape)):
        others = tuple(a for a in range(len(shape)) if a != axis)
        chosen = np.flatnonzero(mask.any(others))
        step = int(chosen[1] - chosen[0]) if len(chosen) > 1 else 1
        slices.append(slice(int(chosen[0]), int(chosen[-1]) + 1, step))
    found = tuple(slices)
    is_box = mask[found].all() and mask[found].size == len(positions)
    return found if is_box else positions


def _look(operation: str, array: np.ndarray, check: Check) -> None:
    """Raise for the first element that is not right, if there is one."""
    range_ = check.range
    is_right = np.zeros(array.shape, bool)
    for low, high in range_.allowed:
        is_right |= (array >= low) & (array <= high)
    is_wrong = ~is_right
    if range_.positions is not None:
        asked = np.zeros(array.size, bool)
        asked[range_.positions] = True
        is_wrong &= asked.reshape(array.shape)
    if is_wrong.any():
        index = tuple(int(i) for i in np.argwhere(is_wrong)[0])
        raise refusal(operation, range_, index, int(array[index]))


def refusal(
    operation: str, range_: IndexRange, index: tuple[int, ...], value: int
) -> IndexRangeError:
    """What is said of an index that is out of range."""
    name = range_.leaf.removeprefix(INPUT_PREFIX) or "the array"
    at = f"[{', '.join(map(str, index))}]" if index else ""
    op = range_.op.removesuffix("_grad")
    what = f"{op} has {range_.size} {_WHAT.get(op, 'elements along its axis')}"
    line = "" if range_.origin is None else f" at {range_.origin}"
    return IndexRangeError(
        operation, f"{name}{at} is {value}, and {what}{line}", remedy(op, range_.allowed)
    )


def remedy(op: str, allowed: Intervals) -> str:
    """Which numbers are right."""
    if not allowed:
        return "There is nothing to choose from."
    low, high = next((i for i in allowed if i[0] <= 0 <= i[1]), allowed[-1])
    others = [f"{a}" if a == b else f"{a} to {b}" for a, b in allowed if (a, b) != (low, high)]
    text = f"Count from {low} to {high}"
    if _WHAT.get(op) == "classes":
        text += ": LabelEncoder does that. If there are more classes, the model needs more scores"
    return f"{text}." + (f" Also right: {', '.join(others)}." if others else "")
