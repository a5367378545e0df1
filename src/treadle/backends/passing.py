"""The stages of a compile, noted one by one and replayed when they are through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from treadle.compile_report import CompileOptions, CompileReport
from treadle.ir.graph import Graph
from treadle.ir.marks import marked, pairs_of
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

    def relate(self, name: str, relation: Relation, before: Graph, after: Graph) -> None:
        self.passages.append(Passage(name, relation, before, after))

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
            if self.options.verify != "off":
                # It brings the checker: importing Treadle stays light.
                from treadle.verify.certificate.replay import replayed

                found = replayed(found)
            self.report.evidence.passages[where] = found


def _paired(passage: Passage) -> Passage:
    if passage.relation is not Relation.EQUAL:
        return passage
    return replace(passage, pairs=pairs_of(passage.before, passage.after))
