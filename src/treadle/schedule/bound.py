"""Kernels apart from the buffers they are used on, so that equal work is done once.

A model's layers give the same kernels again and again on other buffers. What is done to a kernel
(fusing, finishing, checking) depends on the kernel alone, and on which buffers two kernels share.
A signature says what an element-by-element kernel is made of, before it is made.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from treadle.base.origin import Origin
from treadle.ir.graph import Value as TensorValue
from treadle.kernel.nodes import Kernel
from treadle.kernel.rowsums import row_sums_of
from treadle.kernel.target import CPU, Target
from treadle.kernel.verify import verify
from treadle.schedule.finish import finished
from treadle.schedule.fuse import fused, is_serial, localised, outer_iterations, spread, staged
from treadle.schedule.inline import Reader
from treadle.schedule.nests import anonymous, with_buffer_names

Signature = tuple[Hashable, ...]


def signature(reader: Reader, value: TensorValue) -> tuple[Signature, list[str]]:
    """The ops behind a tensor down to what is in memory, and the buffers those are, in order.

    Tensors with equal signatures have equal kernels on other buffers; a buffer that appears twice,
    as one that is updated in place does, is one buffer in both.
    """
    buffers: dict[str, int] = {reader.buffer_of(value) or "": 0}
    positions: dict[TensorValue, int] = {}
    rows: list[Hashable] = []
    pending = [value]
    while pending:
        current = pending[-1]
        name = None if current == value else reader.buffer_of(current)
        if current in positions:
            pending.pop()
            continue
        node = reader.graph.nodes[current.node]
        missing = [] if name is not None else [v for v in node.operands if v not in positions]
        if missing:
            pending += reversed(missing)
            continue
        pending.pop()
        positions[current] = len(positions)
        if name is not None:
            rows.append((buffers.setdefault(name, len(buffers)), node.types[current.output]))
        else:
            operands = tuple(positions[v] for v in node.operands)
            is_shared = reader.uses.get(current, 0) > 1
            rows.append((node.op, node.attributes, operands, node.types, current.output, is_shared))
    return tuple(rows), list(buffers)


@dataclass(frozen=True, slots=True)
class Bound:
    """A kernel, and the buffers it is used on in the order of its own."""

    kernel: Kernel
    names: tuple[str, ...]
    origins: tuple[Origin, ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        return self.names[: len(self.kernel.inputs)]

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.names[len(self.kernel.inputs) :]


Fused = tuple[Kernel, tuple[int, ...]]
How = tuple[tuple[int, ...], bool, bool]  # buffers that both have; needed; as one iteration


@dataclass
class Memo:
    """What was done before. Kernels are known by identity: equal ones are made one first."""

    target: Target = CPU
    kernels: dict[Kernel, Kernel] = field(default_factory=dict)
    pairs: dict[tuple[int, int, How], Fused | None] = field(default_factory=dict)
    calls: dict[tuple[int, tuple[int, ...]], Fused] = field(default_factory=dict)
    maps: dict[Signature, Fused] = field(default_factory=dict)  # and where its buffers are in it

    def bound(self, kernel: Kernel) -> Bound:
        plain = anonymous(kernel)
        known = self.kernels.setdefault(plain, plain)
        # Equality ignores whether a kernel stays by itself.
        if known.is_standalone != plain.is_standalone:
            known = plain
        return Bound(known, tuple(b.name for b in kernel.buffers), kernel.origins)

    def fused(self, first: Bound, second: Bound, is_needed: bool, is_single: bool) -> Bound | None:
        """Both as one, if that pays. `is_single`: as one iteration."""
        positions = {n: i for i, n in enumerate(first.names)}
        shared = tuple(positions.get(n, -1) for n in second.names)
        key = (id(first.kernel), id(second.kernel), (shared, is_needed, is_single))
        if key not in self.pairs:
            self.pairs[key] = self._fused(first.kernel, second.kernel, key[2])
        found = self.pairs[key]
        if found is None:
            return None
        every = first.names + second.names
        origins = tuple(dict.fromkeys((*first.origins, *second.origins)))
        return Bound(found[0], tuple(every[i] for i in found[1]), origins)

    def _fused(self, first: Kernel, second: Kernel, how: How) -> Fused | None:
        """Both kernels as one, and where each of its buffers is among the buffers of both."""
        shared, is_needed, is_single = how
        every = [b.name for b in first.buffers]
        every += [every[at] if at >= 0 else f"q{len(every) + i}" for i, at in enumerate(shared)]
        own = zip(second.buffers, every[len(first.buffers) :], strict=True)
        renamed = with_buffer_names(second, {b.name: name for b, name in own})
        found = fused(first, renamed, is_needed, is_single, self.target)
        if found is None:
            return None
        # Names that the next fusing cannot meet.
        return anonymous(found), tuple(every.index(b.name) for b in found.buffers)

    def finished(self, bound: Bound, own: frozenset[str]) -> tuple[Kernel, tuple[str, ...]]:
        """The kernel as it is rendered, outputs of its own inside; and its buffers."""
        positions = tuple(i for i, n in enumerate(bound.names) if n in own)
        key = (id(bound.kernel), positions)
        if key not in self.calls:
            names = {bound.kernel.buffers[i].name for i in positions}
            outputs = {b.name for b in bound.kernel.outputs}
            kernel = self._localised(bound.kernel, names & outputs)
            order = {b.name: i for i, b in enumerate(bound.kernel.buffers)}
            done = verify(finished(anonymous(kernel), self.target))
            known = self.kernels.setdefault(done, done)
            self.calls[key] = known, tuple(order[b.name] for b in kernel.buffers)
        done, order_ = self.calls[key]
        return done, tuple(bound.names[i] for i in order_)

    def _localised(self, kernel: Kernel, names: set[str]) -> Kernel:
        """Outputs of its own inside: a thread's memory, or what a block's shared memory holds."""
        if not self.target.is_spmd:
            return localised(spread(kernel, self.target.fusion.shared_iterations), names)
        rows = row_sums_of(kernel)
        if rows is not None:
            return localised(kernel, names, rows)
        if is_serial(kernel) or kernel.is_standalone:
            return kernel
        iterations = outer_iterations(kernel)
        room, own = self.target.fusion.shared_memory, set[str]()
        for buffer in sorted(kernel.outputs, key=lambda b: b.nbytes):
            if buffer.name in names and buffer.nbytes // iterations <= room:
                own.add(buffer.name)
                room -= buffer.nbytes // iterations
        found = localised(kernel, own)
        return staged(found, room) if self.target.is_small else found
