"""Chains of a device executed on the processor: buffers are bytes of the host, programs the CPU's.

`emulated()` makes the CPU a device that makes steps as chains, as a GPU does. A file that is run
trains cases of `distributed_cases.py` so, on the ranks that a launcher has started.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

import distributed_cases as cases
from treadle.backends.cpu.backend import CpuBackend
from treadle.ir.graph import OutputKind
from treadle.ir.types import TensorType
from treadle.runtime.chain import (
    RESULTS,
    Chain,
    Copy,
    Exchange,
    Gather,
    Place,
    Run,
    Staged,
    input_name,
)


class Alone:
    """Exchanges of one rank with itself, as a communicator of one GPU makes them."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def exchange(self, name: str, parts: Sequence[tuple[bool, np.ndarray, np.ndarray]]) -> None:
        self.names.append(name)
        for _, given, taken in parts:
            taken[...] = given


class EmulatedChain:
    """A chain whose links are done one after the other."""

    def __init__(self, chain: Chain, ranks: int, direct: Alone | None, staged: Staged | None):
        self.chain, self.ranks, self.exchanging = chain, ranks, direct or staged
        self.calls_made = 0
        self.own = {n: np.zeros(max(1, size), np.uint8) for n, size in chain.buffers.items()}
        # What is never written must not be read: noise is found where zeros are not.
        for buffer in self.own.values():
            buffer[...] = 0xA5

    def run(self, values: Any, version: int, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        self.memory = dict(self.own)
        for name, array in values.items():
            assert array.flags.c_contiguous
            self.memory[name] = array.reshape(-1).view(np.uint8)
        for i, row in enumerate(rows):
            for name, type_ in self.chain.inputs.items():
                given = np.ascontiguousarray(np.asarray(row[name]), type_.dtype.numpy)
                self.memory[input_name(i, name)] = given.reshape(-1).view(np.uint8)
        for link in self.chain.links:
            self._do(link)
        self.calls_made += 1
        return {n: self._array(Place(RESULTS, at), t) for n, (at, t) in self.chain.results.items()}

    def _bytes(self, place: Place, nbytes: int) -> np.ndarray:
        found = self.memory[place.buffer][place.offset : place.offset + nbytes]
        assert found.size == nbytes, f"{place} has no {nbytes} bytes"
        return found

    def _array(self, place: Place, type_: TensorType) -> np.ndarray:
        assert place.offset % min(16, type_.dtype.itemsize * max(1, type_.size)) == 0, place
        return self._bytes(place, type_.nbytes).copy().view(type_.dtype.numpy).reshape(type_.shape)

    def _write(self, place: Place, value: Any, type_: TensorType) -> None:
        array = np.ascontiguousarray(np.asarray(value), type_.dtype.numpy)
        self._bytes(place, type_.nbytes)[...] = array.reshape(-1).view(np.uint8)

    def _do(self, link: Any) -> None:
        match link:
            case Run(program, leaves, results):
                graph = program.graph
                given = {
                    n: self._array(leaves.get(n, Place(n)), graph.nodes[at].types[0])
                    for n, at in graph.leaves.items()
                }
                found = zip(graph.outputs, graph.output_types, program.run(given), strict=True)
                for output, type_, value in found:
                    label = f"{output.kind.value}:{output.name}"
                    if output.kind is OutputKind.UPDATE:
                        place = leaves.get(output.name, Place(output.name))
                        self._write(place, value, type_)
                    elif label in results:
                        self._write(results[label], value, type_)
            case Copy(target, source, nbytes):
                self._bytes(target, nbytes)[...] = self._bytes(source, nbytes).copy()
            case Exchange(name, parts):
                self._exchange(name, parts)

    def _exchange(self, name: str, parts: Sequence[Any]) -> None:
        staged = []
        for part in parts:
            gathers = isinstance(part, Gather)
            given = self._bytes(part.given, part.nbytes * (1 if gathers else self.ranks)).copy()
            taken = np.zeros(self.ranks * part.nbytes, np.uint8)
            staged.append((gathers, given, taken))
        assert self.exchanging is not None
        self.exchanging.exchange(name, staged)
        for part, (_, _, taken) in zip(parts, staged, strict=True):
            self._bytes(part.taken, taken.size)[...] = taken


class Emulated:
    """The CPU as a device that makes chains, and connects them by itself."""

    def __init__(self, cause: str | None):
        self.cause = cause

    @property
    def connecting(self) -> Emulated:
        return self

    def where(self) -> str:
        return "here"

    def why_not_direct(self) -> str | None:
        return self.cause

    def direct_name(self) -> str:
        return "NCCL 2.99.9"

    def new_identity(self) -> bytes:
        return b"identity"

    def direct(self, identity: bytes, rank: int, size: int) -> Alone:
        assert (identity, size) == (b"identity", 1)
        return Alone()

    def chained(self, chain: Chain, ranks: int, direct: Any, staged: Any) -> EmulatedChain:
        return EmulatedChain(chain, ranks, direct, staged)


@contextlib.contextmanager
def emulated(why_not: str | None = "it is emulated") -> Iterator[None]:
    """The CPU makes chains; without `why_not` it connects ranks by itself, if it is one."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuBackend, "chaining", Emulated(why_not))
        yield


if __name__ == "__main__":
    with emulated():
        cases.main()
