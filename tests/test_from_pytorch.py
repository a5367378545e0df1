"""The table of `docs/from-pytorch.md`: in every row, both columns give the same.

The blocks of the page are run and compared by `test_docs.py`.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import treadle as td
from treadle import losses, nn

PAGE = Path(__file__).resolve().parent.parent / "docs" / "from-pytorch.md"
ROWS = re.findall(r"^\| `(.+)` \| `(.+)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)

rng = np.random.default_rng(0)
x = rng.normal(size=(8, 4)).astype(np.float32)
ARRAYS = {"x": x, "y": rng.integers(0, 3, 8), "q": x.reshape(1, 2, 4, 4)}


def test_there_are_rows() -> None:
    assert len(ROWS) > 20


@pytest.mark.parametrize(("theirs", "ours"), ROWS, ids=[ours for _, ours in ROWS])
def test_row(theirs: str, ours: str) -> None:
    names = {"torch": torch, "F": F, "nn": torch.nn}
    expected = eval(theirs, names | {n: torch.tensor(a) for n, a in ARRAYS.items()})
    names = {"td": td, "losses": losses, "nn": nn}
    found = eval(ours, names | {n: td.tensor(a) for n, a in ARRAYS.items()})
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-5, atol=1e-6)
