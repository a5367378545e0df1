"""Forms: sums of products of atoms, each product under binders that are summed over.

A form stands for one element of a tensor, as a function of index variables. Equal forms are equal
elements for all sizes. Binders are named by how deep the expression below them is and by a
canonical order, so that forms that differ in names only are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from fractions import Fraction
from itertools import islice, permutations, product
from threading import local

from treadle.verify.normal_form.index import (
    NO_CODES,
    Codes,
    Index,
    Letter,
    Variable,
    code,
    name_code,
    renamed,
)

Coefficient = int | Fraction


class BudgetError(Exception):
    """The work that deciding would take is beyond its bound."""


class _Budget(local):
    """Products of atoms that a thread may still make."""

    left = 0
    spent = 0  # by all forms of a thread before this one, and by what else is counted


BUDGET = _Budget()


_MOST_ORDERS = 24  # of binders that nothing tells apart


class Kind(IntEnum):
    """What an atom is."""

    LEAF = 1  # label: name; indices
    VALUE = 2  # an index or a size as a number: a letter
    EXP = 3  # e to the power of a product
    APPLY = 4  # label: a function of forms of which nothing else is known
    STEP = 5  # 1 where an index is at least 0, else 0
    MEETS = 6  # 1 where an index is 0, else 0
    POSITIVE = 7  # 1 where a form is above 0, else 0
    VANISHES = 8  # 1 where a form is 0, else 0
    GROUP = 9  # a form without common factors, to be raised to a power
    MAXIMUM = 10  # of forms
    LARGEST = 11  # of a form over binders
    ROOT = 12  # label: a positive constant that is no fraction once raised to a power
    INFINITY = 13
    WHOLE = 14  # label: an op over whole tensors, forms under binders; indices of its result


FLAGS = frozenset([Kind.STEP, Kind.MEETS, Kind.POSITIVE, Kind.VANISHES])


class Atom:
    """A factor. Binders are bound in its forms."""

    __slots__ = ("binders", "forms", "height", "indices", "is_flag", "key", "kind", "label",
                 "letter", "variables")  # fmt: skip

    def __init__(
        self,
        kind: Kind,
        label: str = "",
        indices: tuple[Index, ...] = (),
        forms: tuple[Form, ...] = (),
        binders: tuple[Variable, ...] = (),
        letter: Letter | None = None,
        is_flag: bool = False,
    ):
        self.kind, self.label, self.indices, self.forms = kind, label, indices, forms
        self.binders, self.letter = binders, letter
        self.is_flag = is_flag or kind in FLAGS
        self.height = max((f.height for f in forms), default=0) + bool(binders)
        found: set[Variable] = set()
        for p in indices:
            found |= p.variables
        for form in forms:
            found |= form.variables
        if letter is not None:
            found |= letter.variables
        self.variables = frozenset(found.difference(binders))
        self.key = self._coded(NO_CODES)

    def coded(self, codes: Codes) -> int:
        return self.key if self.variables.isdisjoint(codes) else self._coded(codes)

    def _coded(self, codes: Codes) -> int:
        parts = [self.kind, name_code(self.label), *(p.coded(codes) for p in self.indices)]
        parts += [f.coded(codes) for f in self.forms]
        parts += [v.key for v in self.binders]
        if self.letter is not None:
            parts.append(self.letter.coded(codes))
        return code(*parts)

    def __hash__(self) -> int:
        return self.key

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Atom) or self.key != other.key:
            return False
        mine, theirs = (
            (a.kind, a.label, a.indices, a.forms, a.binders, a.letter) for a in (self, other)
        )
        return mine == theirs

    def __repr__(self) -> str:
        inner = ", ".join(map(repr, (*self.indices, *self.forms)))
        if self.letter is not None:
            return repr(self.letter)
        if self.kind is Kind.LEAF:
            return f"{self.label}[{inner}]"
        under = f"{list(self.binders)} " if self.binders else ""
        return f"{self.kind.name.lower()}{':' if self.label else ''}{self.label}({under}{inner})"


Factor = tuple[Atom, Coefficient]  # an atom and its exponent


class Monomial:
    """Factors under binders."""

    __slots__ = ("binders", "factors", "height", "key", "variables")

    def __init__(self, binders: tuple[Variable, ...], factors: tuple[Factor, ...]):
        self.binders, self.factors = binders, factors
        self.height = max((a.height for a, _ in factors), default=0) + bool(binders)
        found: set[Variable] = set()
        for atom, _ in factors:
            found |= atom.variables
        self.variables = frozenset(found.difference(binders))
        self.key = _product_code(binders, factors, NO_CODES)

    def coded(self, codes: Codes) -> int:
        if self.variables.isdisjoint(codes):
            return self.key
        return _product_code(self.binders, self.factors, codes)

    def __hash__(self) -> int:
        return self.key

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Monomial) or self.key != other.key:
            return False
        return self.binders == other.binders and self.factors == other.factors

    def __repr__(self) -> str:
        factors = " ".join(repr(a) if e == 1 else f"{a!r}^{e}" for a, e in self.factors)
        return (f"Σ{list(self.binders)} " if self.binders else "") + (factors or "1")

    def bound(self, atom: Atom) -> bool:
        return not atom.variables.isdisjoint(self.binders)


def _product_code(binders: Sequence[Variable], factors: Iterable[Factor], codes: Codes) -> int:
    inner = (code(a.coded(codes), e.numerator, e.denominator) for a, e in factors)
    return code(16, *(v.coded(codes) for v in binders), *sorted(inner))


class Form:
    """A sum of products, sorted by key."""

    __slots__ = ("height", "key", "terms", "variables")
    height: int
    variables: frozenset[Variable]

    def __init__(self, terms: tuple[tuple[Monomial, Coefficient], ...]):
        self.terms = terms
        self.height = max((m.height for m, _ in terms), default=0)
        found: set[Variable] = set()
        for monomial, _ in terms:
            found |= monomial.variables
        self.variables = frozenset(found)
        self.key = code(17, *(k for m, c in terms for k in (m.key, c.numerator, c.denominator)))

    def coded(self, codes: Codes) -> int:
        if self.variables.isdisjoint(codes):
            return self.key
        parts = (code(m.coded(codes), c.numerator, c.denominator) for m, c in self.terms)
        return code(18, *sorted(parts))

    def __hash__(self) -> int:
        return self.key

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Form) and self.key == other.key and self.terms == other.terms

    def __repr__(self) -> str:
        return " + ".join(f"{'' if c == 1 else f'{c} '}{m!r}" for m, c in self.terms) or "0"

    @property
    def number(self) -> Coefficient | None:
        """The fraction that this is, if it is one."""
        if not self.terms:
            return 0
        (monomial, c), *others = self.terms
        return c if not others and not monomial.factors else None

    @property
    def atom(self) -> Atom | None:
        """The single atom that this is, if it is one."""
        if len(self.terms) != 1 or self.terms[0][1] != 1:
            return None
        monomial = self.terms[0][0]
        if monomial.binders or len(monomial.factors) != 1 or monomial.factors[0][1] != 1:
            return None
        return monomial.factors[0][0]

    def free_flags(self) -> list[Atom]:
        """Flags that are under no binder, in order."""
        found: dict[Atom, None] = {}
        for monomial, _ in self.terms:
            for atom, _ in monomial.factors:
                if atom.is_flag and not monomial.bound(atom):
                    found[atom] = None
        return list(found)


UNIT = Monomial((), ())


def _factor_key(factor: Factor) -> int:
    return factor[0].key


def _term_key(term: tuple[Monomial, Coefficient]) -> int:
    return term[0].key


def as_form(terms: Mapping[Monomial, Coefficient]) -> Form:
    kept = [(m, c.numerator if c.denominator == 1 else c) for m, c in terms.items() if c]
    return Form(tuple(sorted(kept, key=_term_key)))


def as_factors(exponents: Mapping[Atom, Coefficient]) -> tuple[Factor, ...]:
    kept = [(a, e.numerator if e.denominator == 1 else e) for a, e in exponents.items() if e]
    return tuple(sorted(kept, key=_factor_key))


# Binders


def named(height: int, position: int, bound: Index | None) -> Variable:
    """The canonical binder: deeper expressions below it come first in rank."""
    return Variable(f"%{height}.{position}", bound, (2, -height, position))


def ordered(binders: Sequence[Variable], coded: Callable[[Codes], int]) -> list[Variable]:
    """Binders in an order that does not depend on their names.

    Colours are refined by what the expression looks like from each binder; what is still alike is
    tried in every order, up to a bound.
    """
    if len(binders) < 2:
        return list(binders)
    colours = {v: code(0 if v.bound is None else v.bound.key) for v in binders}
    for _ in binders:
        seen = {v: coded({u: code(colours[u], int(u is v)) for u in binders}) for v in binders}
        finer = {v: code(colours[v], seen[v]) for v in binders}
        is_stable = len(set(finer.values())) == len(set(colours.values()))
        colours = finer
        if is_stable or len(set(colours.values())) == len(binders):
            break
    alike: dict[int, list[Variable]] = {}
    for v in binders:
        alike.setdefault(colours[v], []).append(v)
    groups = [alike[c] for c in sorted(alike)]
    if len(groups) == len(binders):
        return [g[0] for g in groups]
    orders = product(*(permutations(g) for g in groups))
    candidates = [[v for g in order for v in g] for order in islice(orders, _MOST_ORDERS)]
    return min(candidates, key=lambda o: coded({v: code(i) for i, v in enumerate(o)}))


def bind(binders: Sequence[Variable], factors: Iterable[Factor]) -> Monomial:
    """Factors under binders with canonical names."""
    factors = tuple(factors)
    BUDGET.left -= 1 + len(factors) * (1 + len(binders) ** 2)
    if BUDGET.left < 0:
        raise BudgetError("too many products")
    if not binders:
        return Monomial((), tuple(sorted(factors, key=_factor_key)))
    height = 1 + max((a.height for a, _ in factors), default=0)
    # A binder is told by its place in the product, not by its place in the list.
    order = ordered(binders, lambda codes: _product_code((), factors, codes))
    names = {v: named(height, i, v.bound) for i, v in enumerate(order)}
    if all(old == new for old, new in names.items()):
        return Monomial(tuple(order), tuple(sorted(factors, key=_factor_key)))
    moved = ((renamed_atom(a, names), e) for a, e in factors)
    return Monomial(tuple(names.values()), tuple(sorted(moved, key=_factor_key)))


def bound_atom(
    kind: Kind,
    binders: Sequence[Variable],
    forms: tuple[Form, ...],
    label: str = "",
    indices: tuple[Index, ...] = (),
) -> Atom:
    """An atom with binders of canonical names; their order counts where there is a label."""
    height = 1 + max((f.height for f in forms), default=0)
    order = list(binders)
    if not label:
        order = ordered(binders, lambda codes: code(*(f.coded(codes) for f in forms)))
    names = {v: named(height, i, v.bound) for i, v in enumerate(order)}
    moved = tuple(renamed_form(f, names) for f in forms)
    return Atom(kind, label, indices, moved, tuple(names.values()))


def renamed_atom(atom: Atom, names: Mapping[Variable, Variable]) -> Atom:
    """The atom with other names for free variables."""
    if atom.variables.isdisjoint(names):
        return atom
    indices = tuple(renamed(p, names) for p in atom.indices)
    forms = tuple(renamed_form(f, names) for f in atom.forms)
    if atom.binders:
        return bound_atom(atom.kind, atom.binders, forms, atom.label, indices)
    letter = atom.letter
    if letter is not None:
        ((letters, _),) = renamed(Index((((letter,), 1),)), names).terms
        (letter,) = letters
    if atom.kind is Kind.MAXIMUM:
        forms = tuple(sorted(forms, key=lambda f: f.key))
    return Atom(atom.kind, atom.label, indices, forms, (), letter, atom.is_flag)


def renamed_form(form: Form, names: Mapping[Variable, Variable]) -> Form:
    if form.variables.isdisjoint(names):
        return form
    found: dict[Monomial, Coefficient] = {}
    for monomial, c in form.terms:
        moved = bind(monomial.binders, [(renamed_atom(a, names), e) for a, e in monomial.factors])
        found[moved] = found.get(moved, 0) + c
    return as_form(found)
