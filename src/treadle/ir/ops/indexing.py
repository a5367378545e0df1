"""`gather` and its adjoint, and random bits."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.base import dtypes
from treadle.base.errors import ArgumentError, AxisError, DTypeError, ShapeError
from treadle.base.shapes import Shape
from treadle.ir.contract import Contract, Determinism, Exact, SumError
from treadle.ir.op import Attributes, Op, Precision, Types, declare
from treadle.ir.types import TensorType


@dataclass(frozen=True, slots=True)
class Gather(Attributes):
    """Elements along `axis` chosen by indices; the first `batch` axes of both run together.

    The indices' other axes stand in the place of `axis`.
    """

    axis: int
    batch: int = 0


@dataclass(frozen=True, slots=True)
class ScatterAdd(Attributes):
    """The adjoint of `gather`: updates are added into zeros, `size` elements along `axis`."""

    axis: int
    size: int
    batch: int = 0


@dataclass(frozen=True, slots=True)
class RandomBits(Attributes):
    """uint32 bits of one call site. The key is (seed, seed, step, micro-step, scan, sites).

    Where the batch is cut into shards, the upper half of the last word is the shard's number, and
    each shard begins `blocks` blocks of four words after the one before.
    """

    site: int
    shape: Shape
    blocks: int = 0


KEY_WORDS = 6
KEY_TYPE = TensorType((KEY_WORDS,), dtypes.uint32)
MAX_SITES = 2**16


def _check_indices(name: str, indices: TensorType) -> None:
    if not indices.dtype.is_integer:
        raise DTypeError(name, f"the indices are {indices}, not integers", "Cast them to int32.")


def _gather_type(attributes: Gather, x: TensorType, indices: TensorType) -> Types:
    axis, batch = attributes.axis, attributes.batch
    _check_indices("gather", indices)
    if not 0 <= batch <= axis < x.rank or batch > indices.rank:
        raise AxisError(
            "gather", f"axis {axis} with {batch} batch axes of {x} and indices {indices}"
        )
    if x.shape[:batch] != indices.shape[:batch]:
        raise ShapeError("gather", f"the batch axes of {x} and of the indices {indices} differ")
    return (x.with_shape(x.shape[:axis] + indices.shape[batch:] + x.shape[axis + 1 :]),)


def _scatter_type(attributes: ScatterAdd, updates: TensorType, indices: TensorType) -> Types:
    axis, batch = attributes.axis, attributes.batch
    _check_indices("scatter_add", indices)
    chosen = indices.rank - batch
    if updates.dtype is dtypes.bool_:
        raise DTypeError("scatter_add", f"the updates are {updates}", "Cast them first.")
    if not 0 <= batch <= axis or chosen < 0 or axis + chosen > updates.rank or attributes.size < 0:
        raise AxisError("scatter_add", f"{attributes} with updates {updates} and indices {indices}")
    same = updates.shape[:batch] == indices.shape[:batch]
    if not same or updates.shape[axis : axis + chosen] != indices.shape[batch:]:
        raise ShapeError("scatter_add", f"updates {updates} do not match the indices {indices}")
    shape = (*updates.shape[:axis], attributes.size, *updates.shape[axis + chosen :])
    return (updates.with_shape(shape),)


def _random_type(attributes: RandomBits, key: TensorType) -> Types:
    if key != KEY_TYPE:
        raise DTypeError("random_bits", f"the key is {key}, not {KEY_TYPE}")
    if not 0 <= attributes.site < MAX_SITES:
        raise ArgumentError(
            "random_bits", f"site {attributes.site}: a program has at most {MAX_SITES}"
        )
    return (TensorType(attributes.shape, dtypes.uint32),)


_IN_RANGE = (
    "0 ≤ index < size: the oracle raises, other backends clamp or leave out, never read outside"
)

GATHER = declare(
    Op(
        "gather",
        Gather,
        _gather_type,
        Precision.FOLLOW,
        Contract(Exact(), _IN_RANGE, "linear", Determinism.EVERYWHERE),
    )
)
SCATTER_ADD = declare(
    Op(
        "scatter_add",
        ScatterAdd,
        _scatter_type,
        Precision.WIDEN,
        Contract(SumError(), _IN_RANGE, "linear", Determinism.IN_ORDER),
    )
)
RANDOM_BITS = declare(
    Op(
        "random_bits",
        RandomBits,
        _random_type,
        Precision.FOLLOW,
        Contract(Exact(), "all keys", "zero everywhere", Determinism.EVERYWHERE),
    )
)
