"""Rewriting graphs by rules: each a name, a pattern, a condition and a builder.

Users add rules of their own here, as data: `td.rules.add`. They are proved before they are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treadle.verify.rule_proofs import Proof


def add(
    name: str,
    pattern: str,
    replacement: str,
    where: str | Sequence[str] = (),
    *,
    let: Mapping[str, str] | None = None,
    cases: str | Sequence[str] = (),
    statement: str = "",
    unproved: bool = False,
) -> Proof:
    """Adds a rule as data, if it is proved for all sizes; steps compiled later may use it.

    `pattern` and `replacement` are s-expressions like "(mul x (exp y))", `where` conditions like
    "(float (dtype x))", `let` names for values that the replacement needs. `cases` are instances
    with symbols for sizes, "(x (n m)) (p (1 0))", for patterns whose fields depend on each other.
    A rule that does not hold is refused with shapes and values for which its sides differ. One
    that agrees wherever it was tried, and is not decided, is refused unless `unproved` is given.
    """
    from treadle.verify import user_rules

    return user_rules.add(
        name,
        pattern,
        replacement,
        where,
        let=let,
        cases=cases,
        statement=statement,
        unproved=unproved,
    )


def remove(name: str) -> None:
    """Forgets a rule that was added."""
    from treadle.verify import user_rules

    user_rules.remove(name)


def added() -> dict[str, str]:
    """Statements of the rules that were added, by name."""
    from treadle.verify import user_rules

    return user_rules.listed()
