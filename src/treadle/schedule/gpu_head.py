"""Cross-entropy through a head on a GPU: a chunk of rows at a time, so that logits are never whole.

A chunk's logits are a library's product. One kernel reads each of their rows, gives the loss and
puts the gradient of the logits in their place; two products follow, and what chunks add to the
weight's gradient is summed in float32.
"""

from __future__ import annotations

from dataclasses import replace

from treadle.base.dtypes import DType
from treadle.ir.graph import Value as TensorValue
from treadle.kernel.index import Index, Var, data, variable
from treadle.kernel.nodes import (
    Accumulate,
    Apply,
    Buffer,
    Convert,
    Kernel,
    Let,
    Literal,
    Load,
    Local,
    Matrix,
    Multiply,
    Role,
    Statement,
    Store,
    Value,
    Walk,
)
from treadle.kernel.program import Argument
from treadle.schedule.head import F32, Head, Place, add, finite, mul, sub
from treadle.schedule.lower import Draft, RepeatDraft
from treadle.schedule.nests import nest
from treadle.schedule.order import Order

ROWS = 4096  # of a chunk: products of half as many are a little slower, more take more memory
LEAST_ROWS = 2048


def chunk_sizes(rows: int, wanted: int = ROWS, least: int = LEAST_ROWS) -> list[int]:
    """Rows of each chunk: equal ones, and the last what is left over."""
    count = max(-(-rows // wanted), min(2, rows // least), 1)
    size = -(-rows // count)
    size += -size % 8 if size >= 64 else 0  # rows that start at whole packs
    return [min(size, rows - start) for start in range(0, rows, size)]


def gpu_drafts(head: Head) -> list[Draft]:
    """The first chunk, a repeat over those like it, and the rows that are left over."""
    sizes = chunk_sizes(head.rows)
    size = sizes[0]
    like = sizes.count(size) - 1
    found: list[Draft] = [*head.before.phases(), *_phases(_Chunk(head, size, 0, False))]
    if like == 1:
        found += _phases(_Chunk(head, size, size, True))
    elif like:
        found.append(RepeatDraft(like, False, _phases(_Chunk(head, size, None, True))))
    if sizes[-1] != size:
        found += _phases(_Chunk(head, sizes[-1], head.rows - sizes[-1], True))
    for output in sorted(head.wanted - {0, 1}) if head.ct is not None else ():
        if head.result(output).dtype is not F32:
            head.lowering.after.append(_finished(head, output))
    return found


def _phases(chunk: _Chunk) -> list[Draft]:
    order = Order(chunk.head.lowering.fuse, chunk.head.lowering.memo)
    for kernel in chunk.kernels():
        order.add(kernel)
    return [*order.phases()]


def _sums(head: Head, output: int) -> Buffer:
    """Where chunks add up a gradient: in its own memory, if that is wide."""
    result = head.result(output)
    return result if result.dtype is F32 else head.buffer(f"sums{output}", result.size)


def _finished(head: Head, output: int) -> Kernel:
    """A sum of chunks in the dtype of the result."""
    sums, result = _sums(head, output), head.result(output)
    shape = head.lowering.graph.type_of(TensorValue(head.position, output)).shape
    axes = [Var(f"i{i}", n) for i, n in enumerate(shape)]
    place = Index()
    for axis in axes:
        place = place * axis.extent + variable(axis)
    value = _as(Load(sums.name, place, F32), result.dtype)
    body = nest(axes, Role.PARALLEL, [Store(result.name, place, value)])
    made = head.kernel(f"sum{output}", (sums,), (result,), body)
    return replace(made, is_whole=False)


class _Chunk:
    """The kernels of rows from `start` on; None: of each turn of a repeat after the first chunk."""

    def __init__(self, head: Head, size: int, start: int | None, adds: bool):
        self.head, self.size, self.start, self.adds = head, size, start, adds
        self.narrow = head.x.dtype
        held = self.narrow if head.is_rounded else F32
        most = chunk_sizes(head.rows)[0] * head.classes
        full = head.buffer("logits", most, held)
        self.logits = replace(full, size=size * head.classes)
        self.slopes = self.logits
        if head.ct is not None and held is not self.narrow:
            self.slopes = replace(head.buffer("slopes", most, self.narrow), size=self.logits.size)
        self.i, self.v = Var("i", size), Var("v", head.classes)
        self.at = variable(self.i) * head.classes + variable(self.v)

    def part(self, buffer: Buffer, width: int) -> Place:
        if self.start is not None:
            return Place(buffer, self.start * width)
        step = self.size * width
        alias = f"{buffer.name}@{self.head.position}"
        self.head.lowering.rows[alias] = Argument(buffer.name, step)
        # A turn's rows are those after the ones where its part starts: the first chunk is done.
        return Place(Buffer(alias, buffer.dtype, 2 * step), step)

    def kernels(self) -> list[Kernel]:
        wanted = self.head.wanted if self.head.ct is not None else set()
        found = [self._product(), self._rows()]
        found += [self._input_gradient()] if 1 in wanted else []
        found += [self._weight_gradient()] if 2 in wanted else []
        found += self._bias_gradient() if 3 in wanted else []
        return found

    def _product(self) -> Kernel:
        head, width = self.head, self.head.width
        x = self.part(head.x, width)
        product = Multiply(
            Matrix(self.logits.name, Index(), Walk(self.size, head.classes), Walk(head.classes)),
            x.matrix(Index(), Walk(self.size, width), Walk(width)),
            Matrix(head.weight.name, Index(), Walk(width), Walk(head.classes, width)),
        )
        return head.kernel("logits", (x.buffer, head.weight), (self.logits,), [product])

    def _input_gradient(self) -> Kernel:
        head, width = self.head, self.head.width
        target = self.part(head.result(1), width)
        product = Multiply(
            target.matrix(Index(), Walk(self.size, width), Walk(width)),
            self._matrix(self.size, head.classes, False),
            Matrix(head.weight.name, Index(), Walk(head.classes, width), Walk(width)),
        )
        reads = (self.slopes, head.weight)
        return head.kernel("d_input", reads, (target.buffer,), [product])

    def _weight_gradient(self) -> Kernel:
        head, width = self.head, self.head.width
        x, sums = self.part(head.x, width), _sums(head, 2)
        product = Multiply(
            Matrix(sums.name, Index(), Walk(head.classes, width), Walk(width)),
            self._matrix(head.classes, self.size, True),
            x.matrix(Index(), Walk(self.size, width), Walk(width)),
            self.adds,
        )
        return head.kernel("d_weight", (self.slopes, x.buffer), (sums,), [product])

    def _matrix(self, rows: int, columns: int, is_turned: bool) -> Matrix:
        down, across = Walk(rows, self.head.classes), Walk(columns)
        if is_turned:
            down, across = Walk(rows), Walk(columns, self.head.classes)
        return Matrix(self.slopes.name, Index(), down, across)

    # The rows

    def _logit(self) -> Value:
        found = _as(Load(self.logits.name, self.at, self.logits.dtype), F32)
        if self.head.bias is None:
            return found
        bias = Load(self.head.bias.name, variable(self.v), self.head.bias.dtype)
        return add(found, _as(bias, F32))

    def _rows(self) -> Kernel:
        """A row's greatest, its sum of exponentials, its loss; then its slopes."""
        head, i = self.head, variable(self.i)
        targets, rows = self.part(head.targets, 1), self.part(head.result(0), 1)
        own: Value = Load(
            self.logits.name, i * head.classes + data("target", head.classes), self.logits.dtype
        )
        own = _as(own, F32)
        if head.bias is not None:
            place = Index() + data("target", head.classes)
            own = add(own, _as(Load(head.bias.name, place, head.bias.dtype), F32))
        power = Apply("exp", (sub(self._logit(), Local("shift", F32)),), F32)
        terms: list[Statement] = [Accumulate("total", "add", power)]
        if head.smoothing:
            terms.append(Accumulate("every", "add", self._logit()))
        body: list[Statement] = [
            Let("target", targets.load(i)),
            Let("own", own),
            Let("top", Literal(float("-inf"), F32)),
            *nest([self.v], Role.SEQUENTIAL, [Accumulate("top", "max", self._logit())]),
            Let("shift", finite(Local("top", F32))),
            Let("total", Literal(0, F32)),
            *([Let("every", Literal(0, F32))] if head.smoothing else []),
            *nest([self.v], Role.SEQUENTIAL, terms),
            Let("log", add(Apply("log", (Local("total", F32),), F32), Local("shift", F32))),
            rows.store(i, head.loss()),
        ]
        reads, writes = [targets.buffer], [rows.buffer]
        if head.bias is not None:
            reads.append(head.bias)
        if head.ct is not None:
            ct = self.part(head.ct, 1)
            body += self._slopes(ct)
            reads.append(ct.buffer)
        (reads if head.ct is None or self.slopes is not self.logits else writes).append(self.logits)
        writes += [self.slopes] if self.slopes is not self.logits else []
        return head.kernel("rows", reads, writes, nest([self.i], Role.PARALLEL, body))

    def _slopes(self, ct: Place) -> list[Statement]:
        """ct (p − target), over the logits where they are as wide; then once more at the target."""
        head, upstream, own = self.head, Local("ct", F32), Local("own", F32)
        whole: Value = upstream
        if head.smoothing:
            whole = mul(upstream, Literal(1 - head.smoothing, F32))
        target = variable(self.i) * head.classes + data("target", head.classes)
        at_target = sub(self._share(own), whole)
        return [
            Let("ct", _as(ct.load(variable(self.i)), F32)),
            Let("factor", Apply("div", (upstream, Local("total", F32)), F32)),
            *nest(
                [self.v],
                Role.PARALLEL,
                [Store(self.slopes.name, self.at, self._as_slope(self._share(self._logit())))],
            ),
            Store(self.slopes.name, target, self._as_slope(at_target)),
        ]

    def _share(self, logit: Value) -> Value:
        """ct p, less the part of a smoothed target that every class has."""
        power = Apply("exp", (sub(logit, Local("shift", F32)),), F32)
        share = mul(power, Local("factor", F32))
        if not self.head.smoothing:
            return share
        every = Literal(self.head.smoothing / self.head.classes, F32)
        return sub(share, mul(Local("ct", F32), every))

    def _as_slope(self, value: Value) -> Value:
        return _as(value, self.slopes.dtype)

    def _bias_gradient(self) -> list[Kernel]:
        """Sums of the slopes' columns, added to what earlier chunks had."""
        head = self.head
        sums = _sums(head, 3)
        element = _as(Load(self.slopes.name, self.at, self.slopes.dtype), F32)
        place = variable(self.v)
        total: Value = Local("acc", F32)
        if self.adds:
            total = add(Load(sums.name, place, F32), total)
        body: list[Statement] = [
            Let("acc", Literal(0, F32)),
            *nest([self.i], Role.SEQUENTIAL, [Accumulate("acc", "add", element)]),
            Store(sums.name, place, total),
        ]
        loops = nest([self.v], Role.PARALLEL, body)
        return [head.kernel("d_bias", (self.slopes,), (sums,), loops)]


def _as(value: Value, dtype: DType) -> Value:
    return value if value.dtype is dtype else Convert(value, dtype)
