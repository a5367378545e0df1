"""Programs on the GPU: one arena, and the whole step as one captured graph, launched once a step.

Inputs go through pinned memory that is used in turns; results come back into pinned memory and are
waited for when they are looked at.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from treadle.ir.graph import Graph, OutputKind
from treadle.ir.types import TensorType
from treadle.kernel.launch import Launch
from treadle.kernel.plan import Plan
from treadle.runtime.cuda.batches import chosen_batches, matrices
from treadle.runtime.cuda.blas import Matmul, noise, workspace
from treadle.runtime.cuda.device import Block, Event, Pinned, checked, device, out_of_memory, padded
from treadle.runtime.cuda.launches import Code, Runner
from treadle.runtime.cuda.routines import chosen_routines
from treadle.runtime.cuda.values import DeviceValues

TURNS = 3  # of pinned inputs: the host may be that many steps ahead
RESULTS = 32  # of pinned results
TOGETHER = 16  # steps in one launch
SMALL = 1 << 16  # bytes of results that come back by themselves

Algorithms = dict[str, list[int]]


class CudaProgram:
    """A plan with its code and its memory. One call runs at a time."""

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        launches: Sequence[Launch],
        cubins: Sequence[bytes],
        constants: Mapping[str, np.ndarray],
        algorithms: Algorithms,
        is_deterministic: bool = False,
    ):
        self.graph, self.plan, self.launches = graph, plan, tuple(launches)
        self._device = device()
        self._device.enter()
        self._lock = threading.Lock()
        self.runs, self.graph_launches = 0, 0
        self.without: frozenset[Any] = frozenset()  # routines that no library has
        self._places()
        needed = plan.arena + self._results_size + self._inputs_size
        needed += sum(a.nbytes for a in constants.values())
        if needed > self._device.memory()[0]:
            raise out_of_memory(needed)
        self._arena = Block(plan.arena)
        self._results = Block(self._results_size)
        self._constants = [(slot, Block(constants[n].nbytes)) for slot, n in plan.constants]
        for (_, block), (_, name) in zip(self._constants, plan.constants, strict=True):
            block.write(constants[name])
        self._code = Code(cubins, launches)
        self.algorithms = dict(algorithms)
        self._products = self._chosen_products()
        routines = chosen_routines(
            self.launches, self.algorithms, is_deterministic, self._addresses
        )
        batches = chosen_batches(
            plan, self.launches, self._products, self.algorithms, self._arena.address
        )
        self._runner = Runner(plan, self.launches, self._code, self._products, routines, batches)
        self._inputs: _Inputs | None = None
        self._bound: tuple[object, ...] = ()
        self._held: tuple[object, int] = (None, -1)
        self._exec: Any = None
        self._many: _Many | None = None
        self._ring: _Ring | None = None
        wanted = [i for i, o in enumerate(plan.outputs) if o.kind is not OutputKind.UPDATE]
        names = [f"{plan.outputs[i].kind.value}:{plan.outputs[i].name}" for i in wanted]
        self.results = names, wanted  # what is not an update
        self.prints = [o.name for o in plan.outputs if o.kind is OutputKind.PRINT]

    def _places(self) -> None:
        """Where outputs that are no leaves lie in one block."""
        plan = self.plan
        self._leaves = {name: (slot, type_) for name, slot, type_ in plan.leaves}
        leaves = {slot for slot, _ in self._leaves.values()}
        given = {slot for slot, _ in plan.constants}
        self._result_offsets: dict[int, int] = {}
        size = 0
        for output in plan.outputs:
            if output.slot not in leaves | given | set(self._result_offsets):
                self._result_offsets[output.slot] = size
                size += padded(plan.slots[output.slot].nbytes)
        self._results_size = size
        self._inputs_size = sum(padded(t.nbytes) for _, t in self._leaves.values() if t.size)
        self._inputs_size = min(self._inputs_size, 1 << 28)

    def _chosen_products(self) -> dict[int, Matmul]:
        """Products with the algorithms that were chosen before, or that are timed now."""
        found: dict[int, Matmul] = {}
        for i, launch in enumerate(self.launches):
            if launch.product is None or launch.block:
                continue
            workspace()
            matmul = found[i] = Matmul(launch.product)
            key = repr(launch.product)
            if key not in self.algorithms:
                matmul.choose(*self._somewhere(i))
                self.algorithms[key] = matmul.words
            matmul.use(self.algorithms[key])
        self._spare: list[Block] = []
        return found

    @property
    def workspace(self) -> int:
        """Bytes that libraries use while they run; products of all programs share theirs."""
        return self._runner.workspace.nbytes + (workspace().nbytes if self._products else 0)

    def _somewhere(self, entry: int) -> tuple[int, int, int, int]:
        product = self.launches[entry].product
        assert product is not None
        return matrices(product, self._addresses(entry))

    def _addresses(self, entry: int) -> list[int]:
        """Memory to time a routine on, as large as that of one of its calls."""
        call = next(c for c in _calls(self.plan) if c.entry == entry)
        self._spare = [Block(self.plan.slots[s].nbytes) for s in call.slots]
        for block in self._spare:
            block.fill(noise())
        return [b.address for b in self._spare]

    # Addresses

    def _table(self, leaves: Mapping[str, int]) -> list[int]:
        table = [0] * len(self.plan.slots)
        for i, slot in enumerate(self.plan.slots):
            if slot.offset >= 0:
                table[i] = self._arena.address + slot.offset
        for slot_, block in self._constants:
            table[slot_] = block.address
        for slot_, offset in self._result_offsets.items():
            table[slot_] = self._results.address + offset
        for name, (slot_, _) in self._leaves.items():
            table[slot_] = leaves[name]
        return table

    def run(self, values: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        """All outputs, in order; the values given stay as they are."""
        with self._lock:
            self._device.enter()
            read, blocks = self.graph.leaves, dict[str, Block]()
            for name, (_, type_) in self._leaves.items():
                given = values[name] if name in read else np.zeros(type_.shape)
                array = np.ascontiguousarray(given, type_.dtype.numpy)
                blocks[name] = Block(max(1, array.nbytes))
                blocks[name].write(array)
            table = self._table({n: b.address for n, b in blocks.items()})
            self._runner.enqueue(table)
            self._device.wait()
            return tuple(self._read(o.slot, o.type, table) for o in self.plan.outputs)

    def _read(self, slot: int, type_: TensorType, table: Sequence[int]) -> np.ndarray:
        array = np.empty(type_.shape, type_.dtype.numpy)
        if array.nbytes:
            driver = self._device.driver
            found = driver.cuMemcpyDtoH(array.ctypes.data, table[slot], array.nbytes)
            checked(found, "read")
        return array

    def run_on(
        self,
        owner: object,
        version: int,
        values: Mapping[str, np.ndarray],
        inputs: Mapping[str, np.ndarray],
        wanted: Sequence[int],
    ) -> Sequence[Any]:
        """Some outputs, which are waited for when they are looked at; values stay on the device."""
        assert isinstance(values, DeviceValues)
        with self._lock:
            self._device.enter()
            if self._inputs is None:
                types = {n: t for n, (_, t) in self._leaves.items() if n in inputs}
                self._inputs = _Inputs(types)
            self._bind(values)
            self._inputs.copy(inputs)
            driver = self._device.driver
            checked(driver.cuGraphLaunch(self._exec, self._device.stream), "step")
            self._inputs.done()
            self.runs += 1
            return self._outputs(wanted)

    def _bind(self, values: DeviceValues) -> None:
        """Capture the step, unless it was captured on these addresses."""
        assert self._inputs is not None
        if self._held == (values, values.layout):
            return
        own = self._inputs.addresses
        leaves = {n: own[n] if n in own else values.block(n).address for n in self._leaves}
        bound = tuple(leaves.values())
        self._held = (values, values.layout)
        if bound == self._bound:
            return
        driver, stream = self._device.driver, self._device.stream
        self._device.wait()
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        checked(driver.cuStreamBeginCapture(stream, mode), "capture")
        self._now = self._table(leaves)
        try:
            self.graph_launches = self._runner.enqueue(self._now)
        finally:
            captured = checked(driver.cuStreamEndCapture(stream), "capture")
        self._exec = checked(driver.cuGraphInstantiate(captured, 0), "capture")
        checked(driver.cuGraphDestroy(captured), "capture")
        self._bound = bound

    @property
    def can_repeat(self) -> bool:
        """Whether several steps fit one launch: nothing is printed, and results are small."""
        outputs = [self.plan.outputs[i] for i in self.results[1]]
        is_small = self._results_size <= SMALL
        return is_small and not self.prints and all(o.slot in self._result_offsets for o in outputs)

    def run_several_on(
        self,
        owner: object,
        version: int,
        values: Mapping[str, np.ndarray],
        rows: Sequence[Mapping[str, np.ndarray]],
        wanted: Sequence[int],
    ) -> list[list[np.ndarray]]:
        """A step for each row of inputs, many of them in one launch; outputs of each."""
        found: list[list[np.ndarray]] = []
        for start in range(0, len(rows), TOGETHER):
            some = rows[start : start + TOGETHER]
            if len(some) == TOGETHER:
                found += self._run_many(values, some, wanted)
                continue
            single = [self.run_on(owner, version, values, row, wanted) for row in some]
            found += [[np.asarray(x) for x in outputs] for outputs in single]
        return found

    def _run_many(
        self,
        values: Mapping[str, np.ndarray],
        batches: Sequence[Mapping[str, Any]],
        wanted: Sequence[int],
    ) -> list[list[np.ndarray]]:
        """Steps in one launch, each on inputs of its own."""
        assert isinstance(values, DeviceValues)
        with self._lock:
            self._device.enter()
            if self._inputs is None:
                types = {n: t for n, (_, t) in self._leaves.items() if n in batches[0]}
                self._inputs = _Inputs(types)
            many = self._many
            held = (values, values.layout)
            if many is None or many.held != held:
                many = self._many = _Many(self._inputs.types, len(batches), self._results_size)
                many.held = held
                many.exec = self._captured_many(values, many)
            many.copy(batches)
            driver = self._device.driver
            checked(driver.cuGraphLaunch(many.exec, self._device.stream), "run")
            self.runs += len(batches)
            memory = many.read()
            outputs = [self.plan.outputs[i] for i in wanted]
            return [
                [_array(row, self._result_offsets[o.slot], o.type) for o in outputs]
                for row in memory
            ]

    def _captured_many(self, values: DeviceValues, many: _Many) -> Any:
        driver, stream = self._device.driver, self._device.stream
        self._device.wait()
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        checked(driver.cuStreamBeginCapture(stream, mode), "capture")
        try:
            for turn in range(many.count):
                own = many.addresses(turn)
                leaves = {n: own[n] if n in own else values.block(n).address for n in self._leaves}
                self._runner.enqueue(self._table(leaves))
                target = many.results.address + turn * many.results_size
                found = driver.cuMemcpyDtoDAsync(
                    target, self._results.address, many.results_size, stream
                )
                checked(found, "capture")
        finally:
            captured = checked(driver.cuStreamEndCapture(stream), "capture")
        made = checked(driver.cuGraphInstantiate(captured, 0), "capture")
        checked(driver.cuGraphDestroy(captured), "capture")
        return made

    def _outputs(self, wanted: Sequence[int]) -> Sequence[Any]:
        outputs = [self.plan.outputs[i] for i in wanted]
        if self._results_size > SMALL or any(o.slot not in self._result_offsets for o in outputs):
            self._device.wait()
            return [self._read(o.slot, o.type, self._now) for o in outputs]
        if self._ring is None:
            self._ring = _Ring(self._results)
        pending = self._ring.next()
        return [Later(pending, self._result_offsets[o.slot], o.type) for o in outputs]


def _calls(plan: Plan) -> Iterator[Any]:
    pending = list(plan.steps)
    while pending:
        step = pending.pop()
        if hasattr(step, "calls"):
            yield from step.calls
        else:
            pending += step.steps


def _address(array: Any) -> int | None:
    """Where an array on the device is; None for one that is not there."""
    if getattr(array, "is_cuda", False):
        return int(array.data_ptr())
    interface = getattr(array, "__cuda_array_interface__", None)
    return None if interface is None else int(interface["data"][0])


class _Inputs:
    """A program's inputs at fixed addresses, and pinned memory that they come through in turns."""

    def __init__(self, types: Mapping[str, TensorType], turns: int = TURNS):
        self.types, self.turns = dict(types), turns
        self.offsets: dict[str, int] = {}
        size = 0
        for name, type_ in types.items():
            self.offsets[name] = size
            size += padded(max(1, type_.nbytes))
        self.size = size
        self.block = Block(size)
        self.addresses = {n: self.block.address + o for n, o in self.offsets.items()}
        self.pinned = [Pinned(size) for _ in range(turns)]
        self.events = [Event() for _ in range(turns)]
        self.used = [False] * turns
        self.turn = 0
        self.views = [
            {
                n: p.array[o : o + types[n].nbytes]
                .view(types[n].dtype.numpy)
                .reshape(types[n].shape)
                for n, o in self.offsets.items()
            }
            for p in self.pinned
        ]

    def copy(self, inputs: Mapping[str, Any]) -> None:
        """Into the stream: one copy from pinned memory, and one of each array on the device."""
        if not self.size:
            return
        at, driver, stream = self.turn, device().driver, device().stream
        if self.used[at]:
            self.events[at].wait()
        views, here = self.views[at], list[tuple[str, int]]()
        low, high = self.size, 0
        for name, offset in self.offsets.items():
            given = inputs[name]
            if type(given) is not np.ndarray:
                address = _address(given)
                if address is not None:
                    here.append((name, address))
                    continue
            views[name][...] = given
            low, high = min(low, offset), max(high, offset + self.types[name].nbytes)
        if high > low:
            source = self.pinned[at].address + low
            target = self.block.address + low
            checked(driver.cuMemcpyHtoDAsync(target, source, high - low, stream), "inputs")
        for name, address in here:
            size = self.types[name].nbytes
            found = driver.cuMemcpyDtoDAsync(self.addresses[name], address, size, stream)
            checked(found, "inputs")

    def done(self) -> None:
        """The stream is past the copy: this turn's memory may be used again when that is so."""
        if self.size:
            self.events[self.turn].record()
            self.used[self.turn] = True
            self.turn = (self.turn + 1) % self.turns


class _Many:
    """Inputs and results of several steps."""

    def __init__(self, types: Mapping[str, TensorType], count: int, results_size: int):
        self.inputs = [_Inputs(types, turns=1) for _ in range(count)]
        self.count, self.results_size = count, max(1, results_size)
        self.results = Block(self.results_size * count)
        self.pinned = Pinned(self.results_size * count)
        self.held: tuple[object, ...] = ()
        self.exec: Any = None

    def addresses(self, turn: int) -> dict[str, int]:
        return self.inputs[turn].addresses

    def copy(self, batches: Sequence[Mapping[str, Any]]) -> None:
        for own, batch in zip(self.inputs, batches, strict=True):
            own.copy(batch)
            own.done()

    def read(self) -> list[np.ndarray]:
        driver, stream = device().driver, device().stream
        found = driver.cuMemcpyDtoHAsync(
            self.pinned.address, self.results.address, self.results.nbytes, stream
        )
        checked(found, "results")
        device().wait()
        rows = self.pinned.array[: self.results.nbytes].copy()
        return list(rows.reshape(self.count, self.results_size))


class _Pending:
    """Results of one step on their way back."""

    def __init__(self, event: Event, array: np.ndarray):
        self._event, self._array = event, array
        self._kept: np.ndarray | None = None
        self._lock = threading.Lock()

    def bytes(self) -> np.ndarray:
        with self._lock:
            if self._kept is None:
                device().enter()
                self._event.wait()
                self._kept = self._array.copy()
            return self._kept


class _Ring:
    """Pinned memory for results. One that is still waited for is kept before it is written over."""

    def __init__(self, source: Block):
        self.source = source
        self.pinned = [Pinned(source.nbytes) for _ in range(RESULTS)]
        self.events = [Event() for _ in range(RESULTS)]
        self.pending: list[weakref.ref[_Pending] | None] = [None] * RESULTS
        self.turn = 0

    def next(self) -> _Pending:
        at = self.turn
        self.turn = (at + 1) % RESULTS
        before = self.pending[at]
        old = None if before is None else before()
        if old is not None:
            old.bytes()
        driver, stream = device().driver, device().stream
        pinned = self.pinned[at]
        found = driver.cuMemcpyDtoHAsync(
            pinned.address, self.source.address, self.source.nbytes, stream
        )
        checked(found, "results")
        self.events[at].record()
        new = _Pending(self.events[at], pinned.array)
        self.pending[at] = weakref.ref(new)
        return new


def _array(memory: np.ndarray, offset: int, type_: TensorType) -> np.ndarray:
    """A tensor inside some bytes, copied out."""
    part = memory[offset : offset + type_.nbytes]
    return part.view(type_.dtype.numpy).reshape(type_.shape).copy()


class Later:
    """An output that is waited for when it is looked at."""

    def __init__(self, pending: _Pending, offset: int, type_: TensorType):
        self._pending, self._offset, self._type = pending, offset, type_

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = _array(self._pending.bytes(), self._offset, self._type)
        return array if dtype is None else array.astype(dtype)

    def __float__(self) -> float:
        return float(self.__array__())

    def __bool__(self) -> bool:
        return bool(self.__array__())
