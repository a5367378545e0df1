"""The public names of Treadle, found in the package: what pages and tables must have all of."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import treadle as td

# Folders with pages of their own; `tables` fills the rule tables and offers nothing, and `special`
# has functions of `td` by other names.
FOLDERS = (
    "distributions",
    "nn",
    "losses",
    "metrics",
    "optim",
    "data",
    "models",
    "callbacks",
    "loggers",
)
WITHOUT_NAMES = ("tables", "special")


@cache
def public_names() -> list[str]:
    """What `treadle/__init__.py` imports by a name of its own, now or when it is first used."""
    tree = ast.parse(Path(td.__file__).read_text(encoding="utf-8"))
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    found = {alias.asname or alias.name for n in imports for alias in n.names}
    return sorted(n for n in found if not n.startswith("_"))


@cache
def functions() -> dict[str, Callable[..., Any]]:
    """The functions of `td`, and those of its modules of functions: `random.normal`."""
    named = {n: getattr(td, n) for n in public_names()}
    found = {n: f for n, f in named.items() if inspect.isfunction(f)}
    for name, module in modules().items():
        found |= {f"{name}.{n}": f for n, f in offered(module).items() if inspect.isfunction(f)}
    return found


def modules() -> dict[str, ModuleType]:
    """Modules of functions, by their names: `random`."""
    named = {n: getattr(td, n) for n in public_names() if n not in (*FOLDERS, *WITHOUT_NAMES)}
    return {n: m for n, m in named.items() if inspect.ismodule(m)}


def offered(module: ModuleType) -> dict[str, Any]:
    """The classes and functions that a module or folder offers, by name.

    A folder offers what its `__init__.py` imports or lists; a single module what it defines.
    """
    members = {n: m for n, m in vars(module).items() if not n.startswith("_")}
    things = {n: m for n, m in members.items() if inspect.isclass(m) or inspect.isfunction(m)}
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return {n: things[n] for n in sorted(listed) if n in things}
    if Path(module.__file__ or "").name == "__init__.py":
        return dict(sorted(things.items()))
    return {n: m for n, m in sorted(things.items()) if m.__module__ == module.__name__}
