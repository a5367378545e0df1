"""PyTorch's names of arguments beside our own: `dim` for `axis`, `keepdim` for `keepdims`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from treadle.base.errors import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")

SPELLINGS = {
    "dim": "axis",
    "dims": "axis",
    "keepdim": "keepdims",
    "shifts": "shift",
    "start_dim": "start",
    "end_dim": "stop",
    "dim0": "first",
    "dim1": "second",
}


def takes_dim(function: Callable[P, R]) -> Callable[P, R]:
    """A function of axes that takes its arguments by PyTorch's names too."""

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> R:
        for theirs in SPELLINGS.keys() & keywords.keys():
            ours = SPELLINGS[theirs]
            if ours in keywords:
                raise ArgumentError(
                    function.__name__, f"{theirs} and {ours} are both given", "They are the same."
                )
            keywords[ours] = keywords.pop(theirs)
        return function(*arguments, **keywords)

    return call
