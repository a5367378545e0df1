"""Index arithmetic: sums of loop variables, quotients and remainders, with ranges.

An index is affine over atoms. Quotients and remainders simplify away wherever the ranges allow it,
so that a reshape that only regroups axes costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Range = tuple[int, int]  # lowest and highest value, both included


@dataclass(frozen=True, slots=True)
class Var:
    """A loop variable: 0 ≤ value < extent."""

    name: str
    extent: int

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Data:
    """An index that is data: the named local, held between 0 and extent − 1."""

    local: str
    extent: int

    def __str__(self) -> str:
        return f"{self.local}<{self.extent}"


@dataclass(frozen=True, slots=True)
class Quotient:
    """⌊index / divisor⌋ of an index that is not negative."""

    index: Index
    divisor: int

    def __str__(self) -> str:
        return f"({self.index})/{self.divisor}"


@dataclass(frozen=True, slots=True)
class Remainder:
    """index mod divisor of an index that is not negative."""

    index: Index
    divisor: int

    def __str__(self) -> str:
        return f"({self.index})%{self.divisor}"


@dataclass(frozen=True, slots=True)
class Bounded:
    """An index that a guard around its use holds between 0 and extent − 1."""

    index: Index
    extent: int

    def __str__(self) -> str:
        return f"[{self.index}]"


Atom = Var | Data | Quotient | Remainder | Bounded


@dataclass(frozen=True, slots=True)
class Index:
    """offset + Σ factor · atom; atoms are distinct and factors are not 0."""

    terms: tuple[tuple[Atom, int], ...] = ()
    offset: int = 0

    def __add__(self, other: Index | int) -> Index:
        if isinstance(other, int):
            return Index(self.terms, self.offset + other)
        if not other.terms:
            return Index(self.terms, self.offset + other.offset) if other.offset else self
        if not self.terms:
            return Index(other.terms, self.offset + other.offset) if self.offset else other
        factors = dict(self.terms)
        for atom, factor in other.terms:
            factors[atom] = factors.get(atom, 0) + factor
        left = tuple((a, f) for a, f in factors.items() if f)
        return Index(left, self.offset + other.offset)

    def __mul__(self, factor: int) -> Index:
        if factor == 0:
            return Index()
        if factor == 1:
            return self
        return Index(tuple((a, f * factor) for a, f in self.terms), self.offset * factor)

    def __sub__(self, other: Index | int) -> Index:
        return self + (other * -1)

    def same(self, other: Index) -> bool:
        """Equal, whatever order the terms are in."""
        return self == other or (self.offset, dict(self.terms)) == (other.offset, dict(other.terms))

    @property
    def range(self) -> Range:
        low = high = self.offset
        for atom, factor in self.terms:
            least, most = atom_range(atom)
            ends = least * factor, most * factor
            low, high = low + min(ends), high + max(ends)
        return low, high

    def factor_of(self, var: Var) -> int | None:
        """How far a step of the variable moves the index; None where it is not linear in it."""
        found = 0
        for atom, factor in self.terms:
            if atom == var:
                found += factor
            elif isinstance(atom, Bounded):
                inner = atom.index.factor_of(var)
                if inner is None:
                    return None
                found += inner * factor
            elif uses(atom, var):
                return None
        return found

    def __str__(self) -> str:
        parts = [str(a) if f == 1 else f"{f}*{a}" for a, f in self.terms]
        if self.offset or not parts:
            parts.append(str(self.offset))
        return " + ".join(parts).replace("+ -", "- ")


def constant(value: int) -> Index:
    return Index((), value)


def variable(var: Var) -> Index:
    """The variable as an index; one that is always 0 vanishes."""
    return Index(((var, 1),)) if var.extent != 1 else Index()


def data(local: str, extent: int) -> Index:
    return Index(((Data(local, extent), 1),))


def bounded(index: Index, extent: int) -> Index:
    """The index, said to lie in 0 … extent − 1; as it is where the range shows that."""
    low, high = index.range
    return index if low >= 0 and high < extent else Index(((Bounded(index, extent), 1),))


def opened(index: Index) -> Index:
    """The index with bounded sums of loop variables written out; what is data stays bounded."""
    result = constant(index.offset)
    for atom, factor in index.terms:
        is_plain = isinstance(atom, Bounded) and all(
            isinstance(a, Var) for a, _ in atom.index.terms
        )
        inner = atom.index if isinstance(atom, Bounded) and is_plain else Index(((atom, 1),))
        result = result + inner * factor
    return result


def atom_range(atom: Atom) -> Range:
    match atom:
        case Var(_, extent) | Data(_, extent) | Bounded(_, extent):
            return 0, max(0, extent - 1)
        case Quotient(index, divisor):
            low, high = index.range
            return low // divisor, high // divisor
        case Remainder(index, divisor):
            high = index.range[1]
            return 0, min(divisor - 1, high)


def uses(atom: Atom, var: Var) -> bool:
    match atom:
        case Var():
            return atom == var
        case Data():
            return False
        case Quotient(index, _) | Remainder(index, _) | Bounded(index, _):
            return any(uses(a, var) for a, _ in index.terms)


def divide(index: Index, divisor: int) -> tuple[Index, Index]:
    """Quotient and remainder of an index that is not negative, simplified by the ranges."""
    if divisor <= 1:
        return index, Index()  # an axis without elements is never reached
    whole = Index(
        tuple((a, f // divisor) for a, f in index.terms if f % divisor == 0),
        index.offset // divisor,
    )
    rest = Index(tuple((a, f) for a, f in index.terms if f % divisor), index.offset % divisor)
    low, high = rest.range
    if low >= 0 and high < divisor:
        return whole, rest
    if low < 0:
        # Only the whole index is known not to be negative.
        return Index(((Quotient(index, divisor), 1),)), Index(((Remainder(index, divisor), 1),))
    for factor in sorted({f for _, f in rest.terms if f > 1 and divisor % f == 0}):
        # factor · x + y, y below the factor: only x meets the divisor.
        less = Index(tuple((a, f) for a, f in rest.terms if f % factor), rest.offset % factor)
        if less.range[0] >= 0 and less.range[1] < factor:
            more = tuple((a, f // factor) for a, f in rest.terms if f % factor == 0)
            quotient, left = divide(Index(more, rest.offset // factor), divisor // factor)
            return whole + quotient, left * factor + less
    quotient = whole + Index(((Quotient(rest, divisor), 1),))
    return quotient, Index(((Remainder(rest, divisor), 1),))


def flatten(indices: Sequence[Index], shape: Sequence[int]) -> Index:
    """The index in row-major memory."""
    flat = Index()
    for index, n in zip(indices, shape, strict=True):
        flat = flat * n + index
    return recombined(flat)


def unflatten(flat: Index, shape: Sequence[int]) -> tuple[Index, ...]:
    """The indices along the axes of one in row-major memory."""
    found: list[Index] = []
    for n in reversed(shape[1:]):
        flat, rest = divide(flat, n)
        found.append(rest)
    return (flat, *reversed(found)) if shape else ()


def map_atoms(index: Index, change: Callable[[Var | Data], Index]) -> Index:
    """The index with its variables and data replaced, simplified again."""
    result = constant(index.offset)
    for atom, factor in index.terms:
        match atom:
            case Var() | Data():
                new = change(atom)
            case Quotient(inner, divisor):
                new = divide(map_atoms(inner, change), divisor)[0]
            case Remainder(inner, divisor):
                new = divide(map_atoms(inner, change), divisor)[1]
            case Bounded(inner, extent):
                new = bounded(map_atoms(inner, change), extent)
        result = result + new * factor
    return recombined(result)


def substitute(index: Index, values: Mapping[Var, Index]) -> Index:
    """The index with variables replaced."""
    if all(isinstance(atom, Var) and atom not in values for atom, _ in index.terms):
        return index

    def change(atom: Var | Data) -> Index:
        if isinstance(atom, Data):
            return Index(((atom, 1),))
        return values[atom] if atom in values else variable(atom)

    return map_atoms(index, change)


def renamed_data(index: Index, rename: Callable[[str], str]) -> Index:
    """The index with the locals that are data renamed."""
    if all(isinstance(atom, Var) for atom, _ in index.terms):
        return index

    def change(atom: Var | Data) -> Index:
        if isinstance(atom, Data):
            return data(rename(atom.local), atom.extent)
        return variable(atom)

    return map_atoms(index, change)


def recombined(index: Index) -> Index:
    """The index with d · ⌊x / d⌋ + x mod d written as x."""
    factors = dict(index.terms)
    for atom, factor in index.terms:
        if not isinstance(atom, Remainder) or factors.get(atom) != factor:
            continue
        whole = Quotient(atom.index, atom.divisor)
        if factors.get(whole) == factor * atom.divisor:
            rest = tuple((a, f) for a, f in index.terms if a not in (atom, whole))
            return recombined(Index(rest, index.offset) + atom.index * factor)
    return index


def variables_in(index: Index) -> set[Var]:
    """Loop variables that an index depends on."""
    found: set[Var] = set()
    for atom, _ in index.terms:
        match atom:
            case Var():
                found.add(atom)
            case Quotient(inner, _) | Remainder(inner, _) | Bounded(inner, _):
                found |= variables_in(inner)
            case Data():
                pass
    return found


def data_locals(index: Index) -> list[str]:
    """Locals that an index uses as data."""
    found: list[str] = []
    for atom, _ in index.terms:
        match atom:
            case Data(local, _):
                found.append(local)
            case Quotient(inner, _) | Remainder(inner, _) | Bounded(inner, _):
                found += data_locals(inner)
            case Var():
                pass
    return found
