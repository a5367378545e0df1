"""Tables as loaders: Parquet by row groups, Arrow, polars, pandas, Hugging Face datasets."""

from __future__ import annotations

import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fuzz_tables
import treadle as td
from refusals import refused
from treadle.interop import datasets, tables

ROWS = 53
DRAW = np.random.default_rng(0)
COLUMNS: dict[str, Any] = {
    "id": np.arange(ROWS),
    "age": DRAW.normal(size=ROWS),
    "size": DRAW.normal(size=ROWS).astype(np.float32),
    "is_new": DRAW.integers(0, 2, ROWS).astype(bool),
    "pixels": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(ROWS * 4, dtype=np.uint8)), 4),
    "pairs": [[[i, i + 1], [2, 3], [4, 5]] for i in range(ROWS)],
}
TABLE = pa.table(COLUMNS)


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tables") / "rows.parquet"
    pq.write_table(TABLE, path, row_group_size=10)
    return path


def all_of(loader: Any) -> dict[str, np.ndarray]:
    batches = list(loader)
    return {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}


def test_columns_become_arrays_and_share_memory() -> None:
    found = all_of(tables.loader(TABLE, batch_size=8))
    assert {n: (a.dtype.name, a.shape[1:]) for n, a in found.items()} == {
        "id": ("int64", ()),
        "age": ("float64", ()),
        "size": ("float32", ()),
        "is_new": ("bool", ()),
        "pixels": ("uint8", (4,)),
        "pairs": ("int64", (3, 2)),
    }
    np.testing.assert_array_equal(found["pixels"], np.arange(ROWS * 4).reshape(ROWS, 4))
    np.testing.assert_array_equal(found["pairs"][:, 0, 1], np.arange(1, ROWS + 1))
    source = tables.loader(TABLE, ["age"], batch_size=8)._source
    held = TABLE["age"].chunk(0).to_numpy()
    assert np.shares_memory(source._arrays[0], held)  # nothing was copied


def test_frames_are_tables_too() -> None:
    frame = polars.DataFrame({"a": [1.0, 2.0, 3.0], "b": [[1, 2], [3, 4], [5, 6]]})
    named = {"x": ["a", "a"], "y": "b"}
    (batch,) = tables.loader(frame, named, batch_size=3)
    np.testing.assert_array_equal(batch["x"], [[1, 1], [2, 2], [3, 3]])
    np.testing.assert_array_equal(batch["y"], [[1, 2], [3, 4], [5, 6]])
    pandas = pytest.importorskip("pandas")
    (batch,) = tables.loader(pandas.DataFrame({"a": [1, 2]}), batch_size=2)
    np.testing.assert_array_equal(batch["a"], [1, 2])
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12.0).reshape(2, 2, 3))
    (batch,) = tables.loader(pa.table({"t": tensors}), batch_size=2)
    np.testing.assert_array_equal(batch["t"], np.arange(12.0).reshape(2, 2, 3))


def test_parquet_is_read_by_row_groups_and_each_once(file, monkeypatch) -> None:
    loader = tables.loader(file, ["id", "pixels"], batch_size=7, shuffle=True, seed=3, window=2)
    read: list[int] = []
    before = tables.ParquetRows._read

    def counted(self: Any, f: int, number: int, group: int) -> Any:
        read.append(number)
        assert len(self._kept) <= self._window + 1
        return before(self, f, number, group)

    monkeypatch.setattr(tables.ParquetRows, "_read", counted)
    passes = [all_of(loader)["id"] for _ in range(2)]
    counts = Counter(read)
    assert sorted(counts) == [*range(6)]
    assert max(counts.values()) == 2  # once in a pass, or still there from the one before
    for found in passes:  # 7 batches of 7: four rows are left out
        assert len(set(found.tolist())) == 49
    assert (passes[0] != passes[1]).any()
    groups = [set((found[:10] // 10).tolist()) for found in passes]
    assert all(len(g) == 2 for g in groups)  # rows of two groups are mixed
    in_order = all_of(tables.loader([file, file], ["id"], batch_size=20))["id"]
    np.testing.assert_array_equal(in_order, [*range(ROWS), *range(ROWS)])
    same = all_of(tables.loader(file.parent, ["id"], batch_size=20))["id"]
    np.testing.assert_array_equal(same, np.arange(ROWS))


def test_a_position_is_resumed(file) -> None:
    def made(**other: Any) -> Any:
        return tables.loader(
            file, ["id"], **({"batch_size": 5, "shuffle": True, "window": 2} | other)
        )

    whole = [b["id"].tolist() for loader in [made()] for _ in range(2) for b in loader]
    first = made()
    taken = iter(first)
    begun = [next(taken)["id"].tolist() for _ in range(4)]
    second = made()
    second.load_state_dict(first.state_dict())
    rest = [b["id"].tolist() for _ in range(2) for b in second]
    assert begun + rest == whole
    state = first.state_dict()
    assert all(isinstance(v, int) for v in state.values())
    refused(lambda: made(window=3).load_state_dict(state), td.LoadError, "ArrayLoader", "window")
    from_prefetch = [b["id"].tolist() for b in td.data.Prefetch(made())]
    assert from_prefetch == whole[: len(from_prefetch)]


def test_nulls_are_refused_or_filled() -> None:
    table = pa.table({"a": [1.0, None, 3.0], "n": [1, None, 3], "l": [[1], None, [2]]})
    name, load = "tables.loader", partial(tables.loader, table, batch_size=3)
    refused(lambda: load(["a"]), td.LoadError, name, "'a'", "row 1", "fill=")
    np.testing.assert_array_equal(all_of(load(["a"], fill=np.nan))["a"], [1, np.nan, 3])
    found = all_of(load(["a", "n"], fill={"a": 0, "n": -1}))
    np.testing.assert_array_equal(found["n"], [1, -1, 3])
    refused(lambda: load(["n"], fill=0.5), td.LoadError, name, "int64", "0.5")
    refused(lambda: load(["l"], fill=0), td.LoadError, name, "lists", "Drop those rows")
    refused(lambda: load(["a"], fill="x"), td.ArgumentError, name, "fill = 'x'")


def permuted(order: tuple[int, ...] | None, tmp_path: Path) -> Path:
    """A file of two tensors, which are (2, 3, 4) in memory."""
    kind = pa.fixed_shape_tensor(pa.int64(), (2, 3, 4), permutation=order)
    storage = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(48)), 24)
    table = pa.table({"x": pa.ExtensionArray.from_storage(kind, storage)})
    pq.write_table(table, tmp_path / "x.parquet")
    return tmp_path / "x.parquet"


@pytest.mark.parametrize("order", [None, (0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0)])
def test_tensors_have_their_axes_in_order(order, tmp_path) -> None:
    path = permuted(order, tmp_path)
    expected = pq.read_table(path)["x"].chunk(0).to_numpy_ndarray()
    for data in (path, pq.read_table(path)):
        np.testing.assert_array_equal(all_of(tables.loader(data, batch_size=2))["x"], expected)


@pytest.mark.parametrize("order", [(1, 2, 0), (2, 0, 1)])
def test_an_order_of_axes_with_two_meanings_is_refused(order, tmp_path) -> None:
    path = permuted(order, tmp_path)

    def load() -> Any:
        return tables.loader(path, batch_size=2)

    refused(load, td.DTypeError, "tables.loader, x.parquet", "'x'", str(list(order)), "transpose")


@pytest.mark.parametrize(
    ("values", "remedy"),
    [
        (["a", "b"], "LabelEncoder"),
        (pa.array(["a", "b"]).dictionary_encode(), "LabelEncoder"),
        ([b"a", b"b"], "leave it out"),
        (pa.array([1, 2], pa.timestamp("s")), "int64"),
        (pa.array([1, 2], pa.decimal128(5)), "float64"),
        ([{"k": 1}, {"k": 2}], "flatten"),
        ([["a"], ["b"]], "LabelEncoder"),
    ],
    ids=["text", "categories", "bytes", "times", "decimals", "structs", "texts"],
)
def test_what_is_no_number_is_refused(values, remedy, tmp_path) -> None:
    table = pa.table({"ok": [1, 2], "bad": values})

    def load() -> Any:
        return tables.loader(table, batch_size=1)

    refused(load, td.DTypeError, "tables.loader", "'bad'", remedy)
    assert len(tables.loader(table, ["ok"], batch_size=1)) == 2
    pq.write_table(table, tmp_path / "t.parquet")

    def load_file() -> Any:
        return tables.loader(tmp_path / "t.parquet", batch_size=1)

    refused(load_file, td.DTypeError, "tables.loader, t.parquet", "'bad'", remedy)


def test_what_is_no_table_or_does_not_fit(file, tmp_path) -> None:
    uneven = pa.table({"l": [[1], [2, 3]]})
    name = "tables.loader"
    refused(lambda: tables.loader(uneven, batch_size=1), td.LoadError, name, "1 to 2", "pad")
    refused(lambda: tables.loader(3, batch_size=1), td.ArgumentError, name, "int", "collect")
    lazy = polars.LazyFrame({"a": [1]})
    refused(lambda: tables.loader(lazy, batch_size=1), td.ArgumentError, name, ".collect()")
    refused(lambda: tables.loader(TABLE, ["x"], batch_size=1), td.ArgumentError, name, "'x'", "age")
    refused(lambda: tables.loader(TABLE, "age", batch_size=1), td.ArgumentError, name, "['age']")
    mixed = {"x": ["age", "pixels"]}
    refused(lambda: tables.loader(TABLE, mixed, batch_size=1), td.ArgumentError, name, "pixels")
    double = pa.Table.from_arrays([TABLE["age"].combine_chunks()] * 2, ["a", "a"])
    refused(lambda: tables.loader(double, batch_size=1), td.ArgumentError, name, "several")
    missing = tmp_path / "none.parquet"
    refused(lambda: tables.loader(missing, batch_size=1), td.LoadError, name, "no file")
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 nothing PAR1")
    refused(lambda: tables.loader(broken, batch_size=1), td.LoadError, name, "broken.parquet")
    (tmp_path / "cut").mkdir()
    cut = tmp_path / "cut" / "cut.parquet"
    content = file.read_bytes()
    cut.write_bytes(content[:20] + bytes(400) + content[420:])  # the pages, not the footer
    loader = tables.loader(cut, ["id"], batch_size=10)
    refused(lambda: list(loader), td.LoadError, name, "row group 0")


def test_damaged_files_are_refused_or_loaded(tmp_path) -> None:
    """A small corpus of what `tools/fuzz_tables.py` runs by the hundred thousand."""
    wells = fuzz_tables.originals(tmp_path)
    path, ended = tmp_path / "damaged.parquet", Counter[str]()
    for number in range(60):
        draw = np.random.default_rng([1, number])
        path.write_bytes(fuzz_tables.damaged(wells[number % len(wells)], draw))
        try:
            list(tables.loader(path, batch_size=16, shuffle=True, fill=0))
            ended["loaded"] += 1
        except td.TreadleError:
            ended["refused"] += 1
    assert ended["refused"] > 30
    assert ended["loaded"] > 2


def test_only_rows_of_arrow_are_filled(monkeypatch) -> None:
    class Rows:
        format: ClassVar = {"type": "custom"}

    class Stream:
        pass

    # Importing `datasets` takes seconds, and only its classes matter here.
    package = SimpleNamespace(Dataset=Rows, IterableDataset=Stream)
    monkeypatch.setitem(sys.modules, "datasets", package)
    name = "datasets.loader"
    for data, where in ((Rows(), "set_transform"), (Stream(), "map")):
        load = partial(datasets.loader, data, batch_size=2)
        refused(lambda load=load: load(fill=0), td.ArgumentError, name, "fill = 0", where)


@pytest.mark.slow  # importing it takes seconds; docs/data.md has it by default
def test_hugging_face_datasets() -> None:
    hf = pytest.importorskip("datasets")
    rows = {"x": [[float(i), 1.0] for i in range(10)], "y": list(range(10)), "text": ["a"] * 10}
    dataset = hf.Dataset.from_dict(rows)
    name = "datasets.loader"
    refused(lambda: datasets.loader(dataset, batch_size=2), td.DTypeError, name, "'text'", "Encode")
    loader = datasets.loader(dataset, ["x", "y"], batch_size=3, shuffle=True, seed=1)
    taken = iter(loader)
    first = next(taken)
    assert first["x"].shape == (3, 2)
    np.testing.assert_array_equal(first["x"][:, 0], first["y"])
    again = datasets.loader(dataset, ["x", "y"], batch_size=3, shuffle=True, seed=1)
    again.load_state_dict(loader.state_dict())
    np.testing.assert_array_equal(next(iter(again))["y"], next(taken)["y"])
    kept = dataset.filter(lambda row: row["y"] % 2 == 0).select([4, 0, 1])  # numbers of their own
    assert all_of(datasets.loader(kept, ["y"], batch_size=2))["y"].tolist() == [8, 0, 2]
    made = dataset.with_transform(lambda b: {"z": np.array(b["y"]) * 2.0})
    assert all_of(datasets.loader(made, batch_size=4))["z"].tolist() == [2.0 * i for i in range(10)]
    stream = datasets.loader(dataset.to_iterable_dataset(), {"x": ["y", "y"]}, batch_size=4)
    assert [b["x"].shape for b in stream] == [(4, 2), (4, 2), (2, 2)]
    splits = hf.DatasetDict({"train": dataset})
    refused(lambda: datasets.loader(splits, batch_size=2), td.ArgumentError, name, '"train"')
    streamed = dataset.to_iterable_dataset()
    for data, where in ((made, "set_transform"), (streamed, "map")):
        load = partial(datasets.loader, data, batch_size=2, fill=0)
        refused(lambda load=load: load(), td.ArgumentError, name, "fill = 0", where)
    refused(lambda: datasets.loader(rows["y"], batch_size=2), td.ArgumentError, name, "list")
