"""Every rule, by the set it belongs to: what the list of rules and its tests go through."""

from __future__ import annotations

from treadle.rules.canonical import canonical
from treadle.rules.carries import CARRIES
from treadle.rules.expansion import EXPANSION
from treadle.rules.heads import HEADS
from treadle.rules.recurrences import RECURRENCES
from treadle.rules.rule import Rule
from treadle.rules.scans import SCANS
from treadle.rules.slices import SLICES

RULE_SETS = (canonical(), HEADS, EXPANSION, SCANS, RECURRENCES, SLICES, CARRIES)


def every_rule() -> dict[str, Rule]:
    """Rules by name."""
    found = {rule.name: rule for rules in RULE_SETS for rule in rules.rules}
    assert len(found) == sum(len(rules.rules) for rules in RULE_SETS), "a name is used twice"
    return found
