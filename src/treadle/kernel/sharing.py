"""Which threads of a group touched which elements since they last waited for each other.

A thread that reads an element which another wrote, or writes one that another touched, must stand
after a barrier. Elements of a private row have one owner, whatever barriers there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from treadle.base.errors import GraphError

Element = tuple[str, int]  # by the buffer's name


@dataclass(frozen=True, slots=True)
class Threads:
    """Neighbouring threads that execute a statement: one, a warp, or all of a group."""

    first: int
    count: int = 1

    @property
    def writer(self) -> Threads:
        """The one of them that stores."""
        return Threads(self.first)

    @property
    def end(self) -> int:
        return self.first + self.count

    def and_(self, other: Threads) -> Threads:
        """Both, and whoever is between them."""
        first = min(self.first, other.first)
        return Threads(first, max(self.end, other.end) - first)

    def is_with(self, other: Threads) -> bool:
        """Whether both are one and the same thread, to which its own order is enough."""
        return self == other and self.count == 1


@dataclass
class Sharing:
    """What the threads of one group did since the last barrier."""

    kernel: str
    private: frozenset[str] = frozenset()  # rows of which every thread has its own elements
    written: dict[Element, Threads] = field(default_factory=dict)
    read: dict[Element, Threads] = field(default_factory=dict)
    added: dict[Element, Threads] = field(default_factory=dict)  # in one step each
    owners: dict[Element, int] = field(default_factory=dict)

    def reads(self, buffer: str, elements: Iterable[int], by: Threads, lane: int) -> None:
        for element in self._shared(buffer, elements, lane):
            for writer in (self.written.get(element), self.added.get(element)):
                if writer is not None and not writer.is_with(by):
                    raise self._meeting(element, "reads what another thread wrote")
            self.read[element] = by.and_(self.read.get(element, by))

    def writes(self, buffer: str, elements: Iterable[int], by: Threads, lane: int) -> None:
        for element in self._shared(buffer, elements, lane):
            every = (noted.get(element) for noted in (self.written, self.read, self.added))
            if any(other is not None and not other.is_with(by) for other in every):
                raise self._meeting(element, "writes what another thread touched")
            self.written[element] = by

    def adds(self, buffer: str, elements: Iterable[int], by: Threads, lane: int) -> None:
        """Sums in one step each, which may meet one another."""
        for element in self._shared(buffer, elements, lane):
            every = (noted.get(element) for noted in (self.written, self.read))
            if any(other is not None and not other.is_with(by) for other in every):
                raise self._meeting(element, "adds to what another thread touched")
            self.added[element] = by.and_(self.added.get(element, by))

    def barrier(self, of: Threads) -> None:
        """Some threads have waited for each other: what they alone touched is seen by all."""
        for noted in (self.written, self.read, self.added):
            inside = [e for e, t in noted.items() if of.first <= t.first and t.end <= of.end]
            for element in inside:
                del noted[element]

    def start(self) -> None:
        """Another iteration of the grid."""
        for noted in (self.written, self.read, self.added):
            noted.clear()
        self.owners.clear()

    def _shared(self, buffer: str, elements: Iterable[int], lane: int) -> Iterator[Element]:
        """Elements but for those of a private row, each of which has one owner."""
        for element in ((buffer, e) for e in elements):
            if buffer not in self.private:
                yield element
            elif self.owners.setdefault(element, lane) != lane:
                raise self._meeting(element, "touches a private element of another thread")

    def _meeting(self, element: Element, what: str) -> GraphError:
        buffer, at = element
        cause = f"kernel {self.kernel}: without a barrier a thread {what}: {buffer}[{at}]"
        return GraphError("interpret", cause)
