"""Graph to Program: which tensors are kept in memory, and a kernel for each of them.

What is elementwise, moves elements or is a constant is computed where it is read, unless several
kernels would compute it again. Everything else is a root: a kernel of its own, its operands'
elementwise work folded in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from treadle.base.origin import Origin
from treadle.ir.graph import Graph, Node
from treadle.ir.graph import Value as TensorValue
from treadle.ir.literal import ArrayLiteral
from treadle.ir.op import RuleTable
from treadle.ir.ops.leaves import CONSTANT, IOTA, Constant, Leaf
from treadle.kernel.index import Index, flatten, variable
from treadle.kernel.nodes import Buffer, Kernel, Role, Statement, Store
from treadle.kernel.program import Call, Program
from treadle.kernel.verify import verify
from treadle.schedule.expand import expand
from treadle.schedule.inline import INLINE, Reader
from treadle.schedule.nests import axis_vars, merge_loops, nest, with_vector_loop

# Kernels of ops that are not computed where they are read.
Root = Callable[["Lowering", int, Node], list[Kernel]]
ROOTS: RuleTable[Root] = RuleTable("kernel")


def lower(graph: Graph, fuse: bool = True) -> Program:
    """The program of a graph. `fuse=False` keeps every tensor in memory, for debugging."""
    return Lowering(expand(graph), fuse).run()


class Lowering:
    """One walk over a graph of primitives."""

    def __init__(self, graph: Graph, fuse: bool):
        self.graph = graph
        self.kept = kept_values(graph, fuse)
        self.names = {v: f"b{v.node}" + (f"_{v.output}" if v.output else "") for v in self.kept}
        for name, position in graph.leaves.items():
            self.names[TensorValue(position)] = name
        self.constants: list[tuple[str, np.ndarray]] = []
        self.calls: list[Call] = []

    def run(self) -> Program:
        for position, node in enumerate(self.graph.nodes):
            for kernel in self._kernels(position, node):
                own = {b.name for b in kernel.buffers}
                self.calls.append(Call(verify(kernel), tuple((n, n) for n in sorted(own))))
        leaves = {n: self.graph.nodes[i].types[0] for n, i in self.graph.leaves.items()}
        outputs = tuple(
            (o, self.names[o.value], self.graph.type_of(o.value)) for o in self.graph.outputs
        )
        return Program(
            tuple(leaves.items()),
            tuple(self.constants),
            self._buffers(),
            tuple(self.calls),
            outputs,
        )

    def _buffers(self) -> tuple[Buffer, ...]:
        return tuple(
            Buffer(name, self.graph.type_of(v).dtype, self.graph.type_of(v).size)
            for v, name in self.names.items()
        )

    def _kernels(self, position: int, node: Node) -> list[Kernel]:
        value = TensorValue(position)
        if isinstance(node.attributes, Leaf):
            return []
        if isinstance(node.attributes, Constant) and isinstance(
            node.attributes.value, ArrayLiteral
        ):
            self.constants.append((self.names[value], node.attributes.value.array))
            return []
        if all(t.size == 0 for t in node.types):
            return []
        if node.op in ROOTS:
            return ROOTS[node.op](self, position, node)
        return [self.map_kernel(value)] if value in self.kept else []

    def reader(self, being_made: TensorValue | None = None) -> Reader:
        """Reads elements; the tensor that is being made is computed, not loaded."""

        def buffer_of(value: TensorValue) -> str | None:
            return None if value == being_made else self.names.get(value)

        return Reader(self.graph, buffer_of)

    def map_kernel(self, value: TensorValue) -> Kernel:
        """Each element on its own."""
        type_, reader = self.graph.type_of(value), self.reader(value)
        axes = axis_vars("i", type_.shape)
        element = reader.at(value, tuple(map(variable, axes)))
        place = flatten(tuple(map(variable, axes)), type_.shape)
        body = [*reader.lets, Store(self.names[value], place, element)]
        return self.kernel(value.node, reader, [value], nest(axes, Role.PARALLEL, body))

    def kernel(
        self,
        position: int,
        reader: Reader,
        made: Sequence[TensorValue],
        body: Sequence[Statement],
        suffix: str = "",
    ) -> Kernel:
        """A kernel that reads what the reader used and writes some tensors."""
        node = self.graph.nodes[position]
        inputs = tuple(Buffer(n, t.dtype, t.size) for n, t in reader.used.items())
        outputs = tuple(self.buffer(v) for v in made)
        kept = tuple(b for b in inputs if b.name not in {o.name for o in outputs})
        shaped = tuple(with_vector_loop(merge_loops(s)) for s in body)
        origins: tuple[Origin, ...] = (node.origin,) if node.origin else ()
        return Kernel(f"{node.op.name}_{position}{suffix}", kept, outputs, shaped, origins)

    def buffer(self, value: TensorValue) -> Buffer:
        type_ = self.graph.type_of(value)
        return Buffer(self.names[value], type_.dtype, type_.size)

    def place(self, value: TensorValue, indices: Sequence[Index]) -> Index:
        return flatten(tuple(indices), self.graph.type_of(value).shape)


def kept_values(graph: Graph, fuse: bool) -> dict[TensorValue, None]:
    """Tensors that are in memory, in order: roots, outputs, and what several kernels read."""
    readers: dict[TensorValue, set[int]] = {}
    wanted = {o.value for o in graph.outputs}
    kept: dict[TensorValue, None] = {}
    # From the end: which kernels an inlined value ends up in is known from its users.
    homes: dict[int, set[int]] = {}
    for position in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[position]
        values = [TensorValue(position, i) for i in range(len(node.types))]
        used_by = set().union(*(readers.get(v, set()) for v in values))
        is_leaf = isinstance(node.attributes, Leaf)
        if is_leaf:
            continue
        is_root = node.op in ROOTS or not _is_inline(node)
        is_shared = len(used_by) > 1 and node.op not in (CONSTANT, IOTA)
        if is_root or is_shared or not fuse or any(v in wanted for v in values):
            kept |= dict.fromkeys(values)
            homes[position] = {position}
        else:
            homes[position] = used_by
        for operand in node.operands:
            readers.setdefault(operand, set()).update(homes[position])
    return dict.fromkeys(sorted(kept))


def _is_inline(node: Node) -> bool:
    is_array = isinstance(node.attributes, Constant) and isinstance(
        node.attributes.value, ArrayLiteral
    )
    return node.op in INLINE and not is_array


def attributes_of(node: Node) -> Any:
    return node.attributes
