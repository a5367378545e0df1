"""Cross-entropy through a head by chunks of rows, and where a library multiplies: full rows.

The logits of a chunk are computed at a time, never all. Where a library multiplies they are one
matmul. One kernel reads each of their rows, gives the loss and puts the gradients of the logits in
their place; two matmuls follow, and what chunks add to the weight's gradient is summed in float32.
"""

from __future__ import annotations

from dataclasses import replace

from treadle.base.dtypes import DType
from treadle.ir import composites as c
from treadle.ir.graph import Node
from treadle.kernel.index import Index, Var, data
from treadle.kernel.nodes import Accumulate, Apply, Buffer, Kernel, Let, Statement, Store, Value
from treadle.kernel.target import Streaming
from treadle.schedule.cross_entropy_blocks import block_drafts
from treadle.schedule.cross_entropy_head import Chunk, Head, chunk_drafts
from treadle.schedule.keep import CHUNKED
from treadle.schedule.lower import Draft, Lowering
from treadle.schedule.nests import accumulated, as_dtype, axis_vars, parallel
from treadle.schedule.operands import Site
from treadle.schedule.softmax import (
    F32,
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


@CHUNKED(c.LINEAR_CROSS_ENTROPY, c.LINEAR_CROSS_ENTROPY_GRAD)
def linear_cross_entropy_drafts(lowering: Lowering, position: int, node: Node) -> list[Draft]:
    """Full rows of logits where a library multiplies, blocks of classes where loops do."""
    head = Head(lowering, position, node)
    return row_drafts(head) if lowering.target.matmuls.by_library else block_drafts(head)


def chunk_sizes(rows: int, limits: Streaming) -> list[int]:
    """Rows of each chunk: equal ones, and the last what is left over."""
    count = max(-(-rows // limits.most_rows), min(2, rows // limits.least_rows), 1)
    size = -(-rows // count)
    if size >= 8 * limits.rows_multiple:
        size += -size % limits.rows_multiple
    return [min(size, rows - start) for start in range(0, rows, size)]


def row_drafts(head: Head) -> list[Draft]:
    """The first chunk writes gradients that later ones add to; sums are rounded at the end."""
    sizes = chunk_sizes(head.rows, head.lowering.target.streaming)
    found = chunk_drafts(head, sizes, 1, lambda n, start: _RowChunk(head, sizes[0], n, start))
    for output in sorted(head.gradients - {1}):
        if head.result(output).dtype is not F32:
            head.lowering.after.append(_rounded(head, output))
    return found


def _sums(head: Head, output: int) -> Buffer:
    """Where chunks add up a gradient: in its own memory, if that is wide."""
    result = head.result(output)
    return result if result.dtype is F32 else head.buffer(f"sums{output}", result.size)


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
        self.v = Var("v", head.classes)

    def _scores(self, name: str, most: int, dtype: DType) -> Scores:
        """Tokens as rows of all classes."""
        count = self.head.classes
        memory = self.head.buffer(name, most * count, dtype)
        buffer = replace(memory, size=self.size * count)
        return Scores(buffer, Index(), count, self.size, count, keys_are_rows=False)

    def kernels(self) -> list[Kernel]:
        wanted = self.head.gradients
        found = [self._matmul(), self._rows()]
        found += [self._input_gradient()] if 1 in wanted else []
        found += [self._weight_gradient()] if 2 in wanted else []
        found += [self._bias_gradient()] if 3 in wanted else []
        return found

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

    @property
    def _target(self) -> Index:
        return Index() + data("target", self.head.classes)

    def _rows(self) -> Kernel:
        """A row's statistics and its loss; then the gradients of its logits."""
        head, i, logit = self.head, self.i, self.logit(self.logits, self.v, self.v)
        targets, rows = self.part(head.targets, 1), self.part(head.result(0), 1)
        terms = [Accumulate("total", "add", power(logit, local("shift")))]
        sums = ["total"]
        if head.smoothing:
            terms.append(Accumulate("every", "add", logit))
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
        upstream, logit = local("ct"), self.logit(self.logits, self.v, self.v)
        at_target = sub(self._share(local("own")), self.head.own_share(upstream))
        every = self._gradient(self._share(logit), self.v)
        return [
            Let("ct", as_dtype(ct.load(self.i), F32)),
            Let("factor", Apply("div", (upstream, local("total")), F32)),
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
        v, total = self.v, local("acc")
        body = [
            *accumulated("add", F32, [self.i], [], self.gradients.load(v, self.i)),
            sums.store(total if self.start == 0 else add(sums.load(v), total), v),
        ]
        loops = parallel([v], body)
        return self.head.kernel("d_bias", (self.gradients.buffer,), (sums.buffer,), loops)
