"""Which tensor a declaration stands for while a model is traced, and whether it is training."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from treadle.frontend.tensor import Placeholder, Tensor


@dataclass(frozen=True, slots=True)
class Binding:
    """Tensors and names of declarations (by identity), and the mode."""

    tensors: Mapping[int, Tensor]
    names: Mapping[int, str]
    training: bool


class _Active(threading.local):
    def __init__(self) -> None:
        self.bindings: list[Binding] = []


_active = _Active()


@contextmanager
def bound(binding: Binding) -> Iterator[None]:
    """Declarations stand for the binding's tensors inside."""
    _active.bindings.append(binding)
    try:
        yield
    finally:
        _active.bindings.pop()


def tensor_of(declaration: Placeholder) -> Tensor | None:
    """What a declaration stands for, the innermost binding first."""
    for binding in reversed(_active.bindings):
        if id(declaration) in binding.tensors:
            return binding.tensors[id(declaration)]
    return None


def name_of(declaration: Placeholder) -> str | None:
    for binding in reversed(_active.bindings):
        if id(declaration) in binding.names:
            return binding.names[id(declaration)]
    return None


def is_training() -> bool:
    """Whether the innermost binding is for training; False outside of any."""
    return bool(_active.bindings) and _active.bindings[-1].training
