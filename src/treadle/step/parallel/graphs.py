"""The graphs of a data-parallel step: a shard's gradients, their sums, and the update.

Sums and updates are elementwise, so that they have the same bits for rows of any number. What is
not is computed by programs whose shapes do not depend on the number of ranks: a shard's gradients,
and the sums of squares of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.distributed.shards import Merge, Pieces, Share, merges
from treadle.frontend.coerce import cast
from treadle.frontend.functions.arithmetic import isfinite
from treadle.frontend.functions.dynamic import dynamic_slice
from treadle.frontend.functions.reductions import sum as sum_of
from treadle.frontend.functions.shaping import pad, reshape, slice_along, stack, zeros_like
from treadle.frontend.scopes import Trace, isolated_tracing
from treadle.frontend.tensor import Tensor
from treadle.ir.graph import Graph, Output, OutputKind, Value
from treadle.ir.ops.elementwise import CAST
from treadle.ir.ops.leaves import STATE, Leaf
from treadle.ir.rewrite import copied, inline_into, remove_dead_code, walk
from treadle.ir.types import TensorType
from treadle.optim.append import COUNT, SCALAR, Mode, UpdatePlan, append_updates
from treadle.optim.clipping import global_norm

TOTAL, WEIGHT, NORM = "sum:total", "sum:weight", "sum:norm"  # leaves of the update
ROW = "row"  # the number of a row
FINE = "fine"  # 1 if nothing of a shard has overflowed


@dataclass(frozen=True, slots=True)
class Names:
    """Names of the values that a data-parallel step holds beside the session's own."""

    prefix: str

    def _of(self, *parts: str) -> str:
        return "parallel:" + self.prefix + ":".join(parts)

    def gradient(self, parameter: str) -> str:
        """Of a shard, then of this rank's shards: (shards, length)."""
        return self._of("gradient", parameter)

    def summed(self, parameter: str) -> str:
        """Of this rank's shards, where a shard's is stored in a narrow type: (shards, length)."""
        return self._of("summed", parameter)

    def level(self, level: int, parameter: str) -> str:
        """A sum that waits for that of as many shards: (shards, length)."""
        return self._of("waiting", str(level), parameter)

    def received(self, parameter: str) -> str:
        """This rank's rows of the sums of every rank: (ranks, each, length)."""
        return self._of("received", parameter)

    def total(self, parameter: str) -> str:
        """This rank's rows of the sum of all shards: (each, length)."""
        return self._of("total", parameter)

    def gathered(self, parameter: str) -> str:
        """All rows of the sum of all shards: (shards, length)."""
        return self._of("gathered", parameter)

    def rows(self, parameter: str) -> str:
        """This rank's rows of a parameter: (each, length)."""
        return self._of("rows", parameter)

    def state(self, name: str) -> str:
        """What a shard makes of a state of the model."""
        return self._of("state", name)


def cut_rows(x: Tensor, pieces: Pieces) -> Tensor:
    """(shards, length), as `Pieces.cut`."""
    flat = reshape(x, (pieces.size,))
    if pieces.filling:
        flat = pad(flat, [(0, pieces.filling)])
    return reshape(flat, (pieces.shards, pieces.length))


def glue_rows(rows: Tensor, pieces: Pieces) -> Tensor:
    """The whole array, as `Pieces.glue`."""
    flat = reshape(rows, (pieces.shards * pieces.length,))
    return reshape(slice_along(flat, 0, 0, pieces.size), pieces.shape)


def narrow_gradients(graph: Graph) -> dict[str, DType]:
    """Gradients that are nothing but wider copies of narrow values, by parameter."""
    found = {}
    for output in graph.outputs:
        node = graph.nodes[output.value.node]
        if output.kind is OutputKind.GRADIENT and node.op is CAST and node.types[0].shape:
            given, wide = graph.type_of(node.operands[0]), node.types[0]
            if given.is_float and wide.is_float and given.dtype.itemsize < wide.dtype.itemsize:
                found[output.name] = given.dtype
    return found


def with_narrow_leaves(graph: Graph, narrow: Mapping[str, DType]) -> Graph:
    """The graph with some leaves stored in narrower types, from which they are cast at once."""
    if not narrow.keys() & graph.leaves.keys():
        return graph
    with isolated_tracing(graph.name) as trace:

        def visit(position: int, operands: tuple[Value, ...]) -> tuple[Value, ...]:
            node = graph.nodes[position]
            if isinstance(node.attributes, Leaf) and node.attributes.name in narrow:
                leaf = node.attributes
                stored = leaf.type.with_dtype(narrow[leaf.name])
                return (cast(trace.leaf(node.op, leaf.name, stored), leaf.type.dtype).handle,)
            return copied(trace.builder, node, operands)

        values = walk(graph, visit)
        outputs = [Output(o.kind, o.name, v) for o, v in zip(graph.outputs, values, strict=True)]
        return trace.finish_outputs(outputs)


def _before_casts(graph: Graph, narrow: Mapping[str, DType]) -> Graph:
    """The graph whose narrow gradients are what they were cast from."""
    outputs = [
        replace(o, value=graph.nodes[o.value.node].operands[0])
        if o.kind is OutputKind.GRADIENT and o.name in narrow
        else o
        for o in graph.outputs
    ]
    return Graph(graph.nodes, tuple(outputs), graph.name)


def shard_graph(
    graph: Graph,
    names: Names,
    shards: int,
    scales_loss: bool,
    narrow: Mapping[str, DType] | None = None,
) -> Graph:
    """What one shard computes, from a graph with gradients: sums and weights, and rows to add.

    Where gradients may be `narrow`, those that are have the type from which they were cast, and
    those without filling the shape of their parameter: in memory that is what rows are.
    """
    graph = _before_casts(graph, narrow or {})
    with isolated_tracing(graph.name) as trace:
        values = inline_into(trace.builder, graph, {})
        outputs: list[Output] = []
        if scales_loss:  # float16: an overflow anywhere leaves the model's states as they were
            found = zip(graph.outputs, values, strict=True)
            gradients = [
                cast(trace.tensor(v), dtypes.promote(trace.tensor(v).dtype, dtypes.float32))
                for o, v in found
                if o.kind is OutputKind.GRADIENT
            ]
            fine = cast(isfinite(global_norm(gradients)), dtypes.float32)
            outputs.append(Output(OutputKind.RESULT, FINE, fine.handle))
        for output, value in zip(graph.outputs, values, strict=True):
            tensor, kind, name = trace.tensor(value), output.kind, output.name
            if kind is OutputKind.RESULT:
                name = ("scaled", "total", "weight")[int(name)]
            elif kind is OutputKind.GRADIENT:
                pieces = Pieces(tensor.shape, shards)
                is_whole = narrow is not None and not pieces.filling
                tensor = tensor if is_whole else cut_rows(tensor, pieces)
                kind, name = OutputKind.UPDATE, names.gradient(name)
            elif kind is OutputKind.UPDATE:
                name = names.state(name)
            elif kind is OutputKind.CAPTURE:
                continue
            if name != "scaled":
                outputs.append(Output(kind, name, tensor.handle))
        return remove_dead_code(trace.finish_outputs(outputs))


def merge_graph(
    gradients: Mapping[str, TensorType],
    merge: Merge,
    names: Names,
    narrow: Mapping[str, DType] | None = None,
) -> Graph:
    """A shard's gradients (shards, length) added to what waits: older sums on the left."""
    with isolated_tracing("merge") as trace:
        outputs = []
        for name, type_ in gradients.items():
            total = trace.leaf(STATE, names.gradient(name), type_)
            for waiting in merge.levels:
                total = trace.leaf(STATE, names.level(waiting, name), type_) + total
            target = names.summed(name) if name in (narrow or {}) else names.gradient(name)
            if merge.waits_at is not None:
                target = names.level(merge.waits_at, name)
            outputs.append(Output(OutputKind.UPDATE, target, total.handle))
        return remove_dead_code(trace.finish_outputs(outputs))


def fold_graph(
    gradients: Mapping[str, TensorType],
    share: Share,
    names: Names,
    plan: UpdatePlan,
    mode: Mode,
    sums: Mapping[str, str],
) -> Graph:
    """The sum of all shards from the sums of ranks, and of what earlier micro-steps left.

    `sums` are names of what this rank's shards add up to.
    """
    with isolated_tracing("fold") as trace:
        outputs = []
        for name, type_ in gradients.items():
            total = _folded(trace, name, type_, share, names, sums[name])
            accumulator = plan.name("accumulator", "gradient", name)
            if mode is not Mode.UPDATE:
                total = trace.leaf(STATE, accumulator, total.type) + total
                after = zeros_like(total) if mode is Mode.ACCUMULATE_AND_UPDATE else total
                outputs.append(Output(OutputKind.UPDATE, accumulator, after.handle))
            if mode is not Mode.ACCUMULATE:
                outputs.append(Output(OutputKind.UPDATE, names.total(name), total.handle))
        return remove_dead_code(trace.finish_outputs(outputs))


def _folded(
    trace: Trace, name: str, type_: TensorType, share: Share, names: Names, own: str
) -> Tensor:
    length = type_.shape[1]
    if share.ranks == 1:
        return trace.leaf(STATE, own, type_)
    shape = (share.ranks, share.each, length)
    received = trace.leaf(STATE, names.received(name), type_.with_shape(shape))
    waiting: dict[int, Tensor] = {}
    total = received
    for rank, merge in enumerate(merges(share.ranks)):
        total = reshape(slice_along(received, 0, rank, rank + 1), (share.each, length))
        for level in merge.levels:
            total = waiting[level] + total
        if merge.waits_at is not None:
            waiting[merge.waits_at] = total
    return total


def squares_graph(
    gradients: Mapping[str, TensorType], plan: UpdatePlan, held: Names | None = None
) -> Graph:
    """Sums of squares of one row of every mean gradient: (parameters,).

    Its shapes are those of a row, whatever the number of ranks: sums have one order. The row is
    given; where values are `held` on a device, its number, and it is taken there.
    """
    with isolated_tracing("squares") as trace:
        weight = trace.leaf(STATE, WEIGHT, SCALAR)
        scale = plan.loss_scale(trace) if plan.scales_loss else None
        found = []
        for name, type_ in gradients.items():
            row = _row(trace, name, type_, held)
            row = row if scale is None else row / scale
            wide = cast(row / cast(weight, row.dtype), dtypes.promote(row.dtype, dtypes.float32))
            found.append(cast(sum_of(wide * wide), dtypes.float32))
        outputs = [Output(OutputKind.RESULT, "squares", stack(found).handle)]
        return remove_dead_code(trace.finish_outputs(outputs))


def _row(trace: Trace, name: str, type_: TensorType, held: Names | None) -> Tensor:
    length = type_.shape[1]
    if held is None:
        return trace.leaf(STATE, row_name(name), type_.with_shape((length,)))
    number = trace.leaf(STATE, ROW, COUNT)
    rows = trace.leaf(STATE, held.total(name), type_)
    return reshape(dynamic_slice(rows, (number, 0), (1, length)), (length,))


def row_name(parameter: str) -> str:
    return f"row:{parameter}"


def whole_update(
    plan: UpdatePlan,
    gradients: Mapping[str, TensorType],
    metrics: Sequence[str],
    source: Mapping[str, Pieces] | None,
    names: Names,
) -> Graph:
    """The update of whole parameters from sums over all shards.

    `gradients` are their types as parameters have them; with `source` they are glued from rows.
    """
    with isolated_tracing("update") as trace:
        total, weight = (trace.leaf(STATE, n, SCALAR) for n in (TOTAL, WEIGHT))
        outputs = [
            Output(OutputKind.RESULT, str(i), t.handle)
            for i, t in enumerate((total, total, weight))
        ]
        for name, type_ in gradients.items():
            if source is None:
                g = trace.leaf(STATE, names.total(name), type_)
            else:
                shape = (source[name].shards, source[name].length)
                rows = trace.leaf(STATE, names.gathered(name), type_.with_shape(shape))
                g = glue_rows(rows, source[name])
            outputs.append(Output(OutputKind.GRADIENT, name, g.handle))
        for name in metrics:
            value = trace.leaf(STATE, f"sum:metric:{name}", SCALAR)
            one = trace.leaf(STATE, f"sum:metric_weight:{name}", SCALAR)
            outputs.append(Output(OutputKind.METRIC, name, value.handle))
            outputs.append(Output(OutputKind.WEIGHT, name, one.handle))
        graph = trace.finish_outputs(outputs)
    return append_updates(graph, None, plan, Mode.UPDATE)
