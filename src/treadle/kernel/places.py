"""Statements with their places replaced: every index, and the name of every buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from treadle.kernel.index import Index
from treadle.kernel.nodes import (
    Accumulate,
    Apply,
    Barrier,
    Convert,
    For,
    Guarded,
    Let,
    Library,
    Literal,
    Load,
    Local,
    Matrix,
    Multiply,
    Position,
    Set,
    Statement,
    Store,
    Update,
    Value,
    Within,
)

Move = Callable[[Index], Index]
Rename = Callable[[str], str]


def same_name(buffer: str) -> str:
    return buffer


def map_places(statement: Statement, move: Move, rename: Rename = same_name) -> Statement:
    """The statement with every index, and the name of every buffer, replaced."""
    match statement:
        case For(var, role, body, stop):
            inner = tuple(map_places(s, move, rename) for s in body)
            return For(var, role, inner, None if stop is None else move(stop))
        case Let(local, value):
            return Let(local, map_value(value, move, rename))
        case Set(local, value):
            return Set(local, map_value(value, move, rename))
        case Accumulate(local, op, value):
            return Accumulate(local, op, map_value(value, move, rename))
        case Store(buffer, index, value, guard):
            held = None if guard is None else Within(move(guard.index), guard.low, guard.high)
            return Store(rename(buffer), move(index), map_value(value, move, rename), held)
        case Update(buffer, index, value):
            return Update(rename(buffer), move(index), map_value(value, move, rename))
        case Multiply(target, left, right, adds, bias):
            a, b, c = (
                Matrix(rename(m.buffer), move(m.index), m.rows, m.columns)
                for m in (target, left, right)
            )
            return Multiply(a, b, c, adds, None if bias is None else rename(bias))
        case Barrier():
            return statement
        case Library(name, results, operands, numbers, flops):
            made, given = (
                tuple(replace(v, buffer=rename(v.buffer)) for v in views)
                for views in (results, operands)
            )
            return Library(name, made, given, numbers, flops)


def map_value(value: Value, move: Move, rename: Rename = same_name) -> Value:
    """The value with every index, and the name of every buffer, replaced."""
    match value:
        case Literal() | Local():
            return value
        case Load(buffer, index, dtype):
            return Load(rename(buffer), move(index), dtype)
        case Position(index, dtype):
            return Position(move(index), dtype)
        case Within(index, low, high):
            return Within(move(index), low, high)
        case Convert(inner, dtype):
            return Convert(map_value(inner, move, rename), dtype)
        case Apply(op, operands, dtype):
            return Apply(op, tuple(map_value(o, move, rename) for o in operands), dtype)
        case Guarded(guard, inner, other, dtype):
            held, rest = (map_value(v, move, rename) for v in (guard, other))
            return Guarded(held, map_value(inner, move, rename), rest, dtype)


def indices_of(statements: Sequence[Statement]) -> list[Index]:
    """Every index in some statements."""
    found: list[Index] = []

    def note(index: Index) -> Index:
        found.append(index)
        return index

    for statement in statements:
        map_places(statement, note)
    return found
