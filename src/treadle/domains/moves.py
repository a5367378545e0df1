"""The way of an input's elements through ops that only move them."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from treadle.domains.float64 import MEANING
from treadle.ir.control import SCAN
from treadle.ir.op import Attributes, Op, Types
from treadle.ir.ops import shaping as s
from treadle.ir.types import TensorType

MOVES = frozenset([s.RESHAPE, s.PERMUTE, s.BROADCAST, s.SLICE, s.PAD, s.CONCAT, s.FLIP])
ELSEWHERE = -1  # as a position: not an element of the input


class Move(NamedTuple):
    """One operand's way through an op that only moves elements."""

    op: Op
    attributes: Attributes
    position: int  # among the operands; of a scan, which one it is
    operands: Types


def then(moves: tuple[Move, ...], move: Move) -> tuple[Move, ...]:
    """Reshapes of reshapes are one, as canonical graphs have them."""
    if moves and move.op is s.RESHAPE and moves[-1].op is s.RESHAPE:
        return (*moves[:-1], move._replace(operands=moves[-1].operands))
    return (*moves, move)


def rows_of(type_: TensorType, scan: int) -> Move:
    """Every row of a tensor, as the body of a scan sees them; rows of one scan run together."""
    return Move(SCAN, s.Reshape(type_.shape[1:]), scan, (type_,))


def _selects(move: Move) -> bool:
    """Whether some elements may be left behind."""
    is_empty = isinstance(move.attributes, s.Broadcast) and 0 in move.attributes.shape
    return move.op is s.SLICE or is_empty


def positions_after(type_: TensorType, moves: tuple[Move, ...]) -> np.ndarray | None:
    """Which elements of an input come through; None: all of them."""
    if not any(map(_selects, moves)):
        return None
    marks = np.arange(type_.size).reshape(type_.shape)
    left = np.unique(_replayed(marks, moves))
    left = left[left != ELSEWHERE]
    return None if len(left) == type_.size else left


def _replayed(marks: np.ndarray, moves: tuple[Move, ...]) -> np.ndarray:
    for at, move in enumerate(moves):
        if not any(map(_selects, moves[at:])):
            break
        attributes = move.attributes
        if move.op is SCAN:
            rows = [_replayed(row, moves[at + 1 :]).reshape(-1) for row in marks]
            return np.concatenate(rows)
        if move.op is s.CONCAT:
            parts = [np.full(t.shape, ELSEWHERE) for t in move.operands]
            parts[move.position] = marks
            marks = MEANING[move.op](attributes, *parts)
            continue
        if isinstance(attributes, s.Pad):
            attributes = replace(attributes, value=ELSEWHERE)
        marks = MEANING[move.op](attributes, marks)
    return marks
