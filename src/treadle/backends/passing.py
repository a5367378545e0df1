"""The stages of a compile, noted one by one and replayed when they are through."""

from __future__ import annotations

from collections.abc import Callable

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
        pairs = pairs_of(before, after)
        self.passages.append(
            Passage(name, Relation.EQUAL, before, after, pairs, tuple(sorted(near)))
        )
        return after

    def relate(self, name: str, relation: Relation, before: Graph, after: Graph) -> None:
        self.passages.append(Passage(name, relation, before, after))

    def finish(self) -> None:
        """The graphs around each stage are to be compared before anything runs, as options ask."""
        evidence = self.report.evidence
        start = len(evidence.passages)
        evidence.passages += self.passages
        if self.options.verify != "off":
            evidence.pending.append(lambda: self._replay(slice(start, start + len(self.passages))))

    def _replay(self, where: slice) -> None:
        """Compare what stands there: a GraphError if graphs differ."""
        # It brings the checker: importing Treadle stays light.
        from treadle.verify.certificate.replay import replayed

        with self.report.stage("replay"):
            self.report.evidence.passages[where] = replayed(self.passages)
