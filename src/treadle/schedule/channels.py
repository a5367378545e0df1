"""Images in channels-last order: what convolutions of a library want on a GPU.

Tensors have the axes (N, C, H, W) wherever they are written. In memory those that belong to
convolutions have the order (N, H, W, C), and loops over them run in that order. Leaves and outputs
of a program keep the order of their axes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from treadle.ir.composites import ATTENTION, ATTENTION_GRAD, Conv, ConvGrad
from treadle.ir.control import SCAN
from treadle.ir.graph import Graph, Node
from treadle.ir.graph import Value as TensorValue
from treadle.ir.ops import indexing, linear, shaping
from treadle.ir.types import TensorType
from treadle.kernel.contraction import CONVOLUTIONS as CONVOLUTIONS
from treadle.kernel.index import Var

# Ops whose results have other axes than their operands, or that choose their own order.
_REORDERS = frozenset(
    [
        SCAN,
        ATTENTION,
        ATTENTION_GRAD,
        shaping.PERMUTE,
        shaping.BROADCAST,
        linear.CONTRACT,
        indexing.RANDOM_BITS,
    ]
)
_OWN = frozenset([SCAN, linear.CONTRACT, indexing.SCATTER_ADD, indexing.RANDOM_BITS])

LibraryCallKey = tuple[str, tuple[tuple[tuple[int, ...], str], ...], tuple[tuple[str, float], ...]]


def conv_numbers(node: Node) -> tuple[tuple[str, float], ...]:
    """Strides, padding and dilations by name, as a library call has them."""
    given = node.attributes
    conv = given.conv if isinstance(given, ConvGrad) else given
    assert isinstance(conv, Conv)
    low, high = ([pair[i] for pair in conv.padding] for i in (0, 1))
    rows = {"stride": conv.strides, "low": low, "high": high, "dilation": conv.dilations}
    return tuple((f"{n}{i}", float(x)) for n, of in rows.items() for i, x in enumerate(of))


def conv_call_key(node: Node, types: Sequence[TensorType]) -> LibraryCallKey:
    """The key of a library call: what `LibraryCall` says too."""
    operands = tuple((t.shape, t.dtype.name) for t in types)
    return node.op.name, operands, conv_numbers(node)


def is_conv_for_library(
    node: Node, types: Sequence[TensorType], without: Collection[LibraryCallKey]
) -> bool:
    """Whether a library computes a convolution: of images, and none that it refused before."""
    if any(t.rank != 4 or not t.size for t in (*types, *node.types)):
        return False
    if types[0].dtype.name not in ("bfloat16", "float16", "float32"):
        return False
    is_one = all(t.dtype is types[0].dtype for t in types)
    return is_one and conv_call_key(node, types) not in without


def images(graph: Graph) -> frozenset[TensorValue]:
    """Operands and results of convolutions, and what is computed from and for them."""
    if not any(n.op in CONVOLUTIONS for n in graph.nodes):
        return frozenset()
    found: set[TensorValue] = set()
    for i, node in enumerate(graph.nodes):
        if node.op in CONVOLUTIONS:
            found.update(node.operands, (TensorValue(i),))
    neighbours: dict[TensorValue, list[TensorValue]] = {}
    for i, node in enumerate(graph.nodes):
        if node.op in CONVOLUTIONS or node.op in _REORDERS:
            continue
        results = [TensorValue(i, k) for k in range(len(node.types))]
        for a in node.operands:
            for b in results:
                if _counts_alike(graph, node, a, b):
                    neighbours.setdefault(a, []).append(b)
                    neighbours.setdefault(b, []).append(a)
    pending = list(found)
    while pending:
        for other in neighbours.get(pending.pop(), ()):
            if other not in found:
                found.add(other)
                pending.append(other)
    return frozenset(found)


def _counts_alike(graph: Graph, node: Node, a: TensorValue, b: TensorValue) -> bool:
    """Whether both are images, or windows of images, of the same batch and channels."""
    one, other = graph.type_of(a).shape, graph.type_of(b).shape
    same = 4 if node.op is shaping.RESHAPE else 2
    return min(len(one), len(other)) >= 4 and one[:same] == other[:same]


def channels_last(
    graph: Graph, materialized: Mapping[TensorValue, None], of: Collection[TensorValue]
) -> dict[TensorValue, tuple[int, ...]]:
    """The order in memory of images that are materialized inside the program."""
    outside = {o.value for o in graph.outputs}
    outside |= {v for n in graph.nodes if n.op is SCAN for v in n.operands}
    return {
        v: last_order(4)
        for v in materialized
        if v in of and graph.type_of(v).rank == 4 and v not in outside
        if graph.nodes[v.node].op not in _OWN
    }


def last_order(rank: int) -> tuple[int, ...]:
    """Axes with the channels after the spatial ones; axes of windows stay the last."""
    return (0, 2, 3, 1, *range(4, rank))


def channels_after(axes: Sequence[Var]) -> tuple[Var, ...]:
    """The axes of an image or of windows in their order in memory."""
    return tuple(axes[i] for i in last_order(len(axes)))


def in_memory_order(
    value: TensorValue, variables: Sequence[Var], of: Collection[TensorValue]
) -> list[Var]:
    """The loops over a tensor, images in their order in memory."""
    is_image = value in of and len(variables) >= 4
    return list(channels_after(variables) if is_image else variables)


def last_strides(shape: Sequence[int]) -> tuple[int, int, int, int]:
    """Strides along (N, C, H, W) of images in the order (N, H, W, C)."""
    _, c, h, w = shape
    return h * w * c, 1, w * c, c
