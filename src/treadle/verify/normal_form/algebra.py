"""Sums, products and powers of forms."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from math import isqrt

from treadle.verify.normal_form.form import (
    UNIT,
    Atom,
    BudgetError,
    Coefficient,
    Form,
    Kind,
    Monomial,
    as_factors,
    as_form,
    bind,
    renamed_atom,
)
from treadle.verify.normal_form.index import Datum, Index, Variable, of_letter
from treadle.verify.normal_form.index import number as index_number
from treadle.verify.normal_form.ranges import is_nonnegative

MOST_TERMS = 2048  # of a form: what grows beyond is not decided
_MOST_POWER = 8  # whole powers that are multiplied out
_MOST_FACTORED = 10**6  # numbers whose roots are taken apart


ZERO = Form(())
ONE = Form(((UNIT, 1),))


def constant(value: Coefficient) -> Form:
    return as_form({UNIT: value})


def of_factors(exponents: dict[Atom, Coefficient]) -> Form:
    """A product of powers of atoms."""
    return as_form(dict(collected((), dict(exponents))))


def of_atom(atom: Atom, exponent: Coefficient = 1) -> Form:
    return Form(((Monomial((), ((atom, exponent),)), 1),))


def add(*forms: Form) -> Form:
    given = [f for f in forms if f.terms]
    if len(given) < 2:
        return given[0] if given else ZERO
    found = dict(given[0].terms)
    for form in given[1:]:
        for monomial, c in form.terms:
            found[monomial] = found.get(monomial, 0) + c
    return _bounded(as_form(found))


def scale(form: Form, factor: Coefficient) -> Form:
    if factor == 1:
        return form
    return as_form({m: c * factor for m, c in form.terms})


def negate(form: Form) -> Form:
    return scale(form, -1)


def subtract(x: Form, y: Form) -> Form:
    return add(x, negate(y))


def _bounded(form: Form) -> Form:
    if len(form.terms) > MOST_TERMS:
        raise BudgetError(f"a sum of {len(form.terms)} products")
    return form


# Products


def multiply(x: Form, y: Form) -> Form:
    if x == ONE or not y.terms:
        return y
    if y == ONE or not x.terms:
        return x
    if len(x.terms) * len(y.terms) > 4 * MOST_TERMS:
        raise BudgetError(f"a product of sums of {len(x.terms)} and {len(y.terms)} products")
    found: dict[Monomial, Coefficient] = {}
    for m, c in x.terms:
        for n, d in y.terms:
            for monomial, e in _product(m, n):
                found[monomial] = found.get(monomial, 0) + c * d * e
    return _bounded(as_form(found))


def _product(m: Monomial, n: Monomial) -> Iterable[tuple[Monomial, Coefficient]]:
    if not m.factors and not m.binders:
        return ((n, 1),)
    if not n.factors and not n.binders:
        return ((m, 1),)
    binders, factors = n.binders, n.factors
    if m.binders and n.binders:
        apart = {v: Variable(v.name + "'", v.bound, v.rank) for v in n.binders}
        binders = tuple(apart.values())
        factors = tuple((renamed_atom(a, apart), e) for a, e in n.factors)
    exponents: dict[Atom, Coefficient] = dict(m.factors)
    for atom, e in factors:
        exponents[atom] = exponents.get(atom, 0) + e
    return collected((*m.binders, *binders), exponents)


def collected(
    binders: tuple[Variable, ...], exponents: dict[Atom, Coefficient]
) -> Iterable[tuple[Monomial, Coefficient]]:
    """Factors as terms of a form: flags are idempotent, whole powers of sums are multiplied out."""
    flags = [a for a, e in exponents.items() if a.is_flag and e]
    if flags:
        for flag in flags:
            exponents[flag] = 1
        if not _reduce_flags(exponents, [a for a in flags if a.kind is not Kind.LEAF]):
            return ()
    c: Coefficient = 1
    for atom in [a for a in exponents if a.kind is Kind.ROOT]:
        if atom.label.isdigit():
            whole = exponents[atom].__floor__()
            c = c * Fraction(int(atom.label)) ** whole
            exponents[atom] -= whole
    group = next((a for a, e in exponents.items() if a.kind is Kind.GROUP and _is_whole(e)), None)
    if group is not None:
        return scale(_multiplied_out(binders, exponents, group), c).terms
    found = as_form({_bound(binders, exponents): c})
    return _without_vanishing(found).terms


def _bound(binders: tuple[Variable, ...], exponents: dict[Atom, Coefficient]) -> Monomial:
    return bind(binders, as_factors(exponents))


def _is_whole(e: Coefficient) -> bool:
    return 1 <= e <= _MOST_POWER and e.denominator == 1


def _multiplied_out(
    binders: tuple[Variable, ...], exponents: dict[Atom, Coefficient], group: Atom
) -> Form:
    """The product with a whole power of a sum in it, the sum taken apart."""
    apart = {v: Variable(v.name + "*", v.bound, v.rank) for v in binders}
    rest = {renamed_atom(a, apart): e for a, e in exponents.items() if a is not group}
    opened = _whole_power(renamed_atom(group, apart).forms[0], int(exponents[group]))
    inner = multiply(as_form({Monomial((), as_factors(rest)): 1}), opened)
    return under(tuple(apart.values()), inner)


def under(binders: tuple[Variable, ...], form: Form) -> Form:
    """The form under binders, whose names no canonical binder has."""
    if not binders:
        return form
    found: dict[Monomial, Coefficient] = {}
    for monomial, c in form.terms:
        for term, d in collected((*binders, *monomial.binders), dict(monomial.factors)):
            found[term] = found.get(term, 0) + c * d
    return as_form(found)


def _reduce_flags(exponents: dict[Atom, Coefficient], flags: list[Atom]) -> bool:
    """Drops flags that others imply; False if they exclude each other."""
    for a in flags:
        for b in flags:
            if a is b or not exponents.get(a) or not exponents.get(b):
                continue
            if a.kind is b.kind is Kind.STEP and is_nonnegative(a.indices[0] - b.indices[0]):
                exponents[a] = 0
            elif a.kind is Kind.STEP and b.kind is Kind.MEETS:
                known = _step_where_zero(a.indices[0], b.indices[0])
                if known is False:
                    return False
                if known:
                    exponents[a] = 0
            elif _exclude(a, b):
                return False
    return True


def _exclude(a: Atom, b: Atom) -> bool:
    """Whether two flags are never both 1."""
    if a.kind is Kind.POSITIVE and b.kind is Kind.VANISHES:
        return a.forms == b.forms
    return a.kind is b.kind is Kind.MEETS and _are_apart(a.indices[0], b.indices[0])


def _step_where_zero(p: Index, zero: Index) -> bool | None:
    """Whether p ≥ 0, if the other index is 0 and that settles it."""
    for value in (p - zero, p + zero):
        if value.is_of_sizes:
            if is_nonnegative(value):
                return True
            if is_nonnegative(index_number(-1) - value):
                return False
    return None


def _are_apart(p: Index, q: Index) -> bool:
    """Whether two indices cannot both be 0."""
    gap = p - q
    low, high = is_nonnegative(gap - index_number(1)), is_nonnegative(index_number(-1) - gap)
    return gap.is_of_sizes and (low or high)


def _without_vanishing(form: Form) -> Form:
    """[d = 0] t = [d = 0] (t − d), where t is a term of d: what is 0 stands in for it."""
    for _ in range(8):
        for monomial, c in form.terms:
            replaced = _where_zero(monomial)
            if replaced is not None:
                rest = Form(tuple(t for t in form.terms if t[0] is not monomial))
                form = add(rest, scale(replaced, c))
                break
        else:
            return form
    return form


def _where_zero(monomial: Monomial) -> Form | None:
    exponents = dict(monomial.factors)
    for atom in exponents:
        if atom.kind is not Kind.VANISHES:
            continue
        (first, lead), *others = atom.forms[0].terms
        if first.binders or not first.factors:
            continue
        if all(exponents.get(a, 0) >= e > 0 for a, e in first.factors):
            for a, e in first.factors:
                exponents[a] = exponents[a] - e
            rest = as_form({_bound(monomial.binders, exponents): 1})
            others_form = Form(tuple(others))
            return multiply(rest, scale(others_form, Fraction(-1) / lead))
    return None


# Powers


def is_positive_atom(atom: Atom) -> bool:
    """Above 0 wherever it is defined."""
    if atom.kind in (Kind.EXP, Kind.ROOT):
        return True
    if atom.kind is Kind.VALUE:
        return isinstance(atom.letter, Variable) and atom.letter.bound is None
    return atom.kind is Kind.GROUP and is_positive(atom.forms[0])


def is_positive(form: Form) -> bool:
    """A sum of positive products, at least one of which is no square that may vanish."""
    if not form.terms:
        return False
    sure = False
    for monomial, c in form.terms:
        if c < 0:
            return False
        for atom, e in monomial.factors:
            if not (is_positive_atom(atom) or atom.is_flag or _is_even(e)):
                return False
        sure = sure or all(is_positive_atom(a) for a, _ in monomial.factors)
    return sure


def _is_even(e: Coefficient) -> bool:
    return e.denominator == 1 and e.numerator % 2 == 0


def content(form: Form) -> tuple[Coefficient, dict[Atom, Coefficient], Form]:
    """A number, common factors and what is left: form = number · factors · rest.

    A factor's exponent is the least of all terms, so that the rest has no negative ones. The
    number makes the first term's coefficient ±1; its sign stays with the rest.
    """
    least: dict[Atom, Coefficient] = {}
    for position, (monomial, _) in enumerate(form.terms):
        own = {a: e for a, e in monomial.factors if not monomial.bound(a)}
        for atom in {**least, **own}:
            before = least.get(atom, 0) if position else own.get(atom, 0)
            least[atom] = min(before, own.get(atom, 0))
    least = {a: e for a, e in least.items() if e and not a.is_flag}
    lead = _size(form.terms[0][1])
    if not least:
        return lead, {}, scale(form, Fraction(1) / lead)
    rest = _without_factors(form, least)
    if not rest.terms:
        return 1, {}, rest
    lead = _size(rest.terms[0][1])
    return lead, least, scale(rest, Fraction(1) / lead)


def _size(c: Coefficient) -> Coefficient:
    return c if c > 0 else -c


def _without_factors(form: Form, factors: dict[Atom, Coefficient]) -> Form:
    """Term by term, so that a group meets its own inverse before it is multiplied out."""
    found: dict[Monomial, Coefficient] = {}
    for monomial, c in form.terms:
        exponents = dict(monomial.factors)
        for atom, e in factors.items():
            exponents[atom] = exponents.get(atom, 0) - e
        for term, d in collected(monomial.binders, exponents):
            found[term] = found.get(term, 0) + c * d
    return as_form(found)


def power(form: Form, exponent: Coefficient) -> Form:
    """The form to a power; roots are those of numbers that are not negative."""
    if exponent == 1 or form == ONE:
        return form
    if exponent == 0:
        return ONE
    if not form.terms:
        return ZERO if exponent > 0 else of_atom(Atom(Kind.APPLY, "undefined"))
    atom = form.atom
    if atom is not None and atom.kind is not Kind.GROUP:
        return form if atom.is_flag and exponent > 0 else of_atom(atom, exponent)
    if _is_whole(exponent) and len(form.terms) > 1:
        return _whole_power(form, int(exponent))
    lead, factors, rest = content(form)
    if exponent.denominator == 1:
        return _split_power(lead, factors, rest, exponent)
    if all(map(is_positive_atom, factors)):
        return _split_power(lead, factors, rest, exponent)
    pulled = {a: e for a, e in factors.items() if is_positive_atom(a)}
    kept = of_factors({a: e for a, e in factors.items() if a not in pulled})
    return _split_power(lead, pulled, multiply(rest, kept), exponent)


def _split_power(
    lead: Coefficient, factors: dict[Atom, Coefficient], rest: Form, exponent: Coefficient
) -> Form:
    outside = of_factors({a: e * exponent for a, e in factors.items()})
    found = multiply(root(lead, exponent), outside)
    number = rest.number
    if number == 1:
        return found
    if number is not None and exponent.denominator == 1:
        return scale(found, Fraction(number) ** int(exponent))
    atom = rest.atom
    base = atom if atom is not None else Atom(Kind.GROUP, forms=(rest,))
    if _is_whole(exponent):
        return multiply(found, _whole_power(rest, int(exponent)))
    return multiply(found, of_atom(base, exponent))


def _whole_power(form: Form, exponent: int) -> Form:
    found = form
    for _ in range(exponent - 1):
        found = multiply(found, form)
    return found


def root(number: Coefficient, exponent: Coefficient) -> Form:
    """A positive number to a power: a fraction times roots of primes."""
    if number == 1:
        return ONE
    if exponent.denominator == 1:
        return constant(Fraction(number) ** int(exponent))
    found = ONE
    for part, sign in ((number.numerator, 1), (number.denominator, -1)):
        for prime, count in _primes(part).items():
            base = Atom(Kind.ROOT, str(prime))
            whole = Fraction(exponent) * count * sign
            below = whole.__floor__()
            found = scale(found, Fraction(prime) ** below)
            if whole != below:
                found = multiply(found, of_atom(base, whole - below))
    return found


def _primes(number: int) -> dict[int, int]:
    found: dict[int, int] = {}
    divisor = 2
    while divisor <= min(isqrt(number), isqrt(_MOST_FACTORED)):
        while number % divisor == 0:
            found[divisor] = found.get(divisor, 0) + 1
            number //= divisor
        divisor += 1
    if number > 1:
        found[number] = found.get(number, 0) + 1
    return found


def without_denominators(form: Form) -> Form:
    """The form times its denominators that are under no binder: it is 0 where the form is."""
    for _ in range(8):
        before = form
        if form.terms:
            form = content(form)[2]
        if form == before:
            return form
    return form


# Indices as numbers


def of_index(p: Index) -> Form:
    """An index polynomial as a number."""
    found: dict[Monomial, Coefficient] = {}
    for letters, c in p.terms:
        exponents: dict[Atom, Coefficient] = {}
        for letter in letters:
            atom = (
                Atom(Kind.LEAF, letter.leaf, letter.at)
                if isinstance(letter, Datum)
                else Atom(Kind.VALUE, letter=letter)
            )
            exponents[atom] = exponents.get(atom, 0) + 1
        found[Monomial((), as_factors(exponents))] = c
    return as_form(found)


def as_index(form: Form, integers: frozenset[str]) -> Index | None:
    """A form as an index polynomial: of indices, sizes and leaves that are integers."""
    found = index_number(0)
    for monomial, c in form.terms:
        if monomial.binders or c.denominator != 1:
            return None
        term = index_number(int(c))
        for atom, e in monomial.factors:
            if e.denominator != 1 or e < 0:
                return None
            if atom.kind is Kind.VALUE and atom.letter is not None:
                letter = of_letter(atom.letter)
            elif atom.kind is Kind.LEAF and atom.label in integers:
                letter = of_letter(Datum(atom.label, atom.indices))
            else:
                return None
            for _ in range(int(e)):
                term = term * letter
        found = found + term
    return found
