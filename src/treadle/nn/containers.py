"""Modules of modules, and modules without parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from treadle.base.errors import ArgumentError
from treadle.base.numbers import check_integer, check_whole
from treadle.frontend.coerce import as_tensor
from treadle.frontend.functions import shaping
from treadle.frontend.tensor import Operand, Tensor
from treadle.nn.module import Module


class Sequential(Module):
    """One module after the other; names are "0", "1", …, or the keys of one dict."""

    def __init__(self, *modules: Module | Mapping[str, Module]):
        named: Iterable[tuple[object, object]] = enumerate(modules)
        if len(modules) == 1 and isinstance(modules[0], Mapping):
            named = modules[0].items()
        for name, module in named:
            setattr(self, _checked_name("Sequential", name), _checked("Sequential", module))

    def __iter__(self) -> Iterator[Module]:
        return (m for m in vars(self).values() if isinstance(m, Module))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, index: Any) -> Any:
        """A module by its number, or those of a slice as another Sequential with their names."""
        if not isinstance(index, slice):
            return list(self)[index]
        named = [(n, m) for n, m in vars(self).items() if isinstance(m, Module)]
        return Sequential(dict(named[index])) if named[index] else Sequential()

    def append(self, module: Module) -> Sequential:
        setattr(self, str(len(self)), _checked("Sequential", module))
        return self

    def forward(self, x: Any) -> Any:
        for module in self:
            x = module(x)
        return x


def _checked_name(container: str, name: object) -> str:
    text = str(name)
    if not text or "." in text or hasattr(Module, text):
        raise ArgumentError(
            container, f"{name!r} is no name for a module", "Use a word without dots."
        )
    return text


def _checked(container: str, module: object) -> Module:
    if not isinstance(module, Module):
        raise ArgumentError(
            container,
            f"{module!r} is not a module",
            "Use a module, for instance nn.ReLU() for td.relu.",
        )
    return module


class ModuleList(Module):
    """A list of modules; names are "0", "1", …"""

    def __init__(self, modules: Iterable[Module] = ()):
        if not isinstance(modules, Iterable):
            raise ArgumentError("ModuleList", f"modules = {modules!r}", "Pass a list of modules.")
        for module in modules:
            self.append(module)

    def append(self, module: Module) -> ModuleList:
        setattr(self, str(len(self)), _checked("ModuleList", module))
        return self

    def __iter__(self) -> Iterator[Module]:
        return (m for m in vars(self).values() if isinstance(m, Module))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, index: Any) -> Any:
        """A module by its number, or those of a slice as another list."""
        found = list(self)[index]
        return ModuleList(found) if isinstance(found, list) else found

    def extend(self, modules: Iterable[Module]) -> ModuleList:
        for module in modules:
            self.append(module)
        return self


class ModuleDict(Module):
    """Modules by name."""

    def __init__(self, modules: Mapping[str, Module] | None = None):
        if modules is not None and not isinstance(modules, Mapping):
            raise ArgumentError("ModuleDict", f"modules = {modules!r}", "Pass a dict of modules.")
        for name, module in (modules or {}).items():
            self[name] = module

    def __setitem__(self, name: str, module: Module) -> None:
        setattr(self, _checked_name("ModuleDict", name), _checked("ModuleDict", module))

    def __getitem__(self, name: str) -> Module:
        found = vars(self).get(name)
        if not isinstance(found, Module):
            known = ", ".join(self) or "none"
            raise ArgumentError("ModuleDict", f"there is no {name!r}", f"There are: {known}.")
        return found

    def __iter__(self) -> Iterator[str]:
        return (n for n, m in vars(self).items() if isinstance(m, Module))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: str) -> bool:
        return name in set(self)

    def keys(self) -> Iterator[str]:
        return iter(self)

    def values(self) -> Iterator[Module]:
        return (self[n] for n in self)

    def items(self) -> Iterator[tuple[str, Module]]:
        return ((n, self[n]) for n in self)


class Flatten(Module):
    """The axes from `start_dim` to `end_dim` as one: (N, C, H, W) → (N, C · H · W)."""

    def __init__(self, start_dim: int = 1, end_dim: int = -1):
        self.start_dim = check_integer("Flatten", "start_dim", start_dim)
        self.end_dim = check_integer("Flatten", "end_dim", end_dim)

    def forward(self, x: Operand) -> Tensor:
        return shaping.flatten(x, self.start_dim, self.end_dim)


class Identity(Module):
    """x itself: any shape → the same. Arguments are accepted, as in PyTorch, and change nothing."""

    def __init__(self, *arguments: Any, **keywords: Any):
        """Nothing is kept."""

    def forward(self, x: Any) -> Any:
        return x


class Unflatten(Module):
    """One axis as several, the counterpart of Flatten: (N, A · B) → (N, A, B)."""

    def __init__(self, dim: int, unflattened_size: Sequence[int]):
        self.dim = check_integer("Unflatten", "dim", dim)
        if not isinstance(unflattened_size, Sequence):
            raise ArgumentError(
                "Unflatten", f"unflattened_size = {unflattened_size!r}", "Give a tuple of sizes."
            )
        self.unflattened_size = tuple(
            check_whole("Unflatten", "a size", n, -1) for n in unflattened_size
        )

    def forward(self, x: Operand) -> Tensor:
        value = as_tensor(x)
        at = shaping.axis_of("Unflatten", self.dim, value)
        shape = (*value.shape[:at], *self.unflattened_size, *value.shape[at + 1 :])
        return shaping.reshape(value, shape)
