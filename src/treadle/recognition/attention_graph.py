"""The graph of an attention that was found: operands laid out, the bias, the composite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treadle.base.dtypes import int32
from treadle.ir import composites as c
from treadle.ir.graph import Graph, Value
from treadle.ir.op import NONE
from treadle.ir.ops import elementwise as e
from treadle.ir.ops.leaves import CONSTANT, IOTA, Constant, Iota
from treadle.ir.ops.shaping import BROADCAST, Broadcast
from treadle.ir.rewrite import inline_into
from treadle.ir.types import TensorType
from treadle.recognition.attention import Attending
from treadle.recognition.axes import Groups
from treadle.recognition.masks import is_causal, known
from treadle.recognition.regions import Flow
from treadle.recognition.scores import HIDES, Labelled, Term
from treadle.recognition.sketch import Sketch
from treadle.rules.pattern import number_of

_HEADS_LAST = (0, 2, 1, 3)  # (B, H, T, E) as (B, T, H, E), and back


@dataclass(frozen=True, slots=True)
class Mask:
    """A term by labels, of one element along axes that it repeats.

    `seen` is where it hides nothing, if that is known and it does nothing else.
    """

    term: Term
    source: Value  # the term without its broadcast
    labels: str
    sizes: tuple[int, ...]
    seen: np.ndarray | None
    hides: float | None  # the number that stands for −∞, if the term is a mask
    is_causal: bool


class AttentionGraph:
    """Attention over inputs: queries, keys, values, then what masks and biases are made of."""

    def __init__(self, flow: Flow, found: Attending):
        self.flow, self.found, self.axes = flow, found, found.axes
        batch, heads = found.heads
        self.groups = batch, heads + found.own, found.query, found.key
        self.order = "".join(self.groups)
        self.masks = [self._mask(t) for t in found.scores.terms]
        self.others = [m for m in self.masks if not m.is_causal]
        read = [found.q.value, found.k.value, found.v.value]
        read += [m.source for m in self.others if number_of(flow.graph, m.source) is None]
        self.inputs = tuple(dict.fromkeys(read))
        self.sketch = Sketch(tuple(flow.graph.type_of(v) for v in self.inputs))
        self.dtype = flow.graph.type_of(found.q.value).dtype

    def region(self) -> Graph:
        """What is written, over the same inputs; the causal mask in the form that it has here."""
        causal = [m for m in self.masks if m.is_causal]
        sources = tuple(dict.fromkeys(m.source for m in causal))
        region = self.flow.extract(self.found.root, (*self.inputs, *sources))
        sketch = Sketch(tuple(self.flow.graph.type_of(v) for v in self.inputs))
        names = [*self.inputs, *sources]
        leaves = {str(i): v for i, v in enumerate(sketch.inputs)}
        leaves |= {str(names.index(m.source)): self._causal(sketch, m) for m in causal}
        (value,) = inline_into(sketch.builder, region, leaves)
        return sketch.result(value, region.output_types[0])

    def _causal(self, sketch: Sketch, mask: Mask) -> Value:
        """The causal mask, or what adds it, as the source of a term."""
        t, s = (self.axes.size(g) for g in self.groups[2:])
        shape, term = (t, s), mask.term
        rows, columns = (sketch.add(IOTA, Iota(i, shape, int32)) for i in (0, 1))
        value = sketch.add(e.LE, NONE, columns, rows)
        if not term.is_mask:
            type_ = TensorType(shape, self.flow.graph.type_of(mask.source).dtype)
            lowest = math.inf if term.is_subtracted else -math.inf
            numbers = (sketch.add(CONSTANT, Constant(n, type_)) for n in (0.0, lowest))
            value = sketch.add(e.WHERE, NONE, value, *numbers)
        elif term.is_hidden:
            value = sketch.add(e.NOT, NONE, value)
        sizes = [mask.sizes[mask.labels.index(x)] for x in self.order]
        turned = sketch.permuted(
            sketch.reshaped(value, sizes), tuple(self.order.index(x) for x in mask.labels)
        )
        return sketch.reshaped(turned, self.flow.graph.type_of(mask.source).shape)

    @property
    def saturates(self) -> bool:
        """Whether a finite number is taken for −∞."""
        return any(m.hides is not None and math.isfinite(m.hides) for m in self.masks)

    @property
    def blinds(self) -> bool:
        """Whether a query may see nothing but what finite numbers hide: what it sees then is lost.

        A row of such numbers alone is a mean of all values, and −∞ would make it another.
        """
        hiding = [m for m in self.masks if m.hides is not None]
        if any(m.seen is None for m in hiding):
            return True
        seen: np.ndarray = np.array([True])
        for m in hiding:
            seen = seen & m.seen
        return not bool(seen.any(-1).all())

    @property
    def may_hide(self) -> bool:
        """Whether a query may see nothing, so that its row is NaN."""
        if not any(m.hides is None or math.isinf(m.hides) for m in self.others):
            return False
        seen: np.ndarray = np.array([True])
        for m in self.masks:
            if m.seen is None:
                return True
            seen = seen & m.seen
        return not bool(seen.any(-1).all())

    def graph(self, with_nan: bool) -> Graph:
        found, sketch, (batch, heads, query, key) = self.found, self.sketch, self.groups
        keys = found.heads[1]
        q = self.laid(found.q, (batch, heads, query, found.depth))
        k = self.laid(found.k, (batch, keys, key, found.depth))
        v = self.laid(found.v, (batch, keys, key, found.width))
        bias = self.bias()
        attributes = c.Attention(found.scores.scale, len(self.others) < len(self.masks))
        operands = (q, k, v) if bias is None else (q, k, v, bias)
        out, lse = sketch.builder.add(c.ATTENTION, attributes, operands)
        out = self.with_nan(out, lse) if with_nan else out
        labels = batch + heads + query + found.width
        out = sketch.reshaped(out, self.axes.shape(labels))
        wanted = self.axes.resolved("".join(found.result))
        out = sketch.permuted(out, tuple(labels.index(x) for x in wanted))
        type_ = self.flow.graph.type_of(found.root)
        return sketch.result(sketch.reshaped(out, type_.shape), type_)

    def laid(self, x: Labelled, groups: Sequence[str]) -> Value:
        """A value with its axes in groups, each of which becomes one."""
        value = self.sketch.inputs[self.inputs.index(x.value)]
        labels = self.axes.resolved("".join(x.groups))
        turned = self._turned(value, labels, "".join(groups))
        return self.sketch.reshaped(turned, tuple(self.axes.size(g) for g in groups))

    def _turned(self, value: Value, labels: str, order: str) -> Value:
        apart = self.sketch.reshaped(value, self.axes.shape(labels))
        return self.sketch.permuted(apart, tuple(labels.index(x) for x in order))

    def with_nan(self, out: Value, lse: Value) -> Value:
        """NaN in rows that see nothing, as a softmax of −∞ alone is.

        With heads side by side, as the matmul that comes next reads them: no copy is made for it.
        """
        sketch = self.sketch
        rows = sketch.permuted(out, _HEADS_LAST)
        type_, of_rows = sketch.builder.type_of(rows), sketch.builder.type_of(lse)
        hidden = sketch.add(e.EQ, NONE, lse, self.number(-math.inf, of_rows))
        turned = sketch.permuted(hidden, _HEADS_LAST[:3])
        spread = sketch.add(BROADCAST, Broadcast(type_.shape, (0, 1, 2)), turned)
        chosen = sketch.add(e.WHERE, NONE, spread, self.number(math.nan, type_), rows)
        return sketch.permuted(chosen, _HEADS_LAST)

    def number(self, value: float, type_: TensorType) -> Value:
        return self.sketch.add(CONSTANT, Constant(value, type_))

    # The bias

    def bias(self) -> Value | None:
        """Everything that is added, as (B or 1, H or 1, T or 1, S or 1) of the queries' dtype."""
        parts = [self.added(m) for m in self.others]
        shapes = [self.sketch.builder.type_of(x).shape for x in parts]
        shape = tuple(map(max, zip(*shapes, strict=True)))
        total: Value | None = None
        for x in parts:
            spread = self.spread(x, shape)
            total = spread if total is None else self.sketch.add(e.ADD, NONE, total, spread)
        return total

    def added(self, mask: Mask) -> Value:
        sketch, term = self.sketch, mask.term
        value = self._value(mask)
        shape = sketch.builder.type_of(value).shape
        if term.is_mask:
            type_ = TensorType(shape, self.dtype)
            both = self.number(0.0, type_), self.number(term.number, type_)
            value = sketch.add(e.WHERE, NONE, value, *(both[::-1] if term.is_hidden else both))
        elif term.is_subtracted:
            value = sketch.negated(value)
        value, wanted, merged, at = sketch.cast(value, self.dtype), list[int](), list[int](), 0
        for group in self.groups:
            part = shape[at : at + len(group)]
            is_one = all(n == 1 for n in part)
            wanted += part if is_one else self.axes.shape(group)
            merged.append(1 if is_one else self.axes.size(group))
            at += len(group)
        return sketch.reshaped(self.spread(value, tuple(wanted)), tuple(merged))

    def spread(self, value: Value, wanted: tuple[int, ...]) -> Value:
        """Axes of one element repeated."""
        shape = self.sketch.builder.type_of(value).shape
        if shape == wanted:
            return value
        axes = tuple(i for i, n in enumerate(shape) if n == wanted[i])
        kept = self.sketch.reshaped(value, tuple(shape[i] for i in axes))
        return self.sketch.add(BROADCAST, Broadcast(wanted, axes), kept)

    def _value(self, mask: Mask) -> Value:
        """A term in the order of scores, of one element along axes that it repeats."""
        number = number_of(self.flow.graph, mask.source)
        if number is not None:
            type_ = TensorType(mask.sizes, self.flow.graph.type_of(mask.source).dtype)
            value = self.number(float(number), type_)
        else:
            given = self.sketch.inputs[self.inputs.index(mask.source)]
            value = self.sketch.reshaped(given, mask.sizes)
        return self.sketch.permuted(value, tuple(mask.labels.index(x) for x in self.order))

    # Terms

    def _mask(self, term: Term) -> Mask:
        graph, node, source = self.flow.graph, self.flow.node(term.value), term.value
        shape = graph.type_of(source).shape
        if isinstance(node.attributes, Broadcast):
            kept, source = node.attributes.axes, node.operands[0]
            shape = tuple(n if i in kept else 1 for i, n in enumerate(shape))
        elif number_of(graph, source) is not None:
            shape = (1,) * len(shape)
        labels, sizes = self._labels(term.groups, shape)
        is_closed = self.flow.closed[source.node]
        numbers = known(graph, source, self.flow.known) if is_closed else None
        if numbers is None or numbers.size != math.prod(sizes):
            return Mask(
                term, source, labels, sizes, None, term.number if term.is_mask else None, False
            )
        turned = numbers.reshape(sizes).transpose([labels.index(x) for x in self.order])
        seen, hides = self._seen(term, turned)
        causal = seen is not None and is_causal(seen)
        return Mask(term, source, labels, sizes, seen, hides, causal)

    def _labels(self, groups: Groups, shape: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """The labels of a term's axes and their sizes, of one element where it repeats itself."""
        labels, sizes = "", list[int]()
        for group, n in zip(groups, shape, strict=True):
            parts = self.axes.resolved(group)
            labels += parts
            sizes += self.axes.shape(group) if n != 1 else [1] * len(parts)
        return labels, tuple(sizes)

    def _seen(self, term: Term, numbers: np.ndarray) -> tuple[np.ndarray | None, float | None]:
        """Where a term hides nothing, if it is a mask; and by what number it hides."""
        if term.is_mask:
            return self._rows(numbers.astype(bool) ^ term.is_hidden), term.number
        signed = -numbers if term.is_subtracted else numbers
        is_seen = signed == 0
        hidden = signed[~is_seen]
        if hidden.size and (hidden <= HIDES).all():
            return self._rows(is_seen), float(hidden.max())
        return None, None

    def _rows(self, seen: np.ndarray) -> np.ndarray:
        """A mask with one axis of all but queries and keys, one of queries and one of keys."""
        shape = seen.shape
        keys, queries = len(self.groups[3]), len(self.groups[2])
        at = len(shape) - keys - queries
        parts = shape[:at], shape[at : at + queries], shape[at + queries :]
        return seen.reshape([math.prod(p) for p in parts])
