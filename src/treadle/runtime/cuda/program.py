"""Programs on the GPU: one arena, and a step as one captured graph, launched once a step.

Results come back into pinned memory and are waited for when they are looked at.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from treadle.base.errors import DeviceError
from treadle.ir.graph import Graph, OutputKind
from treadle.ir.types import TensorType
from treadle.kernel.choices import Chosen
from treadle.kernel.launch import LibraryLaunch
from treadle.kernel.plan import Plan, PlannedCall, PlannedOutput, PlannedPhase, PlannedRepeat
from treadle.kernel.target import GPU
from treadle.runtime.cuda.arena import shared_arena
from treadle.runtime.cuda.arrays import DeviceArray
from treadle.runtime.cuda.batches import Batch, chosen_batches, matrices
from treadle.runtime.cuda.blas import Matmul, noise, workspace
from treadle.runtime.cuda.calls import LibraryCalls
from treadle.runtime.cuda.code import CudaCode
from treadle.runtime.cuda.conv import NoLibraryCallError
from treadle.runtime.cuda.device import Block, checked, device, out_of_memory, padded
from treadle.runtime.cuda.launches import Code, Runner
from treadle.runtime.cuda.lent import LENT, Lender
from treadle.runtime.cuda.profile import timed_launches, timed_runs
from treadle.runtime.cuda.transfers import Captured, Later, Pending, Slot, Sources, Traffic
from treadle.runtime.cuda.values import DeviceValues
from treadle.runtime.executable import Timing

SIZES = GPU.launching


class CudaProgram:
    """A plan with its code and its memory. One call runs at a time."""

    is_in_place, shares_arena = True, True

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        constants: Mapping[str, np.ndarray],
        code: CudaCode,
        is_deterministic: bool = False,
        chosen: Chosen = (),
    ):
        self.graph, self.plan, self.launches = graph, plan, code.launches
        self._device = device()
        self._device.enter()
        self._lock = threading.Lock()
        self.runs, self.graph_launches = 0, 0
        self.without, self.chosen = code.without, chosen
        self._lay_out_results()
        self._arena = shared_arena()
        needed = max(0, plan.arena - self._arena.nbytes) + self._results_size + self._inputs_size
        needed += sum(a.nbytes for a in constants.values())
        if needed > self._device.memory()[0]:
            if code.calls is not None:
                code.calls.close(waits=True)  # processes that plan have memory too
            self._device.reclaim()
        if needed > self._device.memory()[0]:
            raise out_of_memory(needed, "the program, beside its parameters and state,")
        self._arena.ask(self, plan.arena)
        self._results: Block | None = None  # for runs by themselves
        sizes = {slot: plan.slots[slot].nbytes for slot in self._result_offsets}
        self._lender = Lender(sizes)
        self._constants = [(c.slot, Block(c.type.nbytes)) for c in plan.constants]
        for (_, block), constant in zip(self._constants, plan.constants, strict=True):
            block.write(constants[constant.name])
        # Those that were chosen before, to which this adds.
        self.algorithms, self.call_plans = dict(code.algorithms), dict(code.call_plans)
        with self._device.lock:
            self._runner = self._chosen(is_deterministic, code, self._arena.block())
        self._room = 0  # where the arena was when graphs were captured
        # What libraries use while they run lies behind what the plan uses.
        self._arena.ask(self, padded(plan.arena) + self._runner.workspace)
        self._traffic: dict[int, Traffic] = {}  # by how many steps are one launch
        self._bound: tuple[object, ...] = ()
        self._held: tuple[object, int] = (None, -1)
        self._now: list[int] = []
        wanted = [i for i, o in enumerate(plan.outputs) if o.kind is not OutputKind.UPDATE]
        names = [f"{plan.outputs[i].kind.value}:{plan.outputs[i].name}" for i in wanted]
        self.results = names, wanted  # what is not an update
        self.prints = [o.name for o in plan.outputs if o.kind is OutputKind.PRINT]
        self._usual = self._offsets(wanted)

    def _lay_out_results(self) -> None:
        """Offsets in one block of the outputs that are no leaves."""
        plan = self.plan
        self._leaves = {name: (slot, type_) for name, slot, type_ in plan.leaves}
        leaves = {slot for slot, _ in self._leaves.values()}
        given = {constant.slot for constant in plan.constants}
        self._result_offsets: dict[int, int] = {}
        size = 0
        for output in plan.outputs:
            if output.slot not in leaves | given | set(self._result_offsets):
                self._result_offsets[output.slot] = size
                size += padded(plan.slots[output.slot].nbytes)
        self._results_size = size
        self._inputs_size = sum(padded(t.nbytes) for _, t in self._leaves.values() if t.size)
        self._inputs_size = min(self._inputs_size, 1 << 28)

    def _chosen(self, is_deterministic: bool, code: CudaCode, room: Block) -> Runner:
        """The plan with what libraries compute of it, some of that timed in the arena.

        Code that is compiled meanwhile is waited for at the end.
        """
        begun = code.calls or LibraryCalls(self.launches, self.call_plans, is_deterministic)
        matmuls = self._chosen_matmuls(is_deterministic)
        calls = begun.chosen(self.call_plans, self._addresses)
        self._spare: list[Block] = []
        batches: dict[Batch, Matmul] = {}
        if not is_deterministic:  # what is timed may be chosen otherwise in the next process
            batches = chosen_batches(self.plan, self.launches, matmuls, self.algorithms, room)
        self._code = Code(code.cubins, code.launches, code.cooperative)
        self._code.plans += [call.graph for call in calls.values()]
        return Runner(
            self.plan, self.launches, self._code, matmuls, calls, batches, code.cooperative
        )

    def _chosen_matmuls(self, is_deterministic: bool) -> dict[int, Matmul]:
        """Matmuls with the algorithms that were chosen before, or that are timed now."""
        found: dict[int, Matmul] = {}
        for i, launch in enumerate(self.launches):
            if launch.matmul is None or launch.block:
                continue
            matmul = found[i] = Matmul(launch.matmul)
            key = repr(launch.matmul)
            if key not in self.algorithms:
                choose = matmul.take_first if is_deterministic else matmul.choose
                try:
                    choose(*self._somewhere(i))
                except DeviceError as error:
                    kind = launch.matmul.of_float8
                    if not kind:
                        raise
                    called = LibraryLaunch(kind, (), (), ())
                    raise NoLibraryCallError(called, error.cause) from error
                self.algorithms[key] = matmul.words
            matmul.use(self.algorithms[key])
        return found

    @property
    def workspace(self) -> int:
        """Bytes that libraries use while they run; matmuls of all programs share theirs."""
        return self._runner.workspace + (workspace().nbytes if self._runner.matmuls else 0)

    def _somewhere(self, entry: int) -> tuple[int, ...]:
        product = self.launches[entry].matmul
        assert product is not None
        return matrices(product, self._addresses(entry))

    def _addresses(self, entry: int) -> list[int]:
        """Memory to time a library call on, as large as that of one of its calls."""
        call = next(c for c in _calls(self.plan) if c.entry == entry)
        self._spare = [Block(self.plan.slots[s].nbytes) for s in call.slots]
        for block in self._spare:
            block.fill(noise())
        return [b.address for b in self._spare]

    # Addresses

    def _results_of(
        self, traffic: Traffic, step: int, lent: Mapping[int, Block] | None
    ) -> dict[int, int]:
        """Addresses of results by slot: lent, or in the program's own memory."""
        found = {slot: block.address for slot, block in (lent or {}).items()}
        rest = [slot for slot in self._result_offsets if slot not in found]
        start = traffic.results.address + step * self._results_size if rest else 0
        return found | {slot: start + self._result_offsets[slot] for slot in rest}

    def _table(
        self, leaves: Mapping[str, int], results: Mapping[int, int], start: int
    ) -> list[int]:
        """Of every slot, for an arena; and at the end of what libraries work in."""
        table = [0] * len(self.plan.slots) + [start + padded(self.plan.arena)]
        for i, slot in enumerate(self.plan.slots):
            if slot.offset >= 0:
                table[i] = start + slot.offset
        for slot_, block in self._constants:
            table[slot_] = block.address
        for slot_, address in results.items():
            table[slot_] = address
        for name, (slot_, _) in self._leaves.items():
            table[slot_] = leaves[name]
        return table

    def run(self, values: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        """All outputs, in order; the values given stay as they are."""
        with self._lock:
            self._device.enter()
            blocks, room = self._copies(values), self._arena.block()
            table = self._table_of(blocks, room)

            def enqueue(stream: Any) -> None:
                self._runner.enqueue(table, stream)

            graph = self._code.captured(enqueue)
            checked(self._device.driver.cuGraphLaunch(graph, self._device.stream), "run")
            self._device.wait()
            self._code.drop(graph)
            return tuple(self._read(o.slot, o.type, table) for o in self.plan.outputs)

    def _copies(self, values: Mapping[str, np.ndarray]) -> dict[str, Block]:
        """Leaves on the device, in memory of their own."""
        read, blocks = self.graph.leaves, dict[str, Block]()
        for name, (_, type_) in self._leaves.items():
            given = values[name] if name in read else np.zeros(type_.shape)
            array = np.ascontiguousarray(given, type_.dtype.numpy)
            blocks[name] = Block(max(1, array.nbytes))
            blocks[name].write(array)
        return blocks

    def _table_of(self, blocks: Mapping[str, Block], room: Block) -> list[int]:
        addresses = {n: b.address for n, b in blocks.items()}
        start = self.own_results
        results = {slot: start + offset for slot, offset in self._result_offsets.items()}
        return self._table(addresses, results, room.address)

    def enqueue(
        self, leaves: Mapping[str, int], results: Mapping[str, int], room: int, stream: Any
    ) -> None:
        """Into a stream, on memory by its addresses; results by "kind:name", as far as wanted.

        An output that is no memory of its own, or one of several that are the same, is copied.
        """
        taken: dict[int, int] = {}
        copies: list[tuple[int, PlannedOutput]] = []
        for output in self.plan.outputs:
            target = results.get(f"{output.kind.value}:{output.name}")
            if target is None:
                continue
            if output.slot in self._result_offsets and output.slot not in taken:
                taken[output.slot] = target
            else:
                copies.append((target, output))
        left = {s: o for s, o in self._result_offsets.items() if s not in taken}
        start = self.own_results if left else 0
        rest = {s: start + o for s, o in left.items()}
        table = self._table(leaves, taken | rest, room)
        self._runner.enqueue(table, stream)
        for target, output in copies:
            if output.type.nbytes:
                source, nbytes = table[output.slot], output.type.nbytes
                found = self._device.driver.cuMemcpyDtoDAsync(target, source, nbytes, stream)
                checked(found, "results")

    def prepare(self, results: Collection[str]) -> None:
        """Memory for results that nobody asks for, before anything is captured."""
        outputs = self.plan.outputs
        asked = {o.slot for o in outputs if f"{o.kind.value}:{o.name}" in results}
        if self._result_offsets.keys() - asked:
            _ = self.own_results

    @property
    def own_results(self) -> int:
        """Where results are that nobody asks for."""
        if self._results is None:
            self._results = Block(self._results_size)
        return self._results.address

    @property
    def leaf_names(self) -> Sequence[str]:
        """What a run reads or writes by name."""
        return list(self._leaves)

    @property
    def code(self) -> Code:
        return self._code

    @property
    def runner(self) -> Runner:
        """What puts its launches into a stream, with the calls of libraries by entry."""
        return self._runner

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Nothing of it runs meanwhile, and the device is the thread's."""
        with self._lock, self._device.lock:
            self._device.enter()
            yield

    def seconds(self, values: Mapping[str, np.ndarray], least: float, together: int = 1) -> float:
        """What a run takes on the device, the mean of as many as take some time.

        `together` of them are one graph, so that launching graphs does not count.
        """
        with self._lock:
            self._device.enter()
            blocks, room = self._copies(values), self._arena.block()
            return timed_runs(self._runner, self._table_of(blocks, room), least, together)

    def profile(self, values: Mapping[str, np.ndarray]) -> list[Timing]:
        """What each kernel takes in a run, by events between launches; the values stay."""
        with self._lock:
            self._device.enter()
            blocks, room = self._copies(values), self._arena.block()
            return timed_launches(self._runner, self._table_of(blocks, room))

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
        stays: bool = False,
    ) -> Sequence[Any]:
        """Some outputs, which are waited for when they are looked at; values stay on the device.

        With `stays` the outputs do too.
        """
        if stays:
            return self._left_there(values, inputs, wanted)
        return self._launched(values, (inputs,), wanted)[0]

    def _left_there(
        self, values: Mapping[str, np.ndarray], inputs: Mapping[str, Any], wanted: Sequence[int]
    ) -> list[DeviceArray]:
        """Some outputs as arrays of their own on the device; nothing is waited for."""
        found: list[DeviceArray] = []
        with self._lock:
            self._device.enter()
            lent = self._lender.free()
            self._launch(values, (inputs,), lent)
            for output in (self.plan.outputs[i] for i in wanted):
                block = lent.pop(output.slot, None)  # two that are one value are not one memory
                here = self._copy(output) if block is None else self._lender.lend(block)
                found.append(DeviceArray(here, output.type.shape, output.type.dtype.numpy))
        return found

    def _copy(self, output: PlannedOutput) -> Block:
        """Memory of its own for an output of the last launch."""
        nbytes = output.type.nbytes
        block = Block(max(1, nbytes))
        if nbytes:
            driver, stream = self._device.driver, self._device.stream
            source = self._now[output.slot]
            checked(driver.cuMemcpyDtoDAsync(block.address, source, nbytes, stream), "results")
        return block

    @property
    def can_repeat(self) -> bool:
        """Whether several steps fit one launch: nothing is printed, and results are small."""
        return not self.prints and self._usual is not None

    def _offsets(self, wanted: Sequence[int]) -> list[tuple[int, TensorType]] | None:
        """Where outputs lie in what comes back; None if it is too large to come by itself."""
        outputs = [self.plan.outputs[i] for i in wanted]
        is_there = all(o.slot in self._result_offsets for o in outputs)
        if not is_there or self._results_size > SIZES.small_results:
            return None
        return [(self._result_offsets[o.slot], o.type) for o in outputs]

    def run_several_on(
        self,
        owner: object,
        version: int,
        values: Mapping[str, np.ndarray],
        rows: Sequence[Mapping[str, np.ndarray]],
        wanted: Sequence[int],
    ) -> list[Sequence[Any]]:
        """A step for each row of inputs, many of them in one launch; outputs of each."""
        size = sum(t.nbytes for n, (_, t) in self._leaves.items() if n in rows[0])
        most = SIZES.steps if size * SIZES.steps <= SIZES.most_inputs else 1
        found: list[Sequence[Any]] = []
        for start in range(0, len(rows), most):
            some = rows[start : start + most]
            for part in [some] if len(some) == most else [[row] for row in some]:
                found += self._launched(values, part, wanted)
        return found

    def _launched(
        self,
        values: Mapping[str, np.ndarray],
        rows: Sequence[Mapping[str, Any]],
        wanted: Sequence[int],
    ) -> list[Sequence[Any]]:
        """One launch: a step for each row of inputs."""
        with self._lock:
            return self._outputs(self._launch(values, rows), len(rows), wanted)

    def _launch(
        self,
        values: Mapping[str, np.ndarray],
        rows: Sequence[Mapping[str, Any]],
        lent: Mapping[int, Block] | None = None,
    ) -> Pending:
        """With blocks that are lent, results are there, and else on their way to the host."""
        assert isinstance(values, DeviceValues)
        self._device.enter()
        count = len(rows)
        traffic = self._traffic.get(count)
        if traffic is None:
            types = {n: t for n, (_, t) in self._leaves.items() if n in rows[0]}
            traffic = self._traffic[count] = Traffic(types, count, self._results_size)
        room = self._arena.block()  # held until the launch
        if self._held != (values, values.layout) or room.address != self._room:
            self._rebind(values, set(traffic.types), room.address)
        slot = traffic.next()
        # Graphs without blocks to lend are others than those that copy results to the host.
        there = () if lent is None else (LENT, *(b.address for b in lent.values()))
        sources = traffic.fill(slot, rows, there)
        graph = slot.graphs.get(sources + there)
        if graph is None:
            graph = self._captured(values, traffic, slot, sources, lent)
            slot.add(sources + there, graph, self._code.drop)
        self._now = graph.table
        checked(self._device.driver.cuGraphLaunch(graph.handle, self._device.stream), "step")
        self.runs += count
        return slot.done()

    def _rebind(self, values: DeviceValues, inputs: set[str], room: int) -> None:
        """Graphs are captured anew if the values or the arena have moved."""
        self._held, self._room = (values, values.layout), room
        bound = tuple(values.place(n).address for n in self._leaves if n not in inputs)
        bound += (room,)
        if bound != self._bound:
            for traffic in self._traffic.values():
                traffic.forget(self._code.drop)
            self._bound = bound

    def _captured(
        self,
        values: DeviceValues,
        traffic: Traffic,
        slot: Slot,
        sources: Sources,
        lent: Mapping[int, Block] | None,
    ) -> Captured:
        """The graph of some steps, from the copy of the inputs to that of the results."""
        table: list[int] = []
        # Before the capture: memory may be allocated for them.
        results = [self._results_of(traffic, step, lent) for step in range(traffic.count)]

        def enqueue(stream: Any) -> None:
            nonlocal table
            traffic.copy_in(slot, sources, stream)
            for step in range(traffic.count):
                own = traffic.addresses(step, sources)
                leaves = {n: own[n] if n in own else values.place(n).address for n in self._leaves}
                table = self._table(leaves, results[step], self._room)
                self.graph_launches = self._runner.enqueue(table, stream)
            if lent is None and traffic.comes_back:
                traffic.copy_out(slot, stream)

        return Captured(self._code.captured(enqueue), table)

    def _outputs(self, pending: Pending, count: int, wanted: Sequence[int]) -> list[Sequence[Any]]:
        offsets = self._usual if wanted is self.results[1] else self._offsets(wanted)
        if offsets is None:
            assert count == 1
            self._device.wait()
            outputs = [self.plan.outputs[i] for i in wanted]
            return [[self._read(o.slot, o.type, self._now) for o in outputs]]
        return [
            [Later(pending, step * self._results_size + at, type_) for at, type_ in offsets]
            for step in range(count)
        ]


def _calls(plan: Plan) -> Iterator[PlannedCall]:
    pending = list(plan.steps)
    while pending:
        match pending.pop():
            case PlannedPhase(calls):
                yield from calls
            case PlannedRepeat(steps=steps):
                pending += steps
