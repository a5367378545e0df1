"""Byte pair encoding: text of any kind as numbers, and back to the same bytes."""

from __future__ import annotations

import heapq
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from operator import index
from pathlib import Path

import numpy as np

from treadle.base.errors import ArgumentError, LoadError
from treadle.base.numbers import check_whole

BYTES = 256  # the first tokens are the bytes themselves
KEPT_WORDS = 1 << 16  # words whose encoding is remembered
FORMAT, SCHEMA = "treadle-bpe", 1

# Merges stay within such pieces: a run of letters, digits or marks with the space before it, or
# spaces. Runs are cut at 64, so that no input, however odd, costs the square of its length.
_WORD = re.compile(
    rb" ?[A-Za-z\x80-\xff]{1,64}| ?[0-9]{1,64}| ?[^\sA-Za-z0-9\x80-\xff]{1,64}|\s{1,64}(?!\S)|\s"
)

Pair = tuple[int, int]


class BPE:
    """A byte-level tokenizer: tokens are bytes and merges of two earlier tokens.

    `decode(encode(text))` is the text for any bytes at all.
    """

    def __init__(self, merges: Iterable[Pair] = ()):
        try:
            self.merges: tuple[Pair, ...] = tuple((index(a), index(b)) for a, b in merges)
        except (TypeError, ValueError) as error:
            cause = f"the merges are not pairs of tokens: {error}"
            raise ArgumentError("BPE", cause, "Use BPE.train(text, vocabulary).") from error
        self._tokens = [bytes([i]) for i in range(BYTES)]
        for i, (a, b) in enumerate(self.merges):
            if not (0 <= a < BYTES + i and 0 <= b < BYTES + i):
                raise ArgumentError(
                    "BPE", f"merge {i} is ({a}, {b})", f"It is of tokens from 0 to {BYTES + i - 1}."
                )
            self._tokens.append(self._tokens[a] + self._tokens[b])
        self._ranks = {pair: i for i, pair in enumerate(self.merges)}
        if len(self._ranks) < len(self.merges):
            raise ArgumentError("BPE", "a merge occurs twice", "Each pair is merged once.")
        self._kept: dict[bytes, list[int]] = {}

    @classmethod
    def train(cls, text: str | bytes | Iterable[str | bytes], vocabulary: int) -> BPE:
        """Merge the most frequent pair, again and again, until there are `vocabulary` tokens.

        It stops earlier when no pair occurs twice. Of equally frequent pairs the one with the
        smaller numbers comes first, so that the same text gives the same tokenizer.
        """
        if check_whole("BPE.train", "vocabulary", vocabulary) < BYTES:
            raise ArgumentError(
                "BPE.train", f"vocabulary = {vocabulary}", f"There are {BYTES} bytes already."
            )
        parts = [text] if isinstance(text, (str, bytes)) else text
        words: Counter[bytes] = Counter()
        for part in parts:
            words.update(_WORD.findall(_bytes(part)))
        return cls(_merges(words, vocabulary - BYTES))

    def __len__(self) -> int:
        """How many tokens there are."""
        return len(self._tokens)

    def encode(self, text: str | bytes) -> np.ndarray:
        """Tokens, int32."""
        found: list[int] = []
        for word in _WORD.findall(_bytes(text)):
            tokens = self._kept.get(word)
            if tokens is None:
                tokens = self._encode_word(word)
                if len(self._kept) < KEPT_WORDS:
                    self._kept[word] = tokens
            found += tokens
        return np.array(found, np.int32)

    def _encode_word(self, word: bytes) -> list[int]:
        """The merge that was learnt first goes first, as it did in training."""
        tokens = list(word)
        last = len(self.merges)
        while len(tokens) > 1:
            ranks = [self._ranks.get(pair, last) for pair in pairwise(tokens)]
            best = min(ranks)
            if best == last:
                break
            tokens = _merged(tokens, self.merges[best], BYTES + best)
        return tokens

    def decode(self, tokens: Iterable[int] | np.ndarray) -> bytes:
        """The bytes of tokens."""
        numbers = np.asarray(tokens if isinstance(tokens, np.ndarray) else list(tokens))
        if not numbers.size:
            return b""
        if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
            raise ArgumentError(
                "BPE.decode", f"{numbers.dtype} of shape {numbers.shape}", "One row of integers."
            )
        if numbers.min() < 0 or numbers.max() >= len(self):
            worst = numbers.min() if numbers.min() < 0 else numbers.max()
            raise ArgumentError("BPE.decode", f"token {worst}", f"Tokens are 0 to {len(self) - 1}.")
        return b"".join(map(self._tokens.__getitem__, numbers.tolist()))

    def decode_text(self, tokens: Iterable[int] | np.ndarray) -> str:
        """The same as text; bytes that are not UTF-8 become �."""
        return self.decode(tokens).decode("utf-8", errors="replace")

    def save(self, path: str | Path) -> None:
        """Write the merges as JSON, aside and renamed."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        content = {"format": FORMAT, "schema": SCHEMA, "merges": self.merges}
        aside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            aside.write_text(json.dumps(content), encoding="utf-8")
            aside.replace(target)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: str | Path) -> BPE:
        """A tokenizer that `save` wrote."""
        source = Path(path)
        try:
            content = json.loads(source.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            where = f"line {error.lineno}, column {error.colno}"
            raise LoadError("BPE.load", f"{source.name}, {where}: {error.msg}") from error
        except (OSError, UnicodeDecodeError, RecursionError) as error:
            raise LoadError("BPE.load", f"{source} cannot be read: {error}") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise LoadError("BPE.load", f"{source.name} is not a tokenizer of BPE.save")
        if content.get("schema") != SCHEMA:
            raise LoadError("BPE.load", f"schema {content.get('schema')}, this reads {SCHEMA}")
        merges = content.get("merges")
        if not isinstance(merges, list) or not all(_is_pair(m) for m in merges):
            raise LoadError("BPE.load", f"{source.name}: merges are not pairs of integers")
        try:
            return cls((a, b) for a, b in merges)
        except ArgumentError as error:
            raise LoadError("BPE.load", f"{source.name}: {error.cause}", error.remedy) from error


def _is_pair(merge: object) -> bool:
    return isinstance(merge, list) and len(merge) == 2 and all(type(n) is int for n in merge)


def _bytes(text: str | bytes) -> bytes:
    return text.encode("utf-8", errors="surrogateescape") if isinstance(text, str) else text


def _merged(tokens: list[int], pair: Pair, new: int) -> list[int]:
    """Every occurrence of a pair as one token, from the left."""
    found: list[int] = []
    i, end = 0, len(tokens) - 1
    while i < end:
        if tokens[i] == pair[0] and tokens[i + 1] == pair[1]:
            found.append(new)
            i += 2
        else:
            found.append(tokens[i])
            i += 1
    if i == end:
        found.append(tokens[i])
    return found


def _merges(words: Counter[bytes], limit: int) -> Iterator[Pair]:
    """The merges, most frequent first. Counts change only by the words that a merge touches."""
    texts = [list(word) for word in words]
    counts = list(words.values())
    totals: Counter[Pair] = Counter()
    places: dict[Pair, set[int]] = {}
    for number, (tokens, count) in enumerate(zip(texts, counts, strict=True)):
        for pair in pairwise(tokens):
            totals[pair] += count
            places.setdefault(pair, set()).add(number)
    # Entries are pushed when counts rise, and put right when they come up after counts fell.
    heap = [(-count, pair) for pair, count in totals.items()]
    heapq.heapify(heap)
    for new in range(BYTES, BYTES + limit):
        best = _most_frequent(heap, totals)
        if best is None:
            return
        yield best
        risen: set[Pair] = set()
        for number in places.pop(best):
            tokens = texts[number]
            merged = _merged(tokens, best, new)
            if len(merged) == len(tokens):
                continue  # the pair was in this word once, and is no more
            count = counts[number]
            for pair in pairwise(tokens):
                totals[pair] -= count
            for pair in pairwise(merged):
                totals[pair] += count
                if new in pair:
                    places.setdefault(pair, set()).add(number)
                    risen.add(pair)
            texts[number] = merged
        del totals[best]
        for pair in risen:
            heapq.heappush(heap, (-totals[pair], pair))


def _most_frequent(heap: list[tuple[int, Pair]], totals: Counter[Pair]) -> Pair | None:
    """The pair with the greatest count, if it occurs twice."""
    while heap:
        count, pair = heapq.heappop(heap)
        true = totals.get(pair, 0)
        if true == -count:
            return pair if true > 1 else None
        if true > 1:
            heapq.heappush(heap, (-true, pair))
    return None
