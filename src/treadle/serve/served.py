"""A compiled forward as requests see it: named inputs and results, and several requests a call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treadle.base import trees
from treadle.base.errors import ArgumentError, TreadleError
from treadle.base.trees import Tree
from treadle.domains.index_ranges import index_ranges
from treadle.frontend.scopes import RANDOM_STATE
from treadle.frontend.tracing import spec_of
from treadle.ir.graph import OutputKind
from treadle.ir.types import TensorType
from treadle.nn.tracing import INPUT_PREFIX
from treadle.serve.encoding import Arrays, Named
from treadle.serve.request_error import of_error
from treadle.step.forward import Forward

INPUT, OUTPUT = "input", "output"  # the names of what has none: an array by itself


class Served:
    """A forward under a name. A request is one batch of it; `batch` of them may be one call.

    For that the forward is compiled once more under `td.vmap`, and every request is answered by
    that program, whether it comes alone or with others: the bits of an answer do not depend on
    what else is asked. Places that are left are filled with a request that is there.
    """

    def __init__(self, name: str, forward: Forward):
        self.name, self.forward = name, forward
        self.inputs = [
            Named(n.removeprefix(INPUT_PREFIX) or INPUT, type_) for n, type_ in forward.inputs.types
        ]
        self.outputs: list[Named] = []  # known when it has run once
        self.batch = 1
        self.alone = ""  # why it answers one request a call, where it does
        self._several: Forward | None = None
        _check_unchanging(name, forward)

    def described(self) -> dict[str, object]:
        return {
            "inputs": {n.name: n.described() for n in self.inputs},
            "outputs": {n.name: n.described() for n in self.outputs},
            "batch": self.batch,
        }

    def prepare(self, batch: int) -> None:
        """Run the forward once, and compile it for several requests where that is exact."""
        one = self._drawn(0)
        found = self.forward(self._tree([one[n.name] for n in self.inputs]))
        named = zip(trees.paths(found), trees.flatten(found)[0], strict=True)
        self.outputs = [Named(path or OUTPUT, spec_of(array)) for path, array in named]
        self.alone = self._why_alone(batch)
        if self.alone:
            return
        try:
            self._several, self.batch = self.forward.batched(batch), batch
        except TreadleError as error:
            self.alone = f"it cannot be compiled for several: {error.cause}"
            return
        if not self._is_exact():
            self._several, self.batch = None, 1
            self.alone = "its bits would depend on the place of a request among others"

    def _why_alone(self, batch: int) -> str:
        if batch == 1:
            return "a batch is one request"
        if not self.inputs:
            return "it has no inputs"
        if RANDOM_STATE in self.forward.graph.leaves:
            return "it draws random numbers, others with each call"
        return ""

    def _is_exact(self) -> bool:
        """Whether requests get the same bits in the next place, beside others."""
        rows = [self._drawn(i) for i in range(self.batch)]
        here, there = self.run(rows), self.run([rows[-1], *rows[:-1]])
        moved = [*there[1:], there[0]]
        return all(_same_bits(a, b) for a, b in zip(here, moved, strict=True))

    def check(self, arrays: Arrays) -> None:
        """Refuse what a call would: one request must not fail those beside it."""
        try:
            self.forward.check(self._tree([arrays[n.name] for n in self.inputs]))
        except TreadleError as error:
            raise of_error(422, self.name, error) from error

    def run(self, requests: Sequence[Arrays]) -> list[Arrays]:
        """Results of at most `batch` requests."""
        if self._several is None:
            return [self._one(arrays) for arrays in requests]
        left = self.batch - len(requests)
        full = [*requests, *[requests[0]] * left]
        stacked = self._tree([np.stack([r[n.name] for r in full]) for n in self.inputs])
        found = trees.flatten(self._several(stacked))[0]
        pairs = list(zip(self.outputs, found, strict=True))
        return [{n.name: array[i] for n, array in pairs} for i in range(len(requests))]

    def _one(self, arrays: Arrays) -> Arrays:
        found = self.forward(self._tree([arrays[n.name] for n in self.inputs]))
        leaves = trees.flatten(found)[0]
        return {n.name: np.asarray(a) for n, a in zip(self.outputs, leaves, strict=True)}

    def _tree(self, leaves: Sequence[np.ndarray]) -> Tree:
        return self.forward.inputs.structure.rebuild(leaves)

    def _drawn(self, seed: int) -> Arrays:
        """A request: floats around zero, integers that are indices of what they index."""
        source = np.random.default_rng(seed)
        allowed: dict[str, tuple[int, int]] = {}
        for found in index_ranges(self.forward.graph):
            name = found.leaf.removeprefix(INPUT_PREFIX) or INPUT
            low, high = allowed.get(name, (0, found.allowed[-1][1]))
            allowed[name] = max(low, found.allowed[-1][0]), min(high, found.allowed[-1][1])
        return {n.name: _drawn(n.type, source, allowed.get(n.name, (0, 1))) for n in self.inputs}


def _check_unchanging(name: str, forward: Forward) -> None:
    updated = [o.name for o in forward.graph.outputs if o.kind is OutputKind.UPDATE]
    if updated:
        raise ArgumentError(
            "serve",
            f"calls of {name} change {', '.join(updated[:6])}, which the next request would see",
            "Compile it with training=False, and without state of its own.",
        )


def _drawn(type_: TensorType, source: np.random.Generator, allowed: tuple[int, int]) -> np.ndarray:
    if type_.dtype.is_float:
        return source.normal(size=type_.shape).astype(type_.dtype.numpy)
    low, high = allowed
    drawn = source.integers(low, max(low, high), type_.shape, endpoint=True)
    return np.asarray(drawn).astype(type_.dtype.numpy)


def _same_bits(a: Arrays, b: Arrays) -> bool:
    return all(a[n].tobytes() == b[n].tobytes() for n in a)
