"""Index arithmetic: sums of loop variables, quotients and remainders, with ranges.

An index is affine over atoms. Quotients and remainders simplify away wherever the ranges allow it,
so that a reshape that only regroups axes costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from treadle.base.quick import quick

Range = tuple[int, int]  # lowest and highest value, both included


@quick
@dataclass(frozen=True, slots=True)
class Var:
    """A loop variable: 0 ≤ value < extent."""

    name: str
    extent: int

    def __hash__(self) -> int:
        return hash(self.name)  # which a string keeps

    def __str__(self) -> str:
        return self.name


@quick
@dataclass(frozen=True, slots=True)
class Data:
    """An index that is data: the named local, held between 0 and extent − 1."""

    local: str
    extent: int

    def __str__(self) -> str:
        return f"{self.local}<{self.extent}"


@quick
@dataclass(frozen=True, slots=True)
class Quotient:
    """⌊index / divisor⌋ of an index that is not negative."""

    index: Index
    divisor: int

    def __str__(self) -> str:
        return f"({self.index})/{self.divisor}"


@quick
@dataclass(frozen=True, slots=True)
class Remainder:
    """index mod divisor of an index that is not negative."""

    index: Index
    divisor: int

    def __str__(self) -> str:
        return f"({self.index})%{self.divisor}"


@quick
@dataclass(frozen=True, slots=True)
class Bounded:
    """An index that a guard around its use holds between 0 and extent − 1."""

    index: Index
    extent: int

    def __str__(self) -> str:
        return f"[{self.index}]"


Atom = Var | Data | Quotient | Remainder | Bounded


@quick
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
        terms = tuple(factors.items())
        if not all(factors.values()):
            terms = tuple([term for term in terms if term[1]])
        return Index(terms, self.offset + other.offset)

    def __mul__(self, factor: int) -> Index:
        if factor == 0:
            return Index()
        if factor == 1:
            return self
        return Index(tuple([(a, f * factor) for a, f in self.terms]), self.offset * factor)

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
            first, last = (least, most) if factor >= 0 else (most, least)
            low, high = low + first * factor, high + last * factor
        return low, high

    def factor_of(self, var: Var) -> int | None:
        """How far a step of the variable moves the index; None where it is not linear in it."""
        found = 0
        for atom, factor in self.terms:
            if isinstance(atom, Var):
                found += factor if atom == var else 0
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
    # Here and below as in `operands_of`: a `match` takes three times as long.
    if isinstance(atom, (Var, Data, Bounded)):
        return 0, max(0, atom.extent - 1)
    low, high = atom.index.range
    if isinstance(atom, Quotient):
        return low // atom.divisor, high // atom.divisor
    return 0, min(atom.divisor - 1, high)


def uses(atom: Atom, var: Var) -> bool:
    if isinstance(atom, Var):
        return atom == var
    return not isinstance(atom, Data) and any(uses(a, var) for a, _ in atom.index.terms)


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
    factors, offset = dict[Atom, int](), index.offset
    for atom, factor in index.terms:
        if isinstance(atom, (Var, Data)):
            new = change(atom)
        elif isinstance(atom, Bounded):
            new = bounded(map_atoms(atom.index, change), atom.extent)
        else:
            parts = divide(map_atoms(atom.index, change), atom.divisor)
            new = parts[0] if isinstance(atom, Quotient) else parts[1]
        offset += new.offset * factor
        for a, f in new.terms:  # as a sum of indices: what comes to nothing has no place any more
            total = factors.get(a, 0) + f * factor
            if total:
                factors[a] = total
            else:
                factors.pop(a, None)
    return recombined(Index(tuple(factors.items()), offset))


def substitute(index: Index, values: Mapping[Var, Index]) -> Index:
    """The index with variables replaced."""
    for atom, _ in index.terms:
        if not isinstance(atom, Var) or atom in values:
            break
    else:
        return index

    def change(atom: Var | Data) -> Index:
        if isinstance(atom, Data):
            return Index(((atom, 1),))
        return values[atom] if atom in values else variable(atom)

    return map_atoms(index, change)


def renamed_data(index: Index, rename: Callable[[str], str]) -> Index:
    """The index with the locals that are data renamed."""
    for atom, _ in index.terms:
        if not isinstance(atom, Var):
            break
    else:
        return index

    def change(atom: Var | Data) -> Index:
        if isinstance(atom, Data):
            return data(rename(atom.local), atom.extent)
        return variable(atom)

    return map_atoms(index, change)


def recombined(index: Index) -> Index:
    """The index with d · ⌊x / d⌋ + x mod d written as x."""
    for atom, _ in index.terms:
        if isinstance(atom, Remainder):
            break
    else:
        return index
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
        if isinstance(atom, Var):
            found.add(atom)
        elif not isinstance(atom, Data):
            found |= variables_in(atom.index)
    return found


def data_locals(index: Index) -> list[str]:
    """Locals that an index uses as data."""
    found: list[str] = []
    for atom, _ in index.terms:
        if isinstance(atom, Data):
            found.append(atom.local)
        elif not isinstance(atom, Var):
            found += data_locals(atom.index)
    return found
