"""A scan's results at some elements: iterations run one after another, of all elements of all
results or, where that is too much, of those that are wanted and of those that they are made of."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np

from treadle_checker.field import Array, Element, Field, joined, plain
from treadle_checker.reading import NotEstablished
from treadle_checker.types import Node, Value

LONGEST = 4096  # iterations
MOST = 2**25  # elements that all iterations compute
NONE = np.zeros(0, np.int64)
Held = tuple[Array, Element]  # elements by where they are in what they are of
Some = dict[int, Array]  # which elements, of results or inputs by their numbers


class Scan:
    """One use of a scan, between values of a graph."""

    def __init__(self, on: Any, node: Node):
        a = node.attributes
        self.on, self.body, self.length, self.carries = on, a["body"], a["length"], a["carries"]
        self.order = slice(None, None, -1 if a["reverse"] else 1)
        inputs = self.body.inputs
        self.operands = dict(zip(inputs, node.operands, strict=True))
        self.carried = inputs[a["constants"] :][: self.carries]
        self.sliced = inputs[a["constants"] + self.carries :]
        self.sizes = [t.size for t in self.body.output_types]
        self.known: dict[int, Held] = {}  # by result; rows of what is stacked are one after another

    def at(self, k: int, at: Array) -> Element:
        """Elements of a result by flat index."""
        if self.length > LONGEST:
            raise NotEstablished(f"a scan of {self.length} iterations")
        row, place = np.divmod(at, max(1, self.sizes[k])) if k >= self.carries else (0, at)
        if k not in self.known or not np.isin(place, self.known[k][0]).all():
            elements = self.length * sum(t.size for n in self.body.nodes for t in n.types)
            allows = self.on.field.budget.allows(self.length * self.body.work)
            if elements <= MOST and allows:
                self.run({j: np.arange(size) for j, size in enumerate(self.sizes)}, None)
            else:
                wanted = dict.fromkeys(range(self.carries), NONE) | {k: np.unique(place)}
                self.run(wanted, self.needed(wanted))
        some, found = self.known[k]
        place = row * len(some) + np.searchsorted(some, place)
        return found.map(lambda a: a[place])

    def needed(self, wanted: Some) -> Some:
        """Elements of a body's inputs that the wanted ones of its results are made of. What is
        needed of a carry is wanted of the iteration before, and of all results of its size."""
        budget = self.on.field.budget
        field, fresh = Field(has_logs=False, budget=budget), dict(wanted)
        needed = dict.fromkeys(self.operands, NONE)
        asked: dict[int, list[Array]] = {i: [] for i in self.operands}

        def source(value: Value) -> Any:
            def noted(at: Array) -> Element:
                asked[value.node].append(at)
                return field.keyed("any", self.body.type_of(value).dtype, at)

            return noted if value.node in asked else None

        while fresh:
            on = type(self.on)(self.body, field, source)
            for k, some in fresh.items():
                on.at(self.body.outputs[k][2], some)
            budget.spend(8 * sum(len(some) for each in asked.values() for some in each))
            needed = {i: np.unique(np.concatenate([needed[i], *asked[i]])) for i in needed}
            fresh = {}
            for k, i in enumerate(self.carried):
                for j in (j for j, size in enumerate(self.sizes) if size == self.sizes[k]):
                    known = wanted.get(j, NONE)
                    more = np.setdiff1d(needed[i], known)
                    if len(more):
                        wanted[j], fresh[j] = np.union1d(known, more), more
        return needed

    def run(self, wanted: Some, needed: Some | None) -> None:
        """All iterations, of what is wanted; of everything if nothing says what is needed."""
        found = {k: self.on.at(self.operands[i], wanted[k]) for k, i in enumerate(self.carried)}
        slices, stacked = dict[int, Held](), list[dict[int, Element]]()
        for i in self.sliced:
            size = self.body.nodes[i].types[0].size
            some = np.arange(size) if needed is None else needed[i]
            every = np.arange(self.length)[:, None] * size + some
            found_rows = self.on.at(self.operands[i], every.reshape(-1))
            slices[i] = (
                some,
                found_rows.map(lambda a: a.reshape(self.length, a.size // max(1, self.length))),
            )
        for row in range(self.length)[self.order]:
            held = {i: (wanted[k], found[k]) for k, i in enumerate(self.carried)}
            held |= {i: (some, x.map(itemgetter(row))) for i, (some, x) in slices.items()}
            on = type(self.on)(self.body, self.on.field, partial(self._given, held))
            if needed is None:  # nodes in order, so that no chain is too deep
                found = dict(enumerate(on.outputs()))
            else:
                found = {k: on.at(self.body.outputs[k][2], some) for k, some in wanted.items()}
            stacked.append({k: x for k, x in found.items() if k >= self.carries})
        for k, some in wanted.items():
            rows = [found[k]] if k < self.carries else [each[k] for each in stacked[self.order]]
            self.known[k] = some, joined(rows) if rows else plain(NONE)

    def _given(self, held: Mapping[int, Held], value: Value) -> Any:
        if value.node in held:
            return partial(_among, *held[value.node])
        operand = self.operands.get(value.node)
        return None if operand is None else partial(self.on.at, operand)


def _among(some: Array, x: Element, at: Array) -> Element:
    """Elements of those that there are."""
    places = np.searchsorted(some, at)
    if not np.array_equal(some[np.minimum(places, len(some) - 1)], at):
        raise NotEstablished("an iteration of a long scan reads where its numbers say")
    return x.map(lambda a: a[places])
