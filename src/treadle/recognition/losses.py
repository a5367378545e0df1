"""Cross-entropies that are written out: of logits, and of integers that say which is right."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.ir import composites as c
from treadle.ir.graph import Graph
from treadle.ir.ops.indexing import GATHER
from treadle.recognition.proposals import Region
from treadle.recognition.sketch import Sketch

DIGITS = 12  # of a smoothing that is read off 1 − smoothing


def cross_entropies(region: Region) -> Iterator[Graph]:
    """The loss of each row, or what is to be negated; logits along the last axis."""
    if len(region.inputs) != 2:
        return
    logits, targets = region.inputs
    is_rows = targets.shape == logits.shape[:-1] and region.type.size == targets.size
    if not is_rows or not targets.dtype.is_integer or not region.ops & INDEXED:
        return
    for smoothing in (0.0, *_smoothings(region, logits.shape[-1])):
        for is_negated in (False, True):
            yield _cross_entropy(region, smoothing, is_negated)


def _smoothings(region: Region, classes: int) -> list[float]:
    """Numbers that smooth labels, or whose rest does, or that are of one class."""
    near = (x for n in region.numbers for x in (n, 1 - n, n * classes))
    return list(dict.fromkeys(round(float(x), DIGITS) for x in near if 0 < x < 1))


def _cross_entropy(region: Region, smoothing: float, is_negated: bool) -> Graph:
    sketch = Sketch(region.inputs)
    logits, targets = sketch.inputs
    wide = sketch.cast(logits, region.wide)
    rows = sketch.add(c.CROSS_ENTROPY, c.CrossEntropy(smoothing), wide, targets)
    signed = sketch.negated(rows) if is_negated else rows
    return sketch.result(sketch.reshaped(signed, region.type.shape), region.type)


# What refuses labels out of range, as the composite does. Flags by comparison are 0 for them.
INDEXED = frozenset([GATHER, c.ONE_HOT])
ANCHORS = frozenset([c.LOG_SOFTMAX, c.LOGSUMEXP, c.SOFTMAX])
