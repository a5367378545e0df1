"""Native programs on the CPU: buffers, and one call that runs everything."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np

from treadle.ir.graph import Graph
from treadle.ir.types import TensorType
from treadle.kernel.program import Program
from treadle.runtime.native import Library
from treadle.runtime.threads import pool

ALIGNMENT = 64


class NativeProgram:
    """A program with its memory. `run` takes leaves by name and gives all outputs."""

    def __init__(
        self,
        graph: Graph,
        program: Program,
        source: str,
        offsets: Mapping[str, int],
        arena_size: int,
        threads: int,
    ):
        self.graph, self.program, self.threads = graph, program, threads
        self._library = Library(source)
        self._run = self._library.address("run")
        self._arena = aligned(arena_size)
        self._slots = {b.name: i for i, b in enumerate(program.buffers)}
        self._table = np.zeros(max(1, len(program.buffers)), np.uint64)
        self._kept: list[np.ndarray] = []
        self._lock = threading.Lock()
        for name, offset in offsets.items():
            self._table[self._slots[name]] = self._arena.ctypes.data + offset
        for name, array in program.constants:
            self._place(name, aligned_copy(array))
        self._outputs = [self._output(name, type_) for _, name, type_ in program.outputs]

    def _place(self, name: str, array: np.ndarray) -> np.ndarray:
        self._kept.append(array)
        self._table[self._slots[name]] = array.ctypes.data
        return array

    def _output(self, name: str, type_: TensorType) -> np.ndarray | str:
        """Memory of an output; the name of the leaf where the output is one."""
        if any(name == leaf for leaf, _ in self.program.leaves):
            return name
        known = self._table[self._slots[name]]
        for array in self._kept:
            if array.ctypes.data == known:
                return array
        return self._place(name, aligned(type_.nbytes).view(type_.dtype.numpy))

    def run(self, values: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        """All outputs, in order: copies, which the next run does not change. One call at a time."""
        with self._lock:
            return self._run_alone(values)

    def _run_alone(self, values: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        inputs: dict[str, np.ndarray] = {}
        for name, type_ in self.program.leaves:
            inputs[name] = np.ascontiguousarray(values[name], type_.dtype.numpy)
            self._table[self._slots[name]] = inputs[name].ctypes.data
        pool(self.threads).run(self._run, self._table.ctypes.data)
        found = []
        for output, (_, _, type_) in zip(self._outputs, self.program.outputs, strict=True):
            array = inputs[output] if isinstance(output, str) else output
            found.append(array.reshape(-1)[: type_.size].reshape(type_.shape).copy())
        return tuple(found)


def aligned(nbytes: int) -> np.ndarray:
    """Bytes that start at a cache line."""
    memory = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes]


def aligned_copy(array: np.ndarray) -> np.ndarray:
    flat = np.ascontiguousarray(array).reshape(-1)
    memory = aligned(flat.nbytes).view(flat.dtype)
    memory[:] = flat
    return memory
