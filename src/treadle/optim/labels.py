"""A loss with labels that the model itself draws, for estimates of its curvature."""

from __future__ import annotations

import math
from collections.abc import Callable

from treadle.base.errors import GradientError
from treadle.frontend import random
from treadle.frontend.scopes import isolated_tracing
from treadle.ir.composites import CROSS_ENTROPY
from treadle.ir.control import bodies
from treadle.ir.graph import Graph, Output, Value
from treadle.ir.ops.indexing import RandomBits
from treadle.ir.rewrite import copied, remove_dead_code, walk


def with_sampled_labels(graph: Graph, next_site: Callable[[], int]) -> tuple[Graph, int]:
    """The loss with the targets of every cross-entropy drawn from its logits; how many are drawn.

    `next_site` gives a random call site that is free.
    """
    drawn = 0
    with isolated_tracing(f"{graph.name}.sampled") as trace:

        def visit(position: int, operands: tuple[Value, ...]) -> tuple[Value, ...]:
            nonlocal drawn
            node = graph.nodes[position]
            if node.op is CROSS_ENTROPY:
                logits, targets = (trace.tensor(v) for v in operands)
                trace.skip_sites(next_site())
                labels = random.categorical(logits).astype(targets.dtype)
                operands = (operands[0], labels.handle)
                drawn += math.prod(targets.shape)
            return copied(trace.builder, node, operands)

        values = walk(graph, visit)
        outputs = [Output(o.kind, o.name, v) for o, v in zip(graph.outputs, values, strict=True)]
        sampled = remove_dead_code(trace.finish_outputs(outputs))
    if not drawn:
        raise GradientError(
            "sampled_grad_at",
            "the loss has no cross-entropy of class indices to draw labels for",
            "Use losses.cross_entropy without class weights, outside of td.scan.",
        )
    return sampled, drawn


def free_site(graph: Graph) -> int:
    """The first random call site that a graph and its bodies leave free."""
    highest, pending = -1, [graph]
    while pending:
        for node in pending.pop().nodes:
            if isinstance(node.attributes, RandomBits):
                highest = max(highest, node.attributes.site)
            pending.extend(bodies(node.attributes))
    return highest + 1
