"""Every distinct kernel of the zoo against its part of the graph, and what could not be judged.

usage: python tools/verify_zoo.py [entry ...] [--targets cpu,cuda] [--sizes cpu] [--seconds 300]
                                  [--json FILE] [--gradient]

Entries are those of bench/zoo.py, at the sizes for a few processors, and the workloads of
bench/models.py. Each is scheduled for this processor's vectors and for a GPU, with its library's
matmuls, attention and convolutions; nothing is run, and no GPU is needed. A library's call is no
kernel of ours: it is counted by itself. Times are processor seconds of the comparison alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "src")]

TARGETS = ("cpu", "cuda")
LIBRARY = "is a library's"


@dataclass
class Row:
    """An entry on a target: how many claims its kernels make, and why some are left."""

    entry: str
    target: str
    established: int = 0
    library: int = 0
    seconds: float = 0.0
    left: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def is_complete(self) -> bool:
        return not self.left and not self.error


def entries() -> list[str]:
    from families import ZOO

    from models import FOR_GPUS, WORKLOADS

    return [*ZOO, *(name for name in WORKLOADS if name not in FOR_GPUS)]


def step_graph(name: str, target: str, sizes: str) -> Any:
    """The graph of an entry's training step, as the pipeline gives it to a schedule."""
    from families import ZOO, with_treadle

    import treadle as td
    from models import FOR_GPUS, WORKLOADS, loss
    from treadle.compile_report import CompileReport
    from treadle.nn.tracing import Inputs
    from treadle.optim.append import Mode
    from treadle.pipeline import StepRecipe, build_step

    clip, function, precision = None, lambda model, batch: model(batch), "float32"
    if name in ZOO:
        entry = ZOO[name]
        model = entry.make(with_treadle, **entry.sizes(sizes))
        arrays = entry.arrays(sizes)
        specs = {n: td.Spec(a.shape, getattr(td, a.dtype.name)) for n, a in arrays.items()}
        precision = entry.precision(target)
    else:
        given = WORKLOADS[name]
        model, specs, clip, function = given.make(), given.specs(), given.clip, loss
        precision = "bfloat16" if target == "cuda" and name in FOR_GPUS else "float32"
    recipe = StepRecipe(
        model, function, td.optim.adamw(1e-3), "step0:", 1, clip, getattr(td, precision),
        td.CompileOptions(),
    )  # fmt: skip
    report = CompileReport(target, precision)
    return build_step(recipe, recipe.plan(), Inputs.of(specs), report)[Mode.UPDATE]


def scheduled(graph: Any, target: str) -> Any:
    from dataclasses import replace

    from treadle.kernel.machine import Machine
    from treadle.schedule.schedule import GPU, schedule

    if target == "cpu":
        return schedule(graph, True, 2 * Machine(8).width, in_place=True)
    full = replace(GPU, has_attention=True, has_conv=True)
    return schedule(graph, True, in_place=True, target=full)


def checked(name: str, target: str, sizes: str, seconds: float) -> Row:
    """Each claim of an entry on a target, until the time is up."""
    from treadle.base.errors import TreadleError
    from treadle.verify.certificate.left import judged
    from treadle.verify.claims import sites
    from treadle.verify.kernels import check

    row = Row(name, target)
    program = scheduled(step_graph(name, target, sizes), target)
    start, claims = time.process_time(), []
    for site in sites(program):
        if time.process_time() - start > seconds:
            row.left.append(f"{site.call.kernel.name}: not reached in {seconds:g} s")
            continue
        try:
            claims.append(check(program, site))
        except TreadleError as wrong:
            row.error = row.error or str(wrong)
    for claim in judged(program, claims):
        if claim.is_established:
            row.established += 1
        elif claim.reason.endswith(LIBRARY):
            row.library += 1
        else:
            row.left.append(f"{claim.name}: {claim.reason}")
    row.seconds = round(time.process_time() - start, 2)
    return row


def table(rows: list[Row]) -> str:
    lines = [f"{'':28}{'target':>8}{'checked':>9}{'left':>6}{'library':>9}{'seconds':>9}"]
    for r in rows:
        lines.append(
            f"{r.entry:28}{r.target:>8}{r.established:>9}{len(r.left):>6}{r.library:>9}"
            f"{r.seconds:>9.1f}" + (f"  WRONG: {r.error}" if r.error else "")
        )
        lines += [f"    {told}" for told in r.left]
    for target in TARGETS:
        some = [r for r in rows if r.target == target]
        if some:
            done, left = sum(r.established for r in some), sum(len(r.left) for r in some)
            share = 100 * done / max(1, done + left)
            told = f"{target}: {len(some)} entries, {done} of {done + left} kernels checked"
            lines.append(
                f"{told} ({share:.1f} %), {sum(r.library for r in some)} library calls, "
                f"{sum(bool(r.error) for r in some)} wrong, {sum(r.seconds for r in some):.0f} s"
            )
    reasons = Counter(told.split(": ", 1)[1] for r in rows for told in r.left)
    lines += [f"{count:>5} {reason}" for reason, count in reasons.most_common()]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("entries", nargs="*", metavar="entry", help="all, unless some are named")
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--sizes", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seconds", type=float, default=300, help="processor time for an entry")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows: list[Row] = []
    for name in given.entries or entries():
        for target in given.targets.split(","):
            row = checked(name, target, given.sizes, given.seconds)
            rows.append(row)
            told = f"{name} {target}: {row.established} checked, {len(row.left)} left"
            print(f"{told}, {row.seconds:.1f} s {row.error}", file=sys.stderr, flush=True)
    print(table(rows))
    if given.json:
        given.json.write_text(json.dumps([asdict(r) for r in rows], indent=1))
    return 0 if all(r.is_complete for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
