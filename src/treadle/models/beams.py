"""Beam search for one prompt: the rules of `transformers`."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from treadle.models.sampling import Choice, log_probabilities

NEVER = -1e9  # the score of what may not be chosen, as in the reference


@dataclass
class Beams:
    """The likeliest continuations so far, running and finished."""

    prompt: np.ndarray
    count: int
    most: int  # new tokens
    ends: tuple[int, ...]
    length_penalty: float
    early_stopping: bool | str
    is_open: bool = True  # whether a running one may still become the best
    has_reached_end: bool = False  # whether nothing can go on
    sources: np.ndarray = field(init=False)  # which beam each running one goes on from
    finished: list[tuple[float, np.ndarray]] = field(default_factory=list)  # best first

    def __post_init__(self) -> None:
        self.new = np.zeros((self.count, 0), np.int64)  # the running ones' tokens
        self.scores = np.full(self.count, NEVER)
        self.scores[0] = 0.0  # the others are copies of the first until they differ
        self.sources = np.arange(self.count)

    @property
    def last(self) -> np.ndarray:
        """The tokens that the running ones go on with."""
        found: np.ndarray = self.new[:, -1]
        return found

    @property
    def is_full(self) -> bool:
        return len(self.finished) == self.count

    def advance(self, logits: np.ndarray, choice: Choice) -> None:
        """Choose the next tokens from logits (beams, V)."""
        seen = [np.concatenate([self.prompt, row]) for row in self.new]
        every = choice.scores(log_probabilities(logits), seen) + self.scores[:, None]
        vocabulary = logits.shape[1]
        kept = min(max(2, 1 + len(self.ends)) * self.count, every.size)
        order = np.argsort(-every.reshape(-1), kind="stable")[:kept]
        beams, tokens = order // vocabulary, order % vocabulary
        scores = every.reshape(-1)[order]
        length = self.new.shape[1] + 1
        is_end = np.isin(tokens, self.ends) | (length >= self.most)
        grown = np.concatenate([self.new[beams], tokens[:, None]], 1)
        self._finish(grown, scores, is_end, length)
        going = np.argsort(-(scores + NEVER * is_end), kind="stable")[: self.count]
        self.new, self.sources = grown[going], beams[going]
        self.scores = (scores + NEVER * is_end)[going]
        self.has_reached_end = bool(is_end.all())
        self._close(length)

    def _finish(self, grown: np.ndarray, scores: np.ndarray, is_end: np.ndarray, n: int) -> None:
        """Those of the best that have ended compete with the finished ones."""
        if not self.is_open or (self.is_full and self.early_stopping is True):
            return
        for row, score, ended in zip(
            grown[: self.count], scores[: self.count], is_end[: self.count], strict=True
        ):
            if ended:
                self.finished.append((float(score) / n**self.length_penalty, row))
        self.finished.sort(key=lambda pair: -pair[0])
        del self.finished[self.count :]

    def _close(self, length: int) -> None:
        """No running one may become better than the worst of the finished ones."""
        is_far = self.early_stopping == "never" and self.length_penalty > 0
        reach = self.most if is_far else length
        best = self.scores[0] / reach**self.length_penalty
        worst = self.finished[-1][0] if self.is_full else NEVER
        self.is_open = self.is_open and bool(best > worst)

    def best(self) -> np.ndarray:
        return np.concatenate([self.prompt, self.finished[0][1]])
