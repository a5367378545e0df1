"""Counts of elementary operations, and limits on them: a look at something ends by a count, which
is the same on every machine, never by a clock.

One operation is about what an addition of one element takes in both fields, 40 ns on one core of
2024. Calls of Python count too, so that many looks at few elements end as well.
"""

from __future__ import annotations

from treadle_checker.reading import NotEstablished

CALL = 2**10  # of asking for elements once, however few: 40 µs
FILE = 2**31  # of everything in a file: about a minute


class Budget:
    """Operations so far. Those of a part count in the whole too."""

    def __init__(self, limit: int = FILE, whole: Budget | None = None):
        self.spent, self.limit, self.whole = 0, limit, whole

    def spend(self, operations: int) -> None:
        """Count operations; NotEstablished beyond the limit."""
        self.need(operations)
        self.spent += operations
        if self.whole is not None:
            self.whole.spend(operations)

    def need(self, operations: int) -> None:
        """NotEstablished if so many more operations are beyond the limit: none has begun."""
        if not self.allows(operations):
            raise NotEstablished(f"it takes more than {self.limit:,} operations")

    def allows(self, operations: int) -> bool:
        """Whether so many more operations are within the limit."""
        left = self.whole is None or self.whole.allows(operations)
        return left and self.spent + operations <= self.limit

    def part(self, limit: int) -> Budget:
        """The work of one comparison of several, with a limit of its own."""
        return Budget(min(limit, self.limit), self)
