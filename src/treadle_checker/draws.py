"""Whether two formulas agree: both are computed from the same draws, at some elements.

Floats are random residues. Flags are too, at first: what holds for any number in a flag's place
holds for both of its values; comparisons of floats are such flags. Integers are drawn so that they
meet every constant that they are compared with. Where this does not decide it, comparisons follow
the order of residues, flags are 0 or 1, and several draws must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from treadle_checker import randomness
from treadle_checker.budget import FILE, Budget
from treadle_checker.elements import Elements, Source
from treadle_checker.field import (
    ELEMENTWISE,
    Array,
    Element,
    Field,
    chosen,
    is_float,
    is_zero,
    same,
)
from treadle_checker.reading import NotEstablished
from treadle_checker.types import LEAVES, Graph, Literal, Value, bodies_of, is_integer, is_view

MOST_ROUNDS = 3  # of more and more elements, as long as all are zero
MOST_EDGES = 200  # constants that integers are compared with
_LOGS = frozenset(["log"])
_CHOICES = frozenset("max min reduce_max reduce_min order lt le eq not and or xor where".split())
_PREDICATES = frozenset("eq lt le max min floordiv mod".split())


class Effort(NamedTuple):
    """How long may be looked, and at how much."""

    spent: int = FILE  # operations, all comparisons together; one may take an eighth
    samples: int = 14  # elements of a value, beside the first and the last; all of twice as many
    cuts: int = 6  # deeper ones, where values that are equal should be so at the nearest
    draws: int = 16  # of integers, and of flags, where predicates read them


WHOLE = Effort()


class Mode(NamedTuple):
    """How comparisons are decided, and logarithms; `needed` are the ops that it is for."""

    number: int
    ordered: bool = False
    has_logs: bool = False
    needed: frozenset[str] = frozenset()


# Logarithms without laws are enough as a rule, and fast.
MODES = (Mode(0), Mode(1, has_logs=True, needed=_LOGS), Mode(2, True, True, _CHOICES))


def agree(a: Graph, b: Graph, effort: Effort, budget: Budget) -> bool:
    """Whether the results of two graphs of the same leaves agree in some mode, in all its draws."""
    ops = a.ops | b.ops
    modes = [m for m in MODES if not m.needed or m.needed & ops]
    every = {a.nodes[i].types[0].dtype for i in a.inputs}
    has_integers = any(not is_float(dtype) and dtype != "bool" for dtype in every)
    is_drawn = has_integers and bool(_PREDICATES & ops)
    edges = _edges([a, b]) if is_drawn else []
    indices = _indices(a) | _indices(b)
    for mode in modes:
        draws = effort.draws if is_drawn or mode.ordered else 1
        if all(_agree_once(a, b, effort, budget, mode, k, edges, indices) for k in range(draws)):
            return True
    return False


def _agree_once(
    a: Graph, b: Graph, effort: Effort, budget: Budget, mode: Mode, draw: int,
    edges: list[int], indices: dict[str, int],
) -> bool:  # fmt: skip
    """Whether both agree at some elements; more of them, as long as all are zero."""
    trial, size = mode.number + len(MODES) * draw, a.output_types[0].size
    field = Field(trial, mode.ordered, mode.has_logs, budget.part(effort.spent // 8))
    rng = randomness.generator(4, trial, size)
    most = index_size([a, b])
    if not size:
        return True
    sides = [Elements(g, field, generic(g, field, most, edges, indices)) for g in (a, b)]
    for count in (effort.samples * 16**k for k in range(MOST_ROUNDS)):
        some = np.array(sorted({*rng.integers(0, size, count).tolist(), 0, size - 1}))
        at = np.arange(size) if size <= 2 * count else some
        x, y = (on.at(on.graph.outputs[0][2], at) for on in sides)
        if not same(x, y):
            return False
        # Zeros say little: gradients of a maximum or of a table are almost nothing else.
        is_sparse = is_float(a.output_types[0].dtype) and is_zero(x)
        if not is_sparse or len(at) == size:
            return True
    raise NotEstablished("all elements that were compared are zero")


def generic(
    graph: Graph, field: Field, most: int, edges: list[int], indices: dict[str, int]
) -> Callable[[Value], Source | None]:
    """Leaves as generic elements by their names; integers are indices inside what they index, or
    what they are compared with."""

    def given(value: Value) -> Source | None:
        node, dtype = graph.nodes[value.node], graph.type_of(value).dtype
        name = node.attributes.get("name", "")

        def elements(at: Array) -> Element:
            if dtype == "bool" and field.ordered:
                return field.keyed(name, dtype, at)
            if not field.ordered and not is_integer(dtype):
                return field.keyed(name, "float32", at)
            if is_float(dtype):
                return _colliding(field, name, at)
            drawn = field.keyed(name, dtype, at, most).p.astype(np.int64) % most
            # An index that nothing guards has no meaning outside of its axis.
            inside = [e for e in edges if name not in indices or 0 <= e < indices[name]]
            if inside:
                which = field.keyed(f"edge of {name}", "float32", at).p
                among = np.array(inside)[which // 2 % len(inside)]
                drawn = np.where(which % 2 == 0, among, drawn)
            return field.integers(drawn, dtype)

        return elements if node.op in LEAVES else None

    return given


def _colliding(field: Field, name: str, at: Array) -> Element:
    """Floats half of which are one of three, whatever they are elements of: some are equal."""
    which = field.keyed(f"which of {name}", "float32", at).p
    common = field.keyed("common", "float32", which // 2 % 3)
    return chosen(which % 2 == 0, common, field.keyed(name, "float32", at))


def _edges(graphs: Iterable[Graph]) -> list[int]:
    """Integers at which a comparison with a constant changes."""
    found: set[int] = set()
    for graph in graphs:
        for node in graph.nodes:
            if node.op in _PREDICATES:
                for value in (c for v in node.operands for c in _constants(graph, v)):
                    found |= {value} if node.op == "eq" else {value - 1, value, value + 1}
            found |= {e for body in bodies_of(node) for e in _edges([body])}
    return sorted(found)[:MOST_EDGES]


def _indices(graph: Graph) -> dict[str, int]:
    """Leaves that index an axis as they are, and its length."""
    found = _unguarded(graph)
    leaves = ((graph.nodes[v.node], size) for v, size in found.items())
    return {node.attributes.get("name", ""): s for node, s in leaves if node.op in LEAVES}


def _unguarded(graph: Graph) -> dict[Value, int]:
    """Values that index an axis without a comparison before, and its length."""
    found: dict[Value, int] = {}
    for position, node in reversed(list(enumerate(graph.nodes))):
        value, a = Value(position), node.attributes
        if node.op == "scatter_add":
            found[node.operands[1]] = a["size"]
        elif value in found and (node.op == "cast" or is_view(node)):
            found[node.operands[0]] = found[value]
        elif node.op == "call":
            for body in bodies_of(node):
                inside = _unguarded(body)
                given = zip(body.inputs, node.operands)
                found |= {v: inside[Value(i)] for i, v in given if Value(i) in inside}
        for name, size in (pair for r in a.get("reads", ()) for pair in r.address.data.items()):
            found[node.operands[int(name)]] = size
    return found


def _constants(graph: Graph, value: Value) -> Iterator[int]:
    """The integer that a value is, if it is one constant, spread or cast."""
    node = graph.nodes[value.node]
    while (node.op == "cast" or is_view(node)) and not is_float(node.types[0].dtype):
        node = graph.nodes[node.operands[0].node]
    if node.op == "constant" and not is_float(node.types[0].dtype):
        number = node.attributes["value"]
        if not isinstance(number, Literal):
            yield int(number)


def index_size(graphs: Iterable[Graph]) -> int:
    """The shortest axis that anything indexes, in bodies too."""
    found = [50]
    for graph in graphs:
        found += index_sizes(graph).values()
        found += [index_size(bodies_of(node)) for node in graph.nodes]
    return max(1, min(found))


@lru_cache(maxsize=4)
def index_sizes(graph: Graph) -> dict[Value, int]:
    """How long the axes are that integers index, or are positions along."""
    found: dict[Value, int] = {}
    for position, node in reversed(list(enumerate(graph.nodes))):
        value, a, operands = Value(position), node.attributes, node.operands
        if node.op == "adjoint":
            a, operands = a["of"].attributes, operands[1:]
        if node.op == "order":
            places = (k for k, is_place in enumerate(a["places"]) if is_place)
            found |= {Value(position, k): a["length"] for k in places}
        elif node.op == "scatter_add":
            found[operands[1]] = a["size"]
        elif value in found and (node.op in ELEMENTWISE or is_view(node)):
            found |= {v: found[value] for v in operands if v not in found}
        if a.get("indices"):  # along an axis of one element nothing reads them
            found |= dict.fromkeys(operands[-a["indices"] :], 1)
        for name, size in (pair for r in a.get("reads", ()) for pair in r.address.data.items()):
            found[operands[int(name)]] = size
    return found
