"""The gradients of a loss against forward mode, exactly over the field."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from treadle_checker.composites import DEFINITIONS, body_of
from treadle_checker.elements import Elements, Source
from treadle_checker.equality import index_size
from treadle_checker.field import Array, Element, Field, is_float
from treadle_checker.reading import NotEstablished, Rejected
from treadle_checker.types import labels
from treadle_checker.values import LEAVES, Graph, Value

MOST_LEAVES = 2**23  # elements of all leaves
MOST_WORK = 2**31  # multiplications


def check_gradient(loss: Graph, both: Graph, trial: int = 0) -> str:
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
    if work(loss) > MOST_WORK:
        raise NotEstablished(f"it takes {work(loss):,} multiplications, more than {MOST_WORK:,}")
    # Logarithms without laws are enough as a rule, and fast.
    if not any(_agree(loss, both, wanted, Field(trial, has_logs=laws)) for laws in (False, True)):
        told = ", ".join(wanted)[:200]
        raise Rejected(f"the gradients are not those of the loss, of one of {told}")
    return (
        f"along one random direction of {len(wanted)} parameters with {size:,} elements of leaves"
    )


def _agree(loss: Graph, both: Graph, wanted: dict[str, Value], field: Field) -> bool:
    """Whether forward mode and the gradients give one slope along a random direction."""
    most = index_size([loss, both])

    def along(name: str, at: Array) -> Element:
        return field.keyed(f"along {name}", "float32", at)

    def leaf(name: str, dtype: str, sloped: bool) -> Source:
        def elements(at: Array) -> Element:
            found = field.keyed(name, dtype, at, most)
            if is_float(dtype):
                slope = along(name, at) if sloped and name in wanted else None
                return replace(found, slope=slope)
            is_flag = dtype == "bool"
            return found if is_flag else field.integers(found.p.astype(np.int64) % most, dtype)

        return elements

    def given(graph: Graph, sloped: bool) -> Callable[[Value], Source | None]:
        def source(value: Value) -> Source | None:
            node = graph.nodes[value.node]
            is_leaf = node.op in LEAVES
            return leaf(node.attributes["name"], node.types[0].dtype, sloped) if is_leaf else None

        return source

    slope = Elements(loss, field, given(loss, True)).outputs()[0].slope
    reverse = Elements(both, field, given(both, False))
    found = dict(zip(both.outputs, reverse.outputs(), strict=True))
    totals = [0, 0]
    for name, value in wanted.items():
        x = found["gradient", name, value]
        for k, (f, a, b) in enumerate(field.lanes(x, along(name, np.arange(len(x.p))))):
            totals[k] = (totals[k] + int((a * b % f.modulus).sum())) % f.modulus
    expected = [0, 0] if slope is None else [int(slope.q[0]), int(slope.p[0])]
    return totals[0] == expected[0] or totals[1] == expected[1]


def work(graph: Graph) -> int:
    """Multiplications, and elements that are computed."""
    total = 0
    for node in graph.nodes:
        types = tuple(graph.type_of(v) for v in node.operands)
        if node.op == "scan":
            total += node.attributes["length"] * work(node.attributes["body"])
        elif node.op == "call" or node.op in DEFINITIONS:
            total += work(body_of(node.op, node.attributes, types))
        elif node.op == "contract":
            x, y, _ = labels(node.attributes["spec"])
            total += math.prod(
                dict(zip(x + y, types[0].shape + types[1].shape, strict=True)).values()
            )
        else:
            total += sum(t.size for t in node.types)
    return total
