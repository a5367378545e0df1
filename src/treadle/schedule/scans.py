"""Scans: the body's kernels repeated for each row, or as one kernel that loops by itself."""

from __future__ import annotations

from treadle.ir.control import SCAN, Scan
from treadle.ir.graph import Node
from treadle.ir.graph import Value as TensorValue
from treadle.ir.ops.leaves import Constant
from treadle.kernel.nodes import Buffer, Kernel
from treadle.kernel.program import Argument
from treadle.rules.expansion import expand
from treadle.schedule.keep import CHUNKED
from treadle.schedule.lower import Draft, Lowering, RepeatDraft, attributes_of
from treadle.schedule.nests import copies
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
        self.fixed: set[str] = set()  # buffers that no iteration changes
        self.starts: list[Kernel] = []
        self.ends: list[Kernel] = []
        inputs = [TensorValue(i) for i in body.inputs]
        split = attributes.constants + attributes.carries
        for value, operand in zip(inputs, node.operands, strict=True):
            name, source = self.names[value], outer.names[operand]
            buffer = self.buffers[name]
            if source in outer.rows:  # a row of a row is not one: it is copied first
                copy = self._room(f"{name}@whole", outer.graph.type_of(operand))
                self.starts += copies(source, copy, self.buffers[copy])
                source = copy
            if value in inputs[split:]:
                self.rows[name] = Argument(source, buffer.size)
            elif value in inputs[attributes.constants :]:
                self.starts += copies(source, name, buffer)
            else:
                self.rename(value, source)
                self.fixed.add(source)
        self.carried = [self.names[v] for v in inputs[attributes.constants : split]]
        for k, name in enumerate(self.carried):
            target = outer.names[TensorValue(position, k)]
            self.ends += copies(name, target, self.buffers[name])
        self.stacked = [
            outer.names[TensorValue(position, attributes.carries + k)]
            for k in range(len(body.outputs) - attributes.carries)
        ]
        self._bind_rows()

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
                self.copied_rows.append((name, alias))
            else:
                self.rows[name] = row

    def add_kernel(self, kernel: Kernel, order: Order, after: str | None) -> None:
        """What every iteration would recompute is computed once, before the first."""
        made = {b.name for b in kernel.outputs}
        is_fixed = all(b.name in self.fixed for b in kernel.inputs) and not made & set(self.rows)
        if is_fixed:
            self.fixed |= made
            self.starts.append(kernel)
        else:
            order.add(kernel)

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
            if name in self.carried:  # it may be overwritten before it is copied
                made[k] = self._room(f"{self.prefix}next{k}", self.buffers[name])
                pairs.append((name, made[k]))
        for source, target in [*pairs, *zip(made, self.carried, strict=True)]:
            order.add(*copies(source, target, self.buffers[source]))


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
    lowering.after += inner.ends
    whole = _persistent(lowering, inner, drafts)
    if whole is not None:
        return [*before.phases(), [lowering.memo.bound(whole)]]
    return [*before.phases(), RepeatDraft(attributes.length, attributes.reverse, drafts)]


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
    iterations = Iterations(attributes.length, attributes.reverse, inner.rows, sizes)
    return as_one_kernel(kernels, iterations, frozenset(inner.carried), target)
