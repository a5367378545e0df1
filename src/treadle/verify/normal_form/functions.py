"""Functions of forms: exp and log as homomorphisms, comparisons as flags, maxima.

A function of a form with flags is taken apart by them: f(c x + (1 − c) y) is c f(x) + (1 − c) f(y).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction

from treadle.verify.normal_form import index as ix
from treadle.verify.normal_form import ranges
from treadle.verify.normal_form.algebra import (
    ONE,
    ZERO,
    add,
    as_index,
    constant,
    content,
    is_positive_atom,
    multiply,
    negate,
    of_atom,
    of_factors,
    power,
    scale,
    subtract,
)
from treadle.verify.normal_form.form import (
    Atom,
    BudgetError,
    Coefficient,
    Form,
    Kind,
    Monomial,
    as_form,
    bind,
)
from treadle.verify.normal_form.index import Index, Variable
from treadle.verify.normal_form.ranges import is_nonnegative

_MOST_FLAGS = 6  # by which a function's operands are taken apart
SATURATING = -1e9  # a number that masks are written with where −∞ is meant, or below


class Assumption(Enum):
    """What a proof took for granted beside the laws of the reals."""

    ROUNDED_CONSTANTS = "numbers within 2 ulp of each other are the same"
    SATURATING_MASK = "e to the power of −1e9 or less is 0"
    INDICES_IN_RANGE = "integers that choose an element are in range"


@dataclass(slots=True)
class Work:
    """The state of one decision: which assumptions it may make and has made, names, counts."""

    allowed: frozenset[Assumption] = frozenset()
    integers: frozenset[str] = frozenset()  # leaves
    unrolled: int = 0  # sums of at most so many terms, if known, are written out
    most: int = 20_000  # elements of tensors that are looked at
    made: set[Assumption] = field(default_factory=set)
    maxima: dict[Form, frozenset[Form]] = field(default_factory=dict)
    known_sizes: set[int] = field(default_factory=set)  # of sums and maxima
    count: int = 0

    def assume(self, assumption: Assumption) -> bool:
        if assumption not in self.allowed:
            return False
        self.made.add(assumption)
        return True

    def fresh(self, bound: Index) -> Variable:
        """An index variable that no form has yet."""
        self.spend()
        return Variable(f"k{self.count}", bound, (1, self.count))

    def spend(self) -> None:
        self.count += 1
        if self.count > self.most:
            raise BudgetError(f"more than {self.most} elements")


INFINITY = Atom(Kind.INFINITY)
E = Atom(Kind.ROOT, "e")


# Flags


def assume(form: Form, flag: Atom, value: bool) -> Form:
    """The form where a flag is known, and those that follow from it."""
    found: dict[Monomial, Coefficient] = {}
    for monomial, c in form.terms:
        factors = dict(monomial.factors)
        for atom in [a for a in factors if a.is_flag and not monomial.bound(a)]:
            known = _follows(atom, flag, value)
            if known is False:
                break
            if known:
                del factors[atom]
        else:
            kept = bind(monomial.binders, factors.items())
            found[kept] = found.get(kept, 0) + c
    return as_form(found)


def _follows(atom: Atom, flag: Atom, value: bool) -> bool | None:
    """What a flag is, where another one is known."""
    if atom == flag:
        return value
    if atom.kind is flag.kind is Kind.STEP:
        gap = atom.indices[0] - flag.indices[0]
        if value and is_nonnegative(gap):
            return True
        if not value and is_nonnegative(ix.ZERO - gap):
            return False
    if value and atom.kind is Kind.VANISHES and flag.kind is Kind.POSITIVE:
        return False if atom.forms == flag.forms else None
    if value and atom.kind is Kind.POSITIVE and flag.kind is Kind.VANISHES:
        return False if atom.forms == flag.forms else None
    return None


def by_flags(function: Callable[..., Form], *operands: Form) -> Form:
    """The function, taken apart by the flags of its operands."""
    return _by_flags(function, operands, _MOST_FLAGS)


def _by_flags(function: Callable[..., Form], operands: Sequence[Form], left: int) -> Form:
    flag = next((f for x in operands for f in x.free_flags()), None)
    if flag is None:
        return function(*operands)
    if not left:
        raise BudgetError("a function of many masks")
    yes, no = (
        _by_flags(function, [assume(x, flag, value) for x in operands], left - 1)
        for value in (True, False)
    )
    return add(no, multiply(of_atom(flag), subtract(yes, no)))


def step(p: Index) -> Form:
    """1 where p ≥ 0, else 0. Of a step and its opposite one is used: [−p ≥ 0] = 1 − [p − 1 ≥ 0]."""
    p = ranges.recombined(p)
    if is_nonnegative(p):
        return ONE
    if is_nonnegative(ix.number(-1) - p):
        return ZERO
    divisor = _common_divisor(p)
    if divisor > 1:
        p = ranges.divided(p, ix.number(divisor))[0]
    if _is_turned(p):
        return subtract(ONE, of_atom(Atom(Kind.STEP, indices=(ix.number(-1) - p,))))
    return of_atom(Atom(Kind.STEP, indices=(p,)))


def _common_divisor(p: Index) -> int:
    """Of the coefficients beside the number: [2 i − 1 ≥ 0] is [i − 1 ≥ 0]."""
    found = 0
    for letters, c in p.terms:
        if letters:
            found = _gcd(found, abs(c))
    return found


def _gcd(a: int, b: int) -> int:
    while b:
        a, b = b, a % b
    return a


def _is_turned(p: Index) -> bool:
    """Whether the variable that came first counts negatively."""

    def first(term: tuple[tuple[ix.Letter, ...], int]) -> tuple[object, ...]:
        ranks = [v.rank for x in term[0] for v in x.variables]
        return (not ranks, min(ranks, default=()), tuple(x.key for x in term[0]))

    return min(p.terms, key=first)[1] < 0


def meets(p: Index) -> Form:
    """1 where p = 0, else 0."""
    p = ranges.recombined(p)
    if not p.terms:
        return ONE
    one = ix.number(1)
    if is_nonnegative(p - one) or is_nonnegative(ix.ZERO - p - one):
        return ZERO
    if _is_turned(p):
        p = p.times(-1)
    return of_atom(Atom(Kind.MEETS, indices=(p,)))


def whole(work: Work, form: Form) -> Index | None:
    """A multiple of the form by a positive number as an index, if it is one."""
    denominator = 1
    for _, c in form.terms:
        denominator = denominator * c.denominator // _gcd(denominator, c.denominator)
    return as_index(scale(form, denominator), work.integers)


def is_positive_flag(work: Work, d: Form) -> Form:
    """1 where d > 0, else 0."""
    number = d.number
    if number is not None:
        return ONE if number > 0 else ZERO
    p = whole(work, d)
    if p is not None:
        return step(p - ix.number(1))
    infinite = _infinite(d)
    if infinite is not None:
        return ONE if infinite > 0 else ZERO
    rest = _of_sign(d)
    if rest.terms[0][1] > 0:
        return of_atom(Atom(Kind.POSITIVE, forms=(rest,)))
    turned = negate(rest)
    either = add(of_atom(Atom(Kind.POSITIVE, forms=(turned,))), _vanishing(turned))
    return subtract(ONE, either)


def vanishes_flag(work: Work, d: Form) -> Form:
    """1 where d = 0, else 0. Nothing finite equals an infinity."""
    number = d.number
    if number is not None:
        return ONE if number == 0 else ZERO
    p = whole(work, d)
    if p is not None:
        return meets(p)
    if _infinite(d) is not None:
        return ZERO
    rest = _of_sign(d)
    return _vanishing(rest if rest.terms[0][1] > 0 else negate(rest))


def _vanishing(d: Form) -> Form:
    return of_atom(Atom(Kind.VANISHES, forms=(d,)))


def _of_sign(d: Form) -> Form:
    """The form without positive factors, which do not change its sign."""
    _, factors, rest = content(d)
    kept = {a: e for a, e in factors.items() if not is_positive_atom(a)}
    return multiply(rest, of_factors(kept)) if kept else rest


def is_infinite(monomial: Monomial, coefficient: Coefficient) -> bool:
    """Whether a term is an infinity, or a number that is written for one."""
    if not monomial.factors:
        return coefficient <= SATURATING
    return any(a == INFINITY for a, _ in monomial.factors)


def _infinite(form: Form) -> Coefficient | None:
    """The sign of the infinity that a sum has, if it has one."""
    for monomial, c in form.terms:
        if monomial.factors == ((INFINITY, 1),) and not monomial.binders:
            return c
    return None


# exp and log


def exp(work: Work, form: Form) -> Form:
    return by_flags(lambda x: _exp(work, x), form)


def _exp(work: Work, form: Form) -> Form:
    """A product over the terms; e to the power of −∞ is 0."""
    infinite = _infinite(form)
    if infinite is not None and infinite < 0:
        return ZERO
    found = ONE
    for monomial, c in form.terms:
        if not monomial.factors:
            if c <= SATURATING and work.assume(Assumption.SATURATING_MASK):
                return ZERO
            found = multiply(found, of_atom(E, c))
            continue
        single = as_form({monomial: 1})
        atom = single.atom
        if atom is not None and atom.kind is Kind.APPLY and atom.label == "log":
            found = multiply(found, power(atom.forms[0], c))
        else:
            found = multiply(found, of_atom(Atom(Kind.EXP, forms=(single,)), c))
    return found


def log(form: Form) -> Form:
    return by_flags(_log, form)


def _log(form: Form) -> Form:
    """A sum over the positive factors."""
    if not form.terms:
        return negate(of_atom(INFINITY))
    lead, factors, rest = content(form)
    found = _log_number(lead)
    for atom, e in factors.items():
        if not is_positive_atom(atom):
            rest = multiply(rest, of_atom(atom, e))
        elif atom.kind is Kind.EXP:
            found = add(found, scale(atom.forms[0], e))
        elif atom == E:
            found = add(found, constant(e))
        else:
            inner = atom.forms[0] if atom.kind is Kind.GROUP else of_atom(atom)
            found = add(found, scale(_log_atom(inner), e))
    return found if rest == ONE else add(found, _log_atom(rest))


def _log_number(number: Coefficient) -> Form:
    return ZERO if number == 1 else _log_atom(constant(number))


def _log_atom(form: Form) -> Form:
    return of_atom(Atom(Kind.APPLY, "log", forms=(form,)))


# Other functions


def apply(name: str, *operands: Form) -> Form:
    """A function of which nothing is known but that equal operands give equal results."""
    return by_flags(lambda *x: of_atom(Atom(Kind.APPLY, name, forms=x)), *operands)


def root(form: Form, exponent: Fraction) -> Form:
    return by_flags(lambda x: power(x, exponent), form)


def reciprocal(form: Form) -> Form:
    return by_flags(lambda x: power(x, -1), form)


def choose(condition: Form, x: Form, y: Form) -> Form:
    """x where the flag is 1, y where it is 0."""
    flag = condition.atom
    if flag is not None and flag.is_flag:
        x, y = assume(x, flag, True), assume(y, flag, False)
    return add(y, multiply(condition, subtract(x, y)))


def maximum(work: Work, x: Form, y: Form) -> Form:
    """Of two: y + [x > y] (x − y). Of more: an atom of all, without what they have in common."""
    if x == y:
        return x
    if any(is_infinite(m, c) for f in (x, y) if not _is_lowest(f) for m, c in f.terms):
        return by_flags(lambda a, b: _maximum(work, a, b), x, y)
    return _maximum(work, x, y)


def _maximum(work: Work, x: Form, y: Form) -> Form:
    among = work.maxima.get(x, frozenset([x])) | work.maxima.get(y, frozenset([y]))
    finite = sorted((f for f in among if not _is_lowest(f)), key=lambda f: f.key)
    if len(finite) < 2:
        return finite[0] if finite else x
    found = _of_two(work, *finite) if len(finite) == 2 else _of_several(finite)
    work.maxima[found] = frozenset(finite)
    return found


def _is_lowest(form: Form) -> bool:
    return _infinite(form) is not None and len(form.terms) == 1 and form.terms[0][1] < 0


def _of_two(work: Work, x: Form, y: Form) -> Form:
    d = subtract(x, y)
    if d.terms[0][1] < 0:
        y, d = x, negate(d)
    return add(y, multiply(is_positive_flag(work, d), d))


def _of_several(forms: Sequence[Form]) -> Form:
    """What is added to all, the least of each coefficient, and a scale stand outside."""
    least: dict[Monomial, Coefficient] = {}
    for monomial in {m: None for f in forms for m, _ in f.terms}:
        least[monomial] = min(dict(f.terms).get(monomial, 0) for f in forms)
    shared = as_form(least)
    rest = [subtract(f, shared) for f in forms]
    lead = min(((m.key, c) for f in rest for m, c in f.terms), default=(0, 1))[1]
    inner = tuple(sorted((scale(f, Fraction(1) / lead) for f in rest), key=lambda f: f.key))
    return add(shared, scale(of_atom(Atom(Kind.MAXIMUM, forms=inner)), lead))


def minimum(work: Work, x: Form, y: Form) -> Form:
    return negate(maximum(work, negate(x), negate(y)))
