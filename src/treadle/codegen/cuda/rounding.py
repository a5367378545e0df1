"""Where narrow floats must be rounded after every op, and where that may be left out.

What only smooth arithmetic uses may stay as exact as it is computed. But a comparison must see the
same bits wherever a value is computed: if a program compares narrow floats that it computes, all of
its kernels round after every op.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from treadle.codegen.cuda.scalars import SMOOTH
from treadle.kernel.access import changed_in
from treadle.kernel.nodes import (
    Accumulate,
    Apply,
    Convert,
    For,
    Guarded,
    Kernel,
    Let,
    Local,
    Set,
    Statement,
    Store,
    Update,
    Value,
)


def may_be_loose(kernels: Iterable[Kernel]) -> bool:
    """Whether no kernel of a program compares, orders or cuts off narrow floats it computes."""
    return not any(_compares(k.body, {}) for k in kernels)


def _compares(body: Sequence[Statement], known: dict[str, Value]) -> bool:
    for s in body:
        match s:
            case For(_, _, inner):
                if _compares(inner, known):
                    return True
                continue
            case Let(local, value) | Set(local, value):
                known[local] = value
            case Accumulate(_, op, value):
                if op in ("max", "min") and _is_computed(value, known):
                    return True
            case Store(_, _, value) | Update(_, _, value):
                pass
            case _:
                continue
        if _has_comparison(value, known):
            return True
    return False


def _has_comparison(value: Value, known: dict[str, Value]) -> bool:
    match value:
        case Apply("where", (condition, a, b)):
            return any(_has_comparison(v, known) for v in (condition, a, b))
        case Apply(op, operands):
            is_smooth = op in SMOOTH
            if not is_smooth and any(_is_computed(o, known) for o in operands):
                return True
            return any(_has_comparison(o, known) for o in operands)
        case Convert(inner, dtype):
            cuts = inner.dtype.is_float and not dtype.is_float
            return (cuts and _is_computed(inner, known)) or _has_comparison(inner, known)
        case Guarded(guard, inner, other):
            return any(_has_comparison(v, known) for v in (guard, inner, other))
        case _:
            return False


def _is_computed(value: Value, known: dict[str, Value]) -> bool:
    """Whether a value comes from arithmetic on narrow floats in this kernel."""
    match value:
        case Local(name):
            found = known.get(name)
            return found is not None and found is not value and _is_computed(found, known)
        case Apply(_, operands, dtype):
            return dtype.is_narrow or any(_is_computed(o, known) for o in operands)
        case Convert(inner, dtype):
            is_rounded = dtype.is_narrow and not isinstance(inner, Local)
            return is_rounded or _is_computed(inner, known)
        case Guarded(_, inner, other):
            return _is_computed(inner, known) or _is_computed(other, known)
        case _:
            return False


def loose_locals(body: Sequence[Statement]) -> set[str]:
    """Locals of narrow floats that only smooth arithmetic and stores use: they stay unrounded."""
    named: set[str] = set()
    strict = changed_in(body)

    def look(value: Value, loose: bool) -> None:
        match value:
            case Local(name):
                if not loose:
                    strict.add(name)
            case Apply(op, operands):
                for i, o in enumerate(operands):
                    look(o, op in SMOOTH or (loose and op == "where" and i > 0))
            case Convert(inner):
                look(inner, False)
            case Guarded(guard, inner, other):
                for part in (guard, inner, other):
                    look(part, False)
            case _:
                pass

    def walk(statements: Sequence[Statement]) -> None:
        for s in statements:
            match s:
                case For(_, _, inner):
                    walk(inner)
                case Let(local, value):
                    if value.dtype.is_narrow:
                        named.add(local)
                    # Whether this one is loose is not known yet: its parts must be for both.
                    look(value, False)
                case Store(_, _, value):
                    look(value, True)
                case Set(_, value) | Accumulate(_, _, value) | Update(_, _, value):
                    look(value, False)
                case _:
                    pass

    walk(body)
    return named - strict
