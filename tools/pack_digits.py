"""Writes src/treadle/data/digits.npz from scikit-learn's copy of the digits.

    python tools/pack_digits.py path/to/digits.csv.gz

The source has one image a line: 64 counts of 0 to 16, row by row, then the digit.
"""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "src" / "treadle" / "data" / "digits.npz"
COUNT, SIDE, GREATEST, CLASSES = 1797, 8, 16, 10


def pack(source: Path, target: Path = TARGET) -> None:
    """Check every number, then write images (N, 8, 8) and labels (N,) as bytes, compressed."""
    with gzip.open(source, "rt", encoding="ascii") as file:
        rows = np.loadtxt(file, delimiter=",")
    assert rows.shape == (COUNT, SIDE * SIDE + 1), rows.shape
    whole = rows.astype(np.uint8)
    assert (whole == rows).all(), "the source has numbers that are not whole"
    images, labels = whole[:, :-1].reshape(COUNT, SIDE, SIDE), whole[:, -1]
    assert images.max() == GREATEST
    assert labels.max() == CLASSES - 1
    np.savez_compressed(target, images=images, labels=labels)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/pack_digits.py path/to/digits.csv.gz")
    pack(Path(sys.argv[1]))
