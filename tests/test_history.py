"""Histories: rows and columns, files, and pictures of them."""

from __future__ import annotations

import csv
import math
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import treadle as td
from treadle.train.curves import MOST_POINTS, Plot
from treadle.train.history import History, HistoryFile

NUMBERS = st.floats(width=64)


def made() -> History:
    history = History()
    for step in (1, 2, 4, 5):
        history.record(step, {"loss": 1 / step})
    history.record(5, {"val/loss": 0.5})
    history.record(6, {"val/loss": 0.25})
    return history


def test_columns_and_series() -> None:
    history = made()
    assert history.columns == ("step", "loss", "val/loss")
    assert len(history) == 5
    assert history["step"].tolist() == [1, 2, 4, 5, 6]
    assert history["loss"][:4].tolist() == [1, 0.5, 0.25, 0.2]
    assert math.isnan(history["loss"][4])
    assert [a.tolist() for a in history.series("val/loss")] == [[5, 6], [0.5, 0.25]]
    assert history.last("loss") == (5, 0.2)
    assert history.best("val/loss") == (6, 0.25)
    assert history.best("loss", "max") == (1, 1.0)
    assert ("loss" in history, "step" in history, "x" in history) == (True, True, False)
    assert repr(history) == "History(5 rows to step 6: loss, val/loss)"


def test_a_value_is_replaced_within_its_row() -> None:
    history = made()
    history.record(6, {"val/loss": 0.75, "lr": 1.0})
    assert history.last("val/loss") == (6, 0.75)
    assert list(history.rows())[-1] == {"step": 6, "val/loss": 0.75, "lr": 1.0}


def test_nan_is_a_value() -> None:
    history = History()
    history.record(1, {"a": math.nan})
    history.record(2, {"a": 3.0})
    history.record(3, {"b": 1.0})
    assert len(history.series("a")[0]) == 2
    assert history.best("a", "min") == (2, 3.0)
    assert [sorted(r) for r in history.rows()] == [["a", "step"], ["a", "step"], ["b", "step"]]


def test_mistakes() -> None:
    history = made()
    with pytest.raises(td.ArgumentError, match="no column 'los'. There are: step, loss, val/loss"):
        history["los"]
    with pytest.raises(td.ArgumentError, match="step 3 comes after step 6"):
        history.record(3, {"loss": 1.0})
    with pytest.raises(td.ArgumentError, match="a value is named 'step'"):
        history.record(7, {"step": 1.0})
    with pytest.raises(td.ArgumentError, match="mode = 'least'"):
        history.best("loss", "least")  # type: ignore[arg-type]
    history.record(7, {"x": math.nan})
    with pytest.raises(td.ArgumentError, match="x is never a number"):
        history.best("x", "min")
    with pytest.raises(td.ArgumentError, match="a small or a large 'x' is good. Pass mode="):
        history.best("x")


def test_the_best_accuracy_is_the_greatest() -> None:
    history = History()
    for step, value in enumerate((0.3, 0.7, 0.5)):
        history.record(step, {"val/accuracy": value, "val/loss": value})
    assert history.best("val/accuracy") == (1, 0.7)
    assert history.best("val/loss") == (0, 0.3)
    assert history.best("val/accuracy", "min") == (0, 0.3)


def test_csv(tmp_path: Path) -> None:
    made().to_csv(tmp_path / "sub" / "h.csv")
    with open(tmp_path / "sub" / "h.csv", newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["step", "loss", "val/loss"]
    assert rows[4] == ["5", "0.2", "0.5"]
    assert rows[5] == ["6", "", "0.25"]


ROWS = st.lists(st.dictionaries(st.sampled_from(["a", "b", "c/d"]), NUMBERS), max_size=12)


@given(rows=ROWS, cut=st.integers(0, 12), upto=st.integers(0, 13))
def test_files_give_back_what_was_recorded(tmp_path_factory, rows, cut: int, upto: int) -> None:
    path = tmp_path_factory.mktemp("history") / "h.jsonl"
    history, file = History(), HistoryFile(path)
    file.begin(history)
    for step, row in enumerate(rows, 1):
        history.record(step, dict(list(row.items())[:1]))
        if step == cut:
            file.append(history)
        history.record(step, row)
    file.append(history)
    file.close()
    with open(path, "ab") as torn:
        torn.write(b'{"step": 1')
    found = HistoryFile(path).read(upto)
    expected = [r for r in history.rows() if r["step"] <= upto]
    assert repr(list(found.rows())) == repr(
        [{k: r[k] for k in ("step", *found.columns[1:]) if k in r} for r in expected]
    )
    assert set(found.columns) == {"step"}.union(*expected)


@given(rows=ROWS, start=st.integers(0, 12))
def test_rows_from_a_row_on(rows, start: int) -> None:
    history = History()
    for step, row in enumerate(rows, 1):
        history.record(step, row)
    assert repr(list(history.rows(start))) == repr(list(history.rows())[start:])


def test_pictures(tmp_path: Path) -> None:
    history = made()
    path = history.plot().save(tmp_path / "sub" / "a.svg")
    root = ElementTree.parse(path).getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{space}polyline")) == 2
    texts = [t.text for t in root.findall(f"{space}text")]
    assert {"loss", "val/loss", "step"} <= set(texts)
    assert history.plot("loss")._repr_svg_().startswith("<svg")
    for wrong in ("a", "a.jpeg", "a.png.txt"):
        with pytest.raises(td.ArgumentError, match=r"no known ending. End it in .svg, .png, .pdf"):
            history.plot().save(tmp_path / wrong)
    assert [p.name for p in tmp_path.rglob("a*")] == ["a.svg"]
    with pytest.raises(td.ArgumentError, match="no column 'x'"):
        history.plot("x")
    history.record(7, {"a<b&c": -1.0})
    assert "a&lt;b&amp;c" in history.plot("a<b&c").svg()
    with pytest.raises(td.ArgumentError, match="above 0"):
        history.plot("a<b&c", log=True)


@pytest.mark.parametrize(("ending", "magic"), [(".png", b"\x89PNG\r\n"), (".PDF", b"%PDF-")])
def test_a_picture_is_what_its_name_says(ending: str, magic: bytes, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    history = made()
    history.record(7, {"_$x": 1.0})
    names = ("loss", "_$x")
    for log in (False, True):
        path = history.plot(*names, log=log).save(tmp_path / "sub" / f"a{ending}")
        assert path.read_bytes().startswith(magic)


def test_pictures_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    made().plot().save(tmp_path / "a.svg")
    with pytest.raises(td.ArgumentError, match=r".png file needs matplotlib.*treadle\[plot\]"):
        made().plot().save(tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


@given(
    values=st.lists(
        st.floats(-1e100, 1e100, allow_subnormal=False) | st.just(math.nan), min_size=1, max_size=40
    ),
    log=st.booleans(),
)
def test_any_curve_can_be_drawn(values: list[float], log: bool) -> None:
    array = np.array(values)
    curve = np.arange(len(values)), array
    if not np.isfinite(array[array > 0] if log else array).any():
        with pytest.raises(td.ArgumentError):
            Plot({"a": curve}, log)
        return
    text = Plot({"a": curve}, log).svg()
    ElementTree.fromstring(text)
    assert "nan" not in text
    assert "inf" not in text


def test_long_curves_are_thinned_out() -> None:
    curve = np.arange(10**5), np.sin(np.arange(10**5))
    assert len(Plot({"a": curve}).curves["a"][0]) == MOST_POINTS
