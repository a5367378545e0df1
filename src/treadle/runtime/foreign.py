"""Arrays of other frameworks, seen without touching them: whether they are on a GPU, and what."""

from __future__ import annotations

from typing import Any

import numpy as np

CUDA = 2  # DLPack's number for NVIDIA's devices


def is_on_device(array: object) -> bool:
    """Whether an array of any framework is on a GPU."""
    if getattr(array, "is_cuda", False) or hasattr(array, "__cuda_array_interface__"):
        return True
    where = getattr(array, "__dlpack_device__", None)
    return where is not None and int(where()[0]) == CUDA


def described(array: Any) -> str:
    """Its dtype and shape, to read."""
    interface = getattr(array, "__cuda_array_interface__", {})
    shape = getattr(array, "shape", None) or interface.get("shape", ())
    dtype = getattr(array, "dtype", None) or interface.get("typestr", "")
    return f"{str(dtype).rpartition('.')[2]}{tuple(shape)}"


def shape_of(array: Any) -> tuple[int, ...]:
    """Its shape, wherever it is; an array on a device is not copied for that."""
    interface = getattr(array, "__cuda_array_interface__", None)
    return tuple(np.shape(array) if interface is None else interface["shape"])


def readable(array: Any) -> Any:
    """What NumPy can read: PyTorch's tensors without their gradient, and bfloat16 as float32."""
    if getattr(array, "requires_grad", False):
        array = array.detach()
    return array.float() if str(getattr(array, "dtype", "")) == "torch.bfloat16" else array
