"""What composites mean over the reals: their definitions without what only guards against overflow.

Definitions subtract maxima and step around infinities, which cancels. What is compared has neither;
a test proves that each meaning here is its composite's definition.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any

from treadle.frontend.coerce import broadcast_to
from treadle.frontend.definitions import grouped
from treadle.frontend.definitions import mean as mean_of
from treadle.frontend.functions.arithmetic import exp, log, where
from treadle.frontend.functions.indexing import take_along_axis
from treadle.frontend.functions.linear import contract
from treadle.frontend.functions.reductions import sum as sum_of
from treadle.frontend.functions.shaping import iota, reshape, unsqueeze
from treadle.frontend.scopes import isolated_tracing
from treadle.frontend.tensor import Tensor
from treadle.ir import composites as c
from treadle.ir.graph import Graph, GraphBuilder, Output, Value
from treadle.ir.op import Attributes, Op, Types
from treadle.ir.rewrite import copied, inline_into, remove_dead_code, walk

Meaning = Callable[..., Any]


def softmax(attributes: c.Axis, x: Tensor) -> Tensor:
    weights = exp(x)
    return weights / sum_of(weights, attributes.axis, keepdims=True)


def logsumexp(attributes: c.Axes, x: Tensor) -> Tensor:
    return log(sum_of(exp(x), attributes.axes))


def log_softmax(attributes: c.Axis, x: Tensor) -> Tensor:
    return x - log(sum_of(exp(x), attributes.axis, keepdims=True))


def cross_entropy(attributes: c.CrossEntropy, logits: Tensor, targets: Tensor) -> Tensor:
    last = logits.ndim - 1
    chosen = reshape(take_along_axis(logits, unsqueeze(targets, -1), -1), targets.shape)
    total, smoothing = log(sum_of(exp(logits), last)), Fraction(attributes.label_smoothing)
    if smoothing == 0:
        return total - chosen
    return total - chosen * (1 - smoothing) - mean_of(c.Axes((last,)), logits) * smoothing


def attention(
    attributes: c.Attention, q: Tensor, k: Tensor, v: Tensor, *bias: Tensor
) -> tuple[Tensor, Tensor]:
    queries = grouped(q, k.shape[1])
    scores = contract(queries, k, ("bgrtd", "bgsd", "bgrts")) * attributes.scale
    for x in bias:
        b, heads, t, s = x.shape
        of_heads = (1, 1) if heads == 1 else scores.shape[1:3]
        scores = scores + broadcast_to(reshape(x, (b, *of_heads, t, s)), scores.shape)
    weights = exp(scores)
    if attributes.causal:
        shape = scores.shape[-2:]
        seen = broadcast_to(iota(shape, 1) <= iota(shape, 0), scores.shape)
        weights = where(seen, weights, 0)
    total = sum_of(weights, -1, keepdims=True)
    mixed = contract(weights / total, v, ("bgrts", "bgsd", "bgrtd"))
    shape = (*q.shape[:3], v.shape[3])
    return reshape(mixed, shape), reshape(log(total), q.shape[:3])


MEANINGS: dict[Op, Meaning] = {
    c.SOFTMAX: softmax,
    c.LOGSUMEXP: logsumexp,
    c.LOG_SOFTMAX: log_softmax,
    c.CROSS_ENTROPY: cross_entropy,
    c.ATTENTION: attention,
}


@lru_cache(maxsize=1024)
def meaning_graph(op: Op, attributes: Attributes, operands: Types) -> Graph:
    with isolated_tracing(op.name) as trace:
        inputs = [trace.input(str(i), t) for i, t in enumerate(operands)]
        result = MEANINGS[op](attributes, *inputs)
        return remove_dead_code(trace.finish(result if isinstance(result, tuple) else (result,)))


def over_reals(graph: Graph) -> Graph:
    """The graph with composites by their meaning over the reals."""
    builder = GraphBuilder()

    def visit(position: int, operands: tuple[Value, ...]) -> tuple[Value, ...]:
        node = graph.nodes[position]
        if node.op not in MEANINGS:
            return copied(builder, node, operands)
        types = tuple(builder.type_of(v) for v in operands)
        meaning = meaning_graph(node.op, node.attributes, types)
        return tuple(inline_into(builder, meaning, {str(i): v for i, v in enumerate(operands)}))

    values = walk(graph, visit)
    outputs = [Output(o.kind, o.name, v) for o, v in zip(graph.outputs, values, strict=True)]
    return remove_dead_code(builder.build(outputs, graph.name))
