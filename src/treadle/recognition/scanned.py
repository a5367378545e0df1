"""The graph with a `scan` in place of a chain of equal steps."""

from __future__ import annotations

from treadle.ir.control import SCAN, Scan
from treadle.ir.graph import Graph, GraphBuilder, Node, Output, OutputKind, Value
from treadle.ir.op import Attributes, Op
from treadle.ir.ops.leaves import INPUT, Leaf
from treadle.ir.ops.shaping import (
    CONCAT,
    PERMUTE,
    RESHAPE,
    SLICE,
    Concat,
    Permute,
    Reshape,
    Slice,
)
from treadle.ir.rewrite import inline_into, remove_dead_code, replace_values
from treadle.recognition.regions import Flow
from treadle.recognition.unrolled import MODEL, Chain, Reads


def with_scan(flow: Flow, chain: Chain) -> Graph:
    return _Scanning(flow, chain).graph()


class _Scanning:
    """A graph that is being copied, with a scan appended that takes the place of some nodes."""

    def __init__(self, flow: Flow, chain: Chain):
        self.flow, self.old, self.chain = flow, flow.graph, chain
        self.builder = GraphBuilder()
        for node in flow.graph.nodes:
            self.builder.copy(node, node.operands)
        self.inside = {p for nodes in chain.nodes for p in nodes} - chain.shared
        self.origin = flow.graph.nodes[chain.model[0]].origin
        self.length = len(chain.nodes)

    def graph(self) -> Graph:
        stacked = self._stacked()
        body = self._body(stacked)
        slices = [self._slices(r) for r in self.chain.reads]
        operands = (*self.chain.outside, *self.chain.first, *slices)
        counts = len(self.chain.outside), len(self.chain.carries), self.length
        scan = Scan(body, *counts, reverse=self.chain.is_reversed)
        results = self.builder.add(SCAN, scan, operands, self.origin)
        replacements = self._replacements(stacked, self._wholes(stacked, results))
        grown = self.builder.build(self.old.outputs, self.old.name)
        return replace_values(grown, replacements)

    def _add(self, op: Op, attributes: Attributes, *operands: Value) -> Value:
        return self.builder.add(op, attributes, operands, self.origin)[0]

    def _stacked(self) -> list[tuple[int, int]]:
        """Results of the model's nodes that something outside of the chain reads."""
        found: dict[tuple[int, int], None] = {}
        where = {p: i for nodes in self.chain.nodes for i, p in enumerate(nodes)}
        where = {p: i for p, i in where.items() if p in self.inside}
        for position, node in enumerate(self.old.nodes):
            if position not in self.inside:
                read = [v for v in node.operands if v.node in where]
                found.update(((where[v.node], v.output), None) for v in read)
        for o in self.old.outputs:
            if o.value.node in where:
                found[where[o.value.node], o.value.output] = None
        return list(found)

    def _body(self, stacked: list[tuple[int, int]]) -> Graph:
        chain, builder = self.chain, GraphBuilder()
        moved: dict[Value, Value] = {}
        for name, given in (("k", chain.outside), ("c", chain.carries)):
            for i, v in enumerate(given):
                (moved[v],) = builder.add(INPUT, Leaf(f"{name}{i}", self.old.type_of(v)), ())
        for i, r in enumerate(chain.reads):
            value = r.values[::-1][MODEL] if chain.is_reversed else r.values[MODEL]
            type_ = self.old.type_of(value)
            row = self._row(r)
            (read,) = builder.add(INPUT, Leaf(f"x{i}", type_.with_shape(row)), ())
            if row != type_.shape:
                (read,) = builder.add(RESHAPE, Reshape(type_.shape), (read,))
            moved[value] = read
        for position in chain.model:
            node = self.old.nodes[position]
            operands = [self._inside(builder, moved, v) for v in node.operands]
            copy = builder.copy(node, operands)
            moved |= {Value(position, k): Value(copy, k) for k in range(len(node.types))}
        values = [
            moved[Value(chain.model[i], v.output)]
            for i, v in zip(chain.carried, chain.carries, strict=True)
        ]
        values += [moved[v] for v in self._rows(stacked)]
        outputs = (Output(OutputKind.RESULT, str(i), v) for i, v in enumerate(values))
        return remove_dead_code(builder.build(outputs, "step"))

    def _rows(self, stacked: list[tuple[int, int]]) -> list[Value]:
        """What the body gives for stacks: no views, each once."""
        values = (self._unviewed(Value(self.chain.model[i], k)) for i, k in stacked)
        return list(dict.fromkeys(values))

    def _unviewed(self, value: Value) -> Value:
        node = self.old.nodes[value.node]
        is_own = node.op is RESHAPE and node.operands[0].node in self.chain.model
        return self._unviewed(node.operands[0]) if is_own else value

    def _wholes(self, stacked: list[tuple[int, int]], results: tuple[Value, ...]) -> list[Value]:
        """The scan's result for each stack, in the shape of what was written."""
        rows, found = self._rows(stacked), []
        for i, k in stacked:
            value = Value(self.chain.model[i], k)
            whole = results[len(self.chain.carries) + rows.index(self._unviewed(value))]
            shape = (self.length, *self.old.type_of(value).shape)
            is_same = self.builder.type_of(whole).shape == shape
            found.append(whole if is_same else self._add(RESHAPE, Reshape(shape), whole))
        return found

    def _inside(self, builder: GraphBuilder, moved: dict[Value, Value], value: Value) -> Value:
        if value not in moved:  # what nothing decides is computed in the body
            (moved[value],) = inline_into(builder, self.flow.extract(value, ()), {})
        return moved[value]

    def _row(self, reads: Reads) -> tuple[int, ...]:
        shape = self.old.type_of(reads.source).shape
        return shape[: reads.axis] + shape[reads.axis + 1 :]

    def _slices(self, reads: Reads) -> Value:
        """What steps read, along the first axis, from the first step of the chain."""
        type_ = self.old.type_of(reads.source)
        axes = (reads.axis, *(i for i in range(type_.rank) if i != reads.axis))
        value = reads.source
        if reads.axis:
            value = self._add(PERMUTE, Permute(axes), value)
        shape = self.builder.type_of(value).shape
        if self.length < shape[0]:
            is_reversed, start = self.chain.is_reversed, self.chain.start
            low = shape[0] - start - self.length if is_reversed else start
            starts = (low, *(0 for _ in shape[1:]))
            stops = (low + self.length, *shape[1:])
            value = self._add(SLICE, Slice(starts, stops, (1,) * len(shape)), value)
        return value

    def _replacements(
        self, stacked: list[tuple[int, int]], wholes: list[Value]
    ) -> dict[Value, Value]:
        found: dict[Value, Value] = {}
        for (i, k), whole in zip(stacked, wholes, strict=True):
            steps = [Value(nodes[i], k) for nodes in self.chain.nodes]
            in_order = steps[::-1] if self.chain.is_reversed else steps
            stacks = self._stacks(in_order, whole)
            found |= stacks
            for t, value in enumerate(in_order):
                is_inside = value.node in self.inside
                if is_inside and any(
                    n not in stacks for n in self._readers(value, {v.node for v in stacks})
                ):
                    found[value] = self._step(whole, t)
        return found

    def _readers(self, value: Value, stacks: set[int]) -> list[Value]:
        """Nodes outside of the chain that read a value, but for views that only stacks read."""
        found = []
        for user in self.flow.users[value.node]:
            node = self.old.nodes[user]
            if user in self.inside or value not in node.operands:
                continue
            is_view = node.op is RESHAPE and set(self.flow.users[user]) <= stacks
            if not is_view:
                found.append(Value(user))
        is_result = any(o.value == value for o in self.old.outputs)
        return [*found, value] if is_result else found

    def _stacks(self, steps: list[Value], whole: Value) -> dict[Value, Value]:
        """Concatenations of every step's value, and what the scan's result is for them."""
        found: dict[Value, Value] = {}
        views = [p for p in self.flow.users[steps[0].node] if self.old.nodes[p].op is RESHAPE]
        users = {u for p in views for u in self.flow.users[p]} | set(self.flow.users[steps[0].node])
        for user in sorted(users):
            axis = self._joined(self.old.nodes[user], steps)
            if axis is not None:
                rank = self.builder.type_of(whole).rank
                order = (*range(1, axis + 1), 0, *range(axis + 1, rank))
                turned = self._add(PERMUTE, Permute(order), whole) if axis else whole
                shape = self.old.nodes[user].types[0].shape
                is_same = self.builder.type_of(turned).shape == shape
                found[Value(user)] = (
                    turned if is_same else self._add(RESHAPE, Reshape(shape), turned)
                )
        return found

    def _joined(self, node: Node, steps: list[Value]) -> int | None:
        """The axis along which a node joins the values of all steps, or views of one more axis."""
        if not isinstance(node.attributes, Concat) or node.op is not CONCAT:
            return None
        axis, shape = node.attributes.axis, self.old.type_of(steps[0]).shape
        if node.operands == tuple(steps):
            return axis
        views = [self.old.nodes[v.node] for v in node.operands]
        wanted = (*shape[:axis], 1, *shape[axis:])
        is_stack = [n.operands for n in views] == [(v,) for v in steps]
        is_view = all(n.op is RESHAPE and n.types[0].shape == wanted for n in views)
        return axis if is_stack and is_view else None

    def _step(self, whole: Value, t: int) -> Value:
        type_ = self.builder.type_of(whole)
        starts, stops = (t, *(0 for _ in type_.shape[1:])), (t + 1, *type_.shape[1:])
        row = self._add(SLICE, Slice(starts, stops, (1,) * type_.rank), whole)
        return self._add(RESHAPE, Reshape(type_.shape[1:]), row)
