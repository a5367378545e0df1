"""The walk over a graph that gives it one leading axis more, by a rule for each op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from treadle.base.errors import ArgumentError
from treadle.base.origin import Origin
from treadle.domains.domain import input_names
from treadle.frontend.functions.reductions import sum as sum_of
from treadle.frontend.scopes import Trace, bind1, isolated_tracing
from treadle.frontend.tensor import Tensor
from treadle.frontend.tracing import emit
from treadle.ir.composites import definition_graph
from treadle.ir.control import bodies
from treadle.ir.graph import Graph, Node, Output
from treadle.ir.op import Attributes, Op, RuleTable, Types
from treadle.ir.ops.indexing import RANDOM_BITS
from treadle.ir.ops.leaves import Leaf
from treadle.ir.ops.shaping import BROADCAST, Broadcast
from treadle.ir.rewrite import remove_dead_code
from treadle.ir.types import TensorType

RANDOMNESS = ("different", "same", "error")


@dataclass(frozen=True, slots=True)
class Batch:
    """What a rule sees beside the operands: the size of the new axis, and which of them have it.

    The axis is always the first one. Rules are called when an operand has it, or the op draws
    random bits.
    """

    size: int
    batched: tuple[bool, ...]
    randomness: str = "different"

    def spread(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """The operands, those without the axis repeated along it."""
        return [
            x if is_batched else repeated(x, self.size)
            for x, is_batched in zip(operands, self.batched, strict=True)
        ]


# Results with the axis from operands of which some have it. A result that has no more axes than the
# op gives without a batch is the same for every element.
BATCHING: RuleTable[Callable[..., Sequence[Tensor]]] = RuleTable("batching rule")


def repeated(x: Tensor, size: int) -> Tensor:
    """The same for every element of a batch."""
    shape = (size, *x.shape)
    return bind1(BROADCAST, Broadcast(shape, tuple(range(1, len(shape)))), x)


def with_axis(type_: TensorType, size: int) -> TensorType:
    return type_.with_shape((size, *type_.shape))


def batch_graph(
    graph: Graph,
    mapped: frozenset[str],
    size: int,
    randomness: str = "different",
    spread: frozenset[int] = frozenset(),
    summed: frozenset[int] = frozenset(),
) -> Graph:
    """The graph for `size` elements at once: `mapped` leaves have a leading axis.

    So do the outputs that differ between elements, and those at the positions in `spread`; those in
    `summed` are added up over the elements.
    """
    with isolated_tracing(graph.name) as trace:
        known: list[Sequence[Tensor]] = []
        for node in graph.nodes:
            trace.origin = node.origin or Origin("vmap", 0, graph.name)
            operands = [known[v.node][v.output] for v in node.operands]
            plain = [graph.type_of(v) for v in node.operands]
            batched = tuple(x.ndim > t.rank for x, t in zip(operands, plain, strict=True))
            known.append(_visit(trace, node, operands, Batch(size, batched, randomness), mapped))
        outputs = []
        for i, output in enumerate(graph.outputs):
            found = known[output.value.node][output.value.output]
            is_batched = found.ndim > graph.type_of(output.value).rank
            if i in spread | summed and not is_batched:
                found = repeated(found, size)
            found = sum_of(found, 0) if i in summed else found
            outputs.append(Output(output.kind, output.name, found.handle))
        return remove_dead_code(trace.finish_outputs(outputs))


def _visit(
    trace: Trace, node: Node, operands: Sequence[Tensor], batch: Batch, mapped: frozenset[str]
) -> Sequence[Tensor]:
    op, attributes = node.op, node.attributes
    if isinstance(attributes, Leaf):
        is_mapped = attributes.name in mapped
        type_ = with_axis(attributes.type, batch.size) if is_mapped else attributes.type
        return (trace.leaf(op, attributes.name, type_),)
    draws = _draws(node.op, attributes)
    if draws and batch.randomness == "error":
        raise ArgumentError(
            "vmap",
            "the function draws random numbers, and randomness is 'error'",
            "Use 'different' for noise of its own for each element, or 'same'.",
        )
    if any(batch.batched) or (draws and batch.randomness == "different"):
        return apply_rule(op, attributes, batch, operands)
    return trace.apply(op, attributes, operands)


def _draws(op: Op, attributes: Attributes) -> bool:
    """Whether the op draws random bits, in its bodies too."""
    inside = (n for body in bodies(attributes) for n in body.nodes)
    return op is RANDOM_BITS or any(_draws(n.op, n.attributes) for n in inside)


def apply_rule(
    op: Op, attributes: Attributes, batch: Batch, operands: Sequence[Tensor]
) -> Sequence[Tensor]:
    """The results of an op by its rule, or by its definition where a composite has none.

    No elements cannot be folded into an axis and come out again.
    """
    rule = BATCHING.get(op)
    if rule is None or (op.is_composite and batch.size == 0):
        return by_definition(op, attributes, batch, operands)
    given = (attributes,) if op.has_attributes else ()
    return rule(*given, batch, *operands)


def by_definition(
    op: Op, attributes: Attributes, batch: Batch, operands: Sequence[Tensor]
) -> Sequence[Tensor]:
    """A composite through what it is made of."""
    assert op.is_composite, f"{op} has no batching rule"
    plain = tuple(
        x.type.with_shape(x.shape[1:]) if is_batched else x.type
        for x, is_batched in zip(operands, batch.batched, strict=True)
    )
    graph = _batched_definition(op, attributes, plain, batch.batched, batch.size)
    return emit(graph, dict(zip(input_names(graph), operands, strict=True)))


@lru_cache(maxsize=4096)
def _batched_definition(
    op: Op, attributes: Attributes, operands: Types, batched: tuple[bool, ...], size: int
) -> Graph:
    definition = definition_graph(op, attributes, operands)
    return batch_graph(definition, mapped_names(input_names(definition), batched), size)


def mapped_names(names: Sequence[str], batched: Sequence[bool]) -> frozenset[str]:
    return frozenset(n for n, is_batched in zip(names, batched, strict=True) if is_batched)
