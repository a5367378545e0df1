"""Scans: the body's kernels repeated for each row, or as one kernel that loops by itself."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from treadle.ir.control import SCAN, Scan
from treadle.ir.graph import Graph, Node
from treadle.ir.graph import Value as TensorValue
from treadle.ir.ops.leaves import Constant
from treadle.ir.ops.linear import CONTRACT
from treadle.ir.ops.shaping import Concat, Pad
from treadle.kernel.bindings import Whole
from treadle.kernel.nodes import Buffer, Kernel, Statement
from treadle.kernel.program import Argument
from treadle.rules.expansion import expand
from treadle.schedule.drafts import Draft, RepeatDraft
from treadle.schedule.homes import last_reads
from treadle.schedule.inline import ELEMENTWISE
from treadle.schedule.keep import CHUNKED
from treadle.schedule.lower import Lowering, attributes_of
from treadle.schedule.nests import along, axis_vars, copies, parallel, shifted
from treadle.schedule.order import Order
from treadle.schedule.persistent import Iterations, as_one_kernel, named
from treadle.schedule.templates import has_template


class ScanBody(Lowering):
    """The body of a scan: rows are read and written in place, carries copied after an iteration."""

    repeats = True

    def __init__(self, outer: Lowering, position: int, attributes: Scan, node: Node):
        # A stream is a repeat over rows of buffers, which a row of this scan's is not.
        body = expand(attributes.body, outer.target, has_template if outer.fuse else None)
        prefix = f"{outer.prefix}scan{position}:"
        super().__init__(body, outer.fuse, outer.panel, outer.memo, prefix)
        self.attributes = attributes
        self.starts: list[Kernel] = []
        self.carries: dict[str, tuple[str, str]] = {}  # buffers where each starts and ends
        inputs = [TensorValue(i) for i in body.inputs]
        split = attributes.constants + attributes.carries
        for value, operand in zip(inputs, node.operands, strict=True):
            name, source = self.names[value], outer.names[operand]
            buffer = self.buffers[name]
            if source in outer.rows:  # a row of a row is not one: it is copied first
                copy = self._room(f"{name}@whole", outer.graph.type_of(operand))
                outer.held[copy] = operand, Whole()
                self.starts += copies(source, copy, self.buffers[copy])
                source = copy
            if value in inputs[split:]:
                self.rows[name] = Argument(source, buffer.size)
            elif value in inputs[attributes.constants :]:
                target = outer.names[TensorValue(position, len(self.carries))]
                self.carries[name] = source, target
            else:
                self.rename(value, source)
                self.fixed.add(source)
        self.carried = list(self.carries)
        for name, output in zip(self.carried, body.outputs, strict=False):
            self.held[name] = output.value, Whole()  # from the end of an iteration on
        self.stacked = [
            outer.names[TensorValue(position, attributes.carries + k)]
            for k in range(len(body.outputs) - attributes.carries)
        ]
        self._bind_rows()
        self.in_carries = self._write_carries()

    def _write_carries(self) -> set[str]:
        """Carries whose next values are written over them: matmuls that come after all readers."""
        outputs = Counter(o.value for o in self.graph.outputs)
        last_read = last_reads(self.graph, self.materialized, self.recomputed)
        first, found = self.attributes.constants, set[str]()
        for k, name in enumerate(self.carried):
            carry, value = TensorValue(self.graph.inputs[first + k]), self.graph.outputs[k].value
            is_matmul = self.graph.nodes[value.node].op is CONTRACT and value in self.names
            is_last = last_read.get(carry.node, -1) < value.node
            if is_matmul and is_last and outputs[value] == 1 and carry not in outputs:
                del self.buffers[self.names[value]]
                self.names[value] = name
                found.add(name)
        return found

    def _bind_rows(self) -> None:
        """Results of an iteration are written to their rows where they are made here and once."""
        inputs = {self.names[TensorValue(i)] for i in self.graph.inputs}
        self.copied_rows: list[tuple[str, str]] = []
        for output, target in zip(
            self.graph.outputs[self.attributes.carries :], self.stacked, strict=True
        ):
            name = self.names[output.value]
            node = self.graph.nodes[output.value.node]
            row = Argument(target, self.buffers[name].size)
            is_made = node.op is not SCAN and not isinstance(node.attributes, Constant)
            if name in inputs or name in self.rows or not is_made:
                alias = f"{target}@row"
                self.rows[alias] = row
                self.held[alias] = output.value, Whole()
                self.copied_rows.append((name, alias))
            else:
                self.rows[name] = row

    def add_kernels(self, kernels: Sequence[Kernel], order: Order, after: str | None) -> None:
        """What every iteration would recompute is computed once, before the first.

        Of several kernels that write a buffer all are, or none: zeros that an iteration adds to
        must be written anew for the next, though nothing is read for them.
        """
        made = [{b.name for b in kernel.outputs} for kernel in kernels]
        moving = {*self.rows, *self.carried}  # what an iteration is to write, whatever of
        while True:
            fixed, starts = set(self.fixed), set[int]()
            for i, kernel in enumerate(kernels):
                if all(b.name in fixed for b in kernel.inputs) and not made[i] & moving:
                    fixed |= made[i]
                    starts.add(i)
            written = {name for i, names in enumerate(made) if i not in starts for name in names}
            if written <= moving:
                break
            moving |= written
        self.fixed = fixed
        self.starts += [kernel for i, kernel in enumerate(kernels) if i in starts]
        order.add(*(kernel for i, kernel in enumerate(kernels) if i not in starts))

    def map_kernels(self, value: TensorValue) -> list[Kernel]:
        """Each element on its own; elements of equal parts in one iteration, without guards."""
        seam = seams(self.graph, value, self.target.materialization.most_parts)
        if seam is None or not self.target.has_launches or value in self.layouts:
            return super().map_kernels(value)
        axis, count = seam
        shape, reader = list(self.graph.type_of(value).shape), self.reader(value)
        shape[axis] //= count
        axes, body = axis_vars("i", shape), list[Statement]()
        for part in range(count):
            indices, known = list(along(axes)), len(reader.lets)
            indices[axis] += part * shape[axis]
            element = reader.at(value, tuple(indices))
            body += [*reader.lets[known:], self.store(value, indices, element)]
        return [self.kernel(value.node, reader, [value], parallel(axes, body))]

    def rename(self, value: TensorValue, name: str) -> None:
        """A body's input is a buffer of outside."""
        old = self.buffers.pop(self.names[value])
        self.names[value] = name
        self.buffers.setdefault(name, Buffer(name, old.dtype, old.size))

    def finish(self, order: Order) -> None:
        """Rows that are copies, then the carries of the next iteration."""
        pairs = list(self.copied_rows)
        made = [self.names[o.value] for o in self.graph.outputs[: self.attributes.carries]]
        for k, name in enumerate(made):
            if (
                name in self.carried and name not in self.in_carries
            ):  # it may be overwritten before it is copied
                made[k] = self._room(f"{self.prefix}next{k}", self.buffers[name])
                self.held[made[k]] = self.graph.outputs[k].value, Whole()
                pairs.append((name, made[k]))
        carried = [pair for pair in zip(made, self.carried, strict=True) if pair[0] != pair[1]]
        for source, target in carried:
            readers, written = [p for p in pairs if p[0] == target], {t for _, t in pairs}
            is_row = len(readers) == 1 and readers[0] in self.copied_rows
            # What a carry was and what it becomes are one kernel, which the one that makes its
            # next value then takes in: an iteration is a phase less. Nobody else may want the old
            # value, and the new one must be there before any copy.
            if is_row and source not in self.carried and source not in written:
                pairs.remove(readers[0])
                order.add(*shifted(readers[0][1], target, source, self.buffers[target]))
            else:
                pairs.append((source, target))
        for source, target in pairs:
            order.add(*copies(source, target, self.buffers[source]))


def seams(graph: Graph, value: TensorValue, most: int) -> tuple[int, int] | None:
    """The axis along which a value is put together of equal parts, and how many they are.

    What is computed from such a value element by element is made in the same parts, so that it can
    be made with it.
    """
    pending, seen, at = [value], {value}, dict[int, set[int]]()
    shape = graph.type_of(value).shape
    while pending:
        node = graph.nodes[pending.pop().node]
        if isinstance(node.attributes, (Pad, Concat)):
            for axis, places in _places(graph, node).items():
                at.setdefault(axis, set()).update(places)
        elif node.op in ELEMENTWISE:
            pending += [v for v in node.operands if v not in seen]
            seen.update(node.operands)
    if len(at) != 1:
        return None
    ((axis, places),) = at.items()
    count = shape[axis] // math.gcd(shape[axis], *places)
    return (axis, count) if 1 < count <= most else None


def _places(graph: Graph, node: Node) -> dict[int, set[int]]:
    """Where parts of a tensor begin and end, by axis."""
    shape = node.types[0].shape
    if isinstance(node.attributes, Concat):
        axis = node.attributes.axis
        sizes = (graph.type_of(v).shape[axis] for v in node.operands)
        return {axis: set(accumulate(sizes))}
    assert isinstance(node.attributes, Pad)
    low, high = node.attributes.low, node.attributes.high
    return {i: {low[i], n - high[i]} for i, n in enumerate(shape) if low[i] or high[i]}


@CHUNKED(SCAN)
def _scan(lowering: Lowering, position: int, node: Node) -> list[Draft]:
    """The body's program for each row; an iteration changes buffers of carries at its end."""
    attributes: Scan = attributes_of(node)
    inner = ScanBody(lowering, position, attributes, node)
    drafts, before = inner.drafts(), Order(lowering.fuse, lowering.memo)
    before.add(*inner.starts)
    lowering.buffers = inner.buffers | lowering.buffers
    lowering.constants |= inner.constants
    lowering.rows |= inner.rows
    lowering.inner_bindings += [*inner.bindings(), *inner.inner_bindings]
    lowering.bodies += [(inner.prefix, inner.graph), *inner.bodies]
    whole = _persistent(lowering, inner, drafts)
    if whole is not None:
        return [*before.phases(), [lowering.memo.bound(whole)]]
    for k, (name, (first, last)) in enumerate(inner.carries.items()):
        before.add(*copies(first, name, inner.buffers[name]))
        lowering.after += copies(name, last, inner.buffers[name])
        around = node.operands[attributes.constants + k], TensorValue(position, k)
        lowering.carried_around += [(name, value, Whole()) for value in around]
    repeat = RepeatDraft(attributes.length, attributes.reverse, drafts, inner.prefix)
    return [*before.phases(), repeat]


def _persistent(lowering: Lowering, inner: ScanBody, drafts: list[Draft]) -> Kernel | None:
    """The scan as one kernel, where its parts need nothing of each other; None otherwise."""
    attributes, target = inner.attributes, lowering.target
    if not target.has_launches or not lowering.fuse or not attributes.length:
        return None
    kernels: list[Kernel] = []
    for draft in drafts:
        if isinstance(draft, RepeatDraft):
            return None
        kernels += [named(bound) for bound in draft]
    sizes = {b.name: b.size for b in lowering.buffers.values()}
    length, reverse = attributes.length, attributes.reverse
    iterations = Iterations(length, reverse, inner.rows, sizes, inner.carries)
    return as_one_kernel(kernels, iterations, target)
