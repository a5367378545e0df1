"""A classifier's head and its chunks of rows: operands, memory, and the loss of a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from treadle.base import dtypes
from treadle.ir import composites as c
from treadle.ir.graph import Node
from treadle.ir.graph import Value as TensorValue
from treadle.kernel.index import Index, Var, constant, variable
from treadle.kernel.nodes import Apply, Buffer, Kernel, Literal, Statement, Store, Value
from treadle.kernel.program import Argument
from treadle.schedule.lower import Draft, Lowering, RepeatDraft, attributes_of
from treadle.schedule.nests import as_dtype, axis_vars, flat_index, parallel
from treadle.schedule.operands import Site, load_of
from treadle.schedule.order import Order
from treadle.schedule.softmax import F32, I32, At, Rows, Scores, add, local, mul, sub


class Head:
    """One loss: where its operands lie, and what its kernels share."""

    def __init__(self, lowering: Lowering, position: int, node: Node):
        self.lowering, self.position, self.node = lowering, position, node
        attributes: c.HeadCrossEntropy = attributes_of(node)
        self.smoothing, self.is_rounded = float(attributes.label_smoothing), attributes.rounded
        is_grad = node.op is c.LINEAR_CROSS_ENTROPY_GRAD
        ct, operands = (node.operands[0], node.operands[1:]) if is_grad else (None, node.operands)
        x, weight, targets, *bias = operands
        self.rows, self.width = lowering.graph.type_of(x).shape
        self.classes = lowering.graph.type_of(weight).shape[0]
        self.before = Order(lowering.fuse, lowering.memo)
        self.x, self.weight = self._in_order(x), Rows(self._in_order(weight), Index(), self.width)
        self.targets = self._targets(targets)
        self.bias = Rows(self._in_order(bias[0]), Index(), 1) if bias else None
        self.ct = None if ct is None else self._in_order(ct)
        read = {o.value for o in lowering.graph.outputs} | lowering.uses.keys()
        values = (TensorValue(position, i) for i in range(len(node.types)))
        self.wanted = {v.output for v in values if v in read}

    @property
    def gradients(self) -> set[int]:
        """The outputs that are wanted: 1 of the input, 2 of the weight, 3 of the bias."""
        return set() if self.ct is None else self.wanted - {0}

    # Arithmetic of a row

    def loss(self) -> Value:
        """The logsumexp less the target's logit, and less the mean logit where it is smoothed."""
        log, own = local("log"), local("own")
        if not self.smoothing:
            return sub(log, own)
        return sub(sub(log, self.own_share(own)), self.every_share(local("every")))

    def own_share(self, value: Value) -> Value:
        """What the target has of a value, beside what every class has."""
        return mul(value, 1 - self.smoothing) if self.smoothing else value

    def every_share(self, value: Value) -> Value:
        """What every class has of a value, where targets are smoothed."""
        return mul(value, self.smoothing / self.classes)

    # Operands and buffers

    def _in_order(self, operand: TensorValue) -> Buffer:
        """An operand in memory in the order of its axes: where it is, or copied."""
        lowering, type_ = self.lowering, self.lowering.graph.type_of(operand)
        axes = axis_vars("i", type_.shape)
        found = load_of(lowering.reader(), operand, axes)
        if found is not None and found.index - flat_index(axes) == Index():
            known = lowering.buffers[found.buffer]
            if known.size == type_.size:
                return known
        name = f"flat{operand.node}.{operand.output}"
        buffer, kernel = Site(lowering, self.position).copied(operand, name, axes, axes, "_copy")
        self.before.add(kernel)
        return buffer

    def _targets(self, operand: TensorValue) -> Buffer:
        """Class indices as int32, held inside the classes."""
        reader = self.lowering.reader()
        n = Var("n", self.rows)
        found = reader.at(operand, (variable(n),))
        if found.dtype.itemsize < I32.itemsize:
            found = as_dtype(found, I32)
        least, most = Literal(0, found.dtype), Literal(self.classes - 1, found.dtype)
        held = Apply("min", (Apply("max", (found, least), found.dtype), most), found.dtype)
        buffer = self.buffer("targets", self.rows, I32)
        store = Store(buffer.name, variable(n), as_dtype(held, I32))
        body = parallel([n], [*reader.lets, store])
        kernel = self.lowering.kernel(self.position, reader, [], body, "_targets", (buffer,))
        self.before.add(kernel)
        return buffer

    def buffer(self, name: str, size: int, dtype: dtypes.DType = F32) -> Buffer:
        return Site(self.lowering, self.position).memory(name, dtype, size)

    def result(self, output: int) -> Buffer:
        return self.lowering.buffer(TensorValue(self.position, output))

    def kernel(
        self,
        suffix: str,
        reads: Sequence[Buffer],
        writes: Sequence[Buffer],
        body: Sequence[Statement],
        scratch: Sequence[Buffer] = (),
    ) -> Kernel:
        origins = (self.node.origin,) if self.node.origin else ()
        name = f"{self.node.op.name}_{self.position}_{suffix}"
        every = tuple(dict.fromkeys(reads))
        return Kernel(name, every, tuple(writes), tuple(body), origins, tuple(scratch), True)


class Chunk:
    """Some rows: those from `start` on, or those of each iteration of a repeat (None).

    A repeat comes after `done` chunks of its size.
    """

    def __init__(self, head: Head, size: int, start: int | None, done: int = 0):
        self.head, self.size, self.start, self.done = head, size, start, done
        self.i = Var("i", size)

    def part(self, buffer: Buffer, width: int) -> Rows:
        """A tensor's rows that belong to the chunk."""
        if self.start is not None:
            return Rows(buffer, constant(self.start * width), width)
        step = self.size * width
        alias = f"{buffer.name}@{self.head.position}"
        self.head.lowering.rows[alias] = Argument(buffer.name, step)
        # Iterations count from the first row on: theirs come after those that are done.
        rows = Buffer(alias, buffer.dtype, (self.done + 1) * step)
        return Rows(rows, constant(self.done * step), width)

    def logit(self, scores: Scores, key: At, which: At) -> Value:
        """A row's score of a class, and its bias."""
        found, bias = as_dtype(scores.load(key, self.i), F32), self.head.bias
        return found if bias is None else add(found, as_dtype(bias.load(which), F32))


class Kernels(Protocol):
    def kernels(self) -> list[Kernel]: ...


def chunk_drafts(
    head: Head, sizes: Sequence[int], done: int, make: Callable[[int, int | None], Kernels]
) -> list[Draft]:
    """`done` chunks first, a repeat over those of the same size, and the rows that are left."""

    def phases(size: int, start: int | None) -> list[Draft]:
        order = Order(head.lowering.fuse, head.lowering.memo)
        for kernel in make(size, start).kernels():
            order.add(kernel)
        return [*order.phases()]

    size = sizes[0]
    count = sizes.count(size) - done
    found: list[Draft] = [*head.before.phases()]
    for i in range(done):
        found += phases(size, i * size)
    if count == 1:
        found += phases(size, done * size)
    elif count:
        found.append(RepeatDraft(count, False, phases(size, None)))
    return [*found, *(phases(sizes[-1], head.rows - sizes[-1]) if sizes[-1] != size else [])]
