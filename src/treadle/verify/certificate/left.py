"""Claims that the compiler's own comparison leaves, looked at by the checker's.

The checker follows what a certificate states: values of a composite's definition in memory, parts
of buffers in a repeat, sums that calls go on with. The compiler's own comparison has none of these.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace

from treadle.base.errors import GraphError
from treadle.kernel.claims import Claim
from treadle.kernel.program import Program
from treadle.memory.plan import BufferPlan
from treadle.verify.certificate.graphs import Records
from treadle.verify.certificate.programs import program_records
from treadle_checker.graph import read_graph
from treadle_checker.kernel_checks import Claim as Judged
from treadle_checker.kernel_checks import check_call
from treadle_checker.program import read_program
from treadle_checker.reading import Rejected
from treadle_checker.sites import Walk
from treadle_checker.types import Graph


def judged(program: Program, claims: Sequence[Claim]) -> list[Claim]:
    """All claims, those that were left with what the checker says of them; a GraphError if one is
    wrong. Of equal calls of a kernel the checker looks at one."""
    left = {c.name for c in claims if not c.is_established}
    if not left:
        return list(claims)
    found = _looked_at(program, left)
    return [_told(c, found.get(c.name, ())) if not c.is_established else c for c in claims]


def _told(claim: Claim, found: Iterable[Judged]) -> Claim:
    reasons = [c.reason for c in found]
    return replace(claim, reason=next(filter(None, reasons), "")) if reasons else claim


def _looked_at(program: Program, names: set[str]) -> dict[str, list[Judged]]:
    """What the checker says of kernels, by their names."""
    stored = Records()
    made, graphs = program_records(program, BufferPlan({}, {}, 0), stored)

    def graph_of(name: str) -> Graph:
        return read_graph(json.loads(stored.texts[name]), graph_of, name)

    read, found = read_program(json.loads(json.dumps(made))), dict[str, list[Judged]]()
    try:
        for site in Walk(read, {s: graph_of(name) for s, name in graphs.items()}).sites():
            if site.kernel.name in names:
                found.setdefault(site.kernel.name, []).append(check_call(read, site, 1))
    except Rejected as wrong:
        told = f"a kernel does not compute its part of the graph: {wrong}"
        raise GraphError("verify", told) from wrong
    return found
