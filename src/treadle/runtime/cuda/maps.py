"""Matrices as the copy engine of a GPU is told of them, in the words that the driver makes."""

from __future__ import annotations

import ctypes

from treadle.kernel.launch import TensorMap
from treadle.runtime.cuda.device import bindings, checked

WORDS = 16  # of 64 bits


def tensor_map_words(facts: TensorMap, address: int) -> list[int]:
    """A matrix at an address: what lies outside is read as zeros.

    Packs of 16 bytes of a line are exchanged, as the tensor cores read them without conflicts.
    """
    driver = bindings()
    types = driver.CUtensorMapDataType
    dtype = {
        "bfloat16": types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "float16": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    }[facts.dtype]
    kinds = driver.CUtensorMapSwizzle
    swizzle = {
        64: kinds.CU_TENSOR_MAP_SWIZZLE_64B,
        128: kinds.CU_TENSOR_MAP_SWIZZLE_128B,
    }[2 * facts.box[0]]
    wide, narrow = driver.cuuint64_t, driver.cuuint32_t
    found = checked(
        driver.cuTensorMapEncodeTiled(
            dtype,
            2,
            address + 2 * facts.start,
            [wide(facts.inner), wide(facts.outer)],
            [wide(2 * facts.pitch)],
            [narrow(n) for n in facts.box],
            [narrow(1), narrow(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        "matmul",
    )
    return list((ctypes.c_uint64 * WORDS).from_address(int(found.getPtr())))
