"""Memory for what programs compute on the way: one block for all of them.

Nothing in it outlives a run, and runs follow each other in one stream. So a step, its evaluation
and its forwards take the memory of the largest of them, not of all together.
"""

from __future__ import annotations

import threading
import weakref

from treadle.runtime.cuda.device import Block, device


class Arena:
    """A block as large as the largest of those who use it asks for.

    It moves when that changes, so that whoever has its address in a graph asks for it before each
    launch, and holds what it is given until then. Each run is one launch: those of other threads
    come before or after it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: dict[int, int] = {}  # bytes, by who asked
        self._count = 0  # of those there were when the block was made
        self._block = Block(0)

    def ask(self, user: object, nbytes: int) -> None:
        """Have room for so many bytes as long as somebody is there."""
        if id(user) not in self._asked:
            weakref.finalize(user, self._asked.pop, id(user), None)
        with self._lock:
            self._asked[id(user)] = nbytes
            self._count = 0

    def block(self) -> Block:
        """The block as it is now."""
        with self._lock:
            if self._count != len(self._asked):
                self._count = len(self._asked)
                size = max(list(self._asked.values()), default=0)
                if size != self._block.nbytes:
                    self._block = Block(0)  # given back first: both need not fit
                    self._block = Block(size)
            return self._block

    @property
    def nbytes(self) -> int:
        return self._block.nbytes


_arenas: weakref.WeakValueDictionary[int, Arena] = weakref.WeakValueDictionary()
_FIRST = threading.Lock()


def shared_arena() -> Arena:
    """The device's, as long as a program holds it."""
    with _FIRST:
        here = id(device())  # which its block refers to
        found = _arenas.get(here)
        if found is None:
            found = _arenas[here] = Arena()
        return found
