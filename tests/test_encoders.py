"""Splits, standardising and encoding."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn import preprocessing

import treadle as td
from treadle import data
from treadle.data import encoders


@pytest.mark.parametrize("count", [10, 97])
@pytest.mark.parametrize("fractions", [(0.8, 0.2), (0.6, 0.3, 0.1), (1.0,), (1 / 3,) * 3])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_row_is_in_one_part(count: int, fractions: tuple[float, ...], shuffle: bool) -> None:
    arrays = {"x": np.arange(count * 2).reshape(count, 2), "y": np.arange(count)}
    parts = data.split(arrays, fractions, seed=1, shuffle=shuffle)
    rows = [p["y"].tolist() for p in parts]
    assert sorted(sum(rows, [])) == list(range(count))  # noqa: RUF017
    assert all(r == sorted(r) for r in rows)
    assert all(abs(len(r) - f * count) <= 1 for r, f in zip(rows, fractions, strict=True))
    assert all((p["x"][:, 0] == 2 * p["y"]).all() for p in parts)
    assert shuffle or rows[0] == list(range(len(rows[0])))


def test_the_seed_decides() -> None:
    def first(seed: int) -> list[int]:
        return data.split(np.arange(50), seed=seed)[0].tolist()

    assert first(0) == first(0)
    assert first(0) != first(1)
    assert first(0) != list(range(40))


def test_neighbours_are_views(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(10))
    mapped = data.read_npy(tmp_path / "x.npy", memory_map=True)
    train, test = data.split(mapped, (0.7, 0.3), shuffle=False)
    assert isinstance(train, np.memmap)
    assert test.tolist() == [7, 8, 9]


@pytest.mark.parametrize("names", [False, True])
def test_stratified(names: bool) -> None:
    rng = np.random.default_rng(0)
    classes = rng.permutation(np.repeat([0, 1, 2], [60, 30, 11]))
    given = np.array(["a", "b", "c"])[classes] if names else classes
    parts = data.split({"y": classes}, (0.6, 0.3, 0.1), stratify=given)
    assert sum(len(p["y"]) for p in parts) == 101
    for part, fraction in zip(parts, (0.6, 0.3, 0.1), strict=True):
        counts = np.bincount(part["y"], minlength=3)
        assert (np.abs(counts - np.array([60, 30, 11]) * fraction) <= 1).all()
    other = data.split({"y": np.arange(101)}, stratify=given, seed=1)
    assert (
        other[0]["y"].tolist() != data.split({"y": np.arange(101)}, stratify=given)[0]["y"].tolist()
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8])
def test_standardiser(dtype: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "ROWS", 7)  # several pieces
    rng = np.random.default_rng(1)
    x = (rng.random((50, 3)) * [1, 100, 200]).astype(dtype)
    ours = data.Standardiser.fit(x)
    reference = preprocessing.StandardScaler().fit(x.astype(np.float64))
    np.testing.assert_allclose(ours.mean, reference.mean_, rtol=1e-12)
    np.testing.assert_allclose(ours.scale, reference.scale_, rtol=1e-12)
    y = ours.transform(x)
    assert y.dtype == (np.float64 if dtype is np.float64 else np.float32)
    np.testing.assert_allclose(y, reference.transform(x.astype(np.float64)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ours.inverse_transform(y), x, rtol=1e-5, atol=1e-6)


def test_large_means_do_not_cancel() -> None:
    """Σx² − (Σx)² would have no digit left."""
    x = 1e9 + np.random.default_rng(2).normal(size=100_000)
    assert data.Standardiser.fit(x).scale == pytest.approx(x.std(), rel=1e-9)


@pytest.mark.parametrize("value", [0.0, 0.1, -1e9, 1e-30])
def test_constant_columns_stay_finite(value: float) -> None:
    x = np.full((1000, 1), value)
    scaler = data.Standardiser.fit(x)
    assert scaler.scale == 1
    np.testing.assert_allclose(scaler.transform(x), 0, atol=1e-6)


def test_label_encoder() -> None:
    for values in (["cat", "ant", "bee", "ant"], [5, -1, 5, 3], [0.5, 0.25], [True, False, True]):
        ours, reference = data.LabelEncoder.fit(values), preprocessing.LabelEncoder().fit(values)
        assert list(ours.classes) == reference.classes_.tolist()
        numbers = ours.transform(values)
        assert numbers.dtype == np.int32
        assert numbers.tolist() == reference.transform(values).tolist()
        assert ours.inverse_transform(numbers).tolist() == values
    grid = data.LabelEncoder.fit([["a", "b"], ["b", "b"]])
    assert grid.transform(np.array([["b"], ["a"]])).tolist() == [[1], [0]]


def test_one_hot_encoder() -> None:
    encoder = data.OneHotEncoder.fit(["b", "a", "c"])
    rows = encoder.transform(["c", "a"])
    assert (rows.dtype, rows.tolist()) == (np.float32, [[0, 0, 1], [1, 0, 0]])
    assert encoder.classes == ("a", "b", "c")
    assert encoder.inverse_transform(rows + 0.1).tolist() == ["c", "a"]


def test_encoders_as_json() -> None:
    x = np.random.default_rng(3).normal(size=(20, 2))
    scaler = data.Standardiser.fit(x)
    again = data.Standardiser.from_dict(json.loads(json.dumps(scaler.to_dict())))
    assert np.array_equal(again.transform(x), scaler.transform(x))
    for values in (["b", "a"], [3, 1], [True, False], [0.5, 1.5]):
        labels = data.LabelEncoder.fit(values)
        assert data.LabelEncoder.from_dict(json.loads(json.dumps(labels.to_dict()))) == labels
        columns = data.OneHotEncoder.fit(values)
        assert data.OneHotEncoder.from_dict(json.loads(json.dumps(columns.to_dict()))) == columns


def _wrong() -> Iterator[tuple[str, Callable[[], Any]]]:
    x, y = np.zeros((4, 2)), np.arange(4)
    scaler, labels = data.Standardiser.fit(x), data.LabelEncoder.fit(["a", "b"])
    gap = np.array([[1.0, 2.0], [3.0, np.nan]])
    yield "fractions", lambda: data.split(x, (0.5, 0.4))
    yield "fractions", lambda: data.split(x, (1.5, -0.5))
    yield "fractions", lambda: data.split(x, ())
    yield "4 rows in parts", lambda: data.split(x, (0.99, 0.01))
    yield "numbers of rows differ", lambda: data.split({"x": x, "y": y[:3]})
    yield "no rows", lambda: data.split(x[:0])
    yield "shuffle=False", lambda: data.split(x, shuffle=False, stratify=y)
    yield "stratify has the shape", lambda: data.split(x, stratify=y[:2])
    yield "class 0 has 1 rows|class np.int64.0. has 1", lambda: data.split(x, stratify=y)
    yield "row 1, column 1 is nan", lambda: data.Standardiser.fit(gap)
    yield "row 2 is inf", lambda: data.Standardiser.fit(np.array([0, 1, np.inf]))
    yield "rows of numbers", lambda: data.Standardiser.fit(np.array(["a"]))
    yield "rows of numbers", lambda: data.Standardiser.fit(x[:0])
    yield "rows of shape", lambda: scaler.transform(np.zeros((4, 3)))
    yield "not a standardiser", lambda: data.Standardiser.from_dict({"mean": [1.0]})
    yield "do not fit", lambda: data.Standardiser.from_dict({"mean": [1.0], "scale": [0.0]})
    yield "'c' .at 1. is none of the 2", lambda: labels.transform(["a", "c"])
    yield "same kind", lambda: labels.transform([1])
    yield "0 to 1", lambda: labels.inverse_transform([2])
    yield "0 to 1", lambda: labels.inverse_transform([0.0])
    yield "no values", lambda: data.LabelEncoder.fit([])
    yield "no classes", lambda: data.LabelEncoder.fit([{}])
    yield "NaN among them", lambda: data.LabelEncoder.fit([1.0, np.nan])
    yield "no list of classes", lambda: data.LabelEncoder.from_dict({})
    yield "not sorted", lambda: data.LabelEncoder.from_dict({"classes": ["b", "a"]})
    yield "for 2 classes", lambda: data.OneHotEncoder(labels).inverse_transform(np.zeros((1, 3)))


@pytest.mark.parametrize(("message", "call"), list(_wrong()))
def test_mistakes(message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(td.TreadleError, match=message):
        call()
