"""One row of the op table, and the table."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

from treadle.ir.contract import Contract
from treadle.ir.types import TensorType

Types = tuple[TensorType, ...]
# A rule is called with its op's own attributes class, which the table cannot express statically.
TypeRule = Callable[..., Types]


class Attributes:
    """Base of the attributes of ops: frozen dataclasses of plain values."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class NoAttributes(Attributes):
    """For ops that have none."""


NONE = NoAttributes()


class Precision(Enum):
    """What the precision pass does with an op."""

    NARROW = "computes narrow, accumulates in float32"
    FOLLOW = "computes in the dtype its operands have"
    WIDEN = "computes in float32"
    FIRST = "computes in float32; its result is as narrow as its first operand"


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """A row: name, attributes class, type rule, precision class, contract.

    The other cells live in rule tables of the folders that own them: meaning (domains), vjp
    (autodiff), definition of composites (frontend), samples (verify), lowering (schedule).
    """

    name: str
    attributes: type[Attributes]
    infer: TypeRule
    precision: Precision
    contract: Contract
    is_composite: bool = False

    @property
    def has_attributes(self) -> bool:
        return self.attributes is not NoAttributes

    def __repr__(self) -> str:
        return self.name


OPS: dict[str, Op] = {}


def declare(op: Op) -> Op:
    """Put a row into the table."""
    assert op.name not in OPS, f"op {op.name} is declared twice"
    OPS[op.name] = op
    return op


def infer_types(op: Op, attributes: Attributes, operands: Types) -> Types:
    """Types of the results; raises a named error when the operands do not fit."""
    if op.has_attributes:
        return op.infer(attributes, *operands)
    return op.infer(*operands)


Entry = TypeVar("Entry", bound=Callable[..., Any])


class RuleTable(Generic[Entry]):
    """One column of the op table: an entry for each op, added by decorator.

    Entries of ops with attributes take them as their first argument. A module that is imported
    anew, because an interrupt ended its first import, replaces its entries.
    """

    def __init__(self, name: str):
        self.name = name
        self._entries: dict[Op, Entry] = {}
        self._givers: dict[Op, dict[str, Any]] = {}  # names of the module that gave each entry

    def __call__(self, *ops: Op) -> Callable[[Entry], Entry]:
        giver = sys._getframe(1).f_globals

        def add(entry: Entry) -> Entry:
            for op in ops:
                before = self._givers.get(op)
                is_new = before is None or (
                    before is not giver and before["__name__"] == giver["__name__"]
                )
                assert is_new, f"{self.name} of {op} is given twice"
                self._entries[op], self._givers[op] = entry, giver
            return entry

        return add

    def __contains__(self, op: Op) -> bool:
        return op in self._entries

    def __getitem__(self, op: Op) -> Entry:
        return self._entries[op]

    def get(self, op: Op) -> Entry | None:
        return self._entries.get(op)
