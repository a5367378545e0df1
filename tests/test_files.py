"""CSV, NPY, IDX and raw files: what they hold, and where they are malformed."""

from __future__ import annotations

import gzip
import io
import math
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle as td
from treadle import data
from treadle.data import tables


def _packed(content: bytes) -> bytes:
    """Without the time, so that tests have the same names in every process."""
    return gzip.compress(content, mtime=0)


# CSV

PEOPLE = '''\
name,age,height,born
Ann,34,1.62,1990-01-02
"Smith, Bob",-7,2,
"Eve ""E""",0,1e-3,2001-12-31
'''


def _csv(folder: Path, text: str | bytes, name: str = "people.csv") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_columns(tmp_path: Path) -> None:
    table = data.read_csv(_csv(tmp_path, PEOPLE))
    assert list(table) == ["name", "age", "height", "born"]
    assert table["name"].tolist() == ["Ann", "Smith, Bob", 'Eve "E"']
    assert table["born"].tolist() == ["1990-01-02", "", "2001-12-31"]
    assert (table["age"].dtype, table["age"].tolist()) == (np.int64, [34, -7, 0])
    assert (table["height"].dtype, table["height"].tolist()) == (np.float64, [1.62, 2, 1e-3])


@pytest.mark.parametrize("change", ["mark", "crlf", "gzip", "blank lines", "no last newline", "cr"])
def test_the_same_table_in_other_files(change: str, tmp_path: Path) -> None:
    text = PEOPLE.encode()
    changed = {
        "mark": b"\xef\xbb\xbf" + text,
        "crlf": text.replace(b"\n", b"\r\n"),
        "cr": text.replace(b"\n", b"\r"),
        "gzip": _packed(text),
        "blank lines": b"\n" + text.replace(b"\n", b"\n\n"),
        "no last newline": text[:-1],
    }[change]
    found = data.read_csv(_csv(tmp_path, changed))
    expected = data.read_csv(_csv(tmp_path, text, "expected.csv"))
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[n], expected[n]) for n in expected)


def test_options(tmp_path: Path) -> None:
    path = _csv(tmp_path, "1;2,5;07\n3;x;08\n")
    table = data.read_csv(path, delimiter=";", header=["a", "b", "zip"], types={"zip": str})
    assert table["a"].tolist() == [1, 3]
    assert table["b"].tolist() == ["2,5", "x"]
    assert table["zip"].tolist() == ["07", "08"]
    path = _csv(tmp_path, "caf\xe9\n1\n".encode("latin-1"))
    assert list(data.read_csv(path, encoding="latin-1")) == ["café"]
    path = _csv(tmp_path, "a,b\n1,2\n")
    assert data.read_csv(path, types={"a": float})["a"].tolist() == [1.0]


def test_what_is_missing(tmp_path: Path) -> None:
    path = _csv(tmp_path, "a,b,c\n,1,NA\n2,,\n3.5,nan,?\n")
    table = data.read_csv(path, fill=math.nan)
    np.testing.assert_array_equal(table["a"], [np.nan, 2, 3.5])
    np.testing.assert_array_equal(table["b"], [1, np.nan, np.nan])
    np.testing.assert_array_equal(table["c"], [np.nan] * 3)
    table = data.read_csv(path, fill=0)
    assert (table["b"].tolist(), table["b"].dtype) == ([1, 0, 0], np.int64)


def test_numbers_are_the_same_bits(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=200) * 10.0 ** rng.integers(-300, 300, 200)
    whole = rng.integers(-(2**63), 2**63, 200)
    lines = [f"{a!r},{b}" for a, b in zip(x.tolist(), whole.tolist(), strict=True)]
    table = data.read_csv(_csv(tmp_path, "x,whole\n" + "\n".join(lines)))
    assert np.array_equal(table["x"], x)
    assert np.array_equal(table["whole"], whole)


def test_many_rows(tmp_path: Path) -> None:
    """More than are read at a time; a column of integers that a late fraction makes floats."""
    count = tables.ROWS * 2 + 3
    lines = [f"{i},{i if i + 1 < count else 0.5},r{i % 3}" for i in range(count)]
    table = data.read_csv(_csv(tmp_path, "a,b,c\n" + "\n".join(lines)))
    assert np.array_equal(table["a"], np.arange(count))
    assert (table["b"].dtype, table["b"][-2], table["b"][-1]) == (np.float64, count - 2, 0.5)
    assert table["c"][-1] == f"r{(count - 1) % 3}"


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("a,b\n1,2\n3,x\n", "line 3, column 2 ('b')", "'x' is not a number"),
        ("a,b\n1,2\n3\n", "line 3", "1 fields for 2 columns"),
        ("a,b\n1,2\n3,4,5\n", "line 3", "3 fields for 2 columns"),
        ("a,b\n1,2\n\n\n3,\n", "line 5, column 2 ('b')", "a number is missing ('')"),
        ("a,b\n1,NaN\n2,3\n3,n/a\n", "line 2, column 2 ('b')", "missing ('NaN')"),
        ("a\n1\n1_000\n", "line 3, column 1 ('a')", "'1_000' is not a number"),
        ("a\n1\n١\n", "line 3, column 1 ('a')", "is not a number"),
        ("a\n1\n0x10\n", "line 3, column 1 ('a')", "'0x10'"),
        ("a\n1\n99999999999999999999\n", "line 3, column 1 ('a')", "64 bits hold"),
        ("a\n99999999999999999999\n", "line 2, column 1 ('a')", "64 bits hold"),
        ("a\n1.5\n99999999999999999999\n", "line 3, column 1 ('a')", "64 bits hold"),
        ('a,b\n"x\ny",2\nz,w\n', "line 4, column 2 ('b')", "'w' is not a number"),
        ('a,b\n1,"2\n3,4\n', "lines 2 to 3", "unexpected end of data"),
        ('a,b\n1,"2"3\n', "line 2", "expected after"),
        ("a,,c\n1,2,3\n", "line 1, column 2", "no name"),
        ("\na,b,a\n1,2,3\n", "line 2, column 3", "'a' occurs twice"),
        ("1,2\n3,4\n", "line 1", "numbers, not names"),
        ("a,b\n", "people.csv", "no rows"),
        ("", "people.csv", "is empty"),
        ("\n\n", "people.csv", "is empty"),
        (b"a\n1\n\xff\xfe\n", "line 3, byte 0", "not utf-8"),
        (b"a,b\nx,1\nyy\xe9,2\n", "line 3, byte 2", "not utf-8"),
    ],
)
def test_malformed_csv(text: str | bytes, where: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(td.LoadError) as raised:
        data.read_csv(_csv(tmp_path, text))
    assert where in raised.value.cause
    assert what in raised.value.cause
    assert "people.csv" in raised.value.cause


@pytest.mark.parametrize("late", ["text", "0.5"])
def test_a_column_that_begins_late(late: str, tmp_path: Path) -> None:
    """Nothing but gaps in what is read at first: what comes decides."""
    gaps = tables.ROWS + 5
    path = _csv(tmp_path, "a,b\n" + "1,\n" * gaps + f"1,{late}\n1,\n")
    found = data.read_csv(path, fill=0.0)["b"]
    expected = ["", "text", ""] if late == "text" else [0.0, 0.5, 0.0]
    assert found[-3:].tolist() == expected
    assert len(found) == gaps + 2
    if late != "text":
        with pytest.raises(td.LoadError, match="line 2, column 2 .'b'.: a number is missing"):
            data.read_csv(path)


def test_malformed_far_down(tmp_path: Path) -> None:
    count = tables.ROWS + 10
    lines = [str(i) for i in range(count)]
    lines[count - 3] = "oops"
    with pytest.raises(td.LoadError, match=rf"line {count - 1}, column 1.*'oops'"):
        data.read_csv(_csv(tmp_path, "a\n" + "\n".join(lines)))


def test_damaged_gzip_csv(tmp_path: Path) -> None:
    packed = _packed(PEOPLE.encode() * 100)
    with pytest.raises(td.LoadError, match="cannot be read"):
        data.read_csv(_csv(tmp_path, packed[:-20]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"types": {"size": float}}, "types has 'size'"),
        ({"types": {"age": bool}}, "types are int, float and str"),
        ({"types": {"height": int}}, "line 2, column 3 .'height'.: '1.62' is not a whole number"),
        ({"types": {"name": float}}, "line 2, column 1"),
        ({"header": False}, "header=False"),
        ({"header": ["a", "b", "c", "a"]}, "'a' occurs twice"),
        ({"header": ["a"]}, "line 1: 4 fields for 1 columns"),
        ({"encoding": "ascii"}, None),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str | None, tmp_path: Path) -> None:
    path = _csv(tmp_path, PEOPLE)
    if message is None:
        assert len(data.read_csv(path, **options)["age"]) == 3
        return
    with pytest.raises(td.TreadleError, match=message):
        data.read_csv(path, **options)


def test_columns_matrix(tmp_path: Path) -> None:
    table = data.read_csv(_csv(tmp_path, PEOPLE))
    x = data.columns_matrix(table, ["height", "age"])
    assert (x.shape, x.dtype) == ((3, 2), np.float32)
    assert x[0].tolist() == [np.float32(1.62), 34]
    with pytest.raises(td.DTypeError, match="name, born: text"):
        data.columns_matrix(table)
    with pytest.raises(td.ArgumentError, match="no column 'size'"):
        data.columns_matrix(table, ["size"])
    with pytest.raises(td.ArgumentError, match="no columns"):
        data.columns_matrix(table, [])


# NPY


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(4, dtype=">f4"),
        np.array(3.5),
        np.zeros((0, 3)),
        np.array([True, False]),
        np.array(["ab", "c"]),
    ],
    ids=lambda a: f"{a.dtype}{a.shape}",
)
@pytest.mark.parametrize("memory_map", [False, True])
def test_npy(array: np.ndarray, memory_map: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, array)
    found = data.read_npy(path, memory_map=memory_map)
    assert isinstance(found, np.memmap) == (memory_map and array.size > 0)
    assert (found.shape, found.dtype) == (array.shape, array.dtype)
    assert np.array_equal(found, array)
    with path.open("wb") as file:
        np.lib.format.write_array(file, array, version=(2, 0))
    assert np.array_equal(data.read_npy(path), array)


def _npy(array: np.ndarray | None = None) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.arange(6.0) if array is None else array, allow_pickle=True)
    return buffer.getvalue()


class _Trap:
    """Unpickling this would be seen."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return pytest.fail, ("something was unpickled",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "byte 0"),
        (b"not numpy at all", "byte 0: this is not an NPY file"),
        (_npy()[:5], "byte 0"),
        (_npy()[:40], "header from byte 8 on"),
        (_npy().replace(b"'descr'", b"'desc!'"), "header from byte 8 on"),
        (_npy().replace(b"<f8", b"<q9"), "header from byte 8 on"),
        (_npy().replace(b"{", b"("), "header from byte 8 on"),
        (_npy()[:-1], "from byte 128 on there are 47 bytes, and float64 of shape .6,. has 48"),
        (_npy() + b"x", "there are 49 bytes"),
        (_npy().replace(b"(6,)", b"(9,)"), "has 72"),
        (_npy(np.array([_Trap()], object)), "never unpickled"),
        (_npy(np.zeros(2, [("a", "f4")])), "not plain numbers"),
        (_npy(np.array(["", ""])).replace(b"<U1", b"<U0"), "not plain numbers"),
        (_npy(np.zeros(2, "M8[s]")), "not plain numbers"),
        (pickle.dumps(_Trap()), "byte 0"),
        (b"\x93NUMPY\x07\x00" + b"\0" * 20, "version"),
    ],
)
def test_malformed_npy(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(content)
    for memory_map in (False, True):
        with pytest.raises(td.LoadError, match=message):
            data.read_npy(path, memory_map=memory_map)


# IDX


def _idx(kind: int, shape: tuple[int, ...], content: bytes) -> bytes:
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, kind, len(shape), *shape) + content


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(8, "u1"), (9, "i1"), (0xB, "i2"), (0xC, "i4"), (0xD, "f4"), (0xE, "f8")],
)
def test_idx(kind: int, dtype: str, packed: bool, tmp_path: Path) -> None:
    expected = np.arange(-12, 12).reshape(2, 3, 4).astype(dtype)
    big = expected.astype(np.dtype(dtype).newbyteorder(">")).tobytes()
    content = _idx(kind, (2, 3, 4), big)
    path = tmp_path / ("a.idx.gz" if packed else "a.idx")
    path.write_bytes(_packed(content) if packed else content)
    found = data.read_idx(path)
    assert (found.dtype, found.dtype.isnative) == (expected.dtype, True)
    assert np.array_equal(found, expected)
    found[0] = 0  # it is the caller's


GOOD = _idx(8, (2, 2), b"abcd")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "byte 0: the file ends"),
        (b"\0\0\x08", "byte 3: the file ends; the four bytes of the magic"),
        (b"\x01\0\x08\x01" + b"\0" * 8, "byte 0: the magic number is 01 00 08 01"),
        (b"\0\0\x07\x01" + b"\0" * 8, "magic number is 00 00 07 01"),
        (GOOD[:9], "byte 9: the file ends; the sizes of 2 axes needs 8 bytes from byte 4"),
        (GOOD[:-1], "byte 15: the file ends; uint8 of shape .2, 2. needs 4 bytes from byte 12"),
        (GOOD + b"x", "byte 16: the file goes on"),
        (_idx(14, (2**32 - 1,) * 4, b"few"), "byte 23: the file ends"),
        (_packed(GOOD)[:-9], "damaged gzip"),
        (_packed(GOOD)[:-8] + b"\0" * 8, "damaged gzip"),
        (_packed(_idx(14, (2**32 - 1,) * 4, b"few")), "byte 23: the file ends"),
        (_packed(b""), "byte 0: the file ends"),
    ],
)
def test_malformed_idx(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.idx"
    path.write_bytes(content)
    with pytest.raises(td.LoadError, match=message):
        data.read_idx(path)


# Raw numbers


def test_raw(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    np.arange(12, dtype=np.uint16).tofile(path)
    found = data.read_raw(path, np.uint16)
    assert isinstance(found, np.memmap)
    assert found.tolist() == list(range(12))
    assert data.read_raw(path, "u2", columns=4).shape == (3, 4)
    with pytest.raises(td.LoadError, match="24 bytes; 5 × uint16 has 10, so that byte 20"):
        data.read_raw(path, np.uint16, columns=5)
    with pytest.raises(td.LoadError, match="byte 16"):
        data.read_raw(path, "c16")
    for options in ((object,), (np.uint16, 0)):
        with pytest.raises(td.ArgumentError):
            data.read_raw(path, *options)
    path.write_bytes(b"")
    with pytest.raises(td.LoadError, match="0 bytes"):
        data.read_raw(path, np.uint16)


def _damaged(content: bytes, rng: random.Random) -> bytes:
    found = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.randrange(len(found) + 1)
        match rng.randrange(4):
            case 0:
                found[at : at + 1] = bytes([rng.choice([0, 255, 10, 34, rng.randrange(256)])])
            case 1:
                del found[at : at + rng.randrange(1, 5)]
            case 2:
                found[at:at] = bytes(rng.choices(b"\n,\"0129-eE_\xff\0(){}[]'", k=3))
            case 3:
                del found[at:]
    return bytes(found)


@pytest.mark.parametrize(
    ("read", "content"),
    [
        (data.read_npy, _npy()),
        (data.read_npy, _npy(np.array(["ab", "c"]))),
        (data.read_idx, GOOD),
        (data.read_idx, _packed(GOOD)),
        (data.read_csv, PEOPLE.encode()),
        (data.read_csv, _packed("é,b\nñ,2\n".encode())),
    ],
    ids=["npy", "npy of text", "idx", "idx packed", "csv", "csv packed"],
)
def test_damaged_files_are_read_or_refused(
    read: Callable[..., Any], content: bytes, tmp_path: Path
) -> None:
    """Never anything but an array or an error of ours."""
    rng, refused = random.Random(0), 0
    path = tmp_path / "damaged"
    for _ in range(400):
        path.write_bytes(_damaged(content, rng))
        try:
            read(path)
        except td.LoadError:
            refused += 1
    assert refused > 200


@pytest.mark.parametrize("read", [data.read_csv, data.read_npy, data.read_idx, data.read_raw])
def test_no_file(read: Callable[..., Any], tmp_path: Path) -> None:
    arguments = ("u1",) if read is data.read_raw else ()
    for path, cause in ((tmp_path / "none", "there is no file"), (tmp_path, "is a folder")):
        with pytest.raises(td.LoadError, match=cause):
            read(path, *arguments)
