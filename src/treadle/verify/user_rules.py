"""Rules of a user's own: read, proved, and only then used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from treadle.base.errors import ArgumentError, NameTakenError, UnknownNameError
from treadle.egraph import added
from treadle.egraph.language import DataRule, own_rules, rules_of
from treadle.egraph.matching import compiled
from treadle.verify.rule_proofs import Proof, Status, prove

Texts = str | Sequence[str]


def add(
    name: str,
    pattern: str,
    replacement: str,
    where: Texts = (),
    *,
    let: Mapping[str, str] | None = None,
    cases: Texts = (),
    statement: str = "",
    unproved: bool = False,
) -> Proof:
    """Adds the rule if it is proved, or if that is not asked; raises with an example if not."""
    _check_name(name)
    rule = _read(name, pattern, replacement, _texts(where), let or {}, _texts(cases), statement)
    compiled(rule)
    proof = prove(rule)
    if proof.status is Status.REFUSED:
        remedy = "Mend the rule, or say in `where` what it needs."
        raise ArgumentError("rules.add", f"{name} is refused: {proof.reason}", remedy)
    if proof.status is not Status.PROVED and not unproved:
        cause = f"{name} is not proved: {proof.reason}; {proof.tested} instances of it agree"
        raise ArgumentError("rules.add", cause, "Give unproved=True to use it all the same.")
    added.add(rule)
    return proof


def _check_name(name: str) -> None:
    taken = {r.name for r in (*own_rules(), *added.added_rules())}
    if name in taken:
        remedy = "Choose another name, or remove that rule first."
        raise NameTakenError("rules.add", f"there is a rule {name}", remedy)
    if not name.isidentifier():
        raise ArgumentError("rules.add", f"{name!r} is no name", "Use letters, digits and _.")


def _texts(given: Texts) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _read(
    name: str,
    pattern: str,
    replacement: str,
    where: tuple[str, ...],
    let: Mapping[str, str],
    cases: tuple[str, ...],
    statement: str,
) -> DataRule:
    text = " ".join((statement or f"{pattern} is {replacement}").replace('"', "'").split())
    parts = [f'(rule {name} "{text}" (class rounding)', f"(from {pattern})", f"(to {replacement})"]
    parts += [f"(let {' '.join(f'({n} {value})' for n, value in let.items())})"] if let else []
    parts += [f"(when {condition})" for condition in where]
    parts += [f"(case {case})" for case in cases]
    (rule,) = rules_of("\n".join([*parts, ")"]))
    return rule


def remove(name: str) -> None:
    """Forgets a rule that was added."""
    if name not in listed():
        known = ", ".join(listed()) or "none"
        raise UnknownNameError("rules.remove", f"no rule {name} was added", f"There are: {known}.")
    added.remove(name)


def listed() -> dict[str, str]:
    """Statements of the rules that were added, by name."""
    return {rule.name: rule.statement for rule in added.added_rules()}
