"""What a contraction in tiles multiplies, and where its tiles lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treadle.base.dtypes import DType
from treadle.kernel.geometry import Tiled
from treadle.kernel.nodes import Accumulate, Apply, For, Statement, Value
from treadle.kernel.traverse import walk


@dataclass(frozen=True, slots=True)
class Product:
    """The operands of a tile, the sum of their products, and what follows each element."""

    left: Value
    right: Value
    local: str
    dtype: DType
    after: tuple[Statement, ...]


def product_of(body: Sequence[Statement], tiled: Tiled) -> Product:
    at = next(i for i, s in enumerate(body) if isinstance(s, For))
    step = next(s for s in walk(body) if isinstance(s, Accumulate))
    assert isinstance(step.value, Apply)
    left, right = step.value.operands
    left, right = (right, left) if tiled.is_swapped else (left, right)
    return Product(left, right, step.local, step.value.dtype, tuple(body[at + 1 :]))


def tiles_of(tiled: Tiled) -> tuple[int, int]:
    """Tiles of one contraction of the batch, and how many lie beside each other."""
    batch, _, n, _ = tiled.sizes
    return tiled.blocks // batch, -(-n // tiled.right.length)


def limits_of(tiled: Tiled) -> list[str]:
    """Conditions under which an element is in the result; none where tiles fit."""
    _, m, n, _ = tiled.sizes
    limits = [f"row < {m}"] if m % tiled.left.length else []
    return limits + ([f"column < {n}"] if n % tiled.right.length else [])
