"""How the next token is chosen from logits, on the host: as the processors of `transformers`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treadle.base.errors import ArgumentError
from treadle.base.numbers import (
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    check_number,
    check_seed,
    check_whole,
)


@dataclass(frozen=True)
class Choice:
    """The likeliest token (temperature 0), or one drawn from what is left of the distribution.

    First tokens that occurred are made less likely, then logits are divided by the temperature,
    and then top_k, top_p and min_p each leave some out.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("generate", "temperature", self.temperature, NOT_NEGATIVE)
        check_number("generate", "repetition_penalty", self.repetition_penalty, POSITIVE)
        check_seed("generate", self.seed)
        if self.top_k is not None:
            check_whole("generate", "top_k", self.top_k)
        for name in ("top_p", "min_p"):
            if getattr(self, name) is not None:
                check_number("generate", name, getattr(self, name), FRACTION)
        narrowing = [n for n in ("top_k", "top_p", "min_p") if getattr(self, n) is not None]
        if narrowing and not self.temperature:
            cause = f"{narrowing[0]} with temperature 0, which takes the likeliest token"
            raise ArgumentError("generate", cause, "Give a temperature, 1.0 for instance.")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken as the model says."""
        return not self.temperature and self.repetition_penalty == 1.0

    def sources(self, rows: int) -> list[np.random.Generator]:
        """A stream of random numbers for each row, whatever the others are."""
        key = check_seed("generate", self.seed)
        return [np.random.Generator(np.random.Philox(key=[key, row])) for row in range(rows)]

    def scores(self, logits: np.ndarray, seen: Sequence[np.ndarray]) -> np.ndarray:
        """Logits (B, V) after everything but the draw; −inf is left out. `seen` is by row."""
        found = logits.astype(np.float32)
        if self.repetition_penalty != 1.0:
            found = penalised(found, seen, self.repetition_penalty)
        if not self.temperature:
            return found
        found = found / np.float32(self.temperature)
        if self.top_k is not None:
            found = keep_greatest(found, self.top_k)
        if self.top_p is not None:
            found = keep_share(found, self.top_p)
        return found if self.min_p is None else keep_likely(found, self.min_p)

    def choose(
        self,
        logits: np.ndarray,
        seen: Sequence[np.ndarray],
        sources: Sequence[np.random.Generator],
    ) -> np.ndarray:
        """A token of each row."""
        scores = self.scores(logits, seen)
        if not self.temperature:
            return scores.argmax(-1)
        cumulated = probabilities(scores).cumsum(-1)
        draws = np.array([source.random() for source in sources]) * cumulated[:, -1]
        found = [np.searchsorted(c, d, "right") for c, d in zip(cumulated, draws, strict=True)]
        last = [int(np.flatnonzero(np.isfinite(s))[-1]) for s in scores]
        return np.minimum(np.array(found), last)


def probabilities(scores: np.ndarray) -> np.ndarray:
    """Softmax over the last axis, in float64."""
    wide = scores.astype(np.float64)
    raised = np.exp(wide - wide.max(-1, keepdims=True))
    total: np.ndarray = raised / raised.sum(-1, keepdims=True)
    return total


def log_probabilities(scores: np.ndarray) -> np.ndarray:
    wide = scores.astype(np.float64)
    shifted = wide - wide.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def penalised(scores: np.ndarray, seen: Sequence[np.ndarray], penalty: float) -> np.ndarray:
    """Positive scores of tokens that occurred are divided, negative ones multiplied."""
    found = scores.copy()
    for row, tokens in zip(found, seen, strict=True):
        each = np.unique(tokens)
        of_them = row[each]
        factor = np.float32(penalty)
        row[each] = np.where(of_them < 0, of_them * factor, of_them / factor)
    return found


def keep_greatest(scores: np.ndarray, count: int) -> np.ndarray:
    """Those at least as great as the `count`-th."""
    if count >= scores.shape[-1]:
        return scores
    least = np.partition(scores, -count, -1)[:, -count, None]
    return np.where(scores < least, -np.inf, scores)


def keep_share(scores: np.ndarray, share: float) -> np.ndarray:
    """The fewest of the likeliest that have at least a share of the probability; one always."""
    order = np.argsort(scores, -1, kind="stable")
    cumulated = np.take_along_axis(probabilities(scores), order, -1).cumsum(-1)
    is_dropped = cumulated <= 1 - share
    is_dropped[:, -1] = False
    mask = np.zeros_like(is_dropped)
    np.put_along_axis(mask, order, is_dropped, -1)
    return np.where(mask, -np.inf, scores)


def keep_likely(scores: np.ndarray, least: float) -> np.ndarray:
    """Those with at least a fraction of the greatest probability."""
    chances = probabilities(scores)
    return np.where(chances < least * chances.max(-1, keepdims=True), -np.inf, scores)
