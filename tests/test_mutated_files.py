"""Mutated files of each format: a reader answers, or raises one of Treadle's errors.

`tools/fuzz_files.py` reads many more, in processes that may die.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mutated_files import FORMATS, refusals

COUNTS = {"gguf": 150, "npz": 150, "torch": 150, "hdf5": 60, "folder": 60}


@pytest.mark.parametrize("name", FORMATS)
def test_mutated_files(tmp_path: Path, name: str) -> None:
    if name == "hdf5":
        pytest.importorskip("h5py")
    found = refusals(name, tmp_path, COUNTS[name], seed=0)
    assert found > COUNTS[name] // 2


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_many_mutated_files(tmp_path: Path, name: str) -> None:
    if name == "hdf5":
        pytest.importorskip("h5py")
    assert refusals(name, tmp_path, 5000, seed=1) > 2500
