"""Frozen dataclasses with a quicker constructor are the same to everybody else."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import dataclass, field

import pytest

from treadle.base.quick import quick
from treadle.kernel.nodes import Store


@quick
@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: int = 2
    name: str = field(default="p", compare=False)

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError("x is negative")


def test_arguments_are_a_dataclass_s() -> None:
    assert (Point(1).y, Point(1, 3).y, Point(y=4, x=1).y, Point(1, name="q").name) == (2, 3, 4, "q")
    assert Point(1, name="q") == Point(1)
    assert hash(Point(1, name="q")) == hash(Point(1))
    assert dataclasses.replace(Point(1, 5), x=2) == Point(2, 5)
    for made in (copy.copy(Point(1, 5)), pickle.loads(pickle.dumps(Point(1, 5)))):
        assert made == Point(1, 5)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        Point()  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="negative"):
        Point(-1)


def test_nothing_can_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Point(1).x = 2  # type: ignore[misc]


def test_the_slots_are_filled_without_setattr() -> None:
    assert "__setattr__" not in Point.__init__.__code__.co_names
    assert "__setattr__" not in Store.__init__.__code__.co_names
