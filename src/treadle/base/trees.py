"""Nested containers of leaves: tuples (named ones too), lists, dicts and None."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

# A tree is a user's own container, so its static type is open by nature.
Tree = Any


@dataclass(frozen=True, slots=True)
class Structure:
    """The containers of a tree without its leaves: `rebuild` puts other leaves back."""

    kind: type | None  # None: a leaf
    keys: tuple[Any, ...] = ()
    children: tuple[Structure, ...] = ()

    @property
    def leaves(self) -> int:
        return 1 if self.kind is None else sum(c.leaves for c in self.children)

    def rebuild(self, leaves: Iterable[Any]) -> Tree:
        return self._take(iter(leaves))

    def _take(self, leaves: Iterator[Any]) -> Tree:
        if self.kind is None:
            return next(leaves)
        if self.kind is type(None):
            return None
        parts = [c._take(leaves) for c in self.children]
        if self.kind is dict:
            return dict(zip(self.keys, parts, strict=True))
        if self.kind in (tuple, list):
            return self.kind(parts)
        return self.kind(*parts)  # a NamedTuple


LEAF = Structure(None)


def flatten(tree: Tree) -> tuple[list[Any], Structure]:
    """Leaves in order, and the structure that holds them. Dicts are ordered by insertion."""
    leaves: list[Any] = []
    structure = _flatten(tree, leaves)
    return leaves, structure


def _flatten(tree: Tree, leaves: list[Any]) -> Structure:
    parts = children(tree)
    if parts is None:
        leaves.append(tree)
        return LEAF
    kind = dict if isinstance(tree, dict) else type(tree)
    keys = tuple(k for k, _ in parts)
    return Structure(kind, keys, tuple(_flatten(c, leaves) for _, c in parts))


def children(tree: Tree) -> list[tuple[Any, Tree]] | None:
    """(key, child) pairs of a container; None for a leaf."""
    if tree is None:
        return []
    if isinstance(tree, dict):
        return list(tree.items())
    if isinstance(tree, (tuple, list)):
        return list(enumerate(tree))
    return None


def paths(tree: Tree, prefix: str = "") -> list[str]:
    """A dotted name for each leaf, in the order of `flatten`."""
    parts = children(tree)
    if parts is None:
        return [prefix]
    return [
        p for key, child in parts for p in paths(child, f"{prefix}.{key}" if prefix else str(key))
    ]


def map_leaves(function: Callable[[Any], Any], tree: Tree) -> Tree:
    leaves, structure = flatten(tree)
    return structure.rebuild(function(leaf) for leaf in leaves)
