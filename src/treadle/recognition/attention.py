"""A softmax of scores that only a product with values reads is attention.

Scores are then never stored all at once. What is added to them on the way, and masks, become the
bias. A row that sees nothing is NaN by softmax and 0 by attention: where that may be, it is made
NaN again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from treadle.base.dtypes import float32
from treadle.ir import composites as c
from treadle.ir.graph import Value
from treadle.ir.ops import elementwise as e
from treadle.ir.ops.linear import CONTRACT, Contraction
from treadle.ir.ops.shaping import BROADCAST, PERMUTE, RESHAPE
from treadle.kernel.target import Target
from treadle.recognition.axes import Axes, Groups
from treadle.recognition.regions import Flow
from treadle.recognition.scores import Labelled, Scores, scores_of, viewed

_VIEWS = frozenset([RESHAPE, PERMUTE, BROADCAST])


@dataclass(frozen=True, slots=True)
class Attending:
    """An attention: its operands with their axes, and the axes by what they are.

    `batch` are of queries, keys and values; `own` of queries alone, heads that share keys.
    """

    root: Value
    axes: Axes
    q: Labelled
    k: Labelled
    v: Labelled
    scores: Scores
    result: Groups
    batch: str
    own: str
    query: str
    key: str
    width: str

    @property
    def heads(self) -> tuple[str, str]:
        """Labels of the batch, and of the heads: the last axis of several is one of heads."""
        is_several = len(self.batch) > 1
        return (self.batch[:-1], self.batch[-1]) if is_several else (self.batch, "")

    @property
    def depth(self) -> str:
        return self.axes.resolved(self.scores.depth)


def attentions(flow: Flow, target: Target) -> Iterator[Attending]:
    """What may be attention, where that pays."""
    uses: Counter[Value] = Counter(v for n in flow.graph.nodes for v in n.operands)
    uses.update(o.value for o in flow.graph.outputs)
    for position, node in enumerate(flow.graph.nodes):
        if node.op is CONTRACT:
            for side in (0, 1):
                found = _attending(flow, uses, Value(position), side)
                if found is not None and is_suited(flow, found, target):
                    yield found
                    break


def _attending(flow: Flow, uses: Counter[Value], root: Value, side: int) -> Attending | None:
    """What a product of a softmax, its first or second operand, and of values is."""
    node, axes = flow.node(root), Axes()
    assert isinstance(node.attributes, Contraction)
    left, right, result = node.attributes.labels
    names: dict[str, str] = {}
    for labels, operand in ((left, node.operands[0]), (right, node.operands[1])):
        for label, n in zip(labels, flow.graph.type_of(operand).shape, strict=True):
            names.setdefault(label, "")
            names[label] = names[label] or axes.new(n)
    of_left, of_right, of_result = (tuple(names[x] for x in p) for p in (left, right, result))
    groups, of_v = (of_left, of_right) if side == 0 else (of_right, of_left)
    softmax, inner = _above(flow, uses, axes, node.operands[side], groups)
    if inner is None:
        return None
    attributes = flow.node(softmax).attributes
    assert isinstance(attributes, c.Axis)
    scores = scores_of(flow, axes, flow.node(softmax).operands[0], inner)
    if scores is None:
        return None
    v = Labelled(node.operands[1 - side], of_v)
    own_groups = [g for g in groups if g not in of_v]
    return _of_parts(flow, axes, root, scores, v, inner[attributes.axis], own_groups, of_result)


def _above(
    flow: Flow, uses: Counter[Value], axes: Axes, value: Value, groups: Groups
) -> tuple[Value, Groups | None]:
    """The softmax that a value is a view of, and its axes, if nothing else reads it."""
    known: Groups | None = groups
    while known is not None and uses[value] == 1:
        node = flow.node(value)
        if node.op is c.SOFTMAX:
            return value, known
        if node.op in (RESHAPE, PERMUTE):
            known = viewed(flow, axes, value, known)
        elif node.op is not e.CAST:
            return value, None
        value = node.operands[0]
    return value, None


def _of_parts(
    flow: Flow,
    axes: Axes,
    root: Value,
    scores: Scores,
    v: Labelled,
    key_group: str,
    own_groups: list[str],
    result: Groups,
) -> Attending | None:
    if len(own_groups) == 0:
        return None
    q, k = scores.operands
    if not set(axes.resolved("".join(k.groups))) >= set(axes.resolved(key_group)):
        q, k = k, q
    k, v = _unrepeated(flow, axes, k, v)
    key, query = axes.resolved(key_group), axes.resolved(own_groups[-1])
    of_q, of_k, of_v, of_out = (
        axes.resolved("".join(x)) for x in (q.groups, k.groups, v.groups, result)
    )
    depth = axes.resolved(scores.depth)
    batch = "".join(x for x in of_k if x not in key + depth)
    own = "".join(x for x in of_q if x not in batch + query + depth)
    width = "".join(x for x in of_v if x not in batch + key)
    is_whole = (
        set(of_q) == set(batch + own + query + depth)
        and set(of_k) == set(batch + key + depth)
        and set(of_v) == set(batch + key + width)
        and set(of_out) == set(batch + own + query + width)
    )
    if not is_whole or not key or not query or len(width) < 1 or set(own) & set(of_k + of_v):
        return None
    batch = "".join(x for x in of_q if x in batch)
    return Attending(root, axes, q, k, v, scores, result, batch, own, query, key, width)


def _unrepeated(flow: Flow, axes: Axes, k: Labelled, v: Labelled) -> tuple[Labelled, Labelled]:
    """Keys and values without axes that only repeat them, if those are the same of both."""
    found = tuple(_source(flow, axes, x) for x in (k, v))
    dropped = [
        set(axes.resolved("".join(x.groups))) - set(axes.resolved("".join(s.groups)))
        for x, s in zip((k, v), found, strict=True)
    ]
    is_same = dropped[0] and dropped[0] == dropped[1]
    return (found[0], found[1]) if is_same else (k, v)


def _source(flow: Flow, axes: Axes, x: Labelled) -> Labelled:
    """What a value is a view of, as far as the last repetition."""
    last, value, groups = x, x.value, x.groups
    while flow.node(value).op in _VIEWS:
        node = flow.node(value)
        before = viewed(flow, axes, value, groups)
        if before is None:
            break
        value, groups = node.operands[0], before
        if node.op is BROADCAST:
            last = Labelled(value, groups)
    return last


def is_suited(flow: Flow, found: Attending, target: Target) -> bool:
    """Whether the target has kernels for it, and its gradient has enough to share."""
    q, k, v = (flow.graph.type_of(x.value).dtype for x in (found.q, found.k, found.v))
    limits, size = target.rewriting, found.axes.size
    is_taken = q is float32 if limits.blocks_attention else q.is_narrow
    if not is_taken or q is not k or q is not v:
        return False
    if limits.blocks_attention:
        return min(size(found.query), size(found.key)) >= limits.least_fused_attention
    fits = max(size(found.depth), size(found.width)) <= target.matmuls.most_depth
    blocks = size(found.batch + found.own) * -(-size(found.key) // limits.attention_block)
    is_long = min(size(found.query), size(found.key)) >= limits.least_fused_attention
    return fits and is_long and blocks >= limits.least_key_blocks
