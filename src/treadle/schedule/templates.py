"""Which composites a target computes by kernels or library calls of their own, and images.

An analysis, not a rewrite: `lower` asks it which composites stay when a graph is expanded.
Convolutions of a library want images in channels-last order. Tensors have the axes (N, C, H, W),
or one or three axes in space, wherever they are written. In memory those that belong to
convolutions have the order (N, H, W, C), and loops over them run in that order. Leaves and outputs
of a program keep the order of their axes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from treadle.base.dtypes import float16, float32
from treadle.ir import composites as c
from treadle.ir.control import SCAN
from treadle.ir.graph import Graph, Node
from treadle.ir.graph import Value as TensorValue
from treadle.ir.op import Types
from treadle.ir.ops import indexing, linear, shaping
from treadle.ir.types import TensorType
from treadle.kernel.contraction import CONVOLUTIONS as CONVOLUTIONS
from treadle.kernel.index import Var
from treadle.kernel.target import Target


def has_kernels(node: Node, types: Types, target: Target) -> bool:
    """Whether a composite has a template, or is computed by chunked loops."""
    return has_template(node, types, target) or is_chunked_head(node, types, target)


def has_template(node: Node, types: Types, target: Target) -> bool:
    """Whether a composite is one kernel or one library call: attention and convolutions."""
    if node.op in CONVOLUTIONS:
        return target.has_conv and is_conv_for_library(node, types, target)
    if node.op not in (c.ATTENTION, c.ATTENTION_GRAD) or is_decoding(node, types, target):
        return False
    if target.has_attention and is_attention_for_library(node, types, target):
        return True
    if target.rewriting.least_scores:
        return streamed_block(node, types, target) > 0
    is_float32 = all(t.dtype is float32 and t.size for t in types)
    return target.rewriting.blocks_attention and is_float32


BLOCKS = (32, 16, 8, 4)  # queries and keys in shared memory: chosen, 32 by 64 floats are 8 KB


def streamed_block(node: Node, types: Sequence[TensorType], target: Target) -> int:
    """Queries and keys of a block of attention by groups of threads; 0 where it is not for them."""
    plain = types[:6] if node.op is c.ATTENTION_GRAD else types[:3]
    q, k, v = plain[-3:]
    if not all(t.dtype.is_float and t.dtype.itemsize <= 4 and t.size for t in types):
        return 0
    (batch, heads, length, depth), count, width = q.shape, k.shape[2], v.shape[3]
    count_scores, longest = batch * heads * length * count, max(length, count)
    if is_by_matrices(node, types, target) and count_scores >= target.rewriting.least_matrix_scores:
        return matrix_sizes(node, types, target)[0]
    if target.mapping is None or not count_scores >= target.rewriting.least_scores > 0:
        return 0
    for block in (n for n in BLOCKS if n < 2 * longest):
        if 4 * _streamed_floats(node, block, depth, width) <= target.mapping.shared_limit:
            return block
    return 0


def is_by_matrices(node: Node, types: Sequence[TensorType], target: Target) -> bool:
    """Whether warps multiply the blocks of attention, of float16, as matrices."""
    is_forward, mapping = node.op is c.ATTENTION, target.mapping
    if mapping is None or not mapping.matrices or (not is_forward and len(types) > 6):
        return False  # a bias has gradients
    q, k, v = types[:3] if is_forward else types[3:6]
    factors = [q, k, v] if is_forward else [types[0], q, k, v]
    is_whole = q.shape[3] % mapping.matrices == v.shape[3] % mapping.matrices == 0
    is_narrow = all(t.dtype is float16 for t in factors)
    return is_whole and is_narrow and matrix_sizes(node, types, target)[1] > 0


def matrix_sizes(node: Node, types: Sequence[TensorType], target: Target) -> tuple[int, int]:
    """Rows that a group keeps, and of the other side that it goes through at a time; or zeros.

    Half of the rows that it keeps are there at least.
    """
    is_forward, mapping = node.op is c.ATTENTION, target.mapping
    assert mapping is not None
    q, k, v = types[:3] if is_forward else types[3:6]
    longest, sides = max(q.shape[2], k.shape[2]), q.shape[3] + v.shape[3] + 16
    least, strips = mapping.strips
    while strips >= least:
        block = mapping.strip * strips
        pad, numbers = (4, 6 * block) if is_forward else (8, 2 * block)
        for others in mapping.passing:
            # Rows that pass, what is made of scores, scores, and numbers.
            halves = others * sides + block * (others + 8)
            nbytes = 2 * halves + 4 * (block * (others + pad) + numbers)
            if 2 * longest > block and nbytes <= mapping.shared_limit:
                return block, others
        strips //= 2
    return 0, 0


def _streamed_floats(node: Node, block: int, depth: int, width: int) -> int:
    """Numbers of the largest kernel in shared memory."""
    scores, wide = block * (block + 1), block + 1
    if node.op is c.ATTENTION:
        return block * (depth + width + 3) + max(depth, width) * wide + scores
    return (2 * block + wide) * (depth + width) + 2 * scores + 2 * block


def is_decoding(node: Node, types: Types, target: Target) -> bool:
    """Whether a token or two look at a cache: blocks of queries would be all but empty."""
    return node.op is c.ATTENTION and types[0].shape[2] <= target.matmuls.summed_rows


def is_of_library(graph: Graph, node: Node, target: Target) -> bool:
    """Whether a library computes attention, or its gradient."""
    types = tuple(map(graph.type_of, node.operands))
    return target.has_attention and is_attention_for_library(node, types, target)


def is_attention_for_library(node: Node, types: Types, target: Target) -> bool:
    """Whether cuDNN takes attention as it is: one narrow float, heads of whole packs.

    It may still say that it has no plan for a call, which is then one of `target.without`.
    """
    q, _, v = types[3:6] if node.op is c.ATTENTION_GRAD else types[:3]
    narrow = [t for i, t in enumerate(types) if node.op is c.ATTENTION or i != 2]  # no logsumexp
    if any(t.dtype is not q.dtype or not t.dtype.is_narrow or not t.size for t in narrow):
        return False
    limits = target.matmuls
    fits = all(n % limits.pack == 0 and n <= limits.most_depth for n in (q.shape[3], v.shape[3]))
    is_known = attention_call_key(node, types) not in target.without
    return fits and is_known and not _is_short(node, types, target)


def _is_short(node: Node, types: Types, target: Target) -> bool:
    """Whether a head has so few scores that a library's blocks would be mostly empty.

    A bias with a row for each head and query is taken for one that is trained; others are masks.
    """
    is_grad, limits = node.op is c.ATTENTION_GRAD, target.matmuls
    q, k, _, *biases = types[3:] if is_grad else types
    is_trained = any(b.shape[1] > 1 and b.shape[2] > 1 for b in biases)
    most = limits.short_biased_scores if is_trained else limits.short_scores
    return q.shape[2] * k.shape[2] <= max(1, most)  # one score's gradient cuDNN refuses


def attention_numbers(node: Node) -> tuple[tuple[str, float], ...]:
    """What a library call of attention is told beside its operands."""
    assert isinstance(node.attributes, c.Attention)
    return ("scale", float(node.attributes.scale)), ("causal", float(node.attributes.causal))


def attention_call_key(node: Node, types: Sequence[TensorType]) -> LibraryCallKey:
    """The key of a library call: what `LibraryCall` says too."""
    operands = tuple((t.shape, t.dtype.name) for t in types)
    return node.op.name, operands, attention_numbers(node)


def is_chunked_head(node: Node, types: Types, target: Target) -> bool:
    """Whether a head's cross-entropy is computed chunk by chunk, its logits never stored."""
    if node.op is c.LINEAR_CROSS_ENTROPY:
        of_head = types
    elif node.op is c.LINEAR_CROSS_ENTROPY_GRAD:
        of_head = types[1:]  # after the cotangent
    else:
        return False
    x, weight, targets, *_ = of_head
    floats = [t for t in types if t is not targets]
    if not all(t.size for t in floats):
        return False
    if target.rewriting.streams_narrow_logits:
        return _is_large_head(x, weight, target)
    is_float32 = all(t.dtype is float32 for t in floats)
    return is_float32 and weight.shape[0] >= target.rewriting.least_classes


def _is_large_head(x: TensorType, weight: TensorType, target: Target) -> bool:
    """Whether a head of one dtype has as many logits as pay."""
    is_one_dtype = x.dtype is weight.dtype and x.dtype.itemsize <= 4
    return is_one_dtype and x.shape[0] * weight.shape[0] >= target.least_logits


# Ops whose results have other axes than their operands, or that choose their own order.
_REORDERS = frozenset(
    [
        SCAN,
        c.ATTENTION,
        c.ATTENTION_GRAD,
        shaping.PERMUTE,
        shaping.BROADCAST,
        linear.CONTRACT,
        indexing.RANDOM_BITS,
    ]
)
_OWN = frozenset([SCAN, linear.CONTRACT, indexing.SCATTER_ADD, indexing.RANDOM_BITS])

Shape = tuple[int, ...]
LibraryCallKey = tuple[str, tuple[tuple[tuple[int, ...], str], ...], tuple[tuple[str, float], ...]]


def conv_of(node: Node) -> c.Conv:
    given = node.attributes
    conv = given.conv if isinstance(given, c.ConvGrad) else given
    assert isinstance(conv, c.Conv)
    return conv


def conv_numbers(node: Node) -> tuple[tuple[str, float], ...]:
    """Strides, padding and dilations by name, as a library call has them."""
    conv = conv_of(node)
    low, high = ([pair[i] for pair in conv.padding] for i in (0, 1))
    rows = {"stride": conv.strides, "low": low, "high": high, "dilation": conv.dilations}
    return tuple((f"{n}{i}", float(x)) for n, of in rows.items() for i, x in enumerate(of))


def filled_shapes(node: Node, types: Sequence[TensorType], target: Target) -> list[Shape]:
    """Shapes of operands and the result with channels filled up to whole packs.

    Those of narrow floats are, as tensor cores want them.
    """
    pack = target.matmuls.pack if types[0].dtype.is_narrow and conv_of(node).groups == 1 else 1
    weights = {c.CONV: 1, c.CONV_GRAD_X: 1, c.CONV_GRAD_W: 2}
    found: list[Shape] = []
    for i, type_ in enumerate((*types, node.types[0])):
        first, channels, *rest = type_.shape
        first += -first % pack if i == weights[node.op] else 0
        found.append((first, channels + -channels % pack, *rest))
    return found


def conv_call_key(node: Node, types: Sequence[TensorType], target: Target) -> LibraryCallKey:
    """The key of a library call: what `LibraryCall` says too."""
    *shapes, _ = filled_shapes(node, types, target)
    operands = tuple((s, t.dtype.name) for s, t in zip(shapes, types, strict=True))
    return node.op.name, operands, conv_numbers(node)


def is_conv_for_library(node: Node, types: Sequence[TensorType], target: Target) -> bool:
    """Whether a library computes a convolution: of up to three axes, none it refused before."""
    if types[0].rank not in (3, 4, 5) or not all(t.size for t in (*types, *node.types)):
        return False
    if types[0].dtype.name not in ("bfloat16", "float16", "float32"):
        return False
    is_one = all(t.dtype is types[0].dtype for t in types)
    return is_one and conv_call_key(node, types, target) not in target.without


def images(graph: Graph) -> dict[TensorValue, int]:
    """Operands and results of convolutions, and what is computed from and for them.

    Each with its number of axes in space.
    """
    found: dict[TensorValue, int] = {}
    for i, node in enumerate(graph.nodes):
        if node.op in CONVOLUTIONS:
            for value in (*node.operands, TensorValue(i)):
                found.setdefault(value, node.types[0].rank - 2)
    neighbours = _neighbours(graph) if found else {}
    pending = list(found)
    while pending:
        value = pending.pop()
        for node, other in neighbours.get(value, ()):
            if other not in found and _counts_alike(graph, node, value, other, found[value]):
                found[other] = found[value]
                pending.append(other)
    return found


def _neighbours(graph: Graph) -> dict[TensorValue, list[tuple[Node, TensorValue]]]:
    """What is computed from a value by an op that keeps its axes, and what it is computed from."""
    found: dict[TensorValue, list[tuple[Node, TensorValue]]] = {}
    for i, node in enumerate(graph.nodes):
        if node.op in CONVOLUTIONS or node.op in _REORDERS:
            continue
        for a in node.operands:
            for b in (TensorValue(i, k) for k in range(len(node.types))):
                found.setdefault(a, []).append((node, b))
                found.setdefault(b, []).append((node, a))
    return found


def _counts_alike(graph: Graph, node: Node, a: TensorValue, b: TensorValue, dims: int) -> bool:
    """Whether both are images, or windows of images, of the same batch and channels."""
    one, other = graph.type_of(a).shape, graph.type_of(b).shape
    same = 2 + dims if node.op is shaping.RESHAPE else 2
    return min(len(one), len(other)) >= 2 + dims and one[:same] == other[:same]


HEADS_LAST = (0, 2, 1, 3)  # (batch, heads, time, depth) as (batch, time, heads, depth)


def layouts(
    graph: Graph, stored: Collection[TensorValue], of: Mapping[TensorValue, int], has_heads: bool
) -> dict[TensorValue, tuple[int, ...]]:
    """The order in memory of images, and of attention's results: matmuls read these as rows.

    Only of what is materialized inside the program.
    """
    outside = {o.value for o in graph.outputs}
    outside |= {v for n in graph.nodes if n.op is SCAN for v in n.operands}
    found: dict[TensorValue, tuple[int, ...]] = {}
    for v in stored:
        op, rank = graph.nodes[v.node].op, graph.type_of(v).rank
        if v in outside:
            continue
        if v in of and rank == 2 + of[v] and op not in _OWN:
            found[v] = last_order(rank, of[v])
        is_of_bias = v.output > 2  # a bias's gradient, which has no rows of heads
        if has_heads and op in (c.ATTENTION, c.ATTENTION_GRAD) and rank == 4 and not is_of_bias:
            found[v] = HEADS_LAST
    return found


def last_order(rank: int, dims: int) -> tuple[int, ...]:
    """Axes with the channels after those in space; axes of windows stay the last."""
    return (0, *range(2, 2 + dims), 1, *range(2 + dims, rank))


def last_axes(axes: Sequence[Var]) -> tuple[Var, ...]:
    """The axes of an image in their order in memory."""
    return tuple(axes[i] for i in last_order(len(axes), len(axes) - 2))


def in_memory_order(
    value: TensorValue, variables: Sequence[Var], of: Mapping[TensorValue, int]
) -> list[Var]:
    """The loops over a tensor, images in their order in memory."""
    dims = of.get(value)
    if dims is None or len(variables) < 2 + dims:
        return list(variables)
    return [variables[i] for i in last_order(len(variables), dims)]


def last_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides along (N, C, H, W), say, of images in the order (N, H, W, C)."""
    order = last_order(len(shape), len(shape) - 2)
    found, size = [0] * len(shape), 1
    for axis in reversed(order):
        found[axis] = size
        size *= shape[axis]
    return tuple(found)
