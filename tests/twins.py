"""`transformers` and torchvision, for tests that compare models with theirs."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

_kept: list[object] = []


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _declare_operators() -> None:
    """What torchvision's Python part looks up, where its native part does not fit PyTorch's build.

    Its wheels are linked to CUDA's libraries; none of the models needs these operators.
    """
    from torch import library

    declared = library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(declared)  # what it declares goes when it goes


def _prepare() -> None:
    import torch

    if _kept or not _has("torchvision") or torch.cuda.is_available():
        return
    _declare_operators()


def transformers() -> Any:
    """The package, quiet; the test is skipped where it is not installed."""
    if not _has("transformers"):
        pytest.skip("transformers is not installed: pip install treadle[test]")
    _prepare()
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def torchvision() -> Any:
    """torchvision.models; the test is skipped where it is not installed."""
    if not _has("torchvision"):
        pytest.skip("torchvision is not installed: pip install treadle[test]")
    _prepare()
    import torchvision

    return torchvision.models
