"""Queries and keys of an attention in blocks: who sees whom.

Equal blocks where a size divides the length; else the last block has a size of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treadle.kernel.index import Index, Var, variable
from treadle.kernel.nodes import For, Position, Role, Statement, Value
from treadle.kernel.target import Rewriting
from treadle.schedule.nests import Body, compare, in_order
from treadle.schedule.softmax import I32, choose


@dataclass(frozen=True, slots=True)
class Blocks:
    """Positions in equal blocks, from one on."""

    first: int
    count: int
    size: int

    @property
    def end(self) -> int:
        return self.first + self.count * self.size


def blocks_of(length: int, limit: int, least: int, first: int = 0) -> list[Blocks]:
    """Blocks of at most about `limit` positions, and at least `least` where there are as many.

    Equal ones if a divisor is as large; else as large as can be, and one with what is left. A rest
    that is shorter than `least` makes the last block longer.
    """
    if length <= limit:
        return [Blocks(first, 1, length)] if length else []
    size = max(n for n in range(1, limit + 1) if length % n == 0)
    if size >= least:
        return [Blocks(first, length // size, size)]
    count = (length - least) // limit
    equal, rest = Blocks(first, count, limit), length - count * limit
    return [*([equal] if count else []), Blocks(first + count * limit, 1, rest)]


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys in equal blocks, of which some queries see all, or the first ones."""

    blocks: Blocks
    seen: Index | None = None  # blocks that are seen; None for all

    @property
    def var(self) -> Var:
        return Var("kb", self.blocks.count)

    @property
    def first(self) -> Index:
        """The first key of a block."""
        return variable(self.var) * self.blocks.size + self.blocks.first

    def each(self, body: Sequence[Statement]) -> Body:
        """The body for each block."""
        if self.seen is None:
            return in_order([self.var], body)
        return (For(self.var, Role.SEQUENTIAL, tuple(body), self.seen),)


@dataclass(frozen=True, slots=True)
class Queries:
    """Queries in equal blocks, and the keys that those of a block see."""

    blocks: Blocks
    keys: tuple[Keys, ...]
    is_causal: bool = False  # whether each of them sees only the keys up to its own position

    @property
    def var(self) -> Var:
        return Var("qb", self.blocks.count)

    @property
    def lane(self) -> Var:
        """A query of a block."""
        return Var("i", self.blocks.size)

    @property
    def first(self) -> Index:
        """The first query of a block."""
        return variable(self.var) * self.blocks.size + self.blocks.first

    @property
    def count(self) -> int:
        """Keys that any of them sees."""
        return self.keys[-1].blocks.end

    @property
    def seen(self) -> Index | None:
        """Keys that the queries of a block see; None for all."""
        last = self.keys[-1]
        return None if last.seen is None else last.seen * last.blocks.size

    def masked(self, key: Index, value: Value, other: float) -> Value:
        """A value where the query of this lane sees a key."""
        if not self.is_causal:
            return value
        query = Position(self.first + variable(self.lane), I32)
        return choose(compare("le", Position(key, I32), query), value, other)


def queries_of(length: int, count: int, causal: bool, limits: Rewriting) -> list[Queries]:
    """All queries. Causal ones see the keys up to their position, or all where there are fewer."""
    square = min(length, count) if causal else 0
    found = _causal(square, limits)
    short = limits.attention_keys  # so many keys are one block if no size divides them
    block, least = limits.attention_block, limits.least_attention_block
    keys = blocks_of(count, block, least)
    if len(keys) > 1 and count <= short:
        keys = [Blocks(0, 1, count)]
    every = tuple(map(Keys, keys))
    later = blocks_of(length - square, block, least, square)
    return [*found, *(Queries(blocks, every) for blocks in later)]


def _causal(length: int, limits: Rewriting) -> list[Queries]:
    """As many queries as keys. Small blocks leave out more of the keys that come after a query."""
    size, block, least = limits.causal_block, limits.attention_block, limits.least_attention_block
    is_even = length % size == 0
    every = blocks_of(length, size if is_even else block, least)
    found: list[Queries] = []
    for i, blocks in enumerate(every):
        own = variable(Var("qb", blocks.count)) + 1 if blocks.count > 1 else None
        found.append(Queries(blocks, (*map(Keys, every[:i]), Keys(blocks, own)), True))
    return found
