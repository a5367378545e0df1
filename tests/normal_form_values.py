"""Numbers of a normal form: what its text says, summed and multiplied out for given sizes.

It knows what atoms mean and nothing of how forms are made, so that the two check each other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from treadle.verify.normal_form import NormalForm
from treadle.verify.normal_form.form import Atom, Form, Kind, Monomial
from treadle.verify.normal_form.index import Datum, Division, Index, Letter, Variable

Arrays = Mapping[str, np.ndarray]
Places = dict[Variable, int]
LARGE = 2.0**20
FUNCTIONS: dict[str, Any] = {
    "log": lambda x: math.log(abs(x)) if x else -LARGE,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "floor": np.floor,
    "erf": np.vectorize(math.erf),
    "atan2": np.arctan2,
    "pow": np.power,
    "floordiv": np.floor_divide,
    "mod": np.mod,
}


class UnknownMeaningError(Exception):
    """An atom that stands for a whole op."""


def values_of(form: NormalForm, arrays: Arrays) -> list[np.ndarray]:
    """Every output, element by element."""
    found = []
    for shape, element in zip(form.shapes, form.elements, strict=True):
        sizes = [n.number for n in shape]
        axes = [Variable(f"i{k}", n) for k, n in enumerate(shape)]
        result = np.zeros(sizes)  # type: ignore[arg-type]
        for at in itertools.product(*(range(n or 0) for n in sizes)):
            result[at] = _form(element, dict(zip(axes, at, strict=True)), arrays)
        found.append(result)
    return found


def _form(form: Form, places: Places, arrays: Arrays) -> float:
    return sum((float(c) * _monomial(m, places, arrays) for m, c in form.terms), 0.0)


def _monomial(monomial: Monomial, places: Places, arrays: Arrays) -> float:
    total = 0.0
    for inner in _ranges(monomial.binders, places):
        product = 1.0
        # Flags come first: what they rule out may lie outside an array.
        for atom, e in sorted(monomial.factors, key=lambda f: not f[0].is_flag):
            product *= _power(_atom(atom, inner, arrays), e)
            if product == 0:
                break
        total += product
    return total


def _power(base: float, e: int | Fraction) -> float:
    """A branch that is not taken may have a root of what is negative: any number will do."""
    return base ** int(e) if e.denominator == 1 else abs(base) ** float(e)


def _ranges(binders: tuple[Variable, ...], places: Places) -> Any:
    sizes = [_index(v.bound, places, {}) for v in binders if v.bound is not None]
    for at in itertools.product(*map(range, sizes)):
        yield {**places, **dict(zip(binders, at, strict=True))}


def _index(p: Index, places: Places, arrays: Arrays) -> int:
    return sum(c * math.prod(_letter(x, places, arrays) for x in m) for m, c in p.terms)


def _letter(letter: Letter, places: Places, arrays: Arrays) -> int:
    if isinstance(letter, Variable):
        return places[letter]
    if isinstance(letter, Division):
        parts = divmod(_index(letter.of, places, arrays), _index(letter.by, places, arrays))
        return parts[0 if letter.is_quotient else 1]
    assert isinstance(letter, Datum)
    return int(arrays[letter.leaf][tuple(_index(p, places, arrays) for p in letter.at)])


def _atom(atom: Atom, places: Places, arrays: Arrays) -> float:
    at = [_index(p, places, arrays) for p in atom.indices]
    match atom.kind:
        case Kind.LEAF:
            array = arrays[atom.label]
            is_inside = all(0 <= i < n for i, n in zip(at, array.shape, strict=True))
            # Outside, a leaf may be any number: these two must cancel.
            return float(array[tuple(at)]) if is_inside else math.sin(1 + sum(at) + len(at))
        case Kind.VALUE:
            assert atom.letter is not None
            return float(_letter(atom.letter, places, arrays))
        case Kind.STEP:
            return float(at[0] >= 0)
        case Kind.MEETS:
            return float(at[0] == 0)
        case Kind.INFINITY:
            return LARGE  # so that it cancels against itself
        case Kind.ROOT:
            return {"e": math.e, "pi": math.pi}.get(atom.label) or float(atom.label)
        case Kind.LARGEST:
            return max(_form(atom.forms[0], p, arrays) for p in _ranges(atom.binders, places))
        case Kind.WHOLE:
            raise UnknownMeaningError(atom.label)
    operands = [_form(f, places, arrays) for f in atom.forms]
    match atom.kind:
        case Kind.EXP:
            return math.exp(operands[0])
        case Kind.POSITIVE:
            return float(operands[0] > 0)
        case Kind.VANISHES:
            return float(operands[0] == 0)
        case Kind.GROUP:
            return operands[0]
        case Kind.MAXIMUM:
            return max(operands)
    if atom.label not in FUNCTIONS:
        raise UnknownMeaningError(atom.label)
    return float(FUNCTIONS[atom.label](*operands))
