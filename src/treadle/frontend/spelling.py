"""PyTorch's names of arguments beside our own: `dim` for `axis`, `keepdim` for `keepdims`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

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
    "other": "y",
    "input": "x",
}
# PyTorch's arguments that no function has: what to do instead.
ANSWERS = {
    "device": "Devices are chosen when a program is compiled: device= of td.compile.",
    "layout": "The compiler chooses layouts.",
    "memory_format": "The compiler chooses layouts.",
    "pin_memory": "Leave it out: the runtime copies batches itself.",
    "requires_grad": "td.grad(function) names what is differentiated by.",
    "out": "Tensors never change: use the result.",
    "inplace": "Tensors never change: use the result.",
    "generator": "A step has a seed=; td.random.seed(value) is for eager calls.",
}


@overload
def takes_dim(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def takes_dim(**own: str) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def takes_dim(function: Any = None, /, **own: str) -> Any:
    """A function that takes its arguments by PyTorch's names too; `own` are names for it alone.

    A name that it does not have raises `ArgumentError`, which names those it has.
    """
    if function is None:
        return functools.partial(_spelled, own=own)
    return _spelled(function, own)


def _spelled(function: Callable[P, R], own: dict[str, str]) -> Callable[P, R]:
    signature = inspect.signature(function)
    parameters = signature.parameters
    spellings = {
        t: o for t, o in (SPELLINGS | own).items() if o in parameters and t not in parameters
    }

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> R:
        for theirs in keywords.keys() - parameters.keys():
            ours = spellings.get(theirs)
            if ours is None:
                raise _unknown(function.__name__, theirs, list(parameters))
            if ours in keywords:
                raise ArgumentError(
                    function.__name__, f"{theirs} and {ours} are both given", "They are the same."
                )
            keywords[ours] = keywords.pop(theirs)
        try:
            return function(*arguments, **keywords)
        except TypeError:
            _check_call(function.__name__, signature, arguments, keywords)
            raise

    return call


def _check_call(
    name: str, signature: inspect.Signature, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    """Raise an error that names the function if the arguments do not fit its signature."""
    try:
        signature.bind(*arguments, **keywords)
    except TypeError as error:
        known = ", ".join(signature.parameters)
        raise ArgumentError(name, str(error), f"Its arguments are {known}.") from None


def _unknown(name: str, given: str, parameters: list[str]) -> ArgumentError:
    remedy = ANSWERS.get(given, f"Its arguments are {', '.join(parameters)}.")
    return ArgumentError(name, f"it has no argument {given}=", remedy)
