"""Kernels with one defect each: indices, constants, bounds, operators, stores, buffers, barriers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from treadle.kernel.access import accesses
from treadle.kernel.index import Index
from treadle.kernel.nodes import (
    Accumulate,
    Apply,
    Barrier,
    Buffer,
    Convert,
    For,
    Guarded,
    Kernel,
    Let,
    Literal,
    Load,
    Matmul,
    Set,
    Statement,
    Store,
    Update,
    Value,
    Within,
)

OTHER_OP = {
    "add": "sub", "sub": "add", "mul": "add", "div": "mul", "max": "min", "min": "max",
    "exp": "tanh", "tanh": "exp", "erf": "tanh", "rsqrt": "sqrt", "sqrt": "rsqrt", "log": "exp",
    "le": "lt", "lt": "le", "and": "or", "or": "and", "eq": "lt",
}  # fmt: skip
SWAPPED = ("sub", "div", "lt", "le", "where")

Mutant = tuple[str, Kernel]


def mutants(kernel: Kernel) -> Iterator[Mutant]:
    """Every defect that one change makes, and what it is."""
    buffers = {b.name: b for b in (*kernel.buffers, *kernel.scratch)}
    for told, body in _bodies(kernel.body, buffers):
        yield told, replace(kernel, body=body)
    for a, b in pairwise(kernel.inputs):
        if (a.dtype, a.size) == (b.dtype, b.size) and a.size > 1:  # not those of a sum of numbers
            yield f"{a.name} and {b.name} swapped", _swapped(kernel, a, b)


def _swapped(kernel: Kernel, a: Buffer, b: Buffer) -> Kernel:
    other = {a.name: b, b.name: a}
    return replace(kernel, inputs=tuple(other.get(x.name, x) for x in kernel.inputs))


def _bodies(
    body: tuple[Statement, ...], buffers: dict[str, Buffer]
) -> Iterator[tuple[str, tuple[Statement, ...]]]:
    for i, statement in enumerate(body):
        for told, new in _statements(statement, buffers):
            yield told, (*body[:i], *new, *body[i + 1 :])
    for i, (a, b) in enumerate(pairwise(body)):
        if isinstance(a, For) and isinstance(b, For) and _needs(b, a):
            yield "two loops in the other order", (*body[:i], b, a, *body[i + 2 :])


def _needs(second: For, first: For) -> bool:
    """Whether a loop reads what another writes."""
    written = {a.buffer for a in accesses(first.body) if a.writes}
    return any(a.buffer in written for a in accesses(second.body) if not a.writes)


Changes = Iterator[tuple[str, tuple[Statement, ...]]]


def _statements(s: Statement, buffers: dict[str, Buffer]) -> Changes:
    """What a statement may become: others, or none."""
    match s:
        case For(var, _, body, stop):
            for told, new in _bodies(body, buffers):
                yield told, (replace(s, body=new),)
            if var.extent > 1 and stop is None:
                yield "a loop stops early", (replace(s, stop=Index((), var.extent - 1)),)
            elif stop is not None:
                yield "a loop stops early", (replace(s, stop=stop - 1),)
        case Let(_, value) | Set(_, value):
            yield from (((told), (replace(s, value=v),)) for told, v in _values(value, buffers))
        case Accumulate(_, op, value):
            yield from ((told, (replace(s, value=v),)) for told, v in _values(value, buffers))
            yield "an accumulation dropped", ()
            yield f"accumulated by another op than {op}", (replace(s, op=OTHER_OP[op]),)
        case Store(_, index, value, guard):
            yield from ((told, (replace(s, value=v),)) for told, v in _values(value, buffers))
            yield "a store dropped", ()
            yield from ((f"a store: {t}", (replace(s, index=i),)) for t, i in _indices(index))
            if guard is not None:
                yield "a guard dropped", (replace(s, guard=None),)
        case Update(_, index, value):
            yield from ((told, (replace(s, value=v),)) for told, v in _values(value, buffers))
            yield "an update is a store", (Store(s.buffer, index, value),)
            yield "an update dropped", ()
        case Matmul():
            yield from _products(s)
        case Barrier():
            yield "a barrier dropped", ()
        case _:
            pass


def _products(s: Matmul) -> Changes:
    yield "a product dropped", ()
    yield "a product adds or not", (replace(s, adds=not s.adds),)
    for side in ("target", "left", "right"):
        matrix = getattr(s, side)
        yield (
            f"a product's {side} moved",
            (replace(s, **{side: replace(matrix, index=matrix.index + 1)}),),
        )
    deep = s.left.columns.count
    if deep > 1:
        left = replace(s.left, columns=s.left.columns.part(0, deep - 1))
        right = replace(s.right, rows=s.right.rows.part(0, deep - 1))
        yield "a product less deep", (replace(s, left=left, right=right),)


def _indices(index: Index) -> Iterator[tuple[str, Index]]:
    yield "an index one further", index + 1
    yield "an index one back", index - 1
    for i, (atom, factor) in enumerate(index.terms):
        changed = (*index.terms[:i], (atom, factor + 1), *index.terms[i + 1 :])
        yield "a factor of an index", Index(changed, index.offset)
        dropped = (*index.terms[:i], *index.terms[i + 1 :])
        yield "a term of an index dropped", Index(dropped, index.offset)


def _is_same(value: Apply) -> bool:
    """Whether another op would give the same: nothing added, and what differs at ties alone."""
    adds_nothing = any(isinstance(v, Literal) and v.value == 0 for v in value.operands)
    compares = value.op in ("le", "lt") and value.operands[0].dtype.is_float
    return compares or (value.op in ("add", "sub") and adds_nothing)


def _is_of_infinities(value: Apply) -> bool:
    """Whether it asks for infinities or NaN, or chooses by that."""
    first, second = value.operands[0], value.operands[-1]
    if value.op == "where":
        return isinstance(first, Apply) and first.op == "eq" and _is_of_infinities(first)
    is_infinite = isinstance(second, Literal) and isinstance(second.value, float)
    return value.op == "eq" and (first == second or (is_infinite and math.isinf(second.value)))


def _values(value: Value, buffers: dict[str, Buffer]) -> Iterator[tuple[str, Value]]:
    match value:
        case Load(buffer, index, dtype):
            yield from ((f"a load: {t}", replace(value, index=i)) for t, i in _indices(index))
            size = buffers[buffer].size
            for other in buffers.values():
                if other.name != buffer and (other.dtype, other.size) == (dtype, size):
                    yield "a load of another buffer", replace(value, buffer=other.name)
                    break
        case Literal(number, dtype):
            if isinstance(number, (int, float)) and dtype.is_float and abs(number) < 1e30:
                yield "another constant", Literal(number + 1, dtype)
        case Apply(_, operands, _) if _is_of_infinities(value):
            # Generic inputs are finite: only what is taken then can be wrong.
            yield from (
                (told, replace(value, operands=(*operands[:-1], new)))
                for told, new in (_values(operands[-1], buffers) if value.op == "where" else ())
            )
        case Apply(op, operands, _):
            if op in OTHER_OP and not _is_same(value):
                yield f"{op} by another op", replace(value, op=OTHER_OP[op])
            if op in SWAPPED:
                last = len(operands) - 2
                swapped = (*operands[:last], operands[last + 1], operands[last])
                yield f"operands of {op} swapped", replace(value, operands=swapped)
            for i, operand in enumerate(operands):
                for told, new in _values(operand, buffers):
                    changed = (*operands[:i], new, *operands[i + 1 :])
                    yield told, replace(value, operands=changed)
        case Convert(inner):
            yield from ((told, replace(value, value=v)) for told, v in _values(inner, buffers))
        case Within(_, low, high):
            yield "a bound moved", replace(value, low=low + 1)
            yield "a bound moved", replace(value, high=high - 1)
        case Guarded(guard, inner, other, _):
            yield from ((told, replace(value, guard=v)) for told, v in _values(guard, buffers))
            yield from ((told, replace(value, value=v)) for told, v in _values(inner, buffers))
            yield from ((told, replace(value, other=v)) for told, v in _values(other, buffers))
        case _:
            pass
