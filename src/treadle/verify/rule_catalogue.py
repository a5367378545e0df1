"""What is known of every rule: proved for all sizes, tested with a bound, or true by definition."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from treadle.domains.field import equal_graphs, failure_probability
from treadle.egraph.language import own_rules
from treadle.rules.rule import Rule
from treadle.verify import normal_form
from treadle.verify.counterexample import counterexample
from treadle.verify.normal_form.sizes import generic
from treadle.verify.rule_proofs import Status, prove
from treadle.verify.rule_samples import SAMPLES, RuleSample, applied, given

# Rules that put an op's meaning in its place: there is nothing that they could be compared with.
BY_DEFINITION = frozenset(["definition", "inline_call", "recomputed_call"])
_DEGREE, _TRIALS = 64, 2
# Elements of tensors that are looked at in a tenth of a millisecond, measured on one core.
_LOOKED_AT = 2


@dataclass(frozen=True, slots=True)
class Standing:
    """A rule's status in words, and how long the proof takes, by a count that never changes."""

    status: str
    is_proved: bool
    time: str
    reason: str = ""


def standing(rule: Rule) -> Standing:
    """Of a rule that is written in Python, by its sample; of one that is data, by its proof."""
    if rule.name in BY_DEFINITION:
        return Standing("by definition", True, "—")
    data = {r.name: r for r in own_rules()}
    if rule.name in data:
        return of_data(rule.name)
    return _of_sample(rule, SAMPLES[rule.name])


@cache
def of_data(name: str) -> Standing:
    """Of a rule of the file."""
    (rule,) = (r for r in own_rules() if r.name == name)
    proof = prove(rule)
    if proof.status is Status.PROVED:
        return Standing("proved", True, _time(proof.work))
    if proof.status is Status.TESTED:
        return Standing(_tested(proof.bound), False, "—", proof.reason)
    return Standing(proof.status.value, False, "—", proof.reason)


def _of_sample(rule: Rule, sample: RuleSample) -> Standing:
    """By normal form, and by numbers at small sizes; else over the finite field at these."""
    small = [(applied(rule, sample, sizes), sizes) for sizes in sample.sizes]
    for graphs, _ in small:
        found = counterexample(*graphs)
        if found:
            return Standing("refused", False, "—", found)
    reason = "scans of any length are not decided"
    if sample.has_symbols:
        symbols = generic("nmk")
        n, m, k = symbols.values.values()
        verdict = normal_form.equal(*applied(rule, sample, (n, m, k)), sizes=symbols)
        if verdict.is_proved:
            return Standing("proved", True, _time(verdict.work))
        reason = verdict.reason
    for (graph, after), sizes in small:
        if not equal_graphs(graph, after, given(graph, sizes[1]), trials=_TRIALS):
            return Standing("undecided", False, "—", f"the field tells them apart at {sizes}")
    bound = failure_probability(_DEGREE, _TRIALS) * len(small)
    return Standing(_tested(bound), False, "—", reason)


def _tested(bound: float) -> str:
    return f"tested, {bound:.0e}"


def _time(work: int) -> str:
    """A class that the machine's speed does not move a rule out of."""
    return next(f"< {n} ms" for n in (10, 100, 1000, 10_000) if work < n * 10 * _LOOKED_AT)
