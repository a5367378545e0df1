"""Values that are gathered before they are used and dropped after: when, and where they lie.

Uses are known in their order before anything runs. A buffer has one address, which others have
while it is dropped.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from treadle.runtime.chain import aligned

# Of all bytes one part may be held, if what is used at a time is less than half of that, and as
# much is on its way: a layer's weights are often copied right after each other, with nothing beside
# that could hide them.
PART = 8
SMALL = 1 << 16  # bytes of what stays until its last use: it takes a message like any other


@dataclass(frozen=True, slots=True)
class Fetch:
    """A buffer that begins to be gathered before one position, is used from another on, to a last.

    From `begin` to `last` its memory is nobody else's.
    """

    buffer: str
    begin: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Fetching:
    """All fetches in the order of their first uses; where buffers lie, and in how many bytes."""

    fetches: tuple[Fetch, ...]
    offsets: Mapping[str, int]
    nbytes: int


def fetching_of(uses: Sequence[Collection[str]], sizes: Mapping[str, int]) -> Fetching:
    """Fetches for the buffers that each position uses."""
    most = max((sum(sizes[n] for n in names) for names in uses), default=0)
    room = max(2 * most, sum(sizes.values()) // PART)
    fetches = _ahead(_fetches(uses, sizes, room), sizes, room)
    offsets = _offsets(fetches, sizes)
    ends = [offsets[n] + aligned(sizes[n]) for n in offsets]
    return Fetching(tuple(fetches), offsets, max(ends, default=0))


def _fetches(uses: Sequence[Collection[str]], sizes: Mapping[str, int], room: int) -> list[Fetch]:
    """Each begins where it is first used. Whoever is used last of all makes room.

    That is the least number of bytes that are gathered for what may be held (Belady).
    """
    at: dict[str, list[int]] = {}  # positions that use a buffer
    for position, names in enumerate(uses):
        for name in names:
            at.setdefault(name, []).append(position)
    found: list[Fetch] = []
    held: dict[str, int] = {}  # which of the fetches a buffer is there by

    def next_use(name: str, position: int) -> int:
        number = bisect_right(at[name], position)
        return at[name][number] if number < len(at[name]) else len(uses)

    for position, names in enumerate(uses):
        for name in sorted(set(names) - held.keys()):
            while sum(sizes[n] for n in held) + sizes[name] > room:
                others = [n for n in held if n not in names and sizes[n] >= SMALL]
                if not others:
                    break
                del held[max(others, key=lambda n: next_use(n, position))]
            held[name] = len(found)
            found.append(Fetch(name, position, position, position))
        for name in names:
            found[held[name]] = replace(found[held[name]], last=position)
    return found


def _ahead(fetches: Sequence[Fetch], sizes: Mapping[str, int], room: int) -> list[Fetch]:
    """Fetches begin where some bytes are on their way, or where what is used before them is there.

    Their memory is not read any more then.
    """
    found: list[Fetch] = []
    ended: dict[str, int] = {}  # the last use of an earlier fetch of a buffer
    for number, fetch in enumerate(fetches):
        begin, nbytes = fetch.first, 0
        for earlier in reversed(fetches[:number]):
            if nbytes and nbytes + sizes[earlier.buffer] > room:
                break
            begin = earlier.first
            nbytes += sizes[earlier.buffer] if begin < fetch.first else 0
        found.append(replace(fetch, begin=max(begin, ended.get(fetch.buffer, -1) + 1)))
        ended[fetch.buffer] = fetch.last
    return found


def _offsets(fetches: Sequence[Fetch], sizes: Mapping[str, int]) -> dict[str, int]:
    """The large ones first, each at the first place that is free at all times that it is there."""
    times: dict[str, list[Fetch]] = {}
    for fetch in fetches:
        times.setdefault(fetch.buffer, []).append(fetch)
    found: dict[str, int] = {}
    for name in sorted(times, key=lambda n: (-sizes[n], n)):
        taken = sorted(
            (found[other], found[other] + aligned(sizes[other]))
            for other in found
            if any(
                a.begin <= b.last and b.begin <= a.last for a in times[name] for b in times[other]
            )
        )
        start = 0
        for low, high in taken:
            if start + aligned(sizes[name]) <= low:
                break
            start = max(start, high)
        found[name] = start
    return found
