"""Operands of templates and library calls: read where they lie, or copied into order first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from treadle.base.dtypes import DType
from treadle.ir.graph import Value as TensorValue
from treadle.kernel.bindings import Content, Copy, Elements, Work
from treadle.kernel.contraction import Axes, size
from treadle.kernel.index import Index, Var, variable
from treadle.kernel.nodes import Buffer, Kernel, Load, Local, Matrix, Statement, Store, Value
from treadle.schedule.inline import Reader
from treadle.schedule.lower import Lowering
from treadle.schedule.nests import Body, Buffers, accumulated, along, as_dtype, flat_index, parallel


def plain_load(reader: Reader, value: Value) -> Load | None:
    """The load that a value is, with an index of loop variables alone."""
    if reader.lets or not isinstance(value, Load):
        return None
    is_plain = all(isinstance(atom, Var) for atom, _ in value.index.terms)
    return value if is_plain else None


def load_of(reader: Reader, value: TensorValue, axes: Iterable[Var]) -> Load | None:
    """The load that an element of a tensor is, if it lies in memory in some affine order."""
    return plain_load(reader, reader.at(value, along(axes)))


def is_read(lowering: Lowering, value: TensorValue) -> bool:
    """Whether anything uses a result, or it leaves the program."""
    return bool(lowering.uses[value]) or any(o.value == value for o in lowering.graph.outputs)


def reading(lowering: Lowering, names: Iterable[str]) -> Reader:
    """A reader of a kernel that reads some buffers in any case."""
    reader = lowering.reader()
    for name in names:
        reader.used[name] = lowering.buffers[name]
    return reader


def transposed(matrix: Matrix) -> Matrix:
    return replace(matrix, rows=matrix.columns, columns=matrix.rows)


@dataclass(frozen=True, slots=True)
class Site:
    """A node that is being lowered: memory that its kernels share, and copies around them."""

    lowering: Lowering
    position: int
    copies: list[Kernel] = field(default_factory=list)  # of operands

    def memory(
        self,
        name: str,
        dtype: DType,
        size: int,
        content: Content | None = None,
        value: TensorValue | None = None,
    ) -> Buffer:
        """A buffer by its name, as large as the first who asks for it says.

        It holds content of a value: what is on the way to the node's, if nothing else is said.
        """
        full = f"{self.lowering.prefix}b{self.position}.{name}"
        held = TensorValue(self.position) if value is None else value
        self.lowering.held.setdefault(full, (held, content or Work(name)))
        return self.lowering.buffers.setdefault(full, Buffer(full, dtype, size))

    def placed(
        self,
        value: TensorValue,
        name: str,
        axes: Axes,
        order: Axes,
        will_do: Callable[[Index], bool],
    ) -> Load:
        """An element of an operand: where it lies at a whole pack, or of a copy in some order."""
        load = load_of(self.lowering.reader(), value, axes)
        is_aligned = load is not None and load.index.offset % self.lowering.target.matmuls.pack == 0
        if load is not None and is_aligned and will_do(load.index):
            return load
        buffer, kernel = self.copied(value, name, axes, order, f"_{name.split('.')[0]}")
        self.copies.append(kernel)
        return Load(buffer.name, flat_index(order), buffer.dtype)

    def standalone(
        self,
        body: Sequence[Statement],
        read: Iterable[str],
        made: Sequence[TensorValue],
        also: Buffers = (),
    ) -> list[Kernel]:
        """The kernel of a library call that reads some buffers, after the copies it needs."""
        reader = reading(self.lowering, read)
        kernel = self.lowering.kernel(self.position, reader, made, body, "", also)
        return [*self.copies, replace(kernel, is_standalone=True)]

    def copied(
        self,
        value: TensorValue,
        name: str,
        axes: Axes,
        order: Axes,
        suffix: str,
        columns: Axes = (),
        gap: int = 0,
    ) -> tuple[Buffer, Kernel]:
        """A tensor in memory that has its axes in some order, and the kernel that copies it.

        Columns come after the others; behind a row of them may be a gap.
        """
        type_, reader = self.lowering.graph.type_of(value), self.lowering.reader()
        pitch = size(columns) + gap
        at = flat_index(order) * pitch + flat_index(columns)
        copy = Copy(Elements((*order, *columns), at, along(axes)))
        into = self.memory(name, type_.dtype, size(order) * pitch, copy, value)
        element = reader.at(value, along(axes))
        body = [*reader.lets, Store(into.name, at, element)]
        loops = parallel((*order, *columns), body)
        return into, self.lowering.kernel(self.position, reader, [], loops, suffix, (into,))

    def moved(
        self, source: Buffer, axes: Axes, order: Axes, suffix: str = "_moved", output: int = 0
    ) -> Kernel:
        """Writes a result from memory that has its axes in some other order or dtype.

        Memory of several results holds parts, which are added up.
        """
        lowering, value = self.lowering, TensorValue(self.position, output)
        target, body = lowering.buffer(value), Body()
        own = lowering.graph.type_of(value).size
        part = Var("part", source.size // own)
        at = flat_index(order) + variable(part) * own
        found: Value = Load(source.name, at, source.dtype)
        if part.extent > 1:
            body = accumulated("add", source.dtype, [part], [], found)
            found = Local("acc", source.dtype)
        store = lowering.store(value, along(axes), as_dtype(found, target.dtype))
        loops, reader = parallel(axes, [*body, store]), reading(lowering, [source.name])
        return lowering.kernel(self.position, reader, [value], loops, suffix)
