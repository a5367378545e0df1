"""Copies of whole buffers, and whether an update may take the place of what it reads."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.base.dtypes import DType
from treadle.kernel.access import accesses
from treadle.kernel.index import Index, Var, variable
from treadle.kernel.nodes import Buffer, Kernel, Load, Role, Statement, Store
from treadle.schedule.nests import nest


def kind_of(buffer: Buffer) -> tuple[DType, int]:
    return buffer.dtype, buffer.size


def stays(body: Sequence[Statement], leaf: str, at: Index) -> bool:
    """Whether a leaf is read only at the index that is written."""
    return all(a.index == at for a in accesses(body) if a.buffer == leaf)


def copy_kernel(source: str, target: str, like: Buffer) -> Kernel:
    var = Var("i", like.size)
    at = variable(var)
    store = Store(target, at, Load(source, at, like.dtype))
    return Kernel(
        "copy",
        (Buffer(source, like.dtype, like.size),),
        (Buffer(target, like.dtype, like.size),),
        nest([var], Role.PARALLEL, [store]),
    )


def copy_kernels(source: str, target: str, like: Buffer) -> list[Kernel]:
    return [copy_kernel(source, target, like)] if like.size else []
