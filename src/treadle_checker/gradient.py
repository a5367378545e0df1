"""The gradients of a loss against forward mode, exactly over the field."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from treadle_checker.budget import Budget
from treadle_checker.elements import Elements, Source
from treadle_checker.equality import generic, index_size
from treadle_checker.field import Array, Element, Field
from treadle_checker.reading import NotEstablished, Rejected
from treadle_checker.types import Graph, Value

MOST_LEAVES = 2**24  # elements of all leaves
PIECES = 6  # of functions that are made by comparing: which one is chance, for each element


def check_gradient(loss: Graph, both: Graph, trial: int = 0, budget: Budget | None = None) -> str:
    """That Σ gradient · direction is the slope of the first result; what was looked at."""
    wanted = {name: value for kind, name, value in both.outputs if kind == "gradient"}
    if not wanted or not loss.outputs:
        raise NotEstablished("there are no gradients")
    leaves = {name: loss.nodes[i].types[0] for name, i in loss.leaves.items()}
    for name, i in both.leaves.items():
        if leaves.get(name) != both.nodes[i].types[0]:
            raise Rejected(f"the leaf {name!r} is another one in the gradient's graph")
    size = sum(t.size for t in leaves.values())
    if size > MOST_LEAVES:
        raise NotEstablished(f"its leaves have {size:,} elements, more than {MOST_LEAVES:,}")
    # Logarithms without laws are enough as a rule, and fast. Gradients of maxima compare values: of
    # what is made by comparing, as of an absolute value, that is known of one piece at a time.
    modes = [[(trial, False, laws)] for laws in (False, True)]
    modes += [[(k, True, True) for k in range(PIECES)]]
    budget = budget or Budget()

    def agrees(mode: tuple[int, bool, bool]) -> bool:
        return _agree(loss, both, wanted, Field(*mode, budget))

    if not any(all(map(agrees, mode)) for mode in modes):
        told = ", ".join(wanted)[:200]
        raise Rejected(f"the gradients are not those of the loss, of one of {told}")
    told = f"{len(wanted)} parameters with {size:,} elements of leaves"
    return f"along one random direction of {told}"


def _agree(loss: Graph, both: Graph, wanted: dict[str, Value], field: Field) -> bool:
    """Whether forward mode and the gradients give one slope along a random direction."""
    most = index_size([loss, both])

    def along(name: str, at: Array) -> Element:
        return field.keyed(f"along {name}", "float32", at)

    def sloped(value: Value) -> Source | None:
        plain, node = generic(loss, field, most)(value), loss.nodes[value.node]
        name = node.attributes.get("name", "")
        if plain is None or name not in wanted:
            return plain
        return lambda at: replace(plain(at), slope=along(name, at))

    slope = Elements(loss, field, sloped).outputs()[0].slope
    results = Elements(both, field, generic(both, field, most)).outputs()
    found = dict(zip(both.outputs, results, strict=True))
    totals = [0, 0]
    for name, value in wanted.items():
        x = found["gradient", name, value]
        for k, (f, a, b) in enumerate(field.lanes(x, along(name, np.arange(len(x.p))))):
            totals[k] = (totals[k] + int((a * b % f.modulus).sum())) % f.modulus
    expected = [0, 0] if slope is None else [int(slope.q[0]), int(slope.p[0])]
    return totals[0] == expected[0] or totals[1] == expected[1]
