"""A softmax of scaled products that only a product with values reads becomes attention.

Scores are then never stored all at once. What is added to them on the way, and masks by −∞, become
the bias. A row that sees nothing is NaN by softmax and 0 by attention: where that may be, it is
made NaN again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from treadle.base.dtypes import DType
from treadle.ir import composites as c
from treadle.ir.control import Call
from treadle.ir.graph import Graph, GraphBuilder, Node, Value
from treadle.ir.op import NONE, Attributes, Op
from treadle.ir.ops import elementwise as e
from treadle.ir.ops.leaves import CONSTANT, Constant
from treadle.ir.ops.linear import CONTRACT, Contraction
from treadle.ir.ops.shaping import BROADCAST, PERMUTE, RESHAPE, Broadcast, Permute, Reshape
from treadle.ir.types import TensorType
from treadle.kernel.target import Target
from treadle.rules.canonical import canonicalise
from treadle.rules.driver import rewrite
from treadle.rules.masks import is_causal_mask, known_mask
from treadle.rules.pattern import Anything, Nodes, apply, number_of
from treadle.rules.rule import Exactness, Match, Rule, RuleSet

_WEIGHTS = apply(c.SOFTMAX, Anything("scores"), name="weights", single_use=True)
_HEADS_LAST = (0, 2, 1, 3)  # (B, H, T, E) as (B, T, H, E), and back
_NARROW_WEIGHTS = apply(e.CAST, _WEIGHTS, single_use=True)


@dataclass(frozen=True, slots=True)
class _Term:
    """What is added to scores, or where they stay and are not −∞; its axes are those of scores."""

    value: Value
    labels: str
    is_mask: bool = False
    is_hidden: bool = False  # a mask that says where they are −∞


@dataclass(frozen=True, slots=True)
class _Scores:
    """Products of queries and keys by labelled axes, with what happens to them before a softmax."""

    operands: tuple[tuple[Value, str], tuple[Value, str]]
    scale: float
    terms: tuple[_Term, ...] = ()


def _scores(graph: Nodes, value: Value, labels: str) -> _Scores | None:
    """The scores that a value is, if it is some, its axes labelled."""
    node = graph.nodes[value.node]
    operands = node.operands
    if node.op is CONTRACT:
        return _products(node.attributes, operands, labels)
    if node.op is e.CAST:
        return _scores(graph, operands[0], labels) if graph.type_of(operands[0]).is_float else None
    if node.op is PERMUTE:
        assert isinstance(node.attributes, Permute)
        order = sorted(range(len(labels)), key=node.attributes.axes.__getitem__)
        return _scores(graph, operands[0], "".join(labels[i] for i in order))
    if node.op in (e.MUL, e.DIV):
        return _scaled(graph, node.op, operands, labels)
    if node.op is e.WHERE:
        return _masked(graph, operands, labels)
    if node.op is not e.ADD:
        return None
    for inner, other in (operands, operands[::-1]):
        found = _scores(graph, inner, labels)
        if found is not None:
            return replace(found, terms=(*found.terms, _Term(other, labels)))
    return None


def _products(attributes: Attributes, operands: tuple[Value, ...], labels: str) -> _Scores | None:
    assert isinstance(attributes, Contraction)
    left, right, result = attributes.labels
    if len(result) != len(labels):
        return None
    names = dict(zip(result, labels, strict=True))
    summed = sorted(set(left + right) - set(result))
    if len(summed) != 1:
        return None
    names[summed[0]] = "D"
    a, b = ("".join(names[x] for x in part) for part in (left, right))
    return _Scores(((operands[0], a), (operands[1], b)), 1.0)


def _scaled(graph: Nodes, op: Op, operands: Sequence[Value], labels: str) -> _Scores | None:
    """Times a number, or divided by one; nothing may have been added before."""
    pairs = [tuple(operands)] if op is e.DIV else [tuple(operands), tuple(operands[::-1])]
    for inner, other in pairs:
        number = number_of(graph, other)
        if number is None or not math.isfinite(float(number)) or number == 0:
            continue
        found = _scores(graph, inner, labels)
        factor = float(number) if op is e.MUL else 1 / float(number)
        if found is not None and (not found.terms or factor == 1):
            return replace(found, scale=found.scale * factor)
    return None


def _masked(graph: Nodes, operands: Sequence[Value], labels: str) -> _Scores | None:
    """Scores where a condition holds, or where it does not, and −∞ elsewhere."""
    condition, *both = operands
    for inner, other, is_hidden in ((both[0], both[1], False), (both[1], both[0], True)):
        if number_of(graph, other) == -math.inf:
            found = _scores(graph, inner, labels)
            if found is not None:
                term = _Term(condition, labels, True, is_hidden)
                return replace(found, terms=(*found.terms, term))
    return None


@dataclass(frozen=True, slots=True)
class _Found:
    """An attention: its operands with their labels, and the axes by what they are.

    `batch` are of queries, keys and values; `own` of queries alone, heads that share keys.
    """

    q: tuple[Value, str]
    k: tuple[Value, str]
    v: tuple[Value, str]
    scores: _Scores
    result: str
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


def _found(match: Match) -> _Found | None:
    """What a product of a softmax and of values is, if it is attention."""
    attributes, weights = match.root.attributes, match.node("weights")
    assert isinstance(attributes, Contraction)
    assert isinstance(weights.attributes, c.Axis)
    left, right, result = attributes.labels
    is_first = match.root.operands[1] == match["v"]
    of_weights, of_v = (left, right) if is_first else (right, left)
    key = of_weights[weights.attributes.axis]
    widths, batch = set(of_v) - set(of_weights), [x for x in of_weights if x in of_v and x != key]
    queries = [x for x in of_weights if x not in of_v]
    if key in result or key not in of_v or len(widths) != 1 or len(queries) not in (1, 2):
        return None
    if set(result) != {*batch, *queries, *widths} or "D" in of_weights + of_v:
        return None
    scores = _scores(match.graph, match["scores"], of_weights)
    if scores is None:
        return None
    q, k = scores.operands if key in scores.operands[1][1] else scores.operands[::-1]
    if set(q[1]) != {*batch, *queries, "D"} or set(k[1]) != {*batch, key, "D"}:
        return None
    axes = "".join(batch), "".join(queries[:-1]), queries[-1], key, widths.pop()
    return _Found(q, k, (match["v"], of_v), scores, result, *axes)


def is_attention(match: Match) -> bool:
    """scores are products of one narrow float, scaled, then added to and masked by −∞, as pays"""
    found = _found(match)
    if found is None:
        return False
    q, k, v = (match.graph.type_of(x) for x, _ in (found.q, found.k, found.v))
    is_narrow = q.dtype.is_narrow and q.dtype is k.dtype is v.dtype
    extents = dict(zip(found.q[1], q.shape, strict=True)) | dict(
        zip(found.v[1], v.shape, strict=True)
    )
    return is_narrow and _pays(found, extents, match.target)


def _pays(found: _Found, extents: Mapping[str, int], target: Target) -> bool:
    """Whether a library may take it, and its gradient has enough to share."""
    limits, matmuls = target.rewriting, target.matmuls
    fits = max(extents["D"], extents[found.width]) <= matmuls.most_depth
    lengths = extents[found.query], extents[found.key]
    heads = math.prod(extents[x] for x in found.batch + found.own)
    blocks = heads * -(-extents[found.key] // limits.attention_block)
    is_long = min(lengths) >= limits.least_fused_attention
    return fits and is_long and blocks >= limits.least_key_blocks


def _attention(match: Match, builder: GraphBuilder) -> Value:
    found = _found(match)
    assert found is not None
    return _Builder(match, builder, found).result()


class _Builder:
    """Appends an attention and what is around it to a graph."""

    def __init__(self, match: Match, builder: GraphBuilder, found: _Found):
        self.match, self.builder, self.found = match, builder, found
        self.extents: dict[str, int] = {}
        for value, labels in (found.q, found.k, found.v):
            self.extents |= dict(zip(labels, builder.type_of(value).shape, strict=True))
        self.dtype = builder.type_of(found.q[0]).dtype
        batch, heads = found.heads
        self.groups = batch, heads, heads + found.own

    def add(self, op: Op, attributes: Attributes, *operands: Value) -> Value:
        return self.builder.add(op, attributes, operands, self.match.root.origin)[0]

    def size(self, labels: str) -> int:
        return math.prod(self.extents[x] for x in labels)

    def result(self) -> Value:
        found, (batch, groups, heads) = self.found, self.groups
        q = self.laid(*found.q, (batch, heads, found.query, "D"))
        k, v = (
            self.laid(*x, (batch, groups, found.key, last))
            for x, last in ((found.k, "D"), (found.v, found.width))
        )
        is_causal, bias, may_hide = self.bias()
        attributes = c.Attention(found.scores.scale, is_causal)
        operands = (q, k, v) if bias is None else (q, k, v, bias)
        out, lse = self.builder.add(c.ATTENTION, attributes, operands, self.match.root.origin)
        out = self.with_nan(out, lse) if may_hide else out
        labels = batch + heads + found.query + found.width
        out = self.reshaped(out, tuple(self.extents[x] for x in labels))
        out = self.permuted(out, tuple(labels.index(x) for x in found.result))
        return self.cast(out, self.match.type.dtype)

    def with_nan(self, out: Value, lse: Value) -> Value:
        """NaN in rows that see nothing, as a softmax of −∞ alone is.

        With heads side by side, as the matmul that comes next reads them: no copy is made for it.
        """
        rows = self.permuted(out, _HEADS_LAST)
        type_, of_rows = self.builder.type_of(rows), self.builder.type_of(lse)
        hidden = self.add(e.EQ, NONE, lse, self.number(-math.inf, of_rows))
        turned = self.permuted(hidden, _HEADS_LAST[:3])
        spread = self.add(BROADCAST, Broadcast(type_.shape, (0, 1, 2)), turned)
        chosen = self.add(e.WHERE, NONE, spread, self.number(math.nan, type_), rows)
        return self.permuted(chosen, _HEADS_LAST)

    def number(self, value: float, type_: TensorType) -> Value:
        return self.add(CONSTANT, Constant(value, type_))

    # The bias

    def bias(self) -> tuple[bool, Value | None, bool]:
        """Whether it is causal, what else is added, and whether that may hide all from a query."""
        found, graph = self.found, self.builder
        order = found.batch + found.own + found.query + found.key
        terms = [self.compact(t, order) for t in found.scores.terms]
        others = [
            t for t in terms if not (t.is_mask and is_causal_mask(graph, t.value, t.is_hidden))
        ]
        parts = [self.added(t) for t in others]
        shapes = [graph.type_of(x).shape for x in parts]
        shape = tuple(map(max, zip(*shapes, strict=True)))
        total: Value | None = None
        for x in parts:
            spread = self.spread(x, shape)
            total = spread if total is None else self.add(e.ADD, NONE, total, spread)
        return len(others) < len(terms), total, bool(others) and not self._sees_some(terms)

    def _sees_some(self, terms: Sequence[_Term]) -> bool:
        """Whether every query sees a key, whatever the numbers are."""
        seen: np.ndarray = np.array([True])
        for t in terms:
            mask = known_mask(self.builder, t.value, t.is_hidden) if t.is_mask else None
            if mask is None:
                return False
            seen = seen & mask
        return bool(seen.any(-1).all())

    def compact(self, term: _Term, order: str) -> _Term:
        """A term without the axes that it only repeats: of one element each, in some order."""
        node, value = self.builder.nodes[term.value.node], term.value
        number = number_of(self.builder, value)
        if number is not None:
            one = TensorType((1,) * len(order), self.builder.type_of(value).dtype)
            value = self.number(float(number), one)
        elif isinstance(node.attributes, Broadcast):
            shape, axes = node.attributes.shape, node.attributes.axes
            kept = tuple(n if i in axes else 1 for i, n in enumerate(shape))
            value = self.reshaped(node.operands[0], kept)
        turned = self.permuted(value, tuple(term.labels.index(x) for x in order))
        return replace(term, value=turned, labels=order)

    def added(self, term: _Term) -> Value:
        """A term as (B or 1, H or 1, T or 1, S or 1) numbers of the queries' dtype."""
        value, shape = term.value, self.builder.type_of(term.value).shape
        if term.is_mask:
            type_ = TensorType(shape, self.dtype)
            both = self.number(0.0, type_), self.number(-math.inf, type_)
            value = self.add(e.WHERE, NONE, value, *(both[::-1] if term.is_hidden else both))
        value, wanted, merged = self.cast(value, self.dtype), list[int](), list[int]()
        batch, _, heads = self.groups
        at = 0
        for group in (batch, heads, self.found.query, self.found.key):
            part = shape[at : at + len(group)]
            is_one = all(n == 1 for n in part)
            wanted += part if is_one else [self.extents[x] for x in group]
            merged.append(1 if is_one else self.size(group))
            at += len(group)
        return self.reshaped(self.spread(value, tuple(wanted)), tuple(merged))

    # Views

    def laid(self, value: Value, labels: str, groups: Sequence[str]) -> Value:
        """A tensor with its axes in groups, each of which becomes one."""
        order = "".join(groups)
        turned = self.permuted(value, tuple(labels.index(x) for x in order))
        return self.reshaped(turned, tuple(self.size(g) for g in groups))

    def permuted(self, value: Value, axes: tuple[int, ...]) -> Value:
        is_same = axes == tuple(range(len(axes)))
        return value if is_same else self.add(PERMUTE, Permute(axes), value)

    def reshaped(self, value: Value, shape: tuple[int, ...]) -> Value:
        is_same = self.builder.type_of(value).shape == shape
        return value if is_same else self.add(RESHAPE, Reshape(shape), value)

    def spread(self, value: Value, wanted: tuple[int, ...]) -> Value:
        """Axes of one element repeated."""
        shape = self.builder.type_of(value).shape
        if shape == wanted:
            return value
        axes = tuple(i for i, n in enumerate(shape) if n == wanted[i])
        kept = self.reshaped(value, tuple(shape[i] for i in axes))
        return self.add(BROADCAST, Broadcast(wanted, axes), kept)

    def cast(self, value: Value, dtype: DType) -> Value:
        is_same = self.builder.type_of(value).dtype is dtype
        return value if is_same else self.add(e.CAST, e.Cast(dtype), value)


BY_HAND = Rule(
    "attention",
    "softmax(q · kᵀ · scale + bias) · v is attention.",
    apply(CONTRACT, _WEIGHTS, Anything("v"), commutes=True),
    _attention,
    is_attention,
    Exactness.ROUNDING,
)

NARROW_BY_HAND = Rule(
    "narrow_attention",
    "softmax(q · kᵀ · scale + bias) · v is attention, its weights rounded to the dtype of v.",
    apply(CONTRACT, _NARROW_WEIGHTS, Anything("v"), commutes=True),
    _attention,
    is_attention,
    Exactness.ROUNDING,
)

ATTENTION = RuleSet("attention", (BY_HAND, NARROW_BY_HAND))


def recognise_attention(graph: Graph, target: Target, fired: Counter[str] | None = None) -> Graph:
    """The graph with `attention` where the target asks for it, in bodies of calls too."""
    if not target.rewriting.fuses_attention:
        return graph
    counts = Counter[str]() if fired is None else fired
    bodies: dict[Graph, Graph] = {}  # layers share them
    nodes = tuple(_with_body(n, target, counts, bodies) for n in graph.nodes)
    whole = graph if nodes == graph.nodes else replace(graph, nodes=nodes)
    return rewrite(whole, ATTENTION, target, counts)


def _with_body(node: Node, target: Target, fired: Counter[str], bodies: dict[Graph, Graph]) -> Node:
    """A call without a gradient of its own, with its body recognised; other nodes as they are."""
    call = node.attributes
    if not isinstance(call, Call) or call.backward is not None:
        return node
    if call.body not in bodies:
        own: Counter[str] = Counter()
        found = recognise_attention(canonicalise(call.body), target, own)
        bodies[call.body] = found if own else call.body
        fired.update(own)
    body = bodies[call.body]
    return node if body is call.body else replace(node, attributes=replace(call, body=body))
