"""Cross-entropy through a head by chunks of rows: the logits of a chunk at a time, never all.

A head has its operands, memory, and the loss of a row. Where a library multiplies, a chunk's logits
are full rows of one matmul. One kernel reads each of their rows, gives the loss and puts the
gradients of the logits in their place; two matmuls follow, and what chunks add to the weight's
gradient is summed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.base.shapes import Shape
from treadle.ir import composites as c
from treadle.ir.graph import Graph, Node
from treadle.ir.graph import Value as TensorValue
from treadle.ir.ops import elementwise as e
from treadle.ir.ops.linear import CONTRACT
from treadle.kernel.bindings import ITERATION, Content, Copy, Elements, Partial, Whole
from treadle.kernel.index import Index, Var, bounded, constant, data, variable
from treadle.kernel.nodes import (
    Accumulate,
    Buffer,
    Guarded,
    Kernel,
    Let,
    Literal,
    Load,
    Position,
    Statement,
    Store,
    Value,
    Within,
)
from treadle.kernel.program import Argument
from treadle.kernel.target import Streaming
from treadle.schedule.drafts import Draft, RepeatDraft
from treadle.schedule.lower import Lowering, attributes_of
from treadle.schedule.nests import (
    accumulated,
    along,
    apply,
    as_dtype,
    axis_vars,
    compare,
    flat_index,
    parallel,
)
from treadle.schedule.operands import Site, load_of
from treadle.schedule.order import Order
from treadle.schedule.softmax import (
    F32,
    I32,
    At,
    Rows,
    Scores,
    add,
    local,
    log_sum,
    mul,
    power,
    statistics,
    sub,
)


class Head:
    """One loss: where its operands lie, and what its kernels share."""

    def __init__(self, lowering: Lowering, position: int, node: Node):
        self.lowering, self.position, self.node = lowering, position, node
        attributes: c.HeadCrossEntropy = attributes_of(node)
        self.smoothing, self.is_rounded = Fraction(attributes.label_smoothing), attributes.rounded
        is_grad = node.op is c.LINEAR_CROSS_ENTROPY_GRAD
        ct, operands = (node.operands[0], node.operands[1:]) if is_grad else (None, node.operands)
        x, weight, targets, *bias = operands
        self.rows, self.width = lowering.graph.type_of(x).shape
        self.classes = lowering.graph.type_of(weight).shape[0]
        self.before = Order(lowering.fuse, lowering.memo)
        self.inside = Inside(lowering.definition(position))
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
        return mul(value, Literal(1 - self.smoothing, F32)) if self.smoothing else value

    def every_share(self, value: Value) -> Value:
        """What every class has of a value, where targets are smoothed."""
        return mul(value, Literal(self.smoothing / self.classes, F32))

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
        held = apply("min", apply("max", found, least), most)
        if self.inside.targets is None:  # the loss alone has none that are held inside
            buffer = self.buffer("targets", self.rows, I32)
        else:
            buffer = self.room("targets", self.rows, I32)
            self.bind(buffer, self.inside.targets, Whole())
        store = Store(buffer.name, variable(n), as_dtype(held, I32))
        body = parallel([n], [*reader.lets, store])
        kernel = self.lowering.kernel(self.position, reader, [], body, "_targets", (buffer,))
        self.before.add(kernel)
        return buffer

    @property
    def filled(self) -> int:
        """Classes up to a whole pack: from row to row of logits that a library computes."""
        return self.classes + -self.classes % self.lowering.target.matmuls.pack

    def fill_bias(self) -> None:
        """A bias of as many classes as a row has."""
        if self.bias is None or self.filled == self.classes:
            return
        given, v = self.bias.buffer, Var("v", self.filled)
        is_one, zero = Within(variable(v), 0, self.classes), Literal(0, given.dtype)
        copy = Copy(Elements((v,), variable(v), (variable(v),), (is_one,)))
        site = Site(self.lowering, self.position)
        buffer = site.memory("bias", given.dtype, self.filled, copy, self.node.operands[-1])
        own = Load(given.name, bounded(variable(v), self.classes), given.dtype)
        store = Store(buffer.name, variable(v), Guarded(is_one, own, zero, given.dtype))
        self.before.add(self.kernel("bias", [given], [buffer], parallel([v], [store])))
        self.bias = Rows(buffer, Index(), 1)

    def buffer(self, name: str, size: int, dtype: dtypes.DType = F32) -> Buffer:
        return Site(self.lowering, self.position).memory(name, dtype, size)

    def room(self, name: str, size: int, dtype: dtypes.DType = F32) -> Buffer:
        """The same for what holds values of the definition, one after another."""
        return self.lowering.room_inside(self.position, name, dtype, size)

    def bind(self, buffer: Buffer, value: TensorValue, content: Content) -> None:
        self.lowering.bind_inside(self.position, buffer, value, content)

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


class Inside:
    """Values of the definition that kernels have in memory."""

    def __init__(self, graph: Graph):
        nodes = list(enumerate(graph.nodes))
        self.graph = graph
        held = next((i for i, n in nodes if n.op is e.MIN), None)
        self.targets = None if held is None else TensorValue(held)
        self.logits = TensorValue(next(i for i, n in nodes if n.op is CONTRACT))

    @property
    def slopes(self) -> TensorValue:
        """The gradients of the logits."""
        return self.graph.nodes[self.sum(1).node].operands[0]

    def sum(self, output: int) -> TensorValue:
        """A result before it is rounded."""
        value = self.graph.outputs[output].value
        while self.graph.nodes[value.node].op is e.CAST:
            (value,) = self.graph.nodes[value.node].operands
        return value


class Chunk:
    """Some rows: those from `start` on, or those of each iteration of a repeat (None).

    A repeat comes after `done` chunks of its size.
    """

    def __init__(self, head: Head, size: int, start: int | None, done: int = 0):
        self.head, self.size, self.start, self.done = head, size, start, done
        self.i = Var("i", size)

    @property
    def first(self) -> Index:
        """The first row."""
        if self.start is not None:
            return constant(self.start)
        return variable(Var(ITERATION, self.head.rows)) * self.size + self.done * self.size

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


def chunk_drafts(
    head: Head, sizes: Sequence[int], done: int, make: Callable[[int, int | None], list[Kernel]]
) -> list[Draft]:
    """`done` chunks first, a repeat over those of the same size, and the rows that are left."""

    def phases(size: int, start: int | None) -> list[Draft]:
        order = Order(head.lowering.fuse, head.lowering.memo)
        order.add(*make(size, start))
        return [*order.phases()]

    size = sizes[0]
    count = sizes.count(size) - done
    found: list[Draft] = [*head.before.phases()]
    for i in range(done):
        found += phases(size, i * size)
    if count == 1:
        found += phases(size, done * size)
    elif count:
        found.append(RepeatDraft(count, False, phases(size, None), head.lowering.prefix))
    return [*found, *(phases(sizes[-1], head.rows - sizes[-1]) if sizes[-1] != size else [])]


def chunk_sizes(rows: int, limits: Streaming) -> list[int]:
    """Rows of each chunk: equal ones, and the last what is left over."""
    usual = min(limits.usual_chunks, -(-rows // limits.usual_rows))
    count = max(-(-rows // limits.most_rows), usual, min(2, rows // limits.least_rows), 1)
    size = -(-rows // count)
    if size >= 8 * limits.rows_multiple:
        size += -size % limits.rows_multiple
    return [min(size, rows - start) for start in range(0, rows, size)]


def row_drafts(head: Head) -> list[Draft]:
    """The first chunk writes gradients that later ones add to; sums are rounded at the end."""
    head.fill_bias()
    sizes = chunk_sizes(head.rows, head.lowering.target.streaming)
    found = chunk_drafts(
        head, sizes, 1, lambda n, start: _RowChunk(head, sizes[0], n, start).kernels()
    )
    for output in sorted(head.gradients - {1}):
        if head.result(output).dtype is not F32:
            head.lowering.after.append(_rounded(head, output))
    return found


def _sums(head: Head, output: int) -> Buffer:
    """Where chunks add up a gradient: in its own memory, if that is wide."""
    result = head.result(output)
    return result if result.dtype is F32 else head.room(f"sums{output}", result.size)


def _rounded(head: Head, output: int) -> Kernel:
    """A sum of chunks in the dtype of the result."""
    axes = axis_vars("i", head.node.types[output].shape)
    site = Site(head.lowering, head.position)
    return site.moved(_sums(head, output), axes, axes, f"_sum{output}", output)


class _RowChunk(Chunk):
    def __init__(self, head: Head, most: int, size: int, start: int | None):
        super().__init__(head, size, start, done=1)
        held = head.x.dtype if head.is_rounded else F32
        self.logits = self._scores("logits", most, held)
        self.gradients = self.logits
        if head.ct is not None and held is not head.x.dtype:
            self.gradients = self._scores("logit_gradients", most, head.x.dtype)
        self.x = self.part(head.x, head.width)
        self.v = Var("v", head.filled)  # so that a row is whole packs; what is no class is hidden

    def _scores(self, name: str, most: int, dtype: DType) -> Scores:
        """Tokens as rows of all classes; rows start at whole packs, as a library wants them."""
        count, stride = self.head.classes, self.head.filled
        memory = self.head.room(name, most * stride, dtype)
        buffer = replace(memory, size=self.size * stride)
        return Scores(Rows(buffer, Index(), stride), count, self.size, keys_are_rows=False)

    def kernels(self) -> list[Kernel]:
        wanted = self.head.gradients
        self._bind()
        found = [self._matmul(), self._rows()]
        found += [self._input_gradient()] if 1 in wanted else []
        found += [self._weight_gradient()] if 2 in wanted else []
        found += [self._bias_gradient()] if 3 in wanted else []
        return found

    def _bind(self) -> None:
        """What memory holds: the chunk's rows of the logits, then of their gradients, and what is
        summed up to its last row."""
        head, v = self.head, Var("v", self.head.classes)
        at = variable(self.i) * head.filled + variable(v)
        rows = Copy(Elements((self.i, v), at, (self.first + variable(self.i), variable(v))))
        head.bind(self.logits.buffer, head.inside.logits, rows)
        if head.ct is not None:
            head.bind(self.gradients.buffer, head.inside.slopes, rows)
        for output in sorted(head.gradients - {1}):
            sums, value = _sums(head, output), head.inside.sum(output)
            is_last = self.start is not None and self.start + self.size == head.rows
            if not is_last:
                head.bind(sums, value, self._summed(head.inside.graph.type_of(value).shape))
            elif sums != head.result(output):
                head.bind(sums, value, Whole())

    def _summed(self, shape: Shape) -> Partial:
        """A gradient's sum over the rows up to the chunk's last one."""
        axes = axis_vars("axis ", shape)
        row = Var("row", self.head.rows)
        is_done = Within(variable(row) - self.first, -self.head.rows, self.size)
        inner = along(axes)
        term = (*inner, variable(row)) if len(shape) > 1 else (variable(row), *inner)
        return Partial(Elements(tuple(axes), flat_index(axes), term, (is_done,)), (row,))

    def _matmul(self) -> Kernel:
        head, x = self.head, self.x
        weight = head.weight.matrix(head.classes, head.width)
        matmul = self.logits.computed(weight, x.matrix(self.size, head.width))
        reads = (x.buffer, head.weight.buffer)
        return head.kernel("logits", reads, (self.logits.buffer,), [matmul])

    def _input_gradient(self) -> Kernel:
        head = self.head
        target = self.part(head.result(1), head.width)
        weight = head.weight.matrix(head.classes, head.width)
        into = target.matrix(self.size, head.width)
        matmul = self.gradients.onto_queries(into, weight, adds=False)
        reads = (self.gradients.buffer, head.weight.buffer)
        return head.kernel("d_input", reads, (target.buffer,), [matmul])

    def _weight_gradient(self) -> Kernel:
        head, x, sums = self.head, self.x, _sums(self.head, 2)
        into = Rows(sums, Index(), head.width).matrix(head.classes, head.width)
        adds = self.start != 0
        matmul = self.gradients.onto_keys(into, x.matrix(self.size, head.width), adds)
        return head.kernel("d_weight", (self.gradients.buffer, x.buffer), (sums,), [matmul])

    # The rows

    def _every_logit(self, other: float) -> Value:
        """A row's logit of each class; another number behind the last one."""
        found, head = self.logit(self.logits, self.v, self.v), self.head
        if head.filled == head.classes:
            return found
        at, end = Position(variable(self.v), I32), Literal(head.classes, I32)
        return apply("where", compare("lt", at, end), found, Literal(other, F32))

    @property
    def _target(self) -> Index:
        return Index() + data("target", self.head.classes)

    def _rows(self) -> Kernel:
        """A row's statistics and its loss; then the gradients of its logits."""
        head, i, logit = self.head, self.i, self._every_logit(float("-inf"))
        targets, rows = self.part(head.targets, 1), self.part(head.result(0), 1)
        terms = [Accumulate("total", "add", power(logit, local("shift")))]
        sums = ["total"]
        if head.smoothing:
            terms.append(Accumulate("every", "add", self._every_logit(0)))
            sums.append("every")
        body: list[Statement] = [
            Let("target", targets.load(i)),
            Let("own", self.logit(self.logits, self._target, self._target)),
            *statistics(self.v, logit, terms, sums),
            Let("log", log_sum("total", "shift")),
            rows.store(head.loss(), i),
        ]
        reads, writes = [targets.buffer], [rows.buffer]
        reads += [] if head.bias is None else [head.bias.buffer]
        if head.ct is not None:
            ct = self.part(head.ct, 1)
            body += self._logit_gradients(ct)
            reads.append(ct.buffer)
        is_in_place = head.ct is not None and self.gradients is self.logits
        (writes if is_in_place else reads).append(self.logits.buffer)
        writes += [] if self.gradients is self.logits else [self.gradients.buffer]
        return head.kernel("rows", reads, writes, parallel([i], body))

    def _logit_gradients(self, ct: Rows) -> list[Statement]:
        """ct (p − target), over the logits where they are as wide; then once more at the target."""
        upstream, logit = local("ct"), self._every_logit(float("-inf"))
        at_target = sub(self._share(local("own")), self.head.own_share(upstream))
        every = self._gradient(self._share(logit), self.v)
        return [
            Let("ct", as_dtype(ct.load(self.i), F32)),
            Let("factor", apply("div", upstream, local("total"))),
            *parallel([self.v], [every]),
            self._gradient(at_target, self._target),
        ]

    def _share(self, logit: Value) -> Value:
        """ct p, less the part of a smoothed target that every class has."""
        share = mul(power(logit, local("shift")), local("factor"))
        is_smooth = bool(self.head.smoothing)
        return sub(share, self.head.every_share(local("ct"))) if is_smooth else share

    def _gradient(self, value: Value, which: At) -> Store:
        held = as_dtype(value, self.gradients.buffer.dtype)
        return self.gradients.store(held, which, self.i)

    def _bias_gradient(self) -> Kernel:
        """Sums over the chunk's rows, added to what earlier chunks had."""
        sums = Rows(_sums(self.head, 3), Index(), 1)
        v, total = Var("v", self.head.classes), local("acc")
        body = [
            *accumulated("add", F32, [self.i], [], as_dtype(self.gradients.load(v, self.i), F32)),
            sums.store(total if self.start == 0 else add(sums.load(v), total), v),
        ]
        loops = parallel([v], body)
        return self.head.kernel("d_bias", (self.gradients.buffer,), (sums.buffer,), loops)
