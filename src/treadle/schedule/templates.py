"""Which composites a target computes by kernels or library calls of their own.

An analysis, not a rewrite: `lower` asks it which composites stay when a graph is expanded.
"""

from __future__ import annotations

from treadle.base.dtypes import float32
from treadle.ir.composites import (
    ATTENTION,
    ATTENTION_GRAD,
    LINEAR_CROSS_ENTROPY,
    LINEAR_CROSS_ENTROPY_GRAD,
    Attention,
)
from treadle.ir.graph import Node
from treadle.ir.op import Types
from treadle.ir.types import TensorType
from treadle.kernel.target import CPU, Target
from treadle.schedule.channels import CONVOLUTIONS, is_conv_for_library


def has_kernels(node: Node, types: Types, target: Target) -> bool:
    """Whether a composite has a template, or is computed by chunked loops."""
    return has_template(node, types, target) or is_chunked_head(node, types, target)


def has_template(node: Node, types: Types, target: Target) -> bool:
    """Whether a composite is one kernel or one library call: attention and convolutions."""
    if node.op in CONVOLUTIONS:
        return target.has_conv and is_conv_for_library(node, types, target.without)
    if node.op not in (ATTENTION, ATTENTION_GRAD) or _has_bias(node, types):
        return False
    if target.has_attention and _is_attention_for_library(node, types):
        return True
    return target.rewriting.blocks_attention and _is_in_blocks(node, types, target)


def _has_bias(node: Node, types: Types) -> bool:
    return len(types) != (3 if node.op is ATTENTION else 6)


def _is_square_or_full(node: Node, types: Types) -> bool:
    """Whether there are as many keys as queries, or every query sees every key."""
    assert isinstance(node.attributes, Attention)
    q, k = types[-3], types[-2]
    return q.shape[2] == k.shape[2] or not node.attributes.causal


def _is_in_blocks(node: Node, types: Types, target: Target) -> bool:
    """Whether queries and keys are cut into equal blocks, all in float32."""
    if any(t.dtype is not float32 or not t.size for t in types):
        return False
    lengths = types[-3].shape[2], types[-2].shape[2]
    has_blocks = all(attention_block(n, target=target) for n in lengths)
    return has_blocks and _is_square_or_full(node, types)


def attention_block(length: int, causal: bool = False, target: Target = CPU) -> int:
    """Positions of a block of queries or keys: 0 where none divides the length well.

    Small blocks leave out more of the keys that come after a query.
    """
    limits = target.rewriting
    if causal and length % limits.causal_block == 0:
        return limits.causal_block
    if length <= limits.attention_block:
        return length
    divisors = (n for n in range(1, limits.attention_block + 1) if length % n == 0)
    found = max(divisors, default=0)
    return found if found >= limits.least_attention_block else 0


def _is_attention_for_library(node: Node, types: Types) -> bool:
    """Whether cuDNN takes attention as it is: one narrow float, heads of whole packs."""
    q, k, v = types[-3:]
    narrow = [types[0], types[1], q, k, v] if node.op is ATTENTION_GRAD else [q, k, v]
    if any(t.dtype is not q.dtype or not t.dtype.is_narrow or not t.size for t in narrow):
        return False
    depth = q.shape[3]
    fits = depth == v.shape[3] and depth in range(16, 129, 8)  # cuDNN's fused attention
    return fits and min(q.shape[2], k.shape[2]) >= 16 and _is_square_or_full(node, types)


def is_chunked_head(node: Node, types: Types, target: Target) -> bool:
    """Whether a head's cross-entropy is computed chunk by chunk, its logits never stored."""
    if node.op is LINEAR_CROSS_ENTROPY:
        of_head = types
    elif node.op is LINEAR_CROSS_ENTROPY_GRAD:
        of_head = types[1:]  # after the cotangent
    else:
        return False
    x, weight, targets, *bias = of_head
    floats = [t for t in types if t is not targets]
    if not all(t.size for t in floats):
        return False
    if target.rewriting.streams_narrow_logits:
        # A bias's gradient sums logit gradients before they are rounded, which are not stored.
        is_exact = not bias or x.dtype is float32
        return is_exact and _is_large_head(x, weight, target)
    is_float32 = all(t.dtype is float32 for t in floats)
    return is_float32 and weight.shape[0] >= target.rewriting.least_classes


def _is_large_head(x: TensorType, weight: TensorType, target: Target) -> bool:
    """Whether a head of one dtype has as many logits as pay."""
    is_one_dtype = x.dtype is weight.dtype and x.dtype.itemsize <= 4
    return is_one_dtype and x.shape[0] * weight.shape[0] >= target.least_logits
