"""Which parameters are meant: by patterns of names, functions, modules, or lists of those."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from treadle.base.errors import ArgumentError
from treadle.frontend.binding import Part, names_inside
from treadle.frontend.tensor import Placeholder
from treadle.optim.optimizer import Context


@dataclass(frozen=True, slots=True)
class Under:
    """The parameter at a path, or those of the module there."""

    path: str

    def __call__(self, name: str) -> bool:
        return name == self.path or name.startswith(f"{self.path}.")


One = str | Callable[[str], bool] | Part | Placeholder
Selector = One | Sequence[One]


def selects(selector: Selector, name: str) -> bool:
    """Whether a parameter is meant. Modules and parameters have names while a step is compiled."""
    if isinstance(selector, str):
        return fnmatch.fnmatchcase(name, selector)
    if isinstance(selector, (list, tuple)):
        return any(selects(one, name) for one in selector)
    if isinstance(selector, (Part, Placeholder)):
        return name in names_inside(selector)
    assert callable(selector)
    return bool(selector(name))


def check_selector(operation: str, name: str, selector: object) -> None:
    if isinstance(selector, (list, tuple)) and selector:
        for one in selector:
            check_selector(operation, name, one)
        return
    is_one = isinstance(selector, (str, Placeholder)) or callable(selector)
    if selector is not None and not is_one:
        raise ArgumentError(
            operation,
            f"{name} = {selector!r}",
            "It is a pattern of names, a function of one, a module of the model, or a list.",
        )


def check_selects(operation: str, selector: Selector | None, params: Mapping[str, object]) -> None:
    """A pattern that selects nothing is a typing error, and so is a module of another model."""
    if isinstance(selector, (list, tuple)):
        for one in selector:
            check_selects(operation, one, params)
    elif isinstance(selector, (str, Under, Part, Placeholder)):
        is_all = isinstance(selector, str) and selector == "*"
        if not is_all and not any(selects(selector, n) for n in params):
            raise ArgumentError(
                operation,
                f"{shown(selector)} selects no parameter",
                f"There are: {', '.join(params)}.",
            )


def shown(selector: Selector) -> str:
    """A selector in a message."""
    if isinstance(selector, str):
        return repr(selector)
    if isinstance(selector, Under):
        return repr(selector.path)
    if isinstance(selector, (list, tuple)):
        return " or ".join(map(shown, selector))
    return type(selector).__name__ if isinstance(selector, (Part, Placeholder)) else "a function"


def decays(selector: Selector | None, context: Context, name: str) -> bool:
    """Whether weight decay applies: the parameter allows it, and the filter if there is one."""
    return context.decays.get(name, True) and (selector is None or selects(selector, name))
