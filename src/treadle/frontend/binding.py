"""Which tensor a declaration stands for while a model is traced, and whether it is training."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from treadle.base.errors import TraceError
from treadle.frontend.tensor import Placeholder, Tensor


@dataclass(frozen=True, slots=True)
class Binding:
    """Tensors and names of declarations (by identity), and the mode."""

    tensors: Mapping[int, Tensor]
    names: Mapping[int, str]
    training: bool
    inside: dict[int, frozenset[str]] = field(default_factory=dict)  # names in parts, when asked
    made: dict[int, Tensor] = field(default_factory=dict)  # of declarations, once for each trace


@runtime_checkable
class Part(Protocol):
    """A module: what has parameters inside."""

    def parameters(self) -> Iterator[Placeholder]: ...


class _Active(threading.local):
    def __init__(self) -> None:
        self.bindings: list[Binding] = []
        self.shards: list[int] = [1]


_active = _Active()


@contextmanager
def bound(binding: Binding) -> Iterator[None]:
    """Declarations stand for the binding's tensors inside."""
    _active.bindings.append(binding)
    try:
        yield
    finally:
        _active.bindings.pop()


@contextmanager
def summing_over(shards: int) -> Iterator[None]:
    """What is traced inside is one of so many shards, which statistics of a batch are sums over."""
    _active.shards.append(shards)
    try:
        yield
    finally:
        _active.shards.pop()


def summed_shards() -> int:
    """Shards whose sums statistics of a batch are."""
    return _active.shards[-1]


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


def made_once(declaration: Placeholder, make: Callable[[], Tensor]) -> Tensor:
    """What is made of a declaration, once for each binding that gives it a value."""
    for binding in reversed(_active.bindings):
        if id(declaration) in binding.tensors:
            if id(declaration) not in binding.made:
                binding.made[id(declaration)] = make()
            return binding.made[id(declaration)]
    return make()


def names_inside(part: Part | Placeholder) -> frozenset[str]:
    """Names of the parameters of a part of the model that is being compiled."""
    if not _active.bindings:
        raise TraceError(
            "select",
            f"{type(part).__name__} has no names outside of a step that is being compiled",
            "Select by patterns of names.",
        )
    known = _active.bindings[-1].inside
    if id(part) not in known:
        parts = [part] if isinstance(part, Placeholder) else part.parameters()
        known[id(part)] = frozenset(n for n in map(name_of, parts) if n)
    return known[id(part)]


def is_training() -> bool:
    """Whether the innermost binding is for training; False outside of any."""
    return bool(_active.bindings) and _active.bindings[-1].training
