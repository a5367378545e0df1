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
_LEAST_SIZE = 1


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
                both = tuple(sorted(m + n, key=_key_of))
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


def _key_of(letter: Letter) -> int:
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


# Bounds


def _highest(letter: Letter) -> Index | None:
    """The largest value of an index, a quotient or a remainder."""
    if isinstance(letter, Variable):
        return None if letter.bound is None else letter.bound - ONE
    if isinstance(letter, Division):
        if not letter.is_quotient:
            return letter.by - ONE
        whole, rest = _parts(_ceiling(letter.of) + ONE, letter.by)
        if not whole.is_of_sizes or not is_nonnegative(letter.by - rest):
            return None
        return whole - ONE if rest == ZERO else whole
    return None


def _ceiling(p: Index) -> Index:
    """A bound from above, by the largest value of each index that counts positively."""
    for product_, c in p.terms:
        for letter in product_:
            if isinstance(letter, Variable) and letter.bound is None:
                continue
            top = _highest(letter)
            if top is None or c < 0:
                return p
            return _ceiling(p - Index(((product_, c),)) + _without(product_, letter, c) * top)
    return p


def _without(letters: Product, letter: Letter, c: int) -> Index:
    rest = list(letters)
    rest.remove(letter)
    return Index(((tuple(rest), c),))


def _is_index(letter: Letter) -> bool:
    return not (isinstance(letter, Variable) and letter.bound is None)


def _is_nonnegative_letter(letter: Letter) -> bool:
    if isinstance(letter, Division):
        return not letter.is_quotient or is_nonnegative(letter.of)
    return isinstance(letter, Variable)


@lru_cache(maxsize=65536)
def is_nonnegative(p: Index) -> bool:
    """Provably at least 0, whatever the sizes are and wherever the indices stand."""
    for _ in range(16):
        worst = next(((m, c) for m, c in p.terms if c < 0 and any(map(_is_index, m))), None)
        if worst is None:
            break
        letters, c = worst
        letter = next(filter(_is_index, letters))
        top = _highest(letter)
        if top is None or not all(map(_is_nonnegative_letter, letters)):
            return False
        p = p - Index((worst,)) + _without(letters, letter, c) * top
    least = ZERO
    for letters, c in p.terms:
        if any(map(_is_index, letters)):
            if c < 0 or not all(map(_is_nonnegative_letter, letters)):
                return False
        else:
            least = least + _above_least(letters, c)
    return all(c >= 0 for _, c in least.terms)


def _above_least(letters: Product, c: int) -> Index:
    """A product of sizes in terms of how much each is above the least size."""
    found = number(c)
    for letter in letters:
        found = found * (of_letter(letter) + number(_LEAST_SIZE))
    return found


def is_at_most(low: Index, high: Index) -> bool:
    return is_nonnegative(high - low)


# Division


def _quotient_of_term(letters: Product, c: int, by: tuple[Product, int]) -> Index | None:
    """A term divided by another, if that leaves nothing."""
    rest = list(letters)
    for letter in by[0]:
        if letter not in rest:
            return None
        rest.remove(letter)
    return Index(((tuple(rest), c // by[1]),)) if c % by[1] == 0 else None


def _parts(p: Index, by: Index) -> tuple[Index, Index]:
    """p = q · by + r, term by term."""
    if len(by.terms) != 1:
        return _parts_by_sum(p, by)
    quotient, rest = ZERO, ZERO
    (divisor,) = by.terms
    for letters, c in p.terms:
        whole = _quotient_of_term(letters, c, divisor)
        if whole is not None:
            quotient = quotient + whole
        elif not letters and not divisor[0]:
            quotient, rest = quotient + number(c // divisor[1]), rest + number(c % divisor[1])
        else:
            rest = rest + Index(((letters, c),))
    return quotient, rest


def _parts_by_sum(p: Index, by: Index) -> tuple[Index, Index]:
    """Division by a sum, by its last term while the others come along."""
    quotient = ZERO
    for _ in range(4):
        for letters, c in p.terms:
            whole = _quotient_of_term(letters, c, by.terms[-1])
            if whole is None:
                continue
            less = p - whole * by
            if len(less.terms) < len(p.terms):
                quotient, p = quotient + whole, less
                break
        else:
            break
    return quotient, p


@lru_cache(maxsize=65536)
def divided(p: Index, by: Index) -> tuple[Index, Index]:
    """The quotient and the remainder, `by` being positive."""
    if by == ONE:
        return p, ZERO
    whole, rest = _parts(recombined(p), by)
    if is_nonnegative(rest) and is_nonnegative(by - ONE - rest):
        return whole, rest
    for factor in _common_factors(rest, by):
        high, low = _parts(rest, factor)
        if is_nonnegative(low) and is_nonnegative(factor - ONE - low):
            quotient, remainder = divided(high, _parts(by, factor)[0])
            return whole + quotient, remainder * factor + low
    quotient, remainder = _of_division(rest, by)
    return whole + quotient, remainder


def _common_factors(p: Index, by: Index) -> list[Index]:
    """What divides `by` and a term of p, and is neither 1 nor `by` itself."""
    if len(by.terms) != 1:
        return []
    ((letters, c),) = by.terms
    found: dict[Index, None] = {}
    for product_, d in p.terms:
        left, shared = list(letters), []
        for letter in product_:
            if letter in left:
                left.remove(letter)
                shared.append(letter)
        divisor = _gcd(c, abs(d))
        common = Index(((tuple(sorted(shared, key=_key_of)), divisor),))
        if common not in (ONE, by):
            found[common] = None
    return list(found)


def _gcd(a: int, b: int) -> int:
    while b:
        a, b = b, a % b
    return a


def _of_division(p: Index, by: Index) -> tuple[Index, Index]:
    """Of what is a quotient or a remainder itself: (a div b) div c = a div bc and the like."""
    letter = p.terms[0][0][0] if len(p.terms) == 1 and len(p.terms[0][0]) == 1 else None
    if isinstance(letter, Division) and p.terms[0][1] == 1:
        if letter.is_quotient:
            outer = divided(letter.of, letter.by * by)[0]
            return outer, of_letter(Division(p, by, False))
        ratio, left = _parts(letter.by, by)
        if left == ZERO:
            return divided(divided(letter.of, by)[0], ratio)[1], divided(letter.of, by)[1]
    return of_letter(Division(p, by, True)), of_letter(Division(p, by, False))


def recombined(p: Index) -> Index:
    """b · (a div b) + (a mod b) is a."""
    for letters, c in p.terms:
        for letter in letters:
            if not isinstance(letter, Division) or letter.is_quotient:
                continue
            scale = _without(letters, letter, c)
            beside = scale * letter.by * of_letter(Division(letter.of, letter.by, True))
            have = dict(p.terms)
            if all(have.get(m) == d for m, d in beside.terms):
                return recombined(p - beside - Index(((letters, c),)) + scale * letter.of)
    return p


# Replacing variables


def replaced(p: Index, values: Mapping[Variable, Index]) -> Index:
    """The polynomial with indices for variables."""
    if p.variables.isdisjoint(values):
        return p
    found = ZERO
    for letters, c in p.terms:
        term = number(c)
        for letter in letters:
            term = term * _replaced_letter(letter, values)
        found = found + term
    return recombined(found)


def _replaced_letter(letter: Letter, values: Mapping[Variable, Index]) -> Index:
    if isinstance(letter, Variable):
        return values[letter] if letter in values else of_letter(letter)
    if isinstance(letter, Division):
        of, by = replaced(letter.of, values), replaced(letter.by, values)
        return divided(of, by)[0 if letter.is_quotient else 1]
    return of_letter(Datum(letter.leaf, tuple(replaced(p, values) for p in letter.at)))


def renamed(p: Index, names: Mapping[Variable, Variable]) -> Index:
    """The polynomial with other names for variables of the same range: nothing is simplified."""
    if p.variables.isdisjoint(names):
        return p
    found = {
        tuple(sorted((_renamed_letter(x, names) for x in m), key=_key_of)): c for m, c in p.terms
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
