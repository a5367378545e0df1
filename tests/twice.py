"""Programs of the CPU that run a second time from the plan cache, and give the same bits.

Each program that is compiled is loaded again from its entry in the cache. Each call is made on
both, the second on copies of what the owner holds. Results and updated values must have the same
dtypes, shapes and bits. `tests/conftest.py` does this for the modules in `TWICE`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from treadle.backends import compiled
from treadle.backends.protocol import Toolchain
from treadle.compile_report import CompileOptions, CompileReport
from treadle.ir.graph import Graph
from treadle.runtime.cache import plan_cache
from treadle.runtime.cpu.program import NativeProgram
from treadle.runtime.executable import InPlaceProgram
from treadle.runtime.held import aligned_copy

Arrays = Mapping[str, np.ndarray]


class Twins:
    """How many programs came from the cache a second time, and how many of their calls did."""

    def __init__(self) -> None:
        self.programs, self.calls = 0, 0
        self._load = compiled._loaded

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(compiled, "_loaded", self._loaded)

    def _loaded(
        self,
        toolchain: Toolchain[Any, Any],
        graph: Graph,
        report: CompileReport,
        options: CompileOptions,
        name: str,
    ) -> InPlaceProgram:
        program = self._load(toolchain, graph, report, options, name)
        is_compiled = plan_cache() is not None and not report.programs[-1].from_cache
        if isinstance(program, NativeProgram) and is_compiled:
            again = CompileReport(report.device, report.precision)
            again.state_bytes = report.state_bytes
            # A program that is verified in full is compiled anew, and one that is searched for
            # is searched for anew.
            plain = replace(options, verify="off", search="off")
            twin = self._load(toolchain.as_for(program), graph, again, plain, name)
            assert again.programs[-1].from_cache, f"{name} did not come from the plan cache"
            assert isinstance(twin, NativeProgram)
            self.programs += 1
            _Pair(self, program, twin).install()
        return program


class _Pair:
    """A program, and the same from the cache."""

    def __init__(self, twins: Twins, program: NativeProgram, twin: NativeProgram):
        self.twins, self.program, self.twin = twins, program, twin
        self.plain_run, self.plain_run_on = program.run, program.run_on
        self.plain_run_several_on = program.run_several_on

    def install(self) -> None:
        for name in ("run", "run_on", "run_several_on"):
            setattr(self.program, name, getattr(self, name))

    def run(self, values: Arrays) -> tuple[np.ndarray, ...]:
        found = self.plain_run(values)
        self._compare(found, self.twin.run(values))
        return found

    def run_on(
        self,
        owner: object,
        version: int,
        values: Arrays,
        inputs: Arrays,
        wanted: Sequence[int],
        stays: bool = False,
    ) -> tuple[np.ndarray, ...]:
        copies = self._copies(values, inputs)
        found = self.plain_run_on(owner, version, values, inputs, wanted, stays)
        self._compare(found, self.twin.run_on(object(), 0, copies, inputs, wanted, stays))
        self._compare_values(values, copies)
        return found

    def run_several_on(
        self,
        owner: object,
        version: int,
        values: Arrays,
        rows: Sequence[Arrays],
        wanted: Sequence[int],
    ) -> list[tuple[np.ndarray, ...]]:
        copies = self._copies(values, rows[0])
        found = self.plain_run_several_on(owner, version, values, rows, wanted)
        again = self.twin.run_several_on(object(), 0, copies, rows, wanted)
        for ours, theirs in zip(found, again, strict=True):
            self._compare(ours, theirs)
        self._compare_values(values, copies)
        return found

    def _copies(self, values: Arrays, inputs: Arrays) -> dict[str, np.ndarray]:
        names = (name for name, _, _ in self.program.plan.leaves if name not in inputs)
        return {name: aligned_copy(np.asarray(values[name])) for name in names}

    def _compare_values(self, values: Arrays, copies: Arrays) -> None:
        names = [n for n in self.program.plan.updated if n in copies]
        assert_same([np.asarray(values[n]) for n in names], [copies[n] for n in names])

    def _compare(self, found: Sequence[np.ndarray], again: Sequence[np.ndarray]) -> None:
        assert_same(found, again)
        self.twins.calls += 1


def assert_same(found: Sequence[np.ndarray], again: Sequence[np.ndarray]) -> None:
    """Dtypes, shapes and bits are equal."""
    for ours, theirs in zip(found, again, strict=True):
        kinds = (ours.dtype, ours.shape), (theirs.dtype, theirs.shape)
        assert kinds[0] == kinds[1], f"compiled: {kinds[0]}, from the plan cache: {kinds[1]}"
        assert ours.tobytes() == theirs.tobytes(), f"compiled: {ours}, from the cache: {theirs}"
