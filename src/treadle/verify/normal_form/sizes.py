"""Sizes: as they are, or as symbols where a graph was made with values that can be told apart.

Graphs have integers for shapes. A graph that is made with values far from each other for its sizes
says for every integer in it which polynomial of the sizes it is: 1009 + 2003 is n + m.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement

from treadle.verify.normal_form.index import Index, Variable, number, of_letter

_MOST_FACTORS = 4
_MOST_TIMES = 4
_FARTHEST = 8  # from a polynomial of sizes, by which an integer may be off
_PLAIN = 64  # integers up to this are what they are


class AmbiguousSizeError(Exception):
    """An integer of a graph may be several polynomials of its sizes."""


@dataclass(frozen=True, eq=False)
class Sizes:
    """Symbols and the values that stand for them in a graph."""

    values: Mapping[str, int]

    def index(self, value: int) -> Index:
        """The polynomial of the sizes that an integer of the graph is."""
        if not self.values or abs(value) <= _PLAIN:
            return number(value)
        found = self._known.get(value)
        if found is None:
            found = self._known[value] = self._decoded(value)
        return found

    @cached_property
    def _known(self) -> dict[int, Index]:
        return {}

    @cached_property
    def _products(self) -> dict[int, Index]:
        """Products of sizes, times small numbers, by value."""
        letters = {v: of_letter(Variable(name)) for name, v in self.values.items()}
        found: dict[int, Index] = {}
        for count in range(1, _MOST_FACTORS + 1):
            for chosen in combinations_with_replacement(sorted(letters), count):
                value, index = 1, number(1)
                for v in chosen:
                    value, index = value * v, index * letters[v]
                for times in range(1, _MOST_TIMES + 1):
                    found.setdefault(value * times, index.times(times))
        return found

    def _decoded(self, value: int) -> Index:
        """One product, a sum or difference of two, or a sum of three sizes, and a small number."""
        for off in sorted(range(-_FARTHEST, _FARTHEST + 1), key=abs):
            single = self._products.get(value - off)
            if single is not None:
                return single + number(off)
            found = self._sums_of_two(value - off)
            if found:
                return self._only(value, found) + number(off)
        found = self._sums_of_three(value)
        return self._only(value, found) if found else number(value)

    def _only(self, value: int, found: dict[Index, None]) -> Index:
        if len(found) > 1:
            raise AmbiguousSizeError(f"{value} is {' or '.join(map(repr, found))}")
        return next(iter(found))

    def _sums_of_two(self, value: int) -> dict[Index, None]:
        found: dict[Index, None] = {}
        for one, index in self._products.items():
            other = value - one
            if other in self._products:
                found[index + self._products[other]] = None
            elif -other in self._products:
                found[index - self._products[-other]] = None
        return found

    def _sums_of_three(self, value: int) -> dict[Index, None]:
        found: dict[Index, None] = {}
        letters = {v: of_letter(Variable(name)) for name, v in self.values.items()}
        for chosen in combinations_with_replacement(sorted(letters), 3):
            off = value - sum(chosen)
            if abs(off) <= _FARTHEST:
                index = letters[chosen[0]] + letters[chosen[1]] + letters[chosen[2]]
                found[index + number(off)] = None
        return found


AS_GIVEN = Sizes({})
# Values that are far from each other's small multiples, sums and differences.
GENERIC = (10_007, 17_393, 30_241, 52_583, 91_423, 158_981, 276_443, 480_637)
OTHERS = (11_003, 19_121, 33_247, 57_803, 100_501, 174_763, 303_889, 528_383)


def generic(names: str, values: tuple[int, ...] = GENERIC) -> Sizes:
    """Sizes of one letter each."""
    return Sizes(dict(zip(names, values, strict=False)))
