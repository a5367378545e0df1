"""Indices that are on a device already: the program looks at them itself.

It gives a flag with its results, and writes nothing where an index is out of range. The error comes
when a result is looked at, or some steps later: nobody waits for the flag alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from treadle.base.errors import IndexRangeError
from treadle.frontend.functions.arithmetic import ge, le, logical_and, logical_or, where
from treadle.frontend.functions.indexing import getitem, take
from treadle.frontend.functions.reductions import all as all_of
from treadle.frontend.functions.shaping import reshape
from treadle.frontend.scopes import isolated_tracing
from treadle.frontend.tensor import Tensor
from treadle.ir.graph import Graph, Output, OutputKind
from treadle.ir.ops.leaves import STATE
from treadle.ir.rewrite import inline_into
from treadle.pipeline import optimize
from treadle.runtime.executable import Executable
from treadle.runtime.session import Session
from treadle.step.index_checks import Check, IndexChecks, Looking

FLAG = "indices"  # the result that says whether all are in range
AHEAD = 3  # steps that may be on their way before an error: as many as a GPU is given at once


def guarded(graph: Graph, checks: IndexChecks) -> Graph:
    """A program with a flag as a further result; updates are the old values where it is false.

    One that asks for nothing stays as it is.
    """
    if not checks.checks:
        return graph
    nodes = {name: graph.nodes[at] for name, at in graph.leaves.items()}
    with isolated_tracing(graph.name) as trace:
        values = inline_into(trace.builder, graph, {})

        def leaf(name: str, type_: Any) -> Tensor:
            return trace.leaf(nodes[name].op if name in nodes else STATE, name, type_)

        flags = [
            _is_right(leaf(c.range.leaf, nodes[c.range.leaf].types[0]), c) for c in checks.checks
        ]
        is_fine = flags[0]
        for flag in flags[1:]:
            is_fine = logical_and(is_fine, flag)
        outputs: list[Output] = []
        for output, value in zip(graph.outputs, values, strict=True):
            tensor = trace.tensor(value)
            if output.kind is OutputKind.UPDATE:
                tensor = where(is_fine, tensor, leaf(output.name, tensor.type))
            outputs.append(Output(output.kind, output.name, tensor.handle))
        outputs.append(Output(OutputKind.RESULT, FLAG, is_fine.handle))
        return optimize(trace.finish_outputs(outputs), rewrite=False)


def _is_right(array: Tensor, check: Check) -> Tensor:
    """Whether every element that is asked for has a number that is allowed."""
    if isinstance(check.part, np.ndarray):
        array = take(reshape(array, (-1,)), check.part)
    elif check.part is not None:
        array = getitem(array, check.part)
    least, most = array.dtype.range()
    found = array != array
    for low, high in check.range.allowed:
        inside = [ge(array, low)] if low > least else []
        inside += [le(array, high)] if high < most else []
        found = logical_or(found, logical_and(*inside) if len(inside) == 2 else inside[0])
    return all_of(found)


class Guarded(Mapping[str, Any]):
    """A step's outputs, which are there only if its indices were in range."""

    def __init__(self, outputs: Mapping[str, Any], refuse: Callable[[], None]):
        self._outputs, self._refuse = outputs, refuse
        self._is_fine: bool | None = None
        self.is_told = False

    def look(self) -> None:
        """Raise if an index was out of range."""
        if self._is_fine is None:
            self._is_fine = bool(self._outputs[f"result:{FLAG}"])
        if not self._is_fine:
            self.is_told = True
            self._refuse()

    def __getitem__(self, name: str) -> Any:
        self.look()
        return self._outputs[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._outputs if name != f"result:{FLAG}")

    def __len__(self) -> int:
        return len(self._outputs) - 1


def refuse(operation: str, checks: IndexChecks, arrays: Mapping[str, Any]) -> None:
    """Raise for the first number that is not right: arrays are copied to the host for that."""
    there = {c.range.leaf: arrays[c.range.leaf] for c in checks.checks}
    checks.check(operation, {name: np.asarray(array) for name, array in there.items()})
    names = ", ".join(sorted(n.partition(":")[2] or "the array" for n in there))
    raise IndexRangeError(
        operation,
        f"an index in {names} was out of range when the program ran, and no longer is",
        "Write no array that a step still reads: look at its loss first.",
    )


def run_guarded(
    session: Session,
    operation: str,
    built: Looking,
    program: Executable,
    arrays: Mapping[str, Any],
) -> Mapping[str, Any]:
    """Outputs of a program that writes no values, guarded where indices are on the device."""
    outputs = session.run(program, arrays)
    if session.memory.is_host or not built.indices.are_there(arrays):
        return outputs
    return Guarded(outputs, lambda: refuse(operation, built.indices, arrays))


class Unlooked:
    """Results that nobody has looked at yet, the oldest first."""

    def __init__(self) -> None:
        self._waiting: deque[Guarded] = deque()

    def add(
        self,
        operation: str,
        built: Looking,
        arrays: Mapping[str, Any],
        outputs: Mapping[str, Any],
        undo: Callable[[], None] | None = None,  # what a step that was refused has counted
    ) -> Guarded:
        def refused() -> None:
            if undo is not None:
                undo()
            refuse(operation, built.indices, arrays)

        guarded_ = Guarded(outputs, refused)
        self._waiting.append(guarded_)
        return guarded_

    def look(self, leave: int = AHEAD) -> None:
        """Raise if one of those that must be there by now was refused."""
        while len(self._waiting) > leave:
            oldest = self._waiting.popleft()
            if not oldest.is_told:
                oldest.look()
