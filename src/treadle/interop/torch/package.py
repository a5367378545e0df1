"""PyTorch itself, which is imported when something of it is needed."""

from __future__ import annotations

from typing import Any

from treadle.base.errors import ArgumentError


def need_torch(operation: str) -> Any:
    """The package, or an error that says how to get it."""
    try:
        import torch
    except ImportError as error:
        raise ArgumentError(operation, "PyTorch is not installed", "pip install torch") from error
    return torch
