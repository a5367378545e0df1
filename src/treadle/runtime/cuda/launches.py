"""A plan as a list of launches on addresses: calls of one kernel in one phase are one launch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from treadle.base.errors import DeviceError
from treadle.kernel.launch import CooperativeLaunch, Launch
from treadle.kernel.plan import Plan, PlannedCall, PlannedPhase, PlannedStep
from treadle.runtime.cuda.batches import Batch, batch_in, matrices, runs_of
from treadle.runtime.cuda.blas import Matmul
from treadle.runtime.cuda.calls import Called
from treadle.runtime.cuda.captures import Enqueue, captured
from treadle.runtime.cuda.device import checked, device
from treadle.runtime.cuda.maps import tensor_map_words

EARLY_LAUNCH = 90  # chips that launch a kernel before the one ahead of it is done
MOST_SHARED = 32 << 10  # bytes of shared memory that a block may have without being asked

Calls = tuple[tuple[int, int], ...]  # entries, and how often each is called
Note = Callable[[Calls, str], None]  # told of each launch: its calls, and its name if it has one


def _unnoticed(calls: Calls, name: str) -> None:
    """Nobody asks."""


class ChainedGraph:
    """A graph that calls the code of several programs: it goes before any of that does."""

    def __init__(self, handle: Any, codes: Sequence[Code]):
        self.handle, self._codes = handle, list(codes)
        self._device = device()
        for code in self._codes:
            code.chained.append(self)

    def give_back(self) -> None:
        """Launched no more; a launch that is under way ends as it would."""
        if self.handle is not None:
            self._device.releases.give("cuGraphExecDestroy", self.handle)
            self.handle = None

    def drop(self) -> None:
        """Forgotten by the programs, too."""
        self.give_back()
        for code in self._codes:
            code.chained = [c for c in code.chained if c is not self]
        self._codes = []


class Code:
    """Machine code on the device: a program's functions, and the graphs that call them.

    It is given back at once, graphs before what they call, in whatever order Python collects.
    """

    def __init__(
        self,
        cubins: Sequence[bytes],
        launches: Sequence[Launch],
        cooperative: Sequence[CooperativeLaunch] = (),
    ):
        self.device = device()
        self.graphs: list[Any] = []
        self.modules: list[Any] = []
        self.chained: list[ChainedGraph] = []  # that call this code, and that of other programs
        self.plans: list[object] = []  # of a library
        for cubin in cubins:
            self.modules.append(checked(self.device.driver.cuModuleLoadData(cubin), "load"))
        self.functions: dict[str, Any] = {}
        every: list[Launch | CooperativeLaunch] = [*launches, *cooperative]
        for launch in every:
            if launch.block:
                self.functions[launch.symbol] = self._function(launch)

    def _function(self, launch: Launch | CooperativeLaunch) -> Any:
        driver = device().driver
        for module in self.modules:
            found = driver.cuModuleGetFunction(module, launch.symbol.encode())
            if int(found[0]) == 0:
                function = found[1]
                break
        else:
            raise LookupError(f"no code for {launch.symbol}")
        self._check_shared(launch, function)
        if launch.shared > MOST_SHARED:
            kind = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked(driver.cuFuncSetAttribute(function, kind, launch.shared), "load")
        return function

    def _check_shared(self, launch: Launch | CooperativeLaunch, function: Any) -> None:
        """A kernel that needs more shared memory than a block may have is refused by name."""
        driver, here = self.device.driver, self.device
        kind = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        fixed = int(checked(driver.cuFuncGetAttribute(kind, function), "load"))
        if launch.shared + fixed > here.most_shared:
            raise DeviceError(
                "load",
                f"{launch.symbol} needs {launch.shared + fixed:,} bytes of shared memory, and a "
                f"block has at most {here.most_shared:,} on {here.name}",
                'Use device="cpu", and please report it with the program.',
            )

    def captured(self, enqueue: Enqueue) -> Any:
        """A graph of work that calls this code."""
        graph = captured(enqueue)
        self.graphs.append(graph)
        return graph

    def drop(self, graph: Any) -> None:
        """A graph that is launched no more; a launch that is under way ends as it would."""
        self.graphs = [g for g in self.graphs if g is not graph]
        self.device.releases.give("cuGraphExecDestroy", graph)

    def __del__(self) -> None:
        if "plans" not in self.__dict__:
            return  # there is no device
        releases = self.device.releases
        for chained in self.chained:
            chained.give_back()
        for graph in self.graphs:
            releases.give("cuGraphExecDestroy", graph)
        for module in self.modules:
            releases.give("cuModuleUnload", module)
        for plan in self.plans:
            releases.drop(plan)


class Runner:
    """Puts a plan's calls into a stream, for a table of addresses by slot; one thread at a time."""

    def __init__(
        self,
        plan: Plan,
        launches: Sequence[Launch],
        code: Code,
        matmuls: Mapping[int, Matmul],
        called_entries: Mapping[int, Called],
        batches: Mapping[Batch, Matmul],
        cooperative: Sequence[CooperativeLaunch] = (),
    ):
        self.plan, self.launches, self.code, self.matmuls = plan, launches, code, matmuls
        self.cooperative = {(b.path, b.first): b for b in cooperative}
        self.called_entries, self.batches = called_entries, batches
        self.workspace = max((a.workspace for a in called_entries.values()), default=0)
        self.stream: Any = None  # the one that calls go into now
        self._workspace = 0  # where libraries work
        self._note: Note = _unnoticed

    def enqueue(self, table: Sequence[int], stream: Any, note: Note = _unnoticed) -> int:
        """Everything, in order; how many launches that were. `note` is called after each.

        The table's last address is that of memory for what libraries do.
        """
        self.stream, self._note, self._workspace = stream, note, table[-1]
        return self._steps(self.plan.steps, (), table, 0)

    def _steps(
        self,
        steps: Sequence[PlannedStep],
        path: tuple[int, ...],
        table: Sequence[int],
        iteration: int,
    ) -> int:
        count, skipped = 0, 0
        for i, step in enumerate(steps):
            cooperative_launch = self.cooperative.get((path, i))
            if cooperative_launch is not None:
                count += self._launch_cooperative(
                    cooperative_launch,
                    steps[i : i + len(cooperative_launch.phases)],
                    table,
                    iteration,
                )
                skipped = len(cooperative_launch.phases)
            if skipped:
                skipped -= 1
            elif isinstance(step, PlannedPhase):
                for entry, rows in _by_entry(step, table, iteration).items():
                    count += self.launch(entry, rows)
                    self._note(((entry, len(rows)),), "")
            else:
                iterations = range(step.length)
                for j in reversed(iterations) if step.reverse else iterations:
                    count += self._steps(step.steps, (*path, i), table, j)
        return count

    def _launch_cooperative(
        self,
        cooperative_launch: CooperativeLaunch,
        steps: Sequence[PlannedStep],
        table: Sequence[int],
        iteration: int,
    ) -> int:
        """Phases of small kernels as one cooperative launch."""
        words: list[int] = []
        for phase, step in zip(cooperative_launch.phases, steps, strict=True):
            assert isinstance(step, PlannedPhase)
            found = _by_entry(step, table, iteration)
            for entry, calls in phase:
                assert len(found[entry]) == calls
                words += [a for row in found[entry] for a in row]
        # All blocks of several phases must run at once: they wait for each other.
        waits, grid = len(cooperative_launch.phases) > 1, cooperative_launch.grid
        grid = min(grid, device().multiprocessors) if waits else grid
        block, shared = cooperative_launch.block, cooperative_launch.shared
        config = self._config((grid, 1), block, shared, waits)
        self._launch(cooperative_launch.symbol, words or [0], config)
        self._note(
            tuple(pair for phase in cooperative_launch.phases for pair in phase),
            cooperative_launch.symbol,
        )
        return 1

    def launch(self, entry: int, rows: list[list[int]]) -> int:
        """Calls of one kernel that do not depend on each other."""
        launch = self.launches[entry]
        if entry in self.matmuls:
            return self._multiply_all(entry, rows)
        if entry in self.called_entries:
            for addresses in rows:
                self.called_entries[entry].run(addresses, self._workspace, self.stream)
            return len(rows)
        if not launch.grid:
            return 0
        count = 0
        for start in range(0, len(rows), launch.calls):
            some = rows[start : start + launch.calls]
            words = [a for row in some for a in row] or [0]
            words += [0] * (launch.calls * max(1, len(rows[0])) - len(words))
            maps = [w for m in launch.maps for w in tensor_map_words(m, rows[start][m.argument])]
            words, grid = maps + words, launch.grid
            if launch.maps:  # blocks take their work in turn, in pairs where there are many
                grid = min(grid, device().multiprocessors // 2 * 2)
            config = self._config((grid, len(some)), launch.block, launch.shared)
            self._launch(launch.symbol, words, config)
            count += 1
        return count

    def _launch(self, symbol: str, words: Sequence[int], config: Any) -> None:
        arguments = (ctypes.c_uint64 * len(words))(*words)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        function = self.code.functions[symbol]
        found = device().driver.cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0)
        checked(found, symbol)

    def _config(
        self, grid: tuple[int, int], block: int, shared: int, is_cooperative: bool = False
    ) -> Any:
        """A launch that may be made ready while the one before still runs: it waits by itself.

        Blocks of a cooperative launch wait for each other: none starts unless all do.
        """
        driver = device().driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes, config.hStream = shared, self.stream
        kinds, attributes = driver.CUlaunchAttributeID, list[Any]()
        if is_cooperative:
            attribute = driver.CUlaunchAttribute()
            attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
            attributes.append(attribute)
        if device().chip >= EARLY_LAUNCH:
            attribute = driver.CUlaunchAttribute()
            attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        if attributes:
            config.attrs, config.numAttrs = attributes, len(attributes)
        return config

    def _multiply_all(self, entry: int, rows: list[list[int]]) -> int:
        """Equal matmuls, as batches if those were found to be faster."""
        call, count = self.matmuls[entry].matmul, 0
        for run in runs_of(call, rows):
            batched = self.batches.get(batch_in(entry, call, run)) if len(run) > 1 else None
            if batched is not None and self._has_run(batched, matrices(call, run[0])):
                count += 1
                continue
            for addresses in run:
                self._multiply(entry, addresses)
            count += len(run)
        return count

    def _has_run(self, matmul: Matmul, addresses: tuple[int, ...]) -> bool:
        return matmul.run(*addresses, stream=self.stream) == 0

    def _multiply(self, entry: int, addresses: Sequence[int]) -> None:
        matmul = self.matmuls[entry]
        code = matmul.run(*matrices(matmul.matmul, addresses), stream=self.stream)
        if code:
            raise AssertionError(f"cuBLASLt says {code} for {matmul.matmul}")


def _by_entry(
    step: PlannedPhase, table: Sequence[int], iteration: int
) -> dict[int, list[list[int]]]:
    """Addresses of the calls that each entry has in a phase."""
    found: dict[int, list[list[int]]] = {}
    for call in step.calls:
        found.setdefault(call.entry, []).append(_addresses(call, table, iteration))
    return found


def _addresses(call: PlannedCall, table: Sequence[int], iteration: int) -> list[int]:
    return [table[s] + row * iteration for s, row in zip(call.slots, call.rows, strict=True)]
