"""A session: the values that programs share, by name. Writing is all or nothing."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from treadle.base.arrays import lost_mask, lost_range
from treadle.base.errors import ArgumentError, LoadError, ShapeError
from treadle.base.memory import refuse_beyond
from treadle.base.uncopied import uncopied
from treadle.ir.graph import Graph, OutputKind
from treadle.ir.rewrite import remove_dead_code
from treadle.ir.types import TensorType
from treadle.runtime.executable import Executable, InPlaceProgram, updates_in_place
from treadle.runtime.memory import Memory, Values

_PRINT = f"{OutputKind.PRINT.value}:"


class ShardedValues(Protocol):
    """Values of which several processes hold a part each. All of them ask together."""

    @property
    def names(self) -> Collection[str]: ...

    def is_read_by(self, program: Executable) -> bool:
        """Whether a program is to find them whole."""
        ...

    def gather(self, values: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Whole arrays, of the parts that are among the values here and elsewhere."""
        ...

    def free(self) -> None:
        """Give the memory of the whole arrays back."""
        ...

    def part(self, name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
        """What is held here of a whole array, and the name that it has."""
        ...


@uncopied("Copy its values: step.state_dict() has them all.")
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
        self.sharded: ShardedValues | None = None
        self._is_gathered = False

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

    @property
    def nbytes(self) -> int:
        """Bytes of all values that are held between programs."""
        elsewhere = () if self.sharded is None else self.sharded.names
        return sum(t.nbytes for n, t in self.types.items() if n not in elsewhere)

    def shard(self, sharded: ShardedValues) -> None:
        """From now on hold parts of some values, whose types stay those of whole arrays."""
        with self.lock:
            self.write(dict(sharded.part(n, self.values[n]) for n in sharded.names))
            for name in sharded.names:
                del self.values[name]
            self.sharded = sharded

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, sharded values are whole, and nobody else reads or writes any."""
        with self.lock:
            sharded = self.sharded
            if sharded is None or self._is_gathered:
                yield
                return
            self.values.update(sharded.gather(self.values))
            self._is_gathered = True
            try:
                yield
            finally:
                self._is_gathered = False
                for name in sharded.names:
                    del self.values[name]
                sharded.free()

    @contextmanager
    def _gathered_for(self, is_needed: bool) -> Iterator[None]:
        with self.lock:
            if not is_needed:
                yield
                return
            with self.gathered():
                yield

    def _reads_sharded(self, program: Executable) -> bool:
        return self.sharded is not None and self.sharded.is_read_by(program)

    def refuse_sharded(self, operation: str) -> None:
        """For whoever would use the memory of values after it was given back."""
        if self.sharded is not None:
            raise ArgumentError(
                operation,
                "parameters are sharded (DataParallel(shard_parameters=True)): no rank has them "
                "whole but while they are used",
                "Read copies with step.params on all ranks, or save and load without "
                "shard_parameters.",
            )

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
        before = dict(self.types), dict(self.values), self.owners, self.sharded
        try:
            yield
        except BaseException:
            self.types, values, self.owners, self.sharded = before
            self.values.restore(values)
            self.version += 1
            raise

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Copies, so that what is read stays as it was; never in the middle of a step."""
        wanted = list(names)
        sharded = () if self.sharded is None else self.sharded.names
        with self._gathered_for(any(n in sharded for n in wanted)):
            return {n: self.values[n].copy() for n in wanted}

    def shared(self, names: Iterable[str]) -> dict[str, Any]:
        """The memory itself, which programs go on to change."""
        self.refuse_sharded("device_params")
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
            elif self.sharded is not None and name in self.sharded.names:
                assert not self._is_gathered, "gathered values would be old"
                own, part = self.sharded.part(name, found)
                checked[own] = held(part, self.types[own])
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
        with self._gathered_for(self._reads_sharded(program)):
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
        if self._is_gathered:
            outputs = {n: np.array(value) for n, value in outputs.items()}
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
        with self._gathered_for(self._reads_sharded(program)):
            return self._run_in_place(program, inputs, stays=True)

    def run_several(
        self, program: InPlaceProgram, rows: Sequence[Mapping[str, np.ndarray]]
    ) -> list[dict[str, np.ndarray]]:
        """`run` for each row of inputs, in one native call; for programs that print nothing."""
        with self._gathered_for(self._reads_sharded(program)):
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
