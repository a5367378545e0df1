"""Graphs for what the host does with numbers of shards, so that a device can do it in its stream.

What comes of every shard is a row of an array of all shards, the same on every rank: programs have
shapes that do not depend on the number of ranks. Numbers are summed as float64, in the tree of
shards.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from treadle.base import dtypes
from treadle.base.shapes import size_of
from treadle.distributed.shards import merges
from treadle.frontend.coerce import cast
from treadle.frontend.functions.arithmetic import eq, logical_and, sqrt, where
from treadle.frontend.functions.reductions import sum as sum_of
from treadle.frontend.functions.shaping import concat, reshape, slice_along, zeros_like
from treadle.frontend.scopes import Trace, isolated_tracing
from treadle.frontend.tensor import Tensor
from treadle.ir.graph import Graph, Output, OutputKind
from treadle.ir.ops.leaves import STATE
from treadle.ir.rewrite import inline_into, remove_dead_code
from treadle.ir.types import TensorType
from treadle.optim.append import SCALAR, Mode, UpdatePlan
from treadle.runtime.chain import aligned
from treadle.step.parallel.graphs import FINE, NORM, TOTAL

NUMBERS, SQUARES = "numbers", "squares"


def every_name(what: str) -> str:
    """The leaf that has what every shard gave."""
    return f"every:{what}"


def row_type(type_: TensorType) -> TensorType:
    """A value as a flat row, filled up to where the next may begin."""
    size = max(1, size_of(type_.shape)) * type_.dtype.numpy.itemsize
    return type_.with_shape((aligned(size) // type_.dtype.numpy.itemsize,))


def every_type(type_: TensorType, shards: int) -> TensorType:
    return type_.with_shape((shards, *row_type(type_).shape))


def numbers_type(columns: Sequence[str]) -> TensorType:
    """One shard's numbers."""
    return TensorType((len(columns),), dtypes.float64)


def tree_of(rows: Tensor) -> Tensor:
    """The sum over the first axis, as `tree_sum` makes it: pairs while their number is even."""
    while rows.shape[0] % 2 == 0:
        pairs = reshape(rows, (rows.shape[0] // 2, 2, *rows.shape[1:]))
        left, right = (slice_along(pairs, 1, i, i + 1) for i in (0, 1))
        rows = reshape(left + right, (rows.shape[0] // 2, *rows.shape[1:]))
    waiting: dict[int, Tensor] = {}
    total = rows
    for i, merge in enumerate(merges(rows.shape[0])):
        total = slice_along(rows, 0, i, i + 1)
        for level in merge.levels:
            total = waiting[level] + total
        if merge.waits_at is not None:
            waiting[merge.waits_at] = total
    return reshape(total, total.shape[1:])


def _every(trace: Trace, what: str, type_: TensorType, shards: int) -> Tensor:
    """(shards, size): what every shard gave, without what its rows are filled up with."""
    rows = trace.leaf(STATE, every_name(what), every_type(type_, shards))
    return slice_along(rows, 1, 0, size_of(type_.shape))


def packed_graph(graph: Graph, columns: Sequence[str], placed: Collection[str] = ()) -> Graph:
    """A shard's graph whose numbers are one row.

    Updates that are `placed` are results: whoever runs it says where they are, and what computes
    them writes there.
    """
    with isolated_tracing(graph.name) as trace:
        values = inline_into(trace.builder, graph, {})
        found = {
            f"{o.kind.value}:{o.name}": trace.tensor(v)
            for o, v in zip(graph.outputs, values, strict=True)
        }
        row = concat([reshape(cast(found[c], dtypes.float64), (1,)) for c in columns])
        outputs = [
            Output(OutputKind.RESULT if o.name in placed else o.kind, o.name, v)
            for o, v in zip(graph.outputs, values, strict=True)
            if o.kind is OutputKind.UPDATE
        ]
        outputs.append(Output(OutputKind.RESULT, NUMBERS, row.handle))
        return remove_dead_code(trace.finish_outputs(outputs))


def sums_graph(summed: Mapping[str, TensorType], shards: int) -> Graph:
    """Sums over all shards of what a stage ends with."""
    with isolated_tracing("sums") as trace:
        outputs = []
        for name, type_ in summed.items():
            total = tree_of(_every(trace, name, type_, shards))
            outputs.append(Output(OutputKind.RESULT, name, reshape(total, type_.shape).handle))
        return trace.finish_outputs(outputs)


def numbers_graph(
    columns: Sequence[str], metrics: Sequence[str], shards: int, plan: UpdatePlan, mode: Mode
) -> Graph:
    """Loss, weight and metrics over all shards, and over the micro-steps before."""
    with isolated_tracing("numbers") as trace:
        every = _every(trace, NUMBERS, numbers_type(columns), shards)

        def column(name: str) -> Tensor:
            at = columns.index(name)
            return slice_along(every, 1, at, at + 1)

        totals = {n: tree_of(column(f"result:{n}")) for n in ("total", "weight")}
        for name in metrics:
            value, weight = column(f"metric:{name}"), column(f"weight:{name}")
            # A value without weight, NaN perhaps, counts for nothing.
            totals[f"metric:{name}"] = tree_of(where(eq(weight, 0.0), 0.0, value * weight))
            totals[f"metric_weight:{name}"] = tree_of(weight)
        totals = {n: reshape(t, ()) for n, t in totals.items()}
        outputs: list[Output] = []
        if mode is not Mode.UPDATE:
            totals, outputs = _accumulated(trace, totals, plan, mode)
        found = {
            f"result:{TOTAL}": totals["total"],
            "result:weight": totals["weight"],
            "result:loss": _ratio(totals["total"], totals["weight"]),
        }
        for name in metrics:
            weight = totals[f"metric_weight:{name}"]
            found[f"metric:{name}"] = _ratio(totals[f"metric:{name}"], weight)
            found[f"weight:{name}"] = weight
        for label, tensor in found.items():
            kind, _, name = label.partition(":")
            narrow = cast(tensor, dtypes.float32).handle
            outputs.append(Output(OutputKind(kind), name, narrow))
        return remove_dead_code(trace.finish_outputs(outputs))


def _accumulated(
    trace: Trace, totals: Mapping[str, Tensor], plan: UpdatePlan, mode: Mode
) -> tuple[dict[str, Tensor], list[Output]]:
    """Sums with those of earlier micro-steps, and what is left for the next."""
    found, outputs = {}, []
    for name, total in totals.items():
        held = plan.name("accumulator", name)
        narrow = cast(cast(trace.leaf(STATE, held, SCALAR), total.dtype) + total, dtypes.float32)
        found[name] = cast(narrow, total.dtype)
        after = zeros_like(narrow) if mode is Mode.ACCUMULATE_AND_UPDATE else narrow
        outputs.append(Output(OutputKind.UPDATE, held, after.handle))
    return found, outputs


def _ratio(total: Tensor, weight: Tensor) -> Tensor:
    return where(eq(weight, 0.0), math.nan, total / weight)


def norms_graph(parameters: Sequence[str], shards: int, of_each: bool) -> Graph:
    """The norm of all gradients, from sums of squares of every row; that of each if asked for."""
    with isolated_tracing("norms") as trace:
        type_ = TensorType((len(parameters),))
        wide = cast(_every(trace, SQUARES, type_, shards), dtypes.float64)
        outputs = [Output(OutputKind.RESULT, NORM, _root(sum_of(wide)).handle)]
        for i, name in enumerate(parameters) if of_each else ():
            own = sum_of(slice_along(wide, 1, i, i + 1))
            outputs.append(Output(OutputKind.RESULT, f"grad_norm:{name}", _root(own).handle))
        return trace.finish_outputs(outputs)


def _root(total: Tensor) -> Tensor:
    return cast(sqrt(total), dtypes.float32)


def states_graph(
    states: Mapping[str, TensorType], columns: Sequence[str], shards: int, scales_loss: bool
) -> Graph:
    """States of the model: what all shards agree on, or the mean of floats.

    Where the loss is scaled, an overflow in any shard leaves them as they were.
    """
    with isolated_tracing("states") as trace:
        is_fine = None
        if scales_loss:
            every = _every(trace, NUMBERS, numbers_type(columns), shards)
            at = columns.index(f"result:{FINE}")
            count = sum_of(slice_along(every, 1, at, at + 1))
            is_fine = eq(count, float(shards))
        outputs = []
        for name, type_ in states.items():
            rows = _every(trace, f"state:{name}", type_, shards)
            value = reshape(_combined(rows), type_.shape)
            if is_fine is not None:
                value = where(is_fine, value, trace.leaf(STATE, name, type_))
            outputs.append(Output(OutputKind.UPDATE, name, value.handle))
        return remove_dead_code(trace.finish_outputs(outputs))


def _combined(rows: Tensor) -> Tensor:
    first = slice_along(rows, 0, 0, 1)
    if rows.dtype.kind != "float" or rows.shape[0] == 1:
        return first
    wide = cast(rows, dtypes.float64)
    mean = cast(tree_of(wide) / float(rows.shape[0]), rows.dtype)
    same = eq(first, slice_along(rows, 0, 1, 2))
    for i in range(2, rows.shape[0]):
        same = logical_and(same, eq(first, slice_along(rows, 0, i, i + 1)))
    return where(same, first, reshape(mean, first.shape))
