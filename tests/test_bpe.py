"""The tokenizer: merges against a slow definition, round trips, files."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treadle as td
from treadle.data import BPE
from treadle.data.bpe import _WORD

TEXT = (Path(td.__file__).parent / "pipeline.py").read_text(encoding="utf-8")


def _slow_merges(text: bytes, count: int) -> list[tuple[int, int]]:
    """All pairs are counted again for every merge."""
    words = Counter(_WORD.findall(text))
    split = {word: list(word) for word in words}
    merges: list[tuple[int, int]] = []
    while len(merges) < count:
        pairs: Counter[tuple[int, int]] = Counter()
        for word, tokens in split.items():
            for a, b in pairwise(tokens):
                pairs[a, b] += words[word]
        best = min(pairs, key=lambda p: (-pairs[p], p), default=None)
        if best is None or pairs[best] < 2:
            break
        new = 256 + len(merges)
        merges.append(best)
        split = {word: _replaced(tokens, best, new) for word, tokens in split.items()}
    return merges


def _replaced(tokens: list[int], pair: tuple[int, int], new: int) -> list[int]:
    found: list[int] = []
    for token in tokens:
        found.append(token)
        if tuple(found[-2:]) == pair:
            found[-2:] = [new]
    return found


def _slow_encode(bpe: BPE, text: bytes) -> list[int]:
    """Merge after merge over each word, in the order in which they were learnt."""
    found: list[int] = []
    for word in _WORD.findall(text):
        tokens = list(word)
        for i, pair in enumerate(bpe.merges):
            tokens = _replaced(tokens, pair, 256 + i)
        found += tokens
    return found


@pytest.mark.parametrize("seed", range(5))
def test_merges_of_random_text(seed: int) -> None:
    rng = random.Random(seed)
    text = bytes(rng.choices(b"aab  \n.1", k=400))
    bpe = BPE.train(text, 256 + 60)
    assert list(bpe.merges) == _slow_merges(text, 60)
    other = bytes(rng.choices(b"aab  \n.1", k=400))
    assert bpe.encode(other).tolist() == _slow_encode(bpe, other)


def test_merges_of_real_text() -> None:
    bpe = BPE.train(TEXT, 400)
    assert list(bpe.merges) == _slow_merges(TEXT.encode(), 144)
    tokens = bpe.encode(TEXT)
    assert tokens.tolist() == _slow_encode(bpe, TEXT.encode())
    assert tokens.dtype == np.int32
    assert len(tokens) < 0.6 * len(TEXT)
    assert bpe.decode_text(tokens) == TEXT


def test_text_in_parts() -> None:
    """Words do not reach over the ends of parts; text and bytes may be mixed."""
    parts: list[str | bytes] = ["ab ab", b" ab", "cd", "cd"]
    assert BPE.train(iter(parts), 260).merges == BPE.train("ab ab ab\tcd\tcd", 260).merges


TRAINED = BPE.train(TEXT, 600)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_come_back(content: bytes) -> None:
    assert TRAINED.decode(TRAINED.encode(content)) == content
    assert BPE().decode(BPE().encode(content)) == content


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=100))
def test_any_text_comes_back(content: str) -> None:
    assert TRAINED.decode_text(TRAINED.encode(content)) == content


@pytest.mark.parametrize(
    "content", [b"", b"a" * 10_000, b" " * 10_000, b"\xff" * 5_000, bytes(range(256)) * 40]
)
def test_odd_bytes_come_back(content: bytes) -> None:
    assert TRAINED.decode(TRAINED.encode(content)) == content
    trained = BPE.train(content, 300)
    assert trained.decode(trained.encode(content)) == content


def test_words_keep_the_space_before_them() -> None:
    found = _WORD.findall(b"  def  f(x1):\n    return 'a b'")
    assert found == [
        b" ", b" def", b" ", b" f", b"(", b"x", b"1", b"):", b"\n   ", b" return", b" '", b"a",
        b" b", b"'",
    ]  # fmt: skip
    assert b"".join(found) == b"  def  f(x1):\n    return 'a b'"


def test_training_stops_when_nothing_repeats() -> None:
    assert len(BPE.train("abcdef", 1000)) == 256
    assert len(BPE.train("abab", 1000)) == 257  # (97, 98) occurs twice, its merge's pair once
    assert len(BPE.train("", 1000)) == 256


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "bpe.json"
    TRAINED.save(path)
    loaded = BPE.load(path)
    assert loaded.merges == TRAINED.merges
    assert len(loaded) == len(TRAINED) == 600
    assert np.array_equal(loaded.encode(TEXT), TRAINED.encode(TEXT))
    assert [p.name for p in path.parent.iterdir()] == ["bpe.json"]


def _file(**changes: Any) -> bytes:
    content = {"format": "treadle-bpe", "schema": 1, "merges": [[97, 98], [256, 99]]}
    return json.dumps(content | changes).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{\n  oops", "line 2, column 3"),
        (b"\xff", "cannot be read"),
        (b"[]", "not a tokenizer"),
        (_file(format="other"), "not a tokenizer"),
        (_file(schema=2), "schema 2"),
        (_file(merges=None), "not pairs"),
        (_file(merges=[[1]]), "not pairs"),
        (_file(merges=[[1, 2.0]]), "not pairs"),
        (_file(merges=[[1, True]]), "not pairs"),
        (_file(merges=[[97, 98], [257, 99]]), r"merge 1 is \(257, 99\)"),
        (_file(merges=[[-1, 98]]), "merge 0"),
        (_file(merges=[[97, 98], [97, 98]]), "occurs twice"),
    ],
)
def test_malformed_files(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "bpe.json").write_bytes(content)
    with pytest.raises(td.LoadError, match=message):
        BPE.load(tmp_path / "bpe.json")


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(td.LoadError, match="cannot be read"):
        BPE.load(tmp_path / "none.json")
    with pytest.raises(td.ArgumentError, match="vocabulary = 100"):
        BPE.train("abc", 100)
    for tokens, message in (([600], "token 600"), ([-1], "token -1"), ([0.5], "One row")):
        with pytest.raises(td.ArgumentError, match=message):
            TRAINED.decode(tokens)  # type: ignore[arg-type]
    with pytest.raises(td.ArgumentError, match="One row"):
        TRAINED.decode(np.zeros((2, 2), int))
