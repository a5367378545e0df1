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
from treadle.verify.rule_catalogue import Standing, of_data, standing

PAGE = Path(__file__).resolve().parent.parent / "docs" / "rules.md"

INTRODUCTION = """\
# Rules

Every rule by which Treadle rewrites graphs, in the order in which the rules of a set are tried.
This page is written by `tools/rules_page.py` from `src/treadle/rules` and the rules that are data,
`src/treadle/egraph/rules.txt`; change the rules and run it again.
[Architecture](architecture.md#rules) says how they are applied.

In patterns, names stand for any value, `once` for a value that nothing else reads, and `…` for any
operands. A rule is *bitwise* where both sides have the same bits, and *rounding* where they are
equal over the reals but rounding, or the sign of a zero, may differ.

A rule is *proved* where both sides have the same [normal form](architecture.md#a-normal-form) for
all sizes, in instances of several ranks and axes; *proof* says how long that takes. It is *tested*
where that does not decide it: both sides agree on random elements of a finite field, at several
shapes with sizes of 1 and sizes that differ, and the number bounds the probability that they do so
by chance. Rules about scans of any length are tested, as are those that name an element (`argmax`,
sorting). A rule is true *by definition* where it puts an op's meaning in its place."""

TITLES = {
    "canonical": "Canonical form: before and after differentiation, and after expansion on a GPU",
    "heads": "Recognition: before differentiation, for targets that fuse heads",
    "expansion": "Expansion: at the start of `schedule`",
    "scans": "Scans: after expansion",
    "recurrences": "Recurrences: then, where many elements fill a device",
    "slices": "Slices of scans: then, where arithmetic is nearly free",
    "carries": "Carries of scans: after these, where kernels are launched",
}


KNOWN = "class | status | proof"


def row(rule: Rule) -> str:
    condition = inspect.getdoc(rule.condition)
    pattern = to_text(rule.pattern).replace("|", "\\|")
    cells = (
        f"`{rule.name}`",
        rule.statement,
        f"`{pattern}`",
        condition,
        rule.exactness.name.lower(),
        *known(standing(rule)),
    )
    return f"| {' | '.join(map(str, cells))} |"


def known(found: Standing) -> tuple[str, str]:
    """Status and time of proof."""
    assert found.status != "refused", found
    return found.status, found.time


def section(rules: RuleSet) -> str:
    head = [f"| rule | statement | pattern | where | {KNOWN} |", "|---|---|---|---|---|---|---|"]
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
        *known(of_data(rule.name)),
    )
    return f"| {' | '.join(cells)} |"


def alternatives() -> str:
    """The rules of the e-graph that are not of canonical form."""
    rules = [r for r in own_rules() if r.set == "optimize"]
    columns = f"| rule | statement | rule as data | where | {KNOWN} |"
    head = [columns, "|---|---|---|---|---|---|---|"]
    title = "## Alternatives: of whole steps, the cheapest for the target is taken"
    return "\n".join([title, "", *head, *map(data_row, rules)])


OF_YOUR_OWN = """\
## A rule of your own

`td.rules.add` adds a rule as data, in the language of `egraph/rules.txt`: a pattern, what takes its
place, and conditions. It is proved before it is used. Steps that are compiled afterwards may use it
wherever the result costs less.

```python
import treadle as td

proof = td.rules.add(
    "two_exps",
    "(mul (exp x) (exp y))",
    "(exp (add x y))",
    statement="A product of exponentials is the exponential of a sum.",
)
print(proof.status.value)
print(td.rules.added())
td.rules.remove("two_exps")
```

```text
proved for all sizes
{'two_exps': 'A product of exponentials is the exponential of a sum.'}
```

A rule that does not hold is refused, with shapes and values for which its sides differ:

```python
try:
    td.rules.add("wrong", "(sub x y)", "(sub y x)", where="(= (rank x) 0)")
except td.ArgumentError as error:
    print(error.cause.replace(": with", "\\n  with"))
```

```text
wrong is refused: the sides differ for x: float32[], y: float32[]
  with x = 3.0, y = 2.0 they are 1 and -1
```

Conditions are `where`, values that the replacement needs are `let`, and a pattern whose attributes
depend on each other wants a case, with symbols for sizes and a value for each attribute that it
names:

```python
td.rules.add(
    "sum_of_slices",
    "(concat :axis k (slice :starts a :stops b :strides e x) "
    "(slice :starts b :stops c :strides e x))",
    "(slice :starts a :stops c :strides e x)",
    where=["(= (len a) 1)", "(= e (list 1))"],
    cases="(x ((+ n m))) (k 0) (a (0)) (b (n)) (c ((+ n m))) (e (1))",
)
td.rules.remove("sum_of_slices")
```

What is neither proved nor refuted is refused too, unless `unproved=True` says that it is meant."""


def page() -> str:
    sections = [INTRODUCTION, OF_YOUR_OWN, *map(section, RULE_SETS), alternatives()]
    return "\n\n".join(sections) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
