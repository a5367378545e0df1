"""The rules that a compile has applied: their statements, and what is known of them."""

from __future__ import annotations

from typing import Any

from treadle.compile_report import CompileReport
from treadle.egraph.added import added_rules
from treadle.egraph.language import own_rules
from treadle.rules.catalogue import every_rule
from treadle.verify.rule_catalogue import of_data, standing


def rules_used(report: CompileReport) -> list[dict[str, Any]]:
    """By name: statement, class (exact or rounding), status and how often it was applied."""
    data = {r.name: r for r in own_rules()}
    added = {r.name: r for r in added_rules()}
    written = every_rule()
    found: list[dict[str, Any]] = []
    for name, count in sorted(report.rules.items()):
        if name in data or name in added:
            rule = data.get(name) or added[name]
            class_ = "exact" if rule.is_exact else "rounding"
            status = of_data(name).status if name in data else "assumption"
            entry = (rule.statement, class_, status)
        elif name in written:
            is_exact = written[name].exactness.name == "BITWISE"
            class_ = "exact" if is_exact else "rounding"
            entry = (written[name].statement, class_, standing(written[name]).status)
        else:
            entry = _recognised(report, name)
        told, class_, status = entry
        found.append(
            {
                "name": name,
                "statement": told,
                "class": class_,
                "status": _word(status),
                "count": count,
            }
        )
    return found


def _recognised(report: CompileReport, name: str) -> tuple[str, str, str]:
    """A composite in place of what was written out."""
    every = [r for r in report.recognised if r.name == name]
    near = sorted({r.exactness.value for r in every} - {"exact"})
    told = f"What was written out is {name}" + (f", but for {' and '.join(near)}." if near else ".")
    is_proved = bool(every) and all(r.status.value == "proved" for r in every)
    return told, "rounding", "assumption" if near else "proved" if is_proved else "tested"


def _word(status: str) -> str:
    """proved, tested or an assumption."""
    if status in ("proved", "by definition"):
        return "proved"
    return "tested" if status.startswith("tested") else "assumption"
