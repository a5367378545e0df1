"""Rules that a user added, beside Treadle's own: `td.rules`."""

from __future__ import annotations

from treadle.egraph.language import DataRule

_ADDED: dict[str, DataRule] = {}


def added_rules() -> tuple[DataRule, ...]:
    """In the order in which they were added."""
    return tuple(_ADDED.values())


def add(rule: DataRule) -> None:
    _ADDED[rule.name] = rule


def remove(name: str) -> None:
    del _ADDED[name]
