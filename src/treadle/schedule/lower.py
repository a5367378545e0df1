"""Graph to Program: which tensors are kept in memory, and a kernel for each of them.

What is elementwise, moves elements or is a constant is computed where it is read, unless several
kernels would compute it again. Everything else is a root: a kernel of its own, its operands'
elementwise work folded in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from treadle.base.origin import Origin
from treadle.ir.control import SCAN, Scan
from treadle.ir.graph import Graph, Node
from treadle.ir.graph import Value as TensorValue
from treadle.ir.literal import ArrayLiteral
from treadle.ir.op import RuleTable
from treadle.ir.ops import elementwise as e
from treadle.ir.ops import linear, shaping
from treadle.ir.ops.leaves import CONSTANT, IOTA, Constant, Leaf
from treadle.kernel.index import Index, Var, flatten, variable
from treadle.kernel.nodes import Buffer, Kernel, Load, Role, Statement, Store
from treadle.kernel.program import Argument, Call, Program, Repeat, Step
from treadle.kernel.verify import verify
from treadle.schedule.expand import expand
from treadle.schedule.inline import INLINE, Reader
from treadle.schedule.nests import anonymous, axis_vars, merge_loops, nest, with_vector_loop

# What computes ops that are not computed where they are read.
Root = Callable[["Lowering", int, Node], list[Kernel]]
ROOTS: RuleTable[Root] = RuleTable("kernel")


def lower(graph: Graph, fuse: bool = True) -> Program:
    """The program of a graph. `fuse=False` keeps every tensor in memory, for debugging."""
    lowering = Lowering(expand(graph), fuse)
    steps = lowering.steps()
    leaves = {n: lowering.graph.nodes[i].types[0] for n, i in lowering.graph.leaves.items()}
    outputs = tuple(
        (o, lowering.names[o.value], lowering.graph.type_of(o.value))
        for o in lowering.graph.outputs
    )
    return Program(
        tuple(leaves.items()),
        tuple(lowering.constants.items()),
        tuple(lowering.buffers.values()),
        tuple(steps),
        outputs,
    )


class Lowering:
    """One walk over a graph of primitives; bodies of scans are walks of their own."""

    def __init__(self, graph: Graph, fuse: bool, prefix: str = ""):
        self.graph, self.fuse, self.prefix = graph, fuse, prefix
        self.kept = kept_values(graph, fuse)
        self.uses = Counter(v for n in graph.nodes for v in n.operands)
        self.names = {v: f"{prefix}b{v.node}.{v.output}" for v in self.kept}
        for name, position in graph.leaves.items():
            self.names[TensorValue(position)] = f"{prefix}{name}"
        self.constants: dict[str, np.ndarray] = {}
        self.buffers = {
            name: Buffer(name, graph.type_of(v).dtype, graph.type_of(v).size)
            for v, name in self.names.items()
        }

    def steps(self) -> list[Step]:
        found: list[Step] = []
        for position, node in enumerate(self.graph.nodes):
            if node.op is SCAN:
                found += self._scan(position, node)
            else:
                found += [self.call(k) for k in self._kernels(position, node)]
        return found

    def call(self, kernel: Kernel) -> Call:
        """A kernel with names of its own, so that equal kernels are equal."""
        return Call(verify(anonymous(kernel)), tuple(Argument(b.name) for b in kernel.buffers))

    def _kernels(self, position: int, node: Node) -> list[Kernel]:
        value = TensorValue(position)
        if isinstance(node.attributes, Leaf):
            return []
        if isinstance(node.attributes, Constant) and isinstance(
            node.attributes.value, ArrayLiteral
        ):
            self.constants[self.names[value]] = node.attributes.value.array
            return []
        if all(t.size == 0 for t in node.types):
            return []
        if node.op in ROOTS:
            return ROOTS[node.op](self, position, node)
        return [self.map_kernel(value)] if value in self.kept else []

    def _scan(self, position: int, node: Node) -> list[Step]:
        """The body's program for each row; carries are copied in before and on after each turn."""
        attributes: Scan = attributes_of(node)
        body = expand(attributes.body)
        inner = Lowering(body, self.fuse, f"{self.prefix}scan{position}:")
        inputs = [TensorValue(i) for i in body.inputs]
        split = attributes.constants + attributes.carries
        steps: list[Step] = []
        turn: list[Step] = []
        for value, operand in zip(inputs, node.operands, strict=True):
            name, source = inner.names[value], self.names[operand]
            if value in inputs[split:]:
                turn += _copied(source, name, inner.buffers[name], from_row=True)
            elif value in inputs[attributes.constants :]:
                steps += _copied(source, name, inner.buffers[name])
            else:
                inner.rename(value, source)
        turn += inner.steps()
        carried = [inner.names[v] for v in inputs[attributes.constants : split]]
        turn += self._after_turn(inner, attributes, position, carried)
        self.buffers = inner.buffers | self.buffers
        self.constants |= inner.constants
        steps.append(Repeat(attributes.length, attributes.reverse, tuple(turn)))
        for k, name in enumerate(carried):
            target = self.names[TensorValue(position, k)]
            steps += _copied(name, target, self.buffers[target])
        return steps

    def _after_turn(
        self, inner: Lowering, attributes: Scan, position: int, carried: Sequence[str]
    ) -> list[Step]:
        """Stack what a turn gives, then make its carries those of the next."""
        outputs = [inner.names[o.value] for o in inner.graph.outputs]
        steps: list[Step] = []
        for k, name in enumerate(outputs[attributes.carries :]):
            target = self.names[TensorValue(position, attributes.carries + k)]
            steps += _copied(name, target, inner.buffers[name], to_row=True)
        # All new carries are set aside before any old one is overwritten.
        fresh = []
        for k, name in enumerate(outputs[: attributes.carries]):
            aside = f"{inner.prefix}next{k}"
            buffer = inner.buffers[name]
            inner.buffers[aside] = Buffer(aside, buffer.dtype, buffer.size)
            fresh.append(aside)
            steps += _copied(name, aside, buffer)
        for aside, name in zip(fresh, carried, strict=True):
            steps += _copied(aside, name, inner.buffers[name])
        return steps

    def rename(self, value: TensorValue, name: str) -> None:
        """A body's input is a buffer of outside."""
        old = self.buffers.pop(self.names[value])
        self.names[value] = name
        self.buffers.setdefault(name, Buffer(name, old.dtype, old.size))

    def reader(self, being_made: TensorValue | None = None) -> Reader:
        """Reads elements; the tensor that is being made is computed, not loaded."""

        def buffer_of(value: TensorValue) -> str | None:
            return None if value == being_made else self.names.get(value)

        return Reader(self.graph, buffer_of, uses=self.uses)

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
        also: tuple[Buffer, ...] = (),
    ) -> Kernel:
        """A kernel that reads what the reader used and writes some tensors."""
        node = self.graph.nodes[position]
        inputs = tuple(Buffer(n, t.dtype, t.size) for n, t in reader.used.items())
        outputs = (*(self.buffer(v) for v in made), *also)
        kept = tuple(b for b in inputs if b.name not in {o.name for o in outputs})
        shaped = tuple(with_vector_loop(merge_loops(s)) for s in body)
        origins: tuple[Origin, ...] = (node.origin,) if node.origin else ()
        return Kernel(f"{node.op.name}_{position}{suffix}", kept, outputs, shaped, origins)

    def buffer(self, value: TensorValue) -> Buffer:
        type_ = self.graph.type_of(value)
        return Buffer(self.names[value], type_.dtype, type_.size)

    def place(self, value: TensorValue, indices: Sequence[Index]) -> Index:
        return flatten(tuple(indices), self.graph.type_of(value).shape)


def _copied(
    source: str, target: str, like: Buffer, from_row: bool = False, to_row: bool = False
) -> list[Step]:
    """A call that copies as much as a buffer holds, from or to the row of this turn."""
    if like.size == 0:
        return []
    var = Var("i", like.size)
    at = variable(var)
    kernel = Kernel(
        "copy",
        (Buffer("x", like.dtype, like.size),),
        (Buffer("y", like.dtype, like.size),),
        nest([var], Role.VECTOR, [Store("y", at, Load("x", at, like.dtype))]),
    )
    rows = (like.size if is_row else 0 for is_row in (from_row, to_row))
    arguments = tuple(Argument(n, row) for n, row in zip((source, target), rows, strict=True))
    return [Call(verify(anonymous(kernel)), arguments)]


MAX_DEPTH = 40  # of an expression: what is deeper is kept in memory


def kept_values(graph: Graph, fuse: bool) -> dict[TensorValue, None]:
    """Tensors that are in memory, in order: roots, outputs, and what several kernels read."""
    readers: dict[TensorValue, set[int]] = {}
    wanted = {o.value for o in graph.outputs}
    wanted |= _read_again(graph) | _too_deep(graph)
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


# Ops whose results are dear enough to be kept when their elements are read more than once.
_COSTLY = frozenset(
    [e.EXP, e.LOG, e.SQRT, e.RSQRT, e.SIN, e.COS, e.TANH, e.ERF, e.POW, e.DIV, e.MOD]
)
_MOVES = frozenset(
    [
        CONSTANT,
        IOTA,
        e.STOP_GRADIENT,
        shaping.RESHAPE,
        shaping.PERMUTE,
        shaping.BROADCAST,
        shaping.SLICE,
        shaping.PAD,
        shaping.CONCAT,
        shaping.FLIP,
        linear.WINDOW,
    ]
)


def _read_again(graph: Graph) -> set[TensorValue]:
    """Operands whose elements a consumer reads again and again, and that are not mere moves.

    A product reads each element of an operand once for every row or column of the other.
    """
    found: set[TensorValue] = set()
    costly: list[bool] = []  # whether computing an element anew, operands inlined, is dear
    for node in graph.nodes:
        costly.append(node.op in _COSTLY or any(_costs(graph, costly, v) for v in node.operands))
        found.update(v for v in node.operands if _is_reread(graph, costly, node, v))
    return found


def _too_deep(graph: Graph) -> set[TensorValue]:
    """Values that cut long chains of inlined ops into pieces."""
    found: set[TensorValue] = set()
    depths: list[int] = []
    for position, node in enumerate(graph.nodes):
        depth = 1 + max((depths[v.node] for v in node.operands), default=0)
        is_kept = node.op in ROOTS or isinstance(node.attributes, Leaf)
        if depth >= MAX_DEPTH and not is_kept:
            found.update(TensorValue(position, i) for i in range(len(node.types)))
            is_kept = True
        depths.append(0 if is_kept else depth)
    return found


def _is_reread(graph: Graph, costly: Sequence[bool], node: Node, operand: TensorValue) -> bool:
    source = graph.nodes[operand.node]
    if node.op is linear.CONTRACT:
        return _has_arithmetic(graph, source)
    if node.op is linear.WINDOW and source.op in (shaping.PAD, shaping.CONCAT):
        return True  # guards are dear where windows overlap
    if node.op in (shaping.BROADCAST, linear.WINDOW):
        return _costs(graph, costly, operand)
    return node.op is SCAN


def _costs(graph: Graph, costly: Sequence[bool], value: TensorValue) -> bool:
    node = graph.nodes[value.node]
    return costly[value.node] and node.op not in ROOTS and not isinstance(node.attributes, Leaf)


def _has_arithmetic(graph: Graph, node: Node) -> bool:
    """Whether an inlined value is computed rather than only moved."""
    while node.op in _MOVES and node.operands:
        node = graph.nodes[node.operands[0].node]
    is_leaf = isinstance(node.attributes, Leaf)
    return not is_leaf and node.op not in ROOTS and node.op not in _MOVES


def _is_inline(node: Node) -> bool:
    is_array = isinstance(node.attributes, Constant) and isinstance(
        node.attributes.value, ArrayLiteral
    )
    return node.op in INLINE and not is_array


def attributes_of(node: Node) -> Any:
    return node.attributes
