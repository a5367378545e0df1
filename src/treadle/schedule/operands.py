"""Operands of templates and library calls: read where they lie, or copied into order first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from treadle.base.dtypes import DType
from treadle.ir.graph import Value as TensorValue
from treadle.kernel.index import Index, Var, flatten, variable
from treadle.kernel.nodes import Buffer, Convert, Kernel, Load, Role, Store, Value
from treadle.schedule.inline import Reader
from treadle.schedule.lower import Lowering
from treadle.schedule.nests import nest


def as_dtype(value: Value, dtype: DType) -> Value:
    return value if value.dtype is dtype else Convert(value, dtype)


def row_major(axes: Sequence[Var]) -> Index:
    """The address of an element of memory that has some axes in order."""
    return flatten([variable(v) for v in axes], [v.extent for v in axes])


def plain_load(reader: Reader, value: Value) -> Load | None:
    """The load that a value is, with an index of loop variables alone."""
    if reader.lets or not isinstance(value, Load):
        return None
    is_plain = all(isinstance(atom, Var) for atom, _ in value.index.terms)
    return value if is_plain else None


def load_of(reader: Reader, value: TensorValue, axes: Iterable[Var]) -> Load | None:
    """The load that an element of a tensor is, if it lies in memory in some affine order."""
    return plain_load(reader, reader.at(value, tuple(map(variable, axes))))


def reading(lowering: Lowering, names: Iterable[str]) -> Reader:
    """A reader of a kernel that reads some buffers in any case."""
    reader = lowering.reader()
    for name in names:
        reader.used[name] = lowering.as_type(lowering.buffers[name])
    return reader


def temporary(lowering: Lowering, position: int, name: str, dtype: DType, size: int) -> Buffer:
    """Memory that the kernels of one node share; it is as large as the first who asks says."""
    full = f"{lowering.prefix}b{position}.{name}"
    return lowering.buffers.setdefault(full, Buffer(full, dtype, size))


def copied(
    lowering: Lowering,
    position: int,
    value: TensorValue,
    name: str,
    axes: Sequence[Var],
    order: Sequence[Var],
    suffix: str,
) -> tuple[Buffer, Kernel]:
    """A tensor in memory that has its axes in some order, and the kernel that copies it."""
    type_, reader = lowering.graph.type_of(value), lowering.reader()
    into = temporary(lowering, position, name, type_.dtype, type_.size)
    element = reader.at(value, tuple(map(variable, axes)))
    body = [*reader.lets, Store(into.name, row_major(order), element)]
    loops = nest(order, Role.PARALLEL, body)
    return into, lowering.kernel(position, reader, [], loops, suffix, (into,))


def moved(
    lowering: Lowering,
    value: TensorValue,
    source: Buffer,
    axes: Sequence[Var],
    order: Sequence[Var],
) -> Kernel:
    """Writes a result from memory that has its axes in some other order."""
    index = lowering.place(value, [variable(v) for v in axes])
    load = Load(source.name, row_major(order), source.dtype)
    body = nest(axes, Role.PARALLEL, [Store(lowering.names[value], index, load)])
    reader = reading(lowering, [source.name])
    return lowering.kernel(value.node, reader, [value], body, "_moved")
