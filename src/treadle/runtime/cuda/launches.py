"""A plan as a list of launches on addresses: calls of one kernel in one phase are one launch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from treadle.kernel.launch import Launch
from treadle.kernel.plan import Plan, PlannedCall, PlannedPhase, PlannedStep
from treadle.runtime.cuda.batches import Batch, in_order, matrices, steps_between
from treadle.runtime.cuda.blas import Matmul
from treadle.runtime.cuda.conv import Convolution
from treadle.runtime.cuda.device import Block, checked, device
from treadle.runtime.cuda.dnn import Attention

EARLY_LAUNCH = 90  # chips that launch a kernel before the one ahead of it is done
MOST_SHARED = 32 << 10  # bytes of shared memory that a block may have without being asked


class Code:
    """Machine code on the device: the functions of a program's kernels."""

    def __init__(self, cubins: Sequence[bytes], launches: Sequence[Launch]):
        driver = device().driver
        self.modules = [checked(driver.cuModuleLoadData(c), "load") for c in cubins]
        self.functions: dict[str, Any] = {}
        for launch in launches:
            if launch.block:
                self.functions[launch.symbol] = self._function(launch)

    def _function(self, launch: Launch) -> Any:
        driver = device().driver
        for module in self.modules:
            found = driver.cuModuleGetFunction(module, launch.symbol.encode())
            if int(found[0]) == 0:
                function = found[1]
                break
        else:
            raise LookupError(f"no code for {launch.symbol}")
        if launch.shared > MOST_SHARED:
            kind = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked(driver.cuFuncSetAttribute(function, kind, launch.shared), "load")
        return function


class Runner:
    """Puts a plan's calls into the stream, for a table of addresses by slot."""

    def __init__(
        self,
        plan: Plan,
        launches: Sequence[Launch],
        code: Code,
        products: Mapping[int, Matmul],
        routines: Mapping[int, Attention | Convolution],
        batches: Mapping[Batch, Matmul],
    ):
        self.plan, self.launches, self.code, self.products = plan, launches, code, products
        self.routines, self.batches = routines, batches
        self.workspace = Block(max((a.workspace for a in routines.values()), default=0))

    def enqueue(self, table: Sequence[int]) -> int:
        """Everything, in order; how many launches that were."""
        count = 0
        for entry, rows in self._in_order(self.plan.steps, table, 0):
            count += self.launch(entry, rows)
        return count

    def _in_order(
        self, steps: Sequence[PlannedStep], table: Sequence[int], turn: int
    ) -> Iterator[tuple[int, list[list[int]]]]:
        """Entries, and the addresses of the calls that each has in a phase."""
        for step in steps:
            if isinstance(step, PlannedPhase):
                found: dict[int, list[list[int]]] = {}
                for call in step.calls:
                    found.setdefault(call.entry, []).append(_addresses(call, table, turn))
                yield from found.items()
                continue
            turns = range(step.length)
            for i in reversed(turns) if step.reverse else turns:
                yield from self._in_order(step.steps, table, i)

    def launch(self, entry: int, rows: list[list[int]]) -> int:
        """Calls of one kernel that do not depend on each other."""
        launch = self.launches[entry]
        if entry in self.products:
            if len(rows) > 1 and self._multiply_together(entry, rows):
                return 1
            for left_to_target in rows:
                self._multiply(entry, left_to_target)
            return len(rows)
        if entry in self.routines:
            for addresses in rows:
                self.routines[entry].run(addresses, self.workspace.address)
            return len(rows)
        if not launch.grid:
            return 0
        driver, function = device().driver, self.code.functions[launch.symbol]
        count = 0
        for start in range(0, len(rows), launch.calls):
            some = rows[start : start + launch.calls]
            words = [a for row in some for a in row] or [0]
            size = launch.calls * max(1, len(rows[0]))
            arguments = (ctypes.c_uint64 * size)(*words)
            pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
            config = self._config(launch, len(some))
            found = driver.cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0)
            checked(found, launch.symbol)
            count += 1
        return count

    def _config(self, launch: Launch, calls: int) -> Any:
        """A launch that may be made ready while the one before still runs: it waits by itself."""
        driver = device().driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid, calls, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.block, 1, 1
        config.sharedMemBytes, config.hStream = launch.shared, device().stream
        if device().chip >= EARLY_LAUNCH:
            early = driver.CUlaunchAttribute()
            kinds = driver.CUlaunchAttributeID
            early.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            early.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [early], 1
        return config

    def _multiply_together(self, entry: int, rows: list[list[int]]) -> bool:
        """Equal products as one batch, where they were found to be faster so."""
        product = self.products[entry].product
        steps = steps_between(product, rows)
        matmul = None if steps is None else self.batches.get((entry, len(rows), steps))
        if matmul is None:
            return False
        return matmul.run(*matrices(product, in_order(rows)[0])) == 0

    def _multiply(self, entry: int, addresses: list[int]) -> None:
        matmul = self.products[entry]
        code = matmul.run(*matrices(matmul.product, addresses))
        if code:
            raise AssertionError(f"cuBLASLt says {code} for {matmul.product}")


def _addresses(call: PlannedCall, table: Sequence[int], turn: int) -> list[int]:
    return [table[s] + row * turn for s, row in zip(call.slots, call.rows, strict=True)]
