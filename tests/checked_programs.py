"""Programs as the checker reads them, and defects of their kernels."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from kernel_mutants import mutants
from treadle.kernel.nodes import Kernel
from treadle.kernel.program import Program
from treadle.memory.plan import BufferPlan, plan_buffers
from treadle.schedule.schedule import Target
from treadle.verify.certificate.graphs import Records
from treadle.verify.certificate.programs import kernel_record, program_records
from treadle_checker.bounds import check_bounds
from treadle_checker.graph import read_graph
from treadle_checker.kernel_checks import check_call
from treadle_checker.program import read_kernel, read_program
from treadle_checker.races import check_races
from treadle_checker.reading import Rejected
from treadle_checker.sites import Site, Walk


def graphs_of(program: Program) -> dict[str, Any]:
    """The graphs that buffers hold values of, by scope, through JSON."""
    stored = Records()
    names = program_records(program, BufferPlan({}, {}, 0), stored)[1]

    def graph_of(name: str) -> Any:
        return read_graph(json.loads(stored.texts[name]), graph_of, name)

    return {scope: graph_of(name) for scope, name in names.items()}


def record_of(program: Program, target: Target) -> Any:
    """The record of a program, as JSON gives it back."""
    made, _ = program_records(program, plan_buffers(program, target), Records())
    return json.loads(json.dumps(made))


def rejects(program: Any, site: Site, kernel: Kernel) -> bool:
    """Whether the checker refuses a kernel in the place of another."""
    try:
        read = read_kernel(json.loads(json.dumps(kernel_record(kernel))))
        check_bounds(read)
        check_races(read)
        check_call(program, _called(site, read), 1)
    except Rejected:
        return True
    return False


def _called(site: Site, kernel: Any) -> Site:
    """The call with another kernel, whose buffers are the arguments in their order."""
    pairs = zip(site.kernel.buffers, kernel.buffers, strict=True)
    names = {old.name: new.name for old, new in pairs}
    return replace(
        site,
        kernel=kernel,
        before={names[n]: held for n, held in site.before.items()},
        after={names[n]: held for n, held in site.after.items()},
        by_others={names[n]: count for n, count in (site.by_others or {}).items()},
    )


def defects(program: Program, target: Target) -> Iterator[tuple[Any, Site, str, Kernel]]:
    """Every kernel of a program with one change, where it is called, and what was changed."""
    read, kernels = read_program(record_of(program, target)), program.distinct()
    for site in Walk(read, graphs_of(program)).sites():
        for told, kernel in mutants(kernels[site.call.kernel]):
            yield read, site, told, kernel


def survivors(programs: Sequence[tuple[Program, Target]], count: int) -> list[str]:
    """Of some random defects, those that the checker does not see."""
    pool = [found for program, target in programs for found in defects(program, target)]
    random.Random(0).shuffle(pool)
    assert len(pool) >= count
    return [
        f"{site.kernel.name}: {told}"
        for program, site, told, kernel in pool[:count]
        if not rejects(program, site, kernel)
    ]
