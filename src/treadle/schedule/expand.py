"""Composites and calls replaced by what they are made of, so that only primitives remain."""

from __future__ import annotations

from treadle.base.dtypes import float32
from treadle.ir.composites import (
    ATTENTION,
    ATTENTION_GRAD,
    LINEAR_CROSS_ENTROPY,
    LINEAR_CROSS_ENTROPY_GRAD,
    MAX_POOL,
    Attention,
    definition_graph,
)
from treadle.ir.control import CALL, Call
from treadle.ir.graph import Graph, GraphBuilder, Node, Output, Value
from treadle.ir.op import NoAttributes
from treadle.ir.ops.elementwise import STOP_GRADIENT
from treadle.ir.ops.indexing import ScatterAdd
from treadle.ir.ops.leaves import IOTA, Leaf
from treadle.ir.ops.reductions import ARGMAX, REDUCE_MAX, ArgReduce, Reduce
from treadle.ir.rewrite import inline_into, remove_dead_code
from treadle.ir.types import TensorType
from treadle.kernel.target import CPU, Target
from treadle.schedule.channels import CONVOLUTIONS, is_conv_for_library


def expand(
    graph: Graph, templates: bool = False, streams: bool = True, target: Target = CPU
) -> Graph:
    """The same graph in primitives, but for composites that have a template, where asked for.

    Templates that are streams are left out where `streams` is false.
    """
    builder = GraphBuilder()
    moved: list[tuple[Value, ...]] = []
    expanded: dict[int, Graph] = {}  # bodies by identity: layers share them
    for node in graph.nodes:
        operands = [moved[v.node][v.output] for v in node.operands]
        types = tuple(builder.type_of(v) for v in operands)
        is_kept = has_template(node, types, target) or (streams and is_stream(node, types, target))
        body = None if templates and is_kept else _body(node, types)
        if target.is_gpu and _scatters_in_order(builder, node, operands):
            moved.append((operands[0],))
        elif body is None:
            position = builder.copy(node, operands)
            moved.append(tuple(Value(position, i) for i in range(len(node.types))))
        else:
            if _is_recomputed(node):
                # Another name for each operand: what is computed again is not what was computed.
                operands = [builder.add(STOP_GRADIENT, NoAttributes(), (v,))[0] for v in operands]
            names = (_leaf_name(body.nodes[i]) for i in body.inputs)
            leaves = dict(zip(names, operands, strict=True))
            inner = expanded.get(id(body)) or expand(body, templates, streams, target)
            expanded[id(body)] = inner
            moved.append(tuple(inline_into(builder, inner, leaves, node.origin)))
    outputs = [Output(o.kind, o.name, moved[o.value.node][o.value.output]) for o in graph.outputs]
    return remove_dead_code(builder.build(outputs, graph.name))


def _scatters_in_order(builder: GraphBuilder, node: Node, operands: list[Value]) -> bool:
    """Whether rows are added to zeros each at its own number: the result is what is added."""
    if not isinstance(node.attributes, ScatterAdd) or node.attributes.axis or node.attributes.batch:
        return False
    indices = builder.nodes[operands[1].node]
    is_counted = indices.op is IOTA and len(indices.types[0].shape) == 1
    return is_counted and builder.type_of(operands[0]) == node.types[0]


LARGEST_BLOCK = 64
CAUSAL_BLOCK = 32


def attention_block(length: int, causal: bool = False) -> int:
    """Positions of a block of queries or keys: 0 where none divides the length well.

    Small blocks leave out more of the keys that come after a query.
    """
    if causal and length % CAUSAL_BLOCK == 0:
        return CAUSAL_BLOCK
    if length <= LARGEST_BLOCK:
        return length
    found = max((n for n in range(1, LARGEST_BLOCK + 1) if length % n == 0), default=0)
    return found if found >= 16 else 0


def has_template(node: Node, types: tuple[TensorType, ...], target: Target = CPU) -> bool:
    """Whether a composite is computed by kernels of its own: attention without a bias.

    On a GPU it is a library's, and so are convolutions.
    """
    if node.op in CONVOLUTIONS:
        return target.has_conv and is_conv_for_library(node, types, target.without)
    if node.op not in (ATTENTION, ATTENTION_GRAD):
        return False
    if target.is_gpu:
        return target.has_attention and is_for_library(node, types)
    assert isinstance(node.attributes, Attention)
    if len(types) != (3 if node.op is ATTENTION else 6):
        return False  # a bias
    q, k = types[-3], types[-2]
    if any(t.dtype is not float32 or not t.size for t in types):
        return False
    blocks = attention_block(q.shape[2]), attention_block(k.shape[2])
    is_square = q.shape[2] == k.shape[2]
    return all(blocks) and (is_square or not node.attributes.causal)


def is_for_library(node: Node, types: tuple[TensorType, ...]) -> bool:
    """Whether a library takes attention as it is: narrow floats, heads of whole packs, no bias."""
    assert isinstance(node.attributes, Attention)
    if len(types) != (3 if node.op is ATTENTION else 6):
        return False
    q, k, v = types[-3:]
    narrow = [types[0], types[1], q, k, v] if node.op is ATTENTION_GRAD else [q, k, v]
    if any(t.dtype is not q.dtype or not t.dtype.is_narrow or not t.size for t in narrow):
        return False
    depth = q.shape[3]
    is_square = q.shape[2] == k.shape[2]
    fits = depth == v.shape[3] and depth % 8 == 0 and 16 <= depth <= 128
    return fits and min(q.shape[2], k.shape[2]) >= 16 and (is_square or not node.attributes.causal)


LEAST_CLASSES = 512  # below which logits are small


def is_stream(node: Node, types: tuple[TensorType, ...], target: Target = CPU) -> bool:
    """Whether a composite is computed by phases that are repeated over rows."""
    if node.op is LINEAR_CROSS_ENTROPY:
        x, weight, _, *bias = types
        floats = [x, weight, *bias]
    elif node.op is LINEAR_CROSS_ENTROPY_GRAD:
        ct, x, weight, _, *bias = types
        floats = [ct, x, weight, *bias]
    else:
        return False
    if target.is_gpu:
        is_even = x.dtype is weight.dtype and x.dtype.itemsize <= 4
        is_large = x.shape[0] * weight.shape[0] >= target.least_logits
        # Sums of a bias's gradient are of slopes that were not rounded, which nothing keeps.
        is_exact = not bias or x.dtype is float32
        return is_even and is_large and is_exact and all(t.size for t in floats)
    is_float32 = all(t.dtype is float32 and t.size for t in floats)
    return is_float32 and weight.shape[0] >= LEAST_CLASSES


def _body(node: Node, types: tuple[TensorType, ...]) -> Graph | None:
    if node.op.is_composite:
        body = definition_graph(node.op, node.attributes, types)
        return _by_maximum(body) if node.op is MAX_POOL else body
    if node.op is CALL:
        assert isinstance(node.attributes, Call)
        return node.attributes.body
    return None


def _is_recomputed(node: Node) -> bool:
    """Whether a call is the backward of one that keeps nothing: `td.checkpoint`."""
    call = node.attributes
    return isinstance(call, Call) and call.recompute and call.name.endswith(".vjp")


def _leaf_name(node: Node) -> str:
    assert isinstance(node.attributes, Leaf)
    return node.attributes.name


def _by_maximum(body: Graph) -> Graph:
    """A pool's definition takes the first of the greatest; its value is the maximum, no more."""
    node = next(n for n in body.nodes if n.op is ARGMAX)
    assert isinstance(node.attributes, ArgReduce)
    builder = GraphBuilder()
    moved: list[Value] = []
    for source in body.nodes[: node.operands[0].node + 1]:
        moved.append(Value(builder.copy(source, [moved[v.node] for v in source.operands])))
    windows = moved[node.operands[0].node]
    (value,) = builder.add(REDUCE_MAX, Reduce((node.attributes.axis,)), (windows,))
    output = body.outputs[0]
    return builder.build([Output(output.kind, output.name, value)], body.name)
