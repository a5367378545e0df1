"""What index expressions are bounded by, their quotients, and indices in place of variables."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from treadle.verify.normal_form.index import (
    ONE,
    ZERO,
    Datum,
    Division,
    Index,
    Letter,
    Product,
    Variable,
    key_of,
    number,
    of_letter,
)

_LEAST_SIZE = 1


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
        common = Index(((tuple(sorted(shared, key=key_of)), divisor),))
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
