"""Indices: sums of variables, of quotients and remainders, and of what is data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from treadle_checker import reading
from treadle_checker.reading import among, integer, need, several

Array = Any  # numpy.ndarray
Local = Callable[[str], Array]  # what is data, by its name
_name, _signed = reading.text(), integer(-(2**60))


@dataclass(frozen=True, slots=True)
class Index:
    """offset + Σ factor · atom. An atom that is text is a variable."""

    offset: int
    terms: tuple[tuple[int, str | Atom], ...] = ()

    def at(self, variables: Mapping[str, Array], local: Local | None = None) -> Array:
        """Its value, with arrays for variables."""
        total = np.asarray(self.offset, np.int64)
        for factor, atom in self.terms:
            found = variables[atom] if isinstance(atom, str) else atom.at(variables, local)
            total = total + factor * found
        return total

    def fixed(self, name: str, value: int) -> Index:
        """With a number for a variable."""
        own = sum(factor for factor, atom in self.terms if atom == name)
        rest = tuple(t for t in self.terms if t[1] != name)
        return Index(self.offset + own * value, rest)

    def replaced(self, given: Mapping[str, Index]) -> Index:
        """With indices for variables, inside quotients and remainders too."""
        offset, terms = self.offset, list[tuple[int, str | Atom]]()
        for factor, atom in self.terms:
            found = given.get(atom) if isinstance(atom, str) else None
            if found is not None:
                offset += factor * found.offset
                terms += [(factor * own, inner) for own, inner in found.terms]
            elif isinstance(atom, Atom) and isinstance(atom.of, Index):
                terms.append((factor, Atom(atom.kind, atom.of.replaced(given), atom.size)))
            else:
                terms.append((factor, atom))
        return summed(offset, terms)

    @property
    def names(self) -> set[str]:
        """Its variables."""
        found: set[str] = set()
        for _, atom in self.terms:
            if isinstance(atom, str):
                found.add(atom)
            elif isinstance(atom.of, Index):
                found |= atom.of.names
        return found

    @property
    def data(self) -> dict[str, int]:
        """What is data in it, by name, and below which number it is clamped."""
        found: dict[str, int] = {}
        for _, atom in self.terms:
            if isinstance(atom, Atom):
                found |= {atom.of: atom.size} if isinstance(atom.of, str) else atom.of.data
        return found


Guard = tuple[Index, int, int]  # an index, the lowest that it may be, and what it is below
read_guard = reading.row(reading.pair, lambda given: read_index(given), _signed, _signed)


def within(guards: Iterable[Guard], number: Callable[[Index], Array]) -> Array:
    """Where all guards hold, by the numbers that their indices are."""
    held = np.ones((), bool)
    for index, low, high in guards:
        at = number(index)
        held = held & (low <= at) & (at < high)
    return held


@dataclass(frozen=True, slots=True)
class Atom:
    """What is no variable: a "quotient" or "remainder" by `size`; an index that a guard holds below
    it ("bounded"), a local that is clamped below it ("data"), or any number below it ("block")."""

    kind: str
    of: Index | str
    size: int

    def at(self, variables: Mapping[str, Array], local: Local | None) -> Array:
        if isinstance(self.of, str):
            assert local is not None
            return np.clip(local(self.of).astype(np.int64), 0, max(0, self.size - 1))
        found = self.of.at(variables, local)
        match self.kind:
            case "quotient":
                return found // self.size
            case "remainder":
                return found % self.size
        return found


def _read_atom(given: Any) -> Any:
    if isinstance(given, str):
        return _name(given)
    known = among(["data", "bounded", "quotient", "remainder"])
    is_data = isinstance(given, list) and given[:1] == ["data"]
    found = reading.row(Atom, known, _name if is_data else read_index, integer())(given)
    need(found.size or found.kind == "bounded", found.size, "something to divide by")
    return found


def read_index(given: Any) -> Any:
    """[offset, [factor, atom], …]."""
    need(isinstance(given, list) and 0 < len(given) <= 100, given, "an index")
    terms = several(reading.row(reading.pair, _signed, _read_atom))
    return summed(_signed(given[0]), terms(given[1:]))


def summed(offset: int, terms: Iterable[tuple[int, str | Atom]]) -> Index:
    """An index whose atoms are all different: factors of equal ones are added."""
    factors: dict[str | Atom, int] = {}
    for factor, atom in terms:
        factors[atom] = factors.get(atom, 0) + factor
    return Index(offset, tuple((f, a) for a, f in factors.items() if f))
