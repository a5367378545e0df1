"""Sums and maxima over an index, and forms with indices for variables."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from treadle.verify.normal_form import functions as fn
from treadle.verify.normal_form import index as ix
from treadle.verify.normal_form import ranges
from treadle.verify.normal_form.algebra import (
    ONE,
    add,
    as_index,
    collected,
    content,
    is_positive_atom,
    multiply,
    of_atom,
    of_factors,
    of_index,
    power,
    scale,
    subtract,
)
from treadle.verify.normal_form.form import (
    Atom,
    Coefficient,
    Factor,
    Form,
    Kind,
    Monomial,
    as_factors,
    as_form,
    bind,
    bound_atom,
    renamed_atom,
)
from treadle.verify.normal_form.functions import Assumption, Work, meets, step
from treadle.verify.normal_form.index import Division, Index, Variable
from treadle.verify.normal_form.ranges import is_nonnegative

Values = Mapping[Variable, Index]
_Rest = tuple[tuple[Variable, ...], tuple[Factor, ...]]


def replace(work: Work, form: Form, values: Values) -> Form:
    """The form with indices for variables, simplified again."""
    if form.variables.isdisjoint(values):
        return form
    found: list[Form] = []
    for monomial, c in form.terms:
        if monomial.variables.isdisjoint(values):
            found.append(as_form({monomial: c}))
            continue
        inner = {}
        for v in monomial.binders:
            inner[v] = work.fresh(_bound_of(v))
        moved = {**values, **{v: ix.of_letter(w) for v, w in inner.items()}}
        term = scale(ONE, c)
        for atom, e in monomial.factors:
            term = multiply(term, power(_replaced(work, atom, moved), e))
        for w in inner.values():
            term = total(work, w, term)
        found.append(term)
    return add(*found)


def _bound_of(variable: Variable) -> Index:
    assert variable.bound is not None
    return variable.bound


def _replaced(work: Work, atom: Atom, values: Values) -> Form:
    if atom.variables.isdisjoint(values):
        return of_atom(atom)
    indices = tuple(ranges.replaced(p, values) for p in atom.indices)
    match atom.kind:
        case Kind.VALUE:
            assert atom.letter is not None
            return of_index(ranges.replaced(ix.of_letter(atom.letter), values))
        case Kind.STEP:
            return step(indices[0])
        case Kind.MEETS:
            return meets(indices[0])
        case Kind.LEAF:
            return of_atom(Atom(atom.kind, atom.label, indices, is_flag=atom.is_flag))
    if atom.binders:
        inner = {v: ix.of_letter(work.fresh(_bound_of(v))) for v in atom.binders}
        forms = tuple(replace(work, f, {**values, **inner}) for f in atom.forms)
        binders = [p.terms[0][0][0] for p in inner.values()]
        names = [v for v in binders if isinstance(v, Variable)]
        if atom.kind is Kind.LARGEST:
            return largest(work, names, forms[0])
        return of_atom(bound_atom(atom.kind, names, forms, atom.label, indices))
    forms = tuple(replace(work, f, values) for f in atom.forms)
    return _of_forms(work, atom, forms)


def _of_forms(work: Work, atom: Atom, forms: tuple[Form, ...]) -> Form:
    match atom.kind:
        case Kind.EXP:
            return fn.exp(work, forms[0])
        case Kind.POSITIVE:
            return fn.is_positive_flag(work, forms[0])
        case Kind.VANISHES:
            return fn.vanishes_flag(work, forms[0])
        case Kind.GROUP:
            return forms[0]
        case Kind.MAXIMUM:
            found = forms[0]
            for form in forms[1:]:
                found = fn.maximum(work, found, form)
            return found
    if atom.label == "log":
        return fn.log(forms[0])
    return fn.apply(atom.label, *forms)


# Sums


def total(work: Work, variable: Variable, form: Form) -> Form:
    """The sum over a variable. It is bound afterwards."""
    found: list[Form] = []
    for (binders, factors), steps in _by_steps(variable, form).items():
        for low, high, flags in _pieces(variable, steps):
            if low is None:
                for extra, c in flags.terms:
                    every = (*factors, *extra.factors)
                    found.append(scale(_sum_of(work, variable, binders, every), c))
            elif low == ix.ZERO and high == variable.bound:
                c = flags.terms[0][1]
                found.append(scale(_sum_of(work, variable, binders, factors), c))
            else:
                names, inner = _opened(work, binders, factors)
                short = work.fresh(high - low)
                inner = replace(work, inner, {variable: ix.of_letter(short) + low})
                part = _totals(work, names, total(work, short, inner))
                found.append(multiply(flags, part))
    return add(*found)


def _opened(
    work: Work, binders: tuple[Variable, ...], factors: tuple[Factor, ...]
) -> tuple[list[Variable], Form]:
    """A product without its binders, which get names that no canonical binder has."""
    names = {v: work.fresh(_bound_of(v)) for v in binders}
    moved = as_factors({renamed_atom(a, names): e for a, e in factors})
    return list(names.values()), as_form({Monomial((), moved): 1})


def _totals(work: Work, variables: Iterable[Variable], form: Form) -> Form:
    for variable in variables:
        form = total(work, variable, form)
    return form


_Steps = list[tuple[tuple[Atom, ...], Coefficient]]


def _as_flags(steps: _Steps) -> Form:
    return as_form({Monomial((), as_factors(dict.fromkeys(flags, 1))): c for flags, c in steps})


def _by_steps(variable: Variable, form: Form) -> dict[_Rest, _Steps]:
    """Terms that differ in steps along the variable only, with these steps."""
    found: dict[_Rest, _Steps] = {}
    for monomial, c in form.terms:
        steps = tuple(a for a, _ in monomial.factors if _threshold(variable, a) is not None)
        rest = tuple((a, e) for a, e in monomial.factors if a not in steps)
        found.setdefault((monomial.binders, rest), []).append((steps, c))
    return found


def _threshold(variable: Variable, atom: Atom) -> Index | None:
    """The a of [variable ≥ a], where a is made of sizes."""
    if atom.kind is not Kind.STEP:
        return None
    below = ix.of_letter(variable) - atom.indices[0]
    return below if below.is_of_sizes else None


_Piece = tuple[Index | None, Index, Form]  # from, to, and what the terms are times there


def _pieces(variable: Variable, steps: _Steps) -> Iterable[_Piece]:
    """Intervals on which the sum of steps is a number; one without ends if they have no order."""
    size = _bound_of(variable)
    if all(not flags for flags, _ in steps):
        return [(ix.ZERO, size, _as_flags([((), sum(c for _, c in steps))]))]
    jumps: dict[Index, Coefficient] = {}
    for flags, c in steps:
        if len(flags) > 1:
            return [(None, size, _as_flags(steps))]
        start = _threshold(variable, flags[0]) if flags else ix.ZERO
        assert start is not None
        jumps[start] = jumps.get(start, 0) + c
    ends = _ascending([*jumps, *([] if ix.ZERO in jumps else [ix.ZERO]), size])
    if ends is None or ends[0] != ix.ZERO or ends[-1] != size:
        return [(None, size, _as_flags(steps))]
    found: list[_Piece] = []
    height: Coefficient = 0
    for low, high in itertools.pairwise(ends):
        height = height + jumps.get(low, 0)
        if height and low != high:
            found.append((low, high, scale(ONE, height)))
    return found


def _ascending(ends: list[Index]) -> list[Index] | None:
    """In order, if that is the same for all sizes."""
    found: list[Index] = []
    for end in ends:
        place = 0
        for other in found:
            if is_nonnegative(end - other):
                place += 1
            elif not is_nonnegative(other - end):
                return None
        found.insert(place, end)
    return found if all(is_nonnegative(b - a) for a, b in itertools.pairwise(found)) else None


def _sum_of(
    work: Work, variable: Variable, binders: tuple[Variable, ...], factors: tuple[Factor, ...]
) -> Form:
    """The sum of one product."""
    size = _bound_of(variable)
    if not any(variable in a.variables for a, _ in factors):
        return multiply(of_index(size), as_form({bind(binders, factors): 1}))
    names, inner = _opened(work, binders, factors)
    known = size.number
    work.known_sizes.update([] if known is None else [known])
    if known is not None and known <= work.unrolled:
        terms = [replace(work, inner, {variable: ix.number(i)}) for i in range(known)]
        return _totals(work, names, add(*terms))
    chosen = _chosen(work, variable, inner.terms[0][0].factors)
    if chosen is not None:
        return _totals(work, names, chosen)
    parts = _split(work, variable, inner)
    if parts is not None:
        high, low, value = parts
        moved = replace(work, inner, {variable: value})
        return _totals(work, [low, high, *names], moved)
    merged = _merged(work, [variable, *names], inner)
    if merged is not None:
        return _totals(work, *merged)
    return as_form(dict(collected((*binders, variable), dict(factors))))


def _chosen(work: Work, variable: Variable, factors: tuple[Factor, ...]) -> Form | None:
    """Σ [v = e] f(v) is f(e) where 0 ≤ e < size."""
    for atom, _ in factors:
        if atom.kind is not Kind.MEETS or variable not in atom.variables:
            continue
        p = atom.indices[0]
        c = dict(p.terms).get((variable,), 0)
        value = ix.of_letter(variable) - p.times(c)
        if abs(c) != 1 or variable in value.variables:
            continue
        rest = as_form({Monomial((), tuple(f for f in factors if f[0] is not atom)): 1})
        inside = _in_range(work, value, _bound_of(variable))
        return multiply(inside, replace(work, rest, {variable: value}))
    return None


def _in_range(work: Work, value: Index, size: Index) -> Form:
    is_data = any(isinstance(x, ix.Datum) for m, _ in value.terms for x in m)
    if is_data and work.assume(Assumption.INDICES_IN_RANGE):
        return ONE
    return multiply(step(value), step(size - ix.ONE - value))


def _split(work: Work, variable: Variable, form: Form) -> tuple[Variable, Variable, Index] | None:
    """A variable that is divided by a divisor of its size, as a high and a low one."""
    size = _bound_of(variable)
    for divisor in _divisors(variable, form):
        count, left = ranges.divided(size, divisor)
        if left != ix.ZERO or divisor == size:
            continue
        high, low = work.fresh(count), work.fresh(divisor)
        return high, low, ix.of_letter(high) * divisor + ix.of_letter(low)
    return None


def _merged(
    work: Work, variables: list[Variable], form: Form
) -> tuple[list[Variable], Form] | None:
    """Two variables that only stand as high · size + low, as one."""
    first = variables[0]
    for other in variables[1:]:
        for high, low in ((first, other), (other, first)):
            size = _bound_of(low)
            one = work.fresh(_bound_of(high) * size)
            found = _joined_factors(form, high, low, one)
            if found is not None:
                return [one, *(v for v in variables if v not in (high, low))], found
    return None


def _joined_factors(form: Form, high: Variable, low: Variable, one: Variable) -> Form | None:
    factors: dict[Atom, Coefficient] = {}
    for atom, e in form.terms[0][0].factors:
        if atom.variables.isdisjoint((high, low)):
            factors[atom] = e
            continue
        indices = [_joined_index(p, high, low, one) for p in atom.indices]
        if atom.forms or atom.letter is not None or None in indices:
            return None
        moved = tuple(p for p in indices if p is not None)
        factors[Atom(atom.kind, atom.label, moved, is_flag=atom.is_flag)] = e
    return as_form({Monomial((), as_factors(factors)): 1})


def _joined_index(p: Index, high: Variable, low: Variable, one: Variable) -> Index | None:
    """The index with one variable for high · size + low, if it has just that."""
    if p.variables.isdisjoint((high, low)):
        return p
    of_high, of_low, rest = ix.ZERO, ix.ZERO, ix.ZERO
    for letters, c in p.terms:
        others = [x for x in letters if x not in (high, low)]
        moved = [_joined_letter(x, high, low, one) for x in others]
        if None in moved or len(letters) - len(others) > 1:
            return None
        term = ix.product([ix.number(c), *(ix.of_letter(x) for x in moved if x is not None)])
        if high in letters:
            of_high = of_high + term
        elif low in letters:
            of_low = of_low + term
        else:
            rest = rest + term
    if of_high != of_low * _bound_of(low):
        return None
    return rest + of_low * ix.of_letter(one)


def _joined_letter(
    letter: ix.Letter, high: Variable, low: Variable, one: Variable
) -> ix.Letter | None:
    if letter.variables.isdisjoint((high, low)):
        return letter
    if not isinstance(letter, ix.Datum):
        return None
    at = [_joined_index(p, high, low, one) for p in letter.at]
    return None if None in at else ix.Datum(letter.leaf, tuple(p for p in at if p is not None))


def _divisors(variable: Variable, form: Form) -> list[Index]:
    """By what the variable itself is divided, in order of how large it looks."""
    found: dict[Index, None] = {}

    def look(p: Index) -> None:
        for letters, _ in p.terms:
            for letter in letters:
                if isinstance(letter, Division):
                    look(letter.of)
                    alone = dict(letter.of.terms).get((variable,))
                    if alone == 1 and letter.by.is_of_sizes:
                        found[letter.by] = None
                elif isinstance(letter, ix.Datum):
                    for at in letter.at:
                        look(at)

    def visit(f: Form) -> None:
        for monomial, _ in f.terms:
            for atom, _ in monomial.factors:
                if variable in atom.variables:
                    for p in atom.indices:
                        look(p)
                    if atom.letter is not None:
                        look(ix.of_letter(atom.letter))
                    for inner in atom.forms:
                        visit(inner)

    visit(form)
    return sorted(found, key=lambda p: (len(p.terms[0][0]), abs(p.number or 0), p.key))


# Maxima


def largest(work: Work, binders: list[Variable], form: Form) -> Form:
    """The maximum over variables.

    What is added or multiplied without depending on them stands outside, and so do increasing
    functions.
    """
    used = [v for v in binders if v in form.variables]
    if not used:
        return form
    for v in used:
        size = _bound_of(v).number
        work.known_sizes.update([] if size is None else [size])
        if size is not None and size <= work.unrolled:
            rest = [w for w in used if w is not v]
            parts = [replace(work, form, {v: ix.number(i)}) for i in range(size)]
            found = largest(work, rest, parts[0])
            for part in parts[1:]:
                found = fn.maximum(work, found, largest(work, rest, part))
            return found
        parts_of = _split(work, v, form)
        if parts_of is not None:
            high, low, value = parts_of
            others = [w for w in used if w is not v]
            return largest(work, [*others, high, low], replace(work, form, {v: value}))
    return _largest(work, used, form)


def _largest(work: Work, binders: list[Variable], form: Form) -> Form:
    free = (t for t in form.terms if t[0].variables.isdisjoint(binders))
    # An infinity that stood outside would cancel against another one, or what stands for it.
    outside = as_form({m: c for m, c in free if not fn.is_infinite(m, c)})
    inner = subtract(form, outside)
    lead, factors, rest = content(inner)
    common = {
        a: e for a, e in factors.items() if is_positive_atom(a) and a.variables.isdisjoint(binders)
    }
    pulled = scale(of_factors(common), lead)
    bound = {a: e for a, e in factors.items() if a not in common}
    body = multiply(rest, of_factors(bound))
    if len(body.terms) == 1 and not body.terms[0][0].binders and body.terms[0][1] > 0:
        only = body.terms[0][0].factors
        if all(a.kind is Kind.EXP for a, _ in only):
            exponent = add(*(scale(a.forms[0], e) for a, e in only))
            return add(outside, multiply(pulled, fn.exp(work, largest(work, binders, exponent))))
    atom = body.atom
    if atom is not None and atom.kind is Kind.LARGEST:
        deeper = {v: work.fresh(_bound_of(v)) for v in atom.binders}
        values = {v: ix.of_letter(w) for v, w in deeper.items()}
        opened = replace(work, atom.forms[0], values)
        return add(outside, multiply(pulled, largest(work, [*binders, *deeper.values()], opened)))
    found = of_atom(bound_atom(Kind.LARGEST, binders, (body,)))
    return add(outside, multiply(pulled, found))


def element(work: Work, form: Form) -> Index | None:
    """A form that is used as an index."""
    return as_index(form, work.integers)
