"""What NumPy would do to a user's array without a word: drop a mask, turn numbers into infinities.

Failures are reported by the caller, who knows the operation and the array's name.
"""

from __future__ import annotations

import numpy as np

from treadle.base.dtypes import DType, from_numpy


def rounded(array: np.ndarray, dtype: np.dtype[np.generic]) -> np.ndarray:
    """The array in another dtype; what is too large for it is infinite, as IEEE 754 has it."""
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(dtype)


def lost_mask(value: object) -> str | None:
    """What is wrong with a masked array, of which a program would see what is under the mask."""
    if type(value) is np.ndarray or not isinstance(value, np.ma.MaskedArray):
        return None
    count = int(np.sum(np.ma.getmaskarray(value)))
    if not count:
        return None
    return f"is a masked array ({count} of {value.size} masked), and masks are not kept"


FILL = "Pass x.filled(number), and the mask as an array of its own."


def lost_range(array: np.ndarray, dtype: DType) -> str | None:
    """What is wrong with an array that has finite numbers which a float dtype has not.

    Only arrays of a wider dtype are looked at.
    """
    given = from_numpy(array.dtype)
    if given is None or not given.is_float or not array.size or given.largest <= dtype.largest:
        return None
    if not any(array.strides):  # one number seen as an array, which may be large
        array = array[(slice(1),) * array.ndim]
    least, most = array.min(), array.max()
    if -dtype.largest <= least and most <= dtype.largest:
        return None
    finite = array[np.isfinite(array)]
    lost = finite[np.isinf(rounded(finite, dtype.numpy))]
    return f"has the value {lost[0]}, which {dtype} cannot hold" if lost.size else None
