"""Which modules of a model a transform is for, and other parts in the place of some."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from treadle.base.errors import ArgumentError
from treadle.nn.module import Module

One = str | re.Pattern[str] | Callable[[str], bool]
Targets = One | Sequence[One]


def is_target(targets: Targets, path: str) -> bool:
    """Whether a module is meant.

    A string is a pattern with `*` for a path or for its end, so that a bare name is enough; a
    compiled regular expression is for all of the path.
    """
    if isinstance(targets, str):
        return any(fnmatch.fnmatchcase(path, p) for p in (targets, f"*.{targets}"))
    if isinstance(targets, re.Pattern):
        return targets.fullmatch(path) is not None
    if isinstance(targets, Sequence):
        return any(is_target(one, path) for one in targets)
    return bool(targets(path))


def targeted(
    operation: str,
    model: Module,
    targets: Targets,
    fits: Callable[[Module], bool],
    what: str,
    has_one: Callable[[Module], bool] = lambda part: False,
) -> dict[str, Any]:
    """The modules that are meant, of those that a transform can take, by path.

    `has_one` says which have an adapter already, for errors.
    """
    if not isinstance(model, Module):
        raise ArgumentError(operation, f"{model!r} is no module", "Pass a module.")
    _check_targets(operation, targets)
    there = {name: part for name, part in model.named_modules() if name and fits(part)}
    if not there and (fits(model) or has_one(model)):
        cause = f"the model itself is one of the {what}, a {type(model).__name__}"
        remedy = "Only parts of a model are replaced: pass nn.Sequential(layer)."
        raise ArgumentError(operation, cause, remedy)
    ones: Any = list(targets) if isinstance(targets, (list, tuple)) else [targets]
    for one in ones:
        if not any(is_target(one, name) for name in there):
            taken = [n for n, part in model.named_modules() if has_one(part) and is_target(one, n)]
            raise _unmatched(operation, model, one, what, list(there), taken)
    return {name: part for name, part in there.items() if is_target(ones, name)}


def _unmatched(
    operation: str, model: Module, one: One, what: str, there: list[str], taken: list[str]
) -> ArgumentError:
    known = ", ".join(there) or "none"
    if taken:
        cause = f"targets: {', '.join(taken)} of {type(model).__name__} have an adapter already"
        return ArgumentError(operation, cause, f"Build the model anew. Without one are: {known}.")
    shown = one.pattern if isinstance(one, re.Pattern) else one
    cause = f"targets: {shown!r} matches none of the {what} of {type(model).__name__}"
    return ArgumentError(operation, cause, f"There are: {known}.")


def _check_targets(operation: str, targets: object) -> None:
    ones = targets if isinstance(targets, (list, tuple)) else [targets]
    is_right = all(isinstance(one, (str, re.Pattern)) or callable(one) for one in ones)
    if not is_right or not ones:
        remedy = 'A pattern such as "attn.*", a compiled regular expression, a function of a '
        remedy += "path, or a list of those."
        raise ArgumentError(operation, f"targets = {targets!r}", remedy)


def put_in_place(model: Module, parts: Mapping[int, object]) -> None:
    """Parts in the place of others, which are known by their identity, wherever those are held."""
    _put(model, parts, set())


def _put(part: Any, parts: Mapping[int, object], seen: set[int]) -> Any:
    """What stands in a part's place; inside of it others are put in place too."""
    found = parts.get(id(part), part)
    if isinstance(part, tuple):
        return tuple(_put(child, parts, seen) for child in part)
    if id(part) in seen or not isinstance(part, (Module, list, dict)):
        return found
    seen.add(id(part))
    if isinstance(part, list):
        part[:] = [_put(child, parts, seen) for child in part]
        return found
    held = vars(part) if isinstance(part, Module) else part
    for key, child in list(held.items()):
        held[key] = _put(child, parts, seen)
    return found
