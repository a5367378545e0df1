"""What rendering must know about a kernel beforehand: types in memory, and what loops change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from treadle.base.dtypes import DType
from treadle.codegen.llvm.scalars import register_element
from treadle.ir.literal import to_numpy
from treadle.kernel.nodes import Accumulate, Literal, Set, Statement
from treadle.kernel.traverse import walk


def memory_element(dtype: DType) -> str:
    """The element type in memory."""
    names = {"bool": "i8", "bfloat16": "i16", "float16": "i16"}
    return names.get(dtype.name, register_element(dtype))


def python_number(literal: Literal) -> float | int | bool:
    found: float | int | bool = to_numpy(literal.value, literal.dtype.numpy).item()
    return found


def changed_locals(body: Sequence[Statement], known: Iterable[str]) -> list[str]:
    """Locals of outside that some statements change, in order."""
    names = set(known)
    changed = (s.local for s in walk(body) if isinstance(s, (Accumulate, Set)))
    return list(dict.fromkeys(local for local in changed if local in names))


def accumulation(body: Sequence[Statement], name: str) -> Accumulate:
    """The statement by which a vector loop accumulates a local."""
    for s in walk(body):
        if isinstance(s, Accumulate) and s.local == name:
            return s
    raise AssertionError(f"a vector loop sets {name}")
