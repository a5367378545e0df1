"""A session: the values that programs share, by name. Writing is all or nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from treadle.base.arrays import lost_mask, lost_range
from treadle.base.errors import LoadError, ShapeError
from treadle.base.memory import refuse_beyond
from treadle.ir.graph import Graph, OutputKind
from treadle.ir.rewrite import remove_dead_code
from treadle.ir.types import TensorType
from treadle.runtime.executable import Executable, InPlaceProgram, updates_in_place
from treadle.runtime.memory import Memory, Values

_PRINT = f"{OutputKind.PRINT.value}:"


class Session:
    """Parameters, states and everything else that outlives a step."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.types: dict[str, TensorType] = {}
        self.values: Values = memory.new_values()
        self.version = 0  # counts when arrays are replaced, not when they are updated in place
        self.owners = 0  # steps so far: each has a prefix of its own
        self.forwards = 0  # and forwards
        self.calls: dict[int, int] = {}  # of forwards, by their number
        self.lock = threading.RLock()  # held by whoever reads and writes values in one go

    @property
    def device(self) -> str:
        """The name of the device whose memory holds the values."""
        return self.memory.device

    def declare(self, types: Mapping[str, TensorType]) -> list[str]:
        """Make room for values; which are new. A name that is there must have the same type."""
        wrong = [
            f"{n} is {self.types[n]} here and {t} there"
            for n, t in types.items()
            if self.types.get(n, t) != t
        ]
        if wrong:
            raise ShapeError(
                "share",
                f"the models differ: {'; '.join(wrong)}",
                "Share only between equal declarations.",
            )
        new = [n for n in types if n not in self.types]
        self._refuse_beyond(types)
        self.types |= types
        return new

    def forget(self, names: Iterable[str]) -> None:
        """Give the memory of some values back. Programs that use them can no longer run."""
        with self.lock:
            for name in names:
                del self.types[name]
                self.values.pop(name, None)
            self.version += 1

    def stream(self, is_step: bool) -> int:
        """The random stream of the next program: 0, the seed's own, for the first of a session.

        Steps and forwards count apart: looking at a model does not change what the next step draws.
        """
        if not self.owners and not self.forwards:
            return 0
        return 2 * self.owners + 2 if is_step else 2 * self.forwards + 1

    def _refuse_beyond(self, types: Mapping[str, TensorType]) -> None:
        """Before any value is made, which is on the host even where values are on a GPU."""
        every = {**self.types, **types}
        largest = max(every, key=lambda n: every[n].nbytes, default=None)
        if largest is not None:
            what = f"all there is to hold ({largest} is {every[largest]})"
            refuse_beyond("compile", what, sum(t.nbytes for t in every.values()))

    @contextmanager
    def unless_it_fails(self) -> Iterator[None]:
        """What is declared and written inside stays only if nothing is raised."""
        before = dict(self.types), dict(self.values), self.owners
        try:
            yield
        except BaseException:
            self.types, values, self.owners = before
            self.values.restore(values)
            self.version += 1
            raise

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Copies, so that what is read stays as it was; never in the middle of a step."""
        with self.lock:
            return {n: self.values[n].copy() for n in names}

    def shared(self, names: Iterable[str]) -> dict[str, Any]:
        """The memory itself, which programs go on to change."""
        with self.lock:
            return {n: self.values.shared(n) for n in names}

    def note_checkpoint(self, told: str) -> None:
        """What an error says if the device is lost."""
        self.values.note_checkpoint(told)

    def write(self, values: Mapping[str, object]) -> None:
        """Copies in; nothing is written unless everything fits."""
        wrong: list[str] = []
        checked: dict[str, np.ndarray] = {}
        held = self.memory.holder()
        for name, value in values.items():
            found = fitted(value, self.types[name], self.memory.is_wide)
            if isinstance(found, str):
                wrong.append(f"{name} {found}")
            else:
                checked[name] = held(found, self.types[name])
        if wrong:
            raise LoadError("load", f"{len(wrong)} do not fit: {'; '.join(wrong)}")
        with self.lock:
            self.values.update(checked)
            self.version += 1

    def progress(self, program: Executable) -> tuple[int, int]:
        """Changes exactly when a program has written its updates."""
        return self.version, program.runs if updates_in_place(program) else 0

    def run(self, program: Executable, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run a program on inputs and the session's values, then write its updates.

        Outputs come back under "kind:name". A program that fails leaves the values as they were.
        """
        with self.lock:
            if updates_in_place(program):
                return self._run_in_place(program, inputs)
            return self._run_aside(program, inputs)

    def _run_aside(
        self, program: Executable, inputs: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Updates are written when all is computed."""
        values = program.run({**self.values, **inputs})
        outputs: dict[str, np.ndarray] = {}
        updates: dict[str, np.ndarray] = {}
        for output, value in zip(program.graph.outputs, values, strict=True):
            if output.kind is OutputKind.UPDATE:
                updates[output.name] = value
            elif output.kind is OutputKind.PRINT:
                print(output.name.format(value))
            else:
                outputs[f"{output.kind.value}:{output.name}"] = value
        # The oracle's results may share memory with its inputs.
        self.values.update({n: self.memory.held(v, self.types[n]) for n, v in updates.items()})
        self.version += 1
        return outputs

    def _run_in_place(
        self, program: InPlaceProgram, inputs: Mapping[str, np.ndarray], stays: bool = False
    ) -> dict[str, Any]:
        """A compiled program updates the session's arrays itself; the rest are copies.

        A device's results are waited for when they are looked at.
        """
        names, wanted = program.results
        values = program.run_on(self, self.version, self.values, inputs, wanted, stays)
        return _printed(program, names, values)

    def run_there(self, program: Executable, inputs: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """`run`, with outputs left on the device where there is one."""
        if not updates_in_place(program):
            return self.run(program, inputs)
        with self.lock:
            return self._run_in_place(program, inputs, stays=True)

    def run_several(
        self, program: InPlaceProgram, rows: Sequence[Mapping[str, np.ndarray]]
    ) -> list[dict[str, np.ndarray]]:
        """`run` for each row of inputs, in one native call; for programs that print nothing."""
        with self.lock:
            names, wanted = program.results
            found = program.run_several_on(self, self.version, self.values, rows, wanted)
            return [dict(zip(names, values, strict=True)) for values in found]


def _printed(
    program: InPlaceProgram, names: Sequence[str], values: Sequence[Any]
) -> dict[str, Any]:
    """Outputs by name, after printing those that are for that, in their order."""
    if not program.prints:
        return dict(zip(names, values, strict=True))
    outputs: dict[str, Any] = {}
    for name, value in zip(names, values, strict=True):
        # Two prints may have the same text, so they are told apart by their position alone.
        if name.startswith(_PRINT):
            print(name.removeprefix(_PRINT).format(np.asarray(value)))
        else:
            outputs[name] = value
    return outputs


def fitted(value: object, type_: TensorType, as_float64: bool = False) -> np.ndarray | str:
    """An array of the type, or what is wrong. Numbers may change width if they fit.

    With `as_float64` floats fit as they are: that is how they are held.
    """
    masked = lost_mask(value)
    if masked is not None:
        return masked
    array = np.asarray(value)
    if array.shape != type_.shape:
        return f"has the shape {array.shape}, not {type_.shape}"
    kind, wanted = array.dtype.kind, type_.dtype.kind
    is_float = kind == "f" or array.dtype.name == "bfloat16"
    if wanted == "float":
        if not is_float:
            return f"is {array.dtype}, not a float"
        lost = None if as_float64 else lost_range(array, type_.dtype)
        return array if lost is None else lost
    if wanted == "bool":
        return array if kind == "b" else f"is {array.dtype}, not bool"
    if kind not in "iu":
        return f"is {array.dtype}, not an integer"
    low, high = type_.dtype.range()
    if array.size and (array.min() < low or array.max() > high):
        return f"has values from {array.min()} to {array.max()}, which {type_.dtype} cannot hold"
    return array


def select(graph: Graph, kinds: set[OutputKind], results: Iterable[str] = ()) -> Graph:
    """The part of a step that computes outputs of some kinds, and the results named."""
    from_names = set(results)
    kept = [
        o
        for o in graph.outputs
        if o.kind in kinds or (o.kind is OutputKind.RESULT and o.name in from_names)
    ]
    return remove_dead_code(Graph(graph.nodes, tuple(kept), graph.name))
