"""Where narrow floats must be rounded after every op, and where excess precision is allowed.

What only smooth arithmetic uses may stay as exact as it is computed. But a comparison must see the
same bits wherever a value is computed: if a program compares narrow floats that it computes, all of
its kernels round after every op.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from treadle.kernel.access import changed_in
from treadle.kernel.arithmetic import SMOOTH
from treadle.kernel.nodes import (
    Accumulate,
    Apply,
    Convert,
    Kernel,
    Let,
    Local,
    Set,
    Statement,
    Store,
    Value,
)
from treadle.kernel.traverse import operands_of, subvalues, values_of, walk


def may_exceed(kernels: Iterable[Kernel]) -> bool:
    """Whether no kernel of a program compares, orders or cuts off narrow floats it computes."""
    return not any(_compares(k.body, _computed_locals(k.body)) for k in kernels)


def _computed_locals(body: Sequence[Statement]) -> set[str]:
    """Locals from arithmetic on narrow floats, also by way of a loop's last iteration."""
    found: set[str] = set()
    named = [(s.local, s.value) for s in walk(body) if isinstance(s, (Let, Set))]
    known = -1
    while len(found) > known:  # twice, but for locals that are set further down
        known = len(found)
        found |= {name for name, value in named if _is_computed(value, found)}
    return found


def _compares(body: Sequence[Statement], computed: Collection[str]) -> bool:
    for s in walk(body):
        if isinstance(s, Accumulate) and s.op in ("max", "min") and _is_computed(s.value, computed):
            return True
        if any(_cuts(v, computed) for value in values_of(s) for v in subvalues(value)):
            return True
    return False


def _cuts(value: Value, computed: Collection[str]) -> bool:
    """Whether a small change of what a value is computed from may change it much."""
    match value:
        case Apply(op, operands):
            is_smooth = op == "where" or op in SMOOTH
            return not is_smooth and any(_is_computed(o, computed) for o in operands)
        case Convert(inner, dtype):
            cuts = inner.dtype.is_float and not dtype.is_float
            return cuts and _is_computed(inner, computed)
        case _:
            return False


def _is_computed(value: Value, computed: Collection[str]) -> bool:
    """Whether a value comes from arithmetic on narrow floats in this kernel.

    A condition that does is compared itself.
    """
    for part in subvalues(value):
        match part:
            case Local(name):
                is_narrow = name in computed
            case Convert(inner, dtype):
                is_narrow = dtype.is_narrow and not isinstance(inner, Local)
            case _:
                is_narrow = isinstance(part, Apply) and part.dtype.is_narrow
        if is_narrow:
            return True
    return False


def unrounded_locals(body: Sequence[Statement]) -> frozenset[str]:
    """Locals of narrow floats that only smooth arithmetic and stores use."""
    every = list(walk(body))
    named = {s.local for s in every if isinstance(s, Let) and s.value.dtype.is_narrow}
    strict = changed_in(body)
    for s in every:
        # Whether a local is unrounded is not known yet: what it is computed from must be for both.
        for value in values_of(s):
            strict |= _strict_in(value, isinstance(s, Store))
    return frozenset(named - strict)


def _strict_in(value: Value, may_exceed: bool) -> set[str]:
    """Locals that a value needs rounded."""
    match value:
        case Local(name):
            return set() if may_exceed else {name}
        case Apply(op, operands):
            is_chosen = may_exceed and op == "where"
            allowed = (op in SMOOTH or (is_chosen and i > 0) for i in range(len(operands)))
            parts = map(_strict_in, operands, allowed)
            return set().union(*parts)
        case _:
            return set().union(*(_strict_in(o, False) for o in operands_of(value)))
