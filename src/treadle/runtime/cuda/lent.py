"""Results that stay on the device: the memory that a program wrote, lent until it is let go.

A captured graph has addresses in it, so a result cannot have new memory for every run. Each has
few blocks of its own instead, and a run writes into one that nobody holds. A loop that drops its
results goes round the same ones, with a graph for each. If all are held, the result is copied.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import numpy as np

from treadle.kernel.target import GPU
from treadle.runtime.cuda.device import Block

LENT = -2  # as an address: of graphs whose results stay on the device


class Lent:
    """A block that somebody holds, as an array's memory: it comes back when this is gone."""

    __slots__ = ("__weakref__", "_block")

    def __init__(self, block: Block):
        self._block = block

    @property
    def address(self) -> int:
        return self._block.address

    def read(self, array: np.ndarray) -> np.ndarray:
        return self._block.read(array)


class Lender:
    """Blocks of each result of a program."""

    def __init__(self, sizes: Mapping[int, int]):
        self._sizes = dict(sizes)  # bytes by slot of the plan
        self._blocks: dict[int, list[Block]] = {}
        self._held: dict[int, weakref.ref[Lent]] = {}  # by address

    def free(self) -> dict[int, Block]:
        """A block of each result that has one to spare, by slot; the same as long as it may."""
        found = {slot: self._free(slot) for slot in self._sizes}
        return {slot: block for slot, block in found.items() if block is not None}

    def _free(self, slot: int) -> Block | None:
        blocks = self._blocks.setdefault(slot, [])
        for block in blocks:
            held = self._held.get(block.address)
            if held is None or held() is None:
                return block
        if len(blocks) < GPU.launching.result_blocks:
            blocks.append(Block(max(1, self._sizes[slot])))
            return blocks[-1]
        return None

    def lend(self, block: Block) -> Lent:
        lent = Lent(block)
        self._held[block.address] = weakref.ref(lent)
        return lent
