"""Fills the table."""

from treadle.interop.torch.rows import (
    creation,
    elementwise,
    indexing,
    linear,
    losses,
    normalisation,
    pooling,
    recurrent,
    reductions,
    shaping,
    sizes,
)
from treadle.interop.torch.rows.table import ROWS

FAMILIES = (
    elementwise,
    shaping,
    creation,
    reductions,
    indexing,
    linear,
    recurrent,
    normalisation,
    pooling,
    losses,
    sizes,
)

__all__ = ["FAMILIES", "ROWS"]
