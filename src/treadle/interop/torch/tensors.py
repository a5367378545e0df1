"""PyTorch's tensors as arrays that programs take, and back: the same memory, on either side."""

from __future__ import annotations

from typing import Any

import numpy as np

from treadle.base.dtypes import BY_NAME, DType, bfloat16
from treadle.base.errors import DeviceError, DTypeError
from treadle.ir.types import TensorType
from treadle.runtime.memory import Memory


def type_of(operation: str, tensor: Any) -> TensorType:
    """The type of a tensor, wherever it is."""
    return TensorType(tuple(tensor.shape), dtype_of(operation, tensor))


def dtype_of(operation: str, tensor: Any) -> DType:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in BY_NAME:
        known = ", ".join(BY_NAME)
        raise DTypeError(operation, f"a tensor is of {tensor.dtype}", f"There are: {known}.")
    return BY_NAME[name]


def as_array(operation: str, tensor: Any, memory: Memory) -> Any:
    """A tensor as a program of this memory takes it: without a copy if it has no gaps."""
    whole = tensor.detach().contiguous()
    if tensor.is_cuda == memory.is_host:
        there, here = ("a GPU", "the host") if tensor.is_cuda else ("the host", memory.device)
        wanted = '"cuda"' if tensor.is_cuda else '"cpu"'
        raise DeviceError(
            operation,
            f"a tensor is on {there}, and the program on {here}",
            f"Compile it with device={wanted}, or move the tensor.",
        )
    type_ = type_of(operation, tensor)
    if memory.is_host:
        return host_array(whole)
    found = memory.found(whole, type_.shape, type_.dtype.numpy)
    assert found is not None, type_
    return found


def host_array(tensor: Any) -> np.ndarray:
    """The memory of a tensor on the host."""
    import torch

    if tensor.dtype is torch.bfloat16:  # NumPy has none: its bits are seen as such
        return tensor.detach().view(torch.int16).numpy().view(bfloat16.numpy)
    return tensor.detach().numpy()


def as_tensor(array: Any) -> Any:
    """The memory of an array, on the host or on a device, as a tensor."""
    import torch
    import torch.utils.dlpack

    if not isinstance(array, (np.ndarray, np.generic)):
        return torch.utils.dlpack.from_dlpack(array)
    plain = np.asarray(array)
    if plain.dtype == bfloat16.numpy:
        return torch.from_numpy(plain.view(np.int16)).view(torch.bfloat16)
    if plain.dtype == np.uint32:
        return torch.utils.dlpack.from_dlpack(plain)
    return torch.from_numpy(plain)
