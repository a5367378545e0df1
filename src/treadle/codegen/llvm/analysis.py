"""What rendering must know about a kernel beforehand: types in memory, and what loops change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from treadle.base.dtypes import DType
from treadle.codegen.llvm.scalars import register_element
from treadle.ir.literal import to_numpy
from treadle.kernel.nodes import Accumulate, For, Literal, Set, Statement


def memory_element(dtype: DType) -> str:
    """The element type in memory."""
    names = {"bool": "i8", "bfloat16": "i16", "float16": "i16"}
    return names.get(dtype.name, register_element(dtype))


def python_number(literal: Literal) -> float | int | bool:
    found: float | int | bool = to_numpy(literal.value, literal.dtype.numpy).item()
    return found


def changed_locals(body: Sequence[Statement], known: Iterable[str]) -> list[str]:
    """Locals of outside that some statements change, in order."""
    found: dict[str, None] = {}
    names = set(known)
    for statement in body:
        match statement:
            case Accumulate(local) | Set(local):
                if local in names:
                    found[local] = None
            case For(_, _, inner):
                found |= dict.fromkeys(changed_locals(inner, names))
            case _:
                pass
    return list(found)


def accumulation(body: Sequence[Statement], name: str) -> str:
    """The op by which a vector loop accumulates a local."""
    return _find_accumulation(body, name).op


def accumulated_dtype(body: Sequence[Statement], name: str) -> DType:
    return _find_accumulation(body, name).value.dtype


def _find_accumulation(body: Sequence[Statement], name: str) -> Accumulate:
    for statement in body:
        if isinstance(statement, Accumulate) and statement.local == name:
            return statement
        if isinstance(statement, For) and name in changed_locals(statement.body, [name]):
            return _find_accumulation(statement.body, name)
    raise AssertionError(f"a vector loop sets {name}")


def identity(op: str, dtype: DType) -> float | int:
    if op in ("add", "mul"):
        return int(op == "mul")
    if dtype.is_float:
        return float("-inf") if op == "max" else float("inf")
    return dtype.range()[op == "min"]
