"""An elementwise update as one of rows: each rank computes those of its own part.

Whether a graph is elementwise is looked at here, op by op: an optimizer that needs whole matrices
or norms of its parameters is refused by the name of what it does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from treadle.base.errors import ArgumentError
from treadle.distributed.shards import Pieces, Share
from treadle.frontend.functions.shaping import reshape, slice_along
from treadle.frontend.scopes import Trace, isolated_tracing
from treadle.frontend.tensor import Tensor
from treadle.ir.composites import definition_graph
from treadle.ir.graph import Graph, Node, Output, OutputKind, Value
from treadle.ir.literal import ArrayLiteral
from treadle.ir.op import Op
from treadle.ir.ops import elementwise
from treadle.ir.ops.leaves import CONSTANT, PARAMETER, STATE, Constant, Leaf
from treadle.ir.ops.shaping import BROADCAST, RESHAPE, Broadcast
from treadle.ir.rewrite import cut, remove_dead_code, walk
from treadle.ir.types import TensorType
from treadle.step.parallel.graphs import NORM, Names, cut_rows, glue_rows

ELEMENTWISE = frozenset(op for op in vars(elementwise).values() if isinstance(op, Op))


def with_norm_given(update: Graph) -> Graph:
    """The update with the norm of all gradients as a leaf: it is summed over ranks elsewhere."""
    norm = next(o.value for o in update.outputs if o.name == "grad_norm")
    kept = [o for o in update.outputs if o.kind is OutputKind.UPDATE or o.name == "updated"]
    return remove_dead_code(cut(update, [(NORM, norm)], kept, "update"))


def in_rows(
    graph: Graph, share: Share, names: Names, optimizer: str, single: Sequence[str]
) -> Graph:
    """An elementwise graph over whole arrays as one over this rank's rows of them.

    A process by itself has all rows, and its parameters stay as they are; of several each
    has a copy of its own rows beside the parameters. `single` are parameters that are one number.
    """
    with isolated_tracing(graph.name) as trace:
        gathered = {names.total(n): names.gathered(n) for n in single}
        rows = _Rows(trace, graph, share, names, optimizer, gathered)
        values = walk(graph, rows.visit)
        outputs = []
        for output, value in zip(graph.outputs, values, strict=True):
            name = output.name
            if output.kind is OutputKind.UPDATE and name in rows.parameters:
                if share.ranks == 1:
                    value = glue_rows(trace.tensor(value), rows.parameters[name]).handle
                else:
                    name = names.rows(name)
            outputs.append(Output(output.kind, name, value))
        return remove_dead_code(trace.finish_outputs(outputs))


class _Rows:
    """What stands for each node of the whole graph."""

    def __init__(
        self,
        trace: Trace,
        graph: Graph,
        share: Share,
        names: Names,
        optimizer: str,
        single: Mapping[str, str],
    ):
        self.trace, self.graph, self.share, self.names = trace, graph, share, names
        self.optimizer, self.single = optimizer, single
        self.parameters: dict[str, Pieces] = {}

    def row_type(self, type_: TensorType) -> TensorType:
        if not type_.shape:
            return type_
        return type_.with_shape((self.share.each, Pieces(type_.shape, self.share.shards).length))

    def visit(self, position: int, operands: tuple[Value, ...]) -> tuple[Value, ...]:
        node = self.graph.nodes[position]
        attributes = node.attributes
        if isinstance(attributes, Leaf):
            return (self._leaf(node, attributes).handle,)
        if isinstance(attributes, Constant) and not isinstance(attributes.value, ArrayLiteral):
            attributes = Constant(attributes.value, self.row_type(attributes.type))
            return self.trace.builder.add(CONSTANT, attributes, (), node.origin)
        if not node.types[0].shape:
            self._refuse_sums(node)
            return self.trace.builder.add(node.op, attributes, operands, node.origin)
        if isinstance(attributes, Broadcast) and not self._whole_type(node, 0).shape:
            attributes = Broadcast(self.row_type(node.types[0]).shape, ())
            return self.trace.builder.add(BROADCAST, attributes, operands, node.origin)
        if node.op is RESHAPE:  # elements stay in their order
            return operands
        if node.op in ELEMENTWISE or (node.op.is_composite and _is_elementwise(self.graph, node)):
            return self.trace.builder.add(node.op, attributes, operands, node.origin)
        raise self._refusal(node)

    def _whole_type(self, node: Node, operand: int) -> TensorType:
        return self.graph.type_of(node.operands[operand])

    def _leaf(self, node: Node, leaf: Leaf) -> Tensor:
        if leaf.name in self.single:  # the gradient of a number, which every rank updates
            shape = (self.share.shards, 1)
            rows = self.trace.leaf(STATE, self.single[leaf.name], leaf.type.with_shape(shape))
            return reshape(slice_along(rows, 0, 0, 1), ())
        if node.op is not PARAMETER or not leaf.type.shape:
            return self.trace.leaf(node.op, leaf.name, self.row_type(leaf.type))
        pieces = self.parameters[leaf.name] = Pieces(leaf.type.shape, self.share.shards)
        if self.share.ranks == 1:
            return cut_rows(self.trace.leaf(PARAMETER, leaf.name, leaf.type), pieces)
        shape = (self.share.each, pieces.length)
        return self.trace.leaf(STATE, self.names.rows(leaf.name), leaf.type.with_shape(shape))

    def _refuse_sums(self, node: Node) -> None:
        """A number that comes of whole arrays: a norm, a mean."""
        if any(self.graph.type_of(v).shape for v in node.operands):
            raise self._refusal(node)

    def _refusal(self, node: Node) -> ArgumentError:
        operand = self._whole_type(node, 0) if node.operands else node.types[0]
        return ArgumentError(
            "compile_step",
            f"the optimizer {self.optimizer} computes {node.op.name} of {operand}, for which it "
            "needs whole parameters",
            "Compile with DataParallel(shard_optimizer=False).",
        )


def _is_elementwise(graph: Graph, node: Node) -> bool:
    """Whether a composite is by its definition, all of its operands being of one shape."""
    types = tuple(graph.type_of(v) for v in node.operands)
    if len({t.shape for t in types} | {node.types[0].shape}) != 1:
        return False
    inside = definition_graph(node.op, node.attributes, types)
    return all(
        n.op in ELEMENTWISE or isinstance(n.attributes, (Leaf, Constant)) for n in inside.nodes
    )
