"""Writes docs/rules.md: every rule by which graphs are rewritten, from the rules themselves.

    python tools/rules_page.py

A test compares the page with what this writes.
"""

from __future__ import annotations

import inspect
from pathlib import Path

from treadle.egraph.language import DataRule, own_rules
from treadle.egraph.language import to_text as data_text
from treadle.rules.catalogue import RULE_SETS
from treadle.rules.pattern import to_text
from treadle.rules.rule import Rule, RuleSet

PAGE = Path(__file__).resolve().parent.parent / "docs" / "rules.md"

INTRODUCTION = """\
# Rules

Every rule by which Treadle rewrites graphs, in the order in which the rules of a set are tried.
This page is written by `tools/rules_page.py` from `src/treadle/rules` and the rules that are data,
`src/treadle/egraph/rules.txt`; change the rules and run it again.
[Architecture](architecture.md#rules) says how they are applied.

In patterns, names stand for any value, `once` for a value that nothing else reads, and `…` for any
operands. A rule is *bitwise* where both sides have the same bits, and *rounding* where they are
equal over the reals but rounding, or the sign of a zero, may differ."""

TITLES = {
    "canonical": "Canonical form: before and after differentiation, and after expansion on a GPU",
    "heads": "Recognition: before differentiation, for targets that fuse heads",
    "expansion": "Expansion: at the start of `schedule`",
    "scans": "Scans: after expansion",
    "recurrences": "Recurrences: then, where many elements fill a device",
    "slices": "Slices of scans: then, where arithmetic is nearly free",
    "carries": "Carries of scans: after these, where kernels are launched",
}


def row(rule: Rule) -> str:
    condition = inspect.getdoc(rule.condition)
    pattern = to_text(rule.pattern).replace("|", "\\|")
    cells = (
        f"`{rule.name}`",
        rule.statement,
        f"`{pattern}`",
        condition,
        rule.exactness.name.lower(),
    )
    return f"| {' | '.join(map(str, cells))} |"


def section(rules: RuleSet) -> str:
    head = ["| rule | statement | pattern | where | class |", "|---|---|---|---|---|"]
    return "\n".join([f"## {TITLES[rules.name]}", "", *head, *map(row, rules.rules)])


def data_row(rule: DataRule) -> str:
    arrow = "; ".join(
        f"`{data_text(a)}` → `{data_text(b)}`"
        for a, b in zip(rule.sources, rule.targets, strict=True)
    )
    where = " and ".join(f"`{data_text(t)}`" for t in rule.when) or "always"
    cells = (
        f"`{rule.name}`",
        rule.statement,
        arrow,
        where,
        "bitwise" if rule.is_exact else "rounding",
    )
    return f"| {' | '.join(cells)} |"


def alternatives() -> str:
    """The rules of the e-graph that are not of canonical form."""
    rules = [r for r in own_rules() if r.set == "optimize"]
    head = ["| rule | statement | rule as data | where | class |", "|---|---|---|---|---|"]
    title = "## Alternatives: of whole steps, the cheapest for the target is taken"
    return "\n".join([title, "", *head, *map(data_row, rules)])


def page() -> str:
    sections = [INTRODUCTION, *map(section, RULE_SETS), alternatives()]
    return "\n\n".join(sections) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
