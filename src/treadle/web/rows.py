"""Rows of data that a page trains on, in as few bytes as hold them exactly."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from typing import Any

import numpy as np

from treadle.base import trees
from treadle.base.arrays import rounded
from treadle.base.errors import ArgumentError
from treadle.base.trees import Tree
from treadle.nn.tracing import INPUT_PREFIX, Inputs
from treadle.runtime.files import encode_arrays
from treadle.runtime.session import fitted

FILE = "data.bin"  # safetensors, compressed: a name that servers send as it is
DIVISORS = (1, 16, 255)  # whole numbers, pixels that count 4 × 4 others, pixels of one byte
Splits = Mapping[str, Mapping[str, np.ndarray]]


def rows_of(split: str, data: Tree, inputs: Inputs) -> dict[str, np.ndarray]:
    """Arrays by leaf of the batch, with any number of rows along the first axis, but none."""
    given = dict(zip(trees.paths(data), trees.flatten(data)[0], strict=True))
    wanted = {name.removeprefix(INPUT_PREFIX): type_ for name, type_ in inputs.types}
    if given.keys() != wanted.keys():
        names = ", ".join(given) or "none", ", ".join(wanted)
        cause = f"{split} has the arrays {names[0]}, the batch {names[1]}"
        raise ArgumentError("export_web", cause, "Give one array of rows for each.")
    sizes = {t.shape[:1] for t in wanted.values()}
    if len(sizes) > 1 or () in sizes:
        shapes = ", ".join(f"{path}: {t.shape}" for path, t in wanted.items())
        cause = f"the batch has {shapes}, which are not rows of one number"
        raise ArgumentError("export_web", cause, "Leave the data out, and drive the page yourself.")
    found: dict[str, np.ndarray] = {}
    for path, value in given.items():
        type_, shape = wanted[path], np.shape(value)
        if not shape or shape[1:] != type_.shape[1:]:
            cause = f"{split} {path} is {shape}, a batch {type_.shape}"
            raise ArgumentError("export_web", cause, "They differ in the first axis only.")
        array = fitted(value, type_.with_shape(shape))
        if isinstance(array, str):  # as a step would say it
            remedy = f"Give rows of {type_.dtype}, as the batch has them."
            raise ArgumentError("export_web", f"{split} {path} {array}", remedy)
        found[path] = rounded(array, type_.dtype.numpy)
    if len({len(a) for a in found.values()}) > 1:
        counts = ", ".join(f"{len(a)} of {path}" for path, a in found.items())
        raise ArgumentError("export_web", f"{split} has {counts}", "Give as many rows of each.")
    if not all(map(len, found.values())):
        raise ArgumentError("export_web", f"{split} has no rows", "Leave it out, or give some.")
    return found


def packed(splits: Splits) -> tuple[dict[str, Any], bytes]:
    """What the page must know of the rows, and the file that holds them."""
    arrays: dict[str, np.ndarray] = {}
    facts: dict[str, Any] = {}
    for split, leaves in splits.items():
        facts[split] = {}
        for path, array in leaves.items():
            small, divisor = _small(array)
            arrays[f"{split}/{path}"] = small
            facts[split][path] = {"divisor": divisor}
    return {"file": FILE, "splits": facts}, gzip.compress(encode_arrays(arrays, "rows"), mtime=0)


def _small(array: np.ndarray) -> tuple[np.ndarray, int | None]:
    """Bytes and what they are divided by, where that gives every element exactly."""
    if array.dtype == np.float32:
        for divisor in DIVISORS:
            with np.errstate(invalid="ignore"):
                bytes_ = np.rint(array.astype(np.float64) * divisor).clip(0, 255).astype(np.uint8)
            if (bytes_ / np.float64(divisor)).astype(np.float32).tobytes() == array.tobytes():
                return bytes_, divisor
    is_small = array.dtype.kind in "iu" and array.size and 0 <= array.min() <= array.max() <= 255
    return (array.astype(np.uint8), None) if is_small else (array, None)
