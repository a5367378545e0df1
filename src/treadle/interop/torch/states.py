"""State dicts: PyTorch's tensors into what Treadle holds, and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from treadle.base.dtypes import BY_NAME
from treadle.base.errors import ArgumentError


def array_of(name: str, value: Any) -> np.ndarray:
    """A copy of a tensor's values on the host, in Treadle's dtype of the same name."""
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in BY_NAME:
        known = ", ".join(BY_NAME)
        raise ArgumentError("from_module", f"{name} is of {value.dtype}", f"There are: {known}.")
    plain = value.detach().cpu()
    if dtype == "bfloat16":
        return plain.float().numpy().astype(BY_NAME[dtype].numpy)
    return np.array(plain.numpy())
