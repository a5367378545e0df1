"""The handwritten digits: what the file holds, what the loader gives, that the wheel has them."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from treadle.data import digits
from treadle.data.digits import load_digits

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path(digits.__file__).parent

CHECKSUMS = {
    "images": "8f26b2bd9d135c256808f68f14fdabddde6d9c7f869ae419704b051f0f14b3b3",
    "labels": "8ba4f891220f5e4c9c819638d1602d74b83618f167043c6da52a2a247841ddf0",
}
LABEL_COUNTS = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def _packed(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays}


def test_shapes_and_ranges() -> None:
    images, labels = load_digits()
    assert (images.shape, images.dtype) == ((1797, 8, 8), np.float32)
    assert (labels.shape, labels.dtype) == ((1797,), np.int32)
    assert (images.min(), images.max()) == (0, 1)
    assert np.array_equal(images * 16, np.rint(images * 16))


def test_how_often_each_digit_occurs() -> None:
    assert np.bincount(load_digits()[1]).tolist() == LABEL_COUNTS


def test_the_first_image() -> None:
    """The first line of the source: a zero."""
    images, labels = load_digits()
    assert labels[0] == 0
    assert (images[0, 0] * 16).tolist() == [0, 0, 5, 13, 9, 1, 0, 0]


def test_checksums() -> None:
    arrays = _packed(FOLDER / "digits.npz")
    assert {n: hashlib.sha256(a.tobytes()).hexdigest() for n, a in arrays.items()} == CHECKSUMS
    assert {a.dtype for a in arrays.values()} == {np.dtype(np.uint8)}


def test_each_call_gives_arrays_of_its_own() -> None:
    load_digits()[0][:] = 0
    assert load_digits()[0].max() == 1


def test_source_and_licence_are_recorded() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    for part in ("Alpaydin", "Kaynak", "UCI", "CC BY 4.0", "creativecommons.org/licenses/by/4.0"):
        assert part in text


def _tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pack", ROOT / "tools" / "pack_digits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _write_source(path: Path, rows: np.ndarray) -> None:
    with gzip.open(path, "wt", encoding="ascii") as file:
        np.savetxt(file, rows, fmt="%g", delimiter=",")


def _rows() -> np.ndarray:
    arrays = _packed(FOLDER / "digits.npz")
    flat = arrays["images"].reshape(1797, 64)
    return np.concatenate([flat, arrays["labels"][:, None]], axis=1).astype(np.float64)


def test_packing_makes_the_same_file(tmp_path: Path) -> None:
    _write_source(tmp_path / "digits.csv.gz", _rows())
    _tool().pack(tmp_path / "digits.csv.gz", tmp_path / "packed.npz")
    again, kept = _packed(tmp_path / "packed.npz"), _packed(FOLDER / "digits.npz")
    assert again.keys() == kept.keys()
    assert all(np.array_equal(again[name], kept[name]) for name in kept)


@pytest.mark.parametrize("change", ["short", "fraction", "range", "digit"])
def test_packing_refuses_another_source(change: str, tmp_path: Path) -> None:
    rows = _rows()
    if change == "short":
        rows = rows[:-1]
    else:
        column = -1 if change == "digit" else 0
        rows[0, column] = {"fraction": 0.5, "range": 17, "digit": 10}[change]
    _write_source(tmp_path / "digits.csv.gz", rows)
    with pytest.raises(AssertionError):
        _tool().pack(tmp_path / "digits.csv.gz", tmp_path / "packed.npz")
    assert not (tmp_path / "packed.npz").exists()


@pytest.mark.slow
def test_the_wheel_has_the_data(tmp_path: Path) -> None:
    """Needs a package index, for the build backend."""
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), ROOT]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"treadle/data/{n}" for n in ("digits.npz", "digits.py", "README.md")} <= names
