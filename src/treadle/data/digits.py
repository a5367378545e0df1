"""1,797 handwritten digits of 8 × 8 pixels (Alpaydin and Kaynak, UCI, CC BY 4.0)."""

from __future__ import annotations

from importlib import resources

import numpy as np

COUNTS = 16  # a pixel counts the dark ones among 4 × 4 of the original


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Images, float32 (1797, 8, 8) from 0 to 1, and labels, int32 (1797,)."""
    packed = resources.files("treadle.data").joinpath("digits.npz")
    with packed.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    return images.astype(np.float32) / COUNTS, labels.astype(np.int32)
