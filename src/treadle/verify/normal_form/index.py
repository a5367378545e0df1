"""Integer index expressions: polynomials of sizes, index variables, quotients and remainders.

An index variable knows its range, so what a polynomial is bounded by follows from itself. Sizes are
at least 1. Keys order expressions the same way in every process; equality never trusts them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import lru_cache

# Which integer stands for a variable's name while a key is computed: see `coded`.
Codes = Mapping["Variable", int]
NO_CODES: Codes = {}


def code(*parts: int) -> int:
    """A key of integers. CPython's hash of −1 is that of −2, so signs are made a bit."""
    return hash(tuple(p * 2 if p >= 0 else -2 * p + 1 for p in parts))


@lru_cache(maxsize=4096)
def name_code(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")


class Variable:
    """A size (`bound` is None) or an index that runs over 0 … bound − 1.

    `rank` says which of two variables came first: those of the result, then by their creation.
    """

    __slots__ = ("bound", "key", "name", "rank")
    key: int

    def __init__(self, name: str, bound: Index | None = None, rank: tuple[int, ...] = (0,)):
        self.name, self.bound, self.rank = name, bound, rank
        self.key = code(1, name_code(name), 0 if bound is None else bound.key)

    def __hash__(self) -> int:
        return self.key

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        same = isinstance(other, Variable) and self.key == other.key and self.name == other.name
        return same and isinstance(other, Variable) and self.bound == other.bound

    def __repr__(self) -> str:
        return self.name

    def coded(self, codes: Codes) -> int:
        return codes.get(self, self.key)

    @property
    def variables(self) -> frozenset[Variable]:
        return frozenset() if self.bound is None else frozenset([self])


class Division:
    """The quotient, rounded down, or the remainder of two polynomials that is no polynomial."""

    __slots__ = ("by", "is_quotient", "key", "of", "variables")
    key: int
    variables: frozenset[Variable]

    def __init__(self, of: Index, by: Index, is_quotient: bool):
        self.of, self.by, self.is_quotient = of, by, is_quotient
        self.key = code(2 + is_quotient, of.key, by.key)
        self.variables = of.variables | by.variables

    def __hash__(self) -> int:
        return self.key

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Division) or self.key != other.key:
            return False
        same = self.is_quotient == other.is_quotient
        return same and self.of == other.of and self.by == other.by

    def __repr__(self) -> str:
        return f"({self.of!r} {'div' if self.is_quotient else 'mod'} {self.by!r})"

    def coded(self, codes: Codes) -> int:
        return code(2 + self.is_quotient, self.of.coded(codes), self.by.coded(codes))


class Datum:
    """An integer that is data: an element of a leaf, at indices. Its range is not known."""

    __slots__ = ("at", "key", "leaf", "variables")
    key: int
    variables: frozenset[Variable]

    def __init__(self, leaf: str, at: tuple[Index, ...]):
        self.leaf, self.at = leaf, at
        self.key = self.coded(NO_CODES)
        found: set[Variable] = set()
        for p in at:
            found |= p.variables
        self.variables = frozenset(found)

    def __hash__(self) -> int:
        return self.key

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Datum) and self.key == other.key and self.leaf == other.leaf
        return same and isinstance(other, Datum) and self.at == other.at

    def __repr__(self) -> str:
        return f"{self.leaf}{list(self.at)}"

    def coded(self, codes: Codes) -> int:
        return code(4, name_code(self.leaf), *(p.coded(codes) for p in self.at))


Letter = Variable | Division | Datum
Product = tuple[Letter, ...]  # sorted by key


class Index:
    """A polynomial with integer coefficients: products of letters, sorted by key."""

    __slots__ = ("key", "terms", "variables")
    key: int
    variables: frozenset[Variable]

    def __init__(self, terms: tuple[tuple[Product, int], ...]):
        self.terms = terms
        self.key = code(5, *(k for m, c in terms for k in (*(x.key for x in m), c, 7)))
        found: set[Variable] = set()
        for product, _ in terms:
            for letter in product:
                found |= letter.variables
        self.variables = frozenset(found)

    def __hash__(self) -> int:
        return self.key

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Index) and self.key == other.key and self.terms == other.terms

    def __repr__(self) -> str:
        parts = ["*".join([*([str(c)] if c != 1 or not m else []), *map(repr, m)])
                 for m, c in self.terms]  # fmt: skip
        return " + ".join(parts) or "0"

    def coded(self, codes: Codes) -> int:
        if not codes or self.variables.isdisjoint(codes):
            return self.key
        parts = (code(c, *sorted(x.coded(codes) for x in m)) for m, c in self.terms)
        return code(6, *sorted(parts))

    def __add__(self, other: Index) -> Index:
        if not other.terms:
            return self
        found = dict(self.terms)
        for product, c in other.terms:
            found[product] = found.get(product, 0) + c
        return _sorted(found)

    def __sub__(self, other: Index) -> Index:
        return self + other.times(-1)

    def times(self, factor: int) -> Index:
        if factor == 1:
            return self
        return Index(tuple((m, c * factor) for m, c in self.terms)) if factor else ZERO

    def __mul__(self, other: Index) -> Index:
        if other == ONE:
            return self
        found: dict[Product, int] = {}
        for m, c in self.terms:
            for n, d in other.terms:
                both = tuple(sorted(m + n, key=key_of))
                found[both] = found.get(both, 0) + c * d
        return _sorted(found)

    @property
    def number(self) -> int | None:
        """The integer that this is, if it is one."""
        if not self.terms:
            return 0
        (product, c), *others = self.terms
        return c if not product and not others else None

    @property
    def is_of_sizes(self) -> bool:
        return all(isinstance(x, Variable) and x.bound is None for m, _ in self.terms for x in m)


def key_of(letter: Letter) -> int:
    return letter.key


def _term_key(term: tuple[Product, int]) -> tuple[int, ...]:
    return tuple(x.key for x in term[0])


def _sorted(found: Mapping[Product, int]) -> Index:
    return Index(tuple(sorted(((m, c) for m, c in found.items() if c), key=_term_key)))


@lru_cache(maxsize=4096)
def number(value: int) -> Index:
    return Index((((), value),)) if value else Index(())


ZERO, ONE = number(0), number(1)


def of_letter(letter: Letter) -> Index:
    return Index((((letter,), 1),))


def product(parts: Iterable[Index]) -> Index:
    found = ONE
    for part in parts:
        found = found * part
    return found


def renamed(p: Index, names: Mapping[Variable, Variable]) -> Index:
    """The polynomial with other names for variables of the same range: nothing is simplified."""
    if p.variables.isdisjoint(names):
        return p
    found = {
        tuple(sorted((_renamed_letter(x, names) for x in m), key=key_of)): c for m, c in p.terms
    }
    return _sorted(found)


def _renamed_letter(letter: Letter, names: Mapping[Variable, Variable]) -> Letter:
    if isinstance(letter, Variable):
        return names.get(letter, letter)
    if letter.variables.isdisjoint(names):
        return letter
    if isinstance(letter, Division):
        return Division(renamed(letter.of, names), renamed(letter.by, names), letter.is_quotient)
    return Datum(letter.leaf, tuple(renamed(p, names) for p in letter.at))
