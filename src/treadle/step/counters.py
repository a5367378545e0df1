"""What a step counts, and the keys of its random numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treadle.base.errors import LoadError
from treadle.domains.philox import make_key
from treadle.optim.append import Mode


@dataclass(slots=True)
class Counters:
    """Updates, and micro-steps since the last one; the seed and stream of random numbers."""

    seed: int
    stream: int = 0  # a step by itself has none
    steps: int = 0
    micro: int = 0

    def mode(self, accumulate: int) -> Mode:
        """What the next call does."""
        if accumulate == 1:
            return Mode.UPDATE
        return Mode.ACCUMULATE_AND_UPDATE if self.micro == accumulate - 1 else Mode.ACCUMULATE

    def advance(self, mode: Mode) -> None:
        if mode is Mode.ACCUMULATE:
            self.micro += 1
        else:
            self.steps, self.micro = self.steps + 1, 0

    def key(self, ahead: int = 0) -> np.ndarray:
        """Of a call's random numbers: the next one, or one so many updates later."""
        return make_key(self.seed, self.steps + ahead, self.micro, self.stream)

    def words(self) -> np.ndarray:
        """As `state_dict` has them."""
        seed = self.seed % 2**64
        words = [seed & 0xFFFFFFFF, seed >> 32, self.steps, self.micro]
        return np.array([*words, self.stream] if self.stream else words, np.int64)

    @staticmethod
    def of(words: np.ndarray, accumulate: int) -> Counters:
        """What `words` gave, for a step that accumulates so many calls."""
        if words.shape not in ((4,), (5,)) or words.dtype.kind not in "iu":
            raise LoadError("load_state_dict", "there are no step:counters", "Use load_params.")
        low, high, steps, micro, *stream = (int(w) for w in words)
        if not (steps >= 0 and 0 <= micro < accumulate):
            raise LoadError(
                "load_state_dict",
                f"the state is at micro-step {micro}, but {accumulate} make an update here",
                "Compile with the same accumulate, or save right after an update.",
            )
        return Counters(low + (high << 32), stream[0] if stream else 0, steps, micro)
