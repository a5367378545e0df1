"""Where narrow floats must be rounded after every op, and where that may be left out.

What only smooth arithmetic uses may stay as exact as it is computed. But a comparison must see the
same bits wherever a value is computed: if a program compares narrow floats that it computes, all of
its kernels round after every op.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

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
    return not any(_compares(k.body, _computed_locals(k.body)) for k in kernels)


def _computed_locals(body: Sequence[Statement]) -> set[str]:
    """Locals that come from arithmetic on narrow floats, also by way of a loop's last turn."""
    found: set[str] = set()
    named, known = list(_named(body)), -1
    while len(found) > known:  # twice, but for locals that are set further down
        known = len(found)
        for name, value in named:
            if _is_computed(value, found):
                found.add(name)
    return found


def _named(body: Sequence[Statement]) -> Iterator[tuple[str, Value]]:
    for s in body:
        match s:
            case For(_, _, inner):
                yield from _named(inner)
            case Let(local, value) | Set(local, value):
                yield local, value


def _compares(body: Sequence[Statement], computed: Collection[str]) -> bool:
    for s in body:
        match s:
            case For(_, _, inner):
                if _compares(inner, computed):
                    return True
                continue
            case Accumulate(_, op, value):
                if op in ("max", "min") and _is_computed(value, computed):
                    return True
            case Let(_, value) | Set(_, value) | Store(_, _, value) | Update(_, _, value):
                pass
            case _:
                continue
        if _has_comparison(value, computed):
            return True
    return False


def _has_comparison(value: Value, computed: Collection[str]) -> bool:
    match value:
        case Apply("where", (condition, a, b)):
            return any(_has_comparison(v, computed) for v in (condition, a, b))
        case Apply(op, operands):
            is_smooth = op in SMOOTH
            if not is_smooth and any(_is_computed(o, computed) for o in operands):
                return True
            return any(_has_comparison(o, computed) for o in operands)
        case Convert(inner, dtype):
            cuts = inner.dtype.is_float and not dtype.is_float
            return (cuts and _is_computed(inner, computed)) or _has_comparison(inner, computed)
        case Guarded(guard, inner, other):
            return any(_has_comparison(v, computed) for v in (guard, inner, other))
        case _:
            return False


def _is_computed(value: Value, computed: Collection[str]) -> bool:
    """Whether a value comes from arithmetic on narrow floats in this kernel."""
    match value:
        case Local(name):
            return name in computed
        case Apply(_, operands, dtype):
            return dtype.is_narrow or any(_is_computed(o, computed) for o in operands)
        case Convert(inner, dtype):
            is_rounded = dtype.is_narrow and not isinstance(inner, Local)
            return is_rounded or _is_computed(inner, computed)
        case Guarded(_, inner, other):
            return _is_computed(inner, computed) or _is_computed(other, computed)
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
