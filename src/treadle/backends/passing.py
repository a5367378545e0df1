"""The stages of a compile, noted one by one and replayed when they are through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from treadle.compile_report import CompileOptions, CompileReport
from treadle.ir.control import own_backwards
from treadle.ir.graph import Graph, OutputKind
from treadle.ir.marks import marked, pairs_of
from treadle.kernel.claims import Claim
from treadle.kernel.evidence import Passage, Relation

Stage = Callable[[Graph], Graph]


class Passing:
    """Stages that give equal graphs, and those that extend them, noted for the certificate."""

    def __init__(self, report: CompileReport, options: CompileOptions, checked: Stage):
        self.report, self.options, self.checked = report, options, checked
        self.passages: list[Passage] = []

    def __call__(self, name: str, graph: Graph, stage: Stage, *but: str) -> Graph:
        """The graph after a stage, equal to the one before `but` for what is named."""
        before, known = marked(graph), len(self.report.recognised)
        after = self.checked(stage(before))
        near = {r.exactness.value for r in self.report.recognised[known:]} - {"exact"} | set(but)
        self.passages.append(Passage(name, Relation.EQUAL, before, after, (), tuple(sorted(near))))
        return after

    def relate(
        self, name: str, relation: Relation, before: Graph, after: Graph, **hints: Any
    ) -> None:
        self.passages.append(Passage(name, relation, before, after, **hints))

    def finish(self) -> None:
        """The graphs around each stage are to be compared before anything runs, as options ask."""
        evidence = self.report.evidence
        where = slice(len(evidence.passages), len(evidence.passages) + len(self.passages))
        evidence.passages += self.passages
        evidence.pending.append(lambda: self._settle(where))

    def _settle(self, where: slice) -> None:
        """Say which values may be which, and compare: a GraphError if graphs differ."""
        with self.report.stage("replay"):
            found = [_paired(p) for p in self.passages]
            found = looked_at(found, self.options)
            self.report.evidence.passages[where] = found
            self.report.claims += _gradient_claims(found) if self.options.verify == "full" else []


def add_part(
    report: CompileReport, options: CompileOptions, stage: str, whole: Graph, part: Graph
) -> None:
    """Note what a program computes of a marked graph, to be compared before anything runs."""
    evidence = report.evidence
    at = len(evidence.passages)
    evidence.passages.append(Passage(stage, Relation.PART, whole, part))

    def settle() -> None:
        with report.stage("replay"):
            paired = replace(evidence.passages[at], pairs=pairs_of(whole, part))
            (evidence.passages[at],) = looked_at([paired], options)

    evidence.pending.append(settle)


def looked_at(passages: list[Passage], options: CompileOptions) -> list[Passage]:
    """Stages compared as options ask: a GraphError if one is wrong."""
    if options.verify == "off":
        return passages
    # It brings the checker: importing Treadle stays light.
    from treadle.verify.certificate.replay import QUICK, WHOLE, replayed

    return replayed(passages, WHOLE if options.verify == "full" else QUICK)


def _gradient_claims(passages: list[Passage]) -> list[Claim]:
    """What is known of the gradients that stages have added. Those that users wrote are compared
    with forward mode, by themselves."""
    kind, found = OutputKind.GRADIENT, list[Claim]()
    for p in (p for p in passages if p.relation is Relation.GRADIENTS):
        names = tuple(o.name for o in p.after.outputs if o.kind is kind)
        is_own = any(o.kind is kind for o in p.before.outputs) or own_backwards(p.before)
        if not is_own:
            found.append(Claim("gradient", p.before.name, buffers=names, reason=p.reason))
    return found


def _paired(passage: Passage) -> Passage:
    if passage.relation is not Relation.EQUAL:
        return passage
    return replace(passage, pairs=pairs_of(passage.before, passage.after))
