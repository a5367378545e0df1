"""Graph to Program: which tensors are materialized, and a kernel for each of them.

What is elementwise, moves elements or is a constant is computed where it is read, unless several
kernels would recompute it. Everything else is a root: a kernel of its own, its operands'
elementwise work folded in.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from treadle.base.dtypes import DType
from treadle.base.origin import Origin
from treadle.ir.composites import definition_graph
from treadle.ir.graph import Graph, Node, Output, OutputKind
from treadle.ir.graph import Value as TensorValue
from treadle.ir.ops.leaves import CONSTANT, Constant, Leaf
from treadle.ir.ops.linear import CONTRACT
from treadle.ir.ops.shaping import DYNAMIC_UPDATE
from treadle.ir.types import TensorType
from treadle.kernel.bindings import Binding, Bindings, Content, Whole
from treadle.kernel.contraction import launches_dominate
from treadle.kernel.held import check_scope
from treadle.kernel.index import Index, Var
from treadle.kernel.nodes import Buffer, Kernel, Statement, Store, Value, Within
from treadle.kernel.program import Argument, Program, Step, calls_in
from treadle.kernel.states import call_scope
from treadle.kernel.target import CPU, Target
from treadle.rules.canonical import canonicalise
from treadle.rules.carries import choose_carries
from treadle.rules.expansion import expand
from treadle.rules.recurrences import scans_in_blocks
from treadle.rules.scans import split_scans
from treadle.rules.slices import compute_slices
from treadle.schedule.drafts import Draft, Finisher, touches
from treadle.schedule.homes import last_reads
from treadle.schedule.inline import Reader, laid_out, updated_element
from treadle.schedule.inline import attributes_of as attributes_of
from treadle.schedule.keep import (
    CHUNKED,
    ROOTS,
    Materialized,
    array_of,
    is_inline,
    is_root,
    recomputed_operands,
    wider_values,
)
from treadle.schedule.nests import Buffers, along, axis_vars, copies, parallel, pitched, stays
from treadle.schedule.order import Memo, Order
from treadle.schedule.patterns import concatenated_gradients, matmul_epilogues, spreads
from treadle.schedule.pitches import Pitches, crossed_pitches, row_pitches
from treadle.schedule.recompute import Recomputed, recomputed
from treadle.schedule.templates import has_kernels, has_template, images, in_memory_order, layouts


def lower(
    graph: Graph,
    fuse: bool = True,
    panel: int = CPU.panel,
    in_place: bool = False,
    target: Target = CPU,
    with_parts: bool = False,
) -> Program:
    """The program of a graph. `fuse=False` materializes every tensor, for debugging.

    `in_place` writes updates over the leaves they replace. `with_parts`: calls also have the
    kernels that theirs was fused from.
    """
    expanded = expand(graph, target, has_kernels if fuse else None)
    if fuse:
        expanded = split_scans(expanded, target, has_template)
        expanded = scans_in_blocks(expanded, target)
    if target.fuses_epilogues:
        expanded = canonicalise(expanded)  # definitions and their gradients look alike then
    if fuse:
        expanded = choose_carries(compute_slices(expanded, target), target)
    if target.has_launches and fuse and launches_dominate(expanded, target.matmuls):
        target = replace(target, is_small=True, parts=4 * target.parts)
    is_recomputed = fuse and target.rematerializes and not target.is_small
    again = recomputed(expanded, target) if is_recomputed else Recomputed(expanded, {})
    lowering = Lowering(again.graph, fuse, panel, Memo(target), waits=again.waits)
    if in_place:
        lowering.update_in_place()
    drafts = lowering.drafts()
    leaves = {n: lowering.graph.nodes[i].types[0] for n, i in lowering.graph.leaves.items()}
    leaves |= lowering.written
    outputs = tuple(
        (o, lowering.placed(o), lowering.graph.type_of(o.value)) for o in lowering.graph.outputs
    )
    outside = {*leaves, *lowering.constants, *(name for _, name, _ in outputs)}
    finisher = Finisher(drafts, outside, lowering.rows, lowering.memo, with_parts)
    steps = tuple(finisher.steps(drafts))
    used = {a.buffer for s in steps for c in calls_in(s) for a in c.arguments} | outside
    return Program(
        tuple(leaves.items()),
        tuple(lowering.constants.items()),
        tuple(b for b in lowering.buffers.values() if b.name in used),
        steps,
        outputs,
        (*lowering.in_place.values(), *lowering.late),
        bindings=bindings_of(lowering).restricted(used | _in_parts(steps)),
    )


def _in_parts(steps: Sequence[Step]) -> set[str]:
    """What is in memory where calls are made in parts."""
    calls = (part for s in steps for c in calls_in(s) for part in c.parts)
    return {a.buffer for call in calls for a in call.arguments}


def bindings_of(lowering: Lowering) -> Bindings:
    """What every buffer holds, of this graph's values and of those of the bodies of its scans."""
    found = [*lowering.bindings(), *lowering.inner_bindings]
    return Bindings(((lowering.prefix, lowering.graph), *lowering.bodies), tuple(found))


class Lowering:
    """One pass over a graph of primitives; bodies of scans are passes of their own."""

    repeats = False  # whether its kernels run in a repeat: what stays is copied before

    def __init__(
        self,
        graph: Graph,
        fuse: bool,
        panel: int,
        memo: Memo | None = None,
        prefix: str = "",
        waits: Mapping[int, int] | None = None,
    ):
        self.fixed: set[str] = set()  # buffers that no iteration of a repeat changes
        self.graph, self.fuse, self.panel, self.prefix = graph, fuse, panel, prefix
        self.waits = waits or {}  # nodes that come after others which they do not read
        self.memo = memo or Memo()
        self.target = self._target()
        materialized = Materialized(graph, fuse, self.target)
        self.materialized = materialized.values(cheap=self.waits)
        fuses_epilogues = fuse and self.target.fuses_epilogues
        limits = self.target.matmuls
        self.epilogues = (
            matmul_epilogues(graph, self.materialized, limits) if fuses_epilogues else {}
        )
        if self.epilogues:
            read = {v for found in self.epilogues.values() for v in found.read}
            self.materialized = materialized.values(read, self.waits)
        is_copied = fuse and self.target.copies_operands
        self.recomputed = (
            recomputed_operands(graph, self.materialized, self.target) if is_copied else {}
        )
        self.uses = Counter(v for n in graph.nodes for v in n.operands)
        self.names = {v: f"{prefix}b{v.node}.{v.output}" for v in self.materialized}
        for name, position in graph.leaves.items():
            self.names[TensorValue(position)] = f"{prefix}{name}"
        self.constants: dict[str, np.ndarray] = {}
        self.held: dict[str, tuple[TensorValue, Content]] = {}  # by memory of nodes
        # Of scans' carries what they hold before the first iteration, and after the last.
        self.carried_around: list[tuple[str, TensorValue, Content]] = []
        self.bodies: list[tuple[str, Graph]] = []  # of scans
        self.inner_bindings: list[Binding] = []
        self.wider = (
            wider_values(graph, self.materialized) if self.target.has_launches and fuse else {}
        )
        # Tensors whose axes lie in memory in another order than they are counted.
        self.images = images(graph) if self.target.has_conv else {}
        has_heads = self.target.chooses_layouts
        self.layouts = layouts(graph, self.materialized, self.images, has_heads)
        parts = concatenated_gradients(graph, self.layouts, self.target) if fuses_epilogues else {}
        self.parts = {v: p for v, p in parts.items() if p.whole in self.materialized}
        wholes = {p.whole for p in self.parts.values()}
        besides = {*self.wider, *self.layouts, *self.parts, *wholes}
        self.pitches: Pitches = {}
        if fuse and self.target.chooses_layouts:
            self.pitches = row_pitches(graph, self.materialized, besides, self.target)
        elif fuse:
            besides |= {*self.recomputed.values()}
            self.pitches = crossed_pitches(graph, self.materialized, besides, self.target)
        self.buffers = {n: self.buffer(v) for v, n in self.names.items()}
        self.done = {p.whole for p in self.parts.values()}  # what has nothing left to do
        self.sums = {found.sum: matmul for matmul, found in self.epilogues.items()}
        for value in [*self.parts, *self.epilogues]:
            self.buffers.pop(self.names.pop(value))
        self.rows: dict[str, Argument] = {}  # buffers that are rows of others
        self.in_place: dict[TensorValue, str] = {}  # values written over a leaf
        self.late: dict[str, TensorValue] = {}  # leaves that get a copy at the end
        self.written: dict[str, TensorType] = {}  # leaves that are written and never read
        self.after: list[Kernel] = []  # what a stream leaves to be fused with its readers
        self.before: dict[TensorValue, str] = {}  # leaves that leave as they were: their copies

    @cached_property
    def spreads(self) -> dict[TensorValue, tuple[TensorValue, TensorValue]]:
        """Sums of squares around a centre: the sum before them, and the centre."""
        return spreads(self.graph)

    @cached_property
    def spread_sums(self) -> set[TensorValue]:
        """Sums whose parts are wanted with their squared deviations."""
        return {total for total, _ in self.spreads.values()}

    def _target(self) -> Target:
        """The target; where kernels are launched again and again, fewer tensors are in memory."""
        found = self.memo.target
        if not self.repeats or not found.has_launches:
            return found
        sizes = found.materialization
        sizes = replace(sizes, most_sources=sizes.scan_sources, makes_parts=True)
        return replace(found, materialization=sizes)

    def update_in_place(self) -> None:
        """Updates take the place of their leaves where nothing reads the leaf afterwards."""
        last_read = last_reads(self.graph, self.materialized, self.recomputed)
        for output in (o for o in self.graph.outputs if o.kind is OutputKind.UPDATE):
            leaf, value = self.graph.leaves.get(output.name), output.value
            if leaf is None:  # it is written and never read
                self.written[output.name] = type_ = self.graph.type_of(value)
                self._room(output.name, type_)
            elif value == TensorValue(leaf):
                continue  # it stays as it is
            node = self.graph.nodes[value.node]
            is_map = not is_root(self.graph, node) and is_inline(node) and node.op is not CONSTANT
            is_last = leaf is None or last_read.get(leaf, -1) <= value.node
            is_new = value not in self.in_place and not isinstance(node.attributes, Leaf)
            if is_map and is_last and is_new:
                self.in_place[value] = output.name
                self.buffers.pop(self.names[value], None)
                self.names[value] = output.name
            else:
                self.late[output.name] = value
        self._set_leaves_aside({*self.in_place.values(), *self.late})

    def _room(self, name: str, like: TensorType | Buffer) -> str:
        """A buffer by a name, for as many elements of a dtype as something has."""
        self.buffers[name] = Buffer(name, like.dtype, like.size)
        return name

    def _set_leaves_aside(self, changed: set[str]) -> None:
        """Leaves that are outputs as they are, and that an update changes, are copied first."""
        for output in self.graph.outputs:
            value = output.value
            is_leaf = isinstance(self.graph.nodes[value.node].attributes, Leaf)
            stays = output.kind is OutputKind.UPDATE and output.name == self.names[value]
            if is_leaf and self.names[value] in changed and not stays:
                leaf = self.buffers[self.names[value]]
                self.before[value] = self._room(f"{self.prefix}b{value.node}.before", leaf)

    def placed(self, output: Output) -> str:
        """The buffer an output is in when the program is done."""
        if output.kind is OutputKind.UPDATE and (self.in_place or self.late):
            return output.name
        return self.before.get(output.value, self.names[output.value])

    def definition(self, position: int) -> Graph:
        """Of a composite, by its operands."""
        node = self.graph.nodes[position]
        types = tuple(self.graph.type_of(v) for v in node.operands)
        return definition_graph(node.op, node.attributes, types)

    def room_inside(self, position: int, name: str, dtype: DType, size: int) -> Buffer:
        """Memory for values of a composite's definition, which `bind_inside` says."""
        full = f"{self.prefix}b{position}.{name}"
        return self.buffers.setdefault(full, Buffer(full, dtype, size))

    def bind_inside(self, position: int, buffer: Buffer, value: TensorValue, c: Content) -> None:
        """A buffer holds content of a value of a composite's definition; after what it held."""
        scope = call_scope(self.prefix, position)
        if scope not in dict(self.bodies):
            self.bodies.append((scope, self.definition(position)))
        self.inner_bindings.append(Binding(buffer.name, scope, value, c))

    def bindings(self) -> list[Binding]:
        """What the buffers hold that values of this graph, or parts and copies of them, are in."""
        rows = {alias: row.buffer for alias, row in self.rows.items()}
        return [Binding(rows.get(name, name), self.prefix, v, c) for name, v, c in self._held()]

    def _held(self) -> list[tuple[str, TensorValue, Content]]:
        """The same by the names that kernels know: rows of buffers have their own."""
        found: list[tuple[str, TensorValue, Content]] = []
        first = [TensorValue(i) for i in self.graph.leaves.values()]  # before what replaces them
        for value in dict.fromkeys([*first, *self.names]):
            layout = Whole(tuple(self.layouts.get(value, ())), self.pitches.get(value, 0))
            found.append((self.names[value], value, layout))
        found += [(name, value, Whole()) for name, value in self.late.items()]
        found += [(name, value, Whole()) for value, name in self.before.items()]
        return found + [(name, *held) for name, held in self.held.items()] + self.carried_around

    def drafts(self) -> list[Draft]:
        """Phases of kernels, and repeats between them."""
        found: list[Draft] = []
        order = Order(self.fuse, self.memo, self.repeats)
        for value, copy in self.before.items():
            order.add(*copies(self.names[value], copy, self.buffers[copy]))
        for position, node in enumerate(self.graph.nodes):
            if node.op in CHUNKED:
                found += [*order.phases(), *CHUNKED[node.op](self, position, node)]
                order = Order(self.fuse, self.memo, self.repeats)
                order.add(*self.after)
                self.after = []
            else:
                self.add_kernels(self._kernels(position, node), order, self._awaited(position))
        for name, value in self.late.items():
            source = self.before.get(value, self.names[value])
            order.add(*copies(source, name, self.buffers[name]))
        self.finish(order)
        found += order.phases()
        held: dict[str, list[TensorValue]] = {}
        for name, value, _ in self._held():
            held.setdefault(name, []).append(value)
        check_scope(self.graph, held, list(touches(found)))
        return found

    def add_kernels(self, kernels: Sequence[Kernel], order: Order, after: str | None) -> None:
        """All kernels that make a node's values."""
        for kernel in kernels:
            order.add(kernel, after=after)

    def _awaited(self, position: int) -> str | None:
        """The buffer that a node's kernels wait for without reading it."""
        matmul = self.sums.get(TensorValue(position))  # which is made where its bias is known
        first = self.waits.get(position if matmul is None else matmul.node)
        return None if first is None else self.names.get(TensorValue(first))

    def finish(self, order: Order) -> None:
        """What a scan's iteration does at its end."""

    def _kernels(self, position: int, node: Node) -> list[Kernel]:
        value = TensorValue(position)
        array = array_of(node)
        if array is not None:
            self.constants[self.names[value]] = array
            return []
        if isinstance(node.attributes, Leaf) or all(t.size == 0 for t in node.types):
            return []
        if value in self.epilogues:
            return []  # it is made where its bias is known
        if value in self.sums:
            matmul = self.sums[value].node
            return ROOTS[CONTRACT](self, matmul, self.graph.nodes[matmul])
        if is_root(self.graph, node):
            return ROOTS[node.op](self, position, node)
        is_made = value in self.materialized and value not in self.done
        return self.map_kernels(value) if is_made else []

    def source(self, value: TensorValue) -> str | None:
        """The buffer a tensor is read from; a number is written where it is read."""
        node = self.graph.nodes[value.node]
        is_number = self.target.inlines_constants and isinstance(node.attributes, Constant)
        return None if is_number and is_inline(node) else self.names.get(value)

    def reader(self, being_made: TensorValue | None = None) -> Reader:
        """Reads elements; the tensor that is being made is computed, not loaded."""

        def buffer_of(value: TensorValue) -> str | None:
            return None if value == being_made else self.source(value)

        return Reader(
            self.graph,
            buffer_of,
            uses=self.uses,
            layouts=self.layouts,
            wider=self.wider,
            pitches=self.pitches,
        )

    def map_kernels(self, value: TensorValue) -> list[Kernel]:
        """Each element on its own; of an update in place those that it changes."""
        changed = self._part_in_place(value) if value in self.in_place else None
        if changed is not None:
            return [changed]
        type_, reader = self.graph.type_of(value), self.reader(value)
        axes = axis_vars("i", type_.shape)
        element = reader.at(value, along(axes))
        store = self.store(value, along(axes), element)
        loops = self.in_memory_order(value, axes) if value in self.layouts else axes
        body = [*reader.lets, store]
        if value in self.in_place and not stays(body, store.buffer, store.index):
            return self._set_aside(value)
        return [self.kernel(value.node, reader, [value], parallel(loops, body))]

    def _part_in_place(self, value: TensorValue) -> Kernel | None:
        """The kernel that writes a part of a leaf, as a token's keys into a cache.

        None for other updates, and where what is written is computed from the leaf: another
        element may be read after it was written.
        """
        node, leaf = self.graph.nodes[value.node], self.in_place[value]
        if node.op is not DYNAMIC_UPDATE or self.names.get(node.operands[0]) != leaf:
            return None
        reader = self.reader(value)
        axes = axis_vars("i", self.graph.type_of(node.operands[1]).shape)
        at, element = updated_element(reader, node, along(axes))
        if leaf in reader.used:
            return None
        store = self.store(value, at, element)
        return self.kernel(value.node, reader, [value], parallel(axes, [*reader.lets, store]))

    def _set_aside(self, value: TensorValue) -> list[Kernel]:
        """An update that reads other elements of its leaf than it writes: copied at the end."""
        leaf = self.in_place.pop(value)
        name = f"{self.prefix}b{value.node}.{value.output}"
        self.names[value] = self._room(name, self.graph.type_of(value))
        self.late[leaf] = value
        return self.map_kernels(value)

    def kernel(
        self,
        position: int,
        reader: Reader,
        made: Sequence[TensorValue],
        body: Sequence[Statement],
        suffix: str = "",
        also: Buffers = (),
    ) -> Kernel:
        """A kernel that reads what the reader used and writes some tensors."""
        node = self.graph.nodes[position]
        outputs = (*(self.buffer(v) for v in made), *also)
        written = {b.name for b in outputs}
        read = tuple(b for b in reader.used.values() if b.name not in written)
        origins: tuple[Origin, ...] = (node.origin,) if node.origin else ()
        return Kernel(f"{node.op.name}_{position}{suffix}", read, outputs, tuple(body), origins)

    def buffer(self, value: TensorValue) -> Buffer:
        type_ = self.graph.type_of(value)
        size = math.prod(pitched(type_.shape, self.pitches.get(value)))
        return Buffer(self.names[value], self.wider.get(value, type_.dtype), size)

    def in_memory_order(self, value: TensorValue, variables: Sequence[Var]) -> list[Var]:
        """Loops over a tensor's axes in the order in which it lies, or would lie."""
        return in_memory_order(value, variables, self.images)

    def store(
        self,
        value: TensorValue,
        indices: Sequence[Index],
        element: Value,
        guard: Within | None = None,
    ) -> Store:
        """An element of a tensor into its buffer."""
        return Store(self.names[value], self.address(value, indices), element, guard)

    def address(self, value: TensorValue, indices: Sequence[Index]) -> Index:
        """Where an element of a tensor is in its buffer."""
        shape = pitched(self.graph.type_of(value).shape, self.pitches.get(value))
        return laid_out(tuple(indices), shape, self.layouts.get(value))
